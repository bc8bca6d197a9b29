"""What a guard asks for while it takes a batch, so that several guards may be answered by one pass.

A guard's batch is a generator of these. `Guard` answers its own by its adapter; a service that runs many streams over
one model answers those of all streams together.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from poem.adapter import Between
from poem.engine.network import two_columns
from poem.engine.state import Snapshot
from poem.guarded.signals import Averages


class AdaptedPass(Protocol):
    """The adapted model's answer to a batch, and what was learnt; numbers are read when they are asked for."""

    raw: Tensor
    """As the adapter gives it."""
    log_probs: Tensor
    """Of the adapted answer, (B, C)."""

    @property
    def source(self) -> Tensor | None:
        """Log-probabilities (B, C) of the source, where the pass had a copy of it."""
        ...

    @property
    def selected(self) -> float:
        """Share of the batch that was selected."""
        ...

    @property
    def gradient(self) -> float:
        """Norm of the last update's gradient; 0 where there was none."""
        ...

    @property
    def updates(self) -> int:
        """Updates that were applied."""
        ...

    @property
    def drift(self) -> float:
        """Distance of the adapted tensors from the source's."""
        ...


@dataclass(frozen=True)
class AskSource:
    """Log-probabilities of the source for the images, the shifted ones, or both.

    The reply is those of the images, those of the shifted ones, each None where not asked for, and the entropies of the
    first as a list.
    """

    of: Literal["images", "shifted", "both"]


@dataclass(frozen=True)
class AskAdapted:
    """An `AdaptedPass` over the images, or over the shifted ones."""

    shifted: bool
    learning: bool


@dataclass(frozen=True)
class AskJudgement:
    """A `Judgement` of these log-probabilities, and its `BatchNumbers`."""

    averages: Averages
    log_probs: tuple[Tensor, ...]


@dataclass(frozen=True)
class AskCheckpoint:
    """The adapter's state as it is now, a `Snapshot`."""


@dataclass(frozen=True)
class AskRollback:
    """Set the adapter's state back, to the source where `to` is None; the reply is None."""

    to: Between | Snapshot | None


@dataclass(frozen=True)
class AskDrift:
    """The distance of the adapted tensors from the source's, where no `AdaptedPass` was asked for; a float."""


Asked: TypeAlias = AskDrift | AskSource | AskAdapted | AskJudgement | AskCheckpoint | AskRollback
Steps: TypeAlias = Generator[Asked, Any, Any]


def log_probs_of(logits: Tensor) -> Tensor:
    """Log-probabilities (B, C) without a gradient, in single precision at least; one logit is two classes."""
    kind = torch.promote_types(logits.dtype, torch.float32)
    return two_columns(logits.detach().to(kind)).log_softmax(1)
