"""The folder of a service's states: what survives a stop.

    FOLDER/service.json                 what the states are of; another model or method is refused
    FOLDER/streams/HASH/state.safetensors   the last snapshot of a stream, with its idempotency keys
    FOLDER/streams/HASH/0001.jsonl          its audit; a state that was imported begins the next number
    FOLDER/streams/HASH/0001.safetensors    the state that the audit of that number begins with, unless a fresh one

Where several services share the folder, a stream's snapshots are called state-00000007.safetensors by the number with
which their writer owns the stream; the highest is read (`poem.serve.leases`).

HASH is made of the stream's id, so nothing that a request names reaches the file system. The owner alone may read any
of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from poem._util.files import TEMP_SUFFIX, read_json, write_atomic
from poem._util.state_file import MAX_HEADER, load_state, state_bytes
from poem.guarded.audit import json_values
from poem.serve.leases import Leases, floor_of, locked

SCHEMA = 1
STATE = "state.safetensors"
STATES = "state*.safetensors"
LEFT_S = 3600.0
"""Seconds after which a temporary file in a shared folder is one that a kill has left."""
READS = 20
"""Times that a snapshot is looked for anew which another writer has replaced meanwhile."""
_PART = re.compile(rf"{TEMP_SUFFIX}$")
_PART_OR_CLAIM = re.compile(rf"{TEMP_SUFFIX}$|^\.claim-")
T = TypeVar("T")


class Lost(Exception):
    """Another service has become a stream's writer."""


class Store:
    """The files of one service; a second service on the same folder is refused, unless both share it.

    Args:
        folder: Made if it is not there.
        facts: What every state is of, as JSON has it: weights, recipe, settings.
        writer: A name of this service alone, where several share the folder; each stream has one writer at a time.

    Raises:
        ValueError: The folder holds the states of another model, method or settings.
        OSError: It cannot be written, or another service uses it.
    """

    def __init__(self, folder: Path, facts: dict[str, Any], writer: str | None = None) -> None:
        self.folder = Path(folder)
        self._streams = self.folder / "streams"
        self._streams.mkdir(parents=True, exist_ok=True, mode=0o700)
        for each in (self.folder, self._streams):
            each.chmod(0o700)
        self._lock = locked(self.folder / "lock", shared=writer is not None)
        self._leases: Leases | None = None
        try:
            self._leases = None if writer is None else Leases(self.folder, writer)
            self._check_facts(json_values({"schema": SCHEMA, **facts}))
            self._sweep()
        except BaseException:
            self.close()
            raise

    def _check_facts(self, facts: dict[str, Any]) -> None:
        """Note what the states are of, or compare it with what they were of before, where there are any."""
        path = self.folder / "service.json"
        if not path.exists():
            self._write_facts(path, facts)
            return
        stated = read_json(path)
        names = {**facts, **stated} if isinstance(stated, dict) else facts
        differ = [name for name in names if not isinstance(stated, dict) or stated.get(name) != facts.get(name)]
        if differ and isinstance(stated, dict) and "schema" in stated and self._is_empty_and_alone():
            self._write_facts(path, facts)
        elif differ:
            raise ValueError(
                f"expected a folder with states of this service, got {self.folder}, whose states have other "
                f"{', '.join(differ)}; name another with --state"
            )

    def _write_facts(self, path: Path, facts: dict[str, Any]) -> None:
        write_atomic(path, json.dumps(facts, indent=1))
        path.chmod(0o600)

    def _is_empty_and_alone(self) -> bool:
        """Whether no stream has a snapshot, and no other service may be about to write one into a shared folder."""
        return self._leases is None and not any(_newest(place) for place in self._streams.iterdir())

    def _sweep(self) -> None:
        """Remove temporary files that a kill has left; in a shared folder the old ones, since others write there."""
        newest = math.inf if self._leases is None else time.time() - LEFT_S
        for place in (self.folder, *self._streams.iterdir()):
            _remove_left(place, _PART_OR_CLAIM, newest)

    # Who writes a stream ----------------------------------------------------------------------------------------------

    @property
    def shared(self) -> bool:
        """Whether other services may use the folder too."""
        return self._leases is not None

    def take(self, stream: str) -> int:
        """Become the stream's only writer; its number, which is another one each time it moves. 0 if not shared."""
        return 0 if self._leases is None else self._leases.take(self._place(stream))

    def number(self, stream: str) -> int:
        """What `take` returned last; 0 where the stream is not this service's."""
        return 0 if self._leases is None else self._leases.number(self._place(stream))

    def held(self, stream: str) -> bool:
        """Whether this service is the stream's writer still."""
        return self._leases is None or self._leases.held(self._place(stream))

    def moved(self, stream: str) -> bool:
        """Whether the stream's snapshot is of another writer."""
        return self._leases is not None and _generation(self._snapshot(stream)) != self._leases.number(
            self._place(stream)
        )

    def release(self, stream: str) -> None:
        """Let another service be the stream's writer."""
        if self._leases is not None:
            self._leases.release(self._place(stream))

    def asked(self) -> list[str]:
        """Folders (`folder_name`) of the streams that other services ask for."""
        return [] if self._leases is None else self._leases.asked()

    def let_go(self, name: str) -> None:
        """Let go of a stream by the name of its folder."""
        if self._leases is not None:
            self._leases.release(self._streams / Path(name).name)

    # Snapshots --------------------------------------------------------------------------------------------------------

    def known(self) -> dict[str, dict[str, Any]]:
        """What each stored stream's snapshot says of it, by id; files that are none are passed over.

        Raises:
            OSError: One cannot be read.
        """
        found: dict[str, dict[str, Any]] = {}
        for place in sorted(self._streams.iterdir()):
            about = _read_newest(place, _described) or {}
            name = about.get("id")
            if isinstance(name, str) and place.name == folder_name(name):
                found[name] = about
        return found

    def about(self, stream: str) -> dict[str, Any]:
        """What a stream's snapshot says of it; empty where there is none, or a file that is none.

        Raises:
            OSError: It cannot be read: that says nothing of whether there is one.
        """
        return _read_newest(self._place(stream), _described) or {}

    def has(self, stream: str) -> bool:
        """Whether the stream has a snapshot.

        Raises:
            OSError: Its folder cannot be read.
        """
        return self._snapshot(stream) is not None

    def save(self, stream: str, state: dict[str, Any], about: dict[str, Any], number: int = 0) -> None:
        """Write a snapshot, whole or not at all: the state, and what the service knows of the stream.

        Args:
            stream: Its id.
            state: What was learnt.
            about: What `about` is to return.
            number: What `take` had returned when the state was opened. This service may have lost the stream since and
                taken it again: the state then lacks what another writer has learnt meanwhile.

        Raises:
            OSError: It cannot be written.
            Lost: The stream is not owned under that number any more; nothing is written then.
        """
        place, content = self._place(stream), {**state, "serve": {**about, "id": stream}}
        if self._leases is None:  # a deletion by services that shared the folder has left a floor
            self._write(self._snapshot(stream) or place / _state_name(floor_of(place)), content)
            return
        if not number or number != self._leases.number(place) or not self._leases.held(place):
            raise Lost(f"stream {stream!r} has moved since this state was opened")
        path = place / _state_name(number)
        self._write(path, content)
        for each in place.glob(STATES):
            if _generation(each) < _generation(path):
                each.unlink(missing_ok=True)

    def _snapshot(self, stream: str) -> Path | None:
        return _newest(self._place(stream))

    def load(self, stream: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """A stream's state, and what the service knew of it then."""
        state = _read_newest(self._place(stream), load_state)
        if state is None:
            raise FileNotFoundError(f"expected a snapshot of stream {stream!r} in {self._place(stream)}, got none")
        about = state.pop("serve", {})
        return state, about if isinstance(about, dict) else {}

    def delete(self, stream: str) -> None:
        """Remove what was learnt: the snapshot, and states that audits begin with. Audits, which have hashes, stay."""
        place = self._place(stream)
        if self._leases is not None:
            self._leases.forget(place)
        for path in place.glob("*.safetensors"):
            path.unlink(missing_ok=True)
        _remove_left(place, _PART)
        if self._leases is None and not any(place.glob("*.jsonl")):
            shutil.rmtree(place, ignore_errors=True)

    def audit(self, stream: str, number: int) -> Path:
        """The file of a stream's audit with this number; its folder is there."""
        place = self._place(stream)
        if not place.exists():
            place.mkdir(mode=0o700)
        return place / f"{number:04d}.jsonl"

    def last_audit(self, stream: str) -> int:
        """Number of a stream's last audit; 0 where there is none."""
        return max((int(each.stem) for each in self._place(stream).glob("[0-9]*.jsonl")), default=0)

    def discard_audit(self, stream: str, number: int) -> None:
        """Remove an audit that has a header alone, with the state it begins with; a folder that is empty then too."""
        with contextlib.suppress(OSError):  # as where the folder has other files
            for path in (self._place(stream) / f"{number:04d}.jsonl", self.start(stream, number)):
                path.unlink(missing_ok=True)
            if self._leases is None:
                self._place(stream).rmdir()

    def save_start(self, stream: str, number: int, state: dict[str, Any]) -> None:
        """Write the state that an audit begins with."""
        self._write(self.start(stream, number), state)

    def start(self, stream: str, number: int) -> Path:
        """The file of the state that an audit begins with; not there where that is a fresh one."""
        return self._place(stream) / f"{number:04d}.safetensors"

    def close(self) -> None:
        """Let another service use the folder."""
        if self._leases is not None:
            self._leases.close()
        self._lock.close()

    def _write(self, path: Path, state: dict[str, Any]) -> None:
        """Write a state for the owner alone."""
        if not path.parent.exists():
            path.parent.mkdir(mode=0o700)
        write_atomic(path, state_bytes(state))
        path.chmod(0o600)

    def relative_folder(self, stream: str) -> str:
        """The stream's folder, from that of the service, for people who look for its files."""
        return f"{self._streams.name}/{folder_name(stream)}"

    def _place(self, stream: str) -> Path:
        return self._streams / folder_name(stream)


def folder_name(stream: str) -> str:
    """The folder of a stream: a hash, so that no text of a request names a file."""
    return hashlib.sha256(stream.encode()).hexdigest()[:32]


def _state_name(generation: int) -> str:
    return f"state-{generation:08d}.safetensors" if generation else STATE


def _generation(path: Path | None) -> int:
    """The number of the writer that wrote a snapshot; 0 for one that had the folder for itself, -1 for none."""
    text = "" if path is None else path.name[len("state-") : -len(".safetensors")]
    return -1 if path is None else int(text) if text.isdecimal() else 0


def _newest(place: Path) -> Path | None:
    """The snapshot of a folder: that of the last writer; none where the stream was deleted since.

    Raises:
        OSError: The folder cannot be read.
    """
    try:
        names = [Path(name) for name in os.listdir(place)]
    except (FileNotFoundError, NotADirectoryError):
        return None
    found = max((name for name in names if name.match(STATES)), key=_generation, default=None)
    return None if found is None or _generation(found) < floor_of(place) else place / found


def _read_newest(place: Path, read: Callable[[Path], T]) -> T | None:
    """What a folder's snapshot holds; None where there is none. Another writer may replace it meanwhile."""
    for left in reversed(range(READS)):
        path = _newest(place)
        if path is None:
            return None
        try:
            return read(path)
        except FileNotFoundError:
            if not left:
                raise
    return None


def _described(path: Path) -> dict[str, Any]:
    """The service's part of a snapshot, without its tensors; empty where the file is none.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = file.read(size) if size <= MAX_HEADER else b""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        rest = json.loads(json.loads(header)["__metadata__"]["poem"])
        if isinstance(rest, dict) and isinstance(rest.get("serve"), dict):
            found: dict[str, Any] = rest["serve"]
            return found
    return {}


def _remove_left(place: Path, pattern: re.Pattern[str], newest: float = math.inf) -> None:
    """Remove the temporary files of a folder that were written until a time."""
    with contextlib.suppress(OSError):
        for name in os.listdir(place):
            path = place / name
            if pattern.search(name) and path.lstat().st_mtime <= newest:
                path.unlink(missing_ok=True)
