"""States of streams as rows of tensors that all of them share, and back as an adapter holds them.

A stream's row is kept between rounds, so that nothing is copied where the same streams come again. `Member.settle`
hands it to the stream's adapter, which then is as if it had answered the batches itself.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from poem.adapter import Adapter, Between
from poem.engine.accounting import BatchRecord, Costs, FirstLast, RunningTotals
from poem.engine.state import Snapshot, State
from poem.parts.base import Memory
from poem.serve.stack_values import Arrays, Round

COSTS = ("forwards", "backwards", "forwards_computed", "backwards_computed", "taught", "rounds", "updates")
COUNTED = (*COSTS, "not_finite", "idle", "reset", "selected", "newly", "gone")
"""What is summed over batches."""
READ = (*COUNTED, "tried", "applied", "loss", "gradient", "drift")
"""What the host reads of every stream after a round, in one tensor."""


class Layout:
    """Where each tensor of a stream's state lies in its row; one row for each type of number.

    Args:
        state: Of a stream that has seen a batch.
    """

    def __init__(self, state: State) -> None:
        groups = _groups(state.moving, state.steps, state.memory)
        self._places: dict[torch.dtype, list[tuple[str, torch.Size]]] = {}
        for place, tensor in groups.items():
            self._places.setdefault(tensor.dtype, []).append((place, tensor.shape))

    def packed(self, values: dict[str, Any]) -> Memory:
        """The row of a snapshot's values, by type of number.

        Raises:
            KeyError: A tensor is missing; ValueError: one has another shape.
        """
        groups = _groups(values["moving"], values["steps"], values["memory"])
        if sum(map(len, self._places.values())) != len(groups):
            raise ValueError("expected the tensors of a state of this recipe, got others")
        for places in self._places.values():
            for place, shape in places:
                if groups[place].shape != shape:
                    raise ValueError(f"expected {tuple(shape)} in {place}, got {tuple(groups[place].shape)}")
        return {
            str(kind): torch.cat([groups[place].reshape(-1) for place, _ in places])
            for kind, places in self._places.items()
        }

    def flat(self, arrays: Arrays) -> Memory:
        """Rows (N, F) of all tensors, by type of number."""
        groups = _groups(arrays.moving, arrays.steps, arrays.memory)
        return {
            str(kind): torch.cat(
                [groups[place].flatten(1) if shape else groups[place][:, None] for place, shape in places], 1
            )
            for kind, places in self._places.items()
        }

    def arrays(self, flat: Memory) -> Arrays:
        """The tensors as views of rows (..., F)."""
        found = Arrays({}, {}, {})
        for kind, places in self._places.items():
            rows = flat[str(kind)]
            pieces = rows.split([shape.numel() for _, shape in places], dim=-1)
            for (place, shape), piece in zip(places, pieces, strict=True):
                group, _, name = place.partition("/")
                view = piece.view((*rows.shape[:-1], *shape))
                if group == "moving":
                    found.moving[name] = view
                elif group == "memory":
                    found.memory[name] = view
                else:
                    found.steps.setdefault(group.removeprefix("steps:"), {})[name] = view
        for key in found.moving:
            found.steps.setdefault(key, {})
        return found


def _groups(moving: Memory, steps: dict[str, Memory], memory: Memory) -> Memory:
    """All tensors of a state, each under its group and name."""
    found = {f"moving/{name}": tensor for name, tensor in moving.items()}
    found |= {f"steps:{key}/{name}": tensor for key, held in steps.items() for name, tensor in held.items()}
    return found | {f"memory/{name}": tensor for name, tensor in memory.items()}


@dataclass(eq=False)
class Block:
    """Rows (N, F) that one round left behind; members hold rows of it."""

    flat: Memory


@dataclass(eq=False)
class Report:
    """What a round says of every stream, of which `Member.settle` makes records."""

    selected: Tensor
    newly_reliable: Tensor
    no_longer_reliable: Tensor
    entropy: tuple[Tensor, Tensor]
    first_logits: Tensor
    source_logits: Tensor | None
    applied: Tensor  # (N, updates)
    had: Tensor  # (N, updates)
    some: Tensor  # (N, updates): whether it had a selected sample
    updates: bool  # whether any was possible

    @staticmethod
    def of(round: Round, *, learns: bool) -> Report:
        """Without the graph and the streams' states."""
        made, none = round.updates, torch.zeros(len(round.answer), 0, dtype=torch.bool, device=round.answer.device)
        applied, had, some = (
            torch.stack(each, 1) if made else none
            for each in ([one.applied for one in made], round.tried, [one.mask.any(1) for one in made])
        )
        source = round.first.source if not learns else None
        return Report(
            round.selected, round.newly_reliable, round.no_longer_reliable, round.entropy, round.first.logits,
            None if source is None else source.detach(), applied, had, some, learns,
        )  # fmt: skip

    def record(self, row: int, numbers: dict[str, float]) -> BatchRecord:
        """What a stream's adapter would have recorded."""
        record = BatchRecord(Costs(**{name: int(numbers[name]) for name in COSTS}))
        record.selected, record.newly_reliable = self.selected[row], self.newly_reliable[row]
        record.no_longer_reliable = self.no_longer_reliable[row]
        record.entropy = FirstLast(self.entropy[0][row], self.entropy[1][row])
        record.first_logits = self.first_logits[row]
        record.source_logits = None if self.source_logits is None else self.source_logits[row]
        record.anomalies = torch.tensor([int(numbers["not_finite"]), int(numbers["idle"])])
        if numbers["tried"]:
            record.loss_value, record.gradient_value = (torch.tensor(numbers[name]) for name in ("loss", "gradient"))
        if self.applied.shape[1]:
            had = self.had[row].tolist()
            record.applied = [each for each, was in zip(self.applied[row], had, strict=True) if was]
            record.any_selected = [each for each, was in zip(self.some[row], had, strict=True) if was]
        record.none_selected = self.updates and not numbers["tried"]
        record.reset_flag = bool(numbers["reset"])
        return record


@dataclass(eq=False)
class Member:
    """One stream in a stack: its adapter, and its row while that is newer.

    Args:
        adapter: The stream's.
    """

    adapter: Adapter
    block: Block | None = None
    row: int = 0
    seen: Between | None = None  # of the adapter, when the row was made of it, or it of the row
    newer: bool = False  # whether the row is
    last: tuple[Report, int, dict[str, float]] | None = None
    gained: dict[str, int] = field(default_factory=dict)  # counts of the batches since the adapter was handed the row
    rest: dict[str, Any] = field(default_factory=dict)  # of a snapshot: what does not lie in the row

    def join(self, layout: Layout, template: State) -> None:
        """Make the row anew where the adapter has changed since.

        Raises:
            ValueError: The adapter's state is not of this recipe's shapes.
        """
        if self.newer:
            return
        now = self.adapter.checkpoint()
        if now is self.seen and self.block is not None:
            return
        values = dict(now.state.values)
        if values["start"] is None:  # a state that was loaded, or a fresh one
            assert template.start is not None
            values |= {
                "start": template.start, "memory": {**template.start, **values["memory"]}, "classes": template.classes,
                "image": values["image"] or template.image, "size": values["size"] or template.size,
            }  # fmt: skip
        row = layout.packed(values)
        self.block, self.row = Block({kind: each[None] for kind, each in row.items()}), 0
        self.seen, self.last, self.gained = now, None, {}
        self.rest = {name: value for name, value in values.items() if name not in ("moving", "steps", "memory")}

    def move(
        self, block: Block, row: int, report: Report, numbers: dict[str, float], count: int, *, learnt: bool
    ) -> None:
        """Take over what a round left behind; a batch that was not learnt from leaves nothing."""
        if not learnt:
            return
        assert self.seen is not None
        empty = self.seen.empty + 1 if report.updates and not numbers["tried"] else 0
        gained = {name: int(numbers[name]) for name in COUNTED} | {"batches": 1, "images": count}
        gained["skips"] = int(report.updates and not numbers["applied"])
        self.gained = {name: self.gained.get(name, 0) + value for name, value in gained.items()}
        self.rest = {**self.rest, "calls": self.rest["calls"] + 1}
        short = count < (self.rest["size"] or count)
        self.seen = replace(self.seen, empty=empty, short=short)
        self.block, self.row, self.newer, self.last = block, row, True, (report, row, numbers)

    @property
    def newly_reliable(self) -> float | None:
        """Share of the last batch that became reliable after an update; None where the adapter knows."""
        if not self.newer or self.last is None:
            return None
        report, _, numbers = self.last
        return numbers["newly"] / report.selected.shape[1]

    def snapshot(self, layout: Layout) -> Snapshot:
        """The state as the adapter would have it, in memory of its own."""
        assert self.block is not None
        assert self.seen is not None
        arrays = layout.arrays({kind: each[self.row].clone() for kind, each in self.block.flat.items()})
        values = {**self.rest, "moving": arrays.moving, "steps": arrays.steps, "memory": arrays.memory}
        return Snapshot(values, self.rest.get("rng", self.seen.state.rng))

    def settle(self, layout: Layout) -> None:
        """Hand the row over to the adapter, where it is newer."""
        if not self.newer:
            return
        assert self.seen is not None
        assert self.last is not None
        report, row, numbers = self.last
        state = self.snapshot(layout)
        state.values.pop("rng", None)
        between = replace(self.seen, state=state, last=report.record(row, numbers), totals=self._totals())
        self.adapter.rollback(between, counts=True)
        self.seen, self.newer, self.gained = between, False, {}

    def _totals(self) -> RunningTotals:
        """The adapter's sums with those of the batches since."""
        assert self.seen is not None
        totals = copy.copy(self.seen.totals)
        names = {"newly": "newly_reliable", "gone": "no_longer_reliable", "reset": "resets"}
        for name, value in self.gained.items():
            if name not in ("not_finite", "idle"):
                kept = names.get(name, name)
                setattr(totals, kept, getattr(totals, kept) + value)
        new = torch.tensor([self.gained["not_finite"], self.gained["idle"]])
        totals.anomalies = new if totals.anomalies is None else totals.anomalies.cpu() + new
        return totals

    def lighten(self) -> None:
        """Let the adapter forget the tensors that the row has newer ones of; `settle` hands them over again."""
        assert self.seen is not None
        if self.newer and self.seen.state.values["moving"]:
            values = {**self.seen.state.values, "moving": {}, "steps": {}, "memory": {}}
            self.seen = replace(self.seen, state=replace(self.seen.state, values=values))
            self.adapter.rollback(self.seen, counts=True)

    def alone(self) -> None:
        """Keep the row in memory of its own, so that a round's rows are not kept for one of them."""
        if self.block is not None:
            self.block = Block({kind: each[self.row : self.row + 1].clone() for kind, each in self.block.flat.items()})
            self.row = 0

    def left(self) -> dict[str, Any]:
        """What `restore` needs."""
        return dict(vars(self))

    def restore(self, left: dict[str, Any]) -> None:
        """As it was, the adapter too; tensors are replaced, never written into."""
        vars(self).update(left)
        if self.seen is not None and not self.newer and self.adapter.checkpoint() is not self.seen:
            self.adapter.rollback(self.seen, counts=True)


def gathered(members: Sequence[Member]) -> Memory:
    """Rows (N, F) of all members, in their order; the very tensors where they are those of one round."""
    blocks: dict[int, tuple[Block, list[int]]] = {}
    for at, member in enumerate(members):
        assert member.block is not None
        blocks.setdefault(id(member.block), (member.block, []))[1].append(at)
    found: Memory = {}
    order = [at for _, places in blocks.values() for at in places]
    inverse = sorted(range(len(order)), key=order.__getitem__)
    for kind in next(iter(blocks.values()))[0].flat:
        pieces = [_rows(block.flat[kind], [members[at].row for at in places]) for block, places in blocks.values()]
        rows = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        found[kind] = rows if inverse == list(range(len(rows))) else _rows(rows, inverse)
    return found


def _rows(tensor: Tensor, rows: list[int]) -> Tensor:
    """Some rows; the tensor itself where they are all of it in order."""
    if rows == list(range(len(tensor))):
        return tensor
    return tensor.index_select(0, torch.tensor(rows, device=tensor.device))
