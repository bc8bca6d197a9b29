"""CIFAR-10 and CIFAR-100, clean and corrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from poem.streams.datasets.arrays import Rows, bin_rows, npy_labels, npy_start
from poem.streams.datasets.folders import Expect, Files, is_archive, listing
from poem.streams.datasets.named_sets import CIFAR_C_SOURCES, CIFAR_SOURCES, Known, Root, accept, base_folder
from poem.streams.datasets.packed import Packed, packed
from poem.streams.images import About
from poem.streams.shift import Shift

CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_ROWS = 10_000


def cifar_c(root: Root, corruption: str, severity: int, *, classes: Literal[10, 100] = 10) -> Rows:
    """One corruption of CIFAR-10-C or CIFAR-100-C at one severity: rows of `<corruption>.npy`, mapped one by one."""
    shift = Shift(corruption, severity)
    if classes not in (10, 100):
        raise ValueError(f"expected classes 10 or 100, got {classes!r}")
    title = f"CIFAR-{classes}-C"
    base = base_folder(root, f"{title}: labels.npy and <corruption>.npy, uint8 (50000, 32, 32, 3)")
    folder = next((base / sub for sub in (".", title, title.lower()) if (base / sub / "labels.npy").is_file()), None)
    source = CIFAR_C_SOURCES[classes]
    if folder is None or not (folder / f"{corruption}.npy").is_file():
        raise FileNotFoundError(
            f"no {title} with {corruption}.npy and labels.npy in {folder or base}; expected uint8 "
            f"(50000, 32, 32, 3) and integers (50000,). It comes from: {source}"
        )
    labels = npy_labels(folder / "labels.npy", _ROWS, classes)
    path = folder / f"{corruption}.npy"
    start = npy_start(path, (5 * _ROWS, 32, 32, 3)) + (shift.severity - 1) * _ROWS * 3072
    about = About(
        data=f"cifar{classes}-c", provenance=f"files as found; official: {source}", subset=f"all {_ROWS}",
        corruption=corruption, severity=shift.severity,
    )  # fmt: skip
    names = CIFAR10_CLASSES if classes == 10 else None
    return Rows([(path, start)], _ROWS, channels_last=True, labels=labels, about=about, classes=names)


def cifar(
    root: Root = None,
    *,
    classes: Literal[10, 100] = 10,
    split: Literal["test", "train"] = "test",
    partial: bool = False,
) -> Rows | Files | Packed:
    """CIFAR-10 or CIFAR-100, clean: the official binary version, class folders, a tar of them, or a packed .npz.

    The python version is a pickle, which can run code when read, and is not read.
    """
    if classes not in (10, 100) or split not in ("test", "train"):
        raise ValueError(f"expected classes 10 or 100 and split 'test' or 'train', got {classes!r} and {split!r}")
    name, source, count = f"cifar{classes}", CIFAR_SOURCES[classes], {"test": 10_000, "train": 50_000}[split]
    wanted = f"{name}: the binary version's .bin files, or {split}/<class>/*, or {name}-jpeg.tar(.xz) of that"
    base = base_folder(root, wanted)
    if base.suffix == ".npz" and classes == 10:
        return packed(base, split, count, partial)
    binary = {
        (10, "test"): ["test_batch.bin"], (10, "train"): [f"data_batch_{part}.bin" for part in range(1, 6)],
        (100, "test"): ["test.bin"], (100, "train"): ["train.bin"],
    }[classes, split]  # fmt: skip
    about = About(data=name, provenance=f"files as found; official: {source}", subset=f"all {count} ({split})")
    for folder in (base, base / f"cifar-{classes}-batches-bin", base / f"cifar-{classes}-binary"):
        if all((folder / file).is_file() for file in binary):
            heads = 1 if classes == 10 else 2
            rows = count // len(binary)
            files, labels = bin_rows([folder / file for file in binary], rows, heads, classes)
            names = CIFAR10_CLASSES if classes == 10 else None
            return Rows(
                files,
                rows,
                stride=heads + 3072,
                skip=heads,
                channels_last=False,
                labels=labels,
                about=about,
                classes=names,
            )
    for place in (base, base / name, base / f"{name}-jpeg.tar", base / f"{name}-jpeg.tar.xz"):
        if is_archive(place) or (place / split).is_dir():
            found = listing(place, under=split)
            known = Known(
                title=f"{name} {split}", layout=wanted, source=source, places=(),
                expect=Expect(classes=classes, per_class=count // classes, total=count),
            )  # fmt: skip
            words = f"{accept(found, known, partial)} ({split})"
            if classes == 10 and tuple(found.members) != CIFAR10_CLASSES:  # other names may stand in another order
                raise ValueError(
                    f"expected the class folders {', '.join(CIFAR10_CLASSES)} in {found.place}, got "
                    f"{', '.join(found.members)}; rename them, or open the folder as a data set of its own"
                )
            return Files(found, About(data=name, provenance="class folders as found (re-encoded images)", subset=words))
    pickles = [
        path for path in (base, base / f"cifar-{classes}-batches-py", base / "cifar-100-python") if _pickled(path)
    ]
    note = " (the python version there is pickled and is not read)" if pickles else ""
    raise FileNotFoundError(f"no {name} in {base}{note}; expected {wanted}. It comes from: {source}")


def _pickled(folder: Path) -> bool:
    return any((folder / file).is_file() for file in ("test_batch", "data_batch_1", "test", "batches.meta"))
