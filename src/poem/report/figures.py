"""The figures of a suite by its kind: curves, bars, accuracy over the stream, speed, and those of probes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

from poem.bench.analysis.aggregate import Grid, Read, Value, metric, timing
from poem.bench.result import CellResult
from poem.report import formatting, probe_figures
from poem.report.formatting import MISSING
from poem.report.plots import Figure, Panel, Series, SeriesStyle
from poem.report.tables import CORRUPTION_FAMILIES, TextTable, block_title, group_table

MIN_RANGE = 20.0
"""Smallest range of an axis of accuracy in percentage points: what chance does to a few hundred images stays small."""


def figures(grid: Grid) -> tuple[Figure, ...]:
    """The figures of a suite; none where no cell has their data."""
    makers = _KINDS.get(grid.suite.kind, ())
    return tuple(figure for make in makers if (figure := make(grid)) is not None and figure.panels)


# --- curves and bars


def _lines(grid: Grid) -> Figure:
    return _curves(grid, metric("top1"), grid.suite.y or "top-1 accuracy (%)", "Accuracy")


def _times(grid: Grid) -> Figure | None:
    """Curves of time, where the x axis is the number of updates."""
    if not grid.suite.x.startswith(("updates", "iterations")):
        return None
    figure = _curves(grid, timing("adapt_s"), "seconds per cell", "Time")
    data = _grid_table(grid, timing("adapt_s"), "Seconds in the adapter, mean over cells")
    return replace(figure, data=(data,))


def _curves(grid: Grid, read: Read, y: str, title: str) -> Figure:
    numeric = all(_is_number(column) for column in grid.columns)
    at = {column: float(column) if numeric else float(index) for index, column in enumerate(grid.columns)}
    panels = []
    for group in grid.groups:
        found = {row: _points(grid, group, row, read) for row in grid.rows(group)}
        series = [
            _series(row, [at[column] for column in points], list(points.values()))
            for row, points in found.items()
            if points
        ]
        if series:
            text = f"{y}: {'; '.join(_series_text(each) for each in series)}"
            panel = Panel(
                form="lines", title=block_title(grid, group), description=text, x=grid.suite.x, y=y,
                series=tuple(series), tick_labels=() if numeric else tuple(grid.columns),
                min_range=MIN_RANGE if "%" in y else 0.0, from_zero="second" in y,
            )  # fmt: skip
            panels.append(panel)
    legend = dict.fromkeys(series.name for panel in panels for series in panel.series)
    return Figure(title=title, panels=tuple(panels), data=(), legend=tuple(legend))


def _bars(grid: Grid) -> Figure:
    """Bars: one per row where there is one column, otherwise one group of bars per column and one colour per row."""
    single = len(grid.columns) == 1
    y = grid.suite.y or "top-1 accuracy (%)"
    panels = []
    for group in grid.groups:
        found = {row: _points(grid, group, row, metric("top1")) for row in grid.rows(group)}
        rows = [row for row, points in found.items() if points]
        series = []
        for index, row in enumerate(rows):
            xs = [index] if single else [grid.columns.index(column) for column in found[row]]
            series.append(_series(row, [float(x) for x in xs], list(found[row].values())))
        if series:
            labels = tuple(rows) if single else tuple(grid.columns)
            text = "; ".join(_series_text(each) for each in series)
            title = block_title(grid, group)
            panels.append(
                Panel(
                    form="bars", title=title, y=y, series=tuple(series), tick_labels=labels, description=f"{y}: {text}"
                )
            )
    names = tuple(dict.fromkeys(each.name for panel in panels for each in panel.series))
    if single:  # bars have tick labels, so colour can show which methods have POEM in them
        styles = {name: SeriesStyle(0 if "POEM" in name else 7, 0) for name in names}
        return Figure(title="Accuracy", panels=tuple(panels), data=(), styles=styles)
    return Figure(title="Accuracy", panels=tuple(panels), data=(), legend=names)


def _series(name: str, xs: Sequence[float], values: Sequence[Value]) -> Series:
    spread = tuple(value.deviation or 0.0 for value in values)
    return Series(name=name, x=tuple(xs), y=tuple(value.mean for value in values), spread=spread)


def _points(grid: Grid, group: str, row: str, read: Read) -> dict[str, Value]:
    found = {column: grid.value(group, row, column, read) for column in grid.columns}
    return {column: value for column, value in found.items() if value is not None}


def _grid_table(grid: Grid, read: Read, caption: str) -> TextTable:
    rows = []
    for group in grid.groups:
        for row in grid.rows(group):
            values = [grid.value(group, row, column, read) for column in grid.columns]
            rows.append((block_title(grid, group), row, *(_number(value) for value in values)))
    return group_table(caption, ("group", "row", *grid.columns), rows)


def _number(value: Value | None) -> str:
    if value is None:
        return MISSING
    return f"{value.mean:.2f}" + ("" if value.deviation is None else f" ± {value.deviation:.2f}")


def _series_text(series: Series) -> str:
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
    """Accuracy by window of the stream, as mean over a row's cells; needs streams of three windows or more.

    Corruptions of one network are drawn as their mean; up to three columns of other kinds have a panel each.
    """
    if not grid.by_method:
        return None
    per_column = len(grid.columns) <= 3 and not any(column in CORRUPTION_FAMILIES for column in grid.columns)
    panels, rows = [], []
    for group in grid.groups:
        for column in grid.columns if per_column else [None]:
            title = " · ".join(filter(None, (block_title(grid, group), column)))
            series = [each for row in grid.rows(group) if (each := _window_series(row, grid.at(group, row, column)))]
            rows += [(title, each.name, *(f"{value:.1f}" for value in each.y)) for each in series]
            if series:
                text = "accuracy window by window: " + "; ".join(_series_text(each) for each in series)
                panels.append(
                    Panel(form="lines", title=title, description=text, x="window of the stream", y="top-1 accuracy (%)",
                          series=tuple(series), min_range=MIN_RANGE)
                )  # fmt: skip
    width = max((len(row) for row in rows), default=2)
    filled = [row + (MISSING,) * (width - len(row)) for row in rows]
    header = ("group", "row", *(str(at + 1) for at in range(width - 2)))
    data = group_table("Accuracy (%) by window, mean over cells", header, filled)
    legend = dict.fromkeys(each.name for panel in panels for each in panel.series)
    sizes = sorted({result.cell.window for result in grid.results.values()})
    size = " or ".join(map(formatting.count, sizes))
    return Figure(title="Accuracy over the stream", panels=tuple(panels), data=(data,), legend=tuple(legend),
                  note=f"A window is {size} consecutive images of the stream.")  # fmt: skip


def _window_series(row: str, results: Sequence[CellResult]) -> Series | None:
    length = min((len(result.windows) for result in results), default=0)
    if length < 3:
        return None
    means = tuple(statistics.fmean(result.windows[at] for result in results) for at in range(length))
    return Series(name=row, x=tuple(float(at + 1) for at in range(length)), y=means)


def _speed(grid: Grid) -> Figure | None:
    panels, rows = [], []
    for group in grid.groups:
        series = []
        for row in grid.rows(group):
            results = grid.at(group, row)
            pairs = [(result.timing.get("images_per_s"), result.metrics.get("top1")) for result in results]
            complete = [(speed, top1) for speed, top1 in pairs if speed is not None and top1 is not None]
            if complete:
                speed, top1 = (statistics.fmean(each) for each in zip(*complete, strict=True))
                series.append(Series(name=row, x=(speed,), y=(top1,)))
                rows.append((block_title(grid, group), row, formatting.speed(speed), f"{top1:.1f}"))
        if series:
            text = "; ".join(
                f"{each.name} {formatting.speed(each.x[0])} images/s, {each.y[0]:.1f} %" for each in series
            )
            panels.append(
                Panel(form="scatter", title=block_title(grid, group), description=text,
                      x="images per second, log scale", y="top-1 accuracy (%)", series=tuple(series), log_x=True,
                      min_range=MIN_RANGE)
            )  # fmt: skip
    header = ("group", "row", "images/s", "top-1 (%)")
    data = group_table("Speed and accuracy, mean over cells", header, rows)
    legend = dict.fromkeys(each.name for panel in panels for each in panel.series)
    return Figure(title="Speed against accuracy", panels=tuple(panels), data=(data,), legend=tuple(legend))


_KINDS: dict[str, tuple[Callable[[Grid], Figure | None], ...]] = {
    "table": (_windows,),
    "lines": (_lines, _times),
    "bars": (_bars,),
    "efficiency": (_speed,),
    "transitions": (probe_figures.transitions,),
    "groups": (probe_figures.groups,),
    "gradients": (probe_figures.gradients,),
    "range": (probe_figures.entropy_range,),
}
