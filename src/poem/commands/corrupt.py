"""Example: poem corrupt imagenet/val imagenet-c --corruptions fog snow --severities 3 5 --size imagenet.

Makes DST/corruption/severity/class/file from SRC/class/file. Run the same command again to go on after a stop: what
exists is kept, and the result is the same to the byte. Images that cannot be read are listed at the end (exit code 1).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol


class _Bar(Protocol):
    def __call__(self, steps: int) -> None: ...


def options(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("source", metavar="SRC", type=Path, help="folder of class folders of images")
    parser.add_argument("target", metavar="DST", type=Path, help="folder to fill; may hold a part of the result")
    parser.add_argument("--corruptions", nargs="+", metavar="NAME", help="names, 'all' for 19; default: the 15")
    parser.add_argument("--severities", nargs="+", type=int, default=[5], metavar="N", help="1 to 5; default: 5")
    parser.add_argument("--quality", type=int, default=85, help="of the JPEG files; default: 85, as ImageNet-C")
    parser.add_argument("--workers", type=int, default=0, help="processes; default: one per core")
    parser.add_argument("--seed", type=int, default=0, help="default: 0")
    parser.add_argument(
        "--size", choices=["keep", "imagenet"], default="keep", help="imagenet: short side 256, middle 224 x 224"
    )
    parser.add_argument("--profile", help="imagenet, tiny-imagenet or cifar; default: the one nearest in size")


def run(args: argparse.Namespace) -> int:
    """Fill the target folder, and say what was made, kept and could not be read."""
    import os

    from poem.streams import _tree
    from poem.streams.corruptions import CORRUPTIONS, EXTRA, check, frost_source

    names = args.corruptions or list(CORRUPTIONS)
    names = list(CORRUPTIONS + EXTRA) if names == ["all"] else list(dict.fromkeys(names))
    severities = sorted(set(args.severities))
    for name in names:
        for severity in severities:
            check(name, severity, args.profile)
    if not 1 <= args.quality <= 100:
        raise ValueError(f"expected --quality 1..100, got {args.quality}; ImageNet-C has 85")
    if args.workers < 0:
        raise ValueError(f"expected --workers 1 or more, got {args.workers}; leave it out for one per core")
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ImportError("poem corrupt reads images with Pillow; type: pip install 'poem-tta[bench]'") from error

    settings = _tree.Settings(seed=args.seed, quality=args.quality, size=args.size, profile=args.profile)
    found = _tree.survey(args.source)
    if args.target.resolve().is_relative_to(args.source.resolve()):
        raise ValueError(f"expected DST outside SRC, got {args.target} inside {args.source}; choose another DST")
    _tree.record(args.target, settings)
    _tree.sweep(args.target)
    if "frost" in names:
        print(f"frost textures: {frost_source()}")
    each = len(names) * len(severities)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(args.workers or cores, len(found.images))
    todo = _tree.jobs(found, args.source, args.target, names, severities)
    broken: list[str] = []
    written, seen, full, stopped = 0, 0, "", False
    try:
        with _progress(len(found.images) * each) as advance:
            for outcome in _tree.run(todo, args.target, settings, workers):
                written, seen = written + outcome.written, seen + 1
                advance(each)
                if outcome.unreadable:
                    broken.append(f"{outcome.name}: {outcome.unreadable}")
                if outcome.unwritable:
                    full = outcome.unwritable
                    break
    except KeyboardInterrupt:
        stopped = True
    finally:
        _tree.sweep(args.target)

    print(f"{written} files written to {args.target}, from {seen} of {len(found.images)} images")
    if found.others:
        print(f"{len(found.others)} files of {args.source} are no images in class folders, e.g. {found.others[0]}")
    if broken:
        print(f"{len(broken)} images could not be read:", *broken, sep="\n  ", file=sys.stderr)
    if full:
        print(f"poem corrupt: cannot write: {full}; make room and type the same command again", file=sys.stderr)
    if stopped:
        print("poem corrupt: stopped; type the same command again to go on", file=sys.stderr)
    return 130 if stopped else 1 if full or broken else 0


@contextmanager
def _progress(total: int) -> Iterator[_Bar]:
    """Show a bar on a terminal, and a line per tenth elsewhere."""
    if sys.stderr.isatty():
        try:
            from rich.console import Console
            from rich.progress import Progress
        except ImportError:
            pass
        else:
            with Progress(console=Console(stderr=True)) as bar:
                task = bar.add_task("corrupting", total=total)
                yield lambda steps: bar.advance(task, steps)
            return
    done = 0

    def line(steps: int) -> None:
        nonlocal done
        tenth = done * 10 // total
        done += steps
        if done * 10 // total > tenth:
            print(f"{done} of {total} files", file=sys.stderr, flush=True)

    yield line
