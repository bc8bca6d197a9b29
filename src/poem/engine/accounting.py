"""What a batch cost and what it changed, per batch and in total.

Counts are in images. *Needed* rows are those that the method's arithmetic asks for (the paper's tables count these);
*computed* rows are those that went through the network, because a masked pass keeps the batch whole. Tensors are read
only when somebody asks, so that keeping the books never waits for a device.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

Count = int | Tensor


class FirstLast(NamedTuple):
    """A quantity at the first look at a batch, and at the last."""

    first: Tensor
    last: Tensor


@dataclass
class Costs:
    """Running sums of one batch, or of a stream."""

    forwards: Count = 0
    backwards: Count = 0
    forwards_computed: Count = 0
    backwards_computed: Count = 0
    taught: Count = 0
    rounds: Count = 0
    updates: Count = 0

    def add(self, other: Costs) -> None:
        """Adds another's sums to these."""
        for item in fields(Costs):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


class Batchwise:
    """`adapter.last`: everything known about the batch that was answered last."""

    def __init__(self, costs: Costs | None = None) -> None:
        self.costs = costs or Costs()
        self.selected: Tensor = torch.zeros(0, dtype=torch.bool)
        """(B,) who was selected at the first look."""
        self.newly_reliable: Tensor = torch.zeros(0, dtype=torch.bool)
        """(B,) not selected at the first look, selected at a later one."""
        self.no_longer_reliable: Tensor = torch.zeros(0, dtype=torch.bool)
        """(B,) selected at the first look, not at the last one that selected."""
        self.entropy = FirstLast(torch.zeros(0), torch.zeros(0))
        """(B,) each, in nats: at the first look and at the last."""
        self.first_logits: Tensor = torch.zeros(0, 0)
        """(B, C) before any update."""
        self.remarks: list[str] = []  # known while the batch runs
        self.odd: Tensor | None = None  # (2,) answers that are not finite, updates that moved nothing; read when asked
        self.loss_value: Tensor | None = None
        self.reset_flag: bool | Tensor = False
        self.made: list[Tensor] = []
        self.some: list[Tensor] = []  # whether anybody was left to teach, update by update
        self.nothing = False

    @property
    def notes(self) -> list[str]:
        """What the engine has to say about this batch: a fallback, answers that are not finite, an idle update."""
        return [*self.remarks, *alarms(self.odd).values()]

    @property
    def first_entropy(self) -> Tensor:
        """(B,) in nats, before any update."""
        return self.entropy.first

    @property
    def last_entropy(self) -> Tensor:
        """(B,) in nats, at the last look."""
        return self.entropy.last

    @property
    def taught(self) -> int:
        """Samples that taught, summed over the updates."""
        return int(self.costs.taught)

    @property
    def rounds(self) -> int:
        """How often an update was tried."""
        return int(self.costs.rounds)

    @property
    def updates(self) -> int:
        """How many updates were made."""
        return int(self.costs.updates)

    @property
    def forwards(self) -> int:
        """Images needed in forward passes."""
        return int(self.costs.forwards)

    @property
    def backwards(self) -> int:
        """Images with a non-zero share in a loss, summed over backward passes."""
        return int(self.costs.backwards)

    @property
    def forwards_computed(self) -> int:
        """Rows that went through the network."""
        return int(self.costs.forwards_computed)

    @property
    def backwards_computed(self) -> int:
        """Rows that went back through the network."""
        return int(self.costs.backwards_computed)

    @property
    def loss(self) -> float | None:
        """The last update's loss, or None where none was tried."""
        return None if self.loss_value is None else float(self.loss_value)

    @property
    def reset(self) -> bool:
        """Whether everything went back to the source, before or after this batch."""
        return bool(self.reset_flag)

    @property
    def skipped(self) -> str | None:
        """Why nothing was learnt, or None."""
        if self.nothing:
            return "nothing selected"
        if self.made and not any(bool(applied) for applied in self.made):
            taught = any(bool(some) for some in self.some)
            return "the update was not finite" if taught else "nothing passed the second filter"
        return None

    def gather(self, parts: list[Batchwise]) -> None:
        """Take over what was found image by image, or for the one batch there was."""
        self.selected = _together([part.selected for part in parts])
        self.newly_reliable = _together([part.newly_reliable for part in parts])
        self.no_longer_reliable = _together([part.no_longer_reliable for part in parts])
        first = _together([part.entropy.first for part in parts])
        self.entropy = FirstLast(first, _together([part.entropy.last for part in parts]))
        self.first_logits = _together([part.first_logits for part in parts])
        self.loss_value = next((part.loss_value for part in reversed(parts) if part.loss_value is not None), None)
        self.made = [applied for part in parts for applied in part.made]
        self.some = [some for part in parts for some in part.some]
        counts = [part.odd for part in parts if part.odd is not None]
        self.odd = counts[0] if len(counts) == 1 else torch.stack(counts).sum(0) if counts else None
        self.remarks += [remark for part in parts for remark in part.remarks]
        self.nothing = all(part.nothing for part in parts)
        for part in parts:
            self.reset_flag = part.reset_flag if self.reset_flag is False else self.reset_flag

    def __repr__(self) -> str:
        words = f"taught={self.taught}, rounds={self.rounds}, updates={self.updates}, forwards={self.forwards}"
        return f"Batchwise({words}, backwards={self.backwards}, loss={self.loss}, skipped={self.skipped!r})"


def alarms(odd: Tensor | None) -> dict[str, str]:
    """What went wrong without an error, by kind, from the counts of odd answers and updates; reads them."""
    not_finite, idle = (0, 0) if odd is None else odd.tolist()
    found = {}
    if not_finite:
        found["not finite"] = (
            f"answers for {not_finite} images are NaN or Inf although the images are finite: the network has diverged, "
            "or gives such answers unadapted. An update whose loss they enter is skipped. Try a lower lr=, or "
            "adapter.reset()"
        )
    if idle:
        found["idle"] = (
            "an update moved nothing: every gradient is zero, as for layers that do not use the tensors of "
            "adapter.adapted (quantised ones), or answers that are already certain"
        )
    return found


def _together(tensors: list[Tensor]) -> Tensor:
    """One after the other; the very tensor where there is one."""
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


@dataclass(frozen=True, kw_only=True)
class Totals:
    """`adapter.totals`: the same, summed since the last reset by hand."""

    batches: int
    images: int
    forwards: int
    backwards: int
    forwards_computed: int
    backwards_computed: int
    taught: int
    rounds: int
    updates: int
    selected: int
    newly_reliable: int
    no_longer_reliable: int
    resets: int
    skips: int
    not_finite: int
    idle: int


@dataclass
class Books(Costs):
    """The running sums behind `adapter.totals`; on a device they stay there until read."""

    batches: Count = 0
    images: Count = 0
    selected: Count = 0
    newly_reliable: Count = 0
    no_longer_reliable: Count = 0
    resets: Count = 0
    skips: Count = 0
    odd: Tensor | None = None  # (2,) answers that are not finite, updates that moved nothing

    def close(self, entry: Batchwise, images: int) -> None:
        """Adds a finished batch."""
        self.add(entry.costs)
        self.batches += 1
        self.images += images
        self.selected = self.selected + entry.selected.sum()
        self.newly_reliable = self.newly_reliable + entry.newly_reliable.sum()
        self.no_longer_reliable = self.no_longer_reliable + entry.no_longer_reliable.sum()
        self.resets = self.resets + (
            entry.reset_flag if isinstance(entry.reset_flag, Tensor) else int(entry.reset_flag)
        )
        missed: Count = int(entry.nothing)
        if entry.made and not entry.nothing:
            missed = 1 - torch.stack(entry.made).any().long()
        self.skips = self.skips + missed
        if entry.odd is not None:
            self.odd = entry.odd if self.odd is None else self.odd.to(entry.odd.device) + entry.odd

    def read(self) -> Totals:
        """All sums as plain numbers."""
        counts = {item.name: int(getattr(self, item.name)) for item in fields(self) if item.name != "odd"}
        not_finite, idle = (0, 0) if self.odd is None else self.odd.tolist()
        return Totals(**counts, not_finite=not_finite, idle=idle)
