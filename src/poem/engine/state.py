"""Everything that moves, in one place.

Tensors are replaced, never written into: an update that must not happen leaves nothing to undo, and a copy of the
dictionaries is a snapshot.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from poem._util import state_file
from poem._util.caching import fingerprint
from poem.accelerate.weight_casts import whereabouts
from poem.engine import input_checks as checks
from poem.engine.network import Network
from poem.parts.base import Look, Memory
from poem.recipes.recipe import Recipe
from poem.recipes.text import written

log = logging.getLogger("poem")


@dataclass(frozen=True)
class Snapshot:
    """A state between two batches."""

    values: dict[str, Any]
    rng: Tensor


class State:
    """The one owner of moving tensors, optimiser memory, what parts remember, and chance.

    `moving` holds the flat vectors `theta` and, with an adapt branch, `branch`; `teacher` their slow averages; `steps`
    each one's optimiser memory; `memory` what parts and statistics remember.
    """

    def __init__(self, recipe: Recipe, network: Network, seed: int, batch_size: int | None) -> None:
        self._recipe, self._network, self._seed, self._batch_size = recipe, network, seed, batch_size
        self.fisher: Tensor | None = None  # importance of each number on source data; a fact, which no reset forgets
        self.rng = torch.Generator()
        self.entered = False  # a batch is under way, or broke off
        self.reset()

    def reset(self) -> None:
        """As on the first day: tensors, memory, chance, counts, and what the first batch fixes."""
        self._network.forget_proofs()
        self._network.refresh()
        self.source = self._network.source()
        self._print: tuple[str, str] | None = None  # what the weights looked like, and their hash
        self.rng.manual_seed(self._seed)
        self.calls = 0
        self.size: int | None = self._batch_size
        self.classes: int | None = None
        self.start: Memory | None = None  # what parts remember at first; known with the number of classes
        self.restart()

    def restart(self, allowed: Tensor | None = None) -> None:
        """Back to the source, tensors and memory alike; where `allowed` is given, only if it is true."""
        recipe, source = self._recipe, self.source
        steps = {k: (recipe.step if k == "theta" else recipe.step.plain).start(v) for k, v in source.items()}
        teacher = dict(source) if recipe.teacher is not None else {}
        memory = {**self._statistics(), **(self.start or {})}
        if allowed is None:
            self.moving, self.teacher, self.steps, self.memory = dict(source), teacher, steps, memory
        else:
            for mine, fresh in ((self.moving, source), (self.teacher, teacher), (self.memory, memory)):
                put(mine, fresh, allowed)
            for key, fresh in steps.items():
                put(self.steps[key], fresh, allowed)

    def begin(self, look: Look) -> None:
        """The first look fixes the number of classes, and with it what the parts remember."""
        recipe = self._recipe
        if self.start is None:
            self.start = self._start(look)
            self.memory = {**self.start, **self.memory}
            if recipe.select.few(look.classes):
                log.warning("with %d classes %r selects almost nobody; try preset='cifar'", look.classes, recipe.select)
        checks.classes(look.classes, self.classes)
        self.classes = look.classes

    def tensors(self) -> Memory:
        """Every tensor that a turn reads or replaces, by its place."""
        groups = {"moving": self.moving, "teacher": self.teacher, "memory": self.memory, "source": self.source}
        groups |= {f"steps.{key}": value for key, value in self.steps.items()} | {"start": self.start or {}}
        held = {f"{group}/{name}": tensor for group, tensors in groups.items() for name, tensor in tensors.items()}
        return held if self.fisher is None else {**held, "fisher/": self.fisher}

    def place(self, tensors: Memory) -> None:
        """Put tensors in the places that `tensors` names; the dictionaries are new, so a snapshot stays one."""
        groups: dict[str, Memory] = {}
        for place, tensor in tensors.items():
            group, _, name = place.partition("/")
            groups.setdefault(group, {})[name] = tensor
        self.fisher = groups.pop("fisher", {"": self.fisher})[""]
        for group, new in groups.items():
            if group.startswith("steps."):
                key = group.removeprefix("steps.")
                self.steps = {**self.steps, key: {**self.steps[key], **new}}
            else:
                setattr(self, group, {**(getattr(self, group) or {}), **new})

    def snapshot(self) -> Snapshot:
        """All of it at this moment. Tensors are never written into, so copies of the dictionaries are enough."""
        groups = {name: dict(getattr(self, name)) for name in ("source", "moving", "teacher", "memory")}
        steps = {key: dict(value) for key, value in self.steps.items()}
        rest = {name: getattr(self, name) for name in ("calls", "size", "classes", "start")}
        return Snapshot({**groups, "steps": steps, **rest}, self.rng.get_state())

    def restore(self, snapshot: Snapshot) -> None:
        """As it was when the snapshot was taken; doing it twice is as good as once."""
        for name, value in snapshot.values.items():
            setattr(self, name, dict(value) if isinstance(value, dict) and name != "start" else value)
        self.steps = {key: dict(value) for key, value in snapshot.values["steps"].items()}
        self.rng.set_state(snapshot.rng)

    @contextmanager
    def trying(self) -> Iterator[None]:
        """A block that leaves no trace."""
        before = self.snapshot()
        try:
            yield
        finally:
            self.restore(before)

    def follow(self, device: torch.device) -> bool:
        """Move to where the model is now; says whether it was elsewhere."""
        if self.source["theta"].device == device:
            return False
        log.info("the adapter's state follows the model to %s", device)
        for tensors in (self.source, self.moving, self.teacher, self.memory, *self.steps.values()):
            tensors.update({key: value.to(device) for key, value in tensors.items()})
        self.start = None if self.start is None else {key: value.to(device) for key, value in self.start.items()}
        self.fisher = None if self.fisher is None else self.fisher.to(device)
        return True

    def named(self) -> dict[str, Tensor]:
        """Moving tensors by name and in shape; the branch's start with `branch.`."""
        named = self._network.theta.named(self.moving["theta"])
        if self._network.branch is not None:
            branch = self._network.branch.named(self.moving["branch"])
            named.update({f"branch.{name}": tensor for name, tensor in branch.items()})
        return named

    def as_dict(self, method: str) -> dict[str, Any]:
        """What is needed to go on elsewhere: only what moved, with a schema version."""
        tensors = {f"moved/{name}": tensor for name, tensor in self.named().items()}
        tensors |= {f"teacher/{key}": tensor for key, tensor in self.teacher.items()}
        tensors |= {f"step/{key}/{name}": tensor for key, step in self.steps.items() for name, tensor in step.items()}
        tensors |= {f"memory/{key}": tensor for key, tensor in self.memory.items()}
        mean, std, mask = (None if each is None else list(each) for each in self._network.settings[:3])
        return {
            "schema": state_file.SCHEMA, "method": method, "recipe": written(self._recipe),
            "source": self._fingerprint(), "mean": mean, "std": std, "mask": mask,
            "fisher": None if self.fisher is None else fingerprint(self.fisher),
            "calls": self.calls, "batch_size": self.size, "classes": self.classes,
            "rng": self.rng.get_state(), "tensors": {key: tensor.clone() for key, tensor in tensors.items()},
        }  # fmt: skip

    def take(self, state: dict[str, Any], method: str) -> None:
        """Take over a state of the same recipe on the same model; any other is refused and changes nothing."""
        mine = self.as_dict(method)
        checks.state(state, mine)
        kept = {key: tensor for key, tensor in mine["tensors"].items() if not key.startswith("memory/")}
        remembered = {f"memory/{key}": tensor for key, tensor in self._expected(state["classes"]).items()}
        checks.state_tensors(state["tensors"], {**kept, **remembered})
        checks.same_batch_size(state["batch_size"], self._batch_size)
        device = self.source["theta"].device
        parts: dict[str, Memory] = {"moved": {}, "teacher": {}, "step": {}, "memory": {}}
        for key, tensor in state["tensors"].items():
            kind, _, name = key.partition("/")
            parts[kind][name] = tensor.to(device).clone()
        groups = {"theta": self._network.theta.names}
        if self._network.branch is not None:
            groups["branch"] = tuple(f"branch.{name}" for name in self._network.branch.names)
        flat = {key: [parts["moved"][name].reshape(-1) for name in names] for key, names in groups.items()}
        moving = {key: torch.cat(pieces) if pieces else self.source[key] for key, pieces in flat.items()}
        steps = {key: {n: parts["step"][f"{key}/{n}"] for n in step} for key, step in self.steps.items()}
        self.rng.set_state(state["rng"].cpu())
        self.moving, self.steps, self.teacher, self.memory = moving, steps, parts["teacher"], parts["memory"]
        self.calls, self.size, self.classes = state["calls"], state["batch_size"], state["classes"]
        self.start = None

    def _expected(self, classes: int | None) -> Memory:
        """What parts remember with so many classes; before the first batch, what statistics do."""
        if classes is None:
            return self._statistics()
        logits = torch.zeros(1, classes, device=self.source["theta"].device)
        return {**self._start(Look(logits, (logits,))), **self._statistics()}

    def _start(self, look: Look) -> Memory:
        """What parts remember before the first batch."""
        recipe = self._recipe
        return {**recipe.select.start(look), **recipe.weigh.start(look), **recipe.recover.start(look.logits.detach())}

    def _fingerprint(self) -> str:
        """A short hash of all the model's weights, taken again where any has been written: which source this is of."""
        tensors = [*self._network.model.parameters(), *self._network.model.buffers()]
        # Norms beside the counters: a write through `.data` does not bump the version.
        norms = [float(each.detach().double().norm()) for each in tensors if each.is_floating_point()]
        seen = repr((whereabouts(tensors), [each._version for each in tensors], norms))
        if self._print is None or self._print[0] != seen:
            self._print = seen, fingerprint(*tensors)
        return self._print[1]

    def _statistics(self) -> Memory:
        """What batch-norm layers remember at first, each head its own."""
        start: Memory = {}
        for norm in self._network.norms:
            for key in (norm.key, f"branch.{norm.key}"):
                start.update(self._recipe.statistics.start(key, norm) if norm.batch else {})
        return start


def put(mine: Memory, new: Memory, allowed: Tensor) -> None:
    """Replace tensors where `allowed`, decided on the device: nobody waits for the answer."""
    mine.update({key: torch.where(allowed, value.detach(), mine[key]) for key, value in new.items()})
