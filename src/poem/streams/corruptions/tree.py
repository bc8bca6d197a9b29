"""A folder of class folders, corrupted into the layout of ImageNet-C: corruption/severity/class/file.

Every file is written beside its place and moved there, so that it exists whole or not at all; what exists is not made
again. An image's id is its path below the source folder, so the result does not depend on order, workers or restarts.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from poem._util.files import TEMP_SUFFIX, printable, read_bytes, read_json, write_atomic
from poem.streams.corruptions import corrupt, profile_of
from poem.streams.corruptions.frost import frost_source
from poem.streams.datasets.archives import LARGEST
from poem.streams.datasets.folders import FORMATS, listing
from poem.streams.images import Unreadable
from poem.streams.loading.decode import pillow, size
from poem.streams.loading.prepare import EVAL, Prepare

RECORD = "poem-corrupt.json"
_LOOKS = 32  # images whose sizes choose the profile
_PARTS = ".poem-parts"
_LEFT_OVER = re.compile(rf"\..*{TEMP_SUFFIX}|(?P<before>\d+)-\d+")  # the second form is an older version's


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides the bytes of a result, beside the image itself."""

    seed: int = 0
    quality: int = 85
    size: str = "keep"
    profile: str | None = None
    """None until `settled`."""

    @property
    def prepare(self) -> Prepare:
        """How a source image is read."""
        return EVAL if self.size == "imagenet" else Prepare()


@dataclass(frozen=True)
class Job:
    """One source image, and the files still to be made from it."""

    source: Path
    name: str
    targets: tuple[tuple[str, int], ...]
    there: int
    """How many exist already."""


@dataclass
class Outcome:
    """What became of a job: how many files were there, how many were written, and the reason where it went wrong."""

    name: str
    there: int = 0
    written: int = 0
    unreadable: str = ""
    unwritable: str = ""


@dataclass(frozen=True)
class Survey:
    """What the source folder holds, as paths below it: images, and files that are none."""

    source: Path
    images: tuple[str, ...]
    others: tuple[str, ...]


def survey(source: Path) -> Survey:
    """List a folder of class folders."""
    if not source.is_dir():
        raise FileNotFoundError(f"expected a folder of class folders, got {source}, which is no folder")
    found = listing(source)
    images = tuple(os.fsdecode(bytes(name)) for name in found.store.names)
    if not images:
        raise ValueError(
            f"expected class folders with {', '.join(FORMATS)} files in {source}, found none; "
            "put the images into one folder per class"
        )
    return Survey(source, images, found.others)


def settled(target: Path, settings: Settings, found: Survey, corruptions: list[str]) -> Settings:
    """The settings with a profile, noted in the target folder; a folder that was begun with others is refused.

    The profile is the one named; else the folder's; else the one nearest to the usual size of the images. Textures of
    frost count where there is frost: two kinds may not stand in one tree.
    """
    path = target / RECORD
    theirs = _recorded(path)
    profile = settings.profile or theirs.get("profile") or _profile(settings, found)
    settings = replace(settings, profile=profile)
    ours: dict[str, Any] = asdict(settings)
    if "frost" in corruptions:
        ours["frost"] = frost_source()
    binding = [key for key in ours if theirs.get(key) is not None and (key != "frost" or (target / "frost").exists())]
    differ = [f"{key} {theirs[key]!r}, not {ours[key]!r}" for key in binding if theirs[key] != ours[key]]
    if differ:
        raise ValueError(
            f"expected the settings {target} was begun with: {'; '.join(differ)}; pass those, or another folder"
        )
    if theirs != {**theirs, **ours}:
        target.mkdir(parents=True, exist_ok=True)
        _write(target, path, (json.dumps({**theirs, **ours}, indent=1) + "\n").encode())
    return settings


def _recorded(path: Path) -> dict[str, Any]:
    """What the target folder says of itself, if it was begun."""
    if not path.exists():
        return {}
    try:
        held = read_json(path)
    except ValueError as error:
        held = str(error)
    if not isinstance(held, dict):
        raise ValueError(
            f"expected the settings of an earlier run in {path}, got {held}; remove it, or take another DST"
        )
    return held


def _profile(settings: Settings, found: Survey) -> str | None:
    """The profile nearest to the usual shorter side: the median of some images spread over the source, if any opens."""
    if settings.prepare.crop is not None:
        return profile_of(settings.prepare.crop)
    sides = []
    for name in found.images[:: -(-len(found.images) // _LOOKS)]:
        with contextlib.suppress(Exception):  # a broken one is told later
            sides.append(min(size(read_bytes(found.source / name, LARGEST), name)))
    return profile_of(round(median(sides))) if sides else None


def jobs(found: Survey, target: Path, corruptions: list[str], severities: list[int]) -> Iterator[Job]:
    """Yield a job per image; its targets are those that do not exist yet."""
    wanted = [(corruption, severity) for corruption in corruptions for severity in severities]
    for name in found.images:
        missing = tuple(pair for pair in wanted if not _done(target, pair, name))
        yield Job(found.source / name, name, missing, len(wanted) - len(missing))


def _done(target: Path, pair: tuple[str, int], name: str) -> bool:
    try:
        return (target / pair[0] / str(pair[1]) / name).stat().st_size > 0  # a power cut may leave an empty file
    except FileNotFoundError:
        return False


def work(job: Job, target: Path, settings: Settings) -> Outcome:
    """Make all files of one job; a file that cannot be read or written is told, not raised."""
    outcome = Outcome(job.name, job.there)
    try:
        pixels = settings.prepare(read_bytes(job.source, LARGEST), job.name)
    except (OSError, Unreadable) as error:
        outcome.unreadable = str(error).removeprefix(f"{printable(job.name)}: ")
        return outcome
    kind = FORMATS[job.source.suffix.lower()]
    options: dict[str, Any] = {"quality": settings.quality} if kind in ("JPEG", "WEBP") else {}
    if kind == "JPEG":
        options["optimize"] = True
    for corruption, severity in job.targets:
        try:
            out = corrupt(
                pixels[None], corruption, severity, seed=settings.seed, ids=[job.name], profile=settings.profile
            )[0]
            picture, data = pillow().fromarray(out.permute(1, 2, 0).contiguous().numpy()), io.BytesIO()
            picture.save(data, kind, **options)
        except (ValueError, OSError) as error:  # too small to corrupt, or too large for its format
            outcome.unreadable = str(error)
            return outcome
        try:
            _write(target, target / corruption / str(severity) / job.name, data.getvalue())
        except OSError as error:
            outcome.unwritable = f"{error.strerror or error} ({error.filename or target})"
            return outcome
        outcome.written += 1
    return outcome


def _write(target: Path, path: Path, data: bytes) -> None:
    """Write a file whole or not at all, by way of a folder apart, so that no half of one stands among images."""
    for tries in range(5, -1, -1):
        try:
            write_atomic(path, data, temp_folder=target / _PARTS, sync=False)
            break
        except FileNotFoundError:  # another run of the command, ending, has just swept the folder
            if not tries:
                raise


def sweep(target: Path) -> None:
    """Remove half-written files that dead processes left, and their folder, as far as that can be done."""
    parts = target / _PARTS
    for part in parts.glob("*"):
        named = _LEFT_OVER.fullmatch(part.name)
        owner = 0 if named is None else int(named["process"] or named["before"])
        if named is not None and (owner == os.getpid() or not _alive(owner)):
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not there, or in use by another run
        parts.rmdir()


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True


def run(todo: Iterator[Job], target: Path, settings: Settings, workers: int) -> Iterator[Outcome]:
    """Yield outcomes as they come, in this process (one worker) or from several."""
    if workers == 1:
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for job in todo:
                yield work(job, target, settings) if job.targets else Outcome(job.name, job.there)
        finally:
            torch.set_num_threads(threads)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_settle, initargs=(os.getpid(),))
    waiting: set[Future[Outcome]] = set()
    try:
        for job in todo:
            if not job.targets:
                yield Outcome(job.name, job.there)
                continue
            waiting.add(pool.submit(work, job, target, settings))
            while len(waiting) >= 4 * workers:  # a bounded queue: memory stays flat on any number of images
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield future.result()
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                yield future.result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _settle(parent: int) -> None:
    """Prepare a worker: one thread each, no Ctrl-C of its own, and an end when the parent is gone."""
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.3)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
