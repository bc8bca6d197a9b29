"""Images as rows of a binary file: CIFAR-C's .npy and CIFAR's own .bin. Each row is mapped when it is indexed.

No file stays open and no page stays mapped, so memory does not grow with the number of reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from poem.streams.images import DatasetInfo, ImageSet, Labels, Unreadable

PIXELS = 32 * 32 * 3


class BinaryRows(ImageSet):
    """Rows of `stride` bytes in one or several files of the same size; pixels begin `skip` bytes into a row.

    Args:
        files: The files, each with the offset of its first row in bytes.
        rows: Number of rows in each file.
        stride: Bytes from row to row.
        skip: Bytes of a row before its pixels.
        channels_last: Whether the pixels are (32, 32, 3) rather than (3, 32, 32).
        labels: (n,) of all files together.
        info: Its description.
        classes: Names of the classes, or None.
    """

    def __init__(
        self,
        files: Sequence[tuple[Path, int]],
        rows: int,
        *,
        stride: int = PIXELS,
        skip: int = 0,
        channels_last: bool,
        labels: Labels,
        info: DatasetInfo,
        classes: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__(labels, info, classes=classes)
        self.files, self.rows, self.stride, self.skip = tuple(files), rows, stride, skip
        self.channels_last = channels_last

    def where(self, index: int) -> str:
        """File and row of an image, for messages; rows count from the file's first image of this set."""
        return f"{self.files[index // self.rows][0]} row {index % self.rows}"

    def _read(self, index: int) -> Tensor:
        file, row = divmod(index, self.rows)
        path, start = self.files[file]
        try:
            mapped = np.memmap(path, np.uint8, "r", start + row * self.stride + self.skip, (PIXELS,))
        except (OSError, ValueError) as error:
            raise Unreadable(f"{self.where(index)}: {error}") from error
        pixels = torch.from_numpy(np.array(mapped))
        if self.channels_last:
            return pixels.view(32, 32, 3).permute(2, 0, 1).contiguous()
        return pixels.view(3, 32, 32)


def npy_data_offset(path: Path, shape: tuple[int, ...]) -> int:
    """Offset of a .npy file's data in bytes; raises unless it is complete and uint8 of this shape."""
    try:
        mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        if isinstance(error, FileNotFoundError):
            raise
        raise ValueError(f"{path} is no whole .npy of uint8 {shape} ({error}); copy it again") from error
    if mapped.shape != shape or mapped.dtype != np.uint8 or not mapped.flags.c_contiguous:
        raise ValueError(f"expected uint8 {shape} in {path}, got {mapped.dtype} {mapped.shape}")
    return int(mapped.offset)


def npy_labels(path: Path, rows: int, classes: int) -> Labels:
    """Read CIFAR-C's labels of one severity; raises unless the five severities repeat them."""
    try:
        labels = np.load(path, allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ValueError(f"{path} is no whole .npy of integer labels ({error}); copy it again") from error
    if labels.shape != (5 * rows,) or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"expected integers ({5 * rows},) in {path}, got {labels.dtype} {labels.shape}")
    first: Labels = labels[:rows].astype(np.int64)
    if not (labels.reshape(5, rows) == first).all():
        raise ValueError(f"expected the same {rows} labels five times in {path}; they differ between severities")
    _check_range(first, classes, path)
    return first


def bin_labels(files: Sequence[Path], rows: int, header: int, classes: int) -> Labels:
    """Read the labels of CIFAR's binary files: a row is `header` bytes, the last of them the label, then pixels."""
    stride, labels = header + PIXELS, []
    for path in files:
        size = path.stat().st_size
        if size != rows * stride:
            raise ValueError(f"expected {rows} rows of {stride} bytes in {path}, got {size} bytes; copy it again")
        column = np.memmap(path, np.uint8, "r", shape=(rows, stride))[:, header - 1].astype(np.int64)
        _check_range(column, classes, path)
        labels.append(column)
    return np.concatenate(labels)


def _check_range(labels: Labels, classes: int, path: Path) -> None:
    if labels.min() < 0 or labels.max() >= classes:
        raise ValueError(f"expected labels from 0 to {classes - 1} in {path}, got {labels.min()} to {labels.max()}")
