"""Figures from probes: samples whose entropy changes over the updates, their accuracy, and their gradients."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from poem.bench.analysis.aggregate import Grid, pooled
from poem.bench.result import CellResult
from poem.report import formatting
from poem.report.formatting import MISSING
from poem.report.plots import Figure, Panel, Series
from poem.report.tables import block_title, group_table

GROUPS = {"low": "low entropy", "newly": "potentially reliable", "high": "other high entropy"}
RANGE = {"newly": "potentially reliable", "all": "all in the range", "others": "the others in the range"}


def _rows(grid: Grid) -> Iterator[tuple[str, str, list[CellResult]]]:
    """Group, name and results of every row that has results."""
    for group in grid.groups:
        for row in grid.rows(group):
            if results := grid.at(group, row):
                yield group, row, results


def _title(grid: Grid, group: str, row: str) -> str:
    return f"{block_title(grid, group)} · {row}" if group else row


def transitions(grid: Grid) -> Figure:
    """A matrix of low and high entropy, before against after the updates, for every row."""
    panels, rows = [], []
    for group, row, results in _rows(grid):
        found = [result.probes["transitions"] for result in results if "transitions" in result.probes]
        if not found:
            continue
        total = {key: sum(each[key] for each in found) for key in ("low_low", "low_high", "high_low", "high_high")}
        series = tuple(
            Series(name=name, x=(0.0, 1.0), y=(float(total[f"{key}_low"]), float(total[f"{key}_high"])))
            for key, name in (("low", "low"), ("high", "high"))
        )
        count = {key: formatting.count(value) for key, value in {**total, "all": sum(total.values())}.items()}
        text = (
            f"of {count['all']} samples {count['high_low']} went from high to low entropy over the updates of their "
            f"batch and {count['low_high']} from low to high"
        )
        panels.append(
            Panel(form="matrix", title=_title(grid, group, row), description=text, x="entropy after the updates",
                  y="before", series=series, tick_labels=("low", "high"))
        )  # fmt: skip
        rows.append((block_title(grid, group), row, *(formatting.count(value) for value in total.values())))
    header = ("group", "row", "low → low", "low → high", "high → low", "high → high")
    data = group_table("Samples, from the first to the last forward pass of their batch", header, rows)
    return Figure(title="Low and high entropy over the updates", panels=tuple(panels), data=(data,))


def groups(grid: Grid) -> Figure:
    """Number, accuracy and confidence of low-entropy, potentially reliable and other samples."""
    panels, rows = [], []
    for group, row, results in _rows(grid):
        shares = {key: pooled([result.groups.get(key, {"n": 0}) for result in results]) for key in GROUPS}
        if not any(share["n"] for share in shares.values()):
            continue
        for what, y in (("n", "samples"), ("accuracy", "pseudo-labels right (%)"), ("confidence", "confidence (%)")):
            series = [
                Series(name=GROUPS[key], x=(float(at),), y=(float(share[what]),))
                for at, (key, share) in enumerate(shares.items())
                if what in share
            ]
            text = "; ".join(f"{each.name} {each.y[0]:,.1f}" for each in series)
            panels.append(
                Panel(form="bars", title=_title(grid, group, row), description=f"{y}: {text}", y=y,
                      series=tuple(series), tick_labels=("low", "potentially\nreliable", "other\nhigh"))
            )  # fmt: skip
        for key, share in shares.items():
            numbers = [
                f"{share[what]:.1f}" if what in share else MISSING
                for what in ("accuracy", "accuracy_last", "confidence")
            ]
            rows.append((block_title(grid, group), row, GROUPS[key], formatting.count(share["n"]), *numbers))
    header = ("group", "row", "samples of", "n", "pseudo-labels right (%)", "answers right (%)", "confidence (%)")
    data = group_table("Groups by entropy at the first forward pass", header, rows)
    legend = tuple(GROUPS.values())
    return Figure(title="Count, accuracy and confidence", panels=tuple(panels), data=(data,), legend=legend)


def entropy_range(grid: Grid) -> Figure:
    """Accuracy of potentially reliable samples, and of the others in the same range of entropy."""
    panels, rows = [], []
    for group, row, results in _rows(grid):
        found = [result.probes["range"] for result in results if "range" in result.probes]
        shares = {key: pooled([each.get(key, {"n": 0}) for each in found]) for key in RANGE}
        series = [
            Series(name=RANGE[key], x=(float(at),), y=(share["accuracy"],))
            for at, (key, share) in enumerate(shares.items())
            if "accuracy" in share
        ]
        if not series:
            continue
        text = "pseudo-labels right: " + "; ".join(f"{each.name} {each.y[0]:.1f} %" for each in series)
        panels.append(
            Panel(form="bars", title=_title(grid, group, row), description=text, y="pseudo-labels right (%)",
                  series=tuple(series), tick_labels=("potentially\nreliable", "all", "the others"))
        )  # fmt: skip
        low, high = (statistics.fmean(float(each[key]) for each in found if key in each) for key in ("low", "high"))
        for key, share in shares.items():
            right = f"{share['accuracy']:.1f}" if "accuracy" in share else MISSING
            rows.append(
                (
                    block_title(grid, group),
                    row,
                    RANGE[key],
                    formatting.count(share["n"]),
                    right,
                    f"{low:.2f} to {high:.2f}",
                )
            )
    header = ("group", "row", "samples", "n", "pseudo-labels right (%)", "entropy range (nats), mean over cells")
    data = group_table("Three groups in one range of entropy", header, rows)
    legend = tuple(RANGE.values())
    return Figure(title="Same entropy, other accuracy", panels=tuple(panels), data=(data,), legend=legend)


def gradients(grid: Grid) -> Figure:
    """Gradient norm and accuracy of pseudo-labels by entropy."""
    panels, rows, areas = [], [], []
    for group, row, results in _rows(grid):
        found = [result.probes["gradients"] for result in results if "gradients" in result.probes]
        bins = _binned(found) if found else []
        if not bins:
            continue
        marks = _areas(found)
        panels.append(_gradient_panel(_title(grid, group, row), bins, marks, grid.suite.x))
        for each in bins:
            numbers = (f"{each[key]:.3f}" for key in ("norm", "norm_p10", "norm_p90"))
            rows.append(
                (
                    block_title(grid, group),
                    row,
                    f"{each['x']:.3f}",
                    formatting.count(each["n"]),
                    *numbers,
                    f"{each['accuracy']:.1f}",
                )
            )
        for name, area in marks.items():
            ends = f"{area['low']:.2f} to {area['high']:.2f}"
            share = f"{area['accuracy']:.1f}" if "accuracy" in area else MISSING
            norm = f"{area['norm']:.3f}" if "norm" in area else MISSING
            areas.append((block_title(grid, group), row, name, ends, formatting.count(area["n"]), norm, share))
    by_bin = ("group", "row", "entropy (ln C)", "n", "norm", "p10", "p90", "right (%)")
    by_area = ("group", "row", "area", "entropy (ln C), mean of cells", "n", "norm", "right (%)")
    data = (
        group_table("By area: the zone is where potentially reliable samples lie", by_area, areas),
        group_table("By bin of entropy, over all cells", by_bin, rows),
    )
    legend = ("gradient norm", "pseudo-labels right")
    return Figure(
        title="Gradient norm against entropy",
        panels=tuple(panels),
        data=tuple(each for each in data if each.rows),
        legend=legend,
    )


def _gradient_panel(title: str, bins: list[dict[str, float]], areas: dict[str, dict[str, float]], x: str) -> Panel:
    xs = tuple(each["x"] for each in bins)
    band = tuple((each["norm_p10"], each["norm_p90"]) for each in bins)
    norm = Series(name="gradient norm", x=xs, y=tuple(each["norm"] for each in bins), band=band)
    right = Series(name="pseudo-labels right", x=xs, y=tuple(each["accuracy"] for each in bins))
    top = max(bins, key=lambda each: each["norm"])
    text = (
        f"the norm is largest, {top['norm']:.2f}, at entropy {top['x']:.2f} ln C; shaded from the 10th to the 90th "
        f"percentile; pseudo-labels right from {right.y[0]:.0f} % at the lowest entropy to {right.y[-1]:.0f} %"
    )
    marks = tuple((area["low"], area["high"], name) for name, area in areas.items())
    below = Panel(form="lines", title="", description="", x=x, y="right (%)", series=(right,),
                  spans=marks)  # fmt: skip
    return Panel(
        form="stack", title=title, description=text, y="gradient norm", series=(norm,), below=below, spans=marks
    )


def _binned(found: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """Bins of entropy that hold samples, with means over the samples of all cells."""
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
    """The paper's areas in order of entropy, pooled over the cells that have them; ends in units of ln C."""
    present = [each["areas"] for each in found if each.get("areas")]
    areas = {}
    for name in ("area3", "zone", "area2", "area1"):
        shares = [each[name] for each in present]
        if shares:
            tops = [each["area1"]["high"] for each in present]
            ends = {
                end: statistics.fmean(share[end] / top for share, top in zip(shares, tops, strict=True))
                for end in ("low", "high")
            }
            areas[name.replace("area", "area ")] = {**pooled(shares), **ends}
    return areas
