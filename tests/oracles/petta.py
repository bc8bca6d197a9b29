"""PeTTA (NeurIPS 2024): RoTTA's bank, and a teacher that follows less the further its features have drifted."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cosine_similarity

from oracles.common import Augment, Outcome, adam, copied, everyone, step, values
from oracles.lame import features_and_logits
from oracles.rotta import Bank, learning, moving_norms, robust


def class_moments(net: nn.Module, source: list[Tensor]) -> dict[int, tuple[Tensor, Tensor]]:
    """Mean and variance of source features by predicted class, where there are two images or more."""
    still = copied(net)
    with torch.no_grad():
        pairs = [features_and_logits(still, x) for x in source]
    features, labels = torch.cat([f for f, _ in pairs]), torch.cat([z for _, z in pairs]).argmax(1)
    found = {}
    for c in range(pairs[0][1].shape[1]):
        mine = features[labels == c]
        if len(mine) > 1:
            found[c] = mine.mean(0), mine.var(0)
    return found


class Drift:
    """Running means of features by class, and how far they are from the source's."""

    def __init__(self, moments: dict[int, tuple[Tensor, Tensor]]) -> None:
        self.moments = moments
        self.means = {c: mean.clone() for c, (mean, _) in moments.items()}

    def divergence(self, labels: Tensor) -> float:
        """Of the classes that are there."""
        gaps = [
            ((self.means[c] - self.moments[c][0]) ** 2 / (self.moments[c][1] + 1e-6)).mean()
            for c in set(labels.tolist())
            if c in self.means
        ]
        return 1 - math.exp(-float(torch.stack(gaps).mean())) if gaps else 0.0

    def move(self, features: Tensor, labels: Tensor) -> None:
        for c in self.means:
            if (labels == c).any():
                self.means[c] = 0.95 * self.means[c] + 0.05 * features[labels == c].mean(0)


def petta(
    net: nn.Module,
    batches: list[Tensor],
    *,
    lr: float,
    rng: Generator,
    augment: Augment,
    source: list[Tensor],
    capacity: int = 64,
    alpha: float = 0.05,
    nu: float = 0.001,
) -> Iterator[Outcome]:
    """The teacher answers before the update, of which every batch makes one."""
    student, teacher, initial = (robust(net, alpha) for _ in range(3))
    theta, slow = moving_norms(student), moving_norms(teacher)
    origin, optimizer, bank = values(theta), adam(theta, lr), None
    drift = Drift(class_moments(net, source))
    for x in batches:
        with torch.no_grad():
            answer = teacher(x)
        p = answer.softmax(1)
        bank = bank or Bank(capacity, p.shape[1])
        for image, row in zip(x, p, strict=True):
            bank.add(image, int(row.argmax()), float(-(row * (row + 1e-6).log()).sum()))
        images = torch.stack([item[0] for item in bank.items()])
        seen = augment(images, rng)
        for each in (student, teacher, initial):
            learning(each, on=True)
        with torch.no_grad():
            features, target = features_and_logits(teacher, images)
            anchor = initial(images)
        gamma = drift.divergence(target.argmax(1))
        drift.move(features, target.argmax(1))
        log_p = student(seen).log_softmax(1)
        loss = -(target.softmax(1) * log_p).sum(1).mean() - (anchor.softmax(1) * log_p).sum(1).mean()
        near = [cosine_similarity(now, start, dim=0) for now, start in zip(theta, origin, strict=True)]
        loss = loss - 10 * gamma * torch.stack(near).mean()
        step(optimizer, torch.autograd.grad(loss, theta))
        for each in (student, teacher, initial):
            learning(each, on=False)
        with torch.no_grad():
            rate = nu * (1 - gamma)
            for fast, mine in zip(theta, slow, strict=True):
                mine.copy_((1 - rate) * mine + rate * fast)
        yield Outcome(answer, everyone(x), [everyone(x)])
