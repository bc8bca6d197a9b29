"""Batch norm over channels-last activations in half precision, as Triton kernels.

Reading every activation is most of what batch statistics cost. A group of rows has statistics, scale and shift of its
own, so the two halves of a doubled batch are normalised by one kernel.

With `other` a kernel adds that tensor, of the same layout, to what it writes, and with `relu` it clips at zero. Both
are as if torch did it afterwards: what was normalised is rounded before the addition. The backward pass of ReLU without
an addition computes the sign of the output again from the input, by the same expression, so the output need not be kept
for it.

Activations are seen as (groups, rows, channels). A program takes a tile of them, `high` rows by `wide` channels; what
several programs summed is added up `tall` programs at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from poem.accelerate.triton_kernels import WORKERS, Affine

SMALL = 1024  # rows per group that one program takes at once
READING = {"high": 64, "wide": 64, "num_warps": 4}  # tiles that were fastest on an H200, for ResNet-50's activations
WRITING = {"high": 32, "wide": 128, "num_warps": 4}
ADDING = {"tall": 128, "wide": 16}


@triton.jit
def _own(first, second, group, columns, inside):
    """The numbers of this group, out of two tensors."""
    if group == 0:
        found = tl.load(first + columns, inside, 0.0).to(tl.float32)
    else:
        found = tl.load(second + columns, inside, 0.0).to(tl.float32)
    return found


@triton.jit
def _place(group, row, columns, rows, channels):
    """Where the numbers of a tile lie."""
    first = group.to(tl.int64) * rows * channels
    return first + row.to(tl.int64)[:, None] * channels + columns[None, :]


@triton.jit
def _clipped(y, relu: tl.constexpr):
    """Not below zero, with `relu`; not-a-number stays, as torch has it."""
    if relu:
        y = tl.where(y < 0, 0.0, y)
    return y


@triton.jit
def _write(y, y_ptr, other_ptr, place, there, add: tl.constexpr, relu: tl.constexpr):
    """Write what was normalised; with `add`, rounded and then plus the other tensor."""
    if add:
        y = y.to(y_ptr.dtype.element_ty).to(tl.float32) + tl.load(other_ptr + place, there, 0.0).to(tl.float32)
    tl.store(y_ptr + place, _clipped(y, relu).to(y_ptr.dtype.element_ty), there)


@triton.jit
def _passed(dy, x, mean, scale, bias, relu: tl.constexpr):
    """The gradient where the output was above zero, with `relu`; and where it was not a number, as torch has it."""
    if relu:
        y = (x - mean[None, :]) * scale[None, :] + bias[None, :]
        dy = tl.where(y <= 0, 0.0, dy)
    return dy


@triton.jit
def _collect(x_ptr, part_ptr, rows, channels, span, even: tl.constexpr, high: tl.constexpr, wide: tl.constexpr):
    """Sums of a stretch of rows, and of their squares, both about the group's first row, which is one of them."""
    group, stretch, columns = tl.program_id(2), tl.program_id(1), tl.program_id(0) * wide + tl.arange(0, wide)
    x_ptr += group.to(tl.int64) * rows * channels
    inside = columns < channels
    shift = tl.load(x_ptr + columns, inside, 0.0).to(tl.float32)
    total, square = tl.zeros((high, wide), tl.float32), tl.zeros((high, wide), tl.float32)
    last = tl.minimum(rows, (stretch + 1) * span)
    row = stretch * span + tl.arange(0, high)
    place = x_ptr + row.to(tl.int64)[:, None] * channels + columns[None, :]
    for start in range(stretch * span, last, high):
        if even:
            x = tl.load(place).to(tl.float32) - shift[None, :]
        else:
            there = (start + tl.arange(0, high) < last)[:, None] & inside[None, :]
            x = tl.where(there, tl.load(place, there, 0.0).to(tl.float32) - shift[None, :], 0.0)
        total += x
        square += x * x
        place += high * channels
    part_ptr += (group * tl.num_programs(1) + stretch) * 2 * channels + columns
    tl.store(part_ptr, tl.sum(total, 0), inside)
    tl.store(part_ptr + channels, tl.sum(square, 0), inside)


@triton.jit
def _summed(part_ptr, group, columns, inside, channels, parts, tall: tl.constexpr, wide: tl.constexpr):
    """Both sums of all stretches."""
    one, two = tl.zeros((tall, wide), tl.float32), tl.zeros((tall, wide), tl.float32)
    for start in range(0, parts, tall):
        part = start + tl.arange(0, tall)
        there = (part < parts)[:, None] & inside[None, :]
        place = part_ptr + (group * parts + part[:, None]) * 2 * channels + columns[None, :]
        one += tl.load(place, there, 0.0)
        two += tl.load(place + channels, there, 0.0)
    return tl.sum(one, 0), tl.sum(two, 0)


@triton.jit
def _moments(part_ptr, x_ptr, mean_ptr, rstd_ptr, rows, channels, parts, eps, tall: tl.constexpr, wide: tl.constexpr):
    """Mean and inverse deviation out of the sums of all stretches."""
    group, columns = tl.program_id(1), tl.program_id(0) * wide + tl.arange(0, wide)
    inside = columns < channels
    total, square = _summed(part_ptr, group, columns, inside, channels, parts, tall, wide)
    shift = tl.load(x_ptr + group.to(tl.int64) * rows * channels + columns, inside, 0.0).to(tl.float32)
    mean = total / rows
    var = square / rows - mean * mean
    var = tl.where(var < 0, 0.0, var)  # not maximum, which would take 0 for not-a-number
    tl.store(mean_ptr + group * channels + columns, mean + shift, inside)
    tl.store(rstd_ptr + group * channels + columns, tl.rsqrt(var + eps), inside)


@triton.jit
def _sums(part_ptr, total_ptr, along_ptr, channels, parts, tall: tl.constexpr, wide: tl.constexpr):
    """Gradients of shift and scale out of the sums of all stretches."""
    group, columns = tl.program_id(1), tl.program_id(0) * wide + tl.arange(0, wide)
    inside = columns < channels
    total, along = _summed(part_ptr, group, columns, inside, channels, parts, tall, wide)
    tl.store(total_ptr + group * channels + columns, total, inside)
    tl.store(along_ptr + group * channels + columns, along, inside)


@triton.jit
def _apply(
    x_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, weight2_ptr, bias2_ptr, other_ptr, y_ptr, rows, channels,
    add: tl.constexpr, relu: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Normalise, scale and shift."""
    group, columns = tl.program_id(2), tl.program_id(1) * wide + tl.arange(0, wide)
    row, inside = tl.program_id(0) * high + tl.arange(0, high), columns < channels
    there = (row < rows)[:, None] & inside[None, :]
    mean = tl.load(mean_ptr + group * channels + columns, inside, 0.0)
    rstd = tl.load(rstd_ptr + group * channels + columns, inside, 0.0)
    scale = rstd * _own(weight_ptr, weight2_ptr, group, columns, inside)
    bias = _own(bias_ptr, bias2_ptr, group, columns, inside)
    place = _place(group, row, columns, rows, channels)
    x = tl.load(x_ptr + place, there, 0.0).to(tl.float32)
    y = (x - mean[None, :]) * scale[None, :] + bias[None, :]
    _write(y, y_ptr, other_ptr, place, there, add, relu)


@triton.jit
def _collect_backward(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, weight2_ptr, bias2_ptr, part_ptr, rows, channels, span,
    relu: tl.constexpr, even: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Sums of a stretch of gradients, and of gradients times what was normalised."""
    group, stretch, columns = tl.program_id(2), tl.program_id(1), tl.program_id(0) * wide + tl.arange(0, wide)
    inside = columns < channels
    mean = tl.load(mean_ptr + group * channels + columns, inside, 0.0)
    rstd = tl.load(rstd_ptr + group * channels + columns, inside, 0.0)
    scale = rstd * _own(weight_ptr, weight2_ptr, group, columns, inside)
    bias = _own(bias_ptr, bias2_ptr, group, columns, inside)
    total, along = tl.zeros((high, wide), tl.float32), tl.zeros((high, wide), tl.float32)
    last = tl.minimum(rows, (stretch + 1) * span)
    row = stretch * span + tl.arange(0, high)
    place = _place(group, row, columns, rows, channels)
    for start in range(stretch * span, last, high):
        if even:
            dy, x = tl.load(dy_ptr + place).to(tl.float32), tl.load(x_ptr + place).to(tl.float32)
        else:
            there = (start + tl.arange(0, high) < last)[:, None] & inside[None, :]
            dy = tl.load(dy_ptr + place, there, 0.0).to(tl.float32)
            x = tl.load(x_ptr + place, there, 0.0).to(tl.float32)
        dy = _passed(dy, x, mean, scale, bias, relu)
        total += dy
        along += dy * (x - mean[None, :])
        place += high * channels
    part_ptr += (group * tl.num_programs(1) + stretch) * 2 * channels + columns
    tl.store(part_ptr, tl.sum(total, 0), inside)
    tl.store(part_ptr + channels, tl.sum(along, 0) * rstd, inside)


@triton.jit
def _backward(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, weight2_ptr, bias2_ptr, total_ptr, along_ptr, dx_ptr,
    rows, channels, relu: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """The input's gradient."""
    group, columns = tl.program_id(2), tl.program_id(1) * wide + tl.arange(0, wide)
    row, inside = tl.program_id(0) * high + tl.arange(0, high), columns < channels
    there = (row < rows)[:, None] & inside[None, :]
    own = group * channels + columns
    mean, rstd = tl.load(mean_ptr + own, inside, 0.0), tl.load(rstd_ptr + own, inside, 0.0)
    total, along = tl.load(total_ptr + own, inside, 0.0) / rows, tl.load(along_ptr + own, inside, 0.0) / rows * rstd
    scale = rstd * _own(weight_ptr, weight2_ptr, group, columns, inside)
    bias = _own(bias_ptr, bias2_ptr, group, columns, inside)
    place = _place(group, row, columns, rows, channels)
    dy = tl.load(dy_ptr + place, there, 0.0).to(tl.float32)
    x = tl.load(x_ptr + place, there, 0.0).to(tl.float32)
    dy = _passed(dy, x, mean, scale, bias, relu)
    dx = (dy - total[None, :] - (x - mean[None, :]) * along[None, :]) * scale[None, :]
    tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), there)


@triton.jit
def _small(
    x_ptr, weight_ptr, bias_ptr, weight2_ptr, bias2_ptr, other_ptr, y_ptr, mean_ptr, rstd_ptr, rows, channels, eps,
    add: tl.constexpr, relu: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """All of it for one group and some channels, held at once."""
    group, columns, row = tl.program_id(1), tl.program_id(0) * wide + tl.arange(0, wide), tl.arange(0, high)
    inside = columns < channels
    there = (row < rows)[:, None] & inside[None, :]
    place = _place(group, row, columns, rows, channels)
    x = tl.load(x_ptr + place, there, 0.0).to(tl.float32)
    mean = tl.sum(x, 0) / rows
    x = tl.where(there, x - mean[None, :], 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 0) / rows + eps)
    scale = rstd * _own(weight_ptr, weight2_ptr, group, columns, inside)
    bias = _own(bias_ptr, bias2_ptr, group, columns, inside)
    y = x * scale[None, :] + bias[None, :]
    _write(y, y_ptr, other_ptr, place, there, add, relu)
    tl.store(mean_ptr + group * channels + columns, mean, inside)
    tl.store(rstd_ptr + group * channels + columns, rstd, inside)


@triton.jit
def _small_backward(
    dy_ptr, x_ptr, mean_ptr, rstd_ptr, weight_ptr, bias_ptr, weight2_ptr, bias2_ptr, total_ptr, along_ptr, dx_ptr,
    rows, channels, relu: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """The whole backward pass for one group and some channels."""
    group, columns, row = tl.program_id(1), tl.program_id(0) * wide + tl.arange(0, wide), tl.arange(0, high)
    inside = columns < channels
    there = (row < rows)[:, None] & inside[None, :]
    own = group * channels + columns
    place = _place(group, row, columns, rows, channels)
    mean, rstd = tl.load(mean_ptr + own, inside, 0.0), tl.load(rstd_ptr + own, inside, 0.0)
    scale = rstd * _own(weight_ptr, weight2_ptr, group, columns, inside)
    bias = _own(bias_ptr, bias2_ptr, group, columns, inside)
    dy = tl.load(dy_ptr + place, there, 0.0).to(tl.float32)
    x = tl.load(x_ptr + place, there, 0.0).to(tl.float32)
    dy = _passed(dy, x, mean, scale, bias, relu)
    x = (x - mean[None, :]) * rstd[None, :]
    total, along = tl.sum(dy, 0), tl.sum(dy * x, 0)
    dx = (dy - total[None, :] / rows - x * (along / rows)[None, :]) * scale[None, :]
    tl.store(dx_ptr + place, dx.to(dx_ptr.dtype.element_ty), there)
    tl.store(total_ptr + own, total, inside)
    tl.store(along_ptr + own, along, inside)


@triton.jit
def _apply_given(
    x_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr, weight2_ptr, bias2_ptr, other_ptr, y_ptr, rows, channels, eps,
    add: tl.constexpr, relu: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Normalise with a mean and a variance that are given, the same for all groups; scale and shift."""
    group, columns = tl.program_id(2), tl.program_id(1) * wide + tl.arange(0, wide)
    row, inside = tl.program_id(0) * high + tl.arange(0, high), columns < channels
    there = (row < rows)[:, None] & inside[None, :]
    mean = tl.load(mean_ptr + columns, inside, 0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.load(var_ptr + columns, inside, 1.0).to(tl.float32) + eps)
    scale = rstd * _own(weight_ptr, weight2_ptr, group, columns, inside)
    bias = _own(bias_ptr, bias2_ptr, group, columns, inside)
    place = _place(group, row, columns, rows, channels)
    x = tl.load(x_ptr + place, there, 0.0).to(tl.float32)
    y = (x - mean[None, :]) * scale[None, :] + bias[None, :]
    _write(y, y_ptr, other_ptr, place, there, add, relu)


@triton.jit
def _backward_given(
    dy_ptr, x_ptr, mean_ptr, var_ptr, weight_ptr, bias_ptr, weight2_ptr, bias2_ptr, dx_ptr, rows, channels, eps,
    relu: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """The input's gradient, where mean and variance are constants."""
    group, columns = tl.program_id(2), tl.program_id(1) * wide + tl.arange(0, wide)
    row, inside = tl.program_id(0) * high + tl.arange(0, high), columns < channels
    there = (row < rows)[:, None] & inside[None, :]
    mean = tl.load(mean_ptr + columns, inside, 0.0).to(tl.float32)
    rstd = tl.rsqrt(tl.load(var_ptr + columns, inside, 1.0).to(tl.float32) + eps)
    scale = rstd * _own(weight_ptr, weight2_ptr, group, columns, inside)
    bias = _own(bias_ptr, bias2_ptr, group, columns, inside)
    place = _place(group, row, columns, rows, channels)
    dy = tl.load(dy_ptr + place, there, 0.0).to(tl.float32)
    if relu:
        dy = _passed(dy, tl.load(x_ptr + place, there, 0.0).to(tl.float32), mean, scale, bias, relu)
    tl.store(dx_ptr + place, (dy * scale[None, :]).to(dx_ptr.dtype.element_ty), there)


def moments(x: Tensor, eps: float, groups: int) -> tuple[Tensor, Tensor]:
    """Mean and inverse deviation of every channel (groups, channels)."""
    rows, channels = _shape(x, groups)
    (mean, rstd), (parts, span, launch) = _pair(x, groups), _stretches(rows, channels, groups)
    part = torch.empty(groups * parts * 2 * channels, dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):
        _collect[_grid(channels, launch, parts, groups)](x, part, rows, channels, span, **launch)
        _moments[_grid(channels, ADDING, groups)](part, x, mean, rstd, rows, channels, parts, eps, **ADDING)
    return mean, rstd


def sums(
    dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, affine: Affine | None = None, *, relu: bool = False
) -> tuple[Tensor, Tensor]:
    """Gradients of shift and scale (groups, channels); with `relu` only those of outputs above zero."""
    groups = len(mean)
    rows, channels = _shape(x, groups)
    (total, along), (parts, span, launch) = _pair(x, groups), _stretches(rows, channels, groups)
    part = torch.empty(groups * parts * 2 * channels, dtype=torch.float32, device=x.device)
    given = (mean, mean, mean, mean) if affine is None else (*affine[0], *affine[-1])  # which only `relu` reads
    with torch.cuda.device_of(x):
        _collect_backward[_grid(channels, launch, parts, groups)](
            dy, x, mean, rstd, *given, part, rows, channels, span, relu=relu, **launch
        )
        _sums[_grid(channels, ADDING, groups)](part, total, along, channels, parts, **ADDING)
    return total, along


def normed(
    x: Tensor, affine: Affine, eps: float, *, relu: bool = False, other: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Activations normalised, scaled and shifted per group, plus `other`, clipped at zero (`relu`); and the moments."""
    groups = len(affine)
    rows, channels = _shape(x, groups)
    y, given = torch.empty_like(x), (*affine[0], *affine[-1], x if other is None else other)
    ends = {"add": other is not None, "relu": relu}
    if rows <= SMALL:
        (mean, rstd), launch = _pair(x, groups), _whole(rows)
        with torch.cuda.device_of(x):
            _small[_grid(channels, launch, groups)](x, *given, y, mean, rstd, rows, channels, eps, **ends, **launch)
        return y, mean, rstd
    mean, rstd = moments(x, eps, groups)
    with torch.cuda.device_of(x):
        _apply[_tiles(rows, channels, groups)](x, mean, rstd, *given, y, rows, channels, **ends, **WRITING)
    return y, mean, rstd


def backward(
    dy: Tensor, x: Tensor, affine: Affine, mean: Tensor, rstd: Tensor, *, relu: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the input, and of scale and shift (groups, channels)."""
    groups, given = len(mean), (*affine[0], *affine[-1])
    rows, channels = _shape(x, groups)
    dx = torch.empty_like(x)
    if rows <= SMALL:
        (total, along), launch = _pair(x, groups), _whole(rows)
        with torch.cuda.device_of(x):
            _small_backward[_grid(channels, launch, groups)](
                dy, x, mean, rstd, *given, total, along, dx, rows, channels, relu=relu, **launch
            )
        return dx, along, total
    total, along = sums(dy, x, mean, rstd, affine, relu=relu)
    with torch.cuda.device_of(x):
        _backward[_tiles(rows, channels, groups)](
            dy, x, mean, rstd, *given, total, along, dx, rows, channels, relu=relu, **WRITING
        )
    return dx, along, total


def normed_by(
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    affine: Affine,
    eps: float,
    *,
    relu: bool = False,
    other: Tensor | None = None,
) -> Tensor:
    """Activations normalised with this mean and variance (channels,), scaled and shifted per group, plus `other`."""
    rows, channels = _shape(x, len(affine))
    y, given = torch.empty_like(x), (*affine[0], *affine[-1], x if other is None else other)
    with torch.cuda.device_of(x):
        _apply_given[_tiles(rows, channels, len(affine))](
            x, mean, var, *given, y, rows, channels, eps, add=other is not None, relu=relu, **WRITING
        )
    return y


def backward_by(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    var: Tensor,
    affine: Affine,
    eps: float,
    *,
    relu: bool = False,
    input_grad: bool = True,
    affine_grad: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the input (`input_grad`), and of scale and shift (`affine_grad`; groups, channels)."""
    groups, given = len(affine), (*affine[0], *affine[-1])
    rows, channels = _shape(x, groups)
    dx = torch.empty_like(x) if input_grad else None
    if dx is not None:
        with torch.cuda.device_of(x):
            _backward_given[_tiles(rows, channels, groups)](
                dy, x, mean, var, *given, dx, rows, channels, eps, relu=relu, **WRITING
            )
    if not affine_grad:
        return dx, None, None
    rstd = (var.float() + eps).rsqrt().repeat(groups, 1)
    total, along = sums(dy, x, mean.float().repeat(groups, 1), rstd, affine, relu=relu)
    return dx, along, total


def _shape(x: Tensor, groups: int) -> tuple[int, int]:
    """Rows of a group, and channels."""
    return x.numel() // x.shape[1] // groups, x.shape[1]


def _pair(x: Tensor, groups: int) -> tuple[Tensor, Tensor]:
    """Room for two numbers per group and channel."""
    one = torch.empty(groups, x.shape[1], dtype=torch.float32, device=x.device)
    return one, torch.empty_like(one)


def _grid(channels: int, tile: dict[str, Any], *others: int) -> tuple[int, ...]:
    """Programs side by side over the channels, times the others."""
    return triton.cdiv(channels, tile["wide"]), *others


def _tiles(rows: int, channels: int, groups: int) -> tuple[int, ...]:
    """A program for every tile to write."""
    return triton.cdiv(rows, WRITING["high"]), triton.cdiv(channels, WRITING["wide"]), groups


def _stretches(rows: int, channels: int, groups: int) -> tuple[int, int, dict[str, Any]]:
    """Into how many stretches a group's rows are cut, how long one is, and with which tiles they are read."""
    high, wide = READING["high"], READING["wide"]
    parts = max(1, min(WORKERS // (triton.cdiv(channels, wide) * groups), triton.cdiv(rows, 4 * high)))
    span = triton.cdiv(triton.cdiv(rows, parts), high) * high
    even = rows % high == 0 and channels % wide == 0
    return triton.cdiv(rows, span), span, {**READING, "even": even}


def _whole(rows: int) -> dict[str, int]:
    """A tile with all rows of a small group, and as many channels as go beside them."""
    high = triton.next_power_of_2(rows)
    return {"high": high, "wide": max(8, min(64, 8192 // high)), "num_warps": 4}
