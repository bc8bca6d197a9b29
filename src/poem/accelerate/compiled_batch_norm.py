"""Batch norm inside a compiled pass: reading all activations is a kernel of ours, the rest is left to be fused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from poem.accelerate.batch_norm import kernels

LAST = torch.channels_last


def batch_normed(x: Tensor, affine: Sequence[tuple[Tensor, Tensor]], eps: float) -> Tensor:
    """Normalised by each group's own moments, scaled and shifted by each group's own numbers."""
    weight, bias = torch.stack([pair[0] for pair in affine]), torch.stack([pair[1] for pair in affine])
    y: Tensor = TracedNormed.apply(x, weight.float(), bias.float(), eps)
    return y


@torch.library.custom_op("poem::moments", mutates_args=())
def moments(x: Tensor, eps: float, groups: int) -> tuple[Tensor, Tensor]:
    """Mean and inverse deviation of every channel (groups, channels), per group of rows."""
    mean, rstd = kernels().moments(x.contiguous(memory_format=LAST), eps, groups)
    return mean, rstd


@moments.register_fake
def _(x: Tensor, eps: float, groups: int) -> tuple[Tensor, Tensor]:
    found = x.new_empty(groups, x.shape[1], dtype=torch.float32)
    return found, torch.empty_like(found)


@torch.library.custom_op("poem::sums", mutates_args=())
def sums(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of shift and scale (groups, channels)."""
    total, along = kernels().sums(dy.contiguous(memory_format=LAST), x.contiguous(memory_format=LAST), mean, rstd)
    return total, along


@sums.register_fake
def _(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(mean), torch.empty_like(mean)


class TracedNormed(torch.autograd.Function):
    """Plain operations, which are fused with what follows, but for the two kernels."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """Normalise with the batch's statistics; weight and bias are (groups, channels)."""
        mean, rstd = moments(x, eps, len(weight))
        ctx.save_for_backward(x, weight, mean, rstd)
        y: Tensor = _normal(x, mean, rstd) * _wide(weight) + _wide(bias)
        return y.flatten(0, 1).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """The whole backward pass of batch norm, moments included."""
        x, weight, mean, rstd = ctx.saved_tensors
        dy = gradients[0].to(x.dtype)
        total, along = sums(dy, x, mean, rstd)
        rows = x.numel() // x.shape[1] // len(mean)
        inner = _grouped(dy, mean) - _wide(total / rows) - _normal(x, mean, rstd) * _wide(along / rows)
        return (inner * _wide(weight * rstd)).flatten(0, 1).to(x.dtype), along, total, None


def _grouped(x: Tensor, like: Tensor) -> Tensor:
    """(groups, rows, channels, height, width) in single precision."""
    grouped: Tensor = x.unflatten(0, (len(like), -1))
    return grouped.float()


def _wide(each: Tensor) -> Tensor:
    """A number per group and channel, over rows and places."""
    return each[:, None, :, None, None]


def _normal(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    return (_grouped(x, mean) - _wide(mean)) * _wide(rstd)
