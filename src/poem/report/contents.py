"""Which suites a folder of results is about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from poem.bench.cell import Cell
    from poem.bench.store import Request
    from poem.bench.suites import Suite


def about(
    there: Collection[Cell],
    *,
    names: Sequence[str] | None = None,
    scale: str | None = None,
    asked: Mapping[str, Any] | None = None,
    requests: Sequence[Request] = (),
) -> list[Suite]:
    """The suites to show: those named, those that were asked for, or those that are whole here.

    Where nothing is named nor known to have been asked for, and no suite is whole, every one with a cell here is shown.

    Args:
        there: The cells that a folder holds, failed ones too.
        names: Suites by name or file; one that the flags leave nothing of is passed over.
        scale: Where none is given, the one that most cells belong to.
        asked: What else the cells were run with, as `poem.bench.suites.load` takes it. A limit makes other cells; where
            none is given and nothing fits, the cells' own number of images is tried.
        requests: What the folder was asked for; where no flag is given, it is shown as it was asked for.
    """
    from poem.bench import suites

    keys = {cell.key for cell in there}
    settings = dict(asked or {})
    plain = not names and scale is None and not any(settings.values())
    if plain and (found := _as_asked(requests, keys)):
        return found
    scales = [scale] if scale else suites.scales()
    known = list(names or dict.fromkeys(each.suite for each in requests) or _all())
    limits = [settings.pop("limit", None)]
    limits += sorted({cell.n for cell in there if cell.n is not None}) if limits == [None] else []
    nothing: list[str] = []
    for limit in limits:
        loaded = {each: _loaded(known, each, {**settings, "limit": limit}, nothing) for each in scales}
        held = {each: len({cell.key for suite in loaded[each] for cell in suite.cells} & keys) for each in scales}
        best = max(scales, key=lambda each: held[each])
        if held[best] and names:
            return loaded[best]
        if held[best]:
            whole = [suite for suite in loaded[best] if _missing(suite, keys) == 0]
            return whole or [suite for suite in loaded[best] if _present(suite, keys)]
    if names and len(nothing) == len(known) * len(scales) * len(limits):
        raise ValueError(nothing[0])
    sizes = Counter("all" if cell.n is None else str(cell.n) for cell in there)
    raise ValueError(
        f"none of the {len(there)} cells here belongs to {', '.join(names or ['a suite'])} at scale "
        f"{' or '.join(scales)}; give --suites, --scale and the --limit, --seeds, --set of the run. Images of each "
        f"shift here: {', '.join(f'{size} ({count} cells)' for size, count in sizes.most_common())}"
    )


def _all() -> list[str]:
    """Every suite that comes along, the paper's first."""
    from poem.bench import suites

    return [*suites.all_names(), *(name for name in suites.names() if name not in suites.all_names())]


def _as_asked(requests: Sequence[Request], keys: Collection[str]) -> list[Suite]:
    """Each suite in the way, of those asked for, that most cells here belong to; as its file states it is one too."""
    chosen: dict[str, Suite] = {}
    for name in sorted(dict.fromkeys(each.suite for each in requests), key=_place):
        tried: list[Suite] = []
        for each in (each for each in reversed(requests) if each.suite == name):
            tried += [*_loaded([name], each.scale, each.settings), *_loaded([name], each.scale, {})]
        best = max(tried, key=lambda suite: (_present(suite, keys), -_missing(suite, keys)), default=None)
        if best is not None and _present(best, keys):
            chosen.setdefault(best.name, best)
    return list(chosen.values())


def _place(name: str) -> int:
    known = _all()
    return known.index(name) if name in known else len(known)


def _loaded(
    names: Sequence[str], scale: str, settings: Mapping[str, Any], nothing: list[str] | None = None
) -> list[Suite]:
    """These suites, less those that the settings leave nothing of; `nothing` takes the reasons."""
    from poem.bench import suites

    found = []
    for name in names:
        try:
            found.append(suites.load(name, scale, **settings))
        except suites.NothingLeftError as error:
            if nothing is not None:
                nothing.append(str(error))
    return found


def _present(suite: Suite, keys: Collection[str]) -> int:
    return len({cell.key for cell in suite.cells} & set(keys))


def _missing(suite: Suite, keys: Collection[str]) -> int:
    return len({cell.key for cell in suite.cells} - set(keys))
