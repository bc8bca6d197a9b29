"""REM (ICML 2025): a transformer's predictions of ever more masked images agree, and are ranked by their entropy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from nets import Transformer
from torch import Tensor, nn

from oracles.common import (
    Net,
    Outcome,
    adam,
    below,
    deep_part,
    entropy,
    everyone,
    mixed,
    norms_below_top,
    step,
    with_batch_statistics,
)
from oracles.host import Forward, Host


def tokens_at_split(net: Net, x: Tensor, keep: Tensor | None = None) -> Tensor:
    """The input of the last block; of the patches only those in `keep`, one row of indices for each image."""
    assert isinstance(net, Transformer)
    tokens = net.patch(x).flatten(2).transpose(1, 2)
    tokens = torch.cat([net.token.expand(len(x), -1, -1), tokens], dim=1) + net.position
    if keep is not None:
        tokens = torch.stack([torch.cat([row[:1], row[1:][index]]) for row, index in zip(tokens, keep, strict=True)])
    for i in range(7):
        tokens = net.blocks[i](tokens)
    return tokens  # type: ignore[no-any-return]


def attended(net: Net, tokens: Tensor) -> Tensor:
    """What the class token attends to among the patches, in the last block."""
    assert isinstance(net, Transformer)
    block = net.blocks[7]
    q, k, _ = block.qkv(block.norm1(tokens)).chunk(3, dim=-1)  # type: ignore[operator]
    matrix = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).softmax(-1)
    return matrix[:, 0, 1:].detach()  # type: ignore[no-any-return]


def least_attended(attention: Tensor, level: int) -> Tensor:
    """Indices of the patches that level i keeps: all but a tenth for each level, the most attended gone."""
    count = int(attention.shape[1] * (1 - 0.1 * level))
    return attention.argsort(dim=1)[:, :count]


def ranked(scores: Sequence[Tensor]) -> Tensor:
    """Of each sample: agreement with every less masked level, and no less entropy than there."""
    total = torch.zeros(len(scores[0]), dtype=scores[0].dtype)
    for i in range(len(scores)):
        for j in range(len(scores)):
            if i > j:
                total = total - (scores[j].detach().softmax(1) * scores[i].log_softmax(1)).sum(1)
            if i < j:
                total = total + torch.relu(entropy(scores[i]) - entropy(scores[j]).detach())
    return total


def rem(net: nn.Module, batches: list[Tensor], *, lr: float) -> Iterator[Outcome]:
    """Three levels; the whole image is answered, before the update."""
    student = with_batch_statistics(net)
    theta = norms_below_top(student)
    optimizer = adam(theta, lr)
    for x in batches:
        tokens = tokens_at_split(student, x)
        scores = [deep_part(student, tokens)]
        for level in (1, 2):
            keep = least_attended(attended(student, tokens), level)
            scores.append(deep_part(student, tokens_at_split(student, x, keep)))
        step(optimizer, torch.autograd.grad(ranked(scores).mean(), theta))
        yield Outcome(scores[0].detach(), everyone(x), [everyone(x)])


class PlainREMHost(Host):
    """REM as a host: everyone is selected (rem*). Attention is that of the source branch."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.theta_sgd, self.zeta_sgd = adam(self.theta, self.lr), adam(self.zeta, self.lr)

    def own_norms(self, net: Net) -> list[nn.Parameter]:
        return norms_below_top(net)

    def forward(self, x: Tensor) -> Forward:
        self.x = x
        now = self.masked(None)
        self.attention = attended(self.main, tokens_at_split(self.main, x))
        return now

    def masked(self, keep: Tensor | None) -> Forward:
        tokens = tokens_at_split(self.main, self.x, keep)
        if not self.branch:
            return Forward(deep_part(self.main, tokens), None)
        branch_logits = deep_part(self.side, tokens)
        return Forward(mixed(deep_part(self.main, tokens), branch_logits), branch_logits)

    def select(self, now: Forward) -> Tensor:
        return everyone(now.scores)

    def loss(self, now: Forward, chosen: Tensor) -> Tensor:
        levels = [self.masked(least_attended(self.attention, level)).scores for level in (1, 2)]
        return ranked([now.scores, *levels])[chosen].mean()


class REMHost(PlainREMHost):
    """With POEM's threshold."""

    def select(self, now: Forward) -> Tensor:
        return below(now.scores, 0.4)
