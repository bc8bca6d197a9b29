"""Tell glibc to keep freed memory (faster convolutions on a CPU), to use one arena, or to return freed memory now."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

_TRIM, _TOP_PAD, _MMAP = -1, -2, -3  # M_TRIM_THRESHOLD, M_TOP_PAD and M_MMAP_THRESHOLD of malloc.h
_ARENA_MAX = -8  # M_ARENA_MAX


def keep_freed_memory() -> bool:
    """Raise the thresholds of glibc's allocator so that freed blocks are reused; returns whether it accepted them.

    By default every large tensor is mapped anew and unmapped when freed, which costs a network on a CPU a quarter of
    its time and sometimes more. Does nothing with other C libraries. Only commands call this: a library leaves the
    allocator of its host process alone.
    """
    largest = 2**31 - 1
    return _set_options({_MMAP: largest, _TRIM: largest, _TOP_PAD: 1 << 28})


def use_one_arena() -> bool:
    """Let threads that start from now on share glibc's main arena; returns whether it accepted that.

    By default glibc gives each of the first threads, up to eight times the number of cores, an arena of its own, and
    `malloc_trim` returns the pages at the top of the main arena alone. After `keep_freed_memory`, which turns off the
    trimming at every `free`, the top of a thread's arena stays as large as it ever was. One arena makes threads wait
    for each other where several allocate at once; small blocks come from a cache of each thread still. Call it before
    threads have allocated: arenas that there are stay in use, and a limit that glibc has fixed does not change. Does
    nothing with other C libraries. Only commands whose threads run for days call this.
    """
    return _set_options({_ARENA_MAX: 1})


def return_freed_memory() -> bool:
    """Return the pages of freed memory to the operating system (`malloc_trim`); says whether there were any.

    Where `keep_freed_memory` was called, or blocks of many sizes come and go, glibc keeps every page that was ever
    used, and a process that runs for days grows by fragmentation although nothing leaks. What is free at the top of
    another arena than the main one is not returned: see `use_one_arena`. Does nothing with other C libraries.
    """
    trim = _of_glibc("malloc_trim")
    return trim is not None and bool(trim(0))


def _set_options(values: dict[int, int]) -> bool:
    """Call `mallopt` for each option; returns whether there is one, and accepted them all."""
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        return False
    accepted = [mallopt(option, value) for option, value in values.items()]
    return all(accepted)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """A function of glibc's allocator; None with another C library."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        found: Callable[..., int] = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError):
        return None
    return found
