"""Batch norm with the batch's own statistics, where kernels of ours are faster than the layer's own forward."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

log = logging.getLogger("poem")
DEVICES: tuple[str, ...] = ("cuda",)  # that have kernels


@cache
def kernels() -> Any:
    """The kernels, or None where Triton is not installed."""
    try:
        from poem import _kernels
    except ImportError:
        return None
    return _kernels


@cache
def work(device: torch.device) -> bool:
    """Whether the kernels run there, tried once: Triton wants a compiler, which not every machine has."""
    if kernels() is None:
        return False
    x = torch.zeros(2, 8, 2, 2, dtype=torch.bfloat16, device=device).contiguous(memory_format=torch.channels_last)
    try:
        kernels().normed(x, [(torch.ones(8, device=device), torch.zeros(8, device=device))], 1e-5)
    except Exception as error:  # whatever it is, torch has kernels of its own
        log.warning("batch norm as torch has it: %s", (str(error).splitlines() or [type(error).__name__])[0])
        return False
    return True


def fusable(layer: nn.Module, x: Tensor, groups: int, *, traced: bool) -> bool:
    """Whether our kernels take it.

    An ordinary layer on a GPU, half precision, channels last, and more than one value per channel and group. In a pass
    that is to be compiled only where there are many: few values are fused well enough as they are.
    """
    ordinary = type(layer) is nn.BatchNorm2d and layer.affine
    if not ordinary or x.device.type not in DEVICES or x.dtype != torch.bfloat16 or not work(x.device):
        return False
    least: int = kernels().SMALL if traced else 1
    many = len(x) % groups == 0 and x.numel() > least * groups * x.shape[1]
    return many and x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)


class Normed(torch.autograd.Function):
    """Normalised per channel and group of rows, then scaled and shifted by the group's own numbers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float, *affine: Tensor) -> Tensor:
        pairs = list(zip(affine[::2], affine[1::2], strict=True))
        y, mean, rstd = kernels().normed(x, pairs, eps)
        ctx.save_for_backward(x, mean, rstd, *affine[::2])
        answer: Tensor = y
        return answer

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, *weights = ctx.saved_tensors
        given = gradients[0].to(x.dtype).contiguous(memory_format=torch.channels_last)
        dx, scale, shift = kernels().back(given, x, weights, mean, rstd)
        return dx, None, *(each for pair in zip(scale, shift, strict=True) for each in pair)
