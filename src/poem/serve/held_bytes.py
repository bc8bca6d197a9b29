"""How much memory all requests may hold together, from the first byte of a body to the answer."""

from __future__ import annotations

import threading
from collections.abc import Callable

from poem.serve.problems import Problem


class HeldBytes:
    """Counts the bytes that requests hold: bodies, what they are decoded to, and images that wait in queues.

    Args:
        most: Bytes of all requests together. One that is alone is taken whatever it holds; it has limits of its own.
        refused: Called for each request that is refused.
    """

    def __init__(self, most: int, refused: Callable[[], object]) -> None:
        self._most, self._refused, self._lock = most, refused, threading.Lock()
        self.now = 0
        """Bytes that are held."""

    def change(self, count: int, own: int) -> None:
        """Hold so many bytes more, or fewer, for a request that holds `own` already.

        Raises:
            Problem: There is no room (429).
        """
        with self._lock:
            if count <= 0 or self.now == own or self.now + count <= self._most:
                self.now += count
                return
        self._refused()
        raise Problem(
            429, "service-full",
            f"expected at most {self._most} bytes of requests that wait, of all streams together; send it again later",
            retry_after=1,
        )  # fmt: skip


class RequestBytes:
    """What one request holds; a context manager that lets go of it."""

    def __init__(self, held: HeldBytes) -> None:
        self._held, self._own = held, 0

    def add(self, count: int) -> None:
        """Hold more."""
        self._held.change(count, self._own)
        self._own += count

    def keep(self, count: int) -> None:
        """Let go of all but so many."""
        self.add(min(0, count - self._own))

    def __enter__(self) -> RequestBytes:
        return self

    def __exit__(self, *_: object) -> None:
        self.keep(0)
