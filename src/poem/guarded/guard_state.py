"""What a guard remembers from one batch to the next."""

from __future__ import annotations

from dataclasses import dataclass, field

from poem.engine.state import Snapshot
from poem.guarded.alarms import MeanBound, ShiftAlarm
from poem.guarded.budget import AnswerBudget
from poem.guarded.judgement import Verdict
from poem.guarded.signals import Averages

STOPPED = "stopped by hand"
"""Why nothing is learnt after `Guard.stop`."""


@dataclass(frozen=True)
class GuardState:
    """All that a guard remembers between two batches: one value, replaced when a batch is over."""

    batches: int = 0
    verdict: Verdict = "mean"
    averages: Averages | None = None
    shift: ShiftAlarm = field(default_factory=ShiftAlarm)
    worse: MeanBound = field(default_factory=MeanBound)
    budget: AnswerBudget | None = None
    ring: tuple[tuple[int, Snapshot], ...] = ()
    gradients: tuple[float, ...] = ()  # of the last updates
    updates: int = 0
    rollbacks: int = 0
    wait: int = 0  # images until a rollback may be made again
    trial: int = 0  # images for which the source answers yet, after something was undone
    stopped: str = ""  # why nothing is learnt any more; "" while it is
    skipped: str = ""  # why the last batch was not learnt from; "" where it was
    learn_ms: float = 0.0  # running mean of a call that learns; with max_ms alone
    plain_ms: float = 0.0  # and of one that does not
