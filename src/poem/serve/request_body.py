"""The body of a request and its idempotency key: limits on size and time, files of a multipart body, hashes."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import AsyncGenerator, Callable

from fastapi import Request
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect

from poem.serve.ledger import scoped_key
from poem.serve.problems import Problem

KEY = re.compile(r'"[\x20-\x7e]{1,255}"|[\x21-\x7e]{1,255}')
"""An idempotency key: a quoted string, as the draft has it, or the same without quotes."""


def idempotency_key(request: Request) -> str | None:
    """The request's idempotency key together with its token; None without one."""
    text = request.headers.get("idempotency-key")
    if text is None:
        return None
    key = text[1:-1] if text.startswith('"') and text.endswith('"') else text
    if KEY.fullmatch(text) is None or not key:
        raise Problem(400, "key", "expected an Idempotency-Key of 1 to 255 printable characters of ASCII")
    return scoped_key(request.state.token, key)


def payload_hash(kind: str, content: bytes | list[bytes], request: Request) -> str:
    """Hash of what a request asks for; of a multipart body its files, since its boundary is another each time."""
    digest = hashlib.sha256(f"{kind} {request.query_params}".encode())
    for piece in content if isinstance(content, list) else [content]:
        digest.update(f" {len(piece)} ".encode())
        digest.update(piece)
    return digest.hexdigest()


async def whole_body(request: Request, most: int, seconds: float, hold: Callable[[int], None]) -> bytes:
    """The request's body, of so many bytes at most and in that time; `hold` is told of each piece before it is kept."""
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise Problem(415, "content-encoding", "expected a body without Content-Encoding")
    stated = request.headers.get("content-length", "0")
    if stated.isdecimal() and int(stated) > most:
        raise Problem(413, "too-large", f"expected at most {most} bytes, got {stated}")
    try:
        return await asyncio.wait_for(_gathered(request, most, hold), seconds)
    except asyncio.TimeoutError as error:
        raise Problem(408, "body-timeout", f"expected the whole body within {seconds:g} seconds") from error
    except ClientDisconnect as error:
        raise Problem(400, "disconnected", "expected a whole body, got the end of the connection") from error


async def _gathered(request: Request, most: int, hold: Callable[[int], None]) -> bytes:
    """The body, chunk by chunk."""
    content = bytearray()
    async for chunk in request.stream():
        if len(content) + len(chunk) > most:
            raise Problem(413, "too-large", f"expected at most {most} bytes, got more")
        hold(len(chunk))
        content += chunk
    return bytes(content)


async def multipart_files(request: Request, body: bytes, most: int) -> list[bytes]:
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
