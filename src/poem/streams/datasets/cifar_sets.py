"""Open CIFAR-10 and CIFAR-100, clean and corrupted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from poem.streams.datasets.arrays import PIXELS, BinaryRows, bin_labels, npy_data_offset, npy_labels
from poem.streams.datasets.folders import ExpectedCounts, ImageFiles, is_archive, listing
from poem.streams.datasets.named_sets import CIFAR_C_SOURCES, CIFAR_SOURCES, NamedSet, Root, check_complete, data_root
from poem.streams.datasets.packed import PackedImages, open_packed
from poem.streams.datasets.python_cifar import PixelRows, python_batch
from poem.streams.images import DatasetInfo
from poem.streams.shift import Shift

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_ROWS = 10_000  # images of one severity


def cifar_c(root: Root, corruption: str, severity: int, *, classes: Literal[10, 100] = 10) -> BinaryRows:
    """Open one corruption of CIFAR-10-C or CIFAR-100-C at one severity: rows of `<corruption>.npy`."""
    shift = Shift(corruption, severity)
    if classes not in (10, 100):
        raise ValueError(f"expected classes 10 or 100, got {classes!r}")
    title, source = f"CIFAR-{classes}-C", CIFAR_C_SOURCES[classes]
    base, folders = cifar_c_folders(root, classes)
    folder = next((each for each in folders if (each / "labels.npy").is_file()), None)
    if folder is None or not (folder / f"{corruption}.npy").is_file():
        raise FileNotFoundError(
            f"no {title} with {corruption}.npy and labels.npy in {folder or base}; expected uint8 "
            f"(50000, 32, 32, 3) and integers (50000,). It comes from: {source}"
        )
    labels = npy_labels(folder / "labels.npy", _ROWS, classes)
    path = folder / f"{corruption}.npy"
    start = npy_data_offset(path, (5 * _ROWS, 32, 32, 3)) + (shift.severity - 1) * _ROWS * PIXELS
    info = DatasetInfo(
        data=f"cifar{classes}-c", provenance=f"files as found; official: {source}", subset=f"all {_ROWS}",
        corruption=corruption, severity=shift.severity,
    )  # fmt: skip
    names = CIFAR10_CLASSES if classes == 10 else None
    return BinaryRows([(path, start)], _ROWS, channels_last=True, labels=labels, info=info, classes=names)


def cifar_c_folders(root: Root, classes: int) -> tuple[Path, list[Path]]:
    """The root of CIFAR-10-C or CIFAR-100-C, and the folders where its files are looked for."""
    title = f"CIFAR-{classes}-C"
    base = data_root(root, f"{title}: labels.npy and <corruption>.npy, uint8 (50000, 32, 32, 3)")
    return base, [base, base / title, base / title.lower()]


def cifar(
    root: Root = None,
    *,
    classes: Literal[10, 100] = 10,
    split: Literal["test", "train"] = "test",
    partial: bool = False,
) -> BinaryRows | ImageFiles | PackedImages | PixelRows:
    """Open CIFAR-10 or CIFAR-100: the binary or the python version, class folders, a tar of them, or a packed .npz.

    The python version, which torchvision downloads, is a pickle; it is read without running code (`python_cifar.py`).

    Args:
        root: The folder, tar or packed file, or a folder that holds it; by default $POEM_DATA.
        classes: 10 or 100; of CIFAR-100 the fine labels.
        split: The 10,000 test or the 50,000 training images.
        partial: Accept fewer images than that, such as a small copy for a trial.

    Raises:
        FileNotFoundError: Nothing of the kind is there.
        ValueError: A file is not whole, or holds something else.
    """
    if classes not in (10, 100) or split not in ("test", "train"):
        raise ValueError(f"expected classes 10 or 100 and split 'test' or 'train', got {classes!r} and {split!r}")
    wanted = _Wanted(classes, split, {"test": 10_000, "train": 50_000}[split], partial)
    base = data_root(root, wanted.layout)
    if base.suffix == ".npz" and classes == 10:
        return open_packed(base, split, wanted.count, partial)
    for opened in (_binary, _folders, _python):
        found = opened(base, wanted)
        if found is not None:
            return found
    raise FileNotFoundError(
        f"no {wanted.name} in {base}; expected {wanted.layout}. It comes from: {CIFAR_SOURCES[classes]}"
    )


@dataclass(frozen=True)
class _Wanted:
    """What `cifar` looks for."""

    classes: Literal[10, 100]
    split: Literal["test", "train"]
    count: int
    """Images that are published."""
    partial: bool

    @property
    def name(self) -> str:
        """As in `cifar10`."""
        return f"cifar{self.classes}"

    @property
    def layout(self) -> str:
        """What may be there, in words."""
        return (
            f"{self.name}: the binary version's .bin files, the python version's (as torchvision downloads it), or "
            f"{self.split}/<class>/*, or {self.name}-jpeg.tar(.xz) of that"
        )

    @property
    def files(self) -> list[str]:
        """The published files, without the ending of the binary version."""
        if self.classes == 100:
            return [self.split]
        return ["test_batch"] if self.split == "test" else [f"data_batch_{part}" for part in range(1, 6)]

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """Those of CIFAR-10."""
        return CIFAR10_CLASSES if self.classes == 10 else None

    def info(self, found: int) -> DatasetInfo:
        """Of so many published images."""
        words = f"all {self.count}" if found == self.count else f"{found} of {self.count}"
        return DatasetInfo(
            data=self.name,
            provenance=f"files as found; official: {CIFAR_SOURCES[self.classes]}",
            subset=f"{words} ({self.split})",
        )


def _binary(base: Path, wanted: _Wanted) -> BinaryRows | None:
    """The binary version, where its files are there."""
    classes, header = wanted.classes, 1 if wanted.classes == 10 else 2
    for folder in (base, base / f"cifar-{classes}-batches-bin", base / f"cifar-{classes}-binary"):
        paths = [folder / f"{file}.bin" for file in wanted.files]
        if all(path.is_file() for path in paths):
            rows = paths[0].stat().st_size // (header + PIXELS) if wanted.partial else wanted.count // len(paths)
            labels = bin_labels(paths, max(1, rows), header, classes)
            return BinaryRows(
                [(path, 0) for path in paths],
                rows,
                stride=header + PIXELS,
                skip=header,
                channels_last=False,
                labels=labels,
                info=wanted.info(len(labels)),
                classes=wanted.class_names,
            )
    return None


def _folders(base: Path, wanted: _Wanted) -> ImageFiles | None:
    """Class folders, or a tar of them, where they are there."""
    name, classes, split, count = wanted.name, wanted.classes, wanted.split, wanted.count
    for path in (base, base / name, base / f"{name}-jpeg.tar", base / f"{name}-jpeg.tar.xz"):
        if is_archive(path) or (path / split).is_dir():
            found = listing(path, under=split)
            named = NamedSet(
                title=f"{name} {split}", layout=wanted.layout, source=CIFAR_SOURCES[classes], locations=(),
                expect=ExpectedCounts(classes=classes, per_class=count // classes, total=count),
            )  # fmt: skip
            words = f"{check_complete(found, named, wanted.partial)} ({split})"
            if classes == 10 and tuple(found.members) != CIFAR10_CLASSES:  # other names may have another order
                raise ValueError(
                    f"expected the class folders {', '.join(CIFAR10_CLASSES)} in {found.path}, got "
                    f"{', '.join(found.members)}; rename them, or open the folder as a data set of its own"
                )
            return ImageFiles(
                found, DatasetInfo(data=name, provenance="class folders as found (re-encoded images)", subset=words)
            )
    return None


def _python(base: Path, wanted: _Wanted) -> PixelRows | None:
    """The python version, where its files are there."""
    classes = wanted.classes
    for folder in (base, base / f"cifar-{classes}-batches-py", base / f"cifar-{classes}-python"):
        paths = [folder / file for file in wanted.files]
        if all(path.is_file() for path in paths):
            each = None if wanted.partial else wanted.count // len(paths)
            batches = [python_batch(path, each, classes) for path in paths]
            pixels, labels = (np.concatenate(part) for part in zip(*batches, strict=True))
            return PixelRows(pixels, labels, wanted.info(len(labels)), wanted.class_names)
    return None
