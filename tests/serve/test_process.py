"""`poem serve` as a process: SIGTERM drains, kill -9 loses what came after the last snapshot and nothing else."""

from __future__ import annotations

import concurrent.futures
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from served import pictures
from torch import Tensor

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
pytest.importorskip("uvicorn")

from poem import zoo
from poem.guarded.audit import read_audit, tensor_hash
from poem.serve.client import Client, Prediction, ServiceError
from poem.serve.learner import Learner, Served
from poem.serve.replay import replay_answers
from poem.serve.store import Store
from poem.streams.loading.prepare import Prepare

SIZE, EVERY = 4, 5
OPTIONS = ["--batch-size", str(SIZE), "--snapshot-every", str(EVERY), "--threads", "1", "--no-view"]


@contextmanager
def process(
    folder: Path, *options: str, method: str | None = None, lines: list[str] | None = None
) -> Iterator[tuple[subprocess.Popen[str], Client]]:
    """A server of the digits network on a free port; killed at the end if it still runs. `lines` gets its output."""
    words = ["digits-bn"] if method is None else ["digits-bn", method]
    command = [sys.executable, "-m", "poem", "serve", *words, "--port", "0", "--state", str(folder)]
    running = subprocess.Popen(
        [*command, *OPTIONS, *options], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    seen = ""
    try:
        assert running.stdout is not None
        while "http://" not in seen:
            line = running.stdout.readline()
            assert line, f"the server ended: {seen}"
            seen += line
        found = re.search(r"http://127\.0\.0\.1:\d+", seen)
        assert found is not None, seen
        yield running, Client(found[0], retries=0)
    finally:
        if running.poll() is None:
            running.kill()
        running.wait(30)
        if running.stdout is not None:
            if lines is not None:
                lines += [*seen.splitlines(), *running.stdout.read().splitlines()]
            running.stdout.close()


def served() -> Served:
    """What the process serves."""
    model, base = zoo.load("digits-bn")
    settings = {"mean": base.mean, "std": base.std, "lr": None, "preset": None}
    prepare = Prepare(resize=base.resize, crop=base.crop)
    return Served(model=model, guard={"view": "none", "budget": None}, settings=settings, prepare=prepare)


def test_kill_9_and_restart_goes_on_from_the_snapshot(tmp_path: Path) -> None:
    batches = [pictures(SIZE, seed) for seed in range(13)]
    with process(tmp_path) as (running, client):
        before = [client.predict("door", batch, key=f"k{at}") for at, batch in enumerate(batches)]
        assert [each.batch for each in before] == list(range(13))
        running.send_signal(signal.SIGKILL)
        running.wait(30)
    name = next(tmp_path.glob("streams/*/state.safetensors"))
    facts = served().facts(SIZE)
    store = Store(tmp_path, facts)
    state, _ = store.load("door")
    store.close()
    saved = state["guard"]["batches"]
    assert 13 - EVERY <= saved < 13, f"{name}: a kill loses at most {EVERY} batches"
    resumed = Learner(served(), SIZE)
    resumed.load_state_dict(state)
    more = [pictures(SIZE, seed) for seed in range(100, 106)]
    with process(tmp_path) as (running, client):
        status = client.status("door")
        assert status["batches"] == saved
        again = client.predict("door", batches[0], key="k0")
        assert again.replayed, "a key before the snapshot is answered as it was recorded"
        assert again.answers == before[0].answers
        lost = client.predict("door", batches[12], key="k12")
        assert not lost.replayed, "a key after the snapshot is answered anew"
        assert lost.answers == resumed.answer(batches[12])
        later = [client.predict("door", batch) for batch in more]
        assert [each.answers for each in later] == [resumed.answer(batch) for batch in more]
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 0
    images = {reply.request: batch for reply, batch in zip(before, batches, strict=True)}
    images |= {reply.request: batch for reply, batch in zip(later, more, strict=True)}
    images[lost.request] = batches[12]
    (audit,) = tmp_path.glob("streams/*/*.jsonl")
    answers = replay_answers(audit, served(), SIZE, images)
    kept = [*before[:saved], lost, *later]
    assert answers == {reply.request: reply.answers for reply in kept}
    assert any(line["kind"] == "resumed" for line in read_audit(audit)[1])


def test_sigterm_answers_what_waits_and_saves_every_stream(tmp_path: Path) -> None:
    found: dict[int, Prediction | ServiceError] = {}
    # Of four images each, where a micro-batch may have five: a request waits for others that never come.
    with process(tmp_path, "--batch-size", "5", "--wait-ms", "60000") as (running, client):

        def send(at: int) -> None:
            try:
                found[at] = client.predict(f"s{at}", pictures(SIZE, at))
            except ServiceError as error:
                found[at] = error

        threads = [threading.Thread(target=send, args=(at,)) for at in range(8)]
        for thread in threads:
            thread.start()
        until = time.monotonic() + 30
        while client.service()["waiting"] < 8 and time.monotonic() < until:
            time.sleep(0.05)
        assert client.service()["waiting"] == 8, "every request was accepted and waits"
        assert not found
        running.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(30)
        assert running.wait(60) == 0
    answered = [each for each in found.values() if isinstance(each, Prediction)]
    assert len(answered) == 8, f"requests that were accepted are answered: {found}"
    with process(tmp_path, "--batch-size", "5") as (_, client):
        saved = {each["stream"]: each["batches"] for each in client.streams()}
    assert saved == {f"s{at}": 1 for at in range(8)}, "what was answered was saved"


def test_the_log_says_what_is_served_and_what_was_saved_and_each_note_once(tmp_path: Path) -> None:
    first, again = list[str](), list[str]()
    with process(tmp_path, method="eata", lines=first) as (running, client):
        for name in ("door", "yard"):
            client.predict(name, pictures(SIZE, 0))
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0
    whole = "\n".join(first)
    (note,) = [line for line in first if "ETA" in line]
    assert "--source-data FOLDER" in note
    assert whole.count("--preset cifar") == 1
    assert not re.search(r"source_data|preset=", whole), "options, no arguments of Python"
    (started,) = [line for line in first if "started" in line]
    for word in ("http://127.0.0.1:", "digits-bn", "eata", "guarded", "cpu", str(tmp_path), "0 streams found"):
        assert word in started
    assert first[-1] == "poem: stopped: 2 streams are saved"
    with process(tmp_path, method="eata", lines=again) as (running, _):
        running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 0
    assert any("2 streams found" in line for line in again)


@pytest.mark.slow
def test_kill_9_under_load_of_many_streams(tmp_path: Path) -> None:
    sent: dict[str, Tensor] = {}
    by_hash: dict[str, Tensor] = {}
    replies: list[Prediction] = []
    lock = threading.Lock()

    def feed(client: Client, stream: str, seeds: range) -> None:
        for seed in seeds:
            images = pictures(1 + seed % SIZE, seed)
            with lock:
                by_hash[tensor_hash(images)] = images
            try:
                reply = client.predict(stream, images, key=f"{stream} {seed}")
            except RuntimeError:
                return
            with lock:
                sent[reply.request] = images
                replies.append(reply)

    for life in range(2):
        with process(tmp_path, "--live", "5") as (running, client):
            firsts = [1000 * at + 100 * life for at in range(8)]
            threads = [
                threading.Thread(target=feed, args=(client, f"s{at}", range(first, first + 30)))
                for at, first in enumerate(firsts)
            ]
            for thread in threads:
                thread.start()
            if life == 0:
                threads[0].join(3.0)
                running.send_signal(signal.SIGKILL)
            for thread in threads:
                thread.join(120)
            if life == 1:
                running.send_signal(signal.SIGTERM)
                assert running.wait(60) == 0
    again: dict[str, Any] = {}
    for audit in tmp_path.glob("streams/*/*.jsonl"):
        # An answer that the kill cut off may be in a snapshot; a stream's batches are single requests here.
        lines = read_audit(audit)[1]
        batches = {line["batch"]: line["images"] for line in lines if line["kind"] == "batch"}
        cut = {
            line["requests"][0]["request"]: by_hash[batches[line["batch"]]]
            for line in lines
            if line["kind"] == "requests" and batches[line["batch"]] in by_hash
        }
        again |= replay_answers(audit, served(), SIZE, cut | sent)
    checked = [each for each in replies if each.request in again]
    assert len(checked) > 240, "all of the second life, and what the snapshots kept of the first"
    assert all(again[each.request] == each.answers for each in checked)


@pytest.mark.parametrize("raised", [TimeoutError, concurrent.futures.TimeoutError, RuntimeError("no replica")])
def test_streams_that_cannot_be_counted_end_no_start_and_the_end_is_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, raised: Any
) -> None:
    import uvicorn

    from poem.cli.main import main
    from poem.serve.engine import StreamEngine

    def fail(self: StreamEngine) -> Any:
        raise raised

    ran, closed, close = list[bool](), list[bool](), StreamEngine.close

    def noted(self: StreamEngine, timeout_s: float = 60.0) -> bool:
        closed.append(close(self, timeout_s))
        return closed[-1]

    own, handler = logging.getLogger("poem.serve"), signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(own, "level", logging.NOTSET)
    monkeypatch.setattr(StreamEngine, "streams", fail)
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets: ran.append(True))
    monkeypatch.setattr(StreamEngine, "close", noted)
    before = os.umask(0o022)
    try:
        assert main(["serve", "digits-bn", "--port", "0", "--state", str(tmp_path / "s"), "--no-view"]) == 0
    finally:
        os.umask(before)
        signal.signal(signal.SIGTERM, handler)
    assert ran == [True]
    assert closed == [True]
    said = [each.getMessage() for each in caplog.records]
    assert any(each.startswith("the streams could not be counted: ") for each in said)
    assert any(each.startswith("started http://127.0.0.1:") and each.endswith("/s") for each in said)
    assert own.level == logging.NOTSET, "as it was before"


def test_options_are_checked_before_a_model_is_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from poem.cli.main import main

    for words, said in (
        (["--host", "0.0.0.0"], "--token-file"), (["--port", "70000"], "--port"), (["--queue", "0"], "--queue"),
        (["--budget", "0.1", "--no-guard"], "--no-guard"), (["--deadline-ms", "nan"], "--deadline-ms"),
    ):  # fmt: skip
        assert main(["serve", "digits-bn", "--state", str(tmp_path / "s"), *words]) == 2
        assert said in capsys.readouterr().err
    short = tmp_path / "token"
    short.write_text("short\n")
    assert main(["serve", "digits-bn", "--token-file", str(short)]) == 2
    assert "16 characters" in capsys.readouterr().err
    assert main(["serve", "digits-bn", "petta", "--port", "0", "--state", str(tmp_path / "s")]) == 2
    assert "petta needs source images; add --source-data FOLDER" in capsys.readouterr().err
    assert not (tmp_path / "s").exists()
