"""NaN and Inf in a status or an answer: null in JSON, and no error for the streams beside."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from served import npy, pictures, served

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")

from fastapi.testclient import TestClient

from poem._util.state_file import load_state, read_state, state_bytes
from poem.serve.access import LOOPBACK, Access
from poem.serve.engine import StreamEngine
from poem.serve.front import build_app
from poem.serve.json_safe import json_safe
from poem.serve.learner import Served
from poem.serve.metrics import Metrics
from poem.serve.schemas import SCHEMAS
from poem.serve.settings import ServeSettings
from poem.serve.turns import Stream

NPY = {"Content-Type": "application/x-npy"}


@contextmanager
def service(what: Served, folder: Path) -> Iterator[TestClient]:
    metrics = Metrics()
    engine = StreamEngine(what, ServeSettings(batch_size=4), folder, metrics)
    app = build_app(engine, metrics, Access((), LOOPBACK))
    with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:
        yield client


def predict(client: TestClient, stream: str, seed: int) -> dict[str, Any]:
    answer = client.post(f"/v1/streams/{stream}/predict", content=npy(pictures(4, seed).numpy()), headers=NPY)
    found: dict[str, Any] = checked("Prediction", answer)
    return found


def checked(name: str, answer: Any) -> Any:
    """A JSON answer, as strict JSON and as the schema of that name; a list of such where it is one."""

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is no JSON")

    validators = pytest.importorskip("jsonschema", reason="comes with schemathesis").validators
    assert answer.status_code == 200, answer.text
    found = json.loads(answer.content, parse_constant=refuse)
    checker = validators.Draft202012Validator({**SCHEMAS[name], "components": {"schemas": SCHEMAS}})
    for each in found if isinstance(found, list) else [found]:
        checker.validate(each)
    return found


def statuses(client: TestClient, stream: str) -> list[dict[str, Any]]:
    """What the three routes say of a stream that leave what it has learnt."""
    one = checked("StreamStatus", client.get(f"/v1/streams/{stream}/status"))
    (listed,) = [
        each for each in checked("StreamStatus", client.get("/v1/streams")) if each["stream"] == stream
    ]  # fmt: skip
    state = client.get(f"/v1/streams/{stream}/state").content
    return [one, listed, checked("StreamStatus", client.put(f"/v1/streams/{stream}/state", content=state))]


def test_signals_that_are_not_known_at_most_batches_are_null(tmp_path: Path) -> None:
    with service(served(every=4), tmp_path) as client:
        for seed in range(3):
            predict(client, "door", seed)
        for found in statuses(client, "door"):
            assert found["signals"]["disagreement"] is None, "the source is asked at every fourth batch"
            assert isinstance(found["signals"]["drift"], float)
        checked("StreamStatus", client.post("/v1/streams/door/reset"))


def test_a_state_with_infinity_is_taken_and_hides_no_other_stream(tmp_path: Path) -> None:
    with service(served(), tmp_path) as client:
        predict(client, "door", 0)
        state = read_state(client.get("/v1/streams/door/state").content)
        signals = {**state["guard"]["signals"], "drift": math.inf}
        content = state_bytes({**state, "guard": {**state["guard"], "signals": signals, "stopped": "\ud800 by hand"}})
        put = checked("StreamStatus", client.put("/v1/streams/odd/state", content=content))
        for found in (put, *statuses(client, "odd")):
            assert found["signals"]["drift"] is None
            assert found["stopped"] == "? by hand", "no text in UTF-8 has half a pair"
        assert {each["stream"] for each in client.get("/v1/streams").json()} == {"door", "odd"}


def test_a_snapshot_whose_numbers_are_not_finite_is_listed(tmp_path: Path) -> None:
    with service(served(), tmp_path) as client:
        predict(client, "door", 0)
    (path,) = tmp_path.glob("streams/*/state.safetensors")
    state = load_state(path)
    about = state["serve"]
    about["info"] = {**about["info"], "lr": math.nan, "newly_reliable": -math.inf}
    path.write_bytes(state_bytes({**state, "serve": about}))
    with service(served(), tmp_path) as client:
        (found,) = checked("StreamStatus", client.get("/v1/streams"))
        assert (found["lr"], found["newly_reliable"]) == (None, None)


def test_a_diverged_stream_without_a_guard_answers_null_and_is_listed(tmp_path: Path) -> None:
    own = served("tent")
    plain = dataclasses.replace(own, guard=False, settings={**own.settings, "lr": 1e30})
    with service(plain, tmp_path) as client:
        before = predict(client, "door", 0)
        predict(client, "yard", 0)
        diverged = predict(client, "door", 1)
        assert {(each["probability"], each["entropy"]) for each in diverged["answers"]} == {(None, None)}
        mean = sum(each["entropy"] for each in before["answers"]) / 4
        found = checked("StreamStatus", client.get("/v1/streams/door/status"))
        assert found["answer_entropy"] == pytest.approx(mean), "what is not finite is left out of the mean"
        assert found["batches"] == 2
        listed = checked("StreamStatus", client.get("/v1/streams"))
        assert {each["stream"] for each in listed} == {"door", "yard"}
        assert checked("StreamStatus", client.post("/v1/streams/door/reset"))["batches"] == 0


def test_a_running_mean_leaves_out_what_is_not_finite() -> None:
    stream = Stream("a", 0.0)
    for value in (math.nan, 1.0, math.inf, math.nan, 2.0):
        stream.average("answer_entropy", value)
    assert stream.measured == {"answer_entropy": pytest.approx(0.95 * 1.0 + 0.05 * 2.0)}


def test_plain_values_stay_as_they_are() -> None:
    plain = {"a": [1, 2.5, None, True, "é"], "b": {"c": 10**400}}
    assert json_safe(plain) == plain
    assert json_safe({"a": (math.nan, [math.inf, {"b": -math.inf}])}) == {"a": [None, [None, {"b": None}]]}
