"""Data sets, opened by name or by kind: labels are in memory, pixels are read when indexed.

    data = open_dataset("imagenet-c", "/data", corruption="fog", severity=5)     # or POEM_DATA=/data
    for images, labels in batches(data, range(len(data)), 64): ...                # float in [0, 1], int64

A data set has `len(data)`, `data.labels`, `data.classes`, `data.mask`, `data[i]` (uint8, 3 x H x W) and
`data.describe()`, and can be pickled for loader workers. Roots come from the caller or from POEM_DATA.
"""

from __future__ import annotations

from poem.streams.datasets.arrays import BinaryRows
from poem.streams.datasets.cifar_sets import CIFAR10_CLASSES, cifar, cifar_c
from poem.streams.datasets.classes import class_indices
from poem.streams.datasets.digit_sets import digits, mnist_digits
from poem.streams.datasets.folders import ExpectedCounts, ImageFiles
from poem.streams.datasets.own_sets import OwnImages, as_images
from poem.streams.datasets.packed import pack
from poem.streams.datasets.registry import (
    DATASETS,
    archive,
    canonical,
    image_folder,
    imagenet_c,
    named_set,
    open_dataset,
)
from poem.streams.images import Images, ImageSet, Tensors, Unreadable
from poem.streams.loading.batches import Batches, batches
from poem.streams.loading.prepare import Prepare
from poem.streams.stream import Domains, Stream, StreamBatch

__all__ = [
    "CIFAR10_CLASSES", "DATASETS", "Batches", "BinaryRows", "Domains", "ExpectedCounts", "ImageFiles", "ImageSet",
    "Images", "OwnImages", "Prepare", "Stream", "StreamBatch", "Tensors", "Unreadable", "archive", "as_images",
    "batches", "canonical", "cifar", "cifar_c", "class_indices", "digits", "image_folder", "imagenet_c",
    "mnist_digits", "named_set", "open_dataset", "pack",
]  # fmt: skip
