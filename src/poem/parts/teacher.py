"""Is there a teacher, what is its target, and how does it follow the student?"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from poem.parts.augment import Augment, Jitter
from poem.parts.base import Batch, Need, Part
from poem.parts.fields import Count, Range, Share

Predict = Callable[[Tensor], Tensor]


@dataclass(frozen=True, repr=False)
class Teacher(Part):
    """A second set of the adapted tensors, which sets the target of the update and may give the answer."""

    @property
    def own_statistics(self) -> bool:
        """Whether its batch-norm layers keep statistics of their own, apart from the student's."""
        return False

    @property
    def passes(self) -> int:
        """Forward passes that `target` takes, as a rule."""
        return 1

    @abstractmethod
    def target(self, batch: Batch, teacher: Predict, source: Predict) -> Tensor:
        """Logits (B, C) for this batch; `teacher` and `source` predict with the teacher's and the source's tensors."""

    @abstractmethod
    def follow(self, teacher: Tensor, student: Tensor) -> Tensor:
        """The teacher's tensors after a batch, given the student's."""


@dataclass(frozen=True, repr=False)
class MeanTeacher(Teacher):
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
    def needs(self) -> frozenset[Need]:
        """Images in [0, 1], and the host, which decides whether augmented copies are predicted."""
        return frozenset({Need.UNIT_RANGE, Need.HOST})

    @property
    def passes(self) -> int:
        """The source's, and the teacher's: over the copies where the source is often unsure, else over the batch."""
        return 1 + (self.copies if self.unsure > 0.5 else 1)

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
        """The exponential moving average of the student."""
        return torch.lerp(student, teacher, self.momentum)


@dataclass(frozen=True, repr=False)
class SlowTeacher(Teacher):
    """A slow average of the student with statistics of its own, which answers plainly and predicts the target.

    Paper: RoTTA (Yuan et al., CVPR 2023).
    Reference code: BIT-DA/RoTTA (MIT).
    Differs: none.
    """

    momentum: Share = 0.999

    @property
    def own_statistics(self) -> bool:
        """They evolve by the teacher's own forward passes."""
        return True

    def target(self, batch: Batch, teacher: Predict, source: Predict) -> Tensor:
        """The teacher's logits for the batch."""
        return teacher(batch.images)

    def follow(self, teacher: Tensor, student: Tensor) -> Tensor:
        """The exponential moving average of the student."""
        return torch.lerp(student, teacher, self.momentum)
