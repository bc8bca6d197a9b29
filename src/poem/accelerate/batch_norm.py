"""Batch norm by Triton kernels, where these are faster than the layer's own forward.

`fused` has the batch's statistics, `fused_by` statistics that are given, such as the source's. In lazy passes
(`lazy_norm.py`) the kernels also add and clip what comes after the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from poem.accelerate.triton_kernels import TritonKernels
from poem.engine.norm_layers import ForwardContext, PatchedNorm

if TYPE_CHECKING:
    from poem.accelerate.lazy_norm import LazyNorms

DEVICES: tuple[str, ...] = ("cuda",)  # that have kernels
FORWARD = nn.BatchNorm2d.forward  # torch's own, whatever is put in its place later


def _trial(side: int) -> Callable[[torch.device], object]:
    """A forward and a backward pass over an image of so many rows."""

    def call(device: torch.device) -> object:
        x = torch.zeros(1, 8, side, side, dtype=torch.bfloat16, device=device)
        x = x.contiguous(memory_format=torch.channels_last)
        weight = torch.ones(8, device=device)
        y, *moments = kernels().normed(x, [(weight, weight)], 1e-5, relu=True)
        kernels().normed(x, [(weight, weight)], 1e-5, relu=True, other=x)
        return kernels().backward(y, x, [(weight, weight)], *moments, relu=True)

    return call


def _given_trial(device: torch.device) -> object:
    """A forward and a backward pass with given statistics."""
    x = torch.zeros(1, 8, 2, 2, dtype=torch.bfloat16, device=device).contiguous(memory_format=torch.channels_last)
    one = torch.ones(8, device=device)
    y = kernels().normed_by(x, one, one, [(one, one)], 1e-5, relu=True, other=x)
    return kernels().backward_by(y, x, one, one, [(one, one)], 1e-5)


TRITON = TritonKernels("batch norm", ("kernels",), [_trial(2), _trial(64), _given_trial])


def kernels() -> Any:
    """The kernels, or None where Triton is not installed, or is broken."""
    return TRITON.modules and TRITON.modules[0]


def fusable(layer: nn.Module, x: Tensor, groups: int) -> bool:
    """Whether our kernels take it.

    An ordinary layer on a GPU, half precision, channels last, and more than one value per channel and group.
    """
    return _suits(layer, x, groups) and x.numel() > groups * x.shape[1]


def _suits(layer: nn.Module, x: Tensor, groups: int) -> bool:
    """Whether layer and input have the type, layout and shape that the kernels are for."""
    if type(layer) is not nn.BatchNorm2d or x.device.type not in DEVICES or x.dtype != torch.bfloat16:
        return False
    if x.dim() != 4 or not x.is_contiguous(memory_format=torch.channels_last) or not TRITON.work(x.device):
        return False
    affine = all(isinstance(each, Tensor) and each.shape == x.shape[1:2] for each in (layer.weight, layer.bias))
    return affine and len(x) % groups == 0


def fused(
    norm: PatchedNorm, x: Tensor, context: ForwardContext, groups: int, lazy: LazyNorms | None = None
) -> Tensor | None:
    """The layer's output by our kernels, the second group of rows with the branch's tensors, or None.

    Precondition: `fusable`, and the layer's forward is torch's own. Fallback: the layer's forward.
    """
    own = getattr(norm.own, "__func__", None) is FORWARD
    if not (own and fusable(norm.layer, x, groups)):
        return None
    flat, eps = _affine(norm, context, groups), float(norm.layer.eps)  # type: ignore[arg-type]

    def run(other: Tensor | None, relu: bool) -> Tensor:
        y: Tensor = Normed.apply(x, other, eps, relu, *flat)
        return y

    return run(None, False) if lazy is None else lazy(run, x, *flat)


def fused_by(
    norm: PatchedNorm,
    x: Tensor,
    moments: tuple[Tensor, Tensor],
    context: ForwardContext,
    groups: int,
    lazy: LazyNorms | None = None,
) -> Tensor | None:
    """The layer's output with this mean and variance (C,) for all rows, or None.

    Precondition: the layer is one that `fusable` takes, of any number of values, its forward is torch's own, and mean
    and variance are constants. Fallback: the layer's forward.
    """
    constant = all(each.shape == x.shape[1:2] and not each.requires_grad for each in moments)
    own = getattr(norm.own, "__func__", None) is FORWARD
    if not (own and constant and x.numel() and _suits(norm.layer, x, groups)):
        return None
    mean, var = (each.contiguous() for each in moments)
    flat, eps = _affine(norm, context, groups), float(norm.layer.eps)  # type: ignore[arg-type]

    def run(other: Tensor | None, relu: bool) -> Tensor:
        y: Tensor = NormedBy.apply(x, other, mean, var, eps, relu, *flat)
        return y

    return run(None, False) if lazy is None else lazy(run, x, mean, var, *flat)


def _affine(norm: PatchedNorm, context: ForwardContext, groups: int) -> list[Tensor]:
    """Scale and shift of each group of rows, in turn: those in the layer, and of a second group the branch's."""
    branch = norm.affine(context.swaps.get(norm.layer, [])) if groups == 2 else ()
    return [*norm.affine(), *branch]


def _pairs(flat: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Weight and bias of each group, which follow one another."""
    return list(zip(flat[::2], flat[1::2], strict=True))


class Normed(torch.autograd.Function):
    """Normalised per channel and group of rows, scaled and shifted by the group's own numbers.

    Then plus `other`, where there is one, and ReLU if asked.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, other: Tensor | None, eps: float, relu: bool, *affine: Tensor) -> Tensor:
        """Normalise with the batch's statistics; weight and bias of each half follow one another."""
        y, mean, rstd = kernels().normed(x, _pairs(affine), eps, relu=relu, other=other)
        ctx.save_for_backward(x, clipping(y, other, relu=relu), mean, rstd, *affine)
        ctx.relu = relu and other is None
        answer: Tensor = y
        return answer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the input, of what was added and of each weight and bias."""
        x, y, mean, rstd, *affine = ctx.saved_tensors
        given = passed(gradients[0], x, y)
        dx, scale, shift = kernels().backward(given, x, _pairs(affine), mean, rstd, relu=ctx.relu)
        own = (each for pair in zip(scale, shift, strict=True) for each in pair)
        return dx, given if ctx.needs_input_grad[1] else None, None, None, *own


class NormedBy(torch.autograd.Function):
    """Normalised with a mean and a variance that are constants, and else as `Normed`."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, other: Tensor | None, mean: Tensor, var: Tensor, eps: float, relu: bool, *affine: Tensor
    ) -> Tensor:
        """Normalise with these statistics; weight and bias of each half follow one another."""
        y: Tensor = kernels().normed_by(x, mean, var, _pairs(affine), eps, relu=relu, other=other)
        ctx.save_for_backward(x, clipping(y, other, relu=relu), mean, var, *affine)
        ctx.eps, ctx.relu = eps, relu and other is None
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the input, of what was added and of each weight and bias, where they are asked for."""
        x, y, mean, var, *affine = ctx.saved_tensors
        asked = {"input_grad": ctx.needs_input_grad[0], "affine_grad": any(ctx.needs_input_grad[6:])}
        given = passed(gradients[0], x, y)
        dx, *found = kernels().backward_by(given, x, mean, var, _pairs(affine), ctx.eps, relu=ctx.relu, **asked)
        own = (
            (each for pair in zip(*found, strict=True) for each in pair)
            if asked["affine_grad"]
            else [None] * len(affine)
        )
        return dx, given if ctx.needs_input_grad[1] else None, None, None, None, None, *own


def clipping(output: Tensor, other: Tensor | None, *, relu: bool) -> Tensor | None:
    """The output, if its sign is asked of it in the backward pass: after an addition the input does not tell."""
    return output if relu and other is not None else None


def passed(gradient: Tensor, x: Tensor, y: Tensor | None) -> Tensor:
    """The gradient of an output as the kernels read it; where the output `y` was clipped, zero."""
    given = gradient.to(x.dtype).contiguous(memory_format=torch.channels_last)
    return given if y is None else torch.ops.aten.threshold_backward(given, y, 0)
