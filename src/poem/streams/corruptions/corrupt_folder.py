"""Corrupt a folder of class folders into the layout of ImageNet-C: corruption/severity/class/file.

Every file is written atomically, and files that exist are skipped, so a run can be stopped and resumed. An image's id
is its path below the source folder, so the result does not depend on order, workers or restarts.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from poem._util.files import TEMP_SUFFIX, printable, read_bytes, write_atomic
from poem._util.processes import exit_with_parent, process_exists
from poem.streams.corruptions import corrupt, profile_of
from poem.streams.corruptions.frost import frost_source
from poem.streams.datasets.archives import MAX_FILE_BYTES
from poem.streams.datasets.corrupt_record import CORRUPT_RECORD, read_corrupt_record
from poem.streams.datasets.folders import FORMATS, listing
from poem.streams.images import Unreadable
from poem.streams.loading.decode import image_size, pillow
from poem.streams.loading.prepare import IMAGENET_EVAL, Prepare

_SIZE_SAMPLE = 32  # images whose sizes choose the profile
_TEMP_FOLDER = ".poem-parts"
_TEMP_FILE = re.compile(rf"\..*{TEMP_SUFFIX}|(?P<before>\d+)-\d+")  # the second form is an older version's


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The settings that the bytes of a result depend on, beside the image itself."""

    seed: int = 0
    quality: int = 85
    size: str = "keep"
    profile: str | None = None
    """None until `resolve_settings`."""

    @property
    def prepare(self) -> Prepare:
        """Resize and crop of a source image."""
        return IMAGENET_EVAL if self.size == "imagenet" else Prepare()


@dataclass(frozen=True)
class Job:
    """One source image, and the files still to be written from it."""

    source: Path
    name: str
    targets: tuple[tuple[str, int], ...]
    there: int
    """Number of files that exist already."""


@dataclass
class JobResult:
    """What one job did: files that existed, files written, and the reason where reading or writing failed."""

    name: str
    there: int = 0
    written: int = 0
    unreadable: str = ""
    unwritable: str = ""


@dataclass(frozen=True)
class SourceFiles:
    """The files of the source folder, as paths below it: images, and all others."""

    source: Path
    images: tuple[str, ...]
    others: tuple[str, ...]


def list_source(source: Path) -> SourceFiles:
    """List a folder of class folders; one without images is an error."""
    if not source.is_dir():
        raise FileNotFoundError(f"expected a folder of class folders, got {source}, which is no folder")
    found = listing(source)
    images = tuple(os.fsdecode(bytes(name)) for name in found.store.names)
    if not images:
        raise ValueError(
            f"expected class folders with {', '.join(FORMATS)} files in {source}, found none; "
            "put the images into one folder per class"
        )
    return SourceFiles(source, images, found.others)


def resolve_settings(target: Path, settings: Settings, found: SourceFiles, corruptions: list[str]) -> Settings:
    """Choose the profile and record the settings in the target folder; a folder begun with others is an error.

    The profile is the one named; else the folder's; else the one nearest to the median size of the images. Where there
    is frost, the source of its textures is a setting too: one folder holds one kind.
    """
    path = target / CORRUPT_RECORD
    theirs = read_corrupt_record(path, "remove it, or take another DST") if path.exists() else {}
    profile = settings.profile or theirs.get("profile") or _median_profile(settings, found)
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


def _median_profile(settings: Settings, found: SourceFiles) -> str | None:
    """The profile nearest to the median shorter side of some images spread over the source; None if none opens."""
    if settings.prepare.crop is not None:
        return profile_of(settings.prepare.crop)
    sides = []
    for name in found.images[:: -(-len(found.images) // _SIZE_SAMPLE)]:
        with contextlib.suppress(Exception):  # a broken image is reported by its job
            sides.append(min(image_size(read_bytes(found.source / name, MAX_FILE_BYTES), name)))
    return profile_of(round(median(sides))) if sides else None


def jobs(found: SourceFiles, target: Path, corruptions: list[str], severities: list[int]) -> Iterator[Job]:
    """Yield a job per image; its targets are those that do not exist yet."""
    wanted = [(corruption, severity) for corruption in corruptions for severity in severities]
    for name in found.images:
        missing = tuple(pair for pair in wanted if not _is_written(target, pair, name))
        yield Job(found.source / name, name, missing, len(wanted) - len(missing))


def _is_written(target: Path, pair: tuple[str, int], name: str) -> bool:
    try:
        return (target / pair[0] / str(pair[1]) / name).stat().st_size > 0  # a power cut may leave an empty file
    except FileNotFoundError:
        return False


def corrupt_image(job: Job, target: Path, settings: Settings) -> JobResult:
    """Write all files of one job; a failure to read or write is returned in the result, not raised."""
    result = JobResult(job.name, job.there)
    try:
        pixels = settings.prepare(read_bytes(job.source, MAX_FILE_BYTES), job.name)
    except (OSError, Unreadable) as error:
        result.unreadable = str(error).removeprefix(f"{printable(job.name)}: ")
        return result
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
            result.unreadable = str(error)
            return result
        try:
            _write(target, target / corruption / str(severity) / job.name, data.getvalue())
        except OSError as error:
            result.unwritable = f"{error.strerror or error} ({error.filename or target})"
            return result
        result.written += 1
    return result


def _write(target: Path, path: Path, data: bytes) -> None:
    """Write a file atomically, its temporary file in a separate folder, so that class folders hold images alone."""
    for tries in range(5, -1, -1):
        try:
            write_atomic(path, data, temp_folder=target / _TEMP_FOLDER, sync=False)
            break
        except FileNotFoundError:  # another run of the command has just removed the folder
            if not tries:
                raise


def remove_temp_files(target: Path) -> None:
    """Remove temporary files of this process and of dead ones, and their folder if it is empty; errors are ignored."""
    folder = target / _TEMP_FOLDER
    for file in folder.glob("*"):
        named = _TEMP_FILE.fullmatch(file.name)
        owner = 0 if named is None else int(named["process"] or named["before"])
        if named is not None and (owner == os.getpid() or not process_exists(owner)):
            with contextlib.suppress(OSError):
                file.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not there, or in use by another run
        folder.rmdir()


def run_jobs(todo: Iterator[Job], target: Path, settings: Settings, workers: int) -> Iterator[JobResult]:
    """Yield results as they come, from this process (one worker) or from a pool of processes."""
    if workers == 1:
        import torch

        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            for job in todo:
                yield corrupt_image(job, target, settings) if job.targets else JobResult(job.name, job.there)
        finally:
            torch.set_num_threads(threads)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, mp_context=context, initializer=_init_worker)
    waiting: set[Future[JobResult]] = set()
    try:
        for job in todo:
            if not job.targets:
                yield JobResult(job.name, job.there)
                continue
            waiting.add(pool.submit(corrupt_image, job, target, settings))
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


def _init_worker() -> None:
    """Initialise a worker process: one thread, Ctrl-C left to the parent, and an end when the parent has died."""
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exit_with_parent()
