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

    names = methods(args.pattern)
    for name in names:
        print(f"{name:<24} {describe(name).splitlines()[0]}")
    if not names:
        print(f"no method matches {args.pattern!r}; `poem list` prints them all")
    return 0 if names else 1
