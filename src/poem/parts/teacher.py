"""Is there a teacher, and what does it say?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from poem.parts.augment import Augment, Jitter
from poem.parts.base import Batch, Part
from poem.parts.fields import Count, Range, Share

Predict = Callable[[Tensor], Tensor]


@dataclass(frozen=True, repr=False)
class MeanTeacher(Part):
    """A slow average of the student, which sets the target and gives the answer.

    Where the source model is unsure of the batch (mean confidence below `unsure`), the target is the mean of the
    teacher's logits over `copies` augmented copies; otherwise its plain logits.

    Paper: CoTTA (Wang et al., CVPR 2022).
    Reference code: qinenergy/cotta (MIT).
    Differs: the augmented passes are spent only where they are used; buffers are not averaged (as published).
    """

    momentum: Share = 0.999
    copies: Count = 32
    unsure: Annotated[float, Range(at_least=0, at_most=2, hint="a confidence is at most 1, and 2 always asks")] = 0.1
    augment: Augment = field(default_factory=Jitter.cotta)

    @property
    def on_host(self) -> bool:
        """Asks augmented copies only where the source is unsure."""
        return True

    def target(self, batch: Batch, teacher: Predict, source: Predict) -> Tensor:
        """The teacher's logits (B, C) for this batch."""
        confidence = source(batch.images).softmax(1).amax(1).mean()
        if not bool(confidence < self.unsure):
            return teacher(batch.images)
        total: Tensor | None = None
        for _ in range(self.copies):
            logits = teacher(self.augment(batch.images, batch.rng))
            total = logits if total is None else total + logits
        assert total is not None
        return total / self.copies

    def follow(self, teacher: Tensor, student: Tensor) -> Tensor:
        """The teacher moved a little towards the student."""
        return torch.lerp(student, teacher, self.momentum)
