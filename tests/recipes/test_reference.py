"""Every method agrees with a straight-line reference that shares no code with the library, batch after batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from adapters import adapt, on_device
from nets import make_net
from oracles import METHODS, adam, outcomes, sar_coasting, sgd
from oracles.auto import on_batch_norm
from torch import Generator, Tensor
from toys import calibrated

import poem
from poem.parts import (
    SAM,
    SGD,
    Adam,
    AdaptBranch,
    AfterImages,
    Blended,
    ByEntropy,
    Consistency,
    Entropy,
    EntropyBelow,
    EveryCalls,
    FisherAnchor,
    LocalPrior,
    LossAverageBelow,
    LowFrequencies,
    MeanTeacher,
    MemoryBank,
    NotRedundant,
    PatchNoise,
    PLPDAbove,
    Readout,
    RegionalEntropy,
    RegionConfidence,
    Robust,
    SelfBootstrap,
    SlowTeacher,
    SoftLikelihoodRatio,
    StochasticRestore,
    WaryTeacher,
)

pytestmark = pytest.mark.usefixtures("as_asked")
NETS = ("bn", "gn", "ln")
# Under these, selections of random images are neither empty nor full, sets change within a batch, and resets happen.
LR = {"bn": 0.05, "gn": 0.02, "ln": 0.002}
SHARPNESS = {"bn": 10.0, "gn": 6.0, "ln": 9.0}
PLPD = {"bn": 0.2, "gn": 0.1, "ln": 0.0}
REDUNDANCY = {"bn": 0.75, "gn": 0.98, "ln": 0.99}
LOSS_FLOOR = {"bn": 0.5, "gn": 0.65, "ln": 0.82}
COAST = {
    "bn": (1.5, 0.5),
    "gn": (0.05, 0.65),
    "ln": (2.0, 0.41),
}  # radius and loss floor: some sample is no longer selected after the perturbation
OFFICIAL_FLOOR = {"bn": 1.6, "gn": 1.7, "ln": 1.5}


def images(count: int, seed: int) -> Tensor:
    """Coloured quarters under noise of random strength, in [0, 1]."""
    rng = torch.Generator().manual_seed(seed)
    colour = torch.rand(count, 3, 1, 1, generator=rng, dtype=torch.float64)
    strength = torch.rand(count, 1, 1, 1, generator=rng, dtype=torch.float64)
    noise = torch.rand(count, 3, 16, 16, generator=rng, dtype=torch.float64)
    quarters = (torch.rand(count, 3, 2, 2, generator=rng, dtype=torch.float64) > 0.5).double()
    quarters = quarters.repeat_interleave(8, dim=2).repeat_interleave(8, dim=3)
    return (1 - strength) * (0.5 * colour + 0.5 * quarters) + strength * noise


def augment(x: Tensor, rng: Generator) -> Tensor:
    bright = 0.8 + 0.4 * torch.rand(1, generator=rng).to(x)
    noise = torch.rand(x.shape, generator=rng).to(x) - 0.5
    flip = bool(torch.rand(1, generator=rng) < 0.5)
    y = (bright * x + 0.1 * noise).clamp(0, 1)
    return y.flip(3) if flip else y


def views(image: Tensor, rng: Generator) -> Tensor:
    return torch.cat([augment(image, rng) for _ in range(8)])


def settings(method: str, kind: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same unusual settings in the reference's words and in ours."""
    base = method.removesuffix("*").split("+")[0]
    theirs: dict[str, Any] = {}
    ours: dict[str, Any] = {}
    if base == "auto":
        ours["preset"] = "imagenet"  # SGD, as in the reference; `poem.adapt` would choose by the number of classes
    if base in ("auto", "eta", "eata", "rdumb"):
        theirs["redundancy"] = REDUNDANCY[kind]
        ours["select"] = EntropyBelow(0.4) & NotRedundant(REDUNDANCY[kind])
    if base == "sar":
        theirs["loss_floor"] = LOSS_FLOOR[kind]
        ours["recover"] = LossAverageBelow(LOSS_FLOOR[kind])
    if base == "poem-official":
        theirs |= {"redundancy": REDUNDANCY[kind], "plpd": PLPD[kind], "loss_floor": OFFICIAL_FLOOR[kind]}
        ours["select"] = EntropyBelow(0.4) & PLPDAbove(PLPD[kind]) & NotRedundant(REDUNDANCY[kind])
        ours["recover"] = LossAverageBelow(OFFICIAL_FLOOR[kind], of="first")
    if base in ("deyo", "poem-official-v2"):
        theirs["plpd"] = PLPD[kind]
        first = EntropyBelow(0.5) if base == "deyo" else EntropyBelow(0.4, first=0.5)
        ours["select"] = first & PLPDAbove(PLPD[kind])
    if base == "eata":
        theirs["fisher_weight"] = 20.0
        ours["minimise"] = Entropy() + FisherAnchor(20.0)
    if base == "rdumb":
        theirs["reset_every"] = 4
        ours["recover"] = EveryCalls(4)
    if base == "cotta":
        theirs |= {"p_th": 0.9, "copies": 4, "restore": 0.05, "teacher_memory": 0.9}
        ours["teacher"] = MeanTeacher(momentum=0.9, copies=4, unsure=0.9, augment=augment)
        ours["recover"] = StochasticRestore(0.05)
    if base in ("roid", "cmf"):
        ours["minimise"] = SoftLikelihoodRatio() + Consistency(augment)
    if base == "recap":
        theirs |= {"region": 0.05, "margin": 0.4}
        score = RegionalEntropy(0.05)
        ours |= {"select": EntropyBelow(0.4, score=score), "weigh": ByEntropy(0.4, score=score, most=3.0)}
        ours["minimise"] = RegionConfidence(score=score)
    if base == "spa":
        # Of so few frequencies a tenth is often none; the view is then the image but for rounding, which would decide.
        theirs |= {"patch": 4, "dropped": 0.5}
        ours["minimise"] = SelfBootstrap(frequencies=LowFrequencies(0.5, 0.5), noise=PatchNoise(4))
    if base == "protected":
        theirs["begin"] = 24
        ours["select"] = AfterImages(24) & EntropyBelow(0.4)
    if base == "memo":
        ours["views"] = views
    if base == "petta":
        theirs |= {"capacity": 16, "alpha": 0.2, "nu": 0.1}
        ours["views"] = MemoryBank(capacity=16, every=1, augment=augment, by_age=False)
        ours |= {"statistics": Robust(0.2), "teacher": WaryTeacher(0.9)}
    if base == "rotta":
        theirs |= {"capacity": 16, "every": 24, "alpha": 0.2, "nu": 0.1}
        ours["views"] = MemoryBank(capacity=16, every=24, augment=augment)
        ours |= {"statistics": Robust(0.2), "teacher": SlowTeacher(0.9)}
    return theirs, ours


CASES = [(method, kind) for method in METHODS for kind in NETS if kind == "ln" or not method.startswith("rem")]
"""REM takes vision transformers alone."""


@pytest.mark.parametrize(("method", "kind"), CASES, ids=[f"{method}-{kind}" for method, kind in CASES])
def test_every_batch_agrees_with_the_reference(method: str, kind: str) -> None:
    net = make_net(kind, sharpness=SHARPNESS[kind]).double()
    net = calibrated(net) if method == "auto" else net
    batches, source = list(images(72, seed=1).split(12)), list(images(24, seed=2).split(12))
    lr = LR[kind] / 10 if method.startswith(("roid", "cmf")) else LR[kind]
    theirs, ours = settings(method, kind)
    expected = outcomes(method, net, batches, lr=lr, source=source, augment=augment, views=views, **theirs)
    data = source if poem.recipe(method).uses_source_data else None
    adapter = adapt(on_device(net), method, lr=lr, mean=(0, 0, 0), std=(1, 1, 1), source_data=data, **ours)
    learns = adapter.recipe.learns  # of `auto` it depends on the network
    for index, (batch, outcome) in enumerate(zip(batches, expected, strict=True)):
        got = adapter(on_device(batch)).cpu()
        assert got.dtype == torch.float64
        far = float((got - outcome.answer).abs().max())
        assert far < 1e-5, f"batch {index} differs by {far:.3g}"
        if learns and not method.startswith(("memo", "rotta", "petta")):
            assert torch.equal(adapter.last.selected.cpu(), outcome.selected)
            assert adapter.last.reset == outcome.reset
    assert (adapter.totals.taught > 0) == learns
    if learns and not method.startswith("memo"):  # the reference counts updates by the batch, the library by the image
        assert adapter.totals.updates == sum(len(outcome.updates) for outcome in expected)


def test_a_short_last_batch_of_auto_counts_against_the_configured_size() -> None:
    net = calibrated(make_net("ln", sharpness=SHARPNESS["ln"]).double())
    first, second, *_ = images(72, seed=1).split(12)
    batches, (theirs, ours) = [second, first[:5]], settings("auto", "ln")
    expected = list(outcomes("auto", net, batches, lr=LR["ln"], **theirs))
    assert 0 < int(expected[1].selected.sum()) < 5
    adapter = adapt(on_device(net), "auto", lr=LR["ln"], mean=(0, 0, 0), std=(1, 1, 1), **ours)
    for batch, outcome in zip(batches, expected, strict=True):
        assert float((adapter(on_device(batch)).cpu() - outcome.answer).abs().max()) < 1e-7


def test_updates_of_auto_are_smaller_with_the_constants_of_imagenet_alone() -> None:
    recipes = [poem.recipe("auto", preset) for preset in ("imagenet", "cifar", "cifar100")]
    assert [recipe.minimise for recipe in recipes] == [Entropy(least=0.5), Entropy(), Entropy()]
    assert [recipe.branch == AdaptBranch() for recipe in recipes] == [False, True, True]


def test_every_method_has_a_reference() -> None:
    assert set(METHODS) == set(poem.methods())


def test_the_settings_exercise_what_they_should() -> None:
    """Second rounds, newly reliable samples and resets all occur, so that agreement is not empty."""
    for kind in NETS:
        for method in ("poem", "deyo+poem", "eata+poem", "sar+poem-i", "poem-official"):
            net = make_net(kind, sharpness=SHARPNESS[kind]).double()
            adapter = adapt(on_device(net), method, lr=LR[kind], **settings(method, kind)[1])
            for batch in images(72, seed=1).split(12):
                adapter(on_device(batch))
            assert adapter.totals.updates > adapter.totals.batches - adapter.totals.skips, (kind, method)
            assert adapter.totals.newly_reliable + adapter.totals.no_longer_reliable > 0, (kind, method)
    assert AdaptBranch() == poem.recipe("poem").branch


@pytest.mark.parametrize("size", [1, 2, 7, 80])
@pytest.mark.parametrize("kind", NETS)
def test_auto_agrees_with_the_reference_as_it_comes_for_ten_classes_at_any_batch_size(kind: str, size: int) -> None:
    """Adam at 0.001; images that are alike for a while; batches smaller and larger than the 64 that rates are for."""
    net = calibrated(make_net(kind, sharpness=SHARPNESS[kind])).double()
    batches = [dim * images(size, seed=4 + index) for index, dim in enumerate((1, 1, 0.5, 0.5, 0.5, 1))]
    short = [*batches, batches[0][: max(1, size // 2)]]
    expected = outcomes("auto", net, short, lr=0.001, redundancy=0.4, optimizer=adam, least=0.0)
    adapter, answers = adapt(on_device(net), "auto"), []
    assert adapter.recipe.learns == (kind != "bn")
    assert adapter.lr == (0.001 if adapter.recipe.learns else 0.00025)
    for index, (batch, outcome) in enumerate(zip(short, expected, strict=True)):
        answers.append(adapter(on_device(batch)).cpu())
        far = float((answers[-1] - outcome.answer).abs().max())
        assert far < 1e-7, f"batch {index} differs by {far:.3g}"
        assert torch.equal(adapter.last.selected.cpu(), outcome.selected)
    assert adapter.totals.updates == sum(len(outcome.updates) for outcome in expected)
    assert (adapter.totals.updates > 0) == adapter.recipe.learns
    plain = adapt(on_device(net), "auto", lr=0.0, readout=Readout())
    apart = [float((plain(on_device(b)).cpu() - a).abs().max()) for a, b in zip(answers, short, strict=True)]
    assert max(apart[1:]) > 1e-3, "prior and updates change nothing"


@pytest.mark.parametrize("size", [1, 7, 80])
def test_learning_with_blended_statistics_agrees_with_the_reference(size: int) -> None:
    """What `auto` leaves out on batch norm: ETA's update on the mean of the copies."""
    net = calibrated(make_net("bn", sharpness=SHARPNESS["bn"])).double()
    batches = [dim * images(size, seed=4 + index) for index, dim in enumerate((1, 1, 0.5, 0.5, 0.5, 1))]
    expected = list(on_batch_norm(net, batches, lr=0.01, redundancy=0.4))
    adapter = adapt(
        on_device(net), "eta", lr=0.01, select=EntropyBelow(0.4) & NotRedundant(0.4), statistics=Blended(),
        readout=Readout("first", LocalPrior()),
    )  # fmt: skip
    for batch, outcome in zip(batches, expected, strict=True):
        torch.testing.assert_close(adapter(on_device(batch)).cpu(), outcome.answer, rtol=0, atol=1e-7)
        assert torch.equal(adapter.last.selected.cpu(), outcome.selected)
    assert adapter.totals.updates == sum(len(outcome.updates) for outcome in expected) > 0


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("kind", NETS)
def test_lame_agrees_with_the_reference_on_small_batches(kind: str, size: int) -> None:
    net = make_net(kind, sharpness=SHARPNESS[kind]).double()
    batches = list(images(6 * size, seed=3).split(size))
    adapter = adapt(on_device(net), "lame")
    for batch, outcome in zip(batches, outcomes("lame", net, batches, lr=0.0), strict=True):
        torch.testing.assert_close(adapter(on_device(batch)).cpu(), outcome.answer, rtol=0, atol=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("kind", NETS)
def test_sar_with_momentum_coast_agrees_with_the_reference_on_single_images(kind: str, optimizer: str) -> None:
    """The reference skips nothing: without selected samples it differentiates the mean over none and steps."""
    net = make_net(kind, sharpness=SHARPNESS[kind]).double()
    batches, (rho, floor) = list(images(40, seed=1).split(1)), COAST[kind]
    lr = LR[kind] / 10 if optimizer == "adam" else LR[kind]
    chosen = adam if optimizer == "adam" else sgd
    expected = list(sar_coasting(net, batches, lr=lr, rho=rho, loss_floor=floor, optimizer=chosen))
    step = SAM(rho, Adam() if optimizer == "adam" else SGD(), momentum_coast=True)
    adapter = adapt(on_device(net), "sar", lr=lr, step=step, recover=LossAverageBelow(floor))
    still = adapt(on_device(net), "sar", lr=lr, step=SAM(rho, step.base), recover=LossAverageBelow(floor))
    apart = 0.0
    for index, (batch, outcome) in enumerate(zip(batches, expected, strict=True)):
        far = float((adapter(on_device(batch)).cpu() - outcome.answer).abs().max())
        assert far < 1e-7, f"image {index} differs by {far:.3g}"
        assert adapter.last.reset == outcome.reset
        apart = max(apart, float((still(on_device(batch)).cpu() - outcome.answer).abs().max()))
    assert apart > 1e-3, "without the switch the answers are others"
    assert adapter.totals.updates == sum(len(outcome.updates) for outcome in expected) > 3
    assert any(not outcome.selected.any() for outcome in expected[5:]), "nothing was selected, after updates"
    lost = [outcome for outcome in expected if outcome.selected.any() and not outcome.updates]
    assert lost, "no sample stayed selected after the perturbation"
