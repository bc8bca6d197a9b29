"""A budget of answers: how many may differ from the source's, at every moment of the stream.

Accuracy can only fall below the source's on answers that differ from it, so their share bounds the loss: a proof that
needs no labels and no assumption.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from numbers import Real

import torch
from torch import Tensor


@dataclass(frozen=True)
class AnswerBudget:
    """Of the first n samples, at most `share * n` get another answer than the source's, for every n.

    The product is exact, with the share as it is written: 0.1 is a tenth.
    """

    share: float
    seen: int = 0
    spent: int = 0

    def __post_init__(self) -> None:
        """Refuses what is no share."""
        number = isinstance(self.share, Real) and not isinstance(self.share, bool)
        if not number or not 0 < self.share <= 1:
            raise (ValueError if number else TypeError)(
                f"expected a budget above 0 and at most 1, the share of answers that may differ, got {self.share!r}; "
                "for none use the method 'source', for no limit leave budget= out"
            )

    def grant(self, differs: Tensor, gain: Tensor) -> tuple[Tensor, AnswerBudget]:
        """Which of the samples that differ (B,) keep their own answer: those with the largest gain that fit.

        Of equal gains the earlier sample goes first; one that is NaN comes last.
        """
        wanted = differs.tolist()
        gains = [-math.inf if math.isnan(each) else each for each in gain.tolist()]
        share = Fraction(str(float(self.share)))
        room = [math.floor(share * (self.seen + place + 1)) - self.spent for place in range(len(wanted))]
        # room[i] is how many of the samples up to i may differ; it must stay so for all later ones too.
        granted = [False] * len(wanted)
        for place in sorted((i for i, each in enumerate(wanted) if each), key=lambda i: -gains[i]):
            if all(left > 0 for left in room[place:]):
                granted[place] = True
                room = [left - 1 if index >= place else left for index, left in enumerate(room)]
        kept = torch.tensor(granted, dtype=torch.bool, device=differs.device)
        return kept, replace(self, seen=self.seen + len(wanted), spent=self.spent + sum(granted))


def granted_rows(budget: AnswerBudget, source: Tensor, answer: Tensor, both: Tensor) -> tuple[Tensor, AnswerBudget]:
    """Which rows (B,) keep their answer, where the others get the source's; and the budget after them.

    The budget goes to the answers that are likeliest right against the source's, by the mean of both.

    Args:
        budget: Before these rows.
        source: Log-probabilities (B, C) of the source.
        answer: Those that are to be given.
        both: Those of the mean.
    """
    rows, own, other = torch.arange(len(source), device=source.device), source.argmax(1), answer.argmax(1)
    chances = both.exp()
    kept, budget = budget.grant(own != other, chances[rows, other] - chances[rows, own])
    return kept | (own == other), budget
