"""Examples:
poem reproduce table1 --scale tiny
poem reproduce all --scale tiny
poem reproduce table3 fig5 --scale cifar10 --root ROOT --weights FOLDER
poem reproduce all --scale full --root ROOT --limit 256 --dry-run

Every table and figure of the paper: measures what is not there yet, then writes one page with all of it.
Exit codes: 0 all cells are there, 1 some failed or answered with NaN, 2 bad input, 3 broken off (disk full, workers
die), 130 stopped.
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from poem.cli import _grid

if TYPE_CHECKING:
    from poem.bench.store import Store
    from poem.bench.suites import Suite


def options(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("names", nargs="+", metavar="NAME", help="table1 ... table12, fig1a ..., or all")
    _grid.options(parser)


def run(args: argparse.Namespace) -> int:
    """Measure, then write the page."""
    from poem.bench.store import Store
    from poem.bench.suites import all_names

    _grid.check(args)
    names = all_names() if "all" in args.names else list(dict.fromkeys(args.names))
    found = _grid.suites(args, names)
    todo = _grid.cells(found)
    store = Store(_grid.folder(args, _grid.scale(args)))
    if args.dry_run or args.json:
        _grid.show(args, found, todo, store)
        return 0
    code = _grid.run(args, todo, store, names)
    if code in (0, 1):  # to the end, though some may have failed
        _page(found, store)
    return code


def _page(found: Sequence[Suite], store: Store) -> None:
    try:
        from poem.report import build

        text, page = build(found, store.results(), store.folder, failures=store.failures())
        print(f"page: {page}\ntext: {text}")
    except ImportError as error:  # the page needs an extra; the results do not
        print(f"results in {store.folder}; no page was made: {error}")
