"""From results to the numbers of a suite: means and deviations over seeds at each group, row and column."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from poem.bench.cell import Cell
from poem.bench.result import CellResult, latest
from poem.bench.suites import AVERAGE, Placed, Suite

__all__ = ["AVERAGE", "Grid", "Place", "Read", "Value", "metric", "pooled", "timing"]

Read = Callable[[CellResult], float | None]
"""Reads one number from a result, or None where it has none."""
Place = tuple[str, str]
"""A row and a column of a group."""
_STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""The 97.5 % quantile of Student's t with 1 to 30 degrees of freedom."""


@dataclass(frozen=True, kw_only=True)
class Value:
    """Mean and deviation of a number over seeds."""

    mean: float
    deviation: float | None
    """Standard deviation with n - 1; None for a single seed."""
    seeds: dict[int, float]
    """The number of each seed."""

    @property
    def n(self) -> int:
        """The number of seeds."""
        return len(self.seeds)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Student's 95 % interval of the mean, from the deviation over seeds alone; None for a single seed."""
        if self.deviation is None:
            return None
        half = _student(self.n - 1) * self.deviation / math.sqrt(self.n)
        return self.mean - half, self.mean + half

    @classmethod
    def over(cls, seeds: Mapping[int, float]) -> Value | None:
        """The value over these seeds, or None without any."""
        if not seeds:
            return None
        found = list(seeds.values())
        deviation = statistics.stdev(found) if len(found) > 1 else None
        return cls(mean=statistics.fmean(found), deviation=deviation, seeds=dict(seeds))


def _student(degrees: int) -> float:
    """The 97.5 % quantile of Student's t; beyond the table the first terms of its expansion about the normal's."""
    if degrees <= len(_STUDENT):
        return _STUDENT[degrees - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * degrees)


def metric(key: str) -> Read:
    """Reads a key of `CellResult.metrics`."""
    return lambda result: result.metrics.get(key)


def timing(key: str) -> Read:
    """Reads a key of `CellResult.timing`."""
    return lambda result: result.timing.get(key)


def pooled(shares: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """One group of samples from several: counts `n` summed, everything else as the mean over samples."""
    held = [share for share in shares if share.get("n")]
    found = {"n": float(sum(share["n"] for share in held))}
    for key in dict.fromkeys(key for share in held for key in share if key != "n"):
        there = [share for share in held if key in share]
        found[key] = sum(share[key] * share["n"] for share in there) / sum(share["n"] for share in there)
    return found


class Grid:
    """A suite with its results; of a cell that was measured with several weights, the one measured last.

    The number at a group, row and column is, for each seed, the mean over the cells placed there with that seed; then
    mean and deviation over the seeds. A seed that lacks one of its cells does not count, so that every number of a row
    is over the same shifts.
    """

    def __init__(self, suite: Suite, results: Iterable[CellResult]) -> None:
        self.suite = suite
        wanted = {placed.cell.key for placed in suite.placed}
        found = latest(results, lambda result: result.cell_key)
        self.results = {key: result for key, result in found.items() if key in wanted}
        """By the cell's key."""
        self._keys = {id(placed): placed.cell.key for placed in suite.placed}

    @cached_property
    def planned(self) -> int:
        """The number of cells of the suite; one that is placed twice counts once."""
        return len(set(self._keys.values()))

    @property
    def present(self) -> int:
        """The number of these cells that have a result."""
        return len(self.results)

    @cached_property
    def groups(self) -> list[str]:
        """Groups of rows, in the suite's order."""
        return list(dict.fromkeys(placed.group for placed in self.suite.placed))

    def rows(self, group: str) -> list[str]:
        """Rows of a group, in the suite's order."""
        return list(dict.fromkeys(placed.row for placed in self.suite.placed if placed.group == group))

    @cached_property
    def columns(self) -> list[str]:
        """Columns in the suite's order, without the average; those that it does not order come last."""
        ordered = [column for column in self.suite.columns if column != AVERAGE]
        return list(dict.fromkeys([*ordered, *(placed.column for placed in self.suite.placed)]))

    @cached_property
    def _at(self) -> dict[tuple[str, str, str], list[Placed]]:
        found: dict[tuple[str, str, str], list[Placed]] = {}
        for placed in self.suite.placed:
            found.setdefault((placed.group, placed.row, placed.column), []).append(placed)
        return found

    def at(self, group: str, row: str, column: str | None = None) -> list[CellResult]:
        """The results at a group, row and column, or in a whole row, each once."""
        columns = self.columns if column is None else [column]
        there = [placed for each in columns for placed in self._at.get((group, row, each), [])]
        keys = dict.fromkeys(self._keys[id(placed)] for placed in there)
        return [self.results[key] for key in keys if key in self.results]

    def whole(self, group: str, row: str, column: str) -> bool:
        """Whether every cell at a group, row and column has a result, those of all seeds."""
        placed = self._at.get((group, row, column), [])
        return bool(placed) and all(self._keys[id(each)] in self.results for each in placed)

    def cells(self, group: str, column: str) -> list[Cell]:
        """The cells of a group in a column, measured or not."""
        return [each.cell for each in self.suite.placed if (each.group, each.column) == (group, column)]

    @cached_property
    def by_method(self) -> bool:
        """Whether rows differ in their method; otherwise columns do, and each row is a network."""
        cells = self.cells(self.groups[0], self.columns[0])
        return len({(cell.method_label, cell.changes) for cell in cells}) > 1

    def value(self, group: str, row: str, column: str, read: Read) -> Value | None:
        """The number at a group, row and column."""
        return Value.over(self._seeds(group, row, column, read))

    def average(self, group: str, row: str, read: Read) -> Value | None:
        """The mean over all columns, over the seeds that have every one of them."""
        found = [self._seeds(group, row, column, read) for column in self.columns]
        whole = set.intersection(*(set(each) for each in found)) if found else set()
        return Value.over({seed: statistics.fmean(each[seed] for each in found) for seed in sorted(whole)})

    def number(self, group: str, row: str, column: str, read: Read) -> Value | None:
        """The number at a group, row and column, or the row's average where the column is `AVERAGE`."""
        return self.average(group, row, read) if column == AVERAGE else self.value(group, row, column, read)

    def difference(self, group: str, pairs: Sequence[tuple[Place, Place]], read: Read) -> Value | None:
        """The number at each first place less that at the second, paired by seed and stream; their mean over pairs.

        A seed counts where every cell at the places has a result and a partner with the same images in the same order.
        """
        found = [self._paired_seeds(group, first, second, read) for first, second in pairs]
        whole = set.intersection(*(set(each) for each in found)) if found else set()
        return Value.over({seed: statistics.fmean(each[seed] for each in found) for seed in sorted(whole)})

    def _paired_seeds(self, group: str, first: Place, second: Place, read: Read) -> dict[int, float]:
        ours, theirs = self._streams(group, first, read), self._streams(group, second, read)
        by_seed: dict[int, list[float | None]] = {}
        for stream, value in ours.items():
            other = theirs.get(stream)
            by_seed.setdefault(stream[0], []).append(None if value is None or other is None else value - other)
        return _means_of_whole_seeds(by_seed)

    def _streams(self, group: str, place: Place, read: Read) -> dict[tuple[int, tuple[object, ...]], float | None]:
        """The number of each cell at a place, by its seed and stream; None where it has none."""
        found = {}
        for placed in self._at.get((group, *place), []):
            result = self.results.get(self._keys[id(placed)])
            found[placed.cell.seed, _stream(placed.cell)] = None if result is None else read(result)
        return found

    def _seeds(self, group: str, row: str, column: str, read: Read) -> dict[int, float]:
        by_seed: dict[int, list[float | None]] = {}
        for placed in self._at.get((group, row, column), []):
            result = self.results.get(self._keys[id(placed)])
            by_seed.setdefault(placed.cell.seed, []).append(None if result is None else read(result))
        return _means_of_whole_seeds(by_seed)


def _means_of_whole_seeds(by_seed: dict[int, list[float | None]]) -> dict[int, float]:
    """The mean of each seed's numbers; a seed that lacks one is left out."""
    found = {seed: [each for each in values if each is not None] for seed, values in by_seed.items()}
    return {seed: statistics.fmean(each) for seed, each in found.items() if len(each) == len(by_seed[seed])}


def _stream(cell: Cell) -> tuple[object, ...]:
    """What a cell's images and their order depend on, beside the seed."""
    return cell.data, cell.dataset, cell.scenario, cell.corruptions, cell.severity, cell.options, cell.n
