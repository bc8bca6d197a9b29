"""Reports of results: tables in the paper's layout, figures, claims and protocol, as Markdown and as one HTML file.

build([load("table1", "tiny")], store.results(), Path("results/tiny"))
print(compare(Path("results/a"), Path("results/b")))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from poem._util.files import write_atomic
from poem.bench.result import CellResult
from poem.report.comparison import Comparison, compare
from poem.report.html import render_html
from poem.report.markdown import render_markdown
from poem.report.sections import build_page

if TYPE_CHECKING:
    from poem.bench.store import Failure
    from poem.bench.suites import Suite

__all__ = ["Comparison", "build", "compare"]


def build(
    suites: Sequence[Suite], results: Iterable[CellResult], out: Path, *, failures: Mapping[str, Failure] | None = None
) -> tuple[Path, Path]:
    """Write `report.md` and `report.html` into a folder and return their paths.

    Args:
        suites: The suites to show, in this order.
        results: Results; those of no suite are left out, missing ones are shown as missing.
        out: A folder; it is created if it does not exist.
        failures: Failed cells by key.
    """
    if not suites:
        raise ValueError("expected at least one suite to show; see poem bench --help for their names")
    page = build_page(suites, results, failures or {})
    paths = (out / "report.md", out / "report.html")
    for path, text in zip(paths, (render_markdown(page), render_html(page)), strict=True):
        write_atomic(path, text)
    return paths
