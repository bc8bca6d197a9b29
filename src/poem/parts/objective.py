"""What do the chosen samples minimise?

An objective turns a lesson into one number; objectives add up with `+`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Annotated, Literal

from torch import Tensor

from poem.parts.augment import Augment, Jitter
from poem.parts.base import Lesson, Part, entropy
from poem.parts.fields import NotNegative, Positive, Range


@dataclass(frozen=True, repr=False)
class Objective(Part):
    """One number to make smaller."""

    @property
    def augments(self) -> bool:
        """Whether it augments images, and so needs them in [0, 1]."""
        return False

    @property
    def anchored(self) -> bool:
        """Whether it asks for source data."""
        return False

    @property
    def apart(self) -> bool:
        """Whether it is a sum over samples, each of which needs only its own prediction."""
        return False

    @abstractmethod
    def __call__(self, lesson: Lesson) -> Tensor:
        """A scalar with a gradient."""

    def __bool__(self) -> bool:
        """An error: `a and b` would silently be `b`."""
        raise TypeError("join objectives with +, as in a + b; 'and' and 'or' would drop one of them")

    def __add__(self, other: Objective) -> Objective:
        """The sum of both; chains lean to the left."""
        return (self + other.first) + other.second if isinstance(other, Total) else Total(self, other)


@dataclass(frozen=True, repr=False)
class Total(Objective):
    """Two objectives added."""

    first: Objective
    second: Objective

    @property
    def augments(self) -> bool:
        """Whether either does."""
        return self.first.augments or self.second.augments

    @property
    def anchored(self) -> bool:
        """Whether either does."""
        return self.first.anchored or self.second.anchored

    @property
    def apart(self) -> bool:
        """Whether both are."""
        return self.first.apart and self.second.apart

    def __call__(self, lesson: Lesson) -> Tensor:
        """One plus the other."""
        return self.first(lesson) + self.second(lesson)

    def __repr__(self) -> str:
        return f"{self.first!r} + {self.second!r}"


@dataclass(frozen=True, repr=False)
class Entropy(Objective):
    """Mean entropy of the prediction over those who teach; with a branch, of the combined one.

    Paper: Tent (Wang et al., ICLR 2021); POEM, Eq. 3.
    """

    @property
    def apart(self) -> bool:
        """Yes."""
        return True

    def __call__(self, lesson: Lesson) -> Tensor:
        """Weighted mean over the selection, not over the batch."""
        return lesson.mean(lesson.look.entropy)


@dataclass(frozen=True, repr=False)
class CrossEntropy(Objective):
    """Cross-entropy of the last head to hard pseudo-labels: the `"combined"` prediction's, or its `"own"`.

    Paper: POEM, Eq. 6.
    Differs: the published code applies a log-likelihood loss to probabilities.
    """

    labels: Literal["combined", "own"] = "combined"

    @property
    def apart(self) -> bool:
        """Yes."""
        return True

    def __call__(self, lesson: Lesson) -> Tensor:
        """Mean over the selection."""
        head = lesson.look.heads[-1]
        label = (lesson.look.logits if self.labels == "combined" else head).detach().argmax(1, keepdim=True)
        return lesson.mean(-head.log_softmax(1).gather(1, label)[:, 0])


@dataclass(frozen=True, repr=False)
class FisherAnchor(Objective):
    """Pulls each number back to its source value, in proportion to its importance there: `weight * sum F (t - t0)^2`.

    Without source data there is no importance, and the anchor is zero (EATA then runs as ETA).

    Paper: EATA (Niu et al., ICML 2022).
    """

    weight: NotNegative = 2000.0

    @property
    def anchored(self) -> bool:
        """Yes."""
        return True

    @property
    def apart(self) -> bool:
        """Yes."""
        return True

    def __call__(self, lesson: Lesson) -> Tensor:
        """A penalty on the parameters; no average, no half."""
        if lesson.fisher is None:
            return lesson.theta.new_zeros(())
        return self.weight * (lesson.fisher * (lesson.theta - lesson.source).square()).sum()


@dataclass(frozen=True, repr=False)
class SoftLikelihoodRatio(Objective):
    """`-sum_c p_c ln(p_c / (1 - p_c))` with probabilities cut at `clip`: a gradient that does not fade when sure.

    Paper: ROID (Marsden et al., WACV 2024). The sum is divided by the configured batch size.
    """

    clip: Annotated[float, Range(above=0, at_most=1)] = 0.99
    eps: Positive = 1e-5

    @property
    def apart(self) -> bool:
        """Yes."""
        return True

    def __call__(self, lesson: Lesson) -> Tensor:
        """Summed over the selection, divided by the configured batch size."""
        probs = lesson.look.log_probs.exp().clamp(0, self.clip)
        return lesson.mean(-(probs * (probs / (1 - probs) + self.eps).log()).sum(1), over="batch")


@dataclass(frozen=True, repr=False)
class Consistency(Objective):
    """Symmetric cross-entropy between the prediction and that of an augmented copy, gradients through both.

    Paper: ROID (Marsden et al., WACV 2024). One augmentation per batch; on batch norm the copy's statistics are those
    of the selected samples. The sum is divided by the configured batch size.
    """

    augment: Augment = field(default_factory=Jitter)

    @property
    def augments(self) -> bool:
        """Yes."""
        return True

    def __call__(self, lesson: Lesson) -> Tensor:
        """Half each way."""
        batch = lesson.look.batch
        augmented = batch.once(self, lambda rng: self.augment(batch.images, rng))
        other = lesson.look.ask(augmented, among=lesson.mask, grad=True).log_softmax(1)
        mine = lesson.look.log_probs
        return lesson.mean(-0.5 * (mine.exp() * other + other.exp() * mine).sum(1), over="batch")


@dataclass(frozen=True, repr=False)
class MarginalEntropy(Objective):
    """Entropy of the mean prediction over all views of one image. Paper: MEMO (Zhang et al., NeurIPS 2022)."""

    def __call__(self, lesson: Lesson) -> Tensor:
        """In log space: the mean of probabilities is a logsumexp."""
        log_probs = lesson.look.log_probs
        return entropy(log_probs.logsumexp(0) - math.log(len(log_probs)))


@dataclass(frozen=True, repr=False)
class FollowTeacher(Objective):
    """Cross-entropy to the teacher's prediction; `symmetric` adds the other direction, half each.

    Paper: CoTTA (Wang et al., CVPR 2022): one way on CIFAR, symmetric on ImageNet.
    """

    symmetric: bool = True

    def __call__(self, lesson: Lesson) -> Tensor:
        """Mean over those who teach; the teacher gets no gradient."""
        if lesson.target is None:
            raise ValueError("FollowTeacher() needs a teacher; add teacher=MeanTeacher() to the recipe")
        teacher, student = lesson.target.log_softmax(1), lesson.look.log_probs
        losses = -(teacher.exp() * student).sum(1)
        if self.symmetric:
            losses = 0.5 * losses - 0.5 * (student.exp() * teacher).sum(1)
        return lesson.mean(losses)
