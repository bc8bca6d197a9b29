"""The engine without HTTP: queues, micro-batches, deadlines, snapshots, keys, and answers equal to a replay."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from served import engine, pictures, served, taken, until
from torch import Tensor

from poem._util.state_file import load_state, read_state, state_bytes
from poem.guarded.audit import read_audit
from poem.serve.engine import StreamEngine
from poem.serve.learner import Learner, Served
from poem.serve.ledger import Ledger, scoped_key
from poem.serve.micro_batches import MicroBatches
from poem.serve.problems import Problem
from poem.serve.replay import replay_answers
from poem.serve.settings import ServeSettings, check_stream_id
from poem.serve.store import Store, folder_name
from poem.serve.turns import COUNTED, saved_counts
from poem.streams.loading.prepare import Prepare


def ask(made: StreamEngine, stream: str, images: Tensor, **rest: Any) -> dict[str, Any]:
    return made.submit(stream, images, **rest).result(60)


def audits(folder: Path) -> list[Path]:
    return sorted(folder.glob("streams/*/*.jsonl"))


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Every learner's answers wait until the event is set."""
    gate, answer = threading.Event(), Learner.answer

    def wait(self: Learner, images: Tensor) -> Any:
        gate.wait(30)
        return answer(self, images)

    monkeypatch.setattr(Learner, "answer", wait)
    yield gate
    gate.set()


def test_a_stream_answers_as_an_adapter_of_its_own(tmp_path: Path) -> None:
    learner = Learner(served(), 8)
    batches = [pictures(8, seed) for seed in range(4)]
    with engine(tmp_path, batch_size=8) as made:
        for batch in batches:
            ask(made, "other", 1 - batch)
            assert ask(made, "door", batch)["answers"] == learner.answer(batch)
        assert made.status("door")["batches"] == 4
        assert made.status("door")["how"] == "turns"


def test_micro_batches_are_of_one_stream_and_in_order(tmp_path: Path, blocked: threading.Event) -> None:
    with engine(tmp_path, batch_size=8) as made:
        first = made.submit("a", pictures(1, 0))
        taken(made)
        rest = [made.submit("ab"[at % 2], pictures(3, at)) for at in range(8)]
        blocked.set()
        assert first.result(60)["batch"] == 0
        found = [each.result(60) for each in rest]
    assert [each["batch"] for each in found[0::2]] == [1, 1, 2, 2], "3 + 3 images fit into 8, another 3 do not"
    assert [each["batch"] for each in found[1::2]] == [0, 0, 1, 1]
    for path in audits(tmp_path):
        lines = [line for line in read_audit(path)[1] if line["kind"] == "requests"]
        ids = {each["request"] for line in lines for each in line["requests"]}
        streams = {reply["stream"] for reply in (first.result(), *found) if reply["request"] in ids}
        assert len(streams) == 1
        assert path.stat().st_mode & 0o777 == 0o600
        assert path.parent.stat().st_mode & 0o777 == 0o700


def test_a_full_queue_is_429_and_leaves_no_key(tmp_path: Path, blocked: threading.Event) -> None:
    with engine(tmp_path, queue=2, batch_size=1) as made:
        waiting = [made.submit("a", pictures(1, 0))]
        taken(made)
        waiting += [made.submit("a", pictures(1, at)) for at in (1, 2)]
        for _ in range(2):
            with pytest.raises(Problem, match="fewer than 2 requests") as caught:
                made.submit("a", pictures(1, 3), key="k", payload="p")
            assert (caught.value.status, caught.value.headers()) == (429, {"Retry-After": "1"})
        blocked.set()
        assert [each.result(60)["batch"] for each in waiting] == [0, 1, 2]
        assert "replayed" not in ask(made, "a", pictures(1, 3), key="k", payload="p")
        assert made.status("a")["rejected"] == 2


def test_a_late_request_gets_the_sources_answer_and_teaches_nothing(tmp_path: Path, blocked: threading.Event) -> None:
    images = pictures(2, 7)
    with engine(tmp_path, batch_size=4) as made:
        first = made.submit("a", pictures(4, 0))
        taken(made)
        late = made.submit("a", images, deadline_ms=1)
        time.sleep(0.05)
        blocked.set()
        reply = late.result(60)
        first.result(60)
        assert reply["late"] is True
        assert {each["answered_by"] for each in reply["answers"]} == {"source"}
        assert made.status("a")["late"] == 1
        assert made.status("a")["batches"] == 1
        assert not ask(made, "a", images, deadline_ms=60_000)["late"]
    (path,) = audits(tmp_path)
    again = replay_answers(
        path, served(), 4, {reply["request"]: images, first.result()["request"]: pictures(4, 0),
                            _requests(path)[-1]: images},
    )  # fmt: skip
    assert again[reply["request"]] == reply["answers"]


def _requests(path: Path) -> list[str]:
    return [each["request"] for line in read_audit(path)[1] if line["kind"] == "requests" for each in line["requests"]]


def test_many_streams_at_once_equal_a_replay_of_their_audits(tmp_path: Path) -> None:
    sent: dict[str, Tensor] = {}
    replies: list[dict[str, Any]] = []
    lock = threading.Lock()

    def feed(made: StreamEngine, stream: str, seed: int) -> None:
        waiting: list[tuple[Tensor, Future[dict[str, Any]]]] = []
        for at in range(12):
            images = pictures(1 + at % 3, 100 * seed + at)
            waiting.append((images, made.submit(stream, images, deadline_ms=1 if at % 5 == 4 else None)))
        for images, future in waiting:
            reply = future.result(120)
            with lock:
                sent[reply["request"]] = images
                replies.append(reply)

    with engine(tmp_path, batch_size=4, live=3, snapshot_every=3) as made:
        threads = [threading.Thread(target=feed, args=(made, f"s{at}", at)) for at in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    again: dict[str, Any] = {}
    for path in audits(tmp_path):
        again |= replay_answers(path, served(), 4, sent)
    assert len(replies) == 72
    assert any(each["late"] for each in replies), "the deadline of 1 ms was kept: the test shows nothing"
    assert again == {each["request"]: each["answers"] for each in replies}
    assert any("resumed" in path.read_text() for path in audits(tmp_path)), "no stream went to disk and came back"


def test_an_audit_of_the_service_is_repeated_by_poem_replay(tmp_path: Path) -> None:
    from poem.guarded.replay import replay

    batches = [pictures(4, seed) for seed in range(3)]
    with engine(tmp_path, batch_size=4) as made:
        for batch in batches:
            ask(made, "a", batch)
    (path,) = audits(tmp_path)
    guard = Learner(served(), 4).guard
    assert guard is not None
    assert str(replay(path, guard, batches)) == "3 batches repeated, all identical"


def test_keys_are_answered_as_before_also_after_a_restart(tmp_path: Path) -> None:
    images = pictures(2, 0)
    with engine(tmp_path) as made:
        first = ask(made, "a", images, key="k", payload="one")
        again = ask(made, "a", images, key="k", payload="one")
        assert again == {**first, "replayed": True}
        assert made.status("a")["batches"] == 1
        with pytest.raises(Problem, match="another payload") as caught:
            made.submit("a", images, key="k", payload="two")
        assert caught.value.status == 422
        assert "replayed" not in ask(made, "b", images, key="k", payload="two"), "keys are those of a stream"
    with engine(tmp_path) as made:
        assert ask(made, "a", images, key="k", payload="one") == {**first, "replayed": True}
        assert made.status("a")["batches"] == 1


def test_a_key_in_flight_is_a_conflict(tmp_path: Path, blocked: threading.Event) -> None:
    with engine(tmp_path) as made:
        first = made.submit("a", pictures(1, 0), key="k", payload="one")
        with pytest.raises(Problem) as caught:
            made.submit("a", pictures(1, 0), key="k", payload="one")
        assert caught.value.status == 409
        blocked.set()
        assert first.result(60)["batch"] == 0


def test_keys_expire_and_the_newest_are_kept() -> None:
    ledger = Ledger(most=2, expiry_s=10)
    for at, key in enumerate("abc"):
        assert ledger.claim(key, "p", at) is None
        ledger.complete(key, {"at": at}, at)
    assert ledger.claim("a", "p", 3) is None, "the oldest of three is dropped"
    assert ledger.claim("c", "p", 3) == {"at": 2}
    assert ledger.claim("c", "other", 13) is None, "after 10 seconds it may be used anew"
    other = Ledger(most=2, expiry_s=10)
    other.load_plain([["x", "p", {"at": 1}, 5.0], "no entry", ["y"]])
    assert other.claim("x", "p", 6) == {"at": 1}
    assert scoped_key("token", "k") != scoped_key("other", "k")


def test_idle_streams_go_to_disk_and_come_back_the_same(tmp_path: Path) -> None:
    batches = [pictures(count, seed) for seed, count in enumerate((4, 4, 1, 2, 1, 3))]
    learner = Learner(served(), 4)
    with engine(tmp_path, batch_size=4, idle_s=0.05, snapshot_every=100) as made:
        for batch in batches:
            assert ask(made, "a", batch)["answers"] == learner.answer(batch)
            until = time.monotonic() + 10
            while made.status("a")["live"] and time.monotonic() < until:
                time.sleep(0.02)
            assert not made.status("a")["live"]
        assert made.status("a")["batches"] == 6


@pytest.mark.parametrize("method", [None, "tent"])
def test_a_model_of_no_fixed_size_comes_back_the_same(method: str | None) -> None:
    whole = Served(**{**vars(served(method)), "prepare": Prepare()})
    counts = (4, 4, 1, 2, 1, 3, 1, 4)
    stays, moves = Learner(whole, 4), Learner(whole, 4)
    for seed, count in enumerate(counts):
        assert moves.answer(pictures(count, seed)) == stays.answer(pictures(count, seed)), seed
        assert moves.last_hash == stays.last_hash, f"{seed}: the last bits differ"
        state = moves.state_dict()
        moves.close()
        moves = Learner(whole, 4)
        moves.load_state_dict(state)


def test_reset_export_import_and_delete(tmp_path: Path) -> None:
    batches = [pictures(4, seed) for seed in range(4)]
    with engine(tmp_path, batch_size=4) as made:
        first = [ask(made, "a", batch)["answers"] for batch in batches]
        state = made.command("a", "export").result(60)
        assert made.command("b", "import", read_state(state)).result(60)["batches"] == 4
        last = [ask(made, name, batches[0]) for name in "ab"]
        assert last[0]["answers"] == last[1]["answers"]
        assert made.command("a", "reset").result(60)["batches"] == 0
        assert [ask(made, "a", batch)["answers"] for batch in batches] == first
        made.command("a", "delete").result(60)
        with pytest.raises(Problem, match="no stream 'a'") as caught:
            made.status("a")
        assert caught.value.status == 404
        assert [ask(made, "a", batch)["answers"] for batch in batches] == first
    (imported,) = [path for path in audits(tmp_path) if path.with_suffix(".safetensors").exists()]
    answers = replay_answers(imported, served(), 4, {last[1]["request"]: batches[0]})
    assert answers == {last[1]["request"]: last[1]["answers"]}


def test_a_state_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    with engine(tmp_path, batch_size=4) as made:
        ask(made, "a", pictures(4, 0))
        before = made.command("a", "export").result(60)
        good = read_state(before)
        moved = {key: torch.full_like(each, float("nan")) for key, each in good["tensors"].items() if "mean" in key}
        for broken in (
            {**good, "guard": None}, {**good, "recipe": {}}, {**good, "tensors": {}}, {"schema": 3},
            {**good, "guard": {**good["guard"], "gradients": ["a"], "wait": "b"}},
            {**good, "tensors": {**good["tensors"], **moved}},
        ):  # fmt: skip
            with pytest.raises(Problem) as caught:
                made.command("a", "import", broken).result(60)
            assert (caught.value.status, caught.value.code) == (422, "state-refused")
        assert made.command("a", "export").result(60) == before


def test_images_that_are_refused_leave_the_state_as_it_was(tmp_path: Path) -> None:
    with engine(tmp_path, batch_size=4) as made:
        ask(made, "a", pictures(4, 0))
        before = made.command("a", "export").result(60)
        bad = pictures(1, 0)
        bad[0, 0, 0, 0] = float("nan")
        for images in (bad, torch.rand(1, 5, 32, 32)):
            with pytest.raises(Problem) as caught:
                ask(made, "a", images)
            assert caught.value.status == 422
        with pytest.raises(Problem, match="1 to 4 images") as caught:
            ask(made, "a", pictures(5, 0))
        assert caught.value.status == 413
        assert made.command("a", "export").result(60) == before
        with pytest.raises(Problem):
            ask(made, "never", bad)
        assert [each["stream"] for each in made.streams()] == ["a"], "a stream that answered nothing leaves no trace"


def test_limits_on_streams_and_names(tmp_path: Path) -> None:
    with engine(tmp_path, max_streams=2) as made:
        for name in "ab":
            ask(made, name, pictures(1, 0))
        with pytest.raises(Problem, match="at most 2 streams") as caught:
            made.submit("c", pictures(1, 0))
        assert caught.value.status == 429
    for name in ("", "..", "../a", "a/b", "a\\b", "-a", "a" * 65, "a\n", "é", "a\x00", "%2e"):
        with pytest.raises(Problem) as caught:
            check_stream_id(name)
        assert caught.value.status == 422


def test_a_folder_of_another_method_or_in_use_is_refused(tmp_path: Path) -> None:
    with engine(tmp_path) as made:
        ask(made, "a", pictures(1, 0))
        with pytest.raises(OSError, match="no other service uses"):
            StreamEngine(served(), ServeSettings(), tmp_path)
    with pytest.raises(ValueError, match=r"other .*recipe"):
        StreamEngine(served("tent"), ServeSettings(), tmp_path)


def test_a_folder_without_a_stream_is_taken_over_by_other_settings(tmp_path: Path) -> None:
    with engine(tmp_path) as made:
        ask(made, "a", pictures(1, 0))
        made.command("a", "delete").result(60)
    with engine(tmp_path, "tent") as made:
        assert made.streams() == []
        ask(made, "a", pictures(1, 0))
    with pytest.raises(ValueError, match=r"other .*recipe"):
        StreamEngine(served(), ServeSettings(), tmp_path)
    with engine(tmp_path, "tent") as made:
        assert made.status("a")["batches"] == 1


def test_an_empty_folder_that_others_may_share_or_that_is_no_services_is_not_taken_over(tmp_path: Path) -> None:
    first = StreamEngine(served(), ServeSettings(), tmp_path / "shared", writer="one")
    with pytest.raises(ValueError, match=r"other .*recipe"):
        StreamEngine(served("tent"), ServeSettings(), tmp_path / "shared", writer="two")
    assert first.close(60)
    (tmp_path / "own").mkdir()
    path = tmp_path / "own" / "service.json"
    path.write_text('{"name": "something else"}')
    with pytest.raises(ValueError, match="expected a folder with states of this service"):
        StreamEngine(served(), ServeSettings(), tmp_path / "own")
    assert path.read_text() == '{"name": "something else"}'


def test_a_disk_that_is_full_stops_no_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with engine(tmp_path, batch_size=2, snapshot_every=1) as made:
        ask(made, "a", pictures(2, 0))
        monkeypatch.setattr(Store, "save", full)
        for seed in range(3):
            ask(made, "a", pictures(2, seed))
        time.sleep(0.1)
        assert made.status("a")["snapshot_failures"] >= 2
        monkeypatch.undo()
        ask(made, "a", pictures(2, 9))
        until = time.monotonic() + 10
        while made.status("a")["unsaved_batches"] and time.monotonic() < until:
            time.sleep(0.02)
        assert made.status("a")["unsaved_batches"] == 0


def test_a_key_whose_turn_failed_may_come_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no memory")

    with engine(tmp_path, batch_size=2) as made:
        ask(made, "a", pictures(2, 0))
        with monkeypatch.context() as patch:
            patch.setattr(MicroBatches, "take", fail)
            with pytest.raises(Problem, match="inside the service"):
                ask(made, "a", pictures(2, 1), key="k", payload="p")
        with monkeypatch.context() as patch:
            patch.setattr(Learner, "source", fail)
            with pytest.raises(Problem, match="nothing was learnt"):
                ask(made, "a", pictures(2, 1), key="k", payload="p", deadline_ms=0.001)
        assert ask(made, "a", pictures(2, 1), key="k", payload="p")["batch"] == 1


def test_a_late_request_of_a_broken_state_says_so_and_may_come_again(tmp_path: Path) -> None:
    with engine(tmp_path, batch_size=2) as made:
        ask(made, "a", pictures(2, 0))
    path = tmp_path / "streams" / folder_name("a") / "state.safetensors"
    path.write_bytes(state_bytes({**load_state(path), "classes": 7}))
    with engine(tmp_path, batch_size=2) as made:
        for deadline in (0.001, 0.001, None):
            with pytest.raises(Problem) as caught:
                ask(made, "a", pictures(2, 1), key="k", payload="p", deadline_ms=deadline)
            assert (caught.value.status, caught.value.code) == (503, "broken-state")


def test_an_error_after_learning_says_that_it_may_have_been_learnt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with engine(tmp_path, batch_size=2) as made:
        with monkeypatch.context() as patch:
            patch.setattr(Learner, "note", full)
            with pytest.raises(Problem, match="may have been learnt"):
                ask(made, "a", pictures(2, 0))
        assert ask(made, "a", pictures(2, 1))["batch"] == 1


def failing(made: StreamEngine, stream: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From now on the stream's state cannot be read."""

    def fail() -> None:
        raise RuntimeError("no memory for the state")

    monkeypatch.setattr(made._streams[stream].learner, "state_dict", fail)


def test_a_stream_that_cannot_be_saved_keeps_no_other_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "poem.serve")
    made = StreamEngine(served(), ServeSettings(batch_size=2, snapshot_every=50), tmp_path)
    for seed in range(3):
        for name in "abc":
            ask(made, name, pictures(2, seed))
    failing(made, "a", monkeypatch)
    assert made.close(60) is False, "a has two batches that are not saved"
    assert stops(caplog) == [("WARNING", "stopped: 2 streams are saved, 1 could not be")]
    caplog.clear()
    assert {name: made._streams[name].unsaved for name in "abc"} == {"a": 2, "b": 0, "c": 0}
    with engine(tmp_path, batch_size=2) as again:
        assert {name: again.status(name)["batches"] for name in "abc"} == {"a": 1, "b": 3, "c": 3}
    assert stops(caplog) == [("INFO", "stopped: 3 streams are saved")]


def stops(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    """The lines of the log at an end, with their levels."""
    said = [(each.levelname, each.getMessage()) for each in caplog.records]
    return [each for each in said if each[1].startswith("stopped")]


def test_the_folder_is_free_after_a_stream_could_not_be_put_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = StreamEngine(served(), ServeSettings(batch_size=2), tmp_path)
    ask(made, "a", pictures(2, 0))

    def fail(stream: Any) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(made._keeper, "put_away", fail)
    made.close(60)
    with engine(tmp_path, batch_size=2) as again:
        assert ask(again, "a", pictures(2, 1))["batch"] == 1


def test_counts_go_on_after_a_restart_and_not_after_a_deletion(tmp_path: Path) -> None:
    with engine(tmp_path, batch_size=4) as made:
        for seed in range(3):
            ask(made, "a", pictures(4, seed), key=f"k{seed}", payload="p")
        ask(made, "a", pictures(4, 0), key="k0", payload="p")
        ask(made, "a", pictures(2, 9), deadline_ms=1e-3)
        before = made.status("a")
    names = ("requests", "images", "late", "replayed")
    assert [before[name] for name in names] == [4, 14, 1, 1]
    with engine(tmp_path, batch_size=4) as made:
        assert [made.status("a")[name] for name in ("batches", *names)] == [3, 4, 14, 1, 1]
        assert made.status("a")["snapshots"] == 2, "after the first batch, and at the end"
        ask(made, "a", pictures(4, 3))
        assert [made.status("a")[name] for name in ("batches", *names)] == [4, 5, 18, 1, 1]
        made.command("a", "delete").result(60)
        ask(made, "a", pictures(4, 4))
        assert [made.status("a")[name] for name in ("batches", *names)] == [1, 1, 4, 0, 0]


def test_counts_begin_at_0_for_a_request_that_waits_behind_a_deletion(tmp_path: Path, blocked: threading.Event) -> None:
    with engine(tmp_path, batch_size=4) as made:
        blocked.set()
        for seed in range(2):
            ask(made, "a", pictures(4, seed))
        blocked.clear()
        held = made.submit("a", pictures(4, 2))
        deleted = made.command("a", "delete")
        after = made.submit("a", pictures(3, 3))
        assert made.status("a")["requests"] == 2, "the engine is held"
        blocked.set()
        assert held.result(60)["batch"] == 2
        deleted.result(60)
        assert after.result(60)["batch"] == 0
        status = made.status("a")
    assert [status[name] for name in ("batches", "requests", "images")] == [1, 1, 3]


@pytest.mark.parametrize("counts", [None, [], {"images": -1, "requests": True}, {"images": "7", "requests": 1.5}])
def test_counts_of_a_damaged_snapshot_begin_at_0(counts: Any) -> None:
    assert saved_counts({"counts": counts}) == dict.fromkeys(COUNTED, 0)


def test_the_status_names_the_streams_folder_and_the_folders_audit_names_the_stream(tmp_path: Path) -> None:
    with engine(tmp_path, batch_size=4) as made:
        ask(made, "door", pictures(4, 0))
        ask(made, "yard", pictures(4, 1))
        places = {name: tmp_path / made.status(name)["folder"] for name in ("door", "yard")}
    for name, place in places.items():
        assert (place / "state.safetensors").is_file()
        assert read_audit(place / "0001.jsonl")[0]["run"]["stream"] == name
        for path in (place, *place.iterdir()):
            assert path.stat().st_mode & 0o077 == 0, "for the owner alone"


def test_the_source_is_served_without_a_guard(tmp_path: Path) -> None:
    with engine(tmp_path, "source") as made:
        reply = ask(made, "a", pictures(3, 0))
        assert {each["answered_by"] for each in reply["answers"]} == {"source"}
        assert made.summary()["guarded"] is False


def test_a_service_that_ends_answers_what_is_queued_and_takes_no_more(tmp_path: Path, blocked: threading.Event) -> None:
    made = StreamEngine(served(), ServeSettings(batch_size=2, wait_ms=5000), tmp_path)
    waiting = [made.submit("a", pictures(1, at)) for at in range(5)]
    ender = threading.Thread(target=made.close)
    ender.start()
    until(lambda: not made.ready)
    with pytest.raises(Problem, match="ending") as caught:
        made.submit("a", pictures(1, 0))
    assert caught.value.status == 503
    blocked.set()
    ender.join(60)
    assert [each.result(1)["batch"] for each in waiting] == [0, 0, 1, 1, 2]
    with engine(tmp_path, batch_size=2) as again:
        assert again.status("a")["batches"] == 3
