"""The one loop, and the one owner of state.

`Adapter` borrows a model, asks the parts of a `Recipe` their questions, and keeps everything that moves. State is a
dictionary of tensors that is replaced, never written into: an update that must not happen leaves nothing to undo.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from poem import _checks as checks
from poem import _files as files
from poem.export import exported
from poem.ledger import Batchwise, Books, Costs, Totals
from poem.model import anatomy, is_norm
from poem.network import Group, Network, Precision, lease
from poem.parts.base import Batch, Lesson, Look, Memory
from poem.recipes import Recipe, Rule

log = logging.getLogger("poem")
Source = Iterable[Any] | Tensor


@dataclass
class Taught:
    """One update: the look and the set it was drawn from, its loss, and whether it was made."""

    look: Look
    mask: Tensor
    loss: Tensor
    gradient: Tensor
    zeta_gradient: Tensor | None
    made: Tensor


class Adapter:
    """A model that learns while it predicts. Made by `poem.adapt`; a plain object, not an `nn.Module`."""

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        *,
        name: str = "custom",
        batch_size: int | None = None,
        classes: Sequence[int] | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        source_data: Source | None = None,
        split: str | None = None,
        seed: int = 0,
        precision: Precision = "fp32",
        logits: Callable[[Any], Tensor] | None = None,
        example: Tensor | None = None,
    ) -> None:
        model = checks.model(model)
        checks.normalisation(recipe.unit_range, name, mean, std)
        self.recipe, self.name, self.facts = recipe, name, anatomy(model)
        self._settings: dict[str, Any] = {
            "name": name, "batch_size": batch_size, "classes": classes, "mean": mean, "std": std, "split": split,
            "seed": seed, "precision": precision, "logits": logits,
        }  # fmt: skip
        names = recipe.parameters(model, self.facts)
        branch: list[str] = []
        if recipe.branch is not None:
            split = split or self.facts.split(recipe.branch.depth)
            deep = self.facts.modules[self.facts.modules.index(split) :] if self.facts.beyond(split) else ()
            norms = {name for name in deep if is_norm(model.get_submodule(name))}
            branch = [n for n, _ in model.named_parameters() if n.rpartition(".")[0] in norms]
            names = [n for n in names if n.rpartition(".")[0] not in deep]
        checks.something_moves(recipe, model, names, branch)
        self._network = Network(
            model, theta=Group(model, names), branch=Group(model, branch) if recipe.branch else None,
            split=split if recipe.branch else None, norms=self.facts.norms,
            head=self.facts.head if recipe.readout.correct.features else None,
            classes=classes, mean=mean, std=std, logits=logits, precision=precision,
        )  # fmt: skip
        self._seed, self._rng = seed, torch.Generator()
        self._is_frozen, self._unloaded = False, False
        lease(model).borrowers += 1
        self._source: Memory = {"theta": self._network.theta.source()}
        if self._network.branch is not None:
            self._source["branch"] = self._network.branch.source()
        self._fisher: Tensor | None = None
        self.preparation: dict[str, int] = {"forwards": 0, "backwards": 0}
        self.reset()
        if source_data is not None:
            self._prepare(source_data)
        elif "FisherAnchor" in repr(recipe.minimise):
            log.warning("%s has no source_data for its Fisher anchor and runs as ETA", name)
        if example is not None:
            with self.frozen():
                self(example)

    # What users call -------------------------------------------------------------------------------------------------

    def __call__(self, images: Tensor) -> Tensor:
        """Predict and learn: logits (B, C), or the log of the combined probability where a branch answers too."""
        checks.still_here(self._unloaded)
        with torch.inference_mode(False), torch.enable_grad():
            images = checks.images(images, self._network.model, self.facts.channels)
            self._follow(images.device)
            before = dict(self._state), self._calls, self._start, self._size, self._classes, self._rng.get_state()
            entry = Batchwise(Costs())
            try:
                with self._network.borrowed(images.device.type):
                    answer = self._call(images, entry)
            except BaseException:
                self._state, self._calls, self._start, self._size, self._classes = before[:5]
                self._rng.set_state(before[5])
                raise
            if self._is_frozen:
                self._rng.set_state(before[5])
            else:
                self.last = entry
                self._books.close(entry, len(images))
        return answer

    def stream(self, loader: Iterable[Any]) -> Iterator[Tensor]:
        """Answers for each batch of a loader that yields images, or tuples that begin with them (labels are dropped)."""
        device = next(self._network.model.parameters()).device
        for item in loader:
            images = item[0] if isinstance(item, tuple | list) else item
            yield self(images.to(device, non_blocking=True))

    @contextmanager
    def frozen(self) -> Iterator[Adapter]:
        """Inside: predicts with what was learnt so far, learns nothing, and leaves every state untouched."""
        before, self._is_frozen = self._is_frozen, True
        try:
            yield self
        finally:
            self._is_frozen = before

    def reset(self) -> None:
        """Bit for bit a fresh adapter: tensors, optimisers, memory, random state, counts."""
        checks.still_here(self._unloaded)
        self._rng.manual_seed(self._seed)
        self._calls, self._books, self.last = 0, Books(), Batchwise(Costs())
        self._size: int | None = self._settings["batch_size"]
        self._classes: int | None = None
        self._start: Memory | None = None  # memory of the parts, known once the number of classes is
        self._state: Memory = self._fresh()

    def unload(self) -> nn.Module:
        """Give back the very model that came in; the adapter is spent."""
        checks.still_here(self._unloaded)
        self._unloaded = True
        lease(self._network.model).borrowers -= 1
        return self._network.model

    def export(self) -> nn.Module:
        """A plain module with the adapted weights, which predicts as the adapter does when frozen."""
        state = {key: self._state[key] for key in self._source}
        return exported(self._network, self.recipe, state, self._state)

    def as_module(self) -> nn.Module:
        """The adapter inside a module without parameters, to sit in `nn.Sequential`."""
        return AsModule(self)

    def state_dict(self) -> dict[str, Any]:
        """Everything that moved and what is needed to go on elsewhere: `load_state_dict` continues identically."""
        tensors = {key: value.clone() for key, value in self._state.items() if key not in self._source}
        for key, value in self._named().items():
            tensors[f"moved/{key}"] = value.clone()
        return {
            "schema": files.SCHEMA, "method": self.name, "recipe": repr(self.recipe), "source": self._fingerprint(),
            "calls": self._calls, "batch_size": self._size, "classes": self._classes,
            "rng": self._rng.get_state(), "tensors": tensors,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state made by the same recipe on the same model; refuses any other and then changes nothing."""
        checks.state(state, self.state_dict(), begun=self._start is not None)
        tensors = {k: v.to(self._source["theta"].device).clone() for k, v in state["tensors"].items()}
        moved = {k.removeprefix("moved/"): tensors.pop(k) for k in list(tensors) if k.startswith("moved/")}
        flat = {
            "theta": [moved[name].reshape(-1) for name in self._network.theta.names],
            "branch": [moved[f"branch.{name}"].reshape(-1) for name in getattr(self._network.branch, "names", ())],
        }
        self._state = {**tensors, **{key: torch.cat(flat[key]) if flat[key] else self._source[key] for key in self._source}}
        self._calls, self._size, self._classes = state["calls"], state["batch_size"], state["classes"]
        self._start = None
        self._rng.set_state(state["rng"])

    def save(self, path: str | Path) -> None:
        """Write the state to a file, whole or not at all."""
        files.save(self.state_dict(), Path(path))

    def load(self, path: str | Path) -> None:
        """Read a state that `save` wrote."""
        self.load_state_dict(files.load(Path(path)))

    @property
    def model(self) -> nn.Module:
        """The borrowed model; between calls it is as it came."""
        return self._network.model

    @property
    def adapted(self) -> list[str]:
        """Names of the tensors that may move; the branch's own start with `branch.`."""
        return list(self._named())

    @property
    def totals(self) -> Totals:
        """Counts since the last reset by hand."""
        return self._books.read()

    @property
    def lr(self) -> float:
        """The learning rate in force; a rule needs the batch size, which the first batch fixes."""
        rate = self.recipe.lr
        return rate(self.facts.family, self._size or 64) if isinstance(rate, Rule) else float(rate)

    # The loop --------------------------------------------------------------------------------------------------------

    def _learn(self, batch: Batch, entry: Batchwise, *, learn: bool) -> Tensor:
        """Look, choose, update, look again while the set changes; then remember, walk back and answer."""
        recipe, which = self.recipe, self.recipe.readout.look
        updates = recipe.explore.updates if learn and recipe.learns else 0
        plain = self._look(batch, entry, grad=False) if recipe.views and (which != "last" or not updates) else None
        seen = recipe.views(batch.images, batch.rng) if recipe.views and updates else batch.images
        first = look = plain if plain and not updates else self._look(batch, entry, seen, grad=updates > 0)
        target = self._target(batch, entry) if recipe.teacher and (updates or which == "teacher") else None
        sets = [self._choose(look)] if updates else []
        lessons: list[Taught] = []
        for done in range(1, updates + 1):
            if not self._worthwhile(batch, sets):
                break
            lessons.append(self._update(batch, entry, look, sets[-1], target))
            if done == updates and which != "last":
                break
            again = batch.images if done == updates else seen
            look = self._look(batch, entry, again, round=done, grad=done < updates)
            if done < updates or not (recipe.select.passes or recipe.views):
                sets.append(self._choose(look) if recipe.explore.reselect else sets[0])
        if learn:
            self._remember(first, look, sets, lessons, entry)
        before_last = lessons[-1].look if lessons else look
        answers = {"first": first, "before-last": before_last, "last": look, "teacher": first}
        answer = plain or answers[which]
        if which == "teacher" and target is not None:
            answer = Look(target, (target,), batch, first.ask)
        self._enter(entry, first, look, sets, lessons)
        return recipe.readout.correct(answer).detach()

    def _update(self, batch: Batch, entry: Batchwise, look: Look, chosen: Tensor, target: Tensor | None) -> Taught:
        """One step for the recipe's own group, and from the same graph one for the branch."""
        step, theta = self.recipe.step, self._state["theta"]
        taught = self._teach(look, chosen, entry, target, last=not step.climbs)
        if step.climbs:
            higher = theta + step.climb(taught.gradient)
            risen = self._look(batch, entry, round=look.round, theta=higher, needed=chosen.sum())
            ready = taught.made
            taught = self._teach(risen, self._choose(risen, chosen), entry, target, last=True)
            taught.made = taught.made & ready
        for key, gradient in (("theta", taught.gradient), ("branch", taught.zeta_gradient)):
            if gradient is not None:
                kind = step if key == "theta" else step.plain
                prefix = f"step.{key}."
                memory = {k.removeprefix(prefix): v for k, v in self._state.items() if k.startswith(prefix)}
                change, memory = kind(gradient, self.lr, memory)
                self._put({key: self._state[key] + change, **_prefixed(prefix, memory)}, taught.made)
        entry._costs.updates = entry._costs.updates + taught.made.long()
        entry._costs.rounds = entry._costs.rounds + 1
        return taught

    def _teach(self, look: Look, mask: Tensor, entry: Batchwise, target: Tensor | None, *, last: bool) -> Taught:
        """Loss and gradients of a set; whether they may be used: somebody teaches, and every number is finite."""
        recipe, memory = self.recipe, self._memory
        assert look.theta is not None
        fixed = {"theta": look.theta, "source": self._source["theta"], "fisher": self._fisher, "target": target}
        lesson = Lesson(look, mask, recipe.weigh(look, mask, memory).detach(), **fixed)  # type: ignore[arg-type]
        loss, zeta_gradient = recipe.minimise(lesson), None
        second = last and recipe.branch is not None
        (gradient,) = torch.autograd.grad(loss, look.theta, retain_graph=second, materialize_grads=True)
        made = mask.any() & loss.isfinite() & gradient.isfinite().all()
        if second and recipe.branch is not None and look.zeta is not None:
            branch = Lesson(look, mask, torch.ones_like(lesson.weights), **fixed)  # type: ignore[arg-type]
            (zeta_gradient,) = torch.autograd.grad(recipe.branch.teach(branch), look.zeta, materialize_grads=True)
            made = made & zeta_gradient.isfinite().all()
        costs = entry._costs
        costs.backwards = costs.backwards + mask.sum()
        costs.backwards_computed = costs.backwards_computed + len(mask)
        if last:
            costs.taught = costs.taught + mask.sum()
        return Taught(look, mask, loss.detach(), gradient, zeta_gradient, made)

    def _remember(self, first: Look, last: Look, sets: list[Tensor], lessons: list[Taught], entry: Batchwise) -> None:
        """Once per batch: commit what parts remember, let the teacher follow, walk back."""
        recipe, memory = self.recipe, self._memory
        look, mask = (lessons[-1].look, lessons[-1].mask) if lessons else (first, sets[0] if sets else None)
        sound = lessons[-1].made if lessons else torch.ones((), dtype=torch.bool, device=first.logits.device)
        if mask is not None:
            new = {**recipe.select.remember(look, mask, memory), **recipe.weigh.remember(look, mask, memory)}
            losses, made = [taught.loss for taught in lessons], [taught.made for taught in lessons]
            self._put(_prefixed("memory.", {**new, **recipe.recover.remember(losses, made, memory)}), sound)
        self._put(_prefixed("memory.", last.record), sound)
        for key in self._source if recipe.learns else ():
            if recipe.teacher is not None:
                followed = recipe.teacher.follow(self._state[f"teacher.{key}"], self._state[key])
                self._put({f"teacher.{key}": followed}, sound)
            self._put({key: recipe.recover.pull(self._state[key], self._source[key], self._rng)}, sound)
        fires = recipe.recover.fires(self._memory)
        if fires is not None:
            self._put(self._fresh(), fires)
            entry._reset = fires

    # What the loop stands on -----------------------------------------------------------------------------------------

    def _call(self, images: Tensor, entry: Batchwise) -> Tensor:
        """One call: a reset if one is due, the proof of the branch at the first, then the loop once or per image."""
        learn = not self._is_frozen
        self._note_size(len(images))
        if learn and self.recipe.recover.due(self._calls):
            self._state = self._fresh()
            entry._reset = True
        if self._network.branch is not None and self._network.doubles is None:
            checks.finite(images)
            self._prove(images, entry)
        pieces = images.split(1) if self.recipe.recover.each_image else (images,)
        parts, answers = [], []
        for piece in pieces:
            parts.append(Batchwise(entry._costs))
            size = 1 if self.recipe.recover.each_image else self._size or len(images)
            answers.append(self._learn(Batch(piece, self._rng, size), parts[-1], learn=learn))
            if self.recipe.recover.each_image:
                self._state = self._fresh()
        answer = torch.cat(answers)
        if not (learn and self.recipe.learns):
            checks.finite(images)
        entry._gather(parts)
        self._calls += learn
        return answer

    def _look(
        self,
        batch: Batch,
        entry: Batchwise,
        images: Tensor | None = None,
        *,
        round: int = 0,
        grad: bool = True,
        theta: Tensor | None = None,
        needed: Tensor | None = None,
    ) -> Look:
        """One pass over the batch with the present weights, or with those given."""
        weights = (self._state["theta"] if theta is None else theta).detach().requires_grad_(grad)
        zeta = self._state["branch"].detach().requires_grad_(grad) if "branch" in self._state else None

        def predict(images: Tensor, mask: Tensor | None, grad: bool) -> tuple[Tensor, tuple[Tensor, ...], Any]:
            with torch.set_grad_enabled(grad):
                return self._predict(images, weights, zeta, mask)

        def ask(images: Tensor, *, among: Tensor | None = None, grad: bool = False) -> Tensor:
            self._count(entry, images, None if among is None else among.sum())
            return predict(images, among, grad)[0]

        shown = batch.images if images is None else images
        self._count(entry, shown, needed)
        logits, heads, run = predict(shown, None, grad)
        look = Look(logits, heads, batch, ask, round, run.features, theta=weights, zeta=zeta, record=run.record)
        if self._start is None:
            self._begin(look)
        checks.classes(look.classes, self._classes)
        return look

    def _predict(
        self, images: Tensor, theta: Tensor | None, zeta: Tensor | None, mask: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, ...], Any]:
        """Logits that answer, each head's, and what the pass recorded."""
        theta = theta if theta is not None and theta.numel() else None
        heads, run = self._network.heads(images, theta, zeta, self.recipe.statistics, self._memory, mask)
        branch = self.recipe.branch
        return branch.together(*heads) if branch is not None and len(heads) == 2 else heads[0], heads, run

    def _target(self, batch: Batch, entry: Batchwise) -> Tensor:
        """What the teacher says of this batch."""
        assert self.recipe.teacher is not None

        def says(theta: str) -> Callable[[Tensor], Tensor]:
            weights = {key: self._state[f"teacher.{key}"] if theta == "teacher" else self._source[key] for key in self._source}

            def predict(images: Tensor) -> Tensor:
                self._count(entry, images, None)
                with torch.no_grad():
                    return self._predict(images, weights["theta"], weights.get("branch"), None)[0]

            return predict

        return self.recipe.teacher.target(batch, says("teacher"), says("source"))

    def _choose(self, look: Look, among: Tensor | None = None) -> Tensor:
        """Who teaches."""
        everyone = torch.ones(len(look.logits), dtype=torch.bool, device=look.logits.device)
        return self.recipe.select(look, everyone if among is None else among, self._memory)

    def _worthwhile(self, batch: Batch, sets: list[Tensor]) -> bool:
        """The one host read of a round: is the input finite, does anybody teach, has the set changed?"""
        flags = [sets[-1].any()]
        if len(sets) == 1:
            flags.append(batch.images.isfinite().all())
        elif self.recipe.explore.reselect:
            flags.append((sets[-1] != sets[-2]).any())
        some, other = [*torch.stack(flags).tolist(), True][:2]
        if len(sets) == 1 and not other:
            checks.finite(batch.images)
        return bool(some and other)

    def _enter(self, entry: Batchwise, first: Look, last: Look, sets: list[Tensor], lessons: list[Taught]) -> None:
        """The batch in the books."""
        rows = len(first.batch.images)
        chosen = sets or [torch.zeros(rows, dtype=torch.bool, device=first.logits.device)]
        if self.recipe.views is not None:
            chosen = [chosen[0].any().expand(rows)]
        entry.selected = chosen[0]
        later = torch.stack(chosen[1:]).any(0) if len(chosen) > 1 else torch.zeros_like(chosen[0])
        entry.newly_reliable = later & ~chosen[0]
        entry.no_longer_reliable = chosen[0] & ~chosen[-1]
        before, after = first.entropy.detach(), last.entropy.detach()
        entry.entropy = type(entry.entropy)(before if len(before) == rows else before.mean().expand(rows), after)
        entry.first_logits = first.logits.detach() if len(before) == rows else first.logits.detach().mean(0, True)
        entry._loss = lessons[-1].loss if lessons else None
        entry._applied = [taught.made for taught in lessons]
        entry._nothing = bool(sets) and not lessons

    # State -----------------------------------------------------------------------------------------------------------

    @property
    def _memory(self) -> Memory:
        """What the parts remember."""
        return {k.removeprefix("memory."): v for k, v in self._state.items() if k.startswith("memory.")}

    def _put(self, new: Memory, allowed: Tensor) -> None:
        """Replace tensors where `allowed`, on the device and without asking it."""
        self._state = {**self._state, **{k: torch.where(allowed, v.detach(), self._state[k]) for k, v in new.items()}}

    def _fresh(self) -> Memory:
        """All moving tensors as they are before the first batch."""
        fresh: Memory = dict(self._source)
        for key, tensor in self._source.items():
            step = self.recipe.step if key == "theta" else self.recipe.step.plain
            fresh.update(_prefixed(f"step.{key}.", step.start(tensor)))
            if self.recipe.teacher is not None:
                fresh[f"teacher.{key}"] = tensor
        for norm in self._network.norms:
            for key in (norm.key, f"branch.{norm.key}"):
                fresh.update(_prefixed("memory.", self.recipe.statistics.start(key, norm)))
        return {**fresh, **(self._start or {})}

    def _begin(self, look: Look) -> None:
        """The first look fixes the number of classes, and with it what the parts remember."""
        recipe, like = self.recipe, look.logits.detach()
        start = {**recipe.select.start(look), **recipe.weigh.start(look), **recipe.recover.start(like)}
        self._start, self._classes = _prefixed("memory.", start), self._classes or look.classes
        self._state = {**self._start, **self._state}
        if "NotRedundant(0.05)" in repr(recipe.select) and look.classes <= 100:
            log.info("with %d classes and cosine 0.05 almost nothing is selected; try preset='cifar'", look.classes)

    def _prepare(self, data: Source) -> None:
        """Importance of every moving number on source data, for the Fisher anchor."""
        from poem.fisher import fisher

        with torch.inference_mode(False), torch.enable_grad(), self._network.borrowed(self._source["theta"].device.type):
            self._fisher, images = fisher(self._network, self.recipe.statistics, data, self._settings["batch_size"] or 64)
        self.preparation = {"forwards": images, "backwards": images}

    def _prove(self, images: Tensor, entry: Batchwise) -> None:
        """Doubling the batch at the split is right for this model, or two passes are used."""
        with torch.no_grad():
            far = self._network.prove(images, self.recipe.statistics, self._memory)
        if not self._network.doubles:
            note = f"the doubled pass is off by {far:.2g}: the branch runs as a second pass"
            entry.notes.append(note)
            log.warning("%s: %s", type(self._network.model).__name__, note)

    def _count(self, entry: Batchwise, images: Tensor, needed: Tensor | None) -> None:
        """Rows that a pass computes, and those that it was needed for."""
        passes = 2 if self._network.branch is not None and self._network.doubles is False else 1
        entry._costs.forwards_computed = entry._costs.forwards_computed + passes * len(images)
        entry._costs.forwards = entry._costs.forwards + (len(images) if needed is None else needed)

    def _note_size(self, count: int) -> None:
        """The first batch fixes the batch size; a later one of another size is worth a word."""
        if self._size is None:
            self._size = count
        elif count > self._size:
            log.warning("batch of %d after batch size %d; the learning rate stays %g", count, self._size, self.lr)

    def _follow(self, device: torch.device) -> None:
        """Move the state to where the model is now."""
        if self._source["theta"].device != device:
            log.info("state follows the model to %s", device)
            self._source = {key: value.to(device) for key, value in self._source.items()}
            self._state = {key: value.to(device) for key, value in self._state.items()}
            self._start = None if self._start is None else {k: v.to(device) for k, v in self._start.items()}
            self._fisher = None if self._fisher is None else self._fisher.to(device)

    def _named(self) -> dict[str, Tensor]:
        """Moving tensors by name and in shape."""
        named = self._network.theta.named(self._state["theta"])
        if self._network.branch is not None:
            branch = self._network.branch.named(self._state["branch"])
            named.update({f"branch.{name}": tensor for name, tensor in branch.items()})
        return named

    def _fingerprint(self) -> str:
        """Which source the state belongs to."""
        return files.fingerprint(*self._source.values())

    def __deepcopy__(self, memo: dict[int, Any]) -> Adapter:
        """A new adapter with the same state, on a copy of the model."""
        twin = Adapter(copy.deepcopy(self._network.model, memo), self.recipe, **self._settings)
        twin.load_state_dict(self.state_dict())
        twin._fisher, twin.preparation, twin._start = self._fisher, dict(self.preparation), self._start
        twin._network.doubles = self._network.doubles
        return twin

    def __reduce__(self) -> NoReturn:
        raise TypeError("an Adapter is not pickled, because it borrows its model; use adapter.save(path) and load(path)")

    def __repr__(self) -> str:
        return f"<Adapter {self.name} on {type(self._network.model).__name__}, {len(self.adapted)} tensors may move>"


class AsModule(nn.Module):
    """An adapter where a module is expected. It has no parameters: the adapter owns what moves."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__()
        self.adapter = adapter

    def forward(self, images: Tensor) -> Tensor:
        """Predict and learn."""
        return self.adapter(images)


def _prefixed(prefix: str, memory: Memory) -> Memory:
    return {f"{prefix}{key}": value for key, value in memory.items()}
