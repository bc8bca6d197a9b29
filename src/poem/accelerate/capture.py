"""Whole rounds as CUDA graphs: the same loop, recorded once per shape of batch and then replayed.

The loop pauses before each update to be read by the host. What lies between two pauses is one graph, and what is left
to do if it ends there is another: first look | update, look again | ... and an ending for each. A replay runs the
graphs in order, reads the flags between them, and runs one ending. Images, state and draws are copied to addresses that
stay; what a batch leaves behind is copied out, so that nobody holds memory that the next batch will write.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from poem.accelerate import graph_pool as studios
from poem.accelerate.graph_pool import Graph, Studio
from poem.engine.accounting import Batchwise, Costs, FirstLast
from poem.engine.loop import Turn, worthwhile
from poem.engine.network import Network
from poem.engine.state import State
from poem.parts.base import Batch, Memory
from poem.recipes.recipe import Recipe

log = logging.getLogger("poem")
Fast = Literal["auto"] | bool
PATIENCE = 10  # batches of one shape that "auto" runs eagerly before it records: fewer are not worth it
DEVICES: tuple[str, ...] = ("cuda",)  # that record
SHAPES = 8  # shapes that are kept; the one used longest ago goes first


@dataclass
class Draws(Batch):
    """A batch whose draws stay at their addresses, and are made again for every replay."""

    asked: list[tuple[object, Callable[[torch.Generator], Tensor]]] = field(default_factory=list)

    def once(self, key: object, draw: Callable[[torch.Generator], Tensor]) -> Tensor:
        """The draw; the first time its maker is noted, in order."""
        if key not in self._drawn:
            self.asked.append((key, draw))
        return super().once(key, draw)

    def redraw(self, first: int, last: int) -> None:
        """Make some of the draws anew, in the order in which they were asked for."""
        for key, draw in self.asked[first:last]:
            self._drawn[key].copy_(draw(self.rng), non_blocking=True)


@dataclass
class Ending:
    """What a batch leaves behind if it ends here: the answer, its books, and the places of the state that changed."""

    answer: Tensor
    entry: Batchwise
    state: Memory
    graph: Graph | None = None  # None: part of the segment's own

    def __post_init__(self) -> None:
        """All tensors to copy out, by type: one copy for each type of number."""
        found: dict[int, Tensor] = {}
        _mapped((self.answer, self.entry, self.state), lambda tensor: found.setdefault(id(tensor), tensor))
        self._kinds: dict[torch.dtype, list[Tensor]] = {}
        for tensor in found.values():
            self._kinds.setdefault(tensor.dtype, []).append(tensor)

    def copied(self) -> tuple[Tensor, Batchwise, Memory]:
        """The same in memory of its own."""
        new: dict[int, Tensor] = {}
        for tensors in self._kinds.values():
            fresh = [torch.empty_like(tensor) for tensor in tensors]
            torch._foreach_copy_(fresh, tensors)
            new.update(zip(map(id, tensors), fresh, strict=True))
        mine: tuple[Tensor, Batchwise, Memory] = _mapped(
            (self.answer, self.entry, self.state), lambda tensor: new[id(tensor)]
        )
        return mine


@dataclass
class Segment:
    """What runs between two reads of the host."""

    graph: Graph
    flags: Tensor | None  # None: nothing left to ask
    ending: Ending
    draws: tuple[int, int]  # which draws it asks for first


class Way:
    """All ways through the loop for one shape of batch, recorded."""

    def __init__(self, make: Callable[[Batch], Turn], state: State, images: Tensor, size: int, studio: Studio) -> None:
        self._make, self._state, self._studio = make, state, studio
        self._batch = Draws(images.clone(), state.rng, size)
        self._came: Memory = state.tensors()
        self._held = {place: tensor.clone() for place, tensor in self._came.items()}
        with studio.session():
            asked = [segment.draws for segment in self._drive(_done)]  # what is made on first use is made now
            self._drive(_done, drawn=True)
            recorded = self._drive(studio.record, drawn=True)
        self._segments = [replace(segment, draws=draws) for segment, draws in zip(recorded, asked, strict=True)]

    def fits(self) -> bool:
        """Whether the state has the same places and shapes as when this was recorded."""
        now = self._state.tensors()
        return now.keys() == self._held.keys() and all(
            now[place].shape == held.shape and now[place].dtype == held.dtype for place, held in self._held.items()
        )

    def __call__(self, images: Tensor) -> tuple[Tensor, Batchwise]:
        """Answer a batch, and leave the state as the loop would."""
        with self._studio.playing():
            self._batch.images.copy_(images, non_blocking=True)
            self._fill()
            for number, segment in enumerate(self._segments):
                self._batch.redraw(*segment.draws)
                segment.graph.replay()
                if segment.flags is None or not worthwhile(segment.flags, images, first=number == 0):
                    break
            if segment.ending.graph is not None:
                segment.ending.graph.replay()
            answer, entry, state = segment.ending.copied()
        self._state.place(state)
        return answer, entry

    def drop(self) -> None:
        """Give the memory back."""
        with self._studio.still():
            self._segments = []

    def _fill(self) -> None:
        """The state to where the recordings look for it; what did not change since last time is there already."""
        for place, tensor in self._state.tensors().items():
            if tensor is not self._came[place]:
                self._held[place].copy_(tensor, non_blocking=True)
                self._came[place] = tensor

    def _drive(self, record: Callable[[], Any], *, drawn: bool = False) -> list[Segment]:
        """Through all updates, whatever the flags say, and through the ending that each pause could be.

        Once everything has been drawn, chance must stand still: a draw that a replay would not repeat is refused.
        """
        segments: list[Segment] = []
        chance = self._chance()
        with self._state.trying(), self._in_place():
            turn = self._make(self._batch)
            rounds = turn.rounds()
            while not segments or segments[-1].flags is not None:
                asked = len(self._batch.asked)
                with record() as graph:
                    flags = next(rounds, None)
                    ending = self._end(turn) if flags is None else None
                if ending is None:
                    fork = turn.fork()
                    with record() as other:
                        ending = self._end(fork)
                    ending.graph = other
                    fork.forget()
                segments.append(Segment(graph, flags, ending, (asked, len(self._batch.asked))))
            turn.forget()
            if drawn:
                self._still(chance)
        return segments

    def _chance(self) -> bytes:
        """The random state, read without a device."""
        return self._state.rng.get_state().numpy().tobytes()

    def _still(self, chance: bytes) -> None:
        """Nothing has been drawn since."""
        if self._chance() != chance:
            raise RuntimeError("a part draws chance outside Batch.once, which a replay would not repeat")

    def _end(self, turn: Turn) -> Ending:
        """Finish a turn; only what it made is kept."""
        chance = self._chance()
        with self._state.trying():
            answer = turn.finish()
            now = self._state.tensors()
            self._still(chance)
        changed = {place: tensor for place, tensor in now.items() if tensor is not self._held[place]}
        return Ending(answer, turn.entry, changed)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """The state's tensors are the ones that stay at their addresses."""
        before = self._state.tensors()
        self._state.place(self._held)
        try:
            yield
        finally:
            self._state.place(before)


class Recorder:
    """The recorded ways of one adapter."""

    def __init__(self, recipe: Recipe, network: Network, state: State, fast: Fast) -> None:
        self._recipe, self._network, self._state, self._fast = recipe, network, state, fast
        self._ways: OrderedDict[tuple[Any, ...], Way] = OrderedDict()
        self._seen: Counter[tuple[Any, ...]] = Counter()
        self._refused: dict[tuple[Any, ...], str] = {}

    def way(self, images: Tensor, lr: float, size: int, learn: bool) -> tuple[Way | None, str | None]:
        """How to answer such a batch, or None and, where that is worth a word, why the plain loop answers it."""
        if self._fast is False or (self._fast == "auto" and images.device.type not in DEVICES):
            return None, None
        self._network.meet(images.device.type)
        why = self._why_not(images)
        if why is not None:
            return None, why
        key = (images.shape, images.dtype, images.device, lr, size, learn, *self._network.depends())
        begun = self._state.start is not None
        found = self._ways.get(key) if begun else None
        if found is not None and found.fits():
            self._network.recast()
            self._ways.move_to_end(key)
            return found, None
        self._seen[key] += 1
        if not begun or key in self._refused or (self._fast == "auto" and self._seen[key] <= PATIENCE):
            return None, self._refused.get(key)
        if learn and self._recipe.learns and self._network.halves.untried:
            return None, "not captured yet: the branch's way back is tried on the first lesson, and nobody has taught"
        return self._recorded(key, images, lr, size, learn)

    def forget(self) -> None:
        """Give the memory of all recordings back."""
        while self._ways:
            self._ways.popitem()[1].drop()

    def _recorded(
        self, key: tuple[Any, ...], images: Tensor, lr: float, size: int, learn: bool
    ) -> tuple[Way | None, str | None]:
        """Record a way; where that fails the state is as it was, and the plain loop goes on."""

        def make(batch: Batch) -> Turn:
            return Turn(self._recipe, self._network, self._state, batch, Batchwise(), lr, learn)

        try:
            with self._network.borrowed(images.device.type), self._network.early.recording():
                way = Way(make, self._state, images, size, studios.studio(images.device))
        except Exception as error:
            reason = f"not captured: {(str(error).splitlines() or [type(error).__name__])[0]}"
            log.warning("%s runs eagerly, %s", type(self._network.model).__name__, reason)
            if not isinstance(error, torch.OutOfMemoryError):  # others may give memory back: try again
                self._refused[key] = reason
            return None, reason
        for old in [old for old in self._ways if old[-1] != key[-1]]:  # of a model that is elsewhere by now
            self._ways.pop(old).drop()
        self._ways[key] = way
        if len(self._ways) > SHAPES:
            self._ways.popitem(last=False)[1].drop()
        return way, None

    def _why_not(self, images: Tensor) -> str | None:
        """What is known beforehand to stand in the way."""
        if images.device.type not in DEVICES:
            return f"not captured: {images.device.type} has no CUDA graphs"
        part = self._recipe.on_host
        if part is not None:
            return f"not captured: {part} decides on the host as it goes"
        if self._network.hooked:
            return "not captured: the model has hooks, which a replay would not call"
        return None


@contextmanager
def _done() -> Iterator[Any]:
    """Not recorded, simply done."""
    yield None


def _mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A structure of ours with every tensor changed."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, FirstLast):
        return FirstLast(*(_mapped(each, change) for each in value))
    if isinstance(value, list | tuple):
        return type(value)(_mapped(each, change) for each in value)
    if isinstance(value, dict):
        return {key: _mapped(each, change) for key, each in value.items()}
    if isinstance(value, Costs):
        return replace(value, **{item.name: _mapped(getattr(value, item.name), change) for item in fields(value)})
    if isinstance(value, Batchwise):
        new = Batchwise()
        vars(new).update(_mapped(vars(value), change))
        return new
    return value
