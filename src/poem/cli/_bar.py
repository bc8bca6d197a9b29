"""How far a sweep is: a bar on a terminal, a line now and then elsewhere; on standard error."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from poem.bench.runners import Event
    from poem.bench.sweep import SweepPlanned

_EVERY = 10.0  # seconds between two lines
EARLY = 0.01  # the share of the work before which nobody can say how long it takes


class Bar:
    """Watches a sweep; use it with `with`."""

    def __init__(self) -> None:
        self.total = self.done = self.failed = 0
        self.expected = self.seen = 0
        self.work = self.worked = 0.0
        self.running: dict[str, tuple[int, float]] = {}
        """Of cells under way: images that have passed, and what each of them costs."""
        self.label = ""
        self.began = self.said = time.monotonic()
        self.rich: Any = None

    def __enter__(self) -> Bar:
        from rich.console import Console

        console = Console(stderr=True)
        if console.is_terminal:
            from rich.progress import BarColumn, Progress, TextColumn
            from rich.table import Column

            bar = BarColumn(bar_width=10, table_column=Column(width=10, no_wrap=True))
            rest = Column(ratio=1, no_wrap=True, overflow="ellipsis")  # cut off where the terminal ends
            words = TextColumn("{task.description}", markup=False, table_column=rest)
            self.rich = Progress(bar, words, console=console, transient=True, expand=True)
            self.rich.add_task("starting", total=None)
            self.rich.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.rich is not None:
            self.rich.stop()

    def __call__(self, event: SweepPlanned | Event) -> None:
        """Take note, and show it."""
        from poem.bench.estimate import assumed_seconds, image_count
        from poem.bench.runners import CellEnded, CellProgress, CellStarted

        if isinstance(event, CellStarted):
            self.label = event.cell.label
            self.running[event.cell.key] = (0, 0.0)
        elif isinstance(event, CellProgress):
            self.label = event.cell.label
            each = assumed_seconds(event.cell) / max(image_count(event.cell), 1)
            self.running[event.cell.key] = (event.images, each)
        elif isinstance(event, CellEnded):
            self.running.pop(event.cell.key, None)
            self.done += 1
            self.failed += event.result is None
            self.seen += image_count(event.cell)
            self.worked += assumed_seconds(event.cell)
        else:
            self.total, self.began = len(event.todo), time.monotonic()
            self.expected = sum(map(image_count, event.todo))
            self.work = sum(map(assumed_seconds, event.todo))
        self.show()

    def show(self) -> None:
        """On a terminal at once, else every ten seconds."""
        if self.rich is not None:
            self.rich.update(0, total=self.expected, completed=self.images, description=str(self))
        elif time.monotonic() - self.said >= _EVERY:
            self.said = time.monotonic()
            print(self, file=sys.stderr, flush=True)

    @property
    def images(self) -> int:
        """Images that have passed, those of cells under way too."""
        return self.seen + sum(count for count, _ in self.running.values())

    def __str__(self) -> str:
        words = f"{self.done}/{self.total} cells, {self.images}/{self.expected} images"
        seconds = time.monotonic() - self.began
        if self.images and seconds > 0:
            worked = self.worked + sum(count * each for count, each in self.running.values())
            words += f", {self.images / seconds:.0f} images/s"
            if worked >= EARLY * self.work:  # by work: an image of MEMO is not one of Tent
                words += f", about {duration((self.work - worked) * seconds / worked)} left"
        if self.failed:
            words += f", {self.failed} failed"
        return f"{words}: {self.label}"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    seconds = max(seconds, 0.0)
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172_800 else f"{seconds / 86_400:.0f} days"
