"""Which images does an update learn from? By default the batch's own; here, images that a part keeps or makes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from poem.parts.base import Batch, Memory, Part


class View(NamedTuple):
    """What one batch's updates learn from."""

    images: Tensor | None
    """Rows of the forward pass that is learnt from; None makes no update on this batch."""
    teacher_images: Tensor | None = None
    """What the teacher predicts for the target, row by row; None: the target is its answer for the batch."""
    weights: Tensor | None = None
    """(rows,), multiplied with the recipe's weights."""
    memory: Memory = {}  # noqa: RUF012 - never written to
    """New values of the part's memory, kept when the batch is over."""


@dataclass(frozen=True, repr=False)
class Views(Part):
    """Chooses what to learn from, from the batch, the teacher's answer to it, and memory."""

    @abstractmethod
    def __call__(self, batch: Batch, answer: Tensor, memory: Memory) -> View:
        """The view of this batch; `answer` is the teacher's logits (B, C), or the network's without a teacher."""
