"""A connection must bring a request's headers in time: otherwise clients that send half of them hold it for ever.

uvicorn limits neither the first headers of a connection nor, after an answer, headers of which one byte has come. A
connection beyond `limit_concurrency` is answered with a problem too, where uvicorn would send plain text.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import h11
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from poem.serve.front_errors import answered
from poem.serve.problems import TITLES, Problem


class TimedHeaders(H11Protocol):
    """uvicorn's protocol, with a limit on the time for headers; what is no HTTP is answered with a problem."""

    header_s = 10.0
    _due: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self._most, self.limit_concurrency = self.limit_concurrency, None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected: its first headers are due."""
        super().connection_made(transport)
        if self._most is not None and len(self.connections) > self._most:
            self.app = _too_many
        self._watch()

    def data_received(self, data: bytes) -> None:
        """Bytes have come: headers, or a part of them, or of a body."""
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        """An answer was sent; what came behind its request may be half of the next one's headers."""
        super().on_response_complete()
        if self.conn.trailing_data[0]:
            self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has gone."""
        self._stop()
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP."""
        self._refuse(Problem(400, "http", f"expected a request of HTTP/1.1, got something else: {msg}"))

    def _watch(self) -> None:
        """Count from the first byte, or the connection, to the end of the headers."""
        if self.transport.is_closing() or self.conn.their_state is not h11.IDLE:
            self._stop()
        elif self._due is None:
            self._due = self.loop.call_later(self.header_s, self._expire)

    def _stop(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _expire(self) -> None:
        self._due = None
        if not self.transport.is_closing() and self.conn.their_state is h11.IDLE:
            detail = f"expected the request's headers within {self.header_s:g} seconds"
            self._refuse(Problem(408, "header-timeout", detail))

    def _refuse(self, problem: Problem) -> None:
        """A problem as the connection's last answer."""
        body = json.dumps(problem.body()).encode()
        head = (
            f"HTTP/1.1 {problem.status} {TITLES[problem.status]}\r\nContent-Type: application/problem+json\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


async def _too_many(scope: Scope, receive: Receive, send: Send) -> None:
    """The answer on a connection that is one too many."""
    problem = Problem(503, "too-many-connections", "expected fewer connections; send it again later", retry_after=1)
    answer = answered(problem)
    answer.headers["Connection"] = "close"
    await answer(scope, receive, send)


def timed_headers(seconds: float) -> type[Any]:
    """The protocol's class with that limit, for `uvicorn.Config(http=...)`."""
    return type("TimedHeaders", (TimedHeaders,), {"header_s": seconds})
