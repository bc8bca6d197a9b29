"""Tables as dataclasses, for the Markdown and HTML renderers: results in the paper's layout, and tables of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from poem.bench.analysis.aggregate import AVERAGE, Grid, Value, metric
from poem.bench.estimate import domain_size
from poem.bench.result import CellResult
from poem.report import formatting
from poem.report.formatting import METRICS, MISSING, MetricLabel

CORRUPTION_FAMILIES: dict[str, str] = {
    **dict.fromkeys(("Gauss.", "Shot", "Impul."), "Noise"),
    **dict.fromkeys(("Defoc.", "Glass", "Motion", "Zoom"), "Blur"),
    **dict.fromkeys(("Snow", "Frost", "Fog", "Brit."), "Weather"),
    **dict.fromkeys(("Contr.", "Elastic", "Pixel", "JPEG"), "Digital"),
}
"""Family of each of the fifteen corruptions, by the abbreviation in the paper's header."""
PAPER_NETWORKS = ("ResNet-50", "ResNet-50-BN", "ResNet-50-GN", "ViTbase-LN")
"""The paper's networks; its suites name blocks, rows or columns after them at every scale."""
OTHER_DATA = "other data or settings: not comparable"
BOLD = {
    True: "bold: the best of a block's column, where not all are equal",
    False: "bold: in each row the best of a method and its variants, where not all are equal",
}
"""What bold means, by whether rows are methods or columns are."""


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """A table of text; the first column names the row."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    paper: tuple[tuple[str, ...], ...] = ()
    """The paper's cells at the same positions; empty where it has none."""

    @property
    def numeric(self) -> tuple[bool, ...]:
        """For each column, whether it holds only numbers, which are aligned right."""
        return tuple(
            all(row[at][:1].isdigit() or row[at][:1] in (*MISSING, "\u2212", "-", "+") for row in self.rows)
            for at in range(len(self.header))
        )


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One number of a results table, for one metric, as text."""

    text: str
    deviation: str
    """Standard deviation over seeds; empty for a single seed."""
    best: bool = False
    mean: float | None = None
    """The number itself, not rounded; None where it is missing."""
    spread: float | None = None
    """The deviation itself; None for a single seed."""


@dataclass(frozen=True, kw_only=True)
class ResultRow:
    """One method in one block."""

    name: str
    source: str
    """What the method saw of the source data."""
    entries: dict[str, tuple[Entry, ...]]
    """By metric, one entry per column."""
    paper: tuple[str, ...]
    """The paper's numbers, marked where its data differ from ours, empty where it has none."""
    differences: tuple[str, ...]
    """Our number minus the paper's; empty where its data differ from ours."""


@dataclass(frozen=True, kw_only=True)
class ResultBlock:
    """Rows that are compared with each other."""

    name: str
    """The network that was measured; where columns have several, the suite's group; empty where it has none."""
    role: str
    """The suite's group where that is another name, such as the paper's network that this one replaces."""
    rows: tuple[ResultRow, ...]


@dataclass(frozen=True, kw_only=True)
class ResultTable:
    """A table of results in the paper's layout, for every metric."""

    families: tuple[tuple[str, int], ...]
    """A row above the header: title and number of columns of each family; empty where columns have no families."""
    columns: tuple[str, ...]
    column_headers: tuple[str, ...]
    """The columns' headers below their families."""
    blocks: tuple[ResultBlock, ...]
    metrics: tuple[MetricLabel, ...]
    """Metrics that have a number in some cell."""
    has_paper: bool
    bold: str
    """What bold means."""
    first: str = "Method"
    """Header of the column that names the rows."""


def result_table(grid: Grid) -> ResultTable:
    """Build the results table of a suite."""
    columns = [*grid.columns, *([AVERAGE] if grid.suite.average else [])]
    blocks = [_block(grid, group, columns) for group in grid.groups]
    filled = {
        key
        for block in blocks
        for row in block.rows
        for key, entries in row.entries.items()
        if any(entry.text != MISSING for entry in entries)
    }
    families = _column_families(columns)
    return ResultTable(
        families=families,
        columns=tuple(columns),
        column_headers=tuple(_short_header(column, columns) if families else column for column in columns),
        blocks=tuple(blocks),
        metrics=tuple(each for each in METRICS.values() if each.key in filled or each.key == "top1"),
        bold=BOLD[grid.by_method],
        first="Method" if grid.by_method else "Model",
        has_paper=any(text for block in blocks for row in block.rows for text in row.paper),
    )


def _block(grid: Grid, group: str, columns: list[str]) -> ResultBlock:
    names = grid.rows(group)
    found: dict[str, list[tuple[Entry, ...]]] = {}
    for key, label in METRICS.items():
        values = [[grid.number(group, name, column, metric(key)) for column in columns] for name in names]
        found[key] = _entries(values, label, _compared_sets(grid, group, columns))
    rows = [
        ResultRow(
            name=name,
            source=source_access(grid.at(group, name)),
            entries={key: found[key][at] for key in METRICS},
            **_paper_numbers(grid, group, name, columns),
        )
        for at, name in enumerate(names)
    ]
    name, role = block_network(grid, group)
    return ResultBlock(name=name, role=role, rows=tuple(rows))


def block_network(grid: Grid, group: str) -> tuple[str, str]:
    """The network of a group and the group's role, as in `ResultBlock`; with several networks, the group's name."""
    bases = {placed.cell.base for placed in grid.suite.placed if placed.group == group}
    if not group or len(bases) > 1 or group in bases:
        return group, ""
    if group not in PAPER_NETWORKS:
        return bases.pop(), group
    relation = "" if grid.suite.scale == "full" else "in place of "
    return bases.pop(), f"{relation}the paper's {group}"


def block_title(grid: Grid, group: str) -> str:
    """A short title of a group, for a panel or a table's first column."""
    name, role = block_network(grid, group)
    short = role.replace("in place of the paper's", "for").replace("the paper's ", "")
    return f"{name} ({short})" if role else name


def _compared_sets(grid: Grid, group: str, columns: list[str]) -> list[list[tuple[int, int]]]:
    """Sets of (row, column) whose best is bold: columns, or where columns are methods, each row's method families."""
    rows, families = len(grid.rows(group)), _method_families(columns)
    if grid.by_method:
        return [[(row, at) for row in range(rows)] for at in range(len(columns))]
    return [[(row, at) for at in family] for row in range(rows) for family in families]


def _entries(
    values: list[list[Value | None]], label: MetricLabel, compared: list[list[tuple[int, int]]]
) -> list[tuple[Entry, ...]]:
    """Each row's entries; the best of a compared set is decided as printed: ties share it, if all tie there is none."""
    texts = [[label.format(None if each is None else each.mean) for each in row] for row in values]
    best: set[tuple[int, int]] = set()
    for cells in compared:
        present = [(row, at) for row, at in cells if texts[row][at] != MISSING]
        if len({texts[row][at] for row, at in present}) > 1:
            top = (max if label.higher else min)((texts[row][at] for row, at in present), key=float)
            best |= {(row, at) for row, at in present if texts[row][at] == top}
    return [
        tuple(
            Entry(
                text=texts[row][at],
                deviation="" if each is None or each.deviation is None else label.format(each.deviation),
                best=(row, at) in best,
                mean=None if each is None else each.mean,
                spread=None if each is None else each.deviation,
            )
            for at, each in enumerate(line)
        )
        for row, line in enumerate(values)
    ]


def _paper_numbers(grid: Grid, group: str, row: str, columns: list[str]) -> dict[str, tuple[str, ...]]:
    published = [grid.suite.paper(group, row, column) for column in columns]
    mark = "" if comparable_with_paper(grid) else "†"
    differences = []
    for column, number in zip(columns, published, strict=True):
        ours = grid.number(group, row, column, metric("top1"))
        if ours is None or number is None or mark:
            differences.append("")
        else:
            differences.append(formatting.signed(ours.mean - number))
    return {
        "paper": tuple("" if number is None else f"{number:.1f}{mark}" for number in published),
        "differences": tuple(differences),
    }


def comparable_with_paper(grid: Grid) -> bool:
    """Whether a suite was run as in the paper: full scale, no flags, all images, and the bases' own weights."""
    suite = grid.suite
    own = all(placed.cell.n is None and placed.cell.weights is None for placed in suite.placed)
    whole = all(result.card.get("n") == domain_size(result.cell.data) for result in grid.results.values())
    return suite.scale == "full" and not suite.altered and own and whole


def _column_families(columns: list[str]) -> tuple[tuple[str, int], ...]:
    """Title and size of each family of columns: corruptions of one kind, or a method with its `+ POEM` variants."""
    shifts = [column for column in columns if column != AVERAGE]
    if len(shifts) > 4 and all(column in CORRUPTION_FAMILIES for column in shifts):
        return tuple(
            (family, len(list(each))) for family, each in groupby(columns, lambda c: CORRUPTION_FAMILIES.get(c, ""))
        )
    families = _method_families(columns)
    return tuple((columns[each[0]], len(each)) for each in families) if len(families) < len(columns) else ()


def _method_families(columns: list[str]) -> list[list[int]]:
    """Positions of columns by family: `Tent`, `Tent + POEM-I` and the like are one; any other column is its own."""
    found: list[list[int]] = []
    for at, column in enumerate(columns):
        if found and column.startswith(f"{columns[found[-1][0]]} + "):
            found[-1].append(at)
        else:
            found.append([at])
    return found


def _short_header(column: str, columns: list[str]) -> str:
    """A column's header without the name of its family."""
    base = next((each for each in columns if column.startswith(f"{each} + ")), None)
    if base is not None:
        return column.removeprefix(f"{base} ")
    return "alone" if any(each.startswith(f"{column} + ") for each in columns) else column


def source_access(results: Sequence[CellResult]) -> str:
    """What a row's methods saw of the source data: each card's text up to the first comma (then comes the purpose)."""
    found = dict.fromkeys(str(result.card.get("source_access", "none")).partition(",")[0] for result in results)
    return " or ".join(found) or MISSING


def learns(result: CellResult) -> bool:
    """Whether a result's method updates any parameter."""
    return not result.recipe.get("parameters", "").startswith("Nothing")


def group_table(caption: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> TextTable:
    """A table whose first column is the group; the column is left out where no group has a name."""
    first = 0 if any(row[0] for row in rows) else 1
    return TextTable(caption=caption, header=tuple(header[first:]), rows=tuple(tuple(row[first:]) for row in rows))
