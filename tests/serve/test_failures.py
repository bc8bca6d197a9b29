"""What fails at the disk, at the end and after learning: no state is lost, and each audit leads to its state."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from served import engine, pictures, served, taken
from torch import Tensor

from poem._util.state_file import load_state, read_state, state_bytes
from poem.guarded.audit import Audit, read_audit
from poem.serve import learner as learner_module
from poem.serve import stack as stack_module
from poem.serve.engine import SAVE_S, StreamEngine
from poem.serve.learner import Learner, answer_stacked
from poem.serve.meter import Meter
from poem.serve.problems import Problem
from poem.serve.ray_replica import Recorded, described
from poem.serve.replay import replay_answers
from poem.serve.settings import ServeSettings
from poem.serve.stack import Stack
from poem.serve.store import Store, folder_name

COMPOSE = Path(__file__).resolve().parents[2] / "docker" / "compose.yaml"


def ask(made: StreamEngine, stream: str, seed: int, **rest: Any) -> dict[str, Any]:
    return made.submit(stream, pictures(2, seed), **rest).result(60)


def replayed(folder: Path, images: dict[str, Tensor]) -> dict[str, Any]:
    """Answers of every audit in a folder, by request."""
    found: dict[str, Any] = {}
    for path in sorted(folder.glob("streams/*/*.jsonl")):
        found |= replay_answers(path, served(), 2, images)
    return found


def snapshot_of(folder: Path, stream: str = "a") -> Path:
    (path,) = (folder / "streams" / folder_name(stream)).glob("state*.safetensors")
    return path


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every micro-batch takes at least a fifth of a second."""
    answer = Learner.answer

    def wait(self: Learner, images: Tensor) -> Any:
        time.sleep(0.2)
        return answer(self, images)

    monkeypatch.setattr(Learner, "answer", wait)


# The end --------------------------------------------------------------------------------------------------------------


def outcome(future: Future[Any]) -> str:
    try:
        return "answered" if future.result(0) else ""
    except Problem as problem:
        return f"{problem.status} {problem.code}"


@pytest.mark.parametrize("drained", [False, True])
def test_what_is_not_answered_in_time_is_refused_and_every_stream_is_saved(
    tmp_path: Path, slow: None, drained: bool
) -> None:
    made = StreamEngine(served(), ServeSettings(batch_size=2, snapshot_every=100, stack=False), tmp_path)
    for name in "ab":
        ask(made, name, 0)
    waiting = [made.submit("ab"[seed % 2], pictures(2, seed), key=str(seed), payload="p") for seed in range(20)]
    began = time.monotonic()
    if drained:  # the deadline is that of the signal, whatever `close` says later
        made.drain(0.7)
    assert made.close(60 if drained else 0.7) is False, "not everything was answered"
    assert time.monotonic() - began < 5
    assert made.close(60) is False
    found = [outcome(each) for each in waiting]
    assert set(found) == {"answered", "503 draining"}
    assert 1 <= found.count("answered") <= 8
    with engine(tmp_path, batch_size=2) as again:
        assert sum(again.status(name)["batches"] for name in "ab") == 2 + found.count("answered")


def test_a_request_whose_caller_has_gone_teaches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    computing, gate, answer = threading.Event(), threading.Event(), Learner.answer

    def wait(self: Learner, images: Tensor) -> Any:
        computing.set()
        gate.wait(30)
        return answer(self, images)

    monkeypatch.setattr(Learner, "answer", wait)
    with engine(tmp_path, batch_size=2) as made:
        first = made.submit("a", pictures(2, 0))
        assert computing.wait(30)
        assert not first.cancel(), "it is being computed"
        gone = made.submit("a", pictures(2, 1), key="k", payload="p")
        alone = made.submit("never", pictures(2, 1))
        assert gone.cancel()
        assert alone.cancel()
        gate.set()
        assert ask(made, "a", 2)["batch"] == 1
        assert [each["stream"] for each in made.streams()] == ["a"]
        assert ask(made, "a", 1, key="k", payload="p")["batch"] == 2, "its key may come again"


def test_the_time_to_drain_begins_with_the_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uvicorn = pytest.importorskip("uvicorn")
    from poem.cli.main import main

    drained: list[float] = []
    monkeypatch.setattr(StreamEngine, "drain", lambda self, timeout_s: drained.append(timeout_s), raising=False)
    monkeypatch.setattr(StreamEngine, "close", lambda self, timeout_s=0.0: True)
    monkeypatch.setattr(uvicorn.Server, "run", lambda self, sockets=None: self.handle_exit(signal.SIGTERM, None))
    before, mask = signal.getsignal(signal.SIGTERM), os.umask(0o022)
    try:
        assert main(["serve", "digits-bn", "--port", "0", "--state", str(tmp_path), "--drain-s", "7"]) == 0
    finally:
        signal.signal(signal.SIGTERM, before)
        os.umask(mask)
    assert drained == [7]


@pytest.mark.skipif(not COMPOSE.is_file(), reason="a copy without docker")
def test_the_container_is_given_longer_than_the_end_may_take() -> None:
    found = re.search(r"stop_grace_period: (\d+)s", COMPOSE.read_text())
    assert found is not None
    assert int(found[1]) > 60 + SAVE_S + 10


# Audits ---------------------------------------------------------------------------------------------------------------


def test_a_reset_that_a_kill_has_undone_is_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images: dict[str, Tensor] = {}
    replies = []

    def sent(made: StreamEngine, seed: int) -> None:
        replies.append(ask(made, "a", seed))
        images[replies[-1]["request"]] = pictures(2, seed)

    with engine(tmp_path / "one", batch_size=2, snapshot_every=2) as made:
        for seed in range(3):
            sent(made, seed)
        with monkeypatch.context() as patch:
            patch.setattr(made._keeper, "snapshot", lambda stream: True)
            made.command("a", "reset").result(60)
            sent(made, 3)
            time.sleep(0.1)
            shutil.copytree(tmp_path / "one", tmp_path / "two")  # as a kill leaves it
    with engine(tmp_path / "two", batch_size=2) as made:
        sent(made, 4)
        assert replies[-1]["batch"] == 3, "it goes on before the reset"
    again = replayed(tmp_path / "two", images)
    assert again == {each["request"]: each["answers"] for each in replies}


def test_a_batch_that_was_learnt_and_not_answered_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("no memory")

    with engine(tmp_path, batch_size=2) as made:
        first = ask(made, "a", 0)
        with monkeypatch.context() as patch:
            patch.setattr(learner_module, "described", fail)
            with pytest.raises(Problem, match="may have been learnt from"):
                ask(made, "a", 1)
        last = ask(made, "a", 2)
    (path,) = tmp_path.glob("streams/*/*.jsonl")
    ids = [line["requests"][0]["request"] for line in read_audit(path)[1] if line["kind"] == "requests"]
    assert len(ids) == 3
    again = replayed(tmp_path, {name: pictures(2, seed) for seed, name in enumerate(ids)})
    assert [again[each["request"]] for each in (first, last)] == [first["answers"], last["answers"]]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_stream_whose_audit_was_lost_begins_another(tmp_path: Path) -> None:
    images: dict[str, Tensor] = {}
    replies = []
    for life in range(3):
        with engine(tmp_path, batch_size=2) as made:
            for seed in range(10 * life, 10 * life + 3):
                replies.append(ask(made, "a", seed))
                images[replies[-1]["request"]] = pictures(2, seed)
                if life == 1:
                    learner = made._streams["a"].learner
                    assert learner is not None
                    assert learner.guard is not None
                    audit = learner.guard._told.audit
                    assert isinstance(audit, Audit)
                    full = os.open("/dev/full", os.O_WRONLY)
                    os.dup2(full, audit._file.fileno())
                    os.close(full)
    again = replayed(tmp_path, images)
    kept = replies[:4] + replies[6:]  # what the disk had no room for is not in any audit
    assert again == {each["request"]: each["answers"] for each in kept}
    assert [each["batch"] for each in replies] == list(range(9))
    assert len(list(tmp_path.glob("streams/*/*.jsonl"))) == 2


def test_a_stream_on_disk_says_which_audit_it_has(tmp_path: Path) -> None:
    with engine(tmp_path, batch_size=2) as made:
        ask(made, "a", 0)
    with engine(tmp_path, batch_size=2) as made:
        assert made.status("a")["audit"] == 1
        ask(made, "a", 1)
    assert len(list(tmp_path.glob("streams/*/*.jsonl"))) == 1, "which goes on"


@pytest.mark.parametrize("known", [False, True])
def test_an_audit_that_cannot_be_begun_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    def full(self: Audit, line: dict[str, Any]) -> str:
        return "No space left on device"

    if known:  # its audit is gone, so that another begins with the state
        with engine(tmp_path, batch_size=2) as made:
            ask(made, "a", 0)
        (path,) = tmp_path.glob("streams/*/*.jsonl")
        path.unlink()
    before = sorted(tmp_path.glob("streams/*/*"))
    with engine(tmp_path, batch_size=2) as made:
        with monkeypatch.context() as patch:
            patch.setattr(Audit, "write", full)
            for _ in range(2):
                with pytest.raises(Problem) as caught:
                    ask(made, "a", 1)
                assert (caught.value.status, caught.value.code) == (503, "no-storage")
        assert sorted(tmp_path.glob("streams/*/*")) == before
        assert ask(made, "a", 1)["batch"] == int(known)
    (path,) = tmp_path.glob("streams/*/*.jsonl")
    assert path.name == "0001.jsonl"


# Snapshots ------------------------------------------------------------------------------------------------------------


def unreadable(path: Path) -> Path:
    """Put what cannot be opened in a file's place; returns where the file is now."""
    aside = path.with_name("aside")
    path.rename(aside)
    path.symlink_to(path.name)
    return aside


def test_a_snapshot_that_cannot_be_read_is_no_missing_one(tmp_path: Path) -> None:
    with engine(tmp_path, batch_size=2) as made:
        ask(made, "a", 0)
    path = snapshot_of(tmp_path)
    aside = unreadable(path)
    with pytest.raises(OSError, match="symbolic links"):
        StreamEngine(served(), ServeSettings(batch_size=2), tmp_path)
    aside.replace(path)
    with engine(tmp_path, batch_size=2) as made:
        assert ask(made, "a", 1)["batch"] == 1


def test_a_snapshot_that_cannot_be_read_at_a_move_is_no_missing_one(tmp_path: Path) -> None:
    one, two = (StreamEngine(served(), ServeSettings(batch_size=2), tmp_path, writer=name) for name in ("w0", "w1"))
    ask(one, "a", 0, key="k", payload="p")
    assert one.close(60)
    path = snapshot_of(tmp_path)
    aside = unreadable(path)
    for call in (lambda: two.submit("a", pictures(2, 1)), lambda: two.status("a"), lambda: two.command("a", "reset")):
        with pytest.raises(Problem) as caught:
            call()
        assert (caught.value.status, caught.value.code) == (503, "no-storage")
    aside.replace(path)
    assert ask(two, "a", 0, key="k", payload="p")["replayed"]
    assert ask(two, "a", 1)["batch"] == 1
    assert two.close(60)


def test_a_learner_of_before_the_stream_moved_cannot_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ServeSettings(batch_size=2, snapshot_every=1)
    one, two = (StreamEngine(served(), settings, tmp_path, writer=name) for name in ("w0", "w1"))
    for each in (one, two):
        assert each._store._leases is not None
        monkeypatch.setattr(each._store._leases, "_handover", 0.1)
    monkeypatch.setattr(one._sharing, "release_asked", lambda now: None)  # it hangs
    ask(one, "a", 0)
    for seed in (1, 2):
        ask(two, "a", seed)
    one._own("a")  # as a request does that then waits
    stale = one._streams["a"]
    assert stale.learner is not None
    assert stale.learner.batches == 1
    assert not one._keeper.snapshot(stale)
    assert one._store.load("a")[0]["guard"]["batches"] == 3, "what the other one has learnt is there"
    assert ask(one, "a", 3)["batch"] == 3
    assert one.close(60)
    assert two.close(60)


def test_a_stream_that_was_deleted_on_a_shared_folder_can_be_made_again_alone(tmp_path: Path) -> None:
    shared = StreamEngine(served(), ServeSettings(batch_size=2), tmp_path, writer="w0")
    ask(shared, "a", 0)
    shared.command("a", "delete").result(60)
    assert shared.close(60)
    for batch in range(3):
        with engine(tmp_path, batch_size=2) as made:
            assert ask(made, "a", batch)["batch"] == batch
    later = StreamEngine(served(), ServeSettings(batch_size=2), tmp_path, writer="w1")
    assert ask(later, "a", 3)["batch"] == 3
    assert later.close(60)


def test_temporary_files_of_a_kill_are_removed(tmp_path: Path) -> None:
    name = ".state.safetensors.123-0123456789abcdef.part"
    with engine(tmp_path, batch_size=2) as made:
        ask(made, "a", 0)
    place = snapshot_of(tmp_path).parent
    (place / name).write_bytes(b"half")
    (place / ".claim-0123456789abcdef").write_bytes(b"half")
    shared = Store(tmp_path, served().facts(2), "w0")
    shared.close()
    assert (place / name).exists(), "another writer may be at it"
    with engine(tmp_path, batch_size=2) as made:
        assert not [path.name for path in place.iterdir() if path.name.startswith(".")]
        (place / name).write_bytes(b"half")
        made.command("a", "delete").result(60)
    assert [path.suffix for path in place.iterdir()] == [".jsonl"]


# One mapping of failures ----------------------------------------------------------------------------------------------


def test_a_state_that_cannot_be_used_is_the_same_problem_to_every_command(tmp_path: Path) -> None:
    with engine(tmp_path, batch_size=2) as made:
        ask(made, "a", 0)
        good = read_state(made.command("a", "export").result(60))
    path = snapshot_of(tmp_path)
    path.write_bytes(state_bytes({**load_state(path), "classes": 7}))
    with engine(tmp_path, batch_size=2) as made:
        for future in (
            made.submit("a", pictures(2, 1)), made.command("a", "reset"), made.command("a", "export"),
        ):  # fmt: skip
            with pytest.raises(Problem) as caught:
                future.result(60)
            assert (caught.value.status, caught.value.code) == (503, "broken-state")
        assert made.command("a", "import", good).result(60)["batches"] == 1


# After learning -------------------------------------------------------------------------------------------------------


def test_an_error_after_a_stacked_batch_was_learnt_is_that_of_its_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack(Learner(served("tent"), 2).adapter)
    learners = [Learner(served("tent"), 2, stack=stack) for _ in range(3)]
    for each in learners:
        each.answer(pictures(2, 0))
        assert each.why_not_stacked(pictures(2, 1)) == ""

    def fail(*_: Any) -> None:
        raise RuntimeError("after learning")

    monkeypatch.setattr(learners[0].guard, "tell", fail)
    monkeypatch.setattr(learners[1]._member, "lighten", fail)
    monkeypatch.setattr(stack_module, "THIN_EVERY", 1)
    monkeypatch.setattr(Stack, "_thin", fail)
    found = answer_stacked(stack, learners, [pictures(2, 1)] * 3)
    assert [isinstance(each, RuntimeError) for each in found] == [True, True, False]
    assert [each.batches for each in learners] == [2, 2, 2], "all have learnt"
    for each in learners:
        assert each.guard is not None
        assert each.guard.state.batches == 2


def test_a_stacked_batch_that_fails_after_learning_is_not_learnt_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, take = threading.Event(), StreamEngine._take

    def wait(self: StreamEngine, picked: Any) -> None:
        gate.wait(30)
        take(self, picked)

    with engine(tmp_path, "tent", batch_size=2) as made:
        for name in "ab":
            ask(made, name, 0)
        learner = made._streams["a"].learner
        assert learner is not None

        def fail(*_: Any) -> None:
            raise ValueError("after learning")

        monkeypatch.setattr(learner.guard, "tell", fail)
        monkeypatch.setattr(StreamEngine, "_take", wait)
        first = made.submit("b", pictures(2, 1))
        taken(made)
        both = [made.submit(name, pictures(2, 2)) for name in "ab"]
        gate.set()
        first.result(60)
        with pytest.raises(Problem, match="may have been learnt"):
            both[0].result(60)
        assert both[1].result(60)["batch"] == 2
        assert made.status("b")["how"] == "stacked"
        assert learner.batches == 2


# Numbers of replicas --------------------------------------------------------------------------------------------------


def test_counts_of_a_replica_are_added_up_until_a_front_asks() -> None:
    meter = Recorded()
    for _ in range(150_000):
        meter.answered("adapted", 2)
    meter.answered("late", 3)
    for _ in range(4):
        meter.rejected()
        meter.event("alarm")
    meter.batch(4, 0.5)
    meter.streams(1, 2, 3)
    told = meter.taken()
    assert sorted(map(str, told)) == sorted(map(str, [
        ("answered", ("adapted", 300_000)), ("answered", ("late", 3)), ("rejected", (4,)), ("event", ("alarm", 4)),
        ("batch", (4, 0.5)), ("streams", (1, 2, 3)),
    ]))  # fmt: skip
    for name, values in told:  # as a front tells its own meter
        getattr(Meter(), name)(*values)
    assert meter.taken() == [("streams", (1, 2, 3))]


def test_images_are_counted_once_for_each_kind_of_answer(tmp_path: Path) -> None:
    class Told(Meter):
        found: list[tuple[str, int]] = []  # noqa: RUF012

        def answered(self, by: str, images: int) -> None:
            self.found.append((by, images))

    made = StreamEngine(served("source"), ServeSettings(batch_size=2), tmp_path, Told())
    ask(made, "a", 0)
    assert made.close(60)
    assert Told.found == [("source", 2)]


def test_a_second_front_of_another_model_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    from poem.serve.ray_engine import Placement, RayEngine

    settings = ServeSettings(batch_size=2)
    theirs = {"folder": str(tmp_path), "settings": repr(settings), **described(served())}
    overview = SimpleNamespace(remote=lambda: SimpleNamespace(result=lambda timeout_s: theirs))
    made = RayEngine.__new__(RayEngine)
    made.settings = settings
    made._serve = SimpleNamespace(
        start=lambda **_: None, status=lambda: SimpleNamespace(applications={"poem": None}),
        get_app_handle=lambda name: SimpleNamespace(overview=overview),
    )  # fmt: skip
    assert made._deploy(served, tmp_path, Placement())[0] is False
    with pytest.raises(ValueError, match="another method"):
        made._deploy(lambda: served("tent"), tmp_path, Placement())
    with pytest.raises(ValueError, match="another guard"):
        made._deploy(lambda: served(budget=0.1), tmp_path, Placement())
