"""Which answer is given: the source's, the adapted model's, or the mean of both. Numbers in, on the host."""

from __future__ import annotations

import math
from dataclasses import replace

from poem.guarded.judgement import Verdict
from poem.guarded.settings import GuardSettings
from poem.guarded.signals import AverageNumbers, Signals, no_signals
from poem.parts.runs import RUNS

ONE_ANSWER, POOR = 0.95, 0.7
"""A class's share of the source's answers from which on it gives one answer, and a poor network's steadiness."""
MANY_LATELY = 0.4
"""The balance that many answers have more than one lately, as a share of the most there is."""
MOST_GAINED = 0.3
"""Nats of balance gained that count for the adapted answers, at most; less where there are fewer than ten classes."""


def verdict_of(
    settings: GuardSettings, seen: AverageNumbers, classes: int, *, with_view: bool
) -> tuple[Verdict, Signals]:
    """Which answer is given, and the steadiness, balance and evidence that it is made of.

    Evidence is the adapted answers' steadiness less the source's; its margin is wider early. Where classes do not
    come in runs, which shows after a quarter of the horizon, a higher balance counts for the adapted answers too,
    because the source's are collapsing, and a source that gives one answer all along is steady without knowing
    anything. Where they do, wrong answers are the more balanced ones. A lower balance than the source's is a
    collapse; not so where classes come in runs that the adapted answers follow at least as well, and as steadily.
    A source whose answers were many and are one now, while the adapted answers are many still, has collapsed; the
    adapted answers are then compared with a poor network's steadiness.

    Args:
        settings: For the margins.
        seen: Averages over the stream.
        classes: How many there are.
        with_view: Whether images are looked at shifted too, without which there is no steadiness.
    """
    own, other = seen.source_steadiness, seen.adapted_steadiness
    poor = _poor(classes)
    early = math.sqrt(64 / max(1.0, min(seen.images, settings.horizon)))
    judged = seen.images >= settings.horizon / 4
    shuffled = seen.shared_runs < RUNS and judged
    constant = seen.most_answered > ONE_ANSWER and shuffled
    evidence = other - (min(own, poor) if constant else own) if with_view else 0.0
    gained = seen.adapted_balance - seen.source_balance
    if gained > 0 and shuffled:
        evidence += settings.balance * min(gained, _most_gained(classes))
    fallen = with_view and judged and seen.fell > 0 and seen.gained_lately > MANY_LATELY * math.log(classes)
    if fallen:
        evidence = max(evidence, seen.steady_lately - poor)
    measured = replace(
        no_signals(), source_steadiness=own, adapted_steadiness=other, source_balance=seen.source_balance,
        adapted_balance=seen.adapted_balance, runs=seen.runs, adapted_runs=seen.adapted_runs, evidence=evidence,
    )  # fmt: skip
    margin = settings.margin + settings.early * early
    follows = with_view and seen.runs >= RUNS and seen.adapted_runs >= seen.runs and other > own
    collapsed = gained < -settings.collapse - 0.05 * early and not follows and not fallen
    if not math.isfinite(evidence) or collapsed or evidence < -margin:
        return "source", measured
    return "adapted" if evidence > margin else "mean", measured


def _poor(classes: int) -> float:
    """How steady a poor network is: more so the fewer classes there are to choose from."""
    return max(POOR, 1 / classes + 2 / 3 * (1 - 1 / classes))


def _most_gained(classes: int) -> float:
    """Nats of balance gained that count, at most: less where there is less balance to gain."""
    return MOST_GAINED * min(1.0, math.log(classes) / math.log(10))
