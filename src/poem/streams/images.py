"""What a data set is to the rest of the library: lengths and labels at once, pixels one by one."""

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
    """A data set. Everything but pixels is known at once; pixels are read when asked for."""

    @property
    def labels(self) -> Labels:
        """(n,) class of every image."""
        ...

    @property
    def classes(self) -> tuple[str, ...] | None:
        """Names of the classes, where the data names them."""
        ...

    @property
    def mask(self) -> tuple[int, ...] | None:
        """Which of a 1000-class model's logits these classes are; None for all, in order."""
        ...

    def __len__(self) -> int:
        """Number of images."""
        ...

    def __getitem__(self, index: int) -> Tensor:
        """One image: uint8 (3, H, W)."""
        ...

    def describe(self) -> dict[str, Any]:
        """What a card says of the data."""
        ...


class Unreadable(ValueError):
    """An image whose bytes are there but do not decode; the message names it."""


@dataclass(frozen=True, kw_only=True)
class About:
    """What is known about a data set beside its pixels."""

    data: str
    provenance: str
    subset: str = "all"
    corruption: str = "clean"
    severity: int = 0
    preparation: str = "as stored"


class ImageSet(ABC):
    """The common half of every data set here; a kind of storage adds `_read` and `where`."""

    def __init__(
        self,
        labels: Labels,
        about: About,
        *,
        classes: tuple[str, ...] | None = None,
        mask: tuple[int, ...] | None = None,
    ) -> None:
        self.labels = np.asarray(labels, np.int64)
        self.about, self.classes, self.mask = about, classes, mask

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Tensor:
        at = int(index)
        if not 0 <= at < len(self):
            raise IndexError(f"expected an index from 0 to {len(self) - 1}, got {at}")
        return self._read(at)

    def __repr__(self) -> str:
        about = self.about
        shift = "" if about.corruption == "clean" else f", {about.corruption} {about.severity}"
        return f"<{about.data}{shift}: {len(self)} images, {self.class_count} classes>"

    @property
    def class_count(self) -> int:
        """How many classes there are."""
        return len(self.classes) if self.classes is not None else int(self.labels.max()) + 1

    def where(self, index: int) -> str:
        """The image's name, for messages."""
        return f"{self.about.data}[{index}]"

    def describe(self) -> dict[str, Any]:
        """What a card says of the data."""
        about = self.about
        classes = f"{self.class_count}" + ("" if self.mask is None else " of 1000")
        return {
            "data": about.data,
            "subset": about.subset,
            "n": len(self),
            "classes": classes,
            "corruption": about.corruption,
            "severity": about.severity,
            "provenance": about.provenance,
            "preparation": about.preparation,
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
        mask: Which of a model's logits the classes are.
        name: What a card calls it.
        provenance: Where it came from, in words.
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
        super().__init__(numbers.cpu().numpy(), About(data=name, provenance=provenance), classes=classes, mask=mask)
        self.images = pixels

    def _read(self, index: int) -> Tensor:
        image = self.images[index].detach().cpu()
        if image.is_floating_point():
            if not 0 <= float(image.min()) <= float(image.max()) <= 1:
                raise Unreadable(f"{self.where(index)}: expected values in [0, 1]; give images before normalisation")
            image = (image * 255).round().to(torch.uint8)
        return image.expand(3, -1, -1).contiguous()
