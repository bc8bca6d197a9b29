"""Mistakes that are easy to make in test-time adaptation, and are found in published code, one test each.

Where a calculation is done by hand it runs on the group-norm net, whose samples do not see each other, with torch's own
autograd on a copy of the net.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from dial import Dial, spots
from nets import ConvNet, make_net
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy
from toys import images

import poem
from poem.adapter import Adapter
from poem.bench.metrics import Accuracy
from poem.engine.anatomy import anatomy
from poem.parts import (
    SAM,
    SGD,
    Adam,
    AdaptBranch,
    ByEntropy,
    ByPLPD,
    Entropy,
    EntropyBelow,
    Equal,
    EveryCalls,
    Everything,
    FisherAnchor,
    FollowTeacher,
    LossAverageBelow,
    MeanTeacher,
    Memory,
    NormAffine,
    NotRedundant,
    Objective,
    Occlusion,
    Outputs,
    PLPDAbove,
    Readout,
    RunningMean,
    Select,
    Selected,
    SoftLikelihoodRatio,
    StochasticRestore,
)
from poem.recipes.recipe import Rule
from poem.recipes.text import parse

NETS = ("bn", "gn", "ln")
LR = {"bn": 0.05, "gn": 0.02, "ln": 0.002}
SHARPNESS = {"bn": 10.0, "gn": 6.0, "ln": 9.0}
E0 = 0.4 * math.log(10)


def net(kind: str = "gn") -> nn.Module:
    return make_net(kind, sharpness=SHARPNESS[kind]).double()


def stream(count: int = 36, size: int = 12) -> tuple[Tensor, ...]:
    return torch.split(images(count, seed=1).double(), size)


def adapted(kind: str, method: str | poem.Recipe, **changes: Any) -> Adapter:
    settings: dict[str, Any] = {"lr": LR[kind], "mean": (0, 0, 0), "std": (1, 1, 1), **changes}
    return poem.adapt(net(kind), method, **settings)


def frozen(adapter: Adapter, batch: Tensor) -> Tensor:
    with adapter.frozen():
        return adapter(batch)


def tensors(adapter: Adapter) -> dict[str, Tensor]:
    found: dict[str, Tensor] = adapter.state_dict()["tensors"]
    return found


def memories(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """What parts remember, which a fresh adapter does not know before its first batch."""
    return {key: value for key, value in found.items() if key.startswith("memory/")}


def moved(adapter: Adapter) -> dict[str, Tensor]:
    """What may move, by name, with its present values."""
    return {k.removeprefix("moved/"): v for k, v in tensors(adapter).items() if k.startswith("moved/")}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(value, other[key]), key


def differs(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return any(not torch.equal(value, other[key]) for key, value in one.items())


def entropy(logits: Tensor) -> Tensor:
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def with_batch_statistics(model: nn.Module) -> nn.Module:
    """A copy whose batch-norm layers have no running statistics and so use the batch's, in eval mode too."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False
            module.running_mean = module.running_var = None
    return model.eval()


class ByHand:
    """A copy of the net whose norm layers move by plain descent, as a straight-line program would."""

    def __init__(self, model: nn.Module, *, top: bool = True) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        norms = {
            name
            for name, m in self.model.named_modules()
            if isinstance(m, nn.GroupNorm | nn.LayerNorm | nn.BatchNorm2d)
        }
        self.named = {
            name: parameter.requires_grad_()
            for name, parameter in self.model.named_parameters()
            if name.rpartition(".")[0] in norms and (top or not name.startswith("layer4"))
        }

    def __call__(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        return logits

    def gradient(self, loss: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.named, torch.autograd.grad(loss, list(self.named.values())), strict=True))

    def move(self, change: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.add_(change[name])

    def assert_equals(self, adapter: Adapter) -> None:
        found = {name: value for name, value in moved(adapter).items() if not name.startswith("branch.")}
        assert found.keys() == self.named.keys()
        for name, parameter in self.named.items():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-9, atol=1e-11)


def scaled(gradient: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {name: factor * value for name, value in gradient.items()}


@dataclass(frozen=True, repr=False)
class Bright(Select):
    """Selects images whose mean is above zero, so that a test decides who teaches; notes every look."""

    seen: list[tuple[Outputs, Tensor]] = field(default_factory=list, compare=False)

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        mask = among & (outputs.batch.images.mean((1, 2, 3)) > 0)
        self.seen.append((outputs, among))
        return mask

    def __repr__(self) -> str:
        return "Bright()"


@dataclass(frozen=True, repr=False)
class Noting(Objective):
    """Entropy, and notes every selected."""

    seen: list[Selected] = field(default_factory=list, compare=False)
    anchor: bool = False

    @property
    def anchored(self) -> bool:
        return self.anchor

    def __call__(self, selected: Selected) -> Tensor:
        self.seen.append(selected)
        return selected.mean(selected.outputs.entropy)

    def __repr__(self) -> str:
        return "Noting()"


def noisy(images: Tensor, rng: Generator) -> Tensor:
    return 0.5 * images + 0.5 * torch.rand(images.shape, generator=rng).to(images)


def eight_views(image: Tensor, rng: Generator) -> Tensor:
    return image * torch.linspace(0.3, 1, 8, dtype=image.dtype)[:, None, None, None]


# Which look answers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("method", ["tent", "eta", "eata", "sar", "deyo", "rdumb", "cotta"])
def test_most_methods_answer_with_what_they_knew_before_the_update(method: str, kind: str) -> None:
    (batch, *_) = stream()
    changes: dict[str, Any] = {"select": EntropyBelow(0.5) & PLPDAbove(-0.5)} if method == "deyo" else {}
    if method == "cotta":
        changes["teacher"] = MeanTeacher(momentum=0.5)
    adapter = adapted(kind, method, **changes)
    before = frozen(adapter, batch)
    answer = adapter(batch)
    assert adapter.last.updates == 1
    torch.testing.assert_close(answer, before, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(answer, with_batch_statistics(net(kind))(batch).detach(), rtol=1e-9, atol=1e-9)
    assert (frozen(adapter, batch) - answer).abs().max() > 1e-4


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("method", ["poem", "poem-official-v2", "tent+poem", "tent+poem-i", "tent+poem-ii", "sar*"])
def test_poem_answers_with_what_it_knows_after_the_last_update(method: str, kind: str) -> None:
    (batch, *_) = stream()
    changes: dict[str, Any] = {}
    if method == "poem-official-v2":
        changes["select"] = EntropyBelow(0.4, first=0.5) & PLPDAbove(-0.5)
    adapter = adapted(kind, method, **changes)
    before = frozen(adapter, batch)
    answer = adapter(batch)
    assert adapter.last.updates > 0
    torch.testing.assert_close(frozen(adapter, batch), answer, rtol=1e-9, atol=1e-9)
    assert (answer - before).abs().max() > 1e-4


def test_memo_answers_after_the_update_and_forgets_it() -> None:
    (batch, *_) = stream(3, 3)
    adapter = adapted("gn", "memo", views=eight_views)
    before = frozen(adapter, batch)
    answer = adapter(batch)
    assert (answer - before).abs().max() > 1e-4
    assert torch.equal(frozen(adapter, batch), before)


# Batch statistics -----------------------------------------------------------------------------------------------------


def test_batch_statistics_need_more_than_switching_off_the_tracking() -> None:
    """A layer with running statistics uses them in eval mode, tracked or not; the adapter must not."""
    (batch, *_) = stream()
    model = net("bn")
    untracked = copy.deepcopy(model)
    for module in untracked.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False
    with torch.no_grad():
        source, from_batch = model(batch), with_batch_statistics(model)(batch)
        assert torch.equal(untracked.eval()(batch), source)
    assert (source - from_batch).abs().max() > 0.1
    before = copy.deepcopy(model.state_dict())
    for method in ("bn", "tent"):
        torch.testing.assert_close(poem.adapt(model, method)(batch), from_batch, rtol=1e-9, atol=1e-9)
    assert_same(dict(model.state_dict()), before)
    assert not model.training
    torch.testing.assert_close(poem.adapt(untracked, "tent")(batch), from_batch, rtol=1e-9, atol=1e-9)


def test_a_pass_over_some_samples_has_the_statistics_of_those_alone() -> None:
    batch = stream()[0] - 0.45
    select = Bright()
    adapter = adapted("bn", "tent", select=select)
    adapter(batch)
    mask = adapter.last.selected
    assert 2 <= int(mask.sum()) < len(batch)
    outputs, everyone = select.seen[0]
    destroyed = Occlusion()(outputs)
    reference = with_batch_statistics(net("bn"))
    with adapter._network.borrowed("cpu"):
        asked, whole = outputs.forward(destroyed, among=mask), outputs.forward(destroyed, among=everyone)
    with torch.no_grad():
        torch.testing.assert_close(asked[mask], reference(destroyed[mask]), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(whole, reference(destroyed), rtol=1e-9, atol=1e-9)
    assert (asked - whole)[mask].abs().max() > 1e-3


def test_deyo_destroys_only_the_sure_and_so_sees_other_statistics() -> None:
    (batch, *_) = stream()
    reference = with_batch_statistics(net("bn"))
    with torch.no_grad():
        probs = reference(batch).softmax(1)
        sure = entropy(reference(batch)) < 0.5 * math.log(10)
        adapter = adapted("bn", "deyo", lr=0.0, select=EntropyBelow(0.5) & PLPDAbove(0.0, Occlusion()))
        adapter(batch)
        covered = batch.clone()
        covered[:, :, 4:12, 4:12] = batch.mean((2, 3), keepdim=True)
        drops = []
        for kept in (sure, torch.ones_like(sure)):
            drop = torch.zeros(len(batch), dtype=torch.float64)
            labels = probs[kept].argmax(1, keepdim=True)
            found = probs[kept].gather(1, labels) - reference(covered[kept]).softmax(1).gather(1, labels)
            drop[kept] = found[:, 0]
            drops.append(drop)
    assert 2 <= int(sure.sum()) < len(batch)
    assert (drops[0] - drops[1])[sure].abs().max() > 1e-3
    assert torch.equal(adapter.last.selected, sure & (drops[0] > 0))


# Nothing selected -----------------------------------------------------------------------------------------------------


def test_an_empty_mean_is_nan_with_zero_gradient_and_momentum_coasts_on() -> None:
    """Why a step must be skipped where nobody teaches: torch would not complain, and move the weights."""
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


def test_a_sharpness_aware_step_does_not_coast_unless_it_is_told_to() -> None:
    assert poem.recipe("sar").step == SAM(0.05) == SAM(0.05, momentum_coast=False)
    assert repr(SAM(0.05)) == "SAM(0.05)"
    assert parse("SAM(0.05, momentum_coast=True)") == SAM(0.05, momentum_coast=True) != SAM(0.05)
    assert not SGD().steps_when_empty
    assert not SAM().steps_when_empty


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("method", ["sar", "sar+poem"])
def test_a_batch_of_nobody_coasts_by_the_momentum_alone(method: str, kind: str) -> None:
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
def test_coasting_is_part_of_learning(kind: str) -> None:
    """Where somebody teaches in every batch it changes nothing; frozen it does nothing; a reset forgets it."""
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


def test_coasting_on_a_broken_network_leaves_finite_weights() -> None:
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
def test_where_nobody_teaches_nothing_moves_not_even_by_momentum(method: str, kind: str, step: Any) -> None:
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


# EATA -----------------------------------------------------------------------------------------------------------------


def test_the_anchor_alone_never_moves_anything() -> None:
    first, second, third = stream()
    adapter = adapted("gn", "eata", select=Bright(), minimise=Entropy() + FisherAnchor(50.0), source_data=[third])
    adapter(first)
    before = tensors(adapter)
    source = dict(net("gn").named_parameters())
    assert differs(moved(adapter), {name: source[name].detach() for name in moved(adapter)})
    adapter(second - 2)
    assert_same(tensors(adapter), before)


def test_the_first_batch_is_not_tested_for_redundancy() -> None:
    first, second, _ = stream()
    adapter = adapted("gn", "eta", select=EntropyBelow(0.4) & NotRedundant(1e-6))
    adapter(first)
    assert torch.equal(adapter.last.selected, entropy(net("gn")(first)) < E0)
    assert bool(adapter.last.selected.any())
    adapter(second)
    assert not bool(adapter.last.selected.any())


def test_a_reset_forgets_the_average_prediction() -> None:
    first, second, _ = stream()
    adapter = adapted("gn", "eta", select=EntropyBelow(0.4) & NotRedundant(0.9))
    adapter(first)
    assert tensors(adapter)["memory/select.second.seen"].item()
    adapter.reset()
    assert torch.equal(adapter(second), adapted("gn", "eta", select=EntropyBelow(0.4) & NotRedundant(0.9))(second))
    assert torch.equal(adapter.last.selected, entropy(net("gn")(second)) < E0)


def test_importance_is_the_mean_over_batches_of_the_squared_mean_gradient_with_the_nets_own_labels() -> None:
    source = list(torch.split(images(20, seed=2).double(), 8))  # the last is short and counts as much as the others
    minimise = Noting(anchor=True)
    adapter = adapted("gn", "tent", minimise=minimise, source_data=source)
    adapter(stream()[0])
    hand = ByHand(net("gn"))
    total = {name: torch.zeros_like(p) for name, p in hand.named.items()}
    for batch in source:
        logits = hand(batch)
        for name, gradient in hand.gradient(cross_entropy(logits, logits.argmax(1))).items():
            total[name] += gradient.square()
    assert minimise.seen[0].fisher is not None
    expected = torch.cat([(total[name] / 3).flatten() for name in adapter.adapted])
    torch.testing.assert_close(minimise.seen[0].fisher, expected, rtol=1e-9, atol=1e-15)
    assert float(expected.max()) > 0


def test_eata_weighs_by_the_distance_to_its_margin_and_anchors_by_a_plain_sum_of_squares() -> None:
    """`exp(0.4 ln C - H)`, and `weight * sum F (theta - theta0)^2` without a half, over two updates by hand."""
    first, second, third = stream()
    recipe = {"select": EntropyBelow(0.4), "minimise": Entropy() + FisherAnchor(50.0), "source_data": [third]}
    adapter, hand = adapted("gn", "eata", **recipe), ByHand(net("gn"))
    start = {name: p.detach().clone() for name, p in hand.named.items()}
    logits = hand(third)
    fisher = {n: g.square() for n, g in hand.gradient(cross_entropy(logits, logits.argmax(1))).items()}
    velocity = {name: torch.zeros_like(p) for name, p in hand.named.items()}
    pulled = False
    for batch in (first, second):
        adapter(batch)
        h = entropy(hand(batch))
        sure = h.detach() < E0
        assert bool(sure.any())
        anchor = sum((fisher[n] * (p - start[n]).square()).sum() for n, p in hand.named.items())
        loss = ((E0 - h.detach()).exp() * h)[sure].sum() / int(sure.sum()) + 50.0 * anchor
        assert adapter.last.loss == pytest.approx(loss.item(), rel=1e-9)
        pulled = pulled or torch.as_tensor(anchor).item() > 0
        gradient = hand.gradient(loss)
        velocity = {n: 0.9 * velocity[n] + gradient[n] for n in gradient}
        hand.move(scaled(velocity, -LR["gn"]))
        hand.assert_equals(adapter)
    assert pulled
    assert poem.recipe("eata").weigh == ByEntropy(0.4)


# SAR ------------------------------------------------------------------------------------------------------------------


def test_sar_climbs_by_one_norm_filters_again_and_steps_from_where_it_stood() -> None:
    (batch, *_) = stream()
    radius = 0.4
    adapter, hand = adapted("gn", "sar", step=SAM(radius)), ByHand(net("gn"), top=False)
    h = entropy(hand(batch))
    first = h.detach() < E0
    gradient = hand.gradient(h[first].mean())
    norm = math.sqrt(sum(float(g.square().sum()) for g in gradient.values()))
    hand.move(scaled(gradient, radius / norm))
    risen = entropy(hand(batch))
    second = first & (risen.detach() < E0)
    assert 0 < int(second.sum()) < int(first.sum())
    loss = risen[second].sum() / int(second.sum())
    stepped = hand.gradient(loss)
    hand.move(scaled(gradient, -radius / norm))
    hand.move(scaled(stepped, -LR["gn"]))
    adapter(batch)
    assert adapter.last.loss == pytest.approx(loss.item(), rel=1e-9)
    assert adapter.last.taught == int(second.sum())
    hand.assert_equals(adapter)


def test_the_second_filter_of_sar_chooses_among_the_first_and_nobody_else() -> None:
    select = Bright()
    batch = stream()[0] - 0.45
    adapter = adapted("gn", "sar", select=select)
    adapter(batch)
    (_, everyone), (_, again) = select.seen
    assert bool(everyone.all())
    assert torch.equal(again, adapter.last.selected)
    assert 0 < int(again.sum()) < len(batch)


@pytest.mark.parametrize("step", [SAM(0.05), SAM(0.05, Adam())], ids=repr)
def test_the_way_back_of_sar_clears_the_inner_optimiser_and_the_loss_average(step: SAM) -> None:
    batches = stream()
    adapter = adapted("gn", "sar", step=step, recover=LossAverageBelow(0.62))
    fresh = tensors(adapted("gn", "sar", step=step))
    resets = []
    for batch in (*batches, *batches):
        adapter(batch)
        resets.append(adapter.last.reset)
        now = tensors(adapter)
        assert bool(now["memory/recover.seen"]) != adapter.last.reset
        if adapter.last.reset:
            assert adapter.last.updates == 1
            assert float(now["memory/recover.mean"]) == 0
            assert_same({key: now[key] for key in fresh}, fresh)
        else:
            assert differs({key: now[key] for key in fresh}, fresh)
    assert {True, False} == set(resets)


def test_the_loss_average_has_momentum_and_its_limit_is_a_fifth() -> None:
    assert poem.recipe("sar").recover == LossAverageBelow(0.2, momentum=0.9, of="last")
    recover = LossAverageBelow(0.2)
    yes, no = torch.tensor(True), torch.tensor(False)
    memory = recover.start(torch.zeros(1, dtype=torch.float64))
    for loss, made, average, fires in (
        (9.0, no, None, False),
        (1.0, yes, 1.0, False),
        (0.1, yes, 0.91, False),
        (0.0, no, 0.91, False),
        (-6.21, yes, 0.198, True),
    ):
        memory = {**memory, **recover.remember([torch.tensor(loss, dtype=torch.float64)], [made], memory)}
        assert bool(memory["loss.seen"]) == (average is not None)
        if average is not None:
            assert float(memory["loss.mean"]) == pytest.approx(average)
        assert bool(recover.fires(memory)) == fires


# DeYO -----------------------------------------------------------------------------------------------------------------


def test_deyo_selects_by_one_margin_and_weighs_by_another_without_a_gradient_through_the_weights() -> None:
    batch, covering = torch.cat(stream()), Occlusion()
    adapter = adapted(
        "gn", "deyo", select=EntropyBelow(0.5) & PLPDAbove(-0.02, covering), weigh=ByEntropy(0.4) + ByPLPD(covering)
    )
    hand = ByHand(net("gn"), top=False)
    covered = batch.clone()
    covered[:, :, 4:12, 4:12] = batch.mean((2, 3), keepdim=True)
    logits = hand(batch)
    h, probs = entropy(logits), logits.detach().softmax(1)
    label = probs.argmax(1, keepdim=True)
    drop = (probs.gather(1, label) - hand(covered).detach().softmax(1).gather(1, label))[:, 0]
    chosen = (h.detach() < 0.5 * math.log(10)) & (drop > -0.02)
    between = chosen & (h.detach() > E0)
    assert bool(between.any()), "nobody lies between the margins"
    weights = (E0 - h.detach()).exp() + drop.exp()
    loss = (weights * h)[chosen].sum() / int(chosen.sum())
    adapter(batch)
    assert torch.equal(adapter.last.selected, chosen)
    assert adapter.last.loss == pytest.approx(loss.item(), rel=1e-9)
    hand.move(scaled(hand.gradient(loss), -LR["gn"]))
    hand.assert_equals(adapter)
    recipe = poem.recipe("deyo")
    assert recipe.select == EntropyBelow(0.5) & PLPDAbove(0.2)
    assert recipe.weigh == ByEntropy(0.4) + ByPLPD()


# ROID -----------------------------------------------------------------------------------------------------------------


def roid_by_hand(logits: Tensor, prior: Tensor, size: int) -> Tensor:
    """The weighted ratio loss of those at least as diverse as the mean, divided by the configured batch size."""
    probs = logits.detach().softmax(1)
    unlike = 1 - torch.nn.functional.cosine_similarity(prior[None], probs, dim=1)
    unlike = (unlike - unlike.min()) / (unlike.max() - unlike.min())
    sure = -entropy(logits.detach())
    sure = (sure - sure.min()) / (sure.max() - sure.min())
    weights = torch.where(unlike < unlike.mean(), 0.0, (3 * unlike * sure).exp())
    cut = logits.softmax(1).clamp(0, 0.99)
    return (weights * -(cut * (cut / (1 - cut) + 1e-5).log()).sum(1)).sum() / size


def test_roid_divides_by_the_configured_size_and_averages_with_the_source_after_the_step() -> None:
    first, second = torch.split(images(12, seed=1).double(), 6)
    adapter = adapted("gn", "roid", minimise=SoftLikelihoodRatio(), batch_size=8, lr=0.005)
    hand = ByHand(net("gn"))
    start = {name: p.detach().clone() for name, p in hand.named.items()}
    velocity = {name: torch.zeros_like(p) for name, p in hand.named.items()}
    prior = torch.full((10,), 0.1, dtype=torch.float64)
    for batch in (first, second):
        logits = hand(batch)
        answer = adapter(batch)
        loss = roid_by_hand(logits, prior, size=8)
        assert adapter.last.loss == pytest.approx(loss.item(), rel=1e-9)
        gradient = hand.gradient(loss)
        velocity = {n: 0.9 * velocity[n] + gradient[n] for n in gradient}
        hand.move({n: -0.005 * (gradient[n] + 0.9 * velocity[n]) for n in gradient})
        hand.move({n: 0.01 * (start[n] - p.detach()) for n, p in hand.named.items()})
        hand.assert_equals(adapter)
        mean = logits.detach().softmax(1).mean(0)
        smooth = max(1 / 6, 1 / 10) / mean.max()
        torch.testing.assert_close(answer, logits.detach() * (mean + smooth) / (1 + 10 * smooth))
        prior = 0.9 * prior + 0.1 * mean
        torch.testing.assert_close(tensors(adapter)["memory/select.mean"], prior)


def test_the_prior_of_roid_moves_once_per_batch_though_filter_and_weight_both_read_it() -> None:
    (batch, *_) = stream()
    adapter = adapted("gn", "roid", minimise=SoftLikelihoodRatio(), lr=0.0)
    adapter(batch)
    mean = net("gn")(batch).softmax(1).mean(0).detach()
    torch.testing.assert_close(tensors(adapter)["memory/select.mean"], 0.9 * torch.full_like(mean, 0.1) + 0.1 * mean)


@pytest.mark.parametrize("rows", [1, 5])
def test_roid_survives_a_batch_whose_samples_are_all_alike(rows: int) -> None:
    adapter = adapted("gn", "roid", lr=0.005)
    answer = adapter(stream()[0][:1].repeat(rows, 1, 1, 1))
    assert answer.isfinite().all()
    assert adapter.last.selected.tolist() == [True] * rows
    assert adapter.last.updates == 1
    assert all(value.isfinite().all() for value in moved(adapter).values())


# CoTTA ----------------------------------------------------------------------------------------------------------------


def test_the_teacher_of_cotta_averages_logits_not_probabilities() -> None:
    (batch, *_) = stream()
    adapter = adapted("gn", "cotta", teacher=MeanTeacher(copies=4, unsure=2.0, augment=noisy))
    rng = torch.Generator().manual_seed(0)
    logits = torch.stack([net("gn")(noisy(batch, rng)).detach() for _ in range(4)])
    answer = adapter(batch)
    torch.testing.assert_close(answer, logits.mean(0), rtol=1e-9, atol=1e-9)
    assert (answer.softmax(1) - logits.softmax(2).mean(0)).abs().max() > 1e-3


def test_the_teacher_of_cotta_follows_parameters_and_leaves_buffers_alone() -> None:
    model = net("bn")
    before = copy.deepcopy(model.state_dict())
    teacher = MeanTeacher(momentum=0.9, unsure=0.0)
    adapter = poem.adapt(
        model, "cotta", teacher=teacher, lr=0.01, recover=StochasticRestore(0.0), mean=(0, 0, 0), std=(1, 1, 1)
    )
    source = torch.cat([before[name].flatten() for name in adapter.adapted])
    expected = source.clone()
    for batch in stream():
        adapter(batch)
        student = torch.cat([value.flatten() for value in moved(adapter).values()])
        expected = 0.9 * expected + 0.1 * student
        torch.testing.assert_close(tensors(adapter)["teacher/theta"], expected)
    assert not torch.allclose(expected, source)
    assert not any("running" in name or "batches" in name for name in adapter.adapted)
    assert_same(dict(model.state_dict()), dict(before))


def test_stochastic_restore_returns_single_numbers_to_the_source() -> None:
    source, theta = torch.zeros(4000), torch.ones(4000)
    pulled = StochasticRestore(0.3).pull(theta, source, torch.Generator().manual_seed(0))
    assert set(pulled.tolist()) == {0.0, 1.0}
    assert 0.25 < float((pulled == 0).float().mean()) < 0.35
    again = StochasticRestore(0.3).pull(theta, source, torch.Generator().manual_seed(1))
    assert not torch.equal(pulled, again)


@pytest.mark.parametrize("method", ["cotta", "roid", "memo"])
def test_methods_that_augment_want_images_in_the_unit_range_and_the_normalisation_inside(method: str) -> None:
    with pytest.raises(ValueError, match=r"\[0, 1\].*mean=.*std="):
        poem.adapt(net(), method)
    poem.adapt(net(), "sar")


def test_the_student_of_cotta_learns_from_the_teacher_in_both_directions() -> None:
    (batch, *_) = stream()
    hand = net("gn")
    logits, target = hand(batch).detach(), hand(batch * 0.5).detach()
    half = MeanTeacher(unsure=2.0, copies=1, augment=lambda x, rng: 0.5 * x)
    for symmetric in (True, False):
        adapter = adapted("gn", "cotta", teacher=half, minimise=FollowTeacher(symmetric=symmetric))
        adapter(batch)
        there = -(target.softmax(1) * logits.log_softmax(1)).sum(1).mean()
        back = -(logits.softmax(1) * target.log_softmax(1)).sum(1).mean()
        expected = 0.5 * (there + back) if symmetric else there
        assert adapter.last.loss == pytest.approx(float(expected), rel=1e-9)


# MEMO -----------------------------------------------------------------------------------------------------------------


def test_memo_takes_plain_steps_and_begins_anew_with_every_image() -> None:
    assert poem.recipe("memo").step == SGD(momentum=0.0)
    (batch, *_) = stream(4, 4)
    adapter = adapted("gn", "memo", views=eight_views)
    together = adapter(batch)
    alone = torch.cat([adapted("gn", "memo", views=eight_views)(image) for image in torch.split(batch, 1)])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    assert_same(tensors(adapter), tensors(adapted("gn", "memo", views=eight_views)))
    assert torch.equal(adapter(batch), together)


def test_memo_cuts_the_logits_before_it_averages_the_views() -> None:
    (image, *_) = stream(1, 1)
    kept = [1, 4, 7]
    hand = net("gn")
    parameters = list(hand.parameters())
    mean = hand(eight_views(image, torch.Generator()))[:, kept].softmax(1).mean(0)
    gradients = torch.autograd.grad(-(mean * mean.log()).sum(), parameters)
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.sub_(0.1 * gradient)
        expected = hand(image)[:, kept]
    adapter = adapted("gn", "memo", views=eight_views, classes=kept, lr=0.1)
    torch.testing.assert_close(adapter(image), expected, rtol=1e-9, atol=1e-9)
    assert adapter.last.loss == pytest.approx(-(mean * mean.log()).sum().item(), rel=1e-9)


# LAME, RDumb ----------------------------------------------------------------------------------------------------------


def test_lame_answers_log_probabilities() -> None:
    (batch, *_) = stream()
    answer = poem.adapt(net("gn"), "lame")(batch)
    assert bool((answer <= 0).all())
    torch.testing.assert_close(answer.exp().sum(1), torch.ones(12, dtype=torch.float64))


def test_rdumb_counts_calls_whether_or_not_they_taught() -> None:
    adapter = adapted("gn", "rdumb", select=Bright(), recover=EveryCalls(3))
    resets = []
    for index, batch in enumerate(stream(72)):
        before = moved(adapter)
        adapter(batch - 2 if index in (1, 2) else batch)  # two calls teach nothing and count all the same
        resets.append(adapter.last.reset)
        assert differs(moved(adapter), before) == (index not in (1, 2))
    assert resets == [False, False, False, True, False, False]
    assert poem.recipe("rdumb").recover == EveryCalls(1000)


def test_rdumb_forgets_the_average_prediction_too() -> None:
    first, second, third = stream()
    adapter = adapted("gn", "rdumb", select=EntropyBelow(0.4) & NotRedundant(2.0), recover=EveryCalls(2))
    for batch in (first, second, third):
        adapter(batch)
    probs = net("gn")(third).detach().softmax(1)
    sure = entropy(net("gn")(third)) < E0
    torch.testing.assert_close(tensors(adapter)["memory/select.second.mean"], probs[sure].mean(0))


# Thresholds, learning rates, layers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["tent-filtered", "sar", "poem", "eta"])
def test_thresholds_follow_the_classes_that_are_left(method: str) -> None:
    (batch, *_) = stream()
    kept = [0, 2, 3, 5, 8]
    logits = net("gn")(batch).detach()[:, kept]
    adapter = adapted("gn", method, classes=kept)
    answer = adapter(batch)
    assert answer.shape == (12, 5)
    expected = entropy(logits) < 0.4 * math.log(5)
    assert torch.equal(adapter.last.selected, expected)
    for wrong in (10, 1000):
        assert not torch.equal(expected, entropy(logits) < 0.4 * math.log(wrong))


@pytest.mark.parametrize("classes", [3, 5, 10, 100, 200, 1000])
def test_thresholds_know_no_number_of_classes_by_heart(classes: int) -> None:
    model = make_net("gn", classes=classes, sharpness=8.0).double()
    batch = images(24, seed=3).double()
    expected = entropy(model(batch)).detach()
    between = float(expected.sort().values[11:13].mean())  # as many below as above
    adapter = poem.adapt(model, "poem", threshold=between / math.log(classes))
    adapter(batch)
    assert torch.equal(adapter.last.selected, expected < between)
    assert int(adapter.last.selected.sum()) == 12


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


def test_only_roid_and_cotta_look_ahead_of_their_momentum() -> None:
    ahead = {name for name in poem.methods() if getattr(poem.recipe(name).step, "nesterov", False)}
    assert {name.removesuffix("*").split("+")[0] for name in ahead} == {"roid", "cotta"}


def numbers(model: nn.Module, layers: tuple[str, ...]) -> tuple[int, int]:
    return len(layers), sum(p.numel() for layer in layers for p in model.get_submodule(layer).parameters())


@pytest.mark.parametrize(
    ("library", "name", "every", "shallow", "branch"),
    [
        ("torchvision", "resnet50", (53, 53_120), (43, 30_592), (10, 22_528)),
        ("timm", "vit_base_patch16_224", (25, 38_400), (18, 27_648), (3, 4_608)),
    ],
)
def test_layers_are_found_by_what_they_are(
    library: str, name: str, every: tuple[int, int], shallow: tuple[int, int], branch: tuple[int, int]
) -> None:
    models = pytest.importorskip(f"{library}.models")
    with torch.device("meta"):
        inner = getattr(models, name)()
    for model in (inner, nn.Sequential(nn.Identity(), inner)):  # another name in front changes nothing
        facts = anatomy(model)
        assert numbers(model, facts.norms) == every
        for parameters, count in ((NormAffine(), every), (NormAffine("excluded"), shallow)):
            names = parameters(model, facts)
            layers = tuple(dict.fromkeys(n.rpartition(".")[0] for n in names))
            assert len(names) == 2 * len(layers)
            assert numbers(model, layers) == count
        assert numbers(model, facts.beyond(facts.split())) == branch


# POEM -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Nil(Objective):
    """Asks for nothing."""

    def __call__(self, selected: Selected) -> Tensor:
        return 0 * selected.outputs.logits.sum()


@pytest.mark.parametrize("kind", NETS)
def test_the_entropy_moves_the_shallow_layers_alone_and_the_cross_entropy_the_branch_alone(kind: str) -> None:
    batches = stream()
    both = adapted(kind, "poem", rounds=1)
    only_theta = adapted(kind, "poem", rounds=1, branch=AdaptBranch(teach=Nil()))
    only_zeta = adapted(kind, "poem", rounds=1, minimise=Nil())
    start = moved(both)
    zeta = [name for name in start if name.startswith("branch.")]
    theta = [name for name in start if not name.startswith("branch.")]
    for adapter in (both, only_theta, only_zeta):
        adapter(batches[0])
        assert adapter.last.updates == 1

    def assert_moved(adapter: Adapter, names: list[str], as_in: dict[str, Tensor], changed: bool) -> None:
        now = {name: moved(adapter)[name] for name in names}
        for name in names:
            torch.testing.assert_close(now[name], as_in[name], rtol=1e-12, atol=1e-12)
        assert differs(now, start) == changed

    assert_moved(only_theta, theta, moved(both), changed=True)
    assert_moved(only_zeta, zeta, moved(both), changed=True)
    assert_moved(only_theta, zeta, start, changed=False)
    assert_moved(only_zeta, theta, start, changed=False)


def test_poem_by_hand_on_both_heads() -> None:
    """Three batches, one update each: mean entropy of y for the shallow layers, CE(p_A, argmax y) for the branch."""
    adapter = adapted("gn", "poem", rounds=1, readout="first")
    hand = ByHand(net("gn"), top=False)
    shallow = hand.model
    assert isinstance(shallow, ConvNet)
    deep = copy.deepcopy(shallow.layer4).requires_grad_(False)
    norms = {name for name, m in deep.named_modules() if isinstance(m, nn.GroupNorm)}
    zeta = {n: p.requires_grad_() for n, p in deep.named_parameters() if n.rpartition(".")[0] in norms}
    speed = {key: torch.zeros_like(p) for key, p in (*hand.named.items(), *zeta.items())}
    for batch in stream():
        x = torch.relu(shallow.norm1(shallow.conv1(batch)))
        x = shallow.layer3(shallow.layer2(shallow.layer1(x)))
        source, branch = (shallow.fc(part(x).mean((2, 3))) for part in (shallow.layer4, deep))
        y = 0.5 * source.softmax(1) + 0.5 * branch.softmax(1)
        h = -(y * y.log()).sum(1)
        sure = h.detach() < E0
        assert 0 < int(sure.sum()) < 12
        first = torch.autograd.grad(h[sure].mean(), list(hand.named.values()), retain_graph=True)
        second = torch.autograd.grad(cross_entropy(branch[sure], y.detach().argmax(1)[sure]), list(zeta.values()))
        for (key, p), g in zip((*hand.named.items(), *zeta.items()), (*first, *second), strict=True):
            speed[key] = 0.9 * speed[key] + g
            with torch.no_grad():
                p.sub_(LR["gn"] * speed[key])
        torch.testing.assert_close(adapter(batch), y.detach().log(), rtol=1e-9, atol=1e-9)
        assert torch.equal(adapter.last.selected, sure)
        hand.assert_equals(adapter)
        for name, p in zeta.items():
            torch.testing.assert_close(moved(adapter)[f"branch.layer4.{name}"], p.detach(), rtol=1e-9, atol=1e-11)


def test_the_weights_of_a_base_do_not_reach_the_branch() -> None:
    """Whoever is selected counts the same for the cross-entropy, however much for the entropy."""
    (batch, *_) = stream()
    equal, weighed = (adapted("gn", "tent+poem", rounds=1, weigh=weigh) for weigh in (Equal(), ByEntropy(0.4)))
    equal(batch), weighed(batch)
    one, other = moved(equal), moved(weighed)
    zeta = [name for name in one if name.startswith("branch.")]
    assert zeta
    assert_same({name: one[name] for name in zeta}, {name: other[name] for name in zeta})
    assert differs({name: one[name] for name in one if name not in zeta}, other)


def test_poem_compares_sets_and_not_their_sizes() -> None:
    """One enters as one leaves: four before, four after, and another update all the same."""
    adapter = poem.adapt(Dial(), "poem", lr=5.0)
    adapter(spots(3, 3, 3, 2.3, -2.6))
    assert adapter.last.newly_reliable.sum() == adapter.last.no_longer_reliable.sum() == 1
    assert adapter.last.updates == 2


@pytest.mark.parametrize("kind", NETS)
def test_poem_leaves_the_source_head_as_it_came(kind: str) -> None:
    model = net(kind)
    before = copy.deepcopy(model.state_dict())
    select = Bright()
    adapter = poem.adapt(model, "poem", lr=LR[kind], select=select)
    for batch in stream():
        adapter(batch)
    now = moved(adapter)
    facts = anatomy(model)
    deep = facts.modules[facts.modules.index(facts.split()) :]
    assert not [name for name in now if name.rpartition(".")[0] in deep]
    assert differs({name: value for name, value in now.items() if name.startswith("branch.")},
                   {f"branch.{name}": value for name, value in before.items()})  # fmt: skip
    assert_same(dict(model.state_dict()), dict(before))
    # The first head is the network with its shallow layers moved and its deep ones untouched.
    hand = with_batch_statistics(model)
    outputs = select.seen[-1][0]
    with torch.no_grad():
        for name, parameter in hand.named_parameters():
            parameter.copy_(now.get(name, before[name]))
        batch = outputs.batch.images
        torch.testing.assert_close(outputs.heads[0].detach(), hand(batch), rtol=1e-9, atol=1e-9)
        for name, parameter in hand.named_parameters():
            parameter.copy_(now.get(f"branch.{name}", parameter))
        torch.testing.assert_close(outputs.heads[1].detach(), hand(batch), rtol=1e-9, atol=1e-9)
    assert (outputs.heads[0] - outputs.heads[1]).abs().max() > 1e-4


@pytest.mark.parametrize("kind", ["gn", "ln"])
def test_a_single_image_teaches_poem_at_most_once(kind: str) -> None:
    """The set is the image or nobody, so it stands still or is empty after one update."""
    adapter = adapted(kind, "poem", lr=LR[kind] / 10)
    for image in torch.split(images(12, seed=1).double(), 1):
        adapter(image)
        assert adapter.last.updates == int(adapter.last.selected.sum()) <= 1
        assert not bool(adapter.last.newly_reliable.any())
    assert 0 < adapter.totals.updates < 12


def test_mixing_probabilities_and_mixing_logits_are_two_things() -> None:
    source = torch.tensor([[4.0, 0.0, 0.0]], dtype=torch.float64)
    branch = torch.tensor([[0.0, 4.0, 0.0]], dtype=torch.float64)
    probabilities = AdaptBranch(combine="probabilities").together(source, branch)
    logits = AdaptBranch(combine="logits").together(source, branch)
    torch.testing.assert_close(probabilities.exp(), (source.softmax(1) + branch.softmax(1)) / 2)
    torch.testing.assert_close(logits, (source + branch) / 2)
    assert abs(float(entropy(probabilities) - entropy(logits))) > 0.05
    third = AdaptBranch(alpha=0.3).together(source, branch)
    torch.testing.assert_close(third.exp(), 0.3 * source.softmax(1) + 0.7 * branch.softmax(1))
    far = AdaptBranch().together(torch.tensor([[1000.0, 0.0]]), torch.tensor([[1000.0, 0.0]]))
    assert far.isfinite().all()
    assert float(far[0, 1]) == pytest.approx(-1000)


# Streams, precision, reset, copies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["source", "tent", "sar", "poem", "memo"])
def test_the_last_short_batch_is_answered_taught_and_weighted_by_its_size(method: str) -> None:
    x = images(20, seed=1).double()
    adapter = adapted("gn", method, **({"views": eight_views} if method == "memo" else {}))
    answers = list(adapter.stream(torch.split(x, 8)))
    assert [len(answer) for answer in answers] == [8, 8, 4]
    assert (adapter.totals.batches, adapter.totals.images) == (3, 20)
    if method == "tent":
        assert adapter.last.loss == pytest.approx(float(adapter.last.first_entropy.sum()) / 4)
        assert adapter.last.taught == 4


def test_accuracy_counts_samples_and_not_batches() -> None:
    metric = Accuracy()
    metric.update(torch.eye(4), torch.arange(4))
    metric.update(torch.eye(4)[:1], torch.tensor([3]))
    assert metric.result() == pytest.approx(4 / 5)


@pytest.mark.parametrize("where", ["autocast", "precision", "model"])
@pytest.mark.parametrize("kind", NETS)
def test_half_precision_stays_inside_the_network(kind: str, where: str) -> None:
    select = Bright()
    model = make_net(kind, sharpness=SHARPNESS[kind])
    if where == "model":
        model = model.bfloat16()
    precision: Any = "bf16" if where == "precision" else "fp32"
    adapter = poem.adapt(model, "poem", lr=LR[kind], select=select, precision=precision)
    inside: list[torch.dtype] = []

    def note(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        inside.append(output.dtype)

    head = model.fc if isinstance(model, ConvNet) else model.get_submodule("head")
    assert isinstance(head, nn.Linear)
    handle = head.register_forward_hook(note)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where == "autocast"):
        answer = adapter(images(6, seed=1))
    handle.remove()
    assert torch.bfloat16 in inside, "nothing ran in half precision"
    assert answer.dtype == torch.float32
    outputs = select.seen[0][0]
    for found in (outputs.logits, outputs.probs, outputs.entropy, *outputs.heads):
        assert found.dtype == torch.float32
    assert {value.dtype for value in moved(adapter).values()} == {torch.float32}
    assert adapter.last.updates > 0
    alone = -(outputs.logits.detach().double().softmax(1) * outputs.logits.detach().double().log_softmax(1)).sum(1)
    torch.testing.assert_close(outputs.entropy.detach().double(), alone, rtol=1e-5, atol=1e-5)


RESETS: list[tuple[str, dict[str, Any]]] = [
    ("tent", {}),
    ("tent", {"step": Adam()}),
    ("tent", {"statistics": RunningMean(0.2)}),
    ("eata", {"select": EntropyBelow(0.4) & NotRedundant(0.98)}),
    ("sar", {}),
    ("sar", {"step": SAM(0.05, Adam())}),
    ("deyo", {"select": EntropyBelow(0.5) & PLPDAbove(-0.5)}),
    ("roid", {"lr": 0.001}),
    ("memo", {"views": eight_views}),
    ("cotta", {"teacher": MeanTeacher(momentum=0.9, copies=2, unsure=2.0), "recover": StochasticRestore(0.1)}),
    ("rdumb", {"recover": EveryCalls(2)}),
    ("poem", {}),
    ("poem", {"statistics": RunningMean(0.2), "step": Adam(), "threshold": 1.01}),
    ("poem-official", {"select": EntropyBelow(0.4) & PLPDAbove(-0.5) & NotRedundant(0.99)}),
    ("sar+poem", {}),
]


@pytest.mark.parametrize(("method", "changes"), RESETS, ids=[f"{m}{sorted(c)}" for m, c in RESETS])
@pytest.mark.parametrize("kind", ["bn", "ln"])
def test_a_reset_restores_everything(kind: str, method: str, changes: dict[str, Any]) -> None:
    adapter = adapted(kind, method, **changes)
    fresh = adapted(kind, method, **changes).state_dict()
    answers = [adapter(batch) for batch in stream(24)]
    assert adapter.totals.taught > 0
    away = adapter.state_dict()
    assert differs(fresh["tensors"], away["tensors"]) == (method != "memo")
    assert away["calls"] == 2
    adapter.reset()
    state = adapter.state_dict()
    assert_same(state.pop("tensors"), fresh.pop("tensors"))
    assert torch.equal(state.pop("rng"), fresh.pop("rng"))
    assert state == fresh
    assert all(torch.equal(adapter(b), answer) for b, answer in zip(stream(24), answers, strict=True))


@pytest.mark.parametrize("method", ["tent", "sar", "poem", "roid"])
@pytest.mark.parametrize("kind", NETS)
def test_a_copied_adapter_listens_to_its_own_model(kind: str, method: str) -> None:
    """Nothing of the copy reaches back to the original, and the other way round."""
    first, second, third = stream()
    adapter = adapted(kind, method, lr=LR[kind] / 10)
    expected = adapted(kind, method, lr=LR[kind] / 10)
    adapter(first), expected(first)
    twin = copy.deepcopy(adapter)
    assert twin.model is not adapter.model
    before = tensors(adapter)
    twin(third)
    assert twin.last.updates > 0
    assert_same(tensors(adapter), before)
    assert torch.equal(adapter(second), expected(second))
    again = copy.deepcopy(expected)
    with torch.no_grad():
        for parameter in expected.model.parameters():
            parameter.zero_()
    assert torch.equal(again(third), adapter(third))


@pytest.mark.parametrize("method", ["tent", "lame", "poem"])
def test_between_calls_the_model_carries_no_hook_and_can_be_copied(method: str) -> None:
    model = net("bn")
    adapter = poem.adapt(model, method)
    (batch, *_) = stream()
    adapter(batch)
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert "forward" not in vars(module)
    other = copy.deepcopy(model)
    assert torch.equal(other(batch), model(batch))


def test_everything_means_every_parameter_and_cotta_leaves_tokens_alone() -> None:
    model = make_net("ln")
    facts, names = anatomy(model), [name for name, _ in model.named_parameters()]
    assert Everything()(model, facts) == names
    left = set(names) - set(Everything("weight-and-bias")(model, facts))
    assert left == {"token", "position"}
    assert poem.recipe("cotta").parameters == Everything("weight-and-bias")
    assert poem.recipe("cotta").readout == Readout("teacher")
