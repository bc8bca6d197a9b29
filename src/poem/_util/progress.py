"""Progress of a long task on standard error: a bar on a terminal, elsewhere a line now and then.

with Progress("corrupt", 500, unit="files") as progress:
    for file in files:
        progress.advance()
for batch in track(batches, "tent", 500, unit="images", size=len): ...
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")
P = TypeVar("P", bound="Progress")
EVERY = 10.0
"""Seconds between two lines, where standard error is not a terminal."""


class Progress:
    """Shows `done` of `total` steps and the time left, as `str(self)` words it; use it with `with`.

    Without a terminal, or inside a display of rich that allows no other, it prints a line at the first step, then every
    `EVERY` seconds, and none at the last step.
    """

    def __init__(self, title: str = "", total: int | None = None, *, unit: str, done: int = 0) -> None:
        self.title, self.total, self.unit, self.done = title, total, unit, done
        self.note = ""
        """Shown after the counts, such as a loss."""
        self.began = self._printed = time.monotonic()
        self._before = done
        self._bar: Any = None

    def __enter__(self: P) -> P:
        from rich.console import Console
        from rich.errors import LiveError

        console = Console(stderr=True)
        if console.is_terminal:
            bar = _bar(console)
            bar.add_task(self.title or "starting", total=self.total, completed=self.done)
            with suppress(LiveError):  # before rich 14.1 a display inside the user's own is an error
                bar.start()
                self._bar = bar
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def restart(self, title: str) -> None:
        """Begin another task with the same unit, from its first step."""
        self.title, self.done, self.total = title, 0, None
        self.began, self._before = time.monotonic(), 0

    def advance(self, steps: int = 1) -> None:
        """Count further steps as done."""
        self.update(self.done + steps)

    def update(self, done: int, total: int | None = None, note: str = "") -> None:
        """Set how many steps are done, and of how many where that has changed."""
        first = done > self.done == self._before
        self.done, self.note, self.total = done, note, self.total if total is None else total
        now = time.monotonic()
        if self._bar is not None:
            self._bar.update(0, total=self.total, completed=done, description=str(self))
        elif done != self.total and (first or now - self._printed >= EVERY):
            self._printed = now
            sys.stderr.write(f"{self}\n")
            sys.stderr.flush()

    def __str__(self) -> str:
        count = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
        words = f"{self.title}: {count} {self.unit}{self.note and f', {self.note}'}"
        steps = self.done - self._before
        if steps and self.total is not None:
            left = (time.monotonic() - self.began) * (self.total - self.done) / steps
            words += f", about {duration(left)} left"
        return words


def _bar(console: Any) -> Any:
    """A bar of rich with one line of text, cut off where the terminal ends; it is erased at the end."""
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    bar = BarColumn(bar_width=10, table_column=Column(width=10, no_wrap=True))
    rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")
    text = TextColumn("{task.description}", markup=False, table_column=rest)
    return Progress(bar, text, console=console, transient=True, expand=True)


def track(
    items: Iterable[T], title: str, total: int, *, unit: str, size: Callable[[T], int] = lambda item: 1, done: int = 0
) -> Iterator[T]:
    """Yield items and show their progress; an item counts as done when the next one is asked for.

    Args:
        items: What to iterate over.
        title: What is being done.
        total: The sum of all sizes.
        unit: What is counted, such as images.
        size: How much an item counts.
        done: What an earlier run has finished already.
    """
    with Progress(title, total, unit=unit, done=done) as progress:
        for item in items:
            yield item
            progress.advance(size(item))


def duration(seconds: float) -> str:
    """Seconds as `40 s`, `12 min`, `2.5 h` or `3 days`."""
    seconds = max(seconds, 0.0)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} days"
