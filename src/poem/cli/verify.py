"""Examples:
poem verify effnet-lite0 tiny-imagenet-val --root ROOT
poem verify vit-b16-D imagenet-c --root ROOT --corruption fog --limit 2000
poem verify cifar10-bn ROOT/cifar10-jpeg.tar.xz --under test --weights FOLDER
poem verify digits-bn digits-test
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence

from poem.cli import _values
from poem.cli._values import triple as triple


def options(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("base", help="a named base, or 'list' for all of them")
    parser.add_argument("data", nargs="?", help="a data set's name, or a folder or tar of class folders")
    parser.add_argument("--root", help="where named data lies; default: $POEM_DATA")
    parser.add_argument("--weights", help="a file or folder with the weights, or 'random'")
    parser.add_argument("--limit", type=int, help="so many images instead of all")
    parser.add_argument("--mean", type=triple, help="what your code subtracts, as 0.485,0.456,0.406")
    parser.add_argument("--std", type=triple, help="what your code divides by, as 0.229,0.224,0.225")
    parser.add_argument("--corruption", help="of imagenet-c or cifar10-c; default: all fifteen")
    parser.add_argument("--severity", type=int, default=5)
    parser.add_argument("--under", help="the folder inside an archive that holds the class folders")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="one JSON object instead of text, or beside it in FILE"
    )


def run(args: argparse.Namespace) -> int:
    """Measure, compare, say pass or what is wrong; 0 for pass, 1 otherwise."""
    if args.base == "list":
        return _list()
    if args.data is None:
        raise ValueError("expected a base and a data set, as in poem verify effnet-lite0 tiny-imagenet-val")
    _values.positive_std(args.std)
    _values.within(args, 1, None, "batch_size")
    _values.device(args.device)

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
        device=args.device, watch=_bar,
    )  # fmt: skip
    command = " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])
    held = json.dumps({"command": command, **verdict.to_dict()}, indent=1)
    print(held if args.json == "-" else f"{verdict.card}\n\n{verdict}")
    if args.json not in (None, "-"):
        write_atomic(Path(args.json), f"{held}\n")
    return 0 if verdict.passed else 1


def _bar(indices: Sequence[int], words: str) -> Iterable[int]:
    """A progress bar on the terminal, nothing elsewhere."""
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(indices, words[:40], console=console, disable=not console.is_terminal, transient=True)


def _list() -> int:
    from poem import zoo

    for name in zoo.bases():
        base = zoo.base(name)
        print(f"{name:<16} {base.kind:<11} {base.tag}\n{'':<16} {base.normalisation}; {base.notes}")
        for known in base.known[:2]:
            print(f"{'':<16} {known}")
    return 0
