"""What a service is told once: sizes, limits and times."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

from poem.parts.fields import Checked, Count, NotNegative, Positive, Range
from poem.serve.problems import Problem

STREAM_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)
"""What a stream may be called. No file is named so: see `poem.serve.store`."""
ID_RULE = "1 to 64 letters, digits, dots, _ and - as a stream's id, the first a letter or digit"
MOST_CHANNELS = 16
"""Of an array's images."""


@dataclass(frozen=True, kw_only=True)
class ServeSettings(Checked):
    """Sizes, limits and times of a service."""

    batch_size: Annotated[int, Range(at_least=1, at_most=4096)] = 32
    """Images of a micro-batch, and of one request, at most; the learning rate is that of such batches."""
    wait_ms: NotNegative = 0.0
    """How long a request may wait for others of its stream to fill the micro-batch."""
    stack: bool = True
    """Whether streams that wait at the same time are computed as one batch, where the method and the model allow."""
    stack_images: Annotated[int, Range(at_least=2, at_most=4096)] = 64
    """Images of all streams in such a batch, at most."""
    queue: Count = 64
    """Requests that wait in one stream, at most; one more is answered 429."""
    deadline_ms: Positive | None = None
    """After so long a request without a deadline of its own gets the source's answer."""
    snapshot_every: Count = 32
    """Batches of a stream after which its state is written; a kill loses what was learnt since."""
    max_streams: Count = 1024
    """Streams in memory and on disk, at most."""
    live: Count = 256
    """Streams in memory, at most; those used longest ago go to disk."""
    idle_s: Positive = 300.0
    """Seconds without a request after which a stream goes to disk."""
    max_body: Count = 32 << 20
    """Bytes of a request, at most."""
    max_json: Count = 8 << 20
    """Bytes of a request in JSON, at most: its numbers become Python objects that are several times larger."""
    max_queued_bytes: Count = 1 << 30
    """Bytes that the requests of all streams hold together until they are answered, at most; more is answered 429."""
    max_state: Count = 512 << 20
    """Bytes of a state that is imported, at most."""
    max_pixels: Count = 25_000_000
    """Pixels of an image file, and without a crop of all images of a request; counted before any is decoded."""
    min_side: Count = 8
    """Pixels of an image's side, at least: fewer are no image."""
    body_s: Positive = 30.0
    """Seconds in which a request's body must have come."""
    keys: Count = 256
    """Idempotency keys of a stream whose answers are kept."""
    key_bytes: Count = 1 << 20
    """Bytes of these answers, at most; the oldest are forgotten first."""
    key_expiry_s: Positive = 86_400.0
    """Seconds for which an idempotency key's answer is kept."""


def check_stream_id(name: str) -> str:
    """The stream's name, if it is one.

    Raises:
        Problem: 422 for any other text.
    """
    if STREAM_ID.fullmatch(name) is None:
        raise Problem(422, "stream-id", f"expected {ID_RULE}, got {name[:80]!r}")
    return name
