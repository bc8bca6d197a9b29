"""Selection of the suites that a report of a folder of results shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from poem.bench.cell import Cell
    from poem.bench.store import Request
    from poem.bench.suites import Suite


def select_suites(
    cells: Collection[Cell],
    *,
    names: Sequence[str] | None = None,
    scale: str | None = None,
    settings: Mapping[str, Any] | None = None,
    requests: Sequence[Request] = (),
) -> list[Suite]:
    """The suites to show: those named, those that were run into the folder, or those whose cells are all there.

    Where none is named, none is recorded as run and none is complete, every suite with a cell in the folder is shown.

    Args:
        cells: The cells that a folder holds, failed ones too.
        names: Suites by name or file; one that the settings leave no cell of is left out.
        scale: By default the one that most cells belong to.
        settings: Other settings of the run, as `poem.bench.suites.load` takes them. A limit makes other cells; where
            none is given and nothing fits, the cells' own number of images is tried.
        requests: Which suites were run into the folder and how; without names, scale and settings they are shown so.
    """
    from poem.bench import suites

    there = _Cells(cells)
    given = dict(settings or {})
    by_default = not names and scale is None and not any(given.values())
    if by_default and (found := _as_requested(requests, there)):
        return found
    scales = [scale] if scale else suites.scales()
    candidates = list(names or dict.fromkeys(each.suite for each in requests) or _all_suites())
    limits = [given.pop("limit", None)]
    limits += sorted({cell.n for cell in cells if cell.n is not None}) if limits == [None] else []
    empty: list[str] = []
    tried = list(scales)
    for limit in limits:
        loaded = {each: _load_each(candidates, each, {**given, "limit": limit}, empty) for each in tried}
        shared = {each: len({key for suite in loaded[each] for key in there.keys_of(suite)}) for each in tried}
        best = max(tried, key=lambda each: shared[each])
        if shared[best] and names:
            return loaded[best]
        if shared[best]:
            complete = [suite for suite in loaded[best] if there.count_missing(suite) == 0]
            return complete or [suite for suite in loaded[best] if there.keys_of(suite)]
        if names and len(empty) == len(candidates) * len(scales):  # a limit leaves none out
            raise ValueError(empty[0])
        tried = [each for each in tried if any(map(there.resemble, loaded[each]))]
        if not tried:
            break
    sizes = Counter("all" if cell.n is None else str(cell.n) for cell in cells)
    raise ValueError(
        f"none of the {len(cells)} cells here belongs to {', '.join(names or ['a suite'])} at scale "
        f"{' or '.join(scales)}; give --suites, --scale and the --limit, --seeds, --set of the run. Images of each "
        f"shift here: {', '.join(f'{size} ({count} cells)' for size, count in sizes.most_common())}"
    )


def _all_suites() -> list[str]:
    """Names of all suites of the package, the paper's first."""
    from poem.bench import suites

    return [*suites.all_names(), *(name for name in suites.names() if name not in suites.all_names())]


class _Cells:
    """The cells of a folder, to compare suites with.

    A key needs the cell's recipe, which takes most of the time, so it is made only for cells of a suite whose model,
    data, method, corruptions and seed are those of a cell in the folder; no other can have the key of one.
    """

    def __init__(self, cells: Collection[Cell]) -> None:
        self._keys = {cell.key for cell in cells}
        self._plain = {_plain_fields(cell) for cell in cells}

    def keys_of(self, suite: Suite) -> set[str]:
        """Keys of the suite's cells that are in the folder."""
        return {cell.key for cell in suite.cells if _plain_fields(cell) in self._plain} & self._keys

    def count_missing(self, suite: Suite) -> int:
        """How many of the suite's cells are not in the folder."""
        return len(suite.cells) - len(self.keys_of(suite))

    def resemble(self, suite: Suite) -> bool:
        """Whether the suite may share a cell with the folder at another limit, which changes numbers of images only."""
        return any(_plain_fields(cell) in self._plain for cell in suite.cells)


def _plain_fields(cell: Cell) -> tuple[Any, ...]:
    return cell.base, cell.data, cell.method, cell.corruptions, cell.seed


def _as_requested(requests: Sequence[Request], there: _Cells) -> list[Suite]:
    """Each requested suite, with the settings of that request, or with none, that most cells of the folder match."""
    chosen: dict[str, Suite] = {}
    for name in sorted(dict.fromkeys(each.suite for each in requests), key=_rank):
        tried: list[Suite] = []
        for each in (each for each in reversed(requests) if each.suite == name):
            tried += [*_load_each([name], each.scale, each.settings), *_load_each([name], each.scale, {})]
        best = max(tried, key=lambda suite: (len(there.keys_of(suite)), -there.count_missing(suite)), default=None)
        if best is not None and there.keys_of(best):
            chosen.setdefault(best.name, best)
    return list(chosen.values())


def _rank(name: str) -> int:
    order = _all_suites()
    return order.index(name) if name in order else len(order)


def _load_each(
    names: Sequence[str], scale: str, settings: Mapping[str, Any], empty: list[str] | None = None
) -> list[Suite]:
    """Load suites without those that the settings leave no cell of, whose errors are appended to `empty`."""
    from poem.bench import suites

    found = []
    for name in names:
        try:
            found.append(suites.load(name, scale, **settings))
        except suites.NothingLeftError as error:
            if empty is not None:
                empty.append(str(error))
    return found
