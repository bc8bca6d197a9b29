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
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = {".jpg": "JPEG", ".jpeg": "JPEG", ".png": "PNG", ".bmp": "BMP", ".ppm": "PPM", ".webp": "WEBP"}
RECORD = "poem-corrupt.json"
_PARTS = ".poem-parts"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What decides the bytes of a result, beside the image itself."""

    seed: int = 0
    quality: int = 85
    size: str = "keep"
    profile: str | None = None


@dataclass(frozen=True)
class Job:
    """One source image, and the files still to be made from it."""

    source: Path
    name: str
    targets: tuple[tuple[str, int], ...]


@dataclass
class Outcome:
    """What became of a job: how many files were written, and the reason where it went wrong."""

    name: str
    written: int = 0
    unreadable: str = ""
    unwritable: str = ""


@dataclass
class Survey:
    """What the source folder holds: images, and files that are none."""

    images: list[Path] = field(default_factory=list)
    others: list[Path] = field(default_factory=list)


def survey(source: Path) -> Survey:
    """List a folder of class folders, sorted."""
    if not source.is_dir():
        raise FileNotFoundError(f"expected a folder of class folders, got {source}, which is no folder")
    found = Survey()
    for path in sorted(source.rglob("*")):
        if path.is_file():
            inside = len(path.relative_to(source).parts) > 1
            (found.images if inside and path.suffix.lower() in FORMATS else found.others).append(path)
    if not found.images:
        raise ValueError(
            f"expected class folders with {', '.join(FORMATS)} files in {source}, found none; "
            "put the images into one folder per class"
        )
    return found


def record(target: Path, settings: Settings) -> None:
    """Note the settings in the target folder; refuse a folder that was begun with others."""
    from poem.streams._frost import frost_source

    target.mkdir(parents=True, exist_ok=True)
    ours = {**asdict(settings), "frost": frost_source()}
    path = target / RECORD
    if path.exists():
        theirs = json.loads(path.read_text())
        differ = [f"{key} {theirs.get(key)!r}, not {ours[key]!r}" for key in ours if theirs.get(key) != ours[key]]
        if differ:
            raise ValueError(
                f"expected the settings {target} was begun with: {'; '.join(differ)}; pass those, or another folder"
            )
        return
    _write(target, path, (json.dumps(ours, indent=1) + "\n").encode())


def jobs(found: Survey, source: Path, target: Path, corruptions: list[str], severities: list[int]) -> Iterator[Job]:
    """Yield a job per image; its targets are those that do not exist yet."""
    for path in found.images:
        name = path.relative_to(source).as_posix()
        missing = (pair for pair in ((c, s) for c in corruptions for s in severities) if not _done(target, pair, name))
        yield Job(path, name, tuple(missing))


def _done(target: Path, pair: tuple[str, int], name: str) -> bool:
    try:
        return (target / pair[0] / str(pair[1]) / name).stat().st_size > 0  # a power cut may leave an empty file
    except FileNotFoundError:
        return False


def work(job: Job, target: Path, settings: Settings) -> Outcome:
    """Make all files of one job; a file that cannot be read or written is told, not raised."""
    import numpy as np
    from PIL import Image

    from poem.streams.corruptions import corrupt

    outcome = Outcome(job.name)
    try:
        with Image.open(job.source) as file:
            pixels = np.array(_sized(file.convert("RGB"), settings.size))
    except Exception as error:  # a decoder may raise anything on broken bytes
        outcome.unreadable = f"{type(error).__name__}: {error}"
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
        except ValueError as error:
            outcome.unreadable = str(error)
            return outcome
        data = io.BytesIO()
        Image.fromarray(out).save(data, kind, **options)
        try:
            _write(target, target / corruption / str(severity) / job.name, data.getvalue())
        except OSError as error:
            outcome.unwritable = f"{error.strerror or error} ({error.filename or target})"
            return outcome
        outcome.written += 1
    return outcome


def _sized(picture: Image, size: str) -> Image:
    """Return the picture as it is, or as ImageNet is read: short side 256, middle 224 x 224."""
    if size == "keep":
        return picture
    from PIL.Image import Resampling

    width, height = picture.size
    short = min(width, height)
    picture = picture.resize((256 * width // short, 256 * height // short), Resampling.BILINEAR)
    left, top = (round((side - 224) / 2) for side in picture.size)
    return picture.crop((left, top, left + 224, top + 224))


def _write(target: Path, path: Path, data: bytes) -> None:
    """Write a file whole or not at all."""
    part = target / _PARTS / f"{os.getpid()}-{threading.get_ident()}"
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        for tries in range(5, -1, -1):
            part.parent.mkdir(exist_ok=True)
            try:
                part.write_bytes(data)
                os.replace(part, path)
                break
            except FileNotFoundError:  # another run of the command, ending, has just swept the folder
                if not tries:
                    raise
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def sweep(target: Path) -> None:
    """Remove half-written files that dead processes left, and their folder."""
    parts = target / _PARTS
    for part in parts.glob("*-*"):
        owner = int(part.name.split("-")[0])
        if owner == os.getpid() or not _alive(owner):
            part.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not there, or in use by another run
        parts.rmdir()


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
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
                yield work(job, target, settings) if job.targets else Outcome(job.name)
        finally:
            torch.set_num_threads(threads)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_settle, initargs=(os.getpid(),))
    waiting: set[Future[Outcome]] = set()
    try:
        for job in todo:
            if not job.targets:
                yield Outcome(job.name)
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
