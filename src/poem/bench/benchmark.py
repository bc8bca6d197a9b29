"""Stream times adapter times metrics: `evaluate` for what you have in hand, `measure` for a cell of a benchmark."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, cast, get_args

import torch
from torch import Tensor, nn

from poem.adapter import Adapter
from poem.api import adapt
from poem.bench import provenance as origins
from poem.bench.cell import Cell
from poem.bench.collect import Tally
from poem.bench.metrics import ECE, NLL, Accuracy, NonFinite
from poem.bench.opening import Data, Loaded, Place, load_model, source_images
from poem.bench.result import Report
from poem.bench.run_stream import Delay, Run, SameBatches
from poem.engine.precision import Precision
from poem.recipes.recipe import Recipe
from poem.recipes.text import written
from poem.streams.datasets import Stream
from poem.streams.datasets.classes import imagenet_wnids, is_wnid

log = logging.getLogger("poem")

__all__ = ["Place", "Row", "Table", "evaluate", "measure"]


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
    nonfinite: int = 0  # answers that were NaN or infinite; they count as wrong


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
        lines = self._lines()
        wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join([line[0].ljust(wide[0]), *(cell.rjust(w) for cell, w in zip(line[1:], wide[1:], strict=True))])
            for line in lines
        )

    def markdown(self) -> str:
        """The same as a table in Markdown, for a page or an issue."""
        head, *rows = (f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in self._lines())
        return "\n".join([head, f"|---|{'---:|' * (len(self._lines()[0]) - 1)}", *rows])

    def _lines(self) -> list[tuple[str, ...]]:
        """The head, then each row, as printed."""
        head = ("method", "accuracy %", "ECE %", "NLL", "n", "forwards", "backwards", "images/s")
        lines = [head, *map(_printed, self.rows)]
        if not any(row.nonfinite for row in self.rows):
            return lines
        more = ("not finite", *(f"{row.nonfinite}" for row in self.rows))
        return [(*line, word) for line, word in zip(lines, more, strict=True)]


def _printed(row: Row) -> tuple[str, ...]:
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
        loader: Yields (images, labels), or is a `poem.streams` stream, whose resets are kept. It is iterated once per
            method and must give each the same batches: what differs, as with `shuffle=True`, is an error. Labels are
            class numbers (N,) or (N, 1) of any type, or one-hot rows (N, C).
        methods: Names from `poem.methods()`, recipes of your own, or a mapping from a row's name to either.
        settings: Passed on to `poem.adapt` for every method; what suits one alone belongs in a recipe of its own.
    """
    if isinstance(methods, str | Recipe):
        methods = [methods]
    if not isinstance(methods, Mapping):
        methods = {each if isinstance(each, str) else f"recipe {at + 1}": each for at, each in enumerate(methods)}
    rows: list[Row] = []
    same = SameBatches()
    for name, method in methods.items():
        pieces = loader if len(methods) == 1 else same.over(name, loader)
        row, highest, logits = _row(name, model, pieces, method, settings)
        if not rows and settings.get("classes") is None:
            fewer_classes(loader, highest, logits, row.n)
        rows.append(row)
    return Table(tuple(rows))


def fewer_classes(loader: Any, highest: int, logits: int, seen: int) -> None:
    """Say so where data has fewer classes than the logits and nobody said which of them they are.

    Names of classes are taken from the loader, or from the data set that it is over. Without any, the labels tell, once
    there are as many images as logits.
    """
    data: Any = loader
    for _ in range(4):  # a loader over a subset of a data set, or a stream over one
        if _names(data):
            break
        data = getattr(data, "dataset", getattr(data, "data", None))
    names = _names(data)
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


def _names(data: Any) -> Sequence[str]:
    """The names of a data set's classes, where it has them."""
    names = getattr(data, "classes", None)
    return names if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names) else ()


def _row(
    name: str, model: nn.Module, loader: Iterable[Any], method: str | Recipe, settings: dict[str, Any]
) -> tuple[Row, int, int]:
    """A row, the highest label that came, and the number of logits."""
    run = Run(adapt(model, method, **settings))
    accuracy, ece, nll, nonfinite = Accuracy(), ECE(), NLL(), NonFinite()
    seen, highest, logits = 0, 0, 0
    try:
        for answered in run.over(loader):
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
        forwards=run.spent["forwards"], backwards=run.spent["backwards"],
        source_images=run.adapter.preparation["forwards"], seconds=run.adapting, nonfinite=lost,
    )  # fmt: skip
    return row, highest, logits


# Cells ----------------------------------------------------------------------------------------------------------------


def measure(
    cell: Cell,
    place: Place = Place(),  # noqa: B008 - frozen
    *,
    watch: Callable[[int, int], None] | None = None,
) -> Report:
    """Run one cell and report everything about it.

    The report depends on the cell alone, but for its `timing`, `host` and `provenance`: not on the place, nor on what
    ran in this process before.

    Args:
        cell: What to measure.
        place: Where this machine keeps data and weights, and which device it has.
        watch: Called after each batch with the images done and the images in all.
    """
    started, began = datetime.now(timezone.utc), time.perf_counter()
    device = torch.device(place.device)
    with _threads(cell.threads):
        delay = Delay(cell.eta, cell.ratio) if cell.eta else None
        tally = Tally(cell, cell.recipe())
        loaded = load_model(cell, place)
        held = origins.watch_memory(device)  # after the model, with which a GPU's context comes
        data = Data(cell, loaded.base, place)
        stream, described = data.streams(cell.order())
        adapter = _adapter(cell, loaded, data)

        def look(images: Tensor) -> None:
            tally.norms = adapter.gradient_norms(images)

        run = Run(adapter, delay=delay, before=look if "gradients" in cell.probes else None)
        try:
            if adapter.recipe.uses_source_data and cell.source_images:
                adapter.prepare(source_images(cell, loaded.base, place))
            card = _card(described, loaded, adapter)
            for answered in run.over(stream):
                tally.update(answered)
                if watch is not None:
                    watch(tally.n, card["total"])
            tally.close()
        finally:
            adapter.unload()
    if tally.n == 0:
        raise ValueError(f"expected images in {cell.data}, of which none could be read: {stream.failures[0]}")
    notes = [*tally.notes, *_notes(cell, adapter, stream, tally)]
    clock = {"total_s": time.perf_counter() - began, "peak_bytes": origins.peak(device) - held}
    begun = {"started": started.isoformat(timespec="seconds")}
    return _report(cell, loaded, run, tally, card=card, notes=notes, timing=clock, host=begun)


def _report(cell: Cell, loaded: Loaded, run: Run, tally: Tally, **known: Any) -> Report:
    """What a run found; card, notes, clock and start are known to the one who ran it."""
    spent = {"adapt_s": run.adapting, "data_s": run.loading, "images_per_s": tally.n / max(run.adapting, 1e-9)}
    return Report(
        cell=cell,
        recipe=written(run.adapter.recipe),
        base=loaded.about(),
        card=known["card"],
        **tally.found(run.delay),
        ledger={**run.spent, "source_images": run.adapter.preparation["forwards"]},
        notes=known["notes"],
        provenance=origins.provenance(),
        timing={**spent, **known["timing"]},
        host={**origins.host(run.device), **known["host"]},
    )


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """So many threads of the CPU, until the block ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _adapter(cell: Cell, loaded: Loaded, data: Data) -> Adapter:
    base = loaded.base
    if cell.precision not in get_args(Precision):
        raise ValueError(f"expected precision fp32, tf32 or bf16, got {cell.precision!r}")
    with torch.inference_mode(False):
        return Adapter(
            loaded.model, cell.recipe(), name=cell.method, batch_size=cell.batch_size, classes=data.mask(),
            mean=base.mean, std=base.std, seed=cell.seed, precision=cast(Precision, cell.precision),
        )  # fmt: skip


def _card(stream: Stream, loaded: Loaded, adapter: Adapter) -> dict[str, Any]:
    base, seen = loaded.base, adapter.preparation["forwards"]
    tag = "random weights" if loaded.sha256 == "random" else base.tag
    access = f"{seen} clean images, to measure importance" if seen else "none"
    return stream.card(
        base=f"{base.name} ({base.kind} {tag})", normalisation=f"{base.normalisation}; inside", source_access=access
    ).to_dict()


def _notes(cell: Cell, adapter: Adapter, stream: Stream, tally: Tally) -> Iterator[str]:
    """What a reader should know, beside what the adapter said."""
    if tally.nonfinite:
        yield f"{tally.nonfinite} of {tally.n} answers were not finite (NaN or Inf); they count as wrong"
    if tally.left_out:
        yield f"left out, for they are not finite: {', '.join(tally.left_out)}"
    if adapter.recipe.uses_source_data and not adapter.preparation["forwards"]:
        yield f"{cell.method} without source images: no anchor, as ETA"
    if cell.eta and cell.ratio == "measured":
        yield "which batches were missed depends on the clock: other runs will differ"
    if stream.failures:
        yield f"{len(stream.failures)} images could not be read and were left out"
