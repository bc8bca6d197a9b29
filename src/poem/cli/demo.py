"""Examples:
poem demo
poem demo --count 1024 --severity 5
poem demo imagenet --images photos/ --method deyo+poem --corruption fog
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from poem._util.limits import MAX_PROCESSES
from poem.cli import _option_checks as checks
from poem.cli._option_checks import path_argument


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("what", nargs="?", default="digits", choices=["digits", "imagenet"])
    parser.add_argument(
        "--count", type=int, metavar="N",
        help="digits per stream, of 1500 test digits, or photos; default: 384 digits, or all photos",
    )  # fmt: skip
    parser.add_argument("--severity", type=int, default=4, choices=range(1, 6), help="of the corruption; default: 4")
    parser.add_argument(
        "-o", "--out", type=path_argument, default=Path("poem-demo"), help="results and page; default: poem-demo"
    )
    parser.add_argument(
        "--images", type=path_argument, metavar="DIR", help="imagenet: photos, in folders by wnid or as they are"
    )
    parser.add_argument(
        "--model", help="imagenet: a base (`poem list bases`), or package.module:function; default: effnet-lite0"
    )
    parser.add_argument("--method", help="imagenet: a name that `poem list` prints; default: auto, guarded")
    parser.add_argument("--corruption", help="imagenet: corrupt the photos, such as with fog; default: none")
    parser.add_argument("--weights", help="imagenet: a file or folder with the model's weights")
    parser.add_argument("--batch-size", type=int, help="default: 32 digits, or 64 photos")
    parser.add_argument("--workers", type=int, default=2, help="digits: processes; default: 2")
    parser.add_argument("--json", type=path_argument, metavar="FILE", help="digits: the table as JSON too")


def run(args: argparse.Namespace) -> int:
    """Run the demo: methods compared on corrupted digits, or one method on the user's photos."""
    if args.count is not None and args.count < 1:
        raise ValueError(f"expected --count of at least 1, got {args.count}")
    checks.check_range(args, 1, None, "batch_size")
    checks.check_range(args, 1, MAX_PROCESSES, "workers")
    if args.what == "imagenet":
        if args.json is not None:
            raise ValueError(
                "--json is the digits' table; for photos read predictions.csv, or type: poem predict --json"
            )
        from poem.cli._photo_demo import run_photo_demo

        return run_photo_demo(args)
    for name in ("images", "model", "method", "corruption", "weights"):
        if getattr(args, name) is not None:
            raise ValueError(f"--{name} is for photos; type: poem demo imagenet --{name} {getattr(args, name)}")
    return _run_digits_demo(args)


def _run_digits_demo(args: argparse.Namespace) -> int:
    import json
    from dataclasses import asdict

    from poem._util.files import check_file_writable, check_folder_writable, write_atomic
    from poem._util.log_level import errors_only
    from poem.bench.store import Store
    from poem.bench.suites import load
    from poem.bench.sweep import Inline, Workers, sweep
    from poem.cli._sweep_progress import SweepProgress
    from poem.report import build
    from poem.report.demo import demo_rows, demo_text
    from poem.report.pictures import picture

    check_folder_writable(args.out)
    if args.json is not None:
        check_file_writable(args.json)
    count = args.count or 384
    changes = {"severity": args.severity} | ({"batch_size": args.batch_size} if args.batch_size else {})
    suite = load("demo", "tiny", limit=count, changes=changes)
    store = Store(args.out)
    shifts = ", ".join(dict.fromkeys(cell.corruptions[0] for cell in suite.cells))
    size = suite.cells[0].batch_size
    print(f"{count} digits per stream, batches of {size}, severity {args.severity}: {shifts}")
    print("A fresh adapter at each shift; the CIFAR preset, learning rate 0.005; one seed: no evidence.\n")
    runner = Workers(count=args.workers) if args.workers > 1 else Inline()
    with errors_only(), SweepProgress() as progress:  # warnings such as "no sample was selected": the table shows it
        outcome = sweep(suite.cells, store, runner=runner, on_event=progress)
    if outcome.interrupted:
        print("stopped; the same command goes on")
        return outcome.code
    if outcome.skipped:
        print(
            f"{len(outcome.skipped)} of {len(suite.cells)} cells were there already; remove {args.out} to begin anew\n"
        )
    if len(outcome.failed) == len(suite.cells):
        raise ValueError(store.failures()[outcome.failed[0].key].reason)
    for cell in outcome.nonfinite:
        print(f"{cell.label}: some answers were not finite (NaN or Inf) and count as wrong", file=sys.stderr)
    results = list(store.results())
    table = demo_rows(suite, results)
    print(demo_text(suite, table))
    if args.json is not None:
        rows = [{"method": row, "network": group, **asdict(each)} for (row, group), each in table.items()]
        about = {"command": "poem demo", "count": count, "severity": args.severity, "batch_size": size, "seed": 0}
        write_atomic(args.json, json.dumps({**about, "rows": rows}, indent=1) + "\n")
    try:
        shown = {cell.key for cell in suite.cells}
        drawn = picture(each for each in results if each.cell_key in shown)
        _, page = build([suite], results, args.out, failures=store.failures(), picture=drawn)
        print(f"\nThe same with plots: {page}")
    except ImportError as error:
        print(f"\nNo page was made: {error}")
    return outcome.code
