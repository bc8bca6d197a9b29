"""Learning from a bank of past images instead of the batch in hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from poem.parts.augment import Augment, Jitter
from poem.parts.base import Batch, Memory, Need, Outputs
from poem.parts.fields import Count, NotNegative
from poem.parts.views import View, Views


@dataclass
class _Item:
    """One image of the bank: the row it is stored in, and what its score is made of."""

    row: int
    label: int
    uncertainty: float
    age: int


@dataclass(frozen=True, repr=False)
class MemoryBank(Views):
    """A bank of recent, certain images, balanced over predicted classes; an update whenever `every` images have come.

    Images enter one by one. A class that holds less than its quota (`capacity / C`, a fraction) takes the newcomer,
    in place of an item of the largest classes where the bank is full; a class at its quota replaces one of its own. The
    item with the largest score leaves, if that is larger than the newcomer's: `timeliness / (1 + exp(-age / capacity))
    + certainty * entropy / ln C`. An update learns from augmented copies of all items, each weighted by
    `exp(-a) / (1 + exp(-a))`, `a = age / capacity`, or all alike without `by_age`; the teacher predicts them as they
    are.

    Paper: RoTTA (Yuan et al., CVPR 2023).
    Reference code: BIT-DA/RoTTA (MIT), as in mariodoebler/test-time-adaptation (MIT).
    Differs: a batch makes one update at most, however many multiples of `every` it passes.
    """

    capacity: Count = 64
    every: Count = 64
    timeliness: NotNegative = 1.0
    certainty: NotNegative = 1.0
    augment: Augment = field(default_factory=Jitter.cotta)
    by_age: bool = True

    @property
    def needs(self) -> frozenset[Need]:
        """Images in [0, 1] to augment, and the host, which sorts images into the bank."""
        return frozenset({Need.UNIT_RANGE, Need.HOST})

    @property
    def further_passes(self) -> Mapping[object, tuple[int, int]]:
        """The teacher's, over the bank."""
        return {self: (1, 0)}

    def start(self, outputs: Outputs) -> Memory:
        """A bank that holds no image yet."""
        images = outputs.batch.images
        return self._memory(images.new_zeros(self.capacity, *images.shape[1:]), [], 0)

    def __call__(self, batch: Batch, answer: Tensor, memory: Memory) -> View:
        """Sort the batch into the bank; where an update is due, learn from the bank."""
        images, items = memory["images"].clone(), self._items(memory)
        probs = answer.softmax(1)
        labels, classes = probs.argmax(1).tolist(), probs.shape[1]
        for index, uncertainty in enumerate((-(probs * (probs + 1e-6).log()).sum(1)).tolist()):
            row = self._row_for(items, labels[index], uncertainty, classes)
            if row is not None:
                images[row] = batch.images[index]
                items.append(_Item(row, labels[index], uncertainty, 0))
            for item in items:
                item.age += 1
        before = int(memory["count"])
        new = self._memory(images, items, before + len(labels))
        if before // self.every == (before + len(labels)) // self.every:
            return View(None, memory=new)
        by_class = sorted(items, key=lambda item: item.label)  # stable: each class in the order of arrival
        kept = images[[item.row for item in by_class]]
        age = kept.new_tensor([item.age / self.capacity for item in by_class])
        weights = (-age).exp() / (1 + (-age).exp()) if self.by_age else None
        return View(self.augment(kept, batch.rng), kept, weights, new)

    def _row_for(self, items: list[_Item], predicted: int, uncertainty: float, classes: int) -> int | None:
        """The free row for a newcomer, after removing an item if need be; None where the newcomer is dropped."""
        held = [item.label for item in items]
        if held.count(predicted) < self.capacity / classes:
            if len(items) < self.capacity:
                return min(set(range(self.capacity)) - {item.row for item in items})
            most = max(held.count(each) for each in held)
            leaving = [item for item in items if held.count(item.label) == most]
        else:
            leaving = [item for item in items if item.label == predicted]
        leaving.sort(key=lambda item: item.label)  # stable: class by class, each in the order of arrival
        worst = leaving[0]
        for item in leaving[1:]:
            worst = item if self._score(item, classes) >= self._score(worst, classes) else worst
        newcomer = _Item(-1, predicted, uncertainty, 0)
        if not self._score(worst, classes) > self._score(newcomer, classes):
            return None
        items.remove(worst)
        return worst.row

    def _score(self, item: _Item, classes: int) -> float:
        """Large for old and uncertain items."""
        timely = self.timeliness / (1 + math.exp(-item.age / self.capacity))
        return timely + self.certainty * item.uncertainty / math.log(classes)

    def _items(self, memory: Memory) -> list[_Item]:
        """The items in the order of their arrival."""
        names = ("order", "label", "uncertainty", "age")
        rows = list(zip(range(self.capacity), *(memory[name].tolist() for name in names), strict=True))
        held = sorted((row for row in rows if row[1] >= 0), key=lambda row: row[1])
        return [_Item(row, int(label), uncertainty, int(age)) for row, _, label, uncertainty, age in held]

    def _memory(self, images: Tensor, items: list[_Item], count: int) -> Memory:
        """The bank as tensors, one entry per row."""
        empty = _Item(-1, -1, 0.0, 0)
        by_row = {item.row: (order, item) for order, item in enumerate(items)}
        rows = [by_row.get(row, (-1, empty)) for row in range(self.capacity)]

        def whole(numbers: list[int] | int) -> Tensor:
            return torch.tensor(numbers, device=images.device)

        return {
            "images": images,
            "label": whole([item.label for _, item in rows]),
            "uncertainty": torch.tensor([item.uncertainty for _, item in rows], device=images.device),
            "age": whole([item.age for _, item in rows]),
            "order": whole([order for order, _ in rows]),
            "count": whole(count),
        }
