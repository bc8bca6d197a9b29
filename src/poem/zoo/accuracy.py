"""What a base answers on a data set: the image brought to the model's size, normalised, and the classes compared."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from poem import zoo
from poem.streams.datasets.classes import class_indices, is_wnid
from poem.streams.loading.decode import pillow
from poem.streams.loading.prepare import Prepare

if TYPE_CHECKING:
    from poem.streams.images import Images

Guesses = npt.NDArray[np.int64]
log = logging.getLogger("poem")


@dataclass(frozen=True)
class Frame:
    """From a stored image to the model's size: short side to `resize`, centre `crop`; smaller images are enlarged."""

    resize: int
    crop: int
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    direct: bool = False

    def __str__(self) -> str:
        how = (
            f"straight to {self.crop}x{self.crop}"
            if self.direct
            else f"short side to {self.resize}, centre {self.crop}"
        )
        return f"{how} ({self.interpolation}; {self.crop}x{self.crop} left alone, smaller ones enlarged to {self.crop})"

    def __call__(self, image: Tensor) -> Tensor:
        """Pixels (3, crop, crop) as uint8, from (3, H, W)."""
        high, wide = image.shape[1:]
        if (high, wide) == (self.crop, self.crop):
            return image
        picture = pillow().fromarray(image.permute(1, 2, 0).contiguous().numpy())
        if self.direct:
            method = getattr(pillow().Resampling, self.interpolation.upper())
            return Prepare().resize_crop(picture.resize((self.crop, self.crop), method))
        short = self.resize if min(high, wide) >= self.crop else self.crop
        return Prepare(resize=short, crop=self.crop, interpolation=self.interpolation).resize_crop(picture)


@dataclass(frozen=True)
class Setting:
    """What stands between a stored image and the network."""

    frame: Frame
    mean: zoo.Triple
    std: zoo.Triple

    @classmethod
    def of(cls, base: zoo.Base) -> Setting:
        """A base's own."""
        return cls(Frame(base.resize, base.crop, base.interpolation), base.mean, base.std)


def mask_of(data: Images, base: zoo.Base) -> list[int] | None:
    """Which of the model's logits the data's classes are; folders named by wnid know it themselves."""
    mask = None if data.mask is None else list(data.mask)
    names = data.classes or ()
    count = len(names) or int(data.labels.max()) + 1
    if mask is None and base.classes == 1000 and names and all(map(is_wnid, names)):
        mask = list(class_indices(names))
    if mask is None and count > base.classes:
        raise ValueError(f"expected at most {base.classes} classes for {base.name}, got data with {count}")
    if mask is None and names and count != base.classes:
        raise ValueError(
            f"expected {base.classes} class folders for {base.name}, or folders named by wnid, got {count} "
            f"({', '.join(names[:3])}, ...); say which logits they are: mask= in Python, --set dataset.mask=[3,7,...]"
        )
    if mask is None and count < base.classes:
        log.warning(
            "%s has labels 0 to %d and %s has %d classes: answers may fall on classes that never come; say which they "
            "are: mask= in Python, --set dataset.mask=[3,7,...]",
            data.describe()["data"], count - 1, base.name, base.classes,
        )  # fmt: skip
    if mask is not None and max(mask) >= base.classes:
        raise ValueError(f"expected a base with 1000 classes for {data.describe()['data']}, got {base.name}")
    return mask


@torch.no_grad()
def answers(
    model: nn.Module, data: Images, order: Iterable[int], setting: Setting, mask: list[int] | None, batch_size: int = 64
) -> Guesses:
    """The class that the model names for each image, in the data's own numbering; -1 where it answers NaN or Inf."""
    place = next(model.parameters()).device
    mean, std = (torch.tensor(v, device=place).view(1, -1, 1, 1) for v in (setting.mean, setting.std))
    guesses: list[Tensor] = []

    def ask(pixels: list[Tensor]) -> None:
        x = torch.stack(pixels).to(place).float() / 255
        logits = model((x - mean) / std)
        logits = logits if mask is None else logits[:, mask]
        guesses.append(torch.where(logits.amax(1).isfinite(), logits.argmax(1), -1).cpu())

    waiting: list[Tensor] = []
    for index in order:
        waiting.append(setting.frame(data[index]))
        if len(waiting) == batch_size:
            ask(waiting)
            waiting = []
    if waiting:
        ask(waiting)
    found: Guesses = torch.cat(guesses).numpy()
    if lost := int((found == -1).sum()):
        log.warning("%d answers were not finite (NaN or Inf); they count as wrong", lost)
    return found
