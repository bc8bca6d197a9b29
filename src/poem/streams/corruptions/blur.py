"""Blur: defocus, glass, motion, zoom and gaussian."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from poem.streams.corruptions.filters import (
    disk_sum,
    edge_index,
    floor_levels,
    gaussian,
    gaussian_taps,
    motion_filter,
    zoom_centre,
    zoom_matrix,
)
from poem.streams.corruptions.random_numbers import ImageRandom

_SPARSE_SIDE = 256  # squares up to this side are zoomed by one cached sparse matrix product


def gaussian_blur(levels: Tensor, rng: ImageRandom, sigma: float) -> Tensor:
    """Blur with a Gaussian of `sigma` pixels."""
    return gaussian(levels, sigma)


def defocus_blur(levels: Tensor, rng: ImageRandom, radius: float, soft: float) -> Tensor:
    """Spread every point over a disk of `radius` pixels whose rim is softened by a Gaussian of `soft` pixels.

    The Gaussian has three taps, five for a radius above eight. The generators soften the disk inside a box it may touch
    and mirror what falls outside, which makes their kernel sum to a little over one; ours is scaled to the same sum.
    """
    margin = 1 if radius <= 8 else 2
    taps, gain = _rim_taps(radius, soft, margin)
    out = disk_sum(levels, radius, margin)
    for axis, size in ((-2, levels.shape[-2]), (-1, levels.shape[-1])):
        parts = [out.narrow(axis, at, size) * weight for at, weight in enumerate(taps)]
        out = parts[0]
        for part in parts[1:]:
            out += part
    return out.mul_(gain)


@lru_cache(maxsize=32)
def _rim_taps(radius: float, soft: float, margin: int) -> tuple[list[float], float]:
    """Return the taps of the rim's Gaussian, and the sum of the generators' kernel over the area of the disk."""
    reach = max(8, int(radius))
    taps = gaussian_taps(soft, margin / soft)
    line = np.arange(-reach, reach + 1)
    disk = (line**2 + line[:, None] ** 2 <= radius**2).astype(np.float64)
    weight = np.zeros(len(line))  # of each row, in the mirrored Gaussian
    for at, tap in zip(range(-margin, margin + 1), taps, strict=True):
        np.add.at(weight, edge_index(np.arange(len(line)) + at, len(line), "mirror"), tap)
    return taps.tolist(), float(weight @ disk @ weight / disk.sum() ** 2)


def motion_blur(levels: Tensor, rng: ImageRandom, radius: int, sigma: float) -> Tensor:
    """Smear along a random direction within 45 degrees of the horizontal."""
    return motion_filter(levels, radius, sigma, rng.uniform() * 90 - 45)


def zoom_blur(levels: Tensor, rng: ImageRandom, stop: float, step: float) -> Tensor:
    """Average the image with itself zoomed by 1, 1 + step, ... below `stop`."""
    zooms = tuple(np.arange(1, stop, step).tolist())
    height, width = levels.shape[-2:]
    if height == width <= _SPARSE_SIDE:
        pixels = levels.flatten(-2).flatten(0, 1).T.contiguous().double()
        total = (zoom_matrix(height, width, zooms).to(levels.device) @ pixels).float().T.reshape(levels.shape)
    else:
        total = torch.zeros_like(levels)
        for zoom in zooms:
            total += zoom_centre(levels, zoom)[..., :height, :width]
    # A product: CUDA divides by a number through its reciprocal, CPUs do not.
    return total.add_(levels).mul_(1 / (len(zooms) + 1))


def glass_blur(levels: Tensor, rng: ImageRandom, sigma: float, reach: int, rounds: int) -> Tensor:
    """Replace pixels by random neighbours, between two Gaussian blurs.

    The generators walk from the bottom right to the top left and mean to swap each pixel with a random neighbour; as
    their arrays are views, the pixel is in fact overwritten by the neighbour. So a pixel ends as the neighbour it drew
    or, where that one was overwritten before, as what the neighbour had become: a chain of pointers, followed here for
    all pixels at once by pointer doubling. The distribution is the same.
    """
    blurred = floor_levels(gaussian(levels, sigma))
    count, channels, height, width = levels.shape
    y, x = torch.arange(height, device=levels.device)[:, None], torch.arange(width, device=levels.device)
    moves = (y > reach) & (y <= height - reach) & (x > reach) & (x <= width - reach)
    position = (y * width + x).flatten()
    source = position.expand(count, -1)
    for _ in range(rounds):
        shift = rng.integers(-reach, reach, 2, height, width)
        drawn = torch.where(moves, shift[:, 0] * width + shift[:, 1], 0).flatten(1) + position
        # A pixel later in the raster is earlier in the walk, so it has changed already.
        changed = (drawn > position) & moves.flatten()[drawn]
        while bool(changed.any()):
            further = drawn.gather(1, drawn)
            changed, drawn = changed & changed.gather(1, drawn), torch.where(changed, further, drawn)
        source = source.gather(1, drawn)
    shuffled = blurred.flatten(-2).gather(-1, source[:, None].expand(-1, channels, -1))
    return gaussian(shuffled.view_as(levels), sigma)
