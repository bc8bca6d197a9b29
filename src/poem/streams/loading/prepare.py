"""Resize and crop images to the model's size; everything that reads image files uses this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from poem._util.files import printable
from poem.streams.loading.decode import check_pixels, decode, pillow

MAX_SIDE = 8192
"""Largest `resize` or `crop` in pixels; more is likely a typing error, and would need gigabytes for one image."""


@dataclass(frozen=True, kw_only=True)
class Prepare:
    """Resize the short side to `resize`, then crop the centre to `crop`, by PIL.

    Sizes and offsets are rounded as in torchvision's Resize and CenterCrop, so the pixels are the same. `direct`
    resizes to a square of `crop` pixels instead, whatever the image's shape.
    """

    resize: int | None = None
    crop: int | None = None
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    direct: bool = False

    def __post_init__(self) -> None:
        if self.interpolation not in ("bilinear", "bicubic"):
            raise ValueError(f"expected interpolation 'bilinear' or 'bicubic', got {self.interpolation!r}")
        if self.direct and self.crop is None:
            raise ValueError("expected crop, the side of the square, with direct=True, got none; add crop=")
        for name, size in (("resize", self.resize), ("crop", self.crop)):
            if size is not None and not 1 <= size <= MAX_SIDE:
                raise ValueError(f"expected sizes from 1 to {MAX_SIDE} pixels, got {name} {size}")

    def __str__(self) -> str:
        if self.direct:
            return f"straight to {self.crop}x{self.crop} ({self.interpolation})"
        steps = [f"short side to {self.resize} ({self.interpolation})"] if self.resize else []
        return ", ".join(steps + ([f"centre {self.crop}"] if self.crop else [])) or "as stored"

    def __call__(self, data: bytes, where: str) -> Tensor:
        """Decode a file and prepare it: uint8 (3, H, W); a broken file is an error with the name `where`."""
        return self.resize_crop(decode(data, where), where)

    def resize_crop(self, picture: Any, where: str = "the image") -> Tensor:
        """Resize and crop a PIL image of mode RGB: uint8 (3, H, W)."""
        wide, high = picture.size
        short = min(wide, high)
        if self.direct and self.crop:
            if (wide, high) != (self.crop, self.crop):
                wide = high = self.crop
                picture = picture.resize((wide, high), getattr(pillow().Resampling, self.interpolation.upper()))
        elif self.resize and short != self.resize:
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


IMAGENET_EVAL = Prepare(resize=256, crop=224)
"""The resize and crop with which the papers evaluate on ImageNet."""
