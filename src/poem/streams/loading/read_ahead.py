"""Read an iterable ahead in a thread: the same items in the same order, a few of them before they are asked for.

A thread, because decoding, corrupting, hashing and copying release Python's global lock. It gains nothing where the
items and their consumer compute on the same cores.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from contextvars import copy_context
from typing import Any, Generic, TypeVar

import torch

log = logging.getLogger("poem")

T = TypeVar("T")
DEPTH = 2
"""Items that are read ahead: one to be copied to the device, one to be loaded."""
THREAD = "poem-read-ahead"
"""Name of the threads."""
CLOSE_SECONDS = 10.0
"""How long `close` waits for the thread, which ends when the item that it reads is there."""


class ReadAhead(Generic[T]):
    """An iterator over `source` that reads up to `depth` items before they are asked for.

    The first item is read by the caller, who has to wait for it anyway; so worker processes of the first loader are
    forked there. A thread reads the others, with the caller's context variables, grad mode, inference mode and
    default device. An error of the source is raised where the item would have been returned. Use it as a context
    manager, or call `close`, where iterating may stop early.

    Args:
        source: What to read. Only the thread calls it after the first item: it must not depend on what the consumer
            does meanwhile, nor draw from a global random generator that the consumer draws from.
        depth: The most items that are read, or being read, beyond those that were returned; 0 reads without a thread.
        convert: Applied to each item where it is read.

    Raises:
        ValueError: A negative depth.
    """

    def __init__(self, source: Iterable[Any], depth: int = DEPTH, *, convert: Callable[[Any], T] | None = None) -> None:
        if depth < 0:
            raise ValueError(f"expected a depth of at least 0, got {depth}; 0 reads nothing ahead")
        self._reader: _Reader[T] = _Reader(iter(source), depth, convert or _unchanged)
        weakref.finalize(self, self._reader.stop)  # the thread knows the reader alone, so this object can be collected

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        return self._reader.take()

    def __enter__(self) -> ReadAhead[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def peek(self) -> T | None:
        """The item that comes next where it has been read already, else None; it still counts as read ahead."""
        return self._reader.peek()

    def close(self) -> None:
        """End the thread and close the source; further items are not returned. It may be called twice."""
        self._reader.stop()
        self._reader.join()


class _Reader(Generic[T]):
    """The state that the thread and its consumer share."""

    def __init__(self, source: Iterator[Any], depth: int, convert: Callable[[Any], T]) -> None:
        self._source, self._depth, self._convert = source, depth, convert
        self._changed = threading.Condition()
        self._ready: deque[T] = deque()
        self._error: BaseException | None = None
        self._ended = self._stopped = False  # the source has no more items; the consumer wants no more
        self._thread: threading.Thread | None = None

    def take(self) -> T:
        """The next item, read here or by the thread."""
        if self._thread is None:
            return self._first()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._ended or self._stopped)
            if self._ready:
                self._changed.notify_all()
                return self._ready.popleft()
            error, self._error = self._error, None
        try:
            raise error or StopIteration
        finally:
            del error  # its traceback has this frame

    def peek(self) -> T | None:
        with self._changed:
            return self._ready[0] if self._ready else None

    def stop(self) -> None:
        """Tell the thread to end, and drop what it has read."""
        with self._changed:
            self._stopped = True
            self._ready.clear()
            self._changed.notify_all()
        if self._thread is None:
            self._close_source()

    def join(self) -> None:
        if self._thread is None or self._thread.ident is None or self._thread is threading.current_thread():
            return
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            log.warning("a batch is still being read after %g seconds; its thread ends with it", CLOSE_SECONDS)

    def _first(self) -> T:
        if self._ended or self._stopped:
            raise StopIteration
        try:
            item = self._convert(next(self._source))
        except BaseException:
            self._ended = True
            self._close_source()
            raise
        if self._depth:
            inside, modes = copy_context(), _Modes()
            self._thread = threading.Thread(target=inside.run, args=(self._read, modes), name=THREAD, daemon=True)
            self._thread.start()
        return item

    def _read(self, modes: _Modes) -> None:
        """Read items until the source ends or the consumer stops: the thread's function."""
        try:
            with modes.entered():
                while self._waited_for_room():
                    try:
                        item = self._convert(next(self._source))
                    except StopIteration:
                        break
                    except BaseException as error:  # it belongs to the consumer
                        self._error = error
                        break
                    with self._changed:
                        if not self._stopped:
                            self._ready.append(item)
                        self._changed.notify_all()
                    del item
                self._close_source()
        finally:  # however it ended, nobody waits for it
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _waited_for_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or len(self._ready) < self._depth)
            return not self._stopped

    def _close_source(self) -> None:
        """Close a generator, and drop the last reference to a loader's iterator, which ends its processes."""
        source, self._source = self._source, iter(())
        with suppress(Exception):  # as where a generator is collected
            close = getattr(source, "close", None)
            if callable(close):
                close()


class _Modes:
    """Torch's modes of the thread that made this, which another thread does not inherit."""

    def __init__(self) -> None:
        self._grad, self._inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        self._device = torch.get_default_device()

    def entered(self) -> ExitStack:
        stack = ExitStack()
        if self._device.type != "cpu":
            stack.enter_context(self._device)
        if self._inference:
            stack.enter_context(torch.inference_mode())
        stack.enter_context(torch.set_grad_enabled(self._grad))
        return stack


def _unchanged(item: Any) -> Any:
    return item
