"""Load a service for an hour, and fit a line to its memory: a slope beyond noise is a leak.

    python benchmarks/serve_soak.py [--minutes 60] [--json results/serve/soak.json]

A `poem serve digits-bn` on the loopback gets requests from two closed loops: batches of one to eight images to sixteen
streams of which eight fit into memory, so that streams go to disk and come back; keys that are repeated, malformed
bodies, resets, exports, and streams that are made and deleted. Each minute prints the resident memory of the service.
The line is fitted to the minutes after the warm-up, which fills every ledger of keys and every guard's ring.
"""

from __future__ import annotations

import argparse
import contextlib
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


def resident(pid: int) -> int:
    """Resident memory of a process, in KiB."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])


def fitted(points: list[tuple[float, float]]) -> dict[str, float]:
    """The line of least squares through points, and the standard error of its slope."""
    count = len(points)
    mean_x, mean_y = (sum(each[axis] for each in points) / count for axis in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread
    rest = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in points)
    return {"slope": slope, "error": (rest / max(1, count - 2) / spread) ** 0.5}


def main() -> int:
    """Serve, load, print a line a minute, fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--warm-up", type=float, default=15, help="minutes that the line leaves out")
    parser.add_argument("--step-s", type=float, default=60, help="seconds between two lines")
    parser.add_argument("--json", type=Path, default=Path("results/serve/soak.json"))
    args = parser.parse_args()
    if args.minutes <= args.warm_up + 3 * args.step_s / 60:
        raise SystemExit("expected more --minutes than --warm-up, by at least three steps")
    with tempfile.TemporaryDirectory() as folder:
        figures = soak(Path(folder), args)
    print(json.dumps({name: value for name, value in figures.items() if name != "rss_kib"}, indent=1))
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
    rows: list[tuple[float, int]] = []
    try:
        for feed in feeds:
            feed.start()
        began, due = time.monotonic(), 0.0
        while due < 60 * args.minutes:
            due += args.step_s
            time.sleep(max(0.0, began + due - time.monotonic()))
            minute, counts = (time.monotonic() - began) / 60, total(feeds)
            rows.append((minute, resident(server.pid)))
            print(f"{minute:6.1f} min  {rows[-1][1] / 1024:8.1f} MiB  {counts}", flush=True)
        for feed in feeds:
            feed.stopped.set()
        for feed in feeds:
            feed.join(60)
        server.send_signal(signal.SIGTERM)
        stopped = server.wait(120)
    finally:
        if server.poll() is None:
            server.kill()
    line = fitted([(minute, rss) for minute, rss in rows if minute > args.warm_up])
    counts, per_hour = total(feeds), line["slope"] * 60 / 1024
    requests = sum(value for name, value in counts.items() if name != "full")
    return {
        "command": f"python benchmarks/serve_soak.py --minutes {args.minutes:g} --warm-up {args.warm_up:g}",
        "torch": version("torch"),
        "minutes": args.minutes, "warm_up_minutes": args.warm_up, "streams": STREAMS, "in_memory": LIVE,
        "requests": requests, **counts, "error_texts": [each for feed in feeds for each in feed.errors][:20],
        "first_mib": rows[0][1] / 1024, "last_mib": rows[-1][1] / 1024, "most_mib": max(rss for _, rss in rows) / 1024,
        "slope_mib_per_hour": per_hour, "slope_error_mib_per_hour": line["error"] * 60 / 1024,
        "slope_kib_per_1000_requests": line["slope"] * args.minutes / max(1, requests) * 1000, "exit": stopped,
        "rss_kib": [[round(minute, 2), rss] for minute, rss in rows],
        "ok": stopped == 0 and counts["errors"] == 0,
    }  # fmt: skip


def total(feeds: list[Feed]) -> dict[str, int]:
    """Counts of all loops."""
    return {name: sum(feed.counts[name] for feed in feeds) for name in feeds[0].counts}


if __name__ == "__main__":
    sys.exit(main())
