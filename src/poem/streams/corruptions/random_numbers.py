"""Random numbers that do not depend on the batch: every image has its own counter-based generator.

A number is a hash of (key of the image, counter), evaluated in 32-bit integers, so that it has the same bits on every
device, in every batch, in any order. The key comes from the seed, the image's id, the corruption, the severity and the
size. Normals are read off a table rather than computed: logarithms and cosines differ between devices.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["ImageRandom"]

_CALL_BITS = 27  # bits of the counter for the numbers of one call; the upper five count the calls
_PIECES = 9  # bits: pieces of the normal quantile function per octave
_REST = 23 - _PIECES  # bits: the position on a piece
_FIRST, _OCTAVES = 126, 33  # exponents, as a float stores them, of 0.5 ... 2**31
_MIXER = ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)), (16, 1))  # shifts and odd factors of a 32-bit hash


class ImageRandom:
    """A generator for N images: each call returns fresh numbers (N, ...), row i those of image i."""

    def __init__(self, ids: Sequence[int | str], purpose: str, device: torch.device) -> None:
        keys = [hashlib.blake2b(f"{purpose}|{name}".encode(), digest_size=8).digest() for name in ids]
        words = [[int.from_bytes(key[at : at + 4], "little", signed=True) for at in (0, 4)] for key in keys]
        self._keys = torch.tensor(words, dtype=torch.int32).reshape(-1, 2).to(device)
        self._calls = 0

    def bits(self, *shape: int) -> Tensor:
        """Return int32 (N, *shape), every bit of them random."""
        count = math.prod(shape)
        start = self._calls << _CALL_BITS
        self._calls += 1 + (count >> _CALL_BITS)
        counter = torch.arange(start, start + count, device=self._keys.device).to(torch.int32)
        mixed = _mix(counter ^ self._keys[:, :1])
        mixed ^= self._keys[:, 1:]
        return _mix(mixed).view(-1, *shape)

    def uniform(self, *shape: int) -> Tensor:
        """Return float32 (N, *shape), uniform between 0 and 1, both excluded."""
        return ((self.bits(*shape) >> 9) & 0x7FFFFF).to(torch.float32).add_(0.5).mul_(2.0**-23)

    def normal(self, *shape: int) -> Tensor:
        """Return float32 (N, *shape), standard normal, from -6.3 to 6.3.

        A 31-bit number, written as a float, names a piece of the quantile function: its exponent the octave, its first
        bits one of the octave's pieces, the rest the place on the piece, which is straight.
        """
        bits = self.bits(*shape)
        tail = (bits & 0x7FFFFFFF).to(torch.float32).add_(0.5)
        piece = (tail.view(torch.int32) >> _REST).sub_(_FIRST << _PIECES).flatten()
        start, slope = (table.to(bits.device) for table in _quantiles())
        size = slope.index_select(0, piece).view(bits.shape).mul_(tail)
        size += start.index_select(0, piece).view(bits.shape)
        return size.mul_(((bits >> 30) | 1).to(torch.float32))

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """Return int64 (N, *shape) from low to high - 1."""
        return self.uniform(*shape).mul_(high - low).add_(low).floor_().long()


@lru_cache(maxsize=1)
def _quantiles() -> tuple[Tensor, Tensor]:
    """Return value at zero and slope of every piece of the upper half of the normal quantile function."""
    ends = torch.arange(_FIRST << _PIECES, ((_FIRST + _OCTAVES) << _PIECES) + 1, dtype=torch.int32) << _REST
    ends = ends.view(torch.float32).double().clamp_(max=2.0**31)
    height = -torch.special.ndtri(ends / 2.0**32)
    slope = height.diff() / ends.diff().clamp_min(1e-300)
    return (height[:-1] - slope * ends[:-1]).float(), slope.float()


def _mix(word: Tensor) -> Tensor:
    """Scramble int32 words in place, one to one; products wrap, shifts bring in zeros."""
    for shift, factor in _MIXER:
        word ^= (word >> shift) & ((1 << (32 - shift)) - 1)
        word *= factor
    return word
