"""Many streams over one model as one batch.

With recipes that adapt norm layers, streams differ in scales, shifts, statistics and small memories alone, so one pass
can compute them all (`stack_network`, `stack_loop`). Every stream keeps its own adapter and guard: its state is what
they would hold. What cannot be stacked is said in words (`Stack.why_not`), and such streams take turns.

Rows do not depend on what other rows hold, so a batch can be computed again from the number of streams and the stream's
own row: `poem.serve.replay` does so.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap

from poem.adapter import Adapter, Between
from poem.engine import input_checks as checks
from poem.engine.branch_check import MISFITS
from poem.engine.model_lock import model_lock
from poem.engine.state import State
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
from poem.guarded.guard import Guard, Taken
from poem.guarded.judgement import AVERAGES, Answers, Judgement, entropies, judged_tensors
from poem.guarded.signals import Averages, shifted
from poem.parts.base import Batch, Outputs
from poem.parts.destruction import Destroy, Patches
from poem.parts.statistics import Source
from poem.serve.stack_loop import Arrays, Round, StackLoop, destroyed_rows
from poem.serve.stack_network import StackNetwork, by_stream
from poem.serve.stack_recipes import recipe_why_not
from poem.serve.stack_state import READ, Block, Layout, Member, Report, gathered

NEAR, NEAR_COARSE = 5e-4, 3e-2
"""How far a stacked probability may be from that of the stream alone when a model is tried."""
THIN_EVERY = 16
"""Rounds after which rows of rounds that few streams still hold are copied out of them."""
MOST_SHAPES = 256
"""Shapes of batches for which it is remembered whether they can be stacked."""
ORDER = (AskDrift, AskSource, AskAdapted, AskJudgement, AskCheckpoint, AskRollback)


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


class Stack:
    """Computes batches of several streams at once. Not thread-safe: one thread calls it.

    Args:
        like: An adapter, or a guard, as every stream has one: same model, recipe and settings. It is only read.
    """

    def __init__(self, like: Adapter | Guard) -> None:
        adapter = like.adapter if isinstance(like, Guard) else like
        self._model, self._recipe, self._family = adapter.model, adapter.recipe, adapter.facts.family
        self._settings, self._lr, self._size = adapter.settings, adapter.lr, adapter.batch_size
        self._guarded = isinstance(like, Guard)
        self._horizon = like.settings.horizon if isinstance(like, Guard) else 0
        self._views = isinstance(like, Guard) and like.settings.view == "shift"
        self._why = self._first_reason(like)
        self._tried: dict[tuple[int, ...], str] = {}  # shapes (b, C, H, W), and why not
        self._network: StackNetwork | None = None
        self._state: State | None = None
        self._members: weakref.WeakSet[Member] = weakref.WeakSet()
        self._rounds = 0
        if not self._why:
            try:
                self._network = StackNetwork(adapter)
            except MISFITS as error:
                self._why = f"its layers cannot be stacked: {error}"
        self._layout: Layout | None = None
        self._start = Arrays({}, {}, {})

    def _first_reason(self, like: Adapter | Guard) -> str:
        """Why nothing can be stacked; "" where it can."""
        found = recipe_why_not(self._recipe)
        if found:
            return found
        if any(like.preparation.values()):
            return "a part was prepared on source data"
        if self._size is None:
            return "the batch size is that of each stream's first batch; give batch_size"
        if isinstance(like, Guard) and (like.settings.max_ms is not None or like.settings.max_distance is not None):
            return "the guard's max_ms and max_distance depend on each stream's own clock and distance"
        norms = [each for each in self._model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
        if any(norm.running_mean is None for norm in norms):
            return "a batch norm without running statistics mixes the streams in the source's answers"
        return ""

    @property
    def why_never(self) -> str:
        """Why no stream can be stacked, as far as is known; "" where they can."""
        return self._why

    def why_not(self, member: Member, images: Tensor) -> str:
        """Why this batch of a stream is to be taken alone; "" where it can be stacked."""
        if self._why:
            return self._why
        values = member.rest if member.newer else member.adapter.checkpoint().state.values
        if values["calls"] == 0:
            return "the first batch of a stream is taken alone"
        if self._recipe.recover.due(values["calls"]):
            return "a reset is due"
        if images.dim() != 4 or images.dtype not in (torch.float32, torch.float64):
            return "expected images (batch, channels, height, width) in single or double precision"
        if values["image"] is not None and tuple(images.shape[1:]) != tuple(values["image"]):
            return "another size of images than before"
        shape = tuple(images.shape)
        if shape not in self._tried:
            while len(self._tried) >= MOST_SHAPES:  # images of any size may come where the model has none of its own
                del self._tried[next(iter(self._tried))]
            self._tried[shape] = self._tried_on(shape)
        return self._tried[shape]

    # One round --------------------------------------------------------------------------------------------------------

    def answer(
        self, streams: Sequence[Adapter | Guard | None], members: Sequence[Member | None], images: Sequence[Tensor]
    ) -> list[Stacked]:
        """Predict and learn: an answer for each stream.

        Args:
            streams: Each one's adapter or guard; None for a row that is no stream's, as a replay has them.
            members: Each one's member.
            images: (b, C, H, W) of each, all of one shape, on any device.

        Returns:
            Each stream's answer, or the error that its own adapter would have raised: nothing of that stream changed
            then. An error of the pass itself is raised, and nothing changed at all.
        """
        layout = self._ready()[1]
        device = next(self._model.parameters()).device
        rows = torch.stack([each.to(device) for each in images], 1)  # (b, N, C, H, W)
        sound = rows.isfinite().flatten(2).all(2).all(0)
        good = sound.tolist()
        if not all(good):
            rows = torch.where(sound.view(1, -1, *[1] * (rows.dim() - 2)), rows, 0)
        blank = [Member(each) if each is None else each for each in members]  # type: ignore[arg-type]
        refused: dict[int, Exception] = {}
        for at, (member, given) in enumerate(zip(blank, members, strict=True)):
            try:
                if given is not None:
                    member.join(layout, self._template)
                    self._members.add(member)
            except (KeyError, RuntimeError, TypeError, ValueError) as error:  # a state that fits no row
                refused[at] = error
                blank[at], good[at] = Member(None), False  # type: ignore[arg-type]
            if given is None or at in refused:
                blank[at].block, blank[at].row = self._fresh(), 0
        before = [member.left() for member in blank]
        with ExitStack() as held:
            for each in streams:
                if isinstance(each, Guard):
                    held.enter_context(each.holding())
            try:
                with torch.inference_mode(False):
                    batch = _RoundOf(self, blank, rows.flatten(0, 1), images, good)
                    if self._guarded:
                        found = batch.guarded(streams)
                    else:
                        found = batch.plain([each is not None for each in members])
            except BaseException:
                for member, left in zip(blank, before, strict=True):
                    member.restore(left)
                raise
            kept = [(each, found[at].taken) for at, each in enumerate(streams)]
            for each, taken in kept:
                if taken is not None and isinstance(each, Guard):
                    each.keep(taken)
            for at, one in enumerate(found):
                if one.error is not None:
                    blank[at].restore(before[at])
                if not good[at]:
                    found[at] = Stacked(error=refused.get(at) or _refused(images[at]))
            for each, taken in kept:
                if taken is not None and isinstance(each, Guard):
                    each.tell(taken)
        self._rounds += 1
        if self._rounds % THIN_EVERY == 0:
            with suppress(torch.OutOfMemoryError):  # the streams have learnt; rows are copied out another time
                self._thin()
        return found

    def settle(self, member: Member) -> None:
        """Hand a stream's state over to its adapter, where the stack has a newer one."""
        if member.newer:
            member.settle(self._ready()[1])

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """While the network runs: the model is this stack's, and the twin is up to date."""
        network = self._network
        assert network is not None
        device = next(self._model.parameters()).device.type
        with model_lock(self._model).lock, torch.inference_mode(False), network.borrowed(device):
            yield

    def _ready(self) -> tuple[StackNetwork, Layout]:
        assert self._network is not None
        assert self._layout is not None
        return self._network, self._layout

    @property
    def _template(self) -> State:
        assert self._state is not None
        return self._state

    def _fresh(self) -> Block:
        """The row of a stream that has seen nothing."""
        state = self._template
        row = self._ready()[1].packed({"moving": state.moving, "steps": state.steps, "memory": state.memory})
        return Block({kind: each[None] for kind, each in row.items()})

    def _thin(self) -> None:
        """Copy rows out of rounds that few streams still hold."""
        held = Counter(id(each.block) for each in self._members)
        for member in list(self._members):
            if member.block is not None:
                size = len(next(iter(member.block.flat.values())))
                if 2 * held[id(member.block)] < size:
                    member.alone()

    def _tried_on(self, shape: tuple[int, ...]) -> str:
        """Compare three streams of noise with each alone; says why they cannot be stacked, or ""."""
        assert self._network is not None
        device = next(self._model.parameters()).device
        noise = [torch.rand(shape, generator=torch.Generator().manual_seed(at)).to(device) for at in range(3)]
        alone = Adapter(self._model, self._recipe, **self._settings)
        try:
            self._begin(noise[0])
            states = [self._moved(at) for at in range(3)]
            expected = []
            plain = alone.checkpoint()
            for values, images in zip(states, noise, strict=True):
                kept = {**plain.state.values, **values}
                alone.rollback(_with_state(plain, kept), counts=True)
                with alone.frozen():
                    expected.append(log_probs_of(alone(images)).exp())
            return self._compared(states, noise, torch.stack(expected))
        except torch.OutOfMemoryError:
            raise
        except MISFITS as error:
            return f"a stacked pass failed: {(str(error).splitlines() or [type(error).__name__])[0]}"
        finally:
            alone.unload()

    def _compared(self, states: list[dict[str, Any]], noise: list[Tensor], expected: Tensor) -> str:
        """Whether a stacked pass gives what was expected, with the doubled batch or without."""
        network, layout = self._ready()
        flat = [layout.packed(each) for each in states]
        arrays = layout.arrays({kind: torch.stack([each[kind] for each in flat]) for kind in flat[0]})
        coarse = network.autocast.coarse(self._model, cuda=expected.is_cuda)
        error = torch.inf
        for doubles in (True, False) if network.branch is not None else (None,):
            if network.doubles is not None and doubles != network.doubles:
                continue
            before, network.doubles = network.doubles, doubles
            try:
                with self.borrowed(), torch.no_grad():
                    rows = torch.stack(noise, 1).flatten(0, 1)
                    nobody = torch.zeros(3, dtype=torch.bool, device=rows.device)
                    round = self._loop(rows, arrays, nobody).run(learns=False)
                answers = torch.stack([log_probs_of(network.in_model_shape(each)) for each in round.answer])
                error = float((answers.exp() - expected).abs().max())
            except MISFITS:
                if doubles is not True:
                    raise
                error = torch.inf
            if error <= (NEAR_COARSE if coarse else NEAR):
                return ""
            network.doubles = before
        return f"stacked answers are off by {error:.2g} where the model is tried"

    def _begin(self, images: Tensor) -> None:
        """Find out the number of classes, and with it what every stream remembers."""
        if self._layout is not None:
            return
        network = self._network
        assert network is not None
        network.streams = 1
        with self.borrowed(), torch.no_grad():
            (logits,), _ = network.heads(images, None, None, Source(), {}, doubled=False)
            state = State(self._recipe, network, self._settings["seed"], self._size, self._family)
            batch = Batch(images, state.rng, self._size or 1)
            state.begin(Outputs(logits, (logits,), batch, images=images, family=self._family))
        self._state, self._layout = state, Layout(state)
        self._start = Arrays(state.moving, state.steps, state.memory)

    def _moved(self, at: int) -> dict[str, Any]:
        """The values of a stream whose tensors have moved in a way of their own."""
        state = self._template

        def away(start: Tensor) -> Tensor:
            return start + 0.05 * torch.cos(torch.arange(start.numel(), device=start.device) + at).to(start.dtype)

        return {
            "moving": {key: away(each) for key, each in state.moving.items()}, "steps": state.steps,
            "memory": state.memory, "start": state.start, "classes": state.classes, "image": state.image,
            "size": state.size,
        }  # fmt: skip

    def _loop(self, rows: Tensor, arrays: Arrays, learn: Tensor, draws: Tensor | None = None) -> StackLoop:
        """The loop of one batch."""

        def destroyed(destroy: Destroy) -> Tensor:
            return destroyed_rows(destroy, rows, draws)

        return StackLoop(
            self._recipe, self._ready()[0], source=self._template.source, prepared=self._template.prepared,
            start=self._start, images=rows, arrays=arrays, learn=learn, lr=self._lr, size=self._size or 1,
            destroyed=destroyed,
        )  # fmt: skip

    def draws(self, members: Sequence[Member], learn: Sequence[bool], count: int) -> Tensor | None:
        """Each learning stream's random numbers for this batch, by its own generator; None where none are drawn."""
        parts = [part for _, part in self._recipe.places if isinstance(part, Patches)]
        if not parts:
            return None
        tiles = parts[0].grid ** 2
        found = []
        for member, learns in zip(members, learn, strict=True):
            if not learns or member.seen is None:
                found.append(torch.zeros(count, tiles, dtype=torch.long))
                continue
            rng = torch.Generator()
            rng.set_state(member.rest.get("rng", member.seen.state.rng))
            found.append(torch.rand(count, tiles, generator=rng).argsort(dim=1))
            member.rest = {**member.rest, "rng": rng.get_state()}
        return torch.stack(found).to(self._template.source["theta"].device)


class _RoundOf:
    """One round of a stack: rows of all streams, and what was computed of them."""

    def __init__(
        self, stack: Stack, members: list[Member], rows: Tensor, images: Sequence[Tensor], good: list[bool]
    ) -> None:
        self._stack, self._members, self._rows, self._images, self._good = stack, members, rows, images, good
        self._count = len(members)
        self._network, self._layout = stack._ready()
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
        loop = stack._loop(self._rows, self._arrays, mask, draws)
        learns = stack._recipe.learns
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
        if self._stack._guarded and self._stack._recipe.learns:
            columns["drift"] = self._drift(round.arrays)
        table = torch.stack([columns.get(name, zero).to(kind) for name in READ], 1).tolist()
        return [dict(zip(READ, each, strict=True)) for each in table]

    def _drift(self, arrays: Arrays) -> Tensor:
        """(N,) distance of the adapted tensors from the source's, relative to the source's norm."""
        source = self._stack._template.source
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
            views = self._stack._views and min(self._rows.shape[2:]) >= 8
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
                round = self._stack._loop(self._moved_rows(), self._arrays, nobody).run(learns=False)
            numbers: list[dict[str, float]] = [{} for _ in self._members]
        else:
            learn = [isinstance(each := asked.get(at), AskAdapted) and each.learning for at in range(self._count)]
            round, numbers = self._learnt(learn)
        raw = self._network.in_model_shape(round.answer.flatten(0, 1)).unflatten(0, (self._count, -1))
        probs = log_probs_of(raw.flatten(0, 1)).unflatten(0, (self._count, -1))
        source = None if self._stack._recipe.learns else round.first.source
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
            horizon = self._stack._horizon
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


def _refused(images: Tensor) -> Exception:
    """The error of an adapter that is given such images."""
    try:
        checks.finite(images)
    except ValueError as error:
        return error
    return ValueError("expected finite images, got NaN or Inf")


def _with_state(between: Between, values: dict[str, Any]) -> Between:
    """What an adapter holds, with other values of its state."""
    return replace(between, state=replace(between.state, values=values))
