"""Which suites a folder of results is about."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from poem.cells import Cell
    from poem.suites import Suite


def about(
    there: Collection[Cell],
    *,
    names: Sequence[str] | None = None,
    scale: str | None = None,
    asked: Mapping[str, Any] | None = None,
) -> list[Suite]:
    """The suites to show: those named, or every one of which a cell is there.

    Args:
        there: The cells that a folder holds, failed ones too.
        names: Suites by name or file.
        scale: Where none is given, the one that most cells belong to.
        asked: What else the cells were run with, as `poem.suites.load` takes it. A limit makes other cells; where none
            is given and nothing fits, the cells' own number of images is tried.
    """
    from poem import suites

    keys = {cell.key for cell in there}
    scales = [scale] if scale else suites.scales()
    wanted = list(names or [*suites.all_names(), *(name for name in suites.names() if name not in suites.all_names())])
    settings = dict(asked or {})
    limits = [settings.pop("limit", None)]
    limits += sorted({cell.n for cell in there if cell.n is not None}) if limits == [None] else []
    for limit in limits:
        known = {each: [suites.load(name, each, limit=limit, **settings) for name in wanted] for each in scales}
        held = {each: len({cell.key for suite in known[each] for cell in suite.cells} & keys) for each in scales}
        best = max(scales, key=lambda each: held[each])
        if held[best]:
            return [suite for suite in known[best] if names or any(cell.key in keys for cell in suite.cells)]
    raise ValueError(
        f"none of the {len(there)} cells here belongs to {', '.join(names or ['a suite'])} at scale "
        f"{' or '.join(scales)}; give --suites, --scale and the --limit, --seeds, --set of the run"
    )
