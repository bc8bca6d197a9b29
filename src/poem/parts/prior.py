"""The stream's mean prediction, for parts that compare samples with it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from poem.parts.base import Memory, Outcome, Outputs, Part, min_max
from poem.parts.fields import Share


@dataclass(frozen=True, repr=False)
class ClassPrior(Part):
    """Mixin: remembers the stream's mean prediction, from uniform, over all samples, selected or not."""

    momentum: Share = 0.9

    def start(self, outputs: Outputs) -> Memory:
        """Every class equally likely."""
        return {"mean": torch.full_like(outputs.probs[0], 1 / outputs.classes)}

    def remember(self, outcome: Outcome, memory: Memory) -> Memory:
        """The prior moved towards this batch's mean prediction."""

        def moved(outputs: Outputs, mask: Tensor) -> Memory:
            return {"mean": self.momentum * memory["mean"] + (1 - self.momentum) * outputs.probs.mean(0)}

        return outcome.after_updates(moved, memory)

    @staticmethod
    def diversity(outputs: Outputs, memory: Memory) -> Tensor:
        """How unlike the prior each prediction is, on a scale of 0 to 1 over the batch."""
        return min_max(1 - F.cosine_similarity(memory["mean"][None], outputs.probs, dim=1))
