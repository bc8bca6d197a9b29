"""Cells in worker processes of this machine: one per GPU, or one per group of cores.

A worker that is killed, by the system for its memory or by anybody, costs the cell it was at another try and nothing
else. Workers end with this process, however it ends.
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
from poem.bench.benchmark import Place
from poem.bench.cell import Cell
from poem.bench.runners.runner import MEASURE, Begun, Ended, Moved, Tell, answer, found, kin

log = logging.getLogger("poem")

_READY = "ready"
_EVERY = 0.2  # seconds between two words of a worker on how far it is


@dataclass(frozen=True, kw_only=True)
class Workers:
    """A pool of processes.

    Args:
        place: Data, weights and device, as each worker has them.
        count: Processes; each uses the threads that its cells state.
        devices: One per worker, in turn, instead of the place's.
        retries: Further tries for a cell whose process died.
        measure: What runs a cell, as `module:name`.
    """

    place: Place = field(default_factory=Place)
    count: int = 2
    devices: tuple[str, ...] = ()
    retries: int = 2
    measure: str = MEASURE

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"expected at least 1 worker, got {self.count}")

    def run(self, cells: Sequence[Cell], tell: Tell) -> None:
        """Run every cell; a worker keeps to one kin of cells while there are any."""
        pool = _Pool(self, cells, tell)
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
    cell: Cell | None = None
    last: tuple[object, ...] | None = None


class _Queue:
    """Cells by kin, in order of appearance."""

    def __init__(self, cells: Sequence[Cell]) -> None:
        self.kins: dict[tuple[object, ...], deque[Cell]] = {}
        for cell in cells:
            self.kins.setdefault(kin(cell), deque()).append(cell)

    def take(self, last: tuple[object, ...] | None, others: set[tuple[object, ...] | None]) -> Cell | None:
        """The next cell of the kin that a worker had last, else of one that no other is at, else any."""
        free = [last, *(each for each in self.kins if each not in others), *self.kins]
        chosen = next((each for each in free if each in self.kins), None)
        if chosen is None:
            return None
        cell = self.kins[chosen].popleft()
        if not self.kins[chosen]:
            del self.kins[chosen]
        return cell

    def put_back(self, cell: Cell) -> None:
        """A cell to be tried again, soon."""
        self.kins.setdefault(kin(cell), deque()).appendleft(cell)


class _Pool:
    def __init__(self, engine: Workers, cells: Sequence[Cell], tell: Tell) -> None:
        self.engine, self.tell = engine, tell
        self.queue, self.left = _Queue(cells), len(cells)
        self.count = min(engine.count, len(cells))
        self.deaths: Counter[str] = Counter()
        self.stillborn = 0
        self.workers: list[_Worker] = []

    def start(self, device: str) -> None:
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        place = replace(self.engine.place, device=device)
        words = (theirs, self.engine.measure, place, log.getEffectiveLevel(), self.count)
        process = context.Process(target=_work, args=words, name="poem worker")
        with _deaf():
            process.start()
            self.workers.append(_Worker(process, ours, device))
        theirs.close()

    def run(self) -> None:
        devices = self.engine.devices or (self.engine.place.device,)
        for at in range(self.count):
            self.start(devices[at % len(devices)])
        while self.left:
            # A worker's loader processes may hold its pipe open after its death: listen for the death itself too.
            wait([each.pipe for each in self.workers] + [each.process.sentinel for each in self.workers])
            for worker in list(self.workers):
                self.listen(worker)

    def listen(self, worker: _Worker) -> None:
        """All that a worker has said, and its death if it died."""
        dead = not worker.process.is_alive()  # asked first: what it said before is still in the pipe
        while True:
            try:
                said = worker.pipe.recv() if worker.pipe.poll() else None
            except (EOFError, OSError):
                said, dead = None, True
            if said is None:
                break
            self.heard(worker, said)
        if dead:
            self.bury(worker)

    def heard(self, worker: _Worker, said: object) -> None:
        if isinstance(said, Moved):
            self.tell(said)
            return
        worker.ready, self.stillborn = True, 0
        if isinstance(said, Ended):
            worker.cell = None
            self.left -= 1
            self.tell(said)
            if said.report is None and worker.device != "cpu":
                return  # it ends: a device may be of no use after an error
        self.hand_out(worker)

    def hand_out(self, worker: _Worker) -> None:
        cell = self.queue.take(worker.last, {each.last for each in self.workers if each is not worker})
        if cell is not None:
            worker.cell, worker.last = cell, kin(cell)
            self.tell(Begun(cell))
        try:
            worker.pipe.send(cell)
        except OSError:  # it died; its burial puts the cell back
            return

    def bury(self, worker: _Worker) -> None:
        """Take a dead worker's cell back, and start another worker while there is work."""
        self.workers.remove(worker)
        worker.process.join()
        worker.pipe.close()
        code, cell = worker.process.exitcode or 0, worker.cell
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if not worker.ready:
            self.stillborn += 1
            if self.stillborn > self.engine.retries:
                raise ChildProcessError(
                    f"worker processes do not start: the last one {how}; see above, or use --engine inline"
                )
        if cell is not None:
            self.deaths[cell.key] += 1
            if self.deaths[cell.key] > self.engine.retries:
                self.left -= 1
                times = self.deaths[cell.key]
                self.tell(Ended(cell, None, f"its worker process {how}, at each of {times} tries{_hint(code)}"))
            else:
                log.warning("a worker process %s%s; trying again: %s", how, _hint(code), cell.label)
                self.queue.put_back(cell)
        if self.queue.kins:
            self.start(worker.device)

    def kill(self) -> None:
        """Take every worker down, at once: nothing of theirs is on disk."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
            worker.pipe.close()


def _hint(code: int) -> str:
    return " (out of memory?)" if code == -9 else ""


@contextmanager
def _deaf() -> Iterator[None]:
    """Signals wait until a process is started and known; it inherits the deafness until it has chosen its own way."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    resource_tracker.ensure_running()  # beforehand: its own start would undo the deafness
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _work(pipe: Connection, path: str, place: Place, level: int, processes: int) -> None:
    """A worker's life: cells in, results out, until told to stop or left alone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
    exit_with_parent()
    keep_freed_memory()
    logging.basicConfig(format="poem: %(message)s")
    log.setLevel(level)
    measure = found(path)
    pipe.send(_READY)
    while (cell := pipe.recv()) is not None:
        ended = answer(measure, cell, place, _Teller(pipe, cell), processes=processes)
        pipe.send(ended)
        if ended.report is None and place.device != "cpu":
            return


class _Teller:
    """Says how far a cell is, not too often."""

    def __init__(self, pipe: Connection, cell: Cell) -> None:
        self.pipe, self.cell, self.at = pipe, cell, 0.0

    def __call__(self, images: int, of: int) -> None:
        if time.monotonic() - self.at >= _EVERY:
            self.at = time.monotonic()
            self.pipe.send(Moved(self.cell, images, of))
