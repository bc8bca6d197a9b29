"""Numbers worked out by hand from the equations of the newer methods, and mistakes that published code makes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from by_hand import adapted, net, stream, tensors
from torch import Tensor

import poem
from poem.parts import (
    Batch,
    LowFrequencies,
    MatchEntropy,
    MomentumFilter,
    NearSource,
    Outputs,
    PatchNoise,
    RankedEntropy,
    RegionalEntropy,
    RegionConfidence,
    RobustCrossEntropy,
    Score,
    Selected,
    SelfBootstrap,
    WaryTeacher,
)


def selected(logits: Tensor, **more: Any) -> Selected:
    """Every row of some logits selected, each with weight 1."""
    count = len(logits)
    everyone, ones = torch.ones(count, dtype=torch.bool), torch.ones(count, dtype=logits.dtype)
    return Selected(Outputs(logits, (logits,)), everyone, ones, torch.zeros(0), torch.zeros(0), **more)


# RPL -----------------------------------------------------------------------------------------------------------------


def test_the_robust_cross_entropy_lies_between_the_cross_entropy_and_the_absolute_error() -> None:
    logits = torch.tensor([[2.0, 0.0, -1.0], [0.3, 0.2, 0.1]], dtype=torch.float64)
    top = logits.softmax(1).amax(1)
    assert RobustCrossEntropy(0.8)(selected(logits)).item() == pytest.approx(((1 - top**0.8) / 0.8).mean().item())
    assert RobustCrossEntropy(1.0)(selected(logits)).item() == pytest.approx((1 - top).mean().item())
    assert RobustCrossEntropy(1e-6)(selected(logits)).item() == pytest.approx(-top.log().mean().item(), rel=1e-5)


def test_rpl_answers_from_before_its_update_and_learns_from_everyone() -> None:
    first, second, _ = stream()
    adapter = adapted("gn", "rpl")
    torch.testing.assert_close(adapter(first), net("gn")(first).detach())
    assert bool(adapter.last.selected.all())
    assert not torch.allclose(adapter(second), net("gn")(second).detach())
    assert poem.recipe("rpl").lr == 0.0005


# CMF -----------------------------------------------------------------------------------------------------------------


def filtered(steps: int, theta: Tensor, source: Tensor) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """What the filter makes of tensors that stay where they are, step by step."""
    part, rng, found = MomentumFilter(), torch.Generator(), []
    memory = part.init(source)
    for _ in range(steps):
        pulled, memory = part.pulled(theta, source, memory, rng)
        found.append((pulled, memory))
    return found


def test_the_filter_of_a_vit_s_norm_layers_trusts_its_hidden_weights_less_and_less() -> None:
    """q = 0.005: beta .995, .990172, .985554, .981178, .977065, and .939991 in the end; s .004975, .009779, ..."""
    source, theta = torch.zeros(38400, dtype=torch.float64), torch.ones(38400, dtype=torch.float64)
    variance, hidden = 0.0, 0.0
    for step, (_, memory) in enumerate(filtered(200, theta, source)):
        before, hidden = 0.99 * hidden, memory["hidden"][0].item()
        beta = (1 - hidden) / (1 - before)
        variance = memory["variance"].item()
        if step < 5:
            assert beta == pytest.approx([0.995, 0.990172, 0.985554, 0.981178, 0.977065][step], abs=1e-6)
        if step < 3:
            assert variance == pytest.approx([0.004975, 0.009779, 0.014374][step], abs=1e-6)
    assert beta == pytest.approx(0.939991, abs=1e-5)
    assert variance == pytest.approx(0.059709, abs=1e-5)


def test_the_filter_leaves_the_source_where_it_is_and_bounds_its_trust() -> None:
    source = torch.rand(100, dtype=torch.float64)
    assert all(torch.equal(pulled, source) for pulled, _ in filtered(5, source, source))
    ((pulled, memory),) = filtered(1, source + 1, source)  # q = 1.3e-5: beta is 1 from 0.9999 on
    assert torch.equal(memory["hidden"], source)
    torch.testing.assert_close(pulled, source + 0.99)
    many = torch.zeros(10_000_000)
    ((_, memory),) = filtered(1, many + 1, many)  # q is above 1, and r below 0
    assert memory["hidden"][0].item() == pytest.approx(0.11)


def test_a_reset_forgets_the_filter() -> None:
    first, second, _ = stream()
    adapter = adapted("gn", "cmf", lr=0.002)
    source = {k: v for k, v in tensors(adapter).items() if "recover" in k}
    assert set(source) == {"memory/recover.theta.hidden", "memory/recover.theta.variance"}
    adapter(first)
    adapter(second)
    assert tensors(adapter)["memory/recover.theta.variance"].item() > 0
    adapter.reset()
    assert all(torch.equal(tensors(adapter)[key], value) for key, value in source.items())
    assert math.isclose(tensors(adapter)["memory/recover.theta.variance"].item(), 0.0)


# ReCAP ---------------------------------------------------------------------------------------------------------------

WEIGHT = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, -1.0]], dtype=torch.float64)


def head(features: Tensor) -> Tensor:
    return features.to(WEIGHT) @ WEIGHT.T


def region(score: RegionalEntropy, variance: tuple[float, float]) -> dict[str, Tensor]:
    """What the score measures on four features with these variances, before a last layer of three classes."""
    corners = torch.tensor([[1.0, 1.0], [-1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    features = corners * torch.tensor(variance, dtype=torch.float64).sqrt()
    return score.prepare([Outputs(head(features), (head(features),), features=features, classify=head)])


@pytest.mark.parametrize(("tilt", "entropy"), [(None, 1.009726), (5e-4, 0.973287)])
def test_regional_entropy_and_instability_are_the_numbers_worked_out(tilt: float | None, entropy: float) -> None:
    score, logits = RegionalEntropy(1.0, tilt), head(torch.tensor([[1.0, 0.2]], dtype=torch.float64))
    memory = region(score, (0.1, 0.3))
    found, instability = score.both(Outputs(logits, (logits,)), memory)
    assert found.item() == pytest.approx(entropy, abs=1e-6)
    assert instability.item() == pytest.approx(0.141788, abs=1e-6)
    nu = logits.softmax(1) @ memory["moments"]
    torch.testing.assert_close(nu[0], torch.tensor([1.093528, 1.206936, 1.532292]).double(), atol=1e-6, rtol=0)
    loss = RegionConfidence(0.5, score)(selected(logits, memory={f"score.{k}": v for k, v in memory.items()}))
    assert loss.item() == pytest.approx(entropy + 0.5 * 0.141788, abs=1e-6)


def test_instability_bounds_how_far_predictions_in_the_region_are_from_the_sample_s() -> None:
    score, feature = RegionalEntropy(1.0), torch.tensor([[1.0, 0.2]], dtype=torch.float64)
    memory, rng = region(score, (0.1, 0.3)), torch.Generator().manual_seed(0)
    spread = torch.tensor([0.1, 0.3], dtype=torch.float64).sqrt()
    there = head(feature + spread * torch.randn(100_000, 2, generator=rng, dtype=torch.float64)).log_softmax(1)
    here = head(feature).log_softmax(1)
    divergence = (here.exp() * (here - there)).sum(1).mean().item()
    assert divergence == pytest.approx(0.0671, abs=2e-3)
    assert divergence < score.both(Outputs(head(feature), (head(feature),)), memory)[1].item()


def test_a_region_without_extent_has_the_plain_entropy_and_no_instability() -> None:
    logits = torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    outputs = Outputs(logits, (logits,))
    entropy, instability = RegionalEntropy(0.0, 0.0).both(outputs, region(RegionalEntropy(0.0, 0.0), (0.1, 0.3)))
    torch.testing.assert_close(entropy, outputs.entropy)
    torch.testing.assert_close(instability, torch.zeros(5, dtype=torch.float64))


def test_a_region_that_is_too_wide_overflows_nowhere() -> None:
    score = RegionalEntropy(1e6)
    memory = {name: tensor.float() for name, tensor in region(score, (0.1, 0.3)).items()}
    logits = torch.tensor([[300.0, 0.0, -300.0]], requires_grad=True)
    entropy, instability = score.both(Outputs(logits, (logits,)), memory)
    (gradient,) = torch.autograd.grad(entropy.sum() + instability.sum(), logits)
    assert all(bool(each.isfinite().all()) for each in (entropy, instability, gradient))


def test_recap_reads_its_source_images_once_and_needs_them() -> None:
    source = stream()[2]
    from_iterator = adapted("gn", "recap", source_data=iter([source[:6], source[6:]]))
    assert from_iterator.preparation["forwards"] == len(source)
    with pytest.raises(ValueError, match=r"RegionalEntropy\(1.2\) of recap needs source images; pass source_data="):
        adapted("gn", "recap")
    with pytest.raises(ValueError, match=r"needs source images; pass source_data="):
        poem.Adapter(net("gn"), poem.recipe("recap"))(source)


# Protected entropy matching -------------------------------------------------------------------------------------------


def bettor(part: MatchEntropy, entropies: list[float]) -> dict[str, Tensor]:
    """The bettor's memory before the first sample, with these source entropies."""
    values, counts = torch.tensor(entropies, dtype=torch.float64).unique(return_counts=True)
    logits = torch.zeros(1, 2, dtype=torch.float64)
    return {
        "values": values,
        "shares": (counts.cumsum(0) / counts.sum()).double(),
        **part.start(Outputs(logits, (logits,))),
    }


@dataclass(frozen=True, repr=False)
class FirstLogit(Score):
    """A score that a test sets: the first logit."""

    def __call__(self, outputs: Outputs, memory: dict[str, Tensor]) -> Tensor:
        return outputs.logits[:, 0]


def bets(part: MatchEntropy, scores: list[float], memory: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    logits = torch.tensor([[score, 0.0] for score in scores], dtype=torch.float64)
    target, new = part._bets(Outputs(logits, (logits,)), memory)
    return target, {**memory, **new}


def test_bets_targets_and_wealth_are_the_numbers_worked_out() -> None:
    """u is the score itself, where source entropies are evenly spread from 0 to 1."""
    part = MatchEntropy(score=FirstLogit())
    even = {"values": torch.tensor([0.0, 1.0]).double(), "shares": torch.tensor([0.0, 1.0]).double()}
    memory = {**bettor(part, [0.0]), **even}
    rows = [
        (0.9, 0.0, 0.9, 1.0),
        (0.8, 0.0, 0.8, 1.0),
        (0.7, 0.072169, 0.692422, 1.014434),
        (0.2, 0.111804, 0.191056, 0.980408),
        (0.95, 0.064600, 0.948466, 1.008909),
    ]
    at_once, _ = bets(part, [row[0] for row in rows], memory)
    for index, (u, bet, protected, wealth) in enumerate(rows):
        assert memory["bet"].item() == pytest.approx(bet, abs=1e-6)
        target, memory = bets(part, [u], memory)
        assert target.item() == pytest.approx(protected, abs=1e-6)
        assert at_once[index].item() == pytest.approx(protected, abs=1e-6), "samples of a batch come one by one"
        assert memory["log_wealth"].exp().item() == pytest.approx(wealth, abs=1e-6)
    assert memory["bet"].item() == pytest.approx(0.113503, abs=1e-6)


def test_a_shift_makes_the_bettor_rich_and_its_bets_stay_below_two() -> None:
    part = MatchEntropy(score=FirstLogit())
    memory = {**bettor(part, [0.0]), "values": torch.tensor([0.0, 1.0]).double()}
    memory["shares"] = memory["values"]
    wealth, largest = [], 0.0
    for _ in range(3000):
        _, memory = bets(part, [1.0], memory)
        wealth.append(memory["log_wealth"].item())
        largest = max(largest, abs(memory["bet"].item()))
    first = next(index for index, each in enumerate(wealth) if each >= math.log(20)) + 1
    assert first == 22
    assert math.exp(wealth[21]) == pytest.approx(22.5326, abs=1e-3)
    assert largest == pytest.approx(1.801592, abs=1e-5)


def test_source_entropies_are_interpolated_and_what_lies_outside_is_clamped() -> None:
    part = MatchEntropy(score=FirstLogit())
    logits = torch.tensor([[0.5, 0.0], [1.0, 0.0], [2.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    held = part.prepare([Outputs(logits[:3], (logits[:3],)), Outputs(logits[3:], (logits[3:],))])
    assert held["values"].tolist() == [0.5, 1.0, 2.0]
    assert held["shares"].tolist() == [0.25, 0.75, 1.0]
    memory = {**bettor(part, [0.5, 1.0, 1.0, 2.0]), "bet": torch.tensor(1.0).double()}
    target, _ = bets(part, [0.0], memory)  # u = .25 is .15625 under the bet, and the source has nothing below .25
    assert target.item() == 0.5
    plain, _ = bets(part, [0.0, 0.75, 3.0], bettor(part, [0.5, 1.0, 1.0, 2.0]))
    assert plain[0].item() == 0.5
    assert bets(part, [0.75], bettor(part, [0.5, 1.0, 1.0, 2.0]))[0].item() == pytest.approx(0.75)
    assert bets(part, [3.0], bettor(part, [0.5, 1.0, 1.0, 2.0]))[0].item() == 2.0


def test_a_sample_that_is_not_finite_moves_no_bet() -> None:
    part = MatchEntropy(score=FirstLogit())
    memory = bettor(part, [0.2, 0.4, 0.6, 0.8])
    target, there = bets(part, [0.7, math.nan, 0.6], memory)
    _, without = bets(part, [0.7, 0.6], memory)
    assert all(torch.equal(there[name], without[name]) for name in without)
    assert target[[0, 2]].isfinite().all()


def test_weights_multiply_entropy_and_target_and_so_enter_squared() -> None:
    """H = (1, 2), targets (.8, 1.5), w = exp(E0 - H): .627489, gradient (3.399468, 1.150170); plain .0725."""
    h = torch.tensor([[1.0, 0.0], [2.0, 0.0]], dtype=torch.float64, requires_grad=True)
    part, target = MatchEntropy(score=FirstLogit()), torch.tensor([0.8, 1.5], dtype=torch.float64)
    for weigh, loss, gradient in ((True, 0.627489, [3.399468, 1.150170]), (False, 0.0725, [0.1, 0.25])):
        given = selected(h)
        given.outputs.batch.once((part, "target"), lambda _: target)
        if weigh:
            given.weights = (0.4 * math.log(1000) - h[:, 0].detach()).exp()
        found = part(given)
        assert found.item() == pytest.approx(loss, abs=1e-6)
        assert torch.autograd.grad(found, h)[0][:, 0].tolist() == pytest.approx(gradient, abs=1e-6)


def test_protected_waits_for_a_hundred_images_and_forgets_its_bets_at_a_reset() -> None:
    source, batches = stream()[2], stream(120, 12)
    adapter = adapted("gn", "protected", source_data=[source])
    for index, batch in enumerate(batches):
        adapter(batch)
        assert (adapter.totals.updates > 0) == (index >= 8), "108 images have come with the ninth batch"
    assert tensors(adapter)["memory/minimise.bet"].item() != 0
    adapter.reset()
    first = adapter(batches[0])
    assert not adapter.last.updates
    fresh = adapted("gn", "protected", source_data=[source])
    assert torch.equal(first, fresh(batches[0]))
    assert all(torch.equal(value, tensors(fresh)[key]) for key, value in tensors(adapter).items())
    with pytest.raises(ValueError, match=r"of protected needs source images; pass source_data="):
        adapted("gn", "protected")


# SPA -----------------------------------------------------------------------------------------------------------------


def with_images(images: Tensor, family: str = "convolutional", seed: int = 0) -> Outputs:
    """Outputs of a batch of images, for parts that make views of them."""
    logits = torch.zeros(len(images), 3, dtype=images.dtype)
    batch = Batch(images, torch.Generator().manual_seed(seed), len(images))
    return Outputs(logits, (logits,), batch, images=images, family=family)


@pytest.mark.parametrize("side", [15, 16, 224])
def test_frequencies_that_are_all_kept_leave_the_image_and_a_mask_is_symmetric(side: int) -> None:
    x = torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(LowFrequencies(0.0)(with_images(x)), x, rtol=0, atol=1e-13)
    mask = LowFrequencies()._mask(x.shape, 0.5, torch.Generator().manual_seed(0)).double()
    spectrum = torch.fft.fft2(x) * torch.fft.ifftshift(mask, dim=(2, 3))
    assert torch.fft.ifft2(spectrum).imag.abs().max().item() < 1e-13
    rows = (mask == 0).any(3).any(1).any(0).nonzero()[:, 0]
    wide = int(0.2 * side)
    assert rows[0].item() >= side // 2 - wide // 2
    assert rows[-1].item() <= side // 2 + wide // 2
    assert bool((mask[:, :, side // 2, side // 2] == 0).any()), "the constant frequency may be dropped too"


def test_at_224_pixels_rows_90_to_134_may_lose_frequencies() -> None:
    mask = LowFrequencies()._mask(torch.Size([1, 1, 224, 224]), 1.0, torch.Generator())
    gone = (mask[0, 0] == 0).nonzero()
    assert (gone.min().item(), gone.max().item()) == (90, 134)


def test_amounts_of_noise_are_scaled_and_then_cut() -> None:
    noise = PatchNoise(transformer=0.4)
    amount = torch.tensor([0.9, 0.3, 0.6, 0.1], dtype=torch.float64)
    found = noise.constrain("amount", amount, "transformer")
    assert found.tolist() == pytest.approx([1.0, 0.336728, 0.673456, 0.112243], abs=1e-6)
    assert found.square().mean().item() == pytest.approx(0.394882, abs=1e-6)
    assert torch.equal(noise.constrain("amount", torch.zeros(4), "transformer"), torch.zeros(4))


def test_noise_climbs_the_loss_and_is_cut_as_the_network_sees_it() -> None:
    x = torch.rand(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    outputs = with_images(x)
    outputs.scale = torch.full((1, 3, 1, 1), 0.5), torch.full((1, 3, 1, 1), 0.5)
    amount = torch.full((2, 2), 0.9, requires_grad=True)
    view = PatchNoise(4)(outputs, amount)
    assert (view.min().item(), view.max().item()) == (0.0, 1.0), "[-1, 1] for a network that normalises by 0.5 and 0.5"
    plain = torch.full((2, 2), 0.9, requires_grad=True)
    v = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0)).repeat(1, 2, 2)
    share = plain.square().repeat_interleave(4, 0).repeat_interleave(4, 1)
    by_hand = (((1 - share) * (2 * x - 1) + share * v).clamp(-1, 1) + 1) / 2
    torch.testing.assert_close(view, by_hand)
    (up,), (down,) = torch.autograd.grad(view.sum(), amount), torch.autograd.grad(by_hand.sum(), plain)
    torch.testing.assert_close(up, -down)
    with pytest.raises(ValueError, match="needs images whose sides are multiples of 16"):
        PatchNoise().trainable(outputs)


@dataclass(frozen=True, repr=False)
class Untouched(LowFrequencies):
    """Leaves every frequency, to the bit."""

    def __call__(self, outputs: Outputs) -> Tensor:
        return outputs.batch.images


def test_views_that_are_as_sure_as_the_image_teach_nothing() -> None:
    """With the predictor at the identity and undamaged views nobody's confidence falls, and the momentum rests too."""
    whole = SelfBootstrap(frequencies=Untouched(), noise=PatchNoise(4, convolutional=0.0))
    adapter = adapted("gn", "spa", minimise=SelfBootstrap(noise=PatchNoise(4)))
    first, second, _ = stream()
    adapter(first)
    assert adapter.totals.updates == 1
    still = adapted("gn", "spa", minimise=whole)
    before = tensors(still)
    still(second)
    assert still.totals.updates == still.last.taught == 0
    assert still.last.skipped == "nothing passed the second filter"
    assert all(torch.equal(tensors(still)[key], value) for key, value in before.items() if key.startswith("moved/"))


def test_spa_s_rates_are_by_family_and_not_by_batch_size() -> None:
    rates = [poem.adapt(net(kind), "spa", batch_size=size).lr for kind in ("gn", "ln") for size in (64, 1)]
    assert rates == [0.0025, 0.0025, 0.01, 0.01]
    noise = poem.recipe("spa").minimise.noise  # type: ignore[attr-defined]
    assert [rate * noise.lr_factor(family) for rate, family in ((0.0025, "convolutional"), (0.01, "transformer"))] == [
        1.0,
        1.0,
    ]
    with pytest.raises(ValueError, match=r"spa has nothing for '\+poem' to build on"):
        poem.recipe("spa+poem")


# REM -----------------------------------------------------------------------------------------------------------------


def levels(*first: float) -> Selected:
    """A sample whose level i has logits (first[i], 0, 0), whatever patches are kept."""
    made = [torch.tensor([[each, 0.0, 0.0]], dtype=torch.float64, requires_grad=True) for each in first]
    shown = iter(made[1:])
    given = selected(made[0])
    given.outputs.images, given.outputs.attention = torch.zeros(1, 3, 4, 4), torch.arange(16.0)[None]
    given.outputs.forward = lambda images, **_: next(shown)
    return given


def test_consistency_and_ranking_are_the_numbers_worked_out() -> None:
    assert RankedEntropy()(levels(2.0, 1.0, 0.5)).item() == pytest.approx(2.671661, abs=1e-6)
    up = RankedEntropy(ranking=0.0)(levels(0.5, 1.0, 2.0)).item()
    assert RankedEntropy()(levels(0.5, 1.0, 2.0)).item() - up == pytest.approx(0.805745, abs=1e-6)
    entropies = [0.665573, 0.975328, 1.068445]
    gaps = [entropies[i] - entropies[j] + 0.5 * math.log(3) for i in range(3) for j in range(i + 1, 3)]
    wide = RankedEntropy(margin=0.5)(levels(2.0, 1.0, 0.5)).item()
    assert wide == pytest.approx(2.671661 + sum(max(0.0, gap) for gap in gaps), abs=1e-5)


def test_levels_drop_the_most_attended_patches_and_no_gradient_flows_to_targets() -> None:
    seen: list[Tensor] = []
    given = levels(2.0, 1.0, 0.5)
    inner = given.outputs.forward

    def noting(images: Tensor, **named: Any) -> Tensor:
        seen.append(named["keep"])
        return inner(images, **named)

    given.outputs.forward = noting
    given.outputs.attention = torch.tensor([[0.3, 0.1, 0.9, *[0.2] * 10, 0.8, 0.7, 0.6]])
    (gradient,) = torch.autograd.grad(RankedEntropy()(given), given.outputs.logits, materialize_grads=True)
    assert [each.shape[1] for each in seen] == [14, 12]
    assert 2 not in seen[0].tolist()[0]
    assert {2, 13, 14} & set(seen[1].tolist()[0]) == set()
    assert torch.equal(gradient, torch.zeros_like(gradient)), "the whole image is a target, and ranked already"


@pytest.mark.parametrize("fused", [True, False])
def test_attention_is_the_last_block_s_however_it_is_computed(fused: bool) -> None:
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=32, depth=3).eval()
    torch.nn.init.normal_(vit.head.weight, std=0.1)
    for block in vit.blocks:
        block.attn.fused_attn = fused
    x, last, inside = torch.rand(2, 3, 32, 32), vit.blocks[-1].attn, list[Tensor]()
    hook = last.register_forward_pre_hook(lambda _, args: inside.append(args[0]))
    vit(x)
    hook.remove()
    q, k, _ = last.qkv(inside[0]).unflatten(2, (3, 3, 64)).permute(2, 0, 3, 1, 4)
    matrix = (q @ k.transpose(2, 3) / 8).softmax(-1)
    seen: list[Tensor | None] = []

    @dataclass(frozen=True, repr=False)
    class Noting(RankedEntropy):
        def __call__(self, given: Selected) -> Tensor:
            seen.append(given.outputs.attention)
            return super().__call__(given)

    adapter = poem.adapt(vit, "rem", minimise=Noting(0.3, 2))
    adapter(x)
    assert adapter.totals.updates == 1
    assert seen[0] is not None
    torch.testing.assert_close(seen[0], matrix.mean(1)[:, 0, 1:].detach(), rtol=1e-5, atol=1e-6)


def test_rem_takes_torchvision_s_transformer_and_refuses_one_without_a_class_token() -> None:
    vision, timm = pytest.importorskip("torchvision"), pytest.importorskip("timm")
    vit = vision.models.VisionTransformer(32, 8, 4, 2, 16, 32, num_classes=10).eval()
    torch.nn.init.normal_(vit.heads[0].weight)
    adapter = poem.adapt(vit, "rem")
    adapter(torch.rand(4, 3, 32, 32))
    assert adapter.totals.updates == 1
    pooled = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=3, class_token=False, global_pool="avg")
    with pytest.raises(ValueError, match="one class token before 4 patches, got 4 tokens"):
        poem.adapt(pooled.eval(), "rem")(torch.rand(2, 3, 32, 32))
    for kind in ("bn", "gn"):
        with pytest.raises(ValueError, match=r"needs a vision transformer.*ConvNet is none"):
            poem.adapt(net(kind), "rem")
    with pytest.raises(ValueError, match="a highest level that keeps some patches"):
        RankedEntropy(0.5, levels=3)


# PeTTA ---------------------------------------------------------------------------------------------------------------


def watching(features: Tensor, labels: list[int], classes: int = 2) -> Outputs:
    """Outputs with these features, predicted as of these classes."""
    logits = torch.nn.functional.one_hot(torch.tensor(labels), classes).to(features)
    return Outputs(logits, (logits,), features=features)


def test_drift_divergence_and_both_rates_are_the_numbers_worked_out() -> None:
    """Running mean (1, 1), source mean (0, 1) and variance (.5, 2): d = 1, g = .632120, 3.6788e-4, 6.32120."""
    part, one = WaryTeacher(), torch.ones(1, 2, dtype=torch.float64)
    memory = {
        "mean": torch.tensor([[0.0, 1.0]]).double(), "variance": torch.tensor([[0.5, 2.0]]).double(),
        "known": torch.tensor([True]), "drift": torch.tensor([[1.0, 0.0]]).double(),
    }  # fmt: skip
    told, new = part.watch(watching(one * 3, [0], 1), memory)
    assert told["divergence"].item() == pytest.approx(0.632120, abs=2e-6)
    followed = part.follow_told(torch.zeros(1).double(), torch.ones(1).double(), told)
    assert followed.item() == pytest.approx(3.6788e-4, abs=1e-8)
    assert new["drift"].tolist()[0] == pytest.approx([0.95 + 0.05 * 3, 0.05 * 2]), "read before it is moved"
    theta, start = torch.tensor([1.0, 0.0, 3.0]).double(), torch.tensor([1.0, 0.0, 1.0]).double()
    given = replace(selected(one), theta=theta, source=start, told=told, sizes=(2, 1))
    assert NearSource()(given).item() == pytest.approx(-6.32120, abs=1e-5)
    crossed = replace(given, source=torch.tensor([0.0, 1.0, 1.0]).double())
    assert NearSource()(crossed).item() == pytest.approx(-6.32120 / 2, abs=1e-5), "a mean over tensors"


def test_only_classes_that_are_there_and_have_source_images_are_watched() -> None:
    part, features = WaryTeacher(), torch.tensor([[0.0, 2.0], [2.0, 0.0], [5.0, 5.0]], dtype=torch.float64)
    held = part.prepare([watching(features[:2], [0, 0], 3), watching(features[2:], [1], 3)])
    assert held["known"].tolist() == [True, False, False]
    assert held["mean"].tolist()[:2] == [[1.0, 1.0], [5.0, 5.0]]
    assert held["variance"].tolist()[0] == [2.0, 2.0]
    memory = {**held, **part.start(watching(features, [0, 0, 1], 3))}
    told, first = part.watch(watching(features, [0, 0, 1], 3), memory)
    assert told["divergence"].item() == 0, "nothing has drifted before the first batch"
    memory["drift"] = torch.full((3, 2), 2.0, dtype=torch.float64)
    assert part.watch(watching(features[2:], [1], 3), memory)[0]["divergence"].item() == 0, "one image has no variance"
    assert part.watch(watching(features, [0, 1, 2], 3), memory)[0]["divergence"].item() == pytest.approx(
        1 - math.exp(-4 / (2 + 1e-6))
    )
    assert torch.equal(first["drift"][2], torch.zeros(2).double())


def test_petta_drifts_answers_with_its_teacher_and_forgets_all_at_a_reset() -> None:
    first, second, third = stream()
    adapter = adapted("bn", "petta", source_data=[third], lr=0.001)
    start = tensors(adapter)
    answers = [adapter(batch) for batch in (first, second)]
    torch.testing.assert_close(answers[0], net("bn")(first).detach(), msg="the source answers the first batch")
    assert adapter.totals.updates == 2
    held = tensors(adapter)
    assert held["memory/teacher.drift"].abs().max().item() > 0
    moved = [key for key in start if key.startswith("memory/initial.") and not torch.equal(start[key], held[key])]
    assert moved, "the source's weights have statistics of their own, which follow the bank"
    adapter.reset()
    assert all(torch.equal(value, tensors(adapter)[key]) for key, value in start.items())
    assert all(torch.equal(one, adapter(batch)) for one, batch in zip(answers, (first, second), strict=True))
    with pytest.raises(ValueError, match=r"WaryTeacher\(0.999\) of petta needs source images; pass source_data="):
        adapted("bn", "petta")
    with pytest.raises(ValueError, match=r"petta has nothing for '\+poem' to build on"):
        poem.recipe("petta+poem")
    with pytest.raises(ValueError, match=r"watches what a bank holds; add views=MemoryBank\(\)"):
        poem.Recipe(teacher=WaryTeacher())
