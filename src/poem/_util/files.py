"""Atomic writes, and reads that cannot block: of regular files alone, with a limit on their size."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

TEMP_SUFFIX = r"\.(?P<process>\d+)-[0-9a-f]{16}\.part"
"""Regular expression for the end of a temporary file's name; it holds the id of the process that writes it."""
MAX_TEXT_BYTES = 64 << 20
"""Size limit of a file of settings or results."""
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_KINDS = {
    stat.S_IFDIR: "folder", stat.S_IFLNK: "symbolic link", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device", stat.S_IFBLK: "device",
}  # fmt: skip


def write_atomic(path: Path, content: str | bytes, *, temp_folder: Path | None = None, sync: bool = True) -> None:
    """Write a file so that it appears with all of its content or not at all; see `open_atomic`.

    Args:
        path: The file; missing parent folders are created.
        content: Bytes, or text in UTF-8. File names that Python decoded with surrogates become their own bytes again.
        temp_folder: Folder for the temporary file, on the same file system; by default that of `path`.
        sync: Call `fsync` before the rename, so that a power cut cannot leave an empty file. Thousands of small
            files are faster without.
    """
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    with open_atomic(path, temp_folder=temp_folder, sync=sync) as file:
        file.write(data)


@contextmanager
def open_atomic(path: Path, *, temp_folder: Path | None = None, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary file for binary writing; it is renamed to `path` when the block ends, and removed if it raises.

    The temporary file has a random name and is created with `O_EXCL`, so that nobody can plant a link there.
    A new file gets the permissions of the umask, a replaced one keeps its own.

    Raises:
        OSError: `path` exists and is no regular file. A symbolic link is refused too: writing through it would change a
            file elsewhere, and replacing it would undo what its owner set up.
    """
    mode = _permissions(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if temp_folder is not None:
        temp_folder.mkdir(parents=True, exist_ok=True)
    descriptor, temp = _create_temp(path.parent if temp_folder is None else temp_folder, path.name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if mode is not None and hasattr(os, "fchmod"):
                os.fchmod(file.fileno(), mode)
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temp.replace(path)
    finally:
        temp.unlink(missing_ok=True)


def _create_temp(folder: Path, name: str) -> tuple[int, Path]:
    """Create a hidden file and open it for writing. `mkstemp` would ignore the umask."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    # 48 characters are at most 192 bytes: with what follows, less than the 255 that file systems take.
    temp = folder / f".{name[:48]}.{os.getpid()}-{secrets.token_hex(8)}.part"
    return os.open(temp, flags | getattr(os, "O_BINARY", 0), 0o666), temp


def _permissions(path: Path) -> int | None:
    """Permissions of the regular file at a path, or None where nothing exists; anything else is an error."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        _check_parents(path)
        raise
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "special file")
        where = f" to {os.readlink(path)}; give the file it points to, or remove the link" if path.is_symlink() else ""
        raise OSError(
            f"expected a file, or nothing yet, at {path}, got a {kind}{where or '; choose another name, or remove it'}"
        )
    return stat.S_IMODE(mode)


def _check_parents(path: Path) -> None:
    """Raise if a parent of the path exists and is no folder."""
    for parent in path.parents:
        if os.path.lexists(parent):
            if not parent.is_dir():
                raise NotADirectoryError(
                    f"expected a folder at {parent}, to write {path} into, got none; choose another"
                )
            return


def check_file_writable(path: Path) -> None:
    """Raise what `write_atomic(path, ...)` would raise, before the work whose result is to be written there.

    Missing folders are not created; a temporary file is created in the nearest parent that exists, and removed.
    """
    _permissions(path)
    _try_writing(path.parent, path)


def check_folder_writable(path: Path) -> None:
    """Raise if files could not be written into a folder of results, existing or not; it is not created."""
    if os.path.lexists(path) and not path.is_dir():
        raise NotADirectoryError(f"expected a folder, or nothing yet, at {path}, got a file; choose another")
    _try_writing(path, path)


def _try_writing(folder: Path, path: Path) -> None:
    """Create and remove a file in the folder, or in its nearest parent that exists."""
    _check_parents(folder / "file")
    existing = next(each for each in (folder, *folder.parents) if each.is_dir())
    try:
        descriptor, temp = _create_temp(existing, "poem")
        os.close(descriptor)
        temp.unlink()
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error} in {existing}; choose another place") from error


def read_bytes(path: Path, limit: int | None = None) -> bytes:
    """Read a regular file of at most `limit` bytes; a larger one, a FIFO, a socket or a device is an `OSError`.

    The file is opened with `O_NONBLOCK`: opening a FIFO would otherwise block until somebody writes into it.
    """
    descriptor = os.open(path, _READ)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            kind = _KINDS.get(stat.S_IFMT(found.st_mode), "special file")
            raise OSError(errno.EINVAL, f"expected a regular file, got a {kind}", str(path))
        if limit is not None and found.st_size > limit:
            raise OSError(errno.EFBIG, f"expected at most {limit} bytes, got {found.st_size}", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            if limit is None:
                return file.read()
            data = file.read(min(limit, found.st_size + 1))  # Python allocates as much as is asked for
            return data if len(data) <= found.st_size else data + file.read(limit - len(data))  # it has grown
    finally:
        os.close(descriptor)


def read_text(path: Path) -> str:
    """Read a regular file of settings or results as UTF-8."""
    return read_bytes(path, MAX_TEXT_BYTES).decode("utf-8")


def read_json(path: Path) -> Any:
    """Parse a JSON file; NaN, infinity and too deep nesting are a `ValueError`, like any other invalid text."""
    try:
        return json.loads(read_text(path), parse_constant=_refuse_constant, parse_float=_finite_float)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_yaml(path: Path) -> Any:
    """Parse a YAML file by the safe loader; any invalid text is a `ValueError`."""
    import yaml

    try:
        return yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"expected finite numbers, got {name}")


def _finite_float(text: str) -> float:
    found = float(text)
    if not math.isfinite(found):
        raise ValueError(f"expected finite numbers, got {text[:20]}")
    return found


def printable(text: str) -> str:
    """Replace control characters, and bytes that are no UTF-8, by backslash escapes, for one line of a terminal."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def printable_lines(text: str) -> str:
    """As `printable`, of a text of several lines: its line ends stay."""
    return "\n".join(map(printable, text.split("\n")))


_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def without_controls(text: str, form: str = "") -> str:
    """Replace control characters, marks that turn the direction of text, and bytes that are no UTF-8, by escapes.

    For pages: letters of every script, tabs and line feeds stay. The escapes are Python's, or `form.format(code)`.
    """

    def escaped(found: re.Match[str]) -> str:
        return form.format(ord(found[0])) if form else found[0].encode("unicode_escape").decode()

    return _UNSAFE.sub(escaped, text)
