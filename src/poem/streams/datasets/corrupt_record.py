"""The record that `poem corrupt` writes into its target folder: the settings that its images were made with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from poem._util.files import read_json

CORRUPT_RECORD = "poem-corrupt.json"


def read_corrupt_record(path: Path, remedy: str = "remove it") -> dict[str, Any]:
    """Read a record; anything but a JSON object is an error that ends with `remedy`."""
    try:
        settings = read_json(path)
    except ValueError as error:
        settings = str(error)
    if not isinstance(settings, dict):
        raise ValueError(f"expected the settings of poem corrupt in {path}, got {str(settings)[:80]}; {remedy}")
    return settings
