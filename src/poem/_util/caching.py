"""A cache of the values used last, and keys made of everything that a value depends on.

    cache = LRUCache(limit=4)
    value = cache.get_or_create(cache_key(seed=0, batch_size=64, data=images), create)

Keys compare tensors, containers and dataclasses by content, functions by identity.
"""

from __future__ import annotations

import dataclasses
import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from types import MethodType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Key = tuple[tuple[str, Hashable], ...]
"""Names and values, as `cache_key` makes them."""


class LRUCache(Generic[K, T]):
    """The values used last, up to a limit on the sum of their sizes; a value larger than the limit is not stored."""

    def __init__(self, limit: float, size_of: Callable[[T], float] = lambda value: 1) -> None:
        self._limit, self._size_of = limit, size_of
        self._values: OrderedDict[K, T] = OrderedDict()

    def get_or_create(self, key: K, create: Callable[[], T]) -> T:
        """The value of a key; `create()`, stored, if there is none."""
        value = self.get(key)
        return self.add(key, create()) if value is None else value

    def get(self, key: K) -> T | None:
        """The value of a key, or None."""
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def add(self, key: K, value: T) -> T:
        """Store a value, drop the least recently used ones beyond the limit, and return the value."""
        if self._size_of(value) <= self._limit:
            self._values[key] = value
            self._values.move_to_end(key)
        while sum(map(self._size_of, self._values.values())) > self._limit:
            self._values.popitem(last=False)
        return value

    def keys(self) -> list[K]:
        """The keys of all stored values."""
        return list(self._values)

    def clear(self) -> None:
        """Drop every value."""
        self._values.clear()

    def __len__(self) -> int:
        return len(self._values)


class Fingerprint:
    """A running SHA-256 of tensors: their dtypes, shapes and values, in order."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def update(self, *tensors: Tensor) -> None:
        """Add tensors to the hash; a view counts like its contiguous copy."""
        for tensor in tensors:
            plain = tensor.detach().cpu().contiguous()
            self._digest.update(f"{plain.dtype} {tuple(plain.shape)};".encode())
            self._digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)

    def hexdigest(self) -> str:
        """The hash of all tensors so far."""
        return self._digest.hexdigest()


def fingerprint(*tensors: Tensor) -> str:
    """The SHA-256 of some tensors."""
    running = Fingerprint()
    running.update(*tensors)
    return running.hexdigest()


def cache_key(**fields: Any) -> Key:
    """Make a key of everything that a value depends on, by name.

    Tensors are compared by their values at the time of the call, dataclasses and containers by their content, functions
    by identity; the key holds functions by weak references.

    Raises:
        TypeError: A field is none of these, so that equality could not be decided.
    """
    return tuple((name, _hashable(value, name)) for name, value in fields.items())


def _hashable(value: Any, name: str) -> Hashable:
    """A hashable stand-in for a value, tagged with its type."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return type(value).__name__, value
    if isinstance(value, Tensor):
        return "tensor", fingerprint(value)
    if isinstance(value, torch.device | torch.dtype | Path):
        return type(value).__name__, str(value)
    if isinstance(value, tuple | list):
        return "sequence", tuple(_hashable(each, name) for each in value)
    if isinstance(value, Mapping):
        return "mapping", tuple((str(key), _hashable(value[key], name)) for key in sorted(value, key=str))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return kind, tuple(
            (each.name, _hashable(getattr(value, each.name), name)) for each in dataclasses.fields(value)
        )
    if isinstance(value, MethodType):
        return "method", weakref.WeakMethod(value)
    if callable(value):
        return "function", weakref.ref(value)  # a dead reference equals no other, even if the address is reused
    raise TypeError(
        f"expected what a key can be made of in {name}=, got {type(value).__name__}; pass plain values, tensors, "
        "containers of these, dataclasses or functions"
    )
