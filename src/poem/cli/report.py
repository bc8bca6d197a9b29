"""Examples:
poem report poem-results/tiny
poem report poem-results/tiny --suites table1 fig5 --out pages
poem report poem-results/full --scale full --limit 256

Writes report.md and report.html with the suites that were run into the folder, as they were run; flags select others.
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse

from poem._util.limits import SEED_RANGE
from poem.cli import _option_checks as checks
from poem.cli import _sweep
from poem.cli._option_checks import path_argument


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("results", type=path_argument, help="a folder that poem bench or poem reproduce wrote")
    parser.add_argument(
        "--suites", nargs="+", metavar="SUITE", help="names or files; default: those that were run here"
    )
    parser.add_argument(
        "-o", "--out", type=path_argument, metavar="FOLDER", help="for both pages; default: the folder of results"
    )
    _sweep.add_suite_options(parser, "how the suites were run", "that of most cells here")


def run(args: argparse.Namespace) -> int:
    """Write both pages and print their paths."""
    from poem._util.files import check_folder_writable
    from poem.bench.store import Store
    from poem.report import build
    from poem.report.select_suites import select_suites

    checks.check_range(args, *SEED_RANGE, "seeds")
    check_folder_writable(args.out or args.results)
    store = Store(args.results)
    results, failures = list(store.results()), store.failures()
    if not results and not failures:
        raise ValueError(f"expected a folder of results, got {args.results}; poem reproduce table1 makes one")
    cells = [result.cell for result in results] + [failure.cell for failure in failures.values()]
    settings, requests = _sweep.suite_settings(args), store.requests()
    suites = select_suites(cells, names=args.suites, scale=args.scale, settings=settings, requests=requests)
    for path in build(suites, results, args.out or args.results, failures=failures):
        print(path)
    shown = {cell.key for suite in suites for cell in suite.cells}
    if rest := sum(cell.key not in shown for cell in cells):
        print(
            f"left out: {rest} of {len(cells)} cells, of other suites or settings; --suites and the run's flags show "
            "them"
        )
    for reason in store.broken.values():
        print(f"left out: {reason}")
    for warning in store.checksum_warnings():
        print(warning)
    return 0
