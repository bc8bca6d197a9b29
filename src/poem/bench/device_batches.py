"""Batches on their way to the adapter: loaded ahead, and copied to a GPU while it still works on the batch before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from poem.engine.model_input import moved_input
from poem.streams.loading.batches import Batches
from poem.streams.loading.pixels import PixelBatch, to_float
from poem.streams.loading.read_ahead import DEPTH, ReadAhead
from poem.streams.orders import Segment
from poem.streams.stream import Stream


class ArrivedBatch(NamedTuple):
    """One batch of a loader or a stream, its images on the device."""

    images: Any
    """A tensor or a mapping of tensors; anything else is as the loader gave it, for the adapter to refuse."""
    labels: Any
    segment: Segment | None


_Received = ArrivedBatch | PixelBatch
"""A batch as the thread has it ready."""


class DeviceBatches:
    """Iterator over the batches of a stream, with their images on a device; values and order are the stream's.

    With a depth, a thread loads that many batches ahead. For a GPU it also puts their images into page-locked memory,
    and when a batch is returned, the next one is copied on a CUDA stream of its own, if it has been loaded. Batches of
    this package are copied to a GPU as uint8, a quarter of the bytes, and become floating point there.

    Args:
        stream: Batches that begin with images and labels.
        device: Where the images go.
        depth: Batches to load ahead; 0 loads each one when it is asked for.

    Raises:
        TypeError: When iterating, a batch without labels.
    """

    def __init__(self, stream: Iterable[Any], device: torch.device, depth: int) -> None:
        self._device = device
        self._copying = torch.cuda.Stream(device) if depth and device.type == "cuda" else None
        self._ahead = ReadAhead[_Received](as_pixels(stream), depth, convert=self._received)
        self._copied: tuple[ArrivedBatch, torch.cuda.Event] | None = None  # the batch that comes next

    def __iter__(self) -> Iterator[ArrivedBatch]:
        return self

    def __next__(self) -> ArrivedBatch:
        if self._copying is None:
            return self._moved(next(self._ahead))
        coming, (batch, done) = next(self._ahead), self._copied or (None, None)
        if batch is None or done is None:
            batch, done = self._copy(coming, self._copying)
        current = torch.cuda.current_stream(self._device)
        current.wait_event(done)
        for tensor in _tensors(batch.images):
            if tensor.is_cuda:
                tensor.record_stream(current)  # its memory is the copying stream's, and may go back to it only then
        following = self._ahead.peek()
        try:
            self._copied = None if following is None else self._copy(following, self._copying)
        except RuntimeError:  # out of memory: it is raised where that batch is asked for
            self._copied = None
        return batch

    def close(self) -> None:
        """End the thread that loads ahead, if there is one, and close the stream."""
        self._copied = None
        self._ahead.close()

    def _received(self, batch: Any) -> _Received:
        """A batch to keep until it is used, page-locked where it is copied ahead; the thread calls this."""
        pin = self._copying is not None
        if isinstance(batch, PixelBatch) and self._device.type == "cuda" and batch.images.dtype == torch.uint8:
            return batch._replace(images=_own_pinned(batch.images)) if pin else batch
        arrived = _split(batch)
        return _pinned(arrived) if pin else arrived

    def _copy(self, batch: _Received, copying: torch.cuda.Stream) -> tuple[ArrivedBatch, torch.cuda.Event]:
        with torch.cuda.stream(copying):
            return self._moved(batch), copying.record_event()

    def _moved(self, batch: _Received) -> ArrivedBatch:
        if isinstance(batch, PixelBatch):
            return ArrivedBatch(to_float(moved_input(batch.images, self._device)), batch.labels, batch.segment)
        if not isinstance(batch.images, Tensor | Mapping):
            return batch
        return batch._replace(images=moved_input(batch.images, self._device))


def as_pixels(stream: Iterable[Any]) -> Iterable[Any]:
    """The batches of a stream or of a data set of this package as pixels; any other iterable, or subclass, as it is."""
    return stream.pixels() if isinstance(stream, Stream | Batches) and type(stream) in (Stream, Batches) else stream


def depth_for(stream: Any, device: torch.device) -> int:
    """How many batches of a stream are loaded ahead by default: two for a GPU, none on a CPU.

    On a CPU loading and adapting share the cores. For a GPU, reading ahead must change nothing but time. That holds for
    streams and batches of this package, whose random numbers are keyed by image, and for a `DataLoader` with worker
    processes. A data set that a `DataLoader` reads in this process may draw from the global generators, as the model
    may, and other iterables may do anything: they are read batch by batch.
    """
    known = isinstance(stream, Stream | Batches) or (isinstance(stream, DataLoader) and stream.num_workers > 0)
    return DEPTH if known and device.type == "cuda" else 0


def _split(batch: Any) -> ArrivedBatch:
    """Images, labels and the segment of a batch of a loader or a stream; pixels as floating point."""
    if isinstance(batch, PixelBatch):
        return ArrivedBatch(to_float(batch.images), batch.labels, batch.segment)
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        return ArrivedBatch(batch[0], batch[1], getattr(batch, "segment", None))
    of = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
    raise TypeError(
        f"expected batches of (images, labels), got {type(batch).__name__}{of}; without labels use adapter.stream"
    )


def _pinned(batch: ArrivedBatch) -> ArrivedBatch:
    """A batch with its images in page-locked memory, from which a copy does not keep the host waiting."""
    images = batch.images
    if isinstance(images, Mapping):
        return batch._replace(images={name: _pin(value) for name, value in images.items()})
    return batch._replace(images=_pin(images))


def _own_pinned(pixels: Tensor) -> Tensor:
    """A copy of images whose memory will be used again: page-locked where that is possible."""
    pinned: Tensor = _pin(pixels)
    return pixels.clone() if pinned is pixels else pinned


def _pin(value: Any) -> Any:
    """A plain CPU tensor in page-locked memory; other values, and tensors that cannot be there, as they are."""
    if type(value) is not Tensor or value.device.type != "cpu" or value.requires_grad:
        return value
    try:
        return value.pin_memory()
    except RuntimeError:  # no page-locked memory left, or rows that share memory: the copy is slower, its values equal
        return value


def _tensors(images: Any) -> list[Tensor]:
    values = images.values() if isinstance(images, Mapping) else [images]
    return [each for each in values if isinstance(each, Tensor)]
