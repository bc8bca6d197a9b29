"""HTTP before the engine: routes, bodies and errors. Needs the extra `serve`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Any, Protocol

from fastapi import Depends, FastAPI, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from fastapi.security import HTTPBearer
from starlette.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor

from poem._util.state_file import read_state
from poem._version import __version__
from poem.serve.access import Access
from poem.serve.front_errors import add_errors
from poem.serve.held_bytes import HeldBytes, RequestBytes
from poem.serve.json_safe import json_safe
from poem.serve.metrics import Metrics
from poem.serve.openapi import BINARY, BODY, FULL, KEY_HEADER, REFUSED, TAKEN, UNKNOWN, StreamId, describe
from poem.serve.payload import TYPES, PayloadReader
from poem.serve.problems import Problem
from poem.serve.request_body import idempotency_key, multipart_files, payload_hash, whole_body
from poem.serve.schemas import PREDICTION_RESPONSE, STATUS_RESPONSE, STATUSES_RESPONSE
from poem.serve.settings import ServeSettings, check_stream_id
from poem.streams.loading.prepare import Prepare

MAX_DEADLINE_MS = 600_000


class Engine(Protocol):
    """What answers behind the front: `StreamEngine` in this process, or `RayEngine` on a cluster."""

    settings: ServeSettings

    @property
    def prepare(self) -> Prepare:
        """How image files become the model's input."""

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""

    def submit(
        self, stream: str, images: Tensor, *, deadline_ms: float | None = None, key: str | None = None,
        payload: str = "", waited_s: float = 0.0,
    ) -> Future[dict[str, Any]]:  # fmt: skip
        """Put images at the end of a stream's queue; the request began `waited_s` ago."""

    def check_room(self, stream: str) -> None:
        """Raise what `submit` would for a full queue, where that is known."""

    def command(self, stream: str, command: str, value: Any = None) -> Future[Any]:
        """Put a command into a stream's queue."""

    def status(self, stream: str) -> dict[str, Any]:
        """What is known of a stream; may wait for another machine, as the next three."""

    def streams(self) -> list[dict[str, Any]]:
        """The status of every stream."""

    def summary(self) -> dict[str, Any]:
        """What is known of the service."""

    def refresh(self) -> None:
        """Tell the meter what it was not told yet."""

    def close(self, timeout_s: float = 60.0) -> bool:
        """Answer what is queued, save every stream, and end."""


def build_app(engine: Engine, metrics: Metrics, access: Access | None = None, drain_s: float = 60.0) -> FastAPI:
    """The application of a service.

    Args:
        engine: Answers; closed, after all that waits is answered, when the application ends.
        metrics: The engine's meter.
        access: Who may call; by default anybody.
        drain_s: Seconds for that end.
    """
    access = access or Access()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(engine.close, drain_s)

    app = FastAPI(
        title="poem serve", version=__version__, lifespan=lifespan, redoc_url=None, docs_url=None,
        description="Test-time adaptation as a service: one guarded adapter per stream, over one model.",
    )  # fmt: skip
    app.state.engine, app.state.metrics, app.state.access = engine, metrics, access
    app.state.reader = PayloadReader(engine.prepare, engine.settings)
    app.state.held = HeldBytes(engine.settings.max_queued_bytes, metrics.rejected)
    app.add_middleware(Timed, metrics=metrics)
    add_errors(app)
    describe(app)
    _add_service(app)
    _add_predict(app)
    _add_streams(app)
    return app


def _checked(request: Request) -> None:
    """Refuse a request that may not be made; what follows finds its token."""
    request.state.token = request.app.state.access.check(request.headers)


GUARDED = [Depends(_checked), Depends(HTTPBearer(auto_error=False))]


def _add_service(app: FastAPI) -> None:
    """Routes about the service itself."""
    engine: Engine = app.state.engine
    metrics: Metrics = app.state.metrics

    @app.get("/healthz", tags=["service"], summary="Whether the process answers")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", tags=["service"], summary="Whether requests are taken", responses={503: REFUSED[503]})
    async def readyz() -> dict[str, str]:
        if not engine.ready:
            raise Problem(503, "draining", "the service is ending and takes no more requests")
        return {"status": "ready"}

    @app.get(
        "/metrics", tags=["service"], summary="For Prometheus", dependencies=GUARDED, responses=REFUSED,
        response_class=PlainTextResponse,
    )  # fmt: skip
    async def prometheus() -> Response:
        await run_in_threadpool(engine.refresh)
        return Response(metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/v1", tags=["service"], summary="What is served", dependencies=GUARDED, responses=REFUSED)
    async def service() -> dict[str, Any]:
        return await run_in_threadpool(engine.summary)

    @app.get("/", include_in_schema=False)
    async def page() -> HTMLResponse:
        return _page("page.html")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return _page("docs.html")


def _page(name: str) -> HTMLResponse:
    """A page of this package, which loads nothing from elsewhere."""
    text = files("poem.serve").joinpath(name).read_text(encoding="utf-8")
    policy = (
        "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; "
        "frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )
    return HTMLResponse(text, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})


def _add_predict(app: FastAPI) -> None:
    """The route that predicts."""

    @app.post(
        "/v1/streams/{stream}/predict", tags=["streams"], summary="Predict, and learn from the images",
        dependencies=GUARDED, responses={**PREDICTION_RESPONSE, **REFUSED, **FULL, **TAKEN},
        openapi_extra={"requestBody": BODY, "parameters": [KEY_HEADER]},
    )  # fmt: skip
    async def predict(
        request: Request, stream: StreamId, deadline_ms: float | None = Query(None, gt=0, le=MAX_DEADLINE_MS)
    ) -> JSONResponse:
        """JPEG or PNG bytes, several as multipart, an npy array, or JSON; the first request makes the stream.

        A request that would be answered after `deadline_ms` gets the answer of the model as it came: `late` is true,
        and nothing is learnt from it.
        """
        began = time.monotonic()
        check_stream_id(stream)
        key = idempotency_key(request)
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower() or "application/octet-stream"
        if kind not in TYPES:
            raise Problem(415, "media-type", f"expected a body of type {', '.join(TYPES)}, got {kind[:80]!r}")
        with RequestBytes(app.state.held) as held:
            future = await _submitted(request, kind, held, stream, began, deadline_ms, key)
            reply = await asyncio.wrap_future(future)
        replayed = "replayed" in reply
        found = {name: value for name, value in reply.items() if name != "replayed"}
        return JSONResponse(json_safe(found), headers={"Idempotent-Replayed": "true"} if replayed else {})


async def _submitted(
    request: Request, kind: str, held: RequestBytes, stream: str, began: float, deadline_ms: float | None,
    key: str | None,
) -> Future[dict[str, Any]]:  # fmt: skip
    """Read a request's images and hand them to the engine; the body is let go of with this call."""
    engine: Engine = request.app.state.engine
    reader: PayloadReader = request.app.state.reader
    settings = engine.settings
    most = min(settings.max_body, settings.max_json) if kind == "application/json" else settings.max_body
    body = await whole_body(request, most, settings.body_s, held.add)
    if key is None:  # else it may be answered already, which needs no room
        engine.check_room(stream)
    parts = None
    if kind == "multipart/form-data":
        held.add(len(body))
        parts = await multipart_files(request, body, settings.batch_size)
    payload = "" if key is None else payload_hash(kind, body if parts is None else parts, request)

    def submit() -> Future[dict[str, Any]]:
        images = reader.read(kind, body, held.add) if parts is None else reader.from_files(parts, held.add)
        waited = time.monotonic() - began
        future = engine.submit(stream, images, deadline_ms=deadline_ms, key=key, payload=payload, waited_s=waited)
        held.keep(images.nbytes)
        return future

    return await run_in_threadpool(submit)


def _add_streams(app: FastAPI) -> None:
    """Routes of streams but for `predict`."""
    engine: Engine = app.state.engine
    settings = engine.settings

    @app.get(
        "/v1/streams", tags=["streams"], summary="Every stream's status", dependencies=GUARDED,
        responses={**STATUSES_RESPONSE, **REFUSED}, response_model=None,
    )  # fmt: skip
    async def streams() -> list[dict[str, Any]]:
        return await run_in_threadpool(engine.streams)

    @app.get(
        "/v1/streams/{stream}/status", tags=["streams"], summary="What is known of a stream", dependencies=GUARDED,
        responses={**STATUS_RESPONSE, **REFUSED, **UNKNOWN}, response_model=None,
    )  # fmt: skip
    async def status(stream: StreamId) -> dict[str, Any]:
        return await run_in_threadpool(engine.status, stream)

    @app.post(
        "/v1/streams/{stream}/reset", tags=["streams"], summary="Forget what was learnt", dependencies=GUARDED,
        responses={**STATUS_RESPONSE, **REFUSED, **UNKNOWN, 429: FULL[429]}, response_model=None,
    )  # fmt: skip
    async def reset(stream: StreamId) -> dict[str, Any]:
        found: dict[str, Any] = await asyncio.wrap_future(await run_in_threadpool(engine.command, stream, "reset"))
        return found

    @app.get(
        "/v1/streams/{stream}/state", tags=["streams"], summary="The state, as a safetensors file",
        dependencies=GUARDED, responses={
            **REFUSED, **UNKNOWN, 429: FULL[429], 200: {"content": {"application/octet-stream": BINARY}},
        }, response_class=Response,
    )  # fmt: skip
    async def export(stream: StreamId) -> Response:
        content = await asyncio.wrap_future(await run_in_threadpool(engine.command, stream, "export"))
        named = {"Content-Disposition": 'attachment; filename="state.safetensors"'}
        return Response(content, media_type="application/octet-stream", headers=named)

    @app.put(
        "/v1/streams/{stream}/state", tags=["streams"], summary="Go on from a state; makes the stream",
        dependencies=GUARDED, responses={**STATUS_RESPONSE, **REFUSED, **FULL, 408: TAKEN[408]}, response_model=None,
        openapi_extra={"requestBody": {"required": True, "content": {"application/octet-stream": BINARY}}},
    )  # fmt: skip
    async def load(request: Request, stream: StreamId) -> dict[str, Any]:
        check_stream_id(stream)
        with RequestBytes(app.state.held) as held:
            body = await whole_body(request, settings.max_state, settings.body_s, held.add)
            held.add(len(body))  # its tensors are copies

            def parsed() -> dict[str, Any]:
                try:
                    return read_state(body)
                except ValueError as error:
                    raise Problem(422, "state-refused", str(error)) from error

            state = await run_in_threadpool(parsed)
            found: dict[str, Any] = await asyncio.wrap_future(
                await run_in_threadpool(engine.command, stream, "import", state)
            )
        return found

    @app.delete(
        "/v1/streams/{stream}", tags=["streams"], summary="Forget a stream and its state", dependencies=GUARDED,
        status_code=204, responses={**REFUSED, **UNKNOWN, 429: FULL[429]}, response_class=Response,
    )  # fmt: skip
    async def delete(stream: StreamId) -> Response:
        await asyncio.wrap_future(await run_in_threadpool(engine.command, stream, "delete"))
        return Response(status_code=204)


class Timed:
    """Middleware: counts and times requests, by the pattern of their route."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, and note what came of it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        began, status = time.perf_counter(), 500

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self.app(scope, receive, noted)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in METHODS else "other"
            self.metrics.request(method, route, status, time.perf_counter() - began)


METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH")
