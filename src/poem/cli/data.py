"""Check which files of a data set are on this disk, which are missing, and where they come from.

Example: poem data check imagenet-c /data --sample all
"""

from __future__ import annotations

import argparse


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("action", choices=["check"], help="check: look for a data set's files on this disk")
    parser.add_argument("name", help="imagenet-c, cifar10-c, imagenet-r, cifar10, folder, ...")
    parser.add_argument("root", nargs="?", help="where it lies; by default the folder named by POEM_DATA")
    parser.add_argument("--root", dest="root_option", metavar="ROOT", help="the same, by name")
    parser.add_argument(
        "--sample",
        type=_sample_argument,
        default=32,
        metavar="N",
        help="images to decode, spread over the set, or all; default: 32",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _sample_argument(text: str) -> int | str:
    """Parse a number of images, or "all", for argparse."""
    try:
        return text if text == "all" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number of images, or all, got {text!r}") from None


def run(args: argparse.Namespace) -> int:
    """Print what was found; returns 0 if the data set is complete, else 1."""
    import json

    from poem.streams.datasets.check import check

    if args.root is not None and args.root_option is not None:
        raise ValueError("expected one root, got two: give it by position or by --root")
    found = check(args.name, args.root if args.root is not None else args.root_option, sample=args.sample)
    print(json.dumps(found.to_dict(), indent=2) if args.json else found)
    return 0 if found.complete else 1
