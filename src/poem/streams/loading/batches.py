"""From indices to tensors: images are decoded when their batch comes, by this process or by workers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from poem.streams.images import Images, Unreadable
from poem.streams.orders import Segment
from poem.streams.orders.within_domain import Indices
from poem.streams.shift import CLEAN, Shift

log = logging.getLogger("poem")

OnError = Literal["raise", "report"]


class Fetched(NamedTuple):
    """One batch as a worker hands it over."""

    images: Tensor | None
    labels: Tensor
    failures: list[str]
    places: list[int]
    """Positions in the batch of the images that were read."""


class Fetch:
    """Reads and corrupts one batch; picklable, so that it can do so in a worker."""

    def __init__(self, sources: Sequence[Images], make: Sequence[Shift], seed: int, profile: str | None) -> None:
        self.sources, self.make, self.seed, self.profile = list(sources), list(make), seed, profile

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def __getitems__(self, batch: list[tuple[int, int]]) -> Fetched:
        """Images (uint8) and labels of (source, index) pairs, and the names of those that do not decode."""
        images, labels, kept, failures, places = [], [], [], [], []
        for place, (which, index) in enumerate(batch):
            try:
                images.append(self.sources[which][index])
            except Unreadable as error:
                failures.append(str(error))
                continue
            labels.append(int(self.sources[which].labels[index]))
            kept.append((which, index))
            places.append(place)
        sizes = sorted({f"{image.shape[2]}x{image.shape[1]}" for image in images})
        if len(sizes) > 1:
            raise ValueError(
                f"expected images of one size in a batch, got {', '.join(sizes[:5])}; pass prepare=Prepare(...)"
            )
        stacked = self._corrupted(torch.stack(images), kept) if images else None
        return Fetched(stacked, torch.tensor(labels, dtype=torch.int64), failures, places)

    def _corrupted(self, images: Tensor, kept: list[tuple[int, int]]) -> Tensor:
        which = torch.tensor([each for each, _ in kept])
        ids = [index for _, index in kept]
        for number, shift in enumerate(self.make):
            rows = (which == number).nonzero().flatten()
            if shift != CLEAN and len(rows):
                from poem.streams.corruptions import corrupt

                names = [ids[row] for row in rows.tolist()]
                images[rows] = corrupt(
                    images[rows], shift.corruption, shift.severity, seed=self.seed, ids=names, profile=self.profile
                )
        return images


class Batches:
    """Batches of (images, labels): float32 in [0, 1] (B, 3, H, W) and int64 (B,). Made by `batches`."""

    def __init__(self, fetch: Fetch, segment: Segment, size: int, workers: int, on_error: OnError) -> None:
        self._fetch, self._segment, self._size, self._workers = fetch, segment, size, workers
        self._on_error = on_error
        self.failures: list[str] = []
        """Images that could not be read in the latest pass, and why; always empty with `on_error="raise"`."""

    def __len__(self) -> int:
        return -(-len(self._segment) // self._size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels, _ in self.pieces():
            yield images, labels

    def pieces(self) -> Iterator[tuple[Tensor, Tensor, Segment]]:
        """The same, with the stretch of the order that each batch is."""
        self.failures = []
        reset = False  # of a batch that could not be read at all; the next one that can begins afresh instead
        for fetched, piece in zip(self._fetched(), self._segment.cut(self._size), strict=True):
            images, labels, failures, places = fetched
            reset = reset or piece.reset
            if failures and self._on_error == "raise":
                more = f" ({len(failures)} in this batch)" if len(failures) > 1 else ""
                raise Unreadable(f"{failures[0]}{more}; on_error='report' leaves such images out and counts them")
            self.failures += failures
            if images is not None:
                seen = Segment(piece.shifts, piece.indices[places], reset, piece.which[places])
                yield images.float().div_(255), labels, seen
                reset = False
        if self.failures:
            shown = "; ".join(self.failures[:3])
            log.warning("%d of %d images could not be read: %s", len(self.failures), len(self._segment), shown)

    def _fetched(self) -> Iterator[Fetched]:
        cuts = _Cuts(self._segment, self._size)
        if self._workers == 0:
            yield from map(self._fetch.__getitems__, cuts)
            return
        from torch.utils.data import DataLoader

        loader: Any = DataLoader(
            self._fetch,  # type: ignore[arg-type]  # it fetches whole batches
            batch_sampler=cuts,
            num_workers=self._workers,
            collate_fn=_as_it_is,
            generator=torch.Generator(),  # a loader seeds its workers, from the global generator unless given one
        )
        yield from loader


class _Cuts:
    """A segment as lists of (source, index), batch by batch."""

    def __init__(self, segment: Segment, size: int) -> None:
        self.segment, self.size = segment, size

    def __len__(self) -> int:
        return -(-len(self.segment) // self.size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for piece in self.segment.cut(self.size):
            yield list(zip(piece.which.tolist(), piece.indices.tolist(), strict=True))


def _as_it_is(batch: Any) -> Any:
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
    """Images and labels in an order, batch by batch; the last batch is as short as it must be.

    Args:
        data: A data set.
        order: Indices, or a segment of an order (whose shift is *not* applied unless named in `corruption`).
        batch_size: Images per batch.
        corruption: A shift to make on the fly, such as `("fog", 5)`; an image's result depends on (seed, index) alone.
        seed: Seed of the corruption's chance.
        profile: Constants of the corruption; by default by image size.
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
    return checked(Fetch([data], [to_make(data, shift)], seed, profile), segment, batch_size, workers, on_error)


def checked(fetch: Fetch, segment: Segment, size: int, workers: int, on_error: OnError) -> Batches:
    """Batches of a segment, after a check of size and workers."""
    if size < 1 or workers < 0:
        raise ValueError(f"expected batch_size >= 1 and workers >= 0, got {size} and {workers}")
    if on_error not in ("raise", "report"):
        raise ValueError(f"expected on_error 'raise' or 'report', got {on_error!r}")
    return Batches(fetch, segment, size, workers, on_error)


def to_make(data: Images, shift: Shift, *, stated: bool = False) -> Shift:
    """The shift to make on the fly so that `data` becomes `shift`; corrupted data is not corrupted again."""
    about = data.describe()
    has = Shift(about["corruption"], about["severity"])
    if has == CLEAN:
        return shift
    if shift != has and (stated or shift != CLEAN):
        raise ValueError(f"expected clean data, or data that is {shift}; {about['data']} here is {has} already")
    return CLEAN
