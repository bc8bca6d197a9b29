"""The record of what a guard did: one JSON line for each batch and each event, written as it happens."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import stat
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

log = logging.getLogger("poem")
AUDIT_SCHEMA = 1
PIECE = 1 << 16
"""Bytes that are read at once where the end of an audit is looked for."""
MACHINE = ("torch", "device", "threads", "deterministic", "compile", "poem")
"""Fields of a header that say where a run was made; a run that goes on elsewhere may have others.

`compile` stands in older audits: `adapt` had such an argument.
"""


@dataclass(frozen=True)
class Event:
    """A decision of the guard, with what led to it."""

    batch: int
    """Which batch of the stream, from 0."""
    kind: str
    """Such as "alarm", "verdict", "roll back", "reset", "freeze", "skip", "gradient spike", "audit lost"."""
    why: str
    signals: dict[str, float | None] = field(default_factory=dict)
    name: str = ""
    """The guard's `name=`, which tells streams apart."""

    def __str__(self) -> str:
        return f"batch {self.batch}: {self.kind}: {self.why}"


class Audit:
    """A JSONL file: a header, then a line for each batch and event. The owner alone may read it.

    Every line is on its way to the disk before the batch's answer is returned. Where the disk is full the run goes on:
    `write` returns the error once, and nothing more is written.

    Args:
        path: A new or empty file.
        header: What a replay must find the same.
        append: Go on with the file of a run that was stopped; a line that a kill has cut is dropped.

    Raises:
        FileExistsError: The file has content, and `append` is not set.
        ValueError: With `append`: the file is no audit, or that of another run.
        OSError: The header cannot be written.
    """

    def __init__(self, path: Path, header: dict[str, Any], *, append: bool = False) -> None:
        self.path, self.lost = Path(path), False
        whole = _whole_lines(self.path, header) if append else 0
        if not append and self.path.exists() and self.path.stat().st_size:
            raise FileExistsError(
                f"expected a new file for the audit, got {self.path}, which has content; name another"
            )
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._file = os.fdopen(handle, "ab", buffering=0)
        try:
            if hasattr(os, "fchmod") and stat.S_ISREG(os.fstat(handle).st_mode):
                os.fchmod(handle, 0o600)  # an empty file that was there may have another mode
            if append and stat.S_ISREG(os.fstat(handle).st_mode):
                os.truncate(handle, whole)
            failed = None if whole else self.write({"kind": "header", "schema": AUDIT_SCHEMA, **header})
            if failed is not None:
                raise OSError(f"expected a place for the audit, got {self.path}: {failed}; name another")
        except BaseException:
            self._file.close()
            raise

    def write(self, line: dict[str, Any]) -> str | None:
        """Append a line; returns why it could not, the first time."""
        if self.lost or self._file.closed:
            return None
        left = memoryview((json.dumps(_plain(line), separators=(",", ":")) + "\n").encode())
        try:
            while left:  # where the disk is nearly full, the first write takes a part and only the second one fails
                left = left[self._file.write(left) :]
        except OSError as error:
            self.lost = True
            return str(error)
        return None

    @property
    def size(self) -> int | None:
        """Bytes written so far; None where lines are missing."""
        return None if self.lost or self._file.closed else os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class AuditLines:
    """The lines of an audit in memory, as a file would have them; what `replay` compares."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def write(self, line: dict[str, Any]) -> str | None:
        """Keep a line as it would be read back from a file; none is ever lost, so None."""
        self.lines.append(json_values(line))
        return None

    def close(self) -> None:
        """Nothing is open."""


def _whole_lines(path: Path, header: dict[str, Any]) -> int:
    """Bytes of an audit's complete lines, if it is one of a run with this header; 0 where nothing was written yet.

    Of a long audit the first line and the end alone are read: a service goes on with audits all the time.
    """
    if not path.exists():
        return 0
    with path.open("rb") as file:
        whole = _end_of_lines(file)
        if not whole:
            return 0
        file.seek(0)
        stated, mine = _header_of(_lines([file.readline()], path), path), json_values(header)
    names = [name for name in {**mine, **stated} if name not in ("kind", "schema", *MACHINE)]
    differ = [name for name in names if stated.get(name) != mine.get(name)]
    if differ:
        raise ValueError(
            f"expected the audit of the run that goes on, got {path}, of a run with other {', '.join(differ)}; name "
            "another file"
        )
    return whole


def _end_of_lines(file: BinaryIO) -> int:
    """Where the last complete line ends, looked for from the end of the file; 0 where there is none."""
    at = file.seek(0, os.SEEK_END)
    while at > 0:
        start = max(0, at - PIECE)
        file.seek(start)
        found = file.read(at - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        at = start
    return 0


def read_audit(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and lines of an audit; a last line that was cut by a kill is left out."""
    lines = _lines(Path(path).read_bytes().splitlines(), path)
    return _header_of(lines, path), lines[1:]


def lines_after(path: Path, start: int) -> list[dict[str, Any]]:
    """Lines of an audit from a byte on at which one begins; a last line that was cut by a kill is left out."""
    with Path(path).open("rb") as file:
        file.seek(start)
        content = file.read()
    return _lines(content[: content.rfind(b"\n") + 1].splitlines(), path)


def _lines(texts: list[bytes], path: Path) -> list[dict[str, Any]]:
    """Lines of an audit, of which a kill may have cut the last."""
    lines = list[dict[str, Any]]()
    for number, text in enumerate(texts, 1):
        try:
            lines.append(json.loads(text))
        except ValueError as error:
            if number > 1 and number == len(texts):
                break
            raise ValueError(f"expected an audit written by a guard, got {path}, line {number}: {error}") from error
        if not isinstance(lines[-1], dict):
            raise ValueError(f"expected an audit written by a guard, got {path}, whose line {number} is no object")
    return lines


def _header_of(lines: list[dict[str, Any]], path: Path) -> dict[str, Any]:
    """The first line of an audit."""
    if not lines or lines[0].get("kind") != "header":
        raise ValueError(f"expected an audit written by a guard, got {path}, which has no header")
    if lines[0].get("schema") != AUDIT_SCHEMA:
        raise ValueError(f"expected an audit of schema {AUDIT_SCHEMA}, got {lines[0].get('schema')} in {path}")
    return lines[0]


def tensor_hash(*tensors: Tensor) -> str:
    """Sixteen digits of the SHA-256 of each tensor's type, shape and bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        held = tensor.detach().cpu().contiguous()
        digest.update(f"{held.dtype} {tuple(held.shape)}".encode())
        digest.update(held.flatten().view(torch.uint8).numpy().tobytes() if held.numel() else b"")
    return digest.hexdigest()[:16]


def json_values(line: dict[str, Any]) -> dict[str, Any]:
    """A line as it is read back from a file."""
    found: dict[str, Any] = json.loads(json.dumps(_plain(line)))
    return found


def _plain(value: Any) -> Any:
    """Values as JSON has them: no NaN, which is no JSON, but its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
