"""Warnings of the library, held back where a table or a report's notes say the same."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def errors_only(enabled: bool = True) -> Iterator[None]:
    """Inside, the logger `poem` passes errors alone, if enabled; its level is restored at the end."""
    log = logging.getLogger("poem")
    before = log.level
    if enabled:
        log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
