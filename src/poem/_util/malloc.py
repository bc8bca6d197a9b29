"""Tell glibc to keep freed memory (faster convolutions on a CPU), or to return it to the operating system now."""

from __future__ import annotations

import ctypes
import sys

_TRIM, _TOP_PAD, _MMAP = -1, -2, -3  # M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD of malloc.h


def keep_freed_memory() -> bool:
    """Raise the thresholds of glibc's allocator so that freed blocks are reused; returns whether it accepted them.

    By default every large tensor is mapped anew and unmapped when freed, which costs a network on a CPU a quarter of
    its time and sometimes more. Does nothing with other C libraries. Only commands call this: a library leaves the
    allocator of its host process alone.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # another C library
        return False
    largest = 2**31 - 1
    return all([mallopt(_MMAP, largest), mallopt(_TRIM, largest), mallopt(_TOP_PAD, 1 << 28)])


def return_freed_memory() -> bool:
    """Return the pages of freed memory to the operating system (`malloc_trim`); says whether there were any.

    Where `keep_freed_memory` was called, or blocks of many sizes come and go, glibc keeps every page that was ever
    used, and a process that runs for days grows by fragmentation although nothing leaks. Does nothing with other C
    libraries.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # another C library
        return False
    return bool(trim(0))
