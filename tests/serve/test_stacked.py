"""Many streams as one batch: every stream's answers and state are those of its own adapter."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from served import engine, pictures, served
from torch import Tensor, nn

import poem
import poem.serve.stack
from poem import zoo
from poem.adapter import Adapter
from poem.guarded.audit import read_audit
from poem.guarded.guard import Guard
from poem.serve import stack_network
from poem.serve.engine import StreamEngine
from poem.serve.learner import Learner, Served, answer_stacked
from poem.serve.replay import replay_answers
from poem.serve.settings import ServeSettings
from poem.serve.stack import Stack
from poem.serve.stack_round import StackRound
from poem.serve.stack_state import Member

LOOSE = "EntropyBelow(0.85) & NotRedundant(0.97)"
METHODS: dict[str, dict[str, Any]] = {
    "source": {},
    "bn": {},
    "tent": {"lr": 0.02},
    "tent-filtered": {"lr": 0.02, "threshold": 0.5},
    "eta": {"lr": 0.01, "select": LOOSE},
    "rdumb": {"lr": 0.01, "select": LOOSE, "recover": "EveryCalls(5)"},
    "sar": {"lr": 0.01, "threshold": 0.7, "recover": "LossAverageBelow(0.5)"},
    "deyo": {"lr": 0.01, "select": "EntropyBelow(0.9) & PLPDAbove(-0.1)"},
    "poem": {"lr": 0.02, "threshold": 0.5, "rounds": 3},
    "eta+poem": {"lr": 0.01, "select": LOOSE},
    "deyo+poem": {"lr": 0.01, "select": "EntropyBelow(0.9) & PLPDAbove(-0.1)"},
    "sar*": {"lr": 0.01, "threshold": 0.8},
    "poem-official": {"lr": 0.01, "select": "EntropyBelow(0.9) & PLPDAbove(-0.2) & NotRedundant(0.97)"},
    "come": {"lr": 0.02},
    "rpl": {"lr": 0.01, "step": "Adam()", "recover": "AverageWithSource(0.9)"},
    "auto": {"select": "EntropyBelow(0.85) & NotRedundant(1.0)"},
}
"""Methods with settings that select and reset often, so that streams learn in the few batches of a test."""
FAST = {
    ("digits-gn", "rdumb"), ("digits-gn", "sar"), ("digits-gn", "deyo+poem"), ("digits-gn", "poem-official"),
    ("digits-gn", "rpl"), ("digits-bn", "bn"), ("digits-bn", "sar"), ("digits-bn", "poem"), ("digits-bn", "auto"),
    ("digits-ln", "poem"), ("digits-ln", "auto"),
}  # fmt: skip
CASES = [
    each if each in FAST else pytest.param(*each, marks=pytest.mark.slow)
    for each in (
        *(("digits-gn", method) for method in METHODS),
        *(("digits-bn", method) for method in ("source", "bn", "tent", "eta", "sar", "deyo", "poem", "auto")),
        *(("digits-ln", method) for method in ("tent", "poem", "auto")),
    )
]
STREAMS, NEAR = 4, 1e-4


@cache
def network(name: str, double: bool = False) -> tuple[nn.Module, Any]:
    model, base = zoo.load(name)
    return (model.double() if double else model), base


def made(net: str, method: str, guard: Any = False, double: bool = False, **changes: Any) -> Any:
    model, base = network(net, double)
    given = {**METHODS.get(method, {}), **changes}
    if net == "digits-bn" and "threshold" in given:  # by the statistics of one image, few answers are sure
        given["threshold"] = 0.99
    return poem.adapt(model, method, mean=base.mean, std=base.std, batch_size=4, guard=guard, **given)


class Together:
    """Streams that are stacked where they can be, beside streams that are not."""

    def __init__(self, make: Callable[[], Any], streams: int = STREAMS) -> None:
        self.alone, self.streams = [make() for _ in range(streams)], [make() for _ in range(streams)]
        self.stack = Stack(self.streams[0])
        self.members = [Member(each.adapter if isinstance(each, Guard) else each) for each in self.streams]
        self.stacked, self.worst = 0, 0.0

    def turn(self, who: list[int], images: list[Tensor]) -> None:
        """One batch of some streams."""
        expected = [self.alone[at](batch) for at, batch in zip(who, images, strict=True)]
        ready = []
        for place, (at, batch) in enumerate(zip(who, images, strict=True)):
            if self.stack.why_not(self.members[at], batch):
                self.stack.settle(self.members[at])
                self.note(self.streams[at](batch), expected[place])
            else:
                ready.append((at, place))
        found = self.ask([at for at, _ in ready], [images[place] for _, place in ready]) if ready else []
        for answer, (_, place) in zip(found, ready, strict=True):
            self.note(answer, expected[place])

    def ask(self, who: list[int], images: list[Tensor]) -> list[Tensor]:
        """The stacked answers."""
        streams, members = [self.streams[at] for at in who], [self.members[at] for at in who]
        self.stacked += len(who)
        found = []
        for each in self.stack.answer(streams, members, images):
            assert each.error is None, each.error
            assert each.logits is not None
            found.append(each.logits)
        return found

    def note(self, found: Tensor, expected: Tensor) -> None:
        assert found.shape == expected.shape
        self.worst = max(self.worst, float((found.softmax(1) - expected.softmax(1)).abs().max()))

    def settle(self) -> None:
        for member in self.members:
            self.stack.settle(member)


def some(turn: int, streams: int = STREAMS) -> list[int]:
    """Which streams come in a round, in an order that changes."""
    rng = torch.Generator().manual_seed(turn)
    order: list[int] = torch.randperm(streams, generator=rng).tolist()
    return order[: 2 + turn % (streams - 1)]


def same_state(one: Any, two: Any, near: float = 2e-3) -> None:
    """Two states have the same entries, numbers alike and all else equal."""
    assert one.keys() == two.keys()
    for name, value in one.items():
        other = two[name]
        if name == "tensors":
            assert value.keys() == other.keys()
            for key, tensor in value.items():
                assert (tensor.dtype, tensor.shape, tensor.device) == (
                    other[key].dtype,
                    other[key].shape,
                    other[key].device,
                )
                assert torch.allclose(tensor.double(), other[key].double(), rtol=near, atol=near), key
        elif name == "rng":
            assert torch.equal(value, other)
        elif name == "guard":
            plain = ("batches", "verdict", "updates", "rollbacks", "wait", "trial", "stopped")
            assert {key: value[key] for key in plain if key in value} == {
                key: other[key] for key in plain if key in other
            }
        else:
            assert value == other, name


@pytest.mark.parametrize(("net", "method"), CASES)
def test_answers_and_states_are_those_of_each_stream_alone(net: str, method: str) -> None:
    """In double precision: statistics of one image make rounding grow with every update, on some CPUs beyond 1e-3."""
    both = Together(lambda: made(net, method, double=True))
    assert both.stack.why_never == ""
    for turn in range(22):
        who = some(turn)
        both.turn(who, [pictures(1 if turn < 16 else 2, 100 * turn + at).double() for at in who])
    assert both.stacked > 40
    assert both.worst < 1e-6
    both.settle()
    if both.streams[0].recipe.learns:
        assert sum(each.totals.updates for each in both.streams) > 10, "otherwise nothing is compared"
    for alone, stream in zip(both.alone, both.streams, strict=True):
        same_state(alone.state_dict(), stream.state_dict(), near=1e-5)
        mine, other = vars(alone.totals), vars(stream.totals)
        computed = ("forwards_computed", "backwards_computed")  # alone, rows that are not selected are left out
        assert {k: v for k, v in mine.items() if k not in computed} == {
            k: v for k, v in other.items() if k not in computed
        }
        assert alone.last.selected.tolist() == stream.last.selected.tolist()
        assert alone.last.skipped == stream.last.skipped
        assert torch.allclose(alone.last.first_logits, stream.last.first_logits, atol=1e-5)


@pytest.mark.parametrize("most", [1, 65535])
@pytest.mark.parametrize("affine", [True, False, "scale alone"])
def test_batch_norm_of_single_images_is_that_of_each_stream(
    most: int, affine: bool | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a GPU's grid takes a block for every channel of all streams, and where it does not."""
    monkeypatch.setattr(stack_network, "MOST_CHANNELS", most)
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(6, affine=bool(affine))
    if affine == "scale alone":
        norm.bias = None  # type: ignore[assignment]
    body = (nn.Conv2d(3, 6, 3), norm, nn.ReLU(), nn.Conv2d(6, 8, 3), nn.BatchNorm2d(8))
    model = nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)).double().eval()
    both = Together(lambda: poem.adapt(model, "tent", lr=0.1, batch_size=4))
    for turn in range(6):
        who = some(turn)
        both.turn(who, [pictures(1, 100 * turn + at).double() for at in who])
    assert both.stacked > 10
    both.settle()
    assert sum(each.totals.updates for each in both.streams) > 10
    assert both.worst < 1e-6


@pytest.mark.parametrize(
    ("net", "method"), [("digits-bn", "auto"), ("digits-bn", "tent"), ("digits-gn", "auto"), ("digits-gn", "poem")]
)
def test_guarded_streams_are_those_alone(net: str, method: str) -> None:
    both = Together(lambda: made(net, method, guard={"snapshot_every": 2, "horizon": 32}))
    for turn in range(20):
        who = some(turn)
        both.turn(who, [pictures(1, 100 * turn + at) for at in who])
    assert both.stacked > 40
    assert both.worst < NEAR
    both.settle()
    for alone, stream in zip(both.alone, both.streams, strict=True):
        same_state(alone.state_dict(), stream.state_dict())
        assert [each.kind for each in alone.events] == [each.kind for each in stream.events]
        assert alone.verdicts == stream.verdicts


def test_a_stream_learns_in_a_stack() -> None:
    both = Together(lambda: made("digits-gn", "tent", lr=0.05))
    for turn in range(4):
        both.turn(list(range(STREAMS)), [pictures(2, 10 * turn + at) for at in range(STREAMS)])
    both.settle()
    drifts = [each.drift for each in both.streams]
    assert min(drifts) > 1e-3
    assert len(set(drifts)) == STREAMS, "each by its own images"
    assert both.worst < NEAR


def answers_of_others(change: Callable[[Tensor], Tensor], guard: Any = False) -> tuple[list[Tensor], list[Any]]:
    """What streams 1.. answer, and their states, where stream 0's images are changed."""
    both = Together(lambda: made("digits-gn", "auto", guard=guard))
    everyone = list(range(STREAMS))
    both.turn(everyone, [pictures(1, at) for at in everyone])
    for at in everyone:
        assert not both.stack.why_not(both.members[at], pictures(1, at))
    found = []
    for turn in range(1, 6):
        images = [pictures(1, 10 * turn + at) for at in everyone]
        images[0] = change(images[0])
        result = both.stack.answer(both.streams, both.members, images)
        if images[0].isfinite().all():
            assert result[0].error is None
        else:
            assert isinstance(result[0].error, ValueError)
        found += [each.logits for each in result[1:] if each.logits is not None]
    both.settle()
    return found, [each.state_dict() for each in both.streams]


@pytest.mark.parametrize("guard", [False, {"view": "shift"}])
def test_one_streams_images_change_no_other_streams_answers(guard: Any) -> None:
    plain, states = answers_of_others(lambda images: images, guard)
    for change in (lambda images: 1 - images, lambda images: images * torch.nan):
        found, other = answers_of_others(change, guard)
        assert len(found) == len(plain) == 5 * (STREAMS - 1)
        assert all(torch.equal(one, two) for one, two in zip(plain, found, strict=True)), "to the bit"
        for one, two in zip(states[1:], other[1:], strict=True):
            assert all(torch.equal(one["tensors"][key], two["tensors"][key]) for key in one["tensors"])


def test_a_stream_with_nan_is_refused_and_stays_as_it_was() -> None:
    both = Together(lambda: made("digits-bn", "tent"), 3)
    for turn in range(3):
        both.turn([0, 1, 2], [pictures(1, 10 * turn + at) for at in range(3)])
    before = both.members[1].left()
    images = [pictures(1, 50 + at) for at in range(3)]
    images[1] = images[1] * torch.nan
    found = both.stack.answer(both.streams, both.members, images)
    with pytest.raises(ValueError, match=r"finite|NaN"):
        both.alone[1](images[1])
    assert isinstance(found[1].error, ValueError)
    assert both.members[1].left() == before
    assert found[0].logits is not None
    assert found[2].logits is not None


def test_an_error_of_the_pass_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Together(lambda: made("digits-gn", "poem"), 3)
    for turn in range(3):
        both.turn([0, 1, 2], [pictures(1, 10 * turn + at) for at in range(3)])
    before = [member.left() for member in both.members]

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr("poem.serve.stack_loop.StackLoop._remember", fail)
        with pytest.raises(RuntimeError, match="no memory"):
            both.stack.answer(both.streams, both.members, [pictures(1, at) for at in range(3)])
    assert [member.left() for member in both.members] == before
    both.turn([0, 1, 2], [pictures(1, 90 + at) for at in range(3)])
    assert both.worst < NEAR


def test_an_error_late_in_a_round_changes_no_guard_either(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    audits = (tmp_path / f"{number}.jsonl" for number in range(99))

    def make() -> Any:
        return made("digits-gn", "tent", lr=0.001, guard={"horizon": 32, "snapshot_every": 3, "audit": next(audits)})

    both = Together(make, 3)
    both.turn([0, 1, 2], [pictures(1, at) for at in range(3)])
    both.turn([0], [pictures(1, 50)])  # the first is a batch ahead, so its snapshots come in other rounds
    failed = 0
    for turn in range(1, 17):
        images = [pictures(1, 100 * turn + at) for at in range(3)]
        held = [each.state for each in both.streams]
        lines = [path.read_text() for path in sorted(tmp_path.iterdir())]

        def fail(self: Member, layout: Any) -> None:
            raise torch.OutOfMemoryError("no memory")

        raised = False
        with monkeypatch.context() as patch:
            patch.setattr(Member, "snapshot", fail)
            try:
                both.stack.answer(both.streams, both.members, images)
            except torch.OutOfMemoryError:
                raised = True
        if raised:
            failed += 1
            assert all(each.state is state for each, state in zip(both.streams, held, strict=True))
            assert [path.read_text() for path in sorted(tmp_path.iterdir())] == lines
        for guard, member in zip(both.streams, both.members, strict=True):
            both.stack.settle(member)
            assert guard.adapter.totals.batches == guard.state.batches
    assert failed > 0


def test_a_guard_that_is_stopped_during_a_round_stays_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Together(lambda: made("digits-gn", "tent", guard={"horizon": 32}), 3)
    for turn in range(3):
        both.turn([0, 1, 2], [pictures(1, 10 * turn + at) for at in range(3)])
    judged = StackRound._judged
    stopping = threading.Thread(target=both.streams[0].stop)

    def slow(self: Any, asked: Any) -> Any:
        stopping.start()
        stopping.join(0.3)
        assert stopping.is_alive(), "stop waits for the round"
        return judged(self, asked)

    with monkeypatch.context() as patch:
        patch.setattr(StackRound, "_judged", slow)
        both.stack.answer(both.streams, both.members, [pictures(1, 900 + at) for at in range(3)])
    stopping.join(10)
    assert both.streams[0].state.stopped


def test_a_state_that_fits_no_row_is_one_streams_error(monkeypatch: pytest.MonkeyPatch) -> None:
    both = Together(lambda: made("digits-gn", "tent"), 3)
    for turn in range(2):
        both.turn([0, 1, 2], [pictures(1, 3 * turn + at) for at in range(3)])
    join = Member.join

    def fail(self: Member, *given: Any) -> None:
        if self is both.members[1]:
            raise KeyError("theta")
        join(self, *given)

    monkeypatch.setattr(Member, "join", fail)
    found = both.stack.answer(both.streams, both.members, [pictures(1, 10 + at) for at in range(3)])
    assert isinstance(found[1].error, KeyError)
    assert found[0].logits is not None
    assert found[2].logits is not None


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("cotta", "MeanTeacher"),
        ("roid", "Diverse"),
        ("memo", "other images"),
        ("lame", "Laplacian"),
        ("rotta", "Teacher"),
    ],
)
def test_a_recipe_that_cannot_be_stacked_says_why(method: str, why: str) -> None:
    assert why in Stack(made("digits-bn", method)).why_never


def test_a_guard_with_limits_of_its_own_is_not_stacked() -> None:
    assert "max_ms" in Stack(made("digits-bn", "auto", guard={"max_ms": 5.0})).why_never


class Mixing(nn.Module):
    """Subtracts the batch's mean: an image's answer depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x)).mean((2, 3))
        out: Tensor = self.head(y - y.mean(0))
        return out


def test_a_model_that_mixes_samples_is_found_out_by_trying() -> None:
    torch.manual_seed(0)
    adapter = poem.adapt(Mixing().eval(), "tent", batch_size=4)
    assert isinstance(adapter, Adapter)
    stack, member = Stack(adapter), Member(adapter)
    adapter(pictures(2, 0))
    assert "off by" in stack.why_not(member, pictures(2, 1))


def test_what_is_taken_alone() -> None:
    both = Together(lambda: made("digits-bn", "rdumb", recover="EveryCalls(3)"), 2)
    assert "first batch" in both.stack.why_not(both.members[0], pictures(1, 0))
    for turn in range(3):
        both.turn([0, 1], [pictures(1, 10 * turn + at) for at in range(2)])
    assert "reset" in both.stack.why_not(both.members[0], pictures(1, 0))
    both.turn([0, 1], [pictures(1, 70 + at) for at in range(2)])
    small = torch.rand(1, 3, 28, 28)
    assert "another size" in both.stack.why_not(both.members[0], small)
    assert both.worst < NEAR


def test_a_state_goes_from_a_stack_to_an_adapter_and_back() -> None:
    both = Together(lambda: made("digits-gn", "auto"))
    everyone = list(range(STREAMS))
    for turn in range(4):
        both.turn(everyone, [pictures(1, 10 * turn + at) for at in everyone])
    both.settle()
    fresh = made("digits-gn", "auto")
    fresh.load_state_dict(both.streams[2].state_dict())
    both.streams[2], both.members[2] = fresh, Member(fresh)
    for turn in range(4, 8):
        both.turn(everyone, [pictures(1, 10 * turn + at) for at in everyone])
    assert both.worst < NEAR
    both.settle()
    same_state(both.alone[2].state_dict(), fresh.state_dict())


def test_rows_of_old_rounds_are_not_kept_for_one_stream() -> None:
    both = Together(lambda: made("digits-bn", "bn"), 4)
    both.turn([0, 1, 2, 3], [pictures(1, at) for at in range(4)])
    both.turn([0, 1, 2, 3], [pictures(1, at) for at in range(4)])
    for turn in range(16):
        both.turn([0, 1, 2], [pictures(1, 10 * turn + at) for at in range(3)])
    block = both.members[3].block
    assert block is not None
    assert {len(each) for each in block.flat.values()} <= {1}


# The service --------------------------------------------------------------------------------------------------------


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """The engine waits before every step until the event is set."""
    open_gate, step = threading.Event(), StreamEngine._step

    def wait(self: StreamEngine) -> bool:
        open_gate.wait(60)
        return step(self)

    monkeypatch.setattr(StreamEngine, "_step", wait)
    yield open_gate
    open_gate.set()


def rounds(made: StreamEngine, gate: threading.Event, count: int, streams: int = 4) -> dict[str, tuple[Tensor, Any]]:
    """Several rounds in which every stream sends one image at the same time: the images and replies by request."""
    found = {}
    for turn in range(count):
        gate.clear()
        time.sleep(0.02)
        sent = []
        for at in range(streams):
            images = pictures(1, 100 * turn + at)
            sent.append((images, made.submit(f"s{at}", images)))
        gate.set()
        for images, future in sent:
            reply = future.result(120)
            found[reply["request"]] = (images, reply)
    return found


@pytest.mark.parametrize("method", [None, "tent"])
def test_the_service_stacks_and_a_replay_repeats_every_bit(
    tmp_path: Path, gate: threading.Event, method: str | None
) -> None:
    gate.set()
    with engine(tmp_path, method, batch_size=4) as made:
        found = rounds(made, gate, 6)
        assert [made.status(f"s{at}")["how"] for at in range(4)] == ["stacked"] * 4
        assert made.status("s0")["why_alone"] == ""
        assert made.summary()["how"] == "stacked"
    stacked = 0
    for path in sorted(tmp_path.glob("streams/*/*.jsonl")):
        lines = [line for line in read_audit(path)[1] if line["kind"] == "requests"]
        stacked += sum("stacked" in line for line in lines)
        again = replay_answers(path, served(method), 4, {request: images for request, (images, _) in found.items()})
        for request, answers in again.items():
            assert answers == found[request][1]["answers"], "to the last bit, since the row and the number are recorded"
    assert stacked >= 4 * 4


def test_the_service_says_why_streams_take_turns(tmp_path: Path, gate: threading.Event) -> None:
    gate.set()
    with engine(tmp_path / "a", "cotta", batch_size=4) as made:
        rounds(made, gate, 2, streams=2)
        assert made.status("s0")["how"] == "turns"
        assert "MeanTeacher" in made.status("s0")["why_alone"]
        assert "MeanTeacher" in made.summary()["why_alone"]
    with engine(tmp_path / "b", batch_size=4, stack=False) as made:
        rounds(made, gate, 2, streams=2)
        assert (made.status("s0")["how"], made.status("s0")["why_alone"]) == ("turns", "stacking is off")
    with engine(tmp_path / "c", batch_size=4) as made:
        rounds(made, gate, 2, streams=1)
        assert (made.status("s0")["how"], made.status("s0")["why_alone"]) == ("turns", "no other stream was waiting")


def test_a_fault_in_one_stream_of_the_service_is_its_own(tmp_path: Path, gate: threading.Event) -> None:
    gate.set()
    with engine(tmp_path, batch_size=4) as made:
        rounds(made, gate, 2)
        gate.clear()
        time.sleep(0.02)
        bad = made.submit("s1", pictures(1, 7) * torch.nan)
        good = [made.submit(name, pictures(1, 8)) for name in ("s0", "s2", "s3")]
        gate.set()
        with pytest.raises(Exception, match=r"NaN|finite"):
            bad.result(60)
        assert all(len(each.result(60)["answers"]) == 1 for each in good)
        assert [made.status(f"s{at}")["batches"] for at in range(4)] == [3, 2, 3, 3]


def test_stacked_streams_are_saved_and_go_on(tmp_path: Path, gate: threading.Event) -> None:
    gate.set()
    settings: dict[str, Any] = {"batch_size": 4, "live": 3, "snapshot_every": 2}
    with engine(tmp_path, **settings) as made:
        rounds(made, gate, 4)
    with engine(tmp_path, **settings) as made:
        found = rounds(made, gate, 3)
        assert [made.status(f"s{at}")["batches"] for at in range(4)] == [7] * 4
    alone = Learner(served(), 4)
    for turn in (*range(4), *range(3)):
        answers = alone.answer(pictures(1, 100 * turn + 2))
    (reply,) = [reply for _, reply in found.values() if reply["stream"] == "s2" and reply["batch"] == 6]
    assert reply["answers"][0]["label"] == answers[0]["label"]
    assert abs(reply["answers"][0]["probability"] - answers[0]["probability"]) < NEAR


def test_a_snapshot_that_fails_is_its_own_streams(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("no memory for the state")

    gate.set()
    with engine(tmp_path, batch_size=4, snapshot_every=1) as made:
        rounds(made, gate, 2)
        with monkeypatch.context() as patch:
            patch.setattr(made._streams["s1"].learner, "state_dict", fail)
            found = rounds(made, gate, 2)
            gate.clear()  # the last snapshots are written before the next step
            time.sleep(0.1)
            assert [made.status(f"s{at}")["how"] for at in range(4)] == ["stacked"] * 4
            assert [made.status(f"s{at}")["snapshot_failures"] for at in range(4)] == [0, 2, 0, 0]
            gate.set()
        assert len(found) == 8
        assert [made.status(f"s{at}")["unsaved_batches"] for at in range(4)] == [0, 2, 0, 0]


def test_a_stream_whose_answers_cannot_be_noted_is_the_only_one_refused(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    gate.set()
    with engine(tmp_path, batch_size=4) as made:
        rounds(made, gate, 2)
        monkeypatch.setattr(made._streams["s1"].learner, "note", fail)
        gate.clear()
        time.sleep(0.02)
        sent = [made.submit(f"s{at}", pictures(1, at)) for at in range(4)]
        gate.set()
        with pytest.raises(Exception, match="may have been learnt"):
            sent[1].result(60)
        assert [sent[at].result(60)["batch"] for at in (0, 2, 3)] == [2, 2, 2]


@pytest.mark.parametrize("method", [None, "tent"])
def test_streams_of_a_stacked_pass_that_fails_are_taken_alone(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch, method: str | None
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no memory\nfor the pass")

    gate.set()
    with engine(tmp_path, method, batch_size=4) as made:
        found = rounds(made, gate, 3)
        assert made.status("s0")["how"] == "stacked"
        with monkeypatch.context() as patch:
            patch.setattr("poem.serve.stack_loop.StackLoop.run", fail)
            found |= rounds(made, gate, 1)
            said = made.status("s0")
            assert said["how"] == "turns"
            assert said["why_alone"].startswith("a stacked pass of 4 images failed: no memory; at most 2")
        found |= rounds(made, gate, 2)
        assert made.status("s0")["how"] == "stacked", "two at once"
        with monkeypatch.context() as patch:
            patch.setattr("poem.serve.stack_loop.StackLoop.run", fail)
            found |= rounds(made, gate, 1)
        found |= rounds(made, gate, 1)
        assert made.summary()["how"] == made.status("s0")["how"] == "turns"
        assert "a stacked pass of 2 images failed: no memory" in made.summary()["why_alone"]
        assert [made.status(f"s{at}")["batches"] for at in range(4)] == [8] * 4
    wide = set()
    for path in sorted(tmp_path.glob("streams/*/*.jsonl")):
        lines = [line for line in read_audit(path)[1] if line["kind"] == "requests"]
        wide |= {line["stacked"]["streams"] for line in lines if "stacked" in line}
        again = replay_answers(path, served(method), 4, {request: images for request, (images, _) in found.items()})
        for request, answers in again.items():
            assert answers == found[request][1]["answers"], "no stream has learnt from the passes that failed"
    assert wide == {4, 2}


def test_an_error_while_a_model_is_tried_is_a_reason_to_take_turns(
    tmp_path: Path, gate: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> str:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Stack, "_tried_on", fail)
    gate.set()
    with engine(tmp_path, batch_size=4) as made:
        assert len(rounds(made, gate, 3)) == 12
        assert made.status("s0")["how"] == "turns"
        assert "could not be tried: no memory" in made.status("s0")["why_alone"]


def test_answers_that_cannot_be_described_are_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack(Learner(served("tent"), 4).adapter)
    learners = [Learner(served("tent"), 4, stack=stack) for _ in range(2)]
    for turn in range(2):
        for at, learner in enumerate(learners):
            learner.answer(pictures(1, 10 * turn + at))
    images = [pictures(1, 90 + at) for at in range(2)]
    assert [learner.why_not_stacked(each) for learner, each in zip(learners, images, strict=True)] == ["", ""]

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr("poem.serve.learner.described", fail)
    found = answer_stacked(stack, learners, images)
    assert all(isinstance(each, torch.OutOfMemoryError) for each in found), "returned, since both have learnt"
    assert [each.batches for each in learners] == [3, 3]


def test_a_learner_in_a_stack_answers_as_one_alone() -> None:
    given: Served = served("tent")
    like = Learner(given, 4)
    stack = Stack(like.adapter)
    alone, together = [Learner(given, 4) for _ in range(3)], [Learner(given, 4, stack=stack) for _ in range(3)]
    for turn in range(6):
        images = [pictures(1, 10 * turn + at) for at in range(3)]
        expected = [learner.answer(batch) for learner, batch in zip(alone, images, strict=True)]
        if any(learner.why_not_stacked(batch) for learner, batch in zip(together, images, strict=True)):
            found: list[Any] = [learner.answer(batch) for learner, batch in zip(together, images, strict=True)]
        else:
            found = answer_stacked(stack, together, images)
        for one, two in zip(expected, found, strict=True):
            assert (one[0]["label"], one[0]["answered_by"]) == (two[0]["label"], two[0]["answered_by"])
            assert abs(one[0]["probability"] - two[0]["probability"]) < NEAR
    assert [each.batches for each in together] == [6] * 3
    assert together[0].status()["batches"] == 6


def test_settings_say_how_many_images_are_stacked() -> None:
    with pytest.raises(ValueError, match="stack_images"):
        ServeSettings(stack_images=1)
