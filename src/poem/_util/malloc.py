"""Memory that a process has once got it keeps, so that the next batch need not ask the system for it page by page."""

from __future__ import annotations

import ctypes
import sys

_TRIM, _TOP_PAD, _MMAP = -1, -2, -3  # names of malloc.h


def keep_memory() -> bool:
    """Tell glibc's allocator to hold on to large blocks; says whether it listened.

    By default every large tensor is mapped afresh and given back at once, which costs a network on the CPU a quarter of
    its time and sometimes more. Only commands call this: a library leaves its host's allocator alone.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    most = 2**31 - 1
    return all([mallopt(_MMAP, most), mallopt(_TRIM, most), mallopt(_TOP_PAD, 1 << 28)])
