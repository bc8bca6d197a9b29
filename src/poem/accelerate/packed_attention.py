"""Gradients of query, key and value written side by side, where one layer computed all three.

A linear layer of an attention block computes query, key and value at once, and the block takes them apart by views.
Torch's backward pass puts their gradients together again by two copies, neither of which reads or writes in the order
of memory: stacked as the views are, then permuted back. Precondition: half precision, and query, key and value are
views that cover one contiguous tensor, a third each. Effect: one copy, in order, with the same bits. Fallback: torch's.

Why this is right. A view has the numbers of its base, and its gradient is its base's, whatever views of torch's own led
to it. So `scaled_dot_product_attention` is handed other views of the same base, whose backward knows how they lie. What
runs between base and views is not asked for gradients then: where that is more than views, as an `autograd.Function` of
the model or a hook of a tensor, nothing is handed over, nor in models with hooks, nor in compiled code.
`nn.MultiheadAttention` does as well: it calls attention from within a function of torch, into which a
`TorchFunctionMode` does not see.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from poem.accelerate.lazy_norm import hooked

VIEWS = frozenset(
    f"{name}Backward0"
    for name in (
        "View", "UnsafeView", "ReshapeAlias", "Permute", "Transpose", "T", "Unbind", "Split", "SplitWithSizes", "Chunk",
        "Select", "Slice", "Squeeze", "Unsqueeze", "Alias",
    )
)  # fmt: skip
"""Names of the backward steps of torch's views, which hand gradients on as they are."""


class Packing(NamedTuple):
    """How three views lie in their base."""

    size: tuple[int, ...]  # of each
    stride: tuple[int, ...]
    start: int  # the first one's offset in memory
    step: int  # from one to the next, also the numbers that lie side by side in each
    order: tuple[int, ...]  # its dimensions as they lie in memory, the longest stride first


class PackedAttention:
    """Hands other views to attention, in passes with gradients of a model that has any to hand over.

    Args:
        model: The user's model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.used: bool | None = None
        """Whether a pass handed any over; None before the first with gradients."""

    @contextmanager
    def passing(self) -> Iterator[None]:
        """A forward pass; calls of attention are watched if gradients are on and they may be of use."""
        if self.used is False or not torch.is_grad_enabled() or hooked(self._model):
            yield
            return
        with _Watch() as watch:
            yield
        self.used = self.used or watch.used


class _Watch(TorchFunctionMode):
    """Every function of torch that is called inside; attention gets views of ours."""

    def __init__(self) -> None:
        super().__init__()
        self.used = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention and len(args) >= 3 and not torch.compiler.is_compiling():
            found = packing(*args[:3])
            if found is not None:
                self.used = True
                args = (*Apart.apply(args[0]._base, found), *args[3:])
        return func(*args, **(kwargs or {}))


def packing(*parts: Any) -> Packing | None:
    """How these lie in the tensor that all are views of; None where they do not cover it in equal parts, in order."""
    if not all(type(each) is Tensor and each.requires_grad and each._base is not None for each in parts):
        return None
    first, base = parts[0], parts[0]._base
    form = first.shape, first.stride(), first.dtype
    if any(each._base is not base or (each.shape, each.stride(), each.dtype) != form for each in parts):
        return None
    if not (torch.is_grad_enabled() and base.requires_grad and base.is_contiguous() and _stored(base)):
        return None
    if not all(_only_views(each, base) for each in parts):
        return None
    offsets = [each.storage_offset() for each in parts]
    step = offsets[1] - offsets[0]
    order = sorted(range(first.dim()), key=lambda place: (-first.stride(place), first.shape[place] == 1))
    found = Packing(tuple(first.shape), tuple(first.stride()), offsets[0], step, tuple(order))
    even = base.dtype == first.dtype and offsets == [base.storage_offset() + index * step for index in range(3)]
    return found if even and 3 * first.numel() == base.numel() and _dense(found) else None


def _only_views(part: Tensor, base: Tensor) -> bool:
    """Whether nothing but views of torch's own lies between a tensor and its base, and nobody listens to either."""
    if part._backward_hooks or part.retains_grad or base.retains_grad:
        return False
    node: Any = part.grad_fn
    while node is not None and node is not base.grad_fn:
        if node.name() not in VIEWS:
            return False
        node = node.next_functions[0][0]
    return node is not None


def _dense(found: Packing) -> bool:
    """Whether the parts, one beside the other, fill their memory without a gap and without meeting."""
    filled = 1  # numbers that the shorter strides cover
    for place in reversed(found.order):
        if found.size[place] == 1:
            continue
        filled *= 3 if filled == found.step else 1
        if found.stride[place] != filled:
            return False
        filled *= found.size[place]
    return found.step > 0 and filled in (found.step, 3 * math.prod(found.size))


def _stored(tensor: Tensor) -> bool:
    """Whether the tensor has memory of its own; those inside `torch.vmap` have not."""
    try:
        return tensor.data_ptr() != 0
    except RuntimeError:
        return False


class Apart(torch.autograd.Function):
    """Three parts of a tensor as views, and their gradients side by side."""

    @staticmethod
    def forward(ctx: Any, base: Tensor, found: Packing) -> tuple[Tensor, ...]:
        """The parts, as `found` says where they are."""
        ctx.found, ctx.shape = found, base.shape
        size, stride, start, step, _ = found
        return tuple(base.as_strided(size, stride, start + index * step) for index in range(3))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The base's gradient. Attention lays out each part's as it found the part, so that this copies in order."""
        inner = ctx.found.step
        rows = [each.permute(ctx.found.order).reshape(-1, inner) for each in gradients]
        return torch.cat(rows, 1).view(ctx.shape), None
