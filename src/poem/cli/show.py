"""Examples:
poem show sar+poem-i
poem show eata --preset cifar --json
poem show table1                     the paper's numbers, without a run
poem show table5 --format latex      also: markdown, csv, json
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("method", metavar="name", help="a method, as `poem list` prints it, or a table of the paper")
    parser.add_argument(
        "--preset", default="imagenet", help="imagenet, cifar (or cifar10), cifar100; default: imagenet"
    )
    parser.add_argument("--json", action="store_true", help="the recipe's fields, or the table, as one JSON object")
    parser.add_argument(
        "--format", choices=["text", "markdown", "latex", "csv", "json"], help="of a table; default: text"
    )


def run(args: argparse.Namespace) -> int:
    """Print a method's description and its recipe."""
    import json

    from poem.recipes.methods import describe, methods, recipe
    from poem.recipes.text import written

    if args.method not in methods():
        if _is_suite(args.method):
            return _show_table(args.method, "json" if args.json and args.format is None else args.format or "text")
        _raise_if_other_kind(args.method)
        _raise_if_near_a_table(args.method)
    if args.format is not None:
        raise ValueError(f"--format is for a table such as table1, got the method {args.method!r}; --json prints it")
    found = recipe(args.method, args.preset)
    if args.json:
        print(json.dumps({"method": args.method, "preset": args.preset, "recipe": written(found)}, indent=1))
    else:
        print(f"{args.method}: {describe(args.method)}\n\nRecipe, preset {args.preset}:\n{found}")
    return 0


def _is_suite(name: str) -> bool:
    from poem.bench import suites

    return name in suites.names()


def _show_table(name: str, form: str) -> int:
    """Print the paper's numbers of a table."""
    from poem.bench import suites
    from poem.report.export import paper_table

    table = paper_table(suites.load(name, "full"))
    if form == "text":
        print(f"{table.caption}:\n")
    print(getattr(table, form)().rstrip("\n"))
    if form == "text":
        print(f"\npoem reproduce {name} measures ours beside them")
    return 0


def _raise_if_near_a_table(name: str) -> None:
    """Raise if a name is more like a table's than like a method's."""
    from poem._util.nearest import nearest_names
    from poem.bench import suites
    from poem.recipes.methods import methods

    near = nearest_names(name, [*suites.names(), *methods()])
    if near and _is_suite(near[0]):
        raise ValueError(f"unknown method or table {name!r}; did you mean {near[0]!r}?")


def _raise_if_other_kind(name: str) -> None:
    """Raise if a name is not a method but of another kind, such as a base network, and say which."""
    from poem.cli.list import KINDS, names_of

    single = {"bases": "a base network", "data": "a data set"}
    for kind in KINDS[1:]:
        if name in names_of(kind):
            raise ValueError(f"{name!r} is {single.get(kind, f'a {kind[:-1]}')}, not a method; see `poem list {kind}`")
