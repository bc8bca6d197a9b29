"""ReCAP (ICML 2025), as a later paper restates it: entropy and instability over a Gaussian region of features."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from nets import ConvNet
from torch import Tensor, nn

from oracles.common import Net, Outcome, norms_below_top, sgd, step, with_batch_statistics
from oracles.host import Forward, Host
from oracles.lame import features_and_logits


class Region:
    """M and the class-wise correction, entry by entry."""

    def __init__(self, net: Net, source: Sequence[Tensor], region: float, tilt: float = 5e-4) -> None:
        head = net.fc if isinstance(net, ConvNet) else net.head
        weight = head.weight.detach()
        with torch.no_grad():
            features = torch.cat([features_and_logits(net, x)[0] for x in source])
        mean = features.mean(0)
        variance = region * ((features - mean) ** 2).mean(0)
        classes = len(weight)
        self.moments = torch.ones(classes, classes, dtype=weight.dtype)
        for k in range(classes):
            for j in range(classes):
                gap = weight[k] - weight[j]
                self.moments[k, j] = math.exp(0.5 * float((gap * variance * gap).sum()))
        self.tilt = tilt * (weight**2).sum(1)

    def entropy(self, scores: Tensor) -> Tensor:
        p = scores.softmax(1)
        nu = torch.stack([(p * row).sum(1) for row in self.moments], dim=1)
        outer = (scores + self.tilt).softmax(1)
        return (outer * (nu.log() - p.log())).sum(1)

    def instability(self, scores: Tensor) -> Tensor:
        p = scores.softmax(1)
        nu = torch.stack([(p * row).sum(1) for row in self.moments], dim=1)
        return (p * nu.log()).sum(1)

    def loss(self, scores: Tensor, chosen: Tensor, limit: float) -> Tensor:
        """Mean over the selection, surer samples more, three times at most."""
        weight = (limit - self.entropy(scores).detach()).exp().clamp(max=3.0)
        return (weight * (self.entropy(scores) + 0.5 * self.instability(scores)))[chosen].mean()


def recap(
    net: nn.Module,
    batches: list[Tensor],
    *,
    lr: float,
    source: list[Tensor],
    region: float = 1.2,
    margin: float = 0.8,
) -> Iterator[Outcome]:
    """Regional entropy below a multiple of ln C; answers come from before the update."""
    student = with_batch_statistics(net)
    around = Region(student, source, region)
    theta = norms_below_top(student)
    optimizer = sgd(theta, lr)
    for x in batches:
        logits = student(x)
        limit = margin * math.log(logits.shape[1])
        chosen = around.entropy(logits).detach() < limit
        outcome = Outcome(logits.detach(), chosen)
        if chosen.any():
            step(optimizer, torch.autograd.grad(around.loss(logits, chosen, limit), theta))
            outcome.updates.append(chosen)
        yield outcome


class ReCAPHost(Host):
    """ReCAP as a host: the region is of the plain network, the prediction both heads'."""

    def __init__(
        self, net: nn.Module, *, source: list[Tensor], region: float = 1.2, margin: float = 0.8, **more: Any
    ) -> None:
        super().__init__(net, **more)
        self.around, self.margin = Region(with_batch_statistics(net), source, region), margin

    def own_norms(self, net: Net) -> list[nn.Parameter]:
        return norms_below_top(net)

    def select(self, now: Forward) -> Tensor:
        return self.around.entropy(now.scores).detach() < self.margin * math.log(now.scores.shape[1])

    def loss(self, now: Forward, chosen: Tensor) -> Tensor:
        return self.around.loss(now.scores, chosen, self.margin * math.log(now.scores.shape[1]))
