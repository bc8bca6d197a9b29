"""What do the selected samples minimise?

An objective turns selected outputs into one number; objectives add up with `+`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import Tensor

from poem.parts.augment import Augment, Jitter
from poem.parts.base import Memory, Need, Outputs, Part, Selected, entropy
from poem.parts.fields import NotNegative, Positive, Range, Share
from poem.parts.score import OpinionEntropy


@dataclass(frozen=True, repr=False)
class Objective(Part):
    """One number to make smaller."""

    @property
    def per_sample(self) -> bool:
        """Whether the loss is a sum over samples, each of which needs its own logits alone."""
        return False

    @property
    def divisor(self) -> Literal["selected", "batch"]:
        """What that sum is divided by: the number of selected samples, or the configured batch size."""
        return "selected"

    @abstractmethod
    def __call__(self, selected: Selected) -> Tensor:
        """A scalar with a gradient."""

    def taught(self, selected: Selected) -> Tensor:
        """The samples (B,) that the loss is made of; without any no step is made. By default the selected ones."""
        return selected.mask

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
    def per_sample(self) -> bool:
        """Whether both are sums over samples."""
        return self.first.per_sample and self.second.per_sample

    @property
    def divisor(self) -> Literal["selected", "batch"]:
        """The batch size, where either is divided by it."""
        return "batch" if "batch" in (self.first.divisor, self.second.divisor) else "selected"

    def __call__(self, selected: Selected) -> Tensor:
        """The first objective plus the second."""
        return self.first(selected.inside("first")) + self.second(selected.inside("second"))

    def taught(self, selected: Selected) -> Tensor:
        """The samples of either."""
        return self.first.taught(selected.inside("first")) | self.second.taught(selected.inside("second"))

    def __repr__(self) -> str:
        return f"{self.first!r} + {self.second!r}"


@dataclass(frozen=True, repr=False)
class Entropy(Objective):
    """Mean entropy of the prediction over the selected samples; with a branch, of the combined one.

    Where fewer samples are selected than `least` times the configured batch size, the sum is divided by that product
    instead of by their number, so that few samples make a small update. 0 is the published mean.

    Paper: Tent (Wang et al., ICLR 2021); POEM, Eq. 3.
    Differs: no paper has `least`; it is 0 in every published method.
    """

    least: Share = field(default=0.0, kw_only=True)

    @property
    def per_sample(self) -> bool:
        """A sum over samples."""
        return True

    @property
    def divisor(self) -> Literal["selected", "batch"]:
        """The batch size, where few samples are selected and `least` is not 0."""
        return "batch" if self.least else "selected"

    def __call__(self, selected: Selected) -> Tensor:
        """Weighted sum over the selection, divided by its number or by `least` times the batch size, the larger."""
        return selected.mean(selected.outputs.entropy, least=self.least)


@dataclass(frozen=True, repr=False)
class ConservativeEntropy(Objective):
    """Mean entropy of the opinion over the selected samples: certainty may not grow by longer logits alone.

    Paper: COME (Zhang et al., ICLR 2025); see `OpinionEntropy`.
    """

    @property
    def needs(self) -> frozenset[Need]:
        """Several logits: of one, all that is left without its length is its sign, which has no gradient."""
        return frozenset({Need.SEVERAL_LOGITS})

    @property
    def per_sample(self) -> bool:
        """A mean over samples."""
        return True

    def __call__(self, selected: Selected) -> Tensor:
        """Weighted mean over the selection."""
        return selected.mean(OpinionEntropy()(selected.outputs, {}))


@dataclass(frozen=True, repr=False)
class SiameseEntropy(Objective):
    """Entropy behind a trained predictor, and its symmetric divergence from the plain head: a guard against collapse.

    Features `z` pass a matrix `P` (the identity at first) before the frozen last layer: `r = W P z + b`. Minimises
    `H(r) + divergence * (KL(t, r) + KL(r, t))`, with `t` the plain head's prediction, as a constant. `P` is trained
    with a learning rate of its own, a multiple of the recipe's by network family, and is not used for the answer.

    Paper: ZeroSiam (ICLR 2026, arXiv 2509.23183).
    Reference code: Cascol-Chen/ZeroSiam (no licence).
    Differs: one optimiser step for both groups from one backward pass; a reset clears both.
    """

    divergence: NotNegative = 1.0
    convolutional: NotNegative = 10.0
    transformer: NotNegative = 1.0

    @property
    def needs(self) -> frozenset[Need]:
        """Features for the predictor."""
        return frozenset({Need.FEATURES})

    def trainable(self, outputs: Outputs) -> Memory:
        """The predictor, an identity."""
        if outputs.features is None:
            raise ValueError("SiameseEntropy() needs a model whose last layer is linear; none was found")
        size = outputs.features.shape[1]
        return {"predictor": torch.eye(size, dtype=outputs.logits.dtype, device=outputs.logits.device)}

    def lr_factor(self, family: str) -> float:
        """By network family."""
        return self.transformer if family == "transformer" else self.convolutional

    def __call__(self, selected: Selected) -> Tensor:
        """Mean over the selection; the plain head gets no gradient."""
        outputs, predictor = selected.outputs, selected.trained["predictor"]
        assert outputs.features is not None
        online = outputs.classify(outputs.features.to(predictor.dtype) @ predictor.T).log_softmax(1)
        plain = outputs.heads[0].detach().log_softmax(1)
        gap = ((online.exp() - plain.exp()) * (online - plain)).sum(1)
        return selected.mean(entropy(online) + self.divergence * gap)


@dataclass(frozen=True, repr=False)
class CrossEntropy(Objective):
    """Cross-entropy of the last head to hard pseudo-labels: the `"combined"` prediction's, or its `"own"`.

    `least` as in `Entropy`.

    Paper: POEM, Eq. 6.
    Differs: the published code applies a log-likelihood loss to probabilities; no paper has `least`.
    """

    labels: Literal["combined", "own"] = "combined"
    least: Share = 0.0

    @property
    def per_sample(self) -> bool:
        """A sum over samples."""
        return True

    @property
    def divisor(self) -> Literal["selected", "batch"]:
        """The batch size, where few samples are selected and `least` is not 0."""
        return "batch" if self.least else "selected"

    def __call__(self, selected: Selected) -> Tensor:
        """Weighted sum over the selection, divided as in `Entropy`."""
        head = selected.outputs.heads[-1]
        label = (selected.outputs.logits if self.labels == "combined" else head).detach().argmax(1, keepdim=True)
        return selected.mean(-head.log_softmax(1).gather(1, label)[:, 0], least=self.least)


@dataclass(frozen=True, repr=False)
class RobustCrossEntropy(Objective):
    """Generalised cross-entropy to the prediction's own hard label: `(1 - p_y^power) / power`.

    Between the cross-entropy (`power` near 0) and the mean absolute error (1), which a wrong label moves least.

    Paper: RPL (Rusak et al., TMLR 2022); the loss: Zhang and Sabuncu, NeurIPS 2018.
    """

    power: Annotated[float, Range(above=0, at_most=1)] = 0.8

    @property
    def per_sample(self) -> bool:
        """A mean over samples."""
        return True

    def __call__(self, selected: Selected) -> Tensor:
        """Mean over the selection; with a branch, of the combined prediction."""
        log_probs = selected.outputs.log_probs
        chosen = log_probs.gather(1, log_probs.detach().argmax(1, keepdim=True))[:, 0]
        return selected.mean((1 - (self.power * chosen).exp()) / self.power)


@dataclass(frozen=True, repr=False)
class FisherAnchor(Objective):
    """Pulls each number back to its source value, in proportion to its importance there: `weight * sum F (t - t0)^2`.

    Without source data there is no importance, and the anchor is zero (EATA then runs as ETA).

    Paper: EATA (Niu et al., ICML 2022).
    """

    weight: NotNegative = 2000.0

    @property
    def needs(self) -> frozenset[Need]:
        """Source images, to measure importance on."""
        return frozenset({Need.SOURCE_DATA})

    @property
    def per_sample(self) -> bool:
        """The penalty needs no sample at all."""
        return True

    def prepare(self, batches: Iterable[Outputs]) -> Memory:
        """The mean over batches of the squared gradient of the mean loss to the network's own labels."""
        importance, count = torch.zeros(()), 0
        for outputs in batches:
            label = outputs.logits.detach().argmax(1, keepdim=True)
            loss = -outputs.log_probs.gather(1, label).mean()
            assert outputs.theta is not None
            (gradient,) = torch.autograd.grad(loss, outputs.theta)
            importance, count = importance.to(gradient.device) + gradient.square(), count + 1
        return {"importance": importance / count}

    def __call__(self, selected: Selected) -> Tensor:
        """A penalty on the parameters; no average, no half."""
        if "importance" not in selected.memory:
            return selected.theta.new_zeros(())
        return self.weight * (selected.memory["importance"] * (selected.theta - selected.source).square()).sum()


@dataclass(frozen=True, repr=False)
class SoftLikelihoodRatio(Objective):
    """`-sum_c p_c ln(p_c / (1 - p_c))` with probabilities cut at `clip`: a gradient that does not fade when sure.

    Paper: ROID (Marsden et al., WACV 2024). The sum is divided by the configured batch size.
    """

    clip: Annotated[float, Range(above=0, at_most=1)] = 0.99
    eps: Positive = 1e-5

    @property
    def per_sample(self) -> bool:
        """A sum over samples."""
        return True

    @property
    def divisor(self) -> Literal["selected", "batch"]:
        """As in the paper's code."""
        return "batch"

    def __call__(self, selected: Selected) -> Tensor:
        """Summed over the selection, divided by the configured batch size."""
        probs = selected.outputs.log_probs.exp().clamp(0, self.clip)
        return selected.mean(-(probs * (probs / (1 - probs) + self.eps).log()).sum(1), over=self.divisor)


@dataclass(frozen=True, repr=False)
class Consistency(Objective):
    """Symmetric cross-entropy between the prediction and that of an augmented copy, gradients through both.

    Paper: ROID (Marsden et al., WACV 2024). One augmentation per batch; on batch norm the copy's statistics are those
    of the selected samples. The sum is divided by the configured batch size.
    """

    augment: Augment = field(default_factory=Jitter)

    @property
    def needs(self) -> frozenset[Need]:
        """Images in [0, 1] to augment."""
        return frozenset({Need.UNIT_RANGE})

    @property
    def divisor(self) -> Literal["selected", "batch"]:
        """As in the paper's code."""
        return "batch"

    @property
    def further_passes(self) -> Mapping[object, tuple[int, int]]:
        """The augmented copy, forward and backward."""
        return {self: (1, 1)}

    def __call__(self, selected: Selected) -> Tensor:
        """Half each way."""
        batch = selected.outputs.batch
        augmented = batch.once(self, lambda rng: self.augment(batch.images, rng))
        other = selected.outputs.forward(augmented, among=selected.mask, grad=True).log_softmax(1)
        mine = selected.outputs.log_probs
        return selected.mean(-0.5 * (mine.exp() * other + other.exp() * mine).sum(1), over=self.divisor)


@dataclass(frozen=True, repr=False)
class MarginalEntropy(Objective):
    """Entropy of the mean prediction over all views of one image. Paper: MEMO (Zhang et al., NeurIPS 2022)."""

    def __call__(self, selected: Selected) -> Tensor:
        """In log space: the mean of probabilities is a logsumexp."""
        log_probs = selected.outputs.log_probs
        return entropy(log_probs.logsumexp(0) - math.log(len(log_probs)))


@dataclass(frozen=True, repr=False)
class FollowTeacher(Objective):
    """Cross-entropy to the teacher's prediction; `symmetric` adds the other direction, half each.

    Paper: CoTTA (Wang et al., CVPR 2022): one way on CIFAR, symmetric on ImageNet.
    """

    symmetric: bool = True

    def __call__(self, selected: Selected) -> Tensor:
        """Mean over the selected samples; the teacher gets no gradient."""
        if selected.target is None:
            raise ValueError("FollowTeacher() needs a teacher; add teacher=MeanTeacher() to the recipe")
        teacher, student = selected.target.log_softmax(1), selected.outputs.log_probs
        losses = -(teacher.exp() * student).sum(1)
        if self.symmetric:
            losses = 0.5 * losses - 0.5 * (student.exp() * teacher).sum(1)
        return selected.mean(losses)


@dataclass(frozen=True, repr=False)
class FollowSource(Objective):
    """Cross-entropy to what the source's weights predict, with statistics of their own, times `weight`.

    Paper: PeTTA (NeurIPS 2024), its anchor loss.
    """

    weight: NotNegative = 1.0

    def __call__(self, selected: Selected) -> Tensor:
        """Mean over the selected samples."""
        if "source" not in selected.told:
            raise ValueError("FollowSource() needs teacher=WaryTeacher() and views=MemoryBank() in the recipe")
        source = selected.told["source"].log_softmax(1)
        return self.weight * selected.mean(-(source.exp() * selected.outputs.log_probs).sum(1))


@dataclass(frozen=True, repr=False)
class NearSource(Objective):
    """Keeps the direction of each adapted tensor: `-weight * g * mean cos(t, t0)`, with the divergence `g`.

    Paper: PeTTA (NeurIPS 2024), its regulariser; `g` is `WaryTeacher`'s.
    """

    weight: NotNegative = 10.0

    def __call__(self, selected: Selected) -> Tensor:
        """A penalty on the parameters."""
        if "divergence" not in selected.told:
            raise ValueError("NearSource() needs teacher=WaryTeacher() and views=MemoryBank() in the recipe")
        split = (torch.split(each, list(selected.sizes)) for each in (selected.theta, selected.source))
        pairs = zip(*split, strict=True)
        near = torch.stack([torch.nn.functional.cosine_similarity(now, start, dim=0) for now, start in pairs])
        return -self.weight * selected.told["divergence"] * near.mean()
