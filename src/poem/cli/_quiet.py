"""Hints of the library, kept back where a table or a report's notes say the same."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet(wanted: bool = True) -> Iterator[None]:
    """Errors alone are logged, until the block ends."""
    log = logging.getLogger("poem")
    before = log.level
    if wanted:
        log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
