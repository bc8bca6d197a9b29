"""What the paper says of its tables and figures, checked on our numbers: holds, does not hold, or cannot say.

    for claim, result in check_claims(suite, results): print(claim.text, result.state, result.words)

The checks, in `accuracy_claims.py` and `sample_claims.py`, compare means as a page prints them. Where numbers are
missing, or flags left them out, a claim neither holds nor fails.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from poem._util.nearest import nearest_hint
from poem.bench.analysis.aggregate import AVERAGE, Grid, metric
from poem.bench.result import CellResult
from poem.bench.suites import Claim, Suite

Position = tuple[str, str, str]
"""Group, row and column."""


def printed(value: float) -> float:
    """A number rounded to the one decimal that a page prints, so that a claim depends on printed digits alone."""
    return round(value, 1)


class ClaimResult(NamedTuple):
    """Whether a claim holds, and the numbers that decide it in words."""

    holds: bool | None
    """None where numbers are missing."""
    words: str

    @property
    def state(self) -> str:
        """`holds` as a page prints it."""
        return {True: "holds", False: "does not hold", None: "cannot say"}[self.holds]


class MissingError(Exception):
    """A number that a check needs is missing; the message names it."""


@dataclass(frozen=True)
class Evidence:
    """The input of a check: accuracies in percent as the page has them, and results, by group, row and column."""

    numbers: Mapping[Position, float]
    """A row's average is under the column `AVERAGE`."""
    results: Mapping[Position, Sequence[CellResult]]
    positions: tuple[Position, ...] = ()
    """Every position of the suite, with or without a number; without any, those of `numbers`."""

    @classmethod
    def of(cls, suite: Suite, results: Iterable[CellResult]) -> Evidence:
        """A suite's numbers from the page's own grid; a position that lacks a cell of any seed has none."""
        grid, read = Grid(suite, results), metric("top1")
        positions = tuple(dict.fromkeys((each.group, each.row, each.column) for each in suite.placed))
        whole = [each for each in positions if grid.whole(*each)]
        rows = dict.fromkeys((group, row, AVERAGE) for group, row, _ in whole)
        found = {each: grid.number(*each, read) for each in (*whole, *rows)}
        numbers = {each: value.mean for each, value in found.items() if value is not None}
        return cls(numbers, {each: grid.at(*each) for each in whole}, positions)

    @property
    def groups(self) -> list[str]:
        """Groups, in order."""
        return list(dict.fromkeys(group for group, _, _ in self.positions or self.numbers))

    @property
    def columns(self) -> list[str]:
        """Columns, in order, without the average."""
        return list(dict.fromkeys(column for _, _, column in self.positions or self.numbers if column != AVERAGE))

    def rows(self, group: str) -> list[str]:
        """Rows of a group, in order."""
        return list(dict.fromkeys(row for each, row, _ in self.positions or self.numbers if each == group))

    def at(self, group: str, row: str, column: str) -> float:
        """The accuracy at a group, row and column; raises MissingError where there is none."""
        if (group, row, column) not in self.numbers:
            raise MissingError(" ".join(filter(None, (group, row, column))))
        return self.numbers[group, row, column]

    def mean(self, group: str, row: str) -> float:
        """The accuracy of a row over all columns."""
        values = [self.at(group, row, column) for column in self.columns]
        return self.numbers.get((group, row, AVERAGE), statistics.fmean(values))

    def all(self) -> list[CellResult]:
        """Every result of the suite, each once; raises MissingError where one is missing."""
        for each in self.positions:
            self.at(*each)
        found = {result.key: result for held in self.results.values() for result in held}
        if not found:
            raise MissingError("any result")
        return list(found.values())

    def of_row(self, row: str) -> list[CellResult]:
        """Every result of a row, of all groups; raises MissingError where one is missing."""
        for each in self.positions:
            if each[1] == row:
                self.at(*each)
        found = [result for each, held in self.results.items() if each[1] == row for result in held]
        if not found:
            raise MissingError(row)
        return found

    def pair(self, group: str, high: str, low: str, column: str | None = None) -> Pair:
        """Two rows of a group, of which the first should be above the second, in a column or on average."""
        values = [self.mean(group, row) if column is None else self.at(group, row, column) for row in (high, low)]
        return Pair(" ".join(filter(None, (group, column))), (high, values[0]), (low, values[1]))


class Pair(NamedTuple):
    """Two numbers of which the first should be the larger."""

    where: str
    high: tuple[str, float]
    low: tuple[str, float]

    @property
    def lead(self) -> float:
        """The first number less the second, both as printed, and so a whole number of tenths."""
        return printed(printed(self.high[1]) - printed(self.low[1]))

    def __str__(self) -> str:
        head = f"{self.where}: " if self.where else ""
        return f"{head}{self.high[0]} {self.high[1]:.1f}, {self.low[0]} {self.low[1]:.1f}"


def above(pairs: Iterable[Pair], margin: float = 0.0) -> ClaimResult:
    """Holds where every first number is above its second by more than the margin; the words list what fails."""
    found = list(pairs)
    if not found:
        raise MissingError("what is compared")
    failing = [pair for pair in found if not pair.lead > margin]
    if not failing:
        return ClaimResult(True, "; ".join(map(str, found[:4])) + (" ..." if len(found) > 4 else ""))
    words = "; ".join(map(str, failing[:4])) + (" ..." if len(failing) > 4 else "")
    return ClaimResult(False, f"{len(failing)} of {len(found)} fail: {words}")


Check = Callable[[Evidence], ClaimResult]


@cache
def checks() -> dict[str, Check]:
    """Every check by the name that suites use."""
    from poem.bench.analysis import accuracy_claims, sample_claims

    functions = (*accuracy_claims.CHECKS, *sample_claims.CHECKS)
    return {function.__name__.replace("_", "-"): function for function in functions}


def check_claims(suite: Suite, results: Iterable[CellResult]) -> list[tuple[Claim, ClaimResult]]:
    """Each claim of a suite with its result; None for all of them where flags changed the suite."""
    if suite.left_out or suite.altered:
        words = f"left out by flags: {', '.join(suite.left_out)}" if suite.left_out else ""
        other = f"flags made it another suite: {', '.join(suite.altered)}"
        return [(claim, ClaimResult(None, words or other)) for claim in suite.claims]
    evidence = Evidence.of(suite, results)
    return [(claim, check(claim.check, evidence)) for claim in suite.claims]


def check(name: str, evidence: Evidence) -> ClaimResult:
    """Run a check by name."""
    if name not in checks():
        raise ValueError(f"unknown check {name!r}; {nearest_hint(name, checks())}")
    try:
        return checks()[name](evidence)
    except MissingError as missing:
        return ClaimResult(None, f"not there: {missing}")
