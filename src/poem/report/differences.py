"""Paired differences of every row of a table against one of its rows: the same seed, the same stream."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from poem._util.nearest import nearest_hint
from poem.bench.analysis.aggregate import AVERAGE, Grid, Place, Value, metric
from poem.bench.cell import Cell
from poem.report.formatting import METRICS, MISSING, signed
from poem.report.tables import Entry, TextTable, block_network

METRIC = METRICS["top1"]
NOTE = (
    "Each number is the mean over seeds of the difference on the same stream; ± is its deviation over seeds, and the "
    "interval is Student's 95 % for the mean of a row, from the seeds alone. One seed has neither."
)
EXPLAINED = ("95 % from", "95 % to", "seeds")
"""Columns after those of the table: the interval of a row's mean, and the number of seeds."""


@dataclass(frozen=True, kw_only=True)
class DifferenceBlock:
    """Rows that are compared with the same row."""

    name: str
    role: str
    """As in `ResultBlock`."""
    reference: str
    rows: tuple[tuple[str, tuple[Entry, ...]], ...]
    """The name of each other row, and its entries."""

    @property
    def title(self) -> str:
        """The network, with its role."""
        return f"{self.name} ({self.role})" if self.role else self.name


@dataclass(frozen=True, kw_only=True)
class DifferenceTable:
    """Differences of a suite's rows to one of them, in percentage points."""

    caption: str
    first: str
    """Header of the column that names the rows."""
    columns: tuple[str, ...]
    blocks: tuple[DifferenceBlock, ...]

    def texts(self) -> tuple[TextTable, ...]:
        """The tables of a page, one for each block."""
        return tuple(
            TextTable(
                caption=f"{block.title}: {self.caption}" if block.title else self.caption,
                header=(self.first, *self.columns),
                rows=tuple((name, *map(_entry_text, entries)) for name, entries in block.rows),
            )
            for block in self.blocks
        )


def difference_tables(grids: Sequence[Grid], against: str) -> list[DifferenceTable | None]:
    """The table of each suite; None for a suite without such a row.

    Args:
        grids: Suites with their results.
        against: Name of a row (of a column, where columns are the methods), or of a method.

    Raises:
        ValueError: No suite has it, or several rows of a group run this method and none of them is it unchanged.
    """
    found = [_difference_table(grid, against) for grid in grids]
    if all(each is None for each in found):
        known = dict.fromkeys(
            name for grid in grids for group in grid.groups for row in _names(grid, group)
            for name in (row, *sorted({cell.method_label for cell in _cells(grid, group, row)}))
        )  # fmt: skip
        raise ValueError(f"no row and no method is {against!r}; {nearest_hint(against, list(known))}")
    return found


def _difference_table(grid: Grid, against: str) -> DifferenceTable | None:
    references = {group: name for group in grid.groups if (name := _reference(grid, group, against)) is not None}
    if not references or grid.suite.kind not in ("table", "lines", "bars"):
        return None
    named = " or ".join(dict.fromkeys(references.values()))
    columns = _columns(grid)
    blocks = []
    for group, reference in references.items():
        network, role = block_network(grid, group)
        blocks.append(
            DifferenceBlock(name=network, role=role, reference=reference, rows=tuple(_rows(grid, group, reference)))
        )
    return DifferenceTable(
        caption=f"{METRIC.label} less that of {named}, in percentage points",
        first="Method" if grid.by_method else "Model and method", columns=(*columns, *EXPLAINED), blocks=tuple(blocks),
    )  # fmt: skip


def _columns(grid: Grid) -> tuple[str, ...]:
    """The columns of the table and their mean; where columns are the methods, one difference for each row."""
    if not grid.by_method:
        return ("difference",)
    return (*grid.columns, *((AVERAGE,) if len(grid.columns) > 1 else ()))


def _rows(grid: Grid, group: str, reference: str) -> list[tuple[str, tuple[Entry, ...]]]:
    if not grid.by_method:
        others = [name for name in grid.columns if name != reference]
        pairs = {f"{row}, {name}": ((row, name), (row, reference)) for row in grid.rows(group) for name in others}
        return [(name, _entries(grid, group, [[pair]])) for name, pair in pairs.items()]
    rows = []
    for row in grid.rows(group):
        if row != reference:
            pairs_of = [((row, column), (reference, column)) for column in grid.columns]
            means = [pairs_of] if len(pairs_of) > 1 else []
            rows.append((row, _entries(grid, group, [*([pair] for pair in pairs_of), *means])))
    return rows


def _entries(grid: Grid, group: str, pairs: Sequence[Sequence[tuple[Place, Place]]]) -> tuple[Entry, ...]:
    """An entry for each set of pairs, then the interval and the seeds of the last, which is the row's mean."""
    values = [grid.difference(group, each, metric(METRIC.key)) for each in pairs]
    mean = values[-1]
    interval = None if mean is None else mean.interval
    ends = (None, None) if interval is None else interval
    seeds = Entry(text=MISSING, deviation="") if mean is None else Entry(text=str(mean.n), deviation="", mean=mean.n)
    return (*map(_entry, values), *(_entry(_plain(end)) for end in ends), seeds)


def _plain(value: float | None) -> Value | None:
    return None if value is None else Value(mean=value, deviation=None, seeds={})


def _entry(value: Value | None) -> Entry:
    if value is None:
        return Entry(text=MISSING, deviation="")
    deviation = "" if value.deviation is None else METRIC.format(value.deviation)
    return Entry(text=signed(value.mean), deviation=deviation, mean=value.mean, spread=value.deviation)


def _entry_text(entry: Entry) -> str:
    return f"{entry.text} ± {entry.deviation}" if entry.deviation else entry.text


def _names(grid: Grid, group: str) -> list[str]:
    """The methods of a group: its rows, or the columns."""
    return grid.rows(group) if grid.by_method else grid.columns


def _cells(grid: Grid, group: str, name: str) -> list[Cell]:
    """The cells of one of `_names`, measured or not."""
    at = "row" if grid.by_method else "column"
    return [each.cell for each in grid.suite.placed if each.group == group and getattr(each, at) == name]


def _reference(grid: Grid, group: str, against: str) -> str | None:
    """The one of `_names` that is compared with, or None."""
    names = _names(grid, group)
    for found in (
        [name for name in names if name == against],
        [name for name in names if name.casefold() == against.casefold()],
        [name for name in names if {cell.method_label for cell in _cells(grid, group, name)} == {against}],
    ):
        if len(found) > 1:
            found = [name for name in found if not any(cell.changes for cell in _cells(grid, group, name))] or found
        if len(found) > 1:
            raise ValueError(f"several rows are {against!r}: {', '.join(found)}; name one of them")
        if found:
            return found[0]
    return None
