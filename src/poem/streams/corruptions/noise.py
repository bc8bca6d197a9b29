"""Noise: gaussian, shot, impulse and speckle."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from poem.streams.corruptions.random_numbers import ImageRandom

_GUIDES = 1024  # starting points of the search for a Poisson count, per grey level


def gaussian_noise(levels: Tensor, rng: ImageRandom, spread: float) -> Tensor:
    """Add normal noise of standard deviation `spread` (of white) to every value."""
    return rng.normal(*levels.shape[1:]).mul_(spread * 255).add_(levels)


def speckle_noise(levels: Tensor, rng: ImageRandom, spread: float) -> Tensor:
    """Add normal noise in proportion to the value."""
    return rng.normal(*levels.shape[1:]).mul_(spread).add_(1).mul_(levels)


def impulse_noise(levels: Tensor, rng: ImageRandom, amount: float) -> Tensor:
    """Turn a share of the values black or white, half each."""
    bits = rng.bits(*levels.shape[1:])
    white, hit = (round(share * 2**32) - 2**31 for share in (amount / 2, amount))
    return levels.masked_fill_(bits < hit, 0).masked_fill_(bits < white, 255)


def shot_noise(levels: Tensor, rng: ImageRandom, photons: int) -> Tensor:
    """Replace every value by a Poisson count of photons, `photons` expected at white.

    The count is the inverse of the Poisson distribution at one uniform number; float images are read at their nearest
    8-bit level.
    """
    guides, edges = (table.to(levels.device) for table in _poisson(photons))
    row = levels.round().clamp_(0, 255).int().flatten()
    chance = rng.bits(*levels.shape[1:]).flatten()
    start = row * _GUIDES + ((chance >> 22) + _GUIDES // 2)
    count = guides.index_select(0, start).int()
    row *= len(edges) // 256
    more = chance > edges.index_select(0, row + count)
    count += more
    # Only numbers in the tails lie two or more counts above the start of their search.
    pending = more.nonzero().flatten()
    while len(pending):
        pending = pending[chance[pending] > edges[row[pending] + count[pending]]]
        count[pending] += 1
    return count.view(levels.shape).to(levels.dtype).mul_(255 / photons)


@lru_cache(maxsize=16)
def _poisson(photons: int) -> tuple[Tensor, Tensor]:
    """Return, per grey level, where the search for a count starts, and the last 32-bit number that gives each count.

    The first table is (256 * guides), the second (256 * counts).
    """
    rate = np.arange(256)[:, None] * photons / 255
    counts = np.arange(int(photons + 12 * math.sqrt(photons) + 24))
    factorial = np.array([math.lgamma(count + 1) for count in counts])
    with np.errstate(divide="ignore", invalid="ignore"):
        chance = np.exp(counts * np.log(rate) - rate - factorial)
    chance[0] = counts == 0
    edges = np.floor(chance.cumsum(1) * 2.0**32).astype(np.int64).clip(0, 2**32) - 2**31 - 1
    edges[:, -1] = 2**31 - 1
    starts = (np.arange(_GUIDES) << 22) - 2**31
    guides = np.stack([np.searchsorted(row, starts) for row in edges])
    return torch.from_numpy(guides.astype(np.int16)).flatten(), torch.from_numpy(edges.astype(np.int32)).flatten()
