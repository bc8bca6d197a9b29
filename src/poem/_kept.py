"""Things that many cells share, kept while there is room for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """The values used last, up to a limit on their sum of weights; one that is heavier than the limit is not kept."""

    def __init__(self, limit: float, weigh: Callable[[T], float] = lambda value: 1) -> None:
        self._limit, self._weigh = limit, weigh
        self._held: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], T]) -> T:
        """The value of a key, made now where it is not held."""
        if key in self._held:
            self._held.move_to_end(key)
            return self._held[key]
        value = make()
        if self._weigh(value) <= self._limit:
            self._held[key] = value
        while sum(map(self._weigh, self._held.values())) > self._limit:
            self._held.popitem(last=False)
        return value

    def clear(self) -> None:
        """Hold nothing."""
        self._held.clear()

    def __len__(self) -> int:
        return len(self._held)
