"""Batch norm inside a compiled pass: reading all activations is a kernel of ours, the rest is left to be fused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._inductor.decomposition import register_decomposition

from poem.accelerate.batch_norm import kernels


def batch_normed(x: Tensor, affine: Sequence[tuple[Tensor, Tensor]], eps: float) -> Tensor:
    """Normalised by each group's own moments, scaled and shifted by each group's own numbers."""
    weight, bias = (torch.stack(each) for each in zip(*affine, strict=True))
    mean, rstd = moments(x, eps, len(weight))
    y: Tensor = normed(x, weight.float(), bias.float(), mean, rstd)
    return y


@torch.library.custom_op("poem::moments", mutates_args=())
def moments(x: Tensor, eps: float, groups: int) -> tuple[Tensor, Tensor]:
    """Mean and inverse deviation of every channel (groups, channels), per group of rows."""
    packed = x.contiguous(memory_format=torch.channels_last)
    if x.is_cuda:
        found: tuple[Tensor, Tensor] = kernels().moments(packed, eps, groups)
        return found
    var, mean = torch.var_mean(packed.float().unflatten(0, (groups, -1)), (1, 3, 4), correction=0)
    return mean, (var + eps).rsqrt()


@torch.library.custom_op("poem::sums", mutates_args=())
def sums(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of shift and scale (groups, channels)."""
    dy, x = (each.contiguous(memory_format=torch.channels_last) for each in (dy, x))
    if x.is_cuda:
        found: tuple[Tensor, Tensor] = kernels().sums(dy, x, mean, rstd)
        return found
    given = _grouped(dy, mean)
    return given.sum((1, 3, 4)), (given * _normal(x, mean, rstd)).sum((1, 3, 4))


@torch.library.custom_op("poem::normed", mutates_args=())
def normed(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    """Normalised, scaled and shifted; in a compiled pass this is fused with what follows."""
    return _normed(x, weight, bias, mean, rstd)


@register_decomposition([torch.ops.poem.normed.default])
def _normed(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    y = _normal(x, mean, rstd) * _wide(weight) + _wide(bias)
    return y.flatten(0, 1).to(x.dtype)


@moments.register_fake
def _(x: Tensor, eps: float, groups: int) -> tuple[Tensor, Tensor]:
    found = x.new_empty(groups, x.shape[1], dtype=torch.float32)
    return found, torch.empty_like(found)


@sums.register_fake
def _(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(mean), torch.empty_like(mean)


@normed.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    return torch.empty_like(x)


def _nothing(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
    return None, None, None


def _keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    x, weight, _, mean, rstd = inputs
    ctx.save_for_backward(x, weight, mean, rstd)


def _back(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    """The whole way back through batch norm, moments included."""
    x, weight, mean, rstd = ctx.saved_tensors
    total, along = sums(dy, x, mean, rstd)
    rows = x.numel() // x.shape[1] // len(mean)
    inner = _grouped(dy, mean) - _wide(total / rows) - _normal(x, mean, rstd) * _wide(along / rows)
    return (inner * _wide(weight * rstd)).flatten(0, 1).to(x.dtype), along, total, None, None


def _grouped(x: Tensor, like: Tensor) -> Tensor:
    """(groups, rows, channels, height, width) in single precision."""
    return x.view(len(like), -1, *x.shape[1:]).float()


def _wide(each: Tensor) -> Tensor:
    """A number per group and channel, over rows and places."""
    return each[:, None, :, None, None]


def _normal(x: Tensor, mean: Tensor, rstd: Tensor) -> Tensor:
    return (_grouped(x, mean) - _wide(mean)) * _wide(rstd)


moments.register_autograd(_nothing)
normed.register_autograd(_back, setup_context=_keep)
