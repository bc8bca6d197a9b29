"""When do we walk back towards the source, and how far?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from poem.parts.base import Memory, Part
from poem.parts.fields import Count, Share


@dataclass(frozen=True, repr=False)
class Recovery(Part):
    """Never walks back; the others override one verb each."""

    @property
    def each_image(self) -> bool:
        """Whether every image starts from the source."""
        return False

    def due(self, calls: int) -> bool:
        """Whether to go all the way back before call number `calls`, counted from 0."""
        return False

    def start(self, like: Tensor) -> Memory:
        """What is remembered before the first batch."""
        return {}

    def remember(self, losses: Sequence[Tensor], made: Sequence[Tensor], memory: Memory) -> Memory:
        """New memory, given the loss of each update of the batch and whether it was made."""
        return {}

    def fires(self, memory: Memory) -> Tensor | None:
        """Whether to go all the way back after this batch; None is never."""
        return None

    def pull(self, theta: Tensor, source: Tensor, rng: torch.Generator) -> Tensor:
        """Part of the way back, after every batch."""
        return theta


@dataclass(frozen=True, repr=False)
class Never(Recovery):
    """Keeps what was learnt."""


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

    def start(self, like: Tensor) -> Memory:
        """No average yet."""
        return {"loss.mean": like.new_zeros(()), "loss.seen": torch.zeros((), dtype=torch.bool, device=like.device)}

    def remember(self, losses: Sequence[Tensor], made: Sequence[Tensor], memory: Memory) -> Memory:
        """The average moved by this batch's loss, if an update was made."""
        if not losses:
            return {}
        loss, taught, mean, seen = losses[0], made[0], memory["loss.mean"], memory["loss.seen"]
        for later, also in zip(losses[1:], made[1:], strict=True) if self.of == "last" else ():
            loss, taught = torch.where(also, later, loss), taught | also
        moved = torch.where(seen, self.momentum * mean + (1 - self.momentum) * loss, loss)
        return {"loss.mean": torch.where(taught, moved, mean), "loss.seen": seen | taught}

    def fires(self, memory: Memory) -> Tensor | None:
        """An average below the limit."""
        return memory["loss.seen"] & (memory["loss.mean"] < self.limit)


@dataclass(frozen=True, repr=False)
class AverageWithSource(Recovery):
    """After every batch keeps `keep` of what was learnt and takes the rest from the source.

    Paper: ROID (Marsden et al., WACV 2024), weight ensembling.
    """

    keep: Share = 0.99

    def pull(self, theta: Tensor, source: Tensor, rng: torch.Generator) -> Tensor:
        """A step along the line to the source; nowhere, to the bit, where nothing has moved."""
        return theta + (1 - self.keep) * (source - theta)


@dataclass(frozen=True, repr=False)
class EachImage(Recovery):
    """Every image starts from the source, and the batch is taken image by image. Paper: MEMO (NeurIPS 2022)."""

    @property
    def on_host(self) -> bool:
        """Takes the batch apart."""
        return True

    @property
    def each_image(self) -> bool:
        """Yes."""
        return True


@dataclass(frozen=True, repr=False)
class EveryCalls(Recovery):
    """All the way back every `calls` calls, whether or not they taught anything.

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
    def on_host(self) -> bool:
        """Draws after the last update."""
        return True

    def pull(self, theta: Tensor, source: Tensor, rng: torch.Generator) -> Tensor:
        """Source values where the coin says so."""
        back = torch.rand(theta.numel(), generator=rng) < self.chance
        return torch.where(back.to(theta.device), source, theta)
