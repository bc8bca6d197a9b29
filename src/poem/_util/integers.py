"""Integers in whatever type they come: Python's, NumPy's, or a scalar of torch."""

from __future__ import annotations

import operator
from typing import Any


def as_integer(value: Any) -> int | None:
    """Convert an integer of Python, NumPy or torch to an int; None for all else, such as True, 5.0 and '5'."""
    value = plain_scalar(value)
    try:
        return None if isinstance(value, bool) or hasattr(value, "ndim") else operator.index(value)
    except TypeError:
        return None


def plain_scalar(value: Any) -> Any:
    """Convert a scalar of NumPy or torch to Python's own type; all else is returned as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value
