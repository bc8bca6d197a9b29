"""From a cell to things: the model with its weights, the data in its order, the source images.

Cells of a sweep share most of these, so what was opened, made or loaded last is kept for the next one. Nothing that is
kept changes: an adapter gives a model back as it came, and data is only read.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from poem import zoo
from poem._util.caching import Key, LRUCache, cache_key
from poem.bench.cell import Cell
from poem.bench.views import Framed, Made, Part
from poem.streams.datasets import Batches, Domains, Prepare, Stream, batches, canonical, image_folder, mnist_digits
from poem.streams.datasets import open_dataset as open_named
from poem.streams.datasets.named_sets import NAMED_SETS, locate
from poem.streams.images import Images, Unreadable
from poem.streams.orders import Order, generator
from poem.streams.shift import CLEAN, Shift
from poem.zoo.predictions import Preprocessing, class_mask

STORED = ("imagenet-c", "cifar10-c", "cifar100-c")
"""Data that lies on disk once per corruption; all other data is corrupted on the fly."""
ROOM = 256 << 20
"""Bytes of images that are kept once they were made."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a machine keeps things. Never part of a cell: results do not depend on it."""

    root: str | None = None
    """Data; None for $POEM_DATA."""
    weights: str | None = None
    """A folder with weight files; None as `zoo.load` finds them."""
    device: str = "cpu"
    workers: int = 0
    """Loader processes."""

    @property
    def data(self) -> str | None:
        """Where data is looked for."""
        return self.root if self.root is not None else os.environ.get("POEM_DATA")


@dataclass(frozen=True)
class Loaded:
    """A base's model where it will run."""

    model: nn.Module
    base: zoo.Base
    sha256: str
    """Of the file with the weights, or "random"."""

    def about(self) -> dict[str, Any]:
        """What a report says of it."""
        base = self.base
        return {
            "name": base.name, "arch": f"{base.kind} {base.arch}", "tag": base.tag, "sha256": self.sha256,
            "normalisation": base.normalisation,
        }  # fmt: skip


_MODELS: LRUCache[Key, Loaded] = LRUCache(2)
_OPENED: LRUCache[Key, Images] = LRUCache(64)
_SOURCES: LRUCache[Key, Batches] = LRUCache(4)


# Models ---------------------------------------------------------------------------------------------------------------


def load_model(cell: Cell, place: Place) -> Loaded:
    """The cell's base with its weights, on the place's device."""
    base = zoo.base(cell.base)
    fresh = cell.weights == "random"
    weights = weights_of(cell, base, place)

    file = None if fresh else zoo.find_weights(base, weights)

    def make() -> Loaded:
        digest = "random" if file is None else zoo.sha256(file)
        model, _ = zoo.load(cell.base, weights, seed=cell.seed)
        return Loaded(model.to(place.device), base, digest)

    state = None if file is None else (file, file.stat().st_size, file.stat().st_mtime_ns)
    key = cache_key(base=base, weights=weights, file=state, seed=cell.seed if fresh else None, device=place.device)
    return _MODELS.get_or_create(key, make)


def weights_of(cell: Cell, base: zoo.Base, place: Place) -> str | None:
    """What `zoo.load` is given for a cell: its own, "random", or where the place keeps them."""
    return cell.weights or _folder(base, place.weights)


def _folder(base: zoo.Base, folder: str | None) -> str | None:
    """The folder, unless it lacks the file and the package itself carries it."""
    if folder is None or not (zoo.TRAINED / base.file).is_file():
        return folder
    try:
        zoo.find_weights(base, folder)
    except FileNotFoundError:
        return None
    return folder


# Data -----------------------------------------------------------------------------------------------------------------


_MADE: LRUCache[Key, Made] = LRUCache(ROOM, lambda made: made.images.nbytes)


def forget() -> None:
    """Keep nothing: models, data and what was made of it are opened anew."""
    held: tuple[LRUCache[Key, Any], ...] = (_MODELS, _OPENED, _SOURCES, _MADE)
    for kept in held:
        kept.clear()


@dataclass(frozen=True)
class Data:
    """The data of a cell: one domain or all of them."""

    cell: Cell
    base: zoo.Base
    place: Place
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", canonical(self.cell.data))

    def key(self, **more: Any) -> Key:
        """What the images depend on, and more beside it, such as their shift."""
        base = self.base
        return cache_key(
            name=self.name, root=self.place.data, dataset=self.cell.dataset, resize=base.resize, crop=base.crop,
            interpolation=base.interpolation, **more,
        )  # fmt: skip

    def whole(self, shift: Shift) -> Images:
        """Every image as it lies on disk, at the model's size; of clean data all shifts are the same."""
        shift = shift if self.name in STORED else CLEAN
        return _OPENED.get_or_create(self.key(shift=shift), lambda: self._open(shift))

    def stored(self, shift: Shift) -> Images:
        """Those of them that the cell takes."""
        data, n = self.whole(shift), self.cell.n
        return data if n is None or n >= len(data) else Part(data, n)

    def made(self, shift: Shift) -> Images:
        """Clean images with a shift made on the fly: all at once where they are few, else image by image."""
        clean, cell = self.stored(CLEAN), self.cell
        if not self._few(clean):
            return clean
        try:
            key = self.key(shift=shift, n=len(clean), seed=cell.seed, threads=cell.threads)
            return _MADE.get_or_create(key, lambda: self._make(clean, shift))
        except Unreadable:  # a stream leaves such images out and names them
            return clean

    def mask(self) -> list[int] | None:
        """Which of the model's logits the classes are; None for all of them in order."""
        mask = class_mask(self.whole(self._shift()), self.base)
        return None if mask == list(range(self.base.classes)) else mask

    def streams(self, order: Order) -> tuple[Stream, Stream]:
        """The stream to run, and the one to describe: they differ in what is kept, not in what comes."""

        def stream(data: Images | Callable[[Shift], Images], workers: int) -> Stream:
            size = self.cell.batch_size
            return Stream(data=data, order=order, batch_size=size, workers=workers, on_error="report")

        if self.name in STORED:
            each = stream(self.stored, self.place.workers)
            return each, each
        clean = self.stored(CLEAN)
        return stream(self.made, 0 if self._few(clean) else self.place.workers), stream(clean, 0)

    def _few(self, clean: Images) -> bool:
        """Whether a whole domain can be kept."""
        return len(clean) * 3 * self.base.crop**2 <= ROOM

    def _shift(self) -> Shift:
        return self.cell.order().visits[0].shifts[0]

    def _open(self, shift: Shift) -> Images:
        options, root = dict(self.cell.dataset), self.place.root
        if self.name in STORED:
            data: Images = Domains(self.name, root, tuple(options.items()))(shift)
        else:
            photographs = self.name in ("folder", "archive") or (
                self.name in NAMED_SETS and NAMED_SETS[self.name].prepare != Prepare()
            )
            data = open_named(self.name, root, **options, **({"prepare": _prepare(self.base)} if photographs else {}))
        try:
            fits = tuple(data[0].shape[1:]) == (self.base.crop, self.base.crop)
        except Unreadable:
            fits = False
        return data if fits else Framed(data, Preprocessing.of(self.base).resize_crop)

    def _make(self, clean: Images, shift: Shift) -> Made:
        seed, workers = self.cell.seed, self.place.workers
        found = batches(clean, range(len(clean)), 256, corruption=shift, seed=seed, workers=workers)
        pixels = [(images * 255).round_().to(torch.uint8) for images, _ in found]
        return Made(torch.cat(pixels), clean, shift)


def _prepare(base: zoo.Base) -> Prepare:
    return Prepare(resize=base.resize, crop=base.crop, interpolation=base.interpolation)


# Source images --------------------------------------------------------------------------------------------------------


def source_images(cell: Cell, base: zoo.Base, place: Place) -> Batches:
    """Clean images of what the base was trained for, in batches, for methods that measure importance on them.

    Their labels are not used.
    """
    key = cache_key(base=base, root=place.data, images=cell.source_images, batch_size=cell.batch_size)

    def make() -> Batches:
        try:
            data = _training(base, place.root)
        except (FileNotFoundError, ValueError, ImportError) as error:
            raise FileNotFoundError(
                f"{cell.method} measures importance on {cell.source_images} source images of {base.name}, which were "
                f"not found ({error}); put them there, or run it without: --set source_images=0"
            ) from error
        order = generator(0, "source images", "clean").permutation(len(data))[: cell.source_images]
        return batches(Framed(data, Preprocessing.of(base).resize_crop), order, cell.batch_size, workers=place.workers)

    return _SOURCES.get_or_create(key, make)


def _training(base: zoo.Base, root: str | None) -> Images:
    """Training images for our own networks and CIFAR's, validation images for ImageNet's, as EATA took them."""
    family = base.name.split("-")[0]
    if family == "digits":
        return mnist_digits(split="train")
    if family in ("cifar10", "cifar100"):
        return open_named(family, root, split="train", partial=True)
    return image_folder(locate(NAMED_SETS["imagenet-val"], root), prepare=_prepare(base), name="imagenet-val")
