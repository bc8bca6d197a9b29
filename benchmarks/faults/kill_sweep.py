"""Kill a sweep at random moments, resume it each time, and compare with a sweep that nobody disturbed.

    python benchmarks/faults/kill_sweep.py [--kills 50] [--suite table1] [--limit 128] [--json FILE]

Every second kill comes at a random moment of the start, every other one at a random moment after the first new result.
Each kill is SIGKILL to the whole process group: the driver and its workers. After each one, every result that stood
before must stand unchanged, to the byte and to the time of writing, and its cell must not have been begun again (each
worker notes what it begins). In the end the results must equal those of the undisturbed sweep, and nothing half-written
may be left. A sweep that ends before its kill is checked, and another one is begun.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from poem.bench.cell import Cell
from poem.bench.load_cell import Machine
from poem.bench.measure import measure as plain
from poem.bench.result import CellResult
from poem.bench.runners import Workers
from poem.bench.store import Store
from poem.bench.suites import load
from poem.bench.sweep import sweep

LOG = "KILL_SWEEP_LOG"
Stand = dict[str, tuple[bytes, int]]


def measure(cell: Cell, machine: Machine, *, on_progress: Callable[[int, int], None] | None = None) -> CellResult:
    """Note that a cell is begun, then measure it."""
    with open(os.environ[LOG], "a", encoding="utf-8") as file:
        file.write(f"{cell.key}\n")
    return plain(cell, machine, on_progress=on_progress)


def drive(args: argparse.Namespace) -> int:
    """The sweep that is killed: what `poem bench` does, with workers that note what they begin."""
    cells = load(args.suite, "tiny", limit=args.limit).cells
    outcome = sweep(cells, Store(args.drive), runner=Workers(count=args.workers, measure="kill_sweep:measure"))
    print(outcome)
    return outcome.code


def started(out: Path, args: argparse.Namespace) -> subprocess.Popen[str]:
    """A sweep in a process group of its own."""
    words = ["--suite", args.suite, "--limit", str(args.limit), "--workers", str(args.workers), "--drive", str(out)]
    environment = {**os.environ, LOG: f"{out}.log"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, __file__, *words], start_new_session=True, stdout=pipe, text=True, env=environment
    )


def begun(out: Path) -> list[str]:
    """Keys of the cells that were begun, in order."""
    log = Path(f"{out}.log")
    return log.read_text().split() if log.exists() else []


def standing(out: Path) -> Stand:
    """Every result file by name: its bytes and when it was written."""
    files = (path for path in out.glob("cells/*/*/*.json") if not path.name.startswith("."))
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def half_written(out: Path) -> int:
    """Files that a killed process was writing."""
    return sum(1 for _ in out.glob("cells/*/*/.*"))


def identities(out: Path) -> dict[str, dict[str, Any]]:
    """What must be equal, by cell; a broken or failed file is an error."""
    store = Store(out)
    found = {report.key: report.identity() for report in store.results()}
    if store.broken or store.failures():
        raise SystemExit(f"broken: {list(store.broken.values())}, failed: {list(store.failures())}")
    return found


class Trial:
    """Sweeps that are killed, and what was seen."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.folder, self.args, self.chance = folder, args, random.Random(args.seed)
        self.whole, self.out = folder / "whole", folder / "killed-0"
        self.expected: dict[str, dict[str, Any]] = {}
        self.before: Stand = {}
        self.kills = self.barren = self.half = self.changed = self.lost = self.new = self.begun = self.again = 0
        self.noted = 0
        self.rounds = 1

    def undisturbed(self) -> tuple[float, float]:
        """Run once in peace; seconds to the first result, and to the end."""
        began, first = time.perf_counter(), 0.0
        with started(self.whole, self.args) as process:
            while process.poll() is None:
                if not first and standing(self.whole):
                    first = time.perf_counter() - began
                time.sleep(0.05)
        if process.returncode != 0:
            raise SystemExit(f"the undisturbed sweep ended with exit code {process.returncode}")
        self.expected = identities(self.whole)
        return first, time.perf_counter() - began

    def life(self, first: float, share: float) -> None:
        """Start or resume the sweep and kill it: half of the time while it starts, else while it measures."""
        with started(self.out, self.args) as process:
            if self.kills % 2:
                while process.poll() is None and len(standing(self.out)) == len(self.before):
                    time.sleep(0.01)
                time.sleep(self.chance.uniform(0.0, share))
            else:
                time.sleep(self.chance.uniform(0.05, first))
            ended = process.poll()
            if ended is None:
                os.killpg(process.pid, signal.SIGKILL)
                self.kills += 1
        self.look(killed=ended is None)
        if ended is not None:
            self.compare(ended)
            self.rounds += 1
            self.before, self.noted, self.out = {}, 0, self.folder / f"killed-{self.rounds}"

    def look(self, *, killed: bool) -> None:
        """What stood before stands unchanged; what is new is whole."""
        now, noted = standing(self.out), begun(self.out)
        identities(self.out)
        self.half += killed and half_written(self.out)
        self.lost += len(self.before.keys() - now.keys())
        self.changed += sum(now[name] != was for name, was in self.before.items() if name in now)
        finished = {name.rpartition("-")[2].removesuffix(".json") for name in self.before}
        self.again += sum(key in finished for key in noted[self.noted :])
        self.begun += len(noted) - self.noted
        new = len(now.keys() - self.before.keys())
        self.new += new
        self.barren += killed and new == 0
        self.before, self.noted = now, len(noted)

    def compare(self, code: int | None) -> None:
        """A sweep that came to its end has what the undisturbed one has."""
        if code != 0 or identities(self.out) != self.expected:
            raise SystemExit(f"DIFFERENT: exit code {code}, {len(identities(self.out))} of {len(self.expected)} cells")
        if half_written(self.out):
            raise SystemExit("half-written files are left")

    def finish(self) -> None:
        """Run to the end, compare, and once more: nothing is left to run."""
        for expected in ("cells measured", "0 cells measured"):
            with started(self.out, self.args) as process:
                said = process.communicate()[0]
            self.look(killed=False)
            self.compare(process.returncode)
            if expected not in said:
                raise SystemExit(f"expected {expected!r}, got {said}")


def main() -> int:
    """Run, kill, resume, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--suite", default="table1")
    parser.add_argument("--limit", type=int, default=128, help="images of each domain")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--drive", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.drive is not None:
        return drive(args)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(Path(folder), args)
        first, usual = trial.undisturbed()
        print(f"undisturbed: {len(trial.expected)} cells in {usual:.0f} s, the first after {first:.1f} s", flush=True)
        share = 2 * (usual - first) / args.kills
        while trial.kills < args.kills:
            trial.life(first, share)
            print(f"{trial.kills} kills, sweep {trial.rounds}: {len(trial.before)} results stand", flush=True)
        trial.finish()
        figures = {
            "command": " ".join(["python", "benchmarks/faults/kill_sweep.py", *_plain(sys.argv[1:])]),
            "cells": len(trial.expected), "kills": trial.kills, "kills_before_a_new_result": trial.barren,
            "sweeps": trial.rounds, "cells_finished": trial.new, "cells_begun": trial.begun,
            "finished_cells_begun_again": trial.again, "finished_cells_changed": trial.changed,
            "finished_cells_lost": trial.lost, "half_written_at_a_kill": trial.half,
            "half_written_in_the_end": half_written(trial.out),
            "identical_to_undisturbed": identities(trial.out) == trial.expected,
            "undisturbed_s": round(usual, 1), "total_s": round(time.perf_counter() - began, 1),
        }  # fmt: skip
        good = figures["identical_to_undisturbed"] and not trial.again + trial.changed + trial.lost
    print(json.dumps(figures, indent=1))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if good else 1


def _plain(words: list[str]) -> list[str]:
    """The options without the file of the figures."""
    at = words.index("--json") if "--json" in words else len(words)
    return words[:at] + words[at + 2 :]


if __name__ == "__main__":
    sys.exit(main())
