"""Examples:
poem reproduce table1 --scale tiny
poem reproduce all --scale tiny
poem reproduce table3 fig5 --scale cifar10 --root ROOT
poem reproduce all --scale full --root ROOT --limit 256 --dry-run

Measures the cells that have no result yet, then writes one page with the paper's numbers beside ours.
Exit codes: 0 all cells have results, 1 some failed or answered with NaN, 2 bad input, 3 aborted (disk full, workers
die), 130 stopped.
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from poem.cli import _sweep

if TYPE_CHECKING:
    from poem.bench.store import Store
    from poem.bench.suites import Suite


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("names", nargs="+", metavar="NAME", help="table1 ... table12, fig1a ..., or all")
    _sweep.add_options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure the cells that have no result yet, then write the page."""
    from poem.bench.store import Store
    from poem.bench.suites import all_names

    _sweep.check_options(args)
    names = all_names() if "all" in args.names else list(dict.fromkeys(args.names))
    suites = _sweep.load_suites(args, names)
    todo = _sweep.unique_cells(suites)
    store = Store(_sweep.results_folder(args, _sweep.scale_of(args)))
    if args.dry_run or args.json:
        return _sweep.print_plan(args, suites, todo, store)
    code = _sweep.run_sweep(args, todo, store, names)
    if code in (0, 1):  # the sweep ended, though some cells may have failed
        _write_page(suites, store)
    return code


def _write_page(suites: Sequence[Suite], store: Store) -> None:
    try:
        from poem.report import build
        from poem.report.pictures import picture

        results, shown = list(store.results()), {cell.key for suite in suites for cell in suite.cells}
        drawn = picture(each for each in results if each.cell_key in shown)
        text, page = build(suites, results, store.folder, failures=store.failures(), picture=drawn)
        print(f"page: {page}\ntext: {text}")
    except ImportError as error:  # the page needs an extra; the results do not
        print(f"results in {store.folder}; no page was made: {error}")
