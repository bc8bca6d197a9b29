"""Answers by idempotency key: a request that is sent twice is learnt from once.

As the IETF draft of the header `Idempotency-Key` has it: a key whose request is done is answered as before, one that
is in flight is a conflict (409), and one that came with another payload is refused (422). Keys are kept per token and
stream, for a time, and are saved with the stream's snapshot: an answer that a kill has undone is not repeated.

Answers are kept as JSON text, which is several times smaller than their dictionaries, and a stream keeps a limited
number of bytes of them.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from poem.serve.problems import Problem


@dataclass
class Entry:
    """One key: the hash of its request, its answer as JSON text once there is one, and when it came."""

    payload: str
    reply: str
    at: float


def scoped_key(token: str, key: str) -> str:
    """Hash of a key together with the token it came with; the key itself is not kept."""
    return hashlib.sha256(f"{hashlib.sha256(token.encode()).hexdigest()} {key}".encode()).hexdigest()[:32]


class Ledger:
    """The keys of one stream.

    Args:
        most: Answers kept, the newest ones.
        expiry_s: Seconds for which one is kept.
        most_bytes: Characters of all answers kept; the newest one is kept always.
    """

    def __init__(self, most: int, expiry_s: float, most_bytes: int = 1 << 20) -> None:
        self._most, self._expiry, self._most_bytes = most, expiry_s, most_bytes
        self._entries: OrderedDict[str, Entry] = OrderedDict()

    def claim(self, key: str, payload: str, now: float) -> dict[str, Any] | None:
        """Reserve a key for a request, or return the answer that it got before.

        Args:
            key: As `scoped_key` made it.
            payload: Hash of the request.
            now: Seconds since the epoch.

        Raises:
            Problem: 409 while its request is in flight, 422 where it came with another payload.
        """
        self._expire(now)
        found = self._entries.get(key)
        if found is None:
            self._entries[key] = Entry(payload, "", now)
            return None
        if found.payload != payload:
            raise Problem(
                422, "key-reused",
                "expected the same request with the same Idempotency-Key, got another payload; take a new key for it",
            )  # fmt: skip
        if not found.reply:
            raise Problem(
                409,
                "key-in-flight",
                "a request with this Idempotency-Key is being answered; wait for it",
                retry_after=1,
            )
        return _reply(found)

    def complete(self, key: str, reply: dict[str, Any], now: float) -> None:
        """Keep the answer of a key that was claimed."""
        found = self._entries.get(key)
        if found is not None:
            found.reply, found.at = _text(reply), now
            self._entries.move_to_end(key)
        self._expire(now)

    def release(self, key: str) -> None:
        """Forget a key whose request was not answered: it may come again."""
        found = self._entries.get(key)
        if found is not None and not found.reply:
            del self._entries[key]

    def keep_claims(self, keys: Collection[str]) -> None:
        """Forget every answer, and every claim but those of these keys."""
        kept = [(key, each) for key, each in self._entries.items() if not each.reply and key in keys]
        self._entries = OrderedDict(kept)

    def to_plain(self) -> list[list[Any]]:
        """The answers so far, each as JSON text; what is in flight is not among them."""
        return [[key, each.payload, each.reply, each.at] for key, each in self._entries.items() if each.reply]

    def reply(self, key: str) -> dict[str, Any] | None:
        """The answer of a key; None where there is none yet."""
        found = self._entries.get(key)
        return None if found is None or not found.reply else _reply(found)

    def load_plain(self, values: Any) -> None:
        """Take over what `to_plain` returned, over claims of the same keys; what is malformed is left out.

        Answers may be JSON objects too, as earlier snapshots have them.
        """
        for value in values if isinstance(values, list) else []:
            if not (isinstance(value, list) and len(value) == 4):
                continue
            key, payload, reply, at = value
            text = reply if isinstance(reply, str) else _text(reply)
            if _is_object(text) and isinstance(at, int | float) and self.reply(str(key)) is None:
                self._entries[str(key)] = Entry(str(payload), text, float(at))

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def size(self) -> int:
        """Characters of the answers kept."""
        return sum(len(each.reply) for each in self._entries.values())

    def _expire(self, now: float) -> None:
        """Drop answers that are too old, and the oldest beyond the number and the bytes that are kept."""
        done = [key for key, each in self._entries.items() if each.reply]
        count, size = len(done), self.size
        for key in done:
            each = self._entries[key]
            if now - each.at > self._expiry or count > self._most or (size > self._most_bytes and count > 1):
                count, size = count - 1, size - len(each.reply)
                del self._entries[key]


def _text(reply: Any) -> str:
    return json.dumps(reply, separators=(",", ":"))


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


def _reply(entry: Entry) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(entry.reply)
    return found
