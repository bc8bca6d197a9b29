"""How much work a cell is, before it is run: images from its order, seconds from cells like it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from poem.cells import Cell
from poem.report import Report
from poem.streams._known import TREES

IMAGES_PER_SECOND = 100.0
"""Assumed of a process where nothing like a cell has been measured."""

_SIZES: dict[str, tuple[int, int]] = {
    "digits": (1797, 10), "digits-test": (1500, 10), "cifar10": (10_000, 10), "cifar10-c": (10_000, 10),
    "cifar100": (10_000, 100), "cifar100-c": (10_000, 100), "imagenet-c": (50_000, 1000),
    **{
        name: (known.expect.total, known.expect.classes)
        for name, known in TREES.items()
        if known.expect.total and known.expect.classes
    },
}  # fmt: skip
_UNKNOWN = (10_000, 10)


def size(data: str) -> int | None:
    """Images of one domain of a data set, whole; None where nobody knows."""
    return _SIZES[data][0] if data in _SIZES else None


def images(cell: Cell) -> int:
    """Images in a cell's stream, as its data set is known to be; a subset of the user's own may have fewer."""
    whole, classes = _SIZES.get(cell.data, _UNKNOWN)
    return cell.order().count(whole if cell.n is None else min(cell.n, whole), classes)


@dataclass(frozen=True)
class Rates:
    """Seconds per image, by base and method, from results."""

    seconds: dict[tuple[str, ...], float]
    count: int

    @classmethod
    def of(cls, reports: Iterable[Report]) -> Rates:
        """The means over all cells of a kind: of a base and method, of a base, of everything."""
        sums: dict[tuple[str, ...], list[float]] = {}
        count = 0
        for report in reports:
            seen, spent = report.ledger.get("images", 0), report.timing.get("total_s", 0.0)
            if seen and spent:
                count += 1
                for kind in _kinds(report.cell):
                    held = sums.setdefault(kind, [0.0, 0.0])
                    held[0], held[1] = held[0] + spent, held[1] + seen
        return cls({kind: spent / seen for kind, (spent, seen) in sums.items()}, count)

    def total(self, cells: Sequence[Cell]) -> float:
        """Seconds that the cells will take in one process."""
        return sum(images(cell) * self._each(cell) for cell in cells)

    def _each(self, cell: Cell) -> float:
        return next((self.seconds[kind] for kind in _kinds(cell) if kind in self.seconds), 1 / IMAGES_PER_SECOND)

    def __str__(self) -> str:
        if self.count:
            return f"from {self.count} finished cells"
        return f"assuming {IMAGES_PER_SECOND:.0f} images/s a process: nothing is measured yet"


def _kinds(cell: Cell) -> tuple[tuple[str, ...], ...]:
    return ((cell.base, cell.method), (cell.base,), ())
