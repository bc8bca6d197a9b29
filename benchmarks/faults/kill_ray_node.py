"""Kill one of two Ray nodes in the middle of a sweep, and compare with a sweep in one process.

    python benchmarks/faults/kill_ray_node.py [--suite table1] [--limit 128] [--json FILE]

Both nodes are real `ray start` processes on this machine's loopback, with a home and temporary folders of their own.
When a third of the cells have results, and the second node has given at least one of them, every process of that node
is killed with SIGKILL. The sweep must come to its end with all cells, equal to the in-process engine's bit for bit.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from poem.bench.runners import CellEnded, Event, Inline, Ray
from poem.bench.store import Store
from poem.bench.suites import load
from poem.bench.sweep import SweepPlanned, sweep

LOOPBACK = "127.0.0.1"
TOKEN = secrets.token_hex(32)
RAY = str(Path(sys.executable).parent / "ray")


def environment(home: Path) -> dict[str, str]:
    """A home of its own, a token that keeps others out, no niceness, no statistics sent, one thread."""
    own = {
        "HOME": str(home), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_worker_niceness": "0",
        "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    return {**{name: value for name, value in os.environ.items() if not name.startswith("RAY_")}, **own}


def node(home: Path, *words: str, ip: str = LOOPBACK, before: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    """A `ray start` that stays, as the first of its processes; `before` are words that run it elsewhere."""
    home.mkdir()
    command = [*before, RAY, "start", "--block", "--num-cpus=1", f"--node-ip-address={ip}", *words]
    with (home / "log").open("wb") as log:
        return subprocess.Popen(command, env=environment(home), stdout=log, stderr=log, start_new_session=True)


def family(first: int) -> list[int]:
    """A process and all that descend from it."""
    parents: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
        except (FileNotFoundError, ProcessLookupError):  # it ended meanwhile
            continue
    found = [first]
    for each in found:
        found += parents.get(each, [])
    return found


def kill(process: subprocess.Popen[bytes]) -> list[int]:
    """SIGKILL to every process of a node; who they were."""
    found = family(process.pid)
    for pid in found:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
    return found


def nodes() -> int:
    """Nodes of the cluster that this process is part of which are alive."""
    return sum(bool(each["Alive"]) for each in import_module("ray").nodes())


def standing(address: str, wanted: int) -> int:
    """How many nodes the cluster has, once that is as many as wanted; it takes a while to miss one."""
    ray = import_module("ray")
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    until = time.monotonic() + 120
    while nodes() != wanted and time.monotonic() < until:
        time.sleep(0.2)
    found = nodes()
    ray.shutdown()
    return found


class Killer:
    """Watches a sweep and kills a node once."""

    def __init__(self, victim: subprocess.Popen[bytes]) -> None:
        self.victim, self.total = victim, 0
        self.ended = self.of_victim = self.at = 0
        self.killed: list[int] = []

    def __call__(self, event: SweepPlanned | Event) -> None:
        """Count results; kill when a third is there."""
        if isinstance(event, SweepPlanned):
            self.total = len(event.todo)
        elif isinstance(event, CellEnded):
            self.ended += 1
            if not self.killed and event.result is not None:
                self.of_victim += event.result.host["pid"] in family(self.victim.pid)
            if not self.killed and self.of_victim and self.ended >= self.total // 3:
                self.at, self.killed = self.ended, kill(self.victim)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as listener:
        listener.bind((LOOPBACK, 0))
        return int(listener.getsockname()[1])


def main() -> int:
    """Start a cluster, sweep, kill, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="table1")
    parser.add_argument("--limit", type=int, default=128, help="images of each domain")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    cells = load(args.suite, "tiny", limit=args.limit).cells
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as name:
        folder = Path(name)
        os.environ.update(environment(folder / "driver"))
        address = f"{LOOPBACK}:{free_port()}"
        port, temporary = address.split(":")[1], folder / "t"
        head = node(folder / "a", "--head", f"--port={port}", "--include-dashboard=false", f"--temp-dir={temporary}")
        second = None
        try:
            time.sleep(8)
            second = node(folder / "b", f"--address={address}")
            if standing(address, 2) != 2:
                raise SystemExit(f"the second node did not join:\n{(folder / 'b/log').read_text()}")
            killer = Killer(second)
            cluster = sweep(cells, Store(folder / "ray"), runner=Ray(address=address), on_event=killer)
            after = standing(address, 1)
        finally:
            for process in (second, head):
                if process is not None and process.poll() is None:
                    kill(process)
        alone = sweep(cells, Store(folder / "alone"), runner=Inline())
        found, expected = (
            {report.key: report.identity() for report in Store(folder / place).results()} for place in ("ray", "alone")
        )
    figures = {
        "command": f"python benchmarks/faults/kill_ray_node.py --suite {args.suite} --limit {args.limit}",
        "ray": version("ray"), "cells": len(cells), "nodes_before": 2, "nodes_after": after,
        "results_before_the_kill": killer.at, "of_the_killed_node": killer.of_victim,
        "processes_killed": len(killer.killed), "done": len(cluster.done), "failed": len(cluster.failed),
        "identical_to_in_process": found == expected and len(expected) == len(alone.done) == len(cells),
        "ray_s": round(cluster.seconds, 1), "in_process_s": round(alone.seconds, 1),
    }  # fmt: skip
    print(json.dumps(figures, indent=1))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if figures["identical_to_in_process"] and killer.killed and after == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
