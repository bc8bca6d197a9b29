"""Images from the body of a request: JPEG or PNG files, an npy array, or JSON. Nothing is unpickled.

Image files and arrays are checked by their headers before they are decoded or allocated: pixels of each file and of all
together, an array's size. JSON has no header: it is parsed whole, and its bytes alone are limited, to fewer than those
of other bodies. Who reads is told how many bytes are about to be allocated. What is wrong is a `Problem` that says what
was expected.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poem.serve.problems import Problem
from poem.serve.settings import MOST_CHANNELS, ServeSettings
from poem.streams.images import Unreadable
from poem.streams.loading.decode import image_size
from poem.streams.loading.prepare import Prepare

JPEG, PNG, NPY = b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"\x93NUMPY"
"""How the bytes of each begin."""
TYPES = ("image/jpeg", "image/png", "application/octet-stream", "application/x-npy", "application/json",
         "multipart/form-data")  # fmt: skip
"""Types of bodies; of the third, the first bytes say what it is."""
DTYPES = {"|u1": "uint8", "<f2": "float16", "<f4": "float32", "<f8": "float64"}
"""Types of an array's numbers, as npy files name them."""
DEEPEST = 64
"""Levels of JSON."""
PER_PIXEL, PER_JSON_BYTE = 18, 8
"""Bytes that a prepared pixel takes while a batch is made of it, and that Python objects take of a byte of JSON."""


def _nothing(_: int) -> None:
    """For those who do not count."""


class PayloadReader:
    """Reads images as one model takes them.

    Args:
        prepare: Resize and crop of image files; arrays must have the resulting size.
        settings: The limits.
    """

    def __init__(self, prepare: Prepare, settings: ServeSettings) -> None:
        self._prepare, self._settings = prepare, settings

    def read(self, kind: str, body: bytes, hold: Callable[[int], None] = _nothing) -> Tensor:
        """Images (B, C, H, W) from 0 to 1 of a body that is no multipart.

        Args:
            kind: The body's type, without parameters.
            body: Its bytes.
            hold: Called with the bytes that are about to be allocated; may raise.

        Raises:
            Problem: 413 for too many pixels or images, 415 for another type, 422 for what cannot be read.
        """
        if kind == "application/json":
            return self._from_json(body, hold)
        if not body:
            raise _unreadable("expected an image in the request's body, got an empty one")
        if kind == "application/x-npy" or (kind == "application/octet-stream" and body.startswith(NPY)):
            return self._from_npy(body, hold)
        if kind in TYPES and kind != "multipart/form-data":
            return self.from_files([body], hold)
        raise Problem(415, "media-type", f"expected a body of type {', '.join(TYPES)}, got {kind[:80]!r}")

    def from_files(self, files: Sequence[bytes], hold: Callable[[int], None] = _nothing) -> Tensor:
        """Images (B, 3, H, W) from 0 to 1 of image files."""
        self._check_count(len(files))
        stored = [self._stored_size(data, f"image {at}") for at, data in enumerate(files)]
        pixels = sum(self._prepared_pixels(*size, f"image {at}") for at, size in enumerate(stored))
        self._check_sum(pixels)
        hold(PER_PIXEL * pixels + 4 * max(wide * high for wide, high in stored))
        found = [self._from_file(data, f"image {at}") for at, data in enumerate(files)]
        sizes = sorted({tuple(each.shape[1:]) for each in found})
        if len(sizes) > 1:
            raise _unreadable(f"expected images of one size in a request, got {sizes[0]} and {sizes[1]}")
        return torch.stack(found).float().div_(255)

    def _stored_size(self, data: bytes, name: str) -> tuple[int, int]:
        """Width and height of an image file, from its header."""
        if not data.startswith((JPEG, PNG)):
            raise _unreadable(f"{name}: expected a JPEG or PNG file, got {len(data)} bytes that begin otherwise")
        try:
            wide, high = image_size(data, name)
        except Unreadable as error:
            raise _unreadable(str(error)) from error
        except (ValueError, OSError, SyntaxError, MemoryError) as error:  # a header that Pillow cannot follow
            raise _unreadable(f"{name}: {len(data)} bytes that are no whole image ({error})") from error
        self._check_pixels(wide, high, name)
        return wide, high

    def _prepared_pixels(self, wide: int, high: int, name: str) -> int:
        """Pixels of an image of that size after resize and crop."""
        prepare, short = self._prepare, min(wide, high)
        if prepare.resize and not prepare.direct:
            wide, high = (int(prepare.resize * side / short) for side in (wide, high))
            most = self._settings.max_pixels
            if wide * high > max(most, prepare.resize**2):
                raise Problem(413, "too-many-pixels", f"{name}: expected at most {most} pixels, would be {wide}x{high}")
        return prepare.crop**2 if prepare.crop else wide * high

    def _check_sum(self, pixels: int) -> None:
        """Refuse images that are too many pixels together; those that are cropped are as many as the model's size."""
        most = self._settings.max_pixels
        if not self._prepare.crop and pixels > most:
            raise Problem(
                413, "too-many-pixels",
                f"expected at most {most} pixels in a request, got {pixels}; send the images in several requests",
            )  # fmt: skip

    def _from_file(self, data: bytes, name: str) -> Tensor:
        """One image file: uint8 (3, H, W)."""
        try:
            return self._prepare(data, name)
        except Unreadable as error:
            raise _unreadable(str(error)) from error
        except (ValueError, OSError, SyntaxError, MemoryError) as error:  # a header that Pillow cannot follow
            raise _unreadable(f"{name}: {len(data)} bytes that are no whole image ({error})") from error

    def _from_npy(self, body: bytes, hold: Callable[[int], None]) -> Tensor:
        """An array (B, C, H, W) as `numpy.save` writes it: uint8, which is divided by 255, or numbers from 0 to 1."""
        file = io.BytesIO(body)
        try:
            version = np.lib.format.read_magic(file)
            reader = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
            shape, by_column, dtype = reader(file, max_header_size=4096)
        except Exception as error:  # NumPy parses the header as Python literals, which raise anything
            raise _unreadable(f"expected an npy array, got {len(body)} bytes with another header") from error
        if dtype.str not in DTYPES:
            raise _unreadable(f"expected an array of {', '.join(DTYPES.values())}, got {str(dtype)[:40]!r}")
        if by_column:
            raise _unreadable("expected an array in C order, got one in Fortran order; np.ascontiguousarray(array)")
        self._check_shape(shape)
        count = math.prod(shape)
        if len(body) - file.tell() != count * dtype.itemsize:
            raise _unreadable(f"expected {count * dtype.itemsize} bytes of numbers, got {len(body) - file.tell()}")
        hold(4 * count)
        return _numbers(np.frombuffer(body, dtype, count, file.tell()).reshape(shape))

    def _from_json(self, body: bytes, hold: Callable[[int], None]) -> Tensor:
        """`{"images": [...]}`: image files in base64, or numbers (B, C, H, W) from 0 to 1."""
        most = self._settings.max_json
        if len(body) > most:
            raise Problem(413, "too-large", f"expected at most {most} bytes of JSON, got {len(body)}; send npy")
        hold(PER_JSON_BYTE * len(body))
        try:
            value = json.loads(body, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            raise _unreadable(f"expected JSON with finite numbers, got something else: {str(error)[:100]}") from error
        images = value.get("images") if isinstance(value, dict) else None
        if not isinstance(images, list) or not images or set(value) != {"images"}:
            raise _unreadable('expected {"images": [...]} with images in base64, or numbers (B, C, H, W) from 0 to 1')
        if all(isinstance(each, str) for each in images):
            self._check_count(len(images))
            return self.from_files([_from_base64(each, at) for at, each in enumerate(images)], hold)
        shape = _nested_shape(images)
        self._check_shape(shape)
        try:
            found = np.asarray(images)
        except (ValueError, OverflowError) as error:
            raise _unreadable("expected numbers (B, C, H, W), got rows of several lengths or other values") from error
        if found.shape != shape or found.dtype.kind not in "fiu":
            raise _unreadable("expected numbers (B, C, H, W), got rows of several lengths or other values")
        return _numbers(found.astype(np.float64))

    def _check_count(self, count: int) -> None:
        if not 1 <= count <= self._settings.batch_size:
            raise Problem(
                413 if count else 422, "too-many-images" if count else "unreadable",
                f"expected 1 to {self._settings.batch_size} images in a request, got {count}; send several requests",
            )  # fmt: skip

    def _check_pixels(self, wide: int, high: int, name: str) -> None:
        least, most = self._settings.min_side, self._settings.max_pixels
        if wide * high > most:
            raise Problem(413, "too-many-pixels", f"{name}: expected at most {most} pixels, got {wide}x{high}")
        if min(wide, high) < least:
            raise _unreadable(f"{name}: expected at least {least} pixels a side, got {wide}x{high}")

    def _check_shape(self, shape: tuple[int, ...]) -> None:
        """Refuse an array that is no batch of images of the model's size."""
        side = self._prepare.crop
        if len(shape) != 4 or min(shape) < 1:
            raise _unreadable(f"expected an array (B, C, H, W) of images, got a shape of {str(shape)[:80]}")
        self._check_count(shape[0])
        if shape[1] > MOST_CHANNELS:
            raise _unreadable(f"expected an array (B, C, H, W), got {shape[1]} channels; is it (B, H, W, C)?")
        self._check_pixels(shape[3], shape[2], "the array")
        self._check_sum(shape[0] * shape[2] * shape[3])
        if side and shape[2:] != (side, side):
            raise _unreadable(f"expected images of {side}x{side}, which is the model's size, got {shape[3]}x{shape[2]}")


def _numbers(array: Any) -> Tensor:
    """An array's numbers as images from 0 to 1."""
    if array.dtype == np.uint8:
        pixels = array.astype(np.float32)
        pixels /= np.float32(255)
        return torch.from_numpy(pixels)
    found = torch.from_numpy(array.astype(np.float32))
    low, high = float(found.min()), float(found.max())
    if not found.isfinite().all():
        wrong = int((~found.isfinite()).sum())
        raise _unreadable(f"expected finite numbers from 0 to 1, got {wrong} of {found.numel()} that are not finite")
    if not (low >= 0 and high <= 1):
        raise _unreadable(f"expected finite numbers from 0 to 1, got {low:g} to {high:g}; divide pixels by 255")
    return found


def _nested_shape(value: Any) -> tuple[int, ...]:
    """Lengths of nested lists, by their first elements."""
    shape: list[int] = []
    while isinstance(value, list) and len(shape) < DEEPEST:
        shape.append(len(value))
        value = value[0] if value else None
    return tuple(shape)


def _from_base64(text: str, at: int) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise _unreadable(f"image {at}: expected base64, got something else") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"expected finite numbers, got {name}")


def _unreadable(detail: str) -> Problem:
    return Problem(422, "unreadable", detail)
