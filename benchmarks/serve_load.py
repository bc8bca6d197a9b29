"""64 streams at once, on the loopback: throughput, latency, and every answer computed again from its stream's audit.

    python benchmarks/serve_load.py [--streams 64] [--requests 100] [--base digits-bn] [--json results/serve/load.json]

Each stream has four requests of four images in flight; every twentieth has a deadline that it cannot keep under this
load, so that late answers are among them. Then the same load goes to the same model behind the same front without
adaptation (method `source`, no guard). Requests that meet a full queue are sent again and counted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from poem import zoo
from poem.guarded.audit import read_audit
from poem.serve.client import Client, Prediction, ServiceError
from poem.serve.learner import Served
from poem.serve.load import percentile
from poem.serve.replay import replay_answers
from poem.streams.loading.prepare import Prepare

SIZE, PER_REQUEST, IN_FLIGHT, DEADLINE_MS = 16, 4, 4, 100.0


def pictures(count: int, side: int, seed: int) -> torch.Tensor:
    """Images (count, 3, side, side) from 0 to 1."""
    rng = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 8, 8, generator=rng)
    return torch.nn.functional.interpolate(coarse, size=(side, side), mode="nearest")


@contextlib.contextmanager
def service(base: str, folder: Path, *words: str) -> Iterator[str]:
    """Its address; it is stopped in order at the end."""
    command = [
        sys.executable, "-m", "poem", "serve", base, *words, "--port", "0", "--state", str(folder), "--threads", "1",
        "--batch-size", str(SIZE),
    ]  # fmt: skip
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert running.stdout is not None
    try:
        found = re.search(r"http://127\.0\.0\.1:\d+", running.stdout.readline())
        assert found is not None
        yield found[0]
        running.send_signal(signal.SIGTERM)
        if running.wait(300) != 0:
            raise SystemExit("the service did not answer and save everything")
    finally:
        if running.poll() is None:
            running.kill()


class Load:
    """All requests to one service."""

    def __init__(self, url: str, streams: int, requests: int, images: list[torch.Tensor]) -> None:
        self.client, self.images, self.requests = Client(url, retries=0, timeout_s=300), images, requests
        self.sent: dict[str, torch.Tensor] = {}
        self.replies: list[Prediction] = []
        self.latencies: list[float] = []
        self.full, self.errors, self.lock = 0, list[str](), threading.Lock()
        left = [iter(range(requests)) for _ in range(streams)]
        threads = [threading.Thread(target=self.feed, args=(at % streams, left[at % streams]))
                   for at in range(streams * IN_FLIGHT)]  # fmt: skip
        began = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.seconds = time.perf_counter() - began

    def feed(self, stream: int, left: Iterator[int]) -> None:
        """Requests of one stream, one after the other; others of the same stream come from other threads."""
        while True:
            with self.lock:
                number = next(left, None)
            if number is None:
                return
            images = self.images[(stream * self.requests + number) % len(self.images)]
            deadline = DEADLINE_MS if number % 20 == 19 else None
            try:
                while True:
                    began = time.perf_counter()
                    try:
                        reply = self.client.predict(f"s{stream}", images, deadline_ms=deadline)
                    except ServiceError as error:
                        if error.code != "queue-full":
                            raise
                        with self.lock:
                            self.full += 1
                        time.sleep(0.2)
                    else:
                        break
            except ServiceError as error:
                with self.lock:
                    self.errors.append(str(error))
                continue
            with self.lock:
                self.latencies.append(1000 * (time.perf_counter() - began))
                self.replies.append(reply)
                self.sent[reply.request] = images

    def figures(self) -> dict[str, Any]:
        """What came of it."""
        ordered = sorted(self.latencies)
        return {
            "answered": len(self.replies), "late": sum(each.late for each in self.replies), "full_429": self.full,
            "errors": len(self.errors), "error_texts": sorted(set(self.errors))[:5], "seconds": round(self.seconds, 2),
            "images_per_second": round(len(self.replies) * PER_REQUEST / self.seconds, 1),
            "micro_batches": len({(each.stream, each.batch) for each in self.replies if not each.late}),
            "p50_ms": round(percentile(ordered, 50), 1), "p99_ms": round(percentile(ordered, 99), 1),
        }  # fmt: skip


def served(base: str) -> Served:
    """What the guarded service serves."""
    model, found = zoo.load(base)
    settings = {"mean": found.mean, "std": found.std, "lr": None, "preset": None}
    prepare = Prepare(resize=found.resize, crop=found.crop)
    return Served(model=model, guard={"view": "shift", "budget": None}, settings=settings, prepare=prepare)


def main() -> int:
    """Both loads, the replay, the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--requests", type=int, default=100, help="of each stream")
    parser.add_argument("--base", default="digits-bn")
    parser.add_argument("--json", type=Path, default=Path("results/serve/load.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    side = zoo.load(args.base)[1].crop or 32
    images = [pictures(PER_REQUEST, side, seed) for seed in range(256)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with service(args.base, folder / "source", "source") as url:
            source = Load(url, args.streams, args.requests, images)
        print("source: ", source.figures(), flush=True)
        with service(args.base, folder / "auto") as url:
            adapted = Load(url, args.streams, args.requests, images)
        print("adapted:", adapted.figures(), flush=True)
        again: dict[str, Any] = {}
        shared, composed = served(args.base), 0
        for audit in sorted((folder / "auto").glob("streams/*/*.jsonl")):
            again |= replay_answers(audit, shared, SIZE, adapted.sent)
            composed += sum(len(line["requests"]) > 1 for line in read_audit(audit)[1] if line["kind"] == "requests")
    expected = {each.request: each.answers for each in adapted.replies}
    ratio = adapted.figures()["images_per_second"] / source.figures()["images_per_second"]
    figures = {
        "command": f"python benchmarks/serve_load.py --streams {args.streams} --requests {args.requests} "
        f"--base {args.base}",
        "torch": version("torch"), "machine": platform.machine(), "cores": os.cpu_count(),
        "load_average": [round(each, 1) for each in os.getloadavg()], "streams": args.streams,
        "requests_of_each": args.requests, "images_per_request": PER_REQUEST, "in_flight_of_each": IN_FLIGHT,
        "adapted": adapted.figures(), "source": source.figures(), "throughput_of_the_source": round(ratio, 3),
        "micro_batches_of_several_requests": composed, "answers_replayed": len(again),
        "all_equal_a_replay": again == expected,
    }  # fmt: skip
    print(json.dumps(figures, indent=1))
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(figures, indent=1) + "\n")
    whole = len(expected) == args.streams * args.requests
    return 0 if whole and figures["all_equal_a_replay"] and not adapted.errors and not source.errors else 1


if __name__ == "__main__":
    sys.exit(main())
