"""Services for tests: the embedded digits network, images for it, and engines that are closed at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from poem import zoo
from poem.serve.engine import StreamEngine
from poem.serve.learner import Served
from poem.serve.settings import ServeSettings
from poem.streams.loading.prepare import Prepare


@cache
def served(method: str | None = None, **guard: Any) -> Served:
    """The digits network with batch norm, served with a method."""
    model, base = zoo.load("digits-bn")
    return Served(
        model=model, method=method, guard={"view": "none", **guard}, base="digits-bn",
        settings={"mean": base.mean, "std": base.std}, prepare=Prepare(resize=base.resize, crop=base.crop),
    )  # fmt: skip


def pictures(count: int, seed: int) -> Tensor:
    """Images (count, 3, 32, 32) from 0 to 1."""
    rng = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 8, 8, generator=rng).repeat_interleave(4, 2).repeat_interleave(4, 3)
    return 0.7 * coarse + 0.3 * torch.rand(count, 3, 32, 32, generator=rng)


@contextmanager
def engine(folder: Path, method: str | None = None, **settings: Any) -> Iterator[StreamEngine]:
    """An engine of the digits network; it is drained at the end."""
    made = StreamEngine(served(method), ServeSettings(**settings), folder)
    try:
        yield made
    finally:
        assert made.close(60)


@contextmanager
def running(folder: Path, *tokens: str, **settings: Any) -> Iterator[str]:
    """A service on a free port of the loopback address, in a thread of its own; its address."""
    import socket
    import threading

    import uvicorn

    from poem.serve.access import LOOPBACK, Access
    from poem.serve.front import build_app
    from poem.serve.metrics import Metrics

    listener, metrics = socket.create_server(("127.0.0.1", 0)), Metrics()
    made = StreamEngine(served(), ServeSettings(**settings), folder / "states", metrics)
    app = build_app(made, metrics, Access(tokens, LOOPBACK))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(60)


def until(there: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until something is so, as where a thread has to come first; an error after so many seconds."""
    end = time.monotonic() + seconds
    while not there():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.002)


def taken(made: StreamEngine) -> None:
    """Wait until the engine has taken every request that waits."""
    until(lambda: made.summary()["waiting"] == 0)


def image_file(kind: str, wide: int = 40, high: int = 36, seed: int = 0) -> bytes:
    """A JPEG or PNG file of noise."""
    import io

    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (high, wide, 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, kind)
    return content.getvalue()


def npy(array: Any) -> bytes:
    """An array as `numpy.save` writes it."""
    import io

    import numpy as np

    content = io.BytesIO()
    np.save(content, np.asarray(array))
    return content.getvalue()
