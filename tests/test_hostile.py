"""No silent wrong answer: odd models, odd inputs, other threads and signals, each with what must come out."""

from __future__ import annotations

import copy
import logging
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare import assert_same_answers, fingerprint
from learners import RICH
from nets import Wrapped, make_net
from test_contract import Case
from torch import Tensor
from toys import images, small_batches

import poem

# The network may write into what it is given.


@pytest.mark.parametrize("how", ["in place", "through data", "of a view"])
@pytest.mark.parametrize("inside", [False, True], ids=["raw", "normalised"])
def test_a_network_that_writes_into_its_input_sees_it_once(how: str, inside: bool) -> None:
    class Writing(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            target = x.data if how == "through data" else x[:, :] if how == "of a view" else x
            target.sub_(0.5).mul_(2.0)
            return super().forward(x)

    class Copying(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward((x - 0.5) * 2.0)

    more: dict[str, Any] = {"mean": [0.4] * 3, "std": [0.3] * 3} if inside else {}
    for method in ("poem", "deyo", "sar"):
        adapters = [poem.adapt(net, method, fast=False, **RICH, **more) for net in (Writing(), Copying())]
        given = small_batches(3)
        kept = [each.clone() for each in given]
        assert_same_answers(*[[adapter(batch) for batch in given] for adapter in adapters])
        assert_same_answers(given, kept)
        assert adapters[0].totals.updates > 0


# Threads.


def test_frozen_holds_in_the_thread_that_entered_it() -> None:
    adapter = poem.adapt(make_net("gn", sharpness=6.0), "tent")
    inside, done = threading.Event(), threading.Event()

    def freeze() -> None:
        with adapter.frozen():
            inside.set()
            done.wait(30)
            adapter(images(4, 9))

    thread = threading.Thread(target=freeze)
    thread.start()
    inside.wait(30)
    adapter(images(4, 0))
    assert adapter.totals.batches == 1, "this thread learns"
    done.set()
    thread.join()
    assert adapter.totals.batches == 1, "that one does not"


def test_a_state_read_beside_a_running_call_is_of_a_batch_boundary() -> None:
    batches = small_batches(40, size=4)
    net = make_net("bn", sharpness=10.0)
    lone = poem.adapt(copy.deepcopy(net), "poem", **RICH)
    allowed = {}
    for number, batch in enumerate([None, *batches]):
        if batch is not None:
            lone(batch)
        state = lone.state_dict()
        allowed[number] = (state["tensors"], state["rng"])
    adapter = poem.adapt(net, "poem", **RICH)
    found: list[dict[str, Any]] = []
    done, has_read = threading.Event(), threading.Event()

    def read() -> None:
        while not done.is_set():
            found.append(adapter.state_dict())
            has_read.set()
            time.sleep(0.0005)

    thread = threading.Thread(target=read)
    thread.start()
    for number, batch in enumerate(batches):
        adapter(batch)
        if number % 8 == 7:  # a thread that is late has read something since
            has_read.clear()
            assert has_read.wait(30)
    done.set()
    thread.join()
    torn = 0
    for state in found:
        tensors, rng = allowed[state["calls"]]
        whole = tensors.keys() == state["tensors"].keys() and torch.equal(rng, state["rng"])
        torn += not (whole and all(torch.equal(tensors[key], state["tensors"][key]) for key in tensors))
    assert len({state["calls"] for state in found}) > 3
    assert torn == 0


def test_reset_waits_for_the_batch_under_way() -> None:
    net: Any = make_net("gn", sharpness=6.0)
    adapter = poem.adapt(net, "tent", lr=0.1)
    fresh = adapter.state_dict()
    entered, go = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        entered.set()
        go.wait(30)

    net.layer1.register_forward_hook(wait)
    thread = threading.Thread(target=lambda: adapter(images(4, 0)))
    thread.start()
    entered.wait(30)
    other = threading.Thread(target=adapter.reset)
    other.start()
    time.sleep(0.05)
    assert other.is_alive(), "it waits its turn"
    go.set()
    thread.join()
    other.join()
    now = adapter.state_dict()
    assert now["calls"] == 0
    assert all(torch.equal(now["tensors"][key], fresh["tensors"][key]) for key in fresh["tensors"])


@pytest.mark.parametrize("act", ["call", "state_dict", "reset"])
def test_an_adapter_used_inside_its_own_call_is_an_error(act: str) -> None:
    net: Any = make_net("gn", sharpness=6.0)
    adapter = poem.adapt(net, "tent")
    acts: dict[str, Callable[[], Any]] = {
        "call": lambda: adapter(images(4, 1)), "state_dict": adapter.state_dict, "reset": adapter.reset,
    }  # fmt: skip
    handle = net.layer1.register_forward_hook(lambda *_: acts[act]() and None)
    before = adapter.state_dict()["tensors"]
    with pytest.raises(RuntimeError, match="inside its own call"):
        adapter(images(4, 0))
    handle.remove()
    after = adapter.state_dict()["tensors"]
    assert all(torch.equal(before[key], after[key]) for key in before)
    adapter(images(4, 0))
    assert adapter.totals.batches == 1


# Signals.


class Interrupted(Exception):
    """Raised by the signal handler."""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
@pytest.mark.parametrize("method", ["poem", "sar", "cotta"])
def test_a_signal_in_mid_call_leaves_model_and_state_whole(method: str) -> None:
    case = Case(method, "bn")
    net = case.net().train()
    adapter, lone = case.adapter(net), case.adapter(copy.deepcopy(net))
    batch, before = case.batches()[0], fingerprint(net)
    states, seconds = [lone.state_dict()], []
    for _ in range(40):
        began = time.perf_counter()
        lone(batch)
        seconds.append(time.perf_counter() - began)
        states.append(lone.state_dict())
    adapter(batch)
    lasts = min(seconds)  # whatever else the machine does, most signals come within a call
    rng, broken, calling = torch.Generator().manual_seed(3), 0, False

    def strike(*_: Any) -> None:
        if calling:  # a signal that comes just after the call is dropped
            raise Interrupted

    previous = signal.signal(signal.SIGALRM, strike)
    try:
        for _ in range(25):
            try:
                calling = True
                signal.setitimer(signal.ITIMER_REAL, max(1e-4, float(torch.rand((), generator=rng)) * 1.2 * lasts))
                adapter(batch)
                calling = False
            except Interrupted:
                calling = False
                broken += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert fingerprint(net) == before
            assert torch.is_grad_enabled()
            assert not torch.is_autocast_enabled("cpu")
            state = adapter.state_dict()
            calls = state["calls"]
            assert_same_answers(list(state["tensors"].values()), list(states[calls]["tensors"].values()))
            assert torch.equal(state["rng"], states[calls]["rng"])
            assert adapter.totals.batches == calls
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert broken > 5
    for _ in range(2):
        adapter(batch)
    assert_same_answers(list(adapter.state_dict()["tensors"].values()), list(states[calls + 2]["tensors"].values()))


# Updates that move nothing, answers that are not finite.


def test_an_update_that_changes_nothing_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    class Quantised(Wrapped):
        """Runs its weights as they were packed, whatever tensors the module holds."""

        def forward(self, x: Tensor) -> Tensor:
            norm: Tensor = self.net.norm1.weight
            return super().forward(x).round() + 0 * norm.sum()

    adapter = poem.adapt(Quantised(), "tent")
    with caplog.at_level(logging.WARNING, logger="poem"):
        for batch in small_batches(3):
            adapter(batch)
    assert "an update changed nothing" in adapter.last.notes[-1]
    assert sum("an update changed nothing" in each.message for each in caplog.records) == 1


@pytest.mark.parametrize("method", ["source", "lame", "bn", "tent", "poem"])
def test_answers_that_are_not_finite_are_logged_once(method: str, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.where(torch.arange(len(x)) == 1, torch.nan, 0.0)[:, None]

    adapter = poem.adapt(Broken("bn"), method)
    with caplog.at_level(logging.WARNING, logger="poem"):
        for batch in small_batches(3):
            adapter(batch)
    rows = 8 if method == "lame" else 1
    assert f"answers for {rows} images are NaN or Inf" in " ".join(adapter.last.notes)
    assert sum("are NaN or Inf" in each.message for each in caplog.records) == 1
    assert adapter.totals.not_finite == 3 * rows


def test_a_class_that_the_model_rules_out_is_no_alarm() -> None:
    class Masked(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x).clone()
            out[:, 3] = -torch.inf
            return out

    adapter = poem.adapt(Masked("bn"), "source")
    adapter(images(4, 0))
    assert adapter.last.notes == []


@pytest.mark.parametrize("kind", ["bn", "gn"])
def test_gradient_checkpointing_is_an_error_not_a_wrong_gradient(kind: str) -> None:
    from torch.utils.checkpoint import checkpoint

    class Saving(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            net = self.net
            x = torch.relu(net.norm1(self.stem(x)))
            x = checkpoint(net.layer1, x, use_reentrant=False)
            logits: Tensor = net.fc(net.layer4(net.layer3(net.layer2(x))).mean((2, 3)))
            return logits

    adapter = poem.adapt(Saving(kind), "tent")
    with pytest.raises(RuntimeError, match="gradient checkpointing"):
        adapter(images(8, 0))
    assert adapter.totals.batches == 0


def test_autocast_s_nesting_is_put_back_after_an_interrupt() -> None:
    from poem.adapter import ThreadFlags, _autocast_nesting

    before = _autocast_nesting()
    flags = ThreadFlags()
    torch.autocast_increment_nesting()
    flags.restore()
    assert _autocast_nesting() == before
