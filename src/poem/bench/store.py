"""A folder of results: one file per cell, whole or not there, and one writer at a time.

    cells/<base>/<method>/<scenario>-<shift>-s<seed>-<key>.json           a result
    cells/<base>/<method>/<scenario>-<shift>-s<seed>-<key>.failed.json    a cell that raised, with its traceback
    asked.json, suites/*.yaml                                             what was asked for, so that a page can be made

The key in a file's name makes it the cell's own; the words before it are for people.
"""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

from poem._util.files import TEMP_SUFFIX, read_json, read_text, write_atomic
from poem._util.processes import process_exists
from poem.bench.cell import Cell
from poem.bench.cell_files import read_cell
from poem.bench.result import SCHEMA, Report
from poem.bench.suites.files import is_path

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

FAILED = ".failed.json"
ASKED, SUITES = "asked.json", "suites"
"""Of what was asked for, and the folder of suites of the user's own."""
_LEFT_OVER = re.compile(rf"\..+{TEMP_SUFFIX}|\..+\.json\.\d+")  # the second form is an older version's
_PATIENCE = 8.0  # seconds in which helpers of a killed process notice that it is gone


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A cell that raised, or whose process died."""

    cell: Cell
    error: str
    """The traceback, or what is known of the death."""

    @property
    def reason(self) -> str:
        """The last line of the traceback: what was raised."""
        lines = self.error.strip().splitlines()
        return lines[-1] if lines else "no reason was recorded"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"schema": SCHEMA, "key": self.cell.key, "cell": self.cell.to_dict(), "error": self.error}

    @classmethod
    def load(cls, path: Path) -> Failure:
        """Read one; a half-written or foreign file is an error that names it."""
        try:
            values = read_json(path)
            if values["schema"] != SCHEMA:
                raise ValueError(f"expected schema {SCHEMA}, got {values['schema']!r}")
            return cls(cell=read_cell(values["cell"]), error=str(values["error"]))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} does not record a failure: {error}") from error


@dataclass(frozen=True, kw_only=True)
class Request:
    """A suite that results were asked for with, and what flags laid over it."""

    suite: str
    """Its name, or the copy of a file of the user's own."""
    scale: str
    settings: dict[str, Any]
    """As `poem.bench.suites.load` takes them; those that nobody gave are left out."""


_SETTINGS: dict[str, type] = {
    "limit": int, "methods": list, "seeds": list, "corruptions": list, "changes": dict, "chosen": dict
}  # fmt: skip
"""What flags may lay over a suite, as JSON has it."""


def _listed(values: Any) -> list[Any]:
    if not isinstance(values, list):
        raise ValueError(f"expected a list, got a {type(values).__name__}")
    return values


def _request(values: Any) -> Request:
    """A request from JSON; an unknown setting or one of another type is an error."""
    found = Request(**values)
    if not (isinstance(found.suite, str) and isinstance(found.scale, str) and isinstance(found.settings, dict)):
        raise ValueError("expected a suite, a scale and settings")
    for name, value in found.settings.items():
        if name not in _SETTINGS or not isinstance(value, _SETTINGS[name]):
            raise ValueError(f"expected settings such as {', '.join(_SETTINGS)}, got {name} {str(value)[:40]}")
    return found


class Store:
    """Results in a folder.

    Args:
        folder: Its top; made when something is saved.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)
        self.cells = self.folder / "cells"
        self.broken: dict[Path, str] = {}
        """Files met so far that are no results, and why. They do not count, and nothing overwrites them."""
        self.edited: dict[Path, str] = {}
        """Results met so far whose checksum is wrong, in words. They count, and whoever shows them says so."""
        self.unchecked: set[Path] = set()
        """Results met so far without a checksum, as of an older version."""

    def path(self, cell: Cell, key: str | None = None) -> Path:
        """Where a cell's result stands; with a key, that of a run with another recipe than the method's is now."""
        shift = cell.corruptions[0] if len(cell.corruptions) == 1 else f"{len(cell.corruptions)}-shifts"
        name = f"{safe(cell.scenario)}-{safe(shift)}-s{cell.seed}-{key or cell.key}.json"
        return self.cells / safe(cell.base) / safe(cell.method) / name

    def finished(self, cell: Cell) -> Report | None:
        """The result of a cell, where a sound one is there; what is there instead is named in `broken`."""
        return self._kept(self.path(cell), cell.key)

    def save(self, report: Report) -> Path:
        """Keep a result: the first one of a cell stays, a broken file in its place is moved aside."""
        path = self.path(report.cell, report.key)
        if self._kept(path, report.key) is None:
            self._move_aside(path)
            report.save(path)
        self._failure(report.cell).unlink(missing_ok=True)
        return path

    def fail(self, cell: Cell, error: str) -> Path:
        """Record why a cell has no result; the last failure stands until the cell succeeds."""
        path = self._failure(cell)
        write_atomic(path, json.dumps(Failure(cell=cell, error=error).to_dict(), indent=1) + "\n")
        return path

    def reports(self) -> Iterator[Report]:
        """Every sound result, in the order of the files' names; the others are named in `broken`."""
        for path in self._files():
            if not path.name.endswith(FAILED) and (report := self._sound(path)) is not None:
                yield report

    def failures(self) -> dict[str, Failure]:
        """What failed and has not succeeded since, by the cell's key; not what failed with a recipe of before."""
        found = {}
        for path in self._files():
            if path.name.endswith(FAILED):
                try:
                    failure = Failure.load(path)
                except (ValueError, OSError) as error:
                    self.broken[path] = str(error)
                    continue
                if path == self._failure(failure.cell):
                    found[failure.cell.key] = failure
        return found

    def ask(self, names: Sequence[str], scale: str, settings: Mapping[str, Any]) -> None:
        """Remember which suites are measured here and with which flags; a suite of the user's own is kept as a copy."""
        found = [asdict(each) for each in self.asked(here=False)]
        given = {key: value for key, value in settings.items() if value}
        for name in names:
            kept = f"{SUITES}/{safe(Path(name).stem)}.yaml" if is_path(name) else name
            if is_path(name):
                write_atomic(self.folder / kept, read_text(Path(name).expanduser()))
            request = json.loads(json.dumps({"suite": kept, "scale": scale, "settings": given}))
            found = [each for each in found if each != request] + [request]  # the latest comes last
        write_atomic(self.folder / ASKED, json.dumps(found, indent=1) + "\n")

    def asked(self, *, here: bool = True) -> list[Request]:
        """What was asked for, the latest last; copies of files as paths from here, or as they are written."""
        path = self.folder / ASKED
        try:
            found = [_request(each) for each in _listed(read_json(path))]
        except FileNotFoundError:
            return []
        except (ValueError, TypeError, OSError) as error:
            self.broken[path] = f"{path} does not say what was asked for: {error}"
            return []
        return [replace(each, suite=str(self.folder / each.suite)) if here and is_path(each.suite) else each
                for each in found]  # fmt: skip

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Be the only writer: a second one is told who the first is. A process that dies lets go by itself.

        What killed writers left half-written is removed. Where the platform has no `fcntl`, nothing is locked.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        with _lock_file(self.folder / ".lock") as file:
            _hold(file, self.folder)
            file.truncate(0)
            file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
            file.flush()
            for path in self.cells.rglob(".*"):
                if _LEFT_OVER.fullmatch(path.name):
                    path.unlink(missing_ok=True)
            yield

    def _kept(self, path: Path, key: str) -> Report | None:
        report = self._sound(path) if path.is_file() else None
        if report is not None and report.key != key:
            self.broken[path] = f"{path} is the result of another cell or recipe: {report.cell.label}"
            report = None
        return report

    def _failure(self, cell: Cell) -> Path:
        path = self.path(cell)
        return path.with_name(path.name.removesuffix(".json") + FAILED)

    def _files(self) -> list[Path]:
        return sorted(path for path in self.cells.rglob("*.json") if not path.name.startswith("."))

    def _sound(self, path: Path) -> Report | None:
        try:
            report = Report.load(path)
        except (ValueError, OSError) as error:
            reason = f"{path} is not a result: {error.strerror or error}" if isinstance(error, OSError) else str(error)
            self.broken[path] = reason
            return None
        if report.intact is False:
            self.edited[path] = (
                f"{path} was edited after it was measured: its checksum is another ({report.cell.label})"
            )
        elif report.intact is None:
            self.unchecked.add(path)
        return report

    def doubts(self) -> list[str]:
        """What is to be said of the results met so far: which were edited, and how many nobody can tell of."""
        said = list(self.edited.values())
        count = len(self.unchecked)
        if count:
            said.append(f"{count} result{' has' if count == 1 else 's have'} no checksum, as of an older version")
        return said

    def _move_aside(self, path: Path) -> None:
        """Give a file that is no result another name, so that its place is free and nothing is lost."""
        if os.path.lexists(path):
            names = (path.with_name(f"{path.name}.broken{number or ''}") for number in range(1_000_000))
            path.rename(next(name for name in names if not os.path.lexists(name)))


def safe(words: str) -> str:
    """A name for any file system: letters, digits and - . + _ stay, `*` is written out, the rest becomes `_`."""
    return re.sub(r"[^A-Za-z0-9.+_-]", "_", words.replace("*", "-twice")).lstrip(".") or "_"


def _lock_file(path: Path) -> IO[str]:
    """The file to lock, open to read and write; a link, a FIFO or a device in its place is an error."""
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


def _hold(file: IO[str], folder: Path) -> None:
    """Lock an open file; wait a moment where its holder is dead, whose helper processes may still have it open."""
    until = time.monotonic() + _PATIENCE
    while fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            file.seek(0)
            words, alive = _holder(file.read())
            if alive or time.monotonic() > until:
                raise BlockingIOError(
                    f"{folder} is in use by {words}; wait until that sweep is over, or give another folder with --out"
                ) from None
            time.sleep(0.1)


def _holder(text: str) -> tuple[str, bool]:
    """Who wrote the lock, in words, and whether it may still be alive."""
    try:
        values = json.loads(text)
        pid, host = int(values["pid"]), str(values["host"])
    except (ValueError, TypeError, KeyError):
        return "another process", True
    alive = host != socket.gethostname() or process_exists(pid)
    return f"process {pid} on {host}", alive
