"""The protocol of a runner, and the events that it reports."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from poem.bench.cell import Cell
from poem.bench.load_cell import Machine
from poem.bench.result import CellResult

MEASURE = "poem.bench.measure:measure"
"""The function that runs a cell, by name: worker processes and cluster nodes import their own."""


@dataclass(frozen=True)
class CellStarted:
    """A cell was given to a process."""

    cell: Cell


@dataclass(frozen=True)
class CellProgress:
    """A batch of a cell is done."""

    cell: Cell
    images: int
    """Answered so far, of `total`."""
    total: int


@dataclass(frozen=True)
class CellEnded:
    """A cell has a result, or the traceback of its error."""

    cell: Cell
    result: CellResult | None
    error: str = ""


Event = CellStarted | CellProgress | CellEnded
OnEvent = Callable[[Event], None]
OnProgress = Callable[[int, int], None]
"""Called with the images done and the images in all."""


class Measure(Protocol):
    """The signature of `poem.bench.measure.measure`."""

    def __call__(self, cell: Cell, machine: Machine, *, on_progress: OnProgress | None = None) -> CellResult:
        """Run the cell on this machine and return its numbers; `on_progress` is called after each batch."""
        ...


class Runner(Protocol):
    """Runs cells and reports events."""

    def run(self, cells: Sequence[Cell], on_event: OnEvent) -> None:
        """Run every cell; each one ends once, in any order.

        `on_event` may raise, and so may a signal at any moment: a runner then kills its processes and re-raises.
        """
        ...


def import_measure(path: str) -> Measure:
    """The function at `module:name`."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def run_cell(
    measure: Measure, cell: Cell, machine: Machine, on_progress: OnProgress | None = None, *,
    processes: int | None = None,
) -> CellEnded:  # fmt: skip
    """Measure a cell; an exception becomes the event's `error`, so that the other cells go on.

    `processes`, the number that measure cells on this machine at a time, is added to the result's host.
    """
    try:
        result = measure(cell, machine, on_progress=on_progress)
    except Exception:
        return CellEnded(cell, None, traceback.format_exc())
    if processes is not None:
        result = replace(result, host={**result.host, "processes": processes})
    return CellEnded(cell, result)


def model_and_data(cell: Cell) -> tuple[object, ...]:
    """A key of the cell's model and images: cells with the same key, run in succession, find both in the cache."""
    return (cell.base, cell.weights, cell.data, cell.dataset, cell.corruptions, cell.severity, cell.seed, cell.n)
