"""Signals that ask a process to end, raised as an exception so that there is time to save what is done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopSignal(KeyboardInterrupt):
    """A signal asked the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.code = 128 + number
        """The exit code by which a shell knows the signal: 130 for Ctrl-C, 143 for SIGTERM."""


@contextmanager
def raise_stop_signals() -> Iterator[None]:
    """Inside, the first SIGINT, SIGTERM or SIGHUP raises `StopSignal`; further ones are ignored until the block ends.

    Signals that are ignored, as SIGHUP under nohup, stay so; outside the main thread nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    before = {number: signal.getsignal(number) for number in numbers if signal.getsignal(number) is not signal.SIG_IGN}

    def stop(number: int, frame: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        raise StopSignal(number)

    for number in before:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
