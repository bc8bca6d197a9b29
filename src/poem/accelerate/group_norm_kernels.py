"""Group norm over channels-last activations in half precision, as Triton kernels.

Activations are seen as (samples, rows, channels), where rows are places of the image. A program takes a block of whole
groups, `used` channels in a tile of `wide`, of one sample. Where samples and blocks are too few to fill the device,
rows are cut into stretches: one kernel sums each of them, and the next adds these sums up before it writes.

The samples are those of one half, or of both halves of a doubled batch; each half has scale and shift of its own. Sums
are per sample and channel. Nothing is added atomically, so results do not depend on the order of programs.

With `other` that tensor is added to what is written, and with `relu` it is clipped at zero, as for batch norm.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from poem.accelerate.kernels import _collect, _own, _passed, _summed, _write
from poem.accelerate.triton_kernels import WORKERS, Affine

PARTS = 64  # stretches of a sample, at most: every program that writes adds them up
LEAST = 256  # rows of a stretch, at least
WIDE = 64  # channels of a tile, where the groups are no wider
TILE, LARGEST = 4096, 8192  # numbers of a tile: of a stretch, and of a whole sample
ANY = ["rows", "per", "span", "parts", "half"]  # numbers whose value is no reason to compile again


@triton.jit
def _over_group(value, columns, inside, per, single: tl.constexpr, wide: tl.constexpr):
    """For each channel of a tile, the sum over all channels of its group; `single` if the tile holds one group."""
    if single:
        found = tl.zeros((wide,), tl.float32) + tl.sum(tl.where(inside, value, 0.0), 0)
    else:
        group = columns // per
        same = (group[:, None] == group[None, :]) & inside[None, :]
        found = tl.sum(tl.where(same, value[None, :], 0.0), 1)
    return found


@triton.jit
def _totals(x_ptr, first, rows, channels, columns, inside, high: tl.constexpr, wide: tl.constexpr):
    """Sums of a sample's rows, and of their squares, both about its first row."""
    shift = tl.load(x_ptr + first + columns, inside, 0.0).to(tl.float32)
    total, square = tl.zeros((high, wide), tl.float32), tl.zeros((high, wide), tl.float32)
    for start in range(0, rows, high):
        row = start + tl.arange(0, high)
        there = (row < rows)[:, None] & inside[None, :]
        place = x_ptr + first + row[:, None] * channels + columns[None, :]
        x = tl.where(there, tl.load(place, there, 0.0).to(tl.float32) - shift[None, :], 0.0)
        total += x
        square += x * x
    return tl.sum(total, 0), tl.sum(square, 0), shift


@triton.jit
def _totals_backward(
    dy_ptr, x_ptr, first, begin, end, channels, columns, inside, mean, rstd, scale, bias,
    relu: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Sums of a stretch of gradients, and of gradients times what was normalised."""
    total, along = tl.zeros((high, wide), tl.float32), tl.zeros((high, wide), tl.float32)
    for start in range(begin, end, high):
        row = start + tl.arange(0, high)
        there = (row < end)[:, None] & inside[None, :]
        place = first + row[:, None] * channels + columns[None, :]
        dy = tl.load(dy_ptr + place, there, 0.0).to(tl.float32)
        x = tl.load(x_ptr + place, there, 0.0).to(tl.float32)
        dy = _passed(dy, x, mean, scale, bias, relu)
        total += dy
        along += dy * (x - mean[None, :])
    return tl.sum(total, 0), tl.sum(along, 0) * rstd


@triton.jit(do_not_specialize=ANY)
def _normalise(
    x_ptr, part_ptr, weight_ptr, bias_ptr, weight2_ptr, bias2_ptr, other_ptr, y_ptr, mean_ptr, rstd_ptr,
    rows, channels, per, used, span, parts, half, eps, add: tl.constexpr, relu: tl.constexpr,
    split: tl.constexpr, single: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Moments of each group, from sums of stretches or from the rows themselves; then normalise, scale and shift."""
    block, stretch, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = block * used + tl.arange(0, wide)
    inside = (tl.arange(0, wide) < used) & (columns < channels)
    first = sample.to(tl.int64) * rows * channels
    if split:
        total, square = _summed(part_ptr, sample, columns, inside, channels, parts, 16, wide)
        shift = tl.load(x_ptr + first + columns, inside, 0.0).to(tl.float32)
    else:
        total, square, shift = _totals(x_ptr, first, rows, channels, columns, inside, high, wide)
    own = total / rows + shift  # the channel's mean
    mean = _over_group(own, columns, inside, per, single, wide) / per
    apart = square - total * total / rows + rows * (own - mean) * (own - mean)
    var = _over_group(apart, columns, inside, per, single, wide) / (per * rows)
    var = tl.where(var < 0, 0.0, var)  # not maximum, which would take 0 for not-a-number
    rstd = tl.rsqrt(var + eps)
    if stretch == 0:  # the first channel of each group writes for all
        place = sample * (channels // per) + columns // per
        one = inside & (columns % per == 0)
        tl.store(mean_ptr + place, mean, one)
        tl.store(rstd_ptr + place, rstd, one)
    scale = rstd * _own(weight_ptr, weight2_ptr, sample // half, columns, inside)
    bias = _own(bias_ptr, bias2_ptr, sample // half, columns, inside)
    end = tl.minimum(rows, (stretch + 1) * span)
    tiles = tl.cdiv(end - stretch * span, high)
    for turn in range(tiles):  # from the end: what was summed last may still be in the cache
        row = stretch * span + (tiles - 1 - turn) * high + tl.arange(0, high)
        there = (row < end)[:, None] & inside[None, :]
        place = first + row[:, None] * channels + columns[None, :]
        x = tl.load(x_ptr + place, there, 0.0).to(tl.float32)
        y = (x - mean[None, :]) * scale[None, :] + bias[None, :]
        _write(y, y_ptr, other_ptr, place, there, add, relu)


@triton.jit(do_not_specialize=ANY)
def _collect_backward(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, part_ptr, weight_ptr, bias_ptr, weight2_ptr, bias2_ptr,
    rows, channels, per, used, span, half, relu: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Both sums of a stretch of a sample's rows."""
    block, stretch, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = block * used + tl.arange(0, wide)
    inside = (tl.arange(0, wide) < used) & (columns < channels)
    group = sample * (channels // per) + columns // per
    mean, rstd = tl.load(mean_ptr + group, inside, 0.0), tl.load(rstd_ptr + group, inside, 0.0)
    first, end = sample.to(tl.int64) * rows * channels, tl.minimum(rows, (stretch + 1) * span)
    scale = rstd * _own(weight_ptr, weight2_ptr, sample // half, columns, inside)
    bias = _own(bias_ptr, bias2_ptr, sample // half, columns, inside)
    total, along = _totals_backward(
        dy_ptr, x_ptr, first, stretch * span, end, channels, columns, inside, mean, rstd, scale, bias, relu, high, wide
    )
    part_ptr += (sample * tl.num_programs(1) + stretch) * 2 * channels + columns
    tl.store(part_ptr, total, inside)
    tl.store(part_ptr + channels, along, inside)


@triton.jit(do_not_specialize=ANY)
def _backward(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, part_ptr, weight_ptr, bias_ptr, weight2_ptr, bias2_ptr, dx_ptr, sum_ptr,
    rows, channels, per, used, span, parts, half,
    relu: tl.constexpr, split: tl.constexpr, single: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """The input's gradient, and each sample's share of the gradients of shift and scale."""
    block, stretch, sample = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = block * used + tl.arange(0, wide)
    inside = (tl.arange(0, wide) < used) & (columns < channels)
    group = sample * (channels // per) + columns // per
    mean, rstd = tl.load(mean_ptr + group, inside, 0.0), tl.load(rstd_ptr + group, inside, 0.0)
    first = sample.to(tl.int64) * rows * channels
    weight = _own(weight_ptr, weight2_ptr, sample // half, columns, inside)
    bias = _own(bias_ptr, bias2_ptr, sample // half, columns, inside)
    scale = rstd * weight
    if split:
        total, along = _summed(part_ptr, sample, columns, inside, channels, parts, 16, wide)
    else:
        total, along = _totals_backward(
            dy_ptr, x_ptr, first, 0, rows, channels, columns, inside, mean, rstd, scale, bias, relu, high, wide
        )
    if stretch == 0:
        place = sum_ptr + sample * 2 * channels + columns
        tl.store(place, total, inside)
        tl.store(place + channels, along, inside)
    total = _over_group(total * weight, columns, inside, per, single, wide) / (per * rows) * rstd
    along = _over_group(along * weight, columns, inside, per, single, wide) / (per * rows) * rstd * rstd
    end = tl.minimum(rows, (stretch + 1) * span)
    tiles = tl.cdiv(end - stretch * span, high)
    for turn in range(tiles):  # from the end: what was summed last may still be in the cache
        row = stretch * span + (tiles - 1 - turn) * high + tl.arange(0, high)
        there = (row < end)[:, None] & inside[None, :]
        place = first + row[:, None] * channels + columns[None, :]
        dy = tl.load(dy_ptr + place, there, 0.0).to(tl.float32)
        x = tl.load(x_ptr + place, there, 0.0).to(tl.float32)
        dy = _passed(dy, x, mean, scale, bias, relu)
        dx = dy * scale[None, :] - total[None, :] - (x - mean[None, :]) * along[None, :]
        tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), there)


def normed(
    x: Tensor, affine: Affine, eps: float, groups: int, *, relu: bool = False, other: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Activations normalised per sample and group, scaled and shifted per half, plus `other`, clipped at zero (`relu`).

    Besides, mean and rstd (samples, groups).
    """
    samples, channels = x.shape[:2]
    rows, per = x.shape[2] * x.shape[3], channels // groups
    used, parts, span, launch = plan(samples, rows, channels, per)
    y = torch.empty_like(x)
    mean = torch.empty(samples, groups, dtype=torch.float32, device=x.device)
    rstd, part = torch.empty_like(mean), mean
    blocks = triton.cdiv(channels, used)
    with torch.cuda.device_of(x):
        if parts > 1:
            part = torch.empty(samples * parts * 2 * channels, dtype=torch.float32, device=x.device)
            even = rows % 64 == 0 and span % 64 == 0 and channels % WIDE == 0
            _collect[triton.cdiv(channels, WIDE), parts, samples](
                x, part, rows, channels, span, even=even, high=64, wide=WIDE, num_warps=4
            )
        _normalise[blocks, parts, samples](
            x, part, *affine[0], *affine[-1], x if other is None else other, y, mean, rstd,
            rows, channels, per, used, span, parts, samples // len(affine), eps,
            add=other is not None, relu=relu, split=parts > 1, single=used == per, **launch,
        )  # fmt: skip
    return y, mean, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    affine: Affine,
    mean: Tensor,
    rstd: Tensor,
    *,
    relu: bool = False,
    input_grad: bool = True,
    affine_grad: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the input (`input_grad`), and of scale and shift (`affine_grad`; halves, channels)."""
    samples, channels = x.shape[:2]
    rows, per, halves = x.shape[2] * x.shape[3], channels // mean.shape[1], len(affine)
    used, parts, span, launch = plan(samples, rows, channels, per)
    dx, blocks, given = (
        torch.empty_like(x) if input_grad else None,
        triton.cdiv(channels, used),
        (*affine[0], *affine[-1]),
    )
    part = sums = torch.empty(samples, parts, 2, channels, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        if parts > 1 or dx is None:
            _collect_backward[blocks, parts, samples](
                dy, x, mean, rstd, part, *given, rows, channels, per, used, span, samples // halves, relu=relu, **launch
            )
        if dx is not None:
            sums = torch.empty_like(part[:, :1]) if parts > 1 else part
            _backward[blocks, parts, samples](
                dy, x, mean, rstd, part, *given, dx, sums,
                rows, channels, per, used, span, parts, samples // halves,
                relu=relu, split=parts > 1, single=used == per, **launch,
            )  # fmt: skip
    if not affine_grad:
        return dx, None, None
    total, along = sums.view(halves, -1, 2, channels).sum(1).unbind(1)
    return dx, along, total


def plan(samples: int, rows: int, channels: int, per: int) -> tuple[int, int, int, dict[str, Any]]:
    """Channels of a block, stretches of a sample, rows of a stretch, and the tile that a program reads at once."""
    used = max(1, WIDE // per) * per  # at most 64 channels, or one group
    wide = max(WIDE, triton.next_power_of_2(used))
    blocks = triton.cdiv(channels, used)
    parts = max(1, min(PARTS, WORKERS // (samples * blocks), triton.cdiv(rows, LEAST)))
    high = max(1, TILE // wide)
    if parts == 1 and 2 * high * wide <= LARGEST and rows > high:  # a program reads a sample whole
        high *= 2
    elif rows < high:
        high = max(triton.next_power_of_2(rows), 1024 // wide)
    span = triton.cdiv(triton.cdiv(rows, parts), high) * high
    launch = {"high": high, "wide": wide, "num_warps": 8 if high * wide > 4096 else 4}
    return used, triton.cdiv(rows, span), span, launch
