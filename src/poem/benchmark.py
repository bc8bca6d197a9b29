"""Stream times adapter times metrics."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from poem.adapter import Adapter
from poem.api import adapt
from poem.metrics import ECE, NLL, Accuracy
from poem.recipes import Recipe


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
    source_images: int  # spent on source data before the stream
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
    model: nn.Module,
    loader: Iterable[Any],
    methods: str | Recipe | Sequence[str | Recipe] | Mapping[str, str | Recipe] = ("source", "tent", "poem"),
    **settings: Any,
) -> Table:
    """Run several methods over the same labelled stream, each from a fresh adapter: accuracy, calibration, cost.

    Args:
        model: The classifier; it comes out as it went in.
        loader: Yields (images, labels), or is a `poem.streams` stream, whose resets are kept. It is iterated once per
            method.
        methods: Names from `poem.methods()`, recipes of your own, or a mapping from a row's name to either.
        settings: Passed on to `poem.adapt` for every method; what suits one alone belongs in a recipe of its own.
    """
    if isinstance(methods, str | Recipe):
        methods = [methods]
    if not isinstance(methods, Mapping):
        methods = {each if isinstance(each, str) else f"recipe {at + 1}": each for at, each in enumerate(methods)}
    return Table(tuple(_row(name, model, loader, method, settings) for name, method in methods.items()))


def _row(name: str, model: nn.Module, loader: Iterable[Any], method: str | Recipe, settings: dict[str, Any]) -> Row:
    adapter = adapt(model, method, **settings)
    device = next(model.parameters()).device
    accuracy, ece, nll = Accuracy(), ECE(), NLL()
    seconds, spent, seen = 0.0, Counter[str](), 0
    for piece in loader:
        images, labels = _labelled(piece)
        if getattr(piece, "segment", None) is not None and piece.segment.reset:
            spent.update(_spent(adapter))
            adapter.reset()
        images, labels = images.to(device), labels.to(device)
        began = _now(device)
        logits = adapter(images)
        seconds += _now(device) - began
        if int(labels.max()) >= logits.shape[1] or int(labels.min()) < 0:
            low, high = int(labels.min()), int(labels.max())
            raise ValueError(f"expected labels 0..{logits.shape[1] - 1}, got {low}..{high}; see classes= for a mask")
        seen += len(images)
        for metric in (accuracy, ece, nll):
            metric.update(logits, labels)
    spent.update(_spent(adapter))
    adapter.unload()
    if seen == 0:
        raise ValueError("expected a loader that can be iterated once per method, got one that was empty or used up")
    return Row(
        method=name, accuracy=100 * accuracy.result(), ece=100 * ece.result(), nll=nll.result(), n=seen,
        forwards=spent["forwards"], backwards=spent["backwards"], source_images=adapter.preparation["forwards"],
        seconds=seconds,
    )  # fmt: skip


def _labelled(piece: Any) -> tuple[Tensor, Tensor]:
    """Images and labels of a batch, or of a piece of a stream."""
    if isinstance(piece, tuple | list) and len(piece) >= 2 and isinstance(piece[1], Tensor):
        return piece[0], piece[1]
    raise TypeError(
        f"expected batches of (images, labels), got {type(piece).__name__}; without labels use adapter.stream"
    )


def _spent(adapter: Adapter) -> dict[str, int]:
    """Images that the adapter has needed since its last reset."""
    return {"forwards": adapter.totals.forwards, "backwards": adapter.totals.backwards}


def _now(device: torch.device) -> float:
    """A clock that waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
