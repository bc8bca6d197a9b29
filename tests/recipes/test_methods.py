"""Mistakes that are easy to make in each method, and are found in published code, one test each."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field

import pytest
import torch
from by_hand import (
    E0,
    LR,
    Bright,
    ByHand,
    adapted,
    assert_same,
    differs,
    eight_views,
    entropy,
    moved,
    net,
    noisy,
    scaled,
    stream,
    tensors,
)
from torch import Tensor
from torch.nn.functional import cross_entropy
from toys import images

import poem
from poem.parts import (
    SAM,
    SGD,
    Adam,
    ByEntropy,
    ByPLPD,
    Entropy,
    EntropyBelow,
    EveryCalls,
    FisherAnchor,
    FollowTeacher,
    LossAverageBelow,
    MeanTeacher,
    NotRedundant,
    Occlusion,
    Outputs,
    PLPDAbove,
    Selected,
    SoftLikelihoodRatio,
    StochasticRestore,
)
from poem.parts.base import Outcome, Update

# EATA -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class NotingAnchor(FisherAnchor):
    """The anchor, which notes all that it is called with."""

    seen: list[Selected] = field(default_factory=list, compare=False)

    def __call__(self, selected: Selected) -> Tensor:
        self.seen.append(selected)
        return super().__call__(selected)

    def __repr__(self) -> str:
        return "NotingAnchor()"


def test_the_anchor_without_selected_samples_moves_nothing() -> None:
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
    anchor = NotingAnchor()
    adapter = adapted("gn", "tent", minimise=Entropy() + anchor, source_data=source)
    adapter(stream()[0])
    hand = ByHand(net("gn"))
    total = {name: torch.zeros_like(p) for name, p in hand.named.items()}
    for batch in source:
        logits = hand(batch)
        for name, gradient in hand.gradient(cross_entropy(logits, logits.argmax(1))).items():
            total[name] += gradient.square()
    expected = torch.cat([(total[name] / 3).flatten() for name in adapter.adapted])
    torch.testing.assert_close(anchor.seen[0].memory["importance"], expected, rtol=1e-9, atol=1e-15)
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


def test_sar_perturbs_by_one_norm_filters_again_and_steps_from_the_unperturbed_weights() -> None:
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


def test_the_second_filter_of_sar_selects_among_the_first() -> None:
    select = Bright()
    batch = stream()[0] - 0.45
    adapter = adapted("gn", "sar", select=select)
    adapter(batch)
    (_, everyone), (_, again) = select.seen
    assert bool(everyone.all())
    assert torch.equal(again, adapter.last.selected)
    assert 0 < int(again.sum()) < len(batch)


@pytest.mark.parametrize("step", [SAM(0.05), SAM(0.05, Adam())], ids=repr)
def test_the_reset_of_sar_clears_the_inner_optimiser_and_the_loss_average(step: SAM) -> None:
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
    logits = torch.zeros(1, 2, dtype=torch.float64)
    outputs, mask = Outputs(logits, (logits,)), torch.ones(1, dtype=torch.bool)
    memory = recover.start(outputs)
    for loss, applied, average, resets in (
        (9.0, False, None, False),
        (1.0, True, 1.0, False),
        (0.1, True, 0.91, False),
        (0.0, False, 0.91, False),
        (-6.21, True, 0.198, True),
    ):
        update = Update(outputs, mask, torch.tensor(loss, dtype=torch.float64), {}, torch.tensor(applied))
        memory = {**memory, **recover.remember(Outcome(outputs, outputs, [update], [mask]), memory)}
        assert bool(memory["seen"]) == (average is not None)
        if average is not None:
            assert float(memory["mean"]) == pytest.approx(average)
        assert bool(recover.resets(memory)) == resets


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
    assert bool(between.any()), "no sample lies between the margins"
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


def test_the_teacher_of_cotta_averages_parameters_and_no_buffers() -> None:
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


def test_the_teacher_of_cotta_follows_on_a_batch_without_a_selected_sample() -> None:
    first, second, _ = stream()
    teacher = MeanTeacher(momentum=0.9, unsure=0.0)
    adapter = adapted("gn", "cotta", select=Bright(), teacher=teacher, recover=StochasticRestore(0.0))
    adapter(first)
    before, student = tensors(adapter)["teacher/theta"], torch.cat([each.flatten() for each in moved(adapter).values()])
    adapter(torch.zeros_like(second))
    assert adapter.last.skipped == "nothing selected"
    torch.testing.assert_close(tensors(adapter)["teacher/theta"], 0.9 * before + 0.1 * student)
    assert not torch.equal(before, student)


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


# RDumb ----------------------------------------------------------------------------------------------------------------


def test_rdumb_counts_calls_with_and_without_updates() -> None:
    adapter = adapted("gn", "rdumb", select=Bright(), recover=EveryCalls(3))
    resets = []
    for index, batch in enumerate(stream(72)):
        before = moved(adapter)
        adapter(batch - 2 if index in (1, 2) else batch)  # two calls make no update and count all the same
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
