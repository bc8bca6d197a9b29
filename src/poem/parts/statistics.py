"""What do batch-norm layers normalise with?

Layer and group norms have no question here: they look at one sample at a time.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from poem.parts.base import Memory, Part
from poem.parts.fields import Share


class BatchLayer(Protocol):
    """A borrowed batch-norm layer. Each verb runs the layer's own forward, activation included."""

    @property
    def source_mean(self) -> Tensor | None:
        """Running mean that came with the model, if it has one."""
        ...

    @property
    def source_var(self) -> Tensor | None:
        """Running variance that came with the model."""
        ...

    @property
    def learning(self) -> bool:
        """Whether the pass under way is learnt from."""
        ...

    def with_source(self, x: Tensor) -> Tensor:
        """Normalise with the model's own running statistics."""
        ...

    def with_batch(self, x: Tensor) -> Tensor:
        """Normalise with the statistics of `x`."""
        ...

    def with_moments(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        """Normalise with the given statistics: (C,), or one row (K, C) for each of K copies of the batch."""
        ...


@dataclass(frozen=True, repr=False)
class Statistics(Part):
    """Chooses the mean and variance of each batch-norm layer, at every pass."""

    @property
    def only_in_training(self) -> bool:
        """Whether only passes that are learnt from are remembered, and others normalise with what is remembered."""
        return False

    @property
    def remembers(self) -> bool:
        """Whether `frozen` finds the stream's statistics in what layers remember."""
        return type(self).frozen is not Statistics.frozen

    def frozen(self, layer: BatchLayer, memory: Memory, key: str) -> tuple[Tensor, Tensor] | None:
        """A layer's mean and variance (C,) for images to come, whatever batch they are in, from what is remembered.

        None where nothing is remembered of the layer.
        """
        return None

    @property
    def copies(self) -> int:
        """How often the batch runs through the network at once, each copy with statistics of its own.

        `combine` makes one answer of them.
        """
        return 1

    @property
    def source_copy(self) -> int | None:
        """Which copy always has the source's statistics; None where none has."""
        return None

    def combine(self, logits: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """The copies' logits (copies, B, C) as one answer (B, C), and what to remember if it is the batch's last.

        By default the logarithm of their mean probability.
        """
        return logits.log_softmax(-1).logsumexp(0) - math.log(len(logits)), {}

    def start_layer(self, key: str, layer: BatchLayer) -> Memory:
        """A layer's memory before the first batch."""
        return {}

    @abstractmethod
    def __call__(self, layer: BatchLayer, x: Tensor, mask: Tensor | None, memory: Memory, key: str) -> Tensor:
        """The layer's output for `x`; rows that `mask` leaves out do not enter the statistics."""

    def remember_layer(self, layer: BatchLayer, x: Tensor, mask: Tensor | None, memory: Memory, key: str) -> Memory:
        """What the layer should find at the next batch, given what it saw at this one."""
        return {}

    def normalised(
        self, layer: BatchLayer, x: Tensor, mask: Tensor | None, memory: Memory, key: str
    ) -> tuple[Tensor, Memory]:
        """The layer's output and what to remember of this pass; a part may compute at once what both need."""
        remembers = layer.learning or not self.only_in_training
        new = self.remember_layer(layer, x, mask, memory, key) if remembers else {}
        return self(layer, x, mask, memory, key), new


@dataclass(frozen=True, repr=False)
class Source(Statistics):
    """The statistics of the training data, as the model came. Without any (never tracked): the batch's."""

    def frozen(self, layer: BatchLayer, memory: Memory, key: str) -> tuple[Tensor, Tensor] | None:
        """As they came."""
        return None if layer.source_mean is None or layer.source_var is None else (layer.source_mean, layer.source_var)

    def __call__(self, layer: BatchLayer, x: Tensor, mask: Tensor | None, memory: Memory, key: str) -> Tensor:
        """The layer as it came."""
        return layer.with_source(x)


@dataclass(frozen=True, repr=False)
class FromBatch(Statistics):
    """The statistics of the batch in hand; a masked pass equals the pass over the kept samples alone.

    A layer that sees one value per channel (one image on a 1x1 map) has no variance to speak of and falls back to the
    source statistics.

    Paper: Nado et al. 2020, Schneider et al. 2020; used by Tent and its descendants.
    """

    def __call__(self, layer: BatchLayer, x: Tensor, mask: Tensor | None, memory: Memory, key: str) -> Tensor:
        """Batch statistics, biased variance."""
        if x.numel() == x.shape[1]:
            return layer.with_source(x)
        if mask is None:
            return layer.with_batch(x)
        mean, var = moments(x, mask)
        if x[0, 0].numel() == 1 and layer.source_mean is not None and layer.source_var is not None:
            several = mask.sum() > 1
            mean, var = torch.where(several, mean, layer.source_mean), torch.where(several, var, layer.source_var)
        return layer.with_moments(x, mean, var)


@dataclass(frozen=True, repr=False)
class Mixed(Statistics):
    """A weighted mean of the source's statistics and the batch's: `(1 - alpha) source + alpha batch`.

    The batch's variance is unbiased and no gradient flows through the statistics, because the reference codes read them
    out of a running average.

    Paper: Schneider et al., NeurIPS 2020; MEMO uses alpha = 1/17 (a prior worth 16 samples).
    """

    alpha: Share = 0.1

    def __call__(self, layer: BatchLayer, x: Tensor, mask: Tensor | None, memory: Memory, key: str) -> Tensor:
        """Mixed statistics, constants for the backward pass."""
        if layer.source_mean is None or layer.source_var is None:
            return FromBatch()(layer, x, mask, memory, key)
        return layer.with_moments(x, *mix(x, mask, layer.source_mean, layer.source_var, self.alpha))


@dataclass(frozen=True, repr=False)
class RunningMean(Statistics):
    """An average over the stream: `(1 - alpha) so far + alpha batch`, starting from the source's statistics.

    Paper: BN-EMA, as in the online-TTA benchmark of Marsden et al.; RoTTA's robust batch norm is its relative.
    Differs: one pass instead of two, so a layer sees inputs that were normalised by averages, not by the batch.
    """

    alpha: Share = 0.1

    def start_layer(self, key: str, layer: BatchLayer) -> Memory:
        """The source's statistics."""
        if layer.source_mean is None or layer.source_var is None:
            return {}
        return {f"{key}.mean": layer.source_mean.clone(), f"{key}.var": layer.source_var.clone()}

    def frozen(self, layer: BatchLayer, memory: Memory, key: str) -> tuple[Tensor, Tensor] | None:
        """The average so far."""
        return (memory[f"{key}.mean"], memory[f"{key}.var"]) if f"{key}.mean" in memory else None

    def __call__(self, layer: BatchLayer, x: Tensor, mask: Tensor | None, memory: Memory, key: str) -> Tensor:
        """The average, this batch included."""
        new = self.remember_layer(layer, x, mask, memory, key)
        if not new:
            return FromBatch()(layer, x, mask, memory, key)
        return layer.with_moments(x, new[f"{key}.mean"], new[f"{key}.var"])

    def remember_layer(self, layer: BatchLayer, x: Tensor, mask: Tensor | None, memory: Memory, key: str) -> Memory:
        """The average moved by this batch."""
        if f"{key}.mean" not in memory:
            return {}
        mean, var = mix(x, mask, memory[f"{key}.mean"], memory[f"{key}.var"], self.alpha)
        return {f"{key}.mean": mean, f"{key}.var": var}


@dataclass(frozen=True, repr=False)
class Robust(Statistics):
    """Statistics of its own for every network: passes that are learnt from mix in the batch's, others only read them.

    A learning pass normalises with `(1 - alpha) own + alpha batch`, through which the gradient flows, and keeps that.

    Paper: RoTTA (Yuan et al., CVPR 2023), robust batch normalisation.
    Reference code: BIT-DA/RoTTA (MIT).
    Differs: none.
    """

    alpha: Share = 0.05

    @property
    def only_in_training(self) -> bool:
        """A pass that only predicts changes nothing."""
        return True

    def start_layer(self, key: str, layer: BatchLayer) -> Memory:
        """The source's statistics."""
        if layer.source_mean is None or layer.source_var is None:
            return {}
        return {f"{key}.mean": layer.source_mean.clone(), f"{key}.var": layer.source_var.clone()}

    def frozen(self, layer: BatchLayer, memory: Memory, key: str) -> tuple[Tensor, Tensor] | None:
        """As a pass that is not learnt from normalises."""
        return (memory[f"{key}.mean"], memory[f"{key}.var"]) if f"{key}.mean" in memory else None

    def __call__(self, layer: BatchLayer, x: Tensor, mask: Tensor | None, memory: Memory, key: str) -> Tensor:
        """Mixed in a learning pass, else as remembered."""
        if f"{key}.mean" not in memory:
            return FromBatch()(layer, x, mask, memory, key)
        if layer.learning:
            return layer.with_moments(x, *self._mixed(x, mask, memory, key))
        return layer.with_moments(x, memory[f"{key}.mean"], memory[f"{key}.var"])

    def remember_layer(self, layer: BatchLayer, x: Tensor, mask: Tensor | None, memory: Memory, key: str) -> Memory:
        """The mixed statistics of a learning pass."""
        if f"{key}.mean" not in memory:
            return {}
        mean, var = self._mixed(x.detach(), mask, memory, key)
        return {f"{key}.mean": mean, f"{key}.var": var}

    def _mixed(self, x: Tensor, mask: Tensor | None, memory: Memory, key: str) -> tuple[Tensor, Tensor]:
        """The remembered statistics moved by the batch's, biased variance."""
        mean, var = moments(x, mask)
        own_mean, own_var = memory[f"{key}.mean"], memory[f"{key}.var"]
        return own_mean + self.alpha * (mean - own_mean), own_var + self.alpha * (var - own_var)


def moments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and biased variance per channel, over the rows that `mask` keeps."""
    values = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    axes = [0, *range(2, x.dim())]
    if mask is None:
        return values.mean(axes), values.var(axes, correction=0)
    rows = mask.view(-1, *[1] * (x.dim() - 1))
    count = (rows.to(values.dtype).sum() * values[0, 0].numel()).clamp(min=1)
    mean = torch.where(rows, values, 0).sum(axes) / count
    centred = values - mean.view(1, -1, *[1] * (x.dim() - 2))
    return mean, torch.where(rows, centred.square(), 0).sum(axes) / count


def mix(x: Tensor, mask: Tensor | None, mean: Tensor, var: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    """`(1 - alpha)` of the given statistics and `alpha` of the batch's, detached, with the unbiased variance."""
    batch_mean, batch_var = moments(x.detach(), mask)
    count = (x.shape[0] if mask is None else mask.sum()) * (x.numel() // (x.shape[0] * x.shape[1]))
    unbiased = batch_var * count / (torch.as_tensor(count) - 1).clamp(min=1)
    return mean + alpha * (batch_mean - mean), var + alpha * (unbiased - var)
