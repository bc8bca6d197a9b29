"""When do the adapted tensors return towards the source, and how far?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from poem.parts.base import Memory, Need, Outcome, Outputs, Part
from poem.parts.fields import Count, Share


@dataclass(frozen=True, repr=False)
class Recovery(Part):
    """Keeps the adapted tensors; subclasses override one method each."""

    @property
    def each_image(self) -> bool:
        """Whether the batch is taken image by image, each from the source."""
        return False

    def due(self, calls: int) -> bool:
        """Whether to reset to the source before call number `calls`, counted from 0."""
        return False

    def resets(self, memory: Memory) -> Tensor | None:
        """Whether to reset to the source after this batch, decided on the device; None is never."""
        return None

    def pull(self, theta: Tensor, source: Tensor, rng: torch.Generator) -> Tensor:
        """The adapted tensors after every batch, moved towards the source."""
        return theta


@dataclass(frozen=True, repr=False)
class Never(Recovery):
    """Keeps the adapted tensors as they are."""


@dataclass(frozen=True, repr=False)
class LossAverageBelow(Recovery):
    """Back to the source when the average loss falls below `limit`: a loss that small is a collapse, not a success.

    `of` names the loss that enters the average: the last update's of the batch (SAR), or the first's (POEM's code).

    Paper: SAR (Niu et al., ICLR 2023), model recovery.
    Differs: the average itself is forgotten at a reset; the published wrapper writes the old one back.
    """

    limit: float = 0.2
    momentum: Share = 0.9
    of: Literal["first", "last"] = "last"

    def start(self, outputs: Outputs) -> Memory:
        """No average yet."""
        zero = outputs.logits.detach().new_zeros(())
        return {"mean": zero, "seen": torch.zeros_like(zero, dtype=torch.bool)}

    def remember(self, outcome: Outcome, memory: Memory) -> Memory:
        """The average moved by this batch's loss, if an update was applied."""
        if not outcome.updates:
            return {}
        first, *others = outcome.updates
        loss, applied, mean, seen = first.loss, first.applied, memory["mean"], memory["seen"]
        for update in others if self.of == "last" else ():
            loss, applied = torch.where(update.applied, update.loss, loss), applied | update.applied
        moved = torch.where(seen, self.momentum * mean + (1 - self.momentum) * loss, loss)
        return {"mean": torch.where(applied, moved, mean), "seen": seen | applied}

    def resets(self, memory: Memory) -> Tensor | None:
        """Whether the average is below the limit."""
        return memory["seen"] & (memory["mean"] < self.limit)


@dataclass(frozen=True, repr=False)
class AverageWithSource(Recovery):
    """After every batch keeps `keep` of the adapted tensors and takes the rest from the source.

    Paper: ROID (Marsden et al., WACV 2024), weight ensembling.
    """

    keep: Share = 0.99

    def pull(self, theta: Tensor, source: Tensor, rng: torch.Generator) -> Tensor:
        """A step along the line to the source; none, to the bit, where nothing has moved."""
        return theta + (1 - self.keep) * (source - theta)


@dataclass(frozen=True, repr=False)
class EachImage(Recovery):
    """Every image starts from the source, and the batch is taken image by image. Paper: MEMO (NeurIPS 2022)."""

    @property
    def needs(self) -> frozenset[Need]:
        """The host, which splits the batch."""
        return frozenset({Need.HOST})

    @property
    def each_image(self) -> bool:
        """Every batch is split."""
        return True


@dataclass(frozen=True, repr=False)
class EveryCalls(Recovery):
    """A reset to the source every `calls` calls, whether or not they made an update.

    Paper: RDumb (Press et al., NeurIPS 2023).
    """

    calls: Count = 1000

    def due(self, calls: int) -> bool:
        """At every multiple, the zeroth excepted."""
        return calls > 0 and calls % self.calls == 0


@dataclass(frozen=True, repr=False)
class StochasticRestore(Recovery):
    """After every batch each number returns to its source value with probability `chance`.

    Paper: CoTTA (Wang et al., CVPR 2022).
    """

    chance: Share = 0.001

    @property
    def needs(self) -> frozenset[Need]:
        """The host, which draws after the last update."""
        return frozenset({Need.HOST})

    def pull(self, theta: Tensor, source: Tensor, rng: torch.Generator) -> Tensor:
        """Source values where the draw says so."""
        back = torch.rand(theta.numel(), generator=rng) < self.chance
        return torch.where(back.to(theta.device), source, theta)
