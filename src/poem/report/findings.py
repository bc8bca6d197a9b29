"""What a table shows, first: a sentence and a set of bars for each network."""

from __future__ import annotations

import math
from dataclasses import dataclass

from poem.bench.analysis.aggregate import Grid, metric
from poem.report.demo import ROUNDING, percent_variance
from poem.report.formatting import signed
from poem.report.plots import Figure, Panel, Series, SeriesStyle
from poem.report.tables import block_title

PLAIN, BEST, LOSS, SOURCE = SeriesStyle(1, 0), SeriesStyle(2, 0), SeriesStyle(0, 0), SeriesStyle(7, 0)
"""Styles of bars: any method, the best and its equals, one that loses beyond chance, and the model as it is."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A row of a table in one number."""

    row: str
    mean: float
    error: float
    """Standard error of the mean, in percentage points, from the number of images."""
    source: bool
    """Whether it is the model as it is."""


def summaries(grid: Grid) -> dict[str, list[Summary]]:
    """By group, the rows that have an average over all columns; empty where rows are not methods."""
    if grid.suite.kind != "table" or not grid.present or not grid.by_method:
        return {}
    found = {group: [each for row in grid.rows(group) if (each := _summary(grid, group, row))] for group in grid.groups}
    return {group: rows for group, rows in found.items() if len(rows) > 1}


def _summary(grid: Grid, group: str, row: str) -> Summary | None:
    value = grid.average(group, row, metric("top1"))
    results = grid.at(group, row)
    if value is None or not results:
        return None
    spread = [
        percent_variance(each.metrics["top1"]) / float(each.card.get("total") or each.ledger.get("images") or 1)
        for each in results
        if "top1" in each.metrics
    ]
    error = math.sqrt(math.fsum(spread)) / max(1, len(spread))
    source = {each.cell.method for each in results} == {"source"}
    return Summary(row=row, mean=value.mean, error=error, source=source)


def findings(grid: Grid) -> tuple[str, ...]:
    """A sentence for each network: which method is best, what that gains, and how many lose or are as good."""
    return tuple(_sentence(block_title(grid, group), rows) for group, rows in summaries(grid).items())


def _sentence(network: str, rows: list[Summary]) -> str:
    where = f"{network}: " if network else ""
    best = max(rows, key=lambda each: each.mean)
    source = next((each for each in rows if each.source), None)
    close = [each for each in rows if each is not best and best.mean - each.mean <= _error(best, each)]
    if best.source:
        return f"{where}no method is above {best.row}, which has {best.mean:.1f} %."
    gain = "" if source is None else f", {signed(best.mean - source.mean)} points over {source.row}"
    if len(close) == len(rows) - 1:
        most = f"{best.row} has most, {best.mean:.1f} %{gain}"
        return f"{where}none stands out: {most}, and all others are within one standard error of it."
    text = f"{where}{best.row} is best, {best.mean:.1f} %{gain}"
    if close:
        are = "are" if len(close) > 1 else "is"
        named = f"{len(close)} others" if len(close) > 2 else " and ".join(each.row for each in close)
        text += f"; {named} {are} within one standard error of it"
    lost = [each for each in rows if source is not None and _loses(each, source)]
    if source is not None and lost:
        worst = min(lost, key=lambda each: each.mean)
        count = f"{len(lost)} of {sum(not each.source for each in rows)} methods lose"
        count = f"{worst.row} loses" if len(lost) == 1 else f"{count}, {worst.row} most"
        text += f"; {count}, {signed(worst.mean - source.mean)}"
    return f"{text.removesuffix('.')}."


def _error(one: Summary, other: Summary) -> float:
    """Standard error of a difference, as for two independent samples of images."""
    return math.hypot(one.error, other.error)


def _loses(each: Summary, source: Summary) -> bool:
    gap = source.mean - each.mean
    return gap > ROUNDING and gap > _error(each, source)


def bars(grid: Grid) -> Figure | None:
    """Bars of every row's average, a panel for each network, from 0 to 100 % so that small differences look small."""
    panels, styles = [], {}
    for group, rows in summaries(grid).items():
        title = block_title(grid, group)
        source = next((each for each in rows if each.source), None)
        best = max(rows, key=lambda each: each.mean)
        won = best if source is None or best.mean - source.mean > _error(best, source) else None
        series = []
        for at, each in enumerate(rows):
            name = f"{title} {each.row}"
            series.append(Series(name=name, x=(float(at),), y=(each.mean,)))
            styles[name] = (
                SOURCE if each.source
                else LOSS if source is not None and _loses(each, source)
                else BEST if won is not None and won.mean - each.mean <= _error(won, each)
                else PLAIN
            )  # fmt: skip
        text = "; ".join(f"{each.row} {each.mean:.1f} %" for each in rows)
        panels.append(
            Panel(
                form="rows",
                title=title,
                description=f"accuracy: {text}",
                x="top-1 accuracy (%)",
                series=tuple(series),
                tick_labels=tuple(each.row for each in rows),
                level=None if source is None else source.mean,
            )
        )
    if not panels:
        return None
    columns = len(grid.columns)
    over = "" if columns == 1 else f", mean of {columns} {'shifts' if _is_shifts(grid) else 'columns'}"
    has_source = any(panel.level is not None for panel in panels)
    parts = {
        "Green: the best, and those within one standard error of it.": BEST in styles.values(),
        "Red: more than one standard error below the model as it is.": LOSS in styles.values(),
        "Dashed: the model as it is.": has_source,
    }
    note = " ".join(text for text, needed in parts.items() if needed)
    return Figure(title=f"Accuracy{over}", panels=tuple(panels), data=(), styles=styles, note=note)


def _is_shifts(grid: Grid) -> bool:
    return all(len(result.cell.corruptions) == 1 for result in grid.results.values())
