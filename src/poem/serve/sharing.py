"""Where several engines share a folder: a stream is taken over from the engine that has it, and released to others."""

from __future__ import annotations

import logging

from poem.serve.keeper import Keeper
from poem.serve.ledger import Ledger
from poem.serve.problems import Problem
from poem.serve.store import folder_name
from poem.serve.turns import Job, Stream, saved_counts

log = logging.getLogger("poem")
LOOK_S = 0.02
"""Seconds between two looks for the questions of other engines."""


class Sharing:
    """Takes streams over and releases them. Does nothing where one engine has the folder for itself.

    Args:
        keeper: The streams that are known here.
    """

    def __init__(self, keeper: Keeper) -> None:
        self._keeper, self._store, self._looked = keeper, keeper.store, 0.0

    def own(self, name: str) -> None:
        """Become the stream's writer; what was known of it here, before it was another's, is forgotten.

        Raises:
            OSError: The folder cannot be read: nothing is known of the stream then, and the next call reads it again.
        """
        if not self._store.shared:
            return
        number = self._store.take(name)
        with self._keeper.changed:
            found = self._keeper.streams.get(name)
            if found is None and self._store.has(name):
                found = self._keeper.streams[name] = self._keeper.revived(name, self._store.about(name))
                found.number = number
            elif found is not None and found.number != number:
                stored, about = self._store.has(name), self._store.about(name)
                info = about.get("info")
                self._keeper.forget_keys(found)
                found.counts = saved_counts(about)
                if found.ledger is not None:
                    found.ledger.load_plain(about.get("keys"))
                    self._answer_known(found, found.ledger)
                found.number, found.stored = number, stored
                found.info = info if isinstance(info, dict) else {}

    def _answer_known(self, stream: Stream, ledger: Ledger) -> None:
        """Answer the requests that wait here and were sent again to another engine, which has answered them."""
        for job in [each for each in stream.jobs if each.key is not None]:
            known = ledger.reply(job.key or "")
            if known is not None:
                job.taken = True
                stream.jobs.remove(job)
                stream.counts["replayed"] += 1
                self._keeper.meter.replayed()
                job.succeed({**known, "replayed": True})

    def gone(self, stream: Stream, jobs: list[Job]) -> bool:
        """Whether another engine has become the stream's writer; its requests are then told so."""
        lost = self._keeper.lost(stream)
        if lost:
            self._keeper.fail(stream, jobs, _moved())
        return lost

    def release_asked(self, now: float) -> None:
        """Save the streams that other engines ask for, and let go of them."""
        if not self._store.shared or now - self._looked < LOOK_S:
            return
        self._looked = now
        for name in self._store.asked():
            try:
                self.release(name)
            except Exception:
                log.exception("a stream that another engine asks for could not be released: %s", name)

    def release(self, name: str) -> None:
        """Save the stream of a folder, and let go of it."""
        keeper = self._keeper
        stream = next((each for each in list(keeper.streams.values()) if folder_name(each.id) == name), None)
        if stream is None:
            self._store.let_go(name)
            return
        keeper.put_away(stream)
        if stream.learner is None:  # else it could not be saved: whoever asks will not wait
            self._store.release(stream.id)
            with keeper.changed:
                keeper.forget_keys(stream)
                stream.number = 0
                if not stream.jobs:
                    keeper.streams.pop(stream.id, None)


def _moved() -> Problem:
    return Problem(503, "moved", "the stream has moved to another replica; nothing was learnt: send it again",
                   retry_after=1)  # fmt: skip
