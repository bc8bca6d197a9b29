"""Examples:
poem compare results/monday results/tuesday
poem compare results/cpu results/ray --json
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse


def options(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("a", metavar="A", help="a folder of results")
    parser.add_argument("b", metavar="B", help="another one")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(args: argparse.Namespace) -> int:
    """Say what differs; 0 where both hold the same results, 1 otherwise."""
    import json
    from pathlib import Path

    from poem.report import compare

    found = compare(Path(args.a), Path(args.b))
    print(json.dumps(found.to_dict(), indent=1) if args.json else found)
    return 0 if found.equal else 1
