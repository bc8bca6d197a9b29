"""A method as the host of POEM's extensions: what it selects and minimises, with or without an adapt branch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from oracles.common import (
    Net,
    all_norms,
    branch_norms,
    deep_part,
    entropy,
    mixed,
    modules_beyond_split,
    put_back,
    sgd,
    shallow_part,
    step,
    values,
    with_batch_statistics,
    without,
)


@dataclass
class Forward:
    """A forward pass: scores are logits, with a branch the log of the heads' mean probabilities."""

    scores: Tensor
    branch_logits: Tensor | None

    @property
    def p(self) -> Tensor:
        return self.scores.softmax(1)

    @property
    def entropy(self) -> Tensor:
        return entropy(self.scores)


class Host:
    """The network, its moving tensors and their steps; methods fill in `select`, `loss` and what they remember.

    `theta` are norm layers of the network, with a branch those below the split; `zeta` are the branch's.
    """

    nesterov = False

    def __init__(self, net: nn.Module, *, lr: float, branch: bool) -> None:
        self.lr, self.branch, self.was_reset = lr, branch, False
        self.main, self.side = with_batch_statistics(net), with_batch_statistics(net)
        self.theta, self.zeta = self.own_norms(self.main), branch_norms(self.side)
        if branch:
            self.theta = without(self.theta, modules_beyond_split(self.main))
        self.theta_origin, self.zeta_origin = values(self.theta), values(self.zeta)
        self.start_optimizers()

    def own_norms(self, net: Net) -> list[nn.Parameter]:
        """The norm layers that the method moves without a branch."""
        return all_norms(net)

    def start_optimizers(self) -> None:
        self.theta_sgd = sgd(self.theta, self.lr, nesterov=self.nesterov)
        self.zeta_sgd = sgd(self.zeta, self.lr, nesterov=self.nesterov)

    def reset(self) -> None:
        """Back to the source, with fresh optimisers."""
        put_back(self.theta, self.theta_origin)
        put_back(self.zeta, self.zeta_origin)
        self.start_optimizers()
        self.was_reset = True

    def forward(self, x: Tensor) -> Forward:
        features = shallow_part(self.main, x)
        if not self.branch:
            return Forward(deep_part(self.main, features), None)
        branch_logits = deep_part(self.side, features)
        return Forward(mixed(deep_part(self.main, features), branch_logits), branch_logits)

    def begin(self, x: Tensor) -> None:
        """What happens before the first forward pass over a batch."""

    def select(self, now: Forward) -> Tensor:
        """The samples that the next update is made of."""
        raise NotImplementedError

    def loss(self, now: Forward, chosen: Tensor) -> Tensor:
        """What the method minimises over them."""
        raise NotImplementedError

    def learn(self, now: Forward, chosen: Tensor) -> Tensor:
        """One update; returns the samples that it was made of."""
        self.step(*self.gradients(self.loss(now, chosen), now, chosen))
        return chosen

    def gradients(self, loss: Tensor, now: Forward, chosen: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The loss moves theta; the cross-entropy of the branch to the combined prediction moves zeta."""
        theta = torch.autograd.grad(loss, self.theta, retain_graph=True)
        if now.branch_logits is None:
            return theta, []
        labels = now.scores.argmax(1)
        branch_loss = cross_entropy(now.branch_logits[chosen], labels[chosen])
        return theta, torch.autograd.grad(branch_loss, self.zeta)

    def step(self, theta: Sequence[Tensor], zeta: Sequence[Tensor]) -> None:
        step(self.theta_sgd, theta)
        if self.branch:
            step(self.zeta_sgd, zeta)

    def answer(self, now: Forward) -> Tensor:
        return now.scores

    def end(self) -> None:
        """What is remembered after the last update of a batch."""
