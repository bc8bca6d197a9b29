"""Pixels of a batch, as they are stored and as a network gets them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from poem.streams.orders import Segment


class PixelBatch(NamedTuple):
    """One batch before its pixels become floating point: a quarter of the bytes.

    Loader processes write the next batches into the memory of its images, so they are valid until the next batch is
    asked for.
    """

    images: Tensor
    """uint8 (B, 3, H, W)."""
    labels: Tensor
    segment: Segment


def to_float(pixels: Tensor) -> Tensor:
    """Levels from 0 to 255 as float32 from 0 to 1, in memory of its own; the same bits on every device."""
    if pixels.device.type == "cpu":
        return pixels.float().div_(255)
    return looked_up(pixels, _fractions(pixels.device))


def looked_up(pixels: Tensor, fractions: Tensor) -> Tensor:
    """The fraction of every level. CUDA divides by a number as it multiplies by its inverse, which rounds twice."""
    return fractions.index_select(0, pixels.flatten().int()).view(pixels.shape)


@lru_cache(maxsize=16)
def _fractions(device: torch.device) -> Tensor:
    """(256,) what the CPU makes of each level."""
    return fractions().to(device)


def fractions() -> Tensor:
    """(256,) each level as `to_float` has it on the CPU."""
    return to_float(torch.arange(256, dtype=torch.uint8, device="cpu"))
