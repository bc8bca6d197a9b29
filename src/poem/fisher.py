"""How much does each moving number matter on source data? EATA's importance weights.

Paper: EATA (Niu et al., ICML 2022). Labels are the network's own; importance is the mean over batches of the squared
gradient of the batch's mean loss. Kept per data object and all that it depends on, so that a sweep pays once.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from poem._checks import finite
from poem._checks import images as images_of
from poem._files import fingerprint
from poem.network import Network
from poem.parts.statistics import Statistics

SAMPLES = 2000
Found = tuple[Tensor, int]
_KNOWN: dict[int, dict[tuple[Any, ...], Found]] = {}  # by identity of the data, for as long as it lives


def fisher(network: Network, statistics: Statistics, data: Iterable[Any] | Tensor, size: int) -> tuple[Tensor, int]:
    """Importance of each number of `theta`, and how many images it took."""
    weights = fingerprint(*network.model.parameters(), *network.model.buffers())
    version = data._version if isinstance(data, Tensor) else None
    device = network.theta.source().device
    key = (weights, network.theta.names, network.settings, repr(statistics), size, version, device)
    known = _known(data)
    if key not in known:
        known[key] = _measure(network, statistics, data, size)
    importance, images = known[key]
    return importance.to(device), images


def _known(data: Iterable[Any] | Tensor) -> dict[tuple[Any, ...], Found]:
    """What was found on this very object before; lists and generators cannot be remembered."""
    if id(data) not in _KNOWN:
        try:
            weakref.finalize(data, _KNOWN.pop, id(data), None)
        except TypeError:
            return {}
        _KNOWN[id(data)] = {}
    return _KNOWN[id(data)]


def _measure(network: Network, statistics: Statistics, data: Iterable[Any] | Tensor, size: int) -> tuple[Tensor, int]:
    theta = network.theta.source().requires_grad_()
    total, batches, images = torch.zeros_like(theta), 0, 0
    for batch in _batches(data, size):
        batch = images_of(batch.to(theta.device), network.model, None)
        finite(batch)
        (logits,), _ = network.heads(batch, theta, None, statistics, {})
        label = logits.detach().argmax(1, keepdim=True)
        loss = -logits.log_softmax(1).gather(1, label).mean()
        (gradient,) = torch.autograd.grad(loss, theta)
        total += gradient.square()
        batches, images = batches + 1, images + len(batch)
    if batches == 0:
        raise ValueError("expected source_data with at least one batch of images, got none")
    return total / batches, images


def _batches(data: Iterable[Any] | Tensor, size: int) -> Iterator[Tensor]:
    """The first `SAMPLES` images, in the loader's batches or in batches of `size`."""
    left = SAMPLES
    for item in torch.split(data, size) if isinstance(data, Tensor) else data:
        images = item[0] if isinstance(item, tuple | list) else item
        if left <= 0:
            return
        yield images[:left]
        left -= len(images)
