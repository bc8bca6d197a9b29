"""The first minute: digits that training never saw, corrupted on the way in, and methods side by side."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from poem.bench.result import CellResult, latest
from poem.bench.suites import Suite
from poem.recipes.methods import recipe

NAME = "demo"
"""Of its suite."""
POINT = 0.05
"""A difference in percent that a table with one decimal would show."""


@dataclass(frozen=True)
class Found:
    """One row of one block: a method on a network, over the shifts."""

    accuracy: float
    gain: float
    right: float | None
    """How often the labels that it learnt from were right, in percent; None where it learnt from none."""
    error: float
    """The standard error of the gain, in points, as of two independent draws of images."""
    shifts: dict[str, tuple[float, float]]
    """Accuracy by shift: of the model unadapted, and of the method."""


Table = Mapping[tuple[str, str], Found]
"""By row and group."""


def table(suite: Suite, reports: Iterable[CellResult]) -> dict[tuple[str, str], Found]:
    """Means over the shifts, with the gain over the model unadapted."""
    by_key = latest(reports, lambda report: report.cell_key)
    cells: dict[tuple[str, str], list[CellResult]] = {}
    for placed in suite.placed:
        if placed.cell.key in by_key:
            cells.setdefault((placed.row, placed.group), []).append(by_key[placed.cell.key])
    plain = {group: found for (_, group), found in cells.items() if found[0].cell.method == "source"}
    return {(row, group): _found(found, plain[group]) for (row, group), found in cells.items() if group in plain}


def _found(reports: Sequence[CellResult], plain: Sequence[CellResult]) -> Found:
    """A row against the model unadapted."""
    own, before = ({each.cell.corruptions[0]: each.metrics["top1"] for each in found} for found in (reports, plain))
    mean = statistics.fmean(own.values())
    shifts = {shift: (before[shift], top1) for shift, top1 in own.items() if shift in before}
    images = [float(each.ledger.get("images") or 1) for each in reports]
    spread = [(_variance(a) + _variance(b)) / n for (a, b), n in zip(shifts.values(), images, strict=False)]
    error = math.sqrt(sum(spread)) / max(1, len(spread))
    return Found(mean, mean - statistics.fmean(before.values()), _right(reports), error, shifts)


def _variance(percent: float) -> float:
    """Of one answer that is right so often, in squared points."""
    return percent * (100 - percent)


def _right(reports: Iterable[CellResult]) -> float | None:
    """Pseudo-labels of those who taught: the low-entropy and the newly reliable ones, or everyone's."""
    right, count = 0.0, 0.0
    for report in reports:
        named = [report.groups.get(name, {}) for name in ("low", "newly")]
        groups = [group for group in named if group.get("n") and "accuracy" in group]
        if not groups and report.ledger.get("taught"):
            groups = [{"n": float(report.ledger.get("images") or 0), "accuracy": report.metrics["top1"]}]
        right += sum(group["n"] * group["accuracy"] for group in groups)
        count += sum(group["n"] for group in groups)
    return right / count if count else None


def text(suite: Suite, found: Table) -> str:
    """The table and what it shows, in lines of at most 100 characters."""
    groups = list(dict.fromkeys(placed.group for placed in suite.placed))
    methods, bases = _named(suite)
    head = f"accuracy %, mean of {len(suite.columns)} shifts"
    lines = [f"{head:<30}{'answers':<9}" + "".join(f"{bases[group]:>19}" for group in groups)]
    for row, method in methods.items():
        answers = "after" if recipe(method).readout.look == "last" else "before"
        if not recipe(method).learns:
            answers = "-"
        cells = [found.get((row, group)) for group in groups]
        shown = [f"{'failed':>19}" if each is None else f"{each.accuracy:>11.1f} ({each.gain:+5.1f})" for each in cells]
        lines.append(f"{row:<30}{answers:<9}" + "".join(shown))
    said = [line for sentence in sentences(suite, found) for line in textwrap.wrap(sentence, 98)]
    return "\n".join([*lines, "", *said])


def _named(suite: Suite) -> tuple[dict[str, str], dict[str, str]]:
    """The method of each row, and the base of each group."""
    placed = suite.placed
    return {each.row: each.cell.method for each in placed}, {each.group: each.cell.base for each in placed}


def sentences(suite: Suite, found: Table) -> list[str]:
    """One sentence on the largest gain, and for each network where adapting loses, one on where it loses most."""
    methods, bases = _named(suite)
    learning = {at: each for at, each in found.items() if recipe(methods[at[0]]).learns}
    if not learning:
        return []
    (row, group), best = max(learning.items(), key=lambda item: item[1].gain)
    still = [each.gain for (other, there), each in found.items() if there == group and methods[other] == "bn"]
    alone = f"; batch statistics alone bring {still[0]:+.1f}" if still else ""
    lines = [f"The largest gain: {row} on {bases[group]}, {best.gain:+.1f} points{alone}."]
    for group, base in bases.items():
        lost = [(row, each) for (row, there), each in learning.items() if there == group and each.gain < -POINT]
        if not lost:
            continue
        row, worst = min(lost, key=lambda item: item[1].gain)
        beyond = sum(each.gain < -each.error for _, each in lost)
        if not beyond:
            why = f"one standard error is {worst.error:.1f}"
            lines.append(f"On {base} no loss is beyond chance: {row} loses most, {worst.gain:+.1f}, and {why}.")
            continue
        count = f"{beyond} of {sum(there == group for _, there in learning)}"
        shift, (before, after) = min(worst.shifts.items(), key=lambda item: item[1][1] - item[1][0])
        where = f"{row} most, {worst.gain:+.1f}, in {shift.replace('_', ' ')} from {before:.1f} to {after:.1f}"
        rest = len(lost) - beyond
        within = f"; {rest} more {'loses' if rest == 1 else 'lose'} less than one standard error" if rest else ""
        lines.append(f"On {base} adapting loses with {count} methods; {where}{within}.")
    return lines
