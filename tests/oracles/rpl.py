"""RPL (Rusak et al., TMLR 2022): robust pseudo-labelling, the generalised cross-entropy to the net's own labels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from oracles.common import Outcome, all_norms, below, everyone, sgd, step, with_batch_statistics
from oracles.host import Forward, Host


def generalised(scores: Tensor) -> Tensor:
    """(1 - p_y^0.8) / 0.8 with y the predicted class."""
    p = scores.softmax(1)
    return (1 - p[torch.arange(len(p)), p.argmax(1)] ** 0.8) / 0.8


def rpl(net: nn.Module, batches: list[Tensor], *, lr: float) -> Iterator[Outcome]:
    """Every sample counts; answers come from before the update."""
    student = with_batch_statistics(net)
    theta = all_norms(student)
    optimizer = sgd(theta, lr)
    for x in batches:
        logits = student(x)
        step(optimizer, torch.autograd.grad(generalised(logits).mean(), theta))
        yield Outcome(logits.detach(), everyone(x), [everyone(x)])


class PlainRPLHost(Host):
    """RPL as a host: everyone is selected (rpl*)."""

    def select(self, now: Forward) -> Tensor:
        return everyone(now.scores)

    def loss(self, now: Forward, chosen: Tensor) -> Tensor:
        return generalised(now.scores)[chosen].mean()


class RPLHost(PlainRPLHost):
    """With POEM's threshold."""

    def select(self, now: Forward) -> Tensor:
        return below(now.scores, 0.4)
