"""Result files: one cell a line, with the correctness of every sample."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Key = tuple[str, str, str, int, int]
"""Network, row, stream, seed, batch size."""


def read_cells(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The cells of result files, without those that failed; a last line that was cut off is left out.

    Raises:
        ValueError: A line is no cell.
    """
    cells = []
    for path in paths:
        lines = path.read_text().splitlines()
        for number, line in enumerate(lines, 1):
            try:
                cell = json.loads(line)
            except json.JSONDecodeError as error:
                if number == len(lines):
                    continue
                raise ValueError(f"expected a cell in line {number} of {path}, got {line[:60]!r}") from error
            if "error" not in cell:
                cells.append(cell)
    return cells


def key_of(cell: dict[str, Any]) -> Key:
    """What tells a cell from every other."""
    return cell["net"], cell["row"], cell["stream"], cell["seed"], cell["batch"]
