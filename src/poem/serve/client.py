"""`poem.Client`: calls a service from Python, with the standard library alone."""

from __future__ import annotations

import http.client
import io
import json
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

RETRIED = ("queue-full", "service-full", "too-many-connections", "draining", "key-in-flight", "moved")
"""Codes of problems that pass by themselves, with which nothing was done."""
UNKNOWN = ("no-replica", "replica-lost")
"""Those with which it is not known whether the request was carried out."""
LONGEST_WAIT_S = 10.0


class ServiceError(RuntimeError):
    """A request that the service did not answer.

    Args:
        status: Of HTTP.
        code: Of the problem, such as "queue-full"; "" where the answer was none of a service.
        detail: In words.
        retry_after: Seconds after which it may be answered, where the service says so.
    """

    def __init__(self, status: int, code: str, detail: str, retry_after: float | None = None) -> None:
        super().__init__(f"{status} {code}: {detail}" if code else f"{status}: {detail}")
        self.status, self.code, self.detail, self.retry_after = status, code, detail, retry_after


class _UnsentError(OSError):
    """There was no connection, so nothing was sent."""


@dataclass(frozen=True)
class Prediction:
    """The reply to one request."""

    stream: str
    request: str
    """The service's name for the request, by which the stream's audit knows it."""
    batch: int
    """The micro-batch of the stream that it was in."""
    late: bool
    """Whether the source answered, because the adapted answer would have come after the deadline."""
    answers: list[dict[str, Any]]
    """For each image: label, name, probability, entropy in nats, and `answered_by`: source, mean or adapted.

    Probability and entropy are None where the network has diverged.
    """
    ms: float
    """Milliseconds in the service."""
    replayed: bool = False
    """Whether the service had answered this key before."""

    @property
    def labels(self) -> list[int]:
        """The predicted classes."""
        return [each["label"] for each in self.answers]


class Client:
    """Calls a service that `poem serve` runs. May be used from several threads.

    Args:
        url: Such as `http://127.0.0.1:8000`.
        token: One of the service's tokens, where it has any.
        timeout_s: Seconds for one attempt.
        retries: Further attempts where a queue is full or the service starts, and where the connection fails under a
            predict or a question. A predict is sent again with the same idempotency key, so it is learnt from once.
            Commands (`reset`, `load_state`, `delete`) may have been carried out when their answer is lost, and are not
            sent again.

    Raises:
        ValueError: The address is none of HTTP.
    """

    def __init__(
        self, url: str = "http://127.0.0.1:8000", *, token: str | None = None, timeout_s: float = 60.0, retries: int = 4
    ) -> None:
        found = urlsplit(url)
        if found.scheme not in ("http", "https") or not found.hostname:
            raise ValueError(f"expected an address such as http://127.0.0.1:8000, got {url!r}")
        self._secure, self._host, self._port = found.scheme == "https", found.hostname, found.port
        self._prefix, self._timeout, self._retries = found.path.rstrip("/"), timeout_s, retries
        self._headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self._own = threading.local()

    def predict(
        self, stream: str, images: Any, *, deadline_ms: float | None = None, key: str | None = None
    ) -> Prediction:
        """Predict, and let the stream learn from the images.

        Args:
            stream: Its id; the first request makes it.
            images: A JPEG or PNG file as bytes or path, a list of these, or an array or tensor (B, C, H, W) or
                (C, H, W): uint8, or numbers from 0 to 1.
            deadline_ms: After which the source's answer comes instead.
            key: An idempotency key; by default a new one.

        Raises:
            ServiceError: The service refused, or could not be reached after all retries.
        """
        kind, body = _encoded(images)
        query = "" if deadline_ms is None else "?" + urlencode({"deadline_ms": deadline_ms})
        headers = {"Content-Type": kind, "Idempotency-Key": f'"{key or uuid.uuid4().hex}"'}
        given, found = self._call("POST", f"/v1/streams/{_named(stream)}/predict{query}", body, headers)
        return Prediction(**json.loads(found), replayed=given.get("idempotent-replayed") == "true")

    def status(self, stream: str) -> dict[str, Any]:
        """What is known of a stream."""
        return self._json("GET", f"/v1/streams/{_named(stream)}/status")

    def streams(self) -> list[dict[str, Any]]:
        """The status of every stream."""
        found: list[dict[str, Any]] = json.loads(self._call("GET", "/v1/streams")[1])
        return found

    def service(self) -> dict[str, Any]:
        """What is served."""
        return self._json("GET", "/v1")

    def reset(self, stream: str) -> dict[str, Any]:
        """Forget what a stream has learnt."""
        return self._json("POST", f"/v1/streams/{_named(stream)}/reset")

    def state(self, stream: str) -> bytes:
        """A stream's state, as a safetensors file."""
        return self._call("GET", f"/v1/streams/{_named(stream)}/state")[1]

    def load_state(self, stream: str, state: bytes) -> dict[str, Any]:
        """Let a stream go on from a state; makes the stream."""
        headers = {"Content-Type": "application/octet-stream"}
        found: dict[str, Any] = json.loads(self._call("PUT", f"/v1/streams/{_named(stream)}/state", state, headers)[1])
        return found

    def delete(self, stream: str) -> None:
        """Forget a stream and its state."""
        self._call("DELETE", f"/v1/streams/{_named(stream)}")

    def ready(self) -> bool:
        """Whether the service takes requests."""
        try:
            self._attempt("GET", "/readyz", None, {})
        except (ServiceError, OSError, http.client.HTTPException):
            return False
        return True

    def close(self) -> None:
        """Close this thread's connection."""
        connection = getattr(self._own, "connection", None)
        if connection is not None:
            connection.close()
            self._own.connection = None

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _json(self, method: str, path: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._call(method, path)[1])
        return found

    def _call(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[dict[str, str], bytes]:
        """The headers and body of an answer, after as many attempts as it takes.

        What may have been carried out is sent again only where that does no harm: a question, a request with a key, and
        the removal of a stream, which is done where a repeated one finds no such stream.
        """
        harmless = method == "GET" or "Idempotency-Key" in (headers or {})
        maybe_done = False
        for attempt in range(self._retries + 1):
            try:
                return self._attempt(method, path, body, headers or {}, harmless)
            except ServiceError as error:
                if maybe_done and method == "DELETE" and error.code == "no-such-stream":
                    return {}, b""
                lost = error.code in UNKNOWN
                again = error.code in RETRIED or (lost and (harmless or method == "DELETE"))
                if not again or attempt == self._retries:
                    raise
                maybe_done, wait = maybe_done or lost, error.retry_after
            except (OSError, http.client.HTTPException) as error:
                self.close()
                unsent = isinstance(error, _UnsentError)
                if not (harmless or unsent) or attempt == self._retries:
                    where = f"{self._host}:{self._port or 80}"
                    done = "" if harmless or unsent else "; it may have been carried out"
                    raise ServiceError(
                        0, "unreachable", f"no answer from {where}: {error or type(error)}{done}"
                    ) from error
                wait = None
            time.sleep(min(0.1 * 2**attempt if wait is None else wait, LONGEST_WAIT_S))
        raise AssertionError("the last attempt returns or raises")

    def _attempt(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], harmless: bool = True
    ) -> tuple[dict[str, str], bytes]:
        """One request over this thread's connection; one that the service has closed meanwhile is opened again.

        What must not be sent twice gets a new connection, which the service has not closed.
        """
        connection = getattr(self._own, "connection", None)
        if connection is not None and not harmless:
            self.close()
        elif connection is not None:
            try:
                return self._exchange(connection, method, path, body, headers)
            except (ConnectionError, http.client.RemoteDisconnected, http.client.CannotSendRequest):
                self.close()
        kind = http.client.HTTPSConnection if self._secure else http.client.HTTPConnection
        self._own.connection = kind(self._host, self._port, timeout=self._timeout)
        try:
            self._own.connection.connect()
        except OSError as error:
            raise _UnsentError(str(error) or type(error).__name__) from error
        return self._exchange(self._own.connection, method, path, body, headers)

    def _exchange(
        self, connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None,
        headers: Mapping[str, str],
    ) -> tuple[dict[str, str], bytes]:  # fmt: skip
        """A request and its answer."""
        connection.request(method, self._prefix + path, body, {**self._headers, **headers})
        answer = connection.getresponse()
        content: bytes = answer.read()
        given = {name.lower(): value for name, value in answer.getheaders()}
        if answer.status >= 400:
            raise _refusal(answer.status, content, given.get("retry-after", ""))
        return given, content


def _refusal(status: int, content: bytes, retry_after: str) -> ServiceError:
    """The error of a problem's JSON, or of whatever came instead."""
    wait = float(retry_after) if retry_after.isdecimal() else None
    try:
        found = json.loads(content)
        return ServiceError(status, str(found["code"]), str(found["detail"]), wait)
    except (ValueError, KeyError, TypeError):
        return ServiceError(status, "", content[:200].decode("utf-8", "replace"), wait)


def _named(stream: str) -> str:
    return quote(stream, safe="")


def _encoded(images: Any) -> tuple[str, bytes]:
    """The type and bytes of a body."""
    if isinstance(images, bytes | bytearray | str | Path):
        return "application/octet-stream", _file(images)
    if isinstance(images, Sequence):
        if not images or not all(isinstance(each, bytes | bytearray | str | Path) for each in images):
            raise TypeError("expected image files as bytes or paths in a list, got other things; stack arrays first")
        return _multipart([_file(each) for each in images])
    import numpy as np

    array = np.asarray(images.detach().cpu() if hasattr(images, "detach") else images)
    if array.ndim == 3:
        array = array[None]
    content = io.BytesIO()
    np.save(content, np.ascontiguousarray(array), allow_pickle=False)
    return "application/x-npy", content.getvalue()


def _file(image: bytes | bytearray | str | Path) -> bytes:
    return bytes(image) if isinstance(image, bytes | bytearray) else Path(image).read_bytes()


def _multipart(files: Sequence[bytes]) -> tuple[str, bytes]:
    """Several files as one body."""
    boundary = uuid.uuid4().hex
    body = bytearray()
    for at, data in enumerate(files):
        body += f'--{boundary}\r\nContent-Disposition: form-data; name="images"; filename="{at}"\r\n\r\n'.encode()
        body += data + b"\r\n"
    return f"multipart/form-data; boundary={boundary}", bytes(body + f"--{boundary}--\r\n".encode())
