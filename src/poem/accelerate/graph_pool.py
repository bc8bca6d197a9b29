"""Where work is recorded and from where it is replayed: CUDA graphs that share one pool of memory per device."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch

log = logging.getLogger("poem")


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Do it again, on the same addresses."""
        ...


class Studio(Protocol):
    """Where work is recorded: one per device, since all recordings there share their memory."""

    def record(self) -> Any:
        """A context; what runs inside is recorded, not done, and the `Graph` it yields does it."""
        ...

    def session(self) -> Any:
        """A context around recordings that belong together."""
        ...

    def playing(self) -> Any:
        """A context around replays that belong together: one batch at a time, whichever thread and stream it has."""
        ...

    def still(self) -> Any:
        """A context in which nobody records or replays: a graph that goes meanwhile would break a recording."""
        ...


class CudaStudio:
    """Records CUDA graphs. All of them share one pool of memory, since they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, threading.RLock()
        self._stream = torch.cuda.Stream(device)
        self._played = torch.cuda.Event()
        self._pool: Any = None
        self._anchor: Any = None

    @contextmanager
    def session(self) -> Iterator[None]:
        """On a stream of its own, without the garbage collector, which could free memory half-way."""
        collecting = gc.isenabled()
        with self._lock, torch.cuda.device(self._device):
            self._stream.wait_stream(torch.cuda.current_stream())
            gc.disable()
            try:
                with torch.cuda.stream(self._stream):
                    if self._pool is None:
                        self._begin()
                    yield
            except BaseException:
                self._pool = None  # a recording that broke off leaves its pool behind in an unknown state
                raise
            finally:
                if collecting:
                    gc.enable()
                torch.cuda.current_stream().wait_stream(self._stream)
                torch.cuda.empty_cache()  # trying it out took memory beside the pool

    def _begin(self) -> None:
        """A pool, with a graph that never goes: a pool dies with its last graph, and its name with it."""
        self._pool = torch.cuda.graph_pool_handle()
        with self.record() as anchor:
            torch.zeros(1, device=self._device)
        self._anchor = anchor  # only now: a graph that goes while another is recorded breaks the recording

    @contextmanager
    def record(self) -> Iterator[Graph]:
        """One graph."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            yield graph
        except BaseException:
            try:
                graph.capture_end()
            except RuntimeError as error:  # the recording was broken by what is already on its way up
                log.debug("recording ended with %s", error)
            raise
        graph.capture_end()

    @contextmanager
    def playing(self) -> Iterator[None]:
        """After the last batch that used the pool, on whatever stream that was."""
        with self._lock, torch.cuda.device(self._device):
            torch.cuda.current_stream().wait_event(self._played)
            try:
                yield
            finally:
                self._played.record()

    @contextmanager
    def still(self) -> Iterator[None]:
        """Everybody else waits."""
        with self._lock:
            yield


@cache
def studio(device: torch.device) -> Studio:
    """The one studio of a device."""
    return CudaStudio(device)
