"""A function of tensors as a CUDA graph: many small operations for the price of one launch."""

from __future__ import annotations

import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from poem.accelerate import capture, graph_pool
from poem.accelerate.capture import EAGER_FIRST, SHAPES, Fast
from poem.accelerate.foreach import copy_each
from poem.accelerate.graph_pool import Graph, GraphPool

log = logging.getLogger("poem")


class CapturedFunction:
    """Calls a function of tensors, captured once for each set of shapes and then replayed.

    Precondition: the function reads nothing but its arguments, draws nothing at random, and the host reads none of its
    tensors; every result is a tensor. Effect: the same results, in memory of their own. Fallback: the function itself,
    on other devices than CUDA, with `fast=False`, and where a capture fails.

    Args:
        function: What is called.
        fast: As for an adapter; "auto" captures from the eleventh call with the same shapes on.
    """

    def __init__(self, function: Callable[..., Sequence[Tensor]], fast: Fast) -> None:
        self._function, self._fast = function, fast
        self._replays: OrderedDict[tuple[Any, ...], Replay | None] = OrderedDict()  # None: could not be captured
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self.capture_seconds = 0.0
        """What all captures took."""

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """The function's results."""
        device = tensors[0].device
        if self._fast is False or device.type not in capture.DEVICES:
            return self._function(*tensors)
        key = device, *((each.shape, each.dtype) for each in tensors)
        if key not in self._replays:
            self._seen[key] += 1
            if self._fast == "auto" and self._seen[key] <= EAGER_FIRST:
                return self._function(*tensors)
            pool, began = graph_pool.graph_pool(device), time.perf_counter()
            try:
                self._replays[key] = self._captured(tensors, pool)
            except torch.OutOfMemoryError:
                self._seen[key] = 0  # others may give memory back
                return self._function(*tensors)
            finally:
                self.capture_seconds += time.perf_counter() - began
            if len(self._replays) > SHAPES:
                with pool.exclusive():
                    oldest, _ = self._replays.popitem(last=False)
                self._seen[oldest] = 0
        self._replays.move_to_end(key)
        replay = self._replays[key]
        return self._function(*tensors) if replay is None else replay(tensors)

    def release(self) -> None:
        """Free the graphs' memory."""
        while self._replays:
            device = next(iter(self._replays))[0]
            with graph_pool.graph_pool(device).exclusive():
                self._replays.popitem(last=False)
        self._seen.clear()

    def _captured(self, tensors: Sequence[Tensor], pool: GraphPool) -> Replay | None:
        """The function on these tensors, captured; None where that fails.

        Raises:
            torch.OutOfMemoryError: The device's memory is full.
        """
        held = [each.clone() for each in tensors]
        try:
            with pool.session():
                self._function(*held)  # what is made on first use is made now
                with pool.capture() as graph:
                    found = list(self._function(*held))
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            log.warning("not captured, so slower: %s", (str(error).splitlines() or [type(error).__name__])[0])
            return None
        return Replay(graph, pool, held, found)


class Replay:
    """One capture: its graph, and the tensors that the graph reads and writes."""

    def __init__(self, graph: Graph, pool: GraphPool, held: list[Tensor], found: list[Tensor]) -> None:
        self._graph, self._pool, self._held, self._found = graph, pool, held, found

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The results for other tensors of the same shapes."""
        fresh = [torch.empty_like(each) for each in self._found]
        with self._pool.replaying():
            copy_each(self._held, tensors)
            self._graph.replay()
            copy_each(fresh, self._found)
        return fresh
