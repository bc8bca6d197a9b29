"""Examples:
poem compare results/monday results/tuesday
poem compare results/cpu results/ray --json
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("a", metavar="A", help="a folder of results")
    parser.add_argument("b", metavar="B", help="another one")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Print what differs; returns 0 if both folders hold the same results, else 1."""
    import json
    from pathlib import Path

    from poem.report import compare

    comparison = compare(Path(args.a), Path(args.b))
    print(json.dumps(comparison.to_dict(), indent=1) if args.json else comparison)
    return 0 if comparison.equal else 1
