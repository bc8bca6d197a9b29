"""How certain is a prediction? Lower scores are more certain; selections and weights compare them with a threshold."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from poem.parts.base import Memory, Outputs, Part, entropy
from poem.parts.fields import Positive


@dataclass(frozen=True, repr=False)
class Score(Part):
    """One number per sample, in nats, with a gradient; `memory` is its own."""

    @abstractmethod
    def __call__(self, outputs: Outputs, memory: Memory) -> Tensor:
        """Scores (B,)."""


@dataclass(frozen=True, repr=False)
class SoftmaxEntropy(Score):
    """The entropy of the prediction; with a branch, of the combined one."""

    def __call__(self, outputs: Outputs, memory: Memory) -> Tensor:
        """Entropy in nats."""
        return outputs.entropy


@dataclass(frozen=True, repr=False)
class TemperedEntropy(Score):
    """The entropy of the prediction whose logits are divided by `temperature`; with a branch, of the combined one."""

    temperature: Positive = 1.0

    def __call__(self, outputs: Outputs, memory: Memory) -> Tensor:
        """Entropy in nats."""
        return entropy((outputs.logits / self.temperature).log_softmax(1))


@dataclass(frozen=True, repr=False)
class OpinionEntropy(Score):
    """The entropy of a subjective opinion: a belief for each of C classes, and a mass that stands for not knowing.

    The opinion is `softmax([x, ln C])` with `x` the logits, whose norm gets no gradient. Its entropy is at most about
    `ln(C + 1)` and `ln(C) / 2 + ln 2` where the logits are zero, so a threshold for it keeps more samples than the same
    one for the softmax entropy.

    Paper: COME (Zhang et al., ICLR 2025).
    Reference code: BlueWhaleLab/COME (no licence).
    Differs: C is the number of logits (the code has 1000); computed by a log-softmax, without the 1e-7 that the code
    adds; with a branch, of the mean of both heads' logits, whatever its `alpha`.
    """

    def __call__(self, outputs: Outputs, memory: Memory) -> Tensor:
        """Entropy in nats over C + 1 entries."""
        logits = torch.stack(outputs.heads).mean(0) if outputs.combined else outputs.logits
        norm = logits.norm(dim=1, keepdim=True)
        scaled = logits / norm.clamp(min=torch.finfo(logits.dtype).tiny) * norm.detach()
        unknown = torch.full_like(scaled[:, :1], math.log(outputs.classes))
        return entropy(torch.cat([scaled, unknown], dim=1).log_softmax(1))
