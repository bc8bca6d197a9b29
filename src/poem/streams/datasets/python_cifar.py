"""CIFAR's python version, as torchvision downloads it: pickles, read by an unpickler that can run no code.

A pickle may name any function, which `pickle.load` would call. Here the only names that are known are the four that a
numpy array is pickled with, and each stands for an object that records what it is given; any other name is an error.
Numpy itself sees only the finished bytes, whose length is compared with the shape.
"""

from __future__ import annotations

import io
import pickle
import pickletools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from poem._util.files import read_bytes
from poem.streams.datasets.arrays import PIXELS
from poem.streams.images import DatasetInfo, ImageSet, Labels

MAX_BATCH_BYTES = 400 << 20
"""Size limit of one pickled file; CIFAR-100's training images are 155 MB."""


class _ArrayRecord:
    """Stands for a pickled array; keeps the state that it is given."""

    def __init__(self, *arguments: Any) -> None:
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _DtypeRecord:
    """Stands for a pickled dtype; keeps its code, such as `u1`."""

    def __init__(self, *arguments: Any) -> None:
        self.code = _text(arguments[0]) if arguments else ""

    def __setstate__(self, state: Any) -> None:
        """Ignore byte order and alignment: one byte has none."""


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """Bytes as Python 3 writes them into old pickles: as latin-1 text."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("bytes in an encoding other than latin1")
    return text.encode("latin1")


_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _ArrayRecord,
    ("numpy._core.multiarray", "_reconstruct"): _ArrayRecord,
    ("numpy", "dtype"): _DtypeRecord,
    ("_codecs", "encode"): _encode,
}


class _RecordingUnpickler(pickle.Unpickler):
    """Builds plain values and the records above, and refuses every other name."""

    def find_class(self, module: str, name: str) -> Any:
        """Return what stands for a name; a fresh object each time, since a pickle may set attributes on it."""
        if (module, name) == ("numpy", "ndarray"):
            return "ndarray"
        if (module, name) in _KNOWN:
            return partial(_KNOWN[module, name])
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no part of CIFAR and was not called")


def _check_memo(data: bytes) -> None:
    """Raise where a pickle puts a value at a place of the memo beyond its own length, which the memo would grow to."""
    for code, argument, _ in pickletools.genops(data):
        if code.name in ("PUT", "BINPUT", "LONG_BINPUT") and isinstance(argument, int) and argument > len(data):
            raise pickle.UnpicklingError(f"it puts a value at place {argument} of its memo and has {len(data)} bytes")


def python_batch(path: Path, rows: int | None, classes: int) -> tuple[NDArray[np.uint8], Labels]:
    """Read one file of the python version: pixels (rows, 3072), the red plane first, and labels (rows,).

    Args:
        path: The file.
        rows: Number of images that it must hold; None for as many as it has labels.
        classes: 10, or 100 for the fine labels of CIFAR-100.

    Raises:
        ValueError: The file is no batch of CIFAR, or names code to run.
    """
    try:
        data = read_bytes(path, MAX_BATCH_BYTES)
        _check_memo(data)
        found = _RecordingUnpickler(io.BytesIO(data), encoding="bytes").load()
    except Exception as error:  # a damaged pickle raises almost anything
        if isinstance(error, OSError):
            raise
        raise ValueError(f"expected a batch of CIFAR's python version in {path}, got another file ({error})") from error
    values = {_text(key): value for key, value in found.items()} if isinstance(found, dict) else {}
    labels = values.get("labels" if classes == 10 else "fine_labels")
    if rows is None and isinstance(labels, list):
        rows = len(labels)
    pixels = None if not rows else _pixels(values.get("data"), rows)
    if pixels is None or not isinstance(labels, list) or len(labels) != rows:
        raise ValueError(
            f"expected {rows or 'some'} images of 3072 bytes and as many labels in {path}, got others; "
            "download it again"
        )
    if not all(type(label) is int and 0 <= label < classes for label in labels):
        raise ValueError(f"expected labels from 0 to {classes - 1} in {path}, got others; download it again")
    return pixels, np.array(labels, np.int64)


def _pixels(record: Any, rows: int) -> NDArray[np.uint8] | None:
    """The pixels that a record holds, or None where they are not `rows` rows of 3072 bytes."""
    state = getattr(record, "state", None)
    if not isinstance(record, _ArrayRecord) or not isinstance(state, tuple) or len(state) != 5:
        return None
    _, shape, dtype, fortran, raw = state
    fits = shape == (rows, PIXELS) and isinstance(dtype, _DtypeRecord) and dtype.code == "u1" and not fortran
    if not fits or not isinstance(raw, bytes) or len(raw) != rows * PIXELS:
        return None
    return np.frombuffer(raw, np.uint8).reshape(rows, PIXELS)


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


class PixelRows(ImageSet):
    """Images in memory as rows of 3072 bytes, the red plane first."""

    def __init__(
        self, pixels: NDArray[np.uint8], labels: Labels, info: DatasetInfo, classes: tuple[str, ...] | None = None
    ) -> None:
        super().__init__(labels, info, classes=classes)
        self.pixels = pixels

    def _read(self, index: int) -> Tensor:
        return torch.from_numpy(self.pixels[index].copy()).view(3, 32, 32)
