"""What an engine counts and times, for whoever wants to know; `poem.serve.metrics` shows it to Prometheus."""

from __future__ import annotations


class Meter:
    """Does nothing with what it is told; subclasses keep it."""

    def answered(self, by: str, images: int) -> None:
        """Images were answered by "source", "mean", "adapted", or "late": the source, because of a deadline."""

    def batch(self, images: int, seconds: float) -> None:
        """A micro-batch was computed."""

    def waited(self, seconds: float) -> None:
        """A request waited so long in its queue."""

    def rejected(self, count: int = 1) -> None:
        """A queue was full, so many times."""

    def replayed(self, count: int = 1) -> None:
        """An idempotency key was answered as before."""

    def event(self, kind: str, count: int = 1) -> None:
        """A guard told of an event."""

    def snapshot(self, seconds: float, ok: bool) -> None:
        """A stream's state was written, or could not be."""

    def streams(self, live: int, idle: int, waiting: int) -> None:
        """How many streams are in memory and on disk, and how many requests wait."""
