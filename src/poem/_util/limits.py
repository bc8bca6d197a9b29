"""Limits on what a command or a file may ask for: a typing error beyond them would stall the machine."""

from __future__ import annotations

import os
from pathlib import Path

MAX_PROCESSES = 1024
"""Processes or threads. OpenMP ends the process where it cannot start as many threads as it is told to."""
SEED_RANGE = (-(2**63), 2**64 - 1)
"""Smallest and largest seed that `torch.Generator.manual_seed` takes."""
_CONTAINER_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""Where Linux states how much memory a container may use, in versions 2 and 1 of its control groups."""


def available_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory() -> int:
    """Bytes of memory that this process may use: the machine's, or its container's limit; 0 where neither is known."""
    try:
        found = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 0
    for file in _CONTAINER_LIMITS:
        try:
            text = Path(file).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            found = min(found, int(text))
    return found
