"""A model that learns while it predicts."""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from poem._util import state_file
from poem.accelerate.capture import Fast, Recorder
from poem.engine import input_checks as checks
from poem.engine.accounting import Batchwise, Books, Totals, alarms
from poem.engine.anatomy import Anatomy, anatomy, is_norm
from poem.engine.borrowed import lease
from poem.engine.export import exported
from poem.engine.fisher import fisher
from poem.engine.loop import Turn
from poem.engine.network import Network, Precision
from poem.engine.state import Snapshot, State
from poem.engine.twin import Translation
from poem.parts.base import Batch
from poem.recipes.recipe import Recipe, Rule

log = logging.getLogger("poem")
IDLE = 10  # batches in a row that teach nobody, before we say so


_FROZEN: ContextVar[tuple[int, ...]] = ContextVar("frozen", default=())
"""Adapters that learn nothing, by identity, in this thread or task."""


@dataclass(frozen=True)
class Between:
    """What an adapter holds between two batches: one value, replaced when a batch is over."""

    state: Snapshot
    last: Batchwise = field(default_factory=Batchwise)
    books: Books = field(default_factory=Books)
    idle: int = 0  # batches in a row that taught nobody
    short: bool = False  # the last batch was smaller than the batch size


class ThreadFlags:
    """Torch's switches of this thread, to be set back where a signal broke into the block that should have."""

    def __init__(self) -> None:
        self._grad = torch.is_grad_enabled()
        kinds = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
        self._autocast = [(kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds]
        self._cache, self._nesting = torch.is_autocast_cache_enabled(), _autocast_nesting()

    def restore(self) -> None:
        """Set the switches back to what they were when this was made."""
        torch.set_grad_enabled(self._grad)
        while _autocast_nesting() > self._nesting:
            torch.autocast_decrement_nesting()
        if self._nesting == 0:
            torch.clear_autocast_cache()
        for kind, enabled, dtype in self._autocast:
            torch.set_autocast_enabled(kind, enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self._cache)


def _autocast_nesting() -> int:
    """How many autocast blocks this thread is in; torch has no way to ask but to count one more."""
    level = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return level


class Adapter:
    """Borrows a model, runs the loop for each batch, and owns what moves. A plain object, not an `nn.Module`.

    Made by `poem.adapt`, which explains the arguments. The model's modules are never patched, and its tensors are only
    read: it may be called plainly, from any thread, while the adapter runs. Calls of an adapter from several threads
    take turns; what others see of it (`state_dict`, `last`, `totals`) is always between two batches.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        *,
        name: str = "custom",
        batch_size: int | None = None,
        classes: Sequence[int] | Tensor | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        split: str | None = None,
        seed: int = 0,
        precision: Precision = "fp32",
        fast: Fast = "auto",
        compile: bool = False,
        logits: Callable[[Any], Tensor] | None = None,
    ) -> None:
        self._given, model = model, checks.model(model)
        batch_size, seed, indices = checks.batch_size(batch_size), checks.seed(seed), checks.indices(classes)
        self.recipe, self.name, self.facts = recipe, name, anatomy(model)
        mean, std = checks.normalisation(recipe.unit_range, name, mean, std, self.facts.channels) or (None, None)
        self._settings: dict[str, Any] = {
            "name": name, "batch_size": batch_size, "classes": indices, "mean": mean, "std": std, "split": split,
            "seed": seed, "precision": precision, "fast": fast, "compile": compile, "logits": logits,
        }  # fmt: skip
        names, branch, split = _groups(model, recipe, self.facts, split)
        self._network = Network(
            model, theta=names, branch=branch if recipe.branch else None, split=split,
            norms=self.facts.norms, head=self.facts.head if recipe.readout.correct.features else None,
            classes=indices, mean=mean, std=std, logits=logits, precision=precision, compile=compile,
        )  # fmt: skip
        self._state = State(recipe, self._network, seed, batch_size)
        self._recorder = Recorder(recipe, self._network, self._state, fast)
        self._unloaded, self._editor = False, recipe.edits_images
        self._warned: set[str] = set()  # kinds of alarms that were logged
        self._between = Between(self._state.snapshot())
        self.preparation = {"forwards": 0, "backwards": 0}
        """Images spent on source data before the stream began, apart from `totals`."""
        with lease(model).lock:
            lease(model).borrowers += 1

    def __call__(self, images: Tensor) -> Tensor:
        """Predict and learn: logits (B, C), or the log of the combined probability where a branch answers too."""
        checks.still_here(self._unloaded)
        entry, learn = Batchwise(), id(self) not in _FROZEN.get()
        flags = ThreadFlags()
        try:
            with self._lock, torch.inference_mode(False), torch.enable_grad():
                self._settle()
                images = self._taken(images)
                if self._state.follow(images.device):
                    self._between = replace(self._between, state=self._state.snapshot())
                self._state.entered = True
                answer = self._answer(images, entry, learn)
                if learn:
                    self._close(entry, len(images))
                self._settle()
                if learn:
                    self._warn(images.device.type == "cpu")
        except BaseException:
            self._network.abandon()
            flags.restore()
            raise
        return answer

    def prepare(self, source_data: Iterable[Any] | Tensor) -> None:
        """Measure on source images how much each number matters, for recipes with a Fisher anchor."""
        checks.still_here(self._unloaded)
        with self._lock, torch.inference_mode(False), torch.enable_grad():
            self._settle()
            device, size = self._state.source["theta"].device.type, self._state.size or 64
            with self._network.borrowed(device):
                self._state.fisher, images = fisher(self._network, self.recipe.statistics, source_data, size)
        self.preparation = {"forwards": images, "backwards": images}

    def stream(self, loader: Iterable[Any]) -> Iterator[Tensor]:
        """Answers for each batch of a loader of images, or of tuples that begin with images (labels are dropped)."""
        for item in loader:
            images = item[0] if isinstance(item, tuple | list) else item
            if not isinstance(images, Tensor):
                kind = type(images).__name__
                raise TypeError(f"expected batches of images or (images, ...), got {kind}; hand adapter() the tensor")
            yield self(images.to(next(self._network.model.parameters()).device, non_blocking=True))

    @contextmanager
    def frozen(self) -> Iterator[Adapter]:
        """Inside, calls of this thread (or task) predict with what was learnt, learn nothing and leave the state alone.

        Other threads that call the adapter meanwhile learn as ever.
        """
        checks.still_here(self._unloaded)
        token = _FROZEN.set((*_FROZEN.get(), id(self)))
        try:
            yield self
        finally:
            _FROZEN.reset(token)

    def gradient_norms(self, images: Tensor) -> Tensor:
        """(B,) norm, over the recipe's own group, of each sample's entropy gradient at a first look; learns nothing.

        A backward pass per sample: a measurement, not a way to learn. The state, chance and counts stay as they were.
        """
        checks.still_here(self._unloaded)
        network, state = self._network, self._state
        with self._lock, torch.inference_mode(False), torch.enable_grad():
            self._settle()
            images = self._taken(images)
            checks.finite(images)
            with state.trying(), network.borrowed(images.device.type), self._proven(images):
                state.follow(images.device)
                batch = Batch(images, state.rng, len(images))
                look = Turn(self.recipe, network, state, batch, Batchwise(), self.lr, learn=False).look()
                norms = [gradient.norm() for gradient in _each_gradient(look.entropy, look.theta)]
        return torch.stack(norms).detach()

    def reset(self) -> None:
        """Bit for bit a fresh adapter: tensors, optimisers, memory, random state, counts, what was tried on a batch."""
        checks.still_here(self._unloaded)
        with self._lock:
            self._state.entered = True
            self._state.reset()
            self._between = Between(self._state.snapshot())
            self._state.entered = False
            self._warned.clear()

    def unload(self) -> nn.Module:
        """Give back the very model that came in; the adapter is spent."""
        checks.still_here(self._unloaded)
        with self._lock:
            self._unloaded = True
            self._recorder.forget()
            self._network.forget()
            held = lease(self._network.model)
            held.borrowers -= 1
        if held.borrowers:
            log.info("%d other adapters still borrow this model", held.borrowers)
        return self._given

    def export(self) -> nn.Module:
        """A plain module with the adapted weights, which predicts as the adapter does when frozen.

        Batch norm keeps to the recipe's statistics, so with the usual ones an answer depends on the batch it is in. An
        adapt branch makes two whole networks, side by side: its keys begin with `heads.0.` and `heads.1.`.
        """
        checks.still_here(self._unloaded)
        with self._lock:
            self._settle()
            return exported(self._network, self.recipe, self._state)

    def as_module(self) -> nn.Module:
        """The adapter inside a module without parameters, to sit in `nn.Sequential`."""
        return AsModule(self)

    def state_dict(self) -> dict[str, Any]:
        """Everything that moved and what is needed to go on elsewhere, as it is between two batches."""
        checks.still_here(self._unloaded)
        with self._lock:
            self._settle()
            return self._state.as_dict(self.name)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state of the same recipe on the same model left off; any other is refused."""
        checks.still_here(self._unloaded)
        with self._lock:
            self._settle()
            self._state.entered = True
            self._state.take(state, self.name)
            self._between = replace(self._between, state=self._state.snapshot())
            self._state.entered = False

    def save(self, path: str | Path) -> None:
        """Write the state to a file, whole or not at all. The format is safetensors, whatever the file is called."""
        state_file.save_state(self.state_dict(), Path(path))

    def load(self, path: str | Path) -> None:
        """Go on from a file that `save` wrote."""
        self.load_state_dict(state_file.load_state(Path(path)))

    @property
    def model(self) -> nn.Module:
        """The borrowed model."""
        return self._network.model

    @property
    def adapted(self) -> list[str]:
        """Names of the tensors that may move; the branch's own start with `branch.`."""
        return list(self._state.named())

    @property
    def last(self) -> Batchwise:
        """What happened to the batch that was answered last, and learnt from."""
        return self._between.last

    @property
    def totals(self) -> Totals:
        """Counts since the last reset by hand."""
        return self._between.books.read()

    @property
    def lr(self) -> float:
        """The learning rate in force; a rule needs the batch size, which the first batch fixes (64 until then)."""
        rate = self.recipe.lr
        return rate(self.facts.family, self._state.size or 64) if isinstance(rate, Rule) else float(rate)

    @property
    def _lock(self) -> threading.RLock:
        """Of the model: one call at a time. A call from inside a call, by a hook or a part, is an error."""
        lock = lease(self._network.model).lock
        if lock._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError("expected the adapter to be called between batches, got a call from inside its own call")
        return lock

    def _taken(self, images: Tensor) -> Tensor:
        """The batch, if the network and the recipe can take it."""
        images = checks.images(images, self._network.model, self.facts.channels, self.facts.spatial)
        checks.compiled(self._settings["compile"], images)
        if self._editor is not None:
            checks.pictures(images, self._editor, self.name)
        return images

    def _settle(self) -> None:
        """The state between two batches; of a call that broke off, or was not to be kept, nothing is left."""
        if self._state.entered:
            self._state.restore(self._between.state)
            self._state.entered = False

    def _close(self, entry: Batchwise, count: int) -> None:
        """Keep what the batch left behind: one assignment, so that an interrupt finds all of it or nothing."""
        idle = self._between.idle + 1 if entry.nothing else 0
        self._say(entry, count, idle)
        self._state.calls += 1
        books = copy.copy(self._between.books)
        books.close(entry, count)
        short = count < (self._state.size or count)
        self._between = Between(self._state.snapshot(), entry, books, idle, short)

    def _warn(self, always: bool) -> None:
        """Once per kind: what went wrong without an error. On a GPU, where reading waits, at every 256th batch."""
        if not always and self._state.calls > 1 and self._state.calls % 256:
            return
        for kind, text in alarms(self._between.books.odd).items():
            if kind not in self._warned:
                self._warned.add(kind)
                log.warning("%s on %s: %s", self.name, type(self._network.model).__name__, text)

    def _answer(self, images: Tensor, entry: Batchwise, learn: bool) -> Tensor:
        """A reset if one is due, the proof of the branch if it is the first time, then the loop."""
        state, recover = self._state, self.recipe.recover
        self._fix_size(len(images), learn)
        if learn and recover.due(state.calls):
            state.restart()
            entry.reset_flag = True
        unproven = self._network.branch is not None and self._network.doubles is None
        if unproven or self.recipe.unit_range:  # a proof and an augmentation need sound images; the loop checks itself
            checks.finite(images)
        if self.recipe.unit_range:
            checks.unit_range(images, self.name)
        elif state.calls == 0 and min(self._settings["std"] or (1.0,)) < 1:
            checks.not_bytes(images)
        way, why = self._recorder.way(images, self.lr, state.size or len(images), learn)
        if why is not None:
            entry.remarks.append(why)
        if way is not None:
            answer, found = way(images)
            entry.costs, parts = found.costs, [found]
        else:
            with self._network.borrowed(images.device.type):
                if unproven:
                    self._prove(images, entry)
                answers, parts = self._eagerly(images, entry, learn)
                if self._settings["compile"] and self._network.hooked:
                    entry.remarks.append("not compiled: the model has hooks, which a compiled pass would not call")
            answer = torch.cat(answers)
        if not (learn and self.recipe.learns):
            checks.finite(images)
        entry.gather(parts)
        return answer

    def _eagerly(self, images: Tensor, entry: Batchwise, learn: bool) -> tuple[list[Tensor], list[Batchwise]]:
        """The loop as it is written, on the batch or image by image."""
        state, each = self._state, self.recipe.recover.each_image
        answers, parts = [], []
        for piece in torch.split(images, 1) if each else (images,):
            parts.append(Batchwise(entry.costs))
            batch = Batch(piece, state.rng, len(piece) if each else state.size or len(piece))
            answers.append(Turn(self.recipe, self._network, state, batch, parts[-1], self.lr, learn).run())
            if each and learn:
                state.restart()
        return answers, parts

    def _prove(self, images: Tensor, entry: Batchwise) -> None:
        """Doubling the batch at the split is right for this model, or the branch runs as a second pass."""
        with torch.no_grad():
            far = self._network.prove(images, self.recipe.statistics, self._state.memory)
        if not self._network.doubles:
            entry.remarks.append(f"the doubled pass is off by {far:.2g}: the branch runs as a second pass")
            log.warning("%s: %s", type(self._network.model).__name__, entry.remarks[-1])

    @contextmanager
    def _proven(self, images: Tensor) -> Iterator[None]:
        """Inside, the branch runs as it should; the proof that counts is made at the first batch that is answered."""
        network, known = self._network, self._network.doubles
        try:
            if network.branch is not None and known is None:
                with torch.no_grad():
                    network.prove(images, self.recipe.statistics, self._state.memory)
            yield
        finally:
            network.doubles = known

    def _fix_size(self, count: int, learn: bool) -> None:
        """The first batch fixes the batch size. Another size later is worth a word, unless it is a short last one."""
        size = self._state.size = self._state.size or count
        odd = count > size or self._between.short
        if learn and self.recipe.learns and odd and "sizes" not in self._warned:
            self._warned.add("sizes")
            log.warning("batches of %d and of other sizes; the learning rate stays %g, as for %d", size, self.lr, size)

    def _say(self, entry: Batchwise, count: int, idle: int) -> None:
        """Once: that nobody teaches, or that a batch of one has no statistics worth the name."""
        if idle == IDLE:
            low, top = float(entry.first_entropy.min()), math.log(max(entry.first_logits.shape[1], 2))
            log.warning(
                "%d batches in a row taught nobody: %r; lowest entropy now %.2f ln C. Try threshold= or preset=",
                IDLE, self.recipe.select, low / top,
            )  # fmt: skip
        if count == 1 and self._state.calls == 0 and self._network.batch_normalised(self.recipe.statistics):
            entry.remarks.append(
                "one image at a time through batch norm: its statistics are noise; see statistics=Source()"
            )
            log.warning(entry.remarks[-1])

    def __deepcopy__(self, memo: dict[int, Any]) -> Adapter:
        """A new adapter with the same state, on a copy of the model."""
        with self._lock:
            model = copy.deepcopy(self._network.model, memo)
            modules = dict(zip(self._network.model.modules(), model.modules(), strict=True))
            settings = {**self._settings, "logits": Translation(modules)(self._settings["logits"])}
            twin = Adapter(model, self.recipe, **settings)
        twin._state.fisher, twin.preparation = self._state.fisher, dict(self.preparation)
        twin._network.doubles = self._network.doubles
        twin.load_state_dict(self.state_dict())
        return twin

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an Adapter borrows its model and is not pickled; use adapter.save(path) and adapter.load(path)"
        )

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


def _each_gradient(losses: Tensor, tensor: Tensor | None) -> Iterator[Tensor]:
    """Each sample's own gradient, one backward pass after another; zeros where nothing moves."""
    for loss in losses:
        if tensor is None or tensor.numel() == 0:
            yield loss.new_zeros(())
        else:
            yield torch.autograd.grad(loss, tensor, retain_graph=True, materialize_grads=True)[0]


def _groups(
    model: nn.Module, recipe: Recipe, facts: Anatomy, split: str | None
) -> tuple[list[str], list[str], str | None]:
    """Names for the recipe's own group and for the branch, and the split between them.

    With a branch, the recipe's group loses everything from the split on, and the branch takes its norm layers.
    """
    names, branch = recipe.parameters(model, facts), []
    if recipe.branch is None:
        split = None
    else:
        split = split or facts.split(recipe.branch.depth)
        facts.beyond(split)  # raises, with the nearest names, where there is no such module
        deep = set(facts.modules[facts.modules.index(split) :])
        norms = {name for name in deep if is_norm(model.get_submodule(name))}
        branch = [name for name, _ in model.named_parameters() if name.rpartition(".")[0] in norms]
        names = [name for name in names if name.rpartition(".")[0] not in deep]
    checks.something_moves(recipe, model, names, branch)
    return names, branch, split
