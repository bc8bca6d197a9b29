"""`poem.Client` and `poem load` against a real server in this process."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from served import image_file, pictures, served

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")

import uvicorn

import poem
from poem.cli.main import main
from poem.serve.access import Access
from poem.serve.client import Client, ServiceError
from poem.serve.engine import StreamEngine
from poem.serve.front import build_app
from poem.serve.headers import timed_headers
from poem.serve.learner import Learner
from poem.serve.load import percentile
from poem.serve.metrics import Metrics
from poem.serve.settings import ServeSettings

TOKEN = "sesame" * 4


@contextmanager
def service(folder: Path, header_s: float = 10.0, body_s: float = 10.0) -> Iterator[str]:
    """A service that waits so long for headers and bodies; its address."""
    listener = socket.create_server(("127.0.0.1", 0))
    metrics = Metrics()
    settings = ServeSettings(batch_size=4, queue=8, body_s=body_s)
    engine = StreamEngine(served(), settings, folder, metrics)
    app = build_app(engine, metrics, Access([TOKEN]))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", http=timed_headers(header_s), ws="none"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(30)
    assert not engine.ready


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with service(tmp_path_factory.mktemp("states")) as found:
        yield found


def test_the_clients_methods(url: str, tmp_path: Path) -> None:
    assert poem.Client is Client
    path = tmp_path / "image.png"
    path.write_bytes(image_file("PNG"))
    with poem.Client(url, token=TOKEN) as client:
        assert client.ready()
        assert client.service()["base"] == "digits-bn"
        given: list[Any] = [
            image_file("JPEG"), path, str(path), [image_file("PNG"), path], pictures(2, 0), pictures(1, 1)[0],
            np.zeros((3, 3, 32, 32), np.uint8),
        ]  # fmt: skip
        counts = []
        for at, images in enumerate(given):
            found = client.predict("door", images)
            counts.append(len(found.labels))
            assert (found.batch, found.late, found.replayed) == (at, False, False)
        assert counts == [1, 1, 1, 2, 2, 1, 3]
        state = client.state("door")
        assert client.load_state("yard", state)["batches"] == len(given)
        assert client.reset("door")["batches"] == 0
        assert {each["stream"] for each in client.streams()} >= {"door", "yard"}
        first = client.predict("yard", pictures(1, 3), key="mine")
        again = client.predict("yard", pictures(1, 3), key="mine")
        assert again.replayed
        assert again.answers == first.answers
        client.delete("yard")
        with pytest.raises(ServiceError, match="no stream 'yard'") as caught:
            client.status("yard")
        assert (caught.value.status, caught.value.code) == (404, "no-such-stream")
        with pytest.raises(ServiceError, match="1 to 64 letters"):
            client.predict("no name", pictures(1, 0))
        with pytest.raises(TypeError, match="stack arrays first"):
            client.predict("door", [pictures(1, 0)])


def test_a_wrong_token_and_a_wrong_address() -> None:
    with pytest.raises(ValueError, match="expected an address"):
        Client("ftp://127.0.0.1")
    with pytest.raises(ServiceError, match="unreachable"):
        Client("http://127.0.0.1:9", retries=0).streams()


def test_a_lost_answer_is_asked_for_again_with_the_same_key(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, lost = Client._exchange, list[bytes]()

    def lossy(self: Client, *args: Any) -> Any:
        found = exchange(self, *args)
        if not lost:
            lost.append(found[1])
            raise TimeoutError("the answer was lost")
        return found

    monkeypatch.setattr(Client, "_exchange", lossy)
    with Client(url, token=TOKEN) as client:
        found = client.predict("retried", pictures(2, 0))
        assert found.replayed
        assert found.answers == json.loads(lost[0])["answers"]
        assert client.status("retried")["batches"] == 1, "learnt from once"


def test_commands_are_not_repeated_where_their_answer_is_lost(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, sent = Client._exchange, list[str]()

    def lossy(self: Client, connection: Any, method: str, *args: Any) -> Any:
        sent.append(method)
        exchange(self, connection, method, *args)
        raise ConnectionResetError("the answer was lost")

    with Client(url, token=TOKEN) as client:
        client.predict("commanded", pictures(2, 0))
        state = client.state("commanded")
        monkeypatch.setattr(Client, "_exchange", lossy)
        for command in (
            lambda: client.reset("commanded"), lambda: client.load_state("commanded", state),
            lambda: client.delete("commanded"),
        ):  # fmt: skip
            sent.clear()
            with pytest.raises(ServiceError, match="may have been carried out"):
                command()
            assert len(sent) == 1
        sent.clear()
        with pytest.raises(ServiceError, match="unreachable"):
            Client(url, token=TOKEN, retries=2).streams()
        assert sent == ["GET"] * 3


def test_commands_are_repeated_where_nothing_was_sent(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    connect, refused = http.client.HTTPConnection.connect, list[int]()

    def later(self: http.client.HTTPConnection) -> None:
        if not refused:
            refused.append(1)
            raise ConnectionRefusedError("not yet")
        connect(self)

    with Client(url, token=TOKEN) as client:
        client.predict("started", pictures(2, 0))
        monkeypatch.setattr(http.client.HTTPConnection, "connect", later)
        client.delete("started")
        assert refused


def test_a_removal_that_was_lost_and_finds_nothing_is_done(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = Client._exchange

    def lost(self: Client, connection: Any, method: str, *args: Any) -> Any:
        found = exchange(self, connection, method, *args)
        if method in ("DELETE", "POST"):
            raise ServiceError(503, "replica-lost", "the replica ended before it answered", 0)
        return found

    with Client(url, token=TOKEN) as client:
        client.predict("removed", pictures(2, 0))
        monkeypatch.setattr(Client, "_exchange", lost)
        with pytest.raises(ServiceError, match="replica-lost"):
            client.reset("removed")
        client.delete("removed")
        monkeypatch.undo()
        with pytest.raises(ServiceError, match="no stream 'removed'"):
            client.delete("removed")


def test_a_connection_too_many_is_503_as_a_problem() -> None:
    from fastapi import FastAPI

    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()
    config = uvicorn.Config(FastAPI(), log_level="warning", http=timed_headers(5), ws="none", limit_concurrency=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        with socket.create_connection(address) as first:
            first.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b" 200 " in first.recv(200).splitlines()[0]
            with pytest.raises(ServiceError) as caught:
                Client(f"http://127.0.0.1:{address[1]}", retries=0).service()
            assert (caught.value.status, caught.value.code) == (503, "too-many-connections")
            assert caught.value.retry_after == 1
    finally:
        server.should_exit = True
        thread.join(30)


def test_half_a_body_is_a_timeout_and_stops_nobody(tmp_path: Path) -> None:
    with service(tmp_path, body_s=1.0) as url:
        host, _, port = url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), 20) as half:
            head = f"POST /v1/streams/half/predict HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {TOKEN}\r\n"
            half.sendall(f"{head}Content-Type: image/jpeg\r\nContent-Length: 1000\r\n\r\n".encode() + bytes(500))
            with Client(url, token=TOKEN) as client:
                assert client.predict("whole", pictures(1, 0)).batch == 0
                answer = half.recv(4096)
                assert b" 408 " in answer.splitlines()[0]
                assert "half" not in {each["stream"] for each in client.streams()}


def test_load_prints_percentiles_and_counts(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POEM_TOKEN", TOKEN)
    out = tmp_path / "load.json"
    words = ["load", url, "--rate", "100", "--requests", "30", "--streams", "3", "--per-request", "2"]
    assert main([*words, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["answered"] + found["rejected"] == 30
    assert found["errors"] == 0
    assert found["latencies_ms"]["p50"] <= found["latencies_ms"]["p95"] <= found["latencies_ms"]["p99"]
    assert "latency p99" in capsys.readouterr().out
    assert percentile(list(range(1, 101)), 99) == 99
    monkeypatch.setenv("POEM_TOKEN", "wrong" * 4)
    assert main(words) == 2
    assert "token" in capsys.readouterr().err


def test_load_counts_full_queues_apart_from_errors(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from poem.serve.load import run_load

    answer = Learner.answer

    def slow(self: Learner, images: Any) -> Any:
        time.sleep(0.2)
        return answer(self, images)

    monkeypatch.setattr(Learner, "answer", slow)
    bodies = [pictures(4, 0).numpy()]
    found = run_load(url, bodies, rate=500, requests=24, per_request=4, token=TOKEN, prefix="slow")
    assert found.rejected > 0
    assert found.errors == 0
    assert found.answered + found.rejected == found.requests == 24


def test_headers_that_do_not_come_in_time_are_408(tmp_path: Path) -> None:
    with service(tmp_path, header_s=1.0) as url:
        check_headers(url)


def check_headers(url: str) -> None:
    """Half of the headers, none, a second request with half of them, and what is no HTTP."""
    host, port = url.removeprefix("http://").split(":")
    whole = f"GET /healthz HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
    half = b"GET /healthz HTTP/1.1\r\nHo"
    for data, first in ((half, 408), (b"", 408), (whole + half, 200), (b"\x16\x03\x01 no HTTP\r\n\r\n", 400)):
        with socket.create_connection((host, int(port))) as connection:
            connection.settimeout(30)
            content = b""
            connection.sendall(data)
            while part := connection.recv(4096):  # until the service closes it
                content += part
        assert int(content.split()[1]) == first, content
        last = content[content.rindex(b"HTTP/1.1 ") :]
        problem = json.loads(last.partition(b"\r\n\r\n")[2])
        assert problem["code"] == ("http" if first == 400 else "header-timeout")
        assert b"application/problem+json" in last
