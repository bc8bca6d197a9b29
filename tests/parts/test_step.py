"""Steps: what moves where nothing is selected, momentum, sharpness-aware steps, learning rates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import LR, NETS, Bright, adapted, assert_same, differs, frozen, memories, net, stream, tensors
from nets import make_net
from torch import nn
from toys import images

import poem
from poem.parts import (
    SAM,
    SGD,
    Adam,
    LossAverageBelow,
)
from poem.recipes.learning_rate import Rule
from poem.recipes.text import parse


def test_an_empty_mean_is_nan_with_zero_gradient_and_momentum_coasts_on() -> None:
    """Why a step must be skipped where nothing is selected: torch would not complain, and move the weights."""
    weight = nn.Parameter(torch.ones(3))
    optimiser = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.square().sum().backward()
    optimiser.step()
    optimiser.zero_grad()
    before = weight.detach().clone()
    loss = (weight * torch.ones(4, 3)).sum(1)[torch.zeros(4, dtype=torch.bool)].mean()
    assert loss.isnan()
    loss.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.zeros(3))
    optimiser.step()
    assert not torch.equal(weight.detach(), before)


def test_a_sharpness_aware_step_coasts_only_with_momentum_coast() -> None:
    assert poem.recipe("sar").step == SAM(0.05) == SAM(0.05, momentum_coast=False)
    assert repr(SAM(0.05)) == "SAM(0.05)"
    assert parse("SAM(0.05, momentum_coast=True)") == SAM(0.05, momentum_coast=True) != SAM(0.05)
    assert not SGD().steps_when_empty
    assert not SAM().steps_when_empty


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("method", ["sar", "sar+poem"])
def test_with_momentum_coast_a_batch_without_selection_moves_by_the_momentum(method: str, kind: str) -> None:
    """The momentum fades by 0.9 and moves the recipe's own group; all else, the branch too, stays where it was."""
    first, second, _ = stream()
    step = SAM(0.05, momentum_coast=True)
    adapter = adapted(kind, method, select=Bright(), step=step, recover=LossAverageBelow(-1.0))
    adapter(-second)
    start = tensors(adapter)
    assert_same(start, tensors(adapted(kind, method, select=Bright(), step=step)) | memories(start))
    adapter(first)
    before, updates = tensors(adapter), adapter.totals.updates
    assert updates > 0
    adapter(-second)
    after, flat = tensors(adapter), 0
    velocity = before["step/theta/velocity"]
    torch.testing.assert_close(after.pop("step/theta/velocity"), 0.9 * before.pop("step/theta/velocity"))
    for name, value in before.items():
        if name.startswith("moved/") and not name.startswith("moved/branch."):
            change = -LR[kind] * 0.9 * velocity[flat : flat + value.numel()].view_as(value)
            torch.testing.assert_close(after[name], value + change)
            flat += value.numel()
        else:
            assert torch.equal(after[name], value), name
    assert flat == velocity.numel() > 0
    assert (adapter.last.updates, adapter.last.taught, adapter.totals.updates) == (0, 0, updates)
    assert str(adapter.last.skipped).startswith("nothing selected")


@pytest.mark.parametrize("kind", NETS)
def test_momentum_coast_acts_only_in_batches_without_selection(kind: str) -> None:
    """Where every batch has selected samples it changes nothing; frozen it does nothing; a reset clears it."""
    first, second, third = stream()
    plain, coasting = (adapted(kind, "sar", select=Bright(), step=SAM(0.05, momentum_coast=c)) for c in (False, True))
    for batch in (first, second, third):
        assert torch.equal(coasting(batch), plain(batch))
        assert_same(tensors(coasting), tensors(plain))
    before = tensors(coasting)
    frozen(coasting, -first)
    assert_same(tensors(coasting), before)
    coasting(-first)
    plain(-first)
    assert_same(tensors(plain), before)
    assert differs(tensors(coasting), before)
    coasting.reset()
    fresh = adapted(kind, "sar", select=Bright(), step=SAM(0.05, momentum_coast=True))
    for batch in (first, -second, third):
        assert torch.equal(coasting(batch), fresh(batch))
    assert_same(tensors(coasting), tensors(fresh))


def test_momentum_coast_on_a_broken_network_leaves_finite_weights() -> None:
    model, broken = net("gn"), {"now": False}
    model.register_forward_hook(lambda _, __, out: out * torch.nan if broken["now"] else out)
    settings: dict[str, Any] = {"lr": LR["gn"], "step": SAM(0.05, momentum_coast=True), "threshold": 0.8}
    adapter = poem.adapt(model, "sar", **settings)
    adapter(stream()[0])
    assert adapter.totals.updates == 1
    broken["now"] = True
    adapter(stream()[1])
    assert all(bool(value.isfinite().all()) for value in tensors(adapter).values())


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("method", ["tent", "eta", "eata", "sar", "poem", "tent*", "sar+poem"])
@pytest.mark.parametrize("step", [SGD(), Adam()], ids=repr)
def test_where_nothing_is_selected_nothing_moves_not_even_by_momentum(method: str, kind: str, step: Any) -> None:
    first, second, _ = stream()
    chosen = SAM(base=step) if method.startswith("sar") else step
    adapter = adapted(kind, method, select=Bright(), step=chosen)
    adapter(first)
    assert adapter.last.updates > 0
    before = tensors(adapter)
    answer = adapter(second - 2)
    assert adapter.last.skipped == "nothing selected"
    assert answer.isfinite().all()
    assert_same(tensors(adapter), before)


@pytest.mark.parametrize(
    ("kind", "size", "plain", "doubled"),
    [
        ("gn", 64, 2.5e-4, 2.5e-4),
        ("bn", 32, 2.5e-4, 2.5e-4),
        ("gn", 31, 2.421875e-4, 2.421875e-4),
        ("gn", 1, 7.8125e-6, 1.5625e-5),
        ("ln", 64, 1e-3, 1e-3),
        ("ln", 128, 2e-3, 2e-3),
        ("ln", 2, 3.125e-5, 3.125e-5),
        ("ln", 1, 1.5625e-5, 3.125e-5),
    ],
)
def test_the_learning_rate_follows_the_rule_and_doubles_for_single_images(
    kind: str, size: int, plain: float, doubled: float
) -> None:
    model = make_net(kind)
    for method in ("tent", "eta", "eata", "tent+poem", "eata+poem-i"):
        assert poem.adapt(model, method, batch_size=size).lr == pytest.approx(plain, rel=1e-12), method
    for method in ("sar", "deyo", "poem", "poem-official", "poem-official-v2", "sar+poem", "deyo+poem-ii"):
        assert poem.adapt(model, method, batch_size=size).lr == pytest.approx(doubled, rel=1e-12), method


def test_the_batch_size_of_the_rule_is_the_first_batchs_unless_configured() -> None:
    adapter = poem.adapt(make_net("gn"), "sar")
    adapter(images(8, seed=0))
    adapter(images(1, seed=1))
    assert adapter.lr == Rule()("convolutional", 8)
    assert poem.adapt(make_net("gn"), "sar", batch_size=64).lr == Rule()("convolutional", 64)


def test_only_roid_cmf_and_cotta_look_ahead_of_their_momentum() -> None:
    ahead = {name for name in poem.methods() if getattr(poem.recipe(name).step, "nesterov", False)}
    assert {name.removesuffix("*").split("+")[0] for name in ahead} == {"roid", "cmf", "cotta"}
