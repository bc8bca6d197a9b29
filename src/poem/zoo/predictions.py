"""Predictions of a base on a data set: preprocessing, the mask of the data's classes, and the predicted classes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from poem import zoo
from poem._util.files import printable
from poem.streams.datasets.classes import class_indices, is_wnid
from poem.streams.loading.decode import pillow
from poem.streams.loading.prepare import Prepare

if TYPE_CHECKING:
    from poem.streams.images import Images

Predictions = npt.NDArray[np.int64]
log = logging.getLogger("poem")


@dataclass(frozen=True)
class ResizeCrop:
    """Resize the short side to `resize`, crop the centre to `crop`; an image smaller than `crop` is enlarged to it.

    `direct` resizes to a square of `crop` pixels instead. Images of that size are left as they are, and with a `crop`
    of 0 all are.
    """

    resize: int
    crop: int
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    direct: bool = False

    def __str__(self) -> str:
        if not self.crop:
            return "as stored"
        how = (
            f"straight to {self.crop}x{self.crop}"
            if self.direct
            else f"short side to {self.resize}, centre {self.crop}"
        )
        return f"{how} ({self.interpolation}; {self.crop}x{self.crop} left alone, smaller ones enlarged to {self.crop})"

    def __call__(self, image: Tensor) -> Tensor:
        """Return uint8 (3, crop, crop) from (3, H, W)."""
        high, wide = image.shape[1:]
        if not self.crop or (high, wide) == (self.crop, self.crop):
            return image
        picture = pillow().fromarray(image.permute(1, 2, 0).contiguous().numpy())
        if self.direct:
            method = getattr(pillow().Resampling, self.interpolation.upper())
            return Prepare().resize_crop(picture.resize((self.crop, self.crop), method))
        short = self.resize if min(high, wide) >= self.crop else self.crop
        return Prepare(resize=short, crop=self.crop, interpolation=self.interpolation).resize_crop(picture)


@dataclass(frozen=True)
class Preprocessing:
    """The steps between a stored image and the network: resize and crop, then normalisation."""

    resize_crop: ResizeCrop
    mean: zoo.Triple
    std: zoo.Triple

    @classmethod
    def of(cls, base: zoo.Base) -> Preprocessing:
        """The preprocessing of a base."""
        return cls(ResizeCrop(base.resize, base.crop, base.interpolation, base.direct), base.mean, base.std)


def class_mask(data: Images, base: zoo.Base) -> list[int] | None:
    """Indices of the data's classes among the base's logits: the data's mask, or found by wnid; None for all in order.

    Raises if the classes cannot be matched; warns if the data has fewer classes and no names.
    """
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
            f"({printable(', '.join(names[:3]))}, ...); say which logits they are: mask= in Python, "
            "--set dataset.mask=[3,7,...]"
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


def channel_tensor(values: Sequence[float], device: torch.device) -> Tensor:
    """Mean or std per channel as a tensor (1, C, 1, 1)."""
    return torch.tensor(values, device=device).view(1, -1, 1, 1)


@torch.no_grad()
def predict_classes(
    model: nn.Module,
    data: Images,
    order: Iterable[int],
    preprocessing: Preprocessing,
    mask: list[int] | None,
    batch_size: int = 64,
) -> Predictions:
    """Predict the class of each image, as a label of the data; -1 where the logits are NaN or Inf."""
    device = next(model.parameters()).device
    mean, std = (channel_tensor(each, device) for each in (preprocessing.mean, preprocessing.std))
    predictions: list[Tensor] = []

    def predict(pixels: list[Tensor]) -> None:
        x = torch.stack(pixels).to(device).float() / 255
        output = model((x - mean) / std)
        logits: Tensor = output if isinstance(output, Tensor) else output.logits
        logits = logits if mask is None else logits[:, mask]
        predictions.append(torch.where(logits.amax(1).isfinite(), logits.argmax(1), -1).cpu())

    batch: list[Tensor] = []
    for index in order:
        batch.append(preprocessing.resize_crop(data[index]))
        if len(batch) == batch_size:
            predict(batch)
            batch = []
    if batch:
        predict(batch)
    found: Predictions = torch.cat(predictions).numpy()
    if lost := int((found == -1).sum()):
        log.warning("%d answers were not finite (NaN or Inf); they count as wrong", lost)
    return found
