"""Whose turn it is: no stream waits for ever, whatever the others send."""

from __future__ import annotations

import torch

from poem.serve.turns import Job, Stream, Turns


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
