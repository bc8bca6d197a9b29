"""The less of an image is seen, the less sure a prediction may be: entropies ranked by how much is masked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from poem.parts.base import Need, Outputs, Selected, entropy
from poem.parts.fields import NotNegative, Range
from poem.parts.objective import Objective


@dataclass(frozen=True, repr=False)
class RankedEntropy(Objective):
    """Predictions of ever more masked images agree with those of less masked ones, and are no surer than these.

    Level i of `levels` drops a share of `i * step` of the patches, those that the class token of the last block attends
    to most. Minimises, over pairs of levels, the cross-entropy of the more masked prediction to the less masked one (a
    constant) plus `ranking` times `relu(H_less - H_more + margin * ln C)`, `H_more` a constant.

    Paper: REM (ICML 2025).
    Reference code: pilsHan/rem (MIT).
    Differs: none known.
    """

    step: Annotated[float, Range(above=0, below=1)] = 0.1
    levels: Annotated[int, Range(at_least=2)] = 3
    ranking: NotNegative = 1.0
    margin: NotNegative = 0.0

    def __post_init__(self) -> None:
        """The highest level keeps some patches."""
        super().__post_init__()
        if self.step * (self.levels - 1) >= 1:
            raise ValueError(
                f"RankedEntropy: expected a highest level that keeps some patches, got step={self.step} and "
                f"levels={self.levels}; lower one of them"
            )

    @property
    def needs(self) -> frozenset[Need]:
        """The attention to each patch, and passes with fewer."""
        return frozenset({Need.TOKENS})

    @property
    def further_passes(self) -> Mapping[object, tuple[int, int]]:
        """One for each level but the first, forward and backward."""
        return {self: (self.levels - 1, self.levels - 1)}

    def __call__(self, selected: Selected) -> Tensor:
        """Means over the selection, summed over pairs of levels."""
        seen = [selected.outputs.log_probs, *self._masked(selected.outputs, selected.mask)]
        margin = self.margin * math.log(selected.outputs.classes)
        losses = torch.zeros_like(selected.weights)
        for more, masked in enumerate(seen):
            for less in seen[:more]:
                losses = losses - (less.detach().exp() * masked).sum(1)
                losses = losses + self.ranking * (entropy(less) - entropy(masked).detach() + margin).relu()
        return selected.mean(losses)

    def _masked(self, outputs: Outputs, among: Tensor) -> list[Tensor]:
        """Log-probabilities (B, C) at each level but the first."""
        if outputs.attention is None or outputs.images is None:
            raise ValueError("RankedEntropy() needs the attention of a vision transformer; use it in minimise=")
        order = outputs.attention.argsort(dim=1)  # the least attended first
        found = []
        for level in range(1, self.levels):
            count = int(order.shape[1] * (1 - level * self.step))
            keep = order[:, :count].sort(dim=1).values
            found.append(outputs.forward(outputs.images, among=among, grad=True, keep=keep).log_softmax(1))
        return found
