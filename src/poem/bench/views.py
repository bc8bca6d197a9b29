"""Data sets seen another way: at a model's size, in part, or with a shift already made."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from poem.streams.images import DatasetInfo, Images, ImageSet, Labels
from poem.streams.orders import generator
from poem.streams.shift import Shift
from poem.zoo.predictions import ResizeCrop


class _Over:
    """A data set seen through another one's labels."""

    def __init__(self, data: Images, labels: Labels) -> None:
        self.data, self.labels = data, labels
        self.classes, self.mask = data.classes, data.mask

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Tensor:
        return self.data[index]

    def describe(self) -> dict[str, Any]:
        """What a card says of the data."""
        return self.data.describe()


class Framed(_Over):
    """Images brought to a model's size when they are read."""

    def __init__(self, data: Images, frame: ResizeCrop) -> None:
        super().__init__(data, data.labels)
        self.frame = frame

    def __getitem__(self, index: int) -> Tensor:
        return self.frame(self.data[index])

    def describe(self) -> dict[str, Any]:
        """What a card says of the data."""
        about = self.data.describe()
        before = "" if about["preparation"] == "as stored" else f"{about['preparation']}; then "
        return {**about, "preparation": f"{before}{self.frame}"}


class Part(_Over):
    """The same `n` images of every domain, drawn once, whatever the run's seed."""

    def __init__(self, data: Images, n: int) -> None:
        self.indices = np.sort(generator(n, "limit", str(n)).permutation(len(data))[:n])
        super().__init__(data, data.labels[self.indices])

    def __getitem__(self, index: int) -> Tensor:
        return self.data[int(self.indices[index])]

    def describe(self) -> dict[str, Any]:
        """What a card says of the data."""
        about = self.data.describe()
        return {**about, "n": len(self), "subset": f"{len(self)} of {about['n']}, drawn once; {about['subset']}"}


class Made(ImageSet):
    """A domain that was made on the fly, in memory."""

    def __init__(self, images: Tensor, data: Images, shift: Shift) -> None:
        info = DatasetInfo(
            data=data.describe()["data"], provenance="made", corruption=shift.corruption, severity=shift.severity
        )
        super().__init__(data.labels, info, classes=data.classes, mask=data.mask)
        self.images = images

    def _read(self, index: int) -> Tensor:
        return self.images[index]
