"""What a guard is told to do: its settings, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from poem.guarded.budget import AnswerBudget
from poem.parts.fields import Checked, Count, NotNegative, Positive, Range


@dataclass(frozen=True, kw_only=True)
class GuardSettings(Checked):
    """What a guard does. The margins were chosen on four corruptions that no table uses; `docs/guard.md` says how."""

    budget: float | None = None
    every: Count = 1
    view: Literal["shift", "none"] = "shift"
    adapt: Literal["always", "when shifted"] = "always"
    when_worse: Literal["roll back", "reset", "freeze", "answer"] = "roll back"
    margin: NotNegative = 0.013
    early: NotNegative = 0.033
    balance: NotNegative = 0.33
    collapse: NotNegative = 0.02
    horizon: Count = 1024
    ring: Annotated[int, Range(at_least=1, at_most=1024)] = 4
    snapshot_every: Count = 8
    alpha: Annotated[float, Range(above=0, below=1)] = 0.01
    reference: Count = 256
    max_updates: Count | None = None
    max_ms: Positive | None = None
    max_distance: Positive | None = None
    seed: int = 0
    name: str = ""

    def __post_init__(self) -> None:
        """Refuses a budget where the source does not answer every batch, and a name that would break a log's line."""
        super().__post_init__()
        if not self.name.isprintable():
            raise ValueError(f"expected a name without line ends and control characters, got {self.name!r}")
        if self.budget is not None:
            AnswerBudget(self.budget)
            if self.every != 1:
                raise ValueError(
                    f"expected every=1 with a budget, got every={self.every}: a share of answers that differ from the "
                    "source's is known only where the source answers every batch; leave one of them out"
                )

    @property
    def patience(self) -> int:
        """Images after a rollback until the next: those of `snapshot_every` batches of 64, whatever the batches are."""
        return 64 * self.snapshot_every


def stated(settings: GuardSettings) -> dict[str, Any]:
    """The settings that decide something, as plain values; the stream's name does not."""
    return {name: getattr(settings, name) for name in GuardSettings.__dataclass_fields__ if name != "name"}
