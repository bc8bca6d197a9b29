"""Answers kept while a run goes on, so that one that is stopped or killed continues where it was.

    predictions.partial.csv          rows of the batches answered so far, in order of arrival
    predictions.partial.csv.state    the adapter's state after some of those batches, and which rows those are

A state is written when a run is stopped, and on the way at most every `EVERY` seconds, and so rarely that writing takes
a twentieth of the time. Going on means: rows after the state's are dropped, the adapter loads the state, and the
batches after it are answered. With the same files, settings and machine, the answers are those of a run that was never
stopped. Both files are removed when the result is written.
"""

from __future__ import annotations

import csv
import dataclasses
import errno
import hashlib
import io
import os
import stat
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from poem._util import files, state_file
from poem.adapter import Adapter
from poem.predict import Answer

try:
    import fcntl
except ImportError:  # not a Unix
    fcntl = None  # type: ignore[assignment]

EVERY = 2.0
"""Seconds between two states, at least; twenty times as long as writing one takes, where that is more."""
_READERS: dict[str, Any] = {
    **dict.fromkeys(("label", "class_index", "source_label"), int),
    **dict.fromkeys(("confidence", "entropy", "first_entropy", "source_entropy"), float),
    **dict.fromkeys(("taught", "newly_reliable"), lambda text: text == "True"),
}
"""How columns that are no text are read; an empty one is None."""


def table(found: Iterable[Answer], *, head: bool = True) -> str:
    """Answers as CSV, with a line of column names."""
    columns = [item.name for item in dataclasses.fields(Answer)]
    rows = [columns] if head else []
    return "".join(map(_line, [*rows, *([getattr(each, name) for name in columns] for each in found)]))


def _line(values: Sequence[Any]) -> str:
    """One row, ended by a line feed; told to end rows with both, the writer quotes fields that hold either."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(values)
    return text.getvalue()[:-2] + "\n"


def read_table(text: str) -> list[Answer]:
    """Answers from `table`'s text."""
    return [_answer(row) for row in csv.DictReader(io.StringIO(text, newline=""))]


def _answer(row: Mapping[str, str]) -> Answer:
    values: dict[str, Any] = dict(row)
    for name, read in _READERS.items():
        values[name] = read(row[name]) if row[name] else None
    return Answer(**values)


def images_of(paths: Sequence[Path], folder: Path) -> str:
    """A hash of images in their order: names, sizes and times of change."""
    digest = hashlib.sha256()
    for path in paths:
        found = path.stat()
        words = f"{path.relative_to(folder)}\0{found.st_size}\0{found.st_mtime_ns}\n"
        digest.update(words.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:16]


class Journal:
    """The record of one run, locked against a second one; use it with `with`, which keeps it, and `remove` at the end.

    Args:
        out: Where the result will be; the record stands beside it.
        settings: All that the answers depend on, as JSON takes it. A record of other settings is an error.
        restart: Begin anew, whatever is there.

    Raises:
        ValueError: A record is there that was begun with other settings, or that was changed since.
        BlockingIOError: Another process writes it.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any], *, restart: bool = False) -> None:
        self.rows = out.with_name(f"{out.stem}.partial{out.suffix}")
        self.saved = out.with_name(f"{self.rows.name}.state")
        self.settings = dict(settings)
        self.done = 0
        """Images that are answered."""
        self.found: list[Answer] = []
        """The answers for those images, in order of arrival."""
        self.state: dict[str, Any] | None = None
        """What the adapter had learnt from them, where a run goes on."""
        self._due, self._finished = 0.0, False
        self._last: dict[str, Any] | None = None
        out.parent.mkdir(parents=True, exist_ok=True)
        files.check_file_writable(self.saved)
        self._file = self._locked()
        try:
            if not restart:
                self._go_on()
            self._digest = hashlib.sha256(self._held)
            if not self._held:
                self._file.truncate(0)
                self.saved.unlink(missing_ok=True)
                self._append(table([]))
        except BaseException:
            self._file.close()
            raise

    def add(self, batch: Sequence[Answer], images: int, adapter: Adapter) -> None:
        """Keep the answers of a batch, after which `images` are done."""
        self._append(table(batch, head=False))
        self.found += batch
        self.done = images
        self._last = adapter.state_dict()  # a copy: a signal may come while the next batch is learnt from
        if time.monotonic() >= self._due:
            self._save()

    def _save(self) -> None:
        """Write the state after the last batch, unless that is done."""
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
        """The result is written: the record is not needed any more."""
        self._finished = True
        self.saved.unlink(missing_ok=True)
        self.rows.unlink(missing_ok=True)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        with self._file:
            self._file.truncate(self._size)  # a signal may have cut a row
            if not self._finished:
                with suppress(OSError) if error is not None else nullcontext():  # the first error is the one to tell
                    self._save()

    def _locked(self) -> io.FileIO:
        """The file of rows, locked; a link or anything else that is no regular file is an error."""
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

    _held = b""
    """The rows that a run goes on after, as they stand in the file."""
    _size = 0
    """Bytes of the file that are whole rows."""

    def _append(self, text: str) -> None:
        data = text.encode("utf-8", "surrogateescape")
        self._file.seek(self._size)
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
        self._digest.update(data)
        self._size += len(data)

    def _go_on(self) -> None:
        """Take over what is there: rows, state and number of images; nothing where there is no state."""
        begin = "; give another -o, or begin anew with --restart"
        if not os.path.lexists(self.saved):
            head = table([]).encode()
            there = self._file.readall()
            if there and not there.startswith(head) and not head.startswith(there):
                raise ValueError(f"{self.rows} is there, and not written by poem predict{begin}")
            return
        try:
            state = state_file.load_state(self.saved)
            record = state.pop("predict")
            theirs, size, images = record["settings"], int(record["bytes"]), int(record["images"])
            digest = str(record["sha256"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.saved} is no state of a stopped run ({error}){begin}") from error
        if theirs != self.settings:
            names = dict.fromkeys([*self.settings, *theirs])
            differ = [name for name in names if theirs.get(name) != self.settings.get(name)]
            if differ == ["images"]:
                raise ValueError(f"the images, or their order, are not those that {self.rows} was begun with{begin}")
            words = ", ".join(f"{name} {theirs.get(name)!r}, now {self.settings.get(name)!r}" for name in differ)
            raise ValueError(
                f"{self.rows} was begun with other settings: {words}; type the same command as then{begin}"
            )
        self._file.seek(0)
        held = self._file.readall()[:size]
        if hashlib.sha256(held).hexdigest() != digest:
            raise ValueError(f"{self.rows} was changed since it was written{begin}")
        self.found = read_table(held.decode("utf-8", "surrogateescape"))
        self.state, self.done, self._held, self._size = state, images, held, size
        self._file.truncate(size)
