"""From cells to numbers: what stands at a group, row and column of a suite, over its seeds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from poem.bench.cell import Cell
from poem.bench.result import Report
from poem.bench.suites import AVERAGE, Placed, Suite

__all__ = ["AVERAGE", "Grid", "Read", "Value", "metric", "pooled", "timing"]

Read = Callable[[Report], float | None]
"""Takes one number out of a report, or None where it has none."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """A number over seeds."""

    mean: float
    deviation: float | None
    """Between seeds, with n - 1; None for a single one."""
    seeds: dict[int, float]
    """Each seed's own number."""

    @property
    def n(self) -> int:
        """How many seeds there are."""
        return len(self.seeds)

    @classmethod
    def over(cls, seeds: Mapping[int, float]) -> Value | None:
        """The value of these seeds, or None without any."""
        if not seeds:
            return None
        found = list(seeds.values())
        deviation = statistics.stdev(found) if len(found) > 1 else None
        return cls(mean=statistics.fmean(found), deviation=deviation, seeds=dict(seeds))


def metric(key: str) -> Read:
    """Reads a key of `Report.metrics`."""
    return lambda report: report.metrics.get(key)


def timing(key: str) -> Read:
    """Reads a key of `Report.timing`."""
    return lambda report: report.timing.get(key)


def pooled(shares: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Groups of samples as one: counts `n` summed, everything else as the mean over samples."""
    held = [share for share in shares if share.get("n")]
    found = {"n": float(sum(share["n"] for share in held))}
    for key in dict.fromkeys(key for share in held for key in share if key != "n"):
        there = [share for share in held if key in share]
        found[key] = sum(share[key] * share["n"] for share in there) / sum(share["n"] for share in there)
    return found


class Grid:
    """A suite with the reports that are there.

    The number at a place is, for each seed, the mean over the cells placed there with that seed; then mean and
    deviation over the seeds. A seed that lacks one of its cells does not count, so that no number rests on fewer
    shifts than its neighbours do.
    """

    def __init__(self, suite: Suite, reports: Iterable[Report]) -> None:
        self.suite = suite
        wanted = {placed.cell.key for placed in suite.placed}
        self.reports = {report.key: report for report in reports if report.key in wanted}
        self._keys = {id(placed): placed.cell.key for placed in suite.placed}

    @cached_property
    def planned(self) -> int:
        """Cells that the suite asks for; one that stands in two places counts once."""
        return len(set(self._keys.values()))

    @property
    def present(self) -> int:
        """Cells of them that are there."""
        return len(self.reports)

    @cached_property
    def groups(self) -> list[str]:
        """Blocks of rows, in the suite's order."""
        return list(dict.fromkeys(placed.group for placed in self.suite.placed))

    def rows(self, group: str) -> list[str]:
        """Rows of a block, in the suite's order."""
        return list(dict.fromkeys(placed.row for placed in self.suite.placed if placed.group == group))

    @cached_property
    def columns(self) -> list[str]:
        """Columns in order of print, the average apart; those that the suite does not order come last."""
        ordered = [column for column in self.suite.columns if column != AVERAGE]
        return list(dict.fromkeys([*ordered, *(placed.column for placed in self.suite.placed)]))

    @cached_property
    def _at(self) -> dict[tuple[str, str, str], list[Placed]]:
        found: dict[tuple[str, str, str], list[Placed]] = {}
        for placed in self.suite.placed:
            found.setdefault((placed.group, placed.row, placed.column), []).append(placed)
        return found

    def at(self, group: str, row: str, column: str | None = None) -> list[Report]:
        """The reports at a place, or in a whole row, each once."""
        columns = self.columns if column is None else [column]
        places = [placed for each in columns for placed in self._at.get((group, row, each), [])]
        keys = dict.fromkeys(self._keys[id(placed)] for placed in places)
        return [self.reports[key] for key in keys if key in self.reports]

    def whole(self, group: str, row: str, column: str) -> bool:
        """Whether everything that the suite asks for at a place is there, all of its seeds too."""
        placed = self._at.get((group, row, column), [])
        return bool(placed) and all(self._keys[id(each)] in self.reports for each in placed)

    def cells(self, group: str, column: str) -> list[Cell]:
        """The cells of a block that a column asks for, measured or not."""
        return [each.cell for each in self.suite.placed if (each.group, each.column) == (group, column)]

    @cached_property
    def by_method(self) -> bool:
        """Whether rows differ in what they do; otherwise columns do, and each row is a network."""
        cells = self.cells(self.groups[0], self.columns[0])
        return len({(cell.method, cell.changes) for cell in cells}) > 1

    def value(self, group: str, row: str, column: str, read: Read) -> Value | None:
        """The number at a place."""
        return Value.over(self._seeds(group, row, column, read))

    def average(self, group: str, row: str, read: Read) -> Value | None:
        """The mean over all columns, over the seeds that have every one of them."""
        found = [self._seeds(group, row, column, read) for column in self.columns]
        whole = set.intersection(*(set(each) for each in found)) if found else set()
        return Value.over({seed: statistics.fmean(each[seed] for each in found) for seed in sorted(whole)})

    def number(self, group: str, row: str, column: str, read: Read) -> Value | None:
        """The number at a place, or the row's average under its column."""
        return self.average(group, row, read) if column == AVERAGE else self.value(group, row, column, read)

    def _seeds(self, group: str, row: str, column: str, read: Read) -> dict[int, float]:
        by_seed: dict[int, list[float | None]] = {}
        for placed in self._at.get((group, row, column), []):
            report = self.reports.get(self._keys[id(placed)])
            by_seed.setdefault(placed.cell.seed, []).append(None if report is None else read(report))
        found = {seed: [each for each in values if each is not None] for seed, values in by_seed.items()}
        return {seed: statistics.fmean(each) for seed, each in found.items() if len(each) == len(by_seed[seed])}
