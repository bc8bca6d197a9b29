"""The steps of one batch: from its images to the answer, and to what the guard remembers after it.

`BatchSteps.of` is the whole of it. What needs a network is asked for (`asked.py`). Whether the batch is learnt from is
decided in `limits.py`, which answer is given in `verdict.py`, and what is kept or taken back in `actions.py`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Generator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from poem.adapter import Adapter
from poem.engine.model_input import ModelInput
from poem.guarded.actions import act
from poem.guarded.asked import AdaptedPass, AskAdapted, AskDrift, Asked, AskJudgement, AskSource, log_probs_of
from poem.guarded.audit import Event, tensor_hash
from poem.guarded.budget import granted_rows
from poem.guarded.guard_state import STOPPED, GuardState
from poem.guarded.judgement import BatchNumbers, Judgement, Verdict, answers, mean_of
from poem.guarded.limits import CallTimes, may_learn
from poem.guarded.replies import shifted_input
from poem.guarded.settings import GuardSettings
from poem.guarded.signals import Averages, Signals, no_signals, stopped_signals
from poem.guarded.verdict import verdict_of

ANSWERING: dict[Verdict, str] = {"source": "the source", "mean": "the mean of both", "adapted": "the adapted model"}
"""Who answers, by verdict, in words."""
NO_IMAGES = (
    "the input is no batch of images (batch, channels, height, width), so it is not looked at shifted (view='none'): "
    "the verdict rests on the balance of the answers alone"
)
Images: TypeAlias = Tensor | ModelInput


@dataclass(frozen=True)
class Taken:
    """A batch that a guard has taken, before it is the guard's."""

    images: Images
    answer: Tensor
    held: GuardState
    """What the guard remembers after it."""
    signals: Signals
    answered: tuple[Verdict, Tensor]
    """Whose answer it is, and which rows (B,) the source answers."""
    events: list[Event]
    learning: bool

    def audit_line(self) -> dict[str, Any]:
        """The batch's line in an audit, with hashes of images and answer."""
        images = self.images.tensors if isinstance(self.images, ModelInput) else [self.images]
        return {
            "kind": "batch", "batch": self.held.batches - 1, "count": len(self.images),
            "images": tensor_hash(*images), "learn": self.learning,
            "verdict": self.held.verdict, "events": [event.kind for event in self.events],
            "signals": self.signals.as_dict(), "answer": tensor_hash(self.answer),
        }  # fmt: skip


class Plan(NamedTuple):
    """What a batch asks for, known before anything is computed."""

    stopped: bool
    """By hand: the source answers, and nothing else is asked."""
    with_source: bool
    """Whether the source answers this batch, and both are compared."""
    views: bool
    """Whether both look at the images shifted too."""
    shares: bool
    """Whether the adapted model's own pass has the source's answers."""


class SourcePair(NamedTuple):
    """The source's log-probabilities (B, C), each None where they are not known yet."""

    images: Tensor | None = None
    shifted: Tensor | None = None


class Choice(NamedTuple):
    """The answer to a batch, and what it was chosen by."""

    answer: Tensor
    """As the model would give it."""
    verdict: Verdict
    """In force after the batch."""
    answered: tuple[Verdict, Tensor]
    """Whose answer it is, and which rows (B,) the source answers."""
    judged: Verdict
    """What the signals say, also where the source answers for another reason."""
    finite: bool
    """Whether all adapted answers are."""
    measured: Signals
    differ: float
    """Share of answers that differ from the source's; NaN where the source was not asked."""


class BatchSteps:
    """How a guard takes a batch. Holds what is the same for all of them; what changes is passed in and returned.

    Args:
        adapter: The guard's.
        settings: The guard's.
        shares: Whether the adapter's own pass has the source's answers.
        times: Of the guard's calls.
    """

    def __init__(self, adapter: Adapter, settings: GuardSettings, *, shares: bool, times: CallTimes) -> None:
        self._adapter, self._settings, self._shares, self._times = adapter, settings, shares, times

    def of(
        self, images: Images, held: GuardState, last: Signals | None, learn: bool | None
    ) -> Generator[Asked, Any, Taken]:
        """Take one batch: a generator of what is asked for, whose value is the batch as it was taken.

        The source answers first, then the adapted model, which may learn. Both are judged, one answer is chosen, and
        what was learnt is kept or taken back.

        Args:
            images: The batch.
            held: What the guard remembers; it stays as it is.
            last: Signals of the batch before.
            learn: A recorded decision to repeat; None to make one.
        """
        began, events = self._times.read(), list[Event]()
        plan = self._plan(images, held, learn)
        held = replace(held, shift=held.shift.copied(), worse=copy.copy(held.worse))  # both are written into
        source = yield from self._ask_source_first(plan, held, events)
        events += self._not_images(images, held)
        learning, held = self._decide_learning(held, learn, events)
        if plan.stopped:
            return (yield from self._take_stopped(images, source, held, events))
        seen: AdaptedPass = yield AskAdapted(shifted=False, learning=learning)
        if plan.with_source:
            choice, held = yield from self._compare(plan, len(images), source, seen, held, events)
        else:
            choice = yield from self._answer_alone(seen, held, last)
        signals = self._signals(choice, seen, learning=learning)
        if choice.verdict != held.verdict:
            why = f"{ANSWERING[choice.verdict]} answers, in the place of {ANSWERING[held.verdict]}"
            events.append(Event(held.batches, "verdict", why, signals.as_dict()))
        held = replace(held, verdict=choice.verdict)
        if self._settings.max_ms is not None:
            held = self._times.counted(held, began, choice.answer, learning=learning)
        if learning:
            held = yield from act(
                self._settings, held, signals, events,
                judged=choice.judged, finite=choice.finite, updates=seen.updates, count=len(images),
            )  # fmt: skip
        held = replace(held, batches=held.batches + 1)
        return Taken(images, choice.answer, held, signals, choice.answered, events, learning)

    def frozen_answer(self, images: Images, held: GuardState) -> Tensor:
        """The answer as things stand; nothing is learnt, and nothing is remembered."""
        adapter = self._adapter
        if held.verdict == "source" or held.budget is not None:  # what a budget grants depends on the order of samples
            return adapter.in_model_shape(log_probs_of(adapter.source(images)))
        raw, record = adapter.answer_with_record(images)
        adapted = log_probs_of(raw)
        shared = record.source_logits if self._shares else None
        source = log_probs_of(adapter.source(images) if shared is None else shared)
        if self._looks_shifted(images):
            adapted = mean_of(adapted, log_probs_of(adapter(shifted_input(images))))
        return adapter.in_model_shape(answers(source, adapted).by(held.verdict))

    # Before anything is learnt ----------------------------------------------------------------------------------------

    def _plan(self, images: Images, held: GuardState, learn: bool | None) -> Plan:
        """What is asked for: all but the adapted answers depends on the settings and on who answers now."""
        stopped = held.stopped == STOPPED and not learn
        with_source = stopped or held.batches % self._settings.every == 0 or held.verdict == "source"
        views = with_source and not stopped and self._looks_shifted(images)
        return Plan(stopped, with_source, views, self._shares and not stopped)

    def _ask_source_first(self, plan: Plan, held: GuardState, events: list[Event]) -> Generator[Asked, Any, SourcePair]:
        """The source's answers, where they do not come with the adapted ones; the shift alarm sees them."""
        if not plan.with_source or plan.shares:
            return SourcePair()
        source, shifted, entropies = yield AskSource("both" if plan.views else "images")
        events += _alarm(held, entropies)
        return SourcePair(source, shifted)

    def _not_images(self, images: Images, held: GuardState) -> list[Event]:
        """An event of the first batch where it cannot be looked at shifted; what is no tensor the adapter refuses."""
        if held.batches > 0 or self._settings.view != "shift":
            return []
        given = _tensor(images)
        return [Event(0, "view", NO_IMAGES)] if isinstance(given, Tensor) and given.dim() != 4 else []

    def _decide_learning(self, held: GuardState, learn: bool | None, events: list[Event]) -> tuple[bool, GuardState]:
        """Whether the batch is learnt from; a reason against it is an event once, however many batches it holds for."""
        allowed, why = may_learn(self._settings, held, self._adapter)
        if why not in ("", held.skipped):
            events.append(Event(held.batches, "skip", why))
        return allowed if learn is None else learn, replace(held, skipped=why)

    def _take_stopped(
        self, images: Images, source: SourcePair, held: GuardState, events: list[Event]
    ) -> Generator[Asked, Any, Taken]:
        """The source's answer and nothing else: all but the shift alarm stays as it was when the guard was stopped."""
        assert source.images is not None
        drift: float = yield AskDrift()
        answer = self._adapter.in_model_shape(source.images)
        answered: tuple[Verdict, Tensor] = ("source", torch.ones(len(source.images), dtype=torch.bool))
        held = replace(held, batches=held.batches + 1)
        return Taken(images, answer, held, stopped_signals(drift), answered, events, learning=False)

    # The answer -------------------------------------------------------------------------------------------------------

    def _compare(
        self, plan: Plan, count: int, source: SourcePair, seen: AdaptedPass, held: GuardState, events: list[Event]
    ) -> Generator[Asked, Any, tuple[Choice, GuardState]]:
        """Judge both answers, and choose by the verdict; `count` is of the images."""
        own, *moved = yield from self._ask_rest(plan, source, seen)
        averages = held.averages or Averages.start(own.shape[1], own.device)
        reply: tuple[Judgement, BatchNumbers] = yield AskJudgement(averages, (own, seen.log_probs, *moved))
        judgement, numbers = reply
        if plan.shares:
            events += _alarm(held, numbers.entropies)
        held.worse.update(numbers.worse)
        judged, measured = verdict_of(self._settings, numbers.averages, own.shape[1], with_view=plan.views)
        verdict: Verdict = "source" if held.trial > 0 else judged
        held = replace(held, averages=judgement.averages, trial=max(0, held.trial - count))
        possible, differ = judgement.answers, numbers.differ[verdict]
        answer, by_source = possible.by(verdict), ~possible.sound
        if verdict == "source":
            by_source = torch.ones_like(by_source)
        if held.budget is not None:
            kept, budget = granted_rows(held.budget, own, answer, possible.mean)
            held = replace(held, budget=budget)
            answer, by_source = torch.where(kept[:, None], answer, own), by_source | ~kept
            differ = float((own.argmax(1) != answer.argmax(1)).float().mean())
        answer = self._adapter.in_model_shape(answer)
        return Choice(answer, verdict, (verdict, by_source), judged, numbers.finite, measured, differ), held

    def _ask_rest(self, plan: Plan, source: SourcePair, seen: AdaptedPass) -> Generator[Asked, Any, tuple[Tensor, ...]]:
        """The source's log-probabilities; where images are looked at shifted, also those of both for the shifted ones.

        What the adapted model's pass has of the source is taken from there; what neither has is asked for.
        """
        own, shifted = source
        if plan.shares:
            own = seen.source
        if own is None:
            own, _, _ = yield AskSource("images")
        if not plan.views:
            return (own,)
        again: AdaptedPass = yield AskAdapted(shifted=True, learning=False)
        if shifted is None:
            shifted = again.source
        if shifted is None:
            _, shifted, _ = yield AskSource("shifted")
        return own, shifted, again.log_probs

    def _answer_alone(self, seen: AdaptedPass, held: GuardState, last: Signals | None) -> Generator[Asked, Any, Choice]:
        """The adapted answer, where the source is not asked about this batch but for rows that are not finite."""
        answer, sound = seen.raw, seen.log_probs.amax(1).isfinite()
        finite, by_source = bool(sound.all()), torch.zeros(len(sound), dtype=torch.bool)
        if not finite:
            source, _, _ = yield AskSource("images")
            answer = self._adapter.in_model_shape(torch.where(sound[:, None], seen.log_probs, source))
            by_source = ~sound
        verdict = held.verdict
        return Choice(answer, verdict, ("adapted", by_source), verdict, finite, last or no_signals(), math.nan)

    def _signals(self, choice: Choice, seen: AdaptedPass, *, learning: bool) -> Signals:
        """The signals of the batch: what the verdict was made of, and what was learnt."""
        selected = seen.selected if learning and self._adapter.recipe.learns else 0.0
        gradient = seen.gradient if learning else 0.0
        return replace(
            choice.measured, disagreement=choice.differ, selected=selected, gradient=gradient, drift=seen.drift
        )

    def _looks_shifted(self, given: Images) -> bool:
        """Whether images are looked at shifted too: pictures of some size. What is no batch the source refuses."""
        images = _tensor(given)
        if self._settings.view != "shift" or not isinstance(images, Tensor) or not images.is_floating_point():
            return False
        return images.dim() == 4 and min(images.shape[2:]) >= 8 and min(images.shape) > 0


def _tensor(given: Images) -> Tensor:
    """The tensor that the adapter works on."""
    return given.images if isinstance(given, ModelInput) else given


def _alarm(held: GuardState, entropies: list[float]) -> list[Event]:
    """The shift alarm with the entropies of the source's answers for one more batch: an event where it rings."""
    shift = held.shift
    if not shift.update(entropies):
        return []
    among = "source data" if shift.given else f"the first {shift.reference} images; a shift before them is invisible"
    why = f"the source's entropies have shifted after {shift.rang_at} images (compared with {among})"
    return [Event(held.batches, "alarm", why)]
