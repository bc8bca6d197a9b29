"""Examples:
poem list                   every method, one line each
poem list 'sar*'            those that match
poem list bases 'vit*'      named models; also: parts corruptions data scenarios suites
poem list suites --json
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse
from fnmatch import fnmatchcase

KINDS = ("methods", "parts", "corruptions", "bases", "data", "scenarios", "suites")


def options(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("what", nargs="?", default="methods", help=f"{', '.join(KINDS)}; or a pattern for methods")
    parser.add_argument("pattern", nargs="?", default="*", help="a wildcard such as 'sar*'")
    parser.add_argument("--json", action="store_true", help="one JSON object of names and lines")


def run(args: argparse.Namespace) -> int:
    """Print one line per name."""
    import json

    what, pattern = (args.what, args.pattern) if args.what in KINDS else ("methods", args.what)
    found = {name: line for name, line in named(what).items() if fnmatchcase(name, pattern)}
    if args.json:
        print(json.dumps(found, indent=1))
        return 0 if found else 1
    if not found:
        hint = f"kinds: {' '.join(KINDS)}" if what == "methods" else f"`poem list {what}` prints them all"
        print(f"none of the {what} matches {pattern!r}; {hint}")
        return 1
    wide = max(len(name) for name in found)
    for name, line in found.items():
        print(f"{name:<{wide}}  {line}"[:160])
    return 0


def named(what: str) -> dict[str, str]:
    """Everything of a kind: its name and a line about it."""
    if what == "methods":
        from poem.method import BASES, SUFFIXES, describe, methods

        def line(name: str) -> str:
            base = next((base for base in sorted(BASES, key=len, reverse=True) if name.startswith(base)), name)
            suffix = name[len(base) :]
            if suffix not in SUFFIXES:
                return describe(name).splitlines()[0]
            return f"{base}: " + (SUFFIXES[suffix].__doc__ or "").splitlines()[0]

        return {name: line(name) for name in methods()}
    if what == "parts":
        from poem import parts

        kinds = {name: getattr(parts, name) for name in parts.__all__}
        return {name: (kind.__doc__ or "").strip().splitlines()[0] for name, kind in kinds.items() if kind.__doc__}
    if what == "corruptions":
        from poem.streams import CORRUPTIONS, EXTRA

        return dict.fromkeys(CORRUPTIONS, "of the fifteen") | dict.fromkeys(EXTRA, "held out, for choosing")
    if what == "bases":
        from poem import zoo

        return {name: f"{zoo.base(name).tag}; {zoo.base(name).notes}" for name in zoo.bases()}
    if what == "data":
        from poem.streams._known import TREES
        from poem.streams.datasets import DATASETS

        return {name: TREES[name].layout if name in TREES else "" for name in DATASETS}
    if what == "scenarios":
        from poem.streams.orders import SCENARIOS

        return {name: (order.__doc__ or "").splitlines()[0] for name, order in SCENARIOS.items()}
    from poem import suites

    return {name: suites.load(name).title for name in suites.names()}
