"""The references without learning: the network as it comes, and under batch statistics (Nado et al. 2020)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from oracles.common import Outcome, copied, everyone, with_batch_statistics


def source(net: nn.Module, batches: list[Tensor]) -> Iterator[Outcome]:
    """The net as it comes."""
    still = copied(net)
    for x in batches:
        with torch.no_grad():
            logits = still(x)
        yield Outcome(logits, ~everyone(x))


def bn(net: nn.Module, batches: list[Tensor]) -> Iterator[Outcome]:
    """The net under batch statistics."""
    still = with_batch_statistics(net)
    for x in batches:
        with torch.no_grad():
            logits = still(x)
        yield Outcome(logits, ~everyone(x))
