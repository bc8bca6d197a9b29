"""Is a batch doubled at the split the same as two forward passes? Tried once per model, on its first batch."""

from __future__ import annotations

import torch
from torch import Tensor

from poem.engine.network import Network
from poem.parts.base import Memory
from poem.parts.statistics import Statistics

MISFITS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError, AssertionError)
"""What a model raises that cannot take a batch; not what a signal handler does, such as TimeoutError."""


def check_doubling(network: Network, images: Tensor, statistics: Statistics, memory: Memory) -> float:
    """How far the doubled pass is from two plain ones, each half with its own tensors; sets `network.doubles`.

    The branch is moved away from the source first, so that a deep part that mixes samples shows.
    """
    assert network.branch is not None
    start = network.branch.source()
    moved = start + 0.1 * torch.cos(torch.arange(start.numel(), device=start.device)).to(start.dtype)
    plain, run = network.heads(images, None, moved, statistics, memory, doubled=False)
    silent = [norm.name for norm in network.norms if norm.swappable and norm.name not in run.ran]
    if silent:
        raise ValueError(f"the branch's layers {silent[:3]} do not run through their own forward; pass split=")
    try:
        doubled, _ = network.heads(images, None, moved, statistics, memory, doubled=True)
        error = max(float((a - b).abs().max() / (1 + b.abs().max())) for a, b in zip(doubled, plain, strict=True))
    except MISFITS:  # whatever a model does with a batch of another size, two passes are right
        error = torch.inf
    coarse = network.autocast.coarse(network.model, cuda=images.is_cuda)
    network.doubles = error < (5e-2 if coarse else 1e-3)
    return error
