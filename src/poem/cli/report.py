"""Examples:
poem report poem-results/tiny
poem report poem-results/tiny --suites table1 fig5 --out pages
poem report poem-results/full --scale full --limit 256
poem report poem-results/tiny --format latex csv
poem report poem-results/tiny --against tent
poem report --leaderboard results/study results/leaderboard -o leaderboard.html
poem report mine --collect results/leaderboard/mine.json

Writes report.md and report.html with the suites that were run into the folder, as they were run; flags select others.
--format latex, csv or json writes every table as a file of its own into the folder tables: LaTeX with booktabs, CSV and
JSON with the numbers as measured. As pandas frames: poem.report.report_tables.
--leaderboard makes one sortable page of suites of cells (*.json, *.jsonl) and of collected results: per network and
scenario, accuracy, difference to source with its paired standard error, worst stream, cost, seeds, provenance.
--collect writes the results of a folder of poem bench as one file for the leaderboard, after checking them.
A folder is data: modules that it names are not imported, but those of a suite that you name by --suites are.
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse

from poem._util.limits import SEED_RANGE
from poem.cli import _option_checks as checks
from poem.cli import _sweep
from poem.cli._option_checks import path_argument

FORMATS = ("markdown", "html", "latex", "csv", "json")
"""As `poem.report.FORMATS`, which is not imported for the help."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument(
        "results", type=path_argument, nargs="+",
        help="a folder that poem bench or poem reproduce wrote; with --leaderboard, files and folders of cells",
    )  # fmt: skip
    parser.add_argument("--leaderboard", action="store_true", help="one sortable page by network and scenario")
    parser.add_argument(
        "--collect",
        type=path_argument,
        metavar="FILE",
        help="write the folder's results as one file for the leaderboard",
    )
    parser.add_argument(
        "--suites", nargs="+", metavar="SUITE", help="names or files; default: those that were run here"
    )
    parser.add_argument(
        "-o",
        "--out",
        type=path_argument,
        metavar="FOLDER",
        help="for pages and tables; default: the folder of results; with --leaderboard the page, leaderboard.html",
    )
    parser.add_argument(
        "--format", nargs="+", default=["markdown", "html"], choices=FORMATS, metavar="FORMAT",
        help=f"{', '.join(FORMATS)}; default: markdown html",
    )  # fmt: skip
    parser.add_argument(
        "--against", metavar="NAME", help="a row or a method: adds paired differences of every other row to it"
    )
    _sweep.add_suite_options(parser, "how the suites were run", "that of most cells here")


def run(args: argparse.Namespace) -> int:
    """Write the pages or tables and print their paths."""
    if args.leaderboard:
        return _leaderboard(args)
    if len(args.results) > 1:
        raise ValueError(f"expected one folder of results, got {len(args.results)}; several are for --leaderboard")
    (args.results,) = args.results
    return _report(args) if args.collect is None else _collect(args)


def _leaderboard(args: argparse.Namespace) -> int:
    """Write the leaderboard's page."""
    from pathlib import Path

    from poem._util.files import check_file_writable, write_atomic
    from poem.report.leaderboard import make_leaderboard, read_cells
    from poem.report.leaderboard_page import render_leaderboard

    if args.collect is not None:
        raise ValueError("expected --leaderboard or --collect, got both: collect first, then make the page")
    out = args.out or Path("leaderboard.html")
    if out.is_dir() or out.suffix != ".html":
        raise ValueError(f"expected -o as an .html file with --leaderboard, got {out}; type: -o leaderboard.html")
    check_file_writable(out)
    cells, other = read_cells(args.results)
    board = make_leaderboard(cells)
    write_atomic(out, render_leaderboard(board))
    print(out)
    rows = sum(len(block.rows) for block in board.blocks)
    print(f"{len(cells)} cells, {rows} rows in {len(board.blocks)} blocks")
    for path in other:
        print(f"left out: {path} holds no cells")
    if board.without_source:
        print(f"left out, without source on their streams: {'; '.join(board.without_source)}")
    return 0


def _collect(args: argparse.Namespace) -> int:
    """Write a folder's results as one file."""
    from poem._util.files import check_file_writable
    from poem.bench.cell import recorded_keys
    from poem.bench.leaderboard_rows import collect

    check_file_writable(args.collect)
    with recorded_keys({}):
        count = collect(args.results, args.collect)
    print(f"{args.collect}: {count} results, {args.collect.stat().st_size / 1e6:.2f} MB")
    return 0


def _report(args: argparse.Namespace) -> int:
    """Write the pages or tables of one folder."""
    from contextlib import nullcontext

    from poem._util.files import check_folder_writable
    from poem.bench.cell import recorded_keys
    from poem.bench.result import latest
    from poem.bench.store import Store
    from poem.report import build
    from poem.report.pictures import picture
    from poem.report.select_suites import select_suites

    checks.check_range(args, *SEED_RANGE, "seeds")
    check_folder_writable(args.out or args.results)
    store = Store(args.results)
    results = list(store.results())
    measured = {cell: result.cell_key for cell, result in latest(results, lambda result: result.cell).items()}
    recorded = {**store.failed_keys(), **measured}
    out = args.out or args.results
    with recorded_keys(recorded) as refused:
        failures = store.failures()
        if not results and not failures:
            raise ValueError(f"expected a folder of results, got {args.results}; poem reproduce table1 makes one")
        cells = [result.cell for result in results] + [failure.cell for failure in failures.values()]
        for cell in cells:
            _ = cell.key  # kept by the cell, so that no later look at it imports anything
    settings, requests = _sweep.suite_settings(args), store.requests()
    with recorded_keys(recorded) if args.suites is None else nullcontext(set[str]()) as further:
        suites = select_suites(cells, names=args.suites, scale=args.scale, settings=settings, requests=requests)
        shown = {cell.key for suite in suites for cell in suite.cells}
        drawn = picture(each for each in results if each.cell_key in shown) if "html" in args.format else None
        paths = build(suites, results, out, failures=failures, formats=args.format, picture=drawn, against=args.against)
        for path in paths:
            print(path)
    if rest := sum(cell.key not in shown for cell in cells):
        print(
            f"left out: {rest} of {len(cells)} cells, of other suites or settings; --suites and the run's flags show "
            "them"
        )
    if (refused := refused | further) and args.suites is None:
        print(
            f"not imported, since only this folder names them: {', '.join(sorted(refused))}; tables show the results "
            "as measured. --suites FILE imports what a suite that you name states"
        )
    for reason in store.broken.values():
        print(f"left out: {reason}")
    for warning in store.checksum_warnings():
        print(warning)
    return 0
