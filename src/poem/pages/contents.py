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
        names: Suites by name or file; one that the flags leave nothing of is passed over.
        scale: Where none is given, the one that most cells belong to.
        asked: What else the cells were run with, as `poem.suites.load` takes it. A limit makes other cells; where none
            is given and nothing fits, the cells' own number of images is tried.
    """
    from poem import suites

    def load(name: str, scale: str, limit: int | None) -> Suite | None:
        try:
            return suites.load(name, scale, limit=limit, **settings)
        except suites.NothingLeftError as error:
            nothing.append(str(error))
            return None

    nothing: list[str] = []
    keys = {cell.key for cell in there}
    scales = [scale] if scale else suites.scales()
    wanted = list(names or [*suites.all_names(), *(name for name in suites.names() if name not in suites.all_names())])
    settings = dict(asked or {})
    limits = [settings.pop("limit", None)]
    limits += sorted({cell.n for cell in there if cell.n is not None}) if limits == [None] else []
    for limit in limits:
        loaded = {each: [load(name, each, limit) for name in wanted] for each in scales}
        known = {each: [suite for suite in found if suite is not None] for each, found in loaded.items()}
        held = {each: len({cell.key for suite in known[each] for cell in suite.cells} & keys) for each in scales}
        best = max(scales, key=lambda each: held[each])
        if held[best]:
            return [suite for suite in known[best] if names or any(cell.key in keys for cell in suite.cells)]
    if names and len(nothing) == len(wanted) * len(scales) * len(limits):
        raise ValueError(nothing[0])
    raise ValueError(
        f"none of the {len(there)} cells here belongs to {', '.join(names or ['a suite'])} at scale "
        f"{' or '.join(scales)}; give --suites, --scale and the --limit, --seeds, --set of the run"
    )
