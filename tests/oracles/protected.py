"""Protected online entropy matching (Bar, Shaer, Romano, NeurIPS 2024): entropies follow the source's, by betting."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from oracles.common import Net, Outcome, below, entropy, norms_below_top, sgd, step, with_batch_statistics
from oracles.host import Forward, Host


class Bettor:
    """Bets on where the next entropy lies among the source's."""

    def __init__(self, net: nn.Module, source: Sequence[Tensor]) -> None:
        with torch.no_grad():
            held = np.concatenate([entropy(net(x)).numpy() for x in source])
        self.q, counts = np.unique(held, return_counts=True)
        self.c = np.cumsum(counts) / len(held)
        self.bet, self.wealth, self.gradients, self.first = 0.0, 1.0, list[float](), True

    def target(self, h: float) -> float:
        u = float(np.interp(h, self.q, self.c))
        bet, v = self.bet, u - 0.5
        protected = 0.5 * bet * u**2 + (1 - 0.5 * bet) * u
        self.wealth *= 1 + bet * v
        g = v / (1 + bet * v)
        if abs(bet) > 1.8 and np.sign(v) == np.sign(bet):
            g = 0.0
        if not self.first and g != 0:
            self.gradients.append(g)
            self.bet = bet + 1 / (8 * math.sqrt(3)) * g / math.sqrt(sum(each**2 for each in self.gradients))
        self.first = False
        return float(np.interp(protected, self.c, self.q))

    def targets(self, scores: Tensor) -> Tensor:
        return torch.tensor([self.target(float(h)) for h in entropy(scores).detach()], dtype=scores.dtype)


def matching(scores: Tensor, target: Tensor, chosen: Tensor) -> Tensor:
    """Half the mean of (w H - w target)^2, w = exp(0.4 ln C - H)."""
    h = entropy(scores)
    weight = (0.4 * math.log(scores.shape[1]) - h.detach()).exp()
    return 0.5 * ((weight * h - weight * target) ** 2)[chosen].mean()


def protected(
    net: nn.Module, batches: list[Tensor], *, lr: float, source: list[Tensor], begin: int = 100
) -> Iterator[Outcome]:
    """Every sample moves the bets; none is learnt from before so many have come."""
    student = with_batch_statistics(net)
    theta, bettor, seen = norms_below_top(student), Bettor(student, source), 0
    optimizer = sgd(theta, lr)
    for x in batches:
        logits = student(x)
        target = bettor.targets(logits)
        seen += len(x)
        chosen = below(logits, 0.4) & (seen >= begin)
        outcome = Outcome(logits.detach(), chosen)
        if chosen.any():
            step(optimizer, torch.autograd.grad(matching(logits, target, chosen), theta))
            outcome.updates.append(chosen)
        yield outcome


class ProtectedHost(Host):
    """As a host: targets are those of the batch's first pass."""

    def __init__(self, net: nn.Module, *, source: list[Tensor], begin: int = 100, **more: Any) -> None:
        super().__init__(net, **more)
        self.bettor, self.least, self.seen = Bettor(with_batch_statistics(net), source), begin, 0

    def own_norms(self, net: Net) -> list[nn.Parameter]:
        return norms_below_top(net)

    def begin(self, x: Tensor) -> None:
        self.seen += len(x)
        self.target: Tensor | None = None

    def select(self, now: Forward) -> Tensor:
        if self.target is None:
            self.target = self.bettor.targets(now.scores)
        return below(now.scores, 0.4) & (self.seen >= self.least)

    def loss(self, now: Forward, chosen: Tensor) -> Tensor:
        assert self.target is not None
        return matching(now.scores, self.target, chosen)
