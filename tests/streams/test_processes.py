"""Batches of loader processes: the same values however they are handed over, and little that crosses."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import pickle
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from trees import Spoilt, picture, toy

from poem.streams.datasets import Tensors, batches, image_folder
from poem.streams.loading import processes
from poem.streams.loading.batches import Batches
from poem.streams.loading.load_batch import BatchIndices, LoadedBatch
from poem.streams.loading.pixels import fractions, looked_up, to_float
from poem.streams.loading.processes import InSlot, ProcessBatches, SharedSlots, _Tasks

pytestmark = pytest.mark.skipif(not processes.forks(), reason="processes are not forked here")

Found = list[tuple[Tensor, Tensor]]


def order(count: int = 90) -> list[int]:
    return [(7 * at) % 10 for at in range(count)]


def crossing(found: Batches) -> list[LoadedBatch]:
    """What the processes send, batch by batch."""
    running = found._processes()
    sent = []
    for at in range(len(found)):
        running._tasks.used = at
        sent.append(next(running._coming))
    return sent


def check_equal(one: Found, other: Found) -> None:
    assert len(one) == len(other) > 0
    for (images, labels), (others, numbers) in zip(one, other, strict=True):
        assert images.dtype == torch.float32
        assert torch.equal(images, others)
        assert torch.equal(labels, numbers)


@pytest.mark.parametrize("corruption", [None, ("glass_blur", 5)])
@pytest.mark.parametrize("workers", [1, 2])
def test_slots_that_are_used_again_change_no_batch(workers: int, corruption: Any) -> None:
    """Many more batches than slots, all of them kept, as in `list`."""
    plain = list(batches(toy(), order(), 2, corruption=corruption))
    found = batches(toy(), order(), 2, corruption=corruption, workers=workers)
    assert len(found) == 45 > 2 * (processes.AHEAD * workers + 1)
    check_equal(list(found), plain)
    check_equal(list(found), plain)


def test_a_shape_crosses_in_place_of_pixels() -> None:
    sent = crossing(batches(toy(size=64), order(), 8, workers=2))
    assert [each.images for each in sent[:6]] == [InSlot(at % 5, (8, 3, 64, 64)) for at in range(6)]
    assert sent[-1].images == InSlot(11 % 5, (2, 3, 64, 64))
    assert max(len(pickle.dumps(each)) for each in sent) < 400, "the pixels of a batch are 98,304 bytes"
    assert not any(isinstance(part, Tensor) for each in sent for part in each)


def test_a_slot_is_given_away_only_when_its_batch_is_used() -> None:
    """Whatever the loader asks for ahead: a batch without a slot is handed over as a tensor."""
    segment = batches(toy(), order(), 10)._segment
    tasks = _Tasks(BatchIndices(segment, 10), 3)
    asked = iter(tasks)
    assert [next(asked).slot for _ in range(4)] == [0, 1, 2, None]
    tasks.used = 2
    assert [next(asked).slot for _ in range(3)] == [1, None, None]
    assert len(tasks) == 9
    assert next(iter(_Tasks(BatchIndices(segment, 10), 0))).slot is None


def test_batches_without_a_slot_have_the_same_values(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = list(batches(toy(), order(), 4))

    def found() -> Batches:
        return batches(toy(), order(), 4, workers=2)

    with monkeypatch.context() as small:
        small.setattr(processes, "SLOT_SIDE", 16)
        assert all(isinstance(each.images, Tensor) for each in crossing(found()))
        check_equal(list(found()), plain)
    with monkeypatch.context() as spawned:
        spawned.setattr(processes, "forks", lambda: False)
        assert all(isinstance(each.images, Tensor) for each in crossing(found()))
        check_equal(list(found()), plain)

    def refused(*_: Any) -> mmap.mmap:
        raise OSError("Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", refused)
    check_equal(list(found()), plain)


def test_sizes_may_differ_between_batches(tmp_path: Path) -> None:
    for at, size in enumerate([(8, 8), (640, 520), (31, 17), (700, 9)] * 3):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / f"{at:02d}.jpg").write_bytes(picture(20 * at, size))
    data = image_folder(tmp_path)
    kinds = {type(each.images) for each in crossing(batches(data, range(12), 1, workers=2))}
    assert kinds == {InSlot, Tensor}, "640 x 520 is more than a slot holds"
    check_equal(list(batches(data, range(12), 1, workers=2)), list(batches(data, range(12), 1)))


def test_images_that_are_no_uint8_are_read_as_before() -> None:
    class Floats(Tensors):
        def _read(self, index: int) -> Tensor:
            return self.images[index].float() + 0.25

    data = Floats(torch.randint(256, (10, 3, 8, 8), dtype=torch.uint8), list(range(10)))
    plain = list(batches(data, range(10), 4))
    assert torch.equal(plain[0][0], (data.images[:4].float() + 0.25) / 255)
    check_equal(list(batches(data, range(10), 4, workers=2)), plain)


@pytest.mark.parametrize("workers", [0, 2])
def test_pixels_are_the_stored_levels(workers: int) -> None:
    data = Spoilt(torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8), list(range(8)))
    found = batches(data, range(8), 4, workers=workers, on_error="report")
    for images, labels, segment in found.pixels():
        assert images.dtype == torch.uint8
        assert torch.equal(images, data.images[labels])
        assert segment.indices.tolist() == labels.tolist()
    assert len(found.failures) == 2


def test_a_level_is_the_same_number_by_division_and_by_table() -> None:
    levels = np.arange(256, dtype=np.uint8)
    assert fractions().numpy().tobytes() == (levels.astype(np.float32) / np.float32(255)).tobytes()
    shapes = torch.randint(256, (5, 3, 9, 7), dtype=torch.uint8)
    for pixels in (shapes, shapes.to(memory_format=torch.channels_last), shapes[1:, :, ::2], shapes[:0]):
        assert torch.equal(looked_up(pixels, fractions()), to_float(pixels))
        assert looked_up(pixels, fractions()).is_contiguous()
    inverse = fractions() != torch.arange(256.0) * (torch.tensor(1.0) / 255)
    assert inverse.any(), "multiplying by the inverse, as CUDA does for a number, has other bits"


class Dying(Tensors):
    """Ends the process that reads its sixth image."""

    def _read(self, index: int) -> Tensor:
        if index == 5 and multiprocessing.parent_process() is not None:
            os._exit(3)
        if index == 7:
            raise RuntimeError("no such row")
        return super()._read(index)


def test_a_process_that_dies_or_raises_is_an_error_in_its_place() -> None:
    data = Dying(toy().images, list(range(10)))
    dying = iter(batches(data, [0, 1, 2, 3, 4, 5], 2, workers=1))
    assert next(dying)[1].tolist() == [0, 1]
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        list(dying)
    raising = iter(batches(data, [0, 1, 2, 3, 6, 7], 2, workers=2))
    assert [next(raising)[1].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(RuntimeError, match="no such row"):
        next(raising)
    del dying, raising
    gc.collect()
    assert multiprocessing.active_children() == []


def test_memory_and_processes_end_with_the_iterator() -> None:
    found = batches(toy(), order(), 2, workers=1)
    running = found.pixels()
    images = next(running).images
    assert images._base is not None
    slots = weakref.ref(next(each for each in gc.get_objects() if isinstance(each, SharedSlots)))
    assert slots() is not None
    running.close()  # type: ignore[attr-defined]
    del running
    gc.collect()
    assert slots() is None
    assert multiprocessing.active_children() == []
    assert torch.equal(images, toy().images[order()[:2]]), "a view that is kept keeps its memory"


def test_a_batch_without_readable_images_crosses_too() -> None:
    data = Spoilt(torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8), list(range(8)))
    found = batches(data, [0], 1)
    (loaded,) = ProcessBatches(found._loader, BatchIndices(found._segment, 1), 1)
    assert (loaded.images, loaded.labels, loaded.positions) == (None, [], [])
    assert len(loaded.failures) == 1
