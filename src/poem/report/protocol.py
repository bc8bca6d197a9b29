"""Protocol cards of a suite: what was measured and with which settings; and warnings about its results."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from poem.bench.analysis.aggregate import Grid
from poem.bench.provenance import MODULE
from poem.bench.result import CellResult
from poem.recipes.methods import is_outside_method
from poem.recipes.recipe import Recipe
from poem.recipes.text import parse, written
from poem.report import formatting
from poem.report.formatting import MISSING
from poem.report.tables import TextTable, block_title, learns

CHOSEN = (
    "Learning rates were chosen on the held-out corruptions (poem choose): those of the methods and settings that it "
    "covers; the others keep their own. The card says which number each row has."
)
_FROST = re.compile(r"frost(?: textures:)? ([\w-]+)")


def cards(grid: Grid) -> tuple[TextTable, ...]:
    """For each group a card with all values of its cells, and a table of learning rates and changes to recipes."""
    found = []
    for group, results in _groups(grid):
        found.append(
            TextTable(
                caption=block_title(grid, group) or "All rows", header=("field", "value"), rows=tuple(_card(results))
            )
        )
        found.append(_settings(grid, group))
    return tuple(found)


def _groups(grid: Grid) -> Iterator[tuple[str, list[CellResult]]]:
    """Every group that has results, with them."""
    for group in grid.groups:
        if results := [result for row in grid.rows(group) for result in grid.at(group, row)]:
            yield group, results


def _card(results: Sequence[CellResult]) -> list[tuple[str, str]]:
    rows = []
    for field in dict.fromkeys(key for result in results for key in result.card):
        values = dict.fromkeys(_text(result.card.get(field, "")) for result in results)
        rows.append((field.replace("_", " "), formatting.comma_list(list(values), most=15)))
    weights = dict.fromkeys(str(result.base.get("sha256", "")) for result in results)
    digests = [each[:16] for each in weights if each]
    return rows + ([("weights, sha256", formatting.comma_list(digests))] if digests else [])


def _text(value: Any) -> str:
    return formatting.comma_list([str(each) for each in value]) if isinstance(value, list | tuple) else str(value)


# --- learning rates and changes


def _settings(grid: Grid, group: str) -> TextTable:
    """Learning rate and changes to the recipe of each method: rows, or columns where columns are the methods."""
    names = grid.rows(group) if grid.by_method else grid.columns
    rows = []
    for name in names:
        cells = [(name, None)] if grid.by_method else [(row, name) for row in grid.rows(group)]
        if results := [result for row, column in cells for result in grid.at(group, row, column)]:
            rates = dict.fromkeys(_rate(result) for result in results)
            changes = dict.fromkeys(_changes(result) for result in results)
            rows.append((name, formatting.comma_list(list(rates)), formatting.comma_list(list(changes))))
    chosen = "; chosen on the held-out corruptions, where poem choose covers them" if is_chosen(grid) else ""
    caption = f"{block_title(grid, group) or 'All rows'}, learning rates and changes to recipes{chosen}"
    header = ("method" if grid.by_method else "column", "learning rate", "changes")
    return TextTable(caption=caption, header=header, rows=tuple(rows))


def _rate(result: CellResult) -> str:
    """The learning rate of the recipe that ran, marked "its own" where the cell states none."""
    if not learns(result):
        return MISSING
    ran = result.recipe.get("lr", "not stated")
    try:
        rate = parse(ran, trusted=False)
        ran = f"{rate:g}" if isinstance(rate, int | float) else str(rate)
    except ValueError:  # the recipe of a version with other parts
        pass
    stated = result.cell.lr is not None or "lr" in dict(result.cell.changes)
    return ran if stated else f"its own: {ran}"


def _changes(result: CellResult) -> str:
    """The cell's changes to its recipe, with the values that ran; the learning rate has its own column.

    Before them, for a method of another package, what it is.
    """
    changes = {name: result.recipe.get(name, value) for name, value in result.cell.changes if name != "lr"}
    what = [] if (own := _own_parts(result, changes)) is None else [own]
    guarded = ["guarded"] if result.cell.guard else []
    return ", ".join([*what, *(f"{name} = {value}" for name, value in changes.items()), *guarded]) or MISSING


def _own_parts(result: CellResult, changes: Mapping[str, object]) -> str | None:
    """The parts of a method of another package where they are not Tent's, as `mine:sure: tent with select = ...`."""
    method = result.cell.method
    if ":" not in method and not is_outside_method(method):
        return None
    plain = written(Recipe())
    stated = {
        name: text for name, text in result.recipe.items()
        if name != "lr" and name not in changes and text != plain.get(name, "None")
    }  # fmt: skip
    parts = ", ".join(f"{name} = {text}" for name, text in stated.items())
    return f"{method}: tent with {parts}" if parts else f"{method}: as tent"


def is_chosen(grid: Grid) -> bool:
    """Whether learning rates come from `poem choose`."""
    return any("chosen" in change for change in grid.suite.altered)


# --- warnings


def warnings(grid: Grid) -> Iterator[str]:
    """Warnings about a suite's results: edited files, answers that are not finite, mixed weights, frost or code."""
    yield from _edited_results(grid)
    yield from _nonfinite_answers(grid)
    yield from _mixed_sources(grid)
    yield from _mixed_code(grid)


def _nonfinite_answers(grid: Grid) -> Iterator[str]:
    """A warning for each group with answers that are NaN or infinite: which rows, how many."""
    for group, _ in _groups(grid):
        found = []
        for row in grid.rows(group):
            results = [result for result in grid.at(group, row) if result.nonfinite]
            images = sum(result.ledger.get("images", 0) for result in results)
            if results:
                found.append(
                    f"{row}, {sum(result.nonfinite for result in results)} of {images} answers were not finite"
                )
        if found:
            yield (
                f"{block_title(grid, group) or 'This table'}: {'; '.join(found)} (NaN or Inf). They count as wrong; "
                "calibration, likelihood and risk of these streams are left out."
            )


def _edited_results(grid: Grid) -> Iterator[str]:
    """A warning that names results whose checksum is wrong."""
    labels = [result.cell.label for result in grid.results.values() if result.intact is False]
    if len(labels) == 1:
        yield f"1 result was edited after it was measured: {labels[0]}. Numbers that rest on it were not measured."
    elif labels:
        yield (
            f"{len(labels)} results were edited after they were measured: {formatting.comma_list(labels)}. Numbers "
            "that rest on them were not measured."
        )


def _mixed_sources(grid: Grid) -> Iterator[str]:
    """A warning for each group whose cells were measured with several files of weights, or several kinds of frost."""
    for group, results in _groups(grid):
        where = block_title(grid, group) or "This table"
        weights: dict[tuple[str, str | None], Counter[str]] = {}
        frost: dict[str, Counter[str]] = {}
        for result in {result.key: result for result in results}.values():
            cell, digest = result.cell, result.base.get("sha256")
            if digest:
                weights.setdefault((cell.base, cell.weights), Counter())[str(digest)[:16]] += 1
            if "frost" in cell.corruptions:
                found = _FROST.search(str(result.card.get("provenance", "")))
                frost.setdefault(cell.data, Counter())[found[1] if found else "as found"] += 1
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


def _mixed_code(grid: Grid) -> Iterator[str]:
    """A warning for each group whose cells were measured with several versions of a module's code."""
    for group, results in _groups(grid):
        found: dict[str, Counter[str]] = {}
        for result in {result.key: result for result in results}.values():
            for name, digest in result.provenance.items():
                if name.startswith(MODULE):
                    found.setdefault(name.removeprefix(MODULE), Counter())[str(digest)[:8]] += 1
        for module, counts in found.items():
            if len(counts) > 1:
                yield (
                    f"{block_title(grid, group) or 'This table'} mixes {len(counts)} versions of the code of {module}: "
                    f"sha256 {_counted(counts)}. poem bench ... --rerun {module} measures its cells again."
                )


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} ({formatting.plural(times, 'cell')})" for name, times in counts.items())
