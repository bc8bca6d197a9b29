"""Entropies brought back to those of the source, as far as a bet against them has gained."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from poem.parts.base import Memory, Need, Outcome, Outputs, Selected, inside, unprepared
from poem.parts.fields import Positive
from poem.parts.objective import Objective
from poem.parts.score import Score, SoftmaxEntropy

WIDEST = 1.99
"""Of a bet: from 2 on the wealth could be lost whole."""


@dataclass(frozen=True, repr=False)
class MatchEntropy(Objective):
    """Half the mean squared distance of the entropy to a target that lies between it and the source's entropies.

    `F` is the distribution of source entropies. A bettor says of each sample in turn how much larger than the source's
    its entropy is; with the bet `e` made before it, `u = F(H)` becomes `e u^2 / 2 + (1 - e / 2) u`, and the target is
    the source entropy at that point. Without a shift no bet gains, the target is the entropy itself, and nothing is
    learnt. `rate` is the bettor's step; beyond `widest` a bet is not raised. Weights multiply entropies and targets, so
    that they enter squared. `log_wealth` in its memory is the logarithm of what a unit has become by betting.

    Paper: Bar, Shaer, Romano, "Protected Test-Time Adaptation via Online Entropy Matching", NeurIPS 2024.
    Reference code: yarinbar/poem (no licence).
    Differs: every reset forgets the bets and the wealth; a sample whose entropy is not finite is passed over; targets
    are those of the batch's first pass in every round; bets are at most 1.99 in size.
    """

    rate: Positive = 1 / (8 * math.sqrt(3))
    widest: Positive = 1.8
    score: Score = field(default_factory=SoftmaxEntropy)

    @property
    def needs(self) -> frozenset[Need]:
        """Source entropies, and the host, which bets sample after sample."""
        return frozenset({Need.SOURCE_DATA, Need.HOST})

    def prepare(self, batches: Iterable[Outputs]) -> Memory:
        """The distribution of source entropies: different values, and how many are at most as large."""
        found = [self.score(outputs, {}).detach() for outputs in batches]
        if not found:
            return {}
        values, counts = torch.cat(found).sort().values.unique_consecutive(return_counts=True)
        return {"values": values, "shares": (counts.cumsum(0) / counts.sum()).to(values.dtype)}

    def start(self, outputs: Outputs) -> Memory:
        """No bet, a wealth of 1."""
        zero = outputs.logits.detach().new_zeros(())
        return {"bet": zero, "squares": zero, "log_wealth": zero, "seen": zero}

    def __call__(self, selected: Selected) -> Tensor:
        """Weighted mean over the selection; targets carry no gradient."""
        outputs, memory = selected.outputs, selected.memory
        target = outputs.batch.once((self, "target"), lambda _: self._bets(outputs, memory)[0])
        gap = self.score(outputs, inside(memory, "score")) - target
        return selected.mean(0.5 * selected.weights * gap.square())

    def remember(self, outcome: Outcome, memory: Memory) -> Memory:
        """The bets after this batch, each sample once."""
        return self._bets(outcome.first, memory)[1]

    def _bets(self, outputs: Outputs, memory: Memory) -> tuple[Tensor, Memory]:
        """Targets (B,) of the samples in their order, and the bettor's memory after the last."""
        if "values" not in memory:
            raise unprepared(self)
        score, values, shares = (
            self.score(outputs, inside(memory, "score")).detach(),
            memory["values"],
            memory["shares"],
        )
        bet, squares, wealth, seen = (float(memory[name]) for name in ("bet", "squares", "log_wealth", "seen"))
        protected = []
        for u in _interpolated(score, values, shares).tolist():
            protected.append(bet * u * u / 2 + (1 - bet / 2) * u)
            if not math.isfinite(u):
                continue
            v = u - 0.5
            wealth += math.log1p(bet * v)
            gain = 0.0 if abs(bet) > self.widest and v * bet > 0 else v / (1 + bet * v)
            if seen and gain:  # the first sample of a stream makes no bet
                squares += gain * gain
                bet += self.rate * gain / math.sqrt(squares)
                bet = min(max(bet, -WIDEST), WIDEST)
            seen += 1
        target = _interpolated(score.new_tensor(protected), shares, values)
        held = {"bet": bet, "squares": squares, "log_wealth": wealth, "seen": seen}
        return torch.where(target.isfinite(), target, score), {
            name: memory[name].new_tensor(number) for name, number in held.items()
        }


def _interpolated(x: Tensor, at: Tensor, values: Tensor) -> Tensor:
    """The piecewise linear function through (at, values), constant beyond its ends; `at` increases. NaN stays."""
    right = torch.searchsorted(at, x.contiguous()).clamp(1, max(1, len(at) - 1))
    if len(at) == 1:
        return values.expand_as(x) + 0 * x
    low, high = at[right - 1], at[right]
    share = ((x - low) / (high - low)).clamp(0, 1)
    return torch.lerp(values[right - 1], values[right], share)
