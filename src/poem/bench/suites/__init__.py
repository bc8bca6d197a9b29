"""Suites: the cells of a table or a figure, and the group, row and column of each number."""

from __future__ import annotations

from poem.bench.suites.expand import LABELS, NothingLeftError, Placed
from poem.bench.suites.schema import Claim
from poem.bench.suites.suite import AVERAGE, FIGURES, TABLES, Suite, all_names, load, names, scales

__all__ = [
    "AVERAGE", "FIGURES", "LABELS", "TABLES", "Claim", "NothingLeftError", "Placed", "Suite", "all_names", "load",
    "names", "scales",
]  # fmt: skip
