"""Where the time of `benchmarks/speed.py` goes: kernels of a call, the most expensive first."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path

import torch
from _speed_place import Call, Place, Row, in_turn
from _speed_rows import SCHEMA, Job, attempted, made
from torch import Tensor

from poem._util.files import write_atomic


def profiled(place: Place, call: Call, images: list[Tensor], calls: int = 5) -> Row:
    """The 25 most expensive kernels (on the CPU: operators) and their sum, against the time on the clock."""
    from torch.profiler import ProfilerActivity, profile

    on_cuda = place.device == "cuda"
    warm = place.warmed(call, in_turn(images)) if on_cuda else [place.once(call, images[0])]
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


def profiles(place: Place, out: Path | None, about: Row, net: str, batches: list[int]) -> None:
    """POEM with one update, captured on CUDA, at each batch size: a file beside `out`."""
    found: list[Row] = []
    for batch in batches:
        job = Job(net, batch, "poem1", "bf16" if place.device == "cuda" else "eager")
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
            path = out.with_name(f"{out.stem}_profile.json")
            write_atomic(path, json.dumps({"schema": SCHEMA, **about, "profiles": found}, indent=1) + "\n", sync=False)
