"""Layer norm over the last dimension, out in half precision, as Triton kernels.

Activations are seen as (samples, places, channels) with any strides for samples and places: transformers hand on
transposed sequences. A program takes whole rows, `high` at a time. The samples are those of one half, or of both halves
of a doubled batch; each half has scale and shift of its own. In the backward pass a program adds up the gradients of
scale and shift over its stretch of rows, and a sum over programs follows: nothing is added atomically.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from poem.accelerate.kernels import _own
from poem.accelerate.triton_kernels import WORKERS, Affine

TILE = 4096  # numbers that a program reads at once
ANY = ["rows", "places", "half", "span"]  # numbers whose value is no reason to compile again


@triton.jit
def _rows_at(row, half, places, samples, by_sample, by_place):
    """Where rows of a half begin."""
    sample = samples * half + row // places
    return sample.to(tl.int64) * by_sample + (row % places).to(tl.int64) * by_place


@triton.jit(do_not_specialize=ANY)
def _normalise(
    x_ptr, weight_ptr, bias_ptr, weight2_ptr, bias2_ptr, y_ptr, mean_ptr, rstd_ptr,
    rows, places, half, channels, by_sample, by_place, eps, high: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Some rows of one half, each with its own moments; what is written is contiguous."""
    second, row, columns = tl.program_id(1), tl.program_id(0) * high + tl.arange(0, high), tl.arange(0, wide)
    inside = columns < channels
    there = (row < rows)[:, None] & inside[None, :]
    place = _rows_at(row, second, places, half, by_sample, by_place)[:, None] + columns[None, :]
    x = tl.load(x_ptr + place, there, 0.0).to(tl.float32)
    mean = tl.sum(x, 1) / channels
    x = tl.where(there, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / channels + eps)
    weight = _own(weight_ptr, weight2_ptr, second, columns, inside)
    bias = _own(bias_ptr, bias2_ptr, second, columns, inside)
    y = x * rstd[:, None] * weight[None, :] + bias[None, :]
    own = second.to(tl.int64) * rows + row
    tl.store(y_ptr + own[:, None] * channels + columns[None, :], y.to(y_ptr.dtype.element_ty), there)
    tl.store(mean_ptr + own, mean, row < rows)
    tl.store(rstd_ptr + own, rstd, row < rows)


@triton.jit(do_not_specialize=ANY)
def _backward(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, weight2_ptr, dx_ptr, part_ptr,
    rows, places, half, channels, span, dy_by_sample, dy_by_place, by_sample, by_place, dx_by_sample, dx_by_place,
    input_grad: tl.constexpr, affine_grad: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """A stretch of rows: the input's gradient, and the stretch's share of the gradients of shift and scale."""
    second, stretch, columns = tl.program_id(1), tl.program_id(0), tl.arange(0, wide)
    inside = columns < channels
    weight = _own(weight_ptr, weight2_ptr, second, columns, inside)
    shift, scale = tl.zeros((high, wide), tl.float32), tl.zeros((high, wide), tl.float32)
    end = tl.minimum(rows, (stretch + 1) * span)
    for start in range(stretch * span, end, high):
        row = start + tl.arange(0, high)
        within = row < end
        there = within[:, None] & inside[None, :]
        own = second.to(tl.int64) * rows + row
        mean, rstd = tl.load(mean_ptr + own, within, 0.0), tl.load(rstd_ptr + own, within, 0.0)
        place = _rows_at(row, second, places, half, by_sample, by_place)[:, None] + columns[None, :]
        x = (tl.load(x_ptr + place, there, 0.0).to(tl.float32) - mean[:, None]) * rstd[:, None]
        place = _rows_at(row, second, places, half, dy_by_sample, dy_by_place)[:, None] + columns[None, :]
        dy = tl.load(dy_ptr + place, there, 0.0).to(tl.float32)
        if affine_grad:
            shift += dy
            scale += dy * x
        if input_grad:
            dy = dy * weight[None, :]
            total, along = tl.sum(dy, 1) / channels, tl.sum(tl.where(there, dy * x, 0.0), 1) / channels
            dx = (dy - total[:, None] - x * along[:, None]) * rstd[:, None]
            place = _rows_at(row, second, places, half, dx_by_sample, dx_by_place)[:, None] + columns[None, :]
            tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), there)
    if affine_grad:
        part_ptr += (second * tl.num_programs(0) + stretch) * 2 * channels + columns
        tl.store(part_ptr, tl.sum(shift, 0), inside)
        tl.store(part_ptr + channels, tl.sum(scale, 0), inside)


def normed(x: Tensor, affine: Affine, eps: float, shape: torch.Size | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of x (samples, places, channels) normalised, scaled and shifted, in bfloat16; mean and rstd of each row.

    The output has x's shape, or another one of as many numbers: a view of it could not be written to in place.
    """
    samples, places, channels = x.shape
    halves = len(affine)
    rows, launch = samples * places // halves, tile(channels)
    y = torch.empty(shape or x.shape, dtype=torch.bfloat16, device=x.device)
    mean = torch.empty(samples * places, dtype=torch.float32, device=x.device)
    rstd = torch.empty_like(mean)
    with torch.cuda.device_of(x):
        _normalise[triton.cdiv(rows, launch["high"]), halves](
            x, *affine[0], *affine[-1], y, mean, rstd,
            rows, places, samples // halves, channels, *x.stride()[:2], eps, **launch,
        )  # fmt: skip
    return y, mean, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    weights: list[Tensor],
    mean: Tensor,
    rstd: Tensor,
    *,
    input_grad: bool = True,
    affine_grad: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the input (`input_grad`), and of scale and shift (`affine_grad`; halves, channels)."""
    samples, places, channels = x.shape
    halves = len(weights)
    rows, launch = samples * places // halves, tile(channels)
    parts = max(1, min(WORKERS // halves, triton.cdiv(rows, launch["high"])))
    span = triton.cdiv(triton.cdiv(rows, parts), launch["high"]) * launch["high"]
    parts = triton.cdiv(rows, span)
    dx = torch.empty_like(x) if input_grad else None
    part = torch.empty(halves, parts, 2, channels, dtype=torch.float32, device=x.device) if affine_grad else None
    with torch.cuda.device_of(x):
        _backward[parts, halves](
            dy, x, mean, rstd, weights[0], weights[-1], x if dx is None else dx, mean if part is None else part,
            rows, places, samples // halves, channels, span,
            *dy.stride()[:2], *x.stride()[:2], *(x if dx is None else dx).stride()[:2],
            input_grad=input_grad, affine_grad=affine_grad, **launch,
        )  # fmt: skip
    if part is None:
        return dx, None, None
    shift, scale = part.sum(1).unbind(1)
    return dx, scale, shift


def tile(channels: int) -> dict[str, Any]:
    """Rows that a program reads at once, all channels wide."""
    wide = triton.next_power_of_2(channels)
    return {"high": max(1, min(16, TILE // wide)), "wide": wide, "num_warps": 8 if wide >= 512 else 4}
