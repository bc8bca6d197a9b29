"""Every error of the front as `application/problem+json`."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.routing import Match

from poem.serve.problems import Problem
from poem.serve.settings import ID_RULE

STREAMS = "/v1/streams/"


def add_errors(app: FastAPI) -> None:
    """Every error as `application/problem+json`."""

    @app.exception_handler(Problem)
    async def problem(_: Request, error: Problem) -> JSONResponse:
        return answered(error)

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = " ".join(str(each) for each in first.get("loc", ()))
        return answered(Problem(422, "parameters", f"{where}: {first.get('msg', 'not as expected')}"))

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        allowed = _allowed(app, request)
        code, detail = {
            404: ("no-such-route", _no_route(request.url.path)),
            405: ("method", f"this route takes {', '.join(allowed)}, got {request.method[:16]}; see /docs"),
        }.get(error.status_code, ("http", str(error.detail)))
        answer = answered(Problem(error.status_code, code, detail))
        for name, value in (error.headers or {}).items():
            answer.headers[name] = value
        if error.status_code == 405:
            answer.headers["Allow"] = ", ".join(allowed)
        return answer

    @app.exception_handler(Exception)
    async def unforeseen(_: Request, __: Exception) -> JSONResponse:
        return answered(Problem(500, "internal", "the request failed inside the service, whose log says why"))


def _no_route(path: str) -> str:
    """What to do about a path that is none: which routes a stream has, or what an id is where it seems to be that."""
    said = f"there is no route {path[:80]!r}"
    if not path.startswith(STREAMS):
        return f"{said}; /docs lists them"
    parts = path[len(STREAMS) :].split("/")
    if len(parts) > 2 or not all(parts):
        return f"{said}; expected {ID_RULE}, so none with a slash or empty; /docs lists the routes"
    return f"{said}; expected {STREAMS}ID with /predict, /status, /reset or /state, or DELETE of it alone; see /docs"


def _allowed(app: FastAPI, request: Request) -> list[str]:
    """What all routes of a request's path take together; Starlette names what the first one does."""
    found = {
        method
        for route in app.routes
        if route.matches(request.scope)[0] is not Match.NONE
        for method in getattr(route, "methods", None) or ()
    }
    return sorted(found)


def answered(problem: Problem) -> JSONResponse:
    """The answer that says what the problem is."""
    headers = problem.headers()
    if problem.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    if problem.status in (408, 413):  # the rest of the body is not waited for
        headers["Connection"] = "close"
    return JSONResponse(problem.body(), problem.status, headers, media_type="application/problem+json")
