"""How much does each moving number matter on source data? EATA's importance weights.

Paper: EATA (Niu et al., ICML 2022). Labels are the network's own; importance is the mean over batches of the squared
gradient of the batch's mean loss.

A sweep asks for the same importance many times, so it is kept: per model, under the settings that it depends on
(`key_of`), and under a hash of every image that was consumed and of the network's answers to the first batch. To find
it again the images are read and hashed, which costs little beside the passes. Nothing is taken for granted of the
object that held them: a tensor may have been written to through `.data`, a data set may have other content, a shuffled
loader another order, and each is then measured anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from poem._util.caching import Fingerprint, Key, LRUCache, cache_key, fingerprint
from poem.engine.input_checks import finite
from poem.engine.input_checks import images as images_of
from poem.engine.network import Network
from poem.parts.statistics import Statistics

SAMPLES = 2000
ROOM = 128 << 20
"""Bytes of importance that are kept for one model."""
Found = tuple[Tensor, int]
_KNOWN: dict[int, LRUCache[tuple[Key, str], Found]] = {}  # by identity of the model, for as long as it lives


def fisher(network: Network, statistics: Statistics, data: Iterable[Any] | Tensor, size: int) -> tuple[Tensor, int]:
    """Importance of each number of `theta`, and how many images it took."""
    known, key = _known(network.model), key_of(network, statistics)
    found = None
    if any(held == key for held, _ in known.keys()) and not isinstance(data, Iterator):  # noqa: SIM118 - no mapping
        source = _Source(network, statistics, data, size)
        for _ in source:
            pass
        found = known.get((key, source.hexdigest()))
    if found is None:
        source = _Source(network, statistics, data, size)
        found = _measure(network, statistics, source)
        known.add((key, source.hexdigest()), found)
    return found[0].clone(), found[1]


def forget() -> None:
    """Keep no importance: it is measured anew."""
    _KNOWN.clear()


def key_of(network: Network, statistics: Statistics) -> Key:
    """What importance depends on, beside the images and what the model computes with its tensors."""
    model = network.model
    return cache_key(
        weights=fingerprint(*model.parameters(), *model.buffers()),
        parameters=network.theta.names,
        settings=network.settings,
        logits=network.given_logits,
        statistics=repr(statistics),
        device=network.theta.source().device,
        threads=torch.get_num_threads(),
        tf32=(torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        compiled=getattr(network, "_passes", None) is not None,
    )


def _known(model: nn.Module) -> LRUCache[tuple[Key, str], Found]:
    """What was found for this very model before."""
    if id(model) not in _KNOWN:
        weakref.finalize(model, _KNOWN.pop, id(model), None)
        _KNOWN[id(model)] = LRUCache(ROOM, lambda found: found[0].nbytes)
    return _KNOWN[id(model)]


def _measure(network: Network, statistics: Statistics, source: _Source) -> Found:
    theta = network.theta.source().requires_grad_()
    total, batches, images = torch.zeros_like(theta), 0, 0
    for batch in source:
        (logits,), _ = network.heads(batch, theta, None, statistics, {})
        label = logits.detach().argmax(1, keepdim=True)
        loss = -logits.log_softmax(1).gather(1, label).mean()
        (gradient,) = torch.autograd.grad(loss, theta)
        total += gradient.square()
        batches, images = batches + 1, images + len(batch)
    if batches == 0:
        raise ValueError("expected source_data with at least one batch of images, got none")
    return total / batches, images


class _Source:
    """The first `SAMPLES` images, in the loader's batches or in batches of `size`, hashed as they are read.

    The hash begins with the network's answers to the first batch. They tell two models apart whose tensors are equal
    and whose code, hooks or attributes are not, and two `logits=` functions that differ in what they close over.
    """

    def __init__(self, network: Network, statistics: Statistics, data: Iterable[Any] | Tensor, size: int) -> None:
        self._network, self._statistics, self._data, self._size = network, statistics, data, size
        self._hash = Fingerprint()

    def hexdigest(self) -> str:
        """The hash of all that was read."""
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[Tensor]:
        theta, left = self._network.theta.source().requires_grad_(), SAMPLES
        for item in torch.split(self._data, self._size) if isinstance(self._data, Tensor) else self._data:
            images = item[0] if isinstance(item, tuple | list) else item
            if left <= 0:
                return
            came = images[:left]
            images = came.to(theta.device) if isinstance(came, Tensor) else came
            images = images_of(images, self._network.model, None)
            finite(images)
            if left == SAMPLES:  # with gradients, as it is measured: another mode may be another computation
                answers, _ = self._network.heads(images.clone(), theta, None, self._statistics, {})
                self._hash.update(*answers)
            self._hash.update(came)
            left -= len(images)
            yield images
