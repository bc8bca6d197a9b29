"""Batches that other processes load, handed over in memory that all of them map.

Where processes are forked, memory for the batches under way is mapped before, a slot for each, and used again and
again: a process stacks its images in a slot, and what crosses is the shape and the labels. Torch's own way to hand over
a tensor costs more than decoding some images does: new shared memory for every batch, which the system clears page by
page, and whose descriptor is fetched through a socket, while the process that decodes may hold Python's lock. That way
is left for batches that do not fit a slot, and for processes that are not forked.
"""

from __future__ import annotations

import logging
import mmap
import multiprocessing
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from poem.streams.loading.load_batch import BatchIndices, BatchLoader, LoadedBatch

log = logging.getLogger("poem")

AHEAD = 2
"""Batches that each process has begun or waits to begin."""
SLOT_SIDE = 512
"""Side in pixels of the images that a slot has room for. Memory is taken only for what is written."""


class Task(NamedTuple):
    """What a process is asked for: (source, index) pairs, and the slot that is free for them, if one is."""

    images: list[tuple[int, int]]
    slot: int | None


class InSlot(NamedTuple):
    """What crosses in place of images that are in a slot."""

    slot: int
    shape: tuple[int, ...]


class SharedSlots:
    """Memory of this process and of those that it forks after, in slots of equal size.

    Raises:
        OSError: The system does not grant as much address space.
    """

    def __init__(self, count: int, size: int) -> None:
        self.count, self._size = count, size
        self._bytes = torch.from_numpy(np.frombuffer(mmap.mmap(-1, count * size), np.uint8))

    def room(self, slot: int) -> Tensor:
        """The bytes of a slot."""
        return self._bytes[slot * self._size : (slot + 1) * self._size]

    def images(self, found: InSlot) -> Tensor:
        """The images in a slot, without a copy."""
        return self.room(found.slot)[: int(np.prod(found.shape))].view(found.shape)


class ProcessBatches:
    """Iterator over the batches that processes load, in order; they start with it, and end with its last reference.

    The images of a batch are valid until the next one is asked for.

    Args:
        loader: Loads one batch.
        tasks: The (source, index) pairs of every batch.
        workers: How many processes.
    """

    def __init__(self, loader: BatchLoader, tasks: BatchIndices, workers: int) -> None:
        from torch.utils.data import DataLoader

        self._slots = _slots(min(AHEAD * workers + 1, len(tasks)), min(tasks.size, len(tasks.segment)))
        self._tasks = _Tasks(tasks, 0 if self._slots is None else self._slots.count)
        self._coming: Iterator[Any] = iter(
            DataLoader(
                _SlotLoader(loader, self._slots),  # type: ignore[arg-type]  # it has __getitems__ alone
                batch_sampler=self._tasks,  # type: ignore[arg-type]  # it yields tasks, not lists
                num_workers=workers,
                prefetch_factor=AHEAD,
                collate_fn=_identity,
                generator=torch.Generator(),  # otherwise the loader draws its workers' seed from the global generator
            )
        )
        self._given = 0

    def __iter__(self) -> ProcessBatches:
        return self

    def __next__(self) -> LoadedBatch:
        self._tasks.used = self._given  # whoever asks for a batch is done with those before
        loaded: LoadedBatch = next(self._coming)
        self._given += 1
        if isinstance(loaded.images, InSlot) and self._slots is not None:
            return loaded._replace(images=self._slots.images(loaded.images))
        return loaded


class _Tasks:
    """A batch sampler that gives each batch a slot, once the batch that had it before is used."""

    def __init__(self, tasks: BatchIndices, slots: int) -> None:
        self._tasks, self._slots = tasks, slots
        self.used = 0  # batches that the consumer is done with

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[Task]:
        for number, images in enumerate(self._tasks):
            yield Task(images, number % self._slots if number < self.used + self._slots else None)


class _SlotLoader:
    """What a process runs: a batch is loaded into its slot, and the slot's number and shape stand for its images."""

    def __init__(self, loader: BatchLoader, slots: SharedSlots | None) -> None:
        self._loader, self._slots = loader, slots

    def __len__(self) -> int:
        return sum(map(len, self._loader.sources))

    def __getitems__(self, task: Task) -> Any:
        if task.slot is None or self._slots is None:
            return self._loader.load(task.images)
        room = self._slots.room(task.slot)
        loaded = self._loader.load(task.images, room)
        if loaded.images is None or loaded.images.data_ptr() != room.data_ptr():
            return loaded
        return loaded._replace(images=InSlot(task.slot, tuple(loaded.images.shape)))  # type: ignore[arg-type]


def forks() -> bool:
    """Whether processes are forked, so that they start at once and any data set can be handed to them."""
    known = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    return known == "fork"


def _slots(count: int, images: int) -> SharedSlots | None:
    """Slots for batches of so many images, or None where processes cannot have them."""
    if not count or not forks():
        return None
    try:
        return SharedSlots(count, images * 3 * SLOT_SIDE**2)
    except OSError as error:
        log.warning("no address space for batches of %d images: %s; they are handed over one by one", images, error)
        return None


def _identity(batch: Any) -> Any:
    return batch
