"""Clipped gradients: each sample's own, from one backward pass, against a backward pass per sample."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters import capturing
from compare import assert_same_state, differing
from inside import captured_sizes, network, set_doubles
from learners import LOOSE, learner, sharp
from nets import make_net
from torch import Tensor, nn
from toys import calibrated, images

import poem
from poem.engine.loop import BatchLoop
from poem.parts import (
    SAM,
    SGD,
    Adam,
    AdaptBranch,
    Batch,
    Blended,
    ByEntropy,
    Clipped,
    CrossEntropy,
    Entropy,
    EntropyBelow,
    Everything,
    Explore,
    FisherAnchor,
    FromBatch,
    MarginalEntropy,
    Outputs,
    Select,
    SoftLikelihoodRatio,
    Source,
    Statistics,
)
from poem.parts.base import Memory
from poem.recipes.text import parse

HUGE = Clipped(limit=1e30)


class Channels(nn.LayerNorm):
    """A layer norm over the channels of pictures, as ConvNeXt's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class Windows(nn.Module):
    """Tokens of 4 windows per image, one after another along the first axis, as in Swin; or windows first."""

    def __init__(self, *, image_first: bool = True) -> None:
        super().__init__()
        self.image_first = image_first
        self.inner, self.norm, self.fc = nn.Linear(12, 8), nn.LayerNorm(8), nn.Linear(8, 10)
        nn.init.normal_(self.norm.weight, 1.0, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        windows = x.flatten(1)[:, :240].reshape(len(x), 4, 5, 12)
        if not self.image_first:
            windows = windows.transpose(0, 1)
        y = torch.relu(self.norm(self.inner(windows.flatten(0, 1)))).mean(1)
        y = y.view(len(x), 4, 8).mean(1) if self.image_first else y.view(4, len(x), 8).mean(0)
        logits: Tensor = self.fc(4 * y)
        return logits


def convolutional(norm: nn.Module) -> nn.Module:
    """A small net of pictures, with an activation that writes in place."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), norm, nn.ReLU(inplace=True), nn.Conv2d(8, 8, 3, 2, 1), nn.GroupNorm(2, 8),
        nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )  # fmt: skip
    for layer in net:
        if isinstance(layer, nn.GroupNorm | nn.LayerNorm | nn.InstanceNorm2d):
            nn.init.normal_(layer.weight, 1.0, 0.3)
            nn.init.normal_(layer.bias, 0.0, 0.3)
    with torch.no_grad():
        last = net[-1].weight
        assert isinstance(last, Tensor)
        last.mul_(20)
    return net


def windows(*, image_first: bool) -> nn.Module:
    torch.manual_seed(0)
    return Windows(image_first=image_first)


class TokensFirst(nn.Module):
    """A batch norm, then a layer norm of tokens, whose first axis is the token's or the image's."""

    def __init__(self, *, image_first: bool, **settings: Any) -> None:
        super().__init__()
        self.image_first = image_first
        self.conv, self.bn, self.norm = nn.Conv2d(3, 8, 4, 4), nn.BatchNorm2d(8, **settings), nn.LayerNorm(8)
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x)).flatten(2)
        tokens = y.permute(0, 2, 1) if self.image_first else y.permute(2, 0, 1)
        logits: Tensor = self.fc(4 * torch.relu(self.norm(tokens)).mean(1 if self.image_first else 0))
        return logits


def tokens(*, image_first: bool, **settings: Any) -> nn.Module:
    torch.manual_seed(0)
    return TokensFirst(image_first=image_first, **settings).eval()


NETS: dict[str, Any] = {
    "gn": lambda: sharp("gn"),
    "ln": lambda: sharp("ln"),
    "in": lambda: convolutional(nn.InstanceNorm2d(8, affine=True)),
    "ln of channels": lambda: convolutional(Channels(8)),
    "ln of pictures": lambda: convolutional(nn.LayerNorm((8, 8, 8))),
    "rms": lambda: convolutional(nn.Sequential(nn.Flatten(2), nn.RMSNorm(64), nn.Unflatten(2, (8, 8)))),
    "windows": lambda: windows(image_first=True),
}


def each_sample(adapter: poem.Adapter, x: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Each sample's gradient (B, P) of its own loss: by rows from one backward pass, and by a pass per sample."""
    recipe, state = adapter.recipe, adapter._state
    with network(adapter).borrowed("cpu"):
        loop = BatchLoop(recipe, network(adapter), state, Batch(x, state.rng, len(x)), 0.1, learn=True)
        outputs = loop.forward()
        mask = loop.select(outputs)
        weights = recipe.weigh(outputs, mask, {}).detach()
        losses = {"theta": weights * outputs.entropy}
        tensors = {"theta": outputs.theta}
        if outputs.branch is not None:
            label = outputs.logits.detach().argmax(1, keepdim=True)
            losses["branch"] = -outputs.heads[1].log_softmax(1).gather(1, label)[:, 0]
            tensors["branch"] = outputs.branch
        rows, singly = {}, {}
        for key, loss in losses.items():
            total = torch.where(mask, loss, 0).sum()
            (rows[key],) = torch.autograd.grad(total, outputs.sample_rows[key], retain_graph=True)
            alone = [torch.autograd.grad(each, tensors[key], retain_graph=True)[0] for each in loss]  # type: ignore[arg-type]
            singly[key] = torch.where(mask.view(-1, 1), torch.stack(alone), 0)
    return rows, singly, mask


@pytest.mark.parametrize("kind", NETS)
def test_rows_are_the_gradients_of_one_backward_pass_per_sample(kind: str) -> None:
    recipe = poem.Recipe(step=Clipped(), select=EntropyBelow(0.9), weigh=ByEntropy(0.4))
    rows, singly, mask = each_sample(poem.adapt(NETS[kind](), recipe), images(8, seed=1))
    assert int(mask.sum()) >= 2
    assert singly["theta"][mask].norm(dim=1).min() > 0
    scale = singly["theta"].abs().max()
    torch.testing.assert_close(rows["theta"] / scale, singly["theta"] / scale, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("doubled", [True, False])
@pytest.mark.parametrize("kind", ["gn", "ln"])
def test_rows_of_the_branch_are_the_gradients_of_its_own_loss(kind: str, doubled: bool) -> None:
    adapter = learner(kind, "eta+poem", step=Clipped(), select=EntropyBelow(0.4))
    set_doubles(adapter, doubled)
    rows, singly, mask = each_sample(adapter, images(8, seed=1))
    assert 2 <= int(mask.sum()) < 8
    for key in ("theta", "branch"):
        scale = singly[key].abs().max()
        assert scale > 0
        torch.testing.assert_close(rows[key] / scale, singly[key] / scale, atol=1e-5, rtol=1e-4)


def test_an_update_is_the_mean_of_shortened_gradients() -> None:
    """By hand: `lr * mean_i g_i min(1, C / |g_i|)` over the selected samples, and the median as C."""
    x, lr = images(8, seed=1), 0.02
    adapter = learner("gn", "tent", step=Clipped(SGD(0.0)), select=EntropyBelow(0.35), lr=lr)
    _, singly, mask = each_sample(adapter, x)
    theirs = singly["theta"][mask]
    norms = theirs.norm(dim=1)
    limit = norms.sort().values[(len(norms) - 1) // 2]
    assert limit == norms.median()
    assert 0 < int((norms > limit).sum()) < len(norms) < 8
    expected = -lr * (theirs * (limit / norms).clamp(max=1).view(-1, 1)).mean(0)
    before = adapter._state.moving["theta"]
    adapter(x)
    torch.testing.assert_close(adapter._state.moving["theta"] - before, expected, atol=1e-6, rtol=1e-4)
    step = Clipped(SGD(0.0), limit=float(limit))
    fixed = learner("gn", "tent", step=step, select=EntropyBelow(0.35), lr=lr)
    fixed(x)
    torch.testing.assert_close(fixed._state.moving["theta"], adapter._state.moving["theta"], atol=1e-7, rtol=1e-5)
    assert "step/theta/median" not in fixed.state_dict()["tensors"]


@pytest.mark.parametrize("method", ["tent", "eta+poem", "eata"])
@pytest.mark.parametrize("kind", ["bn", "gn", "ln"])
def test_a_huge_limit_clips_nothing(method: str, kind: str) -> None:
    """On batch norm too, where rows of samples that are not selected carry gradient; with an anchor beside them."""
    settings: dict[str, Any] = {} if method == "tent" else dict(LOOSE)
    if method == "eata":
        settings |= {"minimise": Entropy() + FisherAnchor(20.0), "source_data": [images(8, seed=2)]}
    plain, huge = (learner(kind, method, step=step, **settings) for step in (SGD(), HUGE))
    for seed in (1, 2, 3):
        x = images(8, seed=seed)
        answer = plain(x)
        torch.testing.assert_close(huge(x), answer, atol=2e-5, rtol=1e-5)
    assert huge.totals == plain.totals
    assert plain.totals.updates > 0
    mine, theirs = (each.state_dict()["tensors"] for each in (huge, plain))
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(mine[name], tensor, atol=5e-6, rtol=1e-4, msg=f"{name} differs")


@pytest.mark.parametrize("kind", ["bn", "gn"])
def test_a_huge_limit_clips_nothing_where_each_image_runs_several_times(kind: str) -> None:
    """`Blended` runs copies of the batch, each with its own statistics, where there is batch norm."""
    nets = (calibrated(sharp(kind)).double() for _ in range(2))
    plain, huge = (
        learner(kind, "eta", net, statistics=Blended(), step=step, **LOOSE)
        for net, step in zip(nets, (SGD(), HUGE), strict=True)
    )
    for seed in (1, 2):
        x = images(8, seed=seed).double()
        answer = plain(x)
        torch.testing.assert_close(huge(x), answer, atol=1e-9, rtol=1e-9)
    assert plain.totals.updates > 0
    torch.testing.assert_close(huge._state.moving, plain._state.moving, atol=1e-9, rtol=1e-9)


def test_clipping_in_bfloat16_is_near_the_plain_one() -> None:
    """The limit is the median, which shortens half of the gradients; in bfloat16 plain SGD's update is off by 0.1."""
    x = images(8, seed=1)
    kinds: dict[str, Any] = {"fp32": {}, "bf16": {"precision": "bf16"}, "huge": {"step": HUGE}}
    moved, medians = {}, {}
    for kind, settings in kinds.items():
        adapter = learner("gn", "tent", **{"step": Clipped(), **settings})
        before = adapter._state.moving["theta"]
        adapter(x)
        assert adapter.totals.updates == 1
        moved[kind] = adapter._state.moving["theta"] - before
        medians[kind] = adapter.state_dict()["tensors"].get("step/theta/median")
    length = moved["fp32"].norm()
    assert (moved["huge"] - moved["fp32"]).norm() > 0.3 * length, "something is clipped"
    assert (moved["bf16"] - moved["fp32"]).norm() < 0.15 * length
    torch.testing.assert_close(medians["bf16"], medians["fp32"], atol=0, rtol=0.05)


def test_norms_of_gradients_are_those_before_clipping() -> None:
    x = images(8, seed=1)
    norms = learner("gn", "tent").gradient_norms(x)
    assert norms.min() > 0
    torch.testing.assert_close(learner("gn", "tent", step=Clipped()).gradient_norms(x), norms, atol=1e-5, rtol=1e-4)


def test_a_planted_outlier_is_bounded() -> None:
    """One sample of eight with a gradient ten thousand times the others': the mean moves by one limit at most."""
    ordinary = torch.randn(8, 20, generator=torch.Generator().manual_seed(0))
    planted = ordinary.clone()
    planted[3] *= 1e4
    everyone, step = torch.ones(8, dtype=torch.bool), Clipped()
    memory = step.init(torch.zeros(20))
    calm, after = step.join(ordinary / 8, everyone, memory)
    wild, median = step.join(planted / 8, everyone, after | {"velocity": memory["velocity"]})
    assert (planted / 8).sum(0).norm() > 1000 * calm.norm()
    assert wild.norm() <= after["median"]
    assert (wild - calm).norm() < 2 * after["median"] / 8 + 1e-4
    assert float(median["median"] / after["median"]) == pytest.approx(1, abs=0.11)  # it counts as one sample


def test_the_median_is_scale_free_follows_the_stream_and_leaves_zeros_out() -> None:
    draw = torch.Generator().manual_seed(0)
    everyone, step = torch.ones(16, dtype=torch.bool), Clipped()
    first = step.init(torch.zeros(4))
    found = {}
    for scale in (1.0, 1e-4):
        memory = dict(first)
        draw.manual_seed(0)
        for _ in range(60):
            rows = torch.randn(16, 4, generator=draw) * scale
            memory |= step.join(rows / 16, everyone, memory)[1]
        found[scale] = float(memory["median"]) / scale
    assert found[1.0] == pytest.approx(found[1e-4], rel=1e-3)
    assert found[1.0] == pytest.approx(float(torch.randn(9999, 4, generator=draw).norm(dim=1).median()), rel=0.15)
    rows = torch.zeros(16, 4)
    rows[:2] = 1.0
    assert float(step.join(rows / 16, everyone, first)[1]["median"]) == pytest.approx(2.0)
    joined, nothing = step.join(torch.zeros(16, 4), everyone, first)
    assert float(nothing["median"]) == 0
    assert torch.equal(joined, torch.zeros(4))


def test_rows_without_selection_that_are_not_finite_do_not_matter() -> None:
    mask = torch.tensor([True, True, False])
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [torch.nan, torch.inf]])
    step = Clipped()
    joined, memory = step.join(rows, mask, step.init(torch.zeros(2)))
    assert torch.equal(joined, torch.ones(2))
    assert float(memory["median"]) == 2  # of a sample's own loss: twice its share in the mean of two


class Broken(CrossEntropy):
    """A loss whose gradient is not finite, though its value is."""

    def __call__(self, selected: Any) -> Tensor:
        zero = selected.outputs.logits - selected.outputs.logits
        broken: Tensor = selected.mean(zero.sum(1).sqrt())
        return super().__call__(selected) + broken


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    adapter = learner("gn", "tent", step=Clipped())
    adapter(images(8, seed=1))
    before = adapter.state_dict()["tensors"]
    assert float(before["step/theta/median"]) > 0
    bad = learner("gn", "tent", step=Clipped(), minimise=Broken("own"))
    start = bad.state_dict()["tensors"]
    bad(images(8, seed=1))
    assert bad.totals.updates == 0
    for name, tensor in start.items():
        assert torch.equal(bad.state_dict()["tensors"][name], tensor), name


@pytest.mark.parametrize("median", [0.0, 0.5])
def test_an_empty_selection_joins_to_finite_numbers_and_keeps_the_median(median: float) -> None:
    """Rows of samples that are not selected do not count for the median; zeros join to zeros."""
    nobody, step = torch.zeros(4, dtype=torch.bool), Clipped()
    before = step.init(torch.zeros(3)) | {"median": torch.tensor(median)}
    for rows in (torch.zeros(4, 3), torch.full((4, 3), 7.0)):
        gradient, memory = step.join(rows, nobody, before)
        assert gradient.isfinite().all()
        assert bool(gradient.any()) <= bool(rows.any())
        assert torch.equal(memory["median"], before["median"])


class UnlessNegative(Select):
    """Every sample but those of negative pixels."""

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        assert outputs.images is not None
        return among & (outputs.images.amin((1, 2, 3)) >= 0)


@pytest.mark.parametrize("kind", ["bn", "gn"])
def test_where_no_sample_is_selected_nothing_changes(kind: str) -> None:
    """Not the tensors, nor the momentum, nor either median, which are not zero; also where the update is made."""
    adapter = learner(kind, "eta+poem", step=Clipped(), select=UnlessNegative())
    adapter(images(8, seed=1))
    before = adapter.state_dict()
    assert adapter.totals.updates > 0
    for name in ("step/theta/median", "step/branch/median", "step/theta/velocity", "step/branch/velocity"):
        assert before["tensors"][name].any(), name
    updates, negative = adapter.totals.updates, -images(8, seed=2)
    adapter(negative)
    assert adapter.totals.updates == updates
    assert differing(adapter.state_dict()["tensors"], before["tensors"]) == []
    state = adapter._state
    with network(adapter).borrowed("cpu"):  # as a captured loop, which the host does not stop
        loop = BatchLoop(adapter.recipe, network(adapter), state, Batch(negative, state.rng, 8), 0.1, learn=True)
        made = loop.update(loop.first()).updates[-1]
    assert not made.mask.any()
    assert made.step_memory.keys() == {"theta", "branch"}
    assert not made.applied
    assert differing(adapter.state_dict()["tensors"], before["tensors"]) == []


def test_the_median_is_saved_loaded_and_reset(tmp_path: Path) -> None:
    one, other = (learner("ln", "eta+poem", step=Clipped(), **LOOSE) for _ in range(2))
    fresh = one.state_dict()
    one(images(8, seed=1))
    median = one.state_dict()["tensors"]["step/theta/median"]
    assert float(median) > 0
    one.save(tmp_path / "state")
    other.load(tmp_path / "state")
    assert torch.equal(other.state_dict()["tensors"]["step/theta/median"], median)
    assert torch.equal(one(images(8, seed=2)), other(images(8, seed=2)))
    assert_same_state(one.state_dict(), other.state_dict())
    assert not torch.equal(one.state_dict()["tensors"]["step/theta/median"], median)
    one.reset()
    assert_same_state(one.state_dict(), fresh)


def test_only_selected_rows_run_backward_where_they_are_few() -> None:
    """The shorter backward pass has rows for the selected samples alone, and gives the same."""
    one, other = (learner("gn", "tent", step=Clipped(), select=EntropyBelow(0.4)) for _ in range(2))
    x = images(24, seed=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(poem.accelerate.selected_rows, "BACKWARD_RATIO", torch.inf)
        whole = one(x), one(x)
    few = other(x), other(x)
    assert 0 < other.totals.taught < 0.8 * 24
    assert other.totals.backwards_computed < one.totals.backwards_computed
    for a, b in zip(few, whole, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("method", ["tent", "eta+poem"])
def test_a_captured_loop_clips_alike(method: str) -> None:
    settings = {} if method == "tent" else LOOSE
    with capturing("cpu"):
        eager, fast = (learner("gn", method, step=Clipped(), fast=fast, **settings) for fast in (False, True))
        for seed in (1, 2, 3, 4):
            assert torch.equal(fast(images(8, seed=seed)), eager(images(8, seed=seed)))
        assert captured_sizes(fast)
        assert_same_state(fast.state_dict(), eager.state_dict())
    assert eager.totals.updates > 0


def test_what_is_not_supported_says_what_is() -> None:
    with pytest.raises(ValueError, match=r"expected a plain optimiser such as SGD\(\) or Adam\(\), got SAM"):
        Clipped(SAM())
    with pytest.raises(ValueError, match="expected a plain optimiser"):
        Clipped(Clipped())
    with pytest.raises(ValueError, match="expected a plain optimiser"):
        SAM(base=Clipped())
    with pytest.raises(ValueError, match="limit"):
        Clipped(limit=0.0)
    with pytest.raises(ValueError, match=r"objective that is a sum over samples.*MarginalEntropy.*step=SGD"):
        poem.Recipe(step=Clipped(), minimise=MarginalEntropy())
    sums = (SoftLikelihoodRatio(), Entropy() + SoftLikelihoodRatio(), Entropy(least=0.5), CrossEntropy(least=0.5))
    for ratio in sums:
        expected = rf"mean over the selected samples.*{re.escape(repr(ratio))}.*divides by the batch size.*step=SGD"
        with pytest.raises(ValueError, match=expected):
            poem.Recipe(step=Clipped(), minimise=ratio)
        with pytest.raises(ValueError, match=expected):
            poem.Recipe(step=Clipped(), branch=AdaptBranch(teach=ratio))
        assert poem.Recipe(step=SGD(), minimise=ratio).minimise == ratio
    with pytest.raises(ValueError, match=r"clips scale and shift of norm layers, got 'conv1.weight'.*NormAffine"):
        poem.adapt(make_net("gn"), "tent", parameters=Everything(), step=Clipped())


def test_a_network_that_mixes_samples_in_a_norm_layer_is_refused() -> None:
    adapter = poem.adapt(windows(image_first=False), "tent", step=Clipped(), lr=0.1)
    before = adapter.state_dict()
    with pytest.raises(ValueError, match="a norm layer mixes samples"):
        adapter(images(8, seed=1))
    assert_same_state(adapter.state_dict(), before)
    assert poem.adapt(windows(image_first=True), "tent", step=Clipped(), lr=0.1)(images(8, seed=1)).shape == (8, 10)


@pytest.mark.parametrize("statistics", [FromBatch(), Source()], ids=repr)
@pytest.mark.parametrize("tracked", [True, False])
def test_a_batch_norm_does_not_hide_a_layer_norm_that_mixes_samples(tracked: bool, statistics: Statistics) -> None:
    """Statistics of the batch norm couple samples, which is no reason to refuse; tokens along the first axis are."""
    made = (tokens(image_first=first, track_running_stats=tracked) for first in (False, True))
    mixed, plain = (poem.adapt(net, "tent", step=Clipped(), statistics=statistics, lr=0.1) for net in made)
    before = mixed.state_dict()
    with pytest.raises(ValueError, match="a norm layer mixes samples"):
        mixed(images(8, seed=1))
    assert_same_state(mixed.state_dict(), before)
    plain(images(8, seed=1))
    assert plain.totals.updates == 1
    assert network(plain).samples_independent


def test_a_batch_of_one_has_one_row_and_the_check_waits_for_several() -> None:
    """One image's rows are right in any network; the check is made on the first batch of more."""
    clipped, plain = (
        poem.adapt(windows(image_first=False), "tent", step=step, lr=0.1, guard=False) for step in (HUGE, SGD())
    )
    torch.testing.assert_close(clipped(images(1, seed=1)), plain(images(1, seed=1)))
    torch.testing.assert_close(clipped._state.moving, plain._state.moving, atol=1e-6, rtol=1e-5)
    assert clipped.totals.updates == 1
    assert network(clipped).samples_independent is None
    with pytest.raises(ValueError, match="a norm layer mixes samples"):
        clipped(images(8, seed=1))


def test_the_check_of_rows_is_made_once_and_not_counted() -> None:
    net, calls = sharp("bn"), []
    net.register_forward_pre_hook(lambda _, args: calls.append(len(args[0])))
    adapter = learner("bn", "tent", net, step=Clipped())
    adapter(images(8, seed=1))
    first = len(calls)
    adapter(images(8, seed=2))
    assert len(calls) - first == first - 1 > 0
    assert adapter.totals.forwards == 16


def test_a_norm_layer_that_does_more_is_refused() -> None:
    class Activated(nn.GroupNorm):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(super().forward(x))

    with pytest.raises(ValueError, match=r"scale and shift and do no more, got '1' \(Activated\)"):
        poem.adapt(convolutional(Activated(2, 8)), "tent", step=Clipped())(images(4, seed=1))


def test_the_branch_is_clipped_and_tensors_that_parts_bring_are_not() -> None:
    assert SGD().for_group("branch") == SGD()
    assert Clipped(Adam()).for_group("branch") == Clipped(Adam())
    assert Clipped(Adam()).for_group("minimise.predictor") == Adam() == SAM(base=Adam()).for_group("branch")


def test_as_text() -> None:
    step = Clipped(Adam(), limit=0.5)
    assert repr(Clipped()) == "Clipped(SGD(0.9))"
    assert parse(repr(step)) == step
    assert parse("Clipped()") == Clipped() == Clipped(SGD(0.9), limit=None, rate=0.1)
    assert poem.Recipe(step=Clipped(), branch=AdaptBranch(), explore=Explore(2)).step == Clipped()
