"""Source images that many guards over one model share: what they compare with is computed once."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

SPLIT = 64
"""Images of a batch."""


class SourceImages:
    """Images like those of training, kept as bytes; iterates over batches (B, C, H, W) from 0 to 1.

    Args:
        pixels: uint8 (N, C, H, W). The guards that are given them must be over one model with one normalisation.
    """

    def __init__(self, pixels: Tensor) -> None:
        self._pixels = pixels
        self.entropies: list[float] | None = None
        """Of the source's answers to them; None until the first guard has computed them."""

    def __len__(self) -> int:
        return len(self._pixels)

    def __iter__(self) -> Iterator[Tensor]:
        return (part.float().div_(255) for part in self._pixels.split(SPLIT))
