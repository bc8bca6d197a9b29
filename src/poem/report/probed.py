"""Figures of what the looks at a batch tell: who becomes sure, how right they are, and what each would teach."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from poem.bench.analysis.aggregate import Grid, pooled
from poem.bench.result import CellResult
from poem.report import words
from poem.report.plots import Look, Panel, Series
from poem.report.tables import Plain, grouped, titled
from poem.report.words import NOTHING

GROUPS = {"low": "low entropy", "newly": "potentially reliable", "high": "other high entropy"}
RANGE = {"newly": "potentially reliable", "all": "all in the range", "others": "the others in the range"}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Panels under one title, and what they show as tables."""

    title: str
    panels: tuple[Panel, ...]
    data: tuple[Plain, ...]
    legend: tuple[str, ...] = ()
    """Names of series that all panels share."""
    note: str = ""
    """What a word in it means."""
    looks: dict[str, Look] = field(default_factory=dict)
    """Of series whose look says something else than their name."""


def _blocks(grid: Grid) -> Iterator[tuple[str, str, list[CellResult]]]:
    """Group, row and the reports of every row that has some."""
    for group in grid.groups:
        for row in grid.rows(group):
            if reports := grid.at(group, row):
                yield group, row, reports


def _title(grid: Grid, group: str, row: str) -> str:
    return f"{titled(grid, group)} · {row}" if group else row


def transitions(grid: Grid) -> Figure:
    """A matrix of low and high entropy, first look against last, for every row."""
    panels, rows = [], []
    for group, row, reports in _blocks(grid):
        found = [report.probes["transitions"] for report in reports if "transitions" in report.probes]
        if not found:
            continue
        total = {key: sum(each[key] for each in found) for key in ("low_low", "low_high", "high_low", "high_high")}
        series = tuple(
            Series(name=name, x=(0.0, 1.0), y=(float(total[f"{key}_low"]), float(total[f"{key}_high"])))
            for key, name in (("low", "low"), ("high", "high"))
        )
        said = (
            f"of {words.count(sum(total.values()))} samples {words.count(total['high_low'])} went from high to low "
            f"entropy over the updates of their batch and {words.count(total['low_high'])} from low to high"
        )
        panels.append(
            Panel(form="matrix", title=_title(grid, group, row), words=said, x="entropy at the last look",
                  y="at the first", series=series, names=("low", "high"))
        )  # fmt: skip
        rows.append((titled(grid, group), row, *(words.count(value) for value in total.values())))
    head = ("group", "row", "low → low", "low → high", "high → low", "high → high")
    data = grouped(
        Plain(caption="Samples, from the first to the last look at their batch", head=head, rows=tuple(rows))
    )
    return Figure(title="Low and high entropy over the updates", panels=tuple(panels), data=(data,))


def groups(grid: Grid) -> Figure:
    """Low-entropy, potentially reliable and other samples: how many, how right, how confident."""
    panels, rows = [], []
    for group, row, reports in _blocks(grid):
        shares = {key: pooled([report.groups.get(key, {"n": 0}) for report in reports]) for key in GROUPS}
        if not any(share["n"] for share in shares.values()):
            continue
        for what, y in (("n", "samples"), ("accuracy", "pseudo-labels right (%)"), ("confidence", "confidence (%)")):
            series = [
                Series(name=GROUPS[key], x=(float(place),), y=(float(share[what]),))
                for place, (key, share) in enumerate(shares.items())
                if what in share
            ]
            said = "; ".join(f"{each.name} {each.y[0]:,.1f}" for each in series)
            panels.append(
                Panel(form="bars", title=_title(grid, group, row), words=f"{y}: {said}", y=y, series=tuple(series),
                      names=("low", "potentially\nreliable", "other\nhigh"))
            )  # fmt: skip
        for key, share in shares.items():
            numbers = [
                f"{share[what]:.1f}" if what in share else NOTHING
                for what in ("accuracy", "accuracy_last", "confidence")
            ]
            rows.append((titled(grid, group), row, GROUPS[key], words.count(share["n"]), *numbers))
    head = ("group", "row", "samples of", "n", "pseudo-labels right (%)", "answers right (%)", "confidence (%)")
    data = grouped(Plain(caption="Groups by entropy at the first look", head=head, rows=tuple(rows)))
    legend = tuple(GROUPS.values())
    return Figure(title="Count, accuracy and confidence", panels=tuple(panels), data=(data,), legend=legend)


def within_range(grid: Grid) -> Figure:
    """Potentially reliable samples beside the others of their range of entropy."""
    panels, rows = [], []
    for group, row, reports in _blocks(grid):
        found = [report.probes["range"] for report in reports if "range" in report.probes]
        shares = {key: pooled([each.get(key, {"n": 0}) for each in found]) for key in RANGE}
        series = [
            Series(name=RANGE[key], x=(float(place),), y=(share["accuracy"],))
            for place, (key, share) in enumerate(shares.items())
            if "accuracy" in share
        ]
        if not series:
            continue
        said = "pseudo-labels right: " + "; ".join(f"{each.name} {each.y[0]:.1f} %" for each in series)
        panels.append(
            Panel(form="bars", title=_title(grid, group, row), words=said, y="pseudo-labels right (%)",
                  series=tuple(series), names=("potentially\nreliable", "all", "the others"))
        )  # fmt: skip
        low, high = (statistics.fmean(float(each[key]) for each in found if key in each) for key in ("low", "high"))
        for key, share in shares.items():
            right = f"{share['accuracy']:.1f}" if "accuracy" in share else NOTHING
            rows.append(
                (titled(grid, group), row, RANGE[key], words.count(share["n"]), right, f"{low:.2f} to {high:.2f}")
            )
    head = ("group", "row", "samples", "n", "pseudo-labels right (%)", "entropy range (nats), mean over cells")
    data = grouped(Plain(caption="Three groups in one range of entropy", head=head, rows=tuple(rows)))
    legend = tuple(RANGE.values())
    return Figure(title="Same entropy, other accuracy", panels=tuple(panels), data=(data,), legend=legend)


def gradients(grid: Grid) -> Figure:
    """Norm of the gradient and accuracy of pseudo-labels, by entropy."""
    panels, rows, areas = [], [], []
    for group, row, reports in _blocks(grid):
        found = [report.probes["gradients"] for report in reports if "gradients" in report.probes]
        bins = _binned(found) if found else []
        if not bins:
            continue
        marks = _areas(found)
        panels.append(_gradient_panel(_title(grid, group, row), bins, marks, grid.suite.x))
        for each in bins:
            numbers = (f"{each[key]:.3f}" for key in ("norm", "norm_p10", "norm_p90"))
            rows.append(
                (
                    titled(grid, group),
                    row,
                    f"{each['x']:.3f}",
                    words.count(each["n"]),
                    *numbers,
                    f"{each['accuracy']:.1f}",
                )
            )
        for name, area in marks.items():
            ends = f"{area['low']:.2f} to {area['high']:.2f}"
            share = f"{area['accuracy']:.1f}" if "accuracy" in area else NOTHING
            norm = f"{area['norm']:.3f}" if "norm" in area else NOTHING
            areas.append((titled(grid, group), row, name, ends, words.count(area["n"]), norm, share))
    by_bin = ("group", "row", "entropy (ln C)", "n", "norm", "p10", "p90", "right (%)")
    by_area = ("group", "row", "area", "entropy (ln C), mean of cells", "n", "norm", "right (%)")
    data = (
        Plain(caption="By area: the zone is where potentially reliable samples lie", head=by_area, rows=tuple(areas)),
        Plain(caption="By bin of entropy, over all cells", head=by_bin, rows=tuple(rows)),
    )
    legend = ("gradient norm", "pseudo-labels right")
    return Figure(
        title="Gradient norm against entropy",
        panels=tuple(panels),
        data=tuple(grouped(each) for each in data if each.rows),
        legend=legend,
    )


def _gradient_panel(title: str, bins: list[dict[str, float]], areas: dict[str, dict[str, float]], x: str) -> Panel:
    xs = tuple(each["x"] for each in bins)
    band = tuple((each["norm_p10"], each["norm_p90"]) for each in bins)
    norm = Series(name="gradient norm", x=xs, y=tuple(each["norm"] for each in bins), band=band)
    right = Series(name="pseudo-labels right", x=xs, y=tuple(each["accuracy"] for each in bins))
    top = max(bins, key=lambda each: each["norm"])
    said = (
        f"the norm is largest, {top['norm']:.2f}, at entropy {top['x']:.2f} ln C; shaded from the 10th to the 90th "
        f"percentile; pseudo-labels right from {right.y[0]:.0f} % at the lowest entropy to {right.y[-1]:.0f} %"
    )
    marks = tuple((area["low"], area["high"], name) for name, area in areas.items())
    below = Panel(form="lines", title="", words="", x=x, y="right (%)", series=(right,),
                  marks=marks)  # fmt: skip
    return Panel(form="stack", title=title, words=said, y="gradient norm", series=(norm,), below=below, marks=marks)


def _binned(found: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Bins that hold somebody, as means over samples."""
    edges = found[0]["edges"]
    keys = ("norm", "norm_p10", "norm_p90", "accuracy")
    bins = []
    for at in range(len(edges) - 1):
        shares = [
            {"n": each["n"][at], **{key: each[key][at] for key in keys if each[key][at] is not None}} for each in found
        ]
        whole = pooled(shares)
        if whole["n"]:
            bins.append({"x": (edges[at] + edges[at + 1]) / 2, **whole})
    return bins


def _areas(found: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The paper's areas by rising entropy, over all cells that have them; ends in units of ln C."""
    there = [each["areas"] for each in found if each.get("areas")]
    areas = {}
    for name in ("area3", "zone", "area2", "area1"):
        shares = [each[name] for each in there]
        if shares:
            tops = [each["area1"]["high"] for each in there]
            ends = {
                end: statistics.fmean(share[end] / top for share, top in zip(shares, tops, strict=True))
                for end in ("low", "high")
            }
            areas[name.replace("area", "area ")] = {**pooled(shares), **ends}
    return areas
