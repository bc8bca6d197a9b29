"""Example: poem corrupt imagenet/val imagenet-c --corruptions fog snow --severities 3 5 --size imagenet.

Writes DST/corruption/severity/class/file for each SRC/class/file. Run the same command again to resume after a stop:
files that exist are kept, and the result is the same to the byte. Images that cannot be read are listed at the end
(exit code 1).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from poem._util.limits import available_cores
from poem.cli._option_checks import path_argument


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("source", metavar="SRC", type=path_argument, help="folder of class folders of images")
    parser.add_argument(
        "target", metavar="DST", type=path_argument, help="folder to fill; may hold part of the result already"
    )
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
    """Fill the target folder; print how many files were written, were there already and could not be read."""
    from concurrent.futures.process import BrokenProcessPool

    from poem._util.files import check_folder_writable
    from poem._util.progress import Progress
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
    workers = min(args.workers or available_cores(), len(found.images))
    unreadable: list[str] = []
    written, there, lost, stopped, code = 0, 0, 0, "", 0
    try:
        settings = _folder.resolve_settings(args.target, settings, found, names)
        _folder.remove_temp_files(args.target)
        if settings.profile is not None:
            print(f"profile: {settings.profile} (constants for {PROFILES[settings.profile]} pixels)")
        if "frost" in names:
            print(f"frost textures: {frost_source()}")
        todo = _folder.jobs(found, args.target, names, severities)
        with Progress("corrupt", total, unit="files") as progress:
            for outcome in _folder.run_jobs(todo, args.target, settings, workers):
                written, there = written + outcome.written, there + outcome.there
                progress.advance(each)
                if outcome.unreadable:
                    lost += each - outcome.written - outcome.there
                    unreadable.append(f"{outcome.name}: {outcome.unreadable}")
                if outcome.unwritable:
                    raise OSError(outcome.unwritable)
    except KeyboardInterrupt:
        stopped, code = "stopped; type the same command again to go on", 130
    except BrokenProcessPool:
        code, stopped = 1, "a worker was killed, often for lack of memory; type the same command again to go on"
        stopped += f", with fewer --workers than {workers} if it happens again"
    except OSError as error:
        stopped, code = f"{error}; make room, or mend what it names, and type the same command again to go on", 1
    finally:
        _folder.remove_temp_files(args.target)

    print(_summary(args.target, written, there, total, total - written - there - lost))
    if found.others:
        shown = ", ".join(found.others[:3]) + (", ..." if len(found.others) > 3 else "")
        print(f"left alone: {_count(len(found.others), 'file')} of {args.source}, no images in class folders: {shown}")
    if unreadable:
        print(f"{_count(len(unreadable), 'image')} could not be read:", *unreadable, sep="\n  ", file=sys.stderr)
    if stopped:
        print(f"poem corrupt: {stopped}", file=sys.stderr)
    return code or (1 if unreadable else 0)


def _summary(target: Path, written: int, there: int, total: int, missing: int) -> str:
    """One line: files written, files there already, and files still missing, without those of unreadable images."""
    if there == total:
        return f"nothing to do: {'the one file was' if total == 1 else f'all {total} files were'} there"
    words = [f"{_count(written, 'file')} written to {target}"]
    words += [f"{there} were there already"] if there else []
    words += [f"{missing} still to make"] if missing else []
    return ", ".join(words)


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
