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

from poem.cli._values import named_path


class _Bar(Protocol):
    def __call__(self, steps: int) -> None: ...


def options(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("source", metavar="SRC", type=named_path, help="folder of class folders of images")
    parser.add_argument("target", metavar="DST", type=named_path, help="folder to fill; may hold a part of the result")
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
    from concurrent.futures.process import BrokenProcessPool

    from poem._util.files import check_folder_writable
    from poem.streams.corruptions import CORRUPTIONS, EXTRA, PROFILES, check_arguments, frost_source
    from poem.streams.corruptions import corrupt_folder as _folder

    names = args.corruptions or list(CORRUPTIONS)
    names = list(CORRUPTIONS + EXTRA) if names == ["all"] else list(dict.fromkeys(names))
    severities = sorted(set(args.severities))
    for name in names:
        for severity in severities:
            check_arguments(name, severity, args.profile)
    if not 1 <= args.quality <= 100:
        raise ValueError(f"expected --quality 1..100, got {args.quality}; ImageNet-C has 85")
    if args.workers < 0:
        raise ValueError(f"expected --workers 1 or more, got {args.workers}; leave it out for one per core")
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ImportError("poem corrupt reads images with Pillow; type: pip install 'poem-tta[bench]'") from error

    check_folder_writable(args.target)
    settings = _folder.Settings(seed=args.seed, quality=args.quality, size=args.size, profile=args.profile)
    found = _folder.list_source(args.source)
    if args.target.resolve().is_relative_to(args.source.resolve()):
        raise ValueError(f"expected DST outside SRC, got {args.target} inside {args.source}; choose another DST")
    each = len(names) * len(severities)
    total = len(found.images) * each
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(args.workers or cores, len(found.images))
    broken: list[str] = []
    written, there, lost, halt, code = 0, 0, 0, "", 0
    try:
        settings = _folder.resolve_settings(args.target, settings, found, names)
        _folder.remove_temp_files(args.target)
        if settings.profile is not None:
            print(f"profile: {settings.profile} (constants for {PROFILES[settings.profile]} pixels)")
        if "frost" in names:
            print(f"frost textures: {frost_source()}")
        todo = _folder.jobs(found, args.target, names, severities)
        with _progress(total) as advance:
            for outcome in _folder.run_jobs(todo, args.target, settings, workers):
                written, there = written + outcome.written, there + outcome.there
                advance(each)
                if outcome.unreadable:
                    lost += each - outcome.written - outcome.there
                    broken.append(f"{outcome.name}: {outcome.unreadable}")
                if outcome.unwritable:
                    raise OSError(outcome.unwritable)
    except KeyboardInterrupt:
        halt, code = "stopped; type the same command again to go on", 130
    except BrokenProcessPool:
        code, halt = 1, "a worker was killed, often for want of memory; type the same command again to go on"
        halt += f", with fewer --workers than {workers} if it happens again"
    except OSError as error:
        halt, code = f"{error}; make room, or mend what it names, and type the same command again to go on", 1
    finally:
        _folder.remove_temp_files(args.target)

    print(_summary(args.target, written, there, total, total - written - there - lost))
    if found.others:
        shown = ", ".join(found.others[:3]) + (", ..." if len(found.others) > 3 else "")
        print(f"left alone: {_count(len(found.others), 'file')} of {args.source}, no images in class folders: {shown}")
    if broken:
        print(f"{_count(len(broken), 'image')} could not be read:", *broken, sep="\n  ", file=sys.stderr)
    if halt:
        print(f"poem corrupt: {halt}", file=sys.stderr)
    return code or (1 if broken else 0)


def _summary(target: Path, written: int, there: int, total: int, missing: int) -> str:
    """One sentence: what was made, what was there, what is still missing (images that cannot be read aside)."""
    if there == total:
        return f"nothing to do: {'the one file was' if total == 1 else f'all {total} files were'} there"
    words = [f"{_count(written, 'file')} written to {target}"]
    words += [f"{there} were there already"] if there else []
    words += [f"{missing} still to make"] if missing else []
    return ", ".join(words)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


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
