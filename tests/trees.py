"""Small image trees, archives and CIFAR files in the layouts of the real ones."""

from __future__ import annotations

import tarfile
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from poem.streams.datasets import (
    ImageFiles,
    Tensors,
    Unreadable,
)

Image = pytest.importorskip("PIL.Image")


def picture(value: int, size: tuple[int, int] = (8, 8), kind: str = "JPEG") -> bytes:
    """An image of one grey level."""
    file = BytesIO()
    Image.new("RGB", size, (value % 256,) * 3).save(file, kind, quality=95)
    return file.getvalue()


def grow(root: Path, names: list[str], per_class: int = 1, ending: str = "JPEG", **settings: Any) -> Path:
    """A tree of class folders; the k-th class's images have grey level k (modulo 256)."""
    for number, name in enumerate(names):
        (root / name).mkdir(parents=True)
        data = picture(number, **settings)
        for at in range(per_class):
            (root / name / f"ILSVRC2012_val_{number * per_class + at:08d}.{ending}").write_bytes(data)
    return root


def wnids(count: int) -> list[str]:
    return [f"n{10_000_000 + 7 * number}" for number in range(count)]


def level(data: ImageFiles | Any, index: int) -> int:
    return int(data[index].float().mean().round())


def pack(path: Path, root: Path, inside: str) -> Path:
    mode: Any = "w:" + {".tar": "", ".xz": "xz", ".gz": "gz"}[path.suffix]
    with tarfile.open(path, mode) as tar:
        tar.add(root, inside)
    return path


def toy(n: int = 10, size: int = 32) -> Tensors:
    images = torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return Tensors(images, np.arange(n) % 4, name="toy")


class Spoilt(Tensors):
    """Images of which some cannot be read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in (0, 5):
            raise Unreadable(f"image {index} is broken")
        return super().__getitem__(index)
