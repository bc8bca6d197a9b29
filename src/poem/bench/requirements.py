"""What cells need and this machine lacks, before any of them is run: all of it in one message.

Weights are looked for once for each base, files once for each data set and shift. Nothing is decoded: whether files are
whole is for those who read them, and for `poem data check`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from poem import zoo
from poem.bench.cell import Cell
from poem.bench.opening import STORED, Place, source_images, weights_of
from poem.streams.datasets import canonical, open_dataset
from poem.streams.datasets.named_sets import CLEAN_COUNTERPARTS, NAMED_SETS, corruption_folder, locate
from poem.streams.shift import CLEAN, Shift

FETCHED = ("torchvision", "timm")
"""Kinds of bases whose weights a run downloads where they are not there."""
_ORDER = ("weights", "data", "source")
_REFUSALS = (OSError, ValueError, TypeError, ImportError)


@dataclass(frozen=True)
class Lack:
    """Something that is not there."""

    what: str
    why: str
    """With what to type."""
    cells: int

    def __str__(self) -> str:
        return f"{self.what} ({self.cells} cell{'' if self.cells == 1 else 's'}): {self.why}"


@dataclass(frozen=True)
class Look:
    """What one look at a machine found."""

    lacks: tuple[Lack, ...] = ()
    to_fetch: tuple[str, ...] = ()
    """Bases whose weights are not there and that a run would download."""

    def __str__(self) -> str:
        """One line where nothing is missing, else one for each thing."""
        later = f"; a run downloads the weights of {', '.join(self.to_fetch)}" if self.to_fetch else ""
        if not self.lacks:
            return f"weights and data: {'nothing is missing' if self.to_fetch else 'all found'}{later}"
        count = "1 thing is" if len(self.lacks) == 1 else f"{len(self.lacks)} things are"
        return "\n".join([f"{count} missing{later}:", *(f"  {each}" for each in self.lacks)])


def look(cells: Sequence[Cell], place: Place, *, fetch: bool = True) -> Look:
    """Look for everything that some cells need.

    Args:
        cells: Those that are to be run.
        place: Where this machine keeps data and weights.
        fetch: Download weights that are nowhere, as a run would; False to say only that it would.
    """
    asked: dict[tuple[str, Any], tuple[str, Callable[[], None]]] = {}
    users: dict[tuple[str, Any], int] = {}
    later: dict[str, None] = {}
    for cell in cells:
        for key, what, find in _needs(cell, place, fetch, later):
            asked.setdefault(key, (what, find))
            users[key] = users.get(key, 0) + 1
    lacks: dict[str, list[Lack]] = {}
    for key, (what, find) in sorted(asked.items(), key=lambda item: _ORDER.index(item[0][0])):
        try:
            find()
        except _REFUSALS as error:
            lacks.setdefault(what, []).append(Lack(what, str(error), users[key]))
    return Look(tuple(_together(alike) for alike in lacks.values()), tuple(later))


Need = tuple[tuple[str, Any], str, Callable[[], None]]
"""By what two needs are one, what it is called, and a search that raises."""


def _needs(cell: Cell, place: Place, fetch: bool, later: dict[str, None]) -> Iterator[Need]:
    def weights() -> None:
        base = zoo.base(cell.base)
        zoo.require_builder(base)
        if cell.weights == "random":
            return
        where = weights_of(cell, base, place)
        if (
            fetch
            or where is not None
            or base.kind not in FETCHED
            or any(path.is_file() for path in zoo.local_weight_paths(base))
        ):
            zoo.find_weights(base, where)
        else:
            later[base.name] = None

    yield ("weights", (cell.base, cell.weights)), f"weights of {cell.base}", weights
    for shift in _shifts(cell):

        def files(shift: Shift = shift) -> None:
            _files(cell, place, shift)

        yield ("data", (cell.data, cell.dataset, shift)), f"data set {cell.data}", files
    if _anchored(cell):

        def source() -> None:
            source_images(cell, zoo.base(cell.base), place)

        family = cell.base.split("-")[0] if cell.base.startswith(("digits", "cifar")) else "imagenet"
        yield ("source", family), f"source images for {cell.method}", source


def _shifts(cell: Cell) -> list[Shift]:
    """The domains that lie on disk; of clean data, which is corrupted on the fly, the one."""
    try:
        if canonical(cell.data) not in STORED:
            return [CLEAN]
        return list(dict.fromkeys(shift for visit in cell.order().visits for shift in visit.shifts))
    except (ValueError, TypeError):  # a name that nobody knows: opening says so
        return [CLEAN]


def _files(cell: Cell, place: Place, shift: Shift) -> None:
    """Find a domain's files."""
    name = canonical(cell.data)
    if name in STORED and shift == CLEAN:
        name = CLEAN_COUNTERPARTS[name]
    if name in NAMED_SETS:
        locate(NAMED_SETS[name], place.root)
    elif name == "imagenet-c":
        corruption_folder(place.root, shift)
    elif name in STORED:
        open_dataset(name, place.root, corruption=shift.corruption, severity=shift.severity, **dict(cell.dataset))
    else:
        open_dataset(name, place.root, **dict(cell.dataset))


def _anchored(cell: Cell) -> bool:
    try:
        return bool(cell.source_images) and cell.recipe().uses_source_data
    except (ValueError, TypeError):  # no such recipe: the cell itself will say so
        return False


def _together(alike: Sequence[Lack]) -> Lack:
    """One line for all domains of a data set."""
    first = alike[0]
    more = f" (and {len(alike) - 1} more like it)" if len(alike) > 1 else ""
    return Lack(first.what, first.why + more, sum(each.cells for each in alike))
