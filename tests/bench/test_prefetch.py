"""Runs that load ahead answer as runs that do not, batch for batch and bit for bit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from nets import make_net
from served import until
from small_cells import add_base, cell
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from trees import toy

import poem
from poem.bench import device_batches, load_cell, run_stream
from poem.bench.device_batches import DeviceBatches, depth_for
from poem.bench.load_cell import CellData, Machine
from poem.bench.run_stream import Delay, StreamRun
from poem.streams.loading.batches import batches
from poem.streams.loading.read_ahead import DEPTH, THREAD
from poem.streams.orders import continual
from poem.streams.stream import Stream

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DEPTHS = [1, 2, 5]


def stream(workers: int = 0) -> Stream:
    order = continual(["gaussian_noise", "glass_blur"], seed=3)
    return Stream(data=toy(n=24), order=order, batch_size=4, workers=workers)


def threads() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name == THREAD]


def answered(
    source: Iterable[Any], prefetch: int, *, guard: bool = False, delay: Delay | None = None
) -> tuple[list[Any], StreamRun]:
    """Logits, labels, shifts and counts of every batch."""
    adapter = poem.adapt(make_net("bn", sharpness=40.0), "poem", lr=0.05)
    run = StreamRun(poem.guard(adapter) if guard else adapter, delay=delay, prefetch=prefetch)
    found = []
    for each in run.answers(source):
        shifts = None if each.segment is None else [str(shift) for shift in each.segment.shifts]
        counts = None if each.entry is None else (each.entry.forwards_computed, each.entry.backwards_computed)
        found.append((each.logits, each.labels, shifts, counts))
    return found, run


def check_equal(one: list[Any], other: list[Any]) -> None:
    assert len(one) == len(other) > 0
    for first, second in zip(one, other, strict=True):
        assert torch.equal(first[0], second[0])
        assert torch.equal(first[1], second[1])
        assert first[2:] == second[2:]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("guard", [False, True])
def test_answers_do_not_depend_on_the_depth(guard: bool, workers: int) -> None:
    plain, run = answered(stream(), 0, guard=guard)
    assert run.totals["backwards"] > 0
    for depth in DEPTHS[: 1 if workers else None]:
        ahead, other = answered(stream(workers), depth, guard=guard)
        check_equal(plain, ahead)
        assert other.totals == run.totals
    assert threads() == []


def test_the_delay_protocol_misses_the_same_batches() -> None:
    delays = [Delay(1.0), Delay(1.0)]
    plain, _ = answered(stream(), 0, delay=delays[0])
    ahead, _ = answered(stream(), 2, delay=delays[1])
    check_equal(plain, ahead)
    assert None in [each[3] for each in plain], "some were missed"
    assert delays[0].ratios == delays[1].ratios


def test_a_clock_that_is_part_of_the_protocol_is_read_synchronised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise nothing waits for the device but the answers themselves."""
    calls = list[Any]()
    monkeypatch.setattr(run_stream, "_synchronise", calls.append)
    answered(stream(), 0)
    answered(stream(), 0, delay=Delay(1.0))
    assert calls == []
    _, run = answered(stream(), 0, delay=Delay(0.0, "measured"))
    assert len(calls) > 12
    monkeypatch.setattr(device_batches, "depth_for", lambda *_: DEPTH)
    run.prefetch = None
    assert run._depth(stream()) == 0, "loading beside a call would be measured with it"


@pytest.mark.parametrize("depth", [0, 2])
def test_seconds_are_of_waiting_and_of_the_adapter(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that goes on by 1 for a batch that is made, and by 10 for one that is answered."""
    counts = {"made": 0, "answering": 0, "answered": 0}

    def slow() -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in batches(toy(), range(10), 2):
            until(lambda: counts["answering"] >= counts["made"])  # a thread makes it while the one before is answered
            counts["made"] += 1
            yield images, labels

    class Slow:
        """An adapter that answers once the next batch is there, where it is read ahead."""

        def __init__(self) -> None:
            self.adapter = poem.adapt(make_net("bn"), "source")

        def __getattr__(self, name: str) -> Any:
            return getattr(self.adapter, name)

        def __call__(self, images: Tensor) -> Tensor:
            counts["answering"] += 1
            if depth:
                until(lambda: counts["made"] == min(5, counts["answering"] + 1))
            counts["answered"] += 1
            return self.adapter(images)

    clock = SimpleNamespace(perf_counter=lambda: counts["made"] + 10 * counts["answered"])
    monkeypatch.setattr(run_stream, "time", clock)
    run = StreamRun(Slow(), prefetch=depth)  # type: ignore[arg-type]
    assert len(list(run.answers(slow()))) == 5
    made_meanwhile = 4 if depth else 0
    assert run.load_seconds == 5 - made_meanwhile, "where it is read ahead, the first batch alone is waited for"
    assert run.adapt_seconds == 5 * 10 + made_meanwhile


@pytest.mark.parametrize("depth", [0, *DEPTHS])
def test_an_error_comes_after_the_answers_before_it(depth: int) -> None:
    def broken() -> Iterator[Any]:
        yield from list(batches(toy(), range(8), 4))
        raise OSError("disk")

    def without_labels() -> Iterator[Any]:
        yield from list(batches(toy(), range(8), 4))
        yield torch.zeros(4, 3, 16, 16)

    for source, kind in ((broken(), OSError), (without_labels(), TypeError)):
        run = StreamRun(poem.adapt(make_net("bn"), "tent"), prefetch=depth)
        found = run.answers(source)
        assert [len(next(found).labels), len(next(found).labels)] == [4, 4]
        assert run.adapter.totals.batches == 2
        with pytest.raises(kind, match=r"disk|expected batches of"):
            next(found)
        assert threads() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_stops_early_leaves_no_thread(workers: int) -> None:
    run = StreamRun(poem.adapt(make_net("bn"), "tent"), prefetch=2)
    found = run.answers(stream(workers))
    next(found)
    assert threads() == [THREAD]
    found.close()  # type: ignore[attr-defined]
    assert threads() == []


@pytest.mark.parametrize("where", ["adapter", "consumer"])
def test_a_keyboard_interrupt_leaves_no_thread(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run = StreamRun(poem.adapt(make_net("bn"), "tent"), prefetch=2)
    found = run.answers(stream())
    next(found)

    def interrupted(*_: Any) -> Tensor:
        raise KeyboardInterrupt

    if where == "adapter":
        monkeypatch.setattr(run, "_adapted", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(found)
    else:
        with pytest.raises(KeyboardInterrupt):
            found.throw(KeyboardInterrupt())  # type: ignore[attr-defined]
    assert threads() == []


def test_mappings_and_strange_batches_arrive_as_they_are() -> None:
    named = {"pixel_values": torch.rand(2, 3, 8, 8), "name": "x"}
    source = [(named, [0, 1]), ("words", [0]), (torch.ones(1), torch.zeros(1), "more")]
    for depth in (0, 2):
        found = list(DeviceBatches(source, CPU, depth))
        assert found[0].images["pixel_values"] is named["pixel_values"]
        assert found[0].images["name"] == "x"
        assert found[1].images == "words"
        assert [each.labels for each in found[:2]] == [[0, 1], [0]]


def test_what_is_read_ahead_by_default() -> None:
    """Only what is known not to depend on when it is read, and only for a GPU."""
    data = TensorDataset(torch.rand(4, 3, 8, 8), torch.zeros(4).long())
    known = [stream(), batches(toy(), range(4), 2), DataLoader(data, 2, num_workers=1)]
    others: list[Any] = [DataLoader(data, 2), [], iter(()), (each for each in list[Any]())]
    assert [depth_for(each, CUDA) for each in known] == [DEPTH] * 3
    assert [depth_for(each, CUDA) for each in others] == [0] * 4
    assert [depth_for(each, CPU) for each in known] == [0] * 3


def test_evaluate_reads_ahead_what_it_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods that are compared see generators; the table is the same, and later methods are held to the first."""
    plain = poem.evaluate(make_net("bn"), stream(), ["source", "tent"])
    asked: list[Any] = []

    def ahead(source: Any, device: torch.device) -> int:
        asked.append(source)
        return 3

    monkeypatch.setattr("poem.bench.evaluate.depth_for", ahead)
    given = stream()
    table = poem.evaluate(make_net("bn"), given, ["source", "tent"])
    assert asked == [given, given]
    assert [(row.accuracy, row.nll, row.n) for row in table.rows] == [
        (row.accuracy, row.nll, row.n) for row in plain.rows
    ]
    shuffled = DataLoader(TensorDataset(torch.rand(40, 3, 16, 16), torch.arange(40) % 5), 4, shuffle=True)
    with pytest.raises(ValueError, match="expected the same batches for every method"):
        poem.evaluate(make_net("bn"), shuffled, ["source", "tent"])
    assert threads() == []


def test_loader_processes_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    add_base(monkeypatch, "large", side=224)
    add_base(monkeypatch, "huge", side=768)
    monkeypatch.setattr(load_cell, "available_cores", lambda: 24)
    monkeypatch.setattr(load_cell, "forks", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)

    def found(base: str = "large", free: int = 64 << 30, memory: int = 64 << 30, **machine: Any) -> int:
        monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free))
        monkeypatch.setattr(load_cell, "memory", lambda: memory)
        return CellData(cell(base=base, batch_size=64), poem.zoo.base(base), Machine(**machine)).workers

    assert found(device="cuda:0") == 12
    assert found(device="cuda:0", workers=3) == 3
    assert found(device="cuda:0", workers=0) == 0
    assert found(device="cpu") == 0
    assert found("digits-bn", device="cuda:0") == 0
    assert found(device="cuda:0", free=64 << 20) == 12, "a container's 64 MiB of /dev/shm are not used"
    assert found(device="cuda:0", memory=1 << 30) == 2, "a quarter of the memory, for two GPUs"
    assert found("huge", device="cuda:0") == 12
    assert found("huge", device="cuda:0", free=2 << 30) == 1, "batches that fit no slot are handed over there"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert found(device="cuda:0") == load_cell.MOST_LOADERS
    monkeypatch.setattr(load_cell, "forks", lambda: False)
    assert found(device="cuda:0") == 0


class Device:
    """Stands in for `torch.cuda`: records what is called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def Stream(self, device: torch.device) -> Device:  # noqa: N802 - torch's name
        return self

    def current_stream(self, device: torch.device) -> Device:
        return self

    @contextmanager
    def stream(self, which: Device) -> Iterator[None]:
        yield

    def record_event(self) -> str:
        return self.calls[-1].replace("copy", "wait")

    def wait_event(self, event: str) -> None:
        self.calls.append(event)


@pytest.mark.parametrize("depth", [2, 5])
def test_the_next_batch_is_copied_before_this_one_is_used(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Device()

    def moved(images: Tensor, device: torch.device) -> Tensor:
        cuda.calls.append(f"copy {int(images[0])}")
        return images

    monkeypatch.setattr(torch, "cuda", cuda)
    monkeypatch.setattr(device_batches, "moved_input", moved)
    monkeypatch.setattr(device_batches, "_pin", lambda value: value)
    found = DeviceBatches([(torch.tensor([at]), torch.tensor([at])) for at in range(4)], CUDA, depth)
    order = []
    for batch in found:
        order.append(int(batch.images[0]))
        cuda.calls.append(f"use {order[-1]}")
        while len(found._ahead._reader._ready) < min(2, 3 - order[-1]):  # until the thread has the next ones ready
            time.sleep(0.001)
    assert order == [0, 1, 2, 3]
    later = [call for call in cuda.calls if call not in ("copy 0", "wait 0", "use 0", "copy 1")]
    assert later == ["wait 1", "copy 2", "use 1", "wait 2", "copy 3", "use 2", "wait 3", "use 3"]


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("depth", [0, 1, 5])
def test_pixels_are_copied_to_a_gpu(depth: int, workers: int, pinned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the bytes, in memory that no later batch is written to before the copy, and the same numbers."""
    plain, copied = list(stream()), list[torch.dtype]()

    def moved(images: Tensor, device: torch.device) -> Tensor:
        copied.append(images.dtype)
        cuda.calls.append("copy")
        return images.clone()

    cuda = Device()
    for name in ("Stream", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(cuda, name))
    monkeypatch.setattr(device_batches, "moved_input", moved)
    monkeypatch.setattr(device_batches, "_pin", Tensor.clone if pinned else lambda value: value)
    found = list(DeviceBatches(stream(workers), CUDA, depth))
    assert copied == [torch.uint8] * len(plain)
    assert len(found) == len(plain) == 12
    for one, other in zip(plain, found, strict=True):
        assert other.images.dtype == torch.float32
        assert torch.equal(one.images, other.images)
        assert torch.equal(one.labels, other.labels)
        assert other.segment is not None
        assert other.segment.shifts == one.segment.shifts


def test_only_streams_of_this_package_are_read_as_pixels() -> None:
    """A subclass may do more in `__iter__`, and uint8 images of another loader are for the adapter to refuse."""

    class Doubled(Stream):
        def __iter__(self) -> Iterator[Any]:
            for images, labels, segment in super().__iter__():
                yield images / 2, labels, segment

    order = continual(["fog"], seed=3)
    (plain,) = DeviceBatches(Stream(data=toy(n=4), order=order, batch_size=4), CPU, 0)
    (halved,) = DeviceBatches(Doubled(data=toy(n=4), order=order, batch_size=4), CPU, 2)
    assert torch.equal(halved.images, plain.images / 2)
    levels = torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8)
    for depth in (0, 2):
        (found,) = DeviceBatches([(levels, [0, 1])], CPU, depth)
        assert found.images is levels


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("depth", [0, *DEPTHS])
def test_on_a_gpu_the_images_are_those_of_the_stream(depth: int, workers: int) -> None:
    plain = list(stream())
    found = []
    for each in DeviceBatches(stream(workers), CUDA, depth):
        torch.cuda._sleep(10_000_000)
        found.append(each.images * 1)
        del each
    assert len(plain) == len(found)
    assert all(torch.equal(one.images, other.cpu()) for one, other in zip(plain, found, strict=True))
