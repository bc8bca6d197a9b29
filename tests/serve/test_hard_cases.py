"""Where requests, commands and failures meet: nothing is learnt twice, lost, or left behind."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from served import engine, pictures, served
from torch import Tensor

from poem._util.state_file import read_state
from poem.guarded.audit import read_audit
from poem.serve import learner as learner_module
from poem.serve.access import Access
from poem.serve.engine import StreamEngine
from poem.serve.learner import Learner
from poem.serve.problems import Problem


def ask(made: StreamEngine, stream: str, images: Tensor, **rest: Any) -> dict[str, Any]:
    return made.submit(stream, images, **rest).result(60)


def test_a_key_that_waits_behind_a_delete_is_learnt_from_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, reached, answer = threading.Semaphore(0), threading.Semaphore(0), Learner.answer

    def wait(self: Learner, images: Tensor) -> Any:
        reached.release()
        assert gate.acquire(timeout=30)
        return answer(self, images)

    with engine(tmp_path, batch_size=2) as made:
        ask(made, "a", pictures(2, 0))
        monkeypatch.setattr(Learner, "answer", wait)
        first = made.submit("a", pictures(1, 1))
        assert reached.acquire(timeout=30)
        deleted = made.command("a", "delete")
        waiting = made.submit("a", pictures(2, 2), key="k", payload="p")
        gate.release()
        first.result(60)
        deleted.result(60)
        assert reached.acquire(timeout=30), "the request behind the delete is being computed"
        with pytest.raises(Problem) as caught:
            made.submit("a", pictures(2, 2), key="k", payload="p")
        assert caught.value.code == "key-in-flight"
        gate.release()
        reply = waiting.result(60)
        assert ask(made, "a", pictures(2, 2), key="k", payload="p") == {**reply, "replayed": True}
        assert made.status("a")["batches"] == 1


def test_an_import_that_cannot_be_written_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twin = Learner(served(), 2)
    with engine(tmp_path, batch_size=2) as made:
        ask(made, "other", pictures(2, 9))
        state = read_state(made.command("other", "export").result(60))
        for seed in range(3):
            ask(made, "a", pictures(2, seed))
            twin.answer(pictures(2, seed))
        files = sorted(path.name for path in tmp_path.glob("streams/*/*"))
        with monkeypatch.context() as patch:

            def full(*_: Any) -> None:
                raise OSError(28, "No space left on device")

            patch.setattr(made._store, "save_start", full)
            with pytest.raises(Problem) as caught:
                made.command("a", "import", state).result(60)
        assert (caught.value.status, caught.value.code) == (503, "no-storage")
        assert made.status("a")["batches"] == 3
        assert ask(made, "a", pictures(2, 3))["answers"] == twin.answer(pictures(2, 3)), "as if it had not been sent"
        assert sorted(path.name for path in tmp_path.glob("streams/*/*")) == files
        assert made.command("a", "import", state).result(60)["batches"] == 1


def test_imported_streams_count_among_those_in_memory(tmp_path: Path) -> None:
    with engine(tmp_path, batch_size=2, live=2) as made:
        ask(made, "a", pictures(2, 0))
        state = made.command("a", "export").result(60)
        for name in ("b", "c", "d", "e"):
            assert made.command(name, "import", read_state(state)).result(60)["batches"] == 1
            assert made.summary()["live"] <= 2
        assert {name: made.status(name)["batches"] for name in "abcde"} == dict.fromkeys("abcde", 1)


def test_a_refused_first_request_leaves_no_file(tmp_path: Path) -> None:
    with engine(tmp_path, batch_size=2) as made:
        ask(made, "a", pictures(2, 0))
        made.command("a", "export").result(60)  # after the first snapshot
        before = sorted(tmp_path.glob("streams/*/*"))
        for at in range(3):
            with pytest.raises(Problem) as caught:
                ask(made, f"never{at}", torch.rand(1, 5, 32, 32))
            assert caught.value.status == 422
        assert len(list(tmp_path.glob("streams/*"))) == 1
        assert sorted(tmp_path.glob("streams/*/*")) == before
        made.command("a", "delete").result(60)
        with pytest.raises(Problem):
            ask(made, "a", torch.rand(1, 5, 32, 32))
    (audit,) = tmp_path.glob("streams/*/*.jsonl")
    assert audit.name == "0001.jsonl", "the audit of a deleted stream stays"


def test_a_batch_that_was_learnt_from_is_saved_although_its_answers_are_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(tmp_path, batch_size=2, snapshot_every=100) as made:
        ask(made, "a", pictures(2, 0))
        with monkeypatch.context() as patch:

            def fail(*_: Any) -> Any:
                raise RuntimeError("no memory")

            patch.setattr(learner_module, "described", fail)
            with pytest.raises(Problem, match="may have been learnt from"):
                ask(made, "a", pictures(2, 1))
        assert made._streams["a"].learner is not None
        assert made._streams["a"].learner.batches == 2
        assert made.status("a")["unsaved_batches"] == 1
    with engine(tmp_path, batch_size=2) as again:
        ask(again, "a", pictures(2, 2))
        assert again.status("a")["batches"] == 3, "the stop has saved the second batch"
    (audit,) = tmp_path.glob("streams/*/*.jsonl")
    assert [line["batch"] for line in read_audit(audit)[1] if line["kind"] == "batch"] == [0, 1, 2]


def test_an_origin_that_is_no_address_is_refused() -> None:
    for origin in ("http://[", "null", "http://[::1", "//"):
        with pytest.raises(Problem) as caught:
            Access().check({"host": "127.0.0.1:8000", "origin": origin})
        assert caught.value.status == 403


def test_a_quote_is_no_key(tmp_path: Path) -> None:
    pytest.importorskip("fastapi")
    from starlette.requests import Request

    from poem.serve.request_body import idempotency_key

    def key(text: str) -> str | None:
        request = Request({"type": "http", "headers": [(b"idempotency-key", text.encode())], "state": {"token": ""}})
        return idempotency_key(request)

    assert key('"a"') == key("a")
    for text in ('"', '""', ""):
        with pytest.raises(Problem) as caught:
            key(text)
        assert caught.value.status == 400


def test_a_signal_between_start_and_serving_stops_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uvicorn = pytest.importorskip("uvicorn")
    from poem.cli.main import main

    before, mask, stopping = signal.getsignal(signal.SIGTERM), os.umask(0o022), []

    def run(self: Any, sockets: Any = None) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        stopping.append(self.should_exit)

    monkeypatch.setattr(uvicorn.Server, "run", run)
    try:
        assert main(["serve", "digits-bn", "--port", "0", "--state", str(tmp_path / "state")]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
        os.umask(mask)
    assert stopping == [True]
