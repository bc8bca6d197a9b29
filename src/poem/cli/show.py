"""Examples:
poem show sar+poem-i
poem show eata --preset cifar --json
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("method", help="a name that `poem list` prints")
    parser.add_argument(
        "--preset", default="imagenet", help="imagenet, cifar (or cifar10), cifar100; default: imagenet"
    )
    parser.add_argument("--json", action="store_true", help="the recipe's fields as one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print a method's description and its recipe."""
    import json

    from poem.recipes.methods import describe, methods, recipe
    from poem.recipes.text import written

    if args.method not in methods():
        _raise_if_other_kind(args.method)
    found = recipe(args.method, args.preset)
    if args.json:
        print(json.dumps({"method": args.method, "preset": args.preset, "recipe": written(found)}, indent=1))
    else:
        print(f"{args.method}: {describe(args.method)}\n\nRecipe, preset {args.preset}:\n{found}")
    return 0


def _raise_if_other_kind(name: str) -> None:
    """Raise if a name is not a method but of another kind, such as a base network, and say which."""
    from poem.cli.list import KINDS, names_of

    single = {"bases": "a base network", "data": "a data set"}
    for kind in KINDS[1:]:
        if name in names_of(kind):
            raise ValueError(f"{name!r} is {single.get(kind, f'a {kind[:-1]}')}, not a method; see `poem list {kind}`")
