"""Many streams over one model as one batch.

With recipes that adapt norm layers, streams differ in scales, shifts, statistics and small memories alone, so one pass
can compute them all (`stack_network`, `stack_loop`, `stack_round`). Every stream keeps its own adapter and guard: its
state is what they would hold. What cannot be stacked is said in words (`Stack.why_not`), and such streams take turns.

Rows do not depend on what other rows hold, so a batch can be computed again from the number of streams and the stream's
own row: `poem.serve.replay` does so.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from poem.adapter import Adapter, Between
from poem.engine import input_checks as checks
from poem.engine.branch_check import MISFITS
from poem.engine.model_lock import model_lock
from poem.engine.state import State
from poem.guarded.asked import log_probs_of
from poem.guarded.guard import Guard
from poem.parts.base import Batch, Outputs
from poem.parts.destruction import Destroy, Patches
from poem.parts.statistics import Source
from poem.serve.stack_loop import StackLoop, destroyed_rows
from poem.serve.stack_network import StackNetwork
from poem.serve.stack_recipes import recipe_why_not
from poem.serve.stack_round import Stacked, StackRound
from poem.serve.stack_state import Block, Layout, Member
from poem.serve.stack_values import Arrays

NEAR, NEAR_COARSE = 5e-4, 3e-2
"""How far a stacked probability may be from that of the stream alone when a model is tried."""
THIN_EVERY = 16
"""Rounds after which rows of rounds that few streams still hold are copied out of them."""
MOST_SHAPES = 256
"""Shapes of batches for which it is remembered whether they can be stacked."""


class Stack:
    """Computes batches of several streams at once. Not thread-safe: one thread calls it.

    Args:
        like: An adapter, or a guard, as every stream has one: same model, recipe and settings. It is only read.
    """

    def __init__(self, like: Adapter | Guard) -> None:
        adapter = like.adapter if isinstance(like, Guard) else like
        self._model, self.recipe, self._family = adapter.model, adapter.recipe, adapter.facts.family
        self._settings, self._lr, self._size = adapter.settings, adapter.lr, adapter.batch_size
        self.guarded = isinstance(like, Guard)
        self.horizon = like.settings.horizon if isinstance(like, Guard) else 0
        self.views = isinstance(like, Guard) and like.settings.view == "shift"
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
        found = recipe_why_not(self.recipe)
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
        if self.recipe.recover.due(values["calls"]):
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
            then. An error beside an answer came after the stream had learnt. An error of the pass itself is raised, and
            nothing changed at all.
        """
        device = next(self._model.parameters()).device
        rows = torch.stack([each.to(device) for each in images], 1)  # (b, N, C, H, W)
        sound = rows.isfinite().flatten(2).all(2).all(0)
        good = sound.tolist()
        if not all(good):
            rows = torch.where(sound.view(1, -1, *[1] * (rows.dim() - 2)), rows, 0)
        joined, refused = self._joined(members)
        good = [each and at not in refused for at, each in enumerate(good)]
        before = [member.left() for member in joined]
        with ExitStack() as held:
            for each in streams:
                if isinstance(each, Guard):
                    held.enter_context(each.holding())
            try:
                with torch.inference_mode(False):
                    batch = StackRound(self, joined, rows.flatten(0, 1), images, good)
                    if self.guarded:
                        found = batch.guarded(streams)
                    else:
                        found = batch.plain([each is not None for each in members])
            except BaseException:
                for member, left in zip(joined, before, strict=True):
                    member.restore(left)
                raise
            self._keep(streams, found, joined, before)
        for at, given in enumerate(members):
            if not good[at]:
                found[at] = Stacked(error=refused.get(at) or _refused(images[at]))
            elif given is not None and found[at].error is None:
                try:
                    given.lighten()
                except Exception as error:
                    found[at] = replace(found[at], error=error)
        self._rounds += 1
        if self._rounds % THIN_EVERY == 0:
            with suppress(RuntimeError):  # as for want of memory: the streams have learnt, and rows can wait
                self._thin()
        return found

    def _joined(self, members: Sequence[Member | None]) -> tuple[list[Member], dict[int, Exception]]:
        """A member with a row for each place, and why a stream is refused whose state fits no row.

        Places that are no stream's, or a refused one's, have the row of a stream that has seen nothing.
        """
        found: list[Member] = []
        refused: dict[int, Exception] = {}
        for at, given in enumerate(members):
            if given is not None:
                try:
                    given.join(self.ready()[1], self.template)
                    self._members.add(given)
                    found.append(given)
                    continue
                except (KeyError, RuntimeError, TypeError, ValueError) as error:
                    refused[at] = error
            found.append(Member(None, self._fresh()))  # type: ignore[arg-type]
        return found, refused

    def _keep(
        self, streams: Sequence[Adapter | Guard | None], found: list[Stacked], members: list[Member],
        before: list[dict[str, Any]],
    ) -> None:  # fmt: skip
        """Let guards keep their batches, set streams that failed back, and then tell of events.

        From here on streams have learnt: what fails is an error of its stream alone.
        """
        kept = [(each, found[at].taken) for at, each in enumerate(streams)]
        for each, taken in kept:
            if taken is not None and isinstance(each, Guard):
                each.keep(taken)
        for at, (one, (each, taken)) in enumerate(zip(found, kept, strict=True)):
            try:
                if one.error is not None:
                    members[at].restore(before[at])
                elif taken is not None and isinstance(each, Guard):
                    each.tell(taken)
            except Exception as error:
                found[at] = replace(one, error=error)

    def settle(self, member: Member) -> None:
        """Hand a stream's state over to its adapter, where the stack has a newer one."""
        if member.newer:
            member.settle(self.ready()[1])

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """While the network runs: the model is this stack's, and the twin is up to date."""
        network = self._network
        assert network is not None
        device = next(self._model.parameters()).device.type
        with model_lock(self._model).lock, torch.inference_mode(False), network.borrowed(device):
            yield

    def ready(self) -> tuple[StackNetwork, Layout]:
        """The network of all streams, and where their tensors lie in a row."""
        assert self._network is not None
        assert self._layout is not None
        return self._network, self._layout

    @property
    def template(self) -> State:
        """The state of a stream that has seen nothing."""
        assert self._state is not None
        return self._state

    def _fresh(self) -> Block:
        """The row of a stream that has seen nothing."""
        state = self.template
        row = self.ready()[1].packed({"moving": state.moving, "steps": state.steps, "memory": state.memory})
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
        alone = Adapter(self._model, self.recipe, **self._settings)
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
        network, layout = self.ready()
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
                    round = self.loop(rows, arrays, nobody).run(learns=False)
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
            state = State(self.recipe, network, self._settings["seed"], self._size, self._family)
            batch = Batch(images, state.rng, self._size or 1)
            state.begin(Outputs(logits, (logits,), batch, images=images, family=self._family))
        self._state, self._layout = state, Layout(state)
        self._start = Arrays(state.moving, state.steps, state.memory)

    def _moved(self, at: int) -> dict[str, Any]:
        """The values of a stream whose tensors have moved in a way of their own."""
        state = self.template

        def away(start: Tensor) -> Tensor:
            return start + 0.05 * torch.cos(torch.arange(start.numel(), device=start.device) + at).to(start.dtype)

        return {
            "moving": {key: away(each) for key, each in state.moving.items()}, "steps": state.steps,
            "memory": state.memory, "start": state.start, "classes": state.classes, "image": state.image,
            "size": state.size,
        }  # fmt: skip

    def loop(self, rows: Tensor, arrays: Arrays, learn: Tensor, draws: Tensor | None = None) -> StackLoop:
        """The loop of one batch."""

        def destroyed(destroy: Destroy) -> Tensor:
            return destroyed_rows(destroy, rows, draws)

        return StackLoop(
            self.recipe, self.ready()[0], source=self.template.source, prepared=self.template.prepared,
            start=self._start, images=rows, arrays=arrays, learn=learn, lr=self._lr, size=self._size or 1,
            destroyed=destroyed,
        )  # fmt: skip

    def draws(self, members: Sequence[Member], learn: Sequence[bool], count: int) -> Tensor | None:
        """Each learning stream's random numbers for this batch, by its own generator; None where none are drawn."""
        parts = [part for _, part in self.recipe.places if isinstance(part, Patches)]
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
        return torch.stack(found).to(self.template.source["theta"].device)


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
