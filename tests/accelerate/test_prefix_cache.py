"""Modules below every adapted layer run once per batch, unless their input or their output was changed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import tape
import torch
from compare import assert_same_answers
from inside import cached_layers, without_prefix_cache
from learners import RICH
from nets import Wrapped, make_net
from torch import Tensor, nn
from toys import images, small_batches, stream

import poem
import poem.accelerate.capture
import poem.engine.loop
from poem import parts
from poem.parts import Everyone, RunningMean


class Tiles(Wrapped):
    """From the second batch on the stem runs on tiles, as for frames of another size."""

    tiled = False

    def stem(self, x: Tensor) -> Tensor:
        if not self.tiled:
            return super().stem(x)
        return torch.cat([self.net.conv1(tile) for tile in x.chunk(4, dim=2)], dim=2)


@pytest.mark.parametrize("fast", [False, pytest.param("tape", id="captured")])
def test_a_stem_that_later_runs_on_tiles_gets_each_tile_s_output(fast: Any) -> None:
    answers = []
    for cached in (True, False):
        with capturing(fast):
            adapter = poem.adapt(Tiles(), "poem", guard=False, fast=bool(fast), **RICH)
            found = [adapter(batch) for batch in small_batches(3)]
            adapter.model.tiled = True  # type: ignore[assignment]
            if not cached:
                without_prefix_cache(adapter)
            found += [adapter(batch) for batch in small_batches(3)]
            assert adapter.totals.updates > 3
        answers.append(found)
    assert_same_answers(*answers)


def test_a_layer_that_gets_another_input_at_the_second_pass_runs_again() -> None:
    class Growing(Wrapped):
        passes = 0

        def stem(self, x: Tensor) -> Tensor:
            self.passes += 1
            return super().stem(x * self.passes)

    adapters = [poem.adapt(Growing(), "poem", fast=False, **RICH) for _ in range(2)]
    without_prefix_cache(adapters[1])
    assert_same_answers(*[[adapter(batch) for batch in small_batches(3)] for adapter in adapters])
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
def capturing(fast: Any) -> Iterator[None]:
    """With the stand-in for CUDA graphs, or without."""
    if not fast:
        yield
        return

    with tape.installed():
        yield


class FromLayer3(parts.Parameters):
    """The norm layers of the third stage only."""

    def __call__(self, model: nn.Module, facts: Any) -> list[str]:
        return [name for name, _ in model.named_parameters() if name.startswith("layer3") and "norm" in name]


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
    assert_same_answers(*[[adapter(batch) for batch in small_batches(3)] for adapter in adapters])
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
    without_prefix_cache(adapters[1])
    assert_same_answers(*[[adapter(batch) for batch in small_batches(3)] for adapter in adapters])
    assert adapters[0].totals.updates > 0


def test_vmap_over_a_cached_layer_runs() -> None:
    class Mapped(Wrapped):
        def stem(self, x: Tensor) -> Tensor:
            out: Tensor = torch.vmap(lambda image: self.net.conv1(image[None])[0])(x)
            return out

    adapters = [poem.adapt(net, "tent*", lr=0.02, fast=False) for net in (Mapped(), Wrapped())]
    for batch in small_batches(2):
        torch.testing.assert_close(*[adapter(batch) for adapter in adapters])


def test_layers_below_all_that_moves_run_once_per_batch() -> None:
    ran: list[str] = []
    net = make_net("bn", sharpness=10.0)
    adapter = poem.adapt(net, "poem", lr=0.02, fast=False)
    batches = stream("cpu", 3)
    adapter(batches[0])
    for name in ("conv1", "layer1.0.conv1"):
        module: Any = net.get_submodule(name)
        module._conv_forward = _counted(module._conv_forward, name, ran)
    adapter(batches[1])  # the model was changed: which layers may be cached is seen anew
    ran.clear()
    adapter(batches[2])
    looks = adapter.last.rounds + 1
    assert looks > 1
    assert ran.count("conv1") == 1
    assert ran.count("layer1.0.conv1") == looks


def _counted(call: Any, name: str, ran: list[str]) -> Any:
    def counted(*args: Any) -> Any:
        ran.append(name)
        return call(*args)

    return counted


class InPlace(nn.Module):
    """Writes into the output of its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net("gn", sharpness=6.0)

    def forward(self, x: Tensor) -> Tensor:
        net: Any = self.net
        x = torch.relu(net.norm1(net.conv1(x).relu_().mul_(0.5)))
        logits: Tensor = net.fc(net.layer4(net.layer3(net.layer2(net.layer1(x)))).mean((2, 3)))
        return logits


def test_a_layer_whose_output_is_written_to_runs_again() -> None:
    adapters = [poem.adapt(InPlace(), "poem", lr=0.02, threshold=0.6, fast=False) for _ in range(2)]
    without_prefix_cache(adapters[1])
    batches = stream("cpu", 4)
    assert_same_answers(*[[adapter(batch) for batch in batches] for adapter in adapters])
    assert adapters[0].totals.updates > 0


def test_a_layer_that_is_called_twice_runs_twice() -> None:
    class Twice(InPlace):
        def forward(self, x: Tensor) -> Tensor:
            net: Any = self.net
            x = torch.relu(net.norm1(net.conv1(x) + net.conv1(x.flip(-1) ** 2)))
            logits: Tensor = net.fc(net.layer4(net.layer3(net.layer2(net.layer1(x)))).mean((2, 3)))
            return logits

    adapters = [poem.adapt(Twice(), "poem", lr=0.02, threshold=0.6, fast=False) for _ in range(2)]
    without_prefix_cache(adapters[1])
    assert_same_answers(*[[adapter(batch) for batch in stream("cpu", 3)] for adapter in adapters])
    assert adapters[0].totals.updates > 0


def test_a_forward_that_the_user_set_stays() -> None:
    net: Any = make_net("gn", sharpness=6.0)
    adapter = poem.adapt(net, "poem", lr=0.02, threshold=0.6, fast=False)
    first, second = stream("cpu", 2)
    adapter(first)
    mine = net.conv1.forward = lambda x: type(net.conv1).forward(net.conv1, x)
    adapter(second)
    assert net.conv1.forward is mine


def test_running_averages_see_every_forward_pass() -> None:
    adapters = [poem.adapt(make_net("bn", sharpness=10.0), "poem", lr=0.02, statistics=RunningMean(0.3)) for _ in "ab"]
    without_prefix_cache(adapters[1])
    assert_same_answers(*[[adapter(batch) for batch in stream("cpu", 3)] for adapter in adapters])


def test_the_higher_the_first_adapted_layer_the_more_is_cached() -> None:
    net = make_net("bn", sharpness=10.0)
    adapter = poem.adapt(net, "poem", lr=0.02, parameters=FromLayer3(), select=Everyone())
    adapter(stream("cpu", 1)[0])
    names = cached_layers(adapter)
    assert {"layer1", "layer2"} <= names
    assert not any(name.startswith(("layer4", "fc")) for name in names)
