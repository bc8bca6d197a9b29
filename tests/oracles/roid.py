"""ROID (Marsden et al., WACV 2024): diverse and certain samples, a soft likelihood ratio, consistency, a prior."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn

from oracles.common import (
    Augment,
    Outcome,
    all_norms,
    averaged,
    cosine,
    entropy,
    sgd,
    step,
    values,
    with_batch_statistics,
)
from oracles.host import Forward, Host


def stretched(value: Tensor) -> Tensor:
    """Min-max normalised; ones if all are equal."""
    low, high = value.min(), value.max()
    return torch.ones_like(value) if high - low < 1e-12 else (value - low) / (high - low)


def diversity_of(scores: Tensor, average: Tensor) -> Tensor:
    """How unlike the average prediction each sample is."""
    return stretched(1 - cosine(average, scores.softmax(1).detach()))


def weights_of(scores: Tensor, average: Tensor) -> Tensor:
    """Diversity times certainty, with a temperature of one third."""
    certainty = stretched(-entropy(scores).detach())
    return (diversity_of(scores, average) * certainty / (1 / 3)).exp()


def likelihood_ratio(scores: Tensor) -> Tensor:
    """The soft likelihood ratio, with probabilities cut at 0.99."""
    p = scores.softmax(1).clamp(0, 0.99)
    return -(p * (p / (1 - p) + 1e-5).log()).sum(1)


def consistency(clean: Tensor, augmented: Tensor) -> Tensor:
    """Symmetric cross-entropy of two views."""
    there = -(clean.softmax(1) * augmented.log_softmax(1)).sum(1)
    back = -(augmented.softmax(1) * clean.log_softmax(1)).sum(1)
    return 0.5 * there + 0.5 * back


def prior_corrected(scores: Tensor, probabilities: Tensor) -> Tensor:
    """Scores times the smoothed mean prediction of the batch."""
    size, classes = scores.shape
    prior = probabilities.mean(0)
    smooth = max(1 / size, 1 / classes) / prior.max()
    return scores * (prior + smooth) / (1 + smooth * classes)


@torch.no_grad()
def pull(tensors: Sequence[Tensor], source: Sequence[Tensor]) -> None:
    """Averages the tensors with their source values."""
    for tensor, value in zip(tensors, source, strict=True):
        tensor.copy_(0.99 * tensor + 0.01 * value)


def roid(net: nn.Module, batches: list[Tensor], *, lr: float, rng: Generator, augment: Augment) -> Iterator[Outcome]:
    """Sums are divided by the size of the first batch, which is the configured one."""
    student = with_batch_statistics(net)
    theta = all_norms(student)
    origin = values(theta)
    optimizer = sgd(theta, lr, nesterov=True)
    size = len(batches[0])
    average: Tensor | None = None
    for x in batches:
        augmented = augment(x, rng)
        logits = student(x)
        if average is None:
            average = torch.full_like(logits[0], 1 / logits.shape[1]).detach()
        diversity = diversity_of(logits, average)
        chosen = ~(diversity < diversity.mean())
        weight = weights_of(logits, average)[chosen]
        loss = (weight * likelihood_ratio(logits[chosen])).sum() / size
        loss = loss + (weight * consistency(logits[chosen], student(augmented[chosen]))).sum() / size
        step(optimizer, torch.autograd.grad(loss, theta))
        average = averaged(average, logits.softmax(1).mean(0).detach())
        pull(theta, origin)
        yield Outcome(prior_corrected(logits, logits.softmax(1)).detach(), chosen, [chosen])


class ROIDHost(Host):
    """ROID as a host: the branch is averaged with the source too, and log-probabilities are centred first."""

    nesterov = True

    def __init__(self, *given: Any, rng: Generator, augment: Augment, **more: Any) -> None:
        super().__init__(*given, **more)
        self.rng, self.augment = rng, augment
        self.size: int | None = None
        self.average: Tensor | None = None

    def begin(self, x: Tensor) -> None:
        self.size = len(x) if self.size is None else self.size
        self.augmented = self.augment(x, self.rng)
        self.seen: Tensor | None = None

    def select(self, now: Forward) -> Tensor:
        if self.average is None:
            self.average = torch.full_like(now.p[0], 1 / now.scores.shape[1]).detach()
        diversity = diversity_of(now.scores, self.average)
        return ~(diversity < diversity.mean())

    def loss(self, now: Forward, chosen: Tensor) -> Tensor:
        assert self.average is not None
        assert self.size is not None
        weight = weights_of(now.scores, self.average)[chosen]
        other = self.forward(self.augmented[chosen])
        self.seen = now.p.mean(0).detach()
        ratio = (weight * likelihood_ratio(now.scores[chosen])).sum() / self.size
        return ratio + (weight * consistency(now.scores[chosen], other.scores)).sum() / self.size

    def answer(self, now: Forward) -> Tensor:
        scores = now.scores - now.scores.mean(1, keepdim=True) if self.branch else now.scores
        return prior_corrected(scores, now.p)

    def end(self) -> None:
        if self.seen is not None:
            self.average = averaged(self.average, self.seen)
        pull(self.theta, self.theta_origin)
        if self.branch:
            pull(self.zeta, self.zeta_origin)
