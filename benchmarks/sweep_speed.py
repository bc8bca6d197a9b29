"""Cells per minute of a sweep with 1 and 2 workers, and its overhead per cell.

    python benchmarks/sweep_speed.py [--scale tiny] [--json FILE]
    python benchmarks/sweep_speed.py --scale cifar10 --root ROOT

The overhead of a cell: seconds from sending it to a worker to the result on disk, less the seconds in the adapter and
in loading data. The first cell of each worker, which includes imports and opening data, is reported separately.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from poem.bench.cell import Cell
from poem.bench.load_cell import Machine
from poem.bench.runners import CellEnded, CellStarted, Event, Workers
from poem.bench.store import Store
from poem.bench.suites import load
from poem.bench.sweep import SweepPlanned, sweep


@dataclass
class Clock:
    """Records how long each cell was with a worker, and how long it was measured."""

    began: dict[str, float] = field(default_factory=dict)
    cells: list[tuple[int, float, float]] = field(default_factory=list)
    """Process, seconds from sending to result, seconds in adapter and data."""

    def __call__(self, event: SweepPlanned | Event) -> None:
        """Called after the result is on disk."""
        if isinstance(event, CellStarted):
            self.began[event.cell.key] = time.perf_counter()
        elif isinstance(event, CellEnded):
            if event.result is None:
                raise SystemExit(f"{event.cell.label} failed:\n{event.error}")
            spent, timing = time.perf_counter() - self.began[event.cell.key], event.result.timing
            self.cells.append((event.result.host["pid"], spent, timing["adapt_s"] + timing["data_s"]))

    def figures(self) -> dict[str, float]:
        """Overhead in seconds and as a share of a cell, for first cells of a worker and for the others."""
        seen: set[int] = set()
        first: list[tuple[float, float]] = []
        later: list[tuple[float, float]] = []
        for process, spent, measured in self.cells:
            (later if process in seen else first).append((spent, measured))
            seen.add(process)
        return {**_overhead("first", first), **_overhead("later", later)}


def _overhead(name: str, pairs: list[tuple[float, float]]) -> dict[str, float]:
    spent, measured = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
    if not pairs:
        return {}
    return {
        f"{name}_cells": len(pairs),
        f"{name}_cell_s": round(spent / len(pairs), 3),
        f"{name}_overhead_s": round((spent - measured) / len(pairs), 3),
        f"{name}_overhead_percent": round(100 * (spent - measured) / spent, 2),
    }


def speed(cells: list[Cell], machine: Machine, workers: int) -> dict[str, Any]:
    """One sweep into an empty folder."""
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        outcome = sweep(cells, Store(folder), runner=Workers(machine=machine, count=workers), on_event=clock)
    return {
        "workers": workers, "cells": len(outcome.done), "seconds": round(outcome.seconds, 1),
        "cells_per_minute": round(60 * len(outcome.done) / outcome.seconds, 1), **clock.figures(),
    }  # fmt: skip


def main() -> int:
    """Sweep with one worker, then with two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", default="table1")
    parser.add_argument("--scale", default="tiny", choices=["tiny", "cifar10"])
    parser.add_argument("--workers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--methods", nargs="+", help="rows; default: all at tiny, source tent poem at cifar10")
    parser.add_argument("--corruptions", nargs="+", help="default: all at tiny, two at cifar10")
    parser.add_argument("--limit", type=int, help="images of each domain")
    parser.add_argument("--bases", nargs="+", help="cells of these alone")
    parser.add_argument("--root")
    parser.add_argument("--weights")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    small = args.scale == "tiny"
    methods = args.methods or (None if small else ["tent", "poem"])
    corruptions = args.corruptions or (None if small else ["gaussian_noise", "contrast"])
    suite = load(
        args.suite, args.scale, limit=args.limit, methods=methods, corruptions=corruptions, seeds=None if small else [0]
    )
    cells = [cell for cell in suite.cells if args.bases is None or cell.base in args.bases]
    machine = Machine(root=args.root, weights=args.weights, device=args.device)
    rows = []
    for workers in args.workers:
        rows.append(speed(cells, machine, workers))
        print(json.dumps(rows[-1]), flush=True)
    if args.json:
        hidden = ("--json", "--root", "--weights")
        argv = sys.argv
        public = [each for at, each in enumerate(argv[1:], 1) if not {each, argv[at - 1]} & set(hidden)]
        figures = {
            "command": " ".join(["python", "benchmarks/sweep_speed.py", *public]),
            "images": args.limit,
            "rows": rows,
        }
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
