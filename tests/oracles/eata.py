"""ETA and EATA (Niu et al., ICML 2022), and RDumb (Press et al., NeurIPS 2023), which is ETA with resets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from oracles.common import (
    Outcome,
    all_norms,
    averaged,
    below,
    confidence_weight,
    cosine,
    entropy,
    norms_below_split,
    put_back,
    sgd,
    step,
    values,
    with_batch_statistics,
)
from oracles.host import Forward, Host


def reliable_and_new(scores: Tensor, average: Tensor | None, redundancy: float) -> Tensor:
    """Low entropy, and unlike the average prediction so far; the first batch is not compared."""
    chosen = below(scores, 0.4)
    if average is None:
        return chosen
    return chosen & (cosine(average, scores.softmax(1).detach()).abs() < redundancy)


def weighted_entropy(scores: Tensor, chosen: Tensor) -> Tensor:
    """Surer samples count more."""
    kept = entropy(scores)[chosen]
    return (confidence_weight(kept, scores.shape[1]) * kept).mean()


def fisher_of(student: nn.Module, theta: list[nn.Parameter], source: Sequence[Tensor]) -> list[Tensor]:
    """Mean over batches of the squared gradient of the mean cross-entropy to the net's own predictions."""
    total = [torch.zeros_like(tensor) for tensor in theta]
    for x in source:
        logits = student(x)
        loss = cross_entropy(logits, logits.argmax(1))
        for amount, gradient in zip(total, torch.autograd.grad(loss, theta), strict=True):
            amount += gradient**2
    return [amount / len(source) for amount in total]


def anchor_loss(theta: Sequence[Tensor], fisher: Sequence[Tensor], origin: Sequence[Tensor]) -> Tensor:
    """What matters for source images stays near its source value; a plain sum of squares, without a half."""
    terms = [
        (importance * (tensor - start) ** 2).sum()
        for tensor, importance, start in zip(theta, fisher, origin, strict=True)
    ]
    return torch.stack(terms).sum()


def eta(net: nn.Module, batches: list[Tensor], *, lr: float, redundancy: float = 0.05) -> Iterator[Outcome]:
    """Reliable and non-redundant samples, without the anchor."""
    student = with_batch_statistics(net)
    theta = all_norms(student)
    optimizer = sgd(theta, lr)
    average: Tensor | None = None
    for x in batches:
        logits = student(x)
        chosen = reliable_and_new(logits, average, redundancy)
        outcome = Outcome(logits.detach(), chosen)
        if chosen.any():
            loss = weighted_entropy(logits, chosen)
            step(optimizer, torch.autograd.grad(loss, theta))
            average = averaged(average, logits.softmax(1)[chosen].mean(0).detach())
            outcome.updates.append(chosen)
        yield outcome


def eata(
    net: nn.Module,
    batches: list[Tensor],
    *,
    lr: float,
    source: list[Tensor],
    redundancy: float = 0.05,
    fisher_weight: float = 2000.0,
) -> Iterator[Outcome]:
    """ETA with the Fisher anchor."""
    student = with_batch_statistics(net)
    theta = all_norms(student)
    origin, fisher = values(theta), fisher_of(student, theta, source)
    optimizer = sgd(theta, lr)
    average: Tensor | None = None
    for x in batches:
        logits = student(x)
        chosen = reliable_and_new(logits, average, redundancy)
        outcome = Outcome(logits.detach(), chosen)
        if chosen.any():
            loss = weighted_entropy(logits, chosen) + fisher_weight * anchor_loss(theta, fisher, origin)
            step(optimizer, torch.autograd.grad(loss, theta))
            average = averaged(average, logits.softmax(1)[chosen].mean(0).detach())
            outcome.updates.append(chosen)
        yield outcome


def rdumb(
    net: nn.Module, batches: list[Tensor], *, lr: float, redundancy: float = 0.05, reset_every: int = 1000
) -> Iterator[Outcome]:
    """ETA that returns to the source after so many calls."""
    student = with_batch_statistics(net)
    theta = all_norms(student)
    origin = values(theta)
    optimizer = sgd(theta, lr)
    average: Tensor | None = None
    for call, x in enumerate(batches):
        reset = call > 0 and call % reset_every == 0
        if reset:
            put_back(theta, origin)
            optimizer, average = sgd(theta, lr), None
        logits = student(x)
        chosen = reliable_and_new(logits, average, redundancy)
        outcome = Outcome(logits.detach(), chosen, reset=reset)
        if chosen.any():
            loss = weighted_entropy(logits, chosen)
            step(optimizer, torch.autograd.grad(loss, theta))
            average = averaged(average, logits.softmax(1)[chosen].mean(0).detach())
            outcome.updates.append(chosen)
        yield outcome


class ETAHost(Host):
    """ETA as a host. The average prediction moves once per batch, by the samples of the last update."""

    def __init__(self, *given: Any, redundancy: float = 0.05, **more: Any) -> None:
        super().__init__(*given, **more)
        self.redundancy = redundancy
        self.average: Tensor | None = None
        self.seen: Tensor | None = None

    def begin(self, x: Tensor) -> None:
        self.seen = None

    def select(self, now: Forward) -> Tensor:
        return reliable_and_new(now.scores, self.average, self.redundancy)

    def loss(self, now: Forward, chosen: Tensor) -> Tensor:
        self.seen = now.p[chosen].mean(0).detach()
        return weighted_entropy(now.scores, chosen)

    def end(self) -> None:
        if self.seen is not None:
            self.average = averaged(self.average, self.seen)


class EATAHost(ETAHost):
    """ETA with the Fisher anchor on what moves; importance is the plain network's, without the branch."""

    def __init__(
        self, net: nn.Module, *, source: list[Tensor], fisher_weight: float = 2000.0, branch: bool, **more: Any
    ) -> None:
        super().__init__(net, branch=branch, **more)
        plain = with_batch_statistics(net)
        self.fisher = fisher_of(plain, norms_below_split(plain) if branch else all_norms(plain), source)
        self.fisher_weight = fisher_weight

    def loss(self, now: Forward, chosen: Tensor) -> Tensor:
        anchor = anchor_loss(self.theta, self.fisher, self.theta_origin)
        return super().loss(now, chosen) + self.fisher_weight * anchor


class RDumbHost(ETAHost):
    """ETA with resets."""

    def __init__(self, *given: Any, reset_every: int = 1000, **more: Any) -> None:
        super().__init__(*given, **more)
        self.reset_every, self.calls = reset_every, 0

    def begin(self, x: Tensor) -> None:
        super().begin(x)
        if self.calls > 0 and self.calls % self.reset_every == 0:
            self.reset()
            self.average = None
        self.calls += 1
