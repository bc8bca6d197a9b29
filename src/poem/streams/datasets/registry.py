"""Opens data sets by name: which names there are, and how each is found on disk."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from poem._util.files import read_json, read_text
from poem._util.nearest import nearest_hint
from poem.streams.datasets.cifar_sets import cifar, cifar_c
from poem.streams.datasets.digit_sets import digits, mnist_digits
from poem.streams.datasets.folders import Expect, Files, Listing, listing
from poem.streams.datasets.named_sets import IMAGENET_C, TREES, Root, accept, base_folder, locate
from poem.streams.images import About, ImageSet
from poem.streams.loading.prepare import Prepare
from poem.streams.shift import Shift


def tree(name: str, root: Root = None, *, partial: bool = False, prepare: Prepare | None = None) -> Files:
    """ImageNet val, -A, -R, -Sketch, -V2 or Tiny-ImageNet val: class folders on disk or in a tar.

    Args:
        name: One of `imagenet-val`, `imagenet-a`, `imagenet-r`, `imagenet-sketch`, `imagenet-v2`, `tiny-imagenet-val`.
        root: The tree, a tar of it, or a folder that holds either; by default POEM_DATA.
        partial: Accept missing images, though never missing classes, which would shift the labels.
        prepare: Resize and crop; by default the papers' (Resize 256, CenterCrop 224; Tiny-ImageNet as stored).
    """
    if name not in TREES:
        raise ValueError(f"unknown tree {name!r}; {nearest_hint(name, TREES)}")
    known = TREES[name]
    found = listing(locate(known, root), numbered=known.numbered)
    subset = accept(found, known, partial)
    prepare = prepare or known.prepare
    about = About(
        data=name, provenance=f"files as found; official: {known.source}", subset=subset, preparation=str(prepare)
    )
    return Files(found, about, prepare=prepare, mask=known.mask)


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
) -> Files:
    """One corruption of ImageNet-C at one severity, or of any tree that `poem corrupt` made.

    Args:
        root: The folder with `<corruption>/<severity>/<wnid>/`, or one that holds it; None for POEM_DATA.
        corruption: One of the nineteen names.
        severity: 1 to 5.
        subset: `"50k"` is everything. `"5k"` is 5000 images: those of the list in `files`, in its order, or without a
            list the first five files of every class by name, which is *not* RobustBench's choice. The card says which.
        files: RobustBench's list of 5000 validation files (`imagenet_test_image_ids.txt`), one a line.
        classes: Class folders to expect; other than 1000 for trees of your own.
        per_class: Images per class to expect; None to take what is there.
        mask: Which of a model's logits the classes are, for trees of your own.
        prepare: Resize and crop; the official images are 224x224 already and are left alone.
    """
    shift = Shift(corruption, severity)
    if subset not in ("50k", "5k"):
        raise ValueError(f"expected subset '50k' or '5k', got {subset!r}")
    place = _cell(root, shift)
    found = listing(place)
    problems = found.problems(Expect(classes=classes, per_class=per_class))
    if problems:
        raise ValueError(
            f"ImageNet-C {shift} in {found.place} is not complete: {'; '.join(problems)}. Copy it again; or, for one "
            "of your own, pass classes= and per_class=None"
        )
    words, chosen = f"all {found.count}" + (" (50k)" if found.count == 50_000 else ""), None
    if subset == "5k" and files is not None:
        chosen = _listed(found, Path(files))
        words = f"5k: {len(chosen)} files of {Path(files).name}, in its order"
    elif subset == "5k":
        chosen = [at for each in found.members.values() for at in each[:5]]
        words = f"5k: the first five files of each class by name, {len(chosen)} (not RobustBench's list)"
    elif files is not None:
        raise ValueError("a list of files was given with subset='50k'; pass subset='5k'")
    about = About(
        data="imagenet-c", provenance=_provenance(place.parent.parent), subset=words,
        corruption=corruption, severity=shift.severity, preparation=str(prepare or Prepare()),
    )  # fmt: skip
    return Files(found, about, prepare=prepare, mask=mask, chosen=chosen)


def _cell(root: Root, shift: Shift) -> Path:
    """The folder of one corruption and severity."""
    base = base_folder(root, f"ImageNet-C, as {IMAGENET_C.layout}")
    tops = [base / place for place in IMAGENET_C.places]
    for top in tops:
        if (top / shift.corruption / str(shift.severity)).is_dir():
            return top / shift.corruption / str(shift.severity)
    there = sorted({path.parent.name + "/" + path.name for top in tops for path in top.glob("*/[1-5]")})
    found = (
        f"found: {', '.join(there[:6])}{' ...' if len(there) > 6 else ''}" if there else "no <corruption>/<severity>"
    )
    raise FileNotFoundError(
        f"no {shift.corruption}/{shift.severity} in {base} ({found}); expected {IMAGENET_C.layout}. "
        f"It comes from: {IMAGENET_C.source}"
    )


def _provenance(top: Path) -> str:
    """Where a tree of corruptions comes from: `poem corrupt` leaves a note, the official one has none."""
    note = top / "poem-corrupt.json"
    if not note.is_file():
        return f"files as found; official: {IMAGENET_C.source}"
    try:
        made = read_json(note)
    except ValueError as error:
        made = str(error)
    if not isinstance(made, dict):
        raise ValueError(f"expected the settings of poem corrupt in {note}, got {str(made)[:80]}; remove it")
    return "made by poem corrupt: " + ", ".join(f"{key} {value}" for key, value in made.items() if value is not None)


def _listed(found: Listing, path: Path) -> list[int]:
    """Positions of a list's files, in the list's order; CRLF line ends and leading folders do not matter."""
    where = {
        os.fsdecode(bytes(found.store.names[at])).rsplit("/", 1)[-1]: at
        for each in found.members.values()
        for at in each
    }
    names = [line.strip().rsplit("/", 1)[-1] for line in read_text(path).splitlines() if line.strip()]
    missing = [name for name in names if name not in where]
    if missing or not names or len(set(names)) != len(names):
        raise ValueError(
            f"expected file names of {found.place}, each once, in {path}: {len(names)} lines, {len(set(names))} "
            f"different, {len(missing)} not there ({', '.join(missing[:3])})"
        )
    return [where[name] for name in names]


def image_folder(
    root: Root = None,
    *,
    prepare: Prepare | None = None,
    mask: tuple[int, ...] | None = None,
    under: str | None = None,
    name: str | None = None,
    cache: str | os.PathLike[str] | None = None,
) -> Files:
    """Any folder of class folders, or a tar of them; labels are the folders' ranks by name.

    Args:
        root: The folder or archive; by default POEM_DATA.
        prepare: Resize and crop, where images differ in size.
        mask: Which of a model's logits the classes are, in the folders' order; `class_indices` finds them.
        under: Sub-folder that holds the class folders, such as `"test"`.
        name: What a card calls it; by default the folder's name.
        cache: Where a compressed tar is unpacked, once; by default POEM_CACHE, else beside it.
    """
    base = base_folder(root, "class folders of images, or a tar of them")
    if (base / "poem-corrupt.json").is_file():
        first = next(iter(sorted(base.glob("*/[1-5]"))), base)
        raise ValueError(
            f"{base} holds a folder per corruption, not per class; open one of them, such as {first}, or all with "
            "imagenet_c(root, corruption, severity, classes=..., per_class=None)"
        )
    found = listing(base, under=under, cache=Path(cache) if cache is not None else None)
    if not found.members:
        raise ValueError(f"expected class folders of images in {found.place}, found none")
    problems = found.problems(Expect(classes=None if mask is None else len(mask)))
    if problems:
        raise ValueError(f"{found.place} is not complete: {'; '.join(problems)}")
    about = About(
        data=name or base.name.split(".")[0], provenance="images as found", preparation=str(prepare or Prepare())
    )
    return Files(found, about, prepare=prepare, mask=mask)


archive = image_folder


def _named(opener: Callable[..., ImageSet], *fixed: Any, **settings: Any) -> Callable[..., ImageSet]:
    def opened(root: Root = None, **options: Any) -> ImageSet:
        return opener(*fixed, root=root, **settings, **options)

    opened.__signature__ = inspect.signature(opener)  # type: ignore[attr-defined]
    return opened


DATASETS: dict[str, Callable[..., ImageSet]] = {
    "imagenet-c": _named(imagenet_c),
    "cifar10-c": _named(cifar_c, classes=10),
    "cifar100-c": _named(cifar_c, classes=100),
    **{name: _named(tree, name) for name in TREES},
    "cifar10": _named(cifar, classes=10),
    "cifar100": _named(cifar, classes=100),
    "folder": _named(image_folder),
    "archive": _named(image_folder),
    "digits": lambda root=None, **options: digits(**options),
    "digits-test": lambda root=None: mnist_digits(split="test"),
}
"""Every name `open_dataset` knows, and who opens it."""


def canonical(name: str) -> str:
    """The name as listed: `CIFAR-10-C` and `cifar10_c` are `cifar10-c`."""
    word = re.sub(r"^cifar-(10+)", r"cifar\1", name.strip().lower().replace("_", "-"))
    if word not in DATASETS:
        raise ValueError(f"unknown data set {name!r}; {nearest_hint(word, DATASETS)}")
    return word


def open_dataset(name: str, root: Root = None, **options: Any) -> ImageSet:
    """A data set by name; `root` by default from POEM_DATA, options as its kind takes them (corruption=, subset=)."""
    opener = DATASETS[canonical(name)]
    try:
        return opener(root=root, **options)
    except TypeError as error:
        raise TypeError(f"{name}: {error}; it takes {inspect.signature(opener)}") from error
