"""One replica of a service on a Ray cluster: an engine of its own over the folder that all share."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections import deque
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
from poem.serve.problems import Problem
from poem.serve.settings import ServeSettings

TOLD = 100_000
"""What a replica's meter keeps until a front asks for it, at most."""


class Recorded(Meter):
    """Keeps what it is told until a front asks for it."""

    def __init__(self) -> None:
        self._told: deque[tuple[str, tuple[Any, ...]]] = deque(maxlen=TOLD)
        self._last: tuple[int, int, int] = (0, 0, 0)

    def taken(self) -> list[tuple[str, tuple[Any, ...]]]:
        """What was told since the last time."""
        found = []
        while self._told:
            found.append(self._told.popleft())
        return [*found, ("streams", self._last)]

    def answered(self, by: str, images: int) -> None:
        """Images were answered."""
        self._told.append(("answered", (by, images)))

    def batch(self, images: int, seconds: float) -> None:
        """A micro-batch was computed."""
        self._told.append(("batch", (images, seconds)))

    def waited(self, seconds: float) -> None:
        """A request waited in its queue."""
        self._told.append(("waited", (seconds,)))

    def rejected(self) -> None:
        """A queue was full."""
        self._told.append(("rejected", ()))

    def replayed(self) -> None:
        """A key was answered as before."""
        self._told.append(("replayed", ()))

    def event(self, kind: str) -> None:
        """A guard decided something."""
        self._told.append(("event", (kind,)))

    def snapshot(self, seconds: float, ok: bool) -> None:
        """A snapshot was written, or not."""
        self._told.append(("snapshot", (seconds, ok)))

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
        served: Served = pickle.loads(make)()  # from the driver of this application, not from a request
        self._meter, self._drain, self._about = Recorded(), drain_s, {"folder": folder, "settings": repr(settings)}
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

    async def close(self) -> bool:
        """Answer what waits and save every stream; says whether that was done in time."""
        return await asyncio.get_running_loop().run_in_executor(None, self._engine.close, self._drain)

    def check_health(self) -> None:
        """Raise where the engine's thread has died: Ray Serve starts another replica then."""
        if not self._engine.ready and not self._engine.closing:
            raise RuntimeError("the engine's thread has died")

    async def __del__(self) -> None:
        """The end of a replica that is stopped in order."""
        if hasattr(self, "_engine"):
            await self.close()


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
