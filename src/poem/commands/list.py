"""Names and what they are.

Example: poem list 'sar*'
"""

from __future__ import annotations

import argparse


def options(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("pattern", nargs="?", default="*", help="a wildcard such as 'sar*'")


def run(args: argparse.Namespace) -> int:
    """Print one line per method."""
    from poem.method import describe, methods

    for name in methods(args.pattern):
        print(f"{name:<24} {describe(name).splitlines()[0]}")
    return 0
