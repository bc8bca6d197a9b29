"""HTTP before the engine: every route, errors as problem+json, keys, tokens, and malformed requests."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import re
import struct
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served import image_file, npy, pictures, served, until

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from fastapi.testclient import TestClient
from torch import Tensor

from poem._util.state_file import read_state, state_bytes
from poem.serve.access import LOOPBACK, Access
from poem.serve.engine import StreamEngine
from poem.serve.front import Engine, build_app
from poem.serve.learner import Learner
from poem.serve.metrics import Metrics
from poem.serve.payload import PayloadReader
from poem.serve.problems import Problem
from poem.serve.schemas import SCHEMAS, STATUS
from poem.serve.settings import ServeSettings
from poem.streams.loading.prepare import Prepare

JPEG, PNG, NPY, JSON = "image/jpeg", "image/png", "application/x-npy", "application/json"
PREDICT = "/v1/streams/door/predict"


ENGINES = ["local", pytest.param("ray", marks=pytest.mark.slow)]


@contextmanager
def service(
    folder: Path, kind: str = "local", *, access: Access | None = None, **settings: Any
) -> Iterator[TestClient]:
    metrics, chosen = Metrics(), ServeSettings(**{"batch_size": 8, "max_body": 1 << 20, **settings})
    engine: Engine
    if kind == "ray":
        pytest.importorskip("ray.serve", reason="needs ray[serve]", exc_type=ImportError)
        from poem.serve.ray_engine import Placement, RayEngine

        engine = RayEngine(
            served, served().prepare, chosen, folder, Placement(replicas=2, cpus=0.25, name=folder.name), metrics
        )
    else:
        engine = StreamEngine(served(), chosen, folder, metrics)
    app = build_app(engine, metrics, access or Access((), LOOPBACK))
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client
    assert not engine.ready


@pytest.fixture(scope="module", params=ENGINES)
def shared(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[TestClient]:
    """One service for tests that leave it as they found it."""
    with service(tmp_path_factory.mktemp("states"), request.param) as client:
        assert post(client, image_file("JPEG"), JPEG).status_code == 200
        yield client


def post(client: TestClient, body: bytes, kind: str, path: str = PREDICT, **headers: str) -> Any:
    return client.post(path, content=body, headers={"Content-Type": kind, **headers})


def check_problem(answer: Any, status: int | None = None) -> dict[str, Any]:
    found: dict[str, Any] = answer.json()
    assert answer.headers["content-type"] == "application/problem+json"
    assert 400 <= answer.status_code < 500, found
    assert found["status"] == answer.status_code
    assert found["title"]
    assert len(found["detail"]) > 10
    assert found["code"]
    if status is not None:
        assert answer.status_code == status, found
    return found


# What is answered -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ENGINES)
def test_every_kind_of_body_is_the_same_image(tmp_path: Path, kind: str) -> None:
    file = image_file("PNG")
    pixels = PayloadReader(served().prepare, ServeSettings()).from_files([file])
    first = Learner(served(), 8).answer(pixels)
    bodies = {
        PNG: file, "application/octet-stream": file, NPY: npy((255 * pixels).round().byte().numpy()),
        JSON: json.dumps({"images": [base64.b64encode(file).decode()]}).encode(),
    }  # fmt: skip
    with service(tmp_path, kind) as client:
        for at, (kind, body) in enumerate(bodies.items()):
            answer = post(client, body, kind, f"/v1/streams/s{at}/predict")
            assert answer.json()["answers"] == first, kind
        parts = [("images", ("a", file)), ("images", ("b", file))]
        both = client.post("/v1/streams/m/predict", files=parts)
        assert len(both.json()["answers"]) == 2
        numbers = json.dumps({"images": pixels.tolist()}).encode()
        assert post(client, numbers, JSON, "/v1/streams/n/predict").json()["answers"] == first
        floats = post(client, npy(pixels.numpy()), NPY, "/v1/streams/f/predict")
        assert floats.json()["answers"] == first


@pytest.mark.parametrize("kind", ENGINES)
def test_status_reset_state_and_delete(tmp_path: Path, kind: str) -> None:
    with service(tmp_path, kind) as client:
        assert check_problem(client.get("/v1/streams/door/status"), 404)["code"] == "no-such-stream"
        for at in range(3):
            assert post(client, npy(pictures(4, at).numpy()), NPY).json()["batch"] == at
        status = client.get("/v1/streams/door/status").json()
        assert (status["batches"], status["how"], status["guarded"], status["method"]) == (3, "turns", True, "auto")
        state = client.get("/v1/streams/door/state").content
        assert client.put("/v1/streams/yard/state", content=state).json()["batches"] == 3
        one, two = (
            post(client, npy(pictures(4, 9).numpy()), NPY, f"/v1/streams/{name}/predict").json()["answers"]
            for name in ("door", "yard")
        )
        assert one == two
        assert client.post("/v1/streams/door/reset").json()["batches"] == 0
        assert {each["stream"] for each in client.get("/v1/streams").json()} == {"door", "yard"}
        deleted = client.delete("/v1/streams/yard")
        assert (deleted.status_code, deleted.content) == (204, b"")
        check_problem(client.delete("/v1/streams/yard"), 404)
        check_problem(client.get("/v1/streams/yard/state"), 404)
        check_problem(client.post("/v1/streams/yard/reset"), 404)


def test_health_metrics_pages_and_what_is_served(shared: TestClient) -> None:
    assert shared.get("/healthz").json() == {"status": "ok"}
    assert shared.get("/readyz").json() == {"status": "ready"}
    assert shared.get("/v1").json()["input"] == [3, 32, 32]
    text = shared.get("/metrics").text
    for name in (
        "poem_http_requests_total", "poem_http_request_duration_seconds_bucket", "poem_images_total",
        "poem_batch_duration_seconds_count", "poem_streams", "poem_queue_requests", "poem_snapshot_duration_seconds",
    ):  # fmt: skip
        assert name in text
    assert 'route="/v1/streams/{stream}/predict"' in text
    assert "door" not in text, "streams are no labels"
    assert shared.get("/docs").status_code == 200
    page = shared.get("/")
    assert page.headers["content-type"].startswith("text/html")
    for rule in ("frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'"):
        assert rule in page.headers["content-security-policy"]
    schema = shared.get("/openapi.json").json()
    predict = schema["paths"]["/v1/streams/{stream}/predict"]["post"]
    assert set(predict["requestBody"]["content"]) >= {JPEG, PNG, NPY, JSON, "multipart/form-data"}
    assert "application/problem+json" in predict["responses"]["422"]["content"]


def test_answers_and_statuses_are_as_the_schema_and_the_page_say(tmp_path: Path) -> None:
    validators = pytest.importorskip("jsonschema", reason="comes with schemathesis").validators
    with service(tmp_path) as client:
        schema = client.get("/openapi.json").json()

        def check(method: str, path: str, answer: Any) -> Any:
            route = schema["paths"][path.replace("/door", "/{stream}")][method]
            found = route["responses"]["200"]["content"]["application/json"]["schema"]
            assert found, "an empty schema takes anything"
            whole = {**found, "components": schema["components"]}
            checker = validators.Draft202012Validator(whole)
            checker.validate(answer.json())
            return answer.json()

        for at, query in enumerate(("", "", "?deadline_ms=0.001")):
            sent = post(client, npy(pictures(4, at).numpy()), NPY, PREDICT + query)
            reply = check("post", PREDICT, sent)
        assert reply["late"]
        status = check("get", "/v1/streams/door/status", client.get("/v1/streams/door/status"))
        assert check("get", "/v1/streams", client.get("/v1/streams"))[0]["stream"] == "door"
        state = client.get("/v1/streams/door/state").content
        check("put", "/v1/streams/door/state", client.put("/v1/streams/door/state", content=state))
        check("post", "/v1/streams/door/reset", client.post("/v1/streams/door/reset"))
    parts = schema["components"]["schemas"]
    for name, example in (("Prediction", reply), ("Answer", reply["answers"][0]), ("StreamStatus", status)):
        assert set(parts[name]["properties"]) == set(example), "every field is described, and none that is not there"
        assert all(each["description"] for each in parts[name]["properties"].values())
    text = (Path(__file__).parents[2] / "docs" / "deploying.md").read_text(encoding="utf-8")
    table = text.split("| field | what it is |\n|---|---|\n")[1].split("\n\n")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+) \|$", table, re.MULTILINE))
    assert rows == {name: each["description"] for name, each in parts["StreamStatus"]["properties"].items()}


@pytest.mark.parametrize("method", ["source", "tent"])
def test_a_status_without_a_guard_is_as_the_schema_says(tmp_path: Path, method: str) -> None:
    validators = pytest.importorskip("jsonschema", reason="comes with schemathesis").validators
    plain = dataclasses.replace(served(method), guard=False)
    made = StreamEngine(plain, ServeSettings(batch_size=4), tmp_path)
    try:
        made.submit("door", pictures(4, 0)).result(60)
        found = made.status("door")
    finally:
        assert made.close(60)
    again = StreamEngine(plain, ServeSettings(batch_size=4), tmp_path)  # on disk: nothing was measured since the start
    stored = again.status("door")
    assert again.close(60)
    assert "latency_ms" in found
    assert "latency_ms" not in stored
    for each in (found, stored):
        validators.Draft202012Validator({**STATUS, "components": {"schemas": SCHEMAS}}).validate(each)
        assert set(each) <= set(STATUS["properties"]), "every field is described"


@pytest.mark.parametrize("path", ["/v1/streams/a/b/predict", "/v1/streams/a%2Fb/predict", "/v1/streams//predict"])
def test_an_id_with_a_slash_is_told_what_an_id_is(shared: TestClient, path: str) -> None:
    said = check_problem(post(shared, image_file("JPEG"), JPEG, path), 404)
    assert "1 to 64 letters, digits, dots, _ and -" in said["detail"]
    assert "slash" in said["detail"]


@pytest.mark.parametrize(
    "path", ["/v1/streams/door/history", "/v1/streams/door/Predict", "/nowhere", "/v1/stream/door"]
)
def test_a_path_that_is_none_is_told_which_are(shared: TestClient, path: str) -> None:
    said = check_problem(shared.get(path), 404)["detail"]
    assert "letters" not in said, "the id is not what is wrong"
    assert "/docs" in said
    assert ("/predict, /status, /reset or /state" in said) == path.startswith("/v1/streams/")


# Keys -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ENGINES)
def test_a_key_is_answered_once(tmp_path: Path, kind: str) -> None:
    file, other = image_file("JPEG"), image_file("JPEG", seed=1)
    with service(tmp_path, kind, access=Access(["a" * 16, "b" * 16])) as client:
        headers = {"Authorization": "Bearer " + "a" * 16, "Idempotency-Key": '"one"'}
        first = post(client, file, JPEG, **headers)
        again = post(client, file, JPEG, **headers)
        assert again.content == first.content
        assert (first.headers.get("idempotent-replayed"), again.headers["idempotent-replayed"]) == (None, "true")
        bare = post(client, file, JPEG, **{**headers, "Idempotency-Key": "one"})
        assert bare.content == first.content, "the same key without quotes"
        assert check_problem(post(client, other, JPEG, **headers), 422)["code"] == "key-reused"
        assert check_problem(post(client, file, JPEG, f"{PREDICT}?deadline_ms=5000", **headers), 422)
        stranger = post(client, other, JPEG, **{**headers, "Authorization": "Bearer " + "b" * 16})
        assert stranger.status_code == 200, "keys are those of a token"
        assert stranger.json()["batch"] == 1
        parts = [[("images", (name, file)), ("images", ("x", other))] for name in "ab"]
        key = {**headers, "Idempotency-Key": '"two"'}
        twice = [client.post(PREDICT, files=each, headers=key) for each in parts]
        assert twice[0].content == twice[1].content, "a multipart body has another boundary each time"
        for bad in ("", " ", "a b", "x" * 256, "k\x7f"):
            check_problem(post(client, file, JPEG, **{**headers, "Idempotency-Key": bad}), 400)


def test_in_flight_full_and_late(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, reached, answer = threading.Event(), threading.Event(), Learner.answer

    def wait(self: Learner, images: Tensor) -> Any:
        reached.set()
        gate.wait(30)
        return answer(self, images)

    monkeypatch.setattr(Learner, "answer", wait)
    file, found = image_file("PNG"), dict[str, Any]()
    with service(tmp_path, queue=1, batch_size=1) as client:
        gate.set()
        assert post(client, file, PNG, "/v1/streams/known/predict", **{"Idempotency-Key": "k"}).status_code == 200
        gate.clear()
        reached.clear()
        engine = client.app.state.engine  # type: ignore[attr-defined]

        def send(name: str, path: str, waiting: int, key: str | None = None) -> threading.Thread:
            headers = {} if key is None else {"Idempotency-Key": key}

            def go() -> None:
                found[name] = post(client, file, PNG, path, **headers)

            thread = threading.Thread(target=go)
            thread.start()
            until(lambda: reached.is_set() and engine.summary()["waiting"] == waiting)
            return thread

        threads = [send("first", PREDICT, 0, key="k"), send("late", f"{PREDICT}?deadline_ms=1", 1)]
        threads.append(send("other", "/v1/streams/known/predict", 2))
        assert check_problem(post(client, file, PNG, **{"Idempotency-Key": "k"}), 409)["code"] == "key-in-flight"
        assert check_problem(post(client, file, PNG, **{"Idempotency-Key": "j"}), 429)["code"] == "queue-full"
        again = post(client, file, PNG, "/v1/streams/known/predict", **{"Idempotency-Key": "k"})
        assert again.headers["idempotent-replayed"] == "true", "a known key needs no room"
        full = post(client, file, PNG)
        assert check_problem(full, 429)["code"] == "queue-full"
        assert int(full.headers["retry-after"]) >= 1
        gate.set()
        for thread in threads:
            thread.join(30)
    assert found["first"].json()["late"] is False
    assert found["late"].json()["late"] is True
    assert found["late"].json()["answers"][0]["answered_by"] == "source"


def test_memory_that_all_requests_hold_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, answer = threading.Event(), Learner.answer

    def wait(self: Learner, images: Tensor) -> Any:
        gate.wait(30)
        return answer(self, images)

    monkeypatch.setattr(Learner, "answer", wait)
    array = npy(pictures(8, 0).numpy())
    with service(tmp_path, max_queued_bytes=len(array) * 3, stack=False) as client:
        held = client.app.state.held  # type: ignore[attr-defined]
        paths = [f"/v1/streams/{name}/predict" for name in "ab"]
        threads = [threading.Thread(target=post, args=(client, array, NPY, path)) for path in paths]
        images = 8 * 3 * 32 * 32 * 4
        for count, thread in enumerate(threads, 1):  # one after another: while it is read a request holds its body too
            thread.start()
            until(lambda: held.now == count * images)  # noqa: B023 - waits before the loop goes on
        for send in (
            lambda: post(client, array, NPY, "/v1/streams/c/predict"),
            lambda: client.put("/v1/streams/c/state", content=bytes(len(array))),
        ):
            full = send()
            assert check_problem(full, 429)["code"] == "service-full"
            assert int(full.headers["retry-after"]) >= 1
        assert held.now == 2 * images, "what was refused holds nothing"
        gate.set()
        for thread in threads:
            thread.join(30)
        assert held.now == 0
        assert post(client, array, NPY, "/v1/streams/c/predict").status_code == 200
        check_problem(post(client, b"rubbish", NPY))
        assert held.now == 0
        assert "poem_queue_rejections_total 2.0" in client.get("/metrics").text


def test_json_has_a_smaller_limit(tmp_path: Path) -> None:
    with service(tmp_path, max_json=1000) as client:
        numbers = json.dumps({"images": pictures(1, 0).tolist()}).encode()
        assert check_problem(post(client, numbers, JSON), 413)["code"] == "too-large"
        assert post(client, npy(pictures(1, 0).numpy()), NPY).status_code == 200


def test_the_pixels_of_a_request_are_counted_before_any_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []
    reader = PayloadReader(Prepare(), ServeSettings(max_pixels=10_000))
    files = [image_file("PNG", 100, 60, seed) for seed in range(2)]
    assert reader.from_files(files[:1], held.append).shape == (1, 3, 60, 100)
    assert held == [18 * 6000 + 4 * 6000]
    monkeypatch.setattr(Prepare, "__call__", lambda *_: pytest.fail("an image was decoded"))
    with pytest.raises(Problem, match="at most 10000 pixels in a request, got 12000") as caught:
        reader.from_files(files)
    assert caught.value.status == 413
    with pytest.raises(Problem, match="pixels in a request, got 12288"):
        reader.read(NPY, npy(np.zeros((12, 3, 32, 32), np.uint8)))
    wide = PayloadReader(Prepare(resize=100), ServeSettings(max_pixels=10_000))
    with pytest.raises(Problem, match="image 0: expected at most 10000 pixels, would be 166x100"):
        wide.from_files(files[:1])


def test_deadlines_and_times_begin_with_the_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = PayloadReader.read

    def slow(self: PayloadReader, *args: Any) -> Tensor:
        time.sleep(0.3)
        return read(self, *args)

    monkeypatch.setattr(PayloadReader, "read", slow)
    with service(tmp_path) as client:
        assert post(client, image_file("PNG"), PNG).json()["ms"] > 300
        assert post(client, image_file("PNG"), PNG, f"{PREDICT}?deadline_ms=250").json()["late"] is True


def test_a_key_in_flight_is_409(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, reached, answer = threading.Event(), threading.Event(), Learner.answer

    def wait(self: Learner, images: Tensor) -> Any:
        reached.set()
        gate.wait(30)
        return answer(self, images)

    monkeypatch.setattr(Learner, "answer", wait)
    file = image_file("PNG")
    with service(tmp_path) as client:
        thread = threading.Thread(target=post, args=(client, file, PNG), kwargs={"Idempotency-Key": "k"})
        thread.start()
        assert reached.wait(30)
        conflict = post(client, file, PNG, **{"Idempotency-Key": "k"})
        gate.set()
        thread.join(30)
        assert check_problem(conflict, 409)["code"] == "key-in-flight"
        assert post(client, file, PNG, **{"Idempotency-Key": "k"}).headers["idempotent-replayed"] == "true"


# Who may call ---------------------------------------------------------------------------------------------------------


def test_tokens(tmp_path: Path) -> None:
    with service(tmp_path, access=Access(["right" * 4])) as client:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic " + "right" * 4}):
            for method, path in (
                ("GET", "/v1/streams"),
                ("GET", "/metrics"),
                ("POST", PREDICT),
                ("DELETE", "/v1/streams/a"),
            ):
                refused = client.request(method, path, headers=headers)
                check_problem(refused, 401)
                assert refused.headers["www-authenticate"] == "Bearer"
        assert client.get("/v1/streams", headers={"Authorization": "bearer " + "right" * 4}).json() == []
        assert client.get("/healthz").status_code == 200


def test_pages_of_other_sites_and_other_hosts_are_refused(shared: TestClient) -> None:
    check_problem(shared.get("/v1", headers={"Origin": "http://evil.example"}), 403)
    check_problem(shared.get("/v1", headers={"Host": "evil.example"}), 403)
    assert shared.get("/v1", headers={"Origin": "http://127.0.0.1"}).status_code == 200


# Malformed requests ---------------------------------------------------------------------------------------------------


def bomb(wide: int, high: int) -> bytes:
    """A small PNG file that says it has very many pixels."""
    header = struct.pack(">IIBBBBB", wide, high, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0" * 1000)), (b"IEND", b"")]
    body = b"\x89PNG\r\n\x1a\n"
    for name, data in chunks:
        body += struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    return body


def pickled() -> bytes:
    content = io.BytesIO()
    np.save(content, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    return content.getvalue()


def huge_header() -> bytes:
    """An npy file whose header claims terabytes."""
    content = npy(np.zeros((1, 3, 32, 32), np.float32))
    return content.replace(b"(1, 3, 32, 32)", b"(9, 3, 99999, 32)")[:200]


GOOD = np.random.default_rng(0).random((2, 3, 32, 32)).astype(np.float32)
NAN, INF = GOOD.copy(), GOOD.copy()
NAN[0, 0, 0, 0], INF[0, 0, 0, 0] = np.nan, np.inf
JPG = image_file("JPEG")
MALFORMED: dict[str, tuple[bytes, str]] = {
    "no body": (b"", JPEG),
    "truncated jpeg": (JPG[: len(JPG) // 2], JPEG),
    "jpeg of two bytes": (JPG[:2], JPEG),
    "jpeg with rubbish": (JPG[:100] + bytes(500), JPEG),
    "truncated png": (image_file("PNG")[:300], PNG),
    "one pixel": (image_file("PNG", 1, 1), PNG),
    "one pixel high": (image_file("JPEG", 64, 1), JPEG),
    "100 megapixels": (bomb(10_000, 10_000), PNG),
    "more pixels than Pillow takes": (bomb(1_000_000, 1_000_000), PNG),
    "gif": (b"GIF89a" + bytes(50), "application/octet-stream"),
    "svg": (b"<svg/>", "application/octet-stream"),
    "npy as jpeg": (npy(GOOD), JPEG),
    "npy of objects": (pickled(), NPY),
    "pickle": (b"\x80\x04\x95", NPY),
    "npy that claims terabytes": (huge_header(), NPY),
    "npy cut short": (npy(GOOD)[:-10], NPY),
    "npy with more": (npy(GOOD) + b"x", NPY),
    "npy of int64": (npy(GOOD.astype(np.int64)), NPY),
    "npy of complex numbers": (npy(GOOD.astype(np.complex64)), NPY),
    "npy of text": (npy(np.array(["a"])), NPY),
    "npy in big endian": (npy(GOOD.astype(">f4")), NPY),
    "npy in Fortran order": (npy(np.asfortranarray(GOOD)), NPY),
    "npy with NaN": (npy(NAN), NPY),
    "npy with Inf": (npy(INF), NPY),
    "npy beyond 1": (npy(GOOD * 255), NPY),
    "npy below 0": (npy(GOOD - 1), NPY),
    "npy of one pixel": (npy(GOOD[:, :, :1, :1]), NPY),
    "npy of another size": (npy(np.zeros((1, 3, 64, 64), np.uint8)), NPY),
    "npy with channels last": (npy(GOOD.transpose(0, 2, 3, 1)), NPY),
    "npy of five channels": (npy(np.zeros((1, 5, 32, 32), np.uint8)), NPY),
    "npy of no image": (npy(np.zeros((0, 3, 32, 32), np.uint8)), NPY),
    "npy of one number": (npy(np.float32(0.5)), NPY),
    "npy of nine images": (npy(np.zeros((9, 3, 32, 32), np.uint8)), NPY),
    "a header of brackets": (b"\x93NUMPY\x01\x00\xe8\x03" + b"(" * 1000, NPY),
    "no json": (b"{", JSON),
    "json that is no text": (b"\xff\xfe\xfd", JSON),
    "json list": (b"[]", JSON),
    "json without images": (b"{}", JSON),
    "json with no images": (b'{"images": []}', JSON),
    "json of null": (b'{"images": [null]}', JSON),
    "json of words": (b'{"images": ["no base64!"]}', JSON),
    "json of mixed things": (b'{"images": ["aGFsbG8=", 1]}', JSON),
    "json of another file": (b'{"images": ["aGFsbG8="]}', JSON),
    "json with more": (b'{"images": ["aGFsbG8="], "path": "/etc/passwd"}', JSON),
    "json with NaN": (b'{"images": [[[[NaN]]]]}', JSON),
    "json with a huge number": (b'{"images": [[[[' + b"9" * 5000 + b"]]]]}", JSON),
    "json with 1e999": (json.dumps({"images": GOOD[:1].tolist()}).replace("0.", "1e999,0.", 1).encode(), JSON),
    "json of ragged rows": (json.dumps({"images": [[[[0.1] * 32] * 32] * 2 + [[[0.1] * 31] * 32]]}).encode(), JSON),
    "json of booleans": (json.dumps({"images": [[[[True] * 32] * 32] * 3]}).encode(), JSON),
    "json of text numbers": (json.dumps({"images": [[[["1"] * 32] * 32] * 3]}).encode(), JSON),
    "deep json": (b'{"images": ' + b"[" * 100_000, JSON),
    "deep whole json": (b'{"images": ' + b"[" * 900 + b"]" * 900 + b"}", JSON),
    "huge json": (b'{"images": [' + b"0," * 600_000 + b"0]}", JSON),
    "a body too large": (bytes(2 << 20), JPEG),
    "another type": (JPG, "application/x-python-pickle"),
    "a form": (b"a=b", "application/x-www-form-urlencoded"),
    "multipart without a boundary": (b"--x", "multipart/form-data"),
    "multipart of nothing": (b"--x--\r\n", "multipart/form-data; boundary=x"),
    "multipart cut short": (b"--x\r\nContent-Disposition: form-data; na", "multipart/form-data; boundary=x"),
    "multipart of a field": (
        b'--x\r\nContent-Disposition: form-data; name="a"\r\n\r\nb\r\n--x--\r\n', "multipart/form-data; boundary=x",
    ),
    "multipart with a path": (
        b'--x\r\nContent-Disposition: form-data; name="a"; filename="../../etc/passwd"\r\n\r\nroot\r\n--x--\r\n',
        "multipart/form-data; boundary=x",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(MALFORMED))
def test_a_malformed_body_is_a_4xx_and_changes_nothing(shared: TestClient, name: str) -> None:
    body, kind = MALFORMED[name]
    before = shared.get("/v1/streams/door/state").content
    check_problem(post(shared, body, kind))
    assert shared.get("/v1/streams/door/state").content == before
    assert len(shared.get("/v1/streams").json()) == 1
    check_problem(post(shared, body, kind, "/v1/streams/never/predict"))
    assert len(shared.get("/v1/streams").json()) == 1, "a stream that answered nothing is not kept"


@pytest.mark.parametrize(
    "name",
    ["..", "%2e%2e", "..%2f..%2fetc%2fpasswd", "a%00b", "a%2fb", "-a", ".hidden", "a%20b", "a%0ab", "%ff", "x" * 65,
     "%E2%80%AE", "CON:", "a;b", "a%5cb", "~root", "$HOME", "*", "a?b"],
)  # fmt: skip
@pytest.mark.parametrize(
    ("method", "rest"), [("POST", "/predict"), ("GET", "/status"), ("POST", "/reset"), ("GET", "/state"),
                         ("PUT", "/state"), ("DELETE", "")],
)  # fmt: skip
def test_tricks_in_a_streams_name_are_refused(shared: TestClient, name: str, method: str, rest: str) -> None:
    check_problem(shared.request(method, f"/v1/streams/{name}{rest}", content=JPG, headers={"Content-Type": JPEG}))
    assert len(shared.get("/v1/streams").json()) == 1


@pytest.mark.parametrize(
    "query",
    ["deadline_ms=0", "deadline_ms=-1", "deadline_ms=nan", "deadline_ms=inf", "deadline_ms=x", "deadline_ms=1e9"],
)
def test_a_deadline_that_is_none_is_refused(shared: TestClient, query: str) -> None:
    check_problem(post(shared, JPG, JPEG, f"{PREDICT}?{query}"), 422)


def test_a_state_that_is_none_is_refused(shared: TestClient) -> None:
    before = shared.get("/v1/streams/door/state").content
    size = int.from_bytes(before[:8], "little")
    other = before[:8] + before[8 : 8 + size].replace(b"digits", b"DIGITS").replace(b"F32", b"I32") + before[8 + size :]
    for body in (b"", b"x", bytes(100), b"\xff" * 100, before[:-1], before[: size // 2], before + b"x", other):
        for name in ("door", "new"):
            check_problem(shared.put(f"/v1/streams/{name}/state", content=body), 422)
    assert shared.get("/v1/streams/door/state").content == before
    assert len(shared.get("/v1/streams").json()) == 1


def test_a_state_of_other_images_or_classes_is_refused_before_anything_is_allocated(shared: TestClient) -> None:
    before = shared.get("/v1/streams/door/state").content
    good = read_state(before)
    images = ([3, 200_000, 200_000], [10**6] * 9, [1] * 100_000, [3, 64, 64], [3, 32], [32] * 3)
    huge: list[dict[str, Any]] = [{"image": image} for image in images]
    huge += [{"classes": count} for count in (10**13, 11, "10", True)]
    for change in huge:
        refused = shared.put("/v1/streams/new/state", content=state_bytes({**good, **change}))
        assert check_problem(refused, 422)["code"] == "state-refused"
        assert "alloc" not in refused.text
        assert "memory" not in refused.text
    assert shared.get("/v1/streams/door/state").content == before
    assert len(shared.get("/v1/streams").json()) == 1


def test_a_model_of_no_fixed_size_takes_states_of_images_that_it_would_take(tmp_path: Path) -> None:
    settings = ServeSettings(batch_size=4, max_pixels=64 * 64)
    open_size = dataclasses.replace(served(), prepare=Prepare())
    engine = StreamEngine(open_size, settings, tmp_path)
    try:
        engine.submit("a", pictures(4, 0)).result(60)
        good = read_state(engine.command("a", "export").result(60))
        assert engine.command("b", "import", good).result(60)["batches"] == 1
        changes: list[dict[str, Any]] = [{"classes": 11}]
        changes += [{"image": image} for image in ([3, 65, 64], [17, 8, 8], None, [3, 32, 32, 32])]
        for change in changes:
            with pytest.raises(Problem) as caught:
                engine.command("c", "import", {**good, **change}).result(60)
            assert caught.value.code == "state-refused"
    finally:
        assert engine.close(60)


def test_a_budget_starts_anew_with_an_import(tmp_path: Path) -> None:
    engine = StreamEngine(served(budget=0.25), ServeSettings(batch_size=8), tmp_path)
    try:
        for at in range(3):
            engine.submit("a", pictures(8, at)).result(60)
        good = read_state(engine.command("a", "export").result(60))
        assert good["guard"]["budget"]["seen"] == 24
        forged = {**good, "guard": {**good["guard"], "budget": {"share": 0.25, "seen": 10**9, "spent": 0}}}
        for name, state in (("b", good), ("c", forged)):
            engine.command(name, "import", state).result(60)
            found = read_state(engine.command(name, "export").result(60))["guard"]
            assert found["budget"] == {"share": 0.25, "seen": 0, "spent": 0}
            assert found["batches"] == 3
        other = {**good, "guard": {**good["guard"], "budget": {"share": 1.0, "seen": 0, "spent": 0}}}
        with pytest.raises(Problem, match="budget"):
            engine.command("d", "import", other).result(60)
    finally:
        assert engine.close(60)


def test_other_methods_encodings_and_routes(shared: TestClient) -> None:
    assert "takes POST, got GET" in check_problem(shared.get(PREDICT), 405)["detail"]
    assert "takes DELETE, got PATCH" in check_problem(shared.patch("/v1/streams/door"), 405)["detail"]
    other = shared.post("/v1/streams/door/state")
    assert "takes GET, PUT, got POST" in check_problem(other, 405)["detail"]
    assert other.headers["allow"] == "GET, PUT"
    check_problem(shared.get("/nowhere"), 404)
    check_problem(post(shared, JPG, JPEG, **{"Content-Encoding": "gzip"}), 415)
