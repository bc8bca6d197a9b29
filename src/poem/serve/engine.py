"""The engine of a service: one guarded adapter, one bounded queue and one writer per stream; no HTTP.

One thread computes, because all streams share one model: it is every stream's only writer, so a stream's requests are
answered in the order in which they came. Micro-batches are made within a stream alone; those of several streams are
computed at once where they can be (`poem.serve.stack`), and else in turn. A request that would be late is
answered by the source, which is marked and is not learnt from. Each stream's audit says which requests made each
micro-batch, and which were late, so that every answer can be computed again (`poem.serve.replay`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from poem._util.malloc import return_freed_memory
from poem._util.state_file import state_bytes
from poem.adapter import Adapter
from poem.guarded.audit import Event, tensor_hash
from poem.guarded.guard import Guard
from poem.serve.learner import Learner, Served, answer_stacked
from poem.serve.ledger import Ledger
from poem.serve.meter import Meter
from poem.serve.problems import Problem
from poem.serve.settings import ServeSettings, check_stream_id
from poem.serve.stack import Stack
from poem.serve.store import Lost, Store, folder_name
from poem.serve.turns import STACKED, TURNS, Job, Picked, Stream, Turns
from poem.streams.loading.prepare import Prepare

log = logging.getLogger("poem")
COMMANDS = ("reset", "export", "import", "delete")
REFUSALS = (ValueError, TypeError)
"""What an adapter raises for images that it does not take."""
TRIM_S = 60.0
"""Seconds between two times at which freed memory is returned to the operating system."""
BROKEN_STATE = (ValueError, TypeError, KeyError, AttributeError, IndexError, RuntimeError, OverflowError)
"""What a state may raise that was not written by a service of this kind."""


class StreamEngine:
    """Streams of one model.

    Args:
        served: The model and how each stream adapts it.
        settings: Sizes, limits and times.
        folder: For snapshots and audits; what a service left there goes on.
        meter: Is told what happens.
        writer: A name of this engine alone, where several share the folder: a stream that is asked for here is taken
            over from the engine that has it, as of its last snapshot, and each stream has one writer at a time.

    Raises:
        ValueError: The folder is of another model, method or settings.
        OSError: It cannot be used.
    """

    def __init__(
        self, served: Served, settings: ServeSettings, folder: Path, meter: Meter | None = None,
        writer: str | None = None,
    ) -> None:  # fmt: skip
        self.served, self.settings, self.meter = served, settings, meter or Meter()
        self._source = Learner(Served(**{**vars(served), "method": "source", "guard": False}), settings.batch_size)
        self._store = Store(Path(folder), served.facts(settings.batch_size), writer)
        self._stack = Stack(self._like()) if settings.stack else None
        self._never = "stacking is off" if self._stack is None else self._stack.why_never
        self._less = ""  # why fewer images are stacked than the settings allow
        self._turns = Turns(
            settings.batch_size, settings.wait_ms / 1000, together=0 if self._never else settings.stack_images,
            streams=settings.live,
        )  # fmt: skip
        self._device = next(served.model.parameters()).device
        self._changed = threading.Condition()
        found = {} if self._store.shared else self._store.known()  # shared: each is known when it is asked for
        self._streams = {name: self._revived(name, about) for name, about in found.items()}
        self._trimmed, self._worked = time.monotonic(), False  # when memory was returned; whether any was used since
        self._looked = 0.0  # when other services' questions were looked for
        self._turn_s = self._source_s = 0.0  # running means of what a turn and a pass of the source take
        self._closing = False
        self._started = time.time()
        self._thread = threading.Thread(target=self._run, name="poem-engine", daemon=True)
        self._thread.start()

    def _like(self) -> Adapter | Guard:
        """An adapter as every stream has one."""
        made = Learner(self.served, self.settings.batch_size)
        made.close()
        return made.adapter

    # Requests ---------------------------------------------------------------------------------------------------------

    def submit(
        self,
        stream: str,
        images: Tensor,
        *,
        deadline_ms: float | None = None,
        key: str | None = None,
        payload: str = "",
    ) -> Future[dict[str, Any]]:
        """Put images at the end of a stream's queue; a stream that is not there is made.

        Args:
            stream: Its id.
            images: (B, C, H, W) from 0 to 1.
            deadline_ms: From now; by default that of the settings.
            key: An idempotency key as `scoped_key` makes it.
            payload: Hash of the request, to tell whether a key comes with the same.

        Returns:
            The reply, a dictionary; `replayed` is set where the key was answered before.

        Raises:
            Problem: A full queue (429), too many streams (429), too many images (413), a key in flight (409) or reused
                (422), a service that ends (503).
        """
        check_stream_id(stream)
        if not 1 <= len(images) <= self.settings.batch_size:
            raise Problem(
                413, "too-many-images",
                f"expected 1 to {self.settings.batch_size} images in a request, got {len(images)}; send several",
            )  # fmt: skip
        now, limit = time.monotonic(), self.settings.deadline_ms if deadline_ms is None else deadline_ms
        deadline = None if limit is None else now + limit / 1000
        self._own(stream)
        with self._changed:
            self._check_open()
            found = self._stream(stream)
            if key is not None:
                known = self._ledger(found).claim(key, payload, time.time())
                if known is not None:
                    found.counts["replayed"] += 1
                    self.meter.replayed()
                    done: Future[dict[str, Any]] = Future()
                    done.set_result({**known, "replayed": True})
                    return done
            try:
                self._check_room(found)
            except Problem:
                if key is not None:
                    self._ledger(found).release(key)
                raise
            job = Job(uuid.uuid4().hex, now, images=images, deadline=deadline, key=key)
            self._turns.add(found, job)
            self._changed.notify()
            return job.future

    def check_room(self, stream: str) -> None:
        """Raise what `submit` would for a full queue, before a request's images are decoded."""
        with self._changed:
            self._check_open()
            found = self._streams.get(stream)
            if found is not None:
                self._check_room(found)

    def command(self, stream: str, command: str, value: Any = None) -> Future[Any]:
        """Put a command into a stream's queue: it is carried out after what came before it.

        `reset`: as a fresh stream. `export`: the state as bytes. `import`: go on from a state, a dictionary; makes the
        stream. `delete`: forget the stream and its state.

        Raises:
            Problem: No such stream (404), a full queue (429), a service that ends (503).
        """
        if command not in COMMANDS:
            raise ValueError(f"expected a command {', '.join(COMMANDS)}, got {command!r}")
        check_stream_id(stream)
        if command == "import" or self._known(stream):
            self._own(stream)
        with self._changed:
            self._check_open()
            if command != "import" and stream not in self._streams:
                raise _unknown(stream)
            found = self._stream(stream)
            self._check_room(found)
            job = Job(uuid.uuid4().hex, time.monotonic(), command=command, value=value)
            self._turns.add(found, job)
            self._changed.notify()
            return job.future

    def status(self, stream: str) -> dict[str, Any]:
        """What is known of a stream, as it is between two batches.

        Raises:
            Problem: No such stream (404).
        """
        check_stream_id(stream)
        with self._changed:
            found = self._streams.get(stream)
            if found is None and self._known(stream):
                found = self._revived(stream, self._store.about(stream))  # shared, and not in use here
            if found is None:
                raise _unknown(stream)
            return self._status(found)

    def streams(self) -> list[dict[str, Any]]:
        """The status of every stream, those in use first."""
        with self._changed:
            found = sorted(self._streams.values(), key=lambda each: -each.used)
            return [self._status(each) for each in found]

    def summary(self) -> dict[str, Any]:
        """What is known of the service."""
        with self._changed:
            live = sum(each.learner is not None for each in self._streams.values())
            side = self.served.prepare.crop
            return {
                "input": [3, side, side] if side else None, "batch_size": self.settings.batch_size,
                "base": self.served.base, "method": self.served.method or "auto", "guarded": self.served.guarded,
                "how": TURNS if self._never else STACKED, "why_alone": self._never,
                "streams": len(self._streams), "live": live, "waiting": self._turns.waiting,
                "up_s": round(time.time() - self._started, 1), "ready": self.ready,
            }  # fmt: skip

    def refresh(self) -> None:
        """Nothing to do: the meter of this engine is told at once."""

    @property
    def prepare(self) -> Prepare:
        """How image files become the model's input."""
        return self.served.prepare

    @property
    def closing(self) -> bool:
        """Whether the service ends."""
        return self._closing

    @property
    def ready(self) -> bool:
        """Whether requests are taken: not while the service ends, nor after its thread has died."""
        return not self._closing and self._thread.is_alive()

    def close(self, timeout_s: float = 60.0) -> bool:
        """Answer what is queued, save every stream, and end; says whether all of it was done in time."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and not any(each.dirty for each in list(self._streams.values()))

    # Where several engines share the folder ---------------------------------------------------------------------------

    def stored(self) -> list[dict[str, Any]]:
        """The status of every stream that has a snapshot, as that says."""
        return [self._status(self._revived(name, about)) for name, about in self._store.known().items()]

    def _known(self, name: str) -> bool:
        """Whether there is such a stream, here or on disk."""
        return name in self._streams or (self._store.shared and self._store.has(name))

    def _own(self, name: str) -> None:
        """Become the stream's writer; what was known of it here, before it was another's, is forgotten."""
        if not self._store.shared:
            return
        self._check_open()
        number = self._store.take(name)
        with self._changed:
            found = self._streams.get(name)
            if found is None and self._store.has(name):
                found = self._streams[name] = self._revived(name, self._store.about(name))
                found.number = number
            elif found is not None and found.number != number:
                about = self._store.about(name)
                info = about.get("info")
                self._forget_keys(found)
                if found.ledger is not None:
                    found.ledger.load_plain(about.get("keys"))
                    self._answer_known(found, found.ledger)
                found.number, found.stored = number, bool(about)
                found.info = info if isinstance(info, dict) else {}

    def _gone(self, stream: Stream, jobs: list[Job]) -> bool:
        """Whether another engine has become the stream's writer; its requests are then told so."""
        lost = self._lost(stream)
        if lost:
            self._fail(stream, jobs, _moved())
        return lost

    def _lost(self, stream: Stream) -> bool:
        """Whether another engine has become the stream's writer; a learner of before that is let go of, unsaved."""
        if not self._store.shared:
            return False
        held = self._store.held(stream.id)
        if not held or (stream.learner is not None and stream.opened != stream.number):
            with self._changed:
                self._drop(stream)
                stream.dirty, stream.unsaved = False, 0
                if not held and not stream.jobs:
                    self._streams.pop(stream.id, None)
        return not held

    def _release_asked(self, now: float) -> None:
        """Save the streams that other engines ask for, and let go of them."""
        if now - self._looked < 0.02:
            return
        self._looked = now
        for name in self._store.asked():
            try:
                self._release(name)
            except Exception:
                log.exception("a stream that another engine asks for could not be released: %s", name)

    def _release(self, name: str) -> None:
        """Save the stream of a folder, and let go of it."""
        stream = next((each for each in list(self._streams.values()) if folder_name(each.id) == name), None)
        if stream is None:
            self._store.let_go(name)
            return
        self._put_away(stream)
        if stream.learner is None:  # else it could not be saved: whoever asks will not wait
            self._store.release(stream.id)
            with self._changed:
                self._forget_keys(stream)
                stream.number = 0
                if not stream.jobs:
                    self._streams.pop(stream.id, None)

    def _answer_known(self, stream: Stream, ledger: Ledger) -> None:
        """Answer the requests that wait here and were sent again to another engine, which has answered them."""
        for job in [each for each in stream.jobs if each.key is not None]:
            known = ledger.reply(job.key or "")
            if known is not None:
                job.taken = True
                stream.jobs.remove(job)
                stream.counts["replayed"] += 1
                self.meter.replayed()
                job.succeed({**known, "replayed": True})

    def _forget_keys(self, stream: Stream) -> None:
        """Forget the answers, which the next writer may add to; keys of requests that wait stay claimed."""
        waiting = {job.key for job in stream.jobs if job.key is not None}
        if stream.ledger is not None and waiting:
            stream.ledger.keep_claims(waiting)
        else:
            stream.ledger = None

    # What the callers' threads share ----------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if not self.ready:
            raise Problem(503, "draining", "the service is ending and takes no more requests", retry_after=5)

    def _check_room(self, stream: Stream) -> None:
        """Refuse one more request for a stream whose queue is full."""
        if len(stream.jobs) >= self.settings.queue:
            stream.counts["rejected"] += 1
            self.meter.rejected()
            busy = max(1, sum(bool(each.jobs) for each in self._streams.values()))
            raise Problem(
                429, "queue-full",
                f"expected fewer than {self.settings.queue} requests waiting in this stream; send them more slowly",
                retry_after=max(1, math.ceil(self._turn_s * busy)),
            )  # fmt: skip

    def _stream(self, name: str) -> Stream:
        """The stream of that id, made where there is none."""
        found = self._streams.get(name)
        if found is None:
            if len(self._streams) >= self.settings.max_streams:
                raise Problem(
                    429, "too-many-streams",
                    f"expected at most {self.settings.max_streams} streams, which there are; delete one first",
                    retry_after=60,
                )  # fmt: skip
            found = self._streams[name] = Stream(name, time.monotonic())
            found.number = self._store.number(name)
        found.used = time.monotonic()
        return found

    def _ledger(self, stream: Stream) -> Ledger:
        """The stream's idempotency keys, from its snapshot where they are not in memory."""
        if stream.ledger is None:
            stream.ledger = Ledger(self.settings.keys, self.settings.key_expiry_s, self.settings.key_bytes)
            if stream.stored:
                stream.ledger.load_plain(self._store.about(stream.id).get("keys"))
        return stream.ledger

    def _revived(self, name: str, about: dict[str, Any]) -> Stream:
        """A stream that is on disk."""
        info = about.get("info")
        return Stream(name, time.monotonic(), stored=True, info=info if isinstance(info, dict) else {})

    def _status(self, stream: Stream) -> dict[str, Any]:
        return {
            "stream": stream.id, "how": stream.how, "why_alone": stream.why_alone,
            "live": stream.learner is not None, "waiting": len(stream.jobs),
            **stream.info, **stream.counts, **stream.measured, "unsaved_batches": stream.unsaved,
            "audit": stream.audit, "idle_s": round(time.monotonic() - stream.used, 1),
        }  # fmt: skip

    # The thread that computes -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Turn after turn, until the service ends and nothing waits."""
        try:
            while self._step():
                pass
            for stream in list(self._streams.values()):
                try:
                    self._put_away(stream)
                except Exception:
                    log.exception("stream %s: it could not be put away at the end", stream.id)
        finally:
            self._store.close()

    def _step(self) -> bool:
        """Wait for work and do it; says whether there may be more."""
        if self._store.shared:
            self._release_asked(time.monotonic())
        self._return_memory(time.monotonic())
        with self._changed:
            now = time.monotonic()
            ahead = self._turn_s + self._source_s
            late = self._turns.late(now, ahead)
            picked: Picked = [] if late else self._turns.pick(now, at_once=self._closing)
            idle = [] if late or picked else self._idle(now)
            if not (late or picked or idle):
                if self._closing and not self._turns.waiting:
                    return False
                due = self._turns.next_time(ahead)
                longest = 0.05 if self._store.shared else 1.0
                self._changed.wait(longest if due is None else min(longest, max(0.0005, due - now)))
                return True
        self._worked = True
        try:
            if late is not None and not self._gone(late[0], [late[1]]):
                self._answer_late(*late)
            elif late is None:
                mine = [(stream, jobs) for stream, jobs in picked if not self._gone(stream, jobs)]
                if mine:
                    self._take_turns(mine)
            for each in idle:
                self._put_away(each)
        except Exception:  # one stream's trouble must not end the others'
            log.exception("the engine failed at a turn")
            for stream, jobs in [(late[0], [late[1]])] if late else picked:
                self._fail(stream, jobs, _internal(learnt=not late))
        self._tell_streams()
        return True

    def _return_memory(self, now: float) -> None:
        """Give freed pages back after work, at most once in `TRIM_S`: glibc would keep each page that was ever used."""
        if self._worked and now - self._trimmed >= TRIM_S:
            self._trimmed, self._worked = now, False
            return_freed_memory()

    def _take_turns(self, picked: Picked) -> None:
        """A command, a micro-batch, or micro-batches of several streams: at once where they can be, else in turn."""
        stream, jobs = picked[0]
        if jobs[0].command:
            self._carry_out(stream, jobs[0])
            return
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
        if self._never:
            return self._never
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
            return self._opened(stream, keep)
        except Exception as error:
            log.exception("stream %s: its state cannot be used", stream.id)
            detail = f"the stream's stored state cannot be used: {error}; delete the stream, or put another state"
            problem = _internal()
            if isinstance(error, OSError):
                problem = Problem(503, "no-storage", f"the service's folder cannot be used: {error}", retry_after=30)
            elif isinstance(error, BROKEN_STATE) and not isinstance(error, torch.OutOfMemoryError):
                problem = Problem(503, "broken-state", detail)
            self._fail(stream, jobs, problem)
            return None

    def _take_alone(self, batch: _Batch) -> None:
        """One stream's micro-batch."""
        began, warm, number = time.monotonic(), batch.learner.batches > 0, batch.learner.batches
        try:
            answers = batch.learner.answer(batch.images.to(self._device))
        except REFUSALS as error:
            self._fail(batch.stream, batch.jobs, Problem(422, "images-refused", str(error)))
            return
        except Exception:
            log.exception("stream %s: a batch failed", batch.stream.id)
            self._fail(batch.stream, batch.jobs, _internal())
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
            if isinstance(answers, REFUSALS):
                self._fail(batch.stream, batch.jobs, Problem(422, "images-refused", str(answers)))
            elif isinstance(answers, Exception):
                log.error("stream %s: a batch failed", batch.stream.id, exc_info=answers)
                self._fail(batch.stream, batch.jobs, _internal(learnt=batch.learner.batches > number))
            else:
                self._hand_over(batch, number, answers, began, {"stacked": {"streams": len(batches), "row": row}})

    def _stack_fewer(self, images: int, error: Exception) -> str:
        """Allow half as many images in a stacked pass as in one that failed, or no such pass; says so."""
        fewer = images // 2
        failed = f"a stacked pass of {images} images failed: {_first_line(error)}"
        if fewer < 2:
            self._never = why = f"{failed}; streams take turns from then on"
        else:
            self._less = why = f"{failed}; at most {fewer} are stacked from then on"
        with self._changed:
            self._turns.together = fewer if fewer >= 2 else 0
        return why

    def _took(self, seconds: float, images: int, *, warm: bool) -> None:
        """Note what a turn took."""
        if warm:
            self._turn_s = _averaged(self._turn_s, seconds)
        self.meter.batch(images, seconds)

    def _hand_over(
        self, batch: _Batch, number: int, answers: list[dict[str, Any]], began: float, how: dict[str, Any]
    ) -> None:
        """Write a micro-batch's requests to the audit, and answer them; an error is that of this stream alone."""
        try:
            self._answer_jobs(batch, number, answers, began, how)
        except Exception:
            log.exception("stream %s: its answers could not be handed over", batch.stream.id)
            batch.stream.dirty = True
            self._fail(batch.stream, batch.jobs, _internal(learnt=True))
        if batch.stream.unsaved >= self.settings.snapshot_every or not batch.stream.stored:
            self._snapshot(batch.stream)

    def _answer_jobs(
        self, batch: _Batch, number: int, answers: list[dict[str, Any]], began: float, how: dict[str, Any]
    ) -> None:
        stream, learner = batch.stream, batch.learner
        requests = [{"request": job.request, "count": len(job.images)} for job in batch.jobs if job.images is not None]
        learner.note("requests", batch=number, requests=requests, **how)
        with self._changed:
            stream.unsaved += 1
            stream.dirty = True
            stream.info = learner.status()
            at = 0
            for job in batch.jobs:
                assert job.images is not None
                own = answers[at : at + len(job.images)]
                at += len(job.images)
                self.meter.waited(began - job.arrived)
                self._finish(stream, job, {"batch": number, "late": False, "answers": own})

    def _answer_late(self, stream: Stream, job: Job) -> None:
        """The source's answer for a request that would otherwise be late; nothing is learnt from it."""
        assert job.images is not None
        began = time.monotonic()
        try:
            images = job.images.to(self._device)
            answers, answer = self._source.source(images)
        except REFUSALS as error:
            self._fail(stream, [job], Problem(422, "images-refused", str(error)))
            return
        except Exception:
            log.exception("stream %s: the source's answer failed", stream.id)
            self._fail(stream, [job], _internal())
            return
        self._source_s = _averaged(self._source_s, time.monotonic() - began)
        self._turn_s *= 0.98  # so that a slow time is forgotten where every request is late
        learner = self._opened_for(stream, [job], set())
        if learner is None:
            return
        learner.note(
            "late", batch=learner.batches, request=job.request, count=len(images), images=tensor_hash(images),
            answer=answer,
        )  # fmt: skip
        with self._changed:
            stream.counts["late"] += 1
            stream.dirty = True
            self._finish(stream, job, {"batch": learner.batches, "late": True, "answers": answers})

    def _finish(self, stream: Stream, job: Job, reply: dict[str, Any]) -> None:
        """Hand over a reply, keep it under its key, and count it; the lock is held."""
        answers, took = reply["answers"], 1000 * (time.monotonic() - job.arrived)
        stream.counts["requests"] += 1
        stream.counts["images"] += len(answers)
        stream.average("latency_ms", took)
        stream.average("answer_entropy", sum(each["entropy"] for each in answers) / len(answers))
        for each in answers:
            self.meter.answered("late" if reply["late"] else each["answered_by"], 1)
        whole = {"stream": stream.id, "request": job.request, **reply, "ms": round(took, 3)}
        if job.key is not None:
            self._ledger(stream).complete(job.key, whole, time.time())
        job.succeed(whole)

    def _fail(self, stream: Stream, jobs: list[Job], problem: Problem) -> None:
        """Refuse requests; a stream that has never answered any leaves no trace."""
        with self._changed:
            for job in jobs:
                if job.key is not None:
                    self._ledger(stream).release(job.key)
                job.fail(problem)
            fresh = not stream.stored and not stream.dirty and (stream.learner is None or not stream.learner.batches)
            if fresh and not stream.jobs:
                self._drop(stream)
                self._streams.pop(stream.id, None)

    def _carry_out(self, stream: Stream, job: Job) -> None:
        """A command; what it raises goes to its caller."""
        try:
            result = {
                "reset": self._reset, "export": self._export, "import": self._import, "delete": self._delete,
            }[job.command](stream, job.value)  # fmt: skip
        except Problem as problem:
            self._fail(stream, [job], problem)
            return
        except Exception:
            log.exception("stream %s: %s failed", stream.id, job.command)
            self._fail(stream, [job], _internal())
            return
        job.succeed(result)

    def _reset(self, stream: Stream, _: Any) -> dict[str, Any]:
        learner = self._opened(stream)
        learner.reset()
        with self._changed:
            stream.info, stream.dirty = learner.status(), True
        self._snapshot(stream)
        return self.status(stream.id)

    def _export(self, stream: Stream, _: Any) -> bytes:
        return state_bytes(self._opened(stream).state_dict())

    def _import(self, stream: Stream, state: Any) -> dict[str, Any]:
        """Go on from a state: tried on a learner of its own first, so that one that does not fit changes nothing."""
        trial = Learner(self.served, self.settings.batch_size)
        try:
            trial.load_state_dict(state)
            side, shape = self.served.prepare.crop, state.get("image")
            if shape or side:
                trial.answer(torch.rand(1, *(shape or (3, side, side)), device=self._device))
        except BROKEN_STATE as error:
            raise Problem(422, "state-refused", f"the state does not fit this service: {error}") from error
        finally:
            trial.close()
        self._drop(stream)
        stream.audit = self._store.last_audit(stream.id) + 1
        stream.learner = learner = self._learner(stream, append=False)
        stream.opened = stream.number
        self._store.save_start(stream.id, stream.audit, state)
        learner.load_state_dict(state)
        with self._changed:
            stream.info, stream.dirty = learner.status(), True
        self._snapshot(stream)
        return self.status(stream.id)

    def _delete(self, stream: Stream, _: Any) -> None:
        self._drop(stream)
        self._store.delete(stream.id)
        with self._changed:
            stream.ledger, stream.stored, stream.dirty, stream.unsaved, stream.info = None, False, False, 0, {}
            if not stream.jobs:
                self._streams.pop(stream.id, None)

    # Memory and disk --------------------------------------------------------------------------------------------------

    def _opened(self, stream: Stream, keep: set[int] | None = None) -> Learner:
        """The stream's learner, from its snapshot where it is not in memory; streams in `keep` stay in memory."""
        if stream.learner is not None:
            return stream.learner
        self._make_room(keep or set())
        if not stream.stored:
            stream.audit = self._store.last_audit(stream.id) + 1
            stream.learner, stream.opened = self._learner(stream, append=False), stream.number
            return stream.learner
        state, about = self._store.load(stream.id)
        stream.audit = about["audit"] if isinstance(about.get("audit"), int) else self._store.last_audit(stream.id)
        moved = self._store.moved(stream.id)
        try:
            if moved:
                raise ValueError("the audit of another writer, who may not know yet that the stream has moved")
            learner = self._learner(stream, append=True)
        except ValueError:  # or one with another header: this version writes another one
            stream.audit = self._store.last_audit(stream.id) + 1
            self._store.save_start(stream.id, stream.audit, state)
            learner = self._learner(stream, append=False)
        try:
            learner.load_state_dict(state)
        except BaseException:
            learner.close()
            raise
        stream.learner, stream.opened = learner, stream.number
        if moved:
            self._snapshot(stream)
        return learner

    def _learner(self, stream: Stream, *, append: bool) -> Learner:
        """A learner that writes the stream's audit."""
        path = self._store.audit(stream.id, stream.audit) if self.served.guarded else None
        return Learner(
            self.served, self.settings.batch_size, stream=stream.id, audit=path, append=append, on_event=self._event,
            stack=None if self._never else self._stack,
        )  # fmt: skip

    def _event(self, event: Event) -> None:
        self.meter.event(event.kind)

    def _snapshot(self, stream: Stream) -> bool:
        """Write the stream's state with its keys; where that fails the stream goes on, and the status says so."""
        assert stream.learner is not None
        began = time.monotonic()
        try:
            with self._changed:
                about = {"audit": stream.audit, "keys": self._ledger(stream).to_plain(), "info": stream.info}
            self._store.save(stream.id, stream.learner.state_dict(), about)
        except Lost as error:
            log.warning("stream %s: its snapshot was not written: %s", stream.id, error)
            return False
        except Exception as error:
            known = isinstance(error, OSError)  # of which the message says all
            log.error("stream %s: its snapshot could not be written: %s", stream.id, error, exc_info=not known)
            stream.counts["snapshot_failures"] += 1
            self.meter.snapshot(time.monotonic() - began, ok=False)
            return False
        with self._changed:
            stream.unsaved, stream.dirty, stream.stored = 0, False, True
            stream.counts["snapshots"] += 1
        self.meter.snapshot(time.monotonic() - began, ok=True)
        return True

    def _idle(self, now: float) -> list[Stream]:
        """Streams in memory that nobody has used for a while."""
        least = now - self.settings.idle_s
        return [
            each for each in self._streams.values() if each.learner is not None and not each.jobs and each.used < least
        ]

    def _make_room(self, keep: set[int]) -> None:
        """Put away the streams used longest ago, where as many are in memory as may be."""
        with self._changed:
            live = sorted((each for each in self._streams.values() if each.learner is not None), key=_last_use)
        away = [each for each in live if id(each) not in keep]
        for stream in away[: max(0, len(live) - self.settings.live + 1)]:
            self._put_away(stream)

    def _put_away(self, stream: Stream) -> None:
        """To disk; a stream that cannot be saved stays in memory."""
        if stream.learner is None or self._lost(stream):
            return
        if stream.dirty and stream.learner is not None and not self._snapshot(stream):
            stream.used = time.monotonic()
            return
        with self._changed:
            self._drop(stream)
            if not any(job.key for job in stream.jobs):
                stream.ledger = None

    def _drop(self, stream: Stream) -> None:
        """Let go of a stream's learner."""
        learner, stream.learner = stream.learner, None
        if learner is not None:
            try:
                learner.close()
            except Exception:  # as where its audit cannot be written to the end
                log.exception("stream %s: its learner could not be closed", stream.id)

    def _tell_streams(self) -> None:
        with self._changed:
            live = sum(each.learner is not None for each in self._streams.values())
            self.meter.streams(live, len(self._streams) - live, self._turns.waiting)


@dataclass(frozen=True)
class _Batch:
    """One stream's micro-batch."""

    stream: Stream
    jobs: list[Job]
    learner: Learner
    images: Tensor


def _last_use(stream: Stream) -> float:
    return stream.used


def _unknown(stream: str) -> Problem:
    return Problem(404, "no-such-stream", f"there is no stream {stream!r}; its first predict makes it")


def _moved() -> Problem:
    return Problem(503, "moved", "the stream has moved to another replica; nothing was learnt: send it again",
                   retry_after=1)  # fmt: skip


def _internal(*, learnt: bool = False) -> Problem:
    """An error of the service itself; `learnt` where the images may have been learnt from before it."""
    said = "it may have been learnt from" if learnt else "nothing was learnt"
    return Problem(500, "internal", f"the request failed inside the service, whose log says why; {said}")


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__


def _averaged(mean: float, value: float) -> float:
    return value if mean == 0 else 0.8 * mean + 0.2 * value
