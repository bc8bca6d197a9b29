"""From a cell to its model with weights, its data in order, and its source images.

Cells of a sweep share most of these, so the models, images and source batches used last are cached. Nothing that is
cached changes: an adapter restores its model on `unload`, and data is only read.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from poem import zoo
from poem._util.caching import Key, LRUCache, cache_key, fingerprint
from poem._util.limits import available_cores, memory
from poem.bench.cell import Cell
from poem.parts import FisherAnchor, Need
from poem.streams.datasets import Batches, Domains, Prepare, Stream, batches, canonical, image_folder, mnist_digits
from poem.streams.datasets import open_dataset as open_named
from poem.streams.datasets.named_sets import NAMED_SETS, locate
from poem.streams.images import DatasetInfo, Images, ImageSet, Labels, Unreadable
from poem.streams.loading.processes import SLOT_SIDE, forks
from poem.streams.orders import Order, generator
from poem.streams.shift import CLEAN, Shift
from poem.zoo.hub_bases import build_hugging_face
from poem.zoo.predictions import Preprocessing, ResizeCrop, class_mask

CORRUPTED_ON_DISK = ("imagenet-c", "cifar10-c", "cifar100-c")
"""Data sets with a folder or file for each corruption; all other data is corrupted on the fly."""
CACHE_BYTES = 256 << 20
"""Size of the cache for corrupted images."""
LARGE = 64
"""Side in pixels from which images are loaded by processes, unless the machine states their number."""
HANDED_OVER = 5
"""Batches per loader process that are under way: two of a domain, two of the next, one in use."""
MOST_LOADERS = 16
"""The most loader processes for one GPU, unless the machine states their number."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Folders, device and loader processes of the machine that runs a cell. Results do not depend on them."""

    root: str | None = None
    """Data; None for $POEM_DATA."""
    weights: str | None = None
    """A folder with weight files; None as `zoo.load` finds them."""
    device: str = "cpu"
    workers: int | None = None
    """Loader processes; None for as many as `CellData.workers` finds useful."""

    @property
    def data(self) -> str | None:
        """The folder with data: `root`, or $POEM_DATA."""
        return self.root if self.root is not None else os.environ.get("POEM_DATA")


@dataclass(frozen=True)
class LoadedModel:
    """A base's model on the device that runs it."""

    model: nn.Module
    base: zoo.Base
    sha256: str
    """SHA-256 of the file with the weights, or of the tensors of random ones."""
    random: bool = False
    """Whether the weights were drawn from the cell's seed."""

    def description(self) -> dict[str, Any]:
        """The field `base` of a result."""
        base = self.base
        found = {
            "name": base.name, "arch": f"{base.kind} {base.arch}", "tag": base.tag,
            "sha256": "random" if self.random else self.sha256, "normalisation": base.normalisation,
        }  # fmt: skip
        return {**found, "tensors_sha256": self.sha256} if self.random else found


_MODELS: LRUCache[Key, LoadedModel] = LRUCache(2)
_OPENED: LRUCache[Key, Images] = LRUCache(64)
_SOURCES: LRUCache[Key, Batches] = LRUCache(4)


# Models ---------------------------------------------------------------------------------------------------------------


def load_model(cell: Cell, machine: Machine) -> LoadedModel:
    """The cell's base with its weights, on the machine's device."""
    base = zoo.base(cell.base)
    random = cell.weights == "random"
    weights = weights_argument(cell, base, machine)
    file = None if random else zoo.weights_file(base, weights)

    def make() -> LoadedModel:
        model, _ = zoo.load(cell.base, weights, seed=cell.seed)
        digest = _tensors_sha256(model) if file is None else zoo.sha256(file)
        return LoadedModel(model.to(machine.device), base, digest, random)

    state = None if file is None else (file, file.stat().st_size, file.stat().st_mtime_ns)
    key = cache_key(base=base, weights=weights, file=state, seed=cell.seed if random else None, device=machine.device)
    return _MODELS.get_or_create(key, make)


def weights_argument(cell: Cell, base: zoo.Base, machine: Machine) -> str | None:
    """The argument `weights` of `zoo.load` for a cell: the cell's own, "random", or the machine's folder."""
    return cell.weights or _folder(base, machine.weights)


def _folder(base: zoo.Base, folder: str | None) -> str | None:
    """The folder, or None where it lacks the file and the package itself has it.

    A base whose builder loads its own weights takes a file alone.
    """
    if folder is not None and not base.file:
        return folder if Path(folder).expanduser().is_file() else None
    if folder is None or not (zoo.TRAINED / base.file).is_file():
        return folder
    try:
        zoo.find_weights(base, folder)
    except FileNotFoundError:
        return None
    return folder


def weights_sha256(cell: Cell, machine: Machine) -> str | None:
    """SHA-256 of the weights that `load_model` would load: of their file, or of the tensors of random ones.

    None where they are not on this machine; nothing is downloaded. Each file is read once per process. Where a function
    loads its own weights, it is called once per process and its tensors are hashed.
    """
    try:
        base = zoo.base(cell.base)
        weights = weights_argument(cell, base, machine)
        if weights == "random":
            return _random_sha256(base, cell.seed)
        if weights is None and not base.file:
            return _built_sha256(base)
        paths = [zoo.find_weights(base, weights)] if weights is not None else zoo.local_weight_paths(base)
    except (OSError, ImportError, ValueError, TypeError):
        return None
    path = next((path for path in paths if path.is_file()), None)
    return None if path is None else zoo.sha256(path)


@lru_cache(maxsize=256)
def _random_sha256(base: zoo.Base, seed: int) -> str:
    return _tensors_sha256(zoo.load(base.name, "random", seed=seed)[0])


@lru_cache(maxsize=64)
def _built_sha256(base: zoo.Base) -> str:
    if base.kind == "transformers":
        return _tensors_sha256(build_hugging_face(base, random=False, local=True))
    return _tensors_sha256(zoo.load(base.name)[0])


def _tensors_sha256(model: nn.Module) -> str:
    return fingerprint(*model.state_dict().values())


# Data -----------------------------------------------------------------------------------------------------------------


class _Wrapped:
    """A data set that reads its images from another one."""

    def __init__(self, data: Images, labels: Labels) -> None:
        self.data, self.labels = data, labels
        self.classes, self.mask = data.classes, data.mask

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def describe(self) -> dict[str, Any]:
        """Fields of the protocol card."""
        return self.data.describe()


class Resized(_Wrapped):
    """Images brought to a model's input size when they are read."""

    def __init__(self, data: Images, resize_crop: ResizeCrop) -> None:
        super().__init__(data, data.labels)
        self.resize_crop = resize_crop

    def __getitem__(self, index: int) -> Tensor:
        return self.resize_crop(self.data[index])

    def describe(self) -> dict[str, Any]:
        """Fields of the protocol card, with the resizing added to the preparation."""
        about = self.data.describe()
        before = "" if about["preparation"] == "as stored" else f"{about['preparation']}; then "
        return {**about, "preparation": f"{before}{self.resize_crop}"}


class Subset(_Wrapped):
    """The same `n` images of every domain, drawn once, whatever the cell's seed."""

    def __init__(self, data: Images, n: int) -> None:
        self.indices = np.sort(generator(n, "limit", str(n)).permutation(len(data))[:n])
        super().__init__(data, data.labels[self.indices])

    def __getitem__(self, index: int) -> Tensor:
        return self.data[int(self.indices[index])]

    def describe(self) -> dict[str, Any]:
        """Fields of the protocol card, with the size of the subset."""
        about = self.data.describe()
        return {**about, "n": len(self), "subset": f"{len(self)} of {about['n']}, drawn once; {about['subset']}"}


class Corrupted(ImageSet):
    """The images of one corrupted domain, in memory."""

    def __init__(self, images: Tensor, data: Images, shift: Shift) -> None:
        info = DatasetInfo(
            data=data.describe()["data"], provenance="made", corruption=shift.corruption, severity=shift.severity
        )
        super().__init__(data.labels, info, classes=data.classes, mask=data.mask)
        self.images = images

    def _read(self, index: int) -> Tensor:
        return self.images[index]


_CORRUPTED: LRUCache[Key, Corrupted] = LRUCache(CACHE_BYTES, lambda made: made.images.nbytes)


def clear_caches() -> None:
    """Drop every cached model, data set and source batch."""
    caches: tuple[LRUCache[Key, Any], ...] = (_MODELS, _OPENED, _SOURCES, _CORRUPTED)
    for cache in caches:
        cache.clear()
    _random_sha256.cache_clear()
    _built_sha256.cache_clear()


@dataclass(frozen=True)
class CellData:
    """The images of a cell, one domain or all of them, at its model's input size."""

    cell: Cell
    base: zoo.Base
    machine: Machine
    name: str = field(init=False)
    """The data set's canonical name."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", canonical(self.cell.data))

    def key(self, **more: Any) -> Key:
        """A cache key of everything that the images depend on, and of more, such as their shift."""
        base = self.base
        return cache_key(
            name=self.name, root=self.machine.data, dataset=self.cell.dataset, resize=base.resize, crop=base.crop,
            interpolation=base.interpolation, direct=base.direct, **more,
        )  # fmt: skip

    def all_stored(self, shift: Shift) -> Images:
        """Every image of a domain as it is on disk; data that is corrupted on the fly gives the clean images."""
        shift = shift if self.name in CORRUPTED_ON_DISK else CLEAN
        return _OPENED.get_or_create(self.key(shift=shift), lambda: self._open(shift))

    def stored(self, shift: Shift) -> Images:
        """`cell.n` images of `all_stored`, the same ones for every seed and domain; all of them without an n."""
        data, n = self.all_stored(shift), self.cell.n
        return data if n is None or n >= len(data) else Subset(data, n)

    def corrupted(self, shift: Shift) -> Images:
        """A corrupted domain from the cache, where it fits there; else the clean images, for the loader to corrupt."""
        clean, cell = self.stored(CLEAN), self.cell
        if not self._fits_cache(clean):
            return clean
        try:
            key = self.key(shift=shift, n=len(clean), seed=cell.seed, threads=cell.threads)
            return _CORRUPTED.get_or_create(key, lambda: self._corrupt(clean, shift))
        except Unreadable:  # a stream leaves such images out and names them
            return clean

    def mask(self) -> list[int] | None:
        """Index of each class among the model's logits; None where they are all of them, in order."""
        mask = class_mask(self.all_stored(self.cell.order().visits[0].shifts[0]), self.base)
        return None if mask == list(range(self.base.classes)) else mask

    def streams(self, order: Order) -> tuple[Stream, Stream]:
        """The stream to run, which may read from the cache, and an equal one to describe, which does not."""

        def stream(data: Images | Callable[[Shift], Images], workers: int) -> Stream:
            size = self.cell.batch_size
            return Stream(data=data, order=order, batch_size=size, workers=workers, on_error="report")

        if self.name in CORRUPTED_ON_DISK:
            each = stream(self.stored, self.workers)
            return each, each
        clean = self.stored(CLEAN)
        return stream(self.corrupted, 0 if self._fits_cache(clean) else self.workers), stream(clean, 0)

    @property
    def workers(self) -> int:
        """Loader processes: as the machine states, else none on a CPU, which they would share with the adapter.

        For a GPU one per core, up to 16, shared by the GPUs, where images are of 64 pixels or more and there is room
        for their batches; where processes are not forked, none.
        """
        stated, side = self.machine.workers, self.base.crop or self.base.resize
        if stated is not None:
            return stated
        if torch.device(self.machine.device).type != "cuda" or side < LARGE or not forks():
            return 0
        gpus = max(torch.cuda.device_count(), 1)
        room = _room(side) // gpus // (HANDED_OVER * self.cell.batch_size * 3 * side**2)
        return min(available_cores() // gpus, MOST_LOADERS, room)

    def _fits_cache(self, clean: Images) -> bool:
        if self.base.crop:
            return len(clean) * 3 * self.base.crop**2 <= CACHE_BYTES
        try:  # images as stored
            return len(clean) * clean[0].nbytes <= CACHE_BYTES
        except Unreadable:
            return False

    def _open(self, shift: Shift) -> Images:
        options, root = dict(self.cell.dataset), self.machine.root
        if self.name in CORRUPTED_ON_DISK:
            data: Images = Domains(self.name, root, tuple(options.items()))(shift)
        else:
            photographs = self.name in ("folder", "archive") or (
                self.name in NAMED_SETS and NAMED_SETS[self.name].prepare != Prepare()
            )
            data = open_named(self.name, root, **options, **({"prepare": _prepare(self.base)} if photographs else {}))
        try:
            fits = not self.base.crop or tuple(data[0].shape[1:]) == (self.base.crop, self.base.crop)
        except Unreadable:
            fits = False
        return data if fits else Resized(data, Preprocessing.of(self.base).resize_crop)

    def _corrupt(self, clean: Images, shift: Shift) -> Corrupted:
        seed, workers = self.cell.seed, self.workers
        found = batches(clean, range(len(clean)), 256, corruption=shift, seed=seed, workers=workers)
        return Corrupted(torch.cat([batch.images.clone() for batch in found.pixels()]), clean, shift)


def _room(side: int) -> int:
    """Bytes for batches of images of a side on their way from loader processes.

    They are in memory that is mapped before the processes start, of which they may fill a quarter. Images that are too
    large for it pass through `/dev/shm`, which is small in many containers.
    """
    if side <= SLOT_SIDE:
        return memory() // 4
    try:
        return shutil.disk_usage("/dev/shm").free
    except OSError:
        return 0


def _prepare(base: zoo.Base) -> Prepare:
    sides = {"resize": base.resize or None, "crop": base.crop or None}
    return Prepare(**sides, interpolation=base.interpolation, direct=base.direct)


# Source images --------------------------------------------------------------------------------------------------------


def source_images(cell: Cell, base: zoo.Base, machine: Machine) -> Batches:
    """Clean images of the base's training task, in batches, for methods that measure something on them.

    Their labels are not used.
    """
    key = cache_key(base=base, root=machine.data, images=cell.source_images, batch_size=cell.batch_size)

    def make() -> Batches:
        try:
            data = _training(base, machine.root)
        except (FileNotFoundError, ValueError, ImportError) as error:
            anchored = isinstance(cell.recipe().first_with(Need.SOURCE_DATA), FisherAnchor)  # runs as ETA without
            raise FileNotFoundError(
                f"{cell.method} reads {cell.source_images} source images of {base.name}, which were not found "
                f"({error}); put them there{', or run it without: --set source_images=0' if anchored else ''}"
            ) from error
        order = generator(0, "source images", "clean").permutation(len(data))[: cell.source_images]
        return batches(
            Resized(data, Preprocessing.of(base).resize_crop), order, cell.batch_size, workers=machine.workers or 0
        )

    return _SOURCES.get_or_create(key, make)


def _training(base: zoo.Base, root: str | None) -> Images:
    """Training images for our own networks and CIFAR's, validation images for ImageNet's, as EATA took them.

    Those of a network of another package are what its factory names.
    """
    if base.source:
        return open_named(base.source, root)
    if base.kind == "outside":
        raise ValueError(f"{base.name} does not name its training images; state poem.zoo.Factory(..., source=NAME)")
    family = base.name.split("-")[0]
    if family == "digits":
        return mnist_digits(split="train")
    if family in ("cifar10", "cifar100"):
        return open_named(family, root, split="train", partial=True)
    return image_folder(locate(NAMED_SETS["imagenet-val"], root), prepare=_prepare(base), name="imagenet-val")
