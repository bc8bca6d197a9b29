"""Images in tar files are read at their offset; a compressed tar is first decompressed to a plain one.

Nothing is extracted by the names inside an archive.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import logging
import lzma
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from poem._util.files import open_atomic, read_bytes

log = logging.getLogger("poem")

MAX_FILE_BYTES = 1 << 30
"""Size limit of one image file, which is read into memory at once."""
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}

_MAGIC: dict[bytes, Callable[..., Any]] = {b"\xfd7zXZ\x00": lzma.open, b"\x1f\x8b": gzip.open, b"BZh": bz2.open}


def plain_tar(path: Path, cache: Path | None = None) -> Path:
    """Return the path of a plain tar: the archive itself, or the decompressed copy of a compressed one.

    xz, gz and bz2 have no random access, so the tar is decompressed once: to `cache`, else to the folder named by
    POEM_CACHE, else beside the archive, if that folder is not marked read-only. The copy is written atomically. One
    larger than `unpacked_limit` is an error.
    """
    with path.open("rb") as file:
        head = file.read(6)
    opener = next((opener for magic, opener in _MAGIC.items() if head.startswith(magic)), None)
    if opener is None:
        return path
    named = cache or (Path(os.environ["POEM_CACHE"]) if os.environ.get("POEM_CACHE") else None)
    folder = named or path.parent
    stat = path.stat()
    key = hashlib.sha256(f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}".encode()).hexdigest()[:12]
    target = folder / f"{path.name.split('.')[0]}-{key}.tar"
    if target.exists():
        return target
    if named is None and not _writable(folder):
        raise ValueError(
            f"{path.name} is compressed and must be unpacked once, but {folder} cannot be written; "
            "set POEM_CACHE to a folder with room"
        )
    log.warning("unpacking %s once, to %s", path, target)
    try:
        with opener(path, "rb") as packed, open_atomic(target) as file:
            _copy_limited(packed, file, path, unpacked_limit(stat.st_size))
    except (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path} is cut short or damaged ({error}); copy it again") from error
    except OSError as error:
        raise ValueError(
            f"could not unpack {path} to {folder}: {error}; set POEM_CACHE to a folder with room"
        ) from error
    return target


def unpacked_limit(size: int) -> int:
    """Bytes that an archive of a size may unpack to: POEM_MAX_UNPACKED, else 20 times its size and at least 1 GiB.

    Images are compressed already, so a tar of them hardly shrinks; one that grows a thousandfold would fill the disk.
    """
    stated = os.environ.get("POEM_MAX_UNPACKED", "").strip()
    if not stated:
        return max(1 << 30, 20 * size)
    found = re.fullmatch(r"(\d+)\s*([KMGT]?)B?", stated, re.IGNORECASE)
    if found is None:
        raise ValueError(f"expected POEM_MAX_UNPACKED as a number of bytes, such as 200G, got {stated!r}")
    return int(found[1]) * _UNITS[found[2].upper()]


def megabytes(size: int) -> str:
    """Format a number of bytes as megabytes."""
    return f"{size / 10**6:,.1f} MB"


def _copy_limited(packed: IO[bytes], file: IO[bytes], path: Path, most: int) -> None:
    """Copy in blocks; more than `most` bytes are an error."""
    total = 0
    while piece := packed.read(1 << 20):
        total += len(piece)
        if total > most:
            raise ValueError(
                f"{path} unpacks to more than {megabytes(most)}, from {megabytes(path.stat().st_size)}; if you trust "
                "it, set POEM_MAX_UNPACKED to the bytes to allow, such as 200G"
            )
        file.write(piece)


def _writable(folder: Path) -> bool:
    """Whether a folder is writable and not marked read-only; root may write to the latter too, but should not."""
    return os.access(folder, os.W_OK) and bool(folder.stat().st_mode & 0o222)


def tar_index(path: Path) -> tuple[list[str], NDArray[np.int64]]:
    """List the files of a plain tar: their names, and (n, 2) their offsets and sizes."""
    names: list[str] = []
    spans: list[tuple[int, int]] = []
    end = 0
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                if member.isreg() and not member.issparse():
                    names.append(member.name)
                    spans.append((member.offset_data, member.size))
                tar.members = []  # type: ignore[attr-defined]  # it would otherwise keep every header
                end = member.offset_data + (member.size + 511) // 512 * 512
        with path.open("rb") as file:  # tarfile stops silently at a damaged header; a complete tar ends in zeros
            file.seek(end)
            if file.read(512) != bytes(512):
                raise tarfile.TarError(f"it breaks off after {len(names)} files")
    except (tarfile.TarError, EOFError) as error:
        raise ValueError(f"{path} is no whole tar archive ({error}); copy it again") from error
    return names, np.array(spans, np.int64).reshape(-1, 2)


class TarStore:
    """Reads the files of one plain tar."""

    def __init__(self, path: Path, names: list[str], spans: NDArray[np.int64]) -> None:
        self.path, self.spans = path, spans
        self.names = np.array([os.fsencode(name) for name in names])

    def read(self, at: int) -> bytes:
        """Read the bytes of one file."""
        start, size = (int(number) for number in self.spans[at])
        with self.path.open("rb") as file:
            file.seek(start)
            if size > MAX_FILE_BYTES:
                raise OSError(f"expected at most {MAX_FILE_BYTES} bytes, got {size}")
            return file.read(size)

    def size(self, at: int) -> int | None:
        """Bytes of one file."""
        return int(self.spans[at][1])

    def where(self, at: int) -> str:
        """Name of one file for messages: archive and name inside it."""
        return f"{self.path.name}:{os.fsdecode(bytes(self.names[at]))}"


class FolderStore:
    """Reads the files under one folder."""

    def __init__(self, root: Path, names: list[str]) -> None:
        self.root = root
        self.names = np.array([os.fsencode(name) for name in names])  # bytes: a sixth of a list of strings

    def read(self, at: int) -> bytes:
        """Read the bytes of one file."""
        return read_bytes(self._path(at), MAX_FILE_BYTES)

    def size(self, at: int) -> int | None:
        """Bytes of one file; None where it is gone."""
        try:
            return self._path(at).stat().st_size
        except OSError:
            return None

    def where(self, at: int) -> str:
        """Name of one file for messages: its path."""
        return str(self._path(at))

    def _path(self, at: int) -> Path:
        return self.root / os.fsdecode(bytes(self.names[at]))


class JoinedStore:
    """Reads the files of several stores, one after the other, as one."""

    def __init__(self, stores: Sequence[FolderStore | TarStore]) -> None:
        self.stores = tuple(stores)
        self.starts = np.cumsum([0, *(len(store.names) for store in stores[:-1])])
        self.names = np.concatenate([store.names for store in stores])

    def read(self, at: int) -> bytes:
        """Read the bytes of one file."""
        store, own = self._find(at)
        return store.read(own)

    def size(self, at: int) -> int | None:
        """Bytes of one file; None where it is gone."""
        store, own = self._find(at)
        return store.size(own)

    def where(self, at: int) -> str:
        """Name of one file for messages, as its own store gives it."""
        store, own = self._find(at)
        return store.where(own)

    def _find(self, at: int) -> tuple[FolderStore | TarStore, int]:
        """The store that holds a file, and the file's position there."""
        number = int(np.searchsorted(self.starts, at, side="right")) - 1
        return self.stores[number], at - int(self.starts[number])
