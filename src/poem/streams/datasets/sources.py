"""Where data sets can be downloaded: address, size, checksum, and the folder that each archive is unpacked to.

A checksum is recorded only where somebody publishes one, with who does; where nobody does it is empty. Sizes are in
bytes. What needs a login (ImageNet itself) is not here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from poem._util.nearest import nearest_hint
from poem.streams.datasets.classes import WNID
from poem.streams.shift import CORRUPTIONS, EXTRA

_ZENODO = "https://zenodo.org/records/{record}/files/{file}?download=1"


@dataclass(frozen=True, kw_only=True)
class Archive:
    """One file of a publisher, and what it is unpacked to."""

    file: str
    address: str
    size: int
    """Bytes; exact where there is a checksum, else about."""
    checksum: str = ""
    """`md5:...` or `sha256:...`; empty where none is published."""
    stated_by: str = ""
    """Who publishes the checksum."""
    folder: str
    """Folder below the root that it is unpacked to."""
    keep: str
    """Regular expression: the first part of a path inside the archive that matches is kept with all below it, folders
    above it are dropped, and files without such a part are left out."""
    entries: tuple[str, ...] = ()
    """Names in the folder that it is unpacked to, each complete when it appears; empty for the folder as a whole."""

    @property
    def checksum_text(self) -> str:
        """The checksum and who states it, in words."""
        return f"{self.checksum} (stated by {self.stated_by})" if self.checksum else "no checksum is published"

    @property
    def targets(self) -> tuple[str, ...]:
        """Paths below the root that appear when it is unpacked."""
        return tuple(f"{self.folder}/{name}" for name in self.entries) or (self.folder,)


IMAGENET_C_GROUPS: dict[str, tuple[str, ...]] = {
    "noise": CORRUPTIONS[:3], "blur": CORRUPTIONS[3:7], "weather": CORRUPTIONS[7:11], "digital": CORRUPTIONS[11:],
    "extra": EXTRA,
}  # fmt: skip
"""The corruptions in each archive of ImageNet-C."""
_GROUP_FILES = {
    "noise": (22_565_673_785, "e80562d7f6c3f8834afb1ecf27252745"),
    "blur": (7_112_704_951, "2d8e81fdd8e07fef67b9334fa635e45c"),
    "weather": (12_797_438_995, "33ffea4db4d93fe4a428c40a6ce0c25d"),
    "digital": (7_757_510_705, "89157860d7b10d5797849337ca2e5c03"),
    "extra": (15_789_490_144, "d492dfba5fc162d8ec2c3cd8ee672984"),
}


def _zenodo(record: int, file: str, size: int, md5: str, **fields: object) -> Archive:
    address = _ZENODO.format(record=record, file=file)
    return Archive(file=file, address=address, size=size, checksum=f"md5:{md5}", stated_by="Zenodo", **fields)  # type: ignore[arg-type]


def _cifar(classes: int, size: int, md5: str, folder: str) -> Archive:
    file = f"cifar-{classes}-binary.tar.gz"
    return Archive(
        file=file, address=f"https://www.cs.toronto.edu/~kriz/{file}", size=size, checksum=f"md5:{md5}",
        stated_by="the CIFAR page", folder=folder, keep=r"[a-z_0-9]+\.(bin|txt|meta\.txt)|batches\.meta\.txt",
    )  # fmt: skip


SOURCES: dict[str, tuple[Archive, ...]] = {
    "cifar10-c": (
        _zenodo(
            2535967, "CIFAR-10-C.tar", 2_918_471_680, "56bf5dcef84df0e2308c6dcbcbbd8499",
            folder="CIFAR-10-C", keep=r"[a-z_]+\.npy",
        ),
    ),
    "cifar100-c": (
        _zenodo(
            3555552, "CIFAR-100-C.tar", 2_918_473_216, "11f0ed0f1191edbf9fa23466ae6021d3",
            folder="CIFAR-100-C", keep=r"[a-z_]+\.npy",
        ),
    ),
    "imagenet-c": tuple(
        _zenodo(
            2235448, f"{group}.tar", *_GROUP_FILES[group],
            folder="ImageNet-C", keep="|".join(names), entries=names,
        )
        for group, names in IMAGENET_C_GROUPS.items()
    ),
    "imagenet-a": (
        Archive(
            file="imagenet-a.tar", address="https://people.eecs.berkeley.edu/~hendrycks/imagenet-a.tar",
            size=687_552_512,
            checksum="sha256:3bb3632277e6ba6392ea64c02ddbf4dd2266c9caffd6bc09c9656d28f012589e",
            stated_by="TensorFlow Datasets", folder="imagenet-a", keep=WNID,
        ),
    ),
    "imagenet-r": (
        Archive(
            file="imagenet-r.tar", address="https://people.eecs.berkeley.edu/~hendrycks/imagenet-r.tar",
            size=2_191_079_936,
            checksum="sha256:18c6bf493b39a0d975d48e587437f562caab9c52ae6327dcfa9dd8eb54aa1b52",
            stated_by="TensorFlow Datasets", folder="imagenet-r", keep=WNID,
        ),
    ),
    "imagenet-v2": (
        Archive(
            file="imagenetv2-matched-frequency.tar.gz",
            address="https://huggingface.co/datasets/vaishaal/ImageNetV2/resolve/main/"
            "imagenetv2-matched-frequency.tar.gz",
            size=1_264_079_360,
            checksum="sha256:f0c37fdf925916b19ea1323cd9a2208cdb6959ba2c32eef2a7fc393835c9ca7c",
            stated_by="TensorFlow Datasets",
            folder="imagenetv2-matched-frequency-format-val", keep=r"\d{1,3}",
        ),
    ),
    "imagenet-sketch": (
        Archive(
            file="ImageNet-Sketch.zip",
            address="https://huggingface.co/datasets/songweig/imagenet_sketch/resolve/main/data/ImageNet-Sketch.zip",
            size=7_593_573_012, folder="sketch", keep=WNID,
        ),
    ),
    "cifar10": (_cifar(10, 170_052_171, "c32a1d4ab5d03f1284b67883e8d87530", "cifar-10-batches-bin"),),
    "cifar100": (_cifar(100, 168_513_733, "03b5dce01913d631647c71ecec9e9cb8", "cifar-100-binary"),),
}  # fmt: skip
"""The archives of every data set that `poem data get` knows."""


def archives(name: str, corruptions: Sequence[str] = ()) -> tuple[Archive, ...]:
    """The archives of a data set; of ImageNet-C those with some corruptions, else with the fifteen of the papers.

    Raises:
        ValueError: The data set cannot be downloaded, a corruption is unknown, or the set is not stored by corruption.
    """
    if name not in SOURCES:
        why = " (ImageNet itself needs a login at image-net.org)" if name.startswith("imagenet-val") else ""
        raise ValueError(f"{name} cannot be downloaded by this command{why}; {nearest_hint(name, SOURCES)}")
    if name != "imagenet-c":
        if corruptions:
            raise ValueError(f"{name} is one archive, so corruptions cannot be chosen; leave --corruption out")
        return SOURCES[name]
    known = (*CORRUPTIONS, *EXTRA)
    for corruption in corruptions:
        if corruption not in known:
            raise ValueError(f"unknown corruption {corruption!r}; {nearest_hint(corruption, known)}")
    wanted = set(corruptions or CORRUPTIONS)
    found = ((each, tuple(entry for entry in each.entries if entry in wanted)) for each in SOURCES[name])
    return tuple(dataclasses.replace(each, entries=left, keep="|".join(left)) for each, left in found if left)


def gigabytes(size: float) -> str:
    """Bytes as `2.9 GB`, or as megabytes below one."""
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"
