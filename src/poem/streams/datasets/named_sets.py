"""Data sets with a name: how many images each has, how its files are laid out, and where it is published."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from poem.streams.datasets.classes import IMAGENET_A, IMAGENET_R, TINY_IMAGENET, WNID
from poem.streams.datasets.folders import ExpectedCounts, Listing, is_archive, join, listing
from poem.streams.loading.prepare import IMAGENET_EVAL, Prepare
from poem.streams.shift import Shift

Root = str | os.PathLike[str] | None
_NUMBER = r"\d{1,3}"


@dataclass(frozen=True, kw_only=True)
class NamedSet:
    """A published data set of class folders."""

    title: str
    layout: str
    """Layout of its files, in words."""
    source: str
    """Where it is published, in words: title and record number."""
    expect: ExpectedCounts
    locations: tuple[str, ...]
    """Paths below the root where it is looked for."""
    folder: str = WNID
    """Regular expression for the name of a class folder."""
    prepare: Prepare = Prepare()  # noqa: RUF009 - frozen
    mask: tuple[int, ...] | None = None
    parts: tuple[NamedSet, ...] = ()
    """Named sets that have its images between them; they are joined where all are found below the root."""

    @property
    def numbered(self) -> bool:
        """Whether the class folders are numbers, which are sorted as numbers."""
        return self.folder == _NUMBER


def _imagenet_val_part(letter: str) -> NamedSet:
    name = f"imagenet-val-{letter}"
    return NamedSet(
        title=f"ImageNet validation, part {letter}",
        layout=f"{name}.tar, or a folder {name}, of <wnid>/ILSVRC2012_val_*.JPEG: 1000 folders of one image of 224x224",
        source=_IMAGENET_VAL_PARTS,
        expect=ExpectedCounts(classes=1000, per_class=1, total=1000),
        locations=(name, f"{name}.tar", "."),
    )


_IMAGENET_VAL_PARTS = (
    "three choices of one ILSVRC 2012 validation image (image-net.org, login) of each class, short side to 256, centre "
    "224, JPEG quality 92"
)
_VAL_PARTS = {f"imagenet-val-{letter}": _imagenet_val_part(letter) for letter in "abc"}

NAMED_SETS: dict[str, NamedSet] = {
    "imagenet-val": NamedSet(
        title="ImageNet validation",
        layout="<wnid>/ILSVRC2012_val_*.JPEG: 1000 folders of 50 images",
        source="ILSVRC 2012 validation images (image-net.org, login), sorted into wnid folders",
        expect=ExpectedCounts(classes=1000, per_class=50, total=50_000),
        locations=(".", "val", "imagenet/val", "ImageNet/val", "imagenet-val", "ILSVRC2012/val"),
        prepare=IMAGENET_EVAL,
    ),
    **_VAL_PARTS,
    "imagenet-val-3k": NamedSet(
        title="ImageNet validation, parts a, b and c",
        layout="imagenet-val-a.tar, imagenet-val-b.tar and imagenet-val-c.tar, or folders of these names, or "
        "imagenet-val-3k(.tar): 1000 folders of three images of 224x224",
        source=_IMAGENET_VAL_PARTS,
        expect=ExpectedCounts(classes=1000, per_class=3, total=3000),
        locations=("imagenet-val-3k", "imagenet-val-3k.tar", "."),
        parts=tuple(_VAL_PARTS.values()),
    ),
    "imagenet-a": NamedSet(
        title="ImageNet-A",
        layout="<wnid>/*.jpg: 200 folders, 7500 images",
        source="Hendrycks et al., Natural Adversarial Examples (repository hendrycks/natural-adv-examples, "
        "imagenet-a.tar)",
        expect=ExpectedCounts(classes=200, total=7500),
        locations=(".", "imagenet-a", "ImageNet-A", "imagenet-a.tar"),
        prepare=IMAGENET_EVAL,
        mask=IMAGENET_A,
    ),
    "imagenet-r": NamedSet(
        title="ImageNet-R",
        layout="<wnid>/*.jpg: 200 folders, 30,000 images",
        source="Hendrycks et al., The Many Faces of Robustness (imagenet-r.tar, repository hendrycks/imagenet-r)",
        expect=ExpectedCounts(classes=200, total=30_000),
        locations=(".", "imagenet-r", "ImageNet-R", "imagenet-r.tar"),
        prepare=IMAGENET_EVAL,
        mask=IMAGENET_R,
    ),
    "imagenet-sketch": NamedSet(
        title="ImageNet-Sketch",
        layout="<wnid>/*.JPEG: 1000 folders, 50,889 images",
        source="Wang et al., Learning Robust Global Representations (repository HaohanWang/ImageNet-Sketch)",
        expect=ExpectedCounts(classes=1000, total=50_889),
        locations=(".", "sketch", "imagenet-sketch", "ImageNet-Sketch"),
        prepare=IMAGENET_EVAL,
    ),
    "imagenet-v2": NamedSet(
        title="ImageNet-V2 (matched frequency)",
        layout="<0..999>/*.jpeg: 1000 folders of 10 images, named by class number",
        source="Recht et al., Do ImageNet Classifiers Generalize to ImageNet? (repository modestyachts/ImageNetV2, "
        "imagenetv2-matched-frequency)",
        expect=ExpectedCounts(classes=1000, per_class=10, total=10_000),
        locations=(".", "imagenetv2-matched-frequency-format-val", "imagenet-v2", "ImageNet-V2"),
        folder=_NUMBER,
        prepare=IMAGENET_EVAL,
    ),
    "tiny-imagenet-val": NamedSet(
        title="Tiny-ImageNet validation",
        layout="<wnid>/*.JPEG: 200 folders of 50 images of 64x64, or tiny-imagenet-val.tar(.xz) of them",
        source="Tiny ImageNet, Stanford CS231n (tiny-imagenet-200.zip), validation images sorted into wnid folders",
        expect=ExpectedCounts(classes=200, per_class=50, total=10_000),
        locations=(".", "tiny-imagenet-val", "tiny-imagenet-val.tar", "tiny-imagenet-val.tar.xz"),
        mask=TINY_IMAGENET,
    ),
}

IMAGENET_C = NamedSet(
    title="ImageNet-C",
    layout="<corruption>/<1..5>/<wnid>/ILSVRC2012_val_*.JPEG: 1000 folders of 50 images each",
    source="Hendrycks and Dietterich, Benchmarking Neural Network Robustness (Zenodo 2235448: blur, digital, extra, "
    "noise, weather); or made from your validation images by `poem corrupt`",
    expect=ExpectedCounts(classes=1000, per_class=50, total=50_000),
    locations=(".", "ImageNet-C", "imagenet-c"),
)

CLEAN_COUNTERPARTS = {"imagenet-c": "imagenet-val", "cifar10-c": "cifar10", "cifar100-c": "cifar100"}
"""Data sets that are stored once per corruption, each with the data set of its clean images."""

CIFAR_C_SOURCES = {
    10: "Hendrycks and Dietterich, CIFAR-10-C (Zenodo 2535967, CIFAR-10-C.tar)",
    100: "Hendrycks and Dietterich, CIFAR-100-C (Zenodo 3555552, CIFAR-100-C.tar)",
}
CIFAR_SOURCES = {
    10: "Krizhevsky, Learning Multiple Layers of Features (2009), binary version: cifar-10-binary.tar.gz",
    100: "Krizhevsky, Learning Multiple Layers of Features (2009), binary version: cifar-100-binary.tar.gz",
}


def data_root(root: Root, what: str) -> Path:
    """The folder to look in: `root`, else the environment variable POEM_DATA; raises if neither exists."""
    named = os.fspath(root) if root is not None else os.environ.get("POEM_DATA", "")
    if not named:
        raise ValueError(
            f"no root given: pass root= (a command: --root), or set POEM_DATA to the folder that holds {what}"
        )
    path = Path(named).expanduser()
    if not path.exists():
        origin = "root" if root is not None else "POEM_DATA"
        raise FileNotFoundError(f"{origin} is {path}, which does not exist; expected there: {what}")
    return path


def corruption_folder(root: Root, shift: Shift) -> Path:
    """Find ImageNet-C's folder of one corruption and severity under the root."""
    base = data_root(root, f"ImageNet-C, as {IMAGENET_C.layout}")
    tops = [base / location for location in IMAGENET_C.locations]
    part = f"{shift.corruption}/{shift.severity}"
    for top in tops:
        if (top / part).is_dir():
            return top / part
    there = sorted({path.parent.name + "/" + path.name for top in tops for path in top.glob("*/[1-5]")})
    found = (
        f"found: {', '.join(there[:6])}{' ...' if len(there) > 6 else ''}" if there else "no <corruption>/<severity>"
    )
    raise FileNotFoundError(
        f"no {part} in {base} ({found}); expected {IMAGENET_C.layout}. It comes from: {IMAGENET_C.source}"
    )


def locate(named: NamedSet, root: Root) -> Path:
    """Find the folder or archive of a named set under the root, by the names of its class folders."""
    base = data_root(root, f"{named.title}, as {named.layout}")
    if is_archive(base):
        return base
    path = _first_location(named, base, named.locations)
    if path is not None:
        return path
    tried = ", ".join(_below(named))
    raise FileNotFoundError(
        f"no {named.title} in {base} (nor in its {tried}); expected {named.layout}. It comes from: {named.source}"
    )


def locate_all(named: NamedSet, root: Root) -> list[Path]:
    """Find the folders or archives that hold a named set under the root: its own one, or those of all its parts."""
    base = data_root(root, f"{named.title}, as {named.layout}")
    if named.parts and _first_location(named, base, _below(named)) is None:
        found = {each.title: _first_location(each, base, _below(each)) for each in named.parts}
        paths = [path for path in found.values() if path is not None]
        if len(paths) == len(found):
            return paths
        if paths:
            lacking = ", ".join(title for title, path in found.items() if path is None)
            raise FileNotFoundError(
                f"no {named.title} in {base}, which lacks {lacking}; expected {named.layout}. It comes from: "
                f"{named.source}"
            )
    return [locate(named, root)]


def named_listing(named: NamedSet, root: Root) -> Listing:
    """List a named set's class folders; those of several folders or archives are joined."""
    found = [listing(path, numbered=named.numbered) for path in locate_all(named, root)]
    return found[0] if len(found) == 1 else join(data_root(root, named.title), found)


def _below(named: NamedSet) -> list[str]:
    """The locations of a set below the root, without the root itself."""
    return [location for location in named.locations if location != "."]


def _first_location(named: NamedSet, base: Path, locations: Iterable[str]) -> Path | None:
    """The first of some locations below a folder that is an archive, or a folder of the set's class folders."""
    for path in (base / location for location in locations):
        if is_archive(path) or (path.is_dir() and _has_folder_like(path, named.folder)):
            return path
    return None


def _has_folder_like(folder: Path, pattern: str) -> bool:
    return any(re.fullmatch(pattern, entry.name) and entry.is_dir() for entry in os.scandir(folder))


def check_complete(found: Listing, named: NamedSet, partial: bool) -> str:
    """Describe the subset that was found, for the protocol card; an incomplete set is an error unless `partial`."""
    full, expect = named.expect.total, named.expect
    problems = found.problems(ExpectedCounts(classes=expect.classes) if partial else expect)
    if problems:
        remedy = "; or pass partial=True" if len(found.members) == expect.classes and not partial else ""
        raise ValueError(f"{named.title} in {found.path} is not complete: {'; '.join(problems)}. Copy it again{remedy}")
    return f"all {found.count}" if full in (None, found.count) else f"{found.count} of {full} images"
