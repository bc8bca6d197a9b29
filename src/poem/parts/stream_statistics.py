"""Statistics that follow the stream: several weights of the batch at once, and a rate of their own.

`Blended` is what `auto` uses on batch norm. How much a batch may move the statistics depends on how many images it
holds and on whether its classes come in runs, which is seen in the network's own predictions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from poem.parts.base import Memory, Outcome, Outputs
from poem.parts.fields import NotNegative, Positive, Share
from poem.parts.statistics import BatchLayer, FromBatch, Statistics, moments

NEAR, FAR, SMOOTH = 64.0, 512.0, 256.0
"""Images over which predictions are averaged: near a sample, before the batch, and for the ratio of both."""


@dataclass(frozen=True, repr=False)
class Blended(Statistics):
    """Several mixtures of the source's statistics and the stream's at once; the answer is their mean probability.

    The stream's statistics are an average, which each batch moves by a rate: 1 for a batch of `worth` images or more
    whose classes are mixed, less for smaller batches, and less for batches whose classes come in runs, because their
    statistics are those of a few classes. Runs are seen in the predictions: `runs` is how much likelier two samples of
    one batch agree than samples of different batches, and the rate is divided by `1 + caution (runs - 1)`.

    Paper: none; mixtures as in Schneider et al., NeurIPS 2020, with the variance that a mixture of two sets has.
    """

    weights: tuple[Share, ...] = (0.0, 0.1, 0.25, 0.5, 1.0)
    caution: NotNegative = 2.0
    worth: Positive = 64.0

    def __post_init__(self) -> None:
        """Refuses no weights at all."""
        super().__post_init__()
        if not self.weights:
            raise ValueError("Blended: expected weights such as (0.0, 0.5, 1.0), got none; use Source()")

    @property
    def copies(self) -> int:
        """One for each weight."""
        return len(self.weights)

    def start_layer(self, key: str, layer: BatchLayer) -> Memory:
        """The source's statistics, once for each copy."""
        if layer.source_mean is None or layer.source_var is None:
            return {}
        rows = (self.copies, 1)
        return {f"{key}.mean": layer.source_mean.repeat(rows), f"{key}.var": layer.source_var.repeat(rows)}

    def __call__(self, layer: BatchLayer, x: Tensor, mask: Tensor | None, memory: Memory, key: str) -> Tensor:
        """Each copy with its own mixture."""
        new = self.remember_layer(layer, x, mask, memory, key)
        if not new or layer.source_mean is None or layer.source_var is None:
            return FromBatch()(layer, x, mask, memory, key)
        weight = torch.tensor(self.weights, dtype=layer.source_mean.dtype, device=x.device)[:, None]
        mean, var = mixture(layer.source_mean, layer.source_var, new[f"{key}.mean"], new[f"{key}.var"], weight)
        return layer.with_moments(x, mean, var)

    def remember_layer(self, layer: BatchLayer, x: Tensor, mask: Tensor | None, memory: Memory, key: str) -> Memory:
        """The average of each copy, moved by the batch."""
        if f"{key}.mean" not in memory:
            return {}
        rows = x.shape[0] // self.copies
        mean, var = copy_moments(x.detach(), mask, self.copies)
        rate = min(1.0, rows / self.worth) * self._caution(memory)
        moved = mixture(memory[f"{key}.mean"], memory[f"{key}.var"], mean, var, rate)
        return dict(zip((f"{key}.mean", f"{key}.var"), moved, strict=True))

    def _caution(self, memory: Memory) -> Tensor | float:
        """The factor of the rate, for runs of classes."""
        near, far = memory.get("statistics.near"), memory.get("statistics.far")
        if near is None or far is None:
            return 0.5
        runs = (near / far.clamp(min=1e-9)).clamp(min=1.0)
        return torch.where(far > 0, 1 / (1 + self.caution * (runs - 1)), 0.5)

    def start(self, outputs: Outputs) -> Memory:
        """No predictions yet."""
        zeros = outputs.probs.new_zeros(outputs.classes)
        return {"recent": zeros, "before": zeros, "seen": zeros[0], "near": zeros[0], "far": zeros[0]}

    def remember(self, outcome: Outcome, memory: Memory) -> Memory:
        """The agreement of samples with those near them and with those of earlier batches, averaged."""
        probs = outcome.first.probs
        count, total = len(probs), probs.sum(0)
        borrowed = max(0.0, NEAR - count) * (memory["seen"] > 0)  # of the last images, where the batch is short
        others = (total - probs + borrowed * memory["recent"]) / (count - 1 + borrowed).clamp(min=1)
        near, far = (probs * others).sum(1).mean(), (probs * memory["before"]).sum(1).mean()
        known = (memory["seen"] > 0) & (count - 1 + borrowed > 0)
        started = memory["far"] > 0
        step = torch.where(started, min(1.0, count / SMOOTH), 1.0)
        average = total / count

        def towards(old: Tensor, horizon: float) -> Tensor:
            share = torch.maximum(torch.tensor(count / horizon), count / (memory["seen"] + count)).clamp(max=1)
            return old + share.to(old) * (average - old)

        return {
            "recent": towards(memory["recent"], NEAR),
            "before": towards(memory["before"], FAR),
            "seen": memory["seen"] + count,
            "near": torch.where(known, memory["near"] + step * (near - memory["near"]), memory["near"]),
            "far": torch.where(known, memory["far"] + step * (far - memory["far"]), memory["far"]),
        }


def mixture(
    mean: Tensor, var: Tensor, other_mean: Tensor, other_var: Tensor, weight: Tensor | float
) -> tuple[Tensor, Tensor]:
    """Mean and variance of two sets of samples together, the other one with this weight."""
    apart = other_mean - mean
    spread = weight * (1 - weight) * apart.square()
    return mean + weight * apart, var + weight * (other_var - var) + spread


def copy_moments(x: Tensor, mask: Tensor | None, copies: int) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance (copies, C) of each copy of the batch, over the rows that `mask` keeps."""
    found = [batch_moments(each, mask) for each in x.chunk(copies)]
    return torch.stack([mean for mean, _ in found]), torch.stack([var for _, var in found])


def batch_moments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Mean and unbiased variance per channel, over the rows that `mask` keeps."""
    if mask is None and x.numel() > x.shape[1]:  # by torch's own layer, which is much faster than its moments
        mean = torch.zeros(x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
        var = torch.zeros_like(mean)
        torch.nn.functional.batch_norm(x, mean, var, training=True, momentum=1.0)
        return mean, var
    mean, var = moments(x, mask)
    count = (x.shape[0] if mask is None else mask.sum()) * (x.numel() // (x.shape[0] * x.shape[1]))
    return mean, var * count / (torch.as_tensor(count) - 1).clamp(min=1)
