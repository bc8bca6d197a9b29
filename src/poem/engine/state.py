"""Everything that adapting changes, in one place.

Tensors are replaced, never written into: an update that must not happen leaves nothing to undo, and a copy of the
dictionaries is a snapshot.
"""

from __future__ import annotations

import logging
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from poem._util import state_file
from poem._util.caching import fingerprint
from poem.engine import input_checks as checks
from poem.engine.network import Network
from poem.engine.parameter_groups import memory_places
from poem.parts.base import Batch, Memory, Outputs, inside
from poem.recipes.recipe import Recipe
from poem.recipes.text import written

log = logging.getLogger("poem")
SMALL, MANY = 2**16, 8
"""Numbers of a tensor up to which it is joined with others to be updated, and how many tensors are worth it."""


@dataclass(frozen=True)
class Snapshot:
    """A state between two batches."""

    values: dict[str, Any]
    rng: Tensor


class State:
    """The one owner of adapted tensors, optimiser memory, the parts' memory, and the random generator.

    `moving` holds the flat vectors `theta` and, with an adapt branch, `branch`, and the tensors that parts bring, each
    under its place (`trained`); `teacher` the teacher's; `steps` each one's optimiser memory; `memory` what parts and
    statistics remember, under `place.name`; `prepared` what parts measured on source data, which no reset forgets.
    """

    def __init__(
        self, recipe: Recipe, network: Network, seed: int, batch_size: int | None, family: str = "convolutional"
    ) -> None:
        self._recipe, self._network, self._seed, self._batch_size = recipe, network, seed, batch_size
        self.family = family
        self.prepared: Memory = {}
        self.rng = torch.Generator()
        self.entered = False  # a batch is under way, or was interrupted
        self.reset()

    def reset(self) -> None:
        """As when it was made: tensors, memory, random generator, counts, and what the first batch fixes."""
        self._network.forget_checks()
        self._network.refresh()
        self.source = self._network.source()
        self._print: tuple[str, str] | None = None  # what the weights looked like, and their hash
        self.rng.manual_seed(self._seed)
        self.calls = 0
        self.size: int | None = self._batch_size
        self.classes: int | None = None
        self.image: tuple[int, ...] | None = None  # shape of one image of the first batch
        self.start: Memory | None = None  # the parts' first memory; known with the number of classes
        self.lr_factors: dict[str, float] = {}  # of the tensors that parts bring
        self.restart()

    def restart(self, allowed: Tensor | None = None) -> None:
        """Back to the source, tensors and memory alike; where `allowed` is given, only if it is true."""
        recipe, source = self._recipe, self.source
        steps = {key: recipe.step.for_group(key).init(tensor) for key, tensor in source.items()}
        network_own: Memory = {key: tensor for key, tensor in source.items() if key in ("theta", "branch")}
        teacher = network_own if recipe.teacher is not None else {}
        memory = {**self._first_memory(), **(self.start or {})}
        if allowed is None:
            self.moving, self.teacher, self.steps, self.memory = dict(source), teacher, steps, memory
        else:
            for mine, fresh in ((self.moving, source), (self.teacher, teacher), (self.memory, memory)):
                update_where(mine, fresh, allowed)
            for key, fresh in steps.items():
                update_where(self.steps[key], fresh, allowed)

    def begin(self, outputs: Outputs) -> None:
        """The first outputs fix the number of classes, and with it the parts' memory and tensors."""
        recipe = self._recipe
        if self.start is None:
            checks.several_logits(recipe, self._network.one_logit)
            self.start = self._start(outputs)
            self.memory = {**self.start, **self.memory}
            self._bring(outputs)
            if recipe.select.selects_almost_none(outputs.classes):
                log.warning(
                    "with %d classes %r selects almost no sample; try preset='cifar'", outputs.classes, recipe.select
                )
        checks.classes(outputs.classes, self.classes)
        self.classes, self.image = outputs.classes, self.image or tuple(outputs.batch.images.shape[1:])

    @property
    def trained(self) -> list[str]:
        """Places of the tensors that parts bring."""
        return [key for key in self.moving if key not in ("theta", "branch")]

    def constrained(self, key: str, tensor: Tensor) -> Tensor:
        """A moving tensor after a step; one that a part brought as that part wants it."""
        if key in ("theta", "branch"):
            return tensor
        place, _, name = key.rpartition(".")
        return dict(self._recipe.places)[place].constrain(name, tensor, self.family)

    def memory_of(self, place: str) -> Memory:
        """What the part at a place remembers, and what it measured on source data."""
        return {**inside(self.prepared, place), **inside(self.memory, place)}

    def tensors(self, *, without: Container[str] = ()) -> Memory:
        """Every tensor that the loop reads or replaces, by place; `without` those of the memory with these names."""
        memory = {name: each for name, each in self.memory.items() if name not in without} if without else self.memory
        groups: dict[str, Memory] = {
            "moving": self.moving, "teacher": self.teacher, "memory": memory, "source": self.source,
        }  # fmt: skip
        groups["prepared"] = self.prepared
        groups |= {f"steps.{key}": value for key, value in self.steps.items()} | {"start": self.start or {}}
        held = {f"{group}/{name}": tensor for group, tensors in groups.items() for name, tensor in tensors.items()}
        return held

    def replace(self, tensors: Memory) -> None:
        """Put tensors where `tensors()` has them; the dictionaries are new, so a snapshot stays one."""
        groups: dict[str, Memory] = {}
        for place, tensor in tensors.items():
            group, _, name = place.partition("/")
            groups.setdefault(group, {})[name] = tensor
        for group, new in groups.items():
            if group.startswith("steps."):
                key = group.removeprefix("steps.")
                self.steps = {**self.steps, key: {**self.steps[key], **new}}
            else:
                setattr(self, group, {**(getattr(self, group) or {}), **new})

    def snapshot(self) -> Snapshot:
        """The state now. Tensors are never written into, so copies of the dictionaries are enough."""
        groups = {name: dict(getattr(self, name)) for name in ("source", "moving", "teacher", "memory")}
        steps = {key: dict(value) for key, value in self.steps.items()}
        rest = {name: getattr(self, name) for name in ("calls", "size", "classes", "image", "start", "lr_factors")}
        return Snapshot({**groups, "steps": steps, **rest}, self.rng.get_state())

    def restore(self, snapshot: Snapshot) -> None:
        """Set the state back to a snapshot; doing it twice is as good as once."""
        for name, value in snapshot.values.items():
            setattr(
                self, name, dict(value) if isinstance(value, dict) and name not in ("start", "lr_factors") else value
            )
        self.steps = {key: dict(value) for key, value in snapshot.values["steps"].items()}
        self.rng.set_state(snapshot.rng)

    @contextmanager
    def rolled_back(self) -> Iterator[None]:
        """A block after which the state is as before it."""
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
        for tensors in (self.source, self.moving, self.teacher, self.memory, self.prepared, *self.steps.values()):
            tensors.update({key: value.to(device) for key, value in tensors.items()})
        self.start = None if self.start is None else {key: value.to(device) for key, value in self.start.items()}
        return True

    def named(self) -> dict[str, Tensor]:
        """Adapted tensors by name and in shape; the branch's start with `branch.`, those of parts with their place."""
        named = self._network.theta.named(self.moving["theta"])
        if self._network.branch is not None:
            branch = self._network.branch.named(self.moving["branch"])
            named.update({f"branch.{name}": tensor for name, tensor in branch.items()})
        return {**named, **{key: self.moving[key] for key in self.trained}}

    def as_dict(self, method: str) -> dict[str, Any]:
        """What is needed to continue elsewhere: only what adapting changed, with a schema version."""
        tensors = {f"moved/{name}": tensor for name, tensor in self.named().items()}
        tensors |= {f"teacher/{key}": tensor for key, tensor in self.teacher.items()}
        tensors |= {f"step/{key}/{name}": tensor for key, step in self.steps.items() for name, tensor in step.items()}
        tensors |= {f"memory/{key}": tensor for key, tensor in self.memory.items()}
        mean, std, mask = (None if each is None else list(each) for each in self._network.settings[:3])
        return {
            "schema": state_file.SCHEMA, "method": method, "recipe": written(self._recipe),
            "source": self._fingerprint(), "mean": mean, "std": std, "mask": mask,
            "prepared": {place: fingerprint(tensor) for place, tensor in sorted(self.prepared.items())},
            "calls": self.calls, "batch_size": self.size, "classes": self.classes,
            "image": None if self.image is None else list(self.image),
            "rng": self.rng.get_state(), "tensors": {key: tensor.clone() for key, tensor in tensors.items()},
        }  # fmt: skip

    def load(self, state: dict[str, Any], method: str) -> None:
        """Continue from a state of the same recipe on the same model; any other is refused and changes nothing."""
        mine = self.as_dict(method)
        checks.state(state, mine)
        remembered = self._expected(state, mine["tensors"])
        checks.state_tensors(state["tensors"], remembered)
        checks.same_batch_size(state["batch_size"], self._batch_size)
        device = self.source["theta"].device
        parts: dict[str, Memory] = {"moved": {}, "teacher": {}, "step": {}, "memory": {}}
        for key, tensor in state["tensors"].items():
            kind, _, name = key.partition("/")
            parts[kind][name] = tensor.to(device).clone()
        groups = {"theta": self._network.theta.names}
        if self._network.branch is not None:
            groups["branch"] = tuple(f"branch.{name}" for name in self._network.branch.names)
        flat = {key: [parts["moved"].pop(name).reshape(-1) for name in names] for key, names in groups.items()}
        moving = {key: torch.cat(pieces) if pieces else self.source[key] for key, pieces in flat.items()}
        steps: dict[str, Memory] = {key: {} for key in (*moving, *parts["moved"])}
        for key, tensor in parts["step"].items():
            group, _, name = key.rpartition("/")
            steps[group][name] = tensor
        self.rng.set_state(state["rng"].cpu())
        self.moving, self.steps = {**moving, **parts["moved"]}, steps
        self.teacher, self.memory = parts["teacher"], parts["memory"]
        self.calls, self.size, self.classes = state["calls"], state["batch_size"], state["classes"]
        self.image, self.start = None if state["image"] is None else tuple(state["image"]), None

    def _expected(self, state: dict[str, Any], mine: Memory) -> Memory:
        """Every tensor that a state of so many classes and such images holds; values do not matter."""
        brought = {f"moved/{key}" for key in self.trained}  # which a state from before the first batch has not
        later = ("memory/", *(f"step/{key}/" for key in self.trained))
        kept = {key: tensor for key, tensor in mine.items() if key not in brought and not key.startswith(later)}
        memory = self._first_memory()
        if state["classes"] is not None:
            outputs = self._blank(state["classes"], state["image"] or [])
            memory |= self._start(outputs)
            for place, tensor in _brought(self._recipe, outputs).items():
                kept[f"moved/{place}"] = tensor
                step = self._recipe.step.optimiser.init(tensor)
                kept |= {f"step/{place}/{name}": each for name, each in step.items()}
        return {**kept, **{f"memory/{key}": tensor for key, tensor in memory.items()}}

    def _blank(self, classes: int, image: Sequence[int]) -> Outputs:
        """Outputs of one blank image: all that a part's `start` may read the shapes of."""
        device, head = self.source["theta"].device, self._network.head
        kind = torch.promote_types(self.source["theta"].dtype, torch.float32)  # as logits have
        logits, images = (torch.zeros(1, *shape, device=device, dtype=kind) for shape in ((classes,), image))
        features = None if head is None else torch.zeros(1, head.in_features, device=device, dtype=kind)
        batch = Batch(images, torch.Generator(), self.size or 1)
        return Outputs(logits, (logits,), batch, images=images, features=features, family=self.family)

    def _start(self, outputs: Outputs) -> Memory:
        """The memory of every part before the first batch."""
        found = ((place, part.start(outputs)) for place, part in self._recipe.places)
        start = {f"{place}.{name}": tensor for place, memory in found for name, tensor in memory.items()}
        return start | self._teacher_copies({key: each for key, each in start.items() if key.startswith("statistics.")})

    def _bring(self, outputs: Outputs) -> None:
        """Add the tensors that parts bring, where a loaded state has not brought them."""
        brought = _brought(self._recipe, outputs)
        strange = [key for key in brought if not key.startswith("minimise.")]
        if strange:
            raise ValueError(
                f"expected trainable tensors of parts in minimise= alone, got {strange[0]}; move the part there"
            )
        self.source = {**self.source, **brought}
        self.moving = {**brought, **self.moving}
        self.steps = {**{key: self._recipe.step.optimiser.init(each) for key, each in brought.items()}, **self.steps}
        factors = {place: part.lr_factor(self.family) for place, part in self._recipe.places}
        self.lr_factors = {key: factors[key.rpartition(".")[0]] for key in brought}

    def _fingerprint(self) -> str:
        """A short hash of all the model's weights, taken again where any has been written: which source this is of."""
        tensors = [*self._network.model.parameters(), *self._network.model.buffers()]
        # Norms beside the counters: a write through `.data` does not bump the version.
        norms = [float(each.detach().double().norm()) for each in tensors if each.is_floating_point()]
        seen = repr((memory_places(tensors), [each._version for each in tensors], norms))
        if self._print is None or self._print[0] != seen:
            self._print = seen, fingerprint(*tensors)
        return self._print[1]

    def _first_memory(self) -> Memory:
        """What is remembered before the first batch, whose outputs need not be known for it."""
        groups = {key: tensor for key, tensor in self.source.items() if key in ("theta", "branch")}
        pulls = ((key, self._recipe.recover.init(tensor)) for key, tensor in groups.items())
        held = {f"recover.{key}.{name}": tensor for key, memory in pulls for name, tensor in memory.items()}
        return {**self._statistics(), **held}

    def _statistics(self) -> Memory:
        """What batch-norm layers remember at first, each head its own."""
        start: Memory = {}
        for norm in self._network.norms:
            for key in (norm.key, f"branch.{norm.key}"):
                start.update(self._recipe.statistics.start_layer(key, norm) if norm.batch else {})
        return start | self._teacher_copies(start)

    def _teacher_copies(self, statistics: Memory) -> Memory:
        """The same once more for a teacher that keeps statistics of its own, and for the source that it asks."""
        teacher = self._recipe.teacher
        copies = {"teacher": teacher is not None and teacher.own_statistics}
        copies["initial"] = teacher is not None and teacher.asks_source
        return {f"{name}.{key}": each for name, asked in copies.items() if asked for key, each in statistics.items()}


def _brought(recipe: Recipe, outputs: Outputs) -> Memory:
    """The tensors that parts bring, by place and name."""
    found = ((place, part.trainable(outputs)) for place, part in recipe.places)
    return {f"{place}.{name}": tensor.detach() for place, tensors in found for name, tensor in tensors.items()}


def update_where(mine: Memory, new: Memory, allowed: Tensor) -> None:
    """Replace tensors where `allowed`, decided on the device: the host does not wait.

    Many small tensors of one type are joined and decided on at once, as a hundred norm layers remember several each.
    They are then views of one new tensor, which nothing outside the state holds; what is saved of them is cloned.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[str]] = {}
    for key, value in new.items():
        kind = value.dtype, value.device
        if allowed.dim() == 0 and kind == (mine[key].dtype, mine[key].device) and _joins(value, mine[key]):
            kinds.setdefault(kind, []).append(key)
    found: Memory = {}
    for keys in kinds.values():
        if len(keys) >= MANY:
            fresh, old = (torch.cat([each[key].detach().reshape(-1) for key in keys]) for each in (new, mine))
            pieces = torch.where(allowed, fresh, old).split([new[key].numel() for key in keys])
            found |= {key: piece.view(new[key].shape) for key, piece in zip(keys, pieces, strict=True)}
    for key, value in new.items():
        mine[key] = found[key] if key in found else torch.where(allowed, value.detach(), mine[key])


def _joins(value: Tensor, old: Tensor) -> bool:
    """Whether a tensor is small, and has neither strides nor a shape that joining it with others would lose."""
    return value.numel() <= SMALL and value.shape == old.shape and value.is_contiguous()
