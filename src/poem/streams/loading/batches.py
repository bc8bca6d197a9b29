"""Batches of tensors from indices: images are decoded when their batch is due, by this process or by workers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from poem.streams.images import Images, Unreadable
from poem.streams.loading.load_batch import BatchIndices, BatchLoader, LoadedBatch
from poem.streams.loading.pixels import PixelBatch, to_float
from poem.streams.loading.processes import ProcessBatches
from poem.streams.orders import Segment
from poem.streams.orders.within_domain import Indices
from poem.streams.shift import CLEAN, Shift

log = logging.getLogger("poem")

OnError = Literal["raise", "report"]


class Batches:
    """Iterable of (images, labels): float32 in [0, 1] (B, 3, H, W) and int64 (B,). Made by `batches`."""

    def __init__(self, loader: BatchLoader, segment: Segment, size: int, workers: int, on_error: OnError) -> None:
        self._loader, self._segment, self._size, self._workers = loader, segment, size, workers
        self._on_error = on_error
        self._started: Iterator[LoadedBatch] | None = None
        self.failures: list[str] = []
        """Images that could not be read in the latest iteration, and why; always empty with `on_error="raise"`."""

    def __len__(self) -> int:
        return len(BatchIndices(self._segment, self._size))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels, _ in self.pixels():
            yield to_float(images), labels

    def start(self) -> None:
        """Start the loader processes, if there are any, for the iteration that comes next."""
        if self._workers and self._started is None:
            self._started = self._processes()

    def pixels(self) -> Iterator[PixelBatch]:
        """The batches with their segments of the order, and their images as uint8, less those that were left out.

        The images of a batch are valid until the next one is asked for.
        """
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
                yield PixelBatch(images, torch.tensor(labels, dtype=torch.int64), read)
                reset = False
        if self.failures:
            shown = "; ".join(self.failures[:3])
            log.warning("%d of %d images could not be read: %s", len(self.failures), len(self._segment), shown)

    def _load(self) -> Iterator[LoadedBatch]:
        if self._workers == 0:
            return map(self._loader.load, BatchIndices(self._segment, self._size))
        started, self._started = self._started, None
        return self._processes() if started is None else started

    def _processes(self) -> ProcessBatches:
        return ProcessBatches(self._loader, BatchIndices(self._segment, self._size), self._workers)


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
