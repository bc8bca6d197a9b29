"""Panels as SVG text that takes its colours and font from the page around it.

Panels are values; `draw` gives one as a self-contained `<svg>`. Colours are drawn as stand-ins and written as CSS
variables afterwards, so one drawing serves light and dark.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

INK, MUTED, RULE = "#010101", "#020202", "#030303"
SERIES = tuple(f"#0000f{number}" for number in range(8))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "h")
DASHES = ("-", "--", ":")
GLYPHS = ("●", "■", "▲", "◆", "▼", "✚", "✖", "⬢")
COLOURS = {INK: "ink", MUTED: "muted", RULE: "rule"} | {each: f"s{at + 1}" for at, each in enumerate(SERIES)}
KNOWN = ("poem", "tent", "eata", "sar", "deyo", "roid", "lame", "source")
"""Rows that keep their colour on the whole page."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points that belong together."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    spread: tuple[float, ...] = ()
    """Half the width of each error bar; 0 for none."""
    band: tuple[tuple[float, float], ...] = ()
    """From and to, drawn as an area."""


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One drawing. Its form says what its series mean."""

    form: str
    """lines, bars, scatter, matrix or stack."""
    title: str
    words: str
    """What a reader who cannot see it should know."""
    x: str = ""
    y: str = ""
    series: tuple[Series, ...] = ()
    names: tuple[str, ...] = ()
    """Of the bars' places, or of the x values where they are no numbers."""
    marks: tuple[tuple[float, float, str], ...] = ()
    """Areas on the x axis: from, to and a name."""
    below: Panel | None = None
    """Of a stack: a second panel on the same x axis."""
    least: float = 0.0
    """Of the y axis: the smallest range that it spans, so that small differences look small."""
    floor: bool = False
    """Whether y starts at 0."""
    log: bool = False
    """Whether x is on a log scale."""


@dataclass(frozen=True)
class Look:
    """How a series is drawn: numbers of its colour, marker and dash."""

    colour: int
    marker: int
    dash: int = 0


Looks = Mapping[str, Look]


def looks(names: Sequence[str]) -> dict[str, Look]:
    """A look for each name; methods keep their colour on the whole page, and their variants share it."""
    families: dict[str, int] = {}
    for word in (_family(name) for name in names):
        if word in KNOWN:
            families[word] = KNOWN.index(word)
    left = [number for number in range(len(SERIES)) if number not in families.values()] or [0]
    for word in (_family(name) for name in names):
        if word not in families:
            families[word] = left[(len(families) - sum(each in KNOWN for each in families)) % len(left)]
    found: dict[str, Look] = {}
    for name in dict.fromkeys(names):
        colour = families[_family(name)]
        variant = sum(look.colour == colour for look in found.values())
        found[name] = Look(colour, (colour + 3 * variant) % len(MARKERS), variant % len(DASHES))
    return found


def _family(name: str) -> str:
    return name.lower().replace("no adapt.", "source").split("(")[0].strip()


def draw(panel: Panel, chosen: Looks, name: str) -> str:
    """A panel as SVG; `name` makes its ids the only ones on a page."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": name, "font.size": 11, "axes.edgecolor": MUTED, "text.color": INK,
        "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED, "axes.spines.top": False,
        "axes.spines.right": False, "axes.linewidth": 0.8, "lines.linewidth": 1.6, "lines.markersize": 5,
        "axes.titlesize": 11, "axes.labelsize": 10, "xtick.labelsize": 10, "ytick.labelsize": 10,
        "axes.titlelocation": "left",
    }  # fmt: skip
    with rc_context(style):
        figure = Figure(figsize=(4.6, 4.6 if panel.below else 3.1), layout="constrained")
        FigureCanvasSVG(figure)
        if panel.below is None:
            _draw(figure.add_subplot(), panel, chosen)
        else:
            upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
            _draw(upper, panel, chosen)
            _draw(lower, panel.below, chosen)
            upper.set_xlabel("")
        written = io.StringIO()
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    return _dressed(written.getvalue(), panel, name)


def _draw(axes: Axes, panel: Panel, chosen: Looks) -> None:
    axes.set_title(panel.title)
    if panel.form == "matrix":
        _matrix(axes, panel)
        return
    for at, (low, high, words) in enumerate(panel.marks):
        colour, shade = SERIES[2] if words == "zone" else RULE, 0.22 if at % 2 else 0.1
        axes.axvspan(low, high, color=colour, alpha=shade, linewidth=0)
        if panel.title:
            where: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "ha": "center", "va": "top"}
            axes.text((low + high) / 2, 1.0, words, fontsize=8.5, color=MUTED, **where)
    _FORMS[panel.form](axes, panel, chosen)
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
    low, high = axes.get_ylim()
    if panel.floor:
        axes.set_ylim(bottom=0)
    elif high - low < panel.least:
        axes.set_ylim((low + high - panel.least) / 2, (low + high + panel.least) / 2)
    if panel.log:
        axes.set_xscale("log")


def _lines(axes: Axes, panel: Panel, chosen: Looks) -> None:
    for series in panel.series:
        look = chosen[series.name]
        colour, dash = SERIES[look.colour], DASHES[look.dash]
        marker = MARKERS[look.marker] if len(series.x) <= 30 else None
        axes.plot(series.x, series.y, color=colour, marker=marker, markeredgewidth=0, linestyle=dash)
        if len(series.x) == 1 < max(len(other.x) for other in panel.series):  # a level to compare the curves with
            axes.axhline(series.y[0], color=colour, linewidth=1, linestyle=":")
        if any(series.spread):
            axes.errorbar(series.x, series.y, yerr=series.spread, fmt="none", color=colour, elinewidth=1, capsize=2)
        if series.band:
            low, high = zip(*series.band, strict=True)
            axes.fill_between(series.x, low, high, color=colour, alpha=0.15, linewidth=0)
    if panel.names:
        axes.set_xticks(range(len(panel.names)), panel.names)
    elif panel.series and len({x for series in panel.series for x in series.x}) <= 8:
        axes.set_xticks(sorted({x for series in panel.series for x in series.x}))


def _bars(axes: Axes, panel: Panel, chosen: Looks) -> None:
    apart = all(len(series.x) == 1 for series in panel.series)  # each at a place of its own
    wide = 0.7 if apart else 0.8 / max(1, len(panel.series))
    for at, series in enumerate(panel.series):
        places = [x if apart else x + (at - (len(panel.series) - 1) / 2) * wide for x in series.x]
        colour = SERIES[chosen[series.name].colour]
        spread = series.spread if any(series.spread) else None
        axes.bar(places, series.y, wide * 0.92, color=colour, yerr=spread, error_kw={"ecolor": INK, "elinewidth": 1})
        if len(panel.names) * len(panel.series) <= 12:
            for x, y in zip(places, series.y, strict=True):
                axes.annotate(f"{y:.1f}" if y % 1 else f"{y:,.0f}", (x, y), (0, 2), textcoords="offset points",
                              ha="center", fontsize=8, color=INK)  # fmt: skip
    longest = max((len(line) for name in panel.names for line in name.split("\n")), default=0)
    tilt = longest * len(panel.names) > 44
    axes.set_xticks(range(len(panel.names)), panel.names, rotation=35 if tilt else 0, ha="right" if tilt else "center")
    values = [y for series in panel.series for y in series.y]
    if values and min(values) > 0 and max(values) <= 100:
        axes.set_ylim(0, min(112, max(values) * 1.15))


def _scatter(axes: Axes, panel: Panel, chosen: Looks) -> None:
    for series in panel.series:
        look = chosen[series.name]
        marker, colour = MARKERS[look.marker], SERIES[look.colour]
        axes.plot(series.x, series.y, linestyle="none", marker=marker, color=colour, markersize=7)
    axes.margins(x=0.1, y=0.12)


def _matrix(axes: Axes, panel: Panel) -> None:
    """Rows are the series, columns the names; a cell's shade is its share of all."""
    total = sum(sum(series.y) for series in panel.series) or 1.0
    for at, series in enumerate(panel.series):
        for x, y in zip(series.x, series.y, strict=True):
            axes.fill_between([x, x + 1], at, at + 1, color=SERIES[0], alpha=0.08 + 0.72 * y / total, linewidth=0)
            axes.text(x + 0.5, at + 0.42, f"{y:,.0f}", ha="center", va="center", fontsize=13, color=INK)
            axes.text(x + 0.5, at + 0.66, f"{100 * y / total:.1f} %", ha="center", va="center", fontsize=9, color=INK)
    wide = len(panel.names)
    axes.set(xlim=(0, wide), ylim=(len(panel.series), 0), xlabel=panel.x, ylabel=panel.y)
    axes.set_xticks([at + 0.5 for at in range(wide)], panel.names)
    axes.set_yticks([at + 0.5 for at in range(len(panel.series))], [series.name for series in panel.series])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


_FORMS: dict[str, Callable[[Any, Panel, Looks], None]] = {
    "lines": _lines, "stack": _lines, "bars": _bars, "scatter": _scatter,
}  # fmt: skip


def _dressed(text: str, panel: Panel, name: str) -> str:
    """Only the `<svg>`, with ids of its own, the page's colours and font, and words for those who do not see it."""
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
    for stand_in, variable in COLOURS.items():
        body = body.replace(stand_in, f"var(--{variable})")
    opening = f'<svg viewBox="{found[1]}" role="img" aria-labelledby="{name}-title {name}-desc">'
    title = f'<title id="{name}-title">{escape(panel.title or panel.y)}</title>'
    words = f'<desc id="{name}-desc">{escape(panel.words)}</desc>'
    return opening + title + words + re.sub(r"\s*\n\s*", "\n", body).strip()
