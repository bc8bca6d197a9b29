"""The study's figures as SVG files: colours that colour-blind readers tell apart, and a marker or hatch for each.

Each file has its numbers in `<desc>`, so that a test can compare them with the cells, whatever version of matplotlib
drew it.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from poem.report.plots import MARKERS
from study import answers, parts
from study.evidence import Difference, Evidence
from study.rows import AUTO_STATISTICS
from study.tables import SHORT

COLOURS = ("#c2381b", "#2563a8", "#23815a", "#8a4fb0", "#96700a", "#0f7f92", "#b0407a", "#6b6862")
"""Those of the report's page, which are told apart in grey by the markers."""
INK, MUTED, RULE = "#1f1d1a", "#65605a", "#d9d4c8"
HATCHES = ("", "///", "xx", "--")
PLACES = {
    "bn": 0, "tent": 1, "deyo": 2, "poem": 3, "deyo+poem": 4, "auto": 5, "tent [auto statistics]": 6, "source": 7,
    "poem [auto statistics]": 0,
}  # fmt: skip
"""Rows that have the same colour and marker in every figure; other series take theirs by order."""
MOST_BYTES = 100_000


@dataclass(frozen=True)
class Series:
    """Points with errors; one marker."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    error: tuple[float, ...]


@dataclass(frozen=True)
class Drawing:
    """One set of axes."""

    name: str
    title: str
    """Also the alternative text."""
    form: str
    """`dots` (values from left to right, one line a label), `lines` or `bars`."""
    value: str
    """What is measured, with its unit."""
    labels: tuple[str, ...]
    series: tuple[Series, ...]
    data: dict[str, Any] = field(default_factory=dict)
    zero: bool = True
    """Whether 0 is marked."""
    across: str = ""
    """What the other axis shows."""


def gains(evidence: Evidence) -> Drawing | None:
    """Mean difference to source of the main rows, by network."""
    chosen = ("bn", "tent", "deyo", "poem", "deyo+poem", "auto")
    nets = [net for net in answers.NETS if evidence.has(net, "auto", parts.ALL)]
    return _differences(
        "gains", "Mean accuracy minus source, clean and 15 corruptions", nets,
        {row: [evidence.difference(net, [(row, "source")], parts.ALL) for net in nets] for row in chosen},
    )  # fmt: skip


def contrasts(evidence: Evidence) -> Drawing | None:
    """The answers, by network."""
    chosen = ("exploration", "branch", "lift", "lift-statistics", "answered-after", "statistics")
    names = {"lift": "+poem", "lift-statistics": "+poem, right statistics", "answered-after": "answer after the update",
             "statistics": "right statistics"}  # fmt: skip
    found = {answer.name: {line.net: line.main for line in answer.lines} for answer in answers.answers(evidence)}
    nets = list(answers.MAIN_NETS)
    held = {names.get(name, name): [found[name].get(net) for net in nets] for name in chosen}
    held = {name: each for name, each in held.items() if any(each)}
    return _differences("contrasts", "What each part adds, in points of accuracy", nets, held)


def by_stream(evidence: Evidence, net: str = "resnet50-keras") -> Drawing | None:
    """Accuracy on every stream."""
    chosen = ("source", "tent", "poem", "auto", *(row + AUTO_STATISTICS for row in ("tent", "poem")))
    streams = [stream for stream in SHORT if evidence.run(net, "source", stream)]
    series = []
    for row in chosen:
        values = [evidence.accuracy(net, row, [stream]) for stream in streams]
        errors = [evidence.difference(net, [(row, "source")], [stream]) for stream in streams]
        there = [
            (float(at), value, error.error if error is not None and row != "source" else 0.0)
            for at, (value, error) in enumerate(zip(values, errors, strict=True))
            if value is not None
        ]
        if there:
            x, y, error = zip(*there, strict=True)
            series.append(Series(row, x, y, error))
    if len(series) < 2:
        return None
    labels = tuple(SHORT[stream] for stream in streams)
    return Drawing(f"streams-{net}", f"Accuracy of {net} on every stream", "lines", "accuracy, %", labels,
                   tuple(series), zero=False)  # fmt: skip


def newly(evidence: Evidence) -> Drawing | None:
    """How often samples are right, by what became of them."""
    found = {net: answers.samples(evidence, net) for net in answers.APART}
    held = {net: each for net, each in found.items() if each is not None and each.newly.n}
    if not held:
        return None
    series = []
    for name in ("selected", "newly", "rest"):
        groups = [getattr(each, name) for each in held.values()]
        errors = tuple(group.error for group in groups)
        label = {"selected": "selected at first", "newly": "newly reliable", "rest": "never selected"}[name]
        series.append(
            Series(label, tuple(map(float, range(len(held)))), tuple(group.share for group in groups), errors)
        )
    return Drawing("newly", "Samples that are right before any update, by what became of them", "bars",
                   "right, %", tuple(held), tuple(series), zero=False)  # fmt: skip


def settings(evidence: Evidence, word: str, values: Sequence[float], own: float, across: str) -> Drawing | None:
    """POEM over a setting, as differences to its own value."""
    series = []
    for net in answers.APART:
        points = []
        for value in values:
            if value == own:
                points.append((value, 0.0, 0.0))
                continue
            text = f"{value:g}" if word == "rounds" else f"{value}"
            found = evidence.difference(net, [(f"poem, {word} {text}", "poem")], parts.FOUR)
            if found is not None:
                points.append((value, found.points, found.error))
        if len(points) > 1:
            x, y, error = zip(*points, strict=True)
            series.append(Series(net, x, y, error))
    if not series:
        return None
    return Drawing(f"settings-{word}", f"POEM over its {word}, minus POEM with {own:g}", "lines",
                   "points of accuracy", (), tuple(series), across=across)  # fmt: skip


def _differences(
    name: str, title: str, nets: Sequence[str], held: dict[str, list[Difference | None]]
) -> Drawing | None:
    series = []
    for label, found in held.items():
        there = [(float(at), each.points, each.error) for at, each in enumerate(found) if each is not None]
        if there:
            x, y, error = zip(*there, strict=True)
            series.append(Series(label, x, y, error))
    return Drawing(name, title, "dots", "points of accuracy", tuple(nets), tuple(series)) if series else None


def drawings(evidence: Evidence) -> dict[str, Drawing | None]:
    """Every figure by its name; None where its cells are missing."""
    values = {"threshold": (0.1, 0.2, 0.4, 0.5, 0.6, 0.8, 1.0), "rounds": (1.0, 2.0, 3.0, 4.0, 5.0),
              "ratio": (0.0, 0.25, 0.5, 0.75, 1.0)}  # fmt: skip
    own = {"threshold": 0.4, "rounds": 2.0, "ratio": 0.5}
    across = {"threshold": "entropy threshold, share of ln C", "rounds": "updates of a batch",
              "ratio": "share of the source branch in the answer"}  # fmt: skip
    return {
        "gains": gains(evidence), "contrasts": contrasts(evidence),
        "streams-resnet50-keras": by_stream(evidence), "newly": newly(evidence),
        **{f"settings-{word}": settings(evidence, word, values[word], own[word], across[word]) for word in values},
    }  # fmt: skip


def numbers(drawing: Drawing) -> dict[str, Any]:
    """The numbers of a figure, rounded as its description has them."""
    return {
        series.name: [
            [round(each, 2) for each in point] for point in zip(series.x, series.y, series.error, strict=True)
        ]
        for series in drawing.series
    }


def draw(drawing: Drawing) -> str:
    """A figure as an SVG file with a white ground."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    style: dict[Any, Any] = {
        "svg.fonttype": "none", "svg.hashsalt": drawing.name, "font.size": 10, "font.family": "sans-serif",
        "axes.edgecolor": MUTED, "text.color": INK, "axes.labelcolor": INK, "xtick.color": INK, "ytick.color": INK,
        "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8, "axes.titlelocation": "left",
        "axes.titlesize": 11, "legend.frameon": False, "legend.fontsize": 9, "lines.linewidth": 1.2,
    }  # fmt: skip
    with rc_context(style):
        height = 1.4 + 0.5 * len(drawing.labels) if drawing.form == "dots" else 3.6
        figure = Figure(figsize=(7.2, height), layout="constrained")
        FigureCanvasSVG(figure)
        axes: Any = figure.add_subplot()
        {"dots": _dots, "lines": _lines, "bars": _bars}[drawing.form](axes, drawing)
        axes.set_title(drawing.title)
        figure.legend(loc="outside lower left", ncols=4)
        written = io.StringIO()
        figure.savefig(written, format="svg", facecolor="white", metadata={"Date": None, "Creator": None})
    text = re.sub(r"<metadata>.*?</metadata>", "", written.getvalue(), flags=re.DOTALL)
    text = re.sub(r"\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", text)
    told = json.dumps(numbers(drawing), separators=(",", ":"))
    told = f"<title>{drawing.title}</title><desc>{told}</desc>"
    return re.sub(r"(<svg [^>]*>)", lambda opening: opening[1] + told, text, count=1)


def _style(at: int, name: str = "") -> dict[str, Any]:
    at = PLACES.get(name, at)
    return {"color": COLOURS[at % len(COLOURS)], "marker": MARKERS[at % len(MARKERS)], "markersize": 5.5}


def _dots(axes: Any, drawing: Drawing) -> None:
    count = len(drawing.series)
    for at, series in enumerate(drawing.series):
        places = [x + (at - (count - 1) / 2) * 0.7 / max(1, count) for x in series.x]
        errors = [2 * each for each in series.error]
        axes.errorbar(series.y, places, xerr=errors, fmt="none", ecolor=_style(at, series.name)["color"], elinewidth=1)
        axes.plot(series.y, places, linestyle="none", label=series.name, **_style(at, series.name))
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(drawing.labels)), drawing.labels)
    axes.set(ylim=(len(drawing.labels) - 0.5, -0.5), xlabel=f"{drawing.value}; bars: two standard errors")
    axes.grid(axis="x", color=RULE, linewidth=0.6)
    for at in range(1, len(drawing.labels)):
        axes.axhline(at - 0.5, color=RULE, linewidth=0.6)


def _lines(axes: Any, drawing: Drawing) -> None:
    for at, series in enumerate(drawing.series):
        dash = ("-", "--", ":", "-.")[at % 4]
        axes.errorbar(series.x, series.y, yerr=[2 * each for each in series.error], fmt="none",
                      ecolor=_style(at, series.name)["color"], elinewidth=0.8)  # fmt: skip
        axes.plot(series.x, series.y, linestyle=dash, label=series.name, **_style(at, series.name))
    if drawing.labels:
        axes.set_xticks(range(len(drawing.labels)), drawing.labels, rotation=40, ha="right")
    if drawing.zero:
        axes.axhline(0, color=INK, linewidth=0.8)
    axes.set(ylabel=drawing.value, xlabel=drawing.across)
    axes.grid(axis="y", color=RULE, linewidth=0.6)


def _bars(axes: Any, drawing: Drawing) -> None:
    width = 0.8 / len(drawing.series)
    for at, series in enumerate(drawing.series):
        places = [x + (at - (len(drawing.series) - 1) / 2) * width for x in series.x]
        axes.bar(places, series.y, width * 0.92, color=COLOURS[at], hatch=HATCHES[at], edgecolor="white",
                 label=series.name, yerr=[2 * each for each in series.error])  # fmt: skip
    axes.set_xticks(range(len(drawing.labels)), drawing.labels)
    axes.set(ylabel=drawing.value, ylim=(0, 100))
    axes.grid(axis="y", color=RULE, linewidth=0.6)
    axes.set_axisbelow(True)
