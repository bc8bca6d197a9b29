"""Examples:
poem data check imagenet-c /data --sample all
poem data get cifar10-c --root /data
poem data get imagenet-c --root /data --corruption fog snow
poem data get --list

check: which files of a data set are on this disk, which are missing, how large they are, and where they come from.
get: download the data set, verify its checksum, and unpack it as check expects it. A download that broke off stays as
FILE.part, and the same command resumes it. Without a network the addresses, sizes and names are printed: a file that
was copied to ROOT by hand is verified and unpacked by the same command.
"""  # noqa: D205, D415 - an epilog of the command's help

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from poem.streams.datasets.sources import Archive


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument(
        "action", choices=["check", "get"], help="check: look for a data set's files on this disk; get: download it"
    )
    parser.add_argument("name", nargs="?", help="imagenet-c, cifar10-c, imagenet-r, cifar10, folder, ...")
    parser.add_argument("root", nargs="?", help="where it lies; by default the folder named by POEM_DATA")
    parser.add_argument("--root", dest="root_option", metavar="ROOT", help="the same, by name")
    parser.add_argument(
        "--sample",
        type=_sample_argument,
        default=32,
        metavar="N",
        help="check: images to decode, spread over the set, or all; default: 32",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--corruption", nargs="+", default=[], metavar="NAME",
        help="get imagenet-c: only these, and only the archives that hold them; default: the fifteen of the papers",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="get: print addresses, sizes and target names alone")
    parser.add_argument("--mirror", metavar="URL", help="get: a folder on the web with the same files")
    parser.add_argument("--keep", action="store_true", help="get: keep the archive after it is unpacked")


def _sample_argument(text: str) -> int | str:
    """Parse a number of images, or "all", for argparse."""
    try:
        return text if text == "all" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number of images, or all, got {text!r}") from None


def run(args: argparse.Namespace) -> int:
    """Check or get a data set; returns 0 if it is complete, 1 if files are missing, 2 without a network."""
    if args.root is not None and args.root_option is not None:
        raise ValueError("expected one root, got two: give it by position or by --root")
    root = args.root if args.root is not None else args.root_option
    return _check(args, root) if args.action == "check" else _get(args, root)


def _check(args: argparse.Namespace, root: str | None) -> int:
    import json

    from poem.streams.datasets.check import check

    if args.name is None:
        raise ValueError("expected the name of a data set, as in poem data check cifar10-c /data; see poem list data")
    for option in ("corruption", "list", "mirror", "keep"):
        if getattr(args, option):
            raise ValueError(f"--{option} belongs to poem data get, got it with check; leave it out")
    found = check(args.name, root, sample=args.sample)
    print(json.dumps(found.to_dict(), indent=2) if args.json else found)
    return 0 if found.complete else 1


def _get(args: argparse.Namespace, root: str | None) -> int:
    """Download and unpack a data set, or print where it is; returns 2 where its server cannot be reached."""
    import json

    from poem.streams.datasets import canonical
    from poem.streams.datasets.download import UnreachableError
    from poem.streams.datasets.sources import SOURCES, archives

    if args.name is None and not args.list:
        raise ValueError(f"expected the name of a data set: {', '.join(SOURCES)}; --list prints all addresses")
    names = [canonical(args.name)] if args.name is not None else list(SOURCES)
    wanted = {name: archives(name, args.corruption if args.name is not None else ()) for name in names}
    if args.list:
        found = {name: [_fields(each, root) for each in wanted[name]] for name in wanted}
        print(json.dumps(found, indent=2) if args.json else _listing(wanted, root))
        return 0
    place = _root(root)
    try:
        new = _get_all(wanted[names[0]], place, args)
    except UnreachableError as error:
        print(f"poem data: {error}", file=sys.stderr)
        print(_listing(wanted, str(place)))
        print(f"Copy these files to {place} from a machine with a network; the same command then unpacks them.")
        return 2
    if args.json:
        print(json.dumps({"name": names[0], "root": str(place), "new": [str(path) for path in new]}, indent=2))
    else:
        there = f"nothing to do: it is in {place} already; remove a folder to get it again"
        print("\n".join(f"new: {path}" for path in new) or there)
        print(f"next: poem data check {names[0]} --root {place}")
    return 0


def _root(root: str | None) -> Path:
    import os

    named = root if root is not None else os.environ.get("POEM_DATA", "")
    if not named:
        raise ValueError("no root given: pass --root DIR, or set POEM_DATA to the folder for data sets")
    place = Path(named).expanduser()
    if place.exists() and not place.is_dir():
        raise NotADirectoryError(f"expected a folder, or nothing yet, at {place}, got a file; choose another")
    return place


def _get_all(found: Sequence[Archive], root: Path, args: argparse.Namespace) -> list[Path]:
    """Get archives one after the other, each with a bar in megabytes."""
    from poem._util.progress import Progress
    from poem.streams.datasets.download import get_archive

    new: list[Path] = []
    for archive in found:
        with Progress(archive.file, unit="MB") as progress:

            def show(what: str, done: int, total: int, progress: Progress = progress) -> None:
                if what != progress.title:
                    progress.restart(what)
                progress.update(done // 10**6, max(1, -(-total // 10**6)))

            new += get_archive(archive, root, mirror=args.mirror, keep=args.keep, on_progress=show)
    return new


def _fields(archive: Archive, root: str | None) -> dict[str, object]:
    return {
        "file": archive.file, "address": archive.address, "bytes": archive.size,
        "checksum": archive.checksum or None, "stated_by": archive.stated_by or None,
        "targets": [str(Path(root or "ROOT") / target) for target in archive.targets],
    }  # fmt: skip


def _listing(wanted: dict[str, tuple[Archive, ...]], root: str | None) -> str:
    """Addresses, sizes, checksums and target names, for people."""
    from poem.streams.datasets.sources import gigabytes

    lines = []
    for name, found in wanted.items():
        total = gigabytes(sum(each.size for each in found))
        lines.append(f"{name}: {len(found)} file{'' if len(found) == 1 else 's'}, {total}")
        for each in found:
            about = "" if each.checksum else "about "
            lines += [f"  {each.file}, {about}{gigabytes(each.size)}", f"    from      {each.address}"]
            lines += [f"    checksum  {each.checksum_text}"]
            targets = [Path(root or "ROOT") / target for target in each.targets]
            rest = "".join(f", {path.name}" for path in targets[1:])
            lines += [f"    becomes   {targets[0]}{rest}"]
    return "\n".join(lines)
