"""The engine of a service: one guarded adapter, one bounded queue and one writer per stream; no HTTP.

One thread computes, because all streams share one model: it is every stream's only writer, so a stream's requests are
answered in the order in which they came. Micro-batches are made within a stream alone; those of several streams are
computed at once where they can be (`poem.serve.stack`), and else in turn (`poem.serve.micro_batches`). A request that
would be late is answered by the source, which is marked and is not learnt from. Streams that are not in use lie on disk
(`poem.serve.keeper`). Each stream's audit says which requests made each micro-batch, and which were late, so that every
answer can be computed again (`poem.serve.replay`).
"""

from __future__ import annotations

import logging
import math
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from poem._util.malloc import return_freed_memory
from poem.serve.commands import COMMANDS, Commands
from poem.serve.failures import failed
from poem.serve.json_safe import json_safe
from poem.serve.keeper import Keeper
from poem.serve.learner import Learner, Served
from poem.serve.meter import Meter
from poem.serve.micro_batches import MicroBatches
from poem.serve.problems import Problem
from poem.serve.settings import ServeSettings, check_stream_id
from poem.serve.sharing import Sharing
from poem.serve.stack import Stack
from poem.serve.store import Store
from poem.serve.turns import STACKED, TURNS, Job, Picked, Stream, Turns
from poem.streams.loading.prepare import Prepare

log = logging.getLogger("poem")
own_log = logging.getLogger("poem.serve")  # its lines at level INFO are shown by `poem serve`, those of `poem` are not
SAVE_S = 30.0
"""Seconds in which streams are saved at the end, after those in which what waits is answered."""
TRIM_S = 60.0
"""Seconds between two times at which freed memory is returned to the operating system."""


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
        store = Store(Path(folder), served.facts(settings.batch_size), writer)
        stack = _stack(served, settings) if settings.stack else None
        never = "stacking is off" if stack is None else stack.why_never
        try:
            self._keeper = Keeper(served, settings, store, self.meter, None if never else stack)
        except BaseException:
            store.close()
            raise
        self._store, self._streams, self._changed = store, self._keeper.streams, self._keeper.changed
        self._turns = Turns(
            settings.batch_size, settings.wait_ms / 1000, together=0 if never else settings.stack_images,
            streams=settings.live,
        )  # fmt: skip
        self._sharing = Sharing(self._keeper)
        self._batches = MicroBatches(self._keeper, self._turns, never)
        self._commands = Commands(self._keeper, self.status)
        self._trimmed, self._worked = time.monotonic(), False  # when memory was returned; whether any was used since
        self._closing, self._refused = False, False  # whether the service ends, and requests that waited were refused
        self._until: float | None = None  # then requests that wait are refused
        self._started = time.time()
        self._thread = threading.Thread(target=self._run, name="poem-engine", daemon=True)
        self._thread.start()

    # Requests ---------------------------------------------------------------------------------------------------------

    def submit(
        self,
        stream: str,
        images: Tensor,
        *,
        deadline_ms: float | None = None,
        key: str | None = None,
        payload: str = "",
        waited_s: float = 0.0,
    ) -> Future[dict[str, Any]]:
        """Put images at the end of a stream's queue; a stream that is not there is made.

        Args:
            stream: Its id.
            images: (B, C, H, W) from 0 to 1.
            deadline_ms: From the request's beginning; by default that of the settings.
            key: An idempotency key as `scoped_key` makes it.
            payload: Hash of the request, to tell whether a key comes with the same.
            waited_s: Seconds since the request's beginning, as for its upload.

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
        began = now - waited_s
        deadline = None if limit is None else began + limit / 1000
        self._own(stream)
        with self._changed, _storage():
            self._check_open()
            found = self._keeper.stream(stream)
            if key is not None:
                known = self._keeper.ledger(found).claim(key, payload, time.time())
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
                    self._keeper.ledger(found).release(key)
                raise
            job = Job(uuid.uuid4().hex, now, images=images, deadline=deadline, key=key, began=began)
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
        with _storage():
            wanted = command == "import" or self._keeper.known(stream)
        if wanted:
            self._own(stream)
        with self._changed:
            self._check_open()
            if command != "import" and stream not in self._streams:
                raise _unknown(stream)
            found = self._keeper.stream(stream)
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
        with self._changed, _storage():
            found = self._streams.get(stream)
            if found is None and self._keeper.known(stream):
                found = self._keeper.revived(stream, self._store.about(stream))  # shared, and not in use here
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
            live = len(self._keeper.live)
            side = self.served.prepare.crop
            return {
                "input": [3, side, side] if side else None, "batch_size": self.settings.batch_size,
                "base": self.served.base, "method": self.served.method or "auto", "guarded": self.served.guarded,
                "how": TURNS if self._batches.never else STACKED, "why_alone": self._batches.never,
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

    def drain(self, timeout_s: float) -> None:
        """From now on what waits is answered as soon as can be, and after so many seconds it is refused.

        The first call counts, so that an end has one deadline. Takes no lock: the handler of a signal may call it.
        """
        if self._until is None:
            self._until = time.monotonic() + timeout_s

    def close(self, timeout_s: float = 60.0) -> bool:
        """Answer what waits, save every stream, and end; says whether all of it was done.

        What is not answered after `timeout_s`, or when `drain` has said, is refused (503): streams are saved always,
        for which `SAVE_S` more are allowed.
        """
        self.drain(timeout_s)
        assert self._until is not None
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join(max(0.0, self._until + SAVE_S - time.monotonic()))
        saved = not any(each.dirty for each in list(self._streams.values()))
        return not self._thread.is_alive() and saved and not self._refused

    def stored(self) -> list[dict[str, Any]]:
        """The status of every stream that has a snapshot, as that says; for engines that share the folder."""
        return [self._status(self._keeper.revived(name, about)) for name, about in self._store.known().items()]

    # What the callers' threads share ----------------------------------------------------------------------------------

    def _own(self, name: str) -> None:
        """Become the stream's writer, where several engines share the folder."""
        if self._store.shared:
            self._check_open()
            with _storage():
                self._sharing.own(name)

    def _check_open(self) -> None:
        if not self.ready:
            raise _draining()

    def _check_room(self, stream: Stream) -> None:
        """Refuse one more request for a stream whose queue is full."""
        if len(stream.jobs) >= self.settings.queue:
            stream.counts["rejected"] += 1
            self.meter.rejected()
            busy = max(1, sum(bool(each.jobs) for each in self._streams.values()))
            raise Problem(
                429, "queue-full",
                f"expected fewer than {self.settings.queue} requests waiting in this stream; send them more slowly",
                retry_after=max(1, math.ceil(self._batches.turn_s * busy)),
            )  # fmt: skip

    def _status(self, stream: Stream) -> dict[str, Any]:
        """A stream's status as every route and every replica has it."""
        found: dict[str, Any] = json_safe({
            "stream": stream.id, "folder": self._store.relative_folder(stream.id), "how": stream.how,
            "why_alone": stream.why_alone, "live": stream.learner is not None, "waiting": len(stream.jobs),
            **stream.info, **stream.counts, **stream.measured, "unsaved_batches": stream.unsaved,
            "audit": stream.audit, "idle_s": round(time.monotonic() - stream.used, 1),
        })  # fmt: skip
        return found

    # The thread that computes -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Turn after turn, until the service ends and nothing waits."""
        try:
            while self._step():
                pass
            for stream in list(self._streams.values()):
                try:
                    self._keeper.put_away(stream)
                except Exception:
                    log.exception("stream %s: it could not be put away at the end", stream.id)
            _log_stop(list(self._streams.values()))
        finally:
            self._store.close()

    def _step(self) -> bool:
        """Wait for work and do it; says whether there may be more."""
        self._sharing.release_asked(time.monotonic())
        self._return_memory(time.monotonic())
        with self._changed:
            now = time.monotonic()
            if self._until is not None and now >= self._until:
                self._refuse_waiting()
            ahead = self._batches.turn_s + self._batches.source_s
            late = self._turns.late(now, ahead)
            picked: Picked = [] if late else self._turns.pick(now, at_once=self._until is not None)
            idle = [] if late or picked else self._keeper.idle(now)
            if not (late or picked or idle):
                if self._closing and not self._turns.waiting:
                    return False
                due = self._turns.next_time(ahead)
                longest = 0.05 if self._store.shared else 1.0
                self._changed.wait(longest if due is None else min(longest, max(0.0005, due - now)))
                return True
        self._worked = True
        begun, left = _begun([(late[0], [late[1]])] if late else picked)
        try:
            begun = [(stream, jobs) for stream, jobs in begun if not self._sharing.gone(stream, jobs)]
            if late is None:
                self._take(begun)
            elif begun:
                self._batches.answer_late(*late)
            for each in idle:
                self._keeper.put_away(each)
        except Exception as error:  # one stream's trouble must not end the others'
            log.exception("the engine failed at a turn")
            for stream, jobs in begun:
                self._keeper.fail(stream, jobs, failed(error, learnt=not late))
        for stream, jobs in left:  # after the others: a stream that has answered nothing is forgotten at once
            self._keeper.fail(stream, jobs, _draining())
        self._tell_streams()
        return True

    def _refuse_waiting(self) -> None:
        """Refuse every request that waits; the lock is held."""
        for stream in [each for each in self._streams.values() if each.jobs]:
            jobs = list(stream.jobs)
            stream.jobs.clear()
            for job in jobs:
                job.taken = True
            self._refused = True
            self._keeper.fail(stream, jobs, _draining())

    def _take(self, picked: Picked) -> None:
        """A command, or the micro-batches of one or several streams."""
        if picked and picked[0][1][0].command:
            stream, jobs = picked[0]
            self._commands.carry_out(stream, jobs[0])
        elif picked:
            self._batches.take(picked)

    def _return_memory(self, now: float) -> None:
        """Give freed pages back after work, at most once in `TRIM_S`: glibc would keep each page that was ever used."""
        if self._worked and now - self._trimmed >= TRIM_S:
            self._trimmed, self._worked = now, False
            return_freed_memory()

    def _tell_streams(self) -> None:
        with self._changed:
            live = len(self._keeper.live)
            self.meter.streams(live, len(self._streams) - live, self._turns.waiting)


def _stack(served: Served, settings: ServeSettings) -> Stack:
    """What computes several streams at once, made of an adapter as every stream has one."""
    made = Learner(served, settings.batch_size)
    made.close()
    return Stack(made.adapter)


def _begun(picked: Picked) -> tuple[Picked, Picked]:
    """What is computed now, and requests whose callers have gone away: nothing is learnt from those."""
    begun, left = Picked(), Picked()
    for stream, jobs in picked:
        there = [job for job in jobs if job.future.set_running_or_notify_cancel()]
        gone = [job for job in jobs if job not in there]
        begun += [(stream, there)] if there else []
        left += [(stream, gone)] if gone else []
    return begun, left


@contextmanager
def _storage() -> Iterator[None]:
    """Let a folder that cannot be read be a problem of the request."""
    try:
        yield
    except OSError as error:
        raise failed(error) from error


def _log_stop(streams: list[Stream]) -> None:
    """The line of the log at the end: a warning where something is lost."""
    saved = sum(each.stored and not each.dirty for each in streams)
    lost = sum(each.dirty for each in streams)
    more = f", {lost} could not be" if lost else ""
    text = f"stopped: {saved} stream{' is' if saved == 1 else 's are'} saved{more}"
    own_log.log(logging.WARNING if lost else logging.INFO, "%s", text)


def _draining() -> Problem:
    return Problem(503, "draining", "the service is ending and takes no more requests", retry_after=5)


def _unknown(stream: str) -> Problem:
    return Problem(404, "no-such-stream", f"there is no stream {stream!r}; its first predict makes it")
