"""When do the adapted tensors return towards the source, and how far?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from poem.parts.base import Memory, Need, Outcome, Outputs, Part
from poem.parts.fields import Count, NotNegative, Share


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

    def init(self, source: Tensor) -> Memory:
        """The memory of one group of adapted tensors before the first batch, for a pull that remembers."""
        return {}

    def pulled(self, theta: Tensor, source: Tensor, memory: Memory, rng: torch.Generator) -> tuple[Tensor, Memory]:
        """`pull`, and the new memory of the group."""
        return self.pull(theta, source, rng), {}


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
class MomentumFilter(Recovery):
    """Pulls the adapted tensors to a hidden copy, which a Kalman filter moves between the source and them.

    After every batch, with the hidden tensors `h` (at first the source's `t0`), a variance `s` (at first 0),
    `q = noise * n / 38400` for n adapted numbers and `r = 1 - q`:

    1. `h <- keep_hidden h + (1 - keep_hidden) t0`, and `s <- keep_hidden^2 s + q`;
    2. `b = r / (s + r)`, at least `least` and 1 from 0.9999 on; `s <- b s`, and `h <- b h + (1 - b) theta`;
    3. `theta <- keep theta + (1 - keep) h`.

    Paper: CMF (Lee et al., ICLR 2024).
    Reference code: mariodoebler/test-time-adaptation (MIT).
    Differs: a reset forgets the variance too; with an adapt branch each group has a filter of its own, and `n` is the
    group's.
    """

    keep: Share = 0.99
    keep_hidden: Share = 0.99
    noise: NotNegative = 0.005
    least: Share = 0.89

    def init(self, source: Tensor) -> Memory:
        """The source, without doubt."""
        return {"hidden": source, "variance": source.new_zeros(())}

    def pulled(self, theta: Tensor, source: Tensor, memory: Memory, rng: torch.Generator) -> tuple[Tensor, Memory]:
        """Predict the hidden tensors, correct them, and pull; to the bit nothing happens where nothing has moved."""
        process = self.noise * theta.numel() / 38400
        hidden = memory["hidden"] + (1 - self.keep_hidden) * (source - memory["hidden"])
        variance = self.keep_hidden**2 * memory["variance"] + process
        trust = ((1 - process) / (variance + 1 - process)).clamp(min=self.least)
        trust = torch.where(trust >= 0.9999, 1.0, trust)
        hidden = hidden + (1 - trust) * (theta - hidden)
        return theta + (1 - self.keep) * (hidden - theta), {"hidden": hidden, "variance": trust * variance}


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
