"""DeYO (Lee et al., ICLR 2024): samples count whose prediction is sure and suffers when their patches are shuffled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor, nn

from oracles.common import (
    Net,
    Outcome,
    below,
    confidence_weight,
    drop_of,
    entropy,
    everyone,
    norms_below_top,
    sgd,
    shuffled,
    step,
    with_batch_statistics,
)
from oracles.host import Forward, Host


def deyo(net: nn.Module, batches: list[Tensor], *, lr: float, rng: Generator, plpd: float = 0.2) -> Iterator[Outcome]:
    """Entropy below 0.5 ln C, PLPD above `plpd`; weights exp(0.4 ln C - H) + exp(PLPD)."""
    student = with_batch_statistics(net)
    theta = norms_below_top(student)
    optimizer = sgd(theta, lr)
    for x in batches:
        destroyed = shuffled(x, rng)
        logits = student(x)
        reliable = below(logits, 0.5)
        outcome = Outcome(logits.detach(), ~everyone(x))
        if reliable.any():
            with torch.no_grad():  # over the reliable samples alone: batch statistics are theirs
                drop = drop_of(logits[reliable].softmax(1), student(destroyed[reliable]).softmax(1))
            inside = drop > plpd
            outcome.selected[reliable] = inside
            if inside.any():
                kept = entropy(logits)[reliable][inside]
                weight = confidence_weight(kept, logits.shape[1]) + drop[inside].exp()
                loss = (weight * kept).mean()
                step(optimizer, torch.autograd.grad(loss, theta))
                outcome.updates.append(outcome.selected)
        yield outcome


class DeYOHost(Host):
    """DeYO as a host. A repeated update has no selection of its own: its PLPD pass covers the selected alone."""

    def __init__(self, *given: Any, rng: Generator, plpd: float = 0.2, **more: Any) -> None:
        super().__init__(*given, **more)
        self.rng, self.plpd = rng, plpd

    def own_norms(self, net: Net) -> list[nn.Parameter]:
        return norms_below_top(net)

    def begin(self, x: Tensor) -> None:
        self.destroyed = shuffled(x, self.rng)

    def drops(self, now: Forward) -> Tensor:
        """PLPD of the samples in `self.among` by a pass over them alone; below every threshold elsewhere."""
        drop = torch.full_like(now.entropy, -2.0).detach()
        if self.among.any():
            with torch.no_grad():
                destroyed = self.forward(self.destroyed[self.among])
                drop[self.among] = drop_of(now.p[self.among], destroyed.p)
        return drop

    def select(self, now: Forward) -> Tensor:
        self.among = below(now.scores, 0.5)
        return self.among & (self.drops(now) > self.plpd)

    def loss(self, now: Forward, chosen: Tensor) -> Tensor:
        kept, drop = now.entropy[chosen], self.drops(now)[chosen]
        weight = confidence_weight(kept, now.scores.shape[1]) + drop.exp()
        self.among = chosen
        return (weight * kept).mean()
