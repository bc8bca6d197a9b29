"""Progress of a sweep: cells, images, speed and the time left, which is estimated by work, not by images."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from poem._util.progress import Progress, duration

if TYPE_CHECKING:
    from poem.bench.runners import Event
    from poem.bench.sweep import SweepPlanned

MIN_SHARE = 0.01
"""The share of all work that must be done before the time left is estimated."""


class SweepProgress(Progress):
    """Takes the events of `poem.bench.sweep.sweep` and shows how far it is; use it with `with`."""

    def __init__(self) -> None:
        super().__init__(unit="images")
        self.cells = self.cells_done = self.failed = 0
        self.work = self.work_done = 0.0
        self.images_done = 0
        """Images of the cells that have ended."""
        self.running: dict[str, tuple[int, float]] = {}
        """For each running cell, by its key: images done, and the work that one image is."""
        self.label = ""

    def __call__(self, event: SweepPlanned | Event) -> None:
        """Update the counts from one event, and show them."""
        from poem.bench.estimate import assumed_seconds, image_count
        from poem.bench.runners import CellEnded, CellProgress, CellStarted

        total = None
        if isinstance(event, CellStarted):
            self.label = event.cell.label
            self.running[event.cell.key] = (0, 0.0)
        elif isinstance(event, CellProgress):
            self.label = event.cell.label
            each = assumed_seconds(event.cell) / max(image_count(event.cell), 1)
            self.running[event.cell.key] = (event.images, each)
        elif isinstance(event, CellEnded):
            self.running.pop(event.cell.key, None)
            self.cells_done += 1
            self.failed += event.result is None
            self.images_done += image_count(event.cell)
            self.work_done += assumed_seconds(event.cell)
        else:
            self.cells, self.began = len(event.todo), time.monotonic()
            total = sum(map(image_count, event.todo))
            self.work = sum(map(assumed_seconds, event.todo))
        self.update(self.images_done + sum(count for count, _ in self.running.values()), total)

    def __str__(self) -> str:
        words = f"{self.cells_done}/{self.cells} cells, {self.done}/{self.total} {self.unit}"
        seconds = time.monotonic() - self.began
        if self.done and seconds > 0:
            work_done = self.work_done + sum(count * each for count, each in self.running.values())
            words += f", {self.done / seconds:.0f} images/s"
            if work_done >= MIN_SHARE * self.work:  # one image of MEMO is as much work as 64 of Tent
                words += f", about {duration((self.work - work_done) * seconds / work_done)} left"
        if self.failed:
            words += f", {self.failed} failed"
        return f"{words}: {self.label}"
