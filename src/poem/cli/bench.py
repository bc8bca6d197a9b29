"""Examples:
poem bench table1 --dry-run
poem bench table1 --methods tent poem --seeds 0 --limit 200
poem bench my-suite.yaml --scale cifar10 --root ROOT --workers 2
poem bench table1 --scale full --engine ray --address 10.0.0.1:6379 --device cuda
poem bench table1 --json > cells.json; poem bench cells.json

Run the same command again to resume after a stop: finished cells are kept and not run again.
Exit codes: 0 all cells have results, 1 some failed or answered with NaN, 2 bad input, 3 aborted (disk full, workers
die), 130 stopped.
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse
from pathlib import Path

from poem.cli import _sweep


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("suite", metavar="SUITE", help="a suite's name, a YAML file, or a JSON list of cells")
    _sweep.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure every cell of a suite that has no result yet."""
    from poem.bench.store import Store

    _sweep.check_options(args)
    from_list = args.suite.endswith(".json")
    suites = [] if from_list else _sweep.load_suites(args, [args.suite])
    todo = _sweep.read_cells(Path(args.suite), args) if from_list else _sweep.unique_cells(suites)
    store = Store(_sweep.results_folder(args, "cells" if from_list else _sweep.scale_of(args)))
    if args.dry_run or args.json:
        return _sweep.print_plan(args, suites, todo, store)
    code = _sweep.run_sweep(args, todo, store, [] if from_list else [args.suite])
    print(f"results in {store.folder}; poem report {store.folder} makes a page of them")
    return code
