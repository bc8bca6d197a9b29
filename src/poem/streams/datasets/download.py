"""Download the archives of a data set, verify them, and unpack them to the layout that `poem data check` accepts.

What an interrupted run leaves:

    ROOT/FILE.part           the bytes so far; the next run asks the server for the rest
    ROOT/FILE                the whole archive, its checksum verified; removed once it is unpacked
    ROOT/.FILE.unpacking-*/  files being unpacked; the next run removes it and begins anew
    ROOT/.FILE.lock          locked from the first byte to the last rename, so that two runs do not mix; empty

A name that the loaders read (`CIFAR-10-C`, `ImageNet-C/fog`) appears by a rename when it is complete.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import logging
import os
import re
import secrets
import shutil
import socket
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any

from poem.streams.datasets.archives import unpacked_limit
from poem.streams.datasets.sources import Archive, gigabytes

try:
    import fcntl
except ImportError:  # no such module on Windows
    fcntl = None  # type: ignore[assignment]

log = logging.getLogger("poem")

ATTEMPTS, FIRST_ATTEMPTS = 6, 3
"""Attempts in a row that may bring no new byte, and those where none has ever come."""
PAUSE = 1.0
"""Seconds before the second attempt; each further one waits twice as long, up to `LONGEST_PAUSE`."""
LONGEST_PAUSE = 30.0
TIMEOUT = 60.0
"""Seconds without a byte after which a connection counts as dropped."""
_BLOCK = 1 << 20
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
_LOCKED_ERRORS = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
"""What flock says where another process holds the lock; any other error means that there are no locks here."""
_MAX_PART = 255
"""Bytes of a name that file systems take."""

OnProgress = Callable[[str, int, int], None]
"""Called with what is done (`"noise.tar"`, `"verify noise.tar"`), the bytes done, and the bytes in all."""


class UnreachableError(OSError):
    """The server of an archive cannot be reached from here."""


class ChecksumError(ValueError):
    """A downloaded archive has another checksum than the published one; it was removed."""


class _DroppedError(OSError):
    """The connection ended early."""


def get_archive(
    archive: Archive,
    root: Path,
    *,
    mirror: str | None = None,
    keep: bool = False,
    on_progress: OnProgress | None = None,
) -> list[Path]:
    """Download, verify and unpack one archive; returns the paths that are new below the root.

    An archive that lies in the root already, such as one that was copied there, is verified and not downloaded again.
    Targets that exist already are left as they are, and an archive of which all targets exist is not downloaded.

    Args:
        archive: What to get, of `sources.archives`.
        root: The folder; it is created if it does not exist.
        mirror: Address of a folder with the same files, such as one inside an institute; the checksum stays.
        keep: Keep the archive after it is unpacked.
        on_progress: Called as bytes are downloaded, verified and unpacked.

    Raises:
        UnreachableError: The server cannot be reached.
        ChecksumError: The file has another checksum than the published one.
        OSError: No room on the disk, the server's error, or a connection that drops again and again.
        ValueError: The archive is damaged, or does not have the files that it should.
    """
    report = on_progress or _no_progress
    if all((root / target).exists() for target in archive.targets):
        return []
    root.mkdir(parents=True, exist_ok=True)
    path = root / archive.file
    with _locked(path) as alone:
        missing = [target for target in archive.targets if not (root / target).exists()]
        if not missing:  # another process has unpacked them since
            return []
        if path.is_file():
            _verify(path, archive, report, remove=False)
        else:
            _check_room(archive, root)
            part = root / f"{archive.file}.part"
            with _PartFile(part) as file:
                _download(archive, file, _address(archive, mirror), report)
            _verify(part, archive, report, remove=True)
            part.replace(path)
        if alone:
            _remove_stale(path)
        new = _unpack(path, archive, root, missing, report)
        if not keep:
            path.unlink(missing_ok=True)
    return new


def _no_progress(what: str, done: int, total: int) -> None:
    """Ignore progress."""


def _address(archive: Archive, mirror: str | None) -> str:
    if mirror is None:
        return archive.address
    if urllib.parse.urlsplit(mirror).scheme not in ("http", "https"):
        raise ValueError(f"expected a mirror as http://... or https://..., got {mirror!r}")
    return f"{mirror.rstrip('/')}/{archive.file}"


def _check_room(archive: Archive, root: Path) -> None:
    """Raise where the disk has no room for the rest of the archive and for the files in it."""
    part = root / f"{archive.file}.part"
    here = part.stat().st_size if part.is_file() else 0
    need, free = max(0, archive.size - here) + archive.size, shutil.disk_usage(root).free
    if free < need:
        raise OSError(
            f"expected about {gigabytes(need)} free in {root}, for {archive.file} and the files in it, got "
            f"{gigabytes(free)}; make room, or give another --root"
        )


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Hold the lock of an archive, and remove its file at the end; yields whether there is a lock.

    Raises:
        OSError: Another process holds it.
    """
    if fcntl is None:
        yield False
        return
    lock = path.with_name(f".{path.name}.lock")
    while True:
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            alone = _lock(handle, path)
            if alone and not _is_open_file(handle, lock):  # its last holder removed it between open and lock
                continue
            try:
                yield alone
            finally:
                lock.unlink(missing_ok=True)
            return
        finally:
            os.close(handle)


def _lock(handle: int, path: Path) -> bool:
    """Lock an open file; False, with a warning, where the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _LOCKED_ERRORS:
            raise OSError(f"another process downloads or unpacks {path}; wait for it, or stop it") from error
        log.warning("%s cannot be locked (%s): start no second download of it to this folder", path, error)
        return False
    return True


def _is_open_file(handle: int, path: Path) -> bool:
    """Whether a path still names the file that is open."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


class _PartFile:
    """The `.part` file, open for reading and appending; it is removed where it stays empty."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> IO[bytes]:
        if self.path.is_symlink() or (self.path.exists() and not self.path.is_file()):
            raise OSError(f"expected a file, or nothing yet, at {self.path}, got something else; remove it")
        self._file = self.path.open("ab")
        return self._file

    def __exit__(self, *error: object) -> None:
        self._file.close()
        if self.path.is_file() and self.path.stat().st_size == 0:
            self.path.unlink()


def _download(archive: Archive, file: IO[bytes], address: str, report: OnProgress) -> None:
    """Append to the file until it has all bytes; a dropped connection is taken up again where it broke off."""
    most, failures = file.tell(), 0
    while True:
        try:
            _attempt(archive, file, address, report)
            return
        except urllib.error.HTTPError as error:
            if error.code not in (408, 425, 429, 500, 502, 503, 504):
                raise OSError(
                    f"{address} answered {error.code} {error.reason}; see whether the publisher has moved it, then "
                    f"put the file at {file.name.removesuffix('.part')} and type the same command"
                ) from error
            problem: Exception = error
        except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
            reason = getattr(error, "reason", error)
            number = getattr(reason, "errno", None)
            if number in _DISK_ERRORS:
                raise OSError(
                    f"cannot write {file.name}: {error}; make room, and type the same command again"
                ) from error
            if isinstance(reason, socket.gaierror) or number in (errno.ENETUNREACH, errno.EHOSTUNREACH):
                host = urllib.parse.urlsplit(address).hostname
                raise UnreachableError(f"no connection to {host}: {reason}") from error
            problem = error
        file.flush()
        failures = 0 if file.tell() > most else failures + 1
        most = max(most, file.tell())
        if failures >= (ATTEMPTS if most else FIRST_ATTEMPTS):
            stay = f"; {gigabytes(most)} stay in {file.name}, and the same command goes on from there" if most else ""
            raise UnreachableError(
                f"no connection to {address}, tried {failures} times without a new byte ({problem}){stay}"
            ) from problem
        wait = min(LONGEST_PAUSE, PAUSE * 2**failures)
        log.info("%s: %s; again in %.0f s", archive.file, problem, wait)
        time.sleep(wait)


def _attempt(archive: Archive, file: IO[bytes], address: str, report: OnProgress) -> None:
    """Ask once for the bytes that are missing, and append what comes."""
    have = file.seek(0, os.SEEK_END)
    headers = {"User-Agent": "poem-tta", "Accept-Encoding": "identity"}
    if have:
        headers["Range"] = f"bytes={have}-"
    try:
        response = urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        total = _total_of(error.headers.get("Content-Range", ""))
        if total == have:  # every byte is here
            return
        file.truncate(0)
        raise _DroppedError(f"the server has {total} bytes and {have} are here, which is no part of it") from error
    with response:
        start, total = _span(response, have)
        if archive.checksum and total is not None and total != archive.size:
            raise ValueError(
                f"expected {archive.size} bytes at {address}, the server offers {total}; it is another file than the "
                f"one that {archive.stated_by} describes. Look at the publisher's page"
            )
        if start != have:  # a server that does not know Range sends the whole file again
            file.truncate(start)
            file.seek(start)
            have = start
        while piece := response.read(_BLOCK):
            file.write(piece)
            have += len(piece)
            report(archive.file, have, total or archive.size)
    file.flush()
    expected = total if total is not None else (archive.size if archive.checksum else have)
    if have < expected:
        raise _DroppedError(f"the connection ended after {have} of {expected} bytes")
    if have > expected:
        file.truncate(0)
        raise _DroppedError(f"{have} bytes came, {expected} were announced")


def _span(response: Any, have: int) -> tuple[int, int | None]:
    """Where the answer's bytes begin, and how many the whole file has, if the server says so."""
    if response.status == 206:
        found = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", response.headers.get("Content-Range", "").strip())
        if found is None or int(found[1]) != have:
            raise _DroppedError(f"the server answered with another range: {response.headers.get('Content-Range')!r}")
        return have, None if found[2] == "*" else int(found[2])
    length = response.headers.get("Content-Length", "")
    return 0, int(length) if length.isdigit() else None


def _total_of(content_range: str) -> int | None:
    found = re.fullmatch(r"bytes \*/(\d+)", content_range.strip())
    return None if found is None else int(found[1])


def _verify(path: Path, archive: Archive, report: OnProgress, *, remove: bool) -> None:
    """Compare a file with the published checksum; a downloaded one that differs is removed."""
    if not archive.checksum:
        log.warning("%s: %s; only its size and its own structure are checked", archive.file, archive.checksum_text)
        return
    kind, _, wanted = archive.checksum.partition(":")
    digest, done, size = hashlib.new(kind, usedforsecurity=False), 0, path.stat().st_size
    with path.open("rb") as file:
        while piece := file.read(_BLOCK):
            digest.update(piece)
            done += len(piece)
            report(f"verify {archive.file}", done, size)
    if digest.hexdigest() == wanted:
        return
    if remove:
        path.unlink()
    what = "it was removed: type the same command to download it again" if remove else f"remove {path}, or replace it"
    raise ChecksumError(
        f"expected {archive.checksum_text} of {archive.file}, got {kind}:{digest.hexdigest()}; {what}. If it is the "
        "same again, the publisher has replaced the file"
    )


@dataclass(frozen=True)
class _Member:
    """A file inside an archive."""

    name: str
    size: int
    open: Callable[[], IO[bytes]]


def _remove_stale(path: Path) -> None:
    """Remove what interrupted runs have unpacked of an archive."""
    begin = f".{path.name}.unpacking"
    for found in path.parent.iterdir():
        if found.name == begin or found.name.startswith(f"{begin}-"):
            shutil.rmtree(found, ignore_errors=True)


def _unpack(path: Path, archive: Archive, root: Path, missing: Sequence[str], report: OnProgress) -> list[Path]:
    """Unpack an archive beside its targets, then rename each target that is not there yet; returns these."""
    staging = root / f".{archive.file}.unpacking-{os.getpid()}-{secrets.token_hex(4)}"
    try:
        try:
            written = _write_members(path, archive, staging, report)
        except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
            raise ValueError(f"{path} is damaged ({error}); remove it, and type the same command again") from error
        lacking = [name for name in archive.entries if not (staging / name).is_dir()]
        if lacking or not staging.is_dir():
            what = ", ".join(lacking) or f"files like {archive.keep}"
            raise ValueError(f"expected {what} in {path}, found none; is it another file of that name?")
        here = sum(len(files) for _, _, files in os.walk(staging))
        if here != written:
            raise OSError(
                f"expected {written} files of {path} in {staging}, found {here}: another process changes that folder; "
                "type the same command again"
            )
        new = []
        for target in missing:
            if (root / target).exists():  # by another process, where there are no locks
                continue
            source = staging / PurePosixPath(target).name if archive.entries else staging
            (root / target).parent.mkdir(parents=True, exist_ok=True)
            source.rename(root / target)
            new.append(root / target)
        return new
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _write_members(path: Path, archive: Archive, staging: Path, report: OnProgress) -> int:
    """Write the files of an archive that are kept; returns how many."""
    size = path.stat().st_size
    most, written, count = unpacked_limit(size), 0, 0
    for member in _members(path):
        inside = _kept_path(member.name, archive)
        if inside is None:
            continue
        written += member.size
        if written > most:
            raise ValueError(
                f"{path} unpacks to more than {gigabytes(most)}, from {gigabytes(size)}; if you trust it, set "
                "POEM_MAX_UNPACKED to the bytes to allow, such as 200G"
            )
        target = staging.joinpath(*inside)
        target.parent.mkdir(parents=True, exist_ok=True)
        with member.open() as source, target.open("xb") as file:
            shutil.copyfileobj(source, file, _BLOCK)
        if target.stat().st_size != member.size:
            raise EOFError(f"{member.name} breaks off")
        count += 1
        report(f"unpack {archive.file}", min(written, size), size)
    return count


def _kept_path(name: str, archive: Archive) -> tuple[str, ...] | None:
    """Where a member goes below the folder, or None for one that is left out; one that points outside is an error."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or "\0" in name:
        raise ValueError(f"{archive.file} holds {name!r}, a path outside its folder; nothing was unpacked")
    parts = path.parts
    at = next((at for at, part in enumerate(parts) if re.fullmatch(archive.keep, part)), None)
    if at is None or any(len(os.fsencode(part)) > _MAX_PART for part in parts[at:]):
        return None
    return parts[at:]


def _members(path: Path) -> Iterator[_Member]:
    """The regular files of a tar, compressed or not, or of a zip."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path) as held:
            for entry in held.infolist():
                linked = (entry.external_attr >> 16) & 0o170000 == 0o120000
                if not entry.is_dir() and not linked:
                    yield _Member(entry.filename, entry.file_size, lambda entry=entry: held.open(entry))  # type: ignore[misc]
        return
    with tarfile.open(path, "r:*") as tar:
        for member in tar:
            if member.isreg() and not member.issparse():
                yield _Member(member.name, member.size, lambda member=member: _opened(tar, member))  # type: ignore[misc]
            tar.members = []  # type: ignore[attr-defined]  # it would otherwise keep every header


def _opened(tar: tarfile.TarFile, member: tarfile.TarInfo) -> IO[bytes]:
    found = tar.extractfile(member)
    assert found is not None, "a regular file"
    return found
