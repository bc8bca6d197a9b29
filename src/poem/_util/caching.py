"""Values that are kept for the next who asks, and the keys under which they are found again.

    kept = Kept(limit=4)
    value = kept.get(cache_key(seed=0, batch_size=64, data=images), make)

A key names everything that a value depends on. What it is made of is compared by content, functions by identity.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import MethodType
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Key = tuple[tuple[str, Hashable], ...]
"""Names and values, as `cache_key` makes them."""


class Kept(Generic[K, T]):
    """The values used last, up to a limit on their sum of weights; one that is heavier than the limit is not kept."""

    def __init__(self, limit: float, weigh: Callable[[T], float] = lambda value: 1) -> None:
        self._limit, self._weigh = limit, weigh
        self._held: OrderedDict[K, T] = OrderedDict()

    def get(self, key: K, make: Callable[[], T]) -> T:
        """The value of a key, made now where it is not held."""
        found = self.find(key)
        return self.keep(key, make()) if found is None else found

    def find(self, key: K) -> T | None:
        """The value of a key, or None where it is not held."""
        if key in self._held:
            self._held.move_to_end(key)
        return self._held.get(key)

    def keep(self, key: K, value: T) -> T:
        """Hold a value, and let those go that were used longest ago until there is room; returns the value."""
        if self._weigh(value) <= self._limit:
            self._held[key] = value
            self._held.move_to_end(key)
        while sum(map(self._weigh, self._held.values())) > self._limit:
            self._held.popitem(last=False)
        return value

    def keys(self) -> list[K]:
        """The keys of all values that are held."""
        return list(self._held)

    def clear(self) -> None:
        """Drop every kept value."""
        self._held.clear()

    def __len__(self) -> int:
        return len(self._held)


class Fingerprint:
    """A running hash of tensors: of their values, kinds and shapes, in the order in which they come."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()

    def update(self, *tensors: Tensor) -> None:
        """Take in some tensors; a view and its contiguous copy are the same."""
        for tensor in tensors:
            plain = tensor.detach().cpu().contiguous()
            self._digest.update(f"{plain.dtype} {tuple(plain.shape)};".encode())
            self._digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)

    def hexdigest(self) -> str:
        """The hash of everything so far."""
        return self._digest.hexdigest()


def fingerprint(*tensors: Tensor) -> str:
    """The hash of some tensors."""
    found = Fingerprint()
    found.update(*tensors)
    return found.hexdigest()


def cache_key(**depends: Any) -> Key:
    """A key from everything that a value depends on, by name.

    Tensors are compared by their values at the time of the call, dataclasses and containers by their content, functions
    by identity; a function is not kept alive by a key.

    Raises:
        TypeError: A field is none of these, so that equal and different could not be told apart.
    """
    return tuple((name, _comparable(value, name)) for name, value in depends.items())


def _comparable(value: Any, name: str) -> Hashable:
    """What stands for a value in a key."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return type(value).__name__, value
    if isinstance(value, Tensor):
        return "tensor", fingerprint(value)
    if isinstance(value, torch.device | torch.dtype | Path):
        return type(value).__name__, str(value)
    if isinstance(value, tuple | list):
        return "sequence", tuple(_comparable(each, name) for each in value)
    if isinstance(value, Mapping):
        return "mapping", tuple((str(key), _comparable(value[key], name)) for key in sorted(value, key=str))
    if is_dataclass(value) and not isinstance(value, type):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        return kind, tuple((each.name, _comparable(getattr(value, each.name), name)) for each in fields(value))
    if isinstance(value, MethodType):
        return "method", weakref.WeakMethod(value)
    if callable(value):
        return "function", weakref.ref(value)  # one that is gone equals nothing, whatever lies in its place now
    raise TypeError(
        f"expected what a key can be made of in {name}=, got {type(value).__name__}; pass plain values, tensors, "
        "containers of these, dataclasses or functions"
    )
