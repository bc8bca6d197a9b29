"""Where a guard's events and batches are told: a list, the log, the audit, and the user's function."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from poem.guarded.audit import Audit, AuditLines, Event

log = logging.getLogger("poem")
OWN_KINDS = ("header", "batch", "event", "resumed")
"""Kinds of lines that a guard writes to its audit."""


class EventLog:
    """Tells a guard's events, and writes its audit.

    Args:
        method: The name of the method that is guarded, for the log.
        name: The stream's, "" where it has none.
        on_event: Called with every event; its errors are logged.
    """

    def __init__(self, method: str, name: str, on_event: Callable[[Event], object] | None) -> None:
        self.events: deque[Event] = deque(maxlen=1000)
        """The last thousand."""
        self.audit: Audit | AuditLines | None = None
        """Where lines go; None where nobody asked for an audit."""
        self._on_event, self._name = on_event, name
        self._title = ", ".join(each for each in (method, name) if each)

    def tell(self, event: Event, batches: int) -> None:
        """An event to the list, the log, the audit and the user's function; `batches`: that the guard has taken."""
        event = replace(event, name=self._name)
        self.events.append(event)
        log.info("guard of %s: %s", self._title, event)
        line = {"kind": "event", "batch": event.batch, "event": event.kind, "why": event.why}
        named = {"name": event.name} if event.name else {}
        lost = self.write({**line, **named, "signals": event.signals}, batches)
        if self._on_event is not None:
            try:
                self._on_event(event)
            except Exception:
                log.exception("guard of %s: on_event failed at %s", self._title, event)
        if lost is not None:
            self.tell(lost, batches)

    def note(self, kind: str, values: dict[str, Any], batches: int) -> None:
        """Write a line that is not the guard's own; that it could not be written is told.

        Raises:
            ValueError: A kind that a guard writes.
        """
        if kind in OWN_KINDS:
            raise ValueError(f"expected a kind of line that a guard does not write itself, got {kind!r}; name another")
        lost = self.write({"kind": kind, **values}, batches)
        if lost is not None:
            self.tell(lost, batches)

    def write(self, line: dict[str, Any], batches: int) -> Event | None:
        """A line to the audit; where the disk is full that is an event, and the run goes on."""
        failed = None if self.audit is None else self.audit.write(line)
        if failed is None:
            return None
        log.warning("guard of %s: the audit is lost: %s; the run goes on without it", self._title, failed)
        return Event(batches, "audit lost", f"{failed}; the run goes on without it")
