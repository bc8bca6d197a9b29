"""The record of what a guard did: one JSON line for each batch and each event, written as it happens."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("poem")
AUDIT_SCHEMA = 1


@dataclass(frozen=True)
class Event:
    """A decision of the guard, with what led to it."""

    batch: int
    """Which batch of the stream, from 0."""
    kind: str
    """Such as "alarm", "roll back", "reset", "freeze", "skip", "budget", "audit lost"."""
    why: str
    signals: dict[str, float | None] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"batch {self.batch}: {self.kind}: {self.why}"


class Audit:
    """A JSONL file: a header, then a line for each batch and event. The owner alone may read it.

    Every line is on its way to the disk before the batch's answer is returned. Where the disk is full the run goes on:
    `write` returns the error once, and nothing more is written.
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        self.path, self.lost = Path(path), False
        if self.path.exists() and self.path.stat().st_size:
            raise FileExistsError(
                f"expected a new file for the audit, got {self.path}, which has content; name another"
            )
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._file = os.fdopen(handle, "ab", buffering=0)
        failed = self.write({"kind": "header", "schema": AUDIT_SCHEMA, **header})
        if failed is not None:
            raise OSError(f"the audit {self.path} cannot be written: {failed}")

    def write(self, line: dict[str, Any]) -> str | None:
        """Append a line; returns why it could not, the first time."""
        if self.lost or self._file.closed:
            return None
        left = (json.dumps(_plain(line), separators=(",", ":")) + "\n").encode()
        try:
            while left:  # a disk that is nearly full takes a part
                left = left[self._file.write(left) :]
        except OSError as error:
            self.lost = True
            return str(error)
        return None

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_audit(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Header and lines of an audit; a last line that was cut by a kill is left out."""
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(Path(path).read_text().splitlines(), 1):
        try:
            lines.append(json.loads(text))
        except ValueError as error:
            if number > 1 and number == len(Path(path).read_text().splitlines()):
                break
            raise ValueError(f"expected an audit written by a guard, got {path}, line {number}: {error}") from error
    if not lines or lines[0].get("kind") != "header":
        raise ValueError(f"expected an audit written by a guard, got {path}, which has no header")
    if lines[0].get("schema") != AUDIT_SCHEMA:
        raise ValueError(f"expected an audit of schema {AUDIT_SCHEMA}, got {lines[0].get('schema')} in {path}")
    return lines[0], lines[1:]


def tensor_hash(tensor: Tensor) -> str:
    """Sixteen digits of the SHA-256 of a tensor's type, shape and bytes."""
    held = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{held.dtype} {tuple(held.shape)}".encode())
    digest.update(held.flatten().view(torch.uint8).numpy().tobytes() if held.numel() else b"")
    return digest.hexdigest()[:16]


def _plain(value: Any) -> Any:
    """Values as JSON has them: no NaN, which is no JSON, but its name."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value
