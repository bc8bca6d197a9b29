"""Group norm and layer norm by Triton kernels that write half precision.

Under autocast torch runs both in single precision, and group norm contiguous: what comes in is cast and transposed, and
what goes out is again, for the next convolution. Precondition: `fusable`, and the layer's forward is torch's or timm's
own. Effect: one kernel from half precision to half precision, both halves of a doubled batch at once, each with its own
scale and shift. Fallback: the layer's forward. In lazy passes (`lazy_norm.py`) the kernel of group norm also adds and
clips what comes after the layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from poem.accelerate.batch_norm import clipping, passed
from poem.accelerate.lazy_norm import computed
from poem.accelerate.triton_kernels import TritonKernels

if TYPE_CHECKING:
    from poem.accelerate.lazy_norm import LazyNorms

DEVICES: tuple[str, ...] = ("cuda",)  # that have kernels
WIDEST_GROUP, WIDEST_ROW = 512, 8192  # channels that a program holds at once, at most
SAMPLES = 65_535  # the largest grid that CUDA takes in that direction
Kind = Literal["group", "layer", "layer 2d"]  # the last over the channels of images
KNOWN: dict[tuple[str, str], Kind] = {
    ("torch.nn.modules.normalization", "GroupNorm"): "group",
    ("torch.nn.modules.normalization", "LayerNorm"): "layer",
    ("timm.layers.norm", "GroupNorm"): "group",
    ("timm.layers.norm", "GroupNorm1"): "group",
    ("timm.layers.norm", "LayerNorm"): "layer",
    ("timm.layers.norm", "LayerNorm2d"): "layer 2d",
    ("timm.layers.norm_act", "GroupNormAct"): "group",
    ("torchvision.models.convnext", "LayerNorm2d"): "layer 2d",
}
"""Classes by module and name, whose forward does nothing but normalise, scale and shift, and then call `THEN`."""
THEN = {"GroupNormAct": ("drop", "act")}
"""Layers inside a class, called one after the other with what was normalised."""


class FusedForward:
    """Takes the place of a norm layer's forward: our kernels, or the layer's own where they do not take it."""

    def __init__(self, layer: nn.Module, lazy: LazyNorms | None = None) -> None:
        self.layer, self.own, self._lazy = layer, layer.forward, lazy

    def __call__(self, *args: Any, **named: Any) -> Tensor:
        """The layer's output for one tensor; further arguments are the layer's own affair."""
        if len(args) == 1 and not named:
            y = fused(self.layer, self.own, computed(args[0]), [affine_of(self.layer)], self._lazy)
            if y is not None:
                return y
        answer: Tensor = self.own(*args, **named)
        return answer


def patch(modules: Iterable[nn.Module], lazy: LazyNorms | None = None) -> None:
    """Replace the forward of each known norm layer, except where it is replaced already; others are left alone.

    `lazy` says whether outputs of group norms wait for what comes after them.
    """
    for module in modules:
        if kind_of(module) is not None and "forward" not in module.__dict__:
            module.__dict__["forward"] = FusedForward(module, lazy)


def kind_of(layer: nn.Module) -> Kind | None:
    """Which norm it is, where its class is known; None for any other, subclasses included."""
    return KNOWN.get((type(layer).__module__, type(layer).__qualname__))


def affine_of(layer: nn.Module) -> tuple[Any, Any]:
    """Scale and shift that are in the layer now."""
    return getattr(layer, "weight", None), getattr(layer, "bias", None)


def fusable(layer: nn.Module, x: Tensor, halves: int) -> bool:
    """Whether our kernels take it.

    A known layer with scale and shift, on a GPU. Group norm: half precision, four dimensions, channels last.
    Layer norm: over the last dimension, or over channels that lie last in memory; half precision, or single precision
    under autocast, which would cast the output for the linear layer that follows; samples and places may have any
    strides.
    """
    kind = kind_of(layer)
    if kind is None or not isinstance(x, Tensor) or x.device.type not in DEVICES or x.numel() == 0:
        return False
    if kind == "layer 2d":
        suits = x.dim() == 4 and _suits_layer(layer, x.permute(0, 2, 3, 1))
    else:
        suits = _suits_group(layer, x) if kind == "group" else _suits_layer(layer, x)
    return suits and len(x) % halves == 0 and TRITON.work(x.device)


def _suits_group(layer: Any, x: Tensor) -> bool:
    """Whether a group norm's input has the type, layout and size that the kernels are for."""
    if x.dim() != 4 or x.dtype != torch.bfloat16 or not x.is_contiguous(memory_format=torch.channels_last):
        return False
    groups, channels = layer.num_groups, x.shape[1]
    affine = all(isinstance(each, Tensor) and each.shape == (channels,) for each in affine_of(layer))
    few = len(x) <= SAMPLES and x.numel() // len(x) < 2**31 and len(x) * channels < 2**29
    whole = channels % groups == 0 and channels // groups <= WIDEST_GROUP
    return affine and few and whole and x.numel() > groups  # torch refuses a single value per group


def _suits_layer(layer: Any, x: Tensor) -> bool:
    """Whether a layer norm's input has the type, strides and size that the kernels are for."""
    cast = x.dtype == torch.float32 and torch.is_autocast_enabled(x.device.type)
    cast = cast and torch.get_autocast_dtype(x.device.type) == torch.bfloat16
    if x.dim() < 2 or not (cast or x.dtype == torch.bfloat16) or rows_of(x) is None:
        return False
    channels = x.shape[-1]
    affine = all(isinstance(each, Tensor) and each.shape == (channels,) for each in affine_of(layer))
    few = channels <= WIDEST_ROW and x.numel() // channels < 2**31
    return affine and few and tuple(layer.normalized_shape) == (channels,)


def rows_of(x: Tensor) -> Tensor | None:
    """Seen as (samples, places, channels), channels side by side; None where that would need a copy."""
    if x.stride(-1) != 1 and x.shape[-1] != 1:
        return None
    if x.dim() == 2:
        return x.unsqueeze(1)
    if x.dim() == 3:
        return x
    try:
        return x.view(len(x), -1, x.shape[-1])
    except RuntimeError:
        return None


def fused(
    layer: Any, own: Any, x: Tensor, affine: list[tuple[Any, Any]], lazy: LazyNorms | None = None
) -> Tensor | None:
    """The layer's output by our kernels, or None where they do not take it.

    Args:
        layer: A norm layer.
        own: Its forward, bound, before any replacement.
        x: Its input; the first dimension is the batch.
        affine: Scale and shift for all of the batch, or for each half of it.
        lazy: Whether the output of a group norm waits for what comes after it; None: it does not.
    """
    function = getattr(own, "__func__", None)
    expected = type(layer).__module__, f"{type(layer).__qualname__}.forward"
    if (getattr(function, "__module__", None), getattr(function, "__qualname__", None)) != expected:
        return None
    if not fusable(layer, x, len(affine)):
        return None
    flat = [tensor.contiguous() for pair in affine for tensor in pair]
    eps, kind, then = float(layer.eps), kind_of(layer), THEN.get(type(layer).__qualname__, ())
    if kind == "layer 2d":
        return Normed.apply(x.permute(0, 2, 3, 1), None, eps, None, False, *flat).permute(0, 3, 1, 2)  # type: ignore[no-any-return]
    groups = int(layer.num_groups) if kind == "group" else None

    def run(other: Tensor | None, relu: bool) -> Tensor:
        y: Tensor = Normed.apply(x, other, eps, groups, relu, *flat)
        return y

    y = run(None, False) if lazy is None or groups is None else lazy(run, x, *flat)
    for name in then:
        y = getattr(layer, name)(y)
    return y


class Normed(torch.autograd.Function):
    """Normalised per sample, then scaled and shifted by the numbers of the half that the sample is in."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, other: Tensor | None, eps: float, groups: int | None, relu: bool, *affine: Tensor
    ) -> Tensor:
        """Normalise `groups` of channels, or whole rows (None); weight and bias of each half follow one another.

        Only with groups, `other` is added to it, and with `relu` what is below zero becomes zero.
        """
        pairs = list(zip(affine[::2], affine[1::2], strict=True))
        if groups is None:
            y, mean, rstd = kernels()[1].normed(rows_of(x), pairs, eps, x.shape)
        else:
            y, mean, rstd = kernels()[0].normed(x, pairs, eps, groups, relu=relu, other=other)
        ctx.save_for_backward(x, clipping(y, other, relu=relu), mean, rstd, *affine)
        ctx.groups, ctx.relu = groups, relu and other is None
        answer: Tensor = y
        return answer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the input, of what was added and of each weight and bias, where they are asked for."""
        x, y, mean, rstd, *affine = ctx.saved_tensors
        asked = {"input_grad": ctx.needs_input_grad[0], "affine_grad": any(ctx.needs_input_grad[5:])}
        given = gradients[0]
        if ctx.groups is None:
            seen = rows_of(given)
            seen = rows_of(given.contiguous()) if seen is None else seen
            dx, *found = kernels()[1].backward(seen, rows_of(x), affine[::2], mean, rstd, **asked)
            dx = None if dx is None else dx.view(x.shape)
        else:
            given = passed(given, x, y)
            pairs = list(zip(affine[::2], affine[1::2], strict=True))
            dx, *found = kernels()[0].backward(given, x, pairs, mean, rstd, relu=ctx.relu, **asked)
        own = (
            (each for pair in zip(*found, strict=True) for each in pair)
            if asked["affine_grad"]
            else [None] * len(affine)
        )
        return dx, given if ctx.needs_input_grad[1] else None, None, None, None, *own


def _group_trial(side: int) -> Callable[[torch.device], object]:
    """A forward and a backward pass of group norm over an image of so many rows."""

    def call(device: torch.device) -> object:
        one = torch.ones(8, device=device)
        x = torch.zeros(1, 8, side, side, dtype=torch.bfloat16, device=device)
        x = x.contiguous(memory_format=torch.channels_last)
        y, *moments = kernels()[0].normed(x, [(one, one)], 1e-5, 2, relu=True)
        kernels()[0].normed(x, [(one, one)], 1e-5, 2, relu=True, other=x)
        return kernels()[0].backward(y, x, [(one, one)], *moments, relu=True)

    return call


def _layer_trial(device: torch.device) -> object:
    """A forward and a backward pass of layer norm."""
    one, rows = torch.ones(8, device=device), torch.zeros(1, 2, 8, dtype=torch.bfloat16, device=device)
    y, *moments = kernels()[1].normed(rows, [(one, one)], 1e-5)
    return kernels()[1].backward(y, rows, [one], *moments)


TRITON = TritonKernels(
    "group and layer norm",
    ("group_norm_kernels", "layer_norm_kernels"),
    [_group_trial(2), _group_trial(32), _layer_trial],
)


def kernels() -> Any:
    """The kernels of group norm and of layer norm, or None where Triton is not installed, or is broken."""
    return TRITON.modules
