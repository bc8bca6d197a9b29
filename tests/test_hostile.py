"""No silent wrong answer: odd models, odd inputs, other threads and signals, each with what must come out."""

from __future__ import annotations

import copy
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from nets import make_net
from test_contract import Case
from torch import Tensor, nn
from toys import images

import poem
from poem import parts

RICH: dict[str, Any] = {"lr": 0.02, "threshold": 0.6}


def stream(count: int = 3, size: int = 8) -> list[Tensor]:
    return [images(size, seed=seed) for seed in range(count)]


def same(some: list[Tensor], others: list[Tensor]) -> None:
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def fingerprint(model: nn.Module) -> list[Any]:
    """All that a caller could see change: tensors, flags, hooks, forwards, attributes."""
    found: list[Any] = []
    for module in model.modules():
        found += [id(module), module.training, sorted(module.__dict__), len(module._forward_pre_hooks)]
        found += [len(module._forward_hooks), id(module.__dict__.get("forward"))]
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None:
                found += [id(tensor), tensor.data_ptr(), tensor.requires_grad, tensor.detach().cpu().numpy().tobytes()]
    return found


class Wrapped(nn.Module):
    """A net whose pieces a test calls in its own way."""

    def __init__(self, kind: str = "gn") -> None:
        super().__init__()
        self.net: Any = make_net(kind, sharpness=6.0)

    def stem(self, x: Tensor) -> Tensor:
        out: Tensor = self.net.conv1(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        net = self.net
        x = torch.relu(net.norm1(self.stem(x)))
        logits: Tensor = net.fc(net.layer4(net.layer3(net.layer2(net.layer1(x)))).mean((2, 3)))
        return logits


# The cache of layers below the first adapted one.


class Tiles(Wrapped):
    """From the second batch on the stem runs on tiles, as for frames of another size."""

    tiled = False

    def stem(self, x: Tensor) -> Tensor:
        if not self.tiled:
            return super().stem(x)
        return torch.cat([self.net.conv1(tile) for tile in x.chunk(4, dim=2)], dim=2)


def without_cache(adapter: poem.Adapter) -> poem.Adapter:
    """An adapter whose every layer runs at every pass."""
    adapter._acceleration.prefix_cache._modules = []
    return adapter


@pytest.mark.parametrize("fast", [False, pytest.param("tape", id="recorded")])
def test_a_stem_that_later_runs_on_tiles_gets_each_tile_s_output(fast: Any) -> None:
    answers = []
    for cached in (True, False):
        with recording(fast):
            adapter = poem.adapt(Tiles(), "poem", fast=bool(fast), **RICH)
            found = [adapter(batch) for batch in stream(3)]
            adapter.model.tiled = True  # type: ignore[assignment]
            if not cached:
                without_cache(adapter)
            found += [adapter(batch) for batch in stream(3)]
            assert adapter.totals.updates > 3
        answers.append(found)
    same(*answers)


def test_a_layer_that_gets_another_input_at_the_second_pass_runs_again() -> None:
    class Growing(Wrapped):
        passes = 0

        def stem(self, x: Tensor) -> Tensor:
            self.passes += 1
            return super().stem(x * self.passes)

    adapters = [poem.adapt(Growing(), "poem", fast=False, **RICH) for _ in range(2)]
    without_cache(adapters[1])
    same(*[[adapter(batch) for batch in stream(3)] for adapter in adapters])
    assert adapters[0].totals.updates > 0


def test_equal_inputs_of_an_upper_layer_are_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache saves work although the layer's input is another tensor at each pass."""
    net: Any = make_net("bn", sharpness=10.0)
    ran = []
    plain = type(net.layer2).forward

    def counted(self: Any, x: Tensor) -> Any:
        ran.extend([1] * (getattr(getattr(self[0], "conv1", None), "stride", 1) == (2, 2) and x.shape[1] == 8))
        return plain(self, x)

    monkeypatch.setattr(type(net.layer2), "forward", counted)
    adapter = poem.adapt(net, "tent*", parameters=FromLayer3(), fast=False, lr=0.02)
    adapter(images(8, 0))
    ran.clear()
    adapter(images(8, 1))
    assert adapter.last.updates == 2
    assert len(ran) == 1


@contextmanager
def recording(fast: Any) -> Iterator[None]:
    """With the stand-in for CUDA graphs, or without."""
    if not fast:
        yield
        return
    import tape

    with tape.installed():
        yield


class FromLayer3(parts.Parameters):
    """The norm layers of the third stage alone."""

    def __call__(self, model: nn.Module, facts: Any) -> list[str]:
        return [name for name, _ in model.named_parameters() if name.startswith("layer3") and "norm" in name]


# The twin: the user's modules are never patched.


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
    same(*[[adapter(batch) for batch in stream(3)] for adapter in adapters])
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
        answers.append([adapter(batch) for batch in stream(4)])
        assert "second.1.weight" in adapter.adapted
        moved = adapter.state_dict()["tensors"]["moved/second.1.weight"]
        assert not torch.equal(moved, net.second[1].weight), "the second head learns"
        exported = adapter.export()
        with adapter.frozen():
            torch.testing.assert_close(exported(images(8, 1)), adapter(images(8, 1)))
    same(answers[0], answers[1])
    same(answers[0], answers[2])


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
        given = stream(3)
        kept = [each.clone() for each in given]
        same(*[[adapter(batch) for batch in given] for adapter in adapters])
        same(given, kept)
        assert adapters[0].totals.updates > 0


# Threads.


def test_frozen_is_of_the_thread_that_asked() -> None:
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
    batches = stream(40, size=4)
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
    done = threading.Event()

    def read() -> None:
        while not done.is_set():
            found.append(adapter.state_dict())
            time.sleep(0.0005)

    thread = threading.Thread(target=read)
    thread.start()
    for batch in batches:
        adapter(batch)
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
    states = [lone.state_dict()]
    for _ in range(40):
        lone(batch)
        states.append(lone.state_dict())
    began = time.perf_counter()
    adapter(batch)
    lasts = time.perf_counter() - began
    rng, broken, calls = torch.Generator().manual_seed(3), 0, 1

    def strike(*_: Any) -> None:
        raise Interrupted

    previous = signal.signal(signal.SIGALRM, strike)
    try:
        for _ in range(25):
            if calls >= 39:
                break
            try:
                signal.setitimer(signal.ITIMER_REAL, max(1e-4, float(torch.rand((), generator=rng)) * 1.2 * lasts))
                adapter(batch)
            except Interrupted:
                broken += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            assert fingerprint(net) == before
            assert torch.is_grad_enabled()
            assert not torch.is_autocast_enabled("cpu")
            state = adapter.state_dict()
            calls = state["calls"]
            same(list(state["tensors"].values()), list(states[calls]["tensors"].values()))
            assert torch.equal(state["rng"], states[calls]["rng"])
            assert adapter.totals.batches == calls
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    assert broken > 5
    for _ in range(2):
        adapter(batch)
    same(list(adapter.state_dict()["tensors"].values()), list(states[calls + 2]["tensors"].values()))


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
    same(*[[each(batch) for batch in stream(3)] for each in (adapter, fresh)])
    assert adapter.totals.updates > 0


# Updates that move nothing, answers that are not finite.


def test_an_update_that_moves_nothing_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    class Quantised(Wrapped):
        """Runs its weights as they were packed, whatever stands in the module."""

        def forward(self, x: Tensor) -> Tensor:
            norm: Tensor = self.net.norm1.weight
            return super().forward(x).round() + 0 * norm.sum()

    adapter = poem.adapt(Quantised(), "tent")
    with caplog.at_level(logging.WARNING, logger="poem"):
        for batch in stream(3):
            adapter(batch)
    assert "an update moved nothing" in adapter.last.notes[-1]
    assert sum("an update moved nothing" in each.message for each in caplog.records) == 1


@pytest.mark.parametrize("method", ["source", "lame", "bn", "tent", "poem"])
def test_answers_that_are_not_finite_are_said_once(method: str, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + torch.where(torch.arange(len(x)) == 1, torch.nan, 0.0)[:, None]

    adapter = poem.adapt(Broken("bn"), method)
    with caplog.at_level(logging.WARNING, logger="poem"):
        for batch in stream(3):
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


# Other shapes.


class Line(nn.Module):
    """A network of one or three spatial dimensions."""

    def __init__(self, dims: int) -> None:
        super().__init__()
        conv: Any = {1: nn.Conv1d, 3: nn.Conv3d}[dims]
        norm: Any = {1: nn.BatchNorm1d, 3: nn.BatchNorm3d}[dims]
        torch.manual_seed(dims)
        self.stages = nn.Sequential(
            *[nn.Sequential(conv(a, b, 3, 2, 1), norm(b), nn.ReLU()) for a, b in ((2, 8), (8, 12), (12, 16))]
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.stages(x).flatten(2).mean(2)) * 4
        return logits


@pytest.mark.parametrize("dims", [1, 3])
@pytest.mark.parametrize("method", ["tent", "eata", "sar", "poem", "eta+poem"])
def test_networks_of_one_and_three_dimensions_adapt(method: str, dims: int) -> None:
    net = Line(dims).eval()
    batch = torch.rand(8, 2, *[12] * dims, generator=torch.Generator().manual_seed(0))
    adapter = poem.adapt(net, method, mean=[0.5, 0.5], std=[0.5, 0.5], threshold=2.0) if method != "tent" else (
        poem.adapt(net, method, mean=[0.5, 0.5], std=[0.5, 0.5])
    )  # fmt: skip
    for _ in range(2):
        assert adapter(batch).shape == (8, 5)
    assert adapter.totals.updates > 0
    with pytest.raises(ValueError, match=f"expected a batch of {dims + 2} dimensions"):
        adapter(torch.rand(8, 2, *[12] * (dims + 1)))


@pytest.mark.parametrize("method", ["deyo", "deyo+poem", "roid", "memo", "cotta"])
def test_methods_that_edit_pictures_say_so_for_other_inputs(method: str) -> None:
    net = Line(1).eval()
    with pytest.raises(ValueError, match=r"needs images \(batch, channels, height, width\)"):
        poem.adapt(net, method, mean=[0.5, 0.5], std=[0.5, 0.5])(torch.rand(8, 2, 12))


def test_a_model_that_answers_fewer_images_than_it_got_is_refused() -> None:
    class Dropping(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:-1]

    for method in ("source", "tent", "poem"):
        adapter = poem.adapt(Dropping(), method)
        with pytest.raises(ValueError, match="expected logits for 8 images, got 7"):
            adapter(images(8, 0))
        assert adapter.totals.batches == 0


def test_a_compiled_child_adapts_as_the_module_inside_it() -> None:
    plain, compiled = Wrapped("bn"), Wrapped("bn")
    compiled.net.layer1 = torch.compile(compiled.net.layer1, backend="eager")
    adapters = [poem.adapt(net, "poem", **RICH) for net in (plain, compiled)]
    same(*[[adapter(batch) for batch in stream(3)] for adapter in adapters])
    assert len(adapters[0].adapted) == len(adapters[1].adapted)
    assert adapters[0].totals.updates > 0


def test_a_scripted_child_is_refused_by_name() -> None:
    net = Wrapped("bn")
    net.net.layer1 = torch.jit.script(net.net.layer1)
    with pytest.raises(TypeError, match=r"'net.layer1' is a ScriptModule"):
        poem.adapt(net, "tent")


def test_a_lazy_layer_is_refused_by_name() -> None:
    net = nn.Sequential(nn.LazyConv2d(4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match=r"0\.weight .* run one batch"):
        poem.adapt(net, "tent")


def test_reset_forgets_what_the_forward_kept_on_its_modules() -> None:
    class Counting(Wrapped):
        passes = 0

        def forward(self, x: Tensor) -> Tensor:
            self.passes += 1
            return super().forward(x / self.passes)

    net = Counting()
    adapter = poem.adapt(net, "tent")
    first = adapter(images(8, 0))
    assert not torch.equal(adapter(images(8, 0)), first)
    adapter.reset()
    same([adapter(images(8, 0))], [first])
    assert net.passes == 0, "the user's module was never run"


def test_reset_forgets_what_was_tried_on_a_batch() -> None:
    """A proof that failed on one batch is not the verdict on the next stream."""
    adapter = poem.adapt(make_net("bn", sharpness=10.0), "poem", **RICH)
    adapter(images(8, 0))
    adapter._network.doubles = adapter._acceleration.independent = (
        adapter._acceleration.branch_backward.right
    ) = False
    adapter.reset()
    fresh = poem.adapt(make_net("bn", sharpness=10.0), "poem", **RICH)
    for batch in stream(2):
        same([adapter(batch)], [fresh(batch)])
        assert adapter.last.forwards_computed == fresh.last.forwards_computed
        assert adapter._network.doubles is True


@pytest.mark.parametrize("how", ["in place", "through data", "another tensor"])
def test_a_state_is_of_the_weights_that_the_model_has_now(how: str) -> None:
    net: Any = make_net("bn")
    adapter = poem.adapt(net, "tent")
    adapter(images(4, 0))
    old = adapter.state_dict()
    with torch.no_grad():
        if how == "in place":
            net.fc.weight.add_(1.0)
        elif how == "through data":
            net.fc.weight.data.add_(1.0)
        else:
            net.fc.weight = nn.Parameter(net.fc.weight + 1.0)
    with pytest.raises(ValueError, match="load the same weights"):
        adapter.load_state_dict(old)
    poem.adapt(copy.deepcopy(net), "tent").load_state_dict(adapter.state_dict())


def test_a_batch_size_that_was_given_is_not_overruled_by_a_state() -> None:
    giver = poem.adapt(make_net("bn"), "tent", batch_size=8)
    giver(images(8, 0))
    with pytest.raises(ValueError, match="expected a state of batch_size=4"):
        poem.adapt(make_net("bn"), "tent", batch_size=4).load_state_dict(giver.state_dict())
    free = poem.adapt(make_net("bn"), "tent")
    free.load_state_dict(giver.state_dict())
    assert free.lr == giver.lr


def test_filters_joined_by_and_are_an_error() -> None:
    with pytest.raises(TypeError, match="join filters with &"):
        poem.parts.EntropyBelow(0.4) and poem.parts.PLPDAbove(0.2)
    with pytest.raises(TypeError, match=r"join weights with \+"):
        poem.parts.ByEntropy(0.4) or poem.parts.ByPLPD()


def test_a_loader_of_dictionaries_is_told_what_is_expected() -> None:
    adapter = poem.adapt(make_net("bn"), "tent")
    with pytest.raises(TypeError, match="expected batches of images"):
        list(adapter.stream([{"image": images(4, 0)}]))


def test_other_batch_sizes_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    adapter = poem.adapt(make_net("bn"), "tent")
    with caplog.at_level(logging.WARNING, logger="poem"):
        for size in (4, 3, 4, 3, 5, 4):
            adapter(images(size, 0))
    assert sum("other sizes" in each.message for each in caplog.records) == 1


# What a reviewer found.


class Recurrent(nn.Module):
    """Adds to its input in place, and is applied several times."""

    def __init__(self, inplace: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.conv, self.inplace = nn.Conv2d(8, 8, 1), inplace

    def forward(self, x: Tensor) -> Tensor:
        if self.inplace:
            x += torch.tanh(self.conv(x))
            return x
        return x + torch.tanh(self.conv(x))


@pytest.mark.parametrize("method", ["tent", "poem", "sar", "deyo"])
def test_a_layer_that_writes_into_its_input_and_runs_again_is_not_cached(method: str) -> None:
    class Looping(Wrapped):
        def __init__(self, inplace: bool) -> None:
            super().__init__()
            self.rec = Recurrent(inplace)

        def stem(self, x: Tensor) -> Tensor:
            x = super().stem(x)
            for _ in range(3):
                x = self.rec(x)
            return x

    changes = RICH if method != "tent" else {"lr": 0.02}
    adapters = [poem.adapt(Looping(inplace), method, fast=False, **changes) for inplace in (True, False)]
    same(*[[adapter(batch) for batch in stream(3)] for adapter in adapters])
    assert adapters[0].totals.updates > 0


def test_arguments_of_other_types_are_other_keys_of_the_cache() -> None:
    class Flagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Conv2d(8, 8, 1)

        def forward(self, x: Tensor, flag: Any) -> Tensor:
            out: Tensor = self.scale(x)
            return out * 2 if flag is True else out

    class Twice(Wrapped):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.flagged = Flagged()

        def stem(self, x: Tensor) -> Tensor:
            x = super().stem(x)
            out: Tensor = self.flagged(x, True) + self.flagged(x, 1)
            return out

    adapters = [poem.adapt(Twice(), "poem", fast=False, **RICH) for _ in range(2)]
    without_cache(adapters[1])
    same(*[[adapter(batch) for batch in stream(3)] for adapter in adapters])
    assert adapters[0].totals.updates > 0


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
        answers.append(found + [adapter(batch) for batch in stream(2)])
    same(*answers)


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
    same(*[[adapter(batch) for batch in stream(3)] for adapter in adapters])


def test_forward_hooks_know_the_user_s_modules_and_see_every_pass() -> None:
    net: Any = make_net("gn", sharpness=6.0)
    names = {module: name for name, module in net.named_modules()}
    seen: list[str] = []
    net.conv1.register_forward_hook(lambda module, args, output: seen.append(names[module]))
    net.register_forward_hook(lambda module, args, output: seen.append(names[module]))
    adapter = poem.adapt(net, "tent*", lr=0.02, fast=False)
    for batch in stream(3):
        adapter(batch)
    assert seen.count("conv1") == seen.count("") > 3


def test_an_export_with_a_branch_copes_with_a_network_that_writes_into_its_input() -> None:
    class Writing(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.sub_(0.5).mul_(2.0))

    adapter = poem.adapt(Writing("bn"), "poem", **RICH)
    adapter(images(8, 0))
    given = images(8, 1)
    with adapter.frozen():
        torch.testing.assert_close(adapter.export()(given), adapter(images(8, 1)))
    same([given], [images(8, 1)])


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


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_state_of_another_dtype_is_refused(dtype: torch.dtype) -> None:
    adapter = poem.adapt(make_net("bn"), "tent")
    state = adapter.state_dict()
    state["tensors"] = {key: tensor.to(dtype) for key, tensor in state["tensors"].items()}
    with pytest.raises(ValueError, match=r"expected moved/.* \(torch.float32\), got"):
        adapter.load_state_dict(state)


def test_a_hook_that_an_interrupt_left_behind_does_nothing() -> None:
    net = make_net("bn")
    adapter = poem.adapt(net, "tent")
    watched = adapter._network.twin.watched()
    watched.__enter__()  # and never left
    with pytest.raises(ValueError, match="expected"):
        adapter(torch.zeros(0, 3, 16, 16))
    net(images(4, 0))


def test_autocast_s_nesting_is_put_back_after_an_interrupt() -> None:
    from poem.adapter import ThreadFlags, _autocast_nesting

    before = _autocast_nesting()
    flags = ThreadFlags()
    torch.autocast_increment_nesting()
    flags.restore()
    assert _autocast_nesting() == before


def test_a_copied_adapter_has_a_head_of_its_own_in_logits() -> None:
    net: Any = Wrapped("bn")
    net.second = nn.Linear(10, 10)
    adapter = poem.adapt(net, "tent", parameters=parts.Everything(), lr=0.1, logits=lambda out: net.second(out))
    adapter(images(8, 0))
    twin = copy.deepcopy(adapter)
    same([adapter(batch) for batch in stream(2)], [twin(batch) for batch in stream(2)])


def test_counts_follow_the_model_to_another_device() -> None:
    from poem.engine.accounting import BatchRecord, RunningTotals

    books, entry = RunningTotals(), BatchRecord()
    for device in ("meta", "cpu"):
        entry.anomalies = torch.zeros(2, dtype=torch.long, device=device)
        if device == "cpu":
            books.anomalies = torch.ones(2, dtype=torch.long)
        books.add_batch(entry, 1)
        entry.anomalies = None
        books.add_batch(entry, 1)
    assert books.anomalies is not None
    assert books.anomalies.tolist() == [1, 1]


def test_vmap_over_a_cached_layer_runs() -> None:
    class Mapped(Wrapped):
        def stem(self, x: Tensor) -> Tensor:
            out: Tensor = torch.vmap(lambda image: self.net.conv1(image[None])[0])(x)
            return out

    adapters = [poem.adapt(net, "tent*", lr=0.02, fast=False) for net in (Mapped(), Wrapped())]
    for batch in stream(2):
        torch.testing.assert_close(*[adapter(batch) for adapter in adapters])


def test_a_state_from_a_pipe_or_a_folder_is_refused(tmp_path: Any) -> None:
    adapter = poem.adapt(make_net("bn"), "tent")
    with pytest.raises(ValueError, match="no regular file"):
        adapter.load(tmp_path)
