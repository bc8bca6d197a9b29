"""Many cells, once each: what is finished is not run again, what fails does not stop the rest.

    outcome = sweep(cells, Store("results"), engine=Workers(count=2))

It can be stopped or killed at any moment and called again.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from poem import zoo
from poem.bench.benchmark import Place
from poem.bench.cell import Cell
from poem.bench.result import Report
from poem.bench.runners import Begun, Ended, Engine, Event, Inline, Moved, Ray, Workers
from poem.bench.runners.runner import kin
from poem.bench.store import Failure, Store

__all__ = [
    "Begun", "CannotWriteError", "Ended", "Engine", "Event", "Inline", "Moved", "Outcome", "Planned", "Ray", "Workers",
    "sweep",
]  # fmt: skip

log = logging.getLogger("poem")

HOPELESS = 20
"""Cells that fail alike, from the first on, before a sweep says that all may."""


class CannotWriteError(OSError):
    """A result could not be written; those before it are kept."""


@dataclass(frozen=True)
class Planned:
    """What a sweep will run, and what it found finished."""

    todo: tuple[Cell, ...]
    finished: tuple[Cell, ...]


Watch = Callable[[Planned | Event], None]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of the cells of a sweep."""

    done: tuple[Cell, ...] = ()
    """Measured now."""
    skipped: tuple[Cell, ...] = ()
    """Finished before."""
    failed: tuple[Cell, ...] = ()
    """Raised, or took their process down; `store.failures()` says why, and the next sweep tries them again."""
    left: tuple[Cell, ...] = ()
    """Not run, because the sweep was stopped."""
    nonfinite: tuple[Cell, ...] = ()
    """Measured now or before, with answers that are NaN or infinite."""
    interrupted: bool = False
    seconds: float = 0.0

    @property
    def code(self) -> int:
        """An exit code: 0 all is there, 1 some failed or have answers that are not finite, 130 stopped."""
        return 130 if self.interrupted else 1 if self.failed or self.nonfinite else 0

    def __str__(self) -> str:
        parts = [f"{len(self.done)} cells measured in {self.seconds:.1f} s"]
        parts += [f"{len(self.skipped)} finished before"] if self.skipped else []
        parts += [f"{len(self.failed)} failed"] if self.failed else []
        parts += [f"{len(self.nonfinite)} with answers that are not finite"] if self.nonfinite else []
        parts += [f"stopped with {len(self.left)} left"] if self.interrupted else []
        return ", ".join(parts)


def sweep(cells: Sequence[Cell], store: Store, *, engine: Engine | None = None, watch: Watch | None = None) -> Outcome:
    """Run the cells that have no result yet, and keep each result as it comes.

    Args:
        cells: What to measure; a cell that comes twice is run once.
        store: Where results are and go. Only this process writes there, whatever the engine.
        engine: `Inline` unless given.
        watch: Is told of everything that happens.

    Ctrl-C and SIGTERM end the sweep with an outcome that says what is left.

    Raises:
        BlockingIOError: Another process writes into the store.
        CannotWriteError: A result could not be written, such as for want of space; those before it are kept.
        ChildProcessError: Worker processes die before they begin.
    """
    engine = engine or Inline()
    unique = list({cell.key: cell for cell in cells}.values())
    began = time.monotonic()
    with store.lock():
        finished = [report for cell in unique if (report := store.finished(cell)) is not None]
        skipped = [report.cell for report in finished]
        before = {cell.key for cell in skipped}
        other_weights(finished, getattr(engine, "place", Place()))
        todo = in_order([cell for cell in unique if cell.key not in before])
        run = _Run(store, watch)
        interrupted = False
        try:
            with _signals():
                run(Planned(tuple(todo), tuple(skipped)))
                if todo:
                    engine.run(todo, run)
        except KeyboardInterrupt:
            interrupted = True
        seen = before | {cell.key for cell in [*run.done, *run.failed]}
        return Outcome(
            done=tuple(run.done),
            skipped=tuple(skipped),
            failed=tuple(run.failed),
            left=tuple(cell for cell in unique if cell.key not in seen),
            nonfinite=(*(report.cell for report in finished if report.nonfinite), *run.nonfinite),
            interrupted=interrupted,
            seconds=time.monotonic() - began,
        )


@dataclass
class _Run:
    """Keeps what an engine tells."""

    store: Store
    watch: Watch | None
    done: list[Cell] = field(default_factory=list)
    failed: list[Cell] = field(default_factory=list)
    nonfinite: list[Cell] = field(default_factory=list)
    reasons: set[str] = field(default_factory=set)

    def __call__(self, event: Planned | Event) -> None:
        if isinstance(event, Ended):
            try:
                self.keep(event)
            except OSError as error:
                raise CannotWriteError(
                    f"cannot write to {self.store.folder}: {error.strerror or error}; the {len(self.done)} results of "
                    "this sweep before it are kept: make room, and type the same command again"
                ) from error
        if self.watch is not None:
            self.watch(event)

    def keep(self, event: Ended) -> None:
        if event.report is not None:
            self.store.save(event.report)
            self.done.append(event.cell)
            self.nonfinite += [event.cell] if event.report.nonfinite else []
        else:
            self.store.fail(event.cell, event.error)
            self.failed.append(event.cell)
            self.despair(Failure(cell=event.cell, error=event.error).reason)

    def despair(self, reason: str) -> None:
        """Say once, at the time, that every cell so far has failed in the same way."""
        self.reasons.add(reason)
        if len(self.failed) == HOPELESS and not self.done and len(self.reasons) == 1:
            log.error("the first %d cells all failed with: %s; Ctrl-C to stop", HOPELESS, reason)


def other_weights(finished: Sequence[Report], place: Place) -> None:
    """Say, once for each base, that finished cells were measured with other weights than are at hand now."""
    here: dict[str, str | None] = {}
    said: set[str] = set()
    for report in finished:
        base, before = report.cell.base, report.base.get("sha256")
        if report.cell.weights is not None or before is None or base in said:
            continue
        if base not in here:
            path = _at_hand(base, place.weights)
            here[base] = None if path is None else zoo.sha256(path)
        if here[base] not in (None, before):
            said.add(base)
            log.error(
                "finished cells of %s were measured with weights of sha256 %.16s, those at hand now have %.16s: they "
                "will stand in one table; give another folder with --out, or the former weights",
                base, before, here[base],
            )  # fmt: skip


def _at_hand(name: str, folder: str | None) -> Path | None:
    """The file that a cell of this base would load, unless it had to be fetched."""
    if name not in zoo.bases():
        return None
    base = zoo.base(name)
    if folder is not None:
        with suppress(FileNotFoundError):
            return zoo.find_weights(base, folder)
    places = zoo.local_weight_paths(base) if folder is None else [zoo.TRAINED / base.file]
    return next((path for path in places if path.is_file()), None)


def in_order(cells: Sequence[Cell]) -> list[Cell]:
    """Cells that share model and data beside each other, otherwise as they came."""
    kins: dict[tuple[object, ...], list[Cell]] = {}
    for cell in cells:
        kins.setdefault(kin(cell), []).append(cell)
    return [cell for each in kins.values() for cell in each]


@contextmanager
def _signals() -> Iterator[None]:
    """The first SIGINT or SIGTERM raises KeyboardInterrupt; further ones wait for the cleaning up."""
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
