"""`Blended` statistics over channels-last activations without a gradient, as three Triton kernels for a layer.

The batch stands in the activations several times. Seen as (images, rows, channels), where rows are places of an image,
they are summed image by image (`_collect` of batch norm, with an image as its group); where images are few, their rows
are cut into stretches. The second kernel makes one program for each copy and some channels: it adds the stretches up,
moves the layer's memory and writes each copy's scale and shift. The third scales and shifts.

The arithmetic is that of `parts/stream_statistics.py`, with the variance inside each image taken about the image's
first place, so that no digits are lost where the mean is large. Not-a-number stays so wherever torch keeps it.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from poem.accelerate.kernels import READING, WRITING, _collect, _place, _write
from poem.accelerate.triton_kernels import WORKERS

MOMENTS = ("mean", "var", "last_mean", "last_var", "mean_moves", "var_moves")
"""What a layer remembers of each copy and channel (K, C)."""
SETTINGS = ("weights", "rates", "doubts")
"""What it only reads of each copy (K, 1)."""
ROWS = len(MOMENTS) + 2  # of (K, C) that a layer writes: these, scale and shift; share and images follow
PARTS = 64  # stretches of an image, at most
LEAST = 2 * READING["high"]  # rows of a stretch, at least
ADDED = 128  # sums that a program adds up at a time
WIDE = 16  # channels of a program that moves the memory
ALL = tl.constexpr(tl.PropagateNan.ALL)  # not-a-number where either is, as in torch
ANY = ["batch", "rows", "parts"]  # numbers whose value is no reason to compile again
HELD = [f"{name}_ptr" for name in (*MOMENTS, "share", "images", *SETTINGS)]  # nor is where a tensor of the state begins


@triton.jit
def _beyond(difference, error):
    """The part of a difference that exceeds the error."""
    sign = tl.where(difference > 0, 1.0, tl.where(difference < 0, -1.0, 0.0))
    return sign * tl.maximum(tl.abs(difference) - error, 0.0, propagate_nan=ALL)


@triton.jit
def _counted(mask_ptr, image, batch, masked: tl.constexpr):
    """Which of some images of a copy count for the statistics."""
    counts = image < batch
    if masked:
        counts = counts & (tl.load(mask_ptr + image, counts, 0) != 0)
    return counts


@triton.jit
def _images(
    part_ptr, x_ptr, copy, image, there, columns, batch, rows, channels, parts,
    tall: tl.constexpr, deep: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Mean and variance (tall, wide) of some images of a copy out of the sums of their stretches; 0 elsewhere."""
    image += copy * batch
    total, square = tl.zeros((tall, wide), tl.float32), tl.zeros((tall, wide), tl.float32)
    for start in range(0, parts, deep):
        part = start + tl.arange(0, deep)
        inside = there[:, None, :] & (part < parts)[None, :, None]
        place = part_ptr + (image[:, None, None] * parts + part[None, :, None]) * 2 * channels + columns[None, None, :]
        total += tl.sum(tl.load(place, inside, 0.0), 1)
        square += tl.sum(tl.load(place + channels, inside, 0.0), 1)
    first = x_ptr + image.to(tl.int64)[:, None] * rows * channels + columns[None, :]
    shift = tl.load(first, there, 0.0).to(tl.float32)
    away = total / rows
    var = square / rows - away * away
    return tl.where(there, away + shift, 0.0), tl.where(there, tl.where(var < 0, 0.0, var), 0.0)


@triton.jit
def _moved(now, error, last, between, first, forget, largest_jump):
    """How much batches differ, with this one among them."""
    between = tl.where(first, error, between)
    floor = tl.maximum(between, error, propagate_nan=ALL)
    jump = (now - last) * (now - last) / 2
    known = between + forget * (tl.minimum(jump, largest_jump * floor, propagate_nan=ALL) - between)
    between = tl.where(first, between, tl.where(floor > 0, known, jump))
    return tl.maximum(between, error, propagate_nan=ALL)


@triton.jit(do_not_specialize=ANY, do_not_specialize_on_alignment=HELD)
def _remember(
    part_ptr, x_ptr, mask_ptr, mean_ptr, var_ptr, last_mean_ptr, last_var_ptr, mean_moves_ptr, var_moves_ptr,
    share_ptr, images_ptr, weights_ptr, rates_ptr, doubts_ptr, own_mean_ptr, own_var_ptr, weight_ptr, bias_ptr, new_ptr,
    batch, rows, channels, parts, source_images, forget, largest_jump, eps,
    masked: tl.constexpr, tall: tl.constexpr, deep: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """One copy's memory moved by the batch, and its scale and shift."""
    copy, columns = tl.program_id(1), tl.program_id(0) * wide + tl.arange(0, wide)
    inside, at, size = columns < channels, copy * channels + columns, tl.num_programs(1) * channels

    # The batch: mean, variance, and the squared standard error of each from the spread over images.
    total, many = tl.zeros((tall, wide), tl.float32), tl.zeros((tall,), tl.float32)
    for start in range(0, batch, tall):
        image = start + tl.arange(0, tall)
        counts = _counted(mask_ptr, image, batch, masked)
        there = counts[:, None] & inside[None, :]
        middle, _ = _images(
            part_ptr, x_ptr, copy, image, there, columns, batch, rows, channels, parts, tall, deep, wide
        )
        total += middle
        many += counts.to(tl.float32)
    count = tl.sum(many, 0)
    several, below = tl.maximum(count, 1.0), tl.maximum(count - 1, 1.0)
    mean = tl.sum(total, 0) / several
    total, square = tl.zeros((tall, wide), tl.float32), tl.zeros((tall, wide), tl.float32)
    for start in range(0, batch, tall):
        image = start + tl.arange(0, tall)
        there = _counted(mask_ptr, image, batch, masked)[:, None] & inside[None, :]
        middle, spread = _images(
            part_ptr, x_ptr, copy, image, there, columns, batch, rows, channels, parts, tall, deep, wide
        )
        apart = tl.where(there, middle - mean[None, :], 0.0)
        total += spread + apart * apart
        square += apart * apart
    var, mean_error = tl.sum(total, 0) / several, tl.sum(square, 0) / several / below
    square = tl.zeros((tall, wide), tl.float32)
    for start in range(0, batch, tall):
        image = start + tl.arange(0, tall)
        there = _counted(mask_ptr, image, batch, masked)[:, None] & inside[None, :]
        middle, spread = _images(
            part_ptr, x_ptr, copy, image, there, columns, batch, rows, channels, parts, tall, deep, wide
        )
        spread += (middle - mean[None, :]) * (middle - mean[None, :])
        apart = tl.where(there, spread - var[None, :], 0.0)
        square += apart * apart
    var_error = tl.sum(square, 0) / several / below
    # One image has no spread, however a compiler rounds the same number twice: 0 says that the error is unknown.
    mean_error = tl.where(count < 2, tl.where(mean_error == mean_error, 0.0, mean_error), mean_error)
    var_error = tl.where(count < 2, tl.where(var_error == var_error, 0.0, var_error), var_error)

    # The memory, moved by it; as it was where no image counts.
    before, share = tl.load(images_ptr), tl.load(share_ptr + copy)
    held_mean, held_var = tl.load(mean_ptr + at, inside, 0.0), tl.load(var_ptr + at, inside, 0.0)
    last_mean, last_var = tl.load(last_mean_ptr + at, inside, 0.0), tl.load(last_var_ptr + at, inside, 0.0)
    mean_moves, var_moves = tl.load(mean_moves_ptr + at, inside, 0.0), tl.load(var_moves_ptr + at, inside, 0.0)
    first, some = before == 0, count > 0
    rate = tl.maximum(tl.minimum(tl.load(rates_ptr + copy) * count / 64, 1.0), count / (source_images + before + count))
    apart = mean - held_mean
    moved_mean = held_mean + rate * apart
    moved_var = held_var + rate * (var - held_var) + rate * (1 - rate) * (apart * apart)
    new_mean_moves = _moved(mean, mean_error, last_mean, mean_moves, first, forget, largest_jump)
    new_var_moves = _moved(var, var_error, last_var, var_moves, first, forget, largest_jump)
    moved_mean, moved_var = tl.where(some, moved_mean, held_mean), tl.where(some, moved_var, held_var)
    new_mean_moves = tl.where(some, new_mean_moves, mean_moves)
    new_var_moves = tl.where(some, new_var_moves, var_moves)
    new_share = tl.where(some, (1 - rate) * (1 - rate) * share + rate * rate, share)
    place = new_ptr + at
    tl.store(place, moved_mean, inside)
    tl.store(place + size, moved_var, inside)
    tl.store(place + 2 * size, tl.where(some, mean, last_mean), inside)
    tl.store(place + 3 * size, tl.where(some, var, last_var), inside)
    tl.store(place + 4 * size, new_mean_moves, inside)
    tl.store(place + 5 * size, new_var_moves, inside)
    if tl.program_id(0) == 0:
        tl.store(new_ptr + 8 * size + copy, new_share)
        if copy == 0:
            tl.store(new_ptr + 8 * size + tl.num_programs(1), tl.where(some, before + count, before))

    # The mixture with the source's, as scale and shift.
    own_mean = tl.load(own_mean_ptr + columns, inside, 0.0).to(tl.float32)
    own_var = tl.load(own_var_ptr + columns, inside, 0.0).to(tl.float32)
    doubt = tl.load(doubts_ptr + copy)
    weight = tl.where(first & (count < 2) & (doubt > 0), 0.0, tl.load(weights_ptr + copy))
    seen = own_mean + _beyond(moved_mean - own_mean, doubt * tl.sqrt(new_mean_moves * new_share))
    spread = own_var + _beyond(moved_var - own_var, doubt * tl.sqrt(new_var_moves * new_share))
    apart = seen - own_mean
    mixed_mean = own_mean + weight * apart
    mixed_var = own_var + weight * (spread - own_var) + weight * (1 - weight) * (apart * apart)
    mixed_mean = tl.where(weight == 0, own_mean, mixed_mean)  # a share of 0 of what is not finite would not be 0
    mixed_var = tl.where(weight == 0, own_var, mixed_var)
    scale = tl.load(weight_ptr + columns, inside, 0.0).to(tl.float32) * tl.rsqrt(mixed_var + eps)
    shift = tl.load(bias_ptr + columns, inside, 0.0).to(tl.float32) - mixed_mean * scale
    tl.store(place + 6 * size, scale, inside)
    tl.store(place + 7 * size, shift, inside)


@triton.jit(do_not_specialize=["rows"])
def _scaled(
    x_ptr, new_ptr, other_ptr, y_ptr, rows, channels,
    add: tl.constexpr, relu: tl.constexpr, high: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """Each copy times its scale, plus its shift."""
    copy, columns = tl.program_id(2), tl.program_id(1) * wide + tl.arange(0, wide)
    row, inside = tl.program_id(0) * high + tl.arange(0, high), columns < channels
    there = (row < rows)[:, None] & inside[None, :]
    at, size = new_ptr + copy * channels + columns, tl.num_programs(2) * channels
    scale, shift = tl.load(at + 6 * size, inside, 0.0), tl.load(at + 7 * size, inside, 0.0)
    place = _place(copy, row, columns, rows, channels)
    x = tl.load(x_ptr + place, there, 0.0).to(tl.float32)
    y = x * scale[None, :] + shift[None, :]
    _write(y, y_ptr, other_ptr, place, there, add, relu)


def remembered(
    x: Tensor,
    mask: Tensor | None,
    held: dict[str, Tensor],
    source: tuple[Tensor, Tensor],
    affine: tuple[Tensor, Tensor],
    *,
    eps: float,
    source_images: float,
    forget: float,
    largest_jump: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """What `scaled` reads, each copy's scale and shift by its own mixture of statistics, and the layer's new memory.

    Args:
        x: Activations (K B, C, H, W), channels last, K copies of B images.
        mask: Which of the B images count for the statistics; all of them are normalised.
        held: The layer's memory by name, single precision and contiguous: `MOMENTS` (K, C), `SETTINGS` and `share`
            (K, 1), and `images` ().
        source: The source's mean and variance (C,).
        affine: The layer's scale and shift (C,).
        eps: Added to the variance.
        source_images: How many images the source's statistics count as.
        forget: Rate at which the variation between batches is averaged.
        largest_jump: A jump counts as so many times the variation at most.
    """
    (copies, channels), count = held["mean"].shape, len(x)
    batch, rows = count // copies, x.shape[2] * x.shape[3]
    parts, span, launch = _stretches(rows, channels, count)
    part = torch.empty(count * parts * 2 * channels, dtype=torch.float32, device=x.device)
    size = copies * channels
    new = torch.empty(ROWS * size + copies + 1, dtype=torch.float32, device=x.device)
    kept = [held[name] for name in (*MOMENTS, "share", "images", *SETTINGS)]
    chosen = x if mask is None else mask.view(torch.uint8)
    tile = _added(batch, parts)
    with torch.cuda.device_of(x):
        _collect[(triton.cdiv(channels, launch["wide"]), parts, count)](x, part, rows, channels, span, **launch)
        _remember[(triton.cdiv(channels, WIDE), copies)](
            part, x, chosen, *kept, *source, *affine, new, batch, rows, channels, parts,
            source_images, forget, largest_jump, eps, masked=mask is not None, **tile,
        )  # fmt: skip
    found = dict(zip(MOMENTS, new[: len(MOMENTS) * size].view(-1, copies, channels).unbind(), strict=True))
    found["share"], found["images"] = new[ROWS * size : -1].view(copies, 1), new[-1]
    return new, found


def scaled(x: Tensor, new: Tensor, copies: int, *, relu: bool = False, other: Tensor | None = None) -> Tensor:
    """Each copy of the batch scaled and shifted, plus `other`, and with `relu` clipped at zero."""
    rows, channels, y = x.numel() // x.shape[1] // copies, x.shape[1], torch.empty_like(x)
    tiles = triton.cdiv(rows, WRITING["high"]), triton.cdiv(channels, WRITING["wide"]), copies
    with torch.cuda.device_of(x):
        _scaled[tiles](
            x, new, x if other is None else other, y, rows, channels, add=other is not None, relu=relu, **WRITING
        )
    return y


def _stretches(rows: int, channels: int, images: int) -> tuple[int, int, dict[str, Any]]:
    """Into how many stretches an image's rows are cut, how long one is, and with which tiles they are read."""
    high, wide = READING["high"], READING["wide"]
    wanted = triton.cdiv(WORKERS, triton.cdiv(channels, wide) * images)
    parts = max(1, min(wanted, triton.cdiv(rows, LEAST), PARTS))
    span = triton.cdiv(triton.cdiv(rows, parts), high) * high
    return triton.cdiv(rows, span), span, {**READING, "even": rows % high == 0 and channels % wide == 0}


def _added(batch: int, parts: int) -> dict[str, int]:
    """How many images, stretches of each and channels a program adds up at a time."""
    deep = triton.next_power_of_2(parts)
    return {
        "tall": min(triton.next_power_of_2(batch), max(1, ADDED // deep)),
        "deep": deep,
        "wide": WIDE,
        "num_warps": 4,
    }
