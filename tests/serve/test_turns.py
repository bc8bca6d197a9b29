"""Whose turn it is: no stream waits for ever, whatever the others send."""

from __future__ import annotations

import gc
import weakref

import torch

from poem.serve.turns import FEW_DEADLINES, Job, Stream, Turns


def job(images: int, side: int = 8) -> Job:
    return Job("r", 0.0, images=torch.zeros(images, 3, side, side))


def names(turns: Turns, now: float = 1.0) -> list[str]:
    return [stream.id for stream, _ in turns.pick(now)]


def test_every_stream_is_served_within_as_many_picks_as_there_are_streams() -> None:
    turns = Turns(4, 0.0, together=64, streams=8)
    first, fewer, same, wide, told = streams = [Stream(name, 0.0) for name in "AXBWC"]
    turns.add(first, job(4))
    turns.add(fewer, job(2))
    turns.add(same, job(4))
    turns.add(wide, job(4, side=16))
    turns.add(told, Job("r", 0.0, command="export"))
    for _ in range(3):
        served = []
        for _ in range(len(streams)):
            turns.add(first, job(4))  # one that always has more
            served += names(turns)
        assert set(served) >= {stream.id for stream in streams if stream is not told}
        assert not told.jobs
        for stream, more in ((fewer, job(2)), (same, job(4)), (wide, job(4, side=16))):
            turns.add(stream, more)


def test_streams_that_are_passed_over_stay_before_those_that_were_picked() -> None:
    turns = Turns(4, 0.0, together=8, streams=8)
    a, x, b, y = (Stream(name, 0.0) for name in "AXBY")
    for stream, count in ((a, 4), (x, 2), (b, 4), (y, 2)):
        for _ in range(2):
            turns.add(stream, job(count, side=8 + count))
    assert names(turns) == ["A", "B"]
    assert names(turns) == ["X", "Y"]
    assert names(turns) == ["A", "B"]


def test_a_stream_that_waits_for_more_keeps_its_place() -> None:
    turns = Turns(4, 10.0, together=0)
    a, b = Stream("A", 0.0), Stream("B", 0.0)
    turns.add(a, job(2))
    for _ in range(3):
        turns.add(b, job(4))
    assert names(turns) == ["B"], "A may get more until 10"
    assert names(turns, now=10.0) == ["A"]
    assert names(turns, now=10.0) == ["B"]


def test_requests_that_were_answered_are_forgotten_before_their_deadline() -> None:
    turns, stream = Turns(1, 0.0), Stream("A", 0.0)
    images, jobs = [], []
    for at in range(4 * FEW_DEADLINES):
        made = Job("r", 0.0, images=torch.zeros(1, 3, 8, 8), deadline=1000.0 + at)
        images.append(weakref.ref(made.images))
        jobs.append(weakref.ref(made))
        turns.add(stream, made)
        ((_, (picked,)),) = turns.pick(1.0)
        (picked.succeed if at % 2 else picked.fail)(ValueError())
    made = picked = None  # type: ignore[assignment]
    gc.collect()
    assert not any(each() is not None for each in images)
    assert sum(each() is not None for each in jobs) <= FEW_DEADLINES
    late = Job("late", 0.0, images=torch.zeros(1, 3, 8, 8), deadline=5.0)
    waits = Job("waits", 0.0, images=torch.zeros(1, 3, 8, 8), deadline=7.0)
    turns.add(stream, waits)
    turns.add(stream, late)
    assert turns.late(4.0, 0.5) is None
    assert turns.late(4.6, 0.5) == (stream, late)
    assert turns.next_time(0.5) == 0.0
