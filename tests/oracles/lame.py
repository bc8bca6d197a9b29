"""LAME (Boudiaf et al., CVPR 2022): predictions of near samples attract each other; nothing is learnt."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from nets import ConvNet
from torch import Tensor, nn

from oracles.common import Net, Outcome, copied, everyone, shallow_part


def features_and_logits(net: Net, x: Tensor) -> tuple[Tensor, Tensor]:
    """What the last layer reads, and what it says."""
    features = shallow_part(net, x)
    if isinstance(net, ConvNet):
        features = net.layer4(features).mean((2, 3))
        return features, net.fc(features)
    features = net.norm(net.blocks[7](features))[:, 0]
    return features, net.head(features)


@torch.no_grad()
def refined(features: Tensor, logits: Tensor) -> Tensor:
    """Log-probabilities after the fixed-point iterations, of which there are at most 100.

    The bandwidth reads the fifth smallest distance, each sample's own 0 counted, and with fewer than five samples the
    largest. One or two samples, and a bandwidth of 0 (equal images), leave the plain log-probabilities.
    """
    features = features / features.norm(dim=1, keepdim=True)
    distance = (features[:, None] - features[None, :]).norm(dim=2)
    bandwidth = distance.sort(dim=1).values[:, min(5, len(logits)) - 1].mean()
    if bandwidth == 0 or len(logits) <= 2:
        return logits.log_softmax(1)
    affinity = (-(distance**2) / (2 * bandwidth**2)).exp()
    unary = -(logits.softmax(1) + 1e-10).log()
    log_y = (-unary).log_softmax(1)
    old_energy = math.inf
    for iteration in range(100):
        pairwise = affinity @ log_y.exp()
        log_y = (pairwise - unary).log_softmax(1)
        y = log_y.exp()
        energy = float((unary * y - pairwise * y + y * y.clamp(min=1e-20).log()).sum())
        if iteration > 1 and abs(energy - old_energy) <= 1e-8 * abs(old_energy):
            break
        old_energy = energy
    return log_y


def lame(net: nn.Module, batches: list[Tensor]) -> Iterator[Outcome]:
    """The source network's predictions, refined batch by batch."""
    still = copied(net)
    for x in batches:
        yield Outcome(refined(*features_and_logits(still, x)), ~everyone(x))
