"""One replica of a service on a Ray cluster: an engine of its own over the folder that all share."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import uuid
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import torch

from poem._util.outside import extend_search_path
from poem.serve.engine import StreamEngine
from poem.serve.learner import Served
from poem.serve.meter import Meter
from poem.serve.notes import NotesOnce
from poem.serve.problems import Problem
from poem.serve.settings import ServeSettings

TOLD = 100_000
"""Times that a replica's meter keeps until a front asks for them, at most; counts are added up."""


class Recorded(Meter):
    """Keeps what it is told until a front asks for it."""

    def __init__(self) -> None:
        self._sums: Counter[tuple[str, tuple[Any, ...]]] = Counter()
        self._timed: deque[tuple[str, tuple[Any, ...]]] = deque(maxlen=TOLD)
        self._last: tuple[int, int, int] = (0, 0, 0)
        self._lock = threading.Lock()

    def taken(self) -> list[tuple[str, tuple[Any, ...]]]:
        """What was told since the last time: counts are added up, so that none is lost where nobody asks."""
        with self._lock:
            sums, timed = self._sums, list(self._timed)
            self._sums = Counter()
            self._timed.clear()
        found = [(name, (*values, count)) for (name, values), count in sums.items()]
        return [*found, *timed, ("streams", self._last)]

    def _add(self, name: str, *values: Any, count: int = 1) -> None:
        with self._lock:
            self._sums[name, values] += count

    def _time(self, name: str, *values: Any) -> None:
        with self._lock:
            self._timed.append((name, values))

    def answered(self, by: str, images: int) -> None:
        """Images were answered."""
        self._add("answered", by, count=images)

    def batch(self, images: int, seconds: float) -> None:
        """A micro-batch was computed."""
        self._time("batch", images, seconds)

    def waited(self, seconds: float) -> None:
        """A request waited in its queue."""
        self._time("waited", seconds)

    def rejected(self, count: int = 1) -> None:
        """A queue was full."""
        self._add("rejected", count=count)

    def replayed(self, count: int = 1) -> None:
        """A key was answered as before."""
        self._add("replayed", count=count)

    def event(self, kind: str, count: int = 1) -> None:
        """A guard decided something."""
        self._add("event", kind, count=count)

    def snapshot(self, seconds: float, ok: bool) -> None:
        """A snapshot was written, or not."""
        self._time("snapshot", seconds, ok)

    def streams(self, live: int, idle: int, waiting: int) -> None:
        """How many streams and waiting requests there are."""
        self._last = (live, idle, waiting)


class Replica:
    """One engine of several; Ray Serve makes it on some node and calls it.

    Args:
        make: A function that opens the model, pickled by cloudpickle; called on the replica's node.
        folders: Of the caller, in which modules are looked for too.
        settings: Of the engine.
        folder: That all replicas share.
        threads: Of torch.
        drain_s: Seconds for the end.
    """

    def __init__(
        self, make: bytes, folders: tuple[str, ...], settings: ServeSettings, folder: str, threads: int, drain_s: float
    ) -> None:
        import pickle

        extend_search_path(folders)
        os.umask(0o077)
        torch.set_num_threads(threads)
        logging.getLogger("poem").addFilter(NotesOnce())
        served: Served = pickle.loads(make)()  # from the driver of this application, not from a request
        self._meter, self._drain = Recorded(), drain_s
        self._about = {"folder": folder, "settings": repr(settings), **described(served)}
        self._name = uuid.uuid4().hex  # a process id may be another replica's on another node
        self._engine = StreamEngine(served, settings, Path(folder), self._meter, writer=self._name)

    async def submit(
        self,
        stream: str,
        images: Any,
        deadline_ms: float | None,
        key: str | None,
        payload: str,
        waited_s: float = 0.0,
    ) -> dict[str, Any]:
        """A reply, or a problem."""
        found = torch.from_numpy(np.array(images))

        def submitted() -> Future[dict[str, Any]]:
            return self._engine.submit(
                stream, found, deadline_ms=deadline_ms, key=key, payload=payload, waited_s=waited_s
            )

        return await _said(submitted)

    async def command(self, stream: str, command: str, value: Any = None) -> dict[str, Any]:
        """A command's result, or a problem."""
        return await _said(lambda: self._engine.command(stream, command, value))

    async def status(self, stream: str) -> dict[str, Any]:
        """A stream's status, or a problem."""

        def found() -> Future[dict[str, Any]]:
            done: Future[dict[str, Any]] = Future()
            done.set_result(self._engine.status(stream))
            return done

        return await _said(found)

    async def overview(self) -> dict[str, Any]:
        """What this replica has: its summary, its streams, its process, and what its meter was told."""
        loop = asyncio.get_running_loop()
        summary, streams = await loop.run_in_executor(None, lambda: (self._engine.summary(), self._engine.streams()))
        return {"pid": os.getpid(), "summary": summary, "streams": streams, **self._about}

    async def told(self) -> tuple[str, list[tuple[str, tuple[Any, ...]]]]:
        """Its name, which no other replica has or had, and what its meter was told since the last time."""
        return self._name, self._meter.taken()

    async def stored(self) -> list[dict[str, Any]]:
        """The status of every stream on disk."""
        return await asyncio.get_running_loop().run_in_executor(None, self._engine.stored)

    async def close(self, timeout_s: float | None = None) -> bool:
        """Answer what waits and save every stream; says whether that was done in time."""
        left = self._drain if timeout_s is None else timeout_s
        return await asyncio.get_running_loop().run_in_executor(None, self._engine.close, left)

    def check_health(self) -> None:
        """Raise where the engine's thread has died: Ray Serve starts another replica then."""
        if not self._engine.ready and not self._engine.closing:
            raise RuntimeError("the engine's thread has died")

    async def __del__(self) -> None:
        """The end of a replica that is stopped in order."""
        if hasattr(self, "_engine"):
            await self.close()


def described(served: Served) -> dict[str, str]:
    """What must be the same of two fronts that use the same replicas."""
    return {
        "base": served.base, "method": str(served.method), "guard": repr(served.guard),
        "prepare": repr(served.prepare), "options": repr(dict(served.settings)),
    }  # fmt: skip


async def _said(call: Callable[[], Future[Any]]) -> dict[str, Any]:
    """What a call of the engine returns, as plain values: a problem is no exception between processes."""
    try:
        future = await asyncio.get_running_loop().run_in_executor(None, call)
        return {"value": await asyncio.wrap_future(future)}
    except Problem as problem:
        return {
            "problem": {
                "status": problem.status, "code": problem.code, "detail": problem.detail,
                "retry_after": problem.retry_after,
            }
        }  # fmt: skip
