"""Protocol cards: one per block of rows, so that a reader knows what the numbers are of."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from poem.bench.analysis.aggregate import Grid
from poem.bench.result import CellResult
from poem.recipes.text import parse
from poem.report import words
from poem.report.tables import Plain, learns, titled
from poem.report.words import NOTHING

CHOSEN = (
    "Learning rates were chosen on the held-out corruptions (poem choose): those of the methods and settings that it "
    "covers; the others keep their own. The card says which number each row has."
)
_FROST = re.compile(r"frost(?: textures:)? ([\w-]+)")


def cards(grid: Grid) -> tuple[Plain, ...]:
    """One protocol card per block, where its cells differ with every value; then what each row learns with."""
    found = []
    for group, reports in _blocks(grid):
        found.append(
            Plain(caption=titled(grid, group) or "All rows", head=("field", "value"), rows=tuple(_card(reports)))
        )
        found.append(_settings(grid, group))
    return tuple(found)


def _blocks(grid: Grid) -> Iterator[tuple[str, list[CellResult]]]:
    """Every block that has reports."""
    for group in grid.groups:
        if reports := [report for row in grid.rows(group) for report in grid.at(group, row)]:
            yield group, reports


def _card(reports: Sequence[CellResult]) -> list[tuple[str, str]]:
    rows = []
    for field in dict.fromkeys(key for report in reports for key in report.card):
        values = dict.fromkeys(_text(report.card.get(field, "")) for report in reports)
        rows.append((field.replace("_", " "), words.listed(list(values), most=15)))
    weights = dict.fromkeys(str(report.base.get("sha256", "")) for report in reports)
    known = [each[:16] for each in weights if each]
    return rows + ([("weights, sha256", words.listed(known))] if known else [])


def _text(value: Any) -> str:
    return words.listed([str(each) for each in value]) if isinstance(value, list | tuple) else str(value)


# --- learning rates and changes


def _settings(grid: Grid, group: str) -> Plain:
    """Learning rate and changes of each row; of each column where columns are the methods."""
    names = grid.rows(group) if grid.by_method else grid.columns
    rows = []
    for name in names:
        places = [(name, None)] if grid.by_method else [(row, name) for row in grid.rows(group)]
        if reports := [report for row, column in places for report in grid.at(group, row, column)]:
            rates = dict.fromkeys(_rate(report) for report in reports)
            changes = dict.fromkeys(_changes(report) for report in reports)
            rows.append((name, words.listed(list(rates)), words.listed(list(changes))))
    chosen = "; chosen on the held-out corruptions, where poem choose covers them" if is_chosen(grid) else ""
    caption = f"{titled(grid, group) or 'All rows'}, learning rates and changes to recipes{chosen}"
    head = ("method" if grid.by_method else "column", "learning rate", "changes")
    return Plain(caption=caption, head=head, rows=tuple(rows))


def _rate(report: CellResult) -> str:
    """The learning rate of the recipe that ran; "its own" where the cell states none."""
    if not learns(report):
        return NOTHING
    ran = report.recipe.get("lr", "not stated")
    try:
        rate = parse(ran)
        ran = f"{rate:g}" if isinstance(rate, int | float) else str(rate)
    except ValueError:  # of a version with other parts
        pass
    stated = report.cell.lr is not None or "lr" in dict(report.cell.changes)
    return ran if stated else f"its own: {ran}"


def _changes(report: CellResult) -> str:
    """What the cell changes, with the values of the recipe that ran; the learning rate has a column of its own."""
    changes = {name: report.recipe.get(name, value) for name, value in report.cell.changes if name != "lr"}
    return ", ".join(f"{name} = {value}" for name, value in changes.items()) or NOTHING


def is_chosen(grid: Grid) -> bool:
    """Whether learning rates come from `poem choose`."""
    return any("chosen" in word for word in grid.suite.altered)


# --- what should not stand in one table


def not_finite(grid: Grid) -> Iterator[str]:
    """A warning for each block with answers that are NaN or infinite: which rows, how many."""
    for group, _ in _blocks(grid):
        found = []
        for row in grid.rows(group):
            reports = [report for report in grid.at(group, row) if report.nonfinite]
            images = sum(report.ledger.get("images", 0) for report in reports)
            if reports:
                found.append(
                    f"{row}, {sum(report.nonfinite for report in reports)} of {images} answers were not finite"
                )
        if found:
            yield (
                f"{titled(grid, group) or 'This table'}: {'; '.join(found)} (NaN or Inf). They count as wrong; "
                "calibration, likelihood and risk of these streams are left out."
            )


def edited(grid: Grid) -> Iterator[str]:
    """A warning that names results whose checksum is wrong."""
    labels = [report.cell.label for report in grid.results.values() if report.intact is False]
    if len(labels) == 1:
        yield f"1 result was edited after it was measured: {labels[0]}. Numbers that rest on it were not measured."
    elif labels:
        yield (
            f"{len(labels)} results were edited after they were measured: {words.listed(labels)}. Numbers that rest on "
            "them were not measured."
        )


def mixed(grid: Grid) -> Iterator[str]:
    """A warning for each block whose cells were measured with two files of weights, or two kinds of frost."""
    for group, reports in _blocks(grid):
        where = titled(grid, group) or "This table"
        weights: dict[tuple[str, str | None], dict[str, int]] = {}
        frost: dict[str, dict[str, int]] = {}
        for report in {report.key: report for report in reports}.values():
            cell, digest = report.cell, report.base.get("sha256")
            if digest:
                _count(weights.setdefault((cell.base, cell.weights), {}), str(digest)[:16])
            if "frost" in cell.corruptions:
                found = _FROST.search(str(report.card.get("provenance", "")))
                _count(frost.setdefault(cell.data, {}), found[1] if found else "as found")
        for (base, _), counts in weights.items():
            if len(counts) > 1:
                yield (
                    f"{where} mixes {len(counts)} files of weights for {base}: sha256 {_counted(counts)}. Its numbers "
                    "are not comparable with each other; measure it again in a folder of its own."
                )
        for data, counts in frost.items():
            if len(counts) > 1:
                yield (
                    f"{where} mixes {len(counts)} sources of frost on {data}: {_counted(counts)}. Its frost numbers "
                    "are not comparable with each other; measure them again in a folder of their own."
                )


def _count(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} ({words.plural(times, 'cell')})" for name, times in counts.items())
