"""The rows of `benchmarks/speed.py`: which there are, in what order, and how one is measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from _plain import PlainPoem, PlainTent
from _speed_nets import UNIT, NotAvailableError, convolutional, network, with_forced_selection
from _speed_place import Call, Place, Row
from torch import Tensor

import poem
from poem.recipes.learning_rate import Rule

SCHEMA = 1
MODES: dict[str, dict[str, Any]] = {
    "eager": {"fast": False, "precision": "fp32"},
    "captured": {"fast": True, "precision": "fp32"},
    "bf16": {"fast": True, "precision": "bf16"},
    "plain": {},
    "plain-separate": {},
}
METHODS = (
    "source", "bn", "tent", "poem1", "poem2", "auto", "guarded-auto",
    "eata", "sar", "deyo", "roid", "rotta", "deyo+poem",
)  # fmt: skip
CORE = METHODS[:7]
CURVES = ("resnet50-bn", "resnet18-bn", "resnet152-bn", "vit-b16", "effnet-lite0")
FREE = ("source", "bn", "auto", "guarded-auto")  # nothing is forced to be selected


@dataclass(frozen=True)
class Job:
    """One row to measure."""

    net: str
    batch: int
    method: str
    mode: str
    select: int = 100  # percent
    curve: str | None = None

    def __str__(self) -> str:
        return f"{self.net} batch {self.batch} {self.method} {self.mode} {self.select} %"


def plan(
    nets: list[str],
    batches: list[int],
    methods: list[str],
    modes: list[str],
    selects: list[int],
    *,
    forward: bool = True,
    curves: bool = False,
) -> list[Job]:
    """Every row, the important ones first.

    Batch 64 and 1, all samples selected, the methods of `CORE`: net by net; then all the rest. Within a net the network
    alone comes first: without the limit there are no shares of it.
    """
    jobs = [
        Job(net, batch, method, mode, select)
        for net in nets for batch in batches for select in selects for method in methods for mode in modes
        if _makes_sense(method, mode, select, first=select == selects[0])
    ]  # fmt: skip
    jobs += [Job(net, batch, "forward", "limit") for net in nets for batch in batches if forward]
    order = ("forward", *METHODS)

    def rank(job: Job) -> tuple[Any, ...]:
        core = job.batch in (64, 1) and job.select == 100 and job.method in (*CORE, "forward")
        return not core, nets.index(job.net), job.mode != "limit", batches.index(job.batch), order.index(job.method)

    jobs.sort(key=rank)
    if curves:
        jobs += [Job(net, 4**power, "poem1", "bf16", curve="batch") for net in CURVES for power in range(5)]
    return jobs


def _makes_sense(method: str, mode: str, select: int, first: bool) -> bool:
    """The plain implementation has three methods and selects all samples; some methods select as they do."""
    if mode.startswith("plain"):
        return method in ("tent", "poem1", "poem2") and select == 100
    return method not in FREE or first


def made(place: Place, job: Job) -> tuple[Call, list[Tensor], dict[str, Any]]:
    """What to call, with what, and facts about it."""
    plain = job.mode.startswith("plain")
    name, changes = with_forced_selection(job.method, job.select / 100, job.batch)
    images = place.images(job.net, job.batch, unit=job.method in UNIT, plain=plain)
    model = place.model(job.net, plain=plain)
    place.sync()
    facts: dict[str, Any] = {"network": network(job.net)[1]}
    if place.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        facts["loaded_mib"] = round(torch.cuda.memory_allocated() / 2**20)
    if plain:
        rate = Rule(double_one=job.method != "tent")(
            "convolutional" if convolutional(job.net) else "transformer", job.batch
        )
        try:
            if job.method == "tent":
                call: Any = PlainTent(model, lr=rate)
            else:
                call = PlainPoem(model, lr=rate, rounds=int(job.method[-1]), threshold=9.0, repeat=True,
                                 separate=job.mode == "plain-separate")  # fmt: skip
        except ValueError as error:
            raise NotAvailableError(str(error)) from error
        return call, images, {**facts, "lr": rate, "object": call}
    mode = MODES[job.mode]
    if job.method == "eata":
        changes = {**changes, "source_data": [images[0][:16]]}
    try:
        adapter = poem.adapt(model, name, batch_size=job.batch, **mode, **changes)
    except (TypeError, ValueError, NotImplementedError) as error:
        if mode.get("fast") is True:
            raise NotAvailableError(str(error)) from error
        raise
    told = {key: repr(value) for key, value in changes.items() if key in ("select", "explore", "rounds")}
    return adapter, images, {**facts, "lr": adapter.lr, "changes": told, "object": adapter}


def measured(place: Place, job: Job) -> Row:
    """A row of one of our methods, or of the plain implementation."""
    call, images, facts = made(place, job)
    thing = facts.pop("object")
    if job.mode.startswith("plain"):
        found = {**place.timed(call, images), "notes": [], **place.memory()}
        updates = thing.updates if isinstance(thing, PlainPoem) else 1
    else:
        notes: list[str] = []

        def noting(batch: Tensor) -> Tensor:  # the engine says once why it runs otherwise than asked
            answer = call(batch)
            notes.extend(note for note in thing.last.notes if note not in notes)
            return answer

        found = {**place.timed(call, images, warming=noting), "notes": notes, **place.memory()}
        updates = thing.last.updates
        thing.unload()  # captured graphs hold memory
        del thing, call
        place.clean(peaks=False)
        facts.update(place.kept())
    as_asked = not any(note.startswith("not captured") for note in found["notes"])
    return {**found, **facts, "updates": updates, "as_asked": as_asked}


def forwards(place: Place, job: Job) -> Iterator[tuple[str, Callable[[], Row]]]:
    """Rows of the network alone: eager fp32, and on CUDA compiled bf16, called and as one graph."""
    model, images = place.model(job.net), place.images(job.net, job.batch)
    facts = {"network": network(job.net)[1], "updates": 0, "notes": [], "as_asked": True}

    def eager(batch: Tensor) -> Tensor:
        with torch.inference_mode():
            answer: Tensor = model(batch)
        return answer

    yield "eager", lambda: {**place.timed(eager, images), **place.memory(), **facts}
    if place.device != "cuda":
        return
    quick: Any = torch.compile(model)

    def compiled(batch: Tensor) -> Tensor:
        with torch.inference_mode(), torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            answer: Tensor = quick(batch)
        return answer

    yield "bf16-compiled", lambda: {**place.timed(compiled, images), **place.memory(), **facts}

    def graphed() -> Row:
        still = images[0].clone()
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(3):
                compiled(still)
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            answer = compiled(still)

        def replay(batch: Tensor) -> Tensor:
            still.copy_(batch)
            graph.replay()
            return answer

        return {**place.timed(replay, images), **place.memory(), **facts}

    yield "bf16-compiled-graph", graphed


def attempted(measure: Callable[[], Row]) -> Row:
    """The row, or why there is none."""
    try:
        return {"status": "ok", **measure()}
    except NotAvailableError as error:
        return {"status": "not available", "reason": str(error)}
    except Exception as error:  # one row's trouble is not the others'
        return {"status": "error", "reason": f"{type(error).__name__}: {error}"[:2000]}
