"""Batch norm with the batch's statistics by Triton kernels, where these are faster than the layer's own forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from poem.accelerate.triton_kernels import TritonKernels
from poem.engine.norm_layers import ForwardContext, PatchedNorm

DEVICES: tuple[str, ...] = ("cuda",)  # that have kernels
FORWARD = nn.BatchNorm2d.forward  # torch's own, whatever is put in its place later


def _trial(side: int) -> Callable[[torch.device], object]:
    """A forward and a backward pass over an image of so many rows."""

    def call(device: torch.device) -> object:
        x = torch.zeros(1, 8, side, side, dtype=torch.bfloat16, device=device)
        x = x.contiguous(memory_format=torch.channels_last)
        weight = torch.ones(8, device=device)
        y, *moments = kernels().normed(x, [(weight, weight)], 1e-5)
        return kernels().backward(y, x, [weight], *moments)

    return call


TRITON = TritonKernels("batch norm", ("kernels",), [_trial(2), _trial(64)])


def kernels() -> Any:
    """The kernels, or None where Triton is not installed, or is broken."""
    return TRITON.modules and TRITON.modules[0]


def fusable(layer: nn.Module, x: Tensor, groups: int) -> bool:
    """Whether our kernels take it.

    An ordinary layer on a GPU, half precision, channels last, and more than one value per channel and group.
    """
    if type(layer) is not nn.BatchNorm2d or x.device.type not in DEVICES or x.dtype != torch.bfloat16:
        return False
    if x.dim() != 4 or not x.is_contiguous(memory_format=torch.channels_last) or not TRITON.work(x.device):
        return False
    affine = all(isinstance(each, Tensor) and each.shape == x.shape[1:2] for each in (layer.weight, layer.bias))
    return affine and len(x) % groups == 0 and x.numel() > groups * x.shape[1]


def fused(norm: PatchedNorm, x: Tensor, context: ForwardContext, groups: int) -> Tensor | None:
    """The layer's output by our kernels, the second group of rows with the branch's tensors, or None.

    Precondition: `fusable`, and the layer's forward is torch's own. Fallback: the layer's forward.
    """
    own = getattr(norm.own, "__func__", None) is FORWARD
    if not (own and fusable(norm.layer, x, groups)):
        return None
    affine = [norm.affine()]
    if groups == 2:
        affine.append(norm.affine(context.swaps.get(norm.layer, [])))
    eps = float(norm.layer.eps)  # type: ignore[arg-type]
    y: Tensor = Normed.apply(x, eps, *(tensor for pair in affine for tensor in pair))
    return y


class Normed(torch.autograd.Function):
    """Normalised per channel and group of rows, then scaled and shifted by the group's own numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, *affine: Tensor) -> Tensor:
        """Normalise with the batch's statistics; weight and bias of each half follow one another."""
        pairs = list(zip(affine[::2], affine[1::2], strict=True))
        y, mean, rstd = kernels().normed(x, pairs, eps)
        ctx.save_for_backward(x, mean, rstd, *affine[::2])
        answer: Tensor = y
        return answer

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the input and of each weight and bias."""
        x, mean, rstd, *weights = ctx.saved_tensors
        given = gradients[0].to(x.dtype).contiguous(memory_format=torch.channels_last)
        dx, scale, shift = kernels().backward(given, x, weights, mean, rstd)
        return dx, None, *(each for pair in zip(scale, shift, strict=True) for each in pair)
