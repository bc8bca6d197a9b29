"""Cells from files and flags: types and limits are checked before a cell is made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from poem._util.limits import MAX_PROCESSES, SEED_RANGE
from poem.bench.cell import NESTED, Cell

_WORDS = ("base", "data", "method", "scenario", "preset", "precision")
_INTEGERS = ("severity", "seed", "batch_size", "n", "source_images", "window", "threads", "version")
_NUMBERS = ("lr", "eta", "ratio")
_LISTS = ("corruptions", "probes")
_OPEN = {"n", "lr", "weights"}
"""Fields that may be None."""


def read_cell(values: Any) -> Cell:
    """A cell from the values of `Cell.to_dict`, as JSON has them.

    Raises:
        ValueError: A field of another type, or a number that no machine or generator takes.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"expected a cell with base, data and method, got a {type(values).__name__}")
    for name, value in values.items():
        if value is None and name in _OPEN:
            continue
        if name in _WORDS or name == "weights":
            _expect(isinstance(value, str), name, "a word", value)
        elif name in _INTEGERS:
            _expect(is_integer(value), name, "an integer", value)
        elif name in _NUMBERS:
            words = name == "ratio" and isinstance(value, str)
            _expect(words or is_number(value), name, "a number", value)
        elif name in _LISTS:
            held = isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)
            _expect(held, name, "a list of words", value)
        elif name in NESTED:
            _expect(isinstance(value, Mapping) or _are_pairs(value), name, "fields and values", value)
    threads, seed = values.get("threads", 1), values.get("seed", 0)
    if not 1 <= threads <= MAX_PROCESSES:
        raise ValueError(f"expected threads from 1 to {MAX_PROCESSES}, got {threads}")
    if not SEED_RANGE[0] <= seed <= SEED_RANGE[1]:
        raise ValueError(f"expected seed from {SEED_RANGE[0]} to {SEED_RANGE[1]}, got {seed}")
    return Cell.from_dict(values)


def is_integer(value: Any) -> bool:
    """An integer, and no bool, which Python takes for one."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """A finite number that a float can hold."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 2**1000
    return isinstance(value, float) and math.isfinite(value)


def _are_pairs(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, list | tuple) and len(each) == 2 for each in value)


def _expect(right: bool, name: str, what: str, value: Any) -> None:
    if not right:
        raise ValueError(f"expected {name} as {what}, got {repr(value)[:80]}")
