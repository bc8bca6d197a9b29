"""Whether a batch is learnt from: limits on updates, distance and time, and how long calls take."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from poem.accelerate.captured_function import CapturedFunction
from poem.adapter import Adapter, seconds_apart
from poem.guarded.guard_state import GuardState
from poem.guarded.settings import GuardSettings

TOO_SLOW = "predicting alone takes longer than max_ms={:g}, which cannot be kept; every 100th batch is learnt from"


def may_learn(settings: GuardSettings, held: GuardState, adapter: Adapter) -> tuple[bool, str]:
    """Whether this batch is learnt from, and why not. The adapter's drift is read only where there is a limit on it."""
    if held.stopped:
        return False, held.stopped
    if settings.max_updates is not None and held.updates >= settings.max_updates:
        return False, f"the budget of {settings.max_updates} updates is spent"
    if settings.max_distance is not None and (drift := adapter.drift) > settings.max_distance:
        return False, f"{drift:.3g} from the source, more than max_distance={settings.max_distance:g}"
    if settings.adapt == "when shifted" and not held.shift.rang:
        return False, "no shift has been seen yet"
    if settings.max_ms is not None and held.learn_ms > settings.max_ms:
        return _every_kth(settings.max_ms, held)
    return True, ""


def _every_kth(max_ms: float, held: GuardState) -> tuple[bool, str]:
    """Learn from as many batches as keep the mean time of a call within `max_ms`, or from every 100th."""
    spare = max_ms - held.plain_ms
    extra = max(held.learn_ms - held.plain_ms, 0.0)
    turn = math.ceil(extra / spare) if spare > 0 else 100
    learns = held.batches % max(turn, 1) == 0
    if spare <= 0:
        return learns, TOO_SLOW.format(max_ms)
    return learns, "" if learns else f"a batch that learns takes more than max_ms={max_ms:g}"


class Reading(NamedTuple):
    """The clock at one moment, in seconds, and how many of them this thread has spent waiting and capturing."""

    clock: float
    apart: float


class CallTimes:
    """How long calls take, without what is no batch's own cost: waiting for other adapters, and capturing.

    The first call of a process, and the first that learns, are slower than all others and not counted.
    """

    def __init__(self, judged: CapturedFunction) -> None:
        self._judged = judged
        self._called = self._learnt = False

    def read(self) -> Reading:
        """The time now, and what this thread has spent waiting and capturing so far."""
        return Reading(time.perf_counter(), seconds_apart() + self._judged.capture_seconds)

    def counted(self, held: GuardState, began: Reading, answer: Tensor, *, learning: bool) -> GuardState:
        """With the call that began then, and whose answer is computed now, in the running mean of its kind."""
        if answer.is_cuda:
            torch.cuda.synchronize(answer.device)
        now = self.read()
        took = now.clock - began.clock - (now.apart - began.apart)
        warm = self._learnt if learning else self._called
        self._called, self._learnt = True, self._learnt or learning
        return _with_time(held, 1000 * took, learning=learning) if warm else held


def _with_time(held: GuardState, milliseconds: float, *, learning: bool) -> GuardState:
    """With the running mean of the time that such a call takes moved by one more."""
    before = held.learn_ms if learning else held.plain_ms
    mean = milliseconds if before == 0 else 0.8 * before + 0.2 * milliseconds
    return replace(held, learn_ms=mean) if learning else replace(held, plain_ms=mean)
