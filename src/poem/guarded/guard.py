"""A guarded adapter: the source answers beside it, and decides with it which answer is given.

What it promises comes in three tiers, and each is named as such. **Proof**: with `budget=`, answers differ from the
source's on at most that share of the samples, so accuracy is at most that far below. **Measured**: what `docs/guard.md`
states of the streams that it names, and of no others. **Alarms** ring wrongly at a stated rate at most.
"""

from __future__ import annotations

import copy
import logging
import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from poem._util import state_file
from poem.accelerate.captured_function import CapturedFunction
from poem.adapter import Adapter, AsModule
from poem.engine.accounting import BatchRecord, Totals
from poem.engine.export import ExportStatistics
from poem.engine.model_input import ModelInput, moved_input, read_input
from poem.guarded.actions import act
from poem.guarded.alarms import MeanBound, ShiftAlarm
from poem.guarded.asked import (
    AdaptedPass,
    AskAdapted,
    AskDrift,
    Asked,
    AskJudgement,
    AskSource,
    log_probs_of,
)
from poem.guarded.audit import MACHINE, Audit, AuditLines, Event, tensor_hash
from poem.guarded.budget import AnswerBudget
from poem.guarded.event_log import EventLog
from poem.guarded.guard_state import GuardState
from poem.guarded.judgement import BatchNumbers, Judgement, Verdict, answers, entropies, judged_tensors, mean_of
from poem.guarded.limits import CallTimes, may_learn
from poem.guarded.replies import Replies, shifted_input
from poem.guarded.saved_state import joined, parted
from poem.guarded.settings import GuardSettings, stated
from poem.guarded.signals import Averages, Signals, no_signals, stopped_signals
from poem.guarded.verdict import verdict_of
from poem.parts.readout import Uncorrected
from poem.parts.statistics import Source
from poem.recipes.recipe import Recipe
from poem.recipes.text import written

log = logging.getLogger("poem")
ANSWERING: dict[Verdict, str] = {"source": "the source", "mean": "the mean of both", "adapted": "the adapted model"}
"""Who answers, by verdict, in words."""
STOPPED = "stopped by hand"
NO_IMAGES = (
    "the input is no batch of images (batch, channels, height, width), so it is not looked at shifted (view='none'): "
    "the verdict rests on the balance of the answers alone"
)
OWN_KINDS = ("header", "batch", "event", "resumed")
"""Kinds of lines that a guard writes to its audit."""


@dataclass(frozen=True)
class Taken:
    """A batch that a guard has taken, before it is the guard's."""

    images: Tensor | ModelInput
    answer: Tensor
    held: GuardState
    """What the guard remembers after it."""
    signals: Signals
    answered: tuple[Verdict, Tensor]
    """Whose answer it is, and which rows (B,) the source answers."""
    events: list[Event]
    learning: bool


class Guard:
    """An adapter with a guard around it: same call, state, save and load. Made by `poem.guard`, which explains it."""

    def __init__(
        self,
        adapter: Adapter,
        settings: GuardSettings,
        *,
        source_data: Iterable[Any] | Tensor | None = None,
        on_event: Callable[[Event], object] | None = None,
        audit: str | Path | None = None,
        append: bool = False,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        if isinstance(adapter, Guard):
            raise TypeError(
                "expected an adapter without a guard, got a guarded one; poem.guard(guarded.adapter, ...) or "
                "poem.adapt(..., guard={...}) makes one with other settings"
            )
        if not isinstance(adapter, Adapter):
            raise TypeError(f"expected an adapter, as poem.adapt makes it, got {type(adapter).__name__}")
        if on_event is not None and not callable(on_event):
            raise TypeError(f"expected on_event to be a function of an Event, got {type(on_event).__name__}")
        if _answers_as_source(adapter.recipe):
            raise ValueError(
                f"{adapter.name} answers as the source does, so there is nothing to guard; guard a method that adapts"
            )
        self.adapter, self.settings = adapter, settings
        self._told = EventLog(adapter.name, settings.name, on_event)
        self.events = self._told.events
        """The last thousand events."""
        self.signals: Signals | None = None
        """What was seen at the last batch; None before the first."""
        self._lock = threading.RLock()
        self._answered: tuple[Verdict, Tensor] | None = None  # of the last batch: whose answer, and the source's rows
        norms = [each for each in adapter.model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
        self._rows_alone = all(norm.running_mean is not None for norm in norms)  # of a pass of the source
        # Whether the adapter's own pass has the source's answers. A budget's proof is about the model itself, and where
        # learning waits for the shift alarm the source answers first.
        own_copy = not adapter.recipe.learns and adapter.recipe.statistics.source_copy is not None
        self._shares = own_copy and self._rows_alone and settings.budget is None and settings.adapt == "always"
        shift = ShiftAlarm(alpha=settings.alpha, reference=settings.reference, seed=settings.seed)
        if source_data is not None:
            shift.compare_with(self._source_entropies(source_data))
        budget = None if settings.budget is None else AnswerBudget(settings.budget)
        self._judged = CapturedFunction(partial(judged_tensors, settings.horizon), adapter.settings["fast"])
        self._times = CallTimes(self._judged)
        self._first = GuardState(shift=shift, worse=MeanBound(alpha=settings.alpha), budget=budget)
        self._held = copy.deepcopy(self._first)
        self._about = dict(about or {})
        if audit is not None:
            self._told.audit = Audit(Path(audit), self.header(), append=append)

    # Calls ------------------------------------------------------------------------------------------------------------

    def __call__(self, images: Tensor | Mapping[str, Any] | ModelInput | None = None, **keywords: Any) -> Tensor:
        """Predict, learn if allowed, and answer with the source, the adapted model, or the mean of both.

        Takes what the adapter takes: a tensor, a mapping, or keywords. What is no batch of images is not looked at
        shifted, as with `view="none"`; an event of the first batch says so.
        """
        return self._call(read_input(self.model, images, keywords), learn=None)

    def repeat(self, images: Tensor | ModelInput, *, learn: bool) -> dict[str, Any]:
        """One batch of a recorded run: learns if `learn` says so, and returns the line that an audit gets of it.

        Whether a batch is learnt from may have depended on time; everything else is computed as in a call.

        Raises:
            RuntimeError: This thread is inside `frozen()`, where nothing is remembered.
        """
        if self.adapter.is_frozen:
            raise RuntimeError("expected a guard that may learn, got one inside frozen(); repeat a run outside of it")
        with self._lock:
            own, lines = self._told.audit, AuditLines()
            self._told.audit = lines
            try:
                self._call(images, learn)
            finally:
                self._told.audit = own
        return lines.lines[0]

    def _call(self, images: Tensor | ModelInput, learn: bool | None) -> Tensor:
        """One batch; `learn` repeats a recorded decision instead of making one."""
        if self.adapter.is_frozen:
            with torch.inference_mode(False), torch.no_grad():
                return self._frozen_answer(images)
        # Outside inference mode: what is remembered must be of use outside it too.
        with self._lock, torch.inference_mode(False), torch.no_grad():
            before = self.adapter.checkpoint()
            try:
                taken = self._replied(
                    self.steps(images, learn), Replies(self.adapter, self._judged, images, rows_alone=self._rows_alone)
                )
                self.write(taken)
            except BaseException:
                self.adapter.rollback(before, counts=True)
                raise
            self.keep(taken)
            self.tell(taken)
            return taken.answer

    def _replied(self, steps: Generator[Asked, Any, Taken], reply: Callable[[Asked], Any]) -> Taken:
        """Answer what is asked until the batch is over."""
        given = None
        while True:
            try:
                asked = steps.send(given)
            except StopIteration as over:
                taken: Taken = over.value
                return taken
            given = reply(asked)

    def steps(self, images: Tensor | ModelInput, learn: bool | None = None) -> Generator[Asked, Any, Taken]:
        """One batch as a generator: what it yields is to be answered; its value is the batch as it was taken.

        A call answers by its own adapter, and goes on with `write`, `keep` and `tell`. Until `keep` nothing of the
        guard has changed: where something fails before it, the caller sets the adapter back. Inside `holding()`.
        """
        return (yield from self._batch(images, copy.copy(self._held), [], learn))

    def holding(self) -> AbstractContextManager[Any]:
        """A context in which no other thread's call, stop or reset reaches this guard."""
        return self._lock

    def keep(self, taken: Taken) -> None:
        """Remember a batch."""
        self._held, self.signals, self._answered = taken.held, taken.signals, taken.answered

    def tell(self, taken: Taken) -> None:
        """Tell the events of a batch."""
        for event in taken.events:
            self._tell(event)

    def _batch(
        self, images: Tensor | ModelInput, held: GuardState, events: list[Event], learn: bool | None
    ) -> Generator[Asked, Any, Taken]:
        """Ask source and adapter about a batch, update the signals, choose the answer, snapshot or undo."""
        settings, began = self.settings, self._times.read()
        held = replace(held, shift=held.shift.copied(), worse=copy.copy(held.worse))  # both are written into
        off = held.stopped == STOPPED and not learn
        with_source = off or held.batches % settings.every == 0 or held.verdict == "source"
        views = with_source and not off and self._views(images)
        shares, source, source_moved = self._shares and not off, None, None
        if with_source and not shares:
            source, source_moved, unsure = yield AskSource("both" if views else "images")
            events += self._alarm(unsure, held)
        if held.batches == 0 and settings.view == "shift" and _tensor(images).dim() != 4:
            events.append(Event(0, "view", NO_IMAGES))
        allowed, why = may_learn(settings, held, self.adapter)
        learning = allowed if learn is None else learn
        if why not in ("", held.skipped):  # once, however many batches it holds for
            events.append(Event(held.batches, "skip", why))
        held = replace(held, skipped=why)
        if off and source is not None:
            drift: float = yield AskDrift()
            return self._stopped_batch(images, source, held, drift, events)
        seen: AdaptedPass = yield AskAdapted(shifted=False, learning=learning)
        raw, adapted = seen.raw, seen.log_probs
        if with_source and shares:
            source = seen.source
            if source is None:
                source, _, _ = yield AskSource("images")
        if source is None:
            measured, differs = self.signals or no_signals(), math.nan
            answer, verdict, sound = raw, held.verdict, adapted.amax(1).isfinite()
            given: tuple[Verdict, Tensor] = ("adapted", torch.zeros(len(raw), dtype=torch.bool))
            judged, finite = verdict, bool(sound.all())
            if not finite:
                source, _, _ = yield AskSource("images")
                answer = self.adapter.in_model_shape(torch.where(sound[:, None], adapted, source))
        else:
            moved: list[Tensor] = []
            if views:
                again: AdaptedPass = yield AskAdapted(shifted=True, learning=False)
                source_moved = again.source if source_moved is None else source_moved
                if source_moved is None:
                    _, source_moved, _ = yield AskSource("shifted")
                moved = [source_moved, again.log_probs]
            averages = held.averages or Averages.start(source.shape[1], source.device)
            found: tuple[Judgement, BatchNumbers] = yield AskJudgement(averages, (source, adapted, *moved))
            judgement_made, numbers = found
            finite = numbers.finite
            if shares:
                events += self._alarm(numbers.entropies, held)
            judged, measured = verdict_of(settings, numbers.averages, source.shape[1], with_view=views)
            verdict = "source" if held.trial > 0 else judged
            held = replace(held, averages=judgement_made.averages, trial=max(0, held.trial - len(images)))
            held.worse.update(numbers.worse)
            by = judgement_made.answers
            answer, by_source, differs = by.by(verdict), ~by.sound, numbers.differ[verdict]
            if verdict == "source":
                by_source = torch.ones_like(by_source)
            if held.budget is not None:
                answer, by_source, held = self._within_budget(source, answer, by_source, by.mean, held)
                differs = float((source.argmax(1) != answer.argmax(1)).float().mean())
            given = (verdict, by_source)
            answer = self.adapter.in_model_shape(answer)
        selected = seen.selected if learning and self.recipe.learns else 0.0
        gradient = seen.gradient if learning else 0.0
        signals = replace(measured, disagreement=differs, selected=selected, gradient=gradient, drift=seen.drift)
        if verdict != held.verdict:
            why = f"{ANSWERING[verdict]} answers, in the place of {ANSWERING[held.verdict]}"
            events.append(Event(held.batches, "verdict", why, signals.as_dict()))
        held = replace(held, verdict=verdict)
        if settings.max_ms is not None:
            held = self._times.counted(held, began, answer, learning=learning)
        if learning:
            held = yield from act(settings, held, signals, events, judged=judged, finite=finite, updates=seen.updates)
        return Taken(images, answer, replace(held, batches=held.batches + 1), signals, given, events, learning)

    def _stopped_batch(
        self, images: Tensor | ModelInput, source: Tensor, held: GuardState, drift: float, events: list[Event]
    ) -> Taken:
        """The source's answer and nothing else: all but the shift alarm stays as it was when the guard was stopped."""
        answer = self.adapter.in_model_shape(source)
        signals = stopped_signals(drift)
        given: tuple[Verdict, Tensor] = ("source", torch.ones(len(source), dtype=torch.bool))
        return Taken(images, answer, replace(held, batches=held.batches + 1), signals, given, events, learning=False)

    def write(self, taken: Taken) -> None:
        """A batch's line to the audit; that it could not be written is one more of its events."""
        line = {
            "kind": "batch", "batch": taken.held.batches - 1, "count": len(taken.images),
            "images": tensor_hash(*_tensors(taken.images)) if self._told.audit else "", "learn": taken.learning,
            "verdict": taken.held.verdict, "events": [event.kind for event in taken.events],
            "signals": taken.signals.as_dict(), "answer": tensor_hash(taken.answer) if self._told.audit else "",
        }  # fmt: skip
        lost = self._told.write(line, self._held.batches)
        if lost is not None:
            taken.events.append(lost)

    def _alarm(self, values: list[float], held: GuardState) -> list[Event]:
        """The shift alarm with the entropies of the source's answers for one more batch: an event where it rings."""
        if not held.shift.update(values):
            return []
        return [Event(held.batches, "alarm", _shift_text(held.shift))]

    def _views(self, given: Tensor | ModelInput) -> bool:
        """Whether images are looked at shifted too: pictures of some size. What is no batch the source refuses."""
        images = _tensor(given)
        if self.settings.view != "shift" or not isinstance(images, Tensor) or not images.is_floating_point():
            return False
        return images.dim() == 4 and min(images.shape[2:]) >= 8 and min(images.shape) > 0

    def _within_budget(
        self, source: Tensor, answer: Tensor, by_source: Tensor, both: Tensor, held: GuardState
    ) -> tuple[Tensor, Tensor, GuardState]:
        """The answer, the source's where the budget is spent; which rows (B,) the source answers; what is remembered.

        The budget goes to the answers that are likeliest right against the source's, to the mean of both.
        """
        assert held.budget is not None
        rows, own, other = torch.arange(len(source), device=source.device), source.argmax(1), answer.argmax(1)
        chances = both.exp()
        kept, budget = held.budget.grant(own != other, chances[rows, other] - chances[rows, own])
        kept = kept | (own == other)
        return torch.where(kept[:, None], answer, source), by_source | ~kept, replace(held, budget=budget)

    def _frozen_answer(self, images: Tensor | ModelInput) -> Tensor:
        """The answer as things stand; nothing is learnt, and nothing is remembered."""
        held, verdict = self._held, self._held.verdict
        if verdict == "source" or held.budget is not None:  # what a budget grants depends on the order of samples
            return self.adapter.in_model_shape(log_probs_of(self.adapter.source(images)))
        raw, record = self.adapter.answer_with_record(images)
        adapted = log_probs_of(raw)
        shared = record.source_logits if self._shares else None
        source = log_probs_of(self.adapter.source(images) if shared is None else shared)
        if self._views(images):
            adapted = mean_of(adapted, log_probs_of(self.adapter(shifted_input(images))))
        return self.adapter.in_model_shape(answers(source, adapted).by(verdict))

    # The same as an adapter's -----------------------------------------------------------------------------------------

    def source(self, images: Tensor | Mapping[str, Any] | ModelInput | None = None, **keywords: Any) -> Tensor:
        """Logits of the model as it came."""
        return self.adapter.source(images, **keywords)

    def stream(self, loader: Iterable[Any]) -> Iterator[Tensor]:
        """Answers for each batch of a loader of images, or of tuples that begin with images."""
        return self.adapter.stream(loader, call=self)

    @contextmanager
    def frozen(self) -> Iterator[Guard]:
        """Inside, calls of this thread predict with what was learnt, learn nothing and leave the state alone."""
        with self.adapter.frozen():
            yield self

    def stop(self, why: str = "stopped by hand") -> None:
        """The kill switch: from now on the source alone is asked and answers, until `resume`.

        Neither the adapted model nor the shifted view is computed, and of what the guard remembers only the shift alarm
        and the number of batches go on.
        """
        with self._lock:
            self._held = replace(self._held, stopped=STOPPED, verdict="source")
            self._tell(Event(self._held.batches, "stop", why))

    def resume(self) -> None:
        """Learn again after `stop` or a freeze, from the state in which it was then."""
        with self._lock:
            self._held = replace(self._held, stopped="", wait=self.settings.snapshot_every)
            self._tell(Event(self._held.batches, "resume", "by hand"))

    def reset(self) -> None:
        """Bit for bit a fresh guarded adapter; the audit goes on."""
        with self._lock:
            self.adapter.reset()
            self._held, self.signals, self._answered = copy.deepcopy(self._first), None, None
            self._tell(Event(0, "reset", "by hand"))

    def state_dict(self) -> dict[str, Any]:
        """The adapter's state, and the guard's under `guard`."""
        with self._lock:
            return joined(self.adapter.state_dict(), self._held, self.signals)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a guarded state left off, and note it in the audit; one without a guard's part is refused."""
        with self._lock:
            own, held, signals = parted(state, self._first, self.adapter.checkpoint().state)
            self.adapter.load_state_dict(own)
            self._held, self.signals, self._answered = held, signals, None
            header = self.header()
            here = {name: header[name] for name in MACHINE if name in header}
            self._told.write({"kind": "resumed", "batch": held.batches, **here}, held.batches)

    def save(self, path: str | Path) -> None:
        """Write the state to a file, whole or not at all."""
        state_file.save_state(self.state_dict(), Path(path))

    def load(self, path: str | Path) -> None:
        """Go on from a file that `save` wrote."""
        self.load_state_dict(state_file.load_state(Path(path)))

    def unload(self) -> nn.Module:
        """Return the very model that came in, and close the audit."""
        if self._told.audit is not None:
            self._told.audit.close()
        self._judged.release()
        return self.adapter.unload()

    def export(
        self, *, statistics: ExportStatistics = "recipe", stream: Iterable[Any] | Tensor | None = None
    ) -> nn.Module:
        """The adapted network as a plain module, without the guard; `Adapter.export` explains the arguments.

        It answers as the adapted model does, also where the guard answers with the source; a warning says so then.
        """
        if self.verdict != "adapted":
            log.warning(
                "the guard's verdict is %r, so its answers are not the adapted model's, which is what an export has; "
                "compare first: poem.check(guarded.adapter, images, labels)", self.verdict
            )  # fmt: skip
        return self.adapter.export(statistics=statistics, stream=stream)

    def as_module(self) -> nn.Module:
        """The guarded adapter inside a module without parameters."""
        return AsModule(self)

    def prepare(self, source_data: Iterable[Any] | Tensor) -> None:
        """Prepare parts that need source data on these images."""
        self.adapter.prepare(source_data)

    @property
    def verdict(self) -> Verdict:
        """Which answer is given now: "source", "mean" or "adapted"."""
        return self._held.verdict

    @property
    def verdicts(self) -> list[Verdict]:
        """Which answer each image of the last batch got; before the first one there is none.

        The source answers in the verdict's place where the adapted answer is not finite or the budget is spent; the
        adapted model does where the source was not asked.
        """
        if self._answered is None:
            return []
        verdict, by_source = self._answered
        return ["source" if each else verdict for each in by_source.tolist()]

    @property
    def state(self) -> GuardState:
        """All that the guard remembers."""
        return self._held

    @property
    def recipe(self) -> Recipe:
        """The adapter's recipe."""
        return self.adapter.recipe

    @property
    def name(self) -> str:
        """The method's name."""
        return self.adapter.name

    @property
    def model(self) -> nn.Module:
        """The borrowed model."""
        return self.adapter.model

    @property
    def adapted(self) -> list[str]:
        """Names of the tensors that may move."""
        return self.adapter.adapted

    @property
    def last(self) -> BatchRecord:
        """What happened to the batch that was learnt from last."""
        return self.adapter.last

    @property
    def totals(self) -> Totals:
        """The adapter's counts since the last reset by hand; the source's passes are not among them."""
        return self.adapter.totals

    @property
    def preparation(self) -> dict[str, int]:
        """Source images that the adapter's parts were prepared on before the stream."""
        return self.adapter.preparation

    @property
    def lr(self) -> float:
        """The learning rate in force."""
        return self.adapter.lr

    # Events -----------------------------------------------------------------------------------------------------------

    def _tell(self, event: Event) -> None:
        """An event to the list, the log, the audit and the user's function."""
        self._told.tell(event, self._held.batches)

    def note(self, kind: str, **values: Any) -> None:
        """Write a line of the caller's own to the audit, where there is one; a replay passes over it.

        Args:
            kind: Of the line; those that a guard writes itself are refused.
            values: More of the line, as JSON takes it.

        Raises:
            ValueError: A kind that a guard writes.
        """
        if kind in OWN_KINDS:
            raise ValueError(f"expected a kind of line that a guard does not write itself, got {kind!r}; name another")
        with self._lock:
            lost = self._told.write({"kind": kind, **values}, self._held.batches)
            if lost is not None:
                self._tell(lost)

    def header(self) -> dict[str, Any]:
        """The first line of an audit: what a replay must find the same, and where the run is made."""
        state, given, shift = self.adapter.state_dict(), self.adapter.settings, self._first.shift
        reference = tensor_hash(torch.tensor(shift.ranks.values)) if shift.given else None
        return {
            "method": self.name, **self._told.named, "recipe": written(self.recipe), "weights": state["source"],
            "mean": state["mean"], "std": state["std"], "mask": state["mask"], "prepared": state["prepared"],
            "reference": reference, **{name: given[name] for name in ("batch_size", "seed", "precision", "split")},
            "guard": stated(self.settings), "torch": torch.__version__,
            "device": next(self.model.parameters()).device.type, "threads": torch.get_num_threads(),
            "deterministic": torch.are_deterministic_algorithms_enabled(),
            **({"run": self._about} if self._about else {}),
        }  # fmt: skip

    def _source_entropies(self, source_data: Iterable[Any] | Tensor) -> list[float]:
        """Entropies of the source's predictions on source images."""
        batches = source_data.split(64) if isinstance(source_data, Tensor) else source_data
        batches = [batches] if isinstance(batches, Mapping) else batches
        found: list[float] = []
        for item in batches:
            images = item[0] if isinstance(item, tuple | list) else item
            images = moved_input(images, next(self.model.parameters()).device)
            found += entropies(log_probs_of(self.adapter.source(images))).tolist()
        if not found:
            raise ValueError("expected source_data with at least one batch of images, got none")
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Guard:
        """A guard of its own around a copy of the adapter; it has no audit and tells its events to no function."""
        with self._lock:
            twin = Guard(copy.deepcopy(self.adapter, memo), self.settings)
            twin._first, twin._held = copy.deepcopy(self._first), copy.deepcopy(self._held)
            twin.signals = self.signals
        return twin

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Guard borrows its model and is not pickled; use guard.save(path) and guard.load(path)")

    def __repr__(self) -> str:
        return f"<Guard of {self.adapter!r}, answers with the {self.verdict}>"


def guard_adapter(
    adapter: Adapter,
    *,
    source_data: Iterable[Any] | Tensor | None = None,
    on_event: Callable[[Event], object] | None = None,
    audit: str | Path | None = None,
    append: bool = False,
    about: Mapping[str, Any] | None = None,
    **settings: Any,
) -> Guard:
    """Put a guard around an adapter: the source answers beside it, and adapting that does harm is seen and undone.

    Args:
        adapter: What `poem.adapt` returned.
        source_data: Images like those of training, without labels: the shift alarm compares the stream with them.
            Without any it compares with the stream's first `reference` images, and a shift from the start is invisible.
        on_event: Called with every `Event`.
        audit: A new file that gets a JSON line for every batch and event; `poem replay` repeats the run from it.
        append: Go on with the audit of a run that was stopped; `load` the run's state next.
        about: More for the audit's header, as JSON takes it: where images come from, and how they are prepared.
        settings: Fields of `GuardSettings`: `budget` (proof: at most this share of answers differs from the source's),
            `every` (the source answers every k-th batch only), `view` ("shift": look at images moved by a few pixels
            too, and average their answers in; "none": do not), `adapt`
            ("always", or "when shifted": learn only after the shift alarm), `when_worse` ("roll back", "reset",
            "freeze", or "answer": with the source, and nothing else), `ring` and `snapshot_every` (of good states to
            roll back to), `alpha` (the rate of false alarms), `max_updates`, `max_ms` (per batch: learns every k-th),
            `max_distance` (from the source, relative), `name` (of the stream, for log, events and audit).

    Returns:
        An object with the adapter's own call, `frozen`, `reset`, `save` and `load`, and with `events`, `signals`,
        `verdict`, `stop()` and `resume()`.
    """
    known = GuardSettings.__dataclass_fields__
    strange = [name for name in settings if name not in known]
    if strange:
        raise TypeError(f"a guard has no setting {strange[0]!r}; it has {', '.join(known)}")
    return Guard(
        adapter, GuardSettings(**settings), source_data=source_data, on_event=on_event, audit=audit, append=append,
        about=about,
    )  # fmt: skip


def _answers_as_source(recipe: Recipe) -> bool:
    """Whether a method neither adapts nor corrects anything."""
    return not recipe.learns and recipe.statistics == Source() and recipe.readout.correct == Uncorrected()


def _tensor(given: Tensor | ModelInput) -> Tensor:
    """The tensor that the adapter works on."""
    return given.images if isinstance(given, ModelInput) else given


def _tensors(given: Tensor | ModelInput) -> list[Tensor]:
    """Every tensor of the model's arguments."""
    return given.tensors if isinstance(given, ModelInput) else [given]


def _shift_text(shift: ShiftAlarm) -> str:
    """What the shift alarm means, in words."""
    among = "source data" if shift.given else f"the first {shift.reference} images; a shift before them is invisible"
    return f"the source's entropies have shifted after {shift.rang_at} images (compared with {among})"
