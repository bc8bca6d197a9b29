"""From a file's bytes to pixels of the model's size: the one resize and crop of everything that reads images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from poem._util.files import printable
from poem.streams.loading.decode import check_pixels, decode, pillow

LARGEST = 8192
"""Pixels a side; more would be a slip of the finger, and gigabytes for one image."""


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """How a decoded image becomes the model's size: short side to `resize`, then the centre `crop`, through PIL.

    Sizes and borders are rounded as torchvision's Resize and CenterCrop round them, so the pixels are the same.
    """

    resize: int | None = None
    crop: int | None = None
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"

    def __post_init__(self) -> None:
        if self.interpolation not in ("bilinear", "bicubic"):
            raise ValueError(f"expected interpolation 'bilinear' or 'bicubic', got {self.interpolation!r}")
        for name, size in (("resize", self.resize), ("crop", self.crop)):
            if size is not None and not 1 <= size <= LARGEST:
                raise ValueError(f"expected sizes from 1 to {LARGEST} pixels, got {name} {size}")

    def __str__(self) -> str:
        steps = [f"short side to {self.resize} ({self.interpolation})"] if self.resize else []
        return ", ".join(steps + ([f"centre {self.crop}"] if self.crop else [])) or "as stored"

    def __call__(self, data: bytes, where: str) -> Tensor:
        """Decode a file to uint8 (3, H, W), by `loading/decode.py`; a broken one is an error that names it."""
        return self.frame(decode(data, where), where)

    def frame(self, picture: Any, where: str = "the image") -> Tensor:
        """Resize and crop an RGB image of PIL's: uint8 (3, H, W)."""
        wide, high = picture.size
        short = min(wide, high)
        if self.resize and short != self.resize:
            stored = f"{wide}x{high} pixels would become "
            wide, high = (self.resize if side == short else int(self.resize * side / short) for side in (wide, high))
            check_pixels(wide, high, printable(where), stored)
            picture = picture.resize((wide, high), getattr(pillow().Resampling, self.interpolation.upper()))
        if self.crop:
            if min(wide, high) < self.crop:
                raise ValueError(
                    f"{printable(where)}: expected at least {self.crop} pixels a side, got {wide}x{high}; add resize="
                )
            left, top = round((wide - self.crop) / 2), round((high - self.crop) / 2)
            picture = picture.crop((left, top, left + self.crop, top + self.crop))
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


EVAL = Prepare(resize=256, crop=224)
"""As the papers read ImageNet."""
