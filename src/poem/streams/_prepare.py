"""From a file's bytes to pixels of the model's size: the one resize and crop of everything that reads images."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from poem.streams._images import Unreadable


def pillow() -> Any:
    """PIL's Image module."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("reading image files needs Pillow: pip install 'poem-tta[bench]'") from error
    return Image


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
        if min(self.resize or 1, self.crop or 1) < 1:
            raise ValueError(f"expected sizes >= 1, got {self}")

    def __str__(self) -> str:
        steps = [f"short side to {self.resize} ({self.interpolation})"] if self.resize else []
        return ", ".join(steps + ([f"centre {self.crop}"] if self.crop else [])) or "as stored"

    def __call__(self, data: bytes, where: str) -> Tensor:
        """Decode a file to uint8 (3, H, W); a broken one is an error that names it."""
        image_module, file = pillow(), BytesIO(data)
        try:
            with image_module.open(file) as opened:
                picture = opened.convert("RGB")
        except Exception as error:  # Pillow's plugins raise whatever a broken file makes them meet
            reason = str(error).replace(repr(file), where.replace("\\", "/").rsplit("/", 1)[-1])
            raise Unreadable(f"{where}: {len(data)} bytes that are no whole image ({reason})") from error
        return self.frame(picture, where)

    def frame(self, picture: Any, where: str = "the image") -> Tensor:
        """Resize and crop an RGB image of PIL's: uint8 (3, H, W)."""
        wide, high = picture.size
        short = min(wide, high)
        if self.resize and short != self.resize:
            wide, high = (self.resize if side == short else int(self.resize * side / short) for side in (wide, high))
            picture = picture.resize((wide, high), getattr(pillow().Resampling, self.interpolation.upper()))
        if self.crop:
            if min(wide, high) < self.crop:
                raise ValueError(
                    f"{where}: expected at least {self.crop} pixels a side, got {wide}x{high}; add resize="
                )
            left, top = round((wide - self.crop) / 2), round((high - self.crop) / 2)
            picture = picture.crop((left, top, left + self.crop, top + self.crop))
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


EVAL = Prepare(resize=256, crop=224)
"""As the papers read ImageNet."""
