"""A CUDA graph's stand-in on the CPU: operations are noted as they run, and done again on the same tensors.

It keeps the rules that matter: what ran outside a capture is not repeated, inputs and outputs stay at their addresses,
and the host may not read inside. `installed` lets every adapter capture with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import poem.accelerate.capture
import poem.accelerate.graph_pool

READS = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select")


class Tape(TorchDispatchMode):
    """Notes every operation; `replay` does them again."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.done: list[tuple[Any, Any, Any, Any]] = []
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in READS:
            raise RuntimeError(f"the host reads inside a capture: {func}")
        if any(isinstance(each, Tensor) and each.dtype == torch.bool for each in _indices(func, args)):
            raise RuntimeError("a mask as an index has no fixed shape")
        before = _where_it_is((args, kwargs or {}))
        out = func(*args, **(kwargs or {}))
        self.done.append((func, *before, _where_it_is(out)))
        return out

    def spoil(self) -> None:
        """Not a number where a number was computed."""
        with torch.no_grad():
            for func, _, _, out in self.done:
                if not any(each.alias_info for each in func._schema.returns):
                    for each in tree_leaves(out):
                        if isinstance(each, Tensor) and each.is_floating_point():
                            each.fill_(torch.nan)

    def replay(self) -> None:
        """Everything again; results go where they went before."""
        self.replays += 1
        with torch.no_grad():
            for func, args, kwargs, out in self.done:
                again = func(*args, **kwargs)
                if any(each.alias_info for each in func._schema.returns):
                    continue  # a view, or written in place
                for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor):
                        old.copy_(new)


def _where_it_is(tensors: Any) -> Any:
    """The same memory and shapes, of which a graph notes no more: `set_` may lead a tensor elsewhere afterwards.

    So does the library with a layer's output that is a view; of linear layers it is one in some versions of torch.
    """
    return tree_map_only(Tensor, Tensor.detach, tensors)


def _indices(func: Any, args: Any) -> list[Any]:
    return list(args[1]) if func.overloadpacket.__name__ in ("index", "index_put", "index_put_") else []


class TapePool:
    """Captures tapes, and spoils what the captures computed: only a replay may fill it.

    A tape keeps every tensor alive, so it cannot show that memory was given away too early; a GPU can.
    """

    def __init__(self) -> None:
        self.tapes: list[Tape] = []

    @contextmanager
    def session(self) -> Iterator[None]:
        before = len(self.tapes)
        yield
        for tape in self.tapes[before:]:
            tape.spoil()

    @contextmanager
    def capture(self) -> Iterator[Tape]:
        tape = Tape()
        with tape:
            yield tape
        self.tapes.append(tape)

    @contextmanager
    def replaying(self) -> Iterator[None]:
        yield

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        yield


@contextmanager
def installed() -> Iterator[TapePool]:
    """Inside, adapters capture on the CPU."""
    tapes = TapePool()
    before = poem.accelerate.graph_pool.graph_pool, poem.accelerate.capture.DEVICES
    poem.accelerate.graph_pool.graph_pool, poem.accelerate.capture.DEVICES = (lambda device: tapes), ("cpu", "cuda")  # type: ignore[assignment]
    try:
        yield tapes
    finally:
        poem.accelerate.graph_pool.graph_pool, poem.accelerate.capture.DEVICES = before
