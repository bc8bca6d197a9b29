"""The page as one HTML file: style, script, numbers and drawings are inside, nothing is fetched."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from poem.report.plots import GLYPHS, Looks, Panel, draw, looks
from poem.report.sections import SMOKE, Page
from poem.report.tables import Numbers
from poem.report.words import METRICS


def html(page: Page) -> str:
    """The whole page."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ImportError("an HTML page needs jinja2 and matplotlib; type: pip install 'poem-tta[bench]'") from error

    folder = resources.files("poem.report")
    parts = {name: (folder / name).read_text(encoding="utf-8") for name in ("template.html", "style.css", "script.js")}
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(draw=_Pen(), glyph=GLYPHS.__getitem__, looks=looks)
    template = environment.from_string(parts["template.html"])
    return template.render(
        page=page, smoke=SMOKE, style=parts["style.css"], script=parts["script.js"], data=_data(page),
        metrics=_offered(page), top1=METRICS["top1"],
    )  # fmt: skip


class _Pen:
    """Draws panels for a template, each under ids of its own."""

    def __init__(self) -> None:
        self._drawn = 0

    def __call__(self, panel: Panel, chosen: Looks) -> Any:
        from markupsafe import Markup

        self._drawn += 1
        return Markup(draw(panel, chosen, f"f{self._drawn}"))


def _offered(page: Page) -> list[Any]:
    """Metrics of which some table has numbers."""
    there = {metric.key for section in page.sections if section.numbers for metric in section.numbers.metrics}
    return [metric for key, metric in METRICS.items() if key in there]


def _data(page: Page) -> Any:
    """Every table's entries as JSON that is safe inside a script element."""
    from markupsafe import Markup

    found = {section.name: _table(section.numbers) for section in page.sections if section.numbers}
    titles = {key: metric.title for key, metric in METRICS.items()}
    text = json.dumps({"titles": titles, "tables": found}, separators=(",", ":"), ensure_ascii=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _table(table: Numbers) -> dict[str, list[list[list[Any]]]]:
    """By metric, row by row as printed: text, deviation, best."""
    return {
        metric.key: [
            [[entry.text, entry.deviation, int(entry.best)] for entry in row.entries[metric.key]]
            for block in table.blocks
            for row in block.rows
        ]
        for metric in table.metrics
    }
