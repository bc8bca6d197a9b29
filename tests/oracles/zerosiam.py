"""ZeroSiam (ICLR 2026): entropy behind a trained matrix before the frozen head, kept near the plain prediction."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from nets import ConvNet
from torch import Tensor, nn

from oracles.common import Outcome, all_norms, entropy, everyone, sgd, step, with_batch_statistics
from oracles.lame import features_and_logits


def kl(p: Tensor, q: Tensor) -> Tensor:
    """KL(p || q) of each row, both log-probabilities."""
    return (p.exp() * (p - q)).sum(1)


def zerosiam(
    net: nn.Module, batches: list[Tensor], *, lr: float, alpha: float = 1.0, conv: float = 10.0, vit: float = 1.0
) -> Iterator[Outcome]:
    """Two optimisers: norm layers at `lr`, the predictor at a multiple of it; the plain head answers."""
    student = with_batch_statistics(net)
    theta, head = all_norms(student), student.fc if isinstance(student, ConvNet) else student.head
    predictor = nn.Parameter(torch.eye(head.in_features, dtype=head.weight.dtype))
    norms, other = sgd(theta, lr), sgd([predictor], lr * (conv if isinstance(student, ConvNet) else vit))
    for x in batches:
        features, logits = features_and_logits(student, x)
        plain = logits.detach().log_softmax(1)
        online = head(features @ predictor.T)
        guess = online.log_softmax(1)
        loss = entropy(online).mean() + alpha * (kl(plain, guess) + kl(guess, plain)).mean()
        *gradients, last = torch.autograd.grad(loss, [*theta, predictor])
        step(norms, gradients)
        step(other, [last])
        yield Outcome(logits.detach(), everyone(x), [everyone(x)])
