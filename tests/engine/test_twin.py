"""The adapter runs a twin of the model: the user's modules are never patched, and their changes reach the twin."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from compare import assert_same_answers, fingerprint
from inside import network
from learners import RICH
from nets import Wrapped, make_net
from test_contract import Case
from torch import Tensor, nn
from toys import images, small_batches

import poem
from poem import parts


@pytest.mark.parametrize("method", ["tent", "poem", "deyo+poem", "sar", "cotta", "memo", "roid", "lame", "bn"])
@pytest.mark.parametrize("kind", ["bn", "gn", "ln"])
def test_the_user_s_modules_are_untouched_while_a_call_runs(method: str, kind: str) -> None:
    case = Case(method, kind)
    net = case.net()
    before, seen = fingerprint(net), []

    def look(_: Any, __: Any, ___: Any) -> None:
        seen.append(fingerprint(net))

    handle = torch.nn.modules.module.register_module_forward_hook(look)
    try:
        adapter = case.adapter(net)
        adapter(case.batches()[0])
    finally:
        handle.remove()
    assert len(seen) > 10
    assert all(each == before for each in seen)


def test_plain_use_in_another_thread_sees_the_source_model() -> None:
    net = make_net("bn", sharpness=10.0)
    batch = images(8, seed=5)
    with torch.no_grad():
        expected = net(batch)
    before, done = fingerprint(net), threading.Event()
    wrong: list[str] = []

    def use() -> None:
        with torch.no_grad():
            while not done.is_set():
                try:
                    found = net(batch)
                except Exception as error:
                    wrong.append(repr(error))
                    return
                if not torch.equal(found, expected):
                    wrong.append(str(float((found - expected).abs().max())))

    threads = [threading.Thread(target=use) for _ in range(2)]
    for thread in threads:
        thread.start()
    adapter = poem.adapt(net, "poem", **RICH)
    for seed in range(25):
        adapter(images(8, seed))
    done.set()
    for thread in threads:
        thread.join()
    assert adapter.totals.updates > 0
    assert not wrong
    assert fingerprint(net) == before


class Interrupted(Exception):
    """Raised in the middle of a forward pass."""


class Table:
    """A plain object that holds a layer."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer


SHAPES: dict[str, Callable[[Any], None]] = {
    "list": lambda self: setattr(self, "reach", [self.net.norm1]),
    "dictionary": lambda self: setattr(self, "reach", {0: self.net.norm1}),
    "object": lambda self: setattr(self, "reach", [Table(self.net.norm1)]),
    "method": lambda self: setattr(self, "reach", [self.net.norm1.__call__]),
    "partial": lambda self: setattr(self, "reach", [partial(lambda m, x: m(x), self.net.norm1)]),
    "closure": lambda self: setattr(self, "reach", [lambda x: self.net.norm1(x)]),
    "forward": lambda self: setattr(self.net, "forward", partial(type(self.net).forward, self.net)),
}


class Reaching(Wrapped):
    """Calls its first norm layer through something else than a child module."""

    def forward(self, x: Tensor) -> Tensor:
        net, reach = self.net, getattr(self, "reach", None)
        if reach is None:
            out: Tensor = net(x)
            return out
        norm = reach[0]
        norm = norm.layer if isinstance(norm, Table) else norm
        x = torch.relu(norm(self.stem(x)))
        logits: Tensor = net.fc(net.layer4(net.layer3(net.layer2(net.layer1(x)))).mean((2, 3)))
        return logits


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", ["bn", "gn"])
def test_layers_reached_in_odd_ways_are_adapted_all_the_same(shape: str, kind: str) -> None:
    plain, odd = Wrapped(kind), Reaching(kind)
    SHAPES[shape](odd)
    adapters = [poem.adapt(net, "poem", **RICH) for net in (plain, odd)]
    assert_same_answers(*[[adapter(batch) for batch in small_batches(3)] for adapter in adapters])
    assert adapters[0].totals.updates > 0


SECOND: Any = None


def test_a_head_named_in_logits_is_the_adapted_one() -> None:
    """`logits=` may name the model, as a closure or as a global variable."""
    global SECOND

    class Two(Wrapped):
        def forward(self, x: Tensor) -> Any:
            return {"features": super().forward(x)}

    answers = []
    for way in ("method", "closure", "global"):
        torch.manual_seed(0)
        net: Any = Two("bn")
        net.second = nn.Sequential(nn.Linear(10, 12), nn.LayerNorm(12), nn.Linear(12, 10))
        SECOND = net
        ways: dict[str, Callable[[Any], Tensor]] = {
            "closure": lambda out: net.second(out["features"]),  # noqa: B023
            "global": lambda out: SECOND.second(out["features"]),  # noqa: B023
            "method": partial(lambda m, out: m.second(out["features"]), net),
        }
        adapter = poem.adapt(net, "tent", lr=0.1, logits=ways[way])
        answers.append([adapter(batch) for batch in small_batches(4)])
        assert "second.1.weight" in adapter.adapted
        moved = adapter.state_dict()["tensors"]["moved/second.1.weight"]
        assert not torch.equal(moved, net.second[1].weight), "the second head learns"
        exported = adapter.export()
        with adapter.frozen():
            torch.testing.assert_close(exported(images(8, 1)), adapter(images(8, 1)))
    assert_same_answers(answers[0], answers[1])
    assert_same_answers(answers[0], answers[2])


def hidden() -> Any:
    """A call that no copy can follow."""
    return SECOND.net.norm1


def test_a_layer_that_is_reached_past_the_model_is_an_error_not_a_wrong_answer() -> None:
    global SECOND

    class Past(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            net = self.net
            x = torch.relu(hidden()(self.stem(x)))
            logits: Tensor = net.fc(net.layer4(net.layer3(net.layer2(net.layer1(x)))).mean((2, 3)))
            return logits

    SECOND = net = Past("bn")
    adapter = poem.adapt(net, "tent")
    before = fingerprint(net)
    with pytest.raises(RuntimeError, match=r"reach its layer 'net\.norm1'"):
        adapter(images(4, 0))
    assert fingerprint(net) == before


@pytest.mark.parametrize("method", ["tent", "poem"])
def test_changes_of_the_model_between_calls_reach_the_adapter(method: str) -> None:
    """New weights in place, behind `.data`, as another parameter; a flag; another frozen layer; a hook."""

    class Flagged(Wrapped):
        louder = False

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x * 2 if self.louder else x)

    def changes(net: Any) -> Iterator[None]:
        with torch.no_grad():
            net.net.conv1.weight.mul_(1.1)
            yield
            net.net.conv1.weight.data = net.net.conv1.weight.data * 1.1
            yield
            net.net.conv1.weight = nn.Parameter(net.net.conv1.weight * 0.9)
            yield
            net.louder = True
            yield
            net.net.conv1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
            nn.init.constant_(net.net.conv1.weight, 0.1)
            yield
            net.net.conv1.register_forward_hook(lambda m, a, out: out * 1.5)
            yield
            net.train()
            yield

    net, batch = Flagged("gn"), images(8, 0)
    adapter = poem.adapt(net, method, fast=False, lr=0.0)
    adapter(batch)
    last = adapter(batch)
    for number, _ in enumerate(changes(net)):
        found = adapter(batch)
        fresh = poem.adapt(copy.deepcopy(net), method, fast=False, lr=0.0)(batch)
        torch.testing.assert_close(found, fresh, rtol=0, atol=0)
        assert torch.equal(found, last) == (number == 6), f"change {number} shows"
        last = found


def test_an_adapted_layer_that_was_replaced_is_an_error() -> None:
    net: Any = make_net("bn")
    adapter = poem.adapt(net, "tent")
    adapter(images(4, 0))
    net.norm1 = nn.BatchNorm2d(8)
    with pytest.raises(RuntimeError, match="the layer 'norm1' was replaced since adapt"):
        adapter(images(4, 1))
    assert adapter.totals.batches == 1


def test_hooks_of_the_user_are_called_at_every_pass_and_write_where_the_user_reads() -> None:
    class Recorder:
        def __init__(self, model: nn.Module) -> None:
            self.model, self.count = model, 0

        def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
            self.count += 1

        def method(self, module: nn.Module, args: Any, output: Any) -> None:
            self.count += 1

    net: Any = make_net("gn", sharpness=6.0)
    recorder = Recorder(net)
    net.layer1.register_forward_hook(recorder)
    net.layer1.register_forward_hook(recorder.method)
    adapter = poem.adapt(net, "tent")
    adapter(images(4, 0))
    assert recorder.count == 2


def test_a_twin_that_a_broken_call_left_half_patched_is_rebuilt() -> None:
    """As if a signal had come while swapped parameters were put back."""
    net: Any = make_net("bn", sharpness=10.0)
    fresh = poem.adapt(copy.deepcopy(net), "poem", **RICH)
    left = [1]

    def wreck(module: Any, args: Any) -> None:
        if left:
            left.clear()
            module.layer1[0].conv1._parameters["weight"] = torch.zeros_like(net.layer1[0].conv1.weight)
            raise Interrupted

    net.register_forward_pre_hook(wreck)
    adapter = poem.adapt(net, "poem", **RICH)
    with pytest.raises(Interrupted):
        adapter(images(8, 0))
    assert_same_answers(*[[each(batch) for batch in small_batches(3)] for each in (adapter, fresh)])
    assert adapter.totals.updates > 0


def test_a_layer_put_into_a_list_between_calls_is_the_adapted_one() -> None:
    class Listed(Wrapped):
        def __init__(self) -> None:
            super().__init__()
            self.active: list[Any] = []

        def stem(self, x: Tensor) -> Tensor:
            x = super().stem(x)
            for module in self.active:
                x = module(x)
            return x

    answers = []
    for way in ("append", "assign"):
        net = Listed()
        adapter = poem.adapt(net, "tent*", lr=0.05, fast=False)
        found = [adapter(images(8, 0))]
        if way == "append":
            net.active.append(net.net.norm1)
        else:
            net.active = [net.net.norm1]
        answers.append(found + [adapter(batch) for batch in small_batches(2)])
    assert_same_answers(*answers)


@pytest.mark.parametrize("held", ["default", "keyword", "named tuple", "key", "deque"])
def test_layers_in_defaults_tuples_and_keys_are_followed(held: str) -> None:
    from collections import deque, namedtuple

    pair = namedtuple("pair", "layer other")

    class Held(Wrapped):
        def __init__(self) -> None:
            super().__init__()
            norm = self.net.norm1
            self.reach: Any = {
                "default": lambda x, layer=norm: layer(x),
                "keyword": lambda x, *, layer=norm: layer(x),
                "named tuple": pair(norm, 1),
                "key": {norm: 1},
                "deque": deque([norm]),
            }[held]

        def forward(self, x: Tensor) -> Tensor:
            net, reach = self.net, self.reach
            norm = reach if callable(reach) else next(iter(reach))
            x = torch.relu(norm(self.stem(x)))
            logits: Tensor = net.fc(net.layer4(net.layer3(net.layer2(net.layer1(x)))).mean((2, 3)))
            return logits

    adapters = [poem.adapt(net, "poem", **RICH) for net in (Wrapped(), Held())]
    assert_same_answers(*[[adapter(batch) for batch in small_batches(3)] for adapter in adapters])


def test_forward_hooks_know_the_user_s_modules_and_see_every_pass() -> None:
    net: Any = make_net("gn", sharpness=6.0)
    names = {module: name for name, module in net.named_modules()}
    seen: list[str] = []
    net.conv1.register_forward_hook(lambda module, args, output: seen.append(names[module]))
    net.register_forward_hook(lambda module, args, output: seen.append(names[module]))
    adapter = poem.adapt(net, "tent*", lr=0.02, fast=False)
    for batch in small_batches(3):
        adapter(batch)
    assert seen.count("conv1") == seen.count("") > 3


def test_a_hook_that_an_interrupt_left_behind_does_nothing() -> None:
    net = make_net("bn")
    adapter = poem.adapt(net, "tent")
    watched = network(adapter).twin.watched()
    watched.__enter__()  # and never left
    with pytest.raises(ValueError, match="expected"):
        adapter(torch.zeros(0, 3, 16, 16))
    net(images(4, 0))


def test_a_copied_adapter_has_a_head_of_its_own_in_logits() -> None:
    net: Any = Wrapped("bn")
    net.second = nn.Linear(10, 10)
    adapter = poem.adapt(net, "tent", parameters=parts.Everything(), lr=0.1, logits=lambda out: net.second(out))
    adapter(images(8, 0))
    twin = copy.deepcopy(adapter)
    assert_same_answers([adapter(batch) for batch in small_batches(2)], [twin(batch) for batch in small_batches(2)])
