"""What an adapter promises, a guarded one promises too: tent, poem and auto on a batch-, group- and layer-norm net."""

from __future__ import annotations

import copy
import math
import pickle
import threading
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from adapters import on_device
from compare import assert_same_answers, assert_same_state, differing
from nets import make_net
from test_contract import NETS, Case, moved, portrait, source_of
from torch import Tensor, nn

import poem
from poem.guarded.guard import Guard

pytestmark = pytest.mark.usefixtures("as_asked")
# Small enough that within a few batches of eight there are snapshots, an alarm and verdicts that are not the first's.
SOON: dict[str, Any] = {"snapshot_every": 1, "ring": 2, "reference": 8, "alpha": 0.9, "horizon": 32}
CASES = [Case(*pair) for pair in product(("tent", "poem", "auto"), NETS)]
each_case = pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.method}/{case.kind}")


def guarded(case: Case, net: nn.Module | None = None, **settings: Any) -> Guard:
    """A fresh guarded adapter with the settings of the contract."""
    return poem.guard(case.adapter(net), **{**SOON, **settings})


def batches(count: int = 4, size: int = 8) -> list[Tensor]:
    return list(on_device(toys.images(count * size, seed=1)).split(size))


def outside(guard: Guard) -> tuple[Any, ...]:
    """What a caller sees besides the state."""
    return guard.totals, guard.last, guard.signals, guard.verdict, list(guard.events)


@each_case
def test_it_is_called_as_an_adapter(case: Case) -> None:
    guard, plain = guarded(case, when_worse="answer"), case.adapter()
    answers = list(guard.stream([(batch, "labels") for batch in batches()]))
    assert [answer.shape for answer in answers] == [plain(batch).shape for batch in batches()]
    for answer in answers:
        assert answer.dtype == torch.float32
        assert not answer.requires_grad
        torch.testing.assert_close(answer.exp().sum(1), torch.ones(8, device=answer.device))
    assert guard.totals == plain.totals
    assert (guard.totals.taught > 0) == guard.recipe.learns
    assert (guard.name, guard.recipe, guard.adapted, guard.lr) == (
        plain.name, plain.recipe, plain.adapted, plain.lr
    )  # fmt: skip
    assert guard.state.batches == 4
    module = nn.Sequential(guard.as_module())
    assert not list(module.parameters())
    assert module(batches()[0]).shape == (8, 10)


@each_case
def test_what_is_learnt_is_what_the_adapter_alone_learns_until_something_is_undone(case: Case) -> None:
    guard, plain = guarded(case, when_worse="answer"), case.adapter()
    for batch in batches():
        guard(batch)
        plain(batch)
    assert differing(moved(guard.state_dict()), moved(plain.state_dict())) == []
    assert_same_state(guard.adapter.state_dict(), plain.state_dict())
    left = source_of(case.net(), guard.adapted)
    assert bool(differing(moved(guard.state_dict()), left)) == guard.recipe.learns


@each_case
def test_only_declared_tensors_move(case: Case) -> None:
    net = case.net()
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    guard = guarded(case, net)
    for batch in batches():
        guard(batch)
        assert differing(net.state_dict(), before) == []
    assert (guard.totals.taught > 0) == guard.recipe.learns
    assert list(moved(guard.state_dict())) == guard.adapted


@each_case
def test_reset_is_a_fresh_guard(case: Case) -> None:
    guard, fresh = guarded(case, budget=0.5), guarded(case, budget=0.5)
    clean = guard.state_dict()
    for batch in reversed(batches()):
        guard(batch)
    assert guard.state.ring or guard.state.rollbacks
    guard.reset()
    assert_same_state(guard.state_dict(), clean)
    assert guard.totals.batches == 0
    assert guard.signals is None
    assert_same_answers([guard(batch) for batch in batches()], [fresh(batch) for batch in batches()])
    assert_same_state(guard.state_dict(), fresh.state_dict())


@each_case
def test_unload_gives_back_the_very_model(case: Case, tmp_path: Path) -> None:
    net = case.net()
    next(net.children()).train()
    like, values = portrait(net), {name: tensor.clone() for name, tensor in net.state_dict().items()}
    guard = guarded(case, net, audit=tmp_path / "audit")
    guard(batches()[0])
    assert guard.unload() is net
    assert portrait(net) == like
    assert differing(net.state_dict(), values) == []
    with pytest.raises(RuntimeError, match="unload"):
        guard(batches()[0])
    guard.stop()  # a switch that may be thrown at any time


@each_case
def test_frozen_leaves_the_state_bit_for_bit(case: Case) -> None:
    guard = guarded(case)
    first, second, *_ = batches()
    with guard.frozen():  # before the first batch too
        assert guard(first).isfinite().all()
    assert_same_state(guard.state_dict(), guarded(case).state_dict())
    guard(first)
    before, seen = guard.state_dict(), outside(guard)
    with guard.frozen() as same:
        assert same is guard
        one, two = guard(second), guard(second)
    assert torch.equal(one, two)
    assert_same_state(guard.state_dict(), before)
    assert outside(guard) == seen
    other = guarded(case)
    other(first)
    assert_same_answers([guard(second)], [other(second)])


@each_case
def test_frozen_with_a_budget_answers_as_the_source(case: Case) -> None:
    guard = guarded(case, budget=0.5)
    guard(batches()[0])
    with guard.frozen():
        answer = guard(batches()[1])
    torch.testing.assert_close(answer, guard.source(batches()[1]).log_softmax(1))


@pytest.mark.parametrize("way", ["dict", "file"])
@each_case
def test_a_state_goes_on_elsewhere_bit_for_bit(case: Case, way: str, tmp_path: Path) -> None:
    lenient = {"margin": 10.0, "collapse": 10.0}  # so that every state is good enough for a snapshot
    settings: dict[str, Any] = {"budget": 0.5, "max_updates": 1000, **lenient}
    here, there = guarded(case, **settings), poem.guard(case.adapter(seed=5), **SOON, **settings)
    *first, last = batches(12)
    for place, batch in enumerate(first):
        here(batch if place < 3 else 0.2 * batch)
    assert here.state.shift.rang, "an alarm is part of the state"
    assert len(here.state.ring) == 2, "so are snapshots"
    assert here.state.budget is not None
    assert here.state.budget.seen == 88
    if way == "dict":
        there.load_state_dict(here.state_dict())
    else:
        here.save(tmp_path / "state")
        there.load(tmp_path / "state")
    assert_same_state(there.state_dict(), here.state_dict())
    assert_same_answers([there(last)], [here(last)])
    assert_same_state(there.state_dict(), here.state_dict())
    # Going back is going back to the same.
    for guard in (here, there):
        guard.adapter.rollback(guard.state.ring[0][1])
    assert_same_state(there.state_dict(), here.state_dict())


def test_a_state_that_is_none_is_refused_and_changes_nothing() -> None:
    case = CASES[1]
    guard, other = guarded(case), guarded(case, budget=0.5)
    for batch in batches(2):
        guard(batch)
    before = guard.state_dict()
    assert guard.state.ring
    broken: list[tuple[Any, str]] = [
        (None, "without a guard"),
        (case.adapter().state_dict(), "without a guard"),
        (other.state_dict(), "make the guard with budget=0.5"),
        ({**before, "guard": {"schema": 2}}, "lacks 'batches'"),
        ({**before, "guard": {**before["guard"], "schema": 1}}, "in format number 2, got number 1; begin the stream"),
        (
            {**before, "guard": {key: value for key, value in before["guard"].items() if key != "schema"}},
            "in format number 2, got none, as of an older version; begin the stream anew",
        ),
        ({**before, "guard": {**before["guard"], "verdict": "both"}}, "expected the verdict"),
        ({**before, "tensors": None}, "tensors by name"),
        (
            {**before, "tensors": {**before["tensors"], "guard/ring/0/moving/theta": torch.ones(2)}},
            r"moving/theta as .* got \(2,\)",
        ),
        ({**before, "source": "another"}, "load the same weights"),
    ]
    for state, why in broken:
        with pytest.raises(ValueError, match=why):
            guard.load_state_dict(state)
        assert_same_state(guard.state_dict(), before)
    with pytest.raises(ValueError, match="besides"):
        case.adapter().load_state_dict(before)


def test_the_limits_of_a_guard_are_its_own_whatever_a_state_has() -> None:
    case = CASES[1]
    guard, other = guarded(case), guarded(case)
    for batch in batches(2):
        guard(batch)
    state = guard.state_dict()
    held = copy.deepcopy(state["guard"])
    held["shift"] |= {"alpha": 1e-9, "reference": 10**9, "seed": 7}
    held["shift"]["ranks"] |= {"limit": 10**9, "seed": 7}
    held["shift"]["jumper"]["jump"] = 0.9
    held["worse"] |= {"alpha": 1e-9, "tuned_for": 1e9}
    other.load_state_dict({**state, "guard": held})
    assert_same_state(other.state_dict(), state)
    shift, worse = state["guard"]["shift"], state["guard"]["worse"]
    for change, why in (
        ({"ring": list(range(3))}, "at most 2 snapshots"),
        ({"gradients": [0.0] * 65}, "at most 64 gradients"),
        ({"gradients": 3}, "at most 64 gradients"),
        ({"wait": "x"}, "wait to be a count"),
        ({"batches": -1}, "batches to be a count"),
        ({"stopped": 1}, "reasons in words"),
        ({"shift": {**shift, "seen": 1.5}}, "shift.seen to be a count"),
        ({"shift": {**shift, "bet": {**shift["bet"], "wealth": math.nan}}}, "shift.bet.wealth to be a finite number"),
        ({"shift": {**shift, "jumper": {**shift["jumper"], "wealths": [1.0]}}}, "three wealths"),
        ({"worse": {**worse, "total": "1"}}, "worse.total to be a finite number"),
    ):
        with pytest.raises(ValueError, match=why):
            other.load_state_dict({**state, "guard": {**state["guard"], **change}})
    for ranks in (torch.zeros(100_001), torch.zeros(2, 2), torch.tensor([1.0, 0.0]), torch.tensor([math.inf])):
        with pytest.raises(ValueError, match="in the state's shift alarm"):
            other.load_state_dict({**state, "tensors": {**state["tensors"], "guard/ranks": ranks.double()}})
    assert_same_state(other.state_dict(), state)


def test_a_budget_that_no_guard_can_have_is_refused() -> None:
    case = CASES[1]
    guard, other = guarded(case, budget=0.5), guarded(case, budget=0.5)
    for batch in batches(2):
        guard(batch)
    state = guard.state_dict()
    held, seen = state["guard"], 16
    assert held["budget"]["seen"] == seen
    for budget in ({"seen": 10**9}, {"spent": 9}, {"spent": -1}, {"spent": 0.5}, {"seen": True, "spent": 0}):
        with pytest.raises(ValueError, match="expected a budget in the state"):
            other.load_state_dict({**state, "guard": {**held, "budget": {**held["budget"], **budget}}})
    other.load_state_dict(state)
    assert_same_state(other.state_dict(), state)


@each_case
def test_a_deepcopy_goes_its_own_way(case: Case) -> None:
    guard = guarded(case, source_data=on_device(toys.images(16, seed=9)))
    first, second, third, _ = batches()
    guard(first)
    guard(second)
    before = guard.state_dict()
    twin = copy.deepcopy(guard)
    assert twin.model is not guard.model
    assert_same_state(twin.state_dict(), before)
    answer = twin(third)
    assert_same_state(guard.state_dict(), before)
    assert_same_answers([guard(third)], [answer])
    assert_same_state(twin.state_dict(), guard.state_dict())
    twin.reset()
    guard.reset()
    assert twin.state.shift.given, "the reference from source data is known to the copy"
    assert_same_state(twin.state_dict(), guard.state_dict())
    with pytest.raises(TypeError, match=r"guard\.save"):
        pickle.dumps(guard)


@each_case
def test_threads_take_turns(case: Case) -> None:
    guard, other, batch = guarded(case), guarded(case), batches()[0]
    errors: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(3):
                guard(batch)
                with guard.frozen():
                    guard(batch)
        except BaseException as error:  # shown in the main thread
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for _ in range(9):
        other(batch)
    assert guard.state.batches == guard.totals.batches == 9
    assert_same_state(guard.state_dict(), other.state_dict())


class Interrupt:
    """A hook that raises at the n-th forward pass of the network from now on."""

    def __init__(self) -> None:
        self.left = -1

    def __call__(self, *_: object) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("every", [1, 2])
@each_case
def test_an_interrupt_leaves_adapter_and_guard_as_before_the_batch(case: Case, every: int) -> None:
    nets, hooks = [case.net(), case.net()], [Interrupt(), Interrupt()]
    for net, hook in zip(nets, hooks, strict=True):
        net.register_forward_hook(hook)
    guard, calm = (guarded(case, net, every=every) for net in nets)
    first, second, third, _ = batches()
    for each in (guard, calm):
        each(first)
        if every == 2:
            each(second)
    before, seen, raised = guard.state_dict(), outside(guard), 0
    for place in range(1, 20):
        hooks[0].left = place
        try:
            answer = guard(third)
        except KeyboardInterrupt:
            raised += 1
        else:
            break
        assert_same_state(guard.state_dict(), before)
        assert outside(guard) == seen
        assert torch.is_grad_enabled()
    hooks[0].left = -1
    # The source's pass, unless the adapter's has its answers; that of the adapter; and the one over shifted images.
    assert raised >= (2 if guard.recipe.statistics.source_copy is not None and not guard.recipe.learns else 3)
    assert_same_answers([answer], [calm(third)])
    assert_same_state(guard.state_dict(), calm.state_dict())


@each_case
def test_broken_images_are_refused_and_move_nothing(case: Case) -> None:
    guard = guarded(case)
    first, second, *_ = batches()
    guard(first)
    before, seen = guard.state_dict(), outside(guard)
    for bad in (torch.nan, torch.inf):
        broken = second.clone()
        broken[5, 1, 4, 5] = bad
        with pytest.raises(ValueError, match="NaN or Inf in sample 5"):
            guard(broken)
        with guard.frozen(), pytest.raises(ValueError, match="NaN or Inf in sample 5"):
            guard(broken)
    for strange in (second[:0], second[0], (255 * second).byte(), second[:, :2], [1.0], None):
        with pytest.raises((ValueError, TypeError)):
            guard(strange)  # type: ignore[arg-type]
    assert_same_state(guard.state_dict(), before)
    assert outside(guard) == seen
    other = guarded(case)
    other(first)
    assert_same_answers([guard(second)], [other(second)])


@each_case
def test_batches_of_one_and_a_short_last_batch(case: Case) -> None:
    guard = guarded(case)
    for image in on_device(toys.images(4, seed=20)).split(1):
        answer = guard(image)
        assert answer.shape == (1, 10)
        assert bool(answer.isfinite().all())
    assert guard.state.batches == 4
    guard = guarded(case)
    first, second, *_ = batches()
    assert [len(guard(batch)) for batch in (first, second, first[:3], second[:1])] == [8, 8, 3, 1]
    assert guard.state.averages is not None
    assert int(guard.state.averages.seen) == 20
    assert all(bool(tensor.isfinite().all()) for tensor in guard.state_dict()["tensors"].values())


@pytest.mark.parametrize("method", ["tent", "poem", "auto"])
@pytest.mark.parametrize("kind", NETS)
def test_a_model_of_one_logit(method: str, kind: str) -> None:
    net = toys.calibrated(make_net(kind, classes=1, sharpness=20.0))
    guard = poem.guard(poem.adapt(net, method, lr=0.001), **SOON, budget=0.5)
    for batch in toys.images(24, seed=1).split(8):
        answer = guard(batch)
        assert answer.shape == (8, 1)
        assert bool(answer.isfinite().all())
    guard.stop()
    torch.testing.assert_close(guard(batch), net(batch).detach(), atol=1e-4, rtol=1e-4)
    with guard.frozen():
        assert guard(batch).shape == (8, 1)


@pytest.mark.parametrize("kind", NETS)
def test_the_callers_modes_dtype_and_chance_are_respected(kind: str) -> None:
    case = Case("auto", kind)
    calm = guarded(case)
    expected, chance = [calm(batch) for batch in batches(3)], torch.get_rng_state()
    for mode in (torch.no_grad, torch.inference_mode):
        guard = guarded(case)
        with mode():
            answers = [guard(batch.clone()) for batch in batches(3)[:2]]
        answers.append(guard(batches(3)[2]))  # and on outside it
        assert_same_answers(answers, expected)
        assert_same_state(guard.state_dict(), calm.state_dict())
    assert torch.equal(torch.get_rng_state(), chance)
    guard = guarded(case, case.net().double())
    assert guard(batches()[0].double()).dtype == torch.float64


@each_case
def test_while_stopped_the_source_alone_is_computed_and_resume_goes_on_from_the_stop(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    guard, twin = guarded(case, budget=0.5), guarded(case, budget=0.5)
    first, second, third, fourth = batches()
    for each in (guard, twin):
        each(first)
        each.stop()
    source, rows, before = guard.adapter.source, list[int](), guard.state

    def counted(images: Tensor) -> Tensor:
        rows.append(len(images))
        return source(images)

    with monkeypatch.context() as patch:
        unasked = lambda *_: pytest.fail("the adapted network was called")  # noqa: E731
        patch.setattr(poem.Adapter, "answer_with_record", unasked)
        patch.setattr(guard.adapter, "source", counted)
        for batch in (second, third):
            torch.testing.assert_close(guard(batch), source(batch).log_softmax(1), atol=1e-5, rtol=1e-4)
    assert rows == [len(second), len(third)], "no shifted view"
    assert guard.verdict == "source"
    assert set(guard.verdicts) == {"source"}
    assert guard.signals is not None
    unknown = {name for name, value in guard.signals.as_dict().items() if value is None}
    assert unknown == {
        "source_steadiness", "adapted_steadiness", "source_balance", "adapted_balance", "runs", "adapted_runs",
        "evidence",
    }  # fmt: skip
    assert replace(guard.state, batches=0, shift=before.shift, skipped="") == replace(before, batches=0)
    for each in (guard, twin):
        each.resume()
    assert torch.equal(guard(fourth), twin(fourth)), "as if nothing had come while it was stopped"
    assert differing(moved(guard.state_dict()), moved(twin.state_dict())) == []


@each_case
def test_stop_answers_with_the_source_until_resume(case: Case) -> None:
    guard = guarded(case, when_worse="answer")
    first, second, third, _ = batches()
    guard(first)
    before, taught = moved(guard.state_dict()), guard.totals.taught
    guard.stop("a person said so")
    assert guard.verdict == "source"
    with guard.frozen():
        torch.testing.assert_close(guard(second), guard.source(second).log_softmax(1), atol=1e-5, rtol=1e-4)
    for batch in (second, third):
        torch.testing.assert_close(guard(batch), guard.source(batch).log_softmax(1), atol=1e-5, rtol=1e-4)
        assert guard.verdict == "source"
    assert guard.totals.taught == taught
    assert differing(moved(guard.state_dict()), before) == []
    assert [(event.kind, event.why) for event in guard.events if event.kind == "stop"] == [("stop", "a person said so")]
    twin = guarded(case, when_worse="answer")
    twin.load_state_dict(guard.state_dict())
    twin(second)
    assert twin.verdict == "source", "a kill switch is part of the state"
    guard.resume()
    guard(second)
    guard(third)
    assert guard.totals.batches == 3
    kinds = {event.kind for event in guard.events if event.batch >= 3}
    assert "resume" in kinds
    assert kinds <= {"resume", "alarm", "verdict"}
