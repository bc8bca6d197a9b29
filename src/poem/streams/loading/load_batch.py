"""Load one batch: decode its images, stack them, corrupt them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from poem.streams.images import Images, Unreadable, size_text
from poem.streams.orders import Segment
from poem.streams.shift import CLEAN, Shift


class LoadedBatch(NamedTuple):
    """One batch as it was read: uint8 images, their labels, and the images that did not decode."""

    images: Tensor | None
    labels: list[int]
    failures: list[str]
    positions: list[int]
    """Positions in the batch of the images that were read."""


class BatchIndices:
    """The batches of a segment: lists of (source, index)."""

    def __init__(self, segment: Segment, size: int) -> None:
        self.segment, self.size = segment, size

    def __len__(self) -> int:
        return -(-len(self.segment) // self.size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for piece in self.segment.cut(self.size):
            yield list(zip(piece.which.tolist(), piece.indices.tolist(), strict=True))


class BatchLoader:
    """Reads and corrupts one batch; can be pickled for worker processes."""

    def __init__(self, sources: Sequence[Images], shifts: Sequence[Shift], seed: int, profile: str | None) -> None:
        self.sources, self.shifts, self.seed, self.profile = list(sources), list(shifts), seed, profile

    def load(self, batch: list[tuple[int, int]], room: Tensor | None = None) -> LoadedBatch:
        """Load the images and labels of (source, index) pairs; images that do not decode are left out and named.

        Args:
            batch: The pairs.
            room: Memory for the images, as bytes; they are put there if it is large enough.
        """
        images, labels, kept, failures, positions = [], [], [], [], []
        for position, (which, index) in enumerate(batch):
            try:
                images.append(self.sources[which][index])
            except Unreadable as error:
                failures.append(str(error))
                continue
            labels.append(int(self.sources[which].labels[index]))
            kept.append((which, index))
            positions.append(position)
        sizes = sorted({size_text(image) for image in images})
        if len(sizes) > 1:
            raise ValueError(
                f"expected images of one size in a batch, got {', '.join(sizes[:5])}; pass prepare=Prepare(...)"
            )
        stacked = self._corrupted(_stacked(images, room), kept) if images else None
        return LoadedBatch(stacked, labels, failures, positions)

    def _corrupted(self, images: Tensor, kept: list[tuple[int, int]]) -> Tensor:
        """The images, those of a shift overwritten by what it makes of them."""
        which = torch.tensor([each for each, _ in kept])
        ids = [index for _, index in kept]
        for number, shift in enumerate(self.shifts):
            rows = (which == number).nonzero().flatten()
            if shift != CLEAN and len(rows):
                from poem.streams.corruptions import corrupt

                names = [ids[row] for row in rows.tolist()]
                images[rows] = corrupt(
                    images[rows], shift.corruption, shift.severity, seed=self.seed, ids=names, profile=self.profile
                )
        return images


def _stacked(images: list[Tensor], room: Tensor | None) -> Tensor:
    """Images of one size as one tensor, in `room` if they are pixels that fit there."""
    shape = (len(images), *images[0].shape)
    fits = room is not None and math.prod(shape) <= len(room)
    if room is None or not fits or any(image.dtype != torch.uint8 for image in images):
        return torch.stack(images)
    return torch.stack(images, out=room[: math.prod(shape)].view(shape))
