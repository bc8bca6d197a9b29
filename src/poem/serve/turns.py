"""Whose turn it is: the streams that have requests waiting, and which of their requests make the next micro-batch.

What `Turns.pick` returns is computed together: one micro-batch of one stream, or, where streams are stacked, equal
micro-batches of several. The status says how a stream was computed last (`how`), and why alone (`why_alone`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any

from torch import Tensor

from poem.serve.learner import Learner
from poem.serve.ledger import Ledger

TURNS, STACKED = "turns", "stacked"
"""How streams share the model, for the status."""
Picked = list[tuple["Stream", list["Job"]]]
"""What is computed together: streams, each with one command or the requests of one micro-batch."""
COUNTED: tuple[str, ...] = ("requests", "images", "late", "rejected", "replayed", "snapshots", "snapshot_failures")
"""Counts of a stream since it was made, or last deleted; they are saved with its snapshots."""
FEW_DEADLINES = 64
"""Deadlines that are kept, whether their requests wait or not, before those that were answered are forgotten."""


def zero_counts() -> dict[str, int]:
    """The counts of a stream that is new."""
    return dict.fromkeys(COUNTED, 0)


def saved_counts(about: Mapping[str, Any]) -> dict[str, int]:
    """The counts that a snapshot says of its stream; 0 where it says none, or something else than a count."""
    found = about.get("counts")
    stated = found if isinstance(found, Mapping) else {}
    values = {name: stated.get(name) for name in COUNTED}
    return {name: value if type(value) is int and value >= 0 else 0 for name, value in values.items()}


@dataclass(eq=False)
class Job:
    """One request of a stream: images to answer, or a command. Times are of `time.monotonic`."""

    request: str
    arrived: float
    images: Tensor | None = None
    command: str = ""
    value: Any = None
    deadline: float | None = None
    key: str | None = None
    began: float | None = None
    """When the request began to come; None where that is when it arrived here."""
    future: Future[Any] = field(default_factory=Future)
    taken: bool = False

    def succeed(self, value: Any) -> None:
        """Hand over the result, and let go of the images; a caller that has gone away is no error."""
        self.images = self.value = None
        with contextlib.suppress(InvalidStateError):
            self.future.set_result(value)

    def fail(self, error: BaseException) -> None:
        """Hand over an error, and let go of the images."""
        self.images = self.value = None
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(error)


@dataclass(eq=False)
class Stream:
    """One stream: its queue, what adapts for it while it is in memory, and its counts."""

    id: str
    used: float
    jobs: deque[Job] = field(default_factory=deque)
    learner: Learner | None = None
    ledger: Ledger | None = None
    audit: int = 0
    """Number of the audit that is written; 0 before the first."""
    unsaved: int = 0
    """Batches since the last snapshot."""
    dirty: bool = False
    """Whether anything is newer than the snapshot."""
    stored: bool = False
    """Whether there is a snapshot."""
    number: int = 0
    """With which this engine owns the stream, where several engines share a folder."""
    opened: int = 0
    """With which the learner was opened."""
    info: dict[str, Any] = field(default_factory=dict)
    """What the learner said of itself last."""
    counts: dict[str, int] = field(default_factory=zero_counts)
    measured: dict[str, float] = field(default_factory=dict)
    """Running means over requests: latency in milliseconds, entropy in nats."""
    how: str = TURNS
    """How the last batch was computed."""
    why_alone: str = ""
    """Why it was not computed together with those of other streams; "" where it was."""

    def average(self, name: str, value: float) -> None:
        """Move a running mean of about the last twenty values; NaN and Inf, as of a diverged network, are left out."""
        if not math.isfinite(value):
            return
        before = self.measured.get(name)
        self.measured[name] = value if before is None else 0.95 * before + 0.05 * value


class Turns:
    """The streams with requests waiting, in the order of their turns. Not thread-safe: the engine holds its lock.

    Args:
        batch_size: Images of a micro-batch, at most.
        wait_s: How long a request may wait for others.
        together: Images of all streams that are computed together, at most; 0: streams take turns.
        streams: Streams that are computed together, at most.
    """

    def __init__(self, batch_size: int, wait_s: float, *, together: int = 0, streams: int = 1) -> None:
        self.together = together
        self._size, self._wait, self._streams = batch_size, wait_s, streams
        self._order: deque[Stream] = deque()
        self._deadlines: list[tuple[float, int, Stream, Job]] = []
        self._numbers = itertools.count()
        self._most_deadlines = FEW_DEADLINES

    def add(self, stream: Stream, job: Job) -> None:
        """Put a request at the end of its stream's queue."""
        stream.jobs.append(job)
        if stream not in self._order:
            self._order.append(stream)
        if job.deadline is not None:
            heappush(self._deadlines, (job.deadline, next(self._numbers), stream, job))
            if len(self._deadlines) > self._most_deadlines:
                self._deadlines = [each for each in self._deadlines if not each[3].taken]
                heapify(self._deadlines)
                self._most_deadlines = max(FEW_DEADLINES, 2 * len(self._deadlines))

    def pick(self, now: float, *, at_once: bool = False) -> Picked:
        """The next stream whose turn it is, with one command or the requests of one micro-batch; they leave the queue.

        Where streams are computed together, others come with it that are ready too, with as many images of the same
        shape. `at_once` waits for nothing more, as when the service ends. Empty where nothing is ready.

        The first stream that is ready is always picked, and picked streams alone go to the end of the order: a stream
        that is ready is picked after at most as many picks as there are streams before it.
        """
        found: Picked = []
        passed: list[Stream] = []
        shape: tuple[int, ...] = ()
        while self._order:
            stream = self._order.popleft()
            if not stream.jobs:
                continue
            count, more = self._front(stream)
            ready = at_once or more or now - stream.jobs[0].arrived >= self._wait
            own = self._shape(stream, count)
            if not ready or (found and (own != shape or not own)):
                passed.append(stream)
                continue
            found.append((stream, [stream.jobs.popleft() for _ in range(count)]))
            shape = own
            for job in found[-1][1]:
                job.taken = True
            most = min(self._streams, self.together // own[0]) if own else 1
            if len(found) >= most:
                break
        self._order.extendleft(reversed(passed))
        self._order.extend(stream for stream, _ in found)
        return found

    def _shape(self, stream: Stream, count: int) -> tuple[int, ...]:
        """Of the images in the first so many requests, as one batch; () for a command."""
        jobs = itertools.islice(stream.jobs, count)
        images = [job.images for job in jobs if job.images is not None]
        return (sum(map(len, images)), *images[0].shape[1:]) if images else ()

    def late(self, now: float, ahead: float) -> tuple[Stream, Job] | None:
        """A request that another turn, of `ahead` seconds, would make late; it leaves the queue."""
        while self._deadlines:
            deadline, _, stream, job = self._deadlines[0]
            if not job.taken and now + ahead < deadline:
                return None
            heappop(self._deadlines)
            if not job.taken:
                job.taken = True
                stream.jobs.remove(job)
                return stream, job
        return None

    def next_time(self, ahead: float) -> float | None:
        """When something may be due that is not yet; None where nothing waits."""
        times = [stream.jobs[0].arrived + self._wait for stream in self._order if stream.jobs]
        if self._deadlines:
            times.append(self._deadlines[0][0] - ahead)
        return min(times, default=None)

    @property
    def waiting(self) -> int:
        """Requests in all queues."""
        return sum(len(stream.jobs) for stream in self._order)

    def _front(self, stream: Stream) -> tuple[int, bool]:
        """How many jobs go together, and whether no more may join them: images of one shape, up to the batch size."""
        first = stream.jobs[0]
        if first.images is None:
            return 1, True
        count, images = 0, 0
        for job in stream.jobs:
            same = job.images is not None and job.images.shape[1:] == first.images.shape[1:]
            if job.images is None or not same or images + len(job.images) > self._size:
                return count, True
            count, images = count + 1, images + len(job.images)
        return count, images >= self._size
