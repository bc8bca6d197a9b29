"""`poem.evaluate`: several methods over one labelled stream, as a table."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from poem.api import adapt
from poem.bench.metrics import ECE, NLL, Accuracy, NonFinite
from poem.bench.run_stream import SameBatches, StreamRun
from poem.recipes.recipe import Recipe
from poem.streams.datasets.classes import imagenet_wnids, is_wnid

log = logging.getLogger("poem")

__all__ = ["Row", "Table", "evaluate"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Accuracy, calibration and cost of one method on one stream."""

    method: str
    accuracy: float  # percent
    ece: float  # percent
    nll: float  # nats
    n: int
    forwards: int  # in images, as the method's arithmetic needs them
    backwards: int
    source_images: int  # spent on source data before the stream
    seconds: float  # in the adapter, loading apart
    nonfinite: int = 0  # answers that were NaN or infinite; they count as wrong


@dataclass(frozen=True)
class Table:
    """Rows that print as an aligned table."""

    rows: tuple[Row, ...]

    def __iter__(self) -> Any:
        """Iterate over the rows."""
        return iter(self.rows)

    def __getitem__(self, method: str) -> Row:
        """The row of a method."""
        for row in self.rows:
            if row.method == method:
                return row
        raise KeyError(f"no row {method!r}; rows: {', '.join(row.method for row in self.rows)}")

    def __str__(self) -> str:
        lines = self._lines()
        wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join([line[0].ljust(wide[0]), *(cell.rjust(w) for cell, w in zip(line[1:], wide[1:], strict=True))])
            for line in lines
        )

    def markdown(self) -> str:
        """The table in Markdown, for a page or an issue."""
        head, *rows = (f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in self._lines())
        return "\n".join([head, f"|---|{'---:|' * (len(self._lines()[0]) - 1)}", *rows])

    def _lines(self) -> list[tuple[str, ...]]:
        """The head and every row, as texts."""
        head = ("method", "accuracy %", "ECE %", "NLL", "n", "forwards", "backwards", "images/s")
        lines = [head, *map(_texts, self.rows)]
        if not any(row.nonfinite for row in self.rows):
            return lines
        more = ("not finite", *(f"{row.nonfinite}" for row in self.rows))
        return [(*line, word) for line, word in zip(lines, more, strict=True)]


def _texts(row: Row) -> tuple[str, ...]:
    shares = f"{row.accuracy:.1f}", f"{row.ece:.1f}", f"{row.nll:.2f}"
    return (
        row.method, *shares, f"{row.n}", f"{row.forwards}", f"{row.backwards}",
        f"{row.n / max(row.seconds, 1e-9):.0f}",
    )  # fmt: skip


def evaluate(
    model: nn.Module,
    loader: Iterable[Any],
    methods: str | Recipe | Sequence[str | Recipe] | Mapping[str, str | Recipe] = ("source", "tent", "poem"),
    **settings: Any,
) -> Table:
    """Run several methods over the same labelled stream, each from a fresh adapter: accuracy, calibration, cost.

    Args:
        model: The classifier; it comes out as it went in.
        loader: Yields (images, labels), or is a `poem.streams` stream, at whose resets the adapter is reset. It is
            iterated once per method and must give each the same batches, or a ValueError is raised, as with
            `shuffle=True`. Labels are class numbers (N,) or (N, 1) of any type, or one-hot rows (N, C).
        methods: Names from `poem.methods()`, recipes of your own, or a mapping from a row's name to either.
        settings: Passed on to `poem.adapt` for every method; a setting for one method belongs in a recipe.
    """
    if isinstance(methods, str | Recipe):
        methods = [methods]
    if not isinstance(methods, Mapping):
        methods = {each if isinstance(each, str) else f"recipe {at + 1}": each for at, each in enumerate(methods)}
    rows: list[Row] = []
    same = SameBatches()
    for name, method in methods.items():
        stream = loader if len(methods) == 1 else same.checked(name, loader)
        row, highest, logits = _row(name, model, stream, method, settings)
        if not rows and settings.get("classes") is None:
            warn_of_fewer_classes(loader, highest, logits, row.n)
        rows.append(row)
    return Table(tuple(rows))


def warn_of_fewer_classes(loader: Any, highest: int, logits: int, seen: int) -> None:
    """Warn where data has fewer classes than there are logits and no `classes=` says which of them they are.

    The number of classes is that of the class names, of the loader or of the data set under it. Without names it is
    the highest label's, once there are as many images as logits.
    """
    data: Any = loader
    for _ in range(4):  # a loader over a subset of a data set, or a stream over one
        if _class_names(data):
            break
        data = getattr(data, "dataset", getattr(data, "data", None))
    names = _class_names(data)
    count = len(names) or (highest + 1 if seen >= logits and highest < logits // 2 else logits)
    if not highest < count < logits:  # labels above it are numbered as the logits are
        return
    mask = getattr(data, "mask", None)
    how = "classes=[...] with the index of each class among the logits"
    if mask is not None:
        how = "classes=data.mask"
    elif logits == len(imagenet_wnids()) and names and all(map(is_wnid, names)):
        how = "classes=poem.streams.datasets.class_indices(data.classes)"
    log.warning(
        "the data has %d classes and the model %d logits: answers may fall on classes that never come, and labels be "
        "numbered otherwise; pass %s", count, logits, how,
    )  # fmt: skip


def _class_names(data: Any) -> Sequence[str]:
    """The names of a data set's classes; empty where it has none."""
    names = getattr(data, "classes", None)
    return names if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names) else ()


def _row(
    name: str, model: nn.Module, loader: Iterable[Any], method: str | Recipe, settings: dict[str, Any]
) -> tuple[Row, int, int]:
    """A row, the highest label of the stream, and the number of logits."""
    run = StreamRun(adapt(model, method, **settings))
    accuracy, ece, nll, nonfinite = Accuracy(), ECE(), NLL(), NonFinite()
    seen, highest, logits = 0, 0, 0
    try:
        for answered in run.answers(loader):
            seen, logits = seen + len(answered.labels), answered.logits.shape[1]
            highest = max(highest, int(answered.labels.max()))
            for metric in (accuracy, ece, nll, nonfinite):
                metric.update(answered.logits, answered.labels)
    finally:
        run.adapter.unload()
    if seen == 0:
        raise ValueError("expected a loader that can be iterated once per method, got one that was empty or used up")
    if lost := int(nonfinite.result()):
        log.warning("%d of %d answers of %s were not finite (NaN or Inf); they count as wrong", lost, seen, name)
    row = Row(
        method=name, accuracy=100 * accuracy.result(), ece=100 * ece.result(), nll=nll.result(), n=seen,
        forwards=run.totals["forwards"], backwards=run.totals["backwards"],
        source_images=run.adapter.preparation["forwards"], seconds=run.adapt_seconds, nonfinite=lost,
    )  # fmt: skip
    return row, highest, logits
