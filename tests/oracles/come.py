"""COME (ICLR 2025): minimise the entropy of an opinion with a mass for not knowing; logits keep their length."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from oracles.common import (
    Outcome,
    all_norms,
    deep_part,
    everyone,
    mixed,
    sgd,
    shallow_part,
    step,
    with_batch_statistics,
)
from oracles.host import Forward, Host


def opinion_entropy(logits: Tensor) -> Tensor:
    """Beliefs e^x / (sum e^x + K) and uncertainty K / (sum e^x + K), x the logits with a constant norm."""
    length = (logits**2).sum(1, keepdim=True).sqrt()
    evidence = (logits / length * length.detach()).exp()
    classes = logits.shape[1]
    total = evidence.sum(1, keepdim=True) + classes
    opinion = torch.cat([evidence, torch.full_like(total, classes)], dim=1) / total
    return -(opinion * opinion.log()).sum(1)


def come(net: nn.Module, batches: list[Tensor], *, lr: float) -> Iterator[Outcome]:
    """Tent with this entropy."""
    student = with_batch_statistics(net)
    theta = all_norms(student)
    optimizer = sgd(theta, lr)
    for x in batches:
        logits = student(x)
        step(optimizer, torch.autograd.grad(opinion_entropy(logits).mean(), theta))
        yield Outcome(logits.detach(), everyone(x), [everyone(x)])


class PlainCOMEHost(Host):
    """COME as a host: everyone is selected (come*)."""

    def forward(self, x: Tensor) -> Forward:
        """With a branch the opinion is of the mean of both heads' logits."""
        features = shallow_part(self.main, x)
        logits = deep_part(self.main, features)
        if not self.branch:
            self.raw = logits
            return Forward(logits, None)
        branch_logits = deep_part(self.side, features)
        self.raw = (logits + branch_logits) / 2
        return Forward(mixed(logits, branch_logits), branch_logits)

    def select(self, now: Forward) -> Tensor:
        return everyone(now.scores)

    def loss(self, now: Forward, chosen: Tensor) -> Tensor:
        return opinion_entropy(self.raw)[chosen].mean()


class COMEHost(PlainCOMEHost):
    """The opinion's entropy below 0.4 ln C, compared as it is."""

    def select(self, now: Forward) -> Tensor:
        return opinion_entropy(self.raw) < 0.4 * math.log(now.scores.shape[1])
