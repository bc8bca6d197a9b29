"""What an engine is and what it tells."""

from __future__ import annotations

import importlib
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from poem.bench.benchmark import Place
from poem.bench.cell import Cell
from poem.bench.result import Report

MEASURE = "poem.bench.benchmark:measure"
"""Named rather than handed over, so that processes and machines find their own."""


@dataclass(frozen=True)
class Begun:
    """A cell was handed out."""

    cell: Cell


@dataclass(frozen=True)
class Moved:
    """A batch of a cell is done."""

    cell: Cell
    images: int
    of: int


@dataclass(frozen=True)
class Ended:
    """A cell has a result, or the text of what went wrong."""

    cell: Cell
    report: Report | None
    error: str = ""


Event = Begun | Moved | Ended
Tell = Callable[[Event], None]
Watching = Callable[[int, int], None]


class Measure(Protocol):
    """The call that measures a cell: `poem.bench.benchmark.measure`."""

    def __call__(self, cell: Cell, place: Place, *, watch: Watching | None = None) -> Report:
        """The cell's result."""
        ...


class Engine(Protocol):
    """Runs cells."""

    def run(self, cells: Sequence[Cell], tell: Tell) -> None:
        """Run every cell and tell what happens; each one ends once, in any order.

        `tell` may raise, and so may a signal at any moment: an engine then takes its processes down and passes it on.
        """
        ...


def found(path: str) -> Measure:
    """The function that `module:name` names."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)  # type: ignore[no-any-return]


def answer(
    measure: Measure, cell: Cell, place: Place, watch: Watching | None = None, *, processes: int | None = None
) -> Ended:
    """Measure a cell; what it raises becomes text, so that the other cells go on.

    The report's host says how many processes measure cells on this machine meanwhile, where that is known.
    """
    try:
        report = measure(cell, place, watch=watch)
    except Exception:
        return Ended(cell, None, traceback.format_exc())
    return Ended(cell, report if processes is None else replace(report, host={**report.host, "processes": processes}))


def kin(cell: Cell) -> tuple[object, ...]:
    """Cells of one kin share a model and its data: run one after the other, they find both in memory."""
    return (cell.base, cell.weights, cell.data, cell.dataset, cell.corruptions, cell.severity, cell.seed, cell.n)
