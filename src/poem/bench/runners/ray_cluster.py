"""Cells on a Ray cluster. Each node has poem installed and finds data by its own root."""

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

from poem.bench.benchmark import Place
from poem.bench.cell import Cell
from poem.bench.runners.runner import MEASURE, Begun, Ended, Tell, answer, found

log = logging.getLogger("poem")


@dataclass(frozen=True, kw_only=True)
class Ray:
    """One task per cell; a task whose node or process dies is run again elsewhere.

    Nodes run their workers at niceness 15 unless they were started with `RAY_worker_niceness=0` in the environment.

    Args:
        place: Data, weights and device; without a root each node looks where its own POEM_DATA says.
        address: Of the cluster, as `ray start --head` prints it, or "auto"; None for one on this machine alone.
        cpus: Of this machine, where there is no address; None for all.
        gpus: That a task takes, parts too; None for one on CUDA and none elsewhere.
        retries: Further tries for a task whose process or node died; what a cell raises is not tried again.
        measure: What runs a cell, as `module:name`.
    """

    place: Place = field(default_factory=Place)
    address: str | None = None
    cpus: int | None = None
    gpus: float | None = None
    retries: int = 3
    measure: str = MEASURE

    def run(self, cells: Sequence[Cell], tell: Tell) -> None:
        """Run every cell; results come back as they finish."""
        with _connected(self) as ray:
            each = self.gpus if self.gpus is not None else float(self.place.device.startswith("cuda"))
            task = ray.remote(_task)
            pending: dict[Any, Cell] = {}
            left = list(reversed(cells))
            _feasible(ray, max(cell.threads for cell in cells), each)
            try:
                while left or pending:
                    room = 2 * max(4, int(ray.cluster_resources().get("CPU", 1)))  # nodes may come and go
                    while left and len(pending) < room:
                        cell = left.pop()
                        wanted = task.options(num_cpus=cell.threads, num_gpus=each, max_retries=self.retries)
                        pending[wanted.remote(cell, self.place, self.measure)] = cell
                        tell(Begun(cell))
                    ready, _ = ray.wait(list(pending), num_returns=1, timeout=1.0)
                    for reference in ready:
                        tell(_result(ray, reference, pending.pop(reference)))
            finally:
                for reference in pending:  # stopped: a cluster that the caller has joined would run them to the end
                    ray.cancel(reference, force=True)


def _task(cell: Cell, place: Place, measure: str) -> Ended:
    """What a node runs."""
    log.setLevel(logging.ERROR)  # a report's notes say it too
    return answer(found(measure), cell, place)


def _result(ray: Any, reference: Any, cell: Cell) -> Ended:
    try:
        ended: Ended = ray.get(reference)
    except ray.exceptions.RayError as error:  # its process or node died too often, or could not read the cell
        ended = Ended(cell, None, f"{type(error).__name__}: {error}")
    return ended


@contextmanager
def _connected(engine: Ray) -> Iterator[Any]:
    """Ray, joined for the while; one that the caller has joined already is used and left as it is."""
    try:
        ray = import_module("ray")
    except ImportError as error:
        raise ImportError("the ray engine needs Ray; type: pip install 'poem-tta[ray]'") from error
    if ray.is_initialized():
        yield ray
        return
    os.environ.setdefault("RAY_worker_niceness", "0")  # counts where the cluster is started here
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    settings: dict[str, Any] = {"address": engine.address, "log_to_driver": False, "logging_level": logging.ERROR}
    if engine.address is None:
        settings.update(address="local", num_cpus=engine.cpus, include_dashboard=False)
    with _own_signals():
        try:
            ray.init(**settings)
        except (ConnectionError, RuntimeError, ValueError) as error:
            first = str(error).strip().splitlines()[0]
            raise ConnectionError(f"no Ray cluster at {engine.address!r}: {first}; see `ray status`") from error
    try:
        yield ray
    finally:
        ray.shutdown()


@contextmanager
def _own_signals() -> Iterator[None]:
    """Ray sets its own answer to SIGTERM; a sweep's comes back."""
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if main and handler is not None:
                signal.signal(number, handler)


def _feasible(ray: Any, cpus: int, gpus: float) -> None:
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not any(each.get("CPU", 0) >= cpus and each.get("GPU", 0) >= gpus for each in nodes):
        log.warning("no node has %d CPUs and %g GPUs, which a cell asks for; waiting until one joins", cpus, gpus)
