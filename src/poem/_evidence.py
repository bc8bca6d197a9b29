"""What claims are checked on: numbers by place, and pairs of them of which the first should be the larger."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from poem.report import Report
from poem.suites import Suite

Place = tuple[str, str, str]
Number = tuple[float, float | None]
"""Mean over seeds, and their deviation where there are several."""
TIE = 0.05
"""Points that the paper's one decimal cannot tell apart."""


class Verdict(NamedTuple):
    """What a check found."""

    holds: bool | None
    """None where the numbers it needs are not there."""
    words: str


class MissingError(Exception):
    """A number that a check needs is not there."""


@dataclass(frozen=True)
class Evidence:
    """What a check may look at: accuracies in percent, and whole reports, by (group, row, column)."""

    numbers: Mapping[Place, Number]
    reports: Mapping[Place, Sequence[Report]]
    places: tuple[Place, ...] = ()
    """Everything that the suite asks for, whether it is there or not; by default what is there."""

    @classmethod
    def of(cls, suite: Suite, reports: Iterable[Report]) -> Evidence:
        """The numbers of a suite: by seed the mean over the cells of a place, then over seeds; gaps are left out."""
        by_key = {report.key: report for report in reports}
        cells: dict[Place, dict[int, list[Report | None]]] = {}
        for each in suite.placed:
            seeds = cells.setdefault((each.group, each.row, each.column), {})
            seeds.setdefault(each.cell.seed, []).append(by_key.get(each.cell.key))
        found: dict[Place, list[Report]] = {}
        numbers: dict[Place, Number] = {}
        for place, seeds in cells.items():
            whole = [[each for each in held if each is not None] for held in seeds.values() if None not in held]
            tops = [statistics.fmean(each.metrics["top1"] for each in held) for held in whole]
            if tops:
                numbers[place] = statistics.fmean(tops), statistics.stdev(tops) if len(tops) > 1 else None
                found[place] = [each for held in whole for each in held]
        return cls(numbers, found, tuple(cells))

    @property
    def groups(self) -> list[str]:
        """Blocks, in order."""
        return list(dict.fromkeys(place[0] for place in self.places or self.numbers))

    @property
    def columns(self) -> list[str]:
        """Columns, in order."""
        return list(dict.fromkeys(place[2] for place in self.places or self.numbers))

    def rows(self, group: str) -> list[str]:
        """Rows of a block, in order."""
        return list(dict.fromkeys(row for block, row, _ in self.places or self.numbers if block == group))

    def at(self, group: str, row: str, column: str) -> float:
        """The accuracy at a place."""
        if (group, row, column) not in self.numbers:
            raise MissingError(" ".join(filter(None, (group, row, column))))
        return self.numbers[group, row, column][0]

    def mean(self, group: str, row: str) -> float:
        """The accuracy of a row over all columns."""
        return statistics.fmean(self.at(group, row, column) for column in self.columns)

    def all(self) -> list[Report]:
        """Every report of the suite, each once."""
        for place in self.places:
            self.at(*place)
        found = {report.key: report for held in self.reports.values() for report in held}
        if not found:
            raise MissingError("any result")
        return list(found.values())

    def of_row(self, row: str) -> list[Report]:
        """Every report of a row."""
        found = [report for place, held in self.reports.items() if place[1] == row for report in held]
        if not found:
            raise MissingError(row)
        return found

    def pair(self, group: str, high: str, low: str, column: str | None = None) -> Pair:
        """Two rows of a block, of which the first should be above the second, in a column or on average."""
        values = [self.mean(group, row) if column is None else self.at(group, row, column) for row in (high, low)]
        return Pair(" ".join(filter(None, (group, column))), (high, values[0]), (low, values[1]))


class Pair(NamedTuple):
    """Two numbers of which the first should be the larger."""

    where: str
    high: tuple[str, float]
    low: tuple[str, float]

    @property
    def lead(self) -> float:
        """How far the first is above the second, both as printed."""
        return round(self.high[1], 1) - round(self.low[1], 1)

    def __str__(self) -> str:
        head = f"{self.where}: " if self.where else ""
        return f"{head}{self.high[0]} {self.high[1]:.1f}, {self.low[0]} {self.low[1]:.1f}"


def above(pairs: Iterable[Pair], margin: float = 0.0) -> Verdict:
    """Holds where every first number is above its second by more than the margin; the words name what fails."""
    found = list(pairs)
    if not found:
        raise MissingError("what is compared")
    failing = [pair for pair in found if not pair.lead > margin]
    if not failing:
        return Verdict(True, "; ".join(map(str, found[:4])) + (" ..." if len(found) > 4 else ""))
    said = "; ".join(map(str, failing[:4])) + (" ..." if len(failing) > 4 else "")
    return Verdict(False, f"{len(failing)} of {len(found)} fail: {said}")
