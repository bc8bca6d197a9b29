"""An open-loop load generator: requests arrive at a rate, whether or not earlier ones are answered.

Latency counts from the moment at which a request was to be sent, so that a service that stalls shows it. Requests that
meet a full queue are counted, not repeated.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

from poem.serve.client import Client, ServiceError

SHARES = (50, 95, 99)


@dataclass
class LoadResult:
    """What came of a load."""

    url: str
    rate: float
    """Requests per second that were sent."""
    streams: int
    images_per_request: int
    seconds: float = 0.0
    """From the first request to the last answer."""
    answered: int = 0
    late: int = 0
    """Of these, answered by the source because of a deadline."""
    rejected: int = 0
    """Met a full queue: 429."""
    errors: int = 0
    """Everything else."""
    error_texts: dict[str, int] = field(default_factory=dict)
    latencies_ms: dict[str, float] = field(default_factory=dict)
    """Percentiles over the requests that were answered."""

    @property
    def requests(self) -> int:
        """All of them."""
        return self.answered + self.rejected + self.errors

    @property
    def throughput(self) -> float:
        """Images answered per second."""
        return self.answered * self.images_per_request / self.seconds if self.seconds else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return {**asdict(self), "requests": self.requests, "images_per_second": self.throughput}

    def __str__(self) -> str:
        answered = self.answered / self.seconds if self.seconds else 0.0
        rows = {
            "requests": f"{self.requests} to {self.streams} streams, {self.images_per_request} images each",
            "rate": f"{self.rate:g} requests/s asked, {answered:.1f} answered",
            "throughput": f"{self.throughput:.1f} images/s",
            "answered": f"{self.answered}, of these late {self.late}",
            "rejected (429)": str(self.rejected), "errors": str(self.errors),
            **{f"latency {name}": f"{value:.1f} ms" for name, value in self.latencies_ms.items()},
        }  # fmt: skip
        lines = [f"{name:<15} {value}" for name, value in rows.items()]
        return "\n".join([*lines, *(f"  {count} x {text}" for text, count in self.error_texts.items())])


def run_load(
    url: str,
    images: Sequence[Any],
    *,
    rate: float,
    requests: int,
    streams: int = 1,
    per_request: int = 1,
    token: str | None = None,
    deadline_ms: float | None = None,
    seed: int = 0,
    workers: int = 256,
    prefix: str = "load",
) -> LoadResult:
    """Send requests at random times, on average `rate` per second, to the streams in turn.

    Args:
        url: Of the service.
        images: Bodies that `Client.predict` takes, sent in turn; each holds `per_request` images.
        rate: Requests per second.
        requests: How many in all.
        streams: How many streams; they are called PREFIX-0 and so on.
        per_request: Images of a request.
        token: Of the service.
        deadline_ms: Of each request.
        seed: Of the times.
        workers: Requests in flight, at most; beyond that they are sent late, which their latency shows.
        prefix: Of the streams' names.
    """
    rng, client = random.Random(seed), Client(url, token=token, retries=0)
    result, lock = LoadResult(url, rate, streams, per_request), threading.Lock()
    latencies: list[float] = []

    def send(at: int, due: float) -> None:
        try:
            found = client.predict(f"{prefix}-{at % streams}", images[at % len(images)], deadline_ms=deadline_ms)
            with lock:
                latencies.append(1000 * (time.perf_counter() - due))
                result.answered += 1
                result.late += found.late
        except ServiceError as error:
            with lock:
                if error.code in ("queue-full", "service-full"):
                    result.rejected += 1
                else:
                    result.errors += 1
                    result.error_texts[str(error)] = result.error_texts.get(str(error), 0) + 1

    began = due = time.perf_counter()
    with ThreadPoolExecutor(workers) as pool:
        for at in range(requests):
            due += rng.expovariate(rate)
            time.sleep(max(0.0, due - time.perf_counter()))
            pool.submit(send, at, due)
    result.seconds = time.perf_counter() - began
    ordered = sorted(latencies)
    if ordered:
        result.latencies_ms = {f"p{share}": percentile(ordered, share) for share in SHARES} | {"max": ordered[-1]}
    return result


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that is at least as large as this share of all, in percent."""
    return ordered[max(0, math.ceil(share / 100 * len(ordered)) - 1)]
