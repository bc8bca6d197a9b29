"""Open data sets by name (`open_dataset`), or by kind: named sets, ImageNet-C, your own class folders."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from poem._util import outside
from poem._util.files import read_text
from poem._util.nearest import nearest_hint
from poem.streams.datasets.cifar_sets import cifar, cifar_c
from poem.streams.datasets.corrupt_record import CORRUPT_RECORD, read_corrupt_record
from poem.streams.datasets.digit_sets import digits, mnist_digits
from poem.streams.datasets.folders import ExpectedCounts, ImageFiles, Listing, listing
from poem.streams.datasets.named_sets import (
    IMAGENET_C,
    NAMED_SETS,
    Root,
    check_complete,
    corruption_folder,
    data_root,
    named_listing,
)
from poem.streams.datasets.own_sets import open_outside
from poem.streams.images import DatasetInfo, ImageSet
from poem.streams.loading.prepare import Prepare
from poem.streams.shift import Shift


def named_set(name: str, root: Root = None, *, partial: bool = False, prepare: Prepare | None = None) -> ImageFiles:
    """Open ImageNet val or parts of it, -A, -R, -Sketch, -V2 or Tiny-ImageNet val: class folders on disk or in a tar.

    Args:
        name: One of `imagenet-val`, `imagenet-val-a`, `-b` and `-c`, `imagenet-val-3k`, `imagenet-a`, `imagenet-r`,
            `imagenet-sketch`, `imagenet-v2`, `tiny-imagenet-val`.
        root: The set's folder, a tar of it, or a folder that holds either; by default POEM_DATA.
        partial: Accept missing images, but no missing classes, which would shift the labels.
        prepare: Resize and crop; by default the papers' (Resize 256, CenterCrop 224; images that are
            stored at their size, of Tiny-ImageNet and the parts of ImageNet val, as stored).
    """
    if name not in NAMED_SETS:
        raise ValueError(f"unknown data set {name!r}; {nearest_hint(name, NAMED_SETS)}")
    named = NAMED_SETS[name]
    found = named_listing(named, root)
    subset = check_complete(found, named, partial)
    prepare = prepare or named.prepare
    info = DatasetInfo(
        data=name, provenance=f"files as found; official: {named.source}", subset=subset, preparation=str(prepare)
    )
    return ImageFiles(found, info, prepare=prepare, mask=named.mask)


def imagenet_c(
    root: Root,
    corruption: str,
    severity: int,
    subset: Literal["50k", "5k"] = "50k",
    *,
    files: str | os.PathLike[str] | None = None,
    classes: int = 1000,
    per_class: int | None = 50,
    mask: tuple[int, ...] | None = None,
    prepare: Prepare | None = None,
) -> ImageFiles:
    """Open one corruption of ImageNet-C at one severity, or of a folder that `poem corrupt` wrote.

    Args:
        root: The folder with `<corruption>/<severity>/<wnid>/`, or one that holds it; None for POEM_DATA.
        corruption: One of the nineteen names.
        severity: 1 to 5.
        subset: `"50k"` is everything. `"5k"` is 5000 images: those of the list in `files`, in its order, or without a
            list the first five files of every class by name, which is *not* RobustBench's choice. The card says which.
        files: RobustBench's list of 5000 validation files (`imagenet_test_image_ids.txt`), one a line.
        classes: Expected number of class folders; other than 1000 for folders of your own.
        per_class: Expected number of images per class; None for any.
        mask: Indices of the classes among a model's logits, for folders of your own.
        prepare: Resize and crop; the official images are 224x224 already.
    """
    shift = Shift(corruption, severity)
    if subset not in ("50k", "5k"):
        raise ValueError(f"expected subset '50k' or '5k', got {subset!r}")
    folder = corruption_folder(root, shift)
    found = listing(folder)
    problems = found.problems(ExpectedCounts(classes=classes, per_class=per_class))
    if problems:
        raise ValueError(
            f"ImageNet-C {shift} in {found.path} is not complete: {'; '.join(problems)}. Copy it again; or, for one "
            "of your own, pass classes= and per_class=None"
        )
    words, chosen = f"all {found.count}" + (" (50k)" if found.count == 50_000 else ""), None
    if subset == "5k" and files is not None:
        chosen = _positions_of(found, Path(files))
        words = f"5k: {len(chosen)} files of {Path(files).name}, in its order"
    elif subset == "5k":
        chosen = [at for each in found.members.values() for at in each[:5]]
        words = f"5k: the first five files of each class by name, {len(chosen)} (not RobustBench's list)"
    elif files is not None:
        raise ValueError("a list of files was given with subset='50k'; pass subset='5k'")
    info = DatasetInfo(
        data="imagenet-c", provenance=_provenance(folder.parent.parent), subset=words,
        corruption=corruption, severity=shift.severity, preparation=str(prepare or Prepare()),
    )  # fmt: skip
    return ImageFiles(found, info, prepare=prepare, mask=mask, chosen=chosen)


def _provenance(top: Path) -> str:
    """Origin of a folder of corruptions: the settings that `poem corrupt` recorded there, or the official source."""
    record = top / CORRUPT_RECORD
    if not record.is_file():
        return f"files as found; official: {IMAGENET_C.source}"
    settings = read_corrupt_record(record).items()
    return "made by poem corrupt: " + ", ".join(f"{key} {value}" for key, value in settings if value is not None)


def _positions_of(found: Listing, path: Path) -> list[int]:
    """Positions of the files named in a text file, in its order; CRLF line ends and leading folders are ignored."""
    positions = {
        os.fsdecode(bytes(found.store.names[at])).rsplit("/", 1)[-1]: at
        for each in found.members.values()
        for at in each
    }
    names = [line.strip().rsplit("/", 1)[-1] for line in read_text(path).splitlines() if line.strip()]
    missing = [name for name in names if name not in positions]
    if missing or not names or len(set(names)) != len(names):
        raise ValueError(
            f"expected file names of {found.path}, each once, in {path}: {len(names)} lines, {len(set(names))} "
            f"different, {len(missing)} not there ({', '.join(missing[:3])})"
        )
    return [positions[name] for name in names]


def image_folder(
    root: Root = None,
    *,
    prepare: Prepare | None = None,
    mask: tuple[int, ...] | None = None,
    under: str | None = None,
    name: str | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> ImageFiles:
    """Open any folder of class folders, or a tar of them; labels are the folders' ranks by name.

    Args:
        root: The folder or archive; by default POEM_DATA.
        prepare: Resize and crop, where images differ in size.
        mask: Indices of the classes among a model's logits, in the folders' order; `class_indices` finds them.
        under: Sub-folder that holds the class folders, such as `"test"`.
        name: Its name on a protocol card; by default the folder's name.
        cache: Folder for the decompressed copy of a compressed tar; by default POEM_CACHE, else beside it.
    """
    base = data_root(root, "class folders of images, or a tar of them")
    if (base / CORRUPT_RECORD).is_file():
        first = next(iter(sorted(base.glob("*/[1-5]"))), base)
        raise ValueError(
            f"{base} holds a folder per corruption, not per class; open one of them, such as {first}, or all with "
            "imagenet_c(root, corruption, severity, classes=..., per_class=None)"
        )
    found = listing(base, under=under, cache=Path(cache) if cache is not None else None)
    if not found.members:
        raise ValueError(f"expected class folders of images in {found.path}, found none")
    problems = found.problems(ExpectedCounts(classes=None if mask is None else len(mask)))
    if problems:
        raise ValueError(f"{found.path} is not complete: {'; '.join(problems)}")
    info = DatasetInfo(
        data=name or base.name.split(".")[0], provenance="images as found", preparation=str(prepare or Prepare())
    )
    return ImageFiles(found, info, prepare=prepare, mask=mask)


archive = image_folder


def _opener(function: Callable[..., ImageSet], *fixed: Any, **settings: Any) -> Callable[..., ImageSet]:
    """The function with some arguments fixed, and with its own signature, for error messages."""

    def opened(root: Root = None, **options: Any) -> ImageSet:
        return function(*fixed, root=root, **settings, **options)

    opened.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return opened


DATASETS: dict[str, Callable[..., ImageSet]] = {
    "imagenet-c": _opener(imagenet_c),
    "cifar10-c": _opener(cifar_c, classes=10),
    "cifar100-c": _opener(cifar_c, classes=100),
    **{name: _opener(named_set, name) for name in NAMED_SETS},
    "cifar10": _opener(cifar, classes=10),
    "cifar100": _opener(cifar, classes=100),
    "folder": _opener(image_folder),
    "archive": _opener(image_folder),
    "digits": lambda root=None, **options: digits(**options),
    "digits-test": lambda root=None: mnist_digits(split="test"),
    "digits-train": lambda root=None: mnist_digits(split="train"),
}
"""Every name that `open_dataset` takes, and the function that opens it."""


def canonical(name: str) -> str:
    """The name as in `DATASETS`: `CIFAR-10-C` and `cifar10_c` become `cifar10-c`; an outside name stays as it is."""
    word = re.sub(r"^cifar-(10+)", r"cifar\1", name.strip().lower().replace("_", "-"))
    if word not in DATASETS and outside.is_outside("data set", name.strip()):
        return name.strip()
    if word not in DATASETS:
        known = [*DATASETS, *outside.announced("data set")]
        hint = nearest_hint(word, known, otherwise=f"known: {', '.join(known)}; your own: package.module:name")
        raise ValueError(f"unknown data set {name!r}; {hint}")
    return word


def open_dataset(name: str, root: Root = None, **options: Any) -> ImageSet:
    """Open a data set by name; `root` is by default POEM_DATA, options are those of its kind (corruption=, subset=).

    `package.module:name`, or a name that a package announces in the group `poem.datasets`, is a data set, or a function
    that is called with the options and returns one: of `poem.streams.datasets`, or any of (image, label) pairs.
    """
    word = canonical(name)
    if word not in DATASETS:
        return open_outside(word, root, **options)
    opener = DATASETS[word]
    try:
        return opener(root=root, **options)
    except TypeError as error:
        raise TypeError(f"{name}: {error}; it takes {inspect.signature(opener)}") from error
