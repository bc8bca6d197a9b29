"""Micro-batches: computed alone or stacked, written to the audit, and answered; late requests, by the source."""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from poem.guarded.audit import tensor_hash
from poem.serve.keeper import Keeper
from poem.serve.learner import Learner, Served, answer_stacked
from poem.serve.problems import Problem, internal
from poem.serve.turns import STACKED, TURNS, Job, Picked, Stream, Turns

log = logging.getLogger("poem")
REFUSALS = (ValueError, TypeError)
"""What an adapter raises for images that it does not take."""


class MicroBatches:
    """Computes and answers what was picked, in the engine's thread.

    Args:
        keeper: The streams; its stack computes several at once.
        turns: Of which fewer images are picked together where a stacked pass fails.
        never: Why streams are not stacked; "" where they are.
    """

    def __init__(self, keeper: Keeper, turns: Turns, never: str) -> None:
        served, settings = keeper.served, keeper.settings
        self._keeper, self._turns, self._stack, self._meter = keeper, turns, keeper.stack, keeper.meter
        self._source = Learner(Served(**{**vars(served), "method": "source", "guard": False}), settings.batch_size)
        self._device = next(served.model.parameters()).device
        self.never = never
        """Why no stream is stacked; "" where they may be."""
        self._less = ""  # why fewer images are stacked than the settings allow
        self.turn_s = self.source_s = 0.0
        """Running means of what a turn and a pass of the source take."""

    def take(self, picked: Picked) -> None:
        """Micro-batches of one or several streams: at once where they can be, else in turn."""
        keep = {id(each) for each, _ in picked}
        ready = [(each, own, learner) for each, own in picked if (learner := self._opened_for(each, own, keep))]
        together = []
        for stream, jobs, learner in ready:
            images = torch.cat([job.images for job in jobs if job.images is not None])
            batch = _Batch(stream, jobs, learner, images)
            together.append((batch, self._why_alone(batch, len(picked))))
        batches = [batch for batch, why in together if not why]
        if len(batches) == 1:
            together = [(batch, why or "no other stream could be stacked") for batch, why in together]
            batches = []
        for batch, why in together:
            if why:
                batch.stream.how, batch.stream.why_alone = TURNS, why
                self._take_alone(batch)
        if batches:
            self._take_stacked(batches)

    def _why_alone(self, batch: _Batch, picked: int) -> str:
        """Why a micro-batch is computed alone, of so many that were picked; "" where it can be stacked."""
        if self.never:
            return self.never
        if picked == 1:
            narrow = 2 * len(batch.images) > self._turns.together
            return (self._less if narrow else "") or "no other stream was waiting"
        try:
            return batch.learner.why_not_stacked(batch.images)
        except Exception as error:  # as where there is no memory to try the model: alone it may go on
            return f"whether it can be stacked could not be tried: {_first_line(error)}"

    def _opened_for(self, stream: Stream, jobs: list[Job], keep: set[int]) -> Learner | None:
        """The stream's learner; None where its state cannot be used, which its requests are told."""
        try:
            return self._keeper.opened(stream, keep)
        except Problem as problem:
            self._keeper.fail(stream, jobs, problem)
            return None

    # Computing --------------------------------------------------------------------------------------------------------

    def _take_alone(self, batch: _Batch) -> None:
        """One stream's micro-batch."""
        began, warm, number = time.monotonic(), batch.learner.batches > 0, batch.learner.batches
        try:
            answers = batch.learner.answer(batch.images.to(self._device))
        except Exception as error:
            if isinstance(error, REFUSALS) and batch.learner.batches == number:
                self._keeper.fail(batch.stream, batch.jobs, Problem(422, "images-refused", str(error)))
                return
            log.exception("stream %s: a batch failed", batch.stream.id)
            self._failed(batch, number, {})
            return
        self._took(time.monotonic() - began, len(batch.images), warm=warm)
        self._hand_over(batch, number, answers, began, {})

    def _take_stacked(self, batches: list[_Batch]) -> None:
        """Micro-batches of several streams at once; one that fails leaves the others as they are.

        A pass that fails as a whole, as for want of memory, has changed no stream: each is taken alone, and fewer
        images are stacked from then on.
        """
        assert self._stack is not None
        began, numbers = time.monotonic(), [batch.learner.batches for batch in batches]
        found, why = list[list[dict[str, Any]] | Exception](), ""
        try:
            found = answer_stacked(
                self._stack, [batch.learner for batch in batches], [batch.images for batch in batches]
            )
        except Exception as error:
            log.exception("%d streams: a stacked batch failed; each is taken alone", len(batches))
            why = self._stack_fewer(sum(len(batch.images) for batch in batches), error)
        if why:  # outside the handler, which holds the failed pass's tensors
            for batch in batches:
                batch.stream.how, batch.stream.why_alone = TURNS, why
                self._take_alone(batch)
            return
        self._took(time.monotonic() - began, sum(len(batch.images) for batch in batches), warm=True)
        for row, (batch, number, answers) in enumerate(zip(batches, numbers, found, strict=True)):
            batch.stream.how, batch.stream.why_alone = STACKED, ""
            how = {"stacked": {"streams": len(batches), "row": row}}
            if isinstance(answers, REFUSALS) and batch.learner.batches == number:
                self._keeper.fail(batch.stream, batch.jobs, Problem(422, "images-refused", str(answers)))
            elif isinstance(answers, Exception):
                log.error("stream %s: a batch failed", batch.stream.id, exc_info=answers)
                self._failed(batch, number, how)
            else:
                self._hand_over(batch, number, answers, began, how)

    def _failed(self, batch: _Batch, number: int, how: dict[str, Any]) -> None:
        """Refuse a micro-batch that failed; what was learnt from it all the same is noted, and to be saved."""
        learnt = batch.learner.batches > number
        if learnt:
            self._note(batch, number, how)
            with self._keeper.changed:
                batch.stream.unsaved += 1
                batch.stream.dirty = True
        self._keeper.fail(batch.stream, batch.jobs, internal(learnt=learnt))

    def _stack_fewer(self, images: int, error: Exception) -> str:
        """Allow half as many images in a stacked pass as in one that failed, or no such pass; says so."""
        fewer = images // 2
        failed = f"a stacked pass of {images} images failed: {_first_line(error)}"
        if fewer < 2:
            self.never = why = f"{failed}; streams take turns from then on"
            self._keeper.stack = None
        else:
            self._less = why = f"{failed}; at most {fewer} are stacked from then on"
        with self._keeper.changed:
            self._turns.together = fewer if fewer >= 2 else 0
        return why

    def _took(self, seconds: float, images: int, *, warm: bool) -> None:
        """Note what a turn took."""
        if warm:
            self.turn_s = _averaged(self.turn_s, seconds)
        self._meter.batch(images, seconds)

    # Answering --------------------------------------------------------------------------------------------------------

    def _hand_over(
        self, batch: _Batch, number: int, answers: list[dict[str, Any]], began: float, how: dict[str, Any]
    ) -> None:
        """Write a micro-batch's requests to the audit, and answer them; an error is that of this stream alone."""
        stream = batch.stream
        try:
            self._answer_jobs(batch, number, answers, began, how)
        except Exception:
            log.exception("stream %s: its answers could not be handed over", stream.id)
            stream.dirty = True
            self._keeper.fail(stream, batch.jobs, internal(learnt=True))
        if stream.unsaved >= self._keeper.settings.snapshot_every or not stream.stored:
            self._keeper.snapshot(stream)

    def _answer_jobs(
        self, batch: _Batch, number: int, answers: list[dict[str, Any]], began: float, how: dict[str, Any]
    ) -> None:
        stream, learner = batch.stream, batch.learner
        self._note(batch, number, how)
        with self._keeper.changed:
            stream.unsaved += 1
            stream.dirty = True
            stream.info = learner.status()
            at = 0
            for job in batch.jobs:
                assert job.images is not None
                own = answers[at : at + len(job.images)]
                at += len(job.images)
                self._meter.waited(began - job.arrived)
                self._finish(stream, job, {"batch": number, "late": False, "answers": own})

    def _note(self, batch: _Batch, number: int, how: dict[str, Any]) -> None:
        """Write the requests of a micro-batch to the audit: a replay needs the images of each that was learnt from."""
        requests = [{"request": job.request, "count": len(job.images)} for job in batch.jobs if job.images is not None]
        batch.learner.note("requests", batch=number, requests=requests, **how)

    def answer_late(self, stream: Stream, job: Job) -> None:
        """The source's answer for a request that would otherwise be late; nothing is learnt from it."""
        assert job.images is not None
        began = time.monotonic()
        try:
            images = job.images.to(self._device)
            answers, answer = self._source.source(images)
        except REFUSALS as error:
            self._keeper.fail(stream, [job], Problem(422, "images-refused", str(error)))
            return
        except Exception:
            log.exception("stream %s: the source's answer failed", stream.id)
            self._keeper.fail(stream, [job], internal())
            return
        self.source_s = _averaged(self.source_s, time.monotonic() - began)
        self.turn_s *= 0.98  # so that a slow time is forgotten where every request is late
        learner = self._opened_for(stream, [job], set())
        if learner is None:
            return
        learner.note(
            "late", batch=learner.batches, request=job.request, count=len(images), images=tensor_hash(images),
            answer=answer,
        )  # fmt: skip
        with self._keeper.changed:
            stream.counts["late"] += 1
            stream.dirty = True
            self._finish(stream, job, {"batch": learner.batches, "late": True, "answers": answers})

    def _finish(self, stream: Stream, job: Job, reply: dict[str, Any]) -> None:
        """Hand over a reply, keep it under its key, and count it; the lock is held."""
        answers, took = reply["answers"], 1000 * (time.monotonic() - (job.arrived if job.began is None else job.began))
        stream.counts["requests"] += 1
        stream.counts["images"] += len(answers)
        stream.average("latency_ms", took)
        stream.average("answer_entropy", sum(each["entropy"] for each in answers) / len(answers))
        for by, count in Counter("late" if reply["late"] else each["answered_by"] for each in answers).items():
            self._meter.answered(by, count)
        whole = {"stream": stream.id, "request": job.request, **reply, "ms": round(took, 3)}
        if job.key is not None and stream.ledger is not None:
            stream.ledger.complete(job.key, whole, time.time())
        job.succeed(whole)


@dataclass(frozen=True)
class _Batch:
    """One stream's micro-batch."""

    stream: Stream
    jobs: list[Job]
    learner: Learner
    images: Tensor


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def _averaged(mean: float, value: float) -> float:
    return value if mean == 0 else 0.8 * mean + 0.2 * value
