"""What a method is made of.

Example: poem show sar+poem-i
"""

from __future__ import annotations

import argparse


def options(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("method", help="a name that `poem list` prints")
    parser.add_argument("--preset", default="imagenet", help="imagenet, cifar or cifar100")


def run(args: argparse.Namespace) -> int:
    """Print a method's description and its recipe."""
    from poem.method import describe, recipe

    sentence = recipe(args.method, args.preset)
    print(f"{args.method}: {describe(args.method)}\n\nRecipe, preset {args.preset}:\n{sentence}")
    return 0
