"""Three hundred malformed requests, generated from the service's own OpenAPI page: each is a 4xx that says why.

The streams' states are compared bit by bit after each of them.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import image_file, npy, served

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from fastapi.testclient import TestClient

from poem.serve.access import LOOPBACK, Access
from poem.serve.engine import StreamEngine
from poem.serve.front import build_app
from poem.serve.metrics import Metrics
from poem.serve.payload import PayloadReader
from poem.serve.problems import Problem
from poem.serve.settings import STREAM_ID, ServeSettings

METHODS = ("get", "post", "put", "delete", "patch")
Sent = tuple[str, str, dict[str, str], bytes]


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    metrics = Metrics()
    chosen = ServeSettings(batch_size=8, max_body=1 << 20, max_state=1 << 20)
    engine = StreamEngine(served(), chosen, tmp_path_factory.mktemp("states"), metrics)
    app = build_app(engine, metrics, Access((), LOOPBACK))
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as made:
        yield made


def images(draw: Any) -> bytes:
    """An image file that is cut, or of too few pixels."""
    kind = draw(st.sampled_from(["JPEG", "PNG"]))
    if draw(st.booleans()):
        whole = image_file(kind, seed=draw(st.integers(0, 9)))
        return whole[: draw(st.integers(0, len(whole) * 6 // 10))]
    small, other = draw(st.integers(1, 7)), draw(st.integers(1, 60))
    return image_file(kind, *((small, other) if draw(st.booleans()) else (other, small)))


def arrays(draw: Any) -> bytes:
    """An npy file that is no batch of images of 32 x 32 pixels from 0 to 1."""
    fault = draw(st.sampled_from(["dtype", "shape", "values", "cut", "bytes"]))
    good = np.random.default_rng(draw(st.integers(0, 99))).random((2, 3, 32, 32)).astype(np.float32)
    if fault == "dtype":
        return npy(good.astype(draw(st.sampled_from(["i1", "i2", "i4", "i8", "u2", "u4", ">f4", "c8", "?", "S3"]))))
    if fault == "shape":
        shape = draw(st.lists(st.integers(0, 40), min_size=0, max_size=6).filter(lambda found: found[2:] != [32, 32]))
        return npy(np.zeros(shape, np.uint8))
    if fault == "values":
        at = tuple(draw(st.integers(0, size - 1)) for size in good.shape)
        good[at] = draw(st.sampled_from([np.nan, np.inf, -np.inf, -1e-3, 1.001, 255.0, 1e30, -3e38]))
        return npy(good)
    whole = npy(good)
    if fault == "cut":
        return bytes(whole[: int(draw(st.integers(1, len(whole) - 1)))])
    return whole[:6] + bytes(draw(st.binary(max_size=200)))


def values(draw: Any) -> bytes:
    """JSON that holds no images, or bytes that are no JSON."""
    plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    nested = st.recursive(
        plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner)
    )
    found = draw(nested | st.fixed_dictionaries({"images": nested}))
    text = json.dumps(found).encode()
    return text[: draw(st.integers(0, len(text) - 1))] if draw(st.booleans()) and len(text) > 1 else text + b" "


BODIES: dict[str, Callable[[Any], bytes]] = {
    "image/jpeg": images, "image/png": images, "application/x-npy": arrays, "application/json": values,
    "application/octet-stream": lambda draw: draw(st.binary(max_size=300)),
    "multipart/form-data": lambda draw: draw(st.binary(max_size=300)),
}  # fmt: skip


@st.composite
def malformed(draw: Any, schema: dict[str, Any], state: bytes) -> Sent:
    """One request with one fault, of some operation of the page."""
    path = draw(st.sampled_from(sorted(schema["paths"])))
    operations = schema["paths"][path]
    known = path.replace("{stream}", "door")
    method = draw(st.sampled_from(sorted(operations)))
    faults = ["method", *(["id"] if "{stream}" in path else [])]
    bodies = operations[method].get("requestBody", {}).get("content", {})
    parameters = {each["name"] for each in operations[method].get("parameters", [])}
    faults += [*(["body"] * 6 if bodies else []), *(["type"] if len(bodies) > 1 else [])]
    faults += [name for name in ("deadline_ms", "Idempotency-Key") if name in parameters]
    fault = draw(st.sampled_from(faults))
    good = {"Content-Type": "image/jpeg"}
    if fault == "method":
        other = draw(st.sampled_from([each for each in METHODS if each not in operations]))
        return other, known, good, b""
    if fault == "id":
        name = draw(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=80))
        if STREAM_ID.fullmatch(name) or name in (".", ".."):
            name = "-" + name
        return method, path.replace("{stream}", quote(name, safe="")), good, image_file("JPEG")
    if fault == "deadline_ms":
        bad = draw(
            st.sampled_from(["", "nan", "inf", "-inf", "x", "1e9", "0x10", "1,5"]) | st.floats(max_value=0).map(str)
        )
        return method, f"{known}?deadline_ms={quote(bad)}", good, image_file("JPEG")
    if fault == "Idempotency-Key":
        bad = draw(st.sampled_from(["", " ", "a b", "k\x7f"]) | st.integers(256, 2000).map(lambda count: "k" * count))
        return method, known, {**good, "Idempotency-Key": bad}, image_file("JPEG")
    if fault == "type":
        word = st.text("abcdefghijklmnopqrstuvwxyz.+-", min_size=1, max_size=12)
        kind = f"{draw(word)}/{draw(word)}"
        return method, known, {"Content-Type": kind}, image_file("JPEG")
    kind = draw(st.sampled_from(sorted(bodies)))
    if method == "put":
        body = draw(st.binary(max_size=300) | st.integers(0, len(state) - 1).map(lambda size: state[:size]))
    else:
        body = BODIES[kind](draw)
    return method, known, {"Content-Type": kind}, body


@pytest.mark.slow
def test_three_hundred_malformed_requests_change_nothing(client: TestClient, tmp_path: Path) -> None:
    array = np.random.default_rng(0).random((4, 3, 32, 32)).astype(np.float32)
    for name in ("door", "yard"):
        answer = client.post(
            f"/v1/streams/{name}/predict", content=npy(array), headers={"Content-Type": "application/x-npy"}
        )
        assert answer.status_code == 200
    states = {name: client.get(f"/v1/streams/{name}/state").content for name in ("door", "yard")}
    schema = client.get("/openapi.json").json()
    seen: dict[str, int] = {}
    statuses: dict[int, int] = {}

    @settings(max_examples=420, derandomize=True, database=None, deadline=None, suppress_health_check=list(HealthCheck))
    @given(malformed(schema, states["door"]))
    def check(sent: Sent) -> None:
        method, path, headers, body = sent
        answer = client.request(method.upper(), path, headers=headers, content=body)
        about = f"{method} {path} {headers} {body[:60]!r}"
        assert 400 <= answer.status_code < 500, f"{about}: {answer.status_code} {answer.text[:200]}"
        assert answer.headers["content-type"] == "application/problem+json", about
        found = answer.json()
        assert found["status"] == answer.status_code
        assert len(found["detail"]) > 10
        assert found["code"], about
        assert client.get("/v1/streams/door/state").content == states["door"], about
        seen[hashlib.sha256(repr(sent).encode()).hexdigest()] = answer.status_code
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1

    check()
    assert len(seen) >= 300, f"{len(seen)} different requests"
    assert {404, 405, 413, 415, 422, 400} >= set(statuses) >= {405, 422, 415, 400}, statuses
    for name, state in states.items():
        assert client.get(f"/v1/streams/{name}/state").content == state
    assert len(client.get("/v1/streams").json()) == 2, "no stream was made of them"
    metrics = client.get("/metrics").text
    assert 'status="500"' not in metrics


def test_the_page_of_routes_loads_nothing_from_elsewhere(client: TestClient) -> None:
    page = client.get("/docs")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["content-security-policy"]
    for word in ("http://", "https://", "src=", "@import", "cdn"):
        assert word not in page.text
    assert 'fetch("openapi.json")' in page.text
    assert client.get("/openapi.json").json()["paths"]


@pytest.mark.parametrize(
    ("shape", "fault", "says"),
    [
        ((4, 32, 32, 3), None, "got 32 channels; is it (B, H, W, C)?"),
        ((2, 3, 32, 32), np.nan, "got 1 of 6144 that are not finite"),
        ((2, 3, 32, 32), 255.0, "divide pixels by 255"),
    ],
)
def test_what_is_wrong_with_an_array_is_said(shape: tuple[int, ...], fault: float | None, says: str) -> None:
    array = np.random.default_rng(0).random(shape).astype(np.float32)
    if fault is not None:
        array[0, 0, 0, 0] = fault
    with pytest.raises(Problem, match=re.escape(says)):
        PayloadReader(served().prepare, ServeSettings()).read("application/x-npy", npy(array))


def test_a_wrong_method_is_told_every_right_one_and_an_open_service_asks_for_no_token(client: TestClient) -> None:
    answer = client.request("OPTIONS", "/v1/streams/door/state")
    assert (answer.status_code, answer.headers["allow"]) == (405, "GET, PUT")
    schema = client.get("/openapi.json").json()
    assert "securitySchemes" not in schema["components"]
    operations = [each for path in schema["paths"].values() for each in path.values()]
    assert operations
    assert not any("security" in each for each in operations)
