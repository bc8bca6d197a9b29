"""Suites: which cells make a table or a figure of the paper, and where each number stands."""

from __future__ import annotations

from poem.bench.suites.expand import LABELS, NothingLeftError, Placed
from poem.bench.suites.suite import AVERAGE, FIGURES, TABLES, Claim, Suite, all_names, load, names, scales

__all__ = [
    "AVERAGE", "FIGURES", "LABELS", "TABLES", "Claim", "NothingLeftError", "Placed", "Suite", "all_names", "load",
    "names", "scales",
]  # fmt: skip
