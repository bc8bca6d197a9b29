"""Which samples are selected?

A selection is a mask (B,), composed with `&`. NaN is never below or above anything, so a sample whose output is not
finite is never selected.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from poem.parts.base import Memory, Outcome, Outputs, Part, inside, masked_mean
from poem.parts.destruction import Destroy, Patches, plpd
from poem.parts.fields import Count, Fraction, Range, Share
from poem.parts.prior import ClassPrior
from poem.parts.score import Score, SoftmaxEntropy


@dataclass(frozen=True, repr=False)
class Select(Part):
    """Selects samples for the update, among those that earlier filters left."""

    @property
    def margin(self) -> float | None:
        """The entropy threshold as a fraction of ln C, where there is one."""
        return None

    def with_margin(self, fraction: float) -> Select:
        """The same selection with another entropy threshold."""
        return self

    def selects_almost_none(self, classes: int) -> bool:
        """Whether the setting selects almost no sample where there are only so many classes."""
        return False

    @abstractmethod
    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        """Mask (B,), never True outside `among`."""

    def __bool__(self) -> bool:
        """An error: `a and b` would silently be `b`."""
        raise TypeError("join filters with &, as in a & b; 'and' and 'or' would drop one of them")

    def __and__(self, other: Select) -> Select:
        """First this filter, then the other on what is left; chains lean to the left."""
        return (self & other.first) & other.second if isinstance(other, Both) else Both(self, other)


@dataclass(frozen=True, repr=False)
class Both(Select):
    """Two filters in a row: the second sees only what the first kept."""

    first: Select
    second: Select

    @property
    def margin(self) -> float | None:
        """The first one found."""
        return self.first.margin if self.first.margin is not None else self.second.margin

    def with_margin(self, fraction: float) -> Select:
        """Both with the new threshold."""
        return Both(self.first.with_margin(fraction), self.second.with_margin(fraction))

    def selects_almost_none(self, classes: int) -> bool:
        """Whether either filter does."""
        return self.first.selects_almost_none(classes) or self.second.selects_almost_none(classes)

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        """The second filter on what the first kept."""
        kept = among & self.first(outputs, among, inside(memory, "first"))
        return kept & self.second(outputs, kept, inside(memory, "second"))

    def __repr__(self) -> str:
        return f"{self.first!r} & {self.second!r}"


@dataclass(frozen=True, repr=False)
class Everyone(Select):
    """Every sample is selected (Tent)."""

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        """All that earlier filters left."""
        return among


@dataclass(frozen=True, repr=False)
class AfterImages(Select):
    """Every sample, from the batch on with which `images` have come; none before.

    Paper: protected online entropy matching (Bar, Shaer, Romano, NeurIPS 2024), whose code waits for 100.
    """

    images: Count = 100

    def start(self, outputs: Outputs) -> Memory:
        """No image has come."""
        return {"seen": outputs.logits.detach().new_zeros((), dtype=torch.long)}

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        """All that earlier filters left, once there were enough; the batch in hand counts."""
        return among & (memory["seen"] + len(among) >= self.images)

    def remember(self, outcome: Outcome, memory: Memory) -> Memory:
        """The images of this batch too."""
        return {"seen": memory["seen"] + len(outcome.first.logits)}


@dataclass(frozen=True, repr=False)
class EntropyBelow(Select):
    """Samples whose entropy is strictly below `fraction * ln C`; `first` is the first round's fraction, if another.

    `score` says which entropy.

    Paper: EATA (Niu et al., ICML 2022), equation for the reliable set; POEM, Eq. 2.
    """

    fraction: Fraction = 0.4
    first: Fraction | None = None
    score: Score = field(default_factory=SoftmaxEntropy)

    @property
    def margin(self) -> float | None:
        """The fraction."""
        return self.fraction

    def with_margin(self, fraction: float) -> Select:
        """Another fraction, in every round."""
        return EntropyBelow(fraction, score=self.score)

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        """Low entropy, strictly."""
        fraction = self.fraction if self.first is None or outputs.round > 0 else self.first
        return among & (self.score(outputs, inside(memory, "score")).detach() < fraction * math.log(outputs.classes))


@dataclass(frozen=True, repr=False)
class NotRedundant(Select):
    """Samples unlike those selected before: cosine to the average prediction of these below `cosine`.

    The average has momentum 0.9 and is taken over selected samples; until there is one, no sample is redundant.

    Paper: EATA (Niu et al., ICML 2022).
    Differs: the average is cleared by every reset; the published code keeps it.
    """

    cosine: Annotated[float, Range(at_least=0, at_most=2, hint="a cosine is at most 1, and 2 keeps everyone")] = 0.05
    momentum: Share = 0.9

    def selects_almost_none(self, classes: int) -> bool:
        """A cosine this small needs hundreds of classes: with ten, every certain prediction is near the average."""
        return self.cosine <= 0.05 and classes <= 100

    def start(self, outputs: Outputs) -> Memory:
        """No average yet."""
        zeros = outputs.probs.new_zeros(outputs.classes)
        return {"mean": zeros, "seen": torch.zeros_like(zeros[0], dtype=torch.bool)}

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        """Far enough from the average."""
        cosine = F.cosine_similarity(memory["mean"][None], outputs.probs, dim=1)
        sound = ~cosine.isnan()
        return among & torch.where(memory["seen"], cosine.abs() < self.cosine, sound)

    def remember(self, outcome: Outcome, memory: Memory) -> Memory:
        """The average moved towards the samples of the last update; unchanged where none was selected."""
        mean, seen = memory["mean"], memory["seen"]

        def moved(outputs: Outputs, mask: Tensor) -> Memory:
            now, some = masked_mean(outputs.probs, mask), mask.any()
            average = torch.where(seen, self.momentum * mean + (1 - self.momentum) * now, now)
            return {"mean": torch.where(some, average, mean), "seen": seen | some}

        return outcome.after_updates(moved, memory)


@dataclass(frozen=True, repr=False)
class PLPDAbove(Select):
    """Samples whose prediction leans on shape: destroying it costs the predicted class more than `drop` in probability.

    PLPD is `p(x)[c] - p(destroyed x)[c]` with `c` the predicted class. The second pass has no gradient and, on batch
    norm, the statistics of the samples in `among` alone. `ByPLPD` reuses it where both destroy alike.

    Paper: DeYO (Lee et al., ICLR 2024).
    Differs: one permutation per image per batch, reused by every forward pass; a new one would change the set.
    """

    drop: Annotated[float, Range(at_least=-2, at_most=2, hint="a probability; -2 keeps everyone")] = 0.2
    destroy: Destroy = field(default_factory=Patches)

    @property
    def further_passes(self) -> Mapping[object, tuple[int, int]]:
        """The destroyed images."""
        return {self.destroy: (1, 0)}

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        """A drop strictly above the threshold."""
        return among & (plpd(outputs, among, self.destroy) > self.drop)


@dataclass(frozen=True, repr=False)
class Diverse(ClassPrior, Select):
    """Samples at least as unlike the stream's mean prediction as the batch is on average.

    Paper: ROID (Marsden et al., WACV 2024).
    Differs: where all samples are equally diverse, nobody is left out; the published code divides by zero.
    """

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        """Diversity not below its mean."""
        diversity = self.diversity(outputs, memory)
        return among & (diversity >= diversity.mean())
