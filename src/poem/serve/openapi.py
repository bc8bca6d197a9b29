"""What /docs and /openapi.json say of bodies, headers and refusals."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import FastAPI, Path

from poem.serve.request_body import KEY
from poem.serve.schemas import SCHEMAS
from poem.serve.settings import STREAM_ID

StreamId = Annotated[str, Path(json_schema_extra={"pattern": f"^{STREAM_ID.pattern}$"})]
"""A stream's id as the schema has it; `check_stream_id` refuses others, in words."""
PROBLEM = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
BINARY = {"schema": {"type": "string", "format": "binary"}}
BODY = {
    "required": True,
    "content": {
        "image/jpeg": BINARY, "image/png": BINARY, "application/octet-stream": BINARY, "application/x-npy": BINARY,
        "multipart/form-data": {
            "schema": {
                "type": "object", "required": ["images"], "additionalProperties": False,
                "properties": {"images": {"type": "array", "minItems": 1, "items": BINARY["schema"]}},
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
KEY_HEADER = {
    "name": "Idempotency-Key", "in": "header", "required": False,
    "schema": {"type": "string", "pattern": f"^({KEY.pattern})$"},
    "description": "A request sent again with the same key and body is answered as before, and learnt from once.",
}  # fmt: skip
REFUSED: dict[int | str, dict[str, Any]] = {
    401: {"description": "No token of this service.", "content": PROBLEM},
    403: {"description": "A page of another site, or another host.", "content": PROBLEM},
    422: {"description": "Something in the request is not as expected.", "content": PROBLEM},
    503: {"description": "The service is ending, or has too many connections.", "content": PROBLEM},
}
UNKNOWN: dict[int | str, dict[str, Any]] = {404: {"description": "No such stream.", "content": PROBLEM}}
FULL: dict[int | str, dict[str, Any]] = {
    413: {"description": "Too many bytes, pixels or images.", "content": PROBLEM},
    429: {"description": "A full queue, too much memory held by requests, or too many streams.", "content": PROBLEM},
}
TAKEN: dict[int | str, dict[str, Any]] = {
    400: {"description": "A malformed multipart body or key.", "content": PROBLEM},
    408: {"description": "The body did not come in time.", "content": PROBLEM},
    409: {"description": "A request with this key is being answered.", "content": PROBLEM},
    415: {"description": "A body of another type.", "content": PROBLEM},
}


def describe(app: FastAPI) -> None:
    """Let the schema say what answers and problems are, and ask for a token only where the service has one."""
    schema = app.openapi

    def described() -> dict[str, Any]:
        found = schema()
        names = {"type": "string", "title": "string", "status": "integer", "detail": "string", "code": "string"}
        properties = {name: {"type": kind} for name, kind in names.items()}
        components = found.setdefault("components", {})
        schemas = components.setdefault("schemas", {})
        schemas |= SCHEMAS
        schemas["Problem"] = {"type": "object", "required": list(names), "properties": properties}
        if app.state.access.is_open:
            components.pop("securitySchemes", None)
            for operation in (each for path in found["paths"].values() for each in path.values()):
                operation.pop("security", None)
        return found

    app.openapi = described  # type: ignore[method-assign]
