"""Examples:
poem report poem-results/tiny
poem report poem-results/tiny --suites table1 fig5 --out pages
poem report poem-results/full --scale full --limit 256

Writes report.md and report.html: the suites that the folder was asked for, as they were asked for; flags show others.
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse

from poem.cli import _values
from poem.cli._values import named_path


def options(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("results", type=named_path, help="a folder that poem bench or poem reproduce wrote")
    parser.add_argument(
        "--suites", nargs="+", metavar="SUITE", help="names or files; default: those asked for, or whole here"
    )
    parser.add_argument("--scale", help="tiny, cifar10 or full; default: that of most cells here")
    parser.add_argument("--limit", type=int, metavar="N", help="as in the run")
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="these rows alone, as 'tent' or '*poem*'")
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", help="as in the run")
    parser.add_argument("--corruptions", nargs="+", metavar="NAME", help="of the suites' these alone")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="as in the run")
    parser.add_argument("--chosen", type=named_path, metavar="FILE", help="as in the run")
    parser.add_argument(
        "--out", type=named_path, metavar="FOLDER", help="for both pages; default: the folder of results"
    )


def run(args: argparse.Namespace) -> int:
    """Write both pages and say where they are."""
    from poem._util.files import check_folder
    from poem.bench.store import Store
    from poem.cli import _grid
    from poem.report import build
    from poem.report.contents import about

    _values.within(args, *_values.SEEDS, "seeds")
    check_folder(args.out or args.results)
    store = Store(args.results)
    results, failures = list(store.results()), store.failures()
    if not results and not failures:
        raise ValueError(f"expected a folder of results, got {args.results}; poem reproduce table1 makes one")
    there = [result.cell for result in results] + [failure.cell for failure in failures.values()]
    suites = about(there, names=args.suites, scale=args.scale, asked=_grid.asked(args), requests=store.requests())
    for path in build(suites, results, args.out or args.results, failures=failures):
        print(path)
    shown = {cell.key for suite in suites for cell in suite.cells}
    if rest := sum(cell.key not in shown for cell in there):
        print(
            f"left out: {rest} of {len(there)} cells, of other suites or settings; --suites and the run's flags show "
            "them"
        )
    for words in store.broken.values():
        print(f"left out: {words}")
    for words in store.checksum_warnings():
        print(words)
    return 0
