"""What claims are checked on: numbers by place, and pairs of them of which the first should be the larger."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from poem.bench.analysis.aggregate import AVERAGE, Grid, metric
from poem.bench.result import Report
from poem.bench.suites import Suite

Place = tuple[str, str, str]
TIE = 0.05
"""Points that the paper's one decimal cannot tell apart."""


def printed(value: float) -> float:
    """A number to the one decimal that a page shows, so that no claim hangs on what nobody can see."""
    return round(value, 1)


class Verdict(NamedTuple):
    """What a check found."""

    holds: bool | None
    """None where the numbers it needs are not there."""
    words: str

    @property
    def state(self) -> str:
        """The answer in words."""
        return {True: "holds", False: "does not hold", None: "cannot say"}[self.holds]


class MissingError(Exception):
    """A number that a check needs is not there."""


@dataclass(frozen=True)
class Evidence:
    """What a check may look at: accuracies in percent as the page has them, and whole reports, by place."""

    numbers: Mapping[Place, float]
    """By (group, row, column), a row's average among them."""
    reports: Mapping[Place, Sequence[Report]]
    places: tuple[Place, ...] = ()
    """Everything that the suite asks for, whether it is there or not; by default what is there."""

    @classmethod
    def of(cls, suite: Suite, reports: Iterable[Report]) -> Evidence:
        """A suite's numbers from the page's own grid; a place that lacks a cell of any seed is left out."""
        grid, read = Grid(suite, reports), metric("top1")
        places = tuple(dict.fromkeys((each.group, each.row, each.column) for each in suite.placed))
        whole = [place for place in places if grid.whole(*place)]
        rows = dict.fromkeys((group, row, AVERAGE) for group, row, _ in whole)
        found = {place: grid.number(*place, read) for place in (*whole, *rows)}
        numbers = {place: value.mean for place, value in found.items() if value is not None}
        return cls(numbers, {place: grid.at(*place) for place in whole}, places)

    @property
    def groups(self) -> list[str]:
        """Blocks, in order."""
        return list(dict.fromkeys(place[0] for place in self.places or self.numbers))

    @property
    def columns(self) -> list[str]:
        """Columns, in order."""
        return list(dict.fromkeys(place[2] for place in self.places or self.numbers if place[2] != AVERAGE))

    def rows(self, group: str) -> list[str]:
        """Rows of a block, in order."""
        return list(dict.fromkeys(row for block, row, _ in self.places or self.numbers if block == group))

    def at(self, group: str, row: str, column: str) -> float:
        """The accuracy at a place."""
        if (group, row, column) not in self.numbers:
            raise MissingError(" ".join(filter(None, (group, row, column))))
        return self.numbers[group, row, column]

    def mean(self, group: str, row: str) -> float:
        """The accuracy of a row over all columns."""
        values = [self.at(group, row, column) for column in self.columns]
        return self.numbers.get((group, row, AVERAGE), statistics.fmean(values))

    def all(self) -> list[Report]:
        """Every report of the suite, each once."""
        for place in self.places:
            self.at(*place)
        found = {report.key: report for held in self.reports.values() for report in held}
        if not found:
            raise MissingError("any result")
        return list(found.values())

    def of_row(self, row: str) -> list[Report]:
        """Every report of a row, once all are there."""
        for place in self.places:
            if place[1] == row:
                self.at(*place)
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
        """How far the first is above the second, both as printed, and so a whole number of tenths."""
        return printed(printed(self.high[1]) - printed(self.low[1]))

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
