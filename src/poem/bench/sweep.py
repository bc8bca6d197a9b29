"""Runs many cells into a store: finished ones are skipped, and a failure does not stop the rest.

    outcome = sweep(cells, Store("results"), runner=Workers(count=2))

A sweep can be stopped or killed at any moment and called again.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import FrameType

from poem.bench.cell import Cell
from poem.bench.load_cell import Machine, weights_sha256
from poem.bench.runners import CellEnded, Event, Inline, Ray, Runner, Workers
from poem.bench.runners.runner import model_and_data
from poem.bench.store import Failure, Store

__all__ = ["CannotWriteError", "Inline", "Ray", "SweepOutcome", "SweepPlanned", "Workers", "sweep"]

log = logging.getLogger("poem")

FAILURES_BEFORE_WARNING = 20
"""Failures with the same reason, from the first cell on, after which a sweep warns that all cells may fail."""


class CannotWriteError(OSError):
    """A result could not be written; those before it are kept."""


@dataclass(frozen=True)
class SweepPlanned:
    """The first event of a sweep: the cells that it will run, and those with a result."""

    todo: tuple[Cell, ...]
    finished: tuple[Cell, ...]


OnSweepEvent = Callable[[SweepPlanned | Event], None]


@dataclass(frozen=True, kw_only=True)
class SweepOutcome:
    """The cells of a sweep by how they ended."""

    done: tuple[Cell, ...] = ()
    """Measured by this sweep."""
    skipped: tuple[Cell, ...] = ()
    """Finished before it."""
    failed: tuple[Cell, ...] = ()
    """Raised, or killed their process; `store.failures()` has the reasons, and the next sweep tries them again."""
    left: tuple[Cell, ...] = ()
    """Not run, because the sweep was stopped."""
    nonfinite: tuple[Cell, ...] = ()
    """Done or skipped, with answers that are NaN or infinite."""
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def code(self) -> int:
        """An exit code: 0 all have results, 1 some failed or have answers that are not finite, 130 stopped."""
        return 130 if self.interrupted else 1 if self.failed or self.nonfinite else 0

    def __str__(self) -> str:
        parts = [f"{len(self.done)} cells measured in {self.seconds:.1f} s"]
        parts += [f"{len(self.skipped)} finished before"] if self.skipped else []
        parts += [f"{len(self.failed)} failed"] if self.failed else []
        parts += [f"{len(self.nonfinite)} with answers that are not finite"] if self.nonfinite else []
        parts += [f"stopped with {len(self.left)} left"] if self.interrupted else []
        return ", ".join(parts)


def sweep(
    cells: Sequence[Cell],
    store: Store,
    *,
    runner: Runner | None = None,
    on_event: OnSweepEvent | None = None,
    again: Callable[[Cell], bool] | None = None,
) -> SweepOutcome:
    """Run the cells that have no result with their recipe and weights of today, and save each result as it comes.

    Args:
        cells: What to measure; a cell that comes twice is run once.
        store: The folder of results. Only this process writes there, whatever the runner.
        runner: `Inline` unless given.
        on_event: Called with every event.
        again: Says which cells are run although they have a result; the old one is kept as `NAME.json.old`.

    Ctrl-C and SIGTERM end the sweep with an outcome that says what is left.

    Raises:
        BlockingIOError: Another process writes into the store.
        CannotWriteError: A result could not be written, such as for want of space; those before it are kept.
        ChildProcessError: Worker processes die before they receive a cell.
    """
    runner = runner or Inline()
    unique = list({cell.key: cell for cell in cells}.values())
    began = time.monotonic()
    with store.lock():
        weights = _weights_of(runner)
        once = [cell for cell in unique if again is None or not again(cell)]
        finished = [result for cell in once if (result := store.finished(cell, weights)) is not None]
        skipped = [result.cell for result in finished]
        before = {cell.key for cell in skipped}
        todo = group_cells([cell for cell in unique if cell.key not in before])
        recorder = _Recorder(store, on_event, {cell.key for cell in unique} - {cell.key for cell in once})
        interrupted = False
        try:
            with _interrupt_on_signals():
                recorder(SweepPlanned(tuple(todo), tuple(skipped)))
                if todo:
                    runner.run(todo, recorder)
        except KeyboardInterrupt:
            interrupted = True
        seen = before | {cell.key for cell in [*recorder.done, *recorder.failed]}
        return SweepOutcome(
            done=tuple(recorder.done),
            skipped=tuple(skipped),
            failed=tuple(recorder.failed),
            left=tuple(cell for cell in unique if cell.key not in seen),
            nonfinite=(*(result.cell for result in finished if result.nonfinite), *recorder.nonfinite),
            interrupted=interrupted,
            seconds=time.monotonic() - began,
        )


def _weights_of(runner: Runner) -> Callable[[Cell], str | None] | None:
    """The hash of the weights that a runner measures a cell with; None for a cluster, whose nodes have their own."""
    if isinstance(runner, Ray) and runner.address is not None:
        return None
    return partial(weights_sha256, machine=getattr(runner, "machine", Machine()))


@dataclass
class _Recorder:
    """Saves the results and failures that a runner reports, and passes its events on."""

    store: Store
    on_event: OnSweepEvent | None
    again: set[str] = field(default_factory=set)
    """Keys of cells whose results are replaced."""
    done: list[Cell] = field(default_factory=list)
    failed: list[Cell] = field(default_factory=list)
    nonfinite: list[Cell] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)

    def __call__(self, event: SweepPlanned | Event) -> None:
        if isinstance(event, CellEnded):
            try:
                self.save(event)
            except OSError as error:
                raise CannotWriteError(
                    f"cannot write to {self.store.folder}: {error.strerror or error}; the {len(self.done)} results of "
                    "this sweep before it are kept: make room, and type the same command again"
                ) from error
        if self.on_event is not None:
            self.on_event(event)

    def save(self, event: CellEnded) -> None:
        if event.result is not None:
            self.store.save(event.result, replace=event.cell.key in self.again)
            self.done.append(event.cell)
            self.nonfinite += [event.cell] if event.result.nonfinite else []
        else:
            self.store.save_failure(event.cell, event.error)
            self.failed.append(event.cell)
            self.warn_if_all_fail(Failure(cell=event.cell, error=event.error).reason)

    def warn_if_all_fail(self, reason: str) -> None:
        """Log once that every cell so far has failed for the same reason."""
        self.reasons.add(reason)
        if len(self.failed) == FAILURES_BEFORE_WARNING and not self.done and len(self.reasons) == 1:
            log.error("the first %d cells all failed with: %s; Ctrl-C to stop", FAILURES_BEFORE_WARNING, reason)


def group_cells(cells: Sequence[Cell]) -> list[Cell]:
    """The cells with those that share model and data beside each other, otherwise in their order."""
    groups: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        groups.setdefault(model_and_data(cell), []).append(cell)
    return [cell for each in groups.values() for cell in each]


@contextmanager
def _interrupt_on_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt at the first SIGINT or SIGTERM, and ignore further ones until the block ends."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM)

    def stop(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
