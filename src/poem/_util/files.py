"""Files that are written whole or not at all, and read without waiting; states as safetensors, never unpickled."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

SCHEMA = 3
PART = r"\.(?P<process>\d+)-[0-9a-f]{16}\.part"
"""How the name of a temporary file ends, with the id of the process that writes it."""
TEXT = 64 << 20
"""Bytes of a file of settings or results, at most."""
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_KINDS = {
    stat.S_IFDIR: "folder", stat.S_IFLNK: "symbolic link", stat.S_IFIFO: "FIFO", stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "device", stat.S_IFBLK: "device",
}  # fmt: skip


def write_whole(path: Path, content: str | bytes, *, beside: Path | None = None, sync: bool = True) -> None:
    """Write a file so that it appears with all of its content or not at all; see `whole_file`.

    Args:
        path: Its place; folders above are made.
        content: Bytes, or text in UTF-8. File names that Python decoded with surrogates become their own bytes again.
        beside: Folder for the temporary file, on the same file system; by default that of `path`.
        sync: Flush to the disk before the move, so that a power cut cannot leave an empty file. Thousands of small
            files are faster without.
    """
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    with whole_file(path, beside=beside, sync=sync) as file:
        file.write(data)


@contextmanager
def whole_file(path: Path, *, beside: Path | None = None, sync: bool = True) -> Iterator[BinaryIO]:
    """A binary file to write; it is moved to `path` when the block ends, and removed if the block raises.

    The temporary file has a random name and is created with `O_EXCL`, so that nobody can put a link in its place.
    A new file gets the permissions of the umask, one that replaces another keeps those of the other.

    Raises:
        OSError: There is something at `path` that is no regular file. A symbolic link is refused too: writing through
            it would change a file elsewhere, and replacing it would undo what its owner set up.
    """
    mode = _replaceable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if beside is not None:
        beside.mkdir(parents=True, exist_ok=True)
    descriptor, part = _temporary(path.parent if beside is None else beside, path.name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            if mode is not None and hasattr(os, "fchmod"):
                os.fchmod(file.fileno(), mode)
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _temporary(folder: Path, name: str) -> tuple[int, Path]:
    """A new hidden file in a folder, open for writing. `mkstemp` would not heed the umask."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
    # 48 characters are at most 192 bytes: with what follows, less than the 255 that file systems take.
    part = folder / f".{name[:48]}.{os.getpid()}-{secrets.token_hex(8)}.part"
    return os.open(part, flags | getattr(os, "O_BINARY", 0), 0o666), part


def _replaceable(path: Path) -> int | None:
    """Permissions of the regular file at a path, None where there is nothing; anything else is an error."""
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        _refuse_parent(path)
        raise
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "special file")
        where = f" to {os.readlink(path)}; give the file it points to, or remove the link" if path.is_symlink() else ""
        raise OSError(
            f"expected a file, or nothing yet, at {path}, got a {kind}{where or '; choose another name, or remove it'}"
        )
    return stat.S_IMODE(mode)


def _refuse_parent(path: Path) -> None:
    """Raise where something that is no folder stands in the place of one above a path."""
    for parent in path.parents:
        if os.path.lexists(parent):
            if not parent.is_dir():
                raise NotADirectoryError(
                    f"expected a folder at {parent}, to write {path} into, got none; choose another"
                )
            return


def check_file(path: Path) -> None:
    """Raise what `write_whole(path, ...)` would raise, before the work whose result is to be written there.

    Nothing is left behind: folders that are missing are not made yet; a file is made and removed in the first that is
    there.
    """
    _replaceable(path)
    _check_writable(path.parent, path)


def check_folder(path: Path) -> None:
    """The same for a folder of results."""
    if os.path.lexists(path) and not path.is_dir():
        raise NotADirectoryError(f"expected a folder, or nothing yet, at {path}, got a file; choose another")
    _check_writable(path, path)


def _check_writable(folder: Path, path: Path) -> None:
    _refuse_parent(folder / "file")
    there = next(each for each in (folder, *folder.parents) if each.is_dir())
    try:
        descriptor, part = _temporary(there, "poem")
        os.close(descriptor)
        part.unlink()
    except OSError as error:
        raise OSError(f"cannot write {path}: {error.strerror or error} in {there}; choose another place") from error


def read_bytes(path: Path, most: int | None = None) -> bytes:
    """The content of a regular file, at most so many bytes; a FIFO, socket or device is an error, not a wait.

    Opening a FIFO waits for somebody to write into it, unless it is opened with `O_NONBLOCK`.
    """
    descriptor = os.open(path, _READ)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            kind = _KINDS.get(stat.S_IFMT(found.st_mode), "special file")
            raise OSError(errno.EINVAL, f"expected a regular file, got a {kind}", str(path))
        if most is not None and found.st_size > most:
            raise OSError(errno.EFBIG, f"expected at most {most} bytes, got {found.st_size}", str(path))
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(-1 if most is None else most)
    finally:
        os.close(descriptor)


def read_text(path: Path) -> str:
    """The text of a regular file of settings or results, in UTF-8."""
    return read_bytes(path, TEXT).decode("utf-8")


def read_json(path: Path) -> Any:
    """What a JSON file holds; NaN, infinity and endless nesting are a `ValueError`, like any other wrong text."""
    try:
        return json.loads(read_text(path), parse_constant=_no_constant, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def read_yaml(path: Path) -> Any:
    """What a YAML file holds, read by the safe loader."""
    import yaml

    try:
        return yaml.safe_load(read_text(path))
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"expected finite numbers, got {name}")


def _finite(text: str) -> float:
    found = float(text)
    if not math.isfinite(found):
        raise ValueError(f"expected finite numbers, got {text[:20]}")
    return found


def printable(text: str) -> str:
    """Text on one line of a terminal: control characters, and bytes that are no UTF-8, as backslash escapes."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def save(state: dict[str, Any], path: Path) -> None:
    """Write a state, whole or not at all."""
    from safetensors.torch import save as to_bytes

    tensors = {**{key: value.contiguous().cpu() for key, value in state["tensors"].items()}, "rng": state["rng"]}
    rest = {key: value for key, value in state.items() if key not in ("tensors", "rng")}
    write_whole(path, to_bytes(tensors, metadata={"poem": json.dumps(rest)}))


def load(path: Path) -> dict[str, Any]:
    """Read a state; refuses files that `save` did not write."""
    from safetensors import SafetensorError, safe_open

    if path.exists() and not path.is_file():
        raise ValueError(f"expected a state written by adapter.save, got {path}, which is no regular file")
    try:
        with safe_open(str(path), framework="pt") as file:
            rest = json.loads((file.metadata() or {}).get("poem", "null"))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dictionary
    except (SafetensorError, ValueError, RecursionError) as error:
        raise ValueError(f"expected a state written by adapter.save, got {path}: {error}") from error
    if not isinstance(rest, dict) or "rng" not in tensors:
        raise ValueError(f"expected a state written by adapter.save, got {path}, which lacks its description")
    rng = tensors.pop("rng")
    return {**rest, "rng": rng, "tensors": tensors}
