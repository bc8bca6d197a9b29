"""Stream times adapter times metrics."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from poem.api import adapt
from poem.metrics import ECE, NLL, Accuracy


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method on one stream."""

    method: str
    accuracy: float  # percent
    ece: float  # percent
    nll: float  # nats
    n: int
    forwards: int  # images needed
    backwards: int
    seconds: float  # in the adapter, loading apart


@dataclass(frozen=True)
class Table:
    """Rows that print as an aligned table."""

    rows: tuple[Row, ...]

    def __iter__(self) -> Any:
        """Row by row."""
        return iter(self.rows)

    def __getitem__(self, method: str) -> Row:
        """The row of a method."""
        for row in self.rows:
            if row.method == method:
                return row
        raise KeyError(f"no row {method!r}; rows: {', '.join(row.method for row in self.rows)}")

    def __str__(self) -> str:
        head = ("method", "accuracy %", "ECE %", "NLL", "n", "forwards", "backwards", "images/s")
        cells = [
            (
                row.method,
                f"{row.accuracy:.1f}",
                f"{row.ece:.1f}",
                f"{row.nll:.2f}",
                f"{row.n}",
                f"{row.forwards}",
                f"{row.backwards}",
                f"{row.n / max(row.seconds, 1e-9):.0f}",
            )
            for row in self.rows
        ]
        wide = [max(len(line[i]) for line in (head, *cells)) for i in range(len(head))]
        lines = [
            "  ".join(
                cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, wide, strict=True))
            )
            for line in (head, *cells)
        ]
        return "\n".join(lines)


def evaluate(
    model: nn.Module, loader: Iterable[Any], methods: Sequence[str] = ("source", "tent", "poem"), **settings: Any
) -> Table:
    """Run several methods over the same labelled stream, each from a fresh adapter: accuracy, calibration, cost.

    Args:
        model: The classifier; it comes out as it went in.
        loader: Yields (images, labels), and can be iterated once per method.
        methods: Names from `poem.methods()`.
        settings: Passed on to `poem.adapt`.
    """
    names = [methods] if isinstance(methods, str) else methods
    return Table(tuple(_row(model, loader, method, settings) for method in names))


def _row(model: nn.Module, loader: Iterable[Any], method: str, settings: dict[str, Any]) -> Row:
    adapter = adapt(model, method, **settings)
    device = next(model.parameters()).device
    accuracy, ece, nll = Accuracy(), ECE(), NLL()
    seconds, seen = 0.0, 0
    for images, labels in loader:
        images = images.to(device)
        began = _now(device)
        logits = adapter(images)
        seconds += _now(device) - began
        seen += len(images)
        for metric in (accuracy, ece, nll):
            metric.update(logits, labels.to(device))
    totals = adapter.totals
    adapter.unload()
    if seen == 0:
        raise ValueError("expected a loader that can be iterated once per method, got one that was empty or used up")
    return Row(
        method=method, accuracy=100 * accuracy.result(), ece=100 * ece.result(), nll=nll.result(), n=seen,
        forwards=totals.forwards, backwards=totals.backwards, seconds=seconds,
    )  # fmt: skip


def _now(device: torch.device) -> float:
    """A clock that waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
