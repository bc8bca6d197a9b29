"""One update of POEM against one forward of the same network, for `benchmarks/speed.py`."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from _speed_nets import convolutional
from _speed_place import Call, Place, Row
from _speed_profile import profiled
from _speed_rows import Job, made
from torch import Tensor

ALLOCATOR = {  # glibc: keep large blocks instead of mapping each tensor afresh
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}


def ratio(args: argparse.Namespace) -> Row:
    """POEM with one update over a plain forward, in a process of its own that keeps its memory."""
    command = [
        sys.executable, str(Path(__file__).resolve().with_name("speed.py")), "--ratio-here", "--device", args.device,
        "--pairs", str(args.pairs), "--ratio-net", args.ratio_net, "--ratio-batch", str(args.ratio_batch),
        "--size", str(args.size), *(["--threads", str(args.threads)] if args.threads else []),
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


def verdict(found: Row) -> str:
    """The ratio in one line, and the most expensive operators where they were profiled."""
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
