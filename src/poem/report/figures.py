"""Figures as values: which panels a suite's kind asks for, what they say in words, and their data as tables."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from poem.bench.analysis.aggregate import Grid, Read, Value, metric, timing
from poem.bench.result import CellResult
from poem.report import probed, words
from poem.report.plots import Look, Panel, Series
from poem.report.probed import Figure
from poem.report.tables import FAMILIES, Plain, grouped, titled
from poem.report.words import NOTHING


def figures(grid: Grid) -> tuple[Figure, ...]:
    """Everything that is drawn of a suite; nothing where no cell has what it takes."""
    makers = _KINDS.get(grid.suite.kind, ())
    return tuple(figure for make in makers if (figure := make(grid)) is not None and figure.panels)


# --- curves and bars


def _lines(grid: Grid) -> Figure:
    return _curves(grid, metric("top1"), grid.suite.y or "top-1 accuracy (%)", "Accuracy")


def _times(grid: Grid) -> Figure | None:
    """Time against updates, where those are what the curve moves."""
    if not grid.suite.x.startswith(("updates", "iterations")):
        return None
    figure = _curves(grid, timing("adapt_s"), "seconds per cell", "Time")
    data = _grid_table(grid, timing("adapt_s"), "Seconds in the adapter, mean over the cells of a place")
    return replace(figure, data=(data,))


def _curves(grid: Grid, read: Read, y: str, title: str) -> Figure:
    numeric = all(_is_number(column) for column in grid.columns)
    at = {column: float(column) if numeric else float(place) for place, column in enumerate(grid.columns)}
    panels = []
    for group in grid.groups:
        found = {row: _points(grid, group, row, read) for row in grid.rows(group)}
        series = [
            _series(row, [at[column] for column in points], list(points.values()))
            for row, points in found.items()
            if points
        ]
        if series:
            said = f"{y}: {'; '.join(_said(each) for each in series)}"
            panel = Panel(
                form="lines", title=titled(grid, group), x=grid.suite.x, y=y, series=tuple(series), words=said,
                names=() if numeric else tuple(grid.columns), least=2.0 if "%" in y else 0.0, floor="second" in y,
            )  # fmt: skip
            panels.append(panel)
    legend = dict.fromkeys(series.name for panel in panels for series in panel.series)
    return Figure(title=title, panels=tuple(panels), data=(), legend=tuple(legend))


def _bars(grid: Grid) -> Figure:
    """One bar per row where there is one column; otherwise one place per column, one colour per row."""
    single = len(grid.columns) == 1
    y = grid.suite.y or "top-1 accuracy (%)"
    panels = []
    for group in grid.groups:
        found = {row: _points(grid, group, row, metric("top1")) for row in grid.rows(group)}
        rows = [row for row, points in found.items() if points]
        series = []
        for place, row in enumerate(rows):
            xs = [place] if single else [grid.columns.index(column) for column in found[row]]
            series.append(_series(row, [float(x) for x in xs], list(found[row].values())))
        if series:
            below = tuple(rows) if single else tuple(grid.columns)
            said = "; ".join(_said(each) for each in series)
            title = titled(grid, group)
            panels.append(Panel(form="bars", title=title, y=y, series=tuple(series), names=below, words=f"{y}: {said}"))
    names = tuple(dict.fromkeys(each.name for panel in panels for each in panel.series))
    if single:  # names stand below the bars, so colour is free to say which have POEM in them
        told = {name: Look(0 if "POEM" in name else 7, 0) for name in names}
        return Figure(title="Accuracy", panels=tuple(panels), data=(), looks=told)
    return Figure(title="Accuracy", panels=tuple(panels), data=(), legend=names)


def _series(name: str, xs: Sequence[float], values: Sequence[Value]) -> Series:
    spread = tuple(value.deviation or 0.0 for value in values)
    return Series(name=name, x=tuple(xs), y=tuple(value.mean for value in values), spread=spread)


def _points(grid: Grid, group: str, row: str, read: Read) -> dict[str, Value]:
    found = {column: grid.value(group, row, column, read) for column in grid.columns}
    return {column: value for column, value in found.items() if value is not None}


def _grid_table(grid: Grid, read: Read, caption: str) -> Plain:
    rows = []
    for group in grid.groups:
        for row in grid.rows(group):
            values = [grid.value(group, row, column, read) for column in grid.columns]
            rows.append((titled(grid, group), row, *(_number(value) for value in values)))
    return grouped(Plain(caption=caption, head=("group", "row", *grid.columns), rows=tuple(rows)))


def _number(value: Value | None) -> str:
    if value is None:
        return NOTHING
    return f"{value.mean:.2f}" + ("" if value.deviation is None else f" ± {value.deviation:.2f}")


def _said(series: Series) -> str:
    values = (
        ", ".join(f"{y:.1f}" for y in series.y) if len(series.y) <= 6 else f"{series.y[0]:.1f} to {series.y[-1]:.1f}"
    )
    return f"{series.name} {values}"


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


# --- along the stream, and speed


def _windows(grid: Grid) -> Figure | None:
    """Accuracy window by window, the mean over a row's cells; only where the stream has three windows or more.

    Corruptions of one network are drawn as their mean; few columns of other kinds have a panel each.
    """
    if not grid.by_method:
        return None
    few = len(grid.columns) <= 3 and not any(column in FAMILIES for column in grid.columns)
    panels, rows = [], []
    for group in grid.groups:
        for column in grid.columns if few else [None]:
            title = " · ".join(filter(None, (titled(grid, group), column)))
            series = [each for row in grid.rows(group) if (each := _course(row, grid.at(group, row, column)))]
            rows += [(title, each.name, *(f"{value:.1f}" for value in each.y)) for each in series]
            if series:
                said = "accuracy window by window: " + "; ".join(_said(each) for each in series)
                panels.append(
                    Panel(form="lines", title=title, words=said, x="window of the stream", y="top-1 accuracy (%)",
                          series=tuple(series), least=2.0)
                )  # fmt: skip
    wide = max((len(row) for row in rows), default=2)
    filled = tuple(row + (NOTHING,) * (wide - len(row)) for row in rows)
    head = ("group", "row", *(str(at + 1) for at in range(wide - 2)))
    data = grouped(Plain(caption="Accuracy (%) by window, mean over cells", head=head, rows=filled))
    legend = dict.fromkeys(each.name for panel in panels for each in panel.series)
    sizes = sorted({report.cell.window for report in grid.results.values()})
    size = " or ".join(map(words.count, sizes))
    return Figure(title="Accuracy over the stream", panels=tuple(panels), data=(data,), legend=tuple(legend),
                  note=f"A window is {size} images that arrived one after the other.")  # fmt: skip


def _course(row: str, reports: Sequence[CellResult]) -> Series | None:
    length = min((len(report.windows) for report in reports), default=0)
    if length < 3:
        return None
    means = tuple(statistics.fmean(report.windows[at] for report in reports) for at in range(length))
    return Series(name=row, x=tuple(float(at + 1) for at in range(length)), y=means)


def _speed(grid: Grid) -> Figure | None:
    panels, rows = [], []
    for group in grid.groups:
        series = []
        for row in grid.rows(group):
            reports = grid.at(group, row)
            pairs = [(report.timing.get("images_per_s"), report.metrics.get("top1")) for report in reports]
            there = [(fast, right) for fast, right in pairs if fast is not None and right is not None]
            if there:
                fast, right = (statistics.fmean(each) for each in zip(*there, strict=True))
                series.append(Series(name=row, x=(fast,), y=(right,)))
                rows.append((titled(grid, group), row, words.speed(fast), f"{right:.1f}"))
        if series:
            said = "; ".join(f"{each.name} {words.speed(each.x[0])} images/s, {each.y[0]:.1f} %" for each in series)
            panels.append(
                Panel(form="scatter", title=titled(grid, group), words=said, x="images per second, log scale",
                      y="top-1 accuracy (%)", series=tuple(series), log=True)
            )  # fmt: skip
    head = ("group", "row", "images/s", "top-1 (%)")
    data = grouped(Plain(caption="Speed and accuracy, mean over cells", head=head, rows=tuple(rows)))
    legend = dict.fromkeys(each.name for panel in panels for each in panel.series)
    return Figure(title="Speed against accuracy", panels=tuple(panels), data=(data,), legend=tuple(legend))


_KINDS: dict[str, tuple[Callable[[Grid], Figure | None], ...]] = {
    "table": (_windows,),
    "lines": (_lines, _times),
    "bars": (_bars,),
    "efficiency": (_speed,),
    "transitions": (probed.transitions,),
    "groups": (probed.groups,),
    "gradients": (probed.gradients,),
    "range": (probed.within_range,),
}
