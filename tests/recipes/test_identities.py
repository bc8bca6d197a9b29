"""Recipes that say the same thing in other words do the same thing, and parts agree with a calculation by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nets import make_net
from torch import Generator, Tensor, nn
from toys import images

import poem
from poem.adapter import Adapter
from poem.engine.anatomy import anatomy
from poem.engine.network import Network
from poem.parts import (
    SAM,
    SGD,
    Adam,
    AdaptBranch,
    AverageWithSource,
    Batch,
    ByEntropy,
    Consistency,
    CrossEntropy,
    Entropy,
    EntropyBelow,
    Equal,
    EveryCalls,
    Explore,
    FirstRound,
    FisherAnchor,
    FromBatch,
    Laplacian,
    LossAverageBelow,
    MeanTeacher,
    Mixed,
    Never,
    NormAffine,
    Nothing,
    NotRedundant,
    Outputs,
    PLPDAbove,
    Prior,
    Readout,
    Repeat,
    RunningMean,
    Select,
    SoftLikelihoodRatio,
    Source,
    Statistics,
    Step,
    StochasticRestore,
)
from poem.parts.base import Memory

NETS = ("bn", "gn", "ln")
LR = {"bn": 0.05, "gn": 0.02, "ln": 0.002}
SHARPNESS = {"bn": 10.0, "gn": 6.0, "ln": 9.0}
SHALLOW = NormAffine("excluded")


def net(kind: str) -> nn.Module:
    return make_net(kind, sharpness=SHARPNESS[kind]).double()


def stream(count: int = 36) -> tuple[Tensor, ...]:
    return torch.split(images(count, seed=1).double(), 12)


def adapted(kind: str, method: str | poem.Recipe, **changes: Any) -> Adapter:
    return poem.adapt(net(kind), method, guard=False, lr=changes.pop("lr", LR[kind]), **changes)


def still(images: Tensor, rng: Generator) -> Tensor:
    return images


def assert_alike(one: Adapter, other: Adapter, answer: Callable[[Tensor], Tensor] = lambda x: x) -> None:
    """Batch by batch the same sets, answers and weights; `answer` is applied to the second's."""
    for batch in stream():
        torch.testing.assert_close(one(batch), answer(other(batch)), rtol=1e-9, atol=1e-9)
        assert torch.equal(one.last.selected, other.last.selected)
    assert one.totals.updates == other.totals.updates > 0
    assert 0 < one.totals.taught <= one.totals.images * one.recipe.explore.updates
    mine, theirs = (x.state_dict()["tensors"] for x in (one, other))
    moved = [key for key in theirs if key.startswith("moved/") and "branch" not in key]
    assert moved
    for key in moved:
        torch.testing.assert_close(mine[key], theirs[key], rtol=1e-9, atol=1e-12)


def log_probs(logits: Tensor) -> Tensor:
    return logits.log_softmax(1)


# One method in the words of another -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NETS)
def test_poem_with_alpha_one_and_one_update_is_filtered_tent(kind: str) -> None:
    mine = adapted(kind, "poem", alpha=1.0, rounds=1)
    filtered = adapted(kind, "tent-filtered", parameters=SHALLOW, readout="last")
    assert_alike(mine, filtered, log_probs)


@pytest.mark.parametrize("kind", NETS)
def test_poem_with_one_update_and_no_branch_is_filtered_tent(kind: str) -> None:
    mine = adapted(kind, "poem", branch=None, rounds=1)
    assert_alike(mine, adapted(kind, "tent-filtered", parameters=SHALLOW, readout="last"))


@pytest.mark.parametrize("kind", NETS)
def test_exploring_once_is_not_exploring(kind: str) -> None:
    mine = adapted(kind, "tent+poem-i", rounds=1)
    assert_alike(mine, adapted(kind, "tent-filtered", readout="last"))
    assert_alike(adapted(kind, "sar", explore=Repeat(1)), adapted(kind, "sar"))


@pytest.mark.parametrize("kind", NETS)
def test_poem_without_a_branch_is_tent_with_exploration_on_the_shallow_layers(kind: str) -> None:
    assert_alike(adapted(kind, "poem", branch=None), adapted(kind, "tent+poem-i", parameters=SHALLOW))


@pytest.mark.parametrize("kind", NETS)
def test_poem_with_alpha_one_explores_as_without_a_branch(kind: str) -> None:
    assert_alike(adapted(kind, "poem", alpha=1.0), adapted(kind, "poem", branch=None), log_probs)


@pytest.mark.parametrize("kind", NETS)
def test_eta_with_a_cosine_beyond_one_and_equal_weights_is_filtered_tent(kind: str) -> None:
    mine = adapted(kind, "eta", select=EntropyBelow(0.4) & NotRedundant(1.01), weigh=Equal())
    assert_alike(mine, adapted(kind, "tent-filtered"))


@pytest.mark.parametrize("kind", NETS)
def test_eata_with_a_weightless_anchor_is_eta(kind: str) -> None:
    select = EntropyBelow(0.4) & NotRedundant(0.98)
    anchor = Entropy() + FisherAnchor(0.0)
    mine = adapted(kind, "eata", select=select, minimise=anchor, source_data=[images(8, seed=2).double()])
    assert mine.preparation["forwards"] == 8
    assert_alike(mine, adapted(kind, "eta", select=select))


@pytest.mark.parametrize("kind", NETS)
def test_eata_without_source_data_is_eta(kind: str) -> None:
    select = EntropyBelow(0.4) & NotRedundant(0.98)
    assert_alike(adapted(kind, "eata", select=select), adapted(kind, "eta", select=select))


@pytest.mark.parametrize("kind", NETS)
def test_deyo_without_plpd_filter_and_weight_is_eta_with_two_margins(kind: str) -> None:
    mine = adapted(kind, "deyo", select=EntropyBelow(0.5) & PLPDAbove(-2.0), weigh=ByEntropy(0.4))
    other = adapted(kind, "eta", parameters=SHALLOW, select=EntropyBelow(0.5), weigh=ByEntropy(0.4))
    assert_alike(mine, other)
    assert mine.totals.forwards > other.totals.forwards


@pytest.mark.parametrize("kind", NETS)
def test_a_margin_beyond_ln_c_selects_every_sample(kind: str) -> None:
    assert_alike(adapted(kind, "tent-filtered", threshold=1.01), adapted(kind, "tent"))


@pytest.mark.parametrize("kind", NETS)
def test_a_perturbation_of_radius_zero_is_plain_descent_on_the_same_samples(kind: str) -> None:
    mine = adapted(kind, "sar", step=SAM(0.0), recover=Never())
    assert_alike(mine, adapted(kind, "tent-filtered", parameters=SHALLOW))
    assert_alike(adapted(kind, "tent", step=SAM(0.0, Adam())), adapted(kind, "tent", step=Adam()))


@pytest.mark.parametrize("kind", NETS)
def test_rdumb_that_never_lives_a_thousand_calls_is_eta(kind: str) -> None:
    select = EntropyBelow(0.4) & NotRedundant(0.98)
    assert_alike(adapted(kind, "rdumb", select=select), adapted(kind, "eta", select=select))


@pytest.mark.parametrize("kind", NETS)
def test_a_reset_before_every_call_is_a_fresh_adapter_for_every_batch(kind: str) -> None:
    mine = adapted(kind, "rdumb", recover=EveryCalls(1), readout="last")
    for batch in stream():
        fresh = adapted(kind, "eta", readout="last")
        torch.testing.assert_close(mine(batch), fresh(batch), rtol=1e-9, atol=1e-9)
        assert fresh.last.updates == 1


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize(
    "recover", [AverageWithSource(1.0), StochasticRestore(0.0), LossAverageBelow(-1.0), EveryCalls(99)], ids=repr
)
def test_a_way_back_that_is_never_taken_is_none(recover: Any, kind: str) -> None:
    assert_alike(adapted(kind, "tent", recover=recover), adapted(kind, "tent"))


@pytest.mark.parametrize("recover", [AverageWithSource(0.0), StochasticRestore(1.0)], ids=repr)
def test_all_the_way_back_leaves_the_source(recover: Any) -> None:
    mine, plain = adapted("bn", "tent", recover=recover), adapted("bn", "bn")
    for batch in stream():
        torch.testing.assert_close(mine(batch), plain(batch), rtol=1e-9, atol=1e-9)
        assert mine.last.updates == 1


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("method", ["tent", "eta", "sar", "deyo", "tent*", "tent+poem-i"])
def test_without_a_learning_rate_every_method_answers_as_bn(method: str, kind: str) -> None:
    changes = {"select": EntropyBelow(0.5) & PLPDAbove(-0.5)} if method == "deyo" else {}
    mine, plain = adapted(kind, method, lr=0.0, **changes), adapted(kind, "bn")
    for batch in stream():
        torch.testing.assert_close(mine(batch), plain(batch), rtol=1e-9, atol=1e-9)
    assert mine.totals.taught > 0


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("combine", ["probabilities", "logits"])
@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.5, 1.0])
def test_before_any_update_the_branch_answers_as_the_source_does(kind: str, combine: Any, alpha: float) -> None:
    mine = adapted(kind, "poem", lr=0.0, branch=AdaptBranch(alpha=alpha, combine=combine))
    plain = adapted(kind, "bn")
    for batch in stream():
        torch.testing.assert_close(log_probs(mine(batch)), log_probs(plain(batch)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("kind", ["gn", "ln"])
def test_networks_without_batch_norm_do_not_ask_for_statistics(kind: str) -> None:
    for statistics in (Source(), Mixed(0.3), RunningMean(0.3)):
        assert_alike(adapted(kind, "tent", statistics=statistics), adapted(kind, "tent"))


def test_weights_of_the_first_round_are_weights_where_there_is_one_round() -> None:
    assert_alike(adapted("gn", "deyo", weigh=FirstRound(ByEntropy(0.4))), adapted("gn", "deyo", weigh=ByEntropy(0.4)))


def test_a_teacher_without_memory_answers_as_the_student_did_after_the_last_batch() -> None:
    teacher = MeanTeacher(momentum=0.0, unsure=0.0)
    mine = adapted("gn", "cotta", teacher=teacher, recover=Never(), mean=(0, 0, 0), std=(1, 1, 1))
    for batch in stream():
        answer = mine(batch)
        torch.testing.assert_close(answer, mine.last.first_logits, rtol=1e-9, atol=1e-9)
    assert mine.totals.updates == 3


def test_a_copy_that_is_not_changed_agrees_as_far_as_its_entropy() -> None:
    """Symmetric cross-entropy of a prediction with itself is its entropy."""
    plain, twice = (
        adapted("gn", "roid", select=EntropyBelow(0.9), minimise=minimise, mean=(0, 0, 0), std=(1, 1, 1), lr=0.0)
        for minimise in (SoftLikelihoodRatio(), SoftLikelihoodRatio() + Consistency(still))
    )
    (batch, *_) = stream()
    plain(batch), twice(batch)
    weights = poem.parts.ByDiversityAndCertainty()
    logits = plain.last.first_logits
    outputs = look_of(logits)
    weighed = weights(outputs, plain.last.selected, weights.start(outputs)) * outputs.entropy
    assert plain.last.loss is not None
    assert twice.last.loss is not None
    extra = float(weighed[plain.last.selected].sum()) / 12
    assert twice.last.loss == pytest.approx(plain.last.loss + extra, rel=1e-9)


@dataclass(frozen=True, repr=False)
class FirstFew(Select):
    """The first samples of a batch."""

    count: int = 1

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        return among & (torch.arange(len(among), device=among.device) < self.count)


@pytest.mark.parametrize("kind", ["gn", "ln"])
@pytest.mark.parametrize(("count", "share"), [(1, 1 / 6), (3, 1 / 2), (6, 1.0), (9, 1.0)])
def test_where_few_samples_are_selected_least_makes_the_update_smaller(kind: str, count: int, share: float) -> None:
    """Half of the twelve images of a batch are six; the branch's update too, and one of more images is the same."""
    batch, moves = next(iter(stream())), []
    for least in (0.0, 0.5):
        parts = {"minimise": Entropy(least=least), "branch": AdaptBranch(teach=CrossEntropy(least=least))}
        adapter = adapted(kind, "poem", select=FirstFew(count), rounds=1, **parts)
        before = {key: tensor.clone() for key, tensor in adapter.state_dict()["tensors"].items()}
        adapter(batch)
        after = adapter.state_dict()["tensors"]
        moves.append({key: after[key] - before[key] for key in before if key.startswith("moved/")})
    assert any("branch" in key for key in moves[0])
    for key, move in moves[0].items():
        assert move.abs().max() > 0, key
        torch.testing.assert_close(moves[1][key], share * move, rtol=1e-6, atol=1e-12)


# Monotone -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NETS)
@pytest.mark.parametrize("method", ["tent", "tent-filtered", "poem"])
def test_a_small_step_lowers_the_entropy_of_the_selected_samples(method: str, kind: str) -> None:
    for batch in stream():
        adapter = adapted(kind, method, lr=LR[kind] / 100, readout="last", explore=Repeat(1))
        adapter(batch)
        assert adapter.last.updates == 1
        who = adapter.last.selected
        assert adapter.last.last_entropy[who].mean() < adapter.last.first_entropy[who].mean()


@pytest.mark.parametrize("kind", NETS)
def test_the_gain_of_a_small_step_is_its_length_times_the_squared_gradient(kind: str) -> None:
    """First order: entropy falls by lr times the squared norm of its gradient, so half the step gains half as much."""
    (batch, *_) = stream()
    gains = []
    for lr in (1e-6, 5e-7):
        adapter = adapted(kind, "tent", lr=lr, readout="last")
        before = {key: value for key, value in adapter.state_dict()["tensors"].items() if key.startswith("moved/")}
        adapter(batch)
        after = adapter.state_dict()["tensors"]
        squared = sum(float((after[key] - value).square().sum()) for key, value in before.items()) / lr**2
        gain = float(adapter.last.first_entropy.mean() - adapter.last.last_entropy.mean())
        assert gain == pytest.approx(lr * squared, rel=1e-3)
        gains.append(gain)
    assert gains[0] == pytest.approx(2 * gains[1], rel=1e-3)


# Steps ----------------------------------------------------------------------------------------------------------------

OPTIMISERS: list[tuple[Step, Callable[[list[Tensor]], torch.optim.Optimizer]]] = [
    (SGD(0.0), lambda p: torch.optim.SGD(p, lr=0.1)),
    (SGD(), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    (SGD(0.5, nesterov=True), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.5, nesterov=True)),
    (SGD(nesterov=True), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)),
    (Adam(), lambda p: torch.optim.Adam(p, lr=0.1)),
    (Adam((0.5, 0.9), eps=1e-3), lambda p: torch.optim.Adam(p, lr=0.1, betas=(0.5, 0.9), eps=1e-3)),
    (SAM(0.05), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    (SAM(0.05, Adam()), lambda p: torch.optim.Adam(p, lr=0.1)),
]


@pytest.mark.parametrize(("step", "theirs"), OPTIMISERS, ids=[repr(step) for step, _ in OPTIMISERS])
@given(seed=st.integers(0, 1000), size=st.integers(1, 6))
@settings(max_examples=10, deadline=None)
def test_a_step_is_torchs_step_by_step(
    step: Step, theirs: Callable[[list[Tensor]], torch.optim.Optimizer], seed: int, size: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    theta = torch.randn(size, generator=rng, dtype=torch.float64)
    parameter = nn.Parameter(theta.clone())
    optimiser, memory = theirs([parameter]), step.init(theta)
    for _ in range(8):
        gradient = torch.randn(size, generator=rng, dtype=torch.float64)
        before = {key: value.clone() for key, value in memory.items()}
        change, new = step(gradient, 0.1, memory)
        assert all(torch.equal(memory[key], value) for key, value in before.items()), "the old memory was written into"
        theta, memory = theta + change, new
        parameter.grad = gradient.clone()
        optimiser.step()
        torch.testing.assert_close(theta, parameter.detach(), rtol=1e-10, atol=1e-12)


@given(st.lists(st.floats(-10, 10), min_size=1, max_size=8), st.floats(0.01, 1.0))
@settings(max_examples=50, deadline=None)
def test_a_perturbation_goes_its_radius_along_the_gradient(values: list[float], radius: float) -> None:
    gradient = torch.tensor(values, dtype=torch.float64)
    perturbation = SAM(radius).perturbation(gradient)
    norm = math.sqrt(sum(v * v for v in values))
    torch.testing.assert_close(perturbation, radius * gradient / (norm + 1e-12))
    if norm > 1e-3:
        assert float(perturbation.norm()) == pytest.approx(radius, rel=1e-6)


@pytest.mark.parametrize("kind", ["gn", "ln"])
@pytest.mark.parametrize(("step", "theirs"), OPTIMISERS[:6], ids=[repr(step) for step, _ in OPTIMISERS[:6]])
def test_tent_is_torchs_optimiser_on_the_mean_entropy(
    kind: str, step: Step, theirs: Callable[[list[Tensor]], torch.optim.Optimizer]
) -> None:
    model = net(kind)
    by_hand = copy.deepcopy(model).requires_grad_(False)
    norms = [m for m in by_hand.modules() if isinstance(m, nn.GroupNorm | nn.LayerNorm)]
    moving = [p.requires_grad_() for m in norms for p in m.parameters()]
    optimiser = theirs(moving)
    for group in optimiser.param_groups:
        group["lr"] = LR[kind]
    adapter = poem.adapt(model, "tent", lr=LR[kind], step=step)
    for batch in stream():
        logits = by_hand(batch)
        torch.testing.assert_close(adapter(batch), logits.detach(), rtol=1e-8, atol=1e-8)
        optimiser.zero_grad()
        torch.distributions.Categorical(logits=logits).entropy().mean().backward()
        optimiser.step()


# Statistics -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("statistics", [FromBatch(), Mixed(0.3), RunningMean(0.3)], ids=repr)
@given(bits=st.integers(1, 2**8 - 2))
@settings(max_examples=12, deadline=None)
def test_a_masked_pass_equals_the_pass_over_the_kept_samples(statistics: Statistics, bits: int) -> None:
    """Values and gradients, for any set of two or more; one value per channel has no variance."""
    mask = torch.tensor([bool(bits >> i & 1) for i in range(8)])
    if int(mask.sum()) < 2:
        mask[:2] = True
    model = net("bn")
    facts = anatomy(model)
    network = Network(model, theta=NormAffine()(model, facts), norms=facts.norms)
    x, found = images(8, seed=bits).double(), []
    memory = {k: v for norm in network.norms for k, v in statistics.start_layer(norm.key, norm).items()}
    for shown, keep in ((x, mask), (x[mask], None)):
        theta = network.theta.source().requires_grad_()
        with network.borrowed("cpu"):
            (logits,), run = network.heads(shown, theta, None, statistics, memory, keep)
        kept = logits if keep is None else logits[keep]
        (gradient,) = torch.autograd.grad(kept.square().sum(), theta)
        found.append((kept.detach(), gradient, run.record))
    (masked, masked_gradient, masked_record), (alone, gradient, record) = found
    torch.testing.assert_close(masked, alone, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(masked_gradient, gradient, rtol=1e-8, atol=1e-8)
    assert gradient.abs().max() > 0
    assert masked_record.keys() == record.keys()
    for key, value in record.items():
        torch.testing.assert_close(masked_record[key], value, rtol=1e-9, atol=1e-9)
    with network.borrowed("cpu"):
        (whole,), _ = network.heads(x, network.theta.source(), None, statistics, memory)
    if not bool(mask.all()):
        assert (whole[mask] - alone).abs().max() > 1e-6, "a mask that changes nothing shows nothing"


class Tail(nn.Module):
    """One batch-norm layer, then a mean and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.norm = nn.BatchNorm2d(3)
        self.fc = nn.Linear(3, 4)
        own = (self.norm.weight, self.norm.bias, self.norm.running_mean, self.norm.running_var, self.fc.weight)
        with torch.no_grad():
            for tensor in own:
                assert tensor is not None
                tensor.copy_(torch.rand(tensor.shape, generator=rng) + 0.5)
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.norm(x).square().mean((2, 3)))
        return logits

    def by_hand(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        shape = (1, 3, 1, 1)
        normal = (x - mean.view(shape)) / (var.view(shape) + self.norm.eps).sqrt()
        normal = normal * self.norm.weight.view(shape) + self.norm.bias.view(shape)
        logits: Tensor = self.fc(normal.square().mean((2, 3)))
        return logits.detach()


def moments_of(x: Tensor, *, unbiased: bool) -> tuple[Tensor, Tensor]:
    values = x.transpose(0, 1).flatten(1)
    mean = values.sum(1) / values.shape[1]
    squares = (values - mean[:, None]).square().sum(1)
    return mean, squares / (values.shape[1] - (1 if unbiased else 0))


def tail_batches() -> tuple[Tensor, ...]:
    return torch.split(3 * torch.rand(9, 3, 2, 2, generator=torch.Generator().manual_seed(4)).double(), 3)


def test_batch_statistics_have_a_biased_variance() -> None:
    model = Tail()
    adapter = poem.adapt(model, "bn")
    for batch in tail_batches():
        torch.testing.assert_close(adapter(batch), model.by_hand(batch, *moments_of(batch, unbiased=False)))


@pytest.mark.parametrize("alpha", [0.1, 1 / 17, 1.0])
def test_mixed_statistics_are_the_sources_with_a_share_of_the_batchs(alpha: float) -> None:
    model = Tail()
    source = model.norm.running_mean, model.norm.running_var
    assert source[0] is not None
    assert source[1] is not None
    adapter = poem.adapt(model, poem.Recipe(parameters=Nothing(), statistics=Mixed(alpha)))
    for batch in tail_batches():
        mean, var = moments_of(batch, unbiased=True)
        expected = model.by_hand(batch, (1 - alpha) * source[0] + alpha * mean, (1 - alpha) * source[1] + alpha * var)
        torch.testing.assert_close(adapter(batch), expected)


def test_running_statistics_move_by_a_share_of_every_batch() -> None:
    model = Tail()
    assert model.norm.running_mean is not None
    assert model.norm.running_var is not None
    mean, var = model.norm.running_mean.clone(), model.norm.running_var.clone()
    adapter = poem.adapt(model, poem.Recipe(parameters=Nothing(), statistics=RunningMean(0.2)))
    for batch in tail_batches():
        new_mean, new_var = moments_of(batch, unbiased=True)
        mean, var = 0.8 * mean + 0.2 * new_mean, 0.8 * var + 0.2 * new_var
        torch.testing.assert_close(adapter(batch), model.by_hand(batch, mean, var))
    assert not torch.allclose(mean, model.norm.running_mean), "the model's own statistics stay as they came"


def test_no_gradient_flows_through_mixed_statistics() -> None:
    """The first layer's output scaled by c is normalised by constants: a gradient sees the scale."""
    model = net("bn")
    facts = anatomy(model)
    network = Network(model, theta=["conv1.weight"], norms=facts.norms)
    x = images(6, seed=3).double()
    slopes = {}
    for statistics in (FromBatch(), Mixed(1.0)):
        theta = network.theta.source().requires_grad_()
        with network.borrowed("cpu"):
            (logits,), _ = network.heads(x, theta, None, statistics, {})
        (gradient,) = torch.autograd.grad(logits.sum(), theta)
        # Batch statistics undo any scale of the convolution before them, so the slope along the weights is zero.
        slopes[type(statistics)] = float((gradient * theta.detach()).sum().abs())
    assert slopes[FromBatch] < 1e-2
    assert slopes[Mixed] > 1e-1


@pytest.mark.parametrize("statistics", [Mixed(0.0), RunningMean(0.0)], ids=repr)
def test_a_share_of_nothing_is_the_source(statistics: Statistics) -> None:
    model = Tail()
    one = poem.adapt(model, poem.Recipe(parameters=Nothing(), statistics=statistics))
    other = poem.adapt(model, "source")
    for batch in tail_batches():
        torch.testing.assert_close(one(batch), other(batch))


# Readouts -------------------------------------------------------------------------------------------------------------


def look_of(logits: Tensor, features: Tensor | None = None, heads: int = 1) -> Outputs:
    def ask(images: Tensor, *, among: Tensor | None = None, grad: bool = False, **_: object) -> Tensor:
        raise AssertionError("a readout asks nothing")

    batch = Batch(torch.zeros(len(logits), 3, 4, 4), torch.Generator(), len(logits))
    return Outputs(logits, (logits,) * heads, batch, ask, features=features)


def test_the_prior_is_the_smoothed_mean_prediction() -> None:
    """Two samples, two classes: mean (0.7, 0.3); smoothing 0.5 / 0.7; prior (0.7 + s, 0.3 + s) / (1 + 2 s)."""
    logits = torch.tensor([[0.8, 0.2], [0.6, 0.4]], dtype=torch.float64).log()
    prior = torch.tensor([99 / 170, 71 / 170], dtype=torch.float64)
    torch.testing.assert_close(Prior()(look_of(logits), {}), logits * prior)
    torch.testing.assert_close(Prior("log")(look_of(logits), {}), logits + prior.log())


@given(seed=st.integers(0, 1000), rows=st.integers(1, 8), classes=st.integers(2, 8))
@settings(max_examples=30, deadline=None)
def test_the_prior_follows_its_formula(seed: int, rows: int, classes: int) -> None:
    logits = 3 * torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    mean = [sum(float(p[c]) for p in logits.softmax(1)) / rows for c in range(classes)]
    smooth = max(1 / rows, 1 / classes) / max(mean)
    prior = torch.tensor([(m + smooth) / (1 + smooth * classes) for m in mean], dtype=torch.float64)
    assert float(prior.sum()) == pytest.approx(1)
    torch.testing.assert_close(Prior()(look_of(logits), {}), logits * prior)
    centred = logits - logits.mean(1, keepdim=True)
    torch.testing.assert_close(Prior()(look_of(logits, heads=2), {}), centred * prior)


def affinity_by_hand(features: Tensor, kind: str, near: int) -> list[list[float]]:
    unit = [f / f.norm() for f in features]
    n = len(unit)
    near = min(near, n if kind == "rbf" else n - 1)  # a width counts the image itself first, a graph leaves it out
    apart = [[float((a - b).norm()) for b in unit] for a in unit]
    if kind == "linear":
        return [[float(a @ b) for b in unit] for a in unit]
    if kind == "rbf":
        width = sum(sorted(row)[near - 1] for row in apart) / n
        return [[math.exp(-(d**2) / (2 * width**2)) for d in row] for row in apart]
    links = [[0.0] * n for _ in unit]
    for i, row in enumerate(apart):
        for j in sorted((j for j in range(n) if j != i), key=lambda j: row[j])[:near]:
            links[i][j] = 1.0
    return [[(links[i][j] + links[j][i]) / 2 for j in range(n)] for i in range(n)]


@pytest.mark.parametrize("kind", ["rbf", "knn", "linear"])
@pytest.mark.parametrize("rows", [3, 4, 5, 6, 9])
def test_the_laplacian_is_the_fixed_point_of_a_loop_by_hand(rows: int, kind: Any) -> None:
    rng = torch.Generator().manual_seed(rows)
    logits = 2 * torch.randn(rows, 4, generator=rng, dtype=torch.float64)
    features = torch.randn(rows, 6, generator=rng, dtype=torch.float64)
    near = affinity_by_hand(features, kind, 5)
    unary = [[-math.log(float(p) + 1e-10) for p in row] for row in logits.softmax(1)]
    y = logits.softmax(1).tolist()
    energy = math.inf
    for step in range(100):
        pull = [[sum(near[i][j] * y[j][c] for j in range(rows)) for c in range(4)] for i in range(rows)]
        raw = [[math.exp(pull[i][c] - unary[i][c]) for c in range(4)] for i in range(rows)]
        y = [[value / sum(row) for value in row] for row in raw]
        cells = [(unary[i][c], pull[i][c], y[i][c]) for i in range(rows) for c in range(4)]
        before, energy = energy, sum(u * q - p * q + q * math.log(max(q, 1e-20)) for u, p, q in cells)
        if step > 1 and abs(energy - before) <= 1e-8 * abs(before):
            break
    found = Laplacian(affinity=kind)(look_of(logits, features), {})
    torch.testing.assert_close(found.exp(), torch.tensor(y, dtype=torch.float64), rtol=1e-8, atol=1e-10)
    assert (found.exp() - logits.softmax(1)).abs().max() > 1e-3


# On the unit circle, angles in degrees and the affinities by hand: exp(-d^2 / (2 width^2)). Chords of 60, 90, 120 and
# 180 degrees have d^2 = 1, 2, 3, 4. The width is the mean distance to the fifth nearest, the image itself counted
# first; of three to five images that is the farthest: (2 + 3 ** 0.5 + 2) / 3 = 1.910684, 2, (8 + 3 ** 0.5) / 5.
SMALL = {
    3: ((0, 60, 180), [[1, 0.872005, 0.578198], [0.872005, 1, 0.663067], [0.578198, 0.663067, 1]]),
    4: (
        (0, 90, 180, 270),
        [
            [1, 0.778801, 0.606531, 0.778801],
            [0.778801, 1, 0.778801, 0.606531],
            [0.606531, 0.778801, 1, 0.778801],
            [0.778801, 0.606531, 0.778801, 1],
        ],
    ),
    5: (
        (0, 60, 120, 180, 240),
        [
            [1, 0.876360, 0.673051, 0.589835, 0.673051],
            [0.876360, 1, 0.876360, 0.673051, 0.589835],
            [0.673051, 0.876360, 1, 0.876360, 0.673051],
            [0.589835, 0.673051, 0.876360, 1, 0.876360],
            [0.673051, 0.589835, 0.673051, 0.876360, 1],
        ],
    ),
}


@pytest.mark.parametrize("rows", SMALL)
def test_the_width_of_a_small_batch_counts_the_image_itself(rows: int) -> None:
    angles, affinity = SMALL[rows]
    turn = torch.tensor(angles, dtype=torch.float64).deg2rad()
    features = torch.stack([turn.cos(), turn.sin()], 1)
    sure = torch.zeros(rows, dtype=torch.float64)
    sure[0] = 3.0  # the first image is sure of class 0, the others do not know
    logits = torch.stack([sure, torch.zeros_like(sure)], 1)
    first = 1 / (1 + math.exp(-3))
    pull = [row[0] * first + sum(row[1:]) / 2 for row in affinity]  # K p, class 0; class 1 has the rest of the row
    lead = [float(sure[i]) + 2 * pull[i] - sum(affinity[i]) for i in range(rows)]
    expected = torch.tensor([1 / (1 + math.exp(-each)) for each in lead], dtype=torch.float64)
    found = Laplacian(steps=1)(look_of(logits, features), {}).exp()
    torch.testing.assert_close(found[:, 0], expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("rows", [3, 4, 5])
def test_the_nearest_of_a_small_batch_are_the_others(rows: int) -> None:
    """The graph of nearest neighbours leaves the image itself out: with five or fewer, all the others are near."""
    logits = torch.randn(rows, 3, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)
    others = 1 - torch.eye(rows, dtype=torch.float64)
    expected = (others @ logits.softmax(1) + (logits.softmax(1) + 1e-10).log()).log_softmax(1)
    found = Laplacian(affinity="knn", steps=1)(look_of(logits, logits), {})
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("rows", [1, 2])
def test_one_or_two_images_have_no_neighbourhood(rows: int) -> None:
    logits = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(Laplacian()(look_of(logits, logits), {}), logits.log_softmax(1))


def test_lame_reads_the_input_of_the_head() -> None:
    model = net("gn")
    seen: list[Tensor] = []
    (batch, *_) = stream()
    answer = poem.adapt(model, "lame")(batch)
    handle = model.get_submodule("fc").register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    logits = model(batch).detach()
    handle.remove()
    torch.testing.assert_close(answer, Laplacian()(look_of(logits, seen[0]), {}))


# Composition ----------------------------------------------------------------------------------------------------------


def test_suffixes_are_replacements_in_the_recipe() -> None:
    both = poem.recipe("sar+poem")
    assert both.explore == Explore(2)
    assert both.branch == AdaptBranch()
    assert both.readout == Readout("last")
    assert both.select == poem.recipe("sar").select
    assert poem.recipe("sar").changed({"explore": Explore(2), "branch": AdaptBranch(), "readout": "last"}) == both
    select: Select = poem.recipe("tent+poem").select
    assert select == poem.recipe("tent-filtered").select == EntropyBelow(0.4)
    assert poem.recipe("roid+poem").readout == Readout("last", Prior())
