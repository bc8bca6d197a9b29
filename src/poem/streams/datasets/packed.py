"""CIFAR-10's encoded images in one .npz without pickles: one small file to copy to another machine."""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from torch import Tensor

from poem._util.files import open_atomic
from poem.streams.datasets.archives import megabytes, unpacked_limit
from poem.streams.datasets.folders import ImageFiles
from poem.streams.images import DatasetInfo, ImageSet, Labels
from poem.streams.loading.prepare import Prepare

_REPACK = "pack it again: python benchmarks/train_cifar10.py --pack CIFAR10_TAR FILE.npz"

_FORMAT_ERRORS = (
    ValueError, KeyError, IndexError, TypeError, OverflowError, EOFError, MemoryError, NotImplementedError, zlib.error,
    zipfile.BadZipFile,
)  # fmt: skip
"""Errors of numpy and zipfile for a file that `pack` did not write, or that is damaged."""


class TooLargeError(ValueError):
    """A packed file that is larger in memory than `unpacked_limit`."""


class PackedImages(ImageSet):
    """The images of one split of a packed file, decoded when indexed."""

    def __init__(self, names: Sequence[str], blobs: Sequence[bytes], labels: Labels, info: DatasetInfo) -> None:
        super().__init__(labels, info)
        self.names, self.blobs = tuple(names), tuple(blobs)

    def where(self, index: int) -> str:
        """Name of the image in the folder or tar that was packed, for messages."""
        return self.names[index]

    def _read(self, index: int) -> Tensor:
        return Prepare()(self.blobs[index], self.where(index))


def pack(parts: dict[str, ImageSet], out: Path) -> int:
    """Write the splits "train" and "test" to one file; returns its size in bytes."""
    names: list[bytes] = []
    blobs: list[bytes] = []
    for data in parts.values():
        if not isinstance(data, ImageFiles):
            raise ValueError(f"expected encoded images to pack (class folders, or a tar of them), got {data!r}")
        names += [bytes(data.store.names[at]) for at in data.positions.tolist()]
        blobs += [data.store.read(at) for at in data.positions.tolist()]
    sizes = [len(data) for data in parts.values()]
    with open_atomic(out) as file:
        np.savez_compressed(
            file,
            names=np.array(names),
            blobs=np.frombuffer(b"".join(blobs), np.uint8),
            lengths=np.array([len(blob) for blob in blobs], np.int32),
            labels=np.concatenate([data.labels for data in parts.values()]).astype(np.uint8),
            splits=np.repeat([split == "test" for split in parts], sizes).astype(np.uint8),
        )
    return out.stat().st_size


def open_packed(path: Path, split: Literal["test", "train"], count: int, partial: bool) -> PackedImages:
    """Open one split of a file that `pack` wrote; another number of images is an error unless `partial`."""
    try:
        with zipfile.ZipFile(path) as held:
            unpacked = sum(each.file_size for each in held.infolist())  # zipfile reads no more than this
        most = unpacked_limit(path.stat().st_size)
        if unpacked > most:
            raise TooLargeError(
                f"{path} unpacks to {megabytes(unpacked)}, more than {megabytes(most)}; if you trust it, set "
                "POEM_MAX_UNPACKED to the bytes to allow, such as 200G"
            )
        with np.load(path, allow_pickle=False) as arrays:
            ends, data = np.cumsum(arrays["lengths"], dtype=np.int64), arrays["blobs"].tobytes()
            rows = np.flatnonzero(arrays["splits"] == (split == "test")).tolist()
            stored, labels = arrays["names"], arrays["labels"][rows]
        if stored.dtype.kind != "S":
            raise TypeError(f"expected names as bytes, got {stored.dtype}")
        names = [os.fsdecode(bytes(stored[row])) for row in rows]
        blobs = [data[ends[row - 1] if row else 0 : ends[row]] for row in rows]
    except TooLargeError:
        raise
    except _FORMAT_ERRORS as error:
        raise ValueError(
            f"expected packed images of CIFAR-10 in {path}, got another file ({error}); {_REPACK}"
        ) from error
    if len(rows) != count and not (partial and rows):
        raise ValueError(f"expected {count} {split} images in {path}, got {len(rows)}; {_REPACK}; or pass partial=True")
    info = DatasetInfo(
        data="cifar10",
        provenance="packed class folders (re-encoded images)",
        subset=f"{len(rows)} of {count} ({split})",
    )
    return PackedImages(names, blobs, labels, info)
