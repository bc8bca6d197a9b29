"""Estimates of a cell's time before it runs: images from its order, passes from its recipe, seconds from results.

A backward counts as two forwards. So the unadapted model is 1, Tent 3, and MEMO with its 64 views 193. A pass costs a
fixed time besides, which the images of its batch share: single images cost several times as much as those of a batch.
Forward passes of a network of another package are timed, since nothing is known about it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from poem import zoo
from poem._util import outside
from poem.bench.cell import Cell, Pairs
from poem.bench.result import CellResult
from poem.parts.base import Part
from poem.parts.views import Views
from poem.recipes.recipe import Recipe
from poem.streams.datasets import DATASETS, canonical, open_dataset
from poem.streams.datasets.named_sets import CLEAN_COUNTERPARTS, NAMED_SETS
from poem.streams.datasets.sources import SOURCES, archives
from poem.streams.shift import CLEAN

ASSUMED = {"digits": (3000.0, 20_000.0), "CIFAR": (100.0, 10_000.0), "ImageNet": (5.0, 1000.0)}
"""Images per second of the unadapted model, on one core of a CPU and on a GPU, where there are no results yet."""
CALL_SECONDS = {"digits": (0.0008, 0.003), "CIFAR": (0.003, 0.006), "ImageNet": (0.010, 0.010)}
"""Fixed seconds of one pass, whatever the size of its batch, on a CPU and on a GPU. The digits' were measured on a CPU
(batches of 1 against batches of 64); the others are scaled by the number of layers."""
BRANCH_FACTOR = 1.5
"""Cost of a pass with the adapt branch, in which the deep half of the network runs twice."""
GUARD_PASSES = 3.0
"""Forward passes per image that a guard adds: the source's, on the image and shifted, and the adapted one shifted."""
NAMED_SHARE = 0.5
"""Share of the time from which on a method is named."""

_SIZES: dict[str, tuple[int, int]] = {
    "digits": (1797, 10), "digits-test": (1500, 10), "digits-train": (3500, 10),
    "cifar10": (10_000, 10), "cifar10-c": (10_000, 10),
    "cifar100": (10_000, 100), "cifar100-c": (10_000, 100), "imagenet-c": (50_000, 1000),
    **{
        name: (known.expect.total, known.expect.classes)
        for name, known in NAMED_SETS.items()
        if known.expect.total and known.expect.classes
    },
}  # fmt: skip
"""Images of one domain, and classes, of data sets of a known size."""
_ASSUMED_SIZE = (10_000, 10)
SMALL_SIDE, LARGE_SIDE = 32, 224
"""Sides of images, in pixels: of digits and CIFAR, and what is assumed of images of unknown size."""


def domain_size(data: str) -> int | None:
    """Images in one whole domain of a data set; None for data of unknown size."""
    return _SIZES[data][0] if data in _SIZES else None


def image_count(cell: Cell) -> int:
    """Images in a cell's stream over a whole data set; a subset of the user's own may have fewer."""
    whole, classes = _SIZES.get(cell.data) or (_opened(cell.data, cell.dataset) or _ASSUMED_SIZE)[:2]
    return cell.order().count(whole if cell.n is None else min(cell.n, whole), classes)


class _Opened(NamedTuple):
    """What is read of a data set of another package."""

    images: int
    classes: int
    side: int


@lru_cache(maxsize=64)
def _opened(data: str, options: Pairs) -> _Opened | None:
    """The size of a data set of another package; None for others, and where it does not open."""
    if data in DATASETS or not outside.is_outside("data set", data):
        return None
    try:
        found = open_dataset(data, **dict(options))
        classes = len(found.classes or set(found.labels.tolist()))
        return _Opened(len(found), classes, int(found[0].shape[-1]))
    except Exception:  # the user's own code: the cell will fail, or needs a root
        return None


class Rows(NamedTuple):
    """Rows of forward and backward passes per image of a batch."""

    forward: float
    backward: float


def rows(recipe: Recipe, *, batch_norm: bool = True, views: bool = True) -> Rows:
    """Rows that one image of a stream costs with a recipe, at most: exploring may end early.

    With `views=False` the views and copies of an image are not counted: the passes of a batch.

    Where images are learnt from that a part keeps, it is taken to keep as many as a batch has. `batch_norm` says
    whether the network has any: a recipe may then be another, and run several copies of the batch.
    """
    recipe = recipe.fitted(batch_norm=batch_norm)
    copies = recipe.statistics.copies if batch_norm and views else 1
    which, learning = recipe.readout.which, recipe.explore.updates if recipe.learns else 0
    seen = float(getattr(recipe.views, "views", 1)) if learning and views else 1.0
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
    return Rows(copies * forward, copies * backward)


def _further(part: Part) -> list[tuple[object, tuple[int, int]]]:
    """Further passes of a part and those inside it, each with the key it is cached under where it is."""
    return [item for _, each in part.places for item in each.further_passes.items()]


def forward_passes(recipe: Recipe, *, views: bool = True) -> float:
    """Plain forward passes that an image costs with a recipe, at most; an image that goes back counts as two."""
    kinds = {True: recipe.fitted(batch_norm=True), False: recipe.fitted(batch_norm=False)}
    found = [(rows(each, batch_norm=kind, views=views), each.branch) for kind, each in kinds.items()]
    return max((each.forward + 2 * each.backward) * (BRANCH_FACTOR if branch else 1.0) for each, branch in found)


def rate_group(base: str, data: str = "", options: Pairs = ()) -> str:
    """The key of `ASSUMED` for a base, by the side of its input; where it takes images as stored, by theirs."""
    if base.startswith("digits"):
        return "digits"
    return "CIFAR" if _input_side(base, data, options) <= SMALL_SIDE else "ImageNet"


def _input_side(base: str, data: str, options: Pairs) -> int:
    """Side of a network's input in pixels; `LARGE_SIDE` where it is not known."""
    with suppress(ValueError, TypeError, OSError, ImportError):  # no such base: the cell will fail
        if crop := zoo.base(base).crop:
            return crop
        if data.startswith(("digits", "cifar")):
            return SMALL_SIDE
        if found := _opened(data, options):
            return found.side
    return LARGE_SIDE


class Speed(NamedTuple):
    """How fast a network is, unadapted."""

    images_per_second: float
    call_seconds: float
    """Fixed seconds of one pass."""


def speed(cell: Cell, device: str = "cpu") -> Speed:
    """The speed of a cell's network: timed for one of another package, else assumed."""
    group, gpu = rate_group(cell.base, cell.data, cell.dataset), device != "cpu"
    known = Speed(ASSUMED[group][gpu], CALL_SECONDS[group][gpu])
    timed = _timed(cell.base, _input_side(cell.base, cell.data, cell.dataset))
    if timed is None:
        return known
    if gpu:  # as much faster there as others of its size are
        return Speed(timed.images_per_second * ASSUMED[group][1] / ASSUMED[group][0], known.call_seconds)
    return timed


@lru_cache(maxsize=64)
def _timed(base: str, side: int) -> Speed | None:
    """Forward passes of a network of another package on one core; None for other bases, and where one raises."""
    count = 16 if side <= 2 * SMALL_SIDE else 4
    threads = torch.get_num_threads()
    try:
        if zoo.base(base).kind != "outside":
            return None
        model = zoo.load(base, "random")[0]  # time does not depend on the weights
        torch.set_num_threads(1)
        with torch.inference_mode():
            one, several = (_fastest(model, torch.rand(size, 3, side, side)) for size in (1, count))
    except Exception:  # the user's own network: the cell will fail, or takes other images
        return None
    finally:
        torch.set_num_threads(threads)
    each = max((several - one) / (count - 1), several / count / 2)  # one image alone may be timed badly
    return Speed(1 / each, max(0.0, several - count * each))


def _fastest(model: torch.nn.Module, images: torch.Tensor) -> float:
    """The least seconds of some passes, after one that is not counted."""
    found = []
    for _ in range(4):
        began = time.perf_counter()
        model(images)
        found.append(time.perf_counter() - began)
    return max(min(found[1:]), 1e-6)


def assumed_seconds(cell: Cell, device: str = "cpu") -> float:
    """Seconds that a cell takes at the assumed rates."""
    return image_count(cell) * _seconds_per_image(cell, device)


def _seconds_per_image(cell: Cell, device: str) -> float:
    known = speed(cell, device)
    cost = _cost(cell.method, cell.preset, cell.changes)
    guard = GUARD_PASSES if cell.guard else 0.0
    batch = 1 if cost.alone else _batch_size(cell)
    return (cost.passes + guard) / known.images_per_second + known.call_seconds * (cost.calls + guard) / batch


def timed_speeds(cells: Iterable[Cell], device: str = "cpu") -> str:
    """The networks of cells whose passes were timed, as `timed here: mine:net 2100 images/s`; empty without any."""
    found = {}
    for cell in cells:
        if _timed(cell.base, _input_side(cell.base, cell.data, cell.dataset)) is not None:
            found[cell.base] = f"{cell.base} {speed(cell, device).images_per_second:.0f} images/s"
    return f"timed here: {', '.join(found.values())}" if found else ""


def _batch_size(cell: Cell) -> int:
    """Images of a batch: the order's own, such as one, or the cell's."""
    try:
        return cell.order().batch_size or cell.batch_size
    except (ValueError, TypeError):  # no such order: the cell will fail
        return cell.batch_size


class _Cost(NamedTuple):
    """What a method costs."""

    passes: float
    """Forward passes per image."""
    calls: float
    """Forward passes per batch, whatever its size."""
    alone: bool
    """Whether each image is a batch of its own."""


@lru_cache(maxsize=1024)
def _cost(method: str, preset: str, changes: Pairs) -> _Cost:
    try:
        recipe = Cell(base="", data="", method=method, preset=preset, changes=changes).recipe()
    except (ValueError, TypeError):  # no such recipe: the cell will fail
        return _Cost(1.0, 1.0, False)
    return _Cost(forward_passes(recipe), forward_passes(recipe, views=False), recipe.recover.each_image)


@dataclass(frozen=True)
class Rates:
    """Measured seconds over assumed seconds, by base and method, from results."""

    factors: dict[tuple[str, ...], float]
    count: int
    """Results that the factors are from."""
    device: str = "cpu"

    @classmethod
    def of(cls, results: Iterable[CellResult], device: str = "cpu") -> Rates:
        """Factors of each base and method, of each base, and of all results."""
        sums: dict[tuple[str, ...], list[float]] = {}
        count = 0
        for result in results:
            images, seconds = result.ledger.get("images", 0), result.timing.get("total_s", 0.0)
            if images and seconds:
                count += 1
                for kind in _kinds(result.cell):
                    held = sums.setdefault(kind, [0.0, 0.0])
                    held[0], held[1] = held[0] + seconds, held[1] + images * _seconds_per_image(result.cell, device)
        return cls({kind: seconds / assumed for kind, (seconds, assumed) in sums.items()}, count, device)

    def seconds(self, cells: Iterable[Cell]) -> float:
        """Seconds that the cells will take in one process."""
        return sum(assumed_seconds(cell, self.device) * self._factor(cell) for cell in cells)

    def slowest(self, cells: Sequence[Cell]) -> str:
        """The method with the largest share of the time, as `60 % of it memo`; empty below `NAMED_SHARE`."""
        by_method: dict[str, float] = {}
        for cell in cells:
            by_method[cell.method_label] = by_method.get(cell.method_label, 0.0) + self.seconds([cell])
        name = max(by_method, key=lambda each: by_method[each], default="")
        share = by_method[name] / (sum(by_method.values()) or 1.0) if len(by_method) > 1 else 0.0
        return f"{100 * share:.0f} % of it {name}" if share >= NAMED_SHARE else ""

    def _factor(self, cell: Cell) -> float:
        return next((self.factors[kind] for kind in _kinds(cell) if kind in self.factors), 1.0)

    def __str__(self) -> str:
        if self.count:
            return f"from {self.count} finished cells"
        rates = ", ".join(f"{pair[self.device != 'cpu']:.0f} ({kind})" for kind, pair in ASSUMED.items())
        where = "core" if self.device == "cpu" else "GPU"
        calls = " to ".join(f"{1000 * value:g}" for value in _call_range(self.device))
        return (
            f"assuming {rates} images/s a {where} for the model unadapted, and {calls} ms for each pass besides: "
            "nothing is measured yet"
        )


def _call_range(device: str) -> tuple[float, float]:
    found = [pair[device != "cpu"] for pair in CALL_SECONDS.values()]
    return min(found), max(found)


def _kinds(cell: Cell) -> tuple[tuple[str, ...], ...]:
    return ((cell.base, cell.method_label), (cell.base,), ())


def data_sizes(cells: Iterable[Cell]) -> dict[str, int]:
    """Bytes of the archives that hold the data of cells, as published; data sets of unknown size are left out."""
    wanted: dict[str, dict[str, None]] = {}
    for cell in cells:
        with suppress(ValueError, TypeError):  # an unknown name: the cell will fail
            name = canonical(cell.data)
            for shift in (shift for visit in cell.order().visits for shift in visit.shifts):
                stored = CLEAN_COUNTERPARTS.get(name, name) if shift == CLEAN else name
                wanted.setdefault(stored, {})[shift.corruption] = None
    found = {}
    for name, corruptions in wanted.items():
        if name in SOURCES:
            chosen = tuple(corruptions) if name == "imagenet-c" else ()
            found[name] = sum(each.size for each in archives(name, chosen))
    return found
