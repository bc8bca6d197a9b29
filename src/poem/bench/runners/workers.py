"""Cells in worker processes of this machine: one per GPU, or one per group of cores.

A worker that is killed, for its memory or by hand, costs its cell another try and nothing else. Workers exit when this
process does, however it ends.
"""

from __future__ import annotations

import logging
import multiprocessing
import signal
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess

from poem._util.malloc import keep_freed_memory
from poem._util.processes import exit_with_parent
from poem.bench.cell import Cell
from poem.bench.load_cell import Machine
from poem.bench.runners.runner import (
    MEASURE,
    CellEnded,
    CellProgress,
    CellStarted,
    OnEvent,
    import_measure,
    model_and_data,
    run_cell,
)  # fmt: skip

log = logging.getLogger("poem")

_READY = "ready"
_PROGRESS_SECONDS = 0.2  # between two progress events of a worker


@dataclass(frozen=True, kw_only=True)
class Workers:
    """Runs cells in a pool of processes.

    Args:
        machine: Folders with data and weights, and the device.
        count: Processes; each uses as many threads as its cells state.
        devices: One per worker, in turn, instead of the machine's.
        retries: Further tries for a cell whose process died.
        measure: The function that runs a cell, as `module:name`.
    """

    machine: Machine = field(default_factory=Machine)
    count: int = 2
    devices: tuple[str, ...] = ()
    retries: int = 2
    measure: str = MEASURE

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"expected at least 1 worker, got {self.count}")

    def run(self, cells: Sequence[Cell], on_event: OnEvent) -> None:
        """Run every cell; a worker gets cells with the same model and data while there are any."""
        pool = _Pool(self, cells, on_event)
        try:
            pool.run()
        finally:
            pool.kill()


@dataclass(eq=False)
class _Worker:
    process: SpawnProcess
    pipe: Connection
    device: str
    ready: bool = False
    """Whether it has sent anything: it has imported everything and waits for cells."""
    cell: Cell | None = None
    last_group: tuple[object, ...] | None = None


class _Queue:
    """Cells grouped by model and data, in order of appearance."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.groups: dict[tuple[object, ...], deque[Cell]] = {}
        for cell in cells:
            self.groups.setdefault(model_and_data(cell), deque()).append(cell)

    def next_cell(self, last: tuple[object, ...] | None, others: set[tuple[object, ...] | None]) -> Cell | None:
        """The next cell of the group that a worker had last, else of one that no other worker is at, else any."""
        preferred = [last, *(each for each in self.groups if each not in others), *self.groups]
        chosen = next((each for each in preferred if each in self.groups), None)
        if chosen is None:
            return None
        cell = self.groups[chosen].popleft()
        if not self.groups[chosen]:
            del self.groups[chosen]
        return cell

    def requeue(self, cell: Cell) -> None:
        """Put a cell at the front of its group, to be tried again."""
        self.groups.setdefault(model_and_data(cell), deque()).appendleft(cell)


class _Pool:
    def __init__(self, runner: Workers, cells: Sequence[Cell], on_event: OnEvent) -> None:
        self.runner, self.on_event = runner, on_event
        self.queue, self.unfinished = _Queue(cells), len(cells)
        self.count = min(runner.count, len(cells))
        self.deaths: Counter[str] = Counter()
        self.failed_starts = 0
        self.workers: list[_Worker] = []

    def start(self, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        machine = replace(self.runner.machine, device=device)
        args = (theirs, self.runner.measure, machine, log.getEffectiveLevel(), self.count)
        process = context.Process(target=_worker_main, args=args, name="poem worker")
        with _signals_blocked():
            process.start()
            self.workers.append(_Worker(process, ours, device))
        theirs.close()

    def run(self) -> None:
        devices = self.runner.devices or (self.runner.machine.device,)
        for at in range(self.count):
            self.start(devices[at % len(devices)])
        while self.unfinished:
            # Loader processes of a dead worker may hold its pipe open: wait for its sentinel too.
            wait([each.pipe for each in self.workers] + [each.process.sentinel for each in self.workers])
            for worker in list(self.workers):
                self.receive(worker)

    def receive(self, worker: _Worker) -> None:
        """Handle every message in a worker's pipe, and its death if it died."""
        dead = not worker.process.is_alive()  # asked first: its last messages are still in the pipe
        while True:
            try:
                message = worker.pipe.recv() if worker.pipe.poll() else None
            except (EOFError, OSError):
                message, dead = None, True
            if message is None:
                break
            self.handle(worker, message)
        if dead:
            self.reap(worker)

    def handle(self, worker: _Worker, message: object) -> None:
        """Pass an event on, and send the next cell to a worker that is free."""
        if isinstance(message, CellProgress):
            self.on_event(message)
            return
        worker.ready, self.failed_starts = True, 0
        if isinstance(message, CellEnded):
            worker.cell = None
            self.unfinished -= 1
            self.on_event(message)
            if message.result is None and worker.device != "cpu":
                return  # it exits: a device may be of no use after an error
        self.send_cell(worker)

    def send_cell(self, worker: _Worker) -> None:
        """Send the next cell to a worker, or None, which ends it."""
        cell = self.queue.next_cell(worker.last_group, {each.last_group for each in self.workers if each is not worker})
        if cell is not None:
            worker.cell, worker.last_group = cell, model_and_data(cell)
            self.on_event(CellStarted(cell))
        try:
            worker.pipe.send(cell)
        except OSError:  # it died; `reap` requeues the cell
            return

    def reap(self, worker: _Worker) -> None:
        """Remove a dead worker, requeue its cell or end it as failed, and start another worker while cells are left."""
        self.workers.remove(worker)
        worker.process.join()
        worker.pipe.close()
        code, cell = worker.process.exitcode or 0, worker.cell
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if not worker.ready:
            self.failed_starts += 1
            if self.failed_starts > self.runner.retries:
                raise ChildProcessError(
                    f"worker processes do not start: the last one {how}; see above, or use --engine inline"
                )
        if cell is not None:
            self.deaths[cell.key] += 1
            if self.deaths[cell.key] > self.runner.retries:
                self.unfinished -= 1
                times = self.deaths[cell.key]
                self.on_event(CellEnded(cell, None, f"its worker process {how}, at each of {times} tries{_hint(code)}"))
            else:
                log.warning("a worker process %s%s; trying again: %s", how, _hint(code), cell.label)
                self.queue.requeue(cell)
        if self.queue.groups:
            self.start(worker.device)

    def kill(self) -> None:
        """Kill every worker at once: none of them writes files."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
            worker.pipe.close()


def _hint(code: int) -> str:
    return " (out of memory?)" if code == -9 else ""


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Block SIGINT and SIGTERM until a process is started and listed; it inherits the mask until it sets its own."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # first: its own start would unblock them
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _worker_main(pipe: Connection, path: str, machine: Machine, level: int, processes: int) -> None:
    """Receive cells and send results, until None comes or the parent process has ended."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    exit_with_parent()
    keep_freed_memory()
    logging.basicConfig(format="poem: %(message)s")
    log.setLevel(level)
    measure = import_measure(path)
    pipe.send(_READY)
    while (cell := pipe.recv()) is not None:
        ended = run_cell(measure, cell, machine, _ProgressSender(pipe, cell), processes=processes)
        pipe.send(ended)
        if ended.result is None and machine.device != "cpu":
            return


class _ProgressSender:
    """Sends the progress of a cell, at most every `_PROGRESS_SECONDS`."""

    def __init__(self, pipe: Connection, cell: Cell) -> None:
        self.pipe, self.cell, self.sent = pipe, cell, 0.0

    def __call__(self, images: int, total: int) -> None:
        if time.monotonic() - self.sent >= _PROGRESS_SECONDS:
            self.sent = time.monotonic()
            self.pipe.send(CellProgress(self.cell, images, total))
