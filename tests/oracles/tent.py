"""Tent (Wang et al., ICLR 2021): minimise the mean entropy over the norm layers' weights and biases."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from oracles.common import Outcome, all_norms, below, entropy, everyone, sgd, step, with_batch_statistics
from oracles.host import Forward, Host


def tent(net: nn.Module, batches: list[Tensor], *, lr: float) -> Iterator[Outcome]:
    """Every sample counts."""
    student = with_batch_statistics(net)
    theta = all_norms(student)
    optimizer = sgd(theta, lr)
    for x in batches:
        logits = student(x)
        loss = entropy(logits).mean()
        step(optimizer, torch.autograd.grad(loss, theta))
        yield Outcome(logits.detach(), everyone(x), [everyone(x)])


def tent_filtered(net: nn.Module, batches: list[Tensor], *, lr: float) -> Iterator[Outcome]:
    """Only samples with an entropy below 0.4 ln C count."""
    student = with_batch_statistics(net)
    theta = all_norms(student)
    optimizer = sgd(theta, lr)
    for x in batches:
        logits = student(x)
        chosen = below(logits, 0.4)
        outcome = Outcome(logits.detach(), chosen)
        if chosen.any():
            loss = entropy(logits)[chosen].mean()
            step(optimizer, torch.autograd.grad(loss, theta))
            outcome.updates.append(chosen)
        yield outcome


class TentHost(Host):
    """Tent as a host: everyone is selected, which leaves nothing to select again (tent*)."""

    def select(self, now: Forward) -> Tensor:
        return everyone(now.scores)

    def loss(self, now: Forward, chosen: Tensor) -> Tensor:
        return now.entropy[chosen].mean()


class FilteredTentHost(TentHost):
    """Tent with POEM's threshold, and filtered Tent itself."""

    def select(self, now: Forward) -> Tensor:
        return below(now.scores, 0.4)
