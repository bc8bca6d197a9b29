"""Example:
poem bench holdout --scale cifar10 --root ROOT
poem choose poem-results/cifar10 -o chosen.yaml
poem reproduce table1 --scale cifar10 --root ROOT --chosen chosen.yaml
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from poem.cli._option_checks import path_argument


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("results", type=path_argument, help="a folder of results that holds the suite holdout")
    parser.add_argument("-o", "--out", type=path_argument, default=Path("chosen.yaml"), help="default: chosen.yaml")


def run(args: argparse.Namespace) -> int:
    """Choose learning rates, write them, and print the rule and the rates."""
    from poem._util.files import check_file_writable
    from poem.bench.analysis.choose_lr import RULE, choose, save
    from poem.bench.store import Store
    from poem.streams import EXTRA

    if not args.results.is_dir():
        raise FileNotFoundError(f"expected a folder of results, got {args.results}; poem bench holdout makes one")
    check_file_writable(args.out)
    store = Store(args.results)
    held_out = [result for result in store.results() if set(result.cell.corruptions) <= set(EXTRA)]
    chosen = choose(held_out)
    save(chosen, args.out)
    for warning in store.checksum_warnings():
        print(warning, file=sys.stderr)
    print(RULE)
    for base, rates in chosen.items():
        print(f"{base}: {', '.join(f'{method} {rate:g}' for method, rate in rates.items())}")
    print(f"from {len(held_out)} results; written to {args.out}")
    return 0
