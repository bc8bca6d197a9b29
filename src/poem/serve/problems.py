"""What can go wrong with a request: each error has an HTTP status, a code for programs and words for people."""

from __future__ import annotations

from typing import Any

TITLES = {
    400: "Bad Request", 401: "Unauthorized", 403: "Forbidden", 404: "Not Found", 405: "Method Not Allowed",
    408: "Request Timeout", 409: "Conflict", 413: "Content Too Large", 415: "Unsupported Media Type",
    422: "Unprocessable Content", 429: "Too Many Requests", 500: "Internal Server Error", 503: "Service Unavailable",
}  # fmt: skip


class Problem(Exception):
    """A request that is not answered: `application/problem+json` (RFC 9457) with a `code` that programs may test.

    Args:
        status: Of HTTP.
        code: Stable and short, such as "queue-full".
        detail: What was expected, what came, what to do.
        retry_after: Seconds after which the same request may succeed.
    """

    def __init__(self, status: int, code: str, detail: str, *, retry_after: int | None = None) -> None:
        super().__init__(detail)
        self.status, self.code, self.detail, self.retry_after = status, code, detail, retry_after

    def body(self) -> dict[str, Any]:
        """The members of the problem's JSON object."""
        title = TITLES.get(self.status, "Error")
        return {
            "type": "about:blank", "title": title, "status": self.status, "detail": self.detail, "code": self.code,
        }  # fmt: skip

    def headers(self) -> dict[str, str]:
        """Headers of the answer."""
        return {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}


def internal(*, learnt: bool = False) -> Problem:
    """An error of the service itself; `learnt` where the images may have been learnt from before it."""
    said = "it may have been learnt from" if learnt else "nothing was learnt"
    return Problem(500, "internal", f"the request failed inside the service, whose log says why; {said}")
