"""How much work a cell is, before it is run: images from its order, passes from its recipe, seconds from cells like it.

An image that goes back counts as two that go forward. So the plain model is 1, Tent 3, and MEMO with its 64 views 193.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from poem import zoo
from poem.bench.cell import Cell, Pairs
from poem.bench.result import Report
from poem.parts.base import Part
from poem.parts.views import Views
from poem.recipes.recipe import Recipe
from poem.streams.datasets.named_sets import NAMED_SETS

ASSUMED = {"digits": (3000.0, 20_000.0), "CIFAR": (100.0, 10_000.0), "ImageNet": (5.0, 1000.0)}
"""Images per second of the model unadapted, on one core of a CPU and on a GPU, where nothing has been measured."""
BRANCHED = 1.5
"""A pass with the adapt branch: the deep half of the network runs twice."""
MOST = 0.5
"""The share of the time from which on a method is named."""

_SIZES: dict[str, tuple[int, int]] = {
    "digits": (1797, 10), "digits-test": (1500, 10), "cifar10": (10_000, 10), "cifar10-c": (10_000, 10),
    "cifar100": (10_000, 100), "cifar100-c": (10_000, 100), "imagenet-c": (50_000, 1000),
    **{
        name: (known.expect.total, known.expect.classes)
        for name, known in NAMED_SETS.items()
        if known.expect.total and known.expect.classes
    },
}  # fmt: skip
_UNKNOWN = (10_000, 10)


def size(data: str) -> int | None:
    """Images of one domain of a data set, whole; None where nobody knows."""
    return _SIZES[data][0] if data in _SIZES else None


def images(cell: Cell) -> int:
    """Images in a cell's stream, as its data set is known to be; a subset of the user's own may have fewer."""
    whole, classes = _SIZES.get(cell.data, _UNKNOWN)
    return cell.order().count(whole if cell.n is None else min(cell.n, whole), classes)


class Rows(NamedTuple):
    """Rows of forward and backward passes per image of a batch."""

    forward: float
    backward: float


def rows(recipe: Recipe) -> Rows:
    """Rows that one image of a stream costs with a recipe, at most: exploring may end early.

    Where images are learnt from that a part keeps, it is taken to keep as many as a batch has.
    """
    which, learning = recipe.readout.which, recipe.explore.updates if recipe.learns else 0
    seen = float(getattr(recipe.views, "views", 1)) if learning else 1.0
    selecting, weighing = (dict(_further(part)) for part in (recipe.select, recipe.weigh))
    losing, branch = _further(recipe.minimise), [] if recipe.branch is None else _further(recipe.branch)
    forward, backward = seen, 0.0
    if recipe.teacher is not None and (learning or which == "teacher"):
        forward += recipe.teacher.passes
    if isinstance(recipe.views, Views) and learning:  # its teacher's passes, or the pass that it is told of
        forward += 1 if recipe.teacher is None else sum(each[0] for _, each in _further(recipe.views))
    for done in range(1, learning + 1):
        selects = done == 1 or recipe.explore.reselect
        if recipe.views is not None and (which == "before-last" or (which == "first" and done == 1)):
            forward += 1
        for first in (True, False) if recipe.step.perturbs else (True,):
            asked = {**(selecting if selects or not first else {}), **weighing}  # a cached pass is made once
            final = not (first and recipe.step.perturbs)
            further = [*asked.values(), *(each for _, each in [*losing, *(branch if final else [])])]
            forward += sum(each[0] for each in further) + (0.0 if first else seen)
            backward += sum(each[1] for each in further) + seen
        if done < learning:
            forward += seen
        elif which == "last":
            forward += 1
    return Rows(forward, backward)


def _further(part: Part) -> list[tuple[object, tuple[int, int]]]:
    """Further passes of a part and those inside it, each with the key it is cached under where it is."""
    return [item for _, each in part.places for item in each.further_passes.items()]


def passes(recipe: Recipe) -> float:
    """Plain forward passes that an image costs with a recipe, at most; an image that goes back counts as two."""
    found = rows(recipe)
    return (found.forward + 2 * found.backward) * (BRANCHED if recipe.branch is not None else 1.0)


def kind_of(base: str) -> str:
    """Which of the assumed rates is a base's."""
    if base.startswith("digits"):
        return "digits"
    return "CIFAR" if base in zoo.bases() and zoo.base(base).crop <= 32 else "ImageNet"


def work(cell: Cell, device: str = "cpu") -> float:
    """Seconds that a cell takes at the assumed rates; what it takes here is a multiple, the same for cells alike."""
    return images(cell) * _each(cell, device)


def _each(cell: Cell, device: str) -> float:
    """The same of one image."""
    rate = ASSUMED[kind_of(cell.base)][device != "cpu"]
    return _passes(cell.method, cell.preset, cell.changes) / rate


@lru_cache(maxsize=1024)
def _passes(method: str, preset: str, changes: Pairs) -> float:
    try:
        return passes(Cell(base="", data="", method=method, preset=preset, changes=changes).recipe())
    except (ValueError, TypeError):  # no such recipe: the cell will fail
        return 1.0


@dataclass(frozen=True)
class Rates:
    """How much longer cells take than at the assumed rates, by base and method, from results."""

    factors: dict[tuple[str, ...], float]
    count: int
    device: str = "cpu"

    @classmethod
    def of(cls, reports: Iterable[Report], device: str = "cpu") -> Rates:
        """The means over all cells of a kind: of a base and method, of a base, of everything."""
        sums: dict[tuple[str, ...], list[float]] = {}
        count = 0
        for report in reports:
            seen, spent = report.ledger.get("images", 0), report.timing.get("total_s", 0.0)
            if seen and spent:
                count += 1
                for kind in _kinds(report.cell):
                    held = sums.setdefault(kind, [0.0, 0.0])
                    held[0], held[1] = held[0] + spent, held[1] + seen * _each(report.cell, device)
        return cls({kind: spent / assumed for kind, (spent, assumed) in sums.items()}, count, device)

    def total(self, cells: Iterable[Cell]) -> float:
        """Seconds that the cells will take in one process."""
        return sum(work(cell, self.device) * self._factor(cell) for cell in cells)

    def most(self, cells: Sequence[Cell]) -> str:
        """The method that most of the time goes to, and its share; empty where none stands out."""
        by_method: dict[str, float] = {}
        for cell in cells:
            by_method[cell.method] = by_method.get(cell.method, 0.0) + self.total([cell])
        name = max(by_method, key=lambda each: by_method[each], default="")
        share = by_method[name] / (sum(by_method.values()) or 1.0) if len(by_method) > 1 else 0.0
        return f"{100 * share:.0f} % of it {name}" if share >= MOST else ""

    def _factor(self, cell: Cell) -> float:
        return next((self.factors[kind] for kind in _kinds(cell) if kind in self.factors), 1.0)

    def __str__(self) -> str:
        if self.count:
            return f"from {self.count} finished cells"
        rates = ", ".join(f"{pair[self.device != 'cpu']:.0f} ({kind})" for kind, pair in ASSUMED.items())
        where = "core" if self.device == "cpu" else "GPU"
        return f"assuming {rates} images/s a {where} for the model unadapted: nothing is measured yet"


def _kinds(cell: Cell) -> tuple[tuple[str, ...], ...]:
    return ((cell.base, cell.method), (cell.base,), ())
