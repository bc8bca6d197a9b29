"""Cells one after the other, in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from poem.bench.benchmark import Place
from poem.bench.cell import Cell
from poem.bench.runners.runner import MEASURE, Begun, Moved, Tell, Watching, answer, found


@dataclass(frozen=True, kw_only=True)
class Inline:
    """The plainest engine: no processes."""

    place: Place = field(default_factory=Place)
    measure: str = MEASURE

    def run(self, cells: Sequence[Cell], tell: Tell) -> None:
        """Run every cell, in order."""
        measure = found(self.measure)
        for cell in cells:
            tell(Begun(cell))
            tell(answer(measure, cell, self.place, _watching(cell, tell), processes=1))


def _watching(cell: Cell, tell: Tell) -> Watching:
    return lambda images, of: tell(Moved(cell, images, of))
