"""What a guard makes of a batch's answers: functions of tensors alone, so that a CUDA graph can hold all of them.

The host reads one tensor of numbers (`BatchNumbers`) and decides; answers for every decision are there by then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from poem.guarded.signals import AverageNumbers, Averages, as_sure_as

Verdict = Literal["source", "mean", "adapted"]
VERDICTS: tuple[Verdict, ...] = ("source", "mean", "adapted")
AVERAGES = len(fields(Averages))


class Answers(NamedTuple):
    """Log-probabilities (B, C) by verdict, and how they compare. Where `sound` is not, all are the source's."""

    source: Tensor
    mean: Tensor
    adapted: Tensor
    sound: Tensor
    """(B,) whether the adapted answer is finite."""
    worse: Tensor
    """(B,) 1/2 where both answer one class; 0 where both together are sure of the adapted class, 1 of the source's."""
    differ: Tensor
    """(3,) shares of the verdicts' classes that are not the source's."""

    def by(self, verdict: Verdict) -> Tensor:
        """The answer (B, C) of a verdict."""
        answer: Tensor = getattr(self, verdict)
        return answer


def answers(source: Tensor, adapted: Tensor) -> Answers:
    """What each verdict would answer; the mean is of equally sure answers."""
    sound = adapted.amax(1).isfinite()
    both = mean_of(source, as_sure_as(adapted, source))
    mean, kept = (torch.where(sound[:, None], each, source) for each in (both, adapted))
    rows, own = torch.arange(len(source), device=source.device), source.argmax(1)
    chances = mean.exp()
    judged = chances[rows, torch.where(sound, adapted.argmax(1), own)] - chances[rows, own]
    differ = torch.stack([(own != each.argmax(1)).float().mean() for each in (source, mean, kept)])
    return Answers(source, mean, kept, sound, (1 - judged) / 2, differ)


@dataclass(frozen=True)
class BatchNumbers:
    """All numbers of a batch that the host decides by, from one read of the device."""

    averages: AverageNumbers
    differ: dict[Verdict, float]
    finite: bool  # all adapted answers
    worse: list[float]  # of each image, for the alarm
    entropies: list[float]  # of the source's answers, in nats


@dataclass(frozen=True)
class Judgement:
    """A batch's answers by verdict, and the running averages with it; tensors."""

    averages: Averages
    answers: Answers
    numbers: Tensor

    def read(self) -> BatchNumbers:
        """The numbers; waits for the device."""
        values, rows = self.numbers.tolist(), len(self.answers.sound)
        rest, worse, entropies = values[: -2 * rows], values[-2 * rows : -rows], values[-rows:]
        *averages, finite = rest[:-3]
        return BatchNumbers(
            AverageNumbers(*averages), dict(zip(VERDICTS, rest[-3:], strict=True)), bool(finite), worse, entropies
        )


def judgement(call: Callable[..., Sequence[Tensor]], averages: Averages, *log_probs: Tensor) -> Judgement:
    """A `Judgement` by `judged_tensors`, called as it is or captured."""
    found = call(*(getattr(averages, item.name) for item in fields(Averages)), *log_probs)
    return Judgement(Averages(*found[:AVERAGES]), Answers(*found[AVERAGES:-1]), found[-1])


def judged_tensors(horizon: float, *tensors: Tensor) -> list[Tensor]:
    """A batch's `Judgement` as a list: the averages, the answers, the numbers.

    Args:
        horizon: Images that the averages are over.
        tensors: The averages, then log-probabilities (B, C) of source and adapted; and, where images were looked at
            shifted, those of source and adapted for the shifted ones.
    """
    averages, (source, adapted, *moved) = Averages(*tensors[:AVERAGES]), tensors[AVERAGES:]
    answered, steady = adapted, None
    if moved:
        pairs = zip((source, adapted), moved, strict=True)
        steady = torch.stack([(one.argmax(1) == two.argmax(1)).float().mean() for one, two in pairs])
        both = mean_of(adapted, moved[1])
        answered = torch.where(both.amax(1, keepdim=True).isfinite(), both, adapted)
    averages, found = averages.moved(source, adapted, steady, horizon), answers(source, answered)
    finite = adapted.amax(1).isfinite().all()[None]
    numbers = [averages.numbers(), finite, found.differ, found.worse, entropies(source)]
    return [*(getattr(averages, item.name) for item in fields(Averages)), *found, torch.cat(numbers)]


def mean_of(one: Tensor, two: Tensor) -> Tensor:
    """The logarithm of the mean of two probabilities."""
    return torch.logaddexp(one, two) - math.log(2)


def entropies(log_probs: Tensor) -> Tensor:
    """Entropies (B,) of predictions, in nats; classes whose probability is 0 count nothing."""
    finite = log_probs.clamp(min=torch.finfo(log_probs.dtype).min)
    return -(log_probs.exp() * finite).sum(1)
