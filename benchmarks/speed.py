"""How fast adaptation is: images per second, latency and memory, beside a plain forward and a plain implementation.

    python benchmarks/speed.py --device cuda --out results/speed/h200.json            # rows, the important ones first
    python benchmarks/speed.py --device cuda --out FILE --nets resnet50-bn --curves --profile --budget 280
    python benchmarks/speed.py --device cpu --threads 2 --out FILE                    # one update against one forward

Needs torch and torchvision; timm where it is installed gives the ViT and EfficientNet-Lite0. poem is found beside this
file, installed or not. Random weights and random images, a new batch for every call (eight in turn).

Who teaches is forced, so that the work does not depend on what random weights say: `--select 100` marks everyone (the
worst case), 50 the first half, 0 nobody. What cannot be measured is a row that says why, and what the budget leaves out
is listed; the file is written after every row.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import gc
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import torch  # noqa: E402
from _plain import PlainPoem, PlainTent  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import poem  # noqa: E402
from poem._files import write_whole  # noqa: E402
from poem._version import __version__  # noqa: E402
from poem.commands._quiet import quiet  # noqa: E402
from poem.parts import Explore, NotRedundant, PLPDAbove, Repeat  # noqa: E402
from poem.parts.base import Look, Memory  # noqa: E402
from poem.parts.selection import Select  # noqa: E402
from poem.recipes import Rule  # noqa: E402

Row = dict[str, Any]
Call = Callable[[Tensor], Tensor]

SCHEMA = 1
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
ALLOCATOR = {  # glibc: keep large blocks instead of mapping each tensor afresh
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}
MODES: dict[str, dict[str, Any]] = {
    "eager": {"fast": False, "precision": "fp32"},
    "bf16-eager": {"fast": False, "precision": "bf16"},
    "captured": {"fast": True, "precision": "fp32"},
    "bf16": {"fast": True, "precision": "bf16"},
    "bf16-compiled": {"fast": True, "precision": "bf16", "compile": True},
    "plain": {},
    "plain-separate": {},
    "plain-channels-last": {},
}
METHODS = ("source", "tent", "poem1", "poem2", "eata", "sar", "deyo", "roid", "deyo+poem")
CORE = METHODS[:4]
NETS = ("resnet50-bn", "vit-b16", "resnet50-gn", "effnet-lite0")
FACTORS = {  # arithmetic of 1 and 2 updates over that of a plain forward, with a doubled deep part
    "resnet50-bn": {"poem1": 3.6, "poem2": 6.0},
    "resnet50-gn": {"poem1": 3.6, "poem2": 6.0},
    "vit-b16": {"poem1": 3.25, "poem2": 5.4},
}
NOTES = {
    "select": "Forced(share) marks ceil(share * batch) samples, one place further on in every round. At 100 % the set "
    "cannot change and exploring would stop after one update, so poem2 and deyo+poem run Repeat(2) there: the same "
    "passes and updates, without the comparison. PLPD's pass is paid (drop above -2: all pass), EATA's cosine too; "
    "ROID's own choice of diverse samples is replaced.",
    "modes": "eager: fast=False, fp32 (convolutions in TF32 where torch's switches allow it). captured: fast=True, "
    "fp32. bf16: fast=True, bf16. bf16-compiled: the same with compile=True. bf16-eager: fast=False, bf16. plain: "
    "benchmarks/_plain.py, fp32, contiguous. plain-separate: the same with a forward through the whole network for "
    "each branch. plain-channels-last: plain in channels_last. forward: the network "
    "alone in eval mode; its bf16-compiled is torch.compile under autocast, bf16-compiled-graph the same in a CUDA "
    "graph made by hand.",
    "layout": "convolutional networks in channels_last, ViTs contiguous; 'plain' is contiguous.",
    "median_ms, p99_ms": "one call at a time, synchronised before and after; p99 is the largest where calls < 100.",
    "images_per_s": "a run of calls with one synchronisation at its end.",
    "peak": "since the model and the images were loaded, warm-up and capture included; pools of CUDA graphs count as "
    "reserved.",
    "ratio_to_source": "time per image over that of 'source' in the same mode (plain: over source in eager).",
    "as_asked": "False: the mode could not be had and the row ran eagerly; its notes say why. No gain is made of it.",
    "share_of_limit": "images/s over what the compiled bf16 forward of this run would leave if an update cost its "
    "arithmetic alone: forward images/s / factor, the faster of the two compiled forwards.",
}


class NotAvailableError(Exception):
    """This version, machine or network has no such thing."""


# What is measured


@dataclass(frozen=True, repr=False)
class Forced(Select):
    """Marks a share of the batch, whatever the network says; each round's block begins one place further on."""

    share: float = 1.0

    def __call__(self, look: Look, among: Tensor, memory: Memory) -> Tensor:
        """A block of `ceil(share * B)` samples."""
        rows = len(among)
        place = torch.arange(rows, device=among.device)
        return among & ((place - look.round) % rows < math.ceil(self.share * rows))


def wording(method: str, share: float, batch: int) -> tuple[str, dict[str, Any]]:
    """The library's name of a method, and the changes that force who teaches."""
    forced = Forced(share)
    again = Repeat(2) if math.ceil(share * batch) == batch else Explore(2)
    shape = forced & PLPDAbove(-2.0)
    changes: dict[str, dict[str, Any]] = {
        "source": {},
        "tent": {} if share == 1 else {"select": forced},
        "eata": {"select": forced & NotRedundant(2.0)},
        "sar": {"select": forced},
        "deyo": {"select": shape},
        "roid": {"select": forced, **IMAGENET},
        "poem1": {"select": forced, "rounds": 1},
        "poem2": {"select": forced, "explore": again},
        "deyo+poem": {"select": shape, "explore": again},
    }
    return {"poem1": "poem", "poem2": "poem"}.get(method, method), changes[method]


@cache
def network(name: str) -> tuple[nn.Module, str]:
    """A network with random weights (seed 0) on the CPU, and who built it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _built(name)


def _built(name: str) -> tuple[nn.Module, str]:
    try:
        import torchvision
        from torchvision.models import resnet
    except ImportError as error:
        raise NotAvailableError(f"{name} needs torchvision: {error}") from error
    by = f"torchvision {torchvision.__version__}"
    arch, _, norm = name.partition("-")
    if name == "tiny-bn":
        return resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=10).eval(), f"{by} ResNet(BasicBlock, 1 each)"
    if arch in ("resnet18", "resnet50", "resnet152") and norm in ("bn", "gn"):
        layer = {} if norm == "bn" else {"norm_layer": lambda width: nn.GroupNorm(32, width)}
        return getattr(resnet, arch)(weights=None, **layer).eval(), f"{by} {arch}"
    if name == "vit-b16":
        try:
            import timm
        except ImportError:
            model = torchvision.models.vit_b_16(weights=None)
            nn.init.normal_(model.heads.head.weight, std=0.02)  # zeros as it comes: nothing would flow back
            return model.eval(), f"{by} vit_b_16"
        return timm.create_model("vit_base_patch16_224").eval(), f"timm {timm.__version__} vit_base_patch16_224"
    if name == "effnet-lite0":
        try:
            from poem import zoo

            return zoo.load("effnet-lite0", "random")[0], "poem.zoo effnet-lite0"
        except ImportError as error:
            raise NotAvailableError(f"effnet-lite0 needs timm: {error}") from error
    raise NotAvailableError(f"expected a net out of {', '.join(NETS)}, resnet18-bn, resnet152-bn, tiny-bn; got {name}")


def convolutional(name: str) -> bool:
    """Whether channels_last is the layout to take."""
    return not name.startswith("vit")


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

    Batch 64 and 1, everyone selected, the methods of `CORE`: net by net; then all the rest. Within a net what must be
    compiled comes last, POEM first, since compiling takes minutes.
    """
    jobs = [
        Job(net, batch, method, mode, select)
        for net in nets for batch in batches for select in selects for method in methods for mode in modes
        if _makes_sense(method, mode, select, first=select == selects[0])
    ]  # fmt: skip
    jobs += [Job(net, batch, "forward", "limit") for net in nets for batch in batches if forward]
    late = {"limit": 1, "bf16-compiled": 2}

    def rank(job: Job) -> tuple[Any, ...]:
        core = job.batch in (64, 1) and job.select == 100 and job.method in (*CORE, "forward")
        order = ("poem1", "poem2", "tent", "source") if job.mode == "bf16-compiled" else ("forward", *METHODS)
        place = order.index(job.method) if job.method in order else len(order)
        return not core, nets.index(job.net), late.get(job.mode, 0), batches.index(job.batch), place

    jobs.sort(key=rank)
    if curves:
        jobs += [Job("resnet50-bn", 4**power, "poem1", "bf16", curve="batch") for power in range(5)]
        jobs += [Job(f"resnet{depth}-bn", 64, "poem1", "bf16", curve="depth") for depth in (18, 50, 152)]
    return jobs


def _makes_sense(method: str, mode: str, select: int, first: bool) -> bool:
    """The plain implementation has three methods and selects everyone; source selects nobody, whatever is forced."""
    if mode.startswith("plain"):
        return method in ("tent", "poem1", "poem2") and select == 100
    return method != "source" or first


# How it is measured


@dataclass
class Place:
    """Where it runs, how long, and on which images."""

    device: str
    size: int
    seconds: float
    autotune: bool = False

    def sync(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def images(self, net: str, batch: int, *, unit: bool = False, plain: bool = False) -> list[Tensor]:
        """Eight batches on the device, in the network's layout."""
        rng = torch.Generator(self.device).manual_seed(0)
        draw = torch.rand if unit else torch.randn
        layout = torch.channels_last if convolutional(net) and not plain else torch.contiguous_format
        shape = (batch, 3, self.size, self.size)
        return [draw(shape, generator=rng, device=self.device).to(memory_format=layout) for _ in range(8)]

    def model(self, net: str, *, plain: bool = False) -> nn.Module:
        """A copy of the network on the device, in its layout."""
        model = copy.deepcopy(network(net)[0]).to(self.device)
        return model.to(memory_format=torch.channels_last) if convolutional(net) and not plain else model

    def clean(self) -> None:
        """Forget what the last row left."""
        gc.collect()
        if self.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def memory(self) -> Row:
        """Peak since `clean`, in MiB; what the CPU's allocator holds is not known."""
        if self.device != "cuda":
            return {"peak_allocated_mib": None, "peak_reserved_mib": None}
        peaks = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
        return {"peak_allocated_mib": round(peaks[0] / 2**20), "peak_reserved_mib": round(peaks[1] / 2**20)}

    def timed(self, call: Call, images: list[Tensor], warming: Call | None = None) -> Row:
        """Warm-up, with a call of its own where one is given, then latencies, then a run without stops."""
        turns = _in_turn(images)
        warm = self.warmed(warming or call, turns)
        least = 10 if self.device == "cuda" else 3
        times: list[float] = []
        while len(times) < least or (sum(times) < self.seconds and len(times) < 2000):
            times.append(self.once(call, next(turns)))
        middle = statistics.median(times)
        count = max(least, min(2000, math.ceil(self.seconds / middle)))
        self.sync()
        start = time.perf_counter()
        for _ in range(count):
            call(next(turns))
        self.sync()
        spent = time.perf_counter() - start
        return {
            "median_ms": 1000 * middle, "p99_ms": 1000 * sorted(times)[math.ceil(0.99 * len(times)) - 1],
            "calls": len(times), "images_per_s": count * len(images[0]) / spent, "run_calls": count,
            "warm_up_calls": len(warm), "warm_up_s": sum(warm),
        }  # fmt: skip

    def once(self, call: Call, images: Tensor) -> float:
        """Seconds of one call, begun and ended with the device at rest."""
        self.sync()
        start = time.perf_counter()
        call(images)
        self.sync()
        return time.perf_counter() - start

    def warmed(self, call: Call, turns: Iterator[Tensor]) -> list[float]:
        """Calls until three in a row are near the fastest: whatever is captured or compiled has been."""
        times: list[float] = []
        least, most = (6, 40) if self.device == "cuda" else (2, 6)
        while len(times) < least or (len(times) < most and max(times[-3:]) > 1.5 * min(times)):
            times.append(self.once(call, next(turns)))
        return times


def _in_turn(images: list[Tensor]) -> Iterator[Tensor]:
    while True:
        yield from images


def made(place: Place, job: Job) -> tuple[Call, list[Tensor], dict[str, Any]]:
    """What to call, with what, and facts about it."""
    plain = job.mode in ("plain", "plain-separate")
    name, changes = wording(job.method, job.select / 100, job.batch)
    images = place.images(job.net, job.batch, unit=job.method == "roid", plain=plain)
    model = place.model(job.net, plain=plain)
    place.sync()
    facts: dict[str, Any] = {"network": network(job.net)[1]}
    if place.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        facts["loaded_mib"] = round(torch.cuda.memory_allocated() / 2**20)
    if job.mode.startswith("plain"):
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
        found = {**place.timed(call, images), "notes": []}
        updates = thing.updates if isinstance(thing, PlainPoem) else 1
    else:
        notes: list[str] = []

        def noting(batch: Tensor) -> Tensor:  # the engine says once why it runs otherwise than asked
            answer = call(batch)
            notes.extend(note for note in thing.last.notes if note not in notes)
            return answer

        found = {**place.timed(call, images, warming=noting), "notes": notes}
        updates = thing.last.updates
        thing.unload()  # recordings hold memory
    as_asked = not any(note.startswith(("not captured", "not compiled")) for note in found["notes"])
    return {**found, **place.memory(), **facts, "updates": updates, "as_asked": as_asked}


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
    how = {"mode": "max-autotune-no-cudagraphs"} if place.autotune else {}
    quick: Any = torch.compile(model, **how)

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


class Bench:
    """Measures job after job within a budget, and keeps the file up to date."""

    def __init__(self, place: Place, out: Path | None, budget: float, about: Row) -> None:
        self.place, self.out, self.budget, self.about = place, out, budget, about
        self.rows: list[Row] = []
        self.skipped: list[str] = []
        self.extra: Row = {}
        self.begun = time.perf_counter()

    @property
    def spent(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self.begun

    def run(self, jobs: list[Job]) -> None:
        """One after the other; when the time is up, or the device is broken, the rest is listed."""
        for index, job in enumerate(jobs):
            broken = not _sound(self.place)
            if broken or self.spent > self.budget:
                self.skipped += [str(each) for each in jobs[index:]]
                why = "the device answers no more" if broken else f"{self.budget:g} s are over"
                print(f"{why}: {len(jobs) - index} rows skipped", flush=True)
                break
            self.one(job)
        self.write()

    def one(self, job: Job) -> None:
        """One job: a row, or three where the network alone is measured."""
        self.place.clean()
        if job.method != "forward":
            self.enter(job, attempted(lambda: measured(self.place, job)))
        else:
            try:
                for mode, measure in forwards(self.place, job):
                    self.place.clean()
                    self.enter(dataclasses.replace(job, mode=mode), attempted(measure))
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                status = "not available" if isinstance(error, NotAvailableError) else "error"
                self.enter(job, {"status": status, "reason": reason})
        if "compiled" in job.mode or job.mode == "limit":
            torch._dynamo.reset()

    def enter(self, job: Job, found: Row) -> None:
        """Into the file, and a line for whoever waits."""
        self.rows.append({**dataclasses.asdict(job), **found})
        print(f"{self.spent:6.1f} s  {job}: {_said(found)}", flush=True)
        self.write()

    def write(self, finished: bool = False) -> None:
        """The whole file as far as it goes."""
        derive(self.rows)
        content = {
            "schema": SCHEMA, **self.about, "seconds": round(self.spent, 1), "finished": finished, "notes": NOTES,
            "gains": gains(self.rows), "rows": self.rows, "skipped": self.skipped, **self.extra,
        }  # fmt: skip
        if self.out is not None:
            write_whole(self.out, json.dumps(content, indent=1) + "\n", sync=False)


def _sound(place: Place) -> bool:
    try:
        place.sync()
    except RuntimeError:
        return False
    return True


def _said(found: Row) -> str:
    if found["status"] != "ok":
        return f"{found['status']}: {found['reason'].splitlines()[0][:160]}"
    notes = f"  ({'; '.join(found['notes'])})" if found["notes"] else ""
    return (
        f"{found['images_per_s']:.1f} images/s, {found['median_ms']:.2f} ms, p99 {found['p99_ms']:.2f} ms, "
        f"{found['updates']} updates, warm-up {found['warm_up_s']:.1f} s{notes}"
    )


# What follows from the rows


def derive(rows: list[Row]) -> None:
    """Adds to each row its time against source's, and its share of the limit."""
    source = {(row["net"], row["batch"], row["mode"]): row["images_per_s"] for row in _good(rows, "source")}
    limit: dict[tuple[str, int], float] = {}
    for row in _good(rows, "forward"):
        if row["mode"].startswith("bf16-compiled"):
            key = row["net"], row["batch"]
            limit[key] = max(limit.get(key, 0.0), row["images_per_s"])
    for row in rows:
        if row["status"] != "ok":
            continue
        mode = "eager" if row["mode"].startswith("plain") else row["mode"]
        base, top = source.get((row["net"], row["batch"], mode)), limit.get((row["net"], row["batch"]))
        factor = FACTORS.get(row["net"], {}).get(row["method"])
        row["ratio_to_source"] = None if base is None else base / row["images_per_s"]
        row["share_of_limit"] = None if top is None or factor is None else row["images_per_s"] * factor / top


def gains(rows: list[Row]) -> list[Row]:
    """Our best mode, and each mode, against the plain implementation of the same run."""
    found = []
    for row in rows:
        if row["mode"] not in ("plain", "plain-separate") or row["status"] != "ok":
            continue
        same = {
            other["mode"]: other["images_per_s"] / row["images_per_s"]
            for other in _good(rows, row["method"])
            if (other["net"], other["batch"], other["select"]) == (row["net"], row["batch"], row["select"])
            and not other["mode"].startswith("plain")
            and other["as_asked"]
        }
        ours = {mode: gain for mode, gain in same.items() if mode in MODES}
        best = max(ours, key=lambda mode: ours[mode], default=None)
        found.append(
            {
                "net": row["net"], "batch": row["batch"], "method": row["method"], "over": row["mode"],
                "best_mode": best, "gain": None if best is None else ours[best], "by_mode": same,
                "plain_images_per_s": row["images_per_s"],
            }
        )  # fmt: skip
    return found


def _good(rows: list[Row], method: str) -> list[Row]:
    return [row for row in rows if row["method"] == method and row["status"] == "ok"]


def table(rows: list[Row], won: list[Row], *, markdown: bool) -> str:
    """Rows and gains as text."""
    heads = ("net", "batch", "method", "mode", "select", "images/s", "median ms", "p99 ms", "x source", "of limit",
             "alloc MiB", "reserved MiB")  # fmt: skip
    lines = [[*map(str, (row["net"], row["batch"], row["method"], row["mode"], f"{row['select']} %"))] + (
        [_number(row[key]) for key in ("images_per_s", "median_ms", "p99_ms", "ratio_to_source", "share_of_limit",
                                            "peak_allocated_mib", "peak_reserved_mib")]
        if row["status"] == "ok" else [row["status"], *[""] * 6]
    ) for row in rows]  # fmt: skip
    for line, row in zip(lines, rows, strict=True):
        line[3] += "" if row.get("as_asked", True) else " (ran eagerly)"
    more = [
        [*map(str, (row["net"], row["batch"], row["method"], row["best_mode"], row["over"])), _number(row["gain"])]
        for row in won
    ]
    parts = [_laid_out(heads, lines, markdown)]
    if more:
        parts.append(
            _laid_out(("net", "batch", "method", "best mode", "over", "x plain implementation"), more, markdown)
        )
    return "\n\n".join(parts)


def _laid_out(heads: tuple[str, ...], lines: list[list[str]], markdown: bool) -> str:
    wide = [max(len(line[column]) for line in [list(heads), *lines]) for column in range(len(heads))]
    rule = ["-" * width for width in wide]
    rows = [[*heads], rule, *lines]
    filled = [[cell.ljust(width) for cell, width in zip(row, wide, strict=True)] for row in rows]
    if markdown:
        return "\n".join(f"| {' | '.join(row)} |" for row in filled)
    return "\n".join("  ".join(row).rstrip() for row in filled)


def _number(value: float | None) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


# Where the time goes


def profiled(place: Place, call: Call, images: list[Tensor], calls: int = 5) -> Row:
    """The 25 dearest kernels (on the CPU: operators) and their sum, against the time on the clock."""
    from torch.profiler import ProfilerActivity, profile

    on_cuda = place.device == "cuda"
    warm = place.warmed(call, _in_turn(images)) if on_cuda else [place.once(call, images[0])]
    clock = [place.once(call, images[turn % 8]) for turn in range(calls)]
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_cuda else [])]
    with profile(activities=activities, acc_events=True) as seen:
        for turn in range(calls):
            call(images[turn % 8])
        place.sync()
    spent: dict[str, tuple[float, int]] = {}
    for event in seen.key_averages():
        kernel = event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
        if kernel == on_cuda:
            took = event.self_device_time_total if on_cuda else event.self_cpu_time_total
            before = spent.get(event.key, (0.0, 0))
            spent[event.key] = before[0] + took, before[1] + event.count
    total = sum(took for took, _ in spent.values())
    dearest = sorted(spent.items(), key=lambda item: -item[1][0])[:25]
    wall = 1000 * statistics.median(clock)
    return {
        "warm_up_calls": len(warm), "calls": calls, "wall_ms_per_call": wall,
        "kernel_ms_per_call": total / 1000 / calls, "kernel_share_of_wall": total / 1000 / calls / wall,
        "launches_per_call": sum(count for _, count in spent.values()) / calls,
        "top": [{"name": name[:200], "share": took / max(total, 1e-9), "ms_per_call": took / 1000 / calls,
                 "times_per_call": count / calls} for name, (took, count) in dearest],
    }  # fmt: skip


def profiles(place: Place, out: Path | None, net: str, batches: list[int]) -> None:
    """POEM with one update, captured and compiled, at each batch size: a file beside `out`."""
    found: list[Row] = []
    for mode in ("bf16", "bf16-compiled") if place.device == "cuda" else ("eager",):
        for batch in batches:
            job = Job(net, batch, "poem1", mode)
            place.clean()

            def measure(job: Job = job) -> Row:
                call, images, _ = made(place, job)
                return profiled(place, call, images)

            row = {**dataclasses.asdict(job), **attempted(measure)}
            found.append(row)
            good = row["status"] == "ok"
            said = f"{row['kernel_share_of_wall']:.0%} of the wall time in kernels" if good else row["reason"][:160]
            print(f"profile of {job}: {said}", flush=True)
            for item in row.get("top", [])[:8]:
                print(f"    {item['share']:6.1%} {item['ms_per_call']:9.3f} ms  {item['name'][:100]}", flush=True)
            if out is not None:
                path = out.with_name(f"{out.stem}-profile.json")
                write_whole(path, json.dumps({"schema": SCHEMA, "profiles": found}, indent=1) + "\n", sync=False)


# One update against one forward


def ratio(args: argparse.Namespace) -> Row:
    """POEM with one update over a plain forward, in a process of its own that keeps its memory."""
    command = [
        sys.executable, str(Path(__file__).resolve()), "--ratio-here", "--device", args.device, "--pairs",
        str(args.pairs), "--ratio-net", args.ratio_net, "--ratio-batch", str(args.ratio_batch), "--size",
        str(args.size), *(["--threads", str(args.threads)] if args.threads else []),
        *(["--profile"] if args.profile else []), "--budget", str(args.budget),
    ]  # fmt: skip
    ended = subprocess.run(
        command, env={**os.environ, **ALLOCATOR}, stdout=subprocess.PIPE, text=True, check=False
    )  # its progress, and its complaints, go straight through
    lines = ended.stdout.strip().splitlines()
    if ended.returncode or not lines:
        return {"status": "error", "reason": f"the process ended with {ended.returncode}"}
    found: Row = {"status": "ok", **json.loads(lines[-1])}
    return found


def ratio_here(args: argparse.Namespace) -> Row:
    """Forwards and POEM calls in turn, since a machine shared with others drifts; medians of both.

    On the clock, and in processor seconds of all threads, which others on the machine disturb less.

    After `--budget` seconds no further pair is begun; one is always measured.
    """
    begun = time.perf_counter()
    place = Place(args.device, args.size, 0.0)
    job = Job(args.ratio_net, args.ratio_batch, "poem1", "eager")
    adapter, images, facts = made(place, job)
    model = facts["object"].model

    def forward(batch: Tensor) -> Tensor:
        with torch.inference_mode():
            answer: Tensor = model(batch)
        return answer

    calls: dict[str, Call] = {"forward": forward, "poem1": adapter}
    clock: dict[str, list[float]] = {name: [] for name in calls}
    worked: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(args.pairs + 1):
        if turn > 1 and time.perf_counter() - begun > args.budget:
            break
        for name, call in calls.items():
            before = time.process_time()
            took = place.once(call, images[turn % 8])
            busy = time.process_time() - before
            print(f"pair {turn}: {name} {took:.2f} s, {busy:.2f} s of work", file=sys.stderr, flush=True)
            if turn:  # the first pair warms up
                clock[name].append(took)
                worked[name].append(busy)
    middle = {name: statistics.median(times) for name, times in clock.items()}
    work = {name: statistics.median(times) for name, times in worked.items()}
    value = middle["poem1"] / middle["forward"]
    found = {
        "net": job.net, "network": facts["network"], "batch": job.batch, "pairs": len(clock["poem1"]),
        "threads": torch.get_num_threads(), "allocator": {key: os.environ.get(key) for key in ALLOCATOR},
        "layout": "channels_last" if convolutional(job.net) else "contiguous",
        "forward_s": middle["forward"], "poem1_s": middle["poem1"], "ratio": value, "at_most_4": value <= 4.0,
        "ratio_of_each_pair": [b / a for a, b in zip(clock["forward"], clock["poem1"], strict=True)],
        "ratio_of_work": work["poem1"] / work["forward"], "clock_s": clock, "work_s": worked,
        "load": os.getloadavg()[0],
    }  # fmt: skip
    if args.profile or (value > 4.0 and time.perf_counter() - begun < args.budget):  # it takes two more pairs
        found["profile_forward"] = profiled(place, forward, images, calls=1)
        found["profile_poem1"] = profiled(place, adapter, images, calls=1)
    return found


# The command


def _named(word: str) -> str:
    """A word of the command line; of a path its last part, since folders are nobody's business."""
    return Path(word).name if os.sep in word else word


def about(args: argparse.Namespace) -> Row:
    """What the numbers depend on."""
    backends = torch.backends
    return {
        "command": " ".join(["python", "benchmarks/speed.py", *map(_named, sys.argv[1:])]),
        "host": {
            "poem": __version__, "torch": torch.__version__, "python": platform.python_version(),
            "device": torch.cuda.get_device_name(0) if args.device == "cuda" else platform.processor() or "cpu",
            "cuda": torch.version.cuda, "cudnn": backends.cudnn.version() if args.device == "cuda" else None,
            "threads": torch.get_num_threads(), "cores": os.cpu_count(),
        },
        "switches": {
            "cudnn.allow_tf32": backends.cudnn.allow_tf32, "cuda.matmul.allow_tf32": backends.cuda.matmul.allow_tf32,
            "cudnn.benchmark": backends.cudnn.benchmark,
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
        },
        "settings": {"size": args.size, "seconds": args.seconds, "budget": args.budget, "autotune": args.autotune},
    }  # fmt: skip


def arguments(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    parser.add_argument("--out", type=Path, default=None, help="JSON, written after every row")
    parser.add_argument("--nets", type=_names, default=None, help=f"default on CUDA: {','.join(NETS)}; on the CPU none")
    parser.add_argument("--batches", type=_counts, default=[64, 1, 16])
    parser.add_argument("--methods", type=_names, default=list(METHODS), help=",".join(METHODS))
    parser.add_argument("--modes", type=_names, default=["eager", "captured", "bf16", "bf16-compiled", "plain"],
                        help=",".join(MODES))  # fmt: skip
    parser.add_argument("--select", type=_counts, default=[100], help="shares of the batch that teach, in percent")
    parser.add_argument("--seconds", type=float, default=1.0, help="per row, once for latency and once for throughput")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds after which no row is begun")
    parser.add_argument("--size", type=int, default=224, help="height and width of the images")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--forward", action=argparse.BooleanOptionalAction, default=True,
                        help="the network alone, which shares of the limit are taken of")  # fmt: skip
    parser.add_argument("--curves", action="store_true", help="POEM with one update over batch sizes and depths")
    parser.add_argument("--profile", action="store_true", help="kernels of POEM with one update, in a file beside")
    parser.add_argument("--autotune", action="store_true", help="max-autotune for the compiled forward")
    parser.add_argument("--cudnn-benchmark", action="store_true", help="let cuDNN try its algorithms")
    parser.add_argument("--markdown", action="store_true", help="the table for the documentation")
    parser.add_argument("--ratio", action=argparse.BooleanOptionalAction, default=None,
                        help="POEM with one update against one forward (default on the CPU)")  # fmt: skip
    parser.add_argument("--ratio-net", default="resnet50-bn")
    parser.add_argument("--ratio-batch", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=5, help="of a forward and a POEM call")
    parser.add_argument("--ratio-here", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    for given, known in ((args.methods, METHODS), (args.modes, MODES)):
        strange = [name for name in given if name not in known]
        if strange:
            parser.error(f"expected some of {', '.join(known)}, got {', '.join(strange)}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("expected a CUDA device, found none; use --device cpu")
    if args.nets is None:
        args.nets = list(NETS) if args.device == "cuda" else []
    if args.ratio is None:
        args.ratio = args.device == "cpu"
    return args


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _counts(text: str) -> list[int]:
    return [int(name) for name in _names(text)]


def main(words: list[str] | None = None) -> int:
    """Measure, write, print; hints about random weights are kept back."""
    with quiet():
        return measure(arguments(words))


def measure(args: argparse.Namespace) -> int:
    """What was asked for."""
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.backends.cudnn.benchmark = args.cudnn_benchmark
    if args.ratio_here:
        print(json.dumps(ratio_here(args)))
        return 0
    place = Place(args.device, args.size, args.seconds, args.autotune)
    bench = Bench(place, args.out, args.budget, about(args))
    asked = args.nets, args.batches, args.methods, args.modes, args.select
    bench.run(plan(*asked, forward=args.forward, curves=args.curves))
    if args.profile and args.nets:
        profiles(place, args.out, args.nets[0], [batch for batch in (64, 1) if batch in args.batches])
    if args.ratio:
        found = bench.extra["ratio"] = ratio(args)
        print(_verdict(found), flush=True)
    bench.write(finished=True)
    if bench.rows:
        print(f"\n{table(bench.rows, gains(bench.rows), markdown=args.markdown)}")
    return 0


def _verdict(found: Row) -> str:
    if found["status"] != "ok":
        return f"POEM against a forward: {found['reason']}"
    said = (
        f"POEM with one update takes {found['poem1_s']:.2f} s, a forward {found['forward_s']:.2f} s: ratio "
        f"{found['ratio']:.2f}, {'at most' if found['at_most_4'] else 'ABOVE'} 4.0; in processor seconds "
        f"{found['ratio_of_work']:.2f} ({found['net']}, batch "
        f"{found['batch']}, {found['threads']} threads, medians of {found['pairs']} pairs)"
    )
    for name in ("profile_forward", "profile_poem1"):
        for item in found.get(name, {}).get("top", [])[:12]:
            said += f"\n    {name[8:]:>8} {item['share']:6.1%} {item['ms_per_call'] / 1000:8.3f} s  {item['name'][:80]}"
    return said


if __name__ == "__main__":
    sys.exit(main())
