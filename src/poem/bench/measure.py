"""`measure`: a cell of a benchmark, run from its model and data to its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any, cast, get_args

import torch
from torch import Tensor

from poem.adapter import Adapter
from poem.bench.cell import Cell
from poem.bench.collect import Collector
from poem.bench.load_cell import CellData, LoadedModel, Machine, load_model, source_images
from poem.bench.provenance import (
    host,
    outside_code,
    outside_versions,
    peak_memory,
    provenance,
    reset_peak_memory,
)
from poem.bench.result import CellResult
from poem.bench.run_stream import AnsweredBatch, Delay, StreamRun
from poem.engine.precision import Precision
from poem.guarded.guard import guard_adapter
from poem.recipes.text import written
from poem.streams.datasets import Stream

__all__ = ["Machine", "measure"]


def measure(
    cell: Cell,
    machine: Machine = Machine(),  # noqa: B008 - frozen
    *,
    on_progress: Callable[[int, int], None] | None = None,
    on_answers: Callable[[AnsweredBatch], None] | None = None,
) -> CellResult:
    """Run one cell: its stream through an adapter with its method, and everything that is measured on the way.

    But for `timing`, `host` and `provenance`, the result depends on the cell and the weights alone: not on the machine,
    nor on what ran in this process before.

    Args:
        cell: What to measure.
        machine: Folders with data and weights, and the device.
        on_progress: Called after each batch with the images done and the images in all.
        on_answers: Called with the answers of each batch, which a result holds no longer.
    """
    started, began = datetime.now(timezone.utc), time.perf_counter()
    device = torch.device(machine.device)
    with _num_threads(cell.threads):
        delay = Delay(cell.eta, cell.ratio) if cell.eta else None
        collector = Collector(cell, cell.recipe())
        loaded = load_model(cell, machine)
        allocated = reset_peak_memory(device)  # after the model, whose loading creates a GPU's context
        data = CellData(cell, loaded.base, machine)
        stream, described = data.streams(cell.order())
        adapter = _adapter(cell, loaded, data)

        def measure_norms(images: Tensor) -> None:
            collector.norms = adapter.gradient_norms(images)

        called = guard_adapter(adapter) if cell.guard else adapter
        run = StreamRun(called, delay=delay, before=measure_norms if "gradients" in cell.probes else None)
        try:
            if adapter.recipe.uses_source_data and cell.source_images:
                adapter.prepare(source_images(cell, loaded.base, machine))
            card = _card(described, loaded, adapter)
            for answered in run.answers(stream):
                collector.update(answered)
                if on_answers is not None:
                    on_answers(answered)
                if on_progress is not None:
                    on_progress(collector.n, card["total"])
            collector.flush()
        finally:
            adapter.unload()
    if collector.n == 0:
        raise ValueError(f"expected images in {cell.data}, of which none could be read: {stream.failures[0]}")
    rate = collector.n / max(run.adapt_seconds, 1e-9)
    return CellResult(
        cell=cell,
        recipe=written(cell.recipe()),  # not the adapter's, which is the one for the network's norm layers
        base=loaded.description(),
        card=card,
        **collector.result_fields(delay),
        ledger={**run.totals, "source_images": adapter.preparation["forwards"]},
        notes=[*collector.notes, *_notes(cell, adapter, stream, collector)],
        provenance={**provenance(), **outside_versions(cell, adapter.recipe), **outside_code(cell, adapter.recipe)},
        timing={
            "adapt_s": run.adapt_seconds, "data_s": run.load_seconds, "images_per_s": rate,
            "total_s": time.perf_counter() - began, "peak_bytes": peak_memory(device) - allocated,
        },
        host={**host(run.device), "started": started.isoformat(timespec="seconds")},
    )  # fmt: skip


@contextmanager
def _num_threads(count: int) -> Iterator[None]:
    """Set the number of CPU threads until the block ends."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _adapter(cell: Cell, loaded: LoadedModel, data: CellData) -> Adapter:
    base = loaded.base
    if cell.precision not in get_args(Precision):
        raise ValueError(f"expected precision fp32, tf32 or bf16, got {cell.precision!r}")
    with torch.inference_mode(False):
        return Adapter(
            loaded.model, cell.recipe(), name=cell.method, batch_size=cell.batch_size, classes=data.mask(),
            mean=base.mean, std=base.std, seed=cell.seed, precision=cast(Precision, cell.precision),
        )  # fmt: skip


def _card(stream: Stream, loaded: LoadedModel, adapter: Adapter) -> dict[str, Any]:
    base, seen = loaded.base, adapter.preparation["forwards"]
    tag = "random weights" if loaded.random else base.tag
    access = f"{seen} clean images, to measure importance" if seen else "none"
    return stream.card(
        base=f"{base.name} ({base.kind} {tag})", normalisation=f"{base.normalisation}; inside", source_access=access
    ).to_dict()


def _notes(cell: Cell, adapter: Adapter, stream: Stream, collector: Collector) -> Iterator[str]:
    """Sentences on the result that the adapter does not give itself."""
    if collector.nonfinite:
        yield f"{collector.nonfinite} of {collector.n} answers were not finite (NaN or Inf); they count as wrong"
    if collector.nonfinite_metrics:
        yield f"left out, for they are not finite: {', '.join(collector.nonfinite_metrics)}"
    if adapter.recipe.uses_source_data and not adapter.preparation["forwards"]:
        yield f"{cell.method} without source images: no anchor, as ETA"
    if cell.guard:
        yield "guarded: the forward passes of the source and of shifted images are not in the ledger"
    if cell.eta and cell.ratio == "measured":
        yield "which batches were missed depends on the clock: other runs will differ"
    if stream.failures:
        yield f"{len(stream.failures)} images could not be read and were left out"
