"""CUDA graphs that share one pool of memory per device."""

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
    """A captured CUDA graph, or on a CPU the tests' stand-in for one."""

    def replay(self) -> None:
        """Do it again, on the same addresses."""
        ...


class GraphPool(Protocol):
    """Captures and replays graphs: one per device, since all graphs there share their memory."""

    def capture(self) -> Any:
        """A context; what runs inside is captured, not run, and the `Graph` it yields runs it."""
        ...

    def session(self) -> Any:
        """A context around captures that belong together."""
        ...

    def replaying(self) -> Any:
        """A context around replays that belong together: one batch at a time, whichever thread and stream it has."""
        ...

    def exclusive(self) -> Any:
        """A context in which no other thread captures or replays: freeing a graph meanwhile would break a capture."""
        ...


class CudaGraphPool:
    """Captures CUDA graphs. All of them share one pool of memory, since they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._lock = device, threading.RLock()
        self._stream = torch.cuda.Stream(device)
        self._replayed = torch.cuda.Event()
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
                self._pool = None  # a capture that failed leaves its pool in an unknown state
                raise
            finally:
                if collecting:
                    gc.enable()
                torch.cuda.current_stream().wait_stream(self._stream)
                torch.cuda.empty_cache()  # running it first took memory beside the pool

    def _begin(self) -> None:
        """Make the pool, with a graph that is never freed: a pool is freed with its last graph."""
        self._pool = torch.cuda.graph_pool_handle()
        with self.capture() as anchor:
            torch.zeros(1, device=self._device)
        self._anchor = anchor  # only now: freeing a graph while another is captured breaks the capture

    @contextmanager
    def capture(self) -> Iterator[Graph]:
        """Capture one graph."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            yield graph
        except BaseException:
            try:
                graph.capture_end()
            except RuntimeError as error:  # the error that is being raised broke the capture
                log.debug("capture ended with %s", error)
            raise
        graph.capture_end()

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """After the last batch that used the pool, on whatever stream that was."""
        with self._lock, torch.cuda.device(self._device):
            torch.cuda.current_stream().wait_event(self._replayed)
            try:
                yield
            finally:
                self._replayed.record()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Other threads wait."""
        with self._lock:
            yield


@cache
def graph_pool(device: torch.device) -> GraphPool:
    """The one graph pool of a device."""
    return CudaGraphPool(device)
