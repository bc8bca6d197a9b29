"""Is there a teacher, what is its target, and how does it follow the student?"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated

import torch
from torch import Tensor

from poem.parts.augment import Augment, Jitter
from poem.parts.base import Batch, Memory, Need, Outputs, Part, unprepared
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

    @property
    def asks_source(self) -> bool:
        """Whether the source's weights, with statistics of their own, predict what is learnt from: `told["source"]`."""
        return False

    def watch(self, outputs: Outputs, memory: Memory) -> tuple[Memory, Memory]:
        """What it tells the objective beside its target, and its new memory; by default nothing.

        `outputs` are the teacher's own for what is learnt from, where a part such as `MemoryBank` chooses that, with
        features where a part needs them.
        """
        return {}, {}

    def follow_told(self, teacher: Tensor, student: Tensor, told: Memory) -> Tensor:
        """`follow`, knowing what it told in this batch."""
        return self.follow(teacher, student)


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


@dataclass(frozen=True, repr=False)
class WaryTeacher(Teacher):
    """A slow teacher that follows the student less, and holds it back more, the further its features have drifted.

    For each class c in what is learnt from (by its own labels), `m_c` is a running mean of the features, at `rate`; the
    drift is the mean over these classes and all features of `(m_c - s_c)^2 / (v_c + 1e-6)`, with the source's means and
    variances, and the divergence `g = 1 - exp(-drift)`. Then `1 - momentum` is multiplied by `1 - g`. The running means
    are read before the batch moves them.

    Paper: PeTTA (NeurIPS 2024).
    Reference code: hthieu166/petta (no licence).
    Differs: classes with less than two source images do not count.
    """

    momentum: Share = 0.999
    rate: Share = 0.05

    @property
    def own_statistics(self) -> bool:
        """They evolve by the teacher's own forward passes."""
        return True

    def target(self, batch: Batch, teacher: Predict, source: Predict) -> Tensor:
        """The teacher's logits for the batch."""
        return teacher(batch.images)

    @property
    def needs(self) -> frozenset[Need]:
        """Source images, and features of them and of the stream."""
        return frozenset({Need.SOURCE_DATA, Need.FEATURES})

    @property
    def asks_source(self) -> bool:
        """For `FollowSource`."""
        return True

    @property
    def passes(self) -> int:
        """The teacher's over the batch, and the source's over what is learnt from."""
        return 2

    def prepare(self, batches: Iterable[Outputs]) -> Memory:
        """Mean and variance (C, D) of source features by predicted class, and which classes have both (C,)."""
        count = total = square = torch.zeros(0)
        for outputs in batches:
            if outputs.features is None:
                raise ValueError("WaryTeacher() needs a model whose last layer is linear; none was found")
            labels, features = outputs.logits.detach().argmax(1), outputs.features.detach().double()
            member = torch.nn.functional.one_hot(labels, outputs.classes).to(features)
            if not len(count):
                total = square = features.new_zeros(outputs.classes, features.shape[1])
                count = features.new_zeros(outputs.classes)
            count, total = count + member.sum(0), total + member.T @ features
            square = square + member.T @ features.square()
        if not len(count):
            return {}
        mean = total / count.clamp(min=1)[:, None]
        variance = (square - count[:, None] * mean.square()).clamp(min=0) / (count - 1).clamp(min=1)[:, None]
        kind = outputs.logits.dtype
        return {"mean": mean.to(kind), "variance": variance.to(kind), "known": count > 1}

    def start(self, outputs: Outputs) -> Memory:
        """Nothing has drifted."""
        if outputs.features is None:
            raise ValueError("WaryTeacher() needs a model whose last layer is linear; none was found")
        return {"drift": outputs.logits.detach().new_zeros(outputs.classes, outputs.features.shape[1])}

    def watch(self, outputs: Outputs, memory: Memory) -> tuple[Memory, Memory]:
        """The divergence, and the running means' distance from the source's."""
        if "known" not in memory:
            raise unprepared(self)
        assert outputs.features is not None
        features, drift = outputs.features.detach().to(memory["drift"].dtype), memory["drift"]
        member = torch.nn.functional.one_hot(outputs.logits.argmax(1), outputs.classes).to(features)
        count = member.sum(0)
        present = (count > 0) & memory["known"]
        apart = (drift.square() / (memory["variance"] + 1e-6)).mean(1)
        divergence = 1 - (-torch.where(present, apart, 0).sum() / present.sum().clamp(min=1)).exp()
        now = member.T @ features / count.clamp(min=1)[:, None] - memory["mean"]
        moved = torch.where(count[:, None] > 0, drift + self.rate * (now - drift), drift)
        return {"divergence": divergence}, {"drift": moved}

    def follow(self, teacher: Tensor, student: Tensor) -> Tensor:
        """The exponential moving average of the student."""
        return torch.lerp(student, teacher, self.momentum)

    def follow_told(self, teacher: Tensor, student: Tensor, told: Memory) -> Tensor:
        """The same, slower by the divergence."""
        return teacher + (1 - self.momentum) * (1 - told["divergence"]) * (student - teacher)
