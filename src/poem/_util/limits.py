"""Limits on what a command or a file may ask for: a typing error beyond them would stall the machine."""

from __future__ import annotations

import os

MAX_PROCESSES = 1024
"""Processes or threads. OpenMP ends the process where it cannot start as many threads as it is told to."""
SEED_RANGE = (-(2**63), 2**64 - 1)
"""Smallest and largest seed that `torch.Generator.manual_seed` takes."""


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
