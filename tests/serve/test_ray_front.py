"""The front of a Ray cluster without one: what it makes of replicas that answer, and of those that do not."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from served import served

from poem.serve.meter import Meter
from poem.serve.ray_engine import Placement, RayEngine
from poem.serve.ray_replica import Replica
from poem.serve.settings import ServeSettings


class Gone(Exception):
    """As Ray raises for a replica that has died."""


class Cluster:
    """Says what each replica returns, as a handle of Ray Serve does."""

    def __init__(self, *said: Any) -> None:
        self.said, self.deleted = list(said), False

    def broadcast(self, method: str, *values: Any) -> Cluster:
        return self

    def results(self, *, timeout_s: float, return_exceptions: bool = False) -> list[Any]:
        failed = [each for each in self.said if isinstance(each, Exception)]
        if failed and not return_exceptions:
            raise failed[0]
        return self.said


class Told(Meter):
    """Keeps the last number of streams, and the images of each batch."""

    def __init__(self) -> None:
        self.last: tuple[int, int, int] = (0, 0, 0)
        self.images: list[int] = []

    def streams(self, live: int, idle: int, waiting: int) -> None:
        self.last = (live, idle, waiting)

    def batch(self, images: int, seconds: float) -> None:
        self.images.append(images)


def front(cluster: Cluster) -> RayEngine:
    """An engine whose cluster is that one."""
    made = RayEngine.__new__(RayEngine)
    made.meter, made._closing, made._done, made._placement = Told(), False, False, Placement()
    made._until = None
    made._handle, made._deployed, made._started = cluster, True, False
    made._exceptions = SimpleNamespace(RayError=Gone)  # type: ignore[assignment]

    def delete(name: str) -> None:
        cluster.deleted = True

    made._serve = SimpleNamespace(exceptions=SimpleNamespace(RayServeException=Gone), delete=delete)
    return made


def make() -> Any:
    return served("tent")


def test_streams_of_a_replica_that_died_are_no_longer_counted() -> None:
    one, two = ("a", [("batch", (4, 0.1)), ("streams", (3, 2, 1))]), ("b", [("streams", (5, 0, 0))])
    cluster = Cluster(one, two)
    made = front(cluster)
    made.refresh()
    assert made.meter.last == (8, 2, 1)  # type: ignore[attr-defined]
    cluster.said = [two, ("c", [("streams", (1, 0, 0))])]
    made.refresh()
    assert made.meter.last == (6, 0, 0)  # type: ignore[attr-defined]
    assert made.meter.images == [4]  # type: ignore[attr-defined]


def test_a_replica_that_does_not_answer_hides_no_other() -> None:
    made = front(Cluster(Gone("its node died"), ("b", [("streams", (5, 0, 0))])))
    made.refresh()
    assert made.meter.last == (5, 0, 0)  # type: ignore[attr-defined]


def test_close_says_whether_every_replica_has_saved_its_streams(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "poem.serve")
    for said, done in (([True, True], True), ([True, False], False), ([], False), ([True, Gone("died")], False)):
        cluster = Cluster(*said)
        made = front(cluster)
        caplog.clear()
        assert made.close() is done, said
        (level,) = [each.levelname for each in caplog.records if each.getMessage().startswith("stopped")]
        assert level == ("INFO" if done else "WARNING"), said
        assert cluster.deleted
        assert made.close() is done, f"{said}: a second call says what the first one did"


@pytest.mark.filterwarnings("ignore:coroutine 'Replica.__del__'")  # Ray Serve awaits it
def test_replicas_of_one_process_id_have_names_of_their_own(tmp_path: Path) -> None:
    settings = ServeSettings(batch_size=2)
    made = [Replica(pickle.dumps(make), (), settings, str(tmp_path), 1, 60.0) for _ in range(2)]
    try:
        assert len({asyncio.run(each.told())[0] for each in made}) == 2
    finally:
        for each in made:
            assert each._engine.close(60)
