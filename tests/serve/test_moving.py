"""Several engines on one folder: a stream has one writer, and a writer that has lost it writes over nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from served import pictures, served, taken, until

from poem.guarded.audit import read_audit
from poem.serve.engine import StreamEngine
from poem.serve.learner import Learner
from poem.serve.leases import Leases, newest
from poem.serve.problems import Problem
from poem.serve.replay import replay_answers
from poem.serve.settings import ServeSettings
from poem.serve.store import Lost, Store, folder_name


@contextmanager
def engines(folder: Path, count: int = 2, **settings: Any) -> Iterator[list[StreamEngine]]:
    """Engines that share a folder."""
    chosen = ServeSettings(**{"batch_size": 4, "snapshot_every": 100, **settings})
    made = [StreamEngine(served(), chosen, folder, writer=f"w{at}") for at in range(count)]
    try:
        yield made
    finally:
        for each in made:
            assert each.close(60)


def ask(made: StreamEngine, stream: str, seed: int, **rest: Any) -> dict[str, Any]:
    return made.submit(stream, pictures(4, seed), **rest).result(60)


def test_a_stream_that_moves_to_and_fro_answers_as_one_that_stays(tmp_path: Path) -> None:
    alone, replies = Learner(served(), 4), []
    with engines(tmp_path) as made:
        for seed in range(9):
            replies.append(ask(made[seed // 2 % 2], "door", seed, key=f"k{seed}", payload="p"))
            assert replies[-1]["answers"] == alone.answer(pictures(4, seed)), seed
        for seed in range(9):  # an engine that has never seen these keys
            assert ask(made[seed % 2], "door", seed, key=f"k{seed}", payload="p")["replayed"]
        assert made[0].status("door")["batches"] == made[1].status("door")["batches"] == 9
        assert made[1].status("door")["images"] == 36, "counts move with the stream"
    images = {reply["request"]: pictures(4, seed) for seed, reply in enumerate(replies)}
    again: dict[str, Any] = {}
    for audit in tmp_path.glob("streams/*/*.jsonl"):
        again |= replay_answers(audit, served(), 4, images)
    assert again == {reply["request"]: reply["answers"] for reply in replies}


def test_a_writer_that_does_not_let_go_loses_the_stream_and_cannot_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engines(tmp_path, snapshot_every=2) as (one, two):
        monkeypatch.setattr(one._sharing, "release_asked", lambda now: None)  # as one that hangs or is cut off
        for leases in (one._store._leases, two._store._leases):
            assert leases is not None
            monkeypatch.setattr(leases, "_handover", 0.2)
        for seed in range(4):
            ask(one, "door", seed)
        assert one.status("door")["unsaved_batches"] == 1, "snapshots after the first batch and the third"
        alone = Learner(served(), 4)
        for seed in range(3):
            alone.answer(pictures(4, seed))
        assert ask(two, "door", 7)["answers"] == alone.answer(pictures(4, 7)), "goes on from the last snapshot"
        stale = one._streams["door"]
        assert stale.learner is not None
        with pytest.raises(Lost):
            one._store.save("door", stale.learner.state_dict(), {}, stale.opened)
        # Even a writer that has looked before it lost the stream, and writes after, does not reach the newer snapshot.
        (mine,) = tmp_path.glob("streams/*/state-*.safetensors")
        before = mine.read_bytes()
        leases = one._store._leases
        assert leases is not None
        monkeypatch.setattr(leases, "held", lambda place: True)
        one._store.save("door", stale.learner.state_dict(), {}, stale.opened)
        assert mine.read_bytes() == before
        assert two._store.load("door")[0]["guard"]["batches"] == 3, "as taken over, not what the stale one wrote"
        monkeypatch.undo()
        assert two.status("door")["batches"] == 4


def test_waiting_requests_of_a_stream_that_has_moved_are_refused_and_teach_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, answer = threading.Event(), Learner.answer

    def wait(self: Learner, images: Any) -> Any:
        gate.wait(30)
        return answer(self, images)

    with engines(tmp_path) as (one, two):
        ask(one, "door", 0)
        for each in (one, two):
            assert each._store._leases is not None
            monkeypatch.setattr(each._store._leases, "_handover", 0.1)
        monkeypatch.setattr(Learner, "answer", wait)
        first = one.submit("door", pictures(4, 1))
        taken(one)
        second = one.submit("door", pictures(4, 2))
        moved = two.submit("door", pictures(4, 3))
        gate.set()
        with pytest.raises(Problem) as caught:
            second.result(60)
        assert (caught.value.status, caught.value.code) == (503, "moved")
        assert first.result(60)["batch"] == moved.result(60)["batch"] == 1
        assert two.status("door")["batches"] == 2


def test_an_engine_that_cannot_save_what_is_asked_for_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (StreamEngine(served(), ServeSettings(batch_size=4, snapshot_every=100), tmp_path, writer=each)
                for each in ("w0", "w1"))  # fmt: skip
    for seed in range(3):
        ask(one, "door", seed)
    assert two._store._leases is not None
    monkeypatch.setattr(two._store._leases, "_handover", 0.2)

    def fail(*_: Any) -> None:
        raise RuntimeError("no memory for the state")

    with monkeypatch.context() as patch:
        patch.setattr(one._streams["door"].learner, "state_dict", fail)
        assert ask(two, "door", 7)["batch"] == 1, "from the snapshot after the first batch"
    with monkeypatch.context() as patch:
        patch.setattr(one._keeper, "put_away", fail)
        ask(one, "gate", 0)
        ask(two, "gate", 1)
    time.sleep(0.1)
    assert one.ready
    assert ask(one, "other", 0)["batch"] == 0
    assert one.close(60)
    assert two.close(60)


@pytest.mark.parametrize("released", [True, False])
def test_a_key_that_waits_while_its_stream_moves_to_and_fro_stays_claimed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, released: bool
) -> None:
    gate, step, stopped = threading.Event(), StreamEngine._step, set[StreamEngine]()

    def wait(self: StreamEngine) -> bool:
        stopped.add(self)
        gate.wait(60)
        return step(self)

    with engines(tmp_path) as (one, two):
        for each in (one, two):
            assert each._store._leases is not None
            monkeypatch.setattr(each._store._leases, "_handover", 0.1)
        ask(one, "door", 0, key="before", payload="p")
        one.command("door", "reset").result(60)  # and a snapshot with the key
        found = one._streams["door"]
        monkeypatch.setattr(StreamEngine, "_step", wait)
        monkeypatch.setattr(one._sharing, "release_asked", lambda now: None)  # below it is called, or it came too late
        until(lambda: len(stopped) == 2)
        waiting = one.submit("door", pictures(4, 1), key="k", payload="p")
        if released:
            one._sharing.release(folder_name("door"))
        two._own("door")
        two._store.release("door")
        with pytest.raises(Problem) as caught:
            one.submit("door", pictures(4, 1), key="k", payload="p")
        assert (caught.value.status, caught.value.code) == (409, "key-in-flight")
        assert one.submit("door", pictures(4, 0), key="before", payload="p").result(1)["replayed"]
        assert len(found.jobs) == 1
        gate.set()
        assert waiting.result(60)["batch"] == 0
        assert one.submit("door", pictures(4, 1), key="k", payload="p").result(60)["replayed"]


def hanging(one: StreamEngine, two: StreamEngine, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Let the first engine hang, so that the second takes its streams after a second; it goes on when this is set."""
    gate, step, stopped = threading.Event(), StreamEngine._step, threading.Event()

    def wait(self: StreamEngine) -> bool:
        if self is one:
            stopped.set()
            gate.wait(60)
        return step(self)

    for each in (one, two):
        assert each._store._leases is not None
        monkeypatch.setattr(each._store._leases, "_handover", 1.0)
    monkeypatch.setattr(StreamEngine, "_step", wait)
    monkeypatch.setattr(one._sharing, "release_asked", lambda now: None)
    assert stopped.wait(60)
    return gate


def test_a_request_that_waits_and_was_answered_elsewhere_is_not_learnt_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engines(tmp_path) as (one, two):
        ask(one, "door", 0)
        gate = hanging(one, two, monkeypatch)
        waiting = one.submit("door", pictures(4, 1), key="k", payload="p")
        there = ask(two, "door", 1, key="k", payload="p")
        again = one.submit("door", pictures(4, 1), key="k", payload="p").result(60)
        assert again == waiting.result(1) == {**there, "replayed": True}
        gate.set()
        assert ask(one, "door", 2)["batch"] == 2, "after those of seeds 0 and 1"


def test_counts_of_a_stream_that_comes_back_while_a_request_waits_are_those_of_its_snapshot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engines(tmp_path) as (one, two):
        ask(one, "door", 0)
        one.command("door", "export").result(60)  # after the snapshot of the first batch
        gate = hanging(one, two, monkeypatch)
        waiting = one.submit("door", pictures(4, 1))
        assert [ask(two, "door", seed)["batch"] for seed in (2, 3)] == [1, 2]
        back = one.submit("door", pictures(4, 4))
        counted = one._streams["door"].counts["requests"]
        gate.set()
        assert counted == 3, "the first, and two elsewhere"
        assert [each.result(60)["batch"] for each in (waiting, back)] == [3, 4]
        found = one.status("door")
    assert [found[name] for name in ("batches", "requests", "images")] == [5, 5, 20]


def test_of_many_that_take_a_stream_at_once_the_last_owns_it(tmp_path: Path) -> None:
    place, numbers = tmp_path / "streams" / "s", list[int]()
    place.mkdir(parents=True)
    leases = [Leases(tmp_path, f"w{at}", handover_s=0) for at in range(8)]

    def take(own: Leases) -> None:
        numbers.extend(own.take(place) for _ in range(20))

    threads = [threading.Thread(target=take, args=(each,)) for each in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(each.held(place) for each in leases) == 1
    owner = next(each for each in leases if each.held(place))
    assert newest(place) == (owner.number(place), {"writer": owner.writer, "floor": 0, "released": False})
    assert max(numbers) == owner.number(place)
    for each in leases:
        each.close()


def test_a_deleted_stream_does_not_come_back_by_a_late_snapshot(tmp_path: Path) -> None:
    with engines(tmp_path) as (one, two):
        ask(one, "door", 0)
        state = one._streams["door"].learner
        assert state is not None
        late = state.state_dict()
        place = next(tmp_path.glob("streams/*"))
        until(lambda: any(place.glob("state-*")))  # written after the answer
        name = next(place.glob("state-*")).name
        two.command("door", "delete").result(60)
        two._store._write(place / name, {**late, "serve": {"id": "door"}})
        for each in (one, two):
            with pytest.raises(Problem) as caught:
                each.status("door")
            assert caught.value.status == 404
        assert ask(one, "door", 1)["batch"] == 0
        assert one.status("door")["batches"] == 1


def test_an_engine_that_has_the_folder_for_itself_goes_on_with_what_several_left(tmp_path: Path) -> None:
    alone = Learner(served(), 4)
    with engines(tmp_path) as made:
        for seed in range(4):
            assert ask(made[seed % 2], "door", seed)["answers"] == alone.answer(pictures(4, seed))
        with pytest.raises(OSError, match="no other service uses"):
            StreamEngine(served(), ServeSettings(batch_size=4), tmp_path)
    for writer in (None, "later"):
        single = StreamEngine(served(), ServeSettings(batch_size=4), tmp_path, writer=writer)
        assert single.status("door")["batches"] == alone.batches
        seed = alone.batches
        assert ask(single, "door", seed)["answers"] == alone.answer(pictures(4, seed))
        assert single.close(60)
    assert any(line["kind"] == "batch" for path in tmp_path.glob("streams/*/*.jsonl") for line in read_audit(path)[1])
    assert Store(tmp_path, served().facts(4)).known()["door"]["info"]["batches"] == alone.batches
