"""The interface of data sets, `Images`; its base class, `ImageSet`; and images in memory, `Tensors`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Labels = NDArray[np.int64]


class Images(Protocol):
    """A data set: labels and class names are in memory, pixels are read when indexed."""

    @property
    def labels(self) -> Labels:
        """(n,) label of every image."""
        ...

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes, or None."""
        ...

    @property
    def mask(self) -> tuple[int, ...] | None:
        """Indices of these classes among the logits of a 1000-class model; None for all, in order."""
        ...

    def __len__(self) -> int:
        """Number of images."""
        ...

    def __getitem__(self, index: int) -> Tensor:
        """Read one image: uint8 (3, H, W)."""
        ...

    def describe(self) -> dict[str, Any]:
        """The data set's fields of a protocol card."""
        ...


class Unreadable(ValueError):
    """An image whose bytes exist but cannot be decoded; the message names it."""


def size_text(image: Tensor) -> str:
    """Width x height of an image (3, H, W), such as "64x48"."""
    return f"{image.shape[2]}x{image.shape[1]}"


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """Description of a data set, for its protocol card."""

    data: str
    provenance: str
    subset: str = "all"
    corruption: str = "clean"
    severity: int = 0
    preparation: str = "as stored"


class ImageSet(ABC):
    """Base class of data sets: labels, classes and description; subclasses implement `_read` and `where`."""

    def __init__(
        self,
        labels: Labels,
        info: DatasetInfo,
        *,
        classes: tuple[str, ...] | None = None,
        mask: tuple[int, ...] | None = None,
    ) -> None:
        self.labels = np.asarray(labels, np.int64)
        self.info, self.classes, self.mask = info, classes, mask

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Tensor:
        at = int(index)
        if not 0 <= at < len(self):
            raise IndexError(f"expected an index from 0 to {len(self) - 1}, got {at}")
        return self._read(at)

    def __repr__(self) -> str:
        info = self.info
        shift = "" if info.corruption == "clean" else f", {info.corruption} {info.severity}"
        return f"<{info.data}{shift}: {len(self)} images, {self.class_count} classes>"

    @property
    def class_count(self) -> int:
        """Number of classes."""
        return len(self.classes) if self.classes is not None else int(self.labels.max()) + 1

    def where(self, index: int) -> str:
        """The image's name, for messages."""
        return f"{self.info.data}[{index}]"

    def describe(self) -> dict[str, Any]:
        """The data set's fields of a protocol card."""
        info = self.info
        classes = f"{self.class_count}" + ("" if self.mask is None else " of 1000")
        return {
            "data": info.data,
            "subset": info.subset,
            "n": len(self),
            "classes": classes,
            "corruption": info.corruption,
            "severity": info.severity,
            "provenance": info.provenance,
            "preparation": info.preparation,
        }

    @abstractmethod
    def _read(self, index: int) -> Tensor:
        """The pixels of one image, uint8 (3, H, W)."""


class Tensors(ImageSet):
    """Images in memory: uint8 or float in [0, 1], (n, 3, H, W) or grey (n, 1, H, W).

    Args:
        images: A tensor or an array.
        labels: (n,) integers.
        classes: Names, in order of the labels.
        mask: Indices of the classes among a model's logits.
        name: Its name on a protocol card.
        provenance: Its origin, in words.
    """

    def __init__(
        self,
        images: Tensor | NDArray[Any],
        labels: Tensor | NDArray[Any] | list[int],
        *,
        classes: tuple[str, ...] | None = None,
        mask: tuple[int, ...] | None = None,
        name: str = "tensors",
        provenance: str = "given in memory",
    ) -> None:
        pixels = torch.as_tensor(images)
        numbers = torch.as_tensor(labels)
        if pixels.dim() != 4 or pixels.shape[1] not in (1, 3) or len(pixels) == 0:
            raise ValueError(f"expected images (n, 3, H, W) or (n, 1, H, W), got {tuple(pixels.shape)}; NHWC: permute")
        if not (pixels.dtype == torch.uint8 or pixels.is_floating_point()):
            raise ValueError(f"expected images of uint8, or float in [0, 1], got {pixels.dtype}")
        if numbers.shape != (len(pixels),) or numbers.is_floating_point() or int(numbers.min()) < 0:
            raise ValueError(f"expected {len(pixels)} integer labels >= 0, got {numbers.dtype} {tuple(numbers.shape)}")
        super().__init__(
            numbers.cpu().numpy(), DatasetInfo(data=name, provenance=provenance), classes=classes, mask=mask
        )
        self.images = pixels

    def _read(self, index: int) -> Tensor:
        return to_pixels(self.images[index], self.where(index))


def to_pixels(image: Tensor, where: str) -> Tensor:
    """An image (3, H, W) or (1, H, W), uint8 or float in [0, 1], as uint8 (3, H, W)."""
    image = image.detach().cpu()
    if image.is_floating_point():
        if not 0 <= float(image.min()) <= float(image.max()) <= 1:
            raise Unreadable(f"{where}: expected values in [0, 1]; give images before normalisation")
        image = (image * 255).round().to(torch.uint8)
    if image.dtype != torch.uint8:
        raise Unreadable(f"{where}: expected an image of uint8, or float in [0, 1], got {image.dtype}")
    return image.expand(3, -1, -1).contiguous()
