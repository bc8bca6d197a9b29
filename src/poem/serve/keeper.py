"""The streams of a service, in memory or on disk: opened from their snapshots, saved, put away and forgotten.

What callers' threads share (streams, queues, ledgers, counts) is read and written under the lock `changed`. Learners
are opened, saved and closed by the engine's thread alone.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

from poem.guarded.audit import Event, lines_after
from poem.serve.failures import not_opened
from poem.serve.learner import Learner, Served
from poem.serve.ledger import Ledger
from poem.serve.meter import Meter
from poem.serve.problems import Problem
from poem.serve.replay import is_reset
from poem.serve.settings import ServeSettings
from poem.serve.stack import Stack
from poem.serve.store import Lost, Store
from poem.serve.turns import Job, Stream, saved_counts

log = logging.getLogger("poem")


class Keeper:
    """Every stream that is known here, by its id.

    Args:
        served: The model and how each stream adapts it.
        settings: Sizes, limits and times.
        store: The folder of snapshots and audits.
        meter: Is told what happens.
        stack: For the learners that are opened; None where streams take turns.
    """

    def __init__(
        self, served: Served, settings: ServeSettings, store: Store, meter: Meter, stack: Stack | None
    ) -> None:
        self.served, self.settings, self.store, self.meter, self.stack = served, settings, store, meter, stack
        self.changed = threading.Condition()
        found = {} if store.shared else store.known()  # shared: each is known when it is asked for
        self.streams = {name: self.revived(name, about) for name, about in found.items()}

    # Under the lock ---------------------------------------------------------------------------------------------------

    def stream(self, name: str) -> Stream:
        """The stream of that id, made where there is none.

        Raises:
            Problem: There are too many (429).
        """
        found = self.streams.get(name)
        if found is None:
            if len(self.streams) >= self.settings.max_streams:
                raise Problem(
                    429, "too-many-streams",
                    f"expected at most {self.settings.max_streams} streams, which there are; delete one first",
                    retry_after=60,
                )  # fmt: skip
            found = self.streams[name] = Stream(name, time.monotonic())
            found.number = self.store.number(name)
        found.used = time.monotonic()
        return found

    def known(self, name: str) -> bool:
        """Whether there is such a stream, here or on disk."""
        return name in self.streams or (self.store.shared and self.store.has(name))

    def revived(self, name: str, about: dict[str, Any]) -> Stream:
        """A stream that is on disk."""
        info, audit = about.get("info"), about.get("audit")
        return Stream(
            name, time.monotonic(), stored=True, info=info if isinstance(info, dict) else {},
            audit=audit if isinstance(audit, int) else 0, counts=saved_counts(about),
        )  # fmt: skip

    def ledger(self, stream: Stream) -> Ledger:
        """The stream's idempotency keys, from its snapshot where they are not in memory.

        Raises:
            OSError: The snapshot cannot be read.
        """
        if stream.ledger is None:
            found = Ledger(self.settings.keys, self.settings.key_expiry_s, self.settings.key_bytes)
            if stream.stored:
                found.load_plain(self.store.about(stream.id).get("keys"))
            stream.ledger = found
        return stream.ledger

    def forget_keys(self, stream: Stream) -> None:
        """Forget the answers, which the next writer may add to; keys of requests that wait stay claimed."""
        waiting = {job.key for job in stream.jobs if job.key is not None}
        if stream.ledger is not None and waiting:
            stream.ledger.keep_claims(waiting)
        else:
            stream.ledger = None

    @property
    def live(self) -> list[Stream]:
        """The streams in memory."""
        return [each for each in self.streams.values() if each.learner is not None]

    def idle(self, now: float) -> list[Stream]:
        """Streams in memory that nobody has used for a while."""
        least = now - self.settings.idle_s
        return [each for each in self.live if not each.jobs and each.used < least]

    # By the engine's thread -------------------------------------------------------------------------------------------

    def fail(self, stream: Stream, jobs: list[Job], problem: Problem) -> None:
        """Refuse requests; a stream that has never answered any leaves no trace."""
        with self.changed:
            for job in jobs:
                if job.key is not None and stream.ledger is not None:
                    stream.ledger.release(job.key)
            fresh = not stream.stored and not stream.dirty and (stream.learner is None or not stream.learner.batches)
            if fresh and not stream.jobs:
                begun = stream.learner is not None
                self.drop(stream)
                self.streams.pop(stream.id, None)
                if begun:
                    self.store.discard_audit(stream.id, stream.audit)
            for job in jobs:
                job.fail(problem)

    def opened(self, stream: Stream, keep: set[int] | None = None) -> Learner:
        """The stream's learner, from its snapshot where it is not in memory; streams in `keep` stay in memory.

        Raises:
            Problem: Its state cannot be read, or cannot be used (503).
        """
        if stream.learner is not None:
            return stream.learner
        try:
            self.make_room(keep or set())
            return self._fresh(stream) if not stream.stored else self._resumed(stream)
        except Exception as error:
            log.exception("stream %s: its state cannot be used", stream.id)
            raise not_opened(error) from error

    def _fresh(self, stream: Stream) -> Learner:
        """The learner of a stream that has no snapshot."""
        number = stream.number
        stream.learner, stream.audit = self.begun(stream)
        stream.opened = number
        return stream.learner

    def _resumed(self, stream: Stream) -> Learner:
        """The learner of a stream's snapshot."""
        number = stream.number  # before the snapshot is read: another writer may take the stream from here on
        state, about = self.store.load(stream.id)
        audit = about["audit"] if isinstance(about.get("audit"), int) else self.store.last_audit(stream.id)
        moved = self.store.moved(stream.id)  # another writer, who may not know it yet, may still write its audit
        learner = None if moved else self._goes_on(stream, audit, about)
        if learner is None:
            learner, audit = self.begun(stream, state)
        else:
            try:
                learner.load_state_dict(state)
            except BaseException:
                learner.close()
                raise
        stream.learner, stream.audit, stream.opened = learner, audit, number
        if moved:
            self.snapshot(stream)
        return learner

    def begun(self, stream: Stream, state: dict[str, Any] | None = None) -> tuple[Learner, int]:
        """A learner with an audit of its own, and that one's number; with a state it goes on from that.

        Where it fails, as for a full disk, no file is left.
        """
        number, learner = self.store.last_audit(stream.id) + 1, None
        try:
            if state is not None:
                self.store.save_start(stream.id, number, state)
            learner = self.learner(stream, number, append=False)
            if state is not None:
                learner.load_state_dict(state)
        except BaseException:
            if learner is not None:
                learner.close()
            self.store.discard_audit(stream.id, number)
            raise
        return learner, number

    def _goes_on(self, stream: Stream, audit: int, about: dict[str, Any]) -> Learner | None:
        """A learner that goes on with the stream's audit; None where a replay of that would not lead to the snapshot.

        So it is where lines of before the snapshot are missing, and where a kill has undone a reset: batches that are
        computed again replace those of before it, a reset stays. None, too, where this version has another header.
        """
        try:
            if self.served.guarded:
                path, size = self.store.audit(stream.id, audit), about.get("audited")
                if not isinstance(size, int) or not path.exists() or path.stat().st_size < size:
                    return None
                if any(is_reset(line) for line in lines_after(path, size)):
                    return None
            return self.learner(stream, audit, append=True)
        except ValueError:
            return None

    def learner(self, stream: Stream, audit: int, *, append: bool) -> Learner:
        """A learner that writes the stream's audit of that number."""
        path = self.store.audit(stream.id, audit) if self.served.guarded else None
        return Learner(
            self.served, self.settings.batch_size, stream=stream.id, audit=path, append=append, on_event=self._event,
            stack=self.stack,
        )  # fmt: skip

    def _event(self, event: Event) -> None:
        self.meter.event(event.kind)

    def snapshot(self, stream: Stream) -> bool:
        """Write the stream's state with its keys; where that fails the stream goes on, and the status says so."""
        assert stream.learner is not None
        began = time.monotonic()
        try:
            with self.changed:
                counts = {**stream.counts, "snapshots": stream.counts["snapshots"] + 1}  # with the one being written
                keys = self.ledger(stream).to_plain()
                about = {"audit": stream.audit, "keys": keys, "info": stream.info, "counts": counts}
            state = stream.learner.state_dict()
            self.store.save(stream.id, state, {**about, "audited": stream.learner.audited}, stream.opened)
        except Lost as error:
            log.warning("stream %s: its snapshot was not written: %s", stream.id, error)
            return False
        except Exception as error:
            known = isinstance(error, OSError)  # of which the message says all
            log.error("stream %s: its snapshot could not be written: %s", stream.id, error, exc_info=not known)
            stream.counts["snapshot_failures"] += 1
            self.meter.snapshot(time.monotonic() - began, ok=False)
            return False
        with self.changed:
            stream.unsaved, stream.dirty, stream.stored = 0, False, True
            stream.counts["snapshots"] += 1
        self.meter.snapshot(time.monotonic() - began, ok=True)
        return True

    def make_room(self, keep: set[int]) -> None:
        """Put away the streams used longest ago, where as many are in memory as may be; those in `keep` stay."""
        with self.changed:
            live = sorted(self.live, key=_last_use)
        away = [each for each in live if id(each) not in keep]
        for stream in away[: max(0, len(live) - self.settings.live + 1)]:
            self.put_away(stream)

    def put_away(self, stream: Stream) -> None:
        """To disk; a stream that cannot be saved stays in memory."""
        if stream.learner is None or self.lost(stream):
            return
        if stream.dirty and stream.learner is not None and not self.snapshot(stream):
            stream.used = time.monotonic()
            return
        with self.changed:
            self.drop(stream)
            if not any(job.key for job in stream.jobs):
                stream.ledger = None

    def drop(self, stream: Stream) -> None:
        """Let go of a stream's learner."""
        learner, stream.learner = stream.learner, None
        if learner is not None:
            try:
                learner.close()
            except Exception:  # as where its audit cannot be written to the end
                log.exception("stream %s: its learner could not be closed", stream.id)

    def lost(self, stream: Stream) -> bool:
        """Whether another engine has become the stream's writer; a learner of before that is let go of, unsaved."""
        if not self.store.shared:
            return False
        held = self.store.held(stream.id)
        if not held or (stream.learner is not None and stream.opened != stream.number):
            with self.changed:
                self.drop(stream)
                stream.dirty, stream.unsaved = False, 0
                if not held and not stream.jobs:
                    self.streams.pop(stream.id, None)
        return not held


def _last_use(stream: Stream) -> float:
    return stream.used
