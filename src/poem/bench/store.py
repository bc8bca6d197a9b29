"""A folder of results: one file per cell, whole or not there, and one writer at a time.

    cells/<base>/<method>/<scenario>-<shift>-s<seed>-<key>-<weights>.json    a result
    cells/<base>/<method>/<scenario>-<shift>-s<seed>-<key>.failed.json       a cell that raised, with its traceback
    asked.json, suites/*.yaml                                                suites and flags of the sweeps, for a page

`<key>` is the cell's, a hash of its fields and its recipe; `<weights>` are the first digits of the SHA-256 of the
weights that it was measured with. The words before them are for people.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from poem._util.files import TEMP_SUFFIX, read_json, read_text, write_atomic
from poem._util.processes import process_exists
from poem.bench.blocks import parse_block
from poem.bench.cell import WEIGHTS_DIGITS, Cell, read_cell, result_key
from poem.bench.result import SCHEMA, CellResult, latest
from poem.bench.suites.expand import Overrides
from poem.bench.suites.files import is_path

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

FAILED = ".failed.json"
REQUESTS, SUITES = "asked.json", "suites"
"""The file with the suites and flags of every sweep, and the folder with copies of the user's own suites."""
_LEFT_OVER = re.compile(rf"\..+{TEMP_SUFFIX}|\..+\.json\.\d+")  # the second form is an older version's
_CELL_KEY = re.compile("[0-9a-f]{16}")
_LOCK_SECONDS = 8.0  # in which child processes of a killed process exit and release its lock


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A cell that raised, or whose process died."""

    cell: Cell
    error: str
    """The traceback, or how the process ended."""
    recorded_key: str | None = None
    """The cell's key when it failed, as the file that the failure was read from has it."""

    @property
    def reason(self) -> str:
        """The last line of the traceback: the exception and its message."""
        lines = self.error.strip().splitlines()
        return lines[-1] if lines else "no reason was recorded"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"schema": SCHEMA, "key": self.cell.key, "cell": self.cell.to_dict(), "error": self.error}

    @classmethod
    def load(cls, path: Path) -> Failure:
        """Read a failure; a half-written or foreign file raises a ValueError that names it."""
        try:
            values = read_json(path)
            if values["schema"] != SCHEMA:
                raise ValueError(f"expected schema {SCHEMA}, got {values['schema']!r}")
            key = str(values.get("key"))
            recorded = key if _CELL_KEY.fullmatch(key) else None
            return cls(cell=read_cell(values["cell"]), error=str(values["error"]), recorded_key=recorded)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} does not record a failure: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Request:
    """A suite that was measured into the folder, and the flags it was measured with."""

    suite: str
    """Its name, or the copy of a file of the user's own."""
    scale: str
    settings: Mapping[str, Any]
    """Keyword arguments of `poem.bench.suites.load`; only those that were given."""


def _request(values: Any) -> Request:
    """A request from JSON; an unknown setting or one of another type raises a ValueError."""
    found = parse_block(Request, values, "a request")
    parse_block(Overrides, found.settings, "its settings")
    return found


class Store:
    """A folder of results and failures.

    Args:
        folder: Made when something is saved.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.cells = self.folder / "cells"
        self.broken: dict[Path, str] = {}
        """Files read so far that are no results, and why. They do not count, and nothing overwrites them."""
        self.edited: dict[Path, str] = {}
        """Results read so far whose checksum is wrong, in words. They count, and commands that show them say so."""
        self.unchecked: set[Path] = set()
        """Results read so far without a checksum, as of an older version."""

    def path(self, cell: Cell, key: str) -> Path:
        """The file of a cell's result with this key."""
        shift = cell.corruptions[0] if len(cell.corruptions) == 1 else f"{len(cell.corruptions)}-shifts"
        name = f"{safe_name(cell.scenario)}-{safe_name(shift)}-s{cell.seed}-{key}.json"
        return self.cells / safe_name(cell.base) / safe_name(cell.method) / name

    def finished(self, cell: Cell, weights: Callable[[Cell], str | None] | None = None) -> CellResult | None:
        """The result of a cell with its recipe of today.

        Args:
            cell: What was measured.
            weights: Gives the SHA-256 of the weights that the result must have been measured with, or None for any;
                called only where there is some result of the cell.

        Returns:
            The result, of several the one measured last, or None. A file that is no result is named in `broken`.
        """
        pattern = self.path(cell, f"{cell.key}-{'[0-9a-f]' * WEIGHTS_DIGITS}")
        paths = sorted(pattern.parent.glob(pattern.name))
        wanted = weights(cell) if paths and weights is not None else None
        if wanted is not None:
            paths = [self.path(cell, result_key(cell.key, wanted))]
        found = [result for path in paths if (result := self._matching(path)) is not None]
        return latest(found, lambda result: result.cell_key).get(cell.key)

    def save(self, result: CellResult, *, replace: bool = False) -> Path:
        """Write a result. A sound one that is there already stays, unless `replace`: it is then kept as `NAME.old`.

        A broken file in its place is moved aside.
        """
        path = self.path(result.cell, result.key)
        sound = self._matching(path) is not None
        if replace or not sound:
            self._move_aside(path, "old" if sound else "broken")
            result.save(path)
        self._failure(result.cell).unlink(missing_ok=True)
        return path

    def save_failure(self, cell: Cell, error: str) -> Path:
        """Record why a cell has no result; the last failure stays until the cell succeeds."""
        path = self._failure(cell)
        write_atomic(path, json.dumps(Failure(cell=cell, error=error).to_dict(), indent=1) + "\n")
        return path

    def results(self) -> Iterator[CellResult]:
        """Every sound result, in the order of the files' names; the others are named in `broken`."""
        for path in self._files():
            if not path.name.endswith(FAILED) and (result := self._load(path)) is not None:
                yield result

    def failures(self) -> dict[str, Failure]:
        """Cells that failed last with their recipe of today, by key."""
        return {each.cell.key: each for path, each in self._failures() if path == self._failure(each.cell)}

    def failed_keys(self) -> dict[Cell, str]:
        """The key that each failed cell had when it failed, for `recorded_keys`; no module is imported for it."""
        return {each.cell: each.recorded_key for _, each in self._failures() if each.recorded_key is not None}

    def save_request(self, names: Sequence[str], scale: str, settings: Mapping[str, Any]) -> None:
        """Record which suites are measured here and with which flags; a suite file of the user's own is copied."""
        found = [asdict(each) for each in self.requests(absolute=False)]
        given = {key: value for key, value in settings.items() if value}
        for name in names:
            kept = f"{SUITES}/{safe_name(Path(name).stem)}.yaml" if is_path(name) else name
            if is_path(name):
                write_atomic(self.folder / kept, read_text(Path(name).expanduser()))
            request = json.loads(json.dumps({"suite": kept, "scale": scale, "settings": given}))
            found = [each for each in found if each != request] + [request]  # the latest comes last
        write_atomic(self.folder / REQUESTS, json.dumps(found, indent=1) + "\n")

    def requests(self, *, absolute: bool = True) -> list[Request]:
        """Suites and flags of every sweep, the latest last; copied files as paths with the folder, or without it."""
        path = self.folder / REQUESTS
        try:
            values = read_json(path)
            if not isinstance(values, list):
                raise ValueError(f"expected a list, got a {type(values).__name__}")
            found = [_request(each) for each in values]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError, OSError) as error:
            self.broken[path] = f"{path} does not say what was asked for: {error}"
            return []
        return [replace(each, suite=str(self.folder / each.suite)) if absolute and is_path(each.suite) else each
                for each in found]  # fmt: skip

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only writer until the block ends; the lock of a process that dies is released by the system.

        Removes temporary files that killed writers left. Where the platform has no `fcntl`, nothing is locked.

        Raises:
            BlockingIOError: Another process holds the lock; the message names it.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with _lock_file(self.folder / ".lock") as file:
            _acquire(file, self.folder)
            file.truncate(0)
            file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
            file.flush()
            for path in self.cells.rglob(".*"):
                if _LEFT_OVER.fullmatch(path.name):
                    path.unlink(missing_ok=True)
            yield

    def _matching(self, path: Path) -> CellResult | None:
        """The result in a file, if the file's name is the result's."""
        result = self._load(path) if path.is_file() else None
        if result is not None and self.path(result.cell, result.key) != path:
            self.broken[path] = f"{path} is the result of another cell, recipe or weights: {result.cell.label}"
            result = None
        return result

    def _failure(self, cell: Cell) -> Path:
        path = self.path(cell, cell.key)
        return path.with_name(path.name.removesuffix(".json") + FAILED)

    def _failures(self) -> Iterator[tuple[Path, Failure]]:
        """Every sound file of a failure, whichever recipe it had; the others are named in `broken`."""
        for path in self._files():
            if path.name.endswith(FAILED):
                try:
                    yield path, Failure.load(path)
                except (ValueError, OSError) as error:
                    self.broken[path] = str(error)

    def _files(self) -> list[Path]:
        return sorted(path for path in self.cells.rglob("*.json") if not path.name.startswith("."))

    def _load(self, path: Path) -> CellResult | None:
        try:
            result = CellResult.load(path)
        except (ValueError, OSError) as error:
            reason = f"{path} is not a result: {error.strerror or error}" if isinstance(error, OSError) else str(error)
            self.broken[path] = reason
            return None
        if result.intact is False:
            self.edited[path] = (
                f"{path} was edited after it was measured: its checksum is another ({result.cell.label})"
            )
        elif result.intact is None:
            self.unchecked.add(path)
        return result

    def checksum_warnings(self) -> list[str]:
        """Which results read so far were edited, and how many have no checksum, in sentences."""
        warnings = list(self.edited.values())
        count = len(self.unchecked)
        if count:
            warnings.append(f"{count} result{' has' if count == 1 else 's have'} no checksum, as of an older version")
        return warnings

    def _move_aside(self, path: Path, ending: str) -> None:
        """Rename a file, so that nothing is lost."""
        if os.path.lexists(path):
            names = (path.with_name(f"{path.name}.{ending}{number or ''}") for number in range(1_000_000))
            path.rename(next(name for name in names if not os.path.lexists(name)))


def safe_name(words: str) -> str:
    """A file name for any file system: letters, digits and - . + _ stay, `*` is spelled, the rest becomes `_`."""
    return re.sub(r"[^A-Za-z0-9.+_-]", "_", words.replace("*", "-twice")).lstrip(".") or "_"


def _lock_file(path: Path) -> IO[str]:
    """The lock file, open to read and write; a link, a FIFO or a device of that name raises an OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    try:
        descriptor = os.open(path, flags, 0o666)
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return os.fdopen(descriptor, "a+", encoding="utf-8")
        os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EISDIR, errno.ENXIO):
            raise
    raise OSError(f"expected a file, or nothing yet, at {path}, got something else; remove it")


def _acquire(file: IO[str], folder: Path) -> None:
    """Lock an open file. Where the process that locked it is dead, wait for its children, which have it open too."""
    until = time.monotonic() + _LOCK_SECONDS
    while fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            file.seek(0)
            words, alive = _owner(file.read())
            if alive or time.monotonic() > until:
                raise BlockingIOError(
                    f"{folder} is in use by {words}; wait until that sweep is over, or give another folder with --out"
                ) from None
            time.sleep(0.1)


def _owner(text: str) -> tuple[str, bool]:
    """The process that wrote the lock file, in words, and whether it may be alive."""
    try:
        values = json.loads(text)
        pid, host = int(values["pid"]), str(values["host"])
    except (ValueError, TypeError, KeyError):
        return "another process", True
    alive = host != socket.gethostname() or process_exists(pid)
    return f"process {pid} on {host}", alive
