"""Who writes a stream, where several services share a folder: a number that rises each time the stream moves.

    FOLDER/streams/HASH/owner-00000007   {"writer": ID, "floor": 0, "released": false}; the highest number owns
    FOLDER/writers/ID                    locked by the process of that writer as long as it lives
    FOLDER/writers/ID.asked/HASH         another writer asks for that stream

A writer takes a stream with the next number: a whole file that appears under a name of its own (`os.link`), so of two
that try the same number one gets it. Snapshots have the number of their writer in their name, and the highest is read:
a writer that has lost a stream, and does not know it yet, can write over its own snapshots alone. Before it takes a
stream from a writer that lives, the next one asks for it and waits a little, so that nothing is lost that was learnt
since the last snapshot. The wait is a courtesy: whoever does not answer in time is not waited for.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import threading
import time
from pathlib import Path
from typing import IO, Any
from weakref import WeakValueDictionary

from poem._util.files import write_atomic

OWNER = "owner-"
HANDOVER_S = 3.0
"""Seconds for which a writer that lives is waited for."""


class Leases:
    """The streams that one writer owns. May be used from several threads.

    Args:
        folder: Of the service.
        writer: Name of this writer, which no other has or had.
        handover_s: Seconds for which another writer that lives is asked for a stream, before it is taken.
    """

    def __init__(self, folder: Path, writer: str, handover_s: float = HANDOVER_S) -> None:
        self.writer, self._handover = writer, handover_s
        self._writers = folder / "writers"
        self._asked = self._writers / f"{writer}.asked"
        self._asked.mkdir(parents=True, mode=0o700, exist_ok=True)
        self._alive = locked(self._writers / writer)
        self._own: dict[str, int] = {}
        self._locks: WeakValueDictionary[str, Any] = WeakValueDictionary()  # of streams that are being taken
        self._making = threading.Lock()

    def take(self, place: Path) -> int:
        """Own the stream of a folder, which is made; returns its number. At once where it is owned already."""
        with self._lock_of(place.name):
            number, claim = newest(place)
            if number and self._own.get(place.name) == number:
                return number
            if number and not claim.get("released"):
                self._ask(place, number, str(claim.get("writer")))
            place.mkdir(mode=0o700, exist_ok=True)
            while True:
                number, claim = newest(place)
                wanted = number + 1
                if self._created(place, wanted, int(claim.get("floor", 0))) and newest(place)[0] == wanted:
                    break
            self._own[place.name] = wanted
            for path in place.glob(f"{OWNER}*"):
                if _number(path) < wanted:
                    path.unlink(missing_ok=True)
            return wanted

    def _lock_of(self, name: str) -> Any:
        """The lock of a stream's folder, which is gone when nobody takes that stream."""
        with self._making:
            lock = self._locks.get(name)
            if lock is None:
                lock = self._locks[name] = threading.Lock()
            return lock

    def number(self, place: Path) -> int:
        """The number with which this writer owns a stream, as far as it knows; 0 where it does not."""
        return self._own.get(place.name, 0)

    def held(self, place: Path) -> bool:
        """Whether this writer owns a stream still."""
        own = self._own.get(place.name)
        return own is not None and newest(place)[0] == own

    def release(self, place: Path) -> None:
        """Let go of a stream whose snapshot is written: the next writer need not wait."""
        own = self._own.pop(place.name, None)
        if own is not None:
            self._write(place, own, released=True)
        (self._asked / place.name).unlink(missing_ok=True)

    def forget(self, place: Path) -> None:
        """Note that snapshots of earlier writers are of a stream that was deleted."""
        own = self._own.get(place.name)
        if own is not None:
            self._write(place, own, floor=own)

    def asked(self) -> list[str]:
        """Names of the folders whose streams other writers ask for."""
        with contextlib.suppress(OSError):
            return os.listdir(self._asked)
        return []

    def close(self) -> None:
        """Own nothing more."""
        for name in list(self._own):
            self._own.pop(name, None)
        with contextlib.suppress(OSError):
            (self._writers / self.writer).unlink(missing_ok=True)
            for path in self._asked.iterdir():
                path.unlink(missing_ok=True)
            self._asked.rmdir()
        self._alive.close()

    def _ask(self, place: Path, number: int, other: str) -> None:
        """Ask the owner for a stream, and wait until it lets go, is gone, or does not answer in time."""
        if not _lives(self._writers / other):
            return
        until, note = time.monotonic() + self._handover, self._writers / f"{other}.asked" / place.name
        try:
            note.touch(mode=0o600)
        except OSError:  # it ended meanwhile
            return
        while time.monotonic() < until:
            time.sleep(0.01)
            at, claim = newest(place)
            if at != number or claim.get("released") or not _lives(self._writers / other):
                break

    def _created(self, place: Path, number: int, floor: int) -> bool:
        """Write a claim under a number that has none; says whether it was the first."""
        temp = place / f".claim-{secrets.token_hex(8)}"
        with os.fdopen(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump({"writer": self.writer, "floor": floor, "released": False}, file)
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temp, place / f"{OWNER}{number:08d}")
        except FileExistsError:
            return False
        finally:
            temp.unlink(missing_ok=True)
        return True

    def _write(self, place: Path, number: int, **values: Any) -> None:
        """Change what a claim says."""
        path = place / f"{OWNER}{number:08d}"
        with contextlib.suppress(OSError):
            write_atomic(path, json.dumps({**_claim(path), "writer": self.writer, **values}))


def newest(place: Path) -> tuple[int, dict[str, Any]]:
    """The highest number of a stream's folder, and what its claim says; 0 where nobody has taken it.

    Raises:
        OSError: The folder cannot be read.
    """
    while True:
        try:
            names = [name for name in os.listdir(place) if name.startswith(OWNER)]
        except (FileNotFoundError, NotADirectoryError):
            return 0, {}
        if not names:
            return 0, {}
        path = place / max(names)
        try:
            return _number(path), _claim(path)
        except FileNotFoundError:  # the next writer has removed it: its own is there
            continue


def floor_of(place: Path) -> int:
    """Snapshots of lower numbers are of a stream that was deleted."""
    return int(newest(place)[1].get("floor", 0))


def _number(path: Path) -> int:
    text = path.name[len(OWNER) :]
    return int(text) if text.isdecimal() else 0


def _claim(path: Path) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        found = json.loads(path.read_text())
        if isinstance(found, dict):
            return found
    return {}


def _lives(path: Path) -> bool:
    """Whether the process of a writer holds its lock."""
    try:
        locked(path, make=False).close()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def locked(path: Path, *, shared: bool = False, make: bool = True) -> IO[bytes]:
    """The file, locked for this process as long as it is open; the system unlocks it when the process ends.

    Raises:
        FileNotFoundError: There is no such file, and none is to be made.
        OSError: Another process has locked it.
    """
    handle = os.fdopen(os.open(path, os.O_RDWR | (os.O_CREAT if make else 0), 0o600), "r+b")
    try:
        import fcntl
    except ImportError:  # not on Windows
        return handle
    try:
        fcntl.flock(handle, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        handle.close()
        raise OSError(
            f"expected a folder that no other service uses, got {path.parent}; stop that one, or name another: --state"
        ) from error
    return handle
