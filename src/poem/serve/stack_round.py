"""One round of a stack: what the streams' guards ask for, computed for the rows of all streams at once."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.func import vmap

from poem.adapter import Adapter
from poem.guarded.asked import (
    AskAdapted,
    AskCheckpoint,
    AskDrift,
    Asked,
    AskJudgement,
    AskRollback,
    AskSource,
    log_probs_of,
)
from poem.guarded.batch import Taken
from poem.guarded.guard import Guard
from poem.guarded.judgement import AVERAGES, Answers, Judgement, entropies, judged_tensors
from poem.guarded.signals import Averages, shifted
from poem.parts.statistics import Source
from poem.serve.stack_network import by_stream
from poem.serve.stack_state import READ, Block, Member, Report, gathered
from poem.serve.stack_values import Arrays, Round

if TYPE_CHECKING:
    from poem.serve.stack import Stack

ORDER = (AskDrift, AskSource, AskAdapted, AskJudgement, AskCheckpoint, AskRollback)
"""Requests in the order in which they are answered, so that streams which are behind catch up."""


@dataclass(frozen=True)
class Stacked:
    """One stream's answer of a round, or why it was refused."""

    logits: Tensor | None = None  # (b, C)
    error: Exception | None = None
    taken: Taken | None = None
    """The batch as the stream's guard took it."""


@dataclass(frozen=True)
class StackedPass:
    """The adapted answer of one stream in a round; see `AdaptedPass`."""

    raw: Tensor
    log_probs: Tensor
    source: Tensor | None
    selected: float = 0.0
    gradient: float = 0.0
    updates: int = 0
    drift: float = 0.0


class StackRound:
    """One round of a stack: rows of all streams, and what was computed of them."""

    def __init__(
        self, stack: Stack, members: list[Member], rows: Tensor, images: Sequence[Tensor], good: list[bool]
    ) -> None:
        self._stack, self._members, self._rows, self._images, self._good = stack, members, rows, images, good
        self._count = len(members)
        self._network, self._layout = stack.ready()
        self._arrays = self._layout.arrays(gathered(members))
        self._shifted: Tensor | None = None
        self._sources: tuple[Tensor, Tensor | None, list[list[float]]] | None = None

    def plain(self, streams: Sequence[bool]) -> list[Stacked]:
        """Streams without guards: each learns."""
        learn = [good and real for good, real in zip(self._good, streams, strict=True)]
        round, _ = self._learnt(learn)
        return [Stacked(self._network.in_model_shape(each)) for each in round.answer]

    def guarded(self, guards: Sequence[Adapter | Guard | None]) -> list[Stacked]:
        """Streams with guards: what they ask for is computed for all rows at once."""
        found = [Stacked() for _ in guards]
        steps: dict[int, Generator[Asked, Any, Taken]] = {}
        for at, guard in enumerate(guards):
            if isinstance(guard, Guard) and self._good[at]:
                steps[at] = guard.steps(self._images[at])
        replies: dict[int, Any] = dict.fromkeys(steps)
        asked: dict[int, Asked] = {}
        while steps:
            for at, reply in replies.items():
                try:
                    with torch.no_grad():
                        asked[at] = steps[at].send(reply)
                except StopIteration as over:
                    found[at] = Stacked(over.value.answer, taken=over.value)
                    del steps[at]
                except Exception as error:
                    found[at] = Stacked(error=error)
                    del steps[at]
            first = min((_stage(asked[at]) for at in steps), default=None)
            now = [at for at in steps if _stage(asked[at]) == first]
            replies = self._replies({at: asked.pop(at) for at in now})
        for at, guard in enumerate(guards):
            taken = found[at].taken
            if taken is not None and isinstance(guard, Guard):
                try:
                    guard.write(taken)
                except Exception as error:
                    found[at] = Stacked(error=error)
        return found

    def _replies(self, asked: dict[int, Asked]) -> dict[int, Any]:
        """What streams asked for that are all at the same stage."""
        kind = next(iter(asked.values()), None)
        if isinstance(kind, AskSource):
            return self._of_source(asked)
        if isinstance(kind, AskAdapted):
            return self._adapted(asked, of_shifted=kind.shifted)
        if isinstance(kind, AskJudgement):
            return self._judged(asked)
        replies: dict[int, Any] = {}
        for at, each in asked.items():
            member = self._members[at]
            if isinstance(each, AskDrift):
                member.settle(self._layout)
                replies[at] = member.adapter.drift
            elif isinstance(each, AskCheckpoint):
                replies[at] = member.snapshot(self._layout) if member.newer else member.adapter.checkpoint().state
            elif isinstance(each, AskRollback):
                self._outside(member, each)
                replies[at] = None
        return replies

    def _outside(self, member: Member, asked: AskRollback) -> None:
        """Set a stream's adapter back; its row is made anew when it next comes."""
        member.settle(self._layout)
        member.adapter.rollback(asked.to)

    def _learnt(self, learn: list[bool]) -> tuple[Round, list[dict[str, float]]]:
        """A pass of all rows, from which some streams learn; members take over what it left."""
        stack, per = self._stack, len(self._rows) // self._count
        mask = torch.tensor(learn, device=self._rows.device)
        draws = stack.draws(self._members, learn, per)
        loop = stack.loop(self._rows, self._arrays, mask, draws)
        learns = stack.recipe.learns
        with stack.borrowed(), torch.enable_grad():
            round = loop.run(learns=learns)
        with torch.no_grad():
            numbers = self._numbers(round)
            report, block = Report.of(round, learns=learns), Block(self._layout.flat(round.arrays))
        for at, member in enumerate(self._members):
            member.move(block, at, report, numbers[at], per, learnt=learn[at])
        self._arrays = round.arrays
        return round, numbers

    def _numbers(self, round: Round) -> list[dict[str, float]]:
        """What the host reads of every stream, in one tensor."""
        kind, zero = torch.float64, torch.zeros(self._count, device=self._rows.device)
        columns: dict[str, Tensor] = dict(round.counts)
        columns["selected"], columns["newly"] = round.selected.sum(1), round.newly_reliable.sum(1)
        columns["gone"] = round.no_longer_reliable.sum(1)
        columns["tried"] = torch.stack(round.tried).any(0) if round.tried else zero
        applied = [each.applied for each in round.updates]
        columns["applied"] = torch.stack(applied).any(0) if applied else zero
        columns["loss"], columns["gradient"] = round.loss, round.gradient
        if self._stack.guarded and self._stack.recipe.learns:
            columns["drift"] = self._drift(round.arrays)
        table = torch.stack([columns.get(name, zero).to(kind) for name in READ], 1).tolist()
        return [dict(zip(READ, each, strict=True)) for each in table]

    def _drift(self, arrays: Arrays) -> Tensor:
        """(N,) distance of the adapted tensors from the source's, relative to the source's norm."""
        source = self._stack.template.source
        keys = [key for key in ("theta", "branch") if key in source]
        away = sum((arrays.moving[key] - source[key]).square().sum(1) for key in keys)
        size = sum(source[key].square().sum() for key in keys)
        return (torch.as_tensor(away) / torch.as_tensor(size).clamp(min=1e-12)).sqrt()

    def _moved_rows(self) -> Tensor:
        """Every image shifted, once."""
        self._shifted = shifted(self._rows) if self._shifted is None else self._shifted
        return self._shifted

    def _of_source(self, asked: dict[int, Asked]) -> dict[int, Any]:
        """The source's log-probabilities of all rows, shifted ones with them where guards look at these."""
        if self._sources is None:
            views = self._stack.views and min(self._rows.shape[2:]) >= 8
            rows = torch.cat([self._rows, self._moved_rows()]) if views else self._rows
            with self._stack.borrowed(), torch.no_grad():
                (logits,), _ = self._network.heads(rows, None, None, Source(), {}, doubled=False)
                all_rows = log_probs_of(self._network.in_model_shape(logits))
                own = by_stream(all_rows[: len(self._rows)], self._count)
                other = by_stream(all_rows[len(self._rows) :], self._count) if views else None
                unsure = entropies(own.flatten(0, 1)).view(self._count, -1).tolist()
            self._sources = own, other, unsure
        own, other, unsure = self._sources
        return {at: (own[at], None if other is None else other[at], unsure[at]) for at in asked}

    def _adapted(self, asked: dict[int, Asked], *, of_shifted: bool) -> dict[int, Any]:
        """The adapted answers of all rows; streams that asked to learn do."""
        if of_shifted:
            nobody = torch.zeros(self._count, dtype=torch.bool, device=self._rows.device)
            with self._stack.borrowed(), torch.no_grad():
                round = self._stack.loop(self._moved_rows(), self._arrays, nobody).run(learns=False)
            numbers: list[dict[str, float]] = [{} for _ in self._members]
        else:
            learn = [isinstance(each := asked.get(at), AskAdapted) and each.learning for at in range(self._count)]
            round, numbers = self._learnt(learn)
        raw = self._network.in_model_shape(round.answer.flatten(0, 1)).unflatten(0, (self._count, -1))
        probs = log_probs_of(raw.flatten(0, 1)).unflatten(0, (self._count, -1))
        source = None if self._stack.recipe.learns else round.first.source
        if source is not None:
            source = log_probs_of(source.flatten(0, 1)).unflatten(0, (self._count, -1))
        replies = {}
        for at in asked:
            known, per = numbers[at], raw.shape[1]
            replies[at] = StackedPass(
                raw[at], probs[at], None if source is None else source[at], known.get("selected", 0.0) / per,
                known["gradient"] if known.get("tried") else 0.0, int(known.get("updates", 0)), known.get("drift", 0.0),
            )  # fmt: skip
        return replies

    def _judged(self, asked: dict[int, Asked]) -> dict[int, Any]:
        """Every guard's judgement; rows that ask for none are filled, so that shapes are the round's."""
        some = next(iter(asked.values()))
        filled = [asked.get(at, some) for at in range(self._count)]
        given = [
            [*(getattr(each.averages, item.name) for item in fields(Averages)), *each.log_probs]
            for each in filled
            if isinstance(each, AskJudgement)
        ]
        with torch.no_grad():
            columns = [torch.stack(column) for column in zip(*given, strict=True)]
            horizon = self._stack.horizon
            tensors = vmap(lambda *each: tuple(judged_tensors(horizon, *each)))(*columns)
        numbers = tensors[-1].cpu()
        rows = list(zip(*(each.unbind() for each in (*tensors[:-1], numbers)), strict=True))
        replies = {}
        for at in asked:
            each = rows[at]
            seen = Judgement(Averages(*each[:AVERAGES]), Answers(*each[AVERAGES:-1]), each[-1])
            replies[at] = seen, seen.read()
        return replies


def _stage(asked: Asked) -> tuple[int, bool]:
    """Which request is answered first: so that streams which are behind catch up."""
    return ORDER.index(type(asked)), isinstance(asked, AskAdapted) and asked.shifted
