"""How much does each selected sample count?

A weight is an amount (B,), composed with `+`; only those of selected samples are used.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from poem.parts.base import Memory, Outputs, Part, inside, min_max
from poem.parts.destruction import Destroy, Patches, plpd
from poem.parts.fields import Fraction, Positive
from poem.parts.prior import ClassPrior
from poem.parts.score import Score, SoftmaxEntropy


@dataclass(frozen=True, repr=False)
class Weigh(Part):
    """How much each selected sample counts in the loss. Weights carry no gradient."""

    @abstractmethod
    def __call__(self, outputs: Outputs, mask: Tensor, memory: Memory) -> Tensor:
        """Weights (B,); only those inside `mask` are used."""

    def __bool__(self) -> bool:
        """An error: `a and b` would silently be `b`."""
        raise TypeError("join weights with +, as in a + b; 'and' and 'or' would drop one of them")

    def __add__(self, other: Weigh) -> Weigh:
        """The sum of both weights; chains lean to the left."""
        return (self + other.first) + other.second if isinstance(other, Sum) else Sum(self, other)


@dataclass(frozen=True, repr=False)
class Sum(Weigh):
    """Two weights added."""

    first: Weigh
    second: Weigh

    def __call__(self, outputs: Outputs, mask: Tensor, memory: Memory) -> Tensor:
        """The first weights plus the second."""
        return self.first(outputs, mask, inside(memory, "first")) + self.second(outputs, mask, inside(memory, "second"))

    def __repr__(self) -> str:
        return f"{self.first!r} + {self.second!r}"


@dataclass(frozen=True, repr=False)
class Equal(Weigh):
    """Every selected sample counts the same."""

    def __call__(self, outputs: Outputs, mask: Tensor, memory: Memory) -> Tensor:
        """Ones."""
        return torch.ones_like(outputs.probs[:, 0])


@dataclass(frozen=True, repr=False)
class ByEntropy(Weigh):
    """More weight for lower entropy: `exp(fraction * ln C - H)`, at most `most` where that is given.

    Paper: EATA (Niu et al., ICML 2022). The margin here and the one of `EntropyBelow` are separate settings: moving
    this one multiplies every weight alike and so acts as a learning rate.
    """

    fraction: Fraction = 0.4
    score: Score = field(default_factory=SoftmaxEntropy)
    most: Positive | None = None

    def __call__(self, outputs: Outputs, mask: Tensor, memory: Memory) -> Tensor:
        """At least 1 for a sample below the margin, unless `most` is less."""
        score = self.score(outputs, inside(memory, "score")).detach()
        weights = (self.fraction * math.log(outputs.classes) - score).exp()
        return weights if self.most is None else weights.clamp(max=self.most)


@dataclass(frozen=True, repr=False)
class ByPLPD(Weigh):
    """More weight where the prediction depends on shape: `exp(PLPD)`. Paper: DeYO (Lee et al., ICLR 2024)."""

    destroy: Destroy = field(default_factory=Patches)

    @property
    def further_passes(self) -> Mapping[object, tuple[int, int]]:
        """The destroyed images."""
        return {self.destroy: (1, 0)}

    def __call__(self, outputs: Outputs, mask: Tensor, memory: Memory) -> Tensor:
        """Between 1/e and e."""
        return plpd(outputs, mask, self.destroy).exp()


@dataclass(frozen=True, repr=False)
class ByDiversityAndCertainty(ClassPrior, Weigh):
    """More weight for diverse and certain samples: `exp(diversity * certainty / temperature)`, both from 0 to 1.

    Paper: ROID (Marsden et al., WACV 2024).
    """

    temperature: Positive = 1 / 3

    def __call__(self, outputs: Outputs, mask: Tensor, memory: Memory) -> Tensor:
        """Between 1 and exp(1 / temperature)."""
        certainty = min_max(-outputs.entropy.detach())
        return (self.diversity(outputs, memory) * certainty / self.temperature).exp()


@dataclass(frozen=True, repr=False)
class FirstRound(Weigh):
    """These weights in the first round, equal ones after it (the published POEM code)."""

    weigh: Weigh = field(default_factory=Equal)

    def __call__(self, outputs: Outputs, mask: Tensor, memory: Memory) -> Tensor:
        """The inner weights, then ones."""
        return (self.weigh if outputs.round == 0 else Equal())(outputs, mask, inside(memory, "weigh"))
