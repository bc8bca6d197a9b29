"""HTTP before the engine: routes, bodies and errors. Needs the extra `serve`."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import Future
from contextlib import asynccontextmanager
from importlib.resources import files
from typing import Annotated, Any, Protocol

from fastapi import Depends, FastAPI, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
from fastapi.security import HTTPBearer
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from torch import Tensor

from poem._util.state_file import read_state
from poem._version import __version__
from poem.serve.access import Access
from poem.serve.ledger import scoped_key
from poem.serve.metrics import Metrics
from poem.serve.payload import TYPES, PayloadReader
from poem.serve.problems import Problem
from poem.serve.settings import STREAM_ID, ServeSettings, check_stream_id
from poem.streams.loading.prepare import Prepare

MAX_DEADLINE_MS = 600_000
KEY = re.compile(r'"[\x20-\x7e]{1,255}"|[\x21-\x7e]{1,255}')
"""An idempotency key: a quoted string, as the draft has it, or the same without quotes."""
PROBLEM = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
_BINARY = {"schema": {"type": "string", "format": "binary"}}
_BODY = {
    "required": True,
    "content": {
        "image/jpeg": _BINARY, "image/png": _BINARY, "application/octet-stream": _BINARY, "application/x-npy": _BINARY,
        "multipart/form-data": {
            "schema": {
                "type": "object", "required": ["images"], "additionalProperties": False,
                "properties": {"images": {"type": "array", "minItems": 1, "items": _BINARY["schema"]}},
            }
        },
        "application/json": {
            "schema": {
                "type": "object", "required": ["images"], "additionalProperties": False,
                "properties": {"images": {"type": "array", "minItems": 1, "description":
                               "Image files in base64, or numbers (B, C, H, W) from 0 to 1.", "items": {}}},
            }
        },
    },
}  # fmt: skip
_KEY_HEADER = {
    "name": "Idempotency-Key", "in": "header", "required": False,
    "schema": {"type": "string", "pattern": f"^({KEY.pattern})$"},
    "description": "A request sent again with the same key and body is answered as before, and learnt from once.",
}  # fmt: skip

StreamId = Annotated[str, Path(json_schema_extra={"pattern": f"^{STREAM_ID.pattern}$"})]
"""A stream's id as the page of routes describes it; `check_stream_id` refuses others, in words."""


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
        payload: str = "",
    ) -> Future[dict[str, Any]]:  # fmt: skip
        """Put images at the end of a stream's queue."""

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
    app.add_middleware(Timed, metrics=metrics)
    _add_errors(app)
    _add_service(app)
    _add_streams(app)
    return app


def _checked(request: Request) -> None:
    """Refuse a request that may not be made; what follows finds its token."""
    request.state.token = request.app.state.access.check(request.headers)


GUARDED = [Depends(_checked), Depends(HTTPBearer(auto_error=False))]
REFUSED: dict[int | str, dict[str, Any]] = {
    401: {"description": "No token of this service.", "content": PROBLEM},
    403: {"description": "A page of another site, or another host.", "content": PROBLEM},
    422: {"description": "Something in the request is not as expected.", "content": PROBLEM},
    503: {"description": "The service is ending.", "content": PROBLEM},
}
UNKNOWN: dict[int | str, dict[str, Any]] = {404: {"description": "No such stream.", "content": PROBLEM}}
FULL: dict[int | str, dict[str, Any]] = {
    413: {"description": "Too many bytes, pixels or images.", "content": PROBLEM},
    429: {"description": "The stream's queue is full, or there are too many streams.", "content": PROBLEM},
}
TAKEN: dict[int | str, dict[str, Any]] = {
    400: {"description": "A malformed multipart body or key.", "content": PROBLEM},
    408: {"description": "The body did not come in time.", "content": PROBLEM},
    409: {"description": "A request with this key is being answered.", "content": PROBLEM},
    415: {"description": "A body of another type.", "content": PROBLEM},
}


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
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
    return HTMLResponse(text, headers={"Content-Security-Policy": policy, "X-Content-Type-Options": "nosniff"})


def _add_streams(app: FastAPI) -> None:
    """Routes of streams."""
    engine: Engine = app.state.engine
    reader: PayloadReader = app.state.reader
    settings = engine.settings

    @app.get("/v1/streams", tags=["streams"], summary="Every stream's status", dependencies=GUARDED, responses=REFUSED)
    async def streams() -> list[dict[str, Any]]:
        return await run_in_threadpool(engine.streams)

    @app.post(
        "/v1/streams/{stream}/predict", tags=["streams"], summary="Predict, and learn from the images",
        dependencies=GUARDED, responses={**REFUSED, **FULL, **TAKEN},
        openapi_extra={"requestBody": _BODY, "parameters": [_KEY_HEADER]},
    )  # fmt: skip
    async def predict(
        request: Request, stream: StreamId, deadline_ms: float | None = Query(None, gt=0, le=MAX_DEADLINE_MS)
    ) -> JSONResponse:
        """JPEG or PNG bytes, several as multipart, an npy array, or JSON; the first request makes the stream.

        A request that would be answered after `deadline_ms` gets the answer of the model as it came: `late` is true,
        and nothing is learnt from it.
        """
        check_stream_id(stream)
        key = _key(request)
        kind = request.headers.get("content-type", "").split(";")[0].strip().lower() or "application/octet-stream"
        if kind not in TYPES:
            raise Problem(415, "media-type", f"expected a body of type {', '.join(TYPES)}, got {kind[:80]!r}")
        body = await _body(request, settings.max_body, settings.body_s)
        engine.check_room(stream)
        parts = await _parts(request, body, settings.batch_size) if kind == "multipart/form-data" else None
        payload = "" if key is None else _payload_hash(kind, body if parts is None else parts, request)

        def submit() -> Any:
            images = reader.read(kind, body) if parts is None else reader.from_files(parts)
            return engine.submit(stream, images, deadline_ms=deadline_ms, key=key, payload=payload)

        future = await run_in_threadpool(submit)
        reply = await asyncio.wrap_future(future)
        replayed = "replayed" in reply
        found = {name: value for name, value in reply.items() if name != "replayed"}
        return JSONResponse(found, headers={"Idempotent-Replayed": "true"} if replayed else {})

    @app.get(
        "/v1/streams/{stream}/status", tags=["streams"], summary="What is known of a stream", dependencies=GUARDED,
        responses={**REFUSED, **UNKNOWN},
    )  # fmt: skip
    async def status(stream: StreamId) -> dict[str, Any]:
        return await run_in_threadpool(engine.status, stream)

    @app.post(
        "/v1/streams/{stream}/reset", tags=["streams"], summary="Forget what was learnt", dependencies=GUARDED,
        responses={**REFUSED, **UNKNOWN, 429: FULL[429]},
    )  # fmt: skip
    async def reset(stream: StreamId) -> dict[str, Any]:
        found: dict[str, Any] = await asyncio.wrap_future(await run_in_threadpool(engine.command, stream, "reset"))
        return found

    @app.get(
        "/v1/streams/{stream}/state", tags=["streams"], summary="The state, as a safetensors file",
        dependencies=GUARDED, responses={
            **REFUSED, **UNKNOWN, 429: FULL[429], 200: {"content": {"application/octet-stream": _BINARY}},
        }, response_class=Response,
    )  # fmt: skip
    async def export(stream: StreamId) -> Response:
        content = await asyncio.wrap_future(await run_in_threadpool(engine.command, stream, "export"))
        named = {"Content-Disposition": 'attachment; filename="state.safetensors"'}
        return Response(content, media_type="application/octet-stream", headers=named)

    @app.put(
        "/v1/streams/{stream}/state", tags=["streams"], summary="Go on from a state; makes the stream",
        dependencies=GUARDED, responses={**REFUSED, **FULL, 408: TAKEN[408]},
        openapi_extra={"requestBody": {"required": True, "content": {"application/octet-stream": _BINARY}}},
    )  # fmt: skip
    async def load(request: Request, stream: StreamId) -> dict[str, Any]:
        check_stream_id(stream)
        body = await _body(request, settings.max_state, settings.body_s)

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


def _key(request: Request) -> str | None:
    """The request's idempotency key together with its token; None without one."""
    text = request.headers.get("idempotency-key")
    if text is None:
        return None
    if KEY.fullmatch(text) is None:
        raise Problem(400, "key", "expected an Idempotency-Key of 1 to 255 printable characters of ASCII")
    return scoped_key(request.state.token, text[1:-1] if text.startswith('"') and text.endswith('"') else text)


def _payload_hash(kind: str, content: bytes | list[bytes], request: Request) -> str:
    """Hash of what a request asks for; of a multipart body its files, since its boundary is another each time."""
    digest = hashlib.sha256(f"{kind} {request.query_params}".encode())
    for piece in content if isinstance(content, list) else [content]:
        digest.update(f" {len(piece)} ".encode())
        digest.update(piece)
    return digest.hexdigest()


async def _body(request: Request, most: int, seconds: float) -> bytes:
    """The request's body, of so many bytes at most and in that time."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Problem(415, "content-encoding", "expected a body without Content-Encoding")
    stated = request.headers.get("content-length", "0")
    if stated.isdecimal() and int(stated) > most:
        raise Problem(413, "too-large", f"expected at most {most} bytes, got {stated}")
    try:
        return await asyncio.wait_for(_gathered(request, most), seconds)
    except asyncio.TimeoutError as error:
        raise Problem(408, "body-timeout", f"expected the whole body within {seconds:g} seconds") from error
    except ClientDisconnect as error:
        raise Problem(400, "disconnected", "expected a whole body, got the end of the connection") from error


async def _gathered(request: Request, most: int) -> bytes:
    """The body, chunk by chunk."""
    content = bytearray()
    async for chunk in request.stream():
        if len(content) + len(chunk) > most:
            raise Problem(413, "too-large", f"expected at most {most} bytes, got more")
        content += chunk
    return bytes(content)


async def _parts(request: Request, body: bytes, most: int) -> list[bytes]:
    """The files of a multipart body, in their order."""

    async def once() -> AsyncGenerator[bytes, None]:
        yield body

    parser = MultiPartParser(request.headers, once(), max_files=most, max_fields=0, max_part_size=1 << 16)
    try:
        form = await parser.parse()
    except MultiPartException as error:
        raise Problem(400, "multipart", f"expected up to {most} image files as multipart: {error.message}") from error
    except (KeyError, ValueError, AssertionError) as error:
        raise Problem(400, "multipart", "expected a multipart body with a boundary and image files") from error
    try:
        return [await each.read() for _, each in form.multi_items() if not isinstance(each, str)]
    finally:
        await form.close()


def _add_errors(app: FastAPI) -> None:
    """Every error as `application/problem+json`."""

    @app.exception_handler(Problem)
    async def problem(_: Request, error: Problem) -> JSONResponse:
        return _answer(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = " ".join(str(each) for each in first.get("loc", ()))
        return _answer(Problem(422, "parameters", f"{where}: {first.get('msg', 'not as expected')}"))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        code, detail = {
            404: ("no-such-route", f"there is no route {request.url.path[:80]!r}; /docs lists them"),
            405: ("method", f"this route takes no {request.method[:16]}; /docs lists what it takes"),
        }.get(error.status_code, ("http", str(error.detail)))
        answer = _answer(Problem(error.status_code, code, detail))
        for name, value in (error.headers or {}).items():
            answer.headers[name] = value
        if error.status_code == 405:
            answer.headers["Allow"] = ", ".join(_allowed(app, request))
        return answer

    @app.exception_handler(Exception)
    async def unforeseen(_: Request, __: Exception) -> JSONResponse:
        return _answer(Problem(500, "internal", "the request failed inside the service, whose log says why"))

    schema = app.openapi

    def with_problem() -> dict[str, Any]:
        found = schema()
        names = {"type": "string", "title": "string", "status": "integer", "detail": "string", "code": "string"}
        properties = {name: {"type": kind} for name, kind in names.items()}
        found.setdefault("components", {}).setdefault("schemas", {})["Problem"] = {
            "type": "object", "required": list(names), "properties": properties,
        }  # fmt: skip
        if app.state.access.is_open:
            found["components"].pop("securitySchemes", None)
            for operation in (each for path in found["paths"].values() for each in path.values()):
                operation.pop("security", None)
        return found

    app.openapi = with_problem  # type: ignore[method-assign]


def _allowed(app: FastAPI, request: Request) -> list[str]:
    """What all routes of a request's path take together; Starlette names what the first one does."""
    found = {
        method
        for route in app.routes
        if route.matches(request.scope)[0] is not Match.NONE
        for method in getattr(route, "methods", None) or ()
    }
    return sorted(found)


def _answer(problem: Problem) -> JSONResponse:
    headers = problem.headers()
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if problem.status in (408, 413):  # the rest of the body is not waited for
        headers["Connection"] = "close"
    return JSONResponse(problem.body(), problem.status, headers, media_type="application/problem+json")


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
