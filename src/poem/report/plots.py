"""Figures and panels as dataclasses, and their drawing as SVG with matplotlib.

`draw` returns a panel as a self-contained `<svg>`. It draws with placeholder colours and replaces them by CSS
variables, so that one drawing has the page's colours and font, light or dark.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, Any

from poem.report.tables import TextTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, RULE = "#010101", "#020202", "#030303"
SERIES = tuple(f"#0000f{number}" for number in range(8))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
DASHES = ("-", "--", ":")
GLYPHS = ("●", "■", "▲", "◆", "▼", "✚", "✖", "⬢")
COLOURS = {INK: "ink", MUTED: "muted", RULE: "rule"} | {each: f"s{at + 1}" for at, each in enumerate(SERIES)}
METHODS = ("poem", "tent", "eata", "sar", "deyo", "roid", "lame", "source")
"""Methods that have the same colour in every figure: the one at their position."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of one curve, set of bars, or row of a matrix."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    spread: tuple[float, ...] = ()
    """Half the width of each error bar; 0 for none."""
    band: tuple[tuple[float, float], ...] = ()
    """Lower and upper end at each point, drawn as an area."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One set of axes, or two in a stack."""

    form: str
    """lines, bars, rows (bars from left to right), scatter, matrix or stack."""
    title: str
    description: str
    """Alternative text for readers who cannot see the drawing."""
    x: str = ""
    y: str = ""
    series: tuple[Series, ...] = ()
    tick_labels: tuple[str, ...] = ()
    """Labels of the bars, or of x values that are not numbers."""
    spans: tuple[tuple[float, float, str], ...] = ()
    """Shaded ranges of the x axis: from, to and a name."""
    below: Panel | None = None
    """The lower panel of a stack, on the same x axis."""
    min_range: float = 0.0
    """Smallest range of the y axis, so that small differences look small."""
    from_zero: bool = False
    """Whether y starts at 0."""
    log_x: bool = False
    """Whether x is on a log scale."""
    level: float | None = None
    """A value that rows are compared with, drawn as a dashed line."""


@dataclass(frozen=True)
class SeriesStyle:
    """Colour, marker and dash of a series, as positions in `SERIES`, `MARKERS` and `DASHES`."""

    colour: int
    marker: int
    dash: int = 0


Styles = Mapping[str, SeriesStyle]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Panels under one title, and their data as tables."""

    title: str
    panels: tuple[Panel, ...]
    data: tuple[TextTable, ...]
    legend: tuple[str, ...] = ()
    """Names of series that all panels share."""
    note: str = ""
    """Explains a term of the figure."""
    styles: dict[str, SeriesStyle] = field(default_factory=dict)
    """Styles by name of the series; by default those of `series_styles`."""


def series_styles(names: Sequence[str]) -> dict[str, SeriesStyle]:
    """A style for each name: each of `METHODS` has the same colour in every figure, and variants share it."""
    families: dict[str, int] = {}
    for family in (_family(name) for name in names):
        if family in METHODS:
            families[family] = METHODS.index(family)
    free = [number for number in range(len(SERIES)) if number not in families.values()] or [0]
    for family in (_family(name) for name in names):
        if family not in families:
            families[family] = free[(len(families) - sum(each in METHODS for each in families)) % len(free)]
    found: dict[str, SeriesStyle] = {}
    for name in dict.fromkeys(names):
        colour = families[_family(name)]
        variant = sum(style.colour == colour for style in found.values())
        found[name] = SeriesStyle(colour, (colour + 3 * variant) % len(MARKERS), variant % len(DASHES))
    return found


def _family(name: str) -> str:
    return name.lower().replace("no adapt.", "source").split("(")[0].strip()


def draw(panel: Panel, styles: Styles, name: str) -> str:
    """Draw a panel as SVG; `name` is the prefix of its ids, so that they are unique on a page."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": name, "font.size": 11, "axes.edgecolor": MUTED, "text.color": INK,
        "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED, "axes.spines.top": False,
        "axes.spines.right": False, "axes.linewidth": 0.8, "lines.linewidth": 1.6, "lines.markersize": 5,
        "axes.titlesize": 11, "axes.labelsize": 10, "xtick.labelsize": 10, "ytick.labelsize": 10,
        "axes.titlelocation": "left",
    }  # fmt: skip
    with rc_context(settings):
        figure = Figure(figsize=(4.6, _height(panel)), layout="constrained")
        FigureCanvasSVG(figure)
        if panel.below is None:
            _draw(figure.add_subplot(), panel, styles)
        else:
            upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
            _draw(upper, panel, styles)
            _draw(lower, panel.below, styles)
            upper.set_xlabel("")
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _page_svg(written.getvalue(), panel, name)


def _height(panel: Panel) -> float:
    """Height of a drawing in inches; rows need more of it the more there are."""
    if panel.form == "rows":
        return 0.8 + 0.25 * len(panel.series)
    return 4.6 if panel.below else 3.1


def _draw(axes: Axes, panel: Panel, styles: Styles) -> None:
    axes.set_title(panel.title)
    if panel.form == "matrix":
        _matrix(axes, panel)
        return
    if panel.form == "rows":
        _rows(axes, panel, styles)
        return
    for at, (low, high, label) in enumerate(panel.spans):
        colour, shade = SERIES[2] if label == "zone" else RULE, 0.22 if at % 2 else 0.1
        axes.axvspan(low, high, color=colour, alpha=shade, linewidth=0)
        if panel.title:
            where: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "top"}
            axes.text((low + high) / 2, 1.0, label, fontsize=8.5, color=MUTED, **where)
    _FORMS[panel.form](axes, panel, styles)
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    low, high = axes.get_ylim()
    if panel.from_zero:
        axes.set_ylim(bottom=0)
    elif high - low < panel.min_range:
        axes.set_ylim(*widened(low, high, panel.min_range))
    if panel.log_x:
        axes.set_xscale("log")


def widened(low: float, high: float, least: float) -> tuple[float, float]:
    """A range of this width around another one, moved to stay between 0 and 100 where that one does."""
    below, above = (low + high - least) / 2, (low + high + least) / 2
    if high <= 100 < above:
        below, above = 100 - least, 100.0
    if low >= 0 > below:
        below, above = 0.0, least
    return below, above


def _lines(axes: Axes, panel: Panel, styles: Styles) -> None:
    for series in panel.series:
        style = styles[series.name]
        colour, dash = SERIES[style.colour], DASHES[style.dash]
        marker = MARKERS[style.marker] if len(series.x) <= 30 else None
        axes.plot(series.x, series.y, color=colour, marker=marker, markeredgewidth=0, linestyle=dash)
        if len(series.x) == 1 < max(len(other.x) for other in panel.series):  # a level to compare the curves with
            axes.axhline(series.y[0], color=colour, linewidth=1, linestyle=":")
        if any(series.spread):
            axes.errorbar(series.x, series.y, yerr=series.spread, fmt="none", color=colour, elinewidth=1, capsize=2)
        if series.band:
            low, high = zip(*series.band, strict=True)
            axes.fill_between(series.x, low, high, color=colour, alpha=0.15, linewidth=0)
    if panel.tick_labels:
        axes.set_xticks(range(len(panel.tick_labels)), panel.tick_labels)
    elif panel.series and len({x for series in panel.series for x in series.x}) <= 8:
        axes.set_xticks(sorted({x for series in panel.series for x in series.x}))


def _bars(axes: Axes, panel: Panel, styles: Styles) -> None:
    one_bar_each = all(len(series.x) == 1 for series in panel.series)
    width = 0.7 if one_bar_each else 0.8 / max(1, len(panel.series))
    for at, series in enumerate(panel.series):
        centres = [x if one_bar_each else x + (at - (len(panel.series) - 1) / 2) * width for x in series.x]
        colour = SERIES[styles[series.name].colour]
        spread = series.spread if any(series.spread) else None
        axes.bar(centres, series.y, width * 0.92, color=colour, yerr=spread, error_kw={"ecolor": INK, "elinewidth": 1})
        if len(panel.tick_labels) * len(panel.series) <= 12:
            for x, y in zip(centres, series.y, strict=True):
                axes.annotate(f"{y:.1f}" if y % 1 else f"{y:,.0f}", (x, y), (0, 2), textcoords="offset points",
                              ha="center", fontsize=8, color=INK)  # fmt: skip
    longest = max((len(line) for name in panel.tick_labels for line in name.split("\n")), default=0)
    tilt = longest * len(panel.tick_labels) > 44
    axes.set_xticks(
        range(len(panel.tick_labels)), panel.tick_labels, rotation=35 if tilt else 0, ha="right" if tilt else "center"
    )
    values = [y for series in panel.series for y in series.y]
    if values and min(values) > 0 and max(values) <= 100:
        axes.set_ylim(0, min(112, max(values) * 1.15))


def _rows(axes: Axes, panel: Panel, styles: Styles) -> None:
    """Draw one bar for each series from left to right, in percent, with its number at the end."""
    for at, series in enumerate(panel.series):
        axes.barh(at, series.y[0], 0.72, color=SERIES[styles[series.name].colour])
        end = series.y[0]
        if panel.level is not None and end < panel.level < end + 15:  # beyond the line, which would cross the number
            end = panel.level
        axes.annotate(f"{series.y[0]:.1f}", (end, at), (3, 0), textcoords="offset points", va="center",
                      fontsize=9, color=INK)  # fmt: skip
    if panel.level is not None:
        axes.axvline(panel.level, color=INK, linewidth=1, linestyle="--")
    axes.set_yticks(range(len(panel.tick_labels)), panel.tick_labels)
    axes.set(xlim=(0, 112), ylim=(len(panel.series) - 0.5, -0.5), xticks=[0, 50, 100], xlabel=panel.x)
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)


def _scatter(axes: Axes, panel: Panel, styles: Styles) -> None:
    for series in panel.series:
        style = styles[series.name]
        marker, colour = MARKERS[style.marker], SERIES[style.colour]
        axes.plot(series.x, series.y, linestyle="none", marker=marker, color=colour, markersize=7)
    axes.margins(x=0.1, y=0.12)


def _matrix(axes: Axes, panel: Panel) -> None:
    """Draw a matrix: rows are the series, columns the tick labels; a cell's shade is its share of the total."""
    total = sum(sum(series.y) for series in panel.series) or 1.0
    for at, series in enumerate(panel.series):
        for x, y in zip(series.x, series.y, strict=True):
            axes.fill_between([x, x + 1], at, at + 1, color=SERIES[0], alpha=0.08 + 0.72 * y / total, linewidth=0)
            axes.text(x + 0.5, at + 0.42, f"{y:,.0f}", ha="center", va="center", fontsize=13, color=INK)
            axes.text(x + 0.5, at + 0.66, f"{100 * y / total:.1f} %", ha="center", va="center", fontsize=9, color=INK)
    columns = len(panel.tick_labels)
    axes.set(xlim=(0, columns), ylim=(len(panel.series), 0), xlabel=panel.x, ylabel=panel.y)
    axes.set_xticks([at + 0.5 for at in range(columns)], panel.tick_labels)
    axes.set_yticks([at + 0.5 for at in range(len(panel.series))], [series.name for series in panel.series])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


_FORMS: dict[str, Callable[[Any, Panel, Styles], None]] = {
    "lines": _lines, "stack": _lines, "bars": _bars, "scatter": _scatter,
}  # fmt: skip


def _page_svg(text: str, panel: Panel, name: str) -> str:
    """The `<svg>` of matplotlib's text, with unique ids, the page's colours and font, a title and a description."""
    found = re.search(r'<svg [^>]*viewBox="([^"]+)"[^>]*>', text)
    if found is None:
        raise ValueError("expected an <svg> with a viewBox from matplotlib; another version may write it otherwise")
    body = text[found.end() :]
    body = re.sub(r"<(metadata|style)\b.*?</\1>", "", body, flags=re.DOTALL)
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', body)
    body = re.sub(r'(?:xlink:)?href="#([^"]+)"', rf'href="#{name}-\1"', body).replace("url(#", f"url(#{name}-")
    body = re.sub(r"font-family: [^;\"]*", "font-family: var(--sans)", body)
    body = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", body)
    for placeholder, variable in COLOURS.items():
        body = body.replace(placeholder, f"var(--{variable})")
    opening = f'<svg viewBox="{found[1]}" role="img" aria-labelledby="{name}-title {name}-desc">'
    title = f'<title id="{name}-title">{escape(panel.title or panel.y)}</title>'
    description = f'<desc id="{name}-desc">{escape(panel.description)}</desc>'
    return opening + title + description + re.sub(r"\s*\n\s*", "\n", body).strip()
