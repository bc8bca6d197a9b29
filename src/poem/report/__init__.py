"""Results as pages: tables in the paper's layout, figures, claims and protocol, as Markdown and as one HTML file.

build([load("table1", "tiny")], store.results(), Path("results/tiny"))
print(compare(Path("results/a"), Path("results/b")))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from poem._util.files import write_whole
from poem.bench.result import CellResult
from poem.report.differences import Comparison, compare
from poem.report.html import html
from poem.report.markdown import markdown
from poem.report.sections import page

if TYPE_CHECKING:
    from poem.bench.store import Failure
    from poem.bench.suites import Suite

__all__ = ["Comparison", "build", "compare"]


def build(
    suites: Sequence[Suite], reports: Iterable[CellResult], out: Path, *, failures: Mapping[str, Failure] | None = None
) -> tuple[Path, Path]:
    """Write `report.md` and `report.html` into a folder and say where they are.

    Args:
        suites: What to show, in order of print.
        reports: Results; those that no suite asks for are left out, missing ones are shown as missing.
        out: A folder; it is made where it is not there.
        failures: By the cell's key, cells that raised.
    """
    if not suites:
        raise ValueError("expected at least one suite to show; see poem bench --help for their names")
    whole = page(suites, reports, failures or {})
    paths = (out / "report.md", out / "report.html")
    for path, text in zip(paths, (markdown(whole), html(whole)), strict=True):
        write_whole(path, text)
    return paths
