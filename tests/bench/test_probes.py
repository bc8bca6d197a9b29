"""Groups, transitions, bins, ranges and gradient norms, each worked out by hand on a few samples."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import torch
from nets import ConvNet, make_net
from oracles import (
    all_norms,
    copied,
    deep_part,
    entropy,
    mixed,
    norm_tensors,
    norms_below_top,
    shallow_part,
    with_batch_statistics,
)
from torch import Tensor, nn
from toys import images

import poem
from poem.bench.probes import BINS, Probes, binned
from poem.engine.accounting import BatchRecord, FirstLast
from poem.parts import EntropyBelow

LOG10 = math.log(10)


def entry(first: list[float], last: list[float], newly: list[bool], pseudo: list[int]) -> BatchRecord:
    """What an adapter would have kept of a batch: ten classes, entropies in units of ln 10."""
    made = BatchRecord()
    made.entropy = FirstLast(torch.tensor(first) * LOG10, torch.tensor(last) * LOG10)
    made.newly_reliable = torch.tensor(newly)
    made.first_logits = torch.zeros(len(first), 10)
    made.first_logits[range(len(first)), pseudo] = math.log(9.0)  # confidence 9 / 18
    return made


def answers(labels: list[int]) -> Tensor:
    return nn.functional.one_hot(torch.tensor(labels), 10).float()


@pytest.fixture
def probes() -> Probes:
    """Six samples in two batches: two low, two that become so, two that stay high."""
    made = Probes(0.4, ("gradients",))
    truth = torch.tensor([1, 2, 3, 4])
    made.update(
        entry([0.1, 0.5, 0.9, 0.39], [0.05, 0.3, 0.95, 0.41], [False, True, False, False], [1, 2, 0, 0]),
        answers([1, 2, 3, 0]), truth, torch.tensor([1.0, 2.0, 3.0, 4.0]),
    )  # fmt: skip
    made.update(entry([0.6, 0.55], [0.2, 0.55], [True, False], [5, 0]), answers([0, 0]), torch.tensor([5, 6]),
                torch.tensor([5.0, 6.0]))  # fmt: skip
    return made


def test_groups(probes: Probes) -> None:
    groups = probes.groups()
    assert groups["low"] == pytest.approx({"n": 2, "accuracy": 50, "accuracy_last": 50, "confidence": 50})
    assert groups["newly"] == pytest.approx({"n": 2, "accuracy": 100, "accuracy_last": 50, "confidence": 50})
    assert groups["high"] == pytest.approx({"n": 2, "accuracy": 0, "accuracy_last": 50, "confidence": 50})


def test_transitions(probes: Probes) -> None:
    found = probes.result()["transitions"]
    assert found.pop("threshold") == pytest.approx(0.4 * LOG10)
    assert found == {"low_low": 1, "low_high": 1, "high_low": 2, "high_high": 2}


def test_bins_of_entropy(probes: Probes) -> None:
    found = probes.result()["entropy_bins"]
    assert found["edges"] == pytest.approx(np.linspace(0, 1, BINS + 1))
    assert sum(found["n"]) == 6
    assert sum(found["right"]) == 3
    assert sum(found["newly_n"]) == sum(found["newly_right"]) == 2
    assert sum(found["confidence"]) == pytest.approx(3.0)
    assert found["n"][7] == 1, "0.39 lies between 0.35 and 0.4"


def test_a_border_and_what_is_beyond() -> None:
    values = np.array([0.0, LOG10, LOG10 * 1.001, np.nan, -1e-9])
    assert binned(values, LOG10).tolist() == [0, BINS - 1, BINS - 1, BINS - 1, 0]


def test_range_compares_within_one_range_of_entropy(probes: Probes) -> None:
    """The two that become low span 0.5 to 0.6; a third sample, at 0.55, lies between them."""
    found = probes.result()["range"]
    assert (found["low"], found["high"]) == pytest.approx((0.5 * LOG10, 0.6 * LOG10))
    assert found["newly"] == {"n": 2, "accuracy": 100.0}
    assert found["all"] == pytest.approx({"n": 3, "accuracy": 200 / 3})
    assert found["others"] == {"n": 1, "accuracy": 0.0}


def test_gradients_by_bin_and_area(probes: Probes) -> None:
    found = probes.result()["gradients"]
    assert found["n"] == probes.result()["entropy_bins"]["n"]
    assert found["norm"][2] == 1.0, "the sample at 0.1"
    assert found["norm"][0] is None
    assert found["accuracy"][7] == 0.0
    areas = found["areas"]
    assert {name: area["n"] for name, area in areas.items()} == {"area3": 2, "zone": 3, "area2": 0, "area1": 1}
    assert areas["area3"]["norm"] == pytest.approx(2.5)
    assert areas["zone"]["norm"] == pytest.approx((2 + 5 + 6) / 3)
    assert areas["area1"]["low"] == pytest.approx(0.8 * LOG10)
    assert "norm" not in areas["area2"]


def test_without_a_threshold_there_are_no_groups() -> None:
    made = Probes(None)
    made.update(entry([0.1], [0.1], [True], [1]), answers([1]), torch.tensor([1]))
    assert made.groups() == {"low": {"n": 0}, "newly": {"n": 0}, "high": {"n": 0}}
    assert set(made.result()) == {"entropy_bins"}
    assert sum(made.result()["entropy_bins"]["newly_n"]) == 0


def test_values_are_left_out_without_potentially_reliable_samples() -> None:
    made = Probes(0.4, ("gradients",))
    made.update(entry([0.1], [0.1], [False], [1]), answers([1]), torch.tensor([1]), torch.ones(1))
    assert made.result()["range"] == {"newly": {"n": 0}, "all": {"n": 0}, "others": {"n": 0}}
    assert made.result()["gradients"]["areas"] == {}
    with pytest.raises(ValueError, match="unknown probe 'gradient'; known: gradients"):
        Probes(0.4, ("gradient",))


def test_batches_of_augmented_views_are_skipped() -> None:
    made, account = Probes(0.4), entry([0.1, 0.2], [0.1, 0.2], [False, False], [1, 1])
    account.first_logits = account.first_logits[:1]
    made.update(account, answers([1, 1]), torch.tensor([1, 1]))
    assert sum(made.result()["entropy_bins"]["n"]) == 0


def test_a_network_that_fell_apart_leaves_plain_numbers() -> None:
    made, account = Probes(0.4, ("gradients",)), entry([0.1, 0.2], [0.1, 0.2], [False, True], [1, 1])
    nothing = torch.full((2,), torch.nan)
    account.first_logits[:], account.entropy = torch.nan, FirstLast(nothing, nothing)
    made.update(account, torch.full((2, 10), torch.nan), torch.tensor([1, 1]), nothing)
    json.dumps(made.result(), allow_nan=False)
    assert made.groups()["high"] == {"n": 2, "accuracy": 0.0, "accuracy_last": 0.0, "confidence": 0.0}


# Gradient norms -------------------------------------------------------------------------------------------------------


def by_hand(entropies: Tensor, tensors: list[nn.Parameter]) -> Tensor:
    """A backward pass per sample, and the length of all gradients together."""
    norms = []
    for loss in entropies:
        gradients = torch.autograd.grad(loss, tensors, retain_graph=True)
        norms.append(torch.cat([gradient.flatten() for gradient in gradients]).norm())
    return torch.stack(norms)


@pytest.mark.parametrize("kind", ["bn", "gn", "ln"])
def test_gradient_norms_of_a_plain_recipe(kind: str) -> None:
    net, x = make_net(kind, sharpness=6.0).double(), images(6, seed=0).double()
    twin = with_batch_statistics(net)
    theta = all_norms(twin)
    expected = by_hand(entropy(twin(x)), theta)
    assert torch.allclose(poem.adapt(net, "tent").gradient_norms(x), expected, rtol=1e-9)


@pytest.mark.parametrize("learnt", [0, 3])
def test_gradient_norms_of_a_branch_recipe_are_of_theta_alone(learnt: int) -> None:
    net, x = make_net("bn", sharpness=10.0).double(), images(8, seed=0).double()
    adapter = poem.adapt(net, "poem", lr=0.05, select=EntropyBelow(0.9))
    for seed in range(learnt):
        adapter(images(8, seed=seed + 1).double())
    main, side = with_batch_statistics(net), with_batch_statistics(net)
    assert isinstance(main, ConvNet)
    moved = {key.removeprefix("moved/"): value for key, value in adapter.state_dict()["tensors"].items()}
    for twin, prefix in ((main, ""), (side, "branch.")):
        for name, parameter in twin.named_parameters():
            if prefix + name in moved:
                parameter.data.copy_(moved[prefix + name])
    theta = norms_below_top(main)
    features = shallow_part(main, x)
    expected = by_hand(entropy(mixed(deep_part(main, features), deep_part(side, features))), theta)
    assert torch.allclose(adapter.gradient_norms(x), expected, rtol=1e-9)


@pytest.mark.parametrize("method", ["tent", "deyo+poem", "memo", "cotta", "source", "roid"])
def test_measuring_gradients_leaves_no_trace(method: str) -> None:
    """Before the first batch and after it: state, chance, counts and answers are those of an adapter never asked."""
    given: dict[str, Any] = {"mean": (0, 0, 0), "std": (1, 1, 1), "lr": 0.05}
    asked, plain = (poem.adapt(make_net("bn", sharpness=6.0), method, **given) for _ in range(2))
    for seed in range(2):
        x = images(5, seed=seed)
        norms = asked.gradient_norms(x)
        assert norms.shape == (5,)
        assert not norms.requires_grad
        assert (norms > 0).all() == (method != "source")
        assert asked.totals == plain.totals
        assert torch.equal(asked(x), plain(x))
        assert asked.last.notes == plain.last.notes
        assert asked.totals == plain.totals
        one, other = asked.state_dict(), plain.state_dict()
        assert all(torch.equal(tensor, other["tensors"][key]) for key, tensor in one.pop("tensors").items())
        assert torch.equal(one.pop("rng"), other["rng"])
        assert one == {key: value for key, value in other.items() if key in one}


def test_gradient_norms_need_sound_images() -> None:
    adapter = poem.adapt(make_net("gn"), "tent")
    with pytest.raises(ValueError, match="NaN or Inf in sample 1"):
        adapter.gradient_norms(torch.stack([torch.rand(3, 16, 16), torch.full((3, 16, 16), torch.nan)]))
    adapter.unload()
    with pytest.raises(RuntimeError, match="unloaded"):
        adapter.gradient_norms(torch.rand(1, 3, 16, 16))


def test_the_model_is_as_it_came() -> None:
    net = make_net("bn")
    before = {key: value.clone() for key, value in copied(net).state_dict().items()}
    poem.adapt(net, "poem").gradient_norms(images(4, seed=0))
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert all(tensor.grad is None for tensor in norm_tensors(net))
