"""Which samples teach, and how much does each count?

A selection is a mask (composed with `&`), a weight an amount (composed with `+`). Both keep the batch whole: shape
`(B,)`, False or zero means "does not teach". NaN is never below or above anything, so a broken sample never teaches.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from poem.parts.base import Look, Memory, Part, masked_mean, min_max
from poem.parts.fields import Count, Positive, Range, Share

_OF_LN_C = "it is a fraction of ln C, the largest entropy that C classes can have: 40 % of it is EntropyBelow(0.4)"
Fraction = Annotated[float, Range(at_least=0, at_most=10, hint=_OF_LN_C)]


@dataclass(frozen=True, repr=False)
class Select(Part):
    """Says who teaches, among those still in question."""

    @property
    def passes(self) -> bool:
        """Whether asking runs the network once more."""
        return False

    @property
    def margin(self) -> float | None:
        """The entropy threshold as a fraction of ln C, where there is one."""
        return None

    def with_margin(self, fraction: float) -> Select:
        """The same selection with another entropy threshold."""
        return self

    def few(self, classes: int) -> bool:
        """Whether so few classes leave almost nobody."""
        return False

    def start(self, look: Look) -> Memory:
        """What is remembered before the first batch."""
        return {}

    @abstractmethod
    def __call__(self, look: Look, among: Tensor, memory: Memory) -> Tensor:
        """Mask (B,), never True outside `among`."""

    def remember(self, look: Look, mask: Tensor, memory: Memory) -> Memory:
        """New memory, given the look and the mask that taught last."""
        return {}

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
    def passes(self) -> bool:
        """Whether either runs the network."""
        return self.first.passes or self.second.passes

    @property
    def margin(self) -> float | None:
        """The first one found."""
        return self.first.margin if self.first.margin is not None else self.second.margin

    def with_margin(self, fraction: float) -> Select:
        """Both with the new threshold."""
        return Both(self.first.with_margin(fraction), self.second.with_margin(fraction))

    def few(self, classes: int) -> bool:
        """Whether either says so."""
        return self.first.few(classes) or self.second.few(classes)

    def start(self, look: Look) -> Memory:
        """Both memories."""
        return {**self.first.start(look), **self.second.start(look)}

    def __call__(self, look: Look, among: Tensor, memory: Memory) -> Tensor:
        """The second filter on what the first kept."""
        kept = among & self.first(look, among, memory)
        return kept & self.second(look, kept, memory)

    def remember(self, look: Look, mask: Tensor, memory: Memory) -> Memory:
        """Both new memories."""
        return {**self.first.remember(look, mask, memory), **self.second.remember(look, mask, memory)}

    def __repr__(self) -> str:
        return f"{self.first!r} & {self.second!r}"


@dataclass(frozen=True, repr=False)
class Everyone(Select):
    """Every sample teaches (Tent)."""

    def __call__(self, look: Look, among: Tensor, memory: Memory) -> Tensor:
        """All of those in question."""
        return among


@dataclass(frozen=True, repr=False)
class EntropyBelow(Select):
    """Samples whose entropy is strictly below `fraction * ln C`; `first` is the first round's fraction, if another.

    Paper: EATA (Niu et al., ICML 2022), equation for the reliable set; POEM, Eq. 2.
    """

    fraction: Fraction = 0.4
    first: Fraction | None = None

    @property
    def margin(self) -> float | None:
        """The fraction."""
        return self.fraction

    def with_margin(self, fraction: float) -> Select:
        """Another fraction, in every round."""
        return EntropyBelow(fraction)

    def __call__(self, look: Look, among: Tensor, memory: Memory) -> Tensor:
        """Low entropy, strictly."""
        fraction = self.fraction if self.first is None or look.round > 0 else self.first
        return among & (look.entropy.detach() < fraction * math.log(look.classes))


@dataclass(frozen=True, repr=False)
class NotRedundant(Select):
    """Samples unlike what has been taught: cosine to the average taught prediction below `cosine`.

    The average has momentum 0.9 and is taken over the samples that taught; until there is one, nobody is redundant.

    Paper: EATA (Niu et al., ICML 2022).
    Differs: the average is cleared by every reset; the published code keeps it.
    """

    cosine: Annotated[float, Range(at_least=0, at_most=2, hint="a cosine is at most 1, and 2 keeps everyone")] = 0.05
    momentum: Share = 0.9

    def few(self, classes: int) -> bool:
        """A cosine this small needs hundreds of classes: with ten, every sure prediction is near the average."""
        return self.cosine <= 0.05 and classes <= 100

    def start(self, look: Look) -> Memory:
        """No average yet."""
        nothing = look.probs.new_zeros(look.classes)
        return {"redundancy.mean": nothing, "redundancy.seen": torch.zeros_like(nothing[0], dtype=torch.bool)}

    def __call__(self, look: Look, among: Tensor, memory: Memory) -> Tensor:
        """Far enough from the average."""
        cosine = F.cosine_similarity(memory["redundancy.mean"][None], look.probs, dim=1)
        sound = ~cosine.isnan()
        return among & torch.where(memory["redundancy.seen"], cosine.abs() < self.cosine, sound)

    def remember(self, look: Look, mask: Tensor, memory: Memory) -> Memory:
        """The average moved towards those who taught; unchanged if nobody did."""
        mean, seen, any_taught = memory["redundancy.mean"], memory["redundancy.seen"], mask.any()
        taught = masked_mean(look.probs, mask)
        moved = torch.where(seen, self.momentum * mean + (1 - self.momentum) * taught, taught)
        return {"redundancy.mean": torch.where(any_taught, moved, mean), "redundancy.seen": seen | any_taught}


@dataclass(frozen=True, repr=False)
class Patches(Part):
    """Cuts each image into `grid` x `grid` tiles and shuffles them, each image in its own way."""

    grid: Count = 4

    @property
    def edits_images(self) -> Part | None:
        """It does."""
        return self

    def __call__(self, look: Look) -> Tensor:
        """Shuffled images; the permutations are drawn once per batch."""
        images, grid = look.batch.images, self.grid
        count, _, high, wide = images.shape
        order = look.batch.once(self, lambda rng: torch.rand(count, grid * grid, generator=rng).argsort(dim=1))
        fitted = _resize(images, high // grid * grid, wide // grid * grid)
        tiles = F.unfold(fitted, (fitted.shape[2] // grid, fitted.shape[3] // grid), stride=_tile(fitted, grid))
        index = order[:, None, :].expand(-1, tiles.shape[1], -1)
        shuffled = F.fold(tiles.gather(2, index), fitted.shape[2:], _tile(fitted, grid), stride=_tile(fitted, grid))
        return _resize(shuffled, high, wide)


@dataclass(frozen=True, repr=False)
class Pixels(Part):
    """Shuffles all pixels, in one way for the whole batch."""

    @property
    def edits_images(self) -> Part | None:
        """It does."""
        return self

    def __call__(self, look: Look) -> Tensor:
        """Shuffled images."""
        images = look.batch.images
        places = images.shape[2] * images.shape[3]
        order = look.batch.once(self, lambda rng: torch.rand(places, generator=rng).argsort())
        return images.flatten(2)[:, :, order].view_as(images)


@dataclass(frozen=True, repr=False)
class Occlusion(Part):
    """Covers the middle of each image (half its height and width) with the image's mean colour."""

    @property
    def edits_images(self) -> Part | None:
        """It does."""
        return self

    def __call__(self, look: Look) -> Tensor:
        """Images with a covered middle."""
        images = look.batch.images.clone()
        high, wide = images.shape[2:]
        images[:, :, high // 4 : high // 4 + high // 2, wide // 4 : wide // 4 + wide // 2] = images.mean(
            (2, 3), keepdim=True
        )
        return images


Destroy = Patches | Pixels | Occlusion


@dataclass(frozen=True, repr=False)
class PLPDAbove(Select):
    """Samples whose prediction leans on shape: destroying it costs the predicted class more than `drop` in probability.

    PLPD is `p(x)[c] - p(destroyed x)[c]` with `c` the predicted class. The second pass has no gradient and, on batch
    norm, the statistics of the samples in question alone. `ByPLPD` reuses it where both destroy alike.

    Paper: DeYO (Lee et al., ICLR 2024).
    Differs: one permutation per image per batch, which every look reuses; redrawing it would change the set each time.
    """

    drop: Annotated[float, Range(at_least=-2, at_most=2, hint="a probability; -2 keeps everyone")] = 0.2
    destroy: Destroy = field(default_factory=Patches)

    @property
    def passes(self) -> bool:
        """The destroyed images are a pass of their own."""
        return True

    def __call__(self, look: Look, among: Tensor, memory: Memory) -> Tensor:
        """A drop strictly above the threshold."""
        return among & (plpd(look, among, self.destroy) > self.drop)


@dataclass(frozen=True, repr=False)
class ClassPrior(Part):
    """Mixin: remembers the stream's mean prediction, from uniform, over all samples whether they teach or not."""

    momentum: Share = 0.9

    def start(self, look: Look) -> Memory:
        """Every class equally likely."""
        return {"prior.mean": torch.full_like(look.probs[0], 1 / look.classes)}

    def remember(self, look: Look, mask: Tensor, memory: Memory) -> Memory:
        """The prior moved towards this batch's mean prediction."""
        return {"prior.mean": self.momentum * memory["prior.mean"] + (1 - self.momentum) * look.probs.mean(0)}

    @staticmethod
    def diversity(look: Look, memory: Memory) -> Tensor:
        """How unlike the prior each prediction is, on a scale of 0 to 1 over the batch."""
        return min_max(1 - F.cosine_similarity(memory["prior.mean"][None], look.probs, dim=1))


@dataclass(frozen=True, repr=False)
class Diverse(ClassPrior, Select):
    """Samples at least as unlike the stream's mean prediction as the batch is on average.

    Paper: ROID (Marsden et al., WACV 2024).
    Differs: where all samples are equally diverse, nobody is left out; the published code divides by zero.
    """

    def __call__(self, look: Look, among: Tensor, memory: Memory) -> Tensor:
        """Diversity not below its mean."""
        diversity = self.diversity(look, memory)
        return among & (diversity >= diversity.mean())


@dataclass(frozen=True, repr=False)
class Weigh(Part):
    """Says how much a sample counts. Weights carry no gradient."""

    def start(self, look: Look) -> Memory:
        """What is remembered before the first batch."""
        return {}

    @abstractmethod
    def __call__(self, look: Look, mask: Tensor, memory: Memory) -> Tensor:
        """Weights (B,); only those inside `mask` are used."""

    def remember(self, look: Look, mask: Tensor, memory: Memory) -> Memory:
        """New memory, given the look and the mask that taught last."""
        return {}

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

    def start(self, look: Look) -> Memory:
        """Both memories."""
        return {**self.first.start(look), **self.second.start(look)}

    def __call__(self, look: Look, mask: Tensor, memory: Memory) -> Tensor:
        """One plus the other."""
        return self.first(look, mask, memory) + self.second(look, mask, memory)

    def remember(self, look: Look, mask: Tensor, memory: Memory) -> Memory:
        """Both new memories."""
        return {**self.first.remember(look, mask, memory), **self.second.remember(look, mask, memory)}

    def __repr__(self) -> str:
        return f"{self.first!r} + {self.second!r}"


@dataclass(frozen=True, repr=False)
class Equal(Weigh):
    """Everyone counts the same."""

    def __call__(self, look: Look, mask: Tensor, memory: Memory) -> Tensor:
        """Ones."""
        return torch.ones_like(look.probs[:, 0])


@dataclass(frozen=True, repr=False)
class ByEntropy(Weigh):
    """The surer, the more: `exp(fraction * ln C - H)`.

    Paper: EATA (Niu et al., ICML 2022). The margin here and the one of `EntropyBelow` are separate settings: moving
    this one multiplies every weight alike and so acts as a learning rate.
    """

    fraction: Fraction = 0.4

    def __call__(self, look: Look, mask: Tensor, memory: Memory) -> Tensor:
        """At least 1 for a sample below the margin."""
        return (self.fraction * math.log(look.classes) - look.entropy.detach()).exp()


@dataclass(frozen=True, repr=False)
class ByPLPD(Weigh):
    """The more the prediction leans on shape, the more: `exp(PLPD)`. Paper: DeYO (Lee et al., ICLR 2024)."""

    destroy: Destroy = field(default_factory=Patches)

    def __call__(self, look: Look, mask: Tensor, memory: Memory) -> Tensor:
        """Between 1/e and e."""
        return plpd(look, mask, self.destroy).exp()


@dataclass(frozen=True, repr=False)
class ByDiversityAndCertainty(ClassPrior, Weigh):
    """Unlike the stream and sure of itself: `exp(diversity * certainty / temperature)`, both on a scale of 0 to 1.

    Paper: ROID (Marsden et al., WACV 2024).
    """

    temperature: Positive = 1 / 3

    def __call__(self, look: Look, mask: Tensor, memory: Memory) -> Tensor:
        """Between 1 and exp(1 / temperature)."""
        certainty = min_max(-look.entropy.detach())
        return (self.diversity(look, memory) * certainty / self.temperature).exp()


@dataclass(frozen=True, repr=False)
class FirstRound(Weigh):
    """These weights in the first round, equal ones after it (the published POEM code)."""

    weigh: Weigh = field(default_factory=Equal)

    def start(self, look: Look) -> Memory:
        """The inner weight's memory."""
        return self.weigh.start(look)

    def __call__(self, look: Look, mask: Tensor, memory: Memory) -> Tensor:
        """The inner weight, then ones."""
        return (self.weigh if look.round == 0 else Equal())(look, mask, memory)

    def remember(self, look: Look, mask: Tensor, memory: Memory) -> Memory:
        """The inner weight's new memory."""
        return self.weigh.remember(look, mask, memory)


def plpd(look: Look, among: Tensor, destroy: Destroy) -> Tensor:
    """Pseudo-label probability difference (B,), meaningful inside `among`; asked once per look."""
    if destroy not in look.cache:
        label = look.probs.argmax(1, keepdim=True)
        destroyed = look.ask(destroy(look), among=among).softmax(1)
        look.cache[destroy] = (look.probs.gather(1, label) - destroyed.gather(1, label))[:, 0]
    return look.cache[destroy]


def _tile(images: Tensor, grid: int) -> tuple[int, int]:
    """Height and width of a tile."""
    return images.shape[2] // grid, images.shape[3] // grid


def _resize(images: Tensor, high: int, wide: int) -> Tensor:
    """Bilinear, or the very images where the size already fits."""
    if images.shape[2:] == (high, wide):
        return images
    return F.interpolate(images, (high, wide), mode="bilinear", align_corners=False)
