"""Protocol cards: one per block of rows, so that a reader knows what the numbers are of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from poem.pages import words
from poem.pages.aggregate import Grid
from poem.pages.tables import Plain
from poem.report import Report


def cards(grid: Grid) -> tuple[Plain, ...]:
    """One protocol card per block; where its cells differ, every value is listed."""
    found = []
    for group in grid.groups:
        reports = [report for row in grid.rows(group) for report in grid.at(group, row)]
        if reports:
            found.append(Plain(caption=group or "All rows", head=("field", "value"), rows=tuple(_card(reports))))
    return tuple(found)


def _card(reports: Sequence[Report]) -> list[tuple[str, str]]:
    rows = []
    for field in dict.fromkeys(key for report in reports for key in report.card):
        values = dict.fromkeys(_text(report.card.get(field, "")) for report in reports)
        rows.append((field.replace("_", " "), words.listed(list(values), most=15)))
    weights = dict.fromkeys(str(report.base.get("sha256", "")) for report in reports)
    known = [each[:16] for each in weights if each]
    return rows + ([("weights, sha256", words.listed(known))] if known else [])


def _text(value: Any) -> str:
    return words.listed([str(each) for each in value]) if isinstance(value, list | tuple) else str(value)
