"""What is done to a stream by name, after the requests that came before it: reset, export, import, delete."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from poem._util.state_file import state_bytes
from poem.serve.failures import BROKEN_STATE, failed
from poem.serve.import_checks import checked_state
from poem.serve.keeper import Keeper
from poem.serve.learner import Learner
from poem.serve.problems import Problem
from poem.serve.turns import Job, Stream, zero_counts

log = logging.getLogger("poem")
COMMANDS = ("reset", "export", "import", "delete")


class Commands:
    """Carries out commands, in the engine's thread.

    Args:
        keeper: The streams.
        status: What is known of a stream, for those who have changed it.
    """

    def __init__(self, keeper: Keeper, status: Callable[[str], dict[str, Any]]) -> None:
        self._keeper, self._status = keeper, status

    def carry_out(self, stream: Stream, job: Job) -> None:
        """A command; what it raises goes to its caller."""
        try:
            result = {
                "reset": self._reset, "export": self._export, "import": self._import, "delete": self._delete,
            }[job.command](stream, job.value)  # fmt: skip
        except Problem as problem:
            self._keeper.fail(stream, [job], problem)
            return
        except Exception as error:
            log.exception("stream %s: %s failed", stream.id, job.command)
            self._keeper.fail(stream, [job], failed(error))
            return
        job.succeed(result)

    def _reset(self, stream: Stream, _: Any) -> dict[str, Any]:
        learner = self._keeper.opened(stream)
        learner.reset()
        with self._keeper.changed:
            stream.info, stream.dirty = learner.status(), True
        self._keeper.snapshot(stream)
        return self._status(stream.id)

    def _export(self, stream: Stream, _: Any) -> bytes:
        return state_bytes(self._keeper.opened(stream).state_dict())

    def _import(self, stream: Stream, state: Any) -> dict[str, Any]:
        """Go on from a state: tried on a learner of its own first, so that one that does not fit changes nothing."""
        keeper = self._keeper
        state = self._check_fits(state)
        keeper.make_room({id(stream)})
        opened = stream.number
        learner, number = keeper.begun(stream, state)  # raises where the disk is full: the stream goes on as it was
        keeper.drop(stream)
        with keeper.changed:
            stream.learner, stream.audit, stream.opened = learner, number, opened
            stream.info, stream.dirty = learner.status(), True
        keeper.snapshot(stream)
        return self._status(stream.id)

    def _check_fits(self, state: Any) -> dict[str, Any]:
        """Load a state into a learner that is no stream's, and let it answer noise; as the stream may go on from it.

        Raises:
            Problem: It does not fit (422).
        """
        served = self._keeper.served
        trial = Learner(served, self._keeper.settings.batch_size)
        try:
            found: dict[str, Any]
            found, shape = checked_state(state, trial.adapter, served.prepare, self._keeper.settings)
            trial.load_state_dict(found)
            if shape is not None:
                trial.answer(torch.rand(1, *shape, device=next(served.model.parameters()).device))
            return found
        except BROKEN_STATE as error:
            raise Problem(422, "state-refused", f"the state does not fit this service: {error}") from error
        finally:
            trial.close()

    def _delete(self, stream: Stream, _: Any) -> None:
        keeper = self._keeper
        keeper.drop(stream)
        keeper.store.delete(stream.id)
        with keeper.changed:
            keeper.forget_keys(stream)
            stream.stored, stream.dirty, stream.unsaved, stream.info = False, False, 0, {}
            stream.counts = zero_counts()
            if not stream.jobs:
                keeper.streams.pop(stream.id, None)
