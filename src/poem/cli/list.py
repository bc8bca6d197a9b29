"""Examples:
poem list                   every method, one line each
poem list 'sar*'            those that match
poem list bases 'vit*'      named models; also: parts corruptions data scenarios suites
poem list suites --json

Names that installed packages announce come last, each with its package; package.module:name needs no announcement.
Without a pattern for methods, a line on standard error names the other kinds.
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from poem._util.outside import Kind

KINDS = ("methods", "parts", "corruptions", "bases", "data", "scenarios", "suites")
SUFFIX_LINES = {
    "+poem": "{} that selects samples again after each update, with the adapt branch",
    "+poem-i": "{} that selects samples again after each update (POEM-I alone)",
    "+poem-ii": "{} with the adapt branch (POEM-II alone)",
    "*": "{} with its update made twice, on the samples it selected first",
}
"""One line about the method that a suffix makes of a host method."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("what", nargs="?", default="methods", help=f"{', '.join(KINDS)}; or a pattern for methods")
    parser.add_argument("pattern", nargs="?", default="*", help="a wildcard such as 'sar*'")
    parser.add_argument("--json", action="store_true", help="one JSON object of names and lines")


def run(args: argparse.Namespace) -> int:
    """Print one line for each name of a kind that matches the pattern."""
    import json
    import shutil
    import sys

    kind, pattern = (args.what, args.pattern) if args.what in KINDS else ("methods", args.what)
    names = names_of(kind)
    found = {name: line for name, line in names.items() if fnmatchcase(name, pattern)}
    if args.json:
        print(json.dumps(found, indent=1))
        return 0 if found else 1
    if not found:
        print(f"none of the {kind} matches {pattern!r}; {_hint(kind, pattern, names)}")
        return 1
    width, columns = max(len(name) for name in found), shutil.get_terminal_size((160, 24)).columns
    for name, line in found.items():
        print(_shorten(f"{name:<{width}}  {line}".rstrip(), columns))
    if (args.what, args.pattern) == ("methods", "*"):
        sys.stdout.flush()
        print(f"poem show NAME explains one; poem list KIND, for other kinds: {' '.join(KINDS[1:])}", file=sys.stderr)
    return 0


def _shorten(line: str, columns: int) -> str:
    """Cut a line that is longer than the terminal after a whole word, and end it in dots."""
    if len(line) <= columns:
        return line
    return line[: columns - 3].rpartition(" ")[0].rstrip(" ,;:") + " ..."


def _hint(kind: str, pattern: str, names: Mapping[str, str]) -> str:
    """Suggest the nearest kind or names where a pattern matches none."""
    from poem._util.nearest import nearest_names

    kinds = nearest_names(pattern, KINDS) if kind == "methods" else []
    near = [f"poem list {each}" for each in kinds] or nearest_names(pattern.strip("*"), names, most=2)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"kinds: {' '.join(KINDS)}" if kind == "methods" else f"`poem list {kind}` prints them all"


def names_of(kind: str) -> dict[str, str]:
    """Every name of a kind, with one line about it; names of other packages come last, with where they come from."""
    from poem._util.outside import announced

    groups: dict[str, Kind] = {"methods": "method", "parts": "part", "bases": "base", "data": "data set"}
    own = _own_names(kind)
    if kind not in groups:
        return own
    found = announced(groups[kind])
    hidden = {name: f"another is {each}; {own[name]}" for name, each in found.items() if name in own}
    return own | hidden | {name: str(each) for name, each in found.items() if name not in own}


def _own_names(kind: str) -> dict[str, str]:
    """Every name of a kind that this package has."""
    if kind == "methods":
        from poem.recipes.methods import HOSTS, METHODS, describe

        lines = {name: describe(name).splitlines()[0] for name in METHODS}
        return lines | {host + suffix: line.format(host) for host in HOSTS for suffix, line in SUFFIX_LINES.items()}
    if kind == "parts":
        return _parts()
    if kind == "corruptions":
        from poem.streams import CORRUPTIONS, EXTRA

        fifteen = dict.fromkeys(CORRUPTIONS, "one of ImageNet-C's fifteen")
        return fifteen | dict.fromkeys(EXTRA, "held out: settings may be chosen on it")
    if kind == "bases":
        from poem import zoo
        from poem.zoo.catalog import own_bases

        return {name: f"{zoo.base(name).tag}; {zoo.base(name).notes}" for name in own_bases()}
    if kind == "data":
        return _data()
    if kind == "scenarios":
        from poem.streams.orders import SCENARIOS

        return {name: (order.__doc__ or "").splitlines()[0] for name, order in SCENARIOS.items()}
    from poem.bench import suites

    return {name: suites.load(name).title for name in suites.names()}


def _parts() -> dict[str, str]:
    """The parts that a recipe is made of, without their base classes and the arguments of their methods."""
    from dataclasses import is_dataclass

    from poem import parts

    kinds = [kind for name in parts.__all__ if isinstance(kind := getattr(parts, name), type)]
    bases = {base for kind in kinds for base in kind.__mro__[1:]}
    arguments = (parts.Batch, parts.Outputs, parts.Selected, parts.Update, parts.Outcome)
    found = [kind for kind in kinds if is_dataclass(kind) and kind not in bases and kind not in arguments]
    return {kind.__name__: (kind.__doc__ or "").strip().splitlines()[0] for kind in found}


def _data() -> dict[str, str]:
    """Data sets, each with the layout of its files."""
    from poem.streams.datasets import DATASETS
    from poem.streams.datasets.check import PACKAGED
    from poem.streams.datasets.named_sets import IMAGENET_C, NAMED_SETS

    other = {
        "imagenet-c": IMAGENET_C.layout,
        "folder": "class folders of your own images",
        "archive": "the same in a tar",
        **{f"cifar{count}-c": "labels.npy and <corruption>.npy, made for all five severities" for count in (10, 100)},
        **{f"cifar{count}": "the binary version, a folder of class folders, or a tar of either" for count in (10, 100)},
        **{name: f"comes with a package: {words}" for name, words in PACKAGED.items()},
    }
    other["digits"] = f"8x8, not the digits bases' own set (digits-test); {other['digits']}"
    return {name: NAMED_SETS[name].layout if name in NAMED_SETS else other.get(name, "") for name in DATASETS}
