"""A page rendered as one HTML file, with its style, script, data and drawings inside."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from poem._util.files import without_controls
from poem.report.differences import NOTE
from poem.report.formatting import METRICS
from poem.report.plots import GLYPHS, Panel, Styles, draw, series_styles
from poem.report.sections import SMOKE, Page
from poem.report.tables import ResultTable


def render_html(page: Page) -> str:
    """Render a page as HTML."""
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError as error:
        raise ImportError("an HTML page needs jinja2 and matplotlib; type: pip install 'poem-tta[bench]'") from error

    folder = resources.files("poem.report")
    files = {name: (folder / name).read_text(encoding="utf-8") for name in ("template.html", "style.css", "script.js")}
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.globals.update(draw=_PanelDrawer(), glyph=GLYPHS.__getitem__, series_styles=series_styles)
    template = environment.from_string(files["template.html"])
    text = template.render(
        page=page, smoke=SMOKE, style=files["style.css"], script=files["script.js"], data=_tables_json(page),
        metrics=_shown_metrics(page), top1=METRICS["top1"], paired=NOTE,
    )  # fmt: skip
    return without_controls(text)


class _PanelDrawer:
    """Draws panels for the template, each with its own prefix of ids."""

    def __init__(self) -> None:
        self._drawn = 0

    def __call__(self, panel: Panel, styles: Styles) -> Any:
        from markupsafe import Markup

        self._drawn += 1
        return Markup(draw(panel, styles, f"f{self._drawn}"))


def _shown_metrics(page: Page) -> list[Any]:
    """Metrics that have numbers in some table."""
    present = {metric.key for section in page.sections if section.numbers for metric in section.numbers.metrics}
    return [metric for key, metric in METRICS.items() if key in present]


def _tables_json(page: Page) -> Any:
    """The entries of every table as JSON, escaped for a script element."""
    from markupsafe import Markup

    found = {section.name: _table_entries(section.numbers) for section in page.sections if section.numbers}
    titles = {key: metric.title for key, metric in METRICS.items()}
    text = json.dumps({"titles": titles, "tables": found}, separators=(",", ":"), ensure_ascii=False)
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def _table_entries(table: ResultTable) -> dict[str, list[list[list[Any]]]]:
    """The entries by metric and row, each as text, deviation and whether it is the best."""
    return {
        metric.key: [
            [[entry.text, entry.deviation, int(entry.best)] for entry in row.entries[metric.key]]
            for block in table.blocks
            for row in block.rows
        ]
        for metric in table.metrics
    }
