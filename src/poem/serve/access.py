"""Who may call: bearer tokens compared in constant time, and no page of another site."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from poem.serve.problems import Problem

LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Access:
    """Checks the headers of a request.

    Args:
        tokens: Any of which a request must bring as `Authorization: Bearer TOKEN`; none for an open service.
        hosts: Names in the header `Host` that are meant for this service; none for any. A service on the loopback
            address that takes any name can be reached from a page in a browser, whose host's address then changes.
    """

    def __init__(self, tokens: Sequence[str] = (), hosts: Sequence[str] = ()) -> None:
        self._tokens = [_digest(each) for each in tokens]
        self._hosts = frozenset(hosts)

    @property
    def is_open(self) -> bool:
        """Whether anybody may call who reaches the address."""
        return not self._tokens

    def check(self, headers: Mapping[str, str]) -> str:
        """The token that a request came with, "" in an open service.

        Raises:
            Problem: 401 without a token that is known, 403 from a page of another site or for another host.
        """
        host = headers.get("host", "")
        if self._hosts and _name(host) not in self._hosts:
            raise Problem(403, "host", f"expected a request to {' or '.join(sorted(self._hosts))}, got {host[:80]!r}")
        origin = headers.get("origin")
        if origin is not None and _place(origin) != host:
            raise Problem(403, "cross-site", f"expected no request of another site's page, got one of {origin[:80]!r}")
        if self.is_open:
            return ""
        kind, _, token = headers.get("authorization", "").partition(" ")
        given, known = _digest(token.strip()), False
        for each in self._tokens:  # all of them, so that the time says nothing
            known |= hmac.compare_digest(given, each)
        if kind.lower() != "bearer" or not known:
            raise Problem(401, "token", "expected the header Authorization: Bearer TOKEN with a token of this service")
        return token.strip()


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


def _place(origin: str) -> str:
    """Host and port of an Origin header; "" where it is no address, as "null" is none."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""


def _name(host: str) -> str:
    """The name in a Host header, without its port."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
