"""What a batch cost and what it changed, per batch and in total; `engine/loop.py` counts each pass into `Costs`.

Counts are in images. *Needed* rows are those that the method's arithmetic asks for (the paper's tables count these);
*computed* rows are those that went through the network, because a masked pass keeps the batch whole. Tensors are read
only when they are asked for, so that counting never waits for a device.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

Count = int | Tensor
WAITING = 32
"""Batches whose counts wait until they are added: on a device each addition is a launch."""


class FirstLast(NamedTuple):
    """A quantity in the first forward pass over a batch, and in the last."""

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
        """Add another's sums to these."""
        for item in fields(Costs):
            setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))


_NO_FLAGS, _NO_NUMBERS, _NO_LOGITS = torch.zeros(0, dtype=torch.bool), torch.zeros(0), torch.zeros(0, 0)
"""What a record holds before its batch has run."""


class BatchRecord:
    """`adapter.last`: everything known about the batch that was answered last."""

    def __init__(self, costs: Costs | None = None) -> None:
        self.costs = costs or Costs()
        self.selected: Tensor = _NO_FLAGS
        """(B,) which samples were selected before any update."""
        self.newly_reliable: Tensor = _NO_FLAGS
        """(B,) not selected before any update, selected after one."""
        self.no_longer_reliable: Tensor = _NO_FLAGS
        """(B,) selected before any update, not in the last selection."""
        self.entropy = FirstLast(_NO_NUMBERS, _NO_NUMBERS)
        """(B,) each, in nats: in the first forward pass and in the last."""
        self.first_logits: Tensor = _NO_LOGITS
        """(B, C) before any update."""
        self.source_logits: Tensor | None = None
        """(B, C) of the model as it came, where the pass had a copy with its weights and statistics; else None."""
        self.remarks: list[str] = []  # notes known while the batch runs
        self.anomalies: Tensor | None = None  # (2,) answers that are not finite, updates that changed nothing
        self.loss_value: Tensor | None = None
        self.gradient_value: Tensor | None = None  # norm of the last update's gradient
        self.reset_flag: bool | Tensor = False
        self.applied: list[Tensor] = []  # () bool for each update tried
        self.any_selected: list[Tensor] = []  # () bool for each update tried: whether it had a selected sample
        self.none_selected = False  # no update was tried, since no sample was selected
        self.not_due = False  # no update was tried, since the recipe makes none on this batch

    @classmethod
    def of(cls, values: dict[str, Any]) -> BatchRecord:
        """A record with these attributes, all of them."""
        made = cls.__new__(cls)
        vars(made).update(values)
        return made

    @property
    def notes(self) -> list[str]:
        """Fallbacks taken in this batch, answers that are not finite, updates that changed nothing."""
        return [*self.remarks, *anomaly_texts(self.anomalies).values()]

    @property
    def first_entropy(self) -> Tensor:
        """(B,) in nats, before any update."""
        return self.entropy.first

    @property
    def last_entropy(self) -> Tensor:
        """(B,) in nats, in the last forward pass."""
        return self.entropy.last

    @property
    def taught(self) -> int:
        """Selected samples, summed over the updates that were applied."""
        return int(self.costs.taught)

    @property
    def rounds(self) -> int:
        """How many updates were tried."""
        return int(self.costs.rounds)

    @property
    def updates(self) -> int:
        """How many updates were applied."""
        return int(self.costs.updates)

    @property
    def forwards(self) -> int:
        """Images needed in forward passes."""
        return int(self.costs.forwards)

    @property
    def backwards(self) -> int:
        """Images with a non-zero share in a loss, summed over backward passes and further passes with a gradient."""
        return int(self.costs.backwards)

    @property
    def forwards_computed(self) -> int:
        """Rows that went through the network."""
        return int(self.costs.forwards_computed)

    @property
    def backwards_computed(self) -> int:
        """Rows of backward passes."""
        return int(self.costs.backwards_computed)

    @property
    def loss(self) -> float | None:
        """The last update's loss, or None where none was tried."""
        return None if self.loss_value is None else float(self.loss_value)

    @property
    def gradient(self) -> float:
        """Norm of the last update's gradient, over theta; 0 where none was tried."""
        return 0.0 if self.gradient_value is None else float(self.gradient_value)

    @property
    def reset(self) -> bool:
        """Whether everything went back to the source, before or after this batch."""
        return bool(self.reset_flag)

    @property
    def skipped(self) -> str | None:
        """Why no update was applied, or None."""
        if self.none_selected:
            return "nothing selected"
        if self.not_due:
            return "no update was due"
        if self.applied and not any(bool(applied) for applied in self.applied):
            selected = any(bool(some) for some in self.any_selected)
            return "the update was not finite" if selected else "nothing passed the second filter"
        return None

    def merge(self, parts: list[BatchRecord]) -> None:
        """Take over the records of the pieces that a batch was split into, or of the one that it was."""
        self.selected = _joined([part.selected for part in parts])
        self.newly_reliable = _joined([part.newly_reliable for part in parts])
        self.no_longer_reliable = _joined([part.no_longer_reliable for part in parts])
        first = _joined([part.entropy.first for part in parts])
        self.entropy = FirstLast(first, _joined([part.entropy.last for part in parts]))
        self.first_logits = _joined([part.first_logits for part in parts])
        source = [part.source_logits for part in parts if part.source_logits is not None]
        self.source_logits = _joined(source) if len(source) == len(parts) else None
        self.loss_value = next((part.loss_value for part in reversed(parts) if part.loss_value is not None), None)
        norms = [part.gradient_value for part in parts if part.gradient_value is not None]
        self.gradient_value = norms[-1] if norms else None
        self.applied = [applied for part in parts for applied in part.applied]
        self.any_selected = [some for part in parts for some in part.any_selected]
        counts = [part.anomalies for part in parts if part.anomalies is not None]
        self.anomalies = counts[0] if len(counts) == 1 else torch.stack(counts).sum(0) if counts else None
        self.remarks += [remark for part in parts for remark in part.remarks]
        self.none_selected = all(part.none_selected for part in parts)
        self.not_due = all(part.not_due for part in parts)
        for part in parts:
            self.costs.add(part.costs)
            self.reset_flag = part.reset_flag if self.reset_flag is False else self.reset_flag

    def __repr__(self) -> str:
        words = f"taught={self.taught}, rounds={self.rounds}, updates={self.updates}, forwards={self.forwards}"
        return f"BatchRecord({words}, backwards={self.backwards}, loss={self.loss}, skipped={self.skipped!r})"


def anomaly_texts(anomalies: Tensor | None) -> dict[str, str]:
    """What went wrong without an error, by kind, from the counts; reads them from the device."""
    not_finite, idle = (0, 0) if anomalies is None else anomalies.tolist()
    found = {}
    if not_finite:
        found["not finite"] = (
            f"answers for {not_finite} images are NaN or Inf although the images are finite: the network has diverged, "
            "or gives such answers unadapted. An update whose loss they enter is skipped. Try a lower lr=, or "
            "adapter.reset()"
        )
    if idle:
        found["idle"] = (
            "an update changed nothing: every gradient is zero, as for layers that do not use the tensors of "
            "adapter.adapted (quantised ones), or answers that are already certain"
        )
    return found


def _joined(tensors: list[Tensor]) -> Tensor:
    """The tensors concatenated; the very tensor where there is one."""
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


class BatchCounts(NamedTuple):
    """What a batch adds to the totals."""

    costs: Costs
    selected: Tensor
    newly_reliable: Tensor
    no_longer_reliable: Tensor
    reset: bool | Tensor
    applied: list[Tensor]
    """() bool for each update tried; none where no sample was selected."""
    none_selected: bool

    def tensors(self) -> list[Tensor]:
        """Those among them that are read from a device."""
        costs = [getattr(self.costs, item.name) for item in fields(Costs)]
        found = [*costs, self.selected, self.newly_reliable, self.no_longer_reliable, self.reset, *self.applied]
        return [each for each in found if isinstance(each, Tensor)]


@dataclass
class RunningTotals(Costs):
    """The running sums behind `adapter.totals`; what is on a device is added up there, some batches at a time."""

    batches: Count = 0
    images: Count = 0
    selected: Count = 0
    newly_reliable: Count = 0
    no_longer_reliable: Count = 0
    resets: Count = 0
    skips: Count = 0
    anomalies: Tensor | None = None  # (2,) answers that are not finite, updates that changed nothing
    waiting: tuple[BatchCounts, ...] = ()  # the last batches, not in the sums yet

    def add_batch(self, record: BatchRecord, images: int) -> None:
        """Add a finished batch."""
        self.batches += 1
        self.images += images
        if record.anomalies is not None:
            before = self.anomalies
            new = record.anomalies
            self.anomalies = new if before is None else before.to(new.device) + new
        counts = BatchCounts(
            replace(record.costs), record.selected, record.newly_reliable, record.no_longer_reliable, record.reset_flag,
            [] if record.none_selected else record.applied, record.none_selected,
        )  # fmt: skip
        self.waiting = (*self.waiting, counts)
        if len(self.waiting) == WAITING or not any(map(_waits, counts.tensors())):
            vars(self).update(vars(self._summed()))

    def read(self) -> Totals:
        """All sums as plain numbers."""
        sums = self._summed()
        plain = [item.name for item in fields(self) if item.name not in ("anomalies", "waiting")]
        counts = {name: int(getattr(sums, name)) for name in plain}
        not_finite, idle = (0, 0) if self.anomalies is None else self.anomalies.tolist()
        return Totals(**counts, not_finite=not_finite, idle=idle)

    def _summed(self) -> RunningTotals:
        """The same totals with no batch waiting."""
        new, waiting = replace(self, waiting=()), self.waiting
        for item in fields(Costs):
            setattr(
                new, item.name, _sum([getattr(self, item.name), *(getattr(each.costs, item.name) for each in waiting)])
            )
        for name in ("selected", "newly_reliable", "no_longer_reliable"):
            setattr(new, name, _sum([getattr(self, name), *(getattr(each, name) for each in waiting)]))
        new.resets = _sum([self.resets, *(each.reset for each in waiting)])
        idle = [1 - torch.stack(each.applied).any().long() for each in waiting if each.applied]
        new.skips = _sum([self.skips, *(int(each.none_selected) for each in waiting), *idle])
        return new


def _waits(tensor: Tensor) -> bool:
    """Whether the host waits for its device where it reads the tensor."""
    return tensor.device.type != "cpu"


def _sum(counts: list[Count]) -> Count:
    """The sum of numbers, and of tensors' elements; a number where all are."""
    plain = sum(int(each) for each in counts if not isinstance(each, Tensor))
    tensors = [each for each in counts if isinstance(each, Tensor)]
    if not tensors:
        return plain
    device = tensors[-1].device  # a model may have been moved between two batches
    return torch.cat([each.to(device, torch.long).flatten() for each in tensors]).sum() + plain
