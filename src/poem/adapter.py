"""The adapter: a model that is adapted while it predicts."""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import perf_counter
from typing import Any, NoReturn, get_args

import torch
from torch import Tensor, nn

from poem._util import state_file
from poem.accelerate.accelerated import Accelerated
from poem.accelerate.capture import Captures, Fast
from poem.engine import input_checks as checks
from poem.engine.accounting import BatchRecord, RunningTotals, Totals, anomaly_texts
from poem.engine.anatomy import Anatomy, anatomy, has_batch_norm, is_norm
from poem.engine.branch_check import MISFITS, check_doubling
from poem.engine.export import ExportStatistics, exported
from poem.engine.loop import BatchLoop
from poem.engine.model_input import ModelInput, moved_input, not_taken, read_input
from poem.engine.model_lock import model_lock
from poem.engine.network import Network
from poem.engine.precision import Precision
from poem.engine.source_data import prepare
from poem.engine.state import Snapshot, State
from poem.engine.tokens import blocks_of
from poem.engine.twin import Translation
from poem.parts.base import Batch, Memory, Need
from poem.parts.statistics import Source
from poem.recipes.learning_rate import Rule
from poem.recipes.recipe import Recipe

log = logging.getLogger("poem")
EMPTY_BATCHES = 10  # batches in a row without a selected sample, before a warning


_FROZEN: ContextVar[tuple[int, ...]] = ContextVar("frozen", default=())
"""Adapters that learn nothing, by identity, in this thread or task."""


@dataclass(frozen=True)
class Between:
    """What an adapter holds between two batches: one value, replaced when a batch is over."""

    state: Snapshot
    last: BatchRecord = field(default_factory=BatchRecord)
    totals: RunningTotals = field(default_factory=RunningTotals)
    empty: int = 0  # batches in a row without a selected sample
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


class _Apart(threading.local):
    """Seconds of one thread; see `seconds_apart`."""

    seconds = 0.0


_APART = _Apart()


def seconds_apart() -> float:
    """Seconds that this thread's calls of adapters have spent so far on what is no batch's own cost.

    These are waiting for other adapters of the same model, which take turns, and capturing CUDA graphs. The difference
    of two readings belongs to what was called between them.
    """
    return _APART.seconds


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
        logits: Callable[[Any], Tensor] | None = None,
    ) -> None:
        self._given, model = model, checks.model(model)
        batch_size, seed, indices = checks.batch_size(batch_size), checks.seed(seed), checks.indices(classes)
        self.facts, self.name = anatomy(model), name
        recipe = recipe.fitted(batch_norm=has_batch_norm(model))
        self.recipe = recipe
        mean, std = checks.normalisation(
            recipe.unit_range, name, mean, std, self.facts.channels, self.facts.spatial
        ) or (None, None)  # fmt: skip
        self._settings: dict[str, Any] = {
            "name": name, "batch_size": batch_size, "classes": indices, "mean": mean, "std": std, "split": split,
            "seed": seed, "precision": precision, "fast": fast, "logits": logits,
        }  # fmt: skip
        names, branch, split = _groups(model, recipe, self.facts, split)
        masking = recipe.first_with(Need.TOKENS)
        self._acceleration = Accelerated(half=precision == "bf16")
        self._network = Network(
            model, theta=names, branch=branch if recipe.branch else None, split=split,
            norms=self.facts.norms, head=self.facts.head if recipe.first_with(Need.FEATURES) is not None else None,
            classes=indices, mean=mean, std=std, logits=logits, precision=precision,
            acceleration=self._acceleration, per_sample=recipe.step.per_sample,
            blocks=None if masking is None else blocks_of(masking, model, self.facts),
        )  # fmt: skip
        self._state = State(recipe, self._network, seed, batch_size, self.facts.family)
        self._captures = Captures(recipe, self._network, self._state, fast)
        self._unloaded, self._editor = False, recipe.first_with(Need.UNIT_RANGE, Need.PICTURES)
        self._warned: set[str] = set()  # kinds of warnings that were logged
        self._odd_inputs: set[object] = set()  # kinds of input that a pass showed the model to take
        self._keeps = any(norm.batch for norm in self._network.norms) and not recipe.statistics.remembers
        self._seen: tuple[Tensor | ModelInput, list[int]] | None = None  # the last batch and its versions, if kept
        self._between = Between(self._state.snapshot())
        self.preparation = {"forwards": 0, "backwards": 0}
        """Source images that parts were prepared on before the stream, apart from `totals`."""
        with model_lock(model).lock:
            model_lock(model).adapters += 1

    def __call__(self, images: Tensor | Mapping[str, Any] | ModelInput | None = None, **keywords: Any) -> Tensor:
        """Predict and learn: logits (B, C), or the log of the combined probability where a branch answers too.

        A model with one logit, whose sigmoid is the probability of class 1, gets such logits (B, 1) back.

        Args:
            images: A floating-point tensor whose first axis is the batch, or the model's arguments as a mapping, such
                as a batch of a Hugging Face processor. Labels in it are dropped.
            keywords: The model's arguments by name, as in `adapter(pixel_values=x)`. Of all arguments the largest
                floating-point tensor is normalised, augmented and counted; the others go along as they are.
        """
        return self.answer_with_record(read_input(self._network.model, images, keywords))[0]

    def answer_with_record(self, given: Tensor | ModelInput) -> tuple[Tensor, BatchRecord]:
        """A call, and the record of this very batch, which `last` keeps only where it was learnt from."""
        checks.still_here(self._unloaded)
        record, learn = BatchRecord(), id(self) not in _FROZEN.get()
        flags, asked = ThreadFlags(), perf_counter()
        try:
            with self._lock, torch.inference_mode(False), torch.enable_grad():
                _APART.seconds += perf_counter() - asked
                self._settle()
                batch = self._taken(given)
                if self._state.follow(batch.device):
                    self._captures.release()
                    self._between = replace(self._between, state=self._state.snapshot())
                self._state.entered = True
                answer = self._answer(batch, record, learn)
                if learn:
                    self._commit(record, len(batch))
                    self._keep(batch)
                self._settle()
                if learn:
                    self._warn(batch.device.type == "cpu")
        except BaseException:
            self._network.abandon()
            flags.restore()
            raise
        return answer, record

    def prepare(self, source_data: Iterable[Any] | Tensor) -> None:
        """Prepare parts that need source data on these images, such as EATA's Fisher anchor."""
        checks.still_here(self._unloaded)
        with self._lock, torch.inference_mode(False), torch.enable_grad():
            self._settle()
            device, size = self._state.source["theta"].device.type, self._state.size or 64
            prepared: Memory = {}
            found: dict[str, Memory] = {}  # equal parts measure the same: source data is read once for them all
            count = 0
            with self._network.borrowed(device):
                for place, part in self.recipe.places:
                    if Need.SOURCE_DATA in part.needs:
                        if repr(part) not in found:
                            memory, images = prepare(part, self._network, self.recipe.statistics, source_data, size)
                            found[repr(part)] = memory
                            count += images
                        prepared |= {f"{place}.{name}": tensor for name, tensor in found[repr(part)].items()}
            self._state.prepared = prepared
        self.preparation = {"forwards": count, "backwards": count}

    def stream(self, loader: Iterable[Any], *, call: Callable[[Any], Tensor] | None = None) -> Iterator[Tensor]:
        """Answers for each batch of a loader of images, of tuples that begin with images, or of mappings.

        Labels in tuples and mappings are dropped.

        `call` answers in the adapter's place, for what is built around it.
        """
        for item in loader:
            images = item[0] if isinstance(item, tuple | list) else item
            if not isinstance(images, Tensor | Mapping):
                kind = type(images).__name__
                raise TypeError(f"expected batches of images or (images, ...), got {kind}; hand adapter() the tensor")
            yield (call or self)(moved_input(images, next(self._network.model.parameters()).device))

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

    def source(self, images: Tensor | Mapping[str, Any] | ModelInput | None = None, **keywords: Any) -> Tensor:
        """Logits (B, C) of the model as it came, for comparison: its own weights and statistics, nothing adapted.

        `mean=`, `std=`, `classes=`, `logits=` and `precision=` apply as in a call. Nothing is updated: the state, the
        random generator, `last` and `totals` stay as they were. The pass is not captured.

        Raises:
            ValueError: Images with NaN or Inf, or of a shape that the model does not take.
            RuntimeError: The adapter was unloaded, or this is a call from inside its own call.
        """
        checks.still_here(self._unloaded)
        network = self._network
        given, asked = read_input(network.model, images, keywords), perf_counter()
        with self._lock, torch.inference_mode(False), torch.no_grad():
            _APART.seconds += perf_counter() - asked
            self._settle()
            batch = self._taken(given)
            checks.finite(batch)
            try:
                with network.borrowed(batch.device.type):
                    (logits,), _ = network.heads(batch, None, None, Source(), {}, doubled=False)
            finally:
                network.given = None  # holds the caller's tensors
            return network.in_model_shape(logits)

    @property
    def shared_arguments(self) -> frozenset[str]:
        """Names of the model's arguments that came with another length than the batch: all samples share them."""
        return frozenset(self._network.shared)

    def gradient_norms(self, images: Tensor | Mapping[str, Any] | ModelInput) -> Tensor:
        """(B,) norm, over theta, of each sample's entropy gradient in a first forward pass; nothing is updated.

        A backward pass per sample: a measurement. The state, random generator and counts stay as they were.
        """
        checks.still_here(self._unloaded)
        network, state = self._network, self._state
        given = read_input(network.model, images, {})
        with self._lock, torch.inference_mode(False), torch.enable_grad():
            self._settle()
            shown = self._taken(given)
            checks.finite(shown)
            with state.rolled_back(), network.borrowed(shown.device.type), self._doubling_checked(shown):
                state.follow(shown.device)
                batch = Batch(shown, state.rng, len(shown))
                outputs = BatchLoop(self.recipe, network, state, batch, self.lr, learn=False).forward()
                norms = [gradient.norm() for gradient in _each_gradient(outputs.entropy, outputs.theta)]
        return torch.stack(norms).detach()

    def reset(self) -> None:
        """Bit for bit a fresh adapter: tensors, optimisers, memory, random state, counts, what was tried on a batch.

        A loop that was captured before keeps the layers' settings, and tensors that are plain attributes, as they were
        then: make the adapter anew after changing one.
        """
        checks.still_here(self._unloaded)
        with self._lock:
            self._state.entered = True
            self._state.reset()
            self._between = Between(self._state.snapshot())
            self._state.entered = False
            self._warned.clear()
            self._seen = None

    def forget_batch(self) -> None:
        """Drop the last batch of images, which is kept only for `export(statistics="frozen")` without a `stream`."""
        self._seen = None

    def checkpoint(self) -> Between:
        """All that adapting has changed, as it is between two batches; tensors are shared, since none is written to."""
        checks.still_here(self._unloaded)
        with self._lock:
            self._settle()
            return self._between

    def rollback(self, to: Between | Snapshot | None, *, counts: bool = False) -> None:
        """Back to a checkpoint, to a state of one, or to the source (None); counts go on, unless `counts` is set.

        What the first batch fixed stays: the batch size and the number of classes.
        """
        checks.still_here(self._unloaded)
        with self._lock:
            self._settle()
            self._state.entered = True
            if isinstance(to, Between) and counts:
                self._state.restore(to.state)
                self._between = to
            elif to is None:
                self._state.restart()
                self._between = replace(self._between, state=self._state.snapshot())
            else:
                state = to.state if isinstance(to, Between) else to
                moved = {name: state.values[name] for name in ("moving", "teacher", "memory", "steps")}
                now = self._state.snapshot()
                self._state.restore(Snapshot({**now.values, **moved}, state.rng))
                self._between = replace(self._between, state=self._state.snapshot())
            self._state.entered = False

    def in_model_shape(self, logits: Tensor) -> Tensor:
        """Logits (B, C) in the shape that the model answers in: (B, 1) for two classes with one logit."""
        return self._network.in_model_shape(logits)

    def unload(self) -> nn.Module:
        """Return the very model that came in; the adapter cannot be used any more."""
        checks.still_here(self._unloaded)
        with self._lock:
            self._unloaded = True
            self._captures.release()
            self._network.acceleration.release()
            shared = model_lock(self._network.model)
            shared.adapters -= 1
        if shared.adapters:
            log.info("%d other adapters still use this model", shared.adapters)
        return self._given

    def export(
        self, *, statistics: ExportStatistics = "recipe", stream: Iterable[Any] | Tensor | None = None
    ) -> nn.Module:
        """A plain module with the adapted weights, which predicts as the adapter does when frozen.

        Its `state_dict` has the keys of the model and loads into the model's class. An adapt branch makes two whole
        networks, side by side: keys begin with `heads.0.` and `heads.1.` then, and a warning says so.

        Args:
            statistics: `"recipe"`: batch norm keeps to the recipe's statistics, so with the usual ones an answer
                depends on the batch it is in, and a batch of one is normalised by itself. `"frozen"`: the stream's
                statistics are written into the running averages, and answers depend on the batch no more. They are
                what the recipe's statistics remember: the average of `RunningMean` and of `Robust`, the components of
                `Components` together, of `Blended` the copy that counts most, but for the one that follows each batch.
                Other statistics remember nothing and are taken of `stream`.
            stream: For `"frozen"`, images or a loader of them to measure the statistics on, where the recipe remembers
                none; by default the last batch that was answered.

        Raises:
            ValueError: Statistics or a readout that depend on each batch, and are not frozen; a `stream` where none is
                used; no batch to measure on.
        """
        checks.still_here(self._unloaded)
        if statistics not in get_args(ExportStatistics):
            raise ValueError(f"expected statistics 'recipe' or 'frozen', got {statistics!r}")
        if stream is not None and (statistics == "recipe" or not self._keeps):
            why = "statistics='recipe' measures nothing" if statistics == "recipe" else "nothing has to be measured"
            raise ValueError(f"expected no stream=, because {why}, got {type(stream).__name__}; leave it out")
        with self._lock, torch.inference_mode(False):
            self._settle()
            batches = self._to_measure(stream) if statistics == "frozen" else []
            return exported(self._network, self.recipe, self._state, statistics, batches)

    def _to_measure(self, stream: Iterable[Any] | Tensor | None) -> Iterator[Tensor | ModelInput]:
        """Batches to measure statistics on: those given, or the last one."""
        network = self._network
        if stream is None and self._seen is not None:
            last, versions = self._seen
            tensors = last.tensors if isinstance(last, ModelInput) else [last]
            if [tensor._version for tensor in tensors] != versions:
                raise ValueError("the last batch was written to since it was answered; pass stream= to measure on")
            yield last
        given = [] if stream is None else [stream] if isinstance(stream, Tensor | Mapping) else stream
        for item in given:
            images = item[0] if isinstance(item, tuple | list) else item
            images = moved_input(images, next(network.model.parameters()).device)
            batch = self._taken(read_input(network.model, images, {}))
            checks.finite(batch)
            yield network.given or batch

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
            self._state.load(state, self.name)
            self._seen = None
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
    def settings(self) -> dict[str, Any]:
        """The arguments beside model and recipe, as they were given."""
        return dict(self._settings)

    @property
    def is_frozen(self) -> bool:
        """Whether calls of this thread or task are inside `frozen()`."""
        return id(self) in _FROZEN.get()

    @property
    def drift(self) -> float:
        """Distance of the adapted tensors from the source's, relative to the norm of the source's; reads the device."""
        if not self.recipe.learns:
            return 0.0
        state = self._between.state.values
        pairs = [(state["moving"][key], state["source"][key]) for key in ("theta", "branch") if key in state["source"]]
        away = sum((now - start).square().sum() for now, start in pairs)
        size = sum(start.square().sum() for _, start in pairs)
        return float((torch.as_tensor(away) / torch.as_tensor(size).clamp(min=1e-12)).sqrt())

    @property
    def last(self) -> BatchRecord:
        """What happened to the batch that was answered last, and learnt from."""
        return self._between.last

    @property
    def totals(self) -> Totals:
        """Counts since the last reset by hand."""
        return self._between.totals.read()

    @property
    def batch_size(self) -> int | None:
        """The batch size that the learning rate is for: as given, or the first batch's; None before that."""
        size: int | None = self._between.state.values["size"]
        return size

    @property
    def lr(self) -> float:
        """The learning rate in force; a rule needs the batch size, which the first batch fixes (64 until then)."""
        rate = self.recipe.lr
        return rate(self.facts.family, self._state.size or 64) if isinstance(rate, Rule) else float(rate)

    @property
    def _lock(self) -> threading.RLock:
        """Of the model: one call at a time. A call from inside a call, by a hook or a part, is an error."""
        lock = model_lock(self._network.model).lock
        if lock._is_owned():  # type: ignore[attr-defined]
            raise RuntimeError("expected the adapter to be called between batches, got a call from inside its own call")
        return lock

    def _taken(self, given: Tensor | ModelInput) -> Tensor:
        """The batch, if the network and the recipe can take it; arguments that go along are handed to the network."""
        network, name = self._network, self.name
        network.given = None  # of the batch before
        images = checks.images(given.images if isinstance(given, ModelInput) else given, network.model)
        if self._editor is not None:
            checks.pictures(images, self._editor, name)
        if isinstance(given, ModelInput):
            given = given.noted(network.shared)
            checks.further(given, network.model, self.recipe, name)
            network.given = replace(given, images=images).taken()
            if given.whole:
                self._try_pass(images, "whole", TypeError(not_taken(network.model, given)))
        odd = checks.odd_shape(images, self.facts.channels, self.facts.spatial)
        if odd is not None:
            self._try_pass(images, images.shape[1:], ValueError(odd))
        return images

    def _try_pass(self, images: Tensor, kind: object, refusal: Exception) -> None:
        """A pass of the source, once for each kind of input that the model may take after all; raises the refusal."""
        if kind in self._odd_inputs:
            return
        try:
            with torch.no_grad(), self._network.borrowed(images.device.type):
                self._network.heads(images, None, None, Source(), {}, doubled=False)
        except MISFITS as error:
            raise refusal from error
        self._odd_inputs.add(kind)

    def _settle(self) -> None:
        """The state between two batches; of a call that was interrupted, or was not to be kept, nothing is left."""
        if self._state.entered:
            self._state.restore(self._between.state)
            self._state.entered = False
        self._network.given = None

    def _keep(self, images: Tensor) -> None:
        """Keep hold of the batch where batch norm remembers nothing of it, for an export with frozen statistics."""
        if self._keeps:
            given = self._network.given
            self._seen = given or images, [tensor._version for tensor in (given.tensors if given else [images])]

    def _commit(self, record: BatchRecord, count: int) -> None:
        """Keep what the batch left behind: one assignment, so that an interrupt finds all of it or nothing."""
        empty = self._between.empty + 1 if record.none_selected else 0
        self._warn_batch(record, count, empty)
        self._state.calls += 1
        totals = copy.copy(self._between.totals)
        totals.add_batch(record, count)
        short = count < (self._state.size or count)
        self._between = Between(self._state.snapshot(), record, totals, empty, short)

    def _warn(self, always: bool) -> None:
        """Once per kind: what went wrong without an error. On a GPU, where reading waits, at every 256th batch."""
        if not always and self._state.calls > 1 and self._state.calls % 256:
            return
        for kind, text in anomaly_texts(self._between.totals.anomalies).items():
            if kind not in self._warned:
                self._warned.add(kind)
                log.warning("%s on %s: %s", self.name, type(self._network.model).__name__, text)

    def _answer(self, images: Tensor, record: BatchRecord, learn: bool) -> Tensor:
        """A reset if one is due, the check of the doubled batch if it is the first, then the loop."""
        state, recover = self._state, self.recipe.recover
        self._fix_size(len(images), learn)
        if learn and recover.due(state.calls):
            state.restart()
            record.reset_flag = True
        unchecked = self._network.branch is not None and self._network.doubles is None
        if unchecked or self.recipe.unit_range:  # both need finite images before the loop checks them
            checks.finite(images)
        if self.recipe.unit_range:
            checks.unit_range(images, self.name)
        elif state.calls == 0 and min(self._settings["std"] or (1.0,)) < 1:
            checks.not_bytes(images)
        finite = None if learn and self.recipe.learns else checks.FiniteCheck(images)  # else the flags tell
        began = self._captures.find_seconds
        replayed, why = self._captures.answer(images, self.lr, state.size or len(images), learn)
        _APART.seconds += self._captures.find_seconds - began  # a capture takes as long as many batches
        if why is not None:
            record.remarks.append(why)
        if replayed is not None:
            answer, pieces = replayed[0], [replayed[1]]
        else:
            with self._network.borrowed(images.device.type):
                if unchecked:
                    self._check_doubling(images, record)
                self._try_once(images, record)
                answers, pieces = self._run_eagerly(images, learn)
            answer = torch.cat(answers)
        if finite is not None:
            finite.read()
        record.merge(pieces)
        return self._network.in_model_shape(answer)

    def _run_eagerly(self, images: Tensor, learn: bool) -> tuple[list[Tensor], list[BatchRecord]]:
        """The loop on the batch, or image by image."""
        state, each = self._state, self.recipe.recover.each_image
        answers, records = [], []
        for piece in torch.split(images, 1) if each else (images,):
            batch = Batch(piece, state.rng, len(piece) if each else state.size or len(piece))
            answer, record = BatchLoop(self.recipe, self._network, state, batch, self.lr, learn).run()
            answers.append(answer)
            records.append(record)
            if each and learn:
                state.restart()
        return answers, records

    def _check_doubling(self, images: Tensor, record: BatchRecord) -> None:
        """Whether a batch doubled at the split is right for this model; if not, the branch runs as a second pass."""
        with torch.no_grad():
            error = check_doubling(self._network, images, self.recipe.statistics, self._state.memory)
        if not self._network.doubles:
            record.remarks.append(f"the doubled pass is off by {error:.2g}: the branch runs as a second pass")
            log.warning("%s: %s", type(self._network.model).__name__, record.remarks[-1])

    def _try_once(self, images: Tensor, record: BatchRecord) -> None:
        """See which faster ways are right for this model, where that is not known yet."""
        learns, state = self.recipe.learns, self._state
        note = self._acceleration.try_once(images, self.recipe.statistics, state.memory, learns=learns)
        if note is not None:
            record.remarks.append(note)
            log.warning("%s: %s", type(self._network.model).__name__, note)

    @contextmanager
    def _doubling_checked(self, images: Tensor) -> Iterator[None]:
        """Inside, the doubled batch has been checked; the check that counts is made at the first batch answered."""
        network, known = self._network, self._network.doubles
        try:
            if network.branch is not None and known is None:
                with torch.no_grad():
                    check_doubling(network, images, self.recipe.statistics, self._state.memory)
            yield
        finally:
            network.doubles = known

    def _fix_size(self, count: int, learn: bool) -> None:
        """The first batch fixes the batch size. Another size later is warned of once, unless a short last batch."""
        size = self._state.size = self._state.size or count
        odd = count > size or self._between.short
        if learn and self.recipe.learns and odd and "sizes" not in self._warned:
            self._warned.add("sizes")
            log.warning("batches of %d and of other sizes; the learning rate stays %g, as for %d", size, self.lr, size)

    def _warn_batch(self, record: BatchRecord, count: int, empty: int) -> None:
        """Warn once that no sample is selected, or that a batch of one has no statistics worth the name."""
        if empty == EMPTY_BATCHES:
            low, top = float(record.first_entropy.min()), math.log(max(record.first_logits.shape[1], 2))
            log.warning(
                "%d batches in a row selected no sample: %r; lowest entropy now %.2f ln C. Try threshold= or preset=",
                EMPTY_BATCHES, self.recipe.select, low / top,
            )  # fmt: skip
        if count == 1 and self._state.calls == 0 and self._network.batch_normalised(self.recipe.statistics):
            record.remarks.append(
                "one image at a time through batch norm: its statistics are noise; see the method auto, or "
                "statistics=RunningMean(0.02)"
            )
            log.warning(record.remarks[-1])

    def __deepcopy__(self, memo: dict[int, Any]) -> Adapter:
        """A new adapter with the same state, on a copy of the model."""
        with self._lock:
            model = copy.deepcopy(self._network.model, memo)
            modules = dict(zip(self._network.model.modules(), model.modules(), strict=True))
            settings = {**self._settings, "logits": Translation(modules)(self._settings["logits"])}
            twin = Adapter(model, self.recipe, **settings)
        twin._state.prepared, twin.preparation = dict(self._state.prepared), dict(self.preparation)
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

    def __init__(self, adapter: Callable[..., Tensor]) -> None:
        super().__init__()
        self.adapter = adapter

    def forward(self, images: Tensor | Mapping[str, Any] | None = None, **keywords: Any) -> Tensor:
        """Predict and learn."""
        return self.adapter(images, **keywords)


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
