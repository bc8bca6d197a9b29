"""The table of `poem demo`: methods compared on corrupted digits, and sentences on where they gain and lose."""

from __future__ import annotations

import math
import statistics
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from poem.bench.result import CellResult, latest
from poem.bench.suites import Suite
from poem.recipes.methods import recipe

SUITE = "demo"
"""Name of the demo's suite."""
ROUNDING = 0.05
"""A difference in percentage points that one decimal shows."""


@dataclass(frozen=True)
class DemoRow:
    """One method on one network, as means over the corruptions."""

    accuracy: float
    gain: float
    right: float | None
    """Accuracy of the pseudo-labels of selected samples, in percent; None where no sample was selected."""
    error: float
    """Standard error of the gain, in percentage points, as for two independent samples of images."""
    shifts: dict[str, tuple[float, float]]
    """By corruption: accuracy of the model unadapted, and of the method."""


DemoTable = Mapping[tuple[str, str], DemoRow]
"""Rows by name and group."""


def demo_rows(suite: Suite, results: Iterable[CellResult]) -> dict[tuple[str, str], DemoRow]:
    """Build the rows of the demo's suite from its results."""
    by_key = latest(results, lambda result: result.cell_key)
    cells: dict[tuple[str, str], list[CellResult]] = {}
    for placed in suite.placed:
        if placed.cell.key in by_key:
            cells.setdefault((placed.row, placed.group), []).append(by_key[placed.cell.key])
    source = {group: found for (_, group), found in cells.items() if found[0].cell.method == "source"}
    return {(row, group): _demo_row(found, source[group]) for (row, group), found in cells.items() if group in source}


def _demo_row(results: Sequence[CellResult], source: Sequence[CellResult]) -> DemoRow:
    """Compare a method's results with those of `source` on the same network."""
    own, before = ({each.cell.corruptions[0]: each.metrics["top1"] for each in found} for found in (results, source))
    mean = statistics.fmean(own.values())
    shifts = {shift: (before[shift], top1) for shift, top1 in own.items() if shift in before}
    images = [float(each.ledger.get("images") or 1) for each in results]
    spread = [
        (percent_variance(a) + percent_variance(b)) / n for (a, b), n in zip(shifts.values(), images, strict=False)
    ]
    error = math.sqrt(sum(spread)) / max(1, len(spread))
    gain = mean - statistics.fmean(before.values())
    return DemoRow(mean, gain, _pseudo_label_accuracy(results), error, shifts)


def percent_variance(percent: float) -> float:
    """Variance of one prediction that is right in so many percent of all cases, in squared percentage points."""
    return percent * (100 - percent)


def _pseudo_label_accuracy(results: Iterable[CellResult]) -> float | None:
    """Accuracy on selected samples: low-entropy and newly reliable ones, or all where the method selects all."""
    right, count = 0.0, 0.0
    for result in results:
        named = [result.groups.get(name, {}) for name in ("low", "newly")]
        groups = [group for group in named if group.get("n") and "accuracy" in group]
        if not groups and result.ledger.get("taught"):
            groups = [{"n": float(result.ledger.get("images") or 0), "accuracy": result.metrics["top1"]}]
        right += sum(group["n"] * group["accuracy"] for group in groups)
        count += sum(group["n"] for group in groups)
    return right / count if count else None


def demo_text(suite: Suite, found: DemoTable) -> str:
    """The table and its sentences, in lines of at most 100 characters."""
    groups = list(dict.fromkeys(placed.group for placed in suite.placed))
    methods, bases = _methods_and_bases(suite)
    header = f"accuracy %, mean of {len(suite.columns)} shifts"
    lines = [f"{header:<30}{'answers':<9}" + "".join(f"{bases[group]:>19}" for group in groups)]
    for row, method in methods.items():
        answers = "after" if recipe(method).readout.which == "last" else "before"
        if not recipe(method).learns:
            answers = "-"
        cells = [found.get((row, group)) for group in groups]
        shown = [f"{'failed':>19}" if each is None else f"{each.accuracy:>11.1f} ({each.gain:+5.1f})" for each in cells]
        lines.append(f"{row:<30}{answers:<9}" + "".join(shown))
    wrapped = [line for sentence in sentences(suite, found) for line in textwrap.wrap(sentence, 98)]
    return "\n".join([*lines, "", *wrapped])


def _methods_and_bases(suite: Suite) -> tuple[dict[str, str], dict[str, str]]:
    """The method of each row, and the base of each group."""
    placed = suite.placed
    return {each.row: each.cell.method for each in placed}, {each.group: each.cell.base for each in placed}


def sentences(suite: Suite, found: DemoTable) -> list[str]:
    """One sentence on the largest gain, one on `auto`, and one for each network where adapting loses."""
    methods, bases = _methods_and_bases(suite)
    learning = {at: each for at, each in found.items() if recipe(methods[at[0]]).learns}
    if not learning:
        return []
    (row, group), best = max(learning.items(), key=lambda item: item[1].gain)
    bn = [each.gain for (other, its_group), each in found.items() if its_group == group and methods[other] == "bn"]
    bn_gain = f"; batch statistics alone bring {bn[0]:+.1f}" if bn else ""
    lines = [f"The largest gain: {row} on {bases[group]}, {best.gain:+.1f} points{bn_gain}."]
    lines += _auto_sentence(methods, bases, found)
    for group, base in bases.items():
        rows = {row: each for (row, its_group), each in learning.items() if its_group == group}
        lost = [(row, each) for row, each in rows.items() if each.gain < -ROUNDING]
        if not lost:
            continue
        row, worst = min(lost, key=lambda item: item[1].gain)
        beyond = sum(each.gain < -each.error for _, each in lost)
        if not beyond:
            why = f"one standard error is {worst.error:.1f}"
            lines.append(f"On {base} no loss is beyond chance: {row} loses most, {worst.gain:+.1f}, and {why}.")
            continue
        count = f"{beyond} of {len(rows)}"
        shift, (before, after) = min(worst.shifts.items(), key=lambda item: item[1][1] - item[1][0])
        where = f"{row} most, {worst.gain:+.1f}, in {shift.replace('_', ' ')} from {before:.1f} to {after:.1f}"
        rest = len(lost) - beyond
        others = f"; {rest} more {'loses' if rest == 1 else 'lose'} less than one standard error" if rest else ""
        lines.append(f"On {base} adapting loses with {count} methods; {where}{others}.")
    return lines


def _auto_sentence(methods: Mapping[str, str], bases: Mapping[str, str], found: DemoTable) -> list[str]:
    """What the default, `auto` with a guard, gains on each network, and whether it loses on any beyond chance."""
    rows = {(row, group): each for (row, group), each in found.items() if methods[row] == "auto"}
    if not rows:
        return []
    name = next(iter(rows))[0]
    gains = ", ".join(f"{each.gain:+.1f} on {bases[group]}" for (_, group), each in rows.items())
    lost = [bases[group] for (_, group), each in rows.items() if each.gain < -max(ROUNDING, each.error)]
    loss = f"it loses on {' and '.join(lost)}" if lost else "no loss beyond chance"
    return [f"{name} (the default, where no method is named): {gains}; {loss}."]
