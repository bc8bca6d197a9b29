"""Training records of our own networks, and the package's folder of their weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TRAINED = Path(__file__).resolve().parent / "trained"
"""Folder of the weights and records that are part of the package."""


def training_records(file: str) -> dict[str, Any]:
    """Read a file of records that `poem train-source` wrote, by network; empty if there is none."""
    path = TRAINED / file
    return json.loads(path.read_text()) if path.is_file() else {}
