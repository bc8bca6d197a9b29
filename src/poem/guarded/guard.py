"""A guarded adapter: the source answers beside it, and decides with it which answer is given.

What it promises comes in three tiers, and each is named as such. **Proof**: with `budget=`, answers differ from the
source's on at most that share of the samples, so accuracy is at most that far below. **Measured**: what `docs/guard.md`
states of the streams that it names, and of no others. **Alarms** ring wrongly at a stated rate at most.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
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
from poem.engine.model_input import ModelInput, read_input
from poem.guarded.alarms import MeanBound, ShiftAlarm
from poem.guarded.asked import Asked
from poem.guarded.audit import MACHINE, Audit, AuditLines, Event
from poem.guarded.batch import BatchSteps, Taken
from poem.guarded.budget import AnswerBudget
from poem.guarded.event_log import EventLog
from poem.guarded.guard_state import STOPPED, GuardState
from poem.guarded.judgement import Verdict, judged_tensors
from poem.guarded.limits import CallTimes
from poem.guarded.replies import Replies, pass_has_source, replied, rows_alone, source_entropies
from poem.guarded.run_header import run_header
from poem.guarded.saved_state import joined, parted
from poem.guarded.settings import GuardSettings
from poem.guarded.signals import Signals
from poem.parts.readout import Uncorrected
from poem.parts.statistics import Source
from poem.recipes.recipe import Recipe

log = logging.getLogger("poem")


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
        _check(adapter, on_event)
        self.adapter, self.settings = adapter, settings
        self._told = EventLog(adapter.name, settings.name, on_event)
        self.events = self._told.events
        """The last thousand events."""
        self.signals: Signals | None = None
        """What was seen at the last batch; None before the first."""
        self._lock = threading.RLock()
        self._answered: tuple[Verdict, Tensor] | None = None  # of the last batch: whose answer, and the source's rows
        self._rows_alone = rows_alone(adapter.model)
        shift = ShiftAlarm(alpha=settings.alpha, reference=settings.reference, seed=settings.seed)
        if source_data is not None:
            shift.compare_with(source_entropies(adapter, source_data))
        budget = None if settings.budget is None else AnswerBudget(settings.budget)
        self._judged = CapturedFunction(partial(judged_tensors, settings.horizon), adapter.settings["fast"])
        shares = self._rows_alone and pass_has_source(adapter.recipe, settings)
        self._batch = BatchSteps(adapter, settings, shares=shares, times=CallTimes(self._judged))
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
                return self._batch.frozen_answer(images, self._held)
        # Outside inference mode: what is remembered must be of use outside it too.
        with self._lock, torch.inference_mode(False), torch.no_grad():
            with self._together():
                replies = Replies(self.adapter, self._judged, images, rows_alone=self._rows_alone)
                taken: Taken = replied(self.steps(images, learn), replies)
                self.write(taken)
                self.keep(taken)
            self.tell(taken)
            return taken.answer

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Adapter and guard change together: after an error or an interrupt inside, both are as they were."""
        before, was = self.adapter.checkpoint(), (self._held, self.signals, self._answered)
        try:
            yield
        except BaseException:
            self.adapter.rollback(before, counts=True)
            self._held, self.signals, self._answered = was
            raise

    def steps(self, images: Tensor | ModelInput, learn: bool | None = None) -> Generator[Asked, Any, Taken]:
        """One batch as a generator: what it yields is to be answered; its value is the batch as it was taken.

        A call answers by its own adapter, and goes on with `write`, `keep` and `tell`. Until `keep` nothing of the
        guard has changed: where something fails before it, the caller sets the adapter back. Inside `holding()`.
        """
        return (yield from self._batch.of(images, self._held, self.signals, learn))

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

    def write(self, taken: Taken) -> None:
        """A batch's line to the audit; that it could not be written is one more of its events."""
        if self._told.audit is None:  # nothing is hashed for it
            return
        lost = self._told.write(taken.audit_line(), self._held.batches)
        if lost is not None:
            taken.events.append(lost)

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
            self._held = replace(self._held, stopped="", wait=self.settings.patience)
            self._tell(Event(self._held.batches, "resume", "by hand"))

    def reset(self) -> None:
        """Bit for bit a fresh guarded adapter; the audit goes on."""
        with self._lock:
            with self._together():
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
            own, held, signals = parted(state, self._first, self.adapter.checkpoint().state, self.settings.ring)
            with self._together():
                self.adapter.load_state_dict(own)
                self._held, self.signals, self._answered = held, signals, None
            header = self.header()
            here = {name: header[name] for name in MACHINE if name in header}
            lost = self._told.write({"kind": "resumed", "batch": held.batches, **here}, held.batches)
            if lost is not None:
                self._tell(lost)

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
        with self._lock:
            self._told.note(kind, values, self._held.batches)

    def header(self) -> dict[str, Any]:
        """The first line of an audit: what a replay must find the same, and where the run is made."""
        return run_header(self.adapter, self.settings, self._first.shift, self._about)

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


def _check(adapter: object, on_event: object) -> None:
    """Refuse what cannot be guarded."""
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


def _answers_as_source(recipe: Recipe) -> bool:
    """Whether a method neither adapts nor corrects anything."""
    return not recipe.learns and recipe.statistics == Source() and recipe.readout.correct == Uncorrected()
