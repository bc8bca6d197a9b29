"""Checks, before a sweep, that this machine has the weights, data and source images that its cells need.

Methods and parts of other packages are imported.
Weights are looked for once for each base, files once for each data set and shift. Nothing is decoded: `poem data check`
reads files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from poem import zoo
from poem.bench.cell import Cell
from poem.bench.load_cell import CORRUPTED_ON_DISK, Machine, source_images, weights_argument
from poem.recipes.methods import is_outside_method
from poem.streams.datasets import canonical, open_dataset
from poem.streams.datasets.named_sets import CLEAN_COUNTERPARTS, NAMED_SETS, corruption_folder, locate_all
from poem.streams.shift import CLEAN, Shift

DOWNLOADED = ("torchvision", "timm")
"""Kinds of bases whose weights a run downloads where they are missing."""
_ORDER = ("recipe", "weights", "data", "source")
_SEARCH_ERRORS = (OSError, ValueError, TypeError, ImportError)


@dataclass(frozen=True)
class Missing:
    """A method, weights, data or source images that were not found."""

    what: str
    why: str
    """The error of the search, with what to type."""
    cells: int
    """How many cells need it."""

    def __str__(self) -> str:
        return f"{self.what} ({self.cells} cell{'' if self.cells == 1 else 's'}): {self.why}"


@dataclass(frozen=True)
class Requirements:
    """What the cells of a sweep need and this machine does not have."""

    missing: tuple[Missing, ...] = ()
    to_download: tuple[str, ...] = ()
    """Bases whose weights a run would download."""

    def __str__(self) -> str:
        """One line where nothing is missing, else one line each."""
        later = f"; a run downloads the weights of {', '.join(self.to_download)}" if self.to_download else ""
        if not self.missing:
            return f"weights and data: {'nothing is missing' if self.to_download else 'all found'}{later}"
        count = "1 thing is" if len(self.missing) == 1 else f"{len(self.missing)} things are"
        return "\n".join([f"{count} missing{later}:", *(f"  {each}" for each in self.missing)])


def check_requirements(cells: Sequence[Cell], machine: Machine, *, download: bool = True) -> Requirements:
    """Look for everything that cells need.

    Args:
        cells: The cells that are to be run.
        machine: Folders with data and weights.
        download: Download missing weights, as a run would; False to list them in `to_download` instead.
    """
    searches: dict[tuple[str, Any], tuple[str, Callable[[], None]]] = {}
    users: dict[tuple[str, Any], int] = {}
    later: dict[str, None] = {}
    for cell in cells:
        for key, what, find in _requirements(cell, machine, download, later):
            searches.setdefault(key, (what, find))
            users[key] = users.get(key, 0) + 1
    missing: dict[str, list[Missing]] = {}
    for key, (what, find) in sorted(searches.items(), key=lambda item: _ORDER.index(item[0][0])):
        try:
            find()
        except _SEARCH_ERRORS as error:
            missing.setdefault(what, []).append(Missing(what, str(error), users[key]))
    return Requirements(tuple(_merged(each) for each in missing.values()), tuple(later))


Requirement = tuple[tuple[str, Any], str, Callable[[], None]]
"""A key, equal for cells with the same requirement; its name; and a search that raises where it is missing."""


def _requirements(cell: Cell, machine: Machine, download: bool, later: dict[str, None]) -> Iterator[Requirement]:
    if is_outside_method(cell.method) or any(":" in str(text) for _, text in cell.changes):

        def made() -> None:
            cell.recipe()

        yield ("recipe", (cell.method, cell.changes)), f"method {cell.method}", made

    def weights() -> None:
        base = zoo.base(cell.base)
        zoo.require_builder(base)
        if cell.weights == "random":
            return
        where = weights_argument(cell, base, machine)
        here = any(path.is_file() for path in zoo.local_weight_paths(base))
        if download or where is not None or base.kind not in DOWNLOADED or here:
            zoo.weights_file(base, where)
        else:
            later[base.name] = None

    yield ("weights", (cell.base, cell.weights)), f"weights of {cell.base}", weights
    for shift in _shifts(cell):

        def files(shift: Shift = shift) -> None:
            _find_files(cell, machine, shift)

        yield ("data", (cell.data, cell.dataset, shift)), f"data set {cell.data}", files
    if _needs_source_images(cell):

        def source() -> None:
            source_images(cell, zoo.base(cell.base), machine)

        family = cell.base.split("-")[0] if cell.base.startswith(("digits", "cifar")) else "imagenet"
        family = cell.base if cell.base not in zoo.bases() or zoo.base(cell.base).kind == "outside" else family
        yield ("source", family), f"source images for {cell.method}", source


def _shifts(cell: Cell) -> list[Shift]:
    """The domains that are read from disk: clean data alone where it is corrupted on the fly."""
    try:
        if canonical(cell.data) not in CORRUPTED_ON_DISK:
            return [CLEAN]
        return list(dict.fromkeys(shift for visit in cell.order().visits for shift in visit.shifts))
    except (ValueError, TypeError):  # an unknown name: the search for its files says so
        return [CLEAN]


def _find_files(cell: Cell, machine: Machine, shift: Shift) -> None:
    """Raise where the files of a domain are missing."""
    name = canonical(cell.data)
    if name in CORRUPTED_ON_DISK and shift == CLEAN:
        name = CLEAN_COUNTERPARTS[name]
    if name in NAMED_SETS:
        locate_all(NAMED_SETS[name], machine.root)
    elif name == "imagenet-c":
        corruption_folder(machine.root, shift)
    elif name in CORRUPTED_ON_DISK:
        open_dataset(name, machine.root, corruption=shift.corruption, severity=shift.severity, **dict(cell.dataset))
    else:
        open_dataset(name, machine.root, **dict(cell.dataset))


def _needs_source_images(cell: Cell) -> bool:
    try:
        return bool(cell.source_images) and cell.recipe().uses_source_data
    except (ValueError, TypeError):  # no such recipe: the cell itself will say so
        return False


def _merged(domains: Sequence[Missing]) -> Missing:
    """One line for all missing domains of a data set."""
    first = domains[0]
    more = f" (and {len(domains) - 1} more like it)" if len(domains) > 1 else ""
    return Missing(first.what, first.why + more, sum(each.cells for each in domains))
