"""Replicas on a Ray cluster: streams are placed by their id, and a replica that dies takes nothing with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from served import pictures, served

pytest.importorskip("ray.serve", reason="needs ray[serve]", exc_type=ImportError)

from poem.serve.learner import Learner
from poem.serve.problems import Problem
from poem.serve.ray_engine import Placement, RayEngine
from poem.serve.replay import replay_answers
from poem.serve.settings import ServeSettings

pytestmark = pytest.mark.slow
SIZE, STREAMS = 4, [f"s{at}" for at in range(8)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[RayEngine]:
    settings = ServeSettings(batch_size=SIZE, snapshot_every=3)
    made = RayEngine(served, served().prepare, settings, folder, Placement(replicas=2))
    yield made
    assert made.close(60)


def ask(engine: RayEngine, stream: str, seed: int, **rest: Any) -> dict[str, Any]:
    return engine.submit(stream, pictures(SIZE, seed), **rest).result(120)


def placed(engine: RayEngine) -> dict[str, int]:
    """The process of each stream's replica."""
    return {each["stream"]: found["pid"] for found in engine.replicas() for each in found["streams"]}


def test_streams_are_spread_and_a_replica_that_is_killed_loses_what_came_after_its_snapshots(
    engine: RayEngine, folder: Path
) -> None:
    sent: dict[str, Any] = {}
    replies = []
    for seed in range(5):
        for name in STREAMS:
            replies.append(ask(engine, name, seed, key=f"k{seed}", payload="p"))
            sent[replies[-1]["request"]] = pictures(SIZE, seed)
    before = placed(engine)
    assert set(before) == set(STREAMS)
    assert len(set(before.values())) == 2, "eight streams on two replicas"
    victim = before[STREAMS[0]]
    os.kill(victim, signal.SIGKILL)
    lost = 0
    for name in STREAMS:
        reply = ask(engine, name, 9, key="later", payload="p")
        replies.append(reply)
        sent[reply["request"]] = pictures(SIZE, 9)
        if before[name] == victim:
            assert 5 - 3 <= reply["batch"] <= 5, "no more than what came after the last snapshot is gone"
            lost += reply["batch"] < 5
            assert ask(engine, name, 0, key="k0", payload="p")["replayed"], "a key before the snapshot"
        else:
            assert reply["batch"] == 5
    assert lost, "the snapshot was of four batches: the test shows nothing"
    assert victim not in placed(engine).values()
    again: dict[str, Any] = {}
    for audit in folder.glob("streams/*/*.jsonl"):
        again |= replay_answers(audit, served(), SIZE, sent)
    assert again == {each["request"]: each["answers"] for each in replies}


def test_the_ring_moves_back_while_streams_go_on_and_nothing_is_lost(engine: RayEngine, folder: Path) -> None:
    until = time.monotonic() + 60
    while len(engine.replicas()) < 2 and time.monotonic() < until:
        time.sleep(0.2)
    assert len(engine.replicas()) == 2, "another replica is started for the one that died"
    alone = {name: Learner(served(), SIZE) for name in STREAMS}
    for name in STREAMS:
        engine.command(name, "reset").result(60)
    for seed in range(4):
        for name in STREAMS:
            assert ask(engine, name, seed)["answers"] == alone[name].answer(pictures(SIZE, seed)), (name, seed)
    assert len(set(placed(engine).values())) == 2
    assert {each["stream"]: each["batches"] for each in engine.streams()} == dict.fromkeys(STREAMS, 4)


def test_commands_problems_and_numbers_come_through(engine: RayEngine) -> None:
    state = engine.command(STREAMS[0], "export").result(60)
    assert isinstance(state, bytes)
    with pytest.raises(Problem) as caught:
        engine.status("never")
    assert (caught.value.status, caught.value.code) == (404, "no-such-stream")
    with pytest.raises(Problem) as caught:
        engine.submit("never", pictures(SIZE + 1, 0)).result(60)
    assert caught.value.status == 413
    summary = engine.summary()
    assert (summary["engine"], summary["replicas"], summary["base"]) == ("ray", 2, "digits-bn")
    told: list[int] = []
    engine.meter.batch = lambda images, seconds: told.append(images)  # type: ignore[method-assign]
    engine.refresh()
    assert sum(told) >= SIZE * len(STREAMS) * 4
    with pytest.raises(ValueError, match="--name"):
        RayEngine(served, served().prepare, ServeSettings(batch_size=8), Path("other"), Placement())


def test_the_command_serves_and_stops_in_order(tmp_path: Path) -> None:
    from poem.serve.client import Client

    command = [sys.executable, "-m", "poem", "serve", "digits-bn", "--engine", "ray", "--port", "0", "--state",
               str(tmp_path), "--no-view", "--batch-size", "4", "--replicas", "2"]  # fmt: skip
    log = tmp_path.with_name(f"{tmp_path.name}.log")
    with log.open("w") as errors:
        running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        assert running.stdout is not None
        line = running.stdout.readline()
        assert line.startswith("serving on http://"), log.read_text()
        assert "2 replicas on Ray" in log.read_text()
        client = Client(line.split()[-1])
        assert client.predict("door", pictures(4, 0)).batch == 0
        assert client.predict("door", pictures(4, 1)).batch == 1
        running.send_signal(signal.SIGTERM)
        assert running.wait(120) == 0
    finally:
        if running.poll() is None:
            running.kill()
        if running.stdout is not None:
            running.stdout.close()
    from poem.serve.store import Store

    with_state = Store(tmp_path, Learner(served(budget=None), 4).facts())
    assert with_state.known()["door"]["info"]["batches"] == 2, "what was learnt since the snapshot is saved"
    with_state.close()
