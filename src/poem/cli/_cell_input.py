"""Cells from the user: JSON files, and `--set FIELD=VALUE`, as in `--set batch_size=16`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def read_cell_json(path: Path, expected: str) -> Any:
    """Read a JSON file; an error says what was expected in it."""
    from poem._util.files import read_json

    try:
        return read_json(path)
    except ValueError as error:
        raise ValueError(f"expected {expected} in {path}: {error}") from error


def parse_assignments(texts: Iterable[str]) -> dict[str, str]:
    """Split each `FIELD=VALUE` into a field and a value."""
    found = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign or not name:
            raise ValueError(f"expected --set FIELD=VALUE, as in --set batch_size=16, got {text!r}")
        found[name] = value
    return found


def apply_assignments(values: Mapping[str, Any], assignments: Mapping[str, str]) -> dict[str, Any]:
    """A cell's fields with assignments applied; `poem.bench.cell.with_field` checks the names and parses the values."""
    from poem.bench.cell import with_field

    found = dict(values)
    for name, text in assignments.items():
        try:
            found = with_field(found, name, text)
        except RecursionError as error:
            raise ValueError(f"--set {name}: a value that is nested too deeply") from error
    return found
