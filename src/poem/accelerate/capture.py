"""The loop captured as CUDA graphs, once per shape of batch, and then replayed.

Each stage of the loop is a graph: `first`, then each `update`, and a `finish` after each of them, since the loop may
end there. A replay runs the stages in order, reads the flags between them, and runs one finish. Images, state and
random draws are copied to addresses that stay; what a batch leaves behind is copied out, so that no caller holds memory
that the next batch writes.

Whether the model is still the one that was captured takes the host longer to see than to launch a graph, so the first
stage of the loop used last is launched before that is known, and given up where the model has changed: it writes
nothing but the loop's own memory, and the loop keeps alive what it reads of the model, but for tensors inside
containers.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from operator import itemgetter
from time import perf_counter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from poem.accelerate import graph_pool
from poem.accelerate.accelerated import Accelerated
from poem.accelerate.foreach import copy_each
from poem.accelerate.graph_pool import Graph, GraphPool
from poem.accelerate.packed_memory import MemoryLayout, PackedMemory
from poem.engine.accounting import BatchRecord, Costs, FirstLast
from poem.engine.loop import BatchLoop, BatchProgress, read_flags
from poem.engine.network import Network
from poem.engine.state import State
from poem.parts.base import Batch, Memory, Need
from poem.recipes.recipe import Recipe

log = logging.getLogger("poem")
Fast = Literal["auto"] | bool
EAGER_FIRST = 10  # batches of one shape that "auto" runs eagerly before it captures: fewer are not worth it
DEVICES: tuple[str, ...] = ("cuda",)  # that capture
SHAPES = 8  # shapes that are kept; the one used longest ago goes first


@dataclass
class CapturedBatch(Batch):
    """A batch whose random draws stay at their addresses, and are made again for every replay."""

    asked: list[tuple[object, Callable[[torch.Generator], Tensor]]] = field(default_factory=list)

    def once(self, key: object, draw: Callable[[torch.Generator], Tensor]) -> Tensor:
        """The draw; the first time, how it is made is noted, in order."""
        if key not in self._drawn:
            self.asked.append((key, draw))
        return super().once(key, draw)

    def redraw(self, first: int, last: int) -> None:
        """Make some of the draws anew, in the order in which they were asked for."""
        for key, draw in self.asked[first:last]:
            self._drawn[key].copy_(draw(self.rng), non_blocking=True)


@dataclass
class CapturedFinish:
    """What a batch leaves behind if it ends here: the answer, its record, and the tensors of the state that changed."""

    answer: Tensor
    record: BatchRecord
    state: Memory  # but for what is in `packed`
    packed: PackedMemory | None  # small tensors of the memory, where one of them changed
    graph: Graph | None = None  # None: part of the stage's own

    def __post_init__(self) -> None:
        """All tensors to copy out."""
        found: dict[int, Tensor] = {}
        self._build = _builder((self.answer, self.record, self.state), found)
        self._tensors = list(found.values())

    def copied(self) -> tuple[Tensor, BatchRecord, Memory, PackedMemory | None]:
        """Answer, record and state in memory of their own."""
        fresh = [torch.empty_like(tensor) for tensor in self._tensors]
        copy_each(fresh, self._tensors)
        mine: tuple[Tensor, BatchRecord, Memory] = self._build(fresh)
        return *mine, None if self.packed is None else self.packed.copied()


@dataclass
class LatestMemory:
    """The packed memory that the last replay of any of an adapter's loops left behind; the state may have another."""

    packed: PackedMemory | None = None


class StateNow(NamedTuple):
    """A state that a captured loop can read."""

    packed: PackedMemory | None
    """Small tensors of its memory, where they lie as the loop reads them."""
    beside: Memory
    """All others, by place."""


@dataclass
class CapturedStage:
    """What runs between two reads of the host."""

    graph: Graph
    flags: Tensor | None  # None: no further update
    finish: CapturedFinish
    draws: tuple[int, int]  # which random draws it asks for first


class CapturedLoop:
    """The loop for one shape of batch, captured."""

    def __init__(
        self, make: Callable[[Batch], BatchLoop], state: State, images: Tensor, size: int, pool: GraphPool,
        latest: LatestMemory, model: Network,
    ) -> None:  # fmt: skip
        # What the graphs read is kept alive: the model's own tensors, and those its modules have as plain attributes.
        # Tensors inside lists, dictionaries or slots of a module are not.
        self._model = [each.detach() for each in model.tensors() if each is not None]
        self._beside_model = [each.detach() for each in model.plain_tensors()]
        self._strided = [each for each in self._model if each.layout == torch.strided]
        self._places = list(map(Tensor.data_ptr, self._strided))
        self._make, self._state, self._pool, self._latest = make, state, pool, latest
        self._batch = CapturedBatch(images.clone(), state.rng, size)
        self._packed = MemoryLayout.of(state.memory).packed(state.memory)
        self._packed_came: PackedMemory | None = None  # what was copied to `_packed` last
        self._came: Memory = {}  # and to each other place, or to a row where the state's memory was not packed
        self._beside = {place: each.clone() for place, each in state.tensors(without=self._packed.rows).items()}
        self._held = self._beside | {f"memory/{name}": row for name, row in self._packed.rows.items()}
        with pool.session():
            draws = [stage.draws for stage in self._stages(_run_eagerly)]  # what is made on first use is made now
            self._stages(_run_eagerly, drawn=True)
            captured = self._stages(pool.capture, drawn=True)
        self._captured = [replace(stage, draws=each) for stage, each in zip(captured, draws, strict=True)]

    def reads(self) -> StateNow | None:
        """The state as the graphs read it; None where its tensors have other shapes than when this was captured."""
        packed, now = self._now()
        expected = self._held if packed is None else self._beside
        same = now.keys() == expected.keys() and all(
            now[place].shape == held.shape and now[place].dtype == held.dtype for place, held in expected.items()
        )
        return StateNow(packed, now) if same else None

    def readable(self) -> bool:
        """Whether the model's memory that the graphs read is where it was: storage may be emptied in place."""
        return list(map(Tensor.data_ptr, self._strided)) == self._places

    def __call__(
        self, images: Tensor, now: StateNow, confirmed: Callable[[], bool] = lambda: True
    ) -> tuple[Tensor, BatchRecord] | None:
        """Answer a batch, and leave the state as the loop would.

        Args:
            images: The batch.
            now: The state, from `reads`.
            confirmed: Whether this is the loop for the batch; asked while a device computes the first stage.

        Returns:
            Answer and record; None, and nothing has changed, where this is not the loop.
        """
        with self._pool.replaying():
            self._batch.images.copy_(images, non_blocking=True)
            self._copy_state(now)
            random = self._batch.rng.get_state() if any(self._captured[0].draws) else None
            for number, stage in enumerate(self._captured):
                self._batch.redraw(*stage.draws)
                stage.graph.replay()
                if number == 0 and not confirmed():
                    if random is not None:
                        self._batch.rng.set_state(random)
                    return None
                if stage.flags is None or not read_flags(stage.flags, images, first=number == 0):
                    break
            if stage.finish.graph is not None:
                stage.finish.graph.replay()
            answer, record, state, packed = stage.finish.copied()
        self._state.replace(state)
        if packed is not None:
            self._state.memory = {**self._state.memory, **packed.rows}
            self._latest.packed = packed
        return answer, record

    def release(self) -> None:
        """Free the graphs' memory."""
        with self._pool.exclusive():
            self._captured = []

    def _now(self) -> StateNow:
        """The state's packed memory, if it has one with the layout that the graphs read, and all else by place."""
        packed = self._latest.packed
        known = packed is not None and packed.layout == self._packed.layout and packed.is_in(self._state.memory)
        beside = self._state.tensors(without=self._packed.rows if known else ())
        return StateNow(packed if known else None, beside)

    def _copy_state(self, state: StateNow) -> None:
        """Copy the state to where the graphs read it; what did not change since last time is there already."""
        packed, now = state
        if packed is not None and packed is not self._packed_came:
            self._packed.copy_from(packed)
            self._came = {place: tensor for place, tensor in self._came.items() if place in self._beside}
        self._packed_came = packed
        changed = {place: tensor for place, tensor in now.items() if tensor is not self._came.get(place)}
        copy_each([self._held[place] for place in changed], changed.values())
        self._came |= changed

    def _stages(self, capture: Callable[[], Any], *, drawn: bool = False) -> list[CapturedStage]:
        """Every stage, whatever the flags say, each with the finish that would follow it.

        Once all random draws have been made, a draw that a replay would not repeat is an error.
        """
        stages: list[CapturedStage] = []
        random = self._random_state()
        with self._state.rolled_back(), self._in_place():
            loop = self._make(self._batch)
            progress: BatchProgress | None = None
            while progress is None or progress.flags is not None:
                asked = len(self._batch.asked)
                with capture() as graph:
                    if progress is None:
                        loop.network.acceleration.copy_weights()
                    progress = loop.first() if progress is None else loop.update(progress)
                    finish = self._finish(loop, progress) if progress.flags is None else None
                if finish is None:
                    with capture() as own:
                        finish = self._finish(loop, progress)
                    finish.graph = own
                stages.append(CapturedStage(graph, progress.flags, finish, (asked, len(self._batch.asked))))
            if drawn:
                self._refuse_draws(random)
        return stages

    def _finish(self, loop: BatchLoop, progress: BatchProgress) -> CapturedFinish:
        """The answer if the loop ended here; state and counts are then as before."""
        random, costs = self._random_state(), replace(loop.costs)
        with self._state.rolled_back():
            answer, record = loop.finish(progress)
            memory, layout = self._state.memory, self._packed.layout
            # Where a part replaced a tensor by one of another shape, each is copied by itself.
            same = layout.fits(memory)
            now = self._state.tensors(without=self._packed.rows if same else ())
            packed = layout.packed(memory) if same and not self._packed.is_in(memory) else None
            self._refuse_draws(random)
        loop.costs = costs
        changed = {place: tensor for place, tensor in now.items() if tensor is not self._held[place]}
        return CapturedFinish(answer, record, changed, packed)

    def _random_state(self) -> bytes:
        """The random generator's state, read without a device."""
        return self._state.rng.get_state().numpy().tobytes()

    def _refuse_draws(self, random: bytes) -> None:
        """An error if anything has been drawn since."""
        if self._random_state() != random:
            raise RuntimeError("a part draws random numbers outside Batch.once, which a replay would not repeat")

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """The state's tensors are the ones that stay at their addresses."""
        before = self._state.tensors()
        self._state.replace(self._held)
        try:
            yield
        finally:
            self._state.replace(before)


class Captures:
    """The captured loops of one adapter, by shape of batch and all else that they depend on."""

    def __init__(self, recipe: Recipe, network: Network, state: State, fast: Fast) -> None:
        self._recipe, self._network, self._state, self._fast = recipe, network, state, fast
        self._loops: OrderedDict[tuple[Any, ...], CapturedLoop] = OrderedDict()
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._refused: dict[tuple[Any, ...], str] = {}
        self._replayed: dict[tuple[Any, ...], tuple[Any, ...]] = {}  # keys of loops by all of them but the model
        self.find_seconds = 0.0
        """What finding loops took, and capturing them."""
        self._latest = LatestMemory()

    def answer(
        self, images: Tensor, lr: float, size: int, learn: bool
    ) -> tuple[tuple[Tensor, BatchRecord] | None, str | None]:
        """The answer to a batch and its record by a replay, or None and why the batch runs eagerly."""
        if self._fast is False or (self._fast == "auto" and images.device.type not in DEVICES):
            return None, None
        network = self._network
        network.autocast.note(images.device.type)
        call = (images.shape, images.dtype, images.device, lr, size, learn)
        known = (*call, *network.call_key())
        key = self._replayed.get(known)
        loop = None if key is None or self._state.start is None or not network.ready else self._loops.get(key)
        state = loop.reads() if loop is not None and loop.readable() else None
        if key is not None and loop is not None and state is not None:

            def confirmed() -> bool:
                return self._why_not(images) is None and key == self._key(call)

            replayed = loop(images, state, confirmed)
            if replayed is not None:
                self._loops.move_to_end(key)
                return replayed, None
            del self._replayed[known]  # do not launch it first again until `find` returns it
        began = perf_counter()
        found, why = self.find(images, lr, size, learn)
        self.find_seconds += perf_counter() - began
        state = None if found is None else found.reads()
        return None if found is None or state is None else found(images, state), why

    def find(self, images: Tensor, lr: float, size: int, learn: bool) -> tuple[CapturedLoop | None, str | None]:
        """The captured loop for such a batch, made where it is worth it; or None and why the batch runs eagerly."""
        why = self._why_not(images)
        if why is not None:
            return None, why
        call = (images.shape, images.dtype, images.device, lr, size, learn)
        key = self._key(call)
        begun = self._state.start is not None
        found = self._loops.get(key) if begun else None
        if found is not None and found.reads() is not None:
            self._network.prepare_replay()
            self._loops.move_to_end(key)
            self._replayed[key[:-1]] = key
            return found, None
        self._seen[key] += 1
        if not begun or key in self._refused or (self._fast == "auto" and self._seen[key] <= EAGER_FIRST):
            return None, self._refused.get(key)
        acceleration = self._network.acceleration
        untried = isinstance(acceleration, Accelerated) and acceleration.branch_backward.untried
        if isinstance(acceleration, Accelerated) and acceleration.untried(images.device.type):
            return None, "not captured yet: whether norm layers may be lazy is tried on a batch that runs eagerly"
        if learn and self._recipe.learns and untried:
            return None, "not captured yet: the branch's backward pass is tried on its first update, and none was made"
        if learn and self._recipe.step.per_sample and self._network.samples_independent is None and len(images) > 1:
            return None, "not captured yet: whether samples are apart is tried on the first batch that is learnt from"
        return self._capture(call, images, lr, size, learn)

    def release(self) -> None:
        """Free the memory of all captured loops."""
        while self._loops:
            self._loops.popitem()[1].release()
        self._latest.packed = None
        self._seen.clear()
        self._refused.clear()
        self._replayed.clear()

    def _capture(
        self, call: tuple[Any, ...], images: Tensor, lr: float, size: int, learn: bool
    ) -> tuple[CapturedLoop | None, str | None]:
        """Capture the loop; where that fails the state is as it was, and the batch runs eagerly."""
        network = self._network

        def make(batch: Batch) -> BatchLoop:
            return BatchLoop(self._recipe, network, self._state, batch, lr, learn)

        pool = graph_pool.graph_pool(images.device)
        try:
            with network.borrowed(images.device.type), self._by_address():
                loop = CapturedLoop(make, self._state, images, size, pool, self._latest, network)
        except Exception as error:
            reason = f"not captured: {(str(error).splitlines() or [type(error).__name__])[0]}"
            log.warning("%s runs eagerly, %s", type(self._network.model).__name__, reason)
            if not isinstance(error, torch.OutOfMemoryError):  # others may give memory back: try again
                self._refused[self._key(call)] = reason
            return None, reason
        key = self._key(call)  # the twin may have been built again
        for old in [old for old in self._loops if old[-1] != key[-1]]:  # of a model that is elsewhere by now
            self._loops.pop(old).release()
        replaced = self._loops.pop(key, None)  # of a state with other shapes
        if replaced is not None:
            replaced.release()
        self._loops[key] = loop
        if len(self._loops) > SHAPES:
            self._loops.popitem(last=False)[1].release()
        self._replayed = {call: each for call, each in self._replayed.items() if each in self._loops} | {key[:-1]: key}
        return loop, None

    def _key(self, call: tuple[Any, ...]) -> tuple[Any, ...]:
        """All that a captured loop depends on; the model comes last."""
        return (*call, *self._network.call_key(), self._network.model_key())

    @contextmanager
    def _by_address(self) -> Iterator[None]:
        """Inside, the prefix cache compares inputs by address: a capture reads no values."""
        acceleration = self._network.acceleration
        if isinstance(acceleration, Accelerated):
            with acceleration.prefix_cache.recording():
                yield
        else:
            yield

    def _why_not(self, images: Tensor) -> str | None:
        """What is known beforehand to prevent a capture."""
        if images.device.type not in DEVICES:
            return f"not captured: {images.device.type} has no CUDA graphs"
        part = self._recipe.first_with(Need.HOST)
        if part is not None:
            return f"not captured: {part} decides on the host as it goes"
        if self._network.given is not None:
            return "not captured: the model is called with more than one tensor, and a replay copies one"
        if self._network.hooked:
            return "not captured: the model has hooks, which a replay would not call"
        return None


@contextmanager
def _run_eagerly() -> Iterator[Any]:
    """Instead of a capture: what is inside is run."""
    yield None


def _builder(value: Any, found: dict[int, Tensor]) -> Callable[[Sequence[Tensor]], Any]:
    """Makes a structure of ours anew, with other tensors in the places of its own; made once, called for every batch.

    Args:
        value: The structure.
        found: Its tensors by identity, in order, to which those not among them are added. The function returned takes
            one for each.
    """
    if isinstance(value, Tensor):
        found.setdefault(id(value), value)
        return itemgetter(list(found).index(id(value)))
    if isinstance(value, list | tuple):
        parts = [_builder(each, found) for each in value]
        kind: Callable[[Any], Any] = FirstLast._make if isinstance(value, FirstLast) else type(value)
        return lambda new: kind([part(new) for part in parts])
    if isinstance(value, dict):
        return _of_fields(value, found, dict)
    if isinstance(value, Costs):
        return _of_fields(vars(value), found, lambda values: Costs(**values))
    if isinstance(value, BatchRecord):
        return _of_fields(vars(value), found, BatchRecord.of)
    return lambda new: value


def _of_fields(
    values: Mapping[str, Any], found: dict[int, Tensor], make: Callable[[dict[str, Any]], Any]
) -> Callable[[Sequence[Tensor]], Any]:
    parts = {name: _builder(each, found) for name, each in values.items()}
    return lambda new: make({name: part(new) for name, part in parts.items()})
