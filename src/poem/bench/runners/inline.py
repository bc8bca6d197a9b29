"""Cells one after the other, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from poem.bench.cell import Cell
from poem.bench.load_cell import Machine
from poem.bench.runners.runner import MEASURE, CellProgress, CellStarted, OnEvent, OnProgress, import_measure, run_cell


@dataclass(frozen=True, kw_only=True)
class Inline:
    """Runs cells in this process.

    Args:
        machine: Folders with data and weights, and the device.
        measure: The function that runs a cell, as `module:name`.
    """

    machine: Machine = field(default_factory=Machine)
    measure: str = MEASURE

    def run(self, cells: Sequence[Cell], on_event: OnEvent) -> None:
        """Run every cell, in order."""
        measure = import_measure(self.measure)
        for cell in cells:
            on_event(CellStarted(cell))
            on_event(run_cell(measure, cell, self.machine, _progress_of(cell, on_event), processes=1))


def _progress_of(cell: Cell, on_event: OnEvent) -> OnProgress:
    return lambda images, total: on_event(CellProgress(cell, images, total))
