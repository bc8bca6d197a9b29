"""Examples:
poem list                   every method, one line each
poem list 'sar*'            those that match
poem list bases 'vit*'      named models; also: parts corruptions data scenarios suites
poem list suites --json
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse
from collections.abc import Mapping
from fnmatch import fnmatchcase

KINDS = ("methods", "parts", "corruptions", "bases", "data", "scenarios", "suites")
GROWN = {
    "+poem": "{} that looks again after each update, with the adapt branch",
    "+poem-i": "{} that looks again after each update (POEM-I alone)",
    "+poem-ii": "{} with the adapt branch (POEM-II alone)",
    "*": "{} with its update made twice, on the samples of its first look",
}
"""What a suffix makes of a base, in a line."""


def options(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("what", nargs="?", default="methods", help=f"{', '.join(KINDS)}; or a pattern for methods")
    parser.add_argument("pattern", nargs="?", default="*", help="a wildcard such as 'sar*'")
    parser.add_argument("--json", action="store_true", help="one JSON object of names and lines")


def run(args: argparse.Namespace) -> int:
    """Print one line per name."""
    import json
    import shutil
    import sys

    what, pattern = (args.what, args.pattern) if args.what in KINDS else ("methods", args.what)
    known = named(what)
    found = {name: line for name, line in known.items() if fnmatchcase(name, pattern)}
    if args.json:
        print(json.dumps(found, indent=1))
        return 0 if found else 1
    if not found:
        print(f"none of the {what} matches {pattern!r}; {_hint(what, pattern, known)}")
        return 1
    wide, room = max(len(name) for name in found), shutil.get_terminal_size((160, 24)).columns
    for name, line in found.items():
        print(_cut(f"{name:<{wide}}  {line}".rstrip(), room))
    if args.what == "methods" and sys.stdout.isatty():
        print(f"\npoem show NAME explains one; poem list KIND has the {', '.join(KINDS[1:])}")
    return 0


def _cut(line: str, room: int) -> str:
    """One line of a terminal: what is longer ends in dots, after a whole word."""
    if len(line) <= room:
        return line
    return line[: room - 3].rpartition(" ")[0].rstrip(" ,;:") + " ..."


def _hint(what: str, pattern: str, known: Mapping[str, str]) -> str:
    """The nearest kinds or names."""
    from poem._util.nearest import nearest_names

    kinds = nearest_names(pattern, KINDS) if what == "methods" else []
    near = [f"poem list {kind}" for kind in kinds] or nearest_names(pattern.strip("*"), known, most=2)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"kinds: {' '.join(KINDS)}" if what == "methods" else f"`poem list {what}` prints them all"


def named(what: str) -> dict[str, str]:
    """Everything of a kind: its name and a line about it."""
    if what == "methods":
        from poem.recipes.methods import HOSTS, METHODS, describe

        lines = {name: describe(name).splitlines()[0] for name in METHODS}
        return lines | {host + suffix: words.format(host) for host in HOSTS for suffix, words in GROWN.items()}
    if what == "parts":
        return _parts()
    if what == "corruptions":
        from poem.streams import CORRUPTIONS, EXTRA

        fifteen = dict.fromkeys(CORRUPTIONS, "one of ImageNet-C's fifteen")
        return fifteen | dict.fromkeys(EXTRA, "held out: settings may be chosen on it")
    if what == "bases":
        from poem import zoo

        return {name: f"{zoo.base(name).tag}; {zoo.base(name).notes}" for name in zoo.bases()}
    if what == "data":
        return _data()
    if what == "scenarios":
        from poem.streams.orders import SCENARIOS

        return {name: (order.__doc__ or "").splitlines()[0] for name, order in SCENARIOS.items()}
    from poem.bench import suites

    return {name: suites.load(name).title for name in suites.names()}


def _parts() -> dict[str, str]:
    """The words that a recipe is made of; what they are built on, and are handed, is for those who write one."""
    from dataclasses import is_dataclass

    from poem import parts

    kinds = [kind for name in parts.__all__ if isinstance(kind := getattr(parts, name), type)]
    built_on = {base for kind in kinds for base in kind.__mro__[1:]}
    handed = (parts.Batch, parts.Outputs, parts.Selected, parts.Update, parts.Outcome)
    words = [kind for kind in kinds if is_dataclass(kind) and kind not in built_on and kind not in handed]
    return {kind.__name__: (kind.__doc__ or "").strip().splitlines()[0] for kind in words}


def _data() -> dict[str, str]:
    """Data sets, and how each lies on a disk."""
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
