"""What a service counts and times, for Prometheus: names and units as its conventions have them.

No metric has the stream's id as a label: there may be thousands. A stream's own numbers are in its status.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from poem._version import __version__
from poem.serve.meter import Meter

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
IMAGES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Metrics(Meter):
    """The metrics of one service, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        Gauge("poem_info", "Version of the service.", ["version"], registry=registry).labels(__version__).set(1)
        self._requests = Counter(
            "poem_http_requests", "Requests answered.", ["method", "route", "status"], registry=registry
        )
        self._seconds = Histogram(
            "poem_http_request_duration_seconds", "From a request's first byte to its answer.", ["route"],
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self._images = Counter(
            "poem_images", "Images answered, by whose answer it was; late: the source's, because of a deadline.",
            ["answered_by"], registry=registry,
        )  # fmt: skip
        self._batch_images = Histogram(
            "poem_batch_images", "Images of a micro-batch.", buckets=IMAGES, registry=registry
        )
        self._batch_seconds = Histogram(
            "poem_batch_duration_seconds", "To predict and learn from a micro-batch.", buckets=SECONDS,
            registry=registry,
        )  # fmt: skip
        self._wait_seconds = Histogram(
            "poem_queue_wait_seconds", "How long requests waited in their queue.", buckets=SECONDS, registry=registry
        )
        self._rejections = Counter("poem_queue_rejections", "Requests that met a full queue.", registry=registry)
        self._replays = Counter(
            "poem_idempotent_replays", "Requests answered as before, by their key.", registry=registry
        )
        self._events = Counter("poem_guard_events", "Decisions of guards.", ["kind"], registry=registry)
        self._snapshots = Histogram(
            "poem_snapshot_duration_seconds", "To write a stream's state.", buckets=SECONDS, registry=registry
        )
        self._failures = Counter("poem_snapshot_failures", "Snapshots that could not be written.", registry=registry)
        self._streams = Gauge("poem_streams", "Streams in memory and on disk.", ["place"], registry=registry)
        self._waiting = Gauge("poem_queue_requests", "Requests that wait in all queues.", registry=registry)

    def request(self, method: str, route: str, status: int, seconds: float) -> None:
        """A request was answered."""
        self._requests.labels(method, route, str(status)).inc()
        self._seconds.labels(route).observe(seconds)

    def answered(self, by: str, images: int) -> None:
        """Images were answered."""
        self._images.labels(by).inc(images)

    def batch(self, images: int, seconds: float) -> None:
        """A micro-batch was computed."""
        self._batch_images.observe(images)
        self._batch_seconds.observe(seconds)

    def waited(self, seconds: float) -> None:
        """A request waited in its queue."""
        self._wait_seconds.observe(seconds)

    def rejected(self, count: int = 1) -> None:
        """A queue was full."""
        self._rejections.inc(count)

    def replayed(self, count: int = 1) -> None:
        """A key was answered as before."""
        self._replays.inc(count)

    def event(self, kind: str, count: int = 1) -> None:
        """A guard decided something."""
        self._events.labels(kind).inc(count)

    def snapshot(self, seconds: float, ok: bool) -> None:
        """A snapshot was written, or not."""
        if ok:
            self._snapshots.observe(seconds)
        else:
            self._failures.inc()

    def streams(self, live: int, idle: int, waiting: int) -> None:
        """How many streams and waiting requests there are."""
        self._streams.labels("memory").set(live)
        self._streams.labels("disk").set(idle)
        self._waiting.set(waiting)

    def text(self) -> bytes:
        """All of it, in Prometheus' text format."""
        found: bytes = generate_latest(self.registry)
        return found
