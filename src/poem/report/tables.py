"""Tables as values: numbers in the paper's layout, and plain ones. Renderers come after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from poem.bench.analysis.aggregate import AVERAGE, Grid, Value, metric
from poem.bench.estimate import domain_size
from poem.bench.result import CellResult
from poem.report import words
from poem.report.words import METRICS, NOTHING, Metric

FAMILIES: dict[str, str] = {
    **dict.fromkeys(("Gauss.", "Shot", "Impul."), "Noise"),
    **dict.fromkeys(("Defoc.", "Glass", "Motion", "Zoom"), "Blur"),
    **dict.fromkeys(("Snow", "Frost", "Fog", "Brit."), "Weather"),
    **dict.fromkeys(("Contr.", "Elastic", "Pixel", "JPEG"), "Digital"),
}
"""The fifteen corruptions as the paper abbreviates them, by the block that its header puts them in."""
NETWORKS = ("ResNet-50", "ResNet-50-BN", "ResNet-50-GN", "ViTbase-LN")
"""The paper's, after which its suites call their blocks, rows or columns at every scale."""
OTHER_DATA = "other data or settings: not comparable"


BOLD = {
    True: "bold: the best of a block's column, where not all are equal",
    False: "bold: in each row the best of a method and its variants, where not all are equal",
}
"""What bold numbers are: where rows are methods, and where columns are."""


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Words and numbers under heads; the first column names the row."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    paper: tuple[tuple[str, ...], ...] = ()
    """What the paper has at the same places; empty where it has nothing."""

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Whether a column holds numbers alone, so that they stand flush right."""
        return tuple(
            all(row[at][:1].isdigit() or row[at][:1] in (*NOTHING, "\u2212", "-", "+") for row in self.rows)
            for at in range(len(self.head))
        )


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is printed at one place for one metric."""

    text: str
    deviation: str
    """Empty for a single seed."""
    best: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method in one block."""

    name: str
    source: str
    """What it saw of the source data."""
    entries: dict[str, tuple[Entry, ...]]
    """By metric, one per column."""
    paper: tuple[str, ...]
    """The paper's numbers, marked where they are of other data, empty where it has none."""
    differences: tuple[str, ...]
    """Ours less the paper's; empty where the data are others."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """Rows that are compared with each other."""

    name: str
    """The network that was measured; where columns have several, the suite's word; empty where it has none."""
    role: str
    """What the suite calls it, such as the paper's network in whose place it stands; empty without a word."""
    rows: tuple[Row, ...]


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """A table in the paper's layout, for every metric at once."""

    families: tuple[tuple[str, int], ...]
    """A head above the heads, as words and width; empty where the columns do not fall into families."""
    columns: tuple[str, ...]
    heads: tuple[str, ...]
    """The columns as printed below their families."""
    blocks: tuple[Block, ...]
    metrics: tuple[Metric, ...]
    """Those that have a number somewhere."""
    has_paper: bool
    bold: str
    """What bold numbers are."""
    first: str = "Method"
    """Head of the column that names the rows."""


def numbers(grid: Grid) -> Numbers:
    """A suite's table of numbers."""
    columns = [*grid.columns, *([AVERAGE] if grid.suite.average else [])]
    blocks = [_block(grid, group, columns) for group in grid.groups]
    filled = {
        key
        for block in blocks
        for row in block.rows
        for key, entries in row.entries.items()
        if any(entry.text != NOTHING for entry in entries)
    }
    families = _families(columns)
    return Numbers(
        families=families,
        columns=tuple(columns),
        heads=tuple(_short(column, columns) if families else column for column in columns),
        blocks=tuple(blocks),
        metrics=tuple(each for each in METRICS.values() if each.key in filled or each.key == "top1"),
        bold=BOLD[grid.by_method],
        first="Method" if grid.by_method else "Model",
        has_paper=any(text for block in blocks for row in block.rows for text in row.paper),
    )


def _block(grid: Grid, group: str, columns: list[str]) -> Block:
    names = grid.rows(group)
    found: dict[str, list[tuple[Entry, ...]]] = {}
    for key, measure in METRICS.items():
        values = [[grid.number(group, name, column, metric(key)) for column in columns] for name in names]
        found[key] = _entries(values, measure, _rivals(grid, group, columns))
    rows = [
        Row(
            name=name,
            source=source_access(grid.at(group, name)),
            entries={key: found[key][at] for key in METRICS},
            **_paper(grid, group, name, columns),
        )
        for at, name in enumerate(names)
    ]
    name, role = network(grid, group)
    return Block(name=name, role=role, rows=tuple(rows))


def network(grid: Grid, group: str) -> tuple[str, str]:
    """The network behind a block, and what the block's name is to it; the name alone where it has several."""
    bases = {placed.cell.base for placed in grid.suite.placed if placed.group == group}
    if not group or len(bases) > 1 or group in bases:
        return group, ""
    if group not in NETWORKS:
        return bases.pop(), group
    stands = "" if grid.suite.scale == "full" else "in place of "
    return bases.pop(), f"{stands}the paper's {group}"


def titled(grid: Grid, group: str) -> str:
    """The same in few words, for a drawing or a table's first column."""
    name, role = network(grid, group)
    short = role.replace("in place of the paper's", "for").replace("the paper's ", "")
    return f"{name} ({short})" if role else name


def _rivals(grid: Grid, group: str, columns: list[str]) -> list[list[tuple[int, int]]]:
    """Places that are compared with each other: a column; where its rows are one method's, a family of each row."""
    rows, families = len(grid.rows(group)), _segments(columns)
    if grid.by_method:
        return [[(row, at) for row in range(rows)] for at in range(len(columns))]
    return [[(row, at) for at in family] for row in range(rows) for family in families]


def _entries(
    values: list[list[Value | None]], measure: Metric, rivals: list[list[tuple[int, int]]]
) -> list[tuple[Entry, ...]]:
    """Each row's entries; the best is found among rivals as printed: ties share it, where all tie there is none."""
    texts = [[measure.text(None if each is None else each.mean) for each in row] for row in values]
    best: set[tuple[int, int]] = set()
    for places in rivals:
        there = [place for place in places if texts[place[0]][place[1]] != NOTHING]
        if len({texts[row][at] for row, at in there}) > 1:
            top = (max if measure.higher else min)((texts[row][at] for row, at in there), key=float)
            best |= {(row, at) for row, at in there if texts[row][at] == top}
    return [
        tuple(
            Entry(
                text=texts[row][at],
                deviation="" if each is None or each.deviation is None else measure.text(each.deviation),
                best=(row, at) in best,
            )
            for at, each in enumerate(line)
        )
        for row, line in enumerate(values)
    ]


def _paper(grid: Grid, group: str, row: str, columns: list[str]) -> dict[str, tuple[str, ...]]:
    theirs = [grid.suite.paper(group, row, column) for column in columns]
    mark = "" if comparable(grid) else "†"
    differences = []
    for column, their in zip(columns, theirs, strict=True):
        ours = grid.number(group, row, column, metric("top1"))
        if ours is None or their is None or mark:
            differences.append("")
        else:
            differences.append(words.signed(ours.mean - their))
    return {
        "paper": tuple("" if their is None else f"{their:.1f}{mark}" for their in theirs),
        "differences": tuple(differences),
    }


def comparable(grid: Grid) -> bool:
    """Whether the paper's numbers are of the same: full scale, nothing set by flags, whole data, the base's weights."""
    suite = grid.suite
    own = all(placed.cell.n is None and placed.cell.weights is None for placed in suite.placed)
    whole = all(report.card.get("n") == domain_size(report.cell.data) for report in grid.results.values())
    return suite.scale == "full" and not suite.altered and own and whole


def _families(columns: list[str]) -> tuple[tuple[str, int], ...]:
    """Corruptions by their kind, or a method with what was added to it."""
    shifts = [column for column in columns if column != AVERAGE]
    if len(shifts) > 4 and all(column in FAMILIES for column in shifts):
        return tuple((family, len(list(each))) for family, each in groupby(columns, lambda c: FAMILIES.get(c, "")))
    segments = _segments(columns)
    return tuple((columns[each[0]], len(each)) for each in segments) if len(segments) < len(columns) else ()


def _segments(columns: list[str]) -> list[list[int]]:
    """`Tent`, `Tent + POEM-I` and the like stand together; every other column stands alone."""
    found: list[list[int]] = []
    for at, column in enumerate(columns):
        if found and column.startswith(f"{columns[found[-1][0]]} + "):
            found[-1].append(at)
        else:
            found.append([at])
    return found


def _short(column: str, columns: list[str]) -> str:
    """A column's head without the name of its family."""
    base = next((each for each in columns if column.startswith(f"{each} + ")), None)
    if base is not None:
        return column.removeprefix(f"{base} ")
    return "alone" if any(each.startswith(f"{column} + ") for each in columns) else column


def source_access(reports: Sequence[CellResult]) -> str:
    """What a row's methods saw of the source data: the cards' words up to the first comma, which says what for."""
    found = dict.fromkeys(str(report.card.get("source_access", "none")).partition(",")[0] for report in reports)
    return " or ".join(found) or NOTHING


def learns(report: CellResult) -> bool:
    """Whether a report's method moves anything."""
    return not report.recipe.get("parameters", "").startswith("Nothing")


def grouped(table: Plain) -> Plain:
    """The same without its first column, where every group is the one without a name."""
    if any(row[0] for row in table.rows):
        return table
    return Plain(caption=table.caption, head=table.head[1:], rows=tuple(row[1:] for row in table.rows))
