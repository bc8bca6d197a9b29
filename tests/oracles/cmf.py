"""CMF (ICLR 2024): ROID, and a Kalman filter between the source's weights and the adapted ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Generator, Tensor, nn

from oracles.common import Augment, Outcome, all_norms, averaged, sgd, step, values, with_batch_statistics
from oracles.roid import (
    ROIDHost,
    consistency,
    diversity_of,
    likelihood_ratio,
    prior_corrected,
    weights_of,
)


class Filter:
    """Hidden tensors and their variance, which start as the source and as zero."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors, self.source, self.hidden, self.variance = tensors, values(tensors), values(tensors), 0.0
        self.q = 0.005 * sum(tensor.numel() for tensor in tensors) / 38400

    def gain(self) -> float:
        """The share of the hidden tensors that a correction keeps; moves the variance."""
        self.variance = 0.99**2 * self.variance + self.q
        beta = max((1 - self.q) / (self.variance + 1 - self.q), 0.89)
        beta = 1.0 if beta >= 0.9999 else beta
        self.variance *= beta
        return beta

    @torch.no_grad()
    def __call__(self) -> None:
        beta = self.gain()
        for i, (tensor, start) in enumerate(zip(self.tensors, self.source, strict=True)):
            hidden = 0.99 * self.hidden[i] + 0.01 * start
            hidden = beta * hidden + (1 - beta) * tensor
            tensor.copy_(0.99 * tensor + 0.01 * hidden)
            self.hidden[i] = hidden


def cmf(net: nn.Module, batches: list[Tensor], *, lr: float, rng: Generator, augment: Augment) -> Iterator[Outcome]:
    """ROID's loss, weights and answer."""
    student = with_batch_statistics(net)
    theta = all_norms(student)
    pull, optimizer, size = Filter(theta), sgd(theta, lr, nesterov=True), len(batches[0])
    average: Tensor | None = None
    for x in batches:
        augmented = augment(x, rng)
        logits = student(x)
        if average is None:
            average = torch.full_like(logits[0], 1 / logits.shape[1]).detach()
        diversity = diversity_of(logits, average)
        chosen = diversity >= diversity.mean()
        weight = weights_of(logits, average)[chosen]
        loss = (weight * likelihood_ratio(logits[chosen])).sum() / size
        loss = loss + (weight * consistency(logits[chosen], student(augmented[chosen]))).sum() / size
        step(optimizer, torch.autograd.grad(loss, theta))
        average = averaged(average, logits.softmax(1).mean(0).detach())
        pull()
        yield Outcome(prior_corrected(logits, logits.softmax(1)).detach(), chosen, [chosen])


class CMFHost(ROIDHost):
    """CMF as a host: the branch has a filter of its own."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.filters = [Filter(self.theta), *([Filter(self.zeta)] if self.branch else [])]

    def end(self) -> None:
        if self.seen is not None:
            self.average = averaged(self.average, self.seen)
        for pull in self.filters:
            pull()
