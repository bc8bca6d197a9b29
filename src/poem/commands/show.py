"""Examples:
poem show sar+poem-i
poem show eata --preset cifar --json
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse


def options(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("method", help="a name that `poem list` prints")
    parser.add_argument("--preset", default="imagenet", help="imagenet, cifar or cifar100")
    parser.add_argument("--json", action="store_true", help="the recipe's fields as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print a method's description and its recipe."""
    import json

    from poem.method import describe, recipe
    from poem.sentences import written

    sentence = recipe(args.method, args.preset)
    if args.json:
        print(json.dumps({"method": args.method, "preset": args.preset, "recipe": written(sentence)}, indent=1))
    else:
        print(f"{args.method}: {describe(args.method)}\n\nRecipe, preset {args.preset}:\n{sentence}")
    return 0
