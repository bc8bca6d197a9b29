"""Examples:
poem verify effnet-lite0 tiny-imagenet-val --root ROOT
poem verify vit-b16-D imagenet-c --root ROOT --corruption fog --limit 2000
poem verify vit-tiny16 imagenet-val-3k --root ROOT --weights FOLDER
poem verify cifar10-bn cifar10 --root ROOT
poem verify digits-bn digits-test
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from poem.cli import _option_checks as checks
from poem.cli._option_checks import rgb_argument


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("base", help="a named base, a hub id or package.module:name; 'list' for all names")
    parser.add_argument(
        "data", nargs="?", help="a data set's name, package.module:name, or a folder or tar of class folders"
    )
    parser.add_argument("--root", help="where named data lies; default: $POEM_DATA")
    parser.add_argument("--weights", help="a file or folder with the weights, or 'random'")
    parser.add_argument("--limit", type=int, metavar="N", help="measure N images instead of all")
    parser.add_argument("--mean", type=rgb_argument, help="what your code subtracts, as 0.485,0.456,0.406")
    parser.add_argument("--std", type=rgb_argument, help="what your code divides by, as 0.229,0.224,0.225")
    parser.add_argument("--corruption", help="of imagenet-c or cifar10-c; default: all fifteen")
    parser.add_argument("--severity", type=int, default=5)
    parser.add_argument("--under", help="the folder inside an archive that holds the class folders")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="one JSON object instead of text, or beside it in FILE"
    )


def run(args: argparse.Namespace) -> int:
    """Measure the source accuracy, compare it with what is known, print the findings; returns 0 for pass, else 1."""
    if args.base == "list":
        return _print_bases()
    if args.data is None:
        raise ValueError("expected a base and a data set, as in poem verify effnet-lite0 tiny-imagenet-val")
    checks.check_std(args.std)
    checks.check_range(args, 1, None, "batch_size")
    checks.check_devices(args.device)

    import json
    import sys
    from pathlib import Path

    from poem._util.files import check_file_writable, write_atomic
    from poem.zoo.verify import verify

    if args.json not in (None, "-"):
        check_file_writable(Path(args.json))

    verdict = verify(
        args.base, args.data, args.root, weights=args.weights, mean=args.mean, std=args.std, limit=args.limit,
        corruption=args.corruption, severity=args.severity, under=args.under, batch_size=args.batch_size,
        device=args.device, watch=_watch,
    )  # fmt: skip
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    held = json.dumps({"command": command, **verdict.to_dict()}, indent=1)
    print(held if args.json == "-" else f"{verdict.card}\n\n{verdict}")
    if args.json not in (None, "-"):
        write_atomic(Path(args.json), f"{held}\n")
    return 0 if verdict.passed else 1


def _watch(indices: Sequence[int], title: str) -> Iterable[int]:
    """Show the progress of a pass over images."""
    from poem._util.progress import track

    return track(indices, title[:40], len(indices), unit="images")


def _print_bases() -> int:
    from poem import zoo
    from poem._util.outside import announced
    from poem.zoo.catalog import own_bases

    others = announced("base")
    for name in own_bases():
        base = zoo.base(name)
        print(f"{name:<16} {base.kind:<11} {base.tag}\n{'':<16} {base.normalisation}; {base.notes}")
        for accuracy in base.known[:2]:
            print(f"{'':<16} {accuracy}")
        if name in others:
            print(f"{'':<16} another is {others.pop(name)}")
    for name, found in others.items():
        print(f"{name:<16} outside     {found}")
    return 0
