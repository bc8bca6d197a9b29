"""Reading ahead changes nothing but time: same items, same order, errors where they belong, no thread left behind."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from trees import toy

from poem.streams.loading import read_ahead
from poem.streams.loading.read_ahead import THREAD, ReadAhead
from poem.streams.orders import continual
from poem.streams.stream import Stream, StreamBatch

DEPTHS = [0, 1, 2, 7]


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == THREAD]


def settled(count: int = 0, seconds: float = 5.0) -> bool:
    """Whether that many threads are left, at the latest after some seconds."""
    end = time.monotonic() + seconds
    while len(threads()) > count and time.monotonic() < end:
        time.sleep(0.01)
    return len(threads()) == count


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert settled()


class Counting:
    """Numbers, and how many were asked for."""

    def __init__(self, count: int, fails_at: int | None = None) -> None:
        self.count, self.fails_at, self.read, self.closed = count, fails_at, 0, False

    def __iter__(self) -> Iterator[int]:
        try:
            for number in range(self.count):
                self.read += 1
                if number == self.fails_at:
                    raise OSError(f"number {number}")
                yield number
        finally:
            self.closed = True


def corrupted(workers: int) -> Stream:
    order = continual(["gaussian_noise", "glass_blur"], seed=3)
    return Stream(data=toy(), order=order, batch_size=4, workers=workers)


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("count", [0, 1, 2, 3, 20])
def test_the_items_are_those_of_the_source_in_order(depth: int, count: int) -> None:
    source = Counting(count)
    assert list(ReadAhead[Any](source, depth)) == list(range(count))
    assert source.closed
    assert list(ReadAhead([5, 6], depth, convert=str)) == ["5", "6"]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_corrupted_stream_has_the_same_bits(depth: int, workers: int) -> None:
    def same(one: StreamBatch, other: StreamBatch) -> bool:
        tensors = torch.equal(one.images, other.images) and torch.equal(one.labels, other.labels)
        segments = one.segment.shifts == other.segment.shifts and one.segment.reset == other.segment.reset
        return tensors and segments and one.segment.indices.tolist() == other.segment.indices.tolist()

    plain = list(corrupted(0))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    ahead = list(ReadAhead[Any](corrupted(workers), depth))
    assert torch.equal(torch.get_rng_state(), before)
    assert len(plain) == len(ahead) == 6
    assert all(same(*pair) for pair in zip(plain, ahead, strict=True))


def test_a_loader_with_processes_is_shuffled_as_without() -> None:
    def labels(depth: int) -> list[int]:
        torch.manual_seed(7)
        loader = DataLoader(TensorDataset(torch.arange(20)), 3, shuffle=True, num_workers=2)
        return torch.cat([batch[0] for batch in ReadAhead[Any](loader, depth)]).tolist()

    assert labels(2) == labels(0) != list(range(20))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("at", [0, 1, 3])
def test_an_error_comes_where_its_item_would_have(depth: int, at: int) -> None:
    found: list[Any] = []
    ahead = ReadAhead[Any](Counting(9, fails_at=at), depth)
    with pytest.raises(OSError, match=f"number {at}"):
        found.extend(iter_into(ahead, found))
    assert found == list(range(at))
    assert list(ahead) == [], "an iterator that has raised is over"


def iter_into(items: Iterator[int], found: list[int]) -> list[int]:
    for each in items:
        found.append(each)
        time.sleep(0.005)  # the thread meets the error while earlier items are still used
    return []


def test_an_error_of_the_conversion_too() -> None:
    def convert(number: int) -> int:
        return number if number < 2 else 1 // 0

    ahead = ReadAhead(range(5), 4, convert=convert)
    assert [next(ahead), next(ahead)] == [0, 1]
    with pytest.raises(ZeroDivisionError):
        next(ahead)


@pytest.mark.parametrize("depth", [0, 1, 2, 5])
def test_never_more_than_depth_items_are_ahead(depth: int) -> None:
    source, taken = Counting(30), 0
    with ReadAhead[Any](source, depth) as ahead:
        for _ in ahead:
            taken += 1
            time.sleep(0.01)
            assert source.read <= taken + depth
            if taken == 10:
                end = time.monotonic() + 10
                while source.read < taken + depth and time.monotonic() < end:
                    time.sleep(0.01)
                assert source.read == taken + depth, "and as many where there is time"
                ahead.peek()
                time.sleep(0.05)
                assert source.read == taken + depth, "an item that was looked at is still ahead"


def test_items_that_were_used_are_not_kept() -> None:
    """Of a hundred batches no more than those ahead and the one in use are alive."""
    alive, most = 0, 0

    class Item:
        def __init__(self) -> None:
            nonlocal alive, most
            alive += 1
            most = max(most, alive)

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    for _ in ReadAhead((Item() for _ in range(100)), 2):
        pass
    assert most <= 2 + 2, "two ahead, the one in use, and the one that the loop variable is being replaced by"
    gc.collect()
    assert alive <= 1


def test_the_next_item_can_be_looked_at() -> None:
    ahead = ReadAhead[Any]([1, 2, 3])
    assert ahead.peek() is None
    assert next(ahead) == 1
    while ahead.peek() is None:
        time.sleep(0.001)
    assert ahead.peek() == 2 == ahead.peek()
    assert list(ahead) == [2, 3]
    assert ahead.peek() is None


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("taken", [0, 1, 4])
def test_a_consumer_that_stops_ends_the_thread_and_the_source(depth: int, taken: int) -> None:
    source = Counting(1000)
    ahead = ReadAhead[Any](source, depth)
    for _ in range(taken):
        next(ahead)
    ahead.close()
    ahead.close()
    assert threads() == []
    assert source.closed or not taken
    assert list(ahead) == []
    assert source.read <= taken + depth


def test_worker_processes_end_with_a_consumer_that_stops() -> None:
    import multiprocessing

    with ReadAhead[Any](corrupted(2), 2) as ahead:
        next(ahead)
        assert multiprocessing.active_children()
    assert threads() == []
    assert multiprocessing.active_children() == []


def test_a_forgotten_iterator_ends_its_thread() -> None:
    ahead = ReadAhead[Any](Counting(1000))
    next(ahead)
    assert len(threads()) == 1
    del ahead
    gc.collect()
    assert settled()


def test_closing_does_not_wait_forever(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(read_ahead, "CLOSE_SECONDS", 0.05)
    free, reached = threading.Event(), threading.Event()

    def blocked() -> Iterator[int]:
        yield 0
        reached.set()
        free.wait()
        yield 1

    ahead = ReadAhead[Any](blocked())
    assert next(ahead) == 0
    assert reached.wait(30)
    ahead.close()
    assert "still being read after 0.05 seconds" in caplog.text
    free.set()


def test_a_keyboard_interrupt_ends_a_process_that_waits() -> None:
    """SIGINT while the consumer waits for a batch: the process ends soon, with KeyboardInterrupt."""
    script = """
        import os, signal, threading
        from poem.streams.loading.read_ahead import ReadAhead

        stopped = threading.Event()

        def interrupt(*_):
            stopped.set()
            raise KeyboardInterrupt

        signal.signal(signal.SIGINT, interrupt)  # a shell's background jobs ignore it

        def slow():
            yield 0
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
            stopped.wait(60)
            yield 1

        try:
            with ReadAhead(slow()) as ahead:
                for item in ahead:
                    print("item", item, flush=True)
        except KeyboardInterrupt:
            print("interrupted;", [each.name for each in threading.enumerate() if "poem" in each.name])
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines() == ["item 0", "interrupted; []"], done.stderr


SETTING: ContextVar[str] = ContextVar("setting", default="unset")


def test_the_thread_has_the_modes_of_its_caller() -> None:
    def modes() -> Iterator[tuple[bool, bool, str, int, Tensor]]:
        for _ in range(3):
            made = torch.zeros(1)
            yield (
                torch.is_grad_enabled(),
                torch.is_inference_mode_enabled(),
                SETTING.get(),
                torch.get_num_threads(),
                made,
            )

    token, before = SETTING.set("set"), torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with torch.no_grad():
            assert {each[:4] for each in ReadAhead[Any](modes())} == {(False, False, "set", 2)}
        with torch.inference_mode():
            assert all(each[1] and each[4].is_inference() for each in ReadAhead[Any](modes()))
        with torch.device("meta"):
            assert {each[4].device.type for each in ReadAhead[Any](modes())} == {"meta"}
        assert {each[:4] for each in ReadAhead[Any](modes())} == {(True, False, "set", 2)}
    finally:
        torch.set_num_threads(before)
        SETTING.reset(token)


def test_the_first_item_is_read_by_the_caller() -> None:
    """So worker processes of a loader are forked where they would be without a thread."""
    where = list(ReadAhead[Any](threading.current_thread().name for _ in range(3)))
    assert where == [threading.current_thread().name, THREAD, THREAD]


def test_a_depth_below_zero() -> None:
    with pytest.raises(ValueError, match="expected a depth of at least 0, got -1"):
        ReadAhead([], -1)
