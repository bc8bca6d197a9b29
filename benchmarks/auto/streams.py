"""The streams of the comparison: which image arrives when, with which corruption, and which images are scored.

A stream is a `Plan`: indices, no pixels. Images are drawn anew for every seed, and so is the corruptions' noise. The
images of a data set are written once into a folder (in memory, where there is one) that all processes read.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from poem import zoo
from poem.streams import CORRUPTIONS, corrupt
from poem.streams.datasets import open_dataset
from poem.streams.images import Images
from poem.streams.orders import LabelShift, Sorted, generator
from poem.streams.shift import CLEAN, Shift
from poem.zoo.predictions import Preprocessing, class_mask

MILD = ("gaussian_noise", "motion_blur", "fog", "jpeg_compression")
"""Corruptions that also come at severity 3, and those of short batches."""
WORST = tuple(f"{name}-5" for name in CORRUPTIONS)
MAIN = (
    "clean", *WORST, *(f"{name}-3" for name in MILD), "label_shift", "sorted-clean", "sorted-contrast-5", "mixed",
    "continual", "noise",
)  # fmt: skip
"""The streams at batch 64, of every network."""
NINE = (
    "clean", "gaussian_noise-5", "defocus_blur-5", "fog-5", "contrast-5", "jpeg_compression-5", "brightness-5",
    "gaussian_noise-2", "jpeg_compression-2",
)  # fmt: skip
"""The nine streams of ResNet-50; the two at severity 2 are run for it alone."""
SHORT = ("clean", *(f"{name}-5" for name in MILD))
"""The streams at batch 8 and 1."""
VISITS = {"continual": (1, 512), "recurring": (20, 250), "recurring-short": (4, 128)}
"""Streams that go through all corruptions in turn: how many times, and with how many images of each."""
SPARE = 512
"""Clean images beside the stream's, without labels, for methods that measure importance on source images."""
NOISE = -1
"""Domain of an image of uniformly random pixels."""
SETS = {"cifar10": "cifar10", "digits": "digits-test", "effnet": "tiny-imagenet-val"}
"""Data set of a network, by the first part of its name; ImageNet's own images for the others."""
CHUNK = 256

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Plan:
    """A stream: for each row its domain, its image, and whether its answer is scored."""

    shifts: tuple[Shift, ...]
    domain: Indices
    """Index into `shifts`, or `NOISE`."""
    image: Indices
    """Index into the images of this seed; for noise its number."""
    scored: NDArray[np.bool_]

    def hashed(self, labels: Indices) -> str:
        """Eight digits that are equal where rows and labels are: only then are two results paired."""
        digest = hashlib.sha256(" ".join(map(str, self.shifts)).encode())
        for part in (self.domain, self.image, self.scored, labels):
            digest.update(np.ascontiguousarray(part.astype(np.int64)).tobytes())
        return digest.hexdigest()[:8]


def names(net: str, batch: int = 64) -> tuple[str, ...]:
    """The streams of a network at a batch size."""
    if batch != 64:
        return SHORT
    more = tuple(name for name in NINE if name not in MAIN) if net == "resnet50-keras" else ()
    return MAIN + more + (("recurring",) if net.startswith("cifar10") else ())


def scored_count(stream: str, n: int) -> int:
    """Number of scored rows of a stream over n images."""
    if stream not in VISITS:
        return n
    visits, size = VISITS[stream]
    return visits * len(WORST) * min(size, n)


def plan(stream: str, labels: Indices, seed: int) -> Plan:
    """The rows of a stream over images with these labels; the same for every method.

    Raises:
        ValueError: There is no such stream.
    """
    n, rng = len(labels), generator(seed, f"auto {stream}", "all")
    worst = tuple(_shift(name) for name in WORST)
    every = np.arange(n, dtype=np.int64)
    if stream == "label_shift":
        return _one(_shift("gaussian_noise-5"), LabelShift(length=n)(labels, rng, seed))
    if stream.startswith("sorted-"):
        return _one(_shift(stream.removeprefix("sorted-")), Sorted()(labels, rng, seed))
    if stream == "mixed":
        return Plan(worst, rng.randint(0, len(worst), n).astype(np.int64), every, np.ones(n, bool))
    if stream in VISITS:
        visits, size = VISITS[stream]
        domains = [k for _ in range(visits) for k in range(len(worst))]
        images = [rng.permutation(n)[:size].astype(np.int64) for _ in domains]
        domain = np.repeat(np.array(domains, np.int64), len(images[0]))
        return Plan(worst, domain, np.concatenate(images), np.ones(len(domain), bool))
    if stream == "noise":  # clean, noise, clean, noise, ...
        domain = np.tile(np.array([0, NOISE], np.int64), n)
        return Plan((CLEAN,), domain, np.repeat(every, 2), domain == 0)
    return _one(_shift(stream), every)


def _one(shift: Shift, order: Indices) -> Plan:
    return Plan((shift,), np.zeros(len(order), np.int64), order, np.ones(len(order), bool))


def _shift(name: str) -> Shift:
    """The domain of a name such as `fog-5` or `clean`."""
    if name == "clean":
        return CLEAN
    corruption, _, severity = name.rpartition("-")
    if corruption not in CORRUPTIONS or severity not in tuple("12345"):
        raise ValueError(f"expected a stream such as clean, fog-5, mixed or sorted-contrast-5, got {name!r}")
    return Shift(corruption, int(severity))


# Images ---------------------------------------------------------------------------------------------------------------


def set_of(net: str) -> str:
    """The data set that a network is measured on."""
    return SETS.get(net.split("-")[0], "imagenet-val-3k")


def key_of(net: str) -> str:
    """The data set at the size of a network's images, such as `tiny-imagenet-val@240`."""
    return f"{set_of(net)}@{zoo.base(net).crop}"


def read(data: str, root: Path | None) -> tuple[Images | Tensor, Indices]:
    """The images of a data set and their labels, from `<root>/<data>.npz` (see `pack`), else as poem finds them.

    Where `imagenet-val-3k` is not whole, those of its parts that are there are taken, one after another.
    """
    packed = None if root is None else root / f"{data}.npz"
    if packed is not None and packed.is_file():
        with np.load(packed, allow_pickle=False) as held:
            return torch.from_numpy(held["images"]), held["labels"].astype(np.int64)
    try:
        found: Images = open_dataset(data, root)
    except (FileNotFoundError, ValueError):
        if data != "imagenet-val-3k":
            raise
        found = _parts(root)
    return found, found.labels


PIXELS = {"cifar10": "2b47ae852d2a691a"}
"""Data sets that come in other copies too, such as JPEGs, and the hash of the images that were measured."""


def pixel_hash(images: Images | Tensor) -> str:
    """Sixteen digits of a hash over a set's pixels, whatever the order of its images."""
    each = (hashlib.sha256(np.ascontiguousarray(images[at]).tobytes()).digest() for at in range(len(images)))
    return hashlib.sha256(b"".join(sorted(each))).hexdigest()[:16]


def _parts(root: Path | None) -> Images:
    """Those parts of ImageNet's validation images that are below the root."""
    found: list[Images] = []
    for letter in "abc":
        try:
            found.append(open_dataset(f"imagenet-val-{letter}", root))
        except FileNotFoundError:
            continue
    if not found:
        raise FileNotFoundError(f"no imagenet-val-a, -b or -c in {root}; name their folder with --data or $POEM_DATA")
    return Joined(found)


class Joined:
    """Several data sets of the same classes, one after another."""

    def __init__(self, parts: list[Images]) -> None:
        self.parts, self.classes, self.mask = parts, parts[0].classes, parts[0].mask
        self.labels = np.concatenate([part.labels for part in parts])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Tensor:
        for part in self.parts:
            if index < len(part):
                return part[index]
            index -= len(part)
        raise IndexError(f"expected an index below {len(self)}")

    def describe(self) -> dict[str, Any]:
        """The first part's description."""
        return self.parts[0].describe()


def order(data: str, labels: Indices, seed: int) -> Indices:
    """Places of a data set's images in the order in which the streams of a seed take them."""
    return generator(seed, "auto images", data).permutation(len(labels)).astype(np.int64)


def pack(data: str, root: Path | None, folder: Path, most: int = 10_000) -> Path:
    """Write images and labels of a set of equal sizes to `<folder>/<data>.npz`, for machines without its library."""
    images, labels = read(data, root)
    chosen = np.sort(generator(0, "auto pack", data).permutation(len(labels))[:most])
    pixels = torch.stack([images[int(at)] for at in chosen]).numpy()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{data}.npz"
    np.savez_compressed(path, images=pixels, labels=labels[chosen].astype(np.int16))
    return path


def image_count(wanted: int, there: int) -> int:
    """`wanted` images of a stream; 1,000 of a smaller set, or all of a still smaller one."""
    return wanted if there >= wanted else min(1000, there)


@dataclass(frozen=True)
class Store:
    """A folder with the images of each data set and seed, and with corrupted copies of the small ones."""

    folder: Path

    def prepare(
        self, net: str, seed: int, n: int, root: Path | None, shifts: Iterable[Shift], device: torch.device
    ) -> int:
        """Write the images that a network and seed need, unless they are there; returns the number of a stream's.

        Args:
            net: A network; those of one data set and size share the files.
            seed: Seed of the choice of images and of the corruptions.
            n: Wanted number of images; see `image_count`.
            root: Where the data is; by default POEM_DATA.
            shifts: Domains to write beside the clean images; none for large images.
            device: Where images are corrupted.
        """
        stem = self._stem(key_of(net), seed)
        if not Path(f"{stem}.json").is_file():
            self._write(net, seed, n, root, stem)
        about = json.loads(Path(f"{stem}.json").read_text())
        for shift in shifts:
            path = self.path(net, seed, shift)
            if shift != CLEAN and not path.is_file():
                made = self._corrupted(key_of(net), seed, shift, np.arange(about["n"], dtype=np.int64), device)
                partial = path.with_suffix(".partial")
                with partial.open("wb") as file:
                    np.save(file, made.cpu().numpy())
                partial.replace(path)  # whole or not at all: other processes read it
        return int(about["n"])

    def _write(self, net: str, seed: int, n: int, root: Path | None, stem: Path) -> None:
        base, (images, labels) = zoo.base(net), read(set_of(net), root)
        count = image_count(n, len(labels))
        rows = order(set_of(net), labels, seed)[: count + SPARE]
        fit = Preprocessing.of(base).resize_crop
        pixels = [images[int(row)] for row in rows]
        pixels = [each if tuple(each.shape[1:]) == (base.crop, base.crop) else fit(each) for each in pixels]
        mask = None if isinstance(images, Tensor) else class_mask(images, base)
        mask = None if mask is None or list(mask) == list(range(base.classes)) else [int(each) for each in mask]
        self.folder.mkdir(parents=True, exist_ok=True)
        np.save(f"{stem}.npy", torch.stack(pixels).numpy())
        about = {"n": count, "labels": labels[rows].tolist(), "ids": rows.tolist(), "mask": mask}
        Path(f"{stem}.json").write_text(json.dumps(about))

    def path(self, net: str, seed: int, shift: Shift) -> Path:
        """The file of a seed's corrupted images, which is there where they were prepared."""
        return Path(f"{self._stem(key_of(net), seed)}-{shift.corruption}-{shift.severity}.npy")

    def labels(self, net: str, seed: int) -> Indices:
        """Labels of a seed's images, spare ones left out."""
        about = self._about(key_of(net), seed)
        return np.array(about["labels"][: about["n"]], np.int64)

    def mask(self, net: str, seed: int) -> list[int] | None:
        """The data's classes among the network's logits; None for all of them, in order."""
        mask: list[int] | None = self._about(key_of(net), seed)["mask"]
        return mask

    def spare(self, net: str, seed: int) -> Tensor | None:
        """Clean images in [0, 1] that are in no stream of this seed, or None where the data set has none left."""
        key = key_of(net)
        held = self._clean(key, seed)[self._about(key, seed)["n"] :]
        return torch.from_numpy(np.array(held)).float() / 255 if len(held) else None

    def images(self, net: str, seed: int, rows: Plan, device: torch.device) -> Tensor:
        """The stream's images in order, uint8, on the device."""
        key = key_of(net)
        size = self._clean(key, seed).shape[1:]
        out = torch.empty((len(rows.domain), *size), dtype=torch.uint8, device=device)
        for number, shift in enumerate(rows.shifts):
            at = np.flatnonzero(rows.domain == number)
            which, back = np.unique(rows.image[at], return_inverse=True)
            path = self.path(net, seed, shift)
            if path.is_file():
                made = torch.from_numpy(np.load(path, mmap_mode="r")[which]).to(device)
            else:
                made = self._corrupted(key, seed, shift, which, device)
            out[torch.from_numpy(at).to(device)] = made[torch.from_numpy(back).to(device)]
        at = np.flatnonzero(rows.domain == NOISE)
        rng = np.random.RandomState(seed)
        for start in range(0, len(at), CHUNK):
            noise = rng.randint(0, 256, (len(at[start : start + CHUNK]), *size)).astype(np.uint8)
            out[torch.from_numpy(at[start : start + CHUNK]).to(device)] = torch.from_numpy(noise).to(device)
        return out

    def _corrupted(self, key: str, seed: int, shift: Shift, which: Indices, device: torch.device) -> Tensor:
        """These of a seed's images, corrupted; the result for an image depends on nothing else."""
        clean, ids = self._clean(key, seed), np.array(self._about(key, seed)["ids"], np.int64)
        made = []
        for start in range(0, len(which), CHUNK):
            some = which[start : start + CHUNK]
            pixels = torch.from_numpy(np.array(clean[some])).to(device)
            if shift != CLEAN:
                pixels = corrupt(pixels, shift.corruption, shift.severity, seed=seed, ids=ids[some])
            made.append(pixels)
        return torch.cat(made) if made else torch.empty((0, *clean.shape[1:]), dtype=torch.uint8, device=device)

    def _stem(self, key: str, seed: int) -> Path:
        return self.folder / f"{key}-{seed}"

    def _clean(self, key: str, seed: int) -> NDArray[np.uint8]:
        held: NDArray[np.uint8] = np.load(f"{self._stem(key, seed)}.npy", mmap_mode="r")
        return held

    def _about(self, key: str, seed: int) -> dict[str, Any]:
        about: dict[str, Any] = json.loads(Path(f"{self._stem(key, seed)}.json").read_text())
        return about


def scratch() -> Iterator[Path]:
    """A folder for the images, in memory where /dev/shm exists; removed at the end."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="poem-auto-", dir=memory if memory.is_dir() else None) as name:
        yield Path(name)
