"""Checkpoint of `poem predict`, in two files beside the result, so that a stopped or killed run can be resumed.

    predictions.partial.csv          rows of the batches answered so far, in order of arrival
    predictions.partial.csv.state    the adapter's state after some of those batches, and which rows those are

The state is written when a run is stopped, and during a run at most every `EVERY` seconds and so rarely that writing
takes a twentieth of the time. To resume, rows after the state's are dropped, the adapter loads the state, and the
batches after it are answered. With the same files, settings and machine, the answers are those of a run that was never
stopped. Both files are removed when the result is written.
"""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from poem._util import files, state_file
from poem.adapter import Adapter
from poem.cli._predictions_csv import COLUMNS, GUARDED_COLUMNS, from_csv, to_csv
from poem.guarded.guard import Guard
from poem.predict import Answer

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

EVERY = 2.0
"""Least seconds between two writes of the state; twenty times as long as one write takes, where that is more."""


def hash_file_list(paths: Sequence[Path], folder: Path) -> str:
    """A hash of the files' names, sizes and modification times, in their order."""
    digest = hashlib.sha256()
    for path in paths:
        found = path.stat()
        line = f"{path.relative_to(folder)}\0{found.st_size}\0{found.st_mtime_ns}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


def checkpoint_files(out: Path) -> tuple[Path, Path]:
    """The files of rows and of the state, beside a result."""
    rows = out.with_name(f"{out.stem}.partial{out.suffix}")
    return rows, out.with_name(f"{rows.name}.state")


class FileCheckpoint:
    """The checkpoint of one run, locked against a second process.

    Use it with `with`, which writes the state when the block ends; call `remove` once the result is written.

    Args:
        out: Path of the result; the checkpoint's files are beside it.
        settings: Everything that the answers depend on, as JSON takes it. A checkpoint of other settings is an error.
        restart: Start from the first image, and drop a checkpoint that is there.
        columns: The columns of the rows.

    Raises:
        ValueError: There is a checkpoint of other settings, or one that was changed since.
        BlockingIOError: Another process writes it.
    """

    def __init__(
        self, out: Path, settings: Mapping[str, Any], *, restart: bool = False, columns: Sequence[str] = COLUMNS
    ) -> None:
        self.rows, self.saved = checkpoint_files(out)
        self.settings, self.columns = dict(settings), columns
        self.done = 0
        """Number of images answered."""
        self.answers: list[Answer] = []
        """The answers for those images, in order of arrival."""
        self.state: dict[str, Any] | None = None
        """The adapter's state after them, where a run is resumed."""
        self._due, self._finished = 0.0, False
        self._last: dict[str, Any] | None = None
        out.parent.mkdir(parents=True, exist_ok=True)
        files.check_file_writable(self.saved)
        self._file = self._open_locked()
        try:
            if not restart:
                self._resume()
            self._digest = hashlib.sha256(self._resumed)
            if not self._resumed:
                self._file.truncate(0)
                self.saved.unlink(missing_ok=True)
                self._append(to_csv([], columns=columns))
        except BaseException:
            self._file.close()
            raise

    def add(self, batch: Sequence[Answer], images: int, adapter: Adapter | Guard) -> None:
        """Write the answers of a batch, after which `images` are done."""
        self._append(to_csv(batch, header=False, columns=self.columns))
        self.answers += batch
        self.done = images
        self._last = adapter.state_dict()  # a copy: a signal may come during the update on the next batch
        if time.monotonic() >= self._due:
            self._save()

    def _save(self) -> None:
        """Write the state after the last batch, unless it is written already."""
        if self._last is None:
            return
        began = time.monotonic()
        os.fsync(self._file.fileno())
        record = {
            "settings": self.settings, "images": self.done, "bytes": self._size, "sha256": self._digest.hexdigest()
        }  # fmt: skip
        state_file.save_state({**self._last, "predict": record}, self.saved)
        self._last, ended = None, time.monotonic()
        self._due = ended + max(EVERY, 20 * (ended - began))

    def remove(self) -> None:
        """Delete both files, after the result has been written."""
        self._finished = True
        self.saved.unlink(missing_ok=True)
        self.rows.unlink(missing_ok=True)

    def __enter__(self) -> FileCheckpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        with self._file:
            self._file.truncate(self._size)  # a signal may have cut a row
            if not self._finished:
                with suppress(OSError) if error is not None else nullcontext():  # report the first error, not this one
                    self._save()

    def _open_locked(self) -> io.FileIO:
        """Open and lock the file of rows; a link, or anything that is not a regular file, is an error."""
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
        files.check_file_writable(self.rows)
        file = io.FileIO(os.open(self.rows, flags | getattr(os, "O_BINARY", 0), 0o666), "r+")
        try:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(errno.EINVAL, "expected a regular file", str(self.rows))
            if fcntl is not None:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            raise BlockingIOError(f"another process writes {self.rows}; wait for it, or give another -o") from None
        except BaseException:
            file.close()
            raise
        return file

    _resumed = b""
    """The rows of the run that is resumed, as bytes of the file."""
    _size = 0
    """Bytes of the file that are complete rows."""

    def _append(self, text: str) -> None:
        data = text.encode("utf-8", "surrogateescape")
        self._file.seek(self._size)
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self._digest.update(data)
        self._size += len(data)

    def _resume(self) -> None:
        """Read rows, state and number of images from the files; where there is no state there is nothing to resume."""
        remedy = "; give another -o, or begin anew with --restart"
        if not os.path.lexists(self.saved):
            headers = [to_csv([], columns=names).encode() for names in (COLUMNS, GUARDED_COLUMNS)]
            present = self._file.readall()
            if present and not any(present.startswith(each) or each.startswith(present) for each in headers):
                raise ValueError(f"{self.rows} is there, and not written by poem predict{remedy}")
            return
        try:
            state = state_file.load_state(self.saved)
            record = state.pop("predict")
            stated, size, images = record["settings"], int(record["bytes"]), int(record["images"])
            digest = str(record["sha256"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.saved} is no state of a stopped run ({error}){remedy}") from error
        if stated != self.settings:
            names = dict.fromkeys([*self.settings, *stated])
            differ = [name for name in names if stated.get(name) != self.settings.get(name)]
            if differ == ["images"]:
                raise ValueError(f"the images, or their order, are not those that {self.rows} was begun with{remedy}")
            changes = ", ".join(f"{name} {stated.get(name)!r}, now {self.settings.get(name)!r}" for name in differ)
            raise ValueError(
                f"{self.rows} was begun with other settings: {changes}; type the same command as then{remedy}"
            )
        self._file.seek(0)
        rows = self._file.readall()[:size]
        if hashlib.sha256(rows).hexdigest() != digest:
            raise ValueError(f"{self.rows} was changed since it was written{remedy}")
        self.answers = from_csv(rows.decode("utf-8", "surrogateescape"))
        self.state, self.done, self._resumed, self._size = state, images, rows, size
        self._file.truncate(size)
