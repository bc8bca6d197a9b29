"""Batches of tensors from indices: images are decoded when their batch is due, by this process or by workers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from poem.streams.images import Images, Unreadable, size_text
from poem.streams.orders import Segment
from poem.streams.orders.within_domain import Indices
from poem.streams.shift import CLEAN, Shift

log = logging.getLogger("poem")

OnError = Literal["raise", "report"]


class LoadedBatch(NamedTuple):
    """One batch as a worker returns it: uint8 images, their labels, and the images that did not decode."""

    images: Tensor | None
    labels: Tensor
    failures: list[str]
    positions: list[int]
    """Positions in the batch of the images that were read."""


class BatchLoader:
    """Reads and corrupts one batch; can be pickled for worker processes."""

    def __init__(self, sources: Sequence[Images], shifts: Sequence[Shift], seed: int, profile: str | None) -> None:
        self.sources, self.shifts, self.seed, self.profile = list(sources), list(shifts), seed, profile

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def __getitems__(self, batch: list[tuple[int, int]]) -> LoadedBatch:
        """Load the images and labels of (source, index) pairs; images that do not decode are left out and named."""
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
        stacked = self._corrupted(torch.stack(images), kept) if images else None
        return LoadedBatch(stacked, torch.tensor(labels, dtype=torch.int64), failures, positions)

    def _corrupted(self, images: Tensor, kept: list[tuple[int, int]]) -> Tensor:
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


class Batches:
    """Iterable of (images, labels): float32 in [0, 1] (B, 3, H, W) and int64 (B,). Made by `batches`."""

    def __init__(self, loader: BatchLoader, segment: Segment, size: int, workers: int, on_error: OnError) -> None:
        self._loader, self._segment, self._size, self._workers = loader, segment, size, workers
        self._on_error = on_error
        self._started: Iterator[LoadedBatch] | None = None
        self.failures: list[str] = []
        """Images that could not be read in the latest iteration, and why; always empty with `on_error="raise"`."""

    def __len__(self) -> int:
        return len(_BatchIndices(self._segment, self._size))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels, _ in self.with_segments():
            yield images, labels

    def start(self) -> None:
        """Start the loader processes, if there are any, for the iteration that comes next."""
        if self._workers and self._started is None:
            self._started = iter(self._processes())

    def with_segments(self) -> Iterator[tuple[Tensor, Tensor, Segment]]:
        """Yield images and labels with each batch's segment of the order, less the images that were left out."""
        self.failures = []
        reset = False  # of a batch without a readable image: it moves on to the next batch
        for loaded, piece in zip(self._load(), self._segment.cut(self._size), strict=True):
            images, labels, failures, positions = loaded
            reset = reset or piece.reset
            if failures and self._on_error == "raise":
                more = f" ({len(failures)} in this batch)" if len(failures) > 1 else ""
                raise Unreadable(f"{failures[0]}{more}; on_error='report' leaves such images out and counts them")
            self.failures += failures
            if images is not None:
                read = Segment(piece.shifts, piece.indices[positions], reset, piece.which[positions])
                yield images.float().div_(255), labels, read
                reset = False
        if self.failures:
            shown = "; ".join(self.failures[:3])
            log.warning("%d of %d images could not be read: %s", len(self.failures), len(self._segment), shown)

    def _load(self) -> Iterator[LoadedBatch]:
        if self._workers == 0:
            return map(self._loader.__getitems__, _BatchIndices(self._segment, self._size))
        started, self._started = self._started, None
        return iter(self._processes()) if started is None else started

    def _processes(self) -> Any:
        from torch.utils.data import DataLoader

        return DataLoader(
            self._loader,  # type: ignore[arg-type]  # it has __getitems__ alone
            batch_sampler=_BatchIndices(self._segment, self._size),
            num_workers=self._workers,
            collate_fn=_identity,
            generator=torch.Generator(),  # otherwise the loader draws its workers' seed from the global generator
        )


class _BatchIndices:
    """A batch sampler over a segment: lists of (source, index)."""

    def __init__(self, segment: Segment, size: int) -> None:
        self.segment, self.size = segment, size

    def __len__(self) -> int:
        return -(-len(self.segment) // self.size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for piece in self.segment.cut(self.size):
            yield list(zip(piece.which.tolist(), piece.indices.tolist(), strict=True))


def _identity(batch: Any) -> Any:
    return batch


def batches(
    data: Images,
    order: Sequence[int] | Indices | Segment,
    batch_size: int = 64,
    *,
    corruption: Shift | tuple[str, int] | None = None,
    seed: int = 0,
    profile: str | None = None,
    workers: int = 0,
    on_error: OnError = "raise",
) -> Batches:
    """Load images and labels in an order, batch by batch; the last batch may be shorter.

    Args:
        data: A data set.
        order: Indices, or a segment of an order (whose shift is *not* applied unless named in `corruption`).
        batch_size: Images per batch.
        corruption: A shift to apply on the fly, such as `("fog", 5)`; the result depends on (seed, index) alone.
        seed: Seed of the corruption's random numbers.
        profile: Constants of the corruption; by default chosen by image size.
        workers: Loader processes; 0 reads in this one.
        on_error: `"raise"` names the first image that does not decode; `"report"` leaves such images out of their
            batch, names them in `.failures` and logs their number.
    """
    indices = np.asarray(order.indices if isinstance(order, Segment) else order)
    if indices.ndim != 1 or (len(indices) and not np.issubdtype(indices.dtype, np.integer)):
        raise ValueError(f"expected a list of indices, got {indices.dtype} {indices.shape}")
    if len(indices) and not 0 <= indices.min() <= indices.max() < len(data):
        raise IndexError(f"expected indices from 0 to {len(data) - 1}, got {indices.min()} to {indices.max()}")
    shift = CLEAN if corruption is None else corruption if isinstance(corruption, Shift) else Shift(*corruption)
    segment = Segment((shift,), indices.astype(np.int64), False, np.zeros(len(indices), np.int64))
    loader = BatchLoader([data], [shift_to_apply(data, shift)], seed, profile)
    return segment_batches(loader, segment, batch_size, workers, on_error)


def segment_batches(loader: BatchLoader, segment: Segment, size: int, workers: int, on_error: OnError) -> Batches:
    """Make the batches of a segment; raises if the size, workers or on_error is invalid."""
    if size < 1 or workers < 0:
        raise ValueError(f"expected batch_size >= 1 and workers >= 0, got {size} and {workers}")
    if on_error not in ("raise", "report"):
        raise ValueError(f"expected on_error 'raise' or 'report', got {on_error!r}")
    return Batches(loader, segment, size, workers, on_error)


def shift_to_apply(data: Images, shift: Shift, *, exact: bool = False) -> Shift:
    """The shift to apply on the fly: `shift` to clean data, none to data that has it; any other data is an error.

    With `exact=False`, corrupted data may also be asked for as clean: it is used as it is.
    """
    about = data.describe()
    stored = Shift(about["corruption"], about["severity"])
    if stored == CLEAN:
        return shift
    if shift != stored and (exact or shift != CLEAN):
        raise ValueError(f"expected clean data, or data that is {shift}; {about['data']} here is {stored} already")
    return CLEAN
