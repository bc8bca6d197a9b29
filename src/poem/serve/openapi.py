"""What /docs and /openapi.json say of bodies, headers and refusals."""

from __future__ import annotations

from typing import Any

PROBLEM = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
BINARY = {"schema": {"type": "string", "format": "binary"}}
BODY = {
    "required": True,
    "content": {
        "image/jpeg": BINARY, "image/png": BINARY, "application/octet-stream": BINARY, "application/x-npy": BINARY,
        "multipart/form-data": {
            "schema": {"type": "object", "properties": {"images": {"type": "array", "items": BINARY["schema"]}}}
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
KEY_HEADER = {
    "name": "Idempotency-Key", "in": "header", "required": False, "schema": {"type": "string", "maxLength": 257},
    "description": "A request sent again with the same key and body is answered as before, and learnt from once.",
}  # fmt: skip
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
