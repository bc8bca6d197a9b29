"""What follows a batch that was learnt from: a good state is kept, or what was learnt is taken back."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import replace
from typing import Any

from poem.engine.state import Snapshot
from poem.guarded.asked import AskCheckpoint, Asked, AskRollback
from poem.guarded.audit import Event
from poem.guarded.guard_state import GuardState
from poem.guarded.judgement import Verdict
from poem.guarded.settings import GuardSettings
from poem.guarded.signals import Signals

SPIKE = 10.0
"""A gradient so many times the median of the last ones is an event."""
LAST_GRADIENTS = 64
WORSE = "the adapted answers are less steady or less balanced than the source's"
FROZEN = "frozen after its answers became worse than the source's"


def act(
    settings: GuardSettings, held: GuardState, signals: Signals, events: list[Event], *,
    judged: Verdict, finite: bool, updates: int, count: int,
) -> Generator[Asked, Any, GuardState]:  # fmt: skip
    """Keep a snapshot, roll back, reset, freeze, or do nothing; what is remembered after it.

    Args:
        settings: Of the guard.
        held: What is remembered before it.
        signals: Of the batch.
        events: Gets those of what was done.
        judged: What the signals say, also where the source answers for another reason.
        finite: Whether all adapted answers are.
        updates: That were applied.
        count: Images of the batch.
    """
    events += _spike(held, signals)
    held = replace(
        held, updates=held.updates + updates, gradients=(*held.gradients, signals.gradient)[-LAST_GRADIENTS:],
        wait=max(0, held.wait - count),
    )  # fmt: skip
    if not finite:
        why = "adapted answers are NaN or Inf; the source answers"
        events.append(Event(held.batches, "not finite", why, signals.as_dict()))
        return (yield from _undo(settings, held, signals, events))
    if judged != "source":
        return (yield from _keep_good(settings, held))
    if held.wait > 0:
        return held
    return (yield from _undo(settings, held, signals, events))


def _spike(held: GuardState, signals: Signals) -> list[Event]:
    """An event where the gradient is far above those of the last updates."""
    gradients = [each for each in held.gradients if math.isfinite(each) and each > 0]
    middle = sorted(gradients)[len(gradients) // 2] if len(gradients) >= 8 else math.inf
    if signals.gradient > SPIKE * middle:
        why = f"{signals.gradient / middle:.1f} times the median"
        return [Event(held.batches, "gradient spike", why, signals.as_dict())]
    return []


def _keep_good(settings: GuardSettings, held: GuardState) -> Generator[Asked, Any, GuardState]:
    """Every few batches, one more snapshot in the ring."""
    if (held.batches + 1) % settings.snapshot_every != 0:
        return held
    good: Snapshot = yield AskCheckpoint()
    return replace(held, ring=(*held.ring, (held.batches, good))[-settings.ring :])


def _undo(
    settings: GuardSettings, held: GuardState, signals: Signals, events: list[Event]
) -> Generator[Asked, Any, GuardState]:
    """Take back what was learnt, as the settings say."""
    batch, known = held.batches, signals.as_dict()
    if settings.when_worse == "answer":
        return held
    if settings.when_worse == "freeze":
        events.append(Event(batch, "freeze", f"{WORSE}; nothing more is learnt", known))
        return replace(held, stopped=FROZEN)
    if settings.when_worse == "roll back" and held.ring:
        at, good = held.ring[-1]
        yield AskRollback(good)
        events.append(Event(batch, "roll back", f"{WORSE}; back to batch {at}", known))
        held = replace(held, ring=held.ring[:-1])
    else:
        yield AskRollback(None)
        events.append(Event(batch, "reset", f"{WORSE}; back to the source", known))
    averages = held.averages
    if averages is not None:  # what came back is judged anew, from where the source stands
        averages = averages.as_source()
    # The first time it answers at once. Where that was not enough, as with a batch's statistics that do harm
    # whatever the weights are, it answers only after the source has, for as long as a judgement takes.
    trial = settings.horizon // 2 if held.rollbacks else 0
    return replace(held, averages=averages, rollbacks=held.rollbacks + 1, wait=settings.patience, trial=trial)
