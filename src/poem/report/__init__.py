"""Reports of results: tables in the paper's layout, figures, claims and protocol, as Markdown and as one HTML file.

build([load("table1", "tiny")], store.results(), Path("results/tiny"))
print(compare(Path("results/a"), Path("results/b")))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from poem._util.files import write_atomic
from poem._util.nearest import nearest_hint
from poem.bench.result import CellResult
from poem.report.comparison import Comparison, compare
from poem.report.export import FORMATS, TABLE_FORMATS, ExportTable, export_tables
from poem.report.html import render_html
from poem.report.markdown import render_markdown
from poem.report.pictures import Picture
from poem.report.sections import build_page

if TYPE_CHECKING:
    from poem.bench.store import Failure
    from poem.bench.suites import Suite

__all__ = ["FORMATS", "Comparison", "ExportTable", "build", "compare", "report_tables"]


def build(
    suites: Sequence[Suite],
    results: Iterable[CellResult],
    out: Path,
    *,
    failures: Mapping[str, Failure] | None = None,
    formats: Sequence[str] = ("markdown", "html"),
    picture: Picture | None = None,
    against: str | None = None,
) -> tuple[Path, ...]:
    """Write a report into a folder and return the paths of its files: by default `report.md` and `report.html`.

    Args:
        suites: The suites to show, in this order.
        results: Results; those of no suite are left out, missing ones are shown as missing.
        out: A folder; it is created if it does not exist.
        failures: Failed cells by key.
        formats: Of `FORMATS`. `latex`, `csv` and `json` write one file for each table into the folder `tables`.
        picture: What the page begins with: images and their answers (`poem.report.pictures.picture`).
        against: A row or a method; adds paired differences of every other row to it, as `NAME-differences`.

    Raises:
        ValueError: No suite, a format that is not known, or no row that `against` names.
    """
    if not suites:
        raise ValueError("expected at least one suite to show; see poem bench --help for their names")
    for name in formats:
        if name not in FORMATS:
            raise ValueError(f"unknown format {name!r}; {nearest_hint(name, FORMATS)}")
    page = build_page(suites, results, failures or {}, picture, against)
    paths = []
    for name in dict.fromkeys(formats):
        if name in TABLE_FORMATS:
            ending, render = TABLE_FORMATS[name]
            found = {out / "tables" / f"{table.name}{ending}": render(table) for table in export_tables(page)}
        else:
            found = (
                {out / "report.md": render_markdown(page)}
                if name == "markdown"
                else {out / "report.html": render_html(page)}
            )
        for path, text in found.items():
            write_atomic(path, text)
            paths.append(path)
    return tuple(paths)


def report_tables(
    suites: Sequence[Suite],
    results: Iterable[CellResult],
    *,
    failures: Mapping[str, Failure] | None = None,
    against: str | None = None,
) -> dict[str, ExportTable]:
    """Every table of a report by name, such as `table1-top1`: `.frame()`, `.latex()`, `.csv()`, `.markdown()`.

    Args:
        suites: The suites to show.
        results: Results; those of no suite are left out.
        failures: Failed cells by key.
        against: A row or a method; adds `NAME-differences`, paired differences of every other row to it.
    """
    page = build_page(suites, results, failures or {}, against=against)
    return {table.name: table for table in export_tables(page)}
