"""Cells on a Ray cluster. Each node has poem installed, the packages that cells name, and its own data and weights."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from poem._util.outside import extend_search_path, search_path
from poem.bench.cell import Cell
from poem.bench.load_cell import Machine
from poem.bench.runners.runner import MEASURE, CellEnded, CellStarted, OnEvent, import_measure, run_cell

log = logging.getLogger("poem")


@dataclass(frozen=True, kw_only=True)
class Ray:
    """Runs each cell as a Ray task; a task whose node or process dies is run again elsewhere.

    Nodes run their workers at niceness 15 unless they were started with `RAY_worker_niceness=0` in the environment.

    Args:
        machine: Folders with data and weights, and the device; without a root each node takes its own POEM_DATA.
        address: The cluster's, as `ray start --head` prints it, or "auto"; None to start one on this machine.
        cpus: CPUs of a cluster that is started here; None for all.
        gpus: GPUs of a task, fractions too; None for one on CUDA and none elsewhere.
        retries: Further tries for a task whose process or node died; a cell that raises is not tried again.
        measure: The function that runs a cell, as `module:name`.
    """

    machine: Machine = field(default_factory=Machine)
    address: str | None = None
    cpus: int | None = None
    gpus: float | None = None
    retries: int = 3
    measure: str = MEASURE

    def run(self, cells: Sequence[Cell], on_event: OnEvent) -> None:
        """Run every cell; results come back as they finish."""
        with _connected(self) as ray:
            each = self.gpus if self.gpus is not None else float(self.machine.device.startswith("cuda"))
            task = ray.remote(_task)
            pending: dict[Any, Cell] = {}
            left = list(reversed(cells))
            folders = search_path()
            _warn_if_infeasible(ray, max(cell.threads for cell in cells), each)
            try:
                while left or pending:
                    room = 2 * max(4, int(ray.cluster_resources().get("CPU", 1)))  # nodes may come and go
                    while left and len(pending) < room:
                        cell = left.pop()
                        wanted = task.options(num_cpus=cell.threads, num_gpus=each, max_retries=self.retries)
                        pending[wanted.remote(cell, self.machine, self.measure, folders)] = cell
                        on_event(CellStarted(cell))
                    ready, _ = ray.wait(list(pending), num_returns=1, timeout=1.0)
                    for reference in ready:
                        on_event(_result(ray, reference, pending.pop(reference)))
            finally:
                for reference in pending:  # stopped: a cluster that outlives this call would run them to the end
                    ray.cancel(reference, force=True)


def _task(cell: Cell, machine: Machine, measure: str, folders: tuple[str, ...]) -> CellEnded:
    """The task that a node runs; modules that a cell names are looked for in the caller's folders too."""
    extend_search_path(folders)
    log.setLevel(logging.ERROR)  # warnings are in the result's notes
    return run_cell(import_measure(measure), cell, machine)


def _result(ray: Any, reference: Any, cell: Cell) -> CellEnded:
    try:
        ended: CellEnded = ray.get(reference)
    except ray.exceptions.RayError as error:  # its process or node died too often, or could not read the cell
        ended = CellEnded(cell, None, f"{type(error).__name__}: {error}")
    return ended


@contextmanager
def _connected(runner: Ray) -> Iterator[Any]:
    """Ray's module, connected until the block ends; a connection that the caller has made is used and stays."""
    try:
        ray = import_module("ray")
    except ImportError as error:
        raise ImportError("--engine ray needs Ray; type: pip install 'poem-tta[ray]'") from error
    if ray.is_initialized():
        yield ray
        return
    os.environ.setdefault("RAY_worker_niceness", "0")  # counts where the cluster is started here
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    settings: dict[str, Any] = {"address": runner.address, "log_to_driver": False, "logging_level": logging.ERROR}
    if runner.address is None:
        settings.update(address="local", num_cpus=runner.cpus, include_dashboard=False)
    with _signal_handlers_restored():
        try:
            ray.init(**settings)
        except (ConnectionError, RuntimeError, ValueError) as error:
            first = str(error).strip().splitlines()[0]
            raise ConnectionError(f"no Ray cluster at {runner.address!r}: {first}; see `ray status`") from error
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _signal_handlers_restored() -> Iterator[None]:
    """Restore the handlers of SIGINT and SIGTERM at the end of the block, which `ray.init` replaces."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if main and handler is not None:
                signal.signal(number, handler)


def _warn_if_infeasible(ray: Any, cpus: int, gpus: float) -> None:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(each.get("CPU", 0) >= cpus and each.get("GPU", 0) >= gpus for each in nodes):
        log.warning("no node has %d CPUs and %g GPUs, which a cell asks for; waiting until one joins", cpus, gpus)
