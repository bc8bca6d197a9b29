"""The backward pass of the branch's own loss through its half of the doubled batch alone.

Precondition: the batch is doubled at the split, so that the gradient of the branch's loss is zero in the source's half,
and the frozen layers beyond it are convolutions or linear. Effect: these layers skip the source's half. Fallback: the
whole batch, also where the first gradient so computed differs from the whole one.

Such a layer that is called with the doubled tensor itself, whose halves are equal, runs once, forward and backward, and
its output is doubled instead: in a ResNet the first convolution of the stage and that of its shortcut.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from poem.accelerate.lazy_norm import computed

KINDS = (nn.Conv2d, nn.Linear)  # the very types: what a subclass does is not known


class BranchBackward:
    """Replaces the forward of frozen layers beyond the split while a batch is doubled."""

    def __init__(
        self, layers: list[nn.Module], doubled: Callable[[], bool], undoubled: Callable[[Tensor], Tensor | None]
    ) -> None:
        self.layers = [_HalfBackwardLayer(layer, self) for layer in layers if _simple(layer)]
        self.doubled, self.undoubled = doubled, undoubled
        self.half_only = False
        self.right: bool | None = None  # not yet tried

    def gradient(self, ask: Callable[[], Tensor], tolerance: float) -> Tensor:
        """What `ask` finds, through the branch's half alone; the first time also through both, to see that it may be.

        It may not where a layer's first dimension is something else than the batch.
        """
        if self.right:
            return self._half(ask)
        whole = ask()
        if self.right is None and self.layers and bool(whole.abs().max() > 0):  # a gradient of nothing proves nothing
            try:
                half = self._half(ask)
            except RuntimeError:  # the rows do not even come in two halves
                self.right = False
                return whole
            self.right = bool((half - whole).abs().max() <= tolerance * whole.abs().max())
            return half if self.right else whole
        return whole

    @property
    def untried(self) -> bool:
        """Whether no gradient has been compared yet."""
        return bool(self.layers) and self.right is None

    def _half(self, ask: Callable[[], Tensor]) -> Tensor:
        self.half_only = True
        try:
            return ask()
        finally:
            self.half_only = False

    def patch(self) -> None:
        """Replace the layers' forwards, except where the user or another part of ours did."""
        for each in self.layers:
            if "forward" not in each.layer.__dict__:
                each.layer.__dict__["forward"] = each


def _simple(layer: nn.Module) -> bool:
    """Whether the layer's backward is known exactly."""
    odd = isinstance(layer, nn.Conv2d) and (layer.padding_mode != "zeros" or isinstance(layer.padding, str))
    return type(layer) in KINDS and "weight" in layer._parameters and not odd


class _HalfBackwardLayer:
    """One layer: the same forward, another backward."""

    def __init__(self, layer: nn.Module, owner: BranchBackward) -> None:
        self.layer, self._owner = layer, owner

    def __call__(self, x: Tensor) -> Tensor:
        own = type(self.layer).forward
        once = self._owner.undoubled(x) if x.dim() == 4 or isinstance(self.layer, nn.Linear) else None
        if once is not None:  # nothing of the branch's comes before it, so its own loss never asks for this gradient
            both: Tensor = own(self.layer, computed(once))
            return torch.cat([both, both])
        if not (torch.is_grad_enabled() and x.requires_grad and self._owner.doubled()):
            answer: Tensor = own(self.layer, x)
            return answer
        return _Half.apply(computed(x), self.layer, self.layer._parameters["weight"], self._owner)  # type: ignore[no-any-return]


class _Half(torch.autograd.Function):
    """Gradients of the input alone; of its second half, where that is all that is asked for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Module, weight: Tensor, owner: BranchBackward) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.layer, ctx.owner, ctx.shape, ctx.dtype = layer, owner, x.shape, x.dtype
        answer: Tensor = type(layer).forward(layer, x)
        if answer._is_view():  # of a tensor that autograd does not know: later views are to be this one's
            answer = answer.new_empty(0).set_(answer)  # type: ignore[call-overload]
        return answer

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (weight,), gradient, layer = ctx.saved_tensors, gradients[0], ctx.layer
        rows = len(gradient) // 2 if ctx.owner.half_only else 0
        asked, weight = gradient[rows:], weight.to(gradient.dtype)
        if isinstance(layer, nn.Linear):
            found = asked @ weight
        else:
            layout = torch.channels_last if asked.is_contiguous(memory_format=torch.channels_last) else None
            like = torch.empty(  # only its shape is asked for; anything but the gradient's own layout would be copied
                (len(asked), *ctx.shape[1:]), dtype=asked.dtype, device=asked.device,
                memory_format=layout or torch.contiguous_format,
            )  # fmt: skip
            found = torch.ops.aten.convolution_backward(
                asked, like, weight, None, layer.stride, layer.padding, layer.dilation,
                False, [0, 0], layer.groups, [True, False, False],
            )[0]  # fmt: skip
        if rows:
            found = torch.cat([torch.zeros_like(found), found])
        return found.to(ctx.dtype), None, None, None
