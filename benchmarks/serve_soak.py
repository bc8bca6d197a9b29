"""Load a service for an hour, and fit a line to its memory: it must be flat.

    python benchmarks/serve_soak.py [--minutes 60] [--json results/serve/soak.json]

A `poem serve digits-bn` on the loopback gets requests from two closed loops: batches of one to eight images to sixteen
streams of which eight fit into memory, so that streams go to disk and come back; keys that are repeated, malformed
bodies, resets, exports, and streams that are made and deleted. Each minute prints the memory of the service: what is
its own (`RssAnon`), and all that is resident (`VmRSS`). The difference are pages of files, mostly of libraries, which
come in when code runs first and which the system may take back and share: they are printed, own memory is judged.

The line is fitted to the minutes after the warm-up: the first `--warm-up` minutes, and as many more as it takes until
every stream has had enough requests to fill its ledger of keys and its guard's ring, but no more than half of the run.
Flat means that the upper end of the slope's 95 % interval is below 1 % of the service's own memory per hour; where the
lower end is above that, the memory grows; else, or where streams were still filling, the run was too short to say.
Neighbouring minutes are alike, so the interval counts them as fewer. Returns 1 unless the memory is flat, nothing
failed and the service stopped with 0.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from poem.serve.client import Client, ServiceError

STREAMS, LIVE, SIZE = 16, 8, 8
FILLED = 1.2 * 256 * STREAMS
"""Requests after which every stream's ledger of 256 keys is full."""
BAR = 0.01
"""Growth per hour, as a share of the service's own memory, below which it counts as flat."""


def pictures(count: int, seed: int) -> torch.Tensor:
    """Images (count, 3, 32, 32) from 0 to 1."""
    rng = torch.Generator().manual_seed(seed)
    return torch.rand(count, 3, 8, 8, generator=rng).repeat_interleave(4, 2).repeat_interleave(4, 3)


class Feed(threading.Thread):
    """One closed loop of requests; counts what came of them."""

    def __init__(self, url: str, number: int, images: list[torch.Tensor]) -> None:
        super().__init__(daemon=True)
        self.client, self.rng, self.images = Client(url, retries=0), random.Random(number), images
        self.number, self.stopped, self.errors = number, threading.Event(), list[str]()
        self.counts = dict.fromkeys(("answered", "replayed", "refused", "full", "commands", "errors"), 0)

    def run(self) -> None:
        """Until stopped."""
        at = 0
        while not self.stopped.is_set():
            at += 1
            try:
                self.once(at)
            except ServiceError as error:
                if error.code == "queue-full":
                    self.counts["full"] += 1
                else:
                    self.counts["errors"] += 1
                    self.errors.append(str(error))

    def once(self, at: int) -> None:
        """One request, or a few that belong together."""
        stream, images = f"s{self.rng.randrange(STREAMS)}", self.rng.choice(self.images)
        kind = at % 50
        if kind == 10:
            with contextlib.suppress(ServiceError):
                self.client.predict(stream, b"\xff\xd8\xff not a picture")
                self.counts["errors"] += 1
            self.counts["refused"] += 1
        elif kind == 20:
            self.client.reset(f"s{self.rng.randrange(2)}")
            self.counts["commands"] += 1
        elif kind == 30:
            passing = f"p{self.number}-{at}"
            self.client.predict(passing, images)
            self.client.load_state(f"q{self.number}", self.client.state(passing))
            self.client.delete(passing)
            self.counts["commands"] += 1
        elif kind == 40:
            self.client.predict(stream, images, key=f"{self.number} {at}")
            self.counts["replayed"] += self.client.predict(stream, images, key=f"{self.number} {at}").replayed
        else:
            self.client.predict(stream, images)
            self.counts["answered"] += 1


def memory_of(pid: int) -> tuple[int, int]:
    """A process's own memory, and all that is resident, in KiB."""
    found = dict(re.findall(r"(RssAnon|VmRSS):\s+(\d+)", Path(f"/proc/{pid}/status").read_text()))
    return int(found["RssAnon"]), int(found["VmRSS"])


def fitted(points: list[tuple[float, float]]) -> dict[str, float]:
    """The line of least squares through points, and the standard error of its slope.

    The error is that of independent residuals times sqrt((1 + r) / (1 - r)), r their correlation from one to the next
    where that is positive: as many independent points as there are would give a smaller error than there is.
    """
    count = len(points)
    mean_x, mean_y = (sum(each[axis] for each in points) / count for axis in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = [y - mean_y - slope * (x - mean_x) for x, y in points]
    squares = sum(each * each for each in rest)
    alike = sum(one * two for one, two in itertools.pairwise(rest)) / squares if squares else 0.0
    wider = ((1 + alike) / (1 - alike)) ** 0.5 if 0 < alike < 1 else 1.0
    return {"slope": slope, "error": (squares / max(1, count - 2) / spread) ** 0.5 * wider, "mean": mean_y}


def judged(rows: list[tuple[float, int, int]], warm_up: float) -> dict[str, Any]:
    """Whether memory is flat, of rows (minute, KiB, requests so far).

    Args:
        rows: One a minute.
        warm_up: Minutes that the line leaves out at least.
    """
    half = rows[-1][0] / 2
    full = next((minute for minute, _, requests in rows if requests >= FILLED), None)
    filled = full is not None and full <= half
    begins = max(warm_up, min(half if full is None else full, half))
    line = fitted([(minute, kib / 1024) for minute, kib, _ in rows if minute > begins])
    slope, error, bar = 60 * line["slope"], 60 * line["error"], BAR * line["mean"]
    low, high = slope - 2 * error, slope + 2 * error
    unsure = f"not decided{'' if filled else ', streams were still filling'}: run it for longer"
    return {
        "line_from_minute": round(begins, 2), "streams_were_full": filled, "mean_mib": line["mean"],
        "slope_mib_per_hour": slope, "slope_error_mib_per_hour": error, "bar_mib_per_hour": bar,
        "memory": "flat" if high < bar else "grows" if low > bar and filled else unsure,
    }  # fmt: skip


def main() -> int:
    """Serve, load, print a line a minute, fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--warm-up", type=float, default=15, help="minutes that the line leaves out at least")
    parser.add_argument("--step-s", type=float, default=60, help="seconds between two lines")
    parser.add_argument("--json", type=Path, default=Path("results/serve/soak.json"))
    args = parser.parse_args()
    if args.minutes <= args.warm_up + 3 * args.step_s / 60:
        raise SystemExit("expected more --minutes than --warm-up, by at least three steps")
    with tempfile.TemporaryDirectory() as folder:
        figures = soak(Path(folder), args)
    print(json.dumps({name: value for name, value in figures.items() if name != "rows"}, indent=1))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if figures["ok"] else 1


def soak(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The figures of one run."""
    command = [
        sys.executable, "-m", "poem", "serve", "digits-bn", "--port", "0", "--state", str(folder / "state"),
        "--live", str(LIVE), "--batch-size", str(SIZE), "--snapshot-every", "16", "--threads", "1",
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env)
    assert server.stdout is not None
    found = re.search(r"http://127\.0\.0\.1:\d+", server.stdout.readline())
    assert found is not None
    images = [pictures(1 + seed % SIZE, seed) for seed in range(64)]
    feeds = [Feed(found[0], number, images) for number in range(2)]
    rows: list[tuple[float, int, int, int]] = []
    try:
        for feed in feeds:
            feed.start()
        began, due = time.monotonic(), 0.0
        while due < 60 * args.minutes:
            due += args.step_s
            time.sleep(max(0.0, began + due - time.monotonic()))
            minute, counts = (time.monotonic() - began) / 60, total(feeds)
            own, resident = memory_of(server.pid)
            rows.append((minute, own, requests_of(counts), resident))
            print(f"{minute:6.1f} min  {own / 1024:8.1f} MiB of {resident / 1024:8.1f}  {counts}", flush=True)
        for feed in feeds:
            feed.stopped.set()
        for feed in feeds:
            feed.join(60)
        server.send_signal(signal.SIGTERM)
        stopped = server.wait(120)
    finally:
        if server.poll() is None:
            server.kill()
    counts = total(feeds)
    kib, found = [each for _, each, *_ in rows], judged([row[:3] for row in rows], args.warm_up)
    return {
        "command": f"python benchmarks/serve_soak.py --minutes {args.minutes:g} --warm-up {args.warm_up:g}",
        "torch": version("torch"),
        "minutes": args.minutes, "warm_up_minutes": args.warm_up, "streams": STREAMS, "in_memory": LIVE,
        "requests": requests_of(counts), **counts,
        "error_texts": [each for feed in feeds for each in feed.errors][:20],
        "first_mib": kib[0] / 1024, "last_mib": kib[-1] / 1024, "most_mib": max(kib) / 1024, **found, "exit": stopped,
        "first_resident_mib": rows[0][3] / 1024, "last_resident_mib": rows[-1][3] / 1024,
        "columns": ["minute", "own KiB", "requests", "resident KiB"],
        "rows": [[round(minute, 2), *rest] for minute, *rest in rows],
        "ok": stopped == 0 and counts["errors"] == 0 and found["memory"] == "flat",
    }  # fmt: skip


def total(feeds: list[Feed]) -> dict[str, int]:
    """Counts of all loops."""
    return {name: sum(feed.counts[name] for feed in feeds) for name in feeds[0].counts}


def requests_of(counts: dict[str, int]) -> int:
    """Requests that reached a stream's queue or were refused before it."""
    return sum(value for name, value in counts.items() if name != "full")


if __name__ == "__main__":
    sys.exit(main())
