"""Sets with a name: what a complete one holds, how it lies on disk, and where it comes from."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from poem.streams.datasets.classes import IMAGENET_A, IMAGENET_R, TINY_IMAGENET
from poem.streams.datasets.folders import Expect, Listing, is_archive
from poem.streams.loading.prepare import EVAL, Prepare

Root = str | os.PathLike[str] | None
_WNID, _NUMBER = r"n\d{8}", r"\d{1,3}"


@dataclass(frozen=True, kw_only=True)
class Known:
    """A tree of class folders that has a name."""

    title: str
    layout: str
    """What lies there, in words."""
    source: str
    """Where it comes from, in words: title and record number."""
    expect: Expect
    places: tuple[str, ...]
    """Where it may lie under the root."""
    folder: str = _WNID
    """What a class folder's name looks like."""
    prepare: Prepare = Prepare()  # noqa: RUF009 - frozen
    mask: tuple[int, ...] | None = None

    @property
    def numbered(self) -> bool:
        """Whether folders are class numbers, to be ordered as numbers."""
        return self.folder == _NUMBER


TREES: dict[str, Known] = {
    "imagenet-val": Known(
        title="ImageNet validation",
        layout="<wnid>/ILSVRC2012_val_*.JPEG: 1000 folders of 50 images",
        source="ILSVRC 2012 validation images (image-net.org, login), sorted into wnid folders",
        expect=Expect(classes=1000, per_class=50, total=50_000),
        places=(".", "val", "imagenet/val", "ImageNet/val", "imagenet-val", "ILSVRC2012/val"),
        prepare=EVAL,
    ),
    "imagenet-a": Known(
        title="ImageNet-A",
        layout="<wnid>/*.jpg: 200 folders, 7500 images",
        source="Hendrycks et al., Natural Adversarial Examples (repository hendrycks/natural-adv-examples, "
        "imagenet-a.tar)",
        expect=Expect(classes=200, total=7500),
        places=(".", "imagenet-a", "ImageNet-A", "imagenet-a.tar"),
        prepare=EVAL,
        mask=IMAGENET_A,
    ),
    "imagenet-r": Known(
        title="ImageNet-R",
        layout="<wnid>/*.jpg: 200 folders, 30,000 images",
        source="Hendrycks et al., The Many Faces of Robustness (imagenet-r.tar, repository hendrycks/imagenet-r)",
        expect=Expect(classes=200, total=30_000),
        places=(".", "imagenet-r", "ImageNet-R", "imagenet-r.tar"),
        prepare=EVAL,
        mask=IMAGENET_R,
    ),
    "imagenet-sketch": Known(
        title="ImageNet-Sketch",
        layout="<wnid>/*.JPEG: 1000 folders, 50,889 images",
        source="Wang et al., Learning Robust Global Representations (repository HaohanWang/ImageNet-Sketch)",
        expect=Expect(classes=1000, total=50_889),
        places=(".", "sketch", "imagenet-sketch", "ImageNet-Sketch"),
        prepare=EVAL,
    ),
    "imagenet-v2": Known(
        title="ImageNet-V2 (matched frequency)",
        layout="<0..999>/*.jpeg: 1000 folders of 10 images, named by class number",
        source="Recht et al., Do ImageNet Classifiers Generalize to ImageNet? (repository modestyachts/ImageNetV2, "
        "imagenetv2-matched-frequency)",
        expect=Expect(classes=1000, per_class=10, total=10_000),
        places=(".", "imagenetv2-matched-frequency-format-val", "imagenet-v2", "ImageNet-V2"),
        folder=_NUMBER,
        prepare=EVAL,
    ),
    "tiny-imagenet-val": Known(
        title="Tiny-ImageNet validation",
        layout="<wnid>/*.JPEG: 200 folders of 50 images of 64x64, or tiny-imagenet-val.tar(.xz) of them",
        source="Tiny ImageNet, Stanford CS231n (tiny-imagenet-200.zip), validation images sorted into wnid folders",
        expect=Expect(classes=200, per_class=50, total=10_000),
        places=(".", "tiny-imagenet-val", "tiny-imagenet-val.tar", "tiny-imagenet-val.tar.xz"),
        mask=TINY_IMAGENET,
    ),
}

IMAGENET_C = Known(
    title="ImageNet-C",
    layout="<corruption>/<1..5>/<wnid>/ILSVRC2012_val_*.JPEG: 1000 folders of 50 images each",
    source="Hendrycks and Dietterich, Benchmarking Neural Network Robustness (Zenodo 2235448: blur, digital, extra, "
    "noise, weather); or made from your validation images by `poem corrupt`",
    expect=Expect(classes=1000, per_class=50, total=50_000),
    places=(".", "ImageNet-C", "imagenet-c"),
)

CIFAR_C_SOURCES = {
    10: "Hendrycks and Dietterich, CIFAR-10-C (Zenodo 2535967, CIFAR-10-C.tar)",
    100: "Hendrycks and Dietterich, CIFAR-100-C (Zenodo 3555552, CIFAR-100-C.tar)",
}
CIFAR_SOURCES = {
    10: "Krizhevsky, Learning Multiple Layers of Features (2009), binary version: cifar-10-binary.tar.gz",
    100: "Krizhevsky, Learning Multiple Layers of Features (2009), binary version: cifar-100-binary.tar.gz",
}


def base_folder(root: Root, what: str) -> Path:
    """The place to look in: what the caller says, else POEM_DATA; nothing is assumed beyond these."""
    named = os.fspath(root) if root is not None else os.environ.get("POEM_DATA", "")
    if not named:
        raise ValueError(
            f"no root given: pass root= (a command: --root), or set POEM_DATA to the folder that holds {what}"
        )
    place = Path(named).expanduser()
    if not place.exists():
        origin = "root" if root is not None else "POEM_DATA"
        raise FileNotFoundError(f"{origin} is {place}, which does not exist; expected there: {what}")
    return place


def locate(known: Known, root: Root) -> Path:
    """The tree or archive under the root, found by what its class folders are called."""
    base = base_folder(root, f"{known.title}, as {known.layout}")
    if is_archive(base):
        return base
    for place in known.places:
        path = base / place
        if is_archive(path) or (path.is_dir() and _holds(path, known.folder)):
            return path
    tried = ", ".join(place for place in known.places if place != ".")
    raise FileNotFoundError(
        f"no {known.title} in {base} (nor in its {tried}); expected {known.layout}. It comes from: {known.source}"
    )


def _holds(folder: Path, pattern: str) -> bool:
    return any(re.fullmatch(pattern, entry.name) and entry.is_dir() for entry in os.scandir(folder))


def accept(found: Listing, known: Known, partial: bool) -> str:
    """Which part of the set was found; an incomplete one is an error unless the caller knows."""
    full, expect = known.expect.total, known.expect
    problems = found.problems(Expect(classes=expect.classes) if partial else expect)
    if problems:
        remedy = "; or pass partial=True" if len(found.members) == expect.classes and not partial else ""
        raise ValueError(
            f"{known.title} in {found.place} is not complete: {'; '.join(problems)}. Copy it again{remedy}"
        )
    return f"all {found.count}" if full in (None, found.count) else f"{found.count} of {full} images"
