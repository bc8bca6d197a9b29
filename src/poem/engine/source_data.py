"""Parts that prepare themselves on source data, such as EATA's Fisher anchor.

A sweep prepares the same part many times, so the result is cached: per model, under the settings that it depends on
(`key_of`), and under a hash of every image that was read and of the network's answers to the first batch. To find it
again the images are read and hashed, which costs little beside the passes. The object that held the images is not
trusted: a tensor may have been written to through `.data`, a data set may have other content, a shuffled loader another
order, and each is then prepared anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from poem._util.caching import Fingerprint, Key, LRUCache, cache_key, fingerprint
from poem.engine.input_checks import finite
from poem.engine.input_checks import images as checked_images
from poem.engine.model_input import ModelInput, read_input
from poem.engine.network import Network
from poem.parts.base import Memory, Outputs, Part
from poem.parts.statistics import Statistics

SAMPLES = 2000
CACHE_BYTES = 128 << 20
"""Bytes of prepared tensors that are cached for one model."""
Prepared = tuple[Memory, int]
_CACHES: dict[int, LRUCache[tuple[Key, str], Prepared]] = {}  # by identity of the model, for as long as it lives


def prepare(
    part: Part, network: Network, statistics: Statistics, data: Iterable[Any] | Tensor, size: int
) -> tuple[Memory, int]:
    """What a part measures on the first `SAMPLES` source images, and how many images there were."""
    cache, key = _cache(network.model), key_of(part, network, statistics)
    found = None
    if any(held == key for held, _ in cache.keys()) and not isinstance(data, Iterator):  # noqa: SIM118 - no mapping
        source = SourceBatches(network, statistics, data, size)
        for _ in source.images():
            pass
        found = cache.get((key, source.hexdigest()))
    if found is None:
        source = SourceBatches(network, statistics, data, size)
        found = part.prepare(source), source.count
        if source.count == 0:
            raise ValueError("expected source_data with at least one batch of images, got none")
        cache.add((key, source.hexdigest()), found)
    return {name: tensor.clone() for name, tensor in found[0].items()}, found[1]


def forget() -> None:
    """Drop everything that is cached."""
    _CACHES.clear()


def key_of(part: Part, network: Network, statistics: Statistics) -> Key:
    """What a preparation depends on, beside the images and what the model computes with its tensors."""
    model = network.model
    return cache_key(
        part=f"{type(part).__module__}.{type(part).__qualname__} {part!r}",
        weights=fingerprint(*model.parameters(), *model.buffers()),
        parameters=network.theta.names,
        settings=network.settings,
        logits=network.given_logits,
        statistics=repr(statistics),
        device=network.theta.source().device,
        threads=torch.get_num_threads(),
        tf32=(torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32),
        acceleration=network.acceleration.key,
    )


def _cache(model: nn.Module) -> LRUCache[tuple[Key, str], Prepared]:
    """What was prepared for this very model before."""
    if id(model) not in _CACHES:
        weakref.finalize(model, _CACHES.pop, id(model), None)
        _CACHES[id(model)] = LRUCache(CACHE_BYTES, lambda found: sum(tensor.nbytes for tensor in found[0].values()))
    return _CACHES[id(model)]


class SourceBatches:
    """Outputs for the first `SAMPLES` images, in the loader's batches or in batches of `size`, hashed as they are read.

    The hash begins with the network's answers to the first batch. They tell two models apart whose tensors are equal
    and whose code, hooks or attributes are not, and two `logits=` functions that differ in what they close over.
    """

    def __init__(self, network: Network, statistics: Statistics, data: Iterable[Any] | Tensor, size: int) -> None:
        self._network, self._statistics, self._data, self._size = network, statistics, data, size
        self._hash, self.count = Fingerprint(), 0

    def hexdigest(self) -> str:
        """The hash of all that was read."""
        return self._hash.hexdigest()

    def __iter__(self) -> Iterator[Outputs]:
        theta = self._network.theta.source().requires_grad_()
        for images in self.images():
            (logits,), context = self._network.heads(images, theta, None, self._statistics, self._memory())
            yield Outputs(
                logits, (logits,), images=images, features=context.features, theta=theta,
                classify=self._network.classify,
            )  # fmt: skip

    def _memory(self) -> Memory:
        """The source's own statistics, where passes that are not learnt from normalise with what is remembered."""
        start, norms = self._statistics.start_layer, self._network.norms
        if not self._statistics.only_in_training:
            return {}
        return {key: each for norm in norms if norm.batch for key, each in start(norm.key, norm).items()}

    def images(self) -> Iterator[Tensor]:
        """The images alone."""
        theta, left = self._network.theta.source().requires_grad_(), SAMPLES
        data = [self._data] if isinstance(self._data, Mapping) else self._data
        for item in torch.split(data, self._size) if isinstance(data, Tensor) else data:
            if left <= 0:
                return
            came = read_input(self._network.model, item[0] if isinstance(item, tuple | list) else item, {})
            given = None
            if isinstance(came, ModelInput):
                given = came.noted(self._network.shared).cut(slice(left)).to(theta.device).taken()
            came = came[:left] if given is None else given.images
            images = came.to(theta.device) if isinstance(came, Tensor) else came
            images = checked_images(images, self._network.model)
            finite(images)
            self._network.given = None if given is None else replace(given, images=images)
            if left == SAMPLES:  # with gradients, as it is measured: another mode may be another computation
                answers, _ = self._network.heads(images.clone(), theta, None, self._statistics, {})
                self._hash.update(*answers)
            self._hash.update(came, *([] if given is None else given.tensors[1:]))
            left -= len(images)
            self.count += len(images)
            yield images
