"""The loop by itself: without acceleration it computes the same, and a loss that is not finite changes nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from learners import LOOSE, UNIT, batch, learner, sharp, snapshot
from torch import Tensor, nn

import poem
from poem.accelerate import selected_rows
from poem.engine.acceleration import Acceleration
from poem.engine.accounting import RunningTotals
from poem.engine.anatomy import anatomy
from poem.engine.branch_check import check_doubling
from poem.engine.loop import BatchLoop
from poem.engine.network import Network
from poem.engine.state import State
from poem.parts import EntropyBelow, Everyone, MemoryBank, PLPDAbove, RunningMean
from poem.parts.base import Batch


class PlainEngine:
    """Network, state and loop of an adapter, made without `poem.accelerate`."""

    def __init__(self, adapter: poem.Adapter, model: nn.Module) -> None:
        recipe, inner, facts = adapter.recipe, adapter._network, anatomy(model)
        split = None if recipe.branch is None else facts.split(recipe.branch.depth)
        branch = None if inner.branch is None else inner.branch.names
        self.network = Network(model, theta=inner.theta.names, branch=branch, split=split, norms=facts.norms)
        self.recipe, self.lr = recipe, adapter.lr
        self.state = State(recipe, self.network, seed=0, batch_size=None, family=facts.family)
        self.totals = RunningTotals()

    def __call__(self, images: Tensor) -> Tensor:
        with self.network.borrowed("cpu"):
            if self.network.branch is not None and self.network.doubles is None:
                with torch.no_grad():
                    check_doubling(self.network, images, self.recipe.statistics, self.state.memory)
            loop = BatchLoop(self.recipe, self.network, self.state, Batch(images, self.state.rng, 8), self.lr, True)
            answer, record = loop.run()
        self.state.calls += 1
        self.totals.add_batch(record, len(images))
        return answer


@pytest.mark.parametrize("kind", ["bn", "gn", "ln"])
@pytest.mark.parametrize("method", ["tent", "poem", "deyo"])
def test_the_plain_engine_answers_as_the_accelerated_one(method: str, kind: str) -> None:
    changes: dict[str, Any] = {} if method == "tent" else {"select": EntropyBelow(0.35)}
    if method == "deyo":
        changes["select"] = EntropyBelow(0.4) & PLPDAbove(-0.1)
    adapter = learner(kind, method, fast=False, **changes)
    plain = PlainEngine(adapter, sharp(kind))
    assert type(plain.network.acceleration) is Acceleration
    for seed in range(6):
        # the accelerated one adds both heads' gradients before the first convolution of the stage, not after it
        torch.testing.assert_close(plain(batch(seed=seed)), adapter(batch(seed=seed)), rtol=1e-6, atol=1e-5)
    mine, other = plain.totals.read(), adapter.totals
    assert (mine.taught, mine.updates, mine.selected) == (other.taught, other.updates, other.selected)
    assert other.updates > 0
    if method == "poem":
        assert plain.network.doubles
        assert adapter._acceleration.branch_backward.right, "the shorter backward pass was not used"
    for key, tensor in plain.state.moving.items():
        torch.testing.assert_close(tensor, adapter._state.moving[key], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["gn", "ln"])
def test_the_plain_engine_answers_as_a_backward_pass_over_selected_rows(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(selected_rows, "BACKWARD_RATIO", 1.01)
    adapter = learner(kind, "poem", fast=False, threshold=0.4)
    plain = PlainEngine(adapter, sharp(kind))
    for seed in range(6):
        torch.testing.assert_close(plain(batch(seed=seed)), adapter(batch(seed=seed)), rtol=0, atol=1e-5)
    assert adapter._acceleration.independent
    assert adapter.totals.backwards_computed < plain.totals.read().backwards_computed


@pytest.mark.parametrize(
    ("method", "changes", "reason"),
    [
        ("tent", {}, "the update was not finite"),
        ("tent*", {}, "the update was not finite"),
        ("cotta", UNIT, "the update was not finite"),
        ("eta", LOOSE, "nothing selected"),
        ("sar", {"threshold": 0.6}, "nothing selected"),
        ("poem", {}, "nothing selected"),
        ("roid", UNIT, "nothing selected"),
        ("rotta", {**UNIT, "views": MemoryBank(80, every=8)}, "the update was not finite"),
        ("zerosiam", {}, "the update was not finite"),
        ("come+poem", {"threshold": 0.6}, "nothing selected"),
    ],
    ids=["tent", "tent*", "cotta", "eta", "sar", "poem", "roid", "rotta", "zerosiam", "come+poem"],
)
@pytest.mark.parametrize("kind", ["bn", "gn", "ln"])
def test_a_loss_that_is_not_finite_is_skipped(kind: str, method: str, changes: dict[str, Any], reason: str) -> None:
    """The images are finite but for one batch the outputs are not: `last.skipped` says so, and nothing moves."""
    net, broken = sharp(kind), {"now": False}
    net.register_forward_hook(lambda _, __, out: out * torch.nan if broken["now"] else out)
    adapter = learner(kind, method, net, **changes)
    adapter(batch())
    assert adapter.totals.updates > 0
    before = snapshot(adapter)[1]
    broken["now"] = True
    adapter(batch(seed=2))
    assert str(adapter.last.skipped).startswith(reason)
    assert adapter.totals.skips == 1
    assert snapshot(adapter)[1] == before
    broken["now"] = False
    assert bool(adapter(batch(seed=3)).isfinite().all())
    assert adapter.last.updates > 0


def test_one_overflowing_image_does_not_change_running_statistics() -> None:
    adapter = learner(method="tent-filtered", statistics=RunningMean(0.1))
    adapter(batch())
    before = snapshot(adapter)[1]
    adapter(batch(seed=2) * 3e38)  # finite, but its activations are not
    assert adapter.last.skipped is not None
    assert snapshot(adapter)[1] == before


@pytest.mark.parametrize("method", ["tent", "poem"])  # the latter's branch is asked for its own gradients alone
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_group_norm_learns_in_channels_last(precision: Any, method: str) -> None:
    settings: dict[str, Any] = {"lr": 0.02, "fast": False, "precision": precision, "guard": False}
    settings |= {"rounds": 1, "select": Everyone()} if method == "poem" else {}
    plain = poem.adapt(sharp("gn"), method, **settings)
    last = poem.adapt(sharp("gn").to(memory_format=torch.channels_last), method, **settings)
    for seed in range(3):
        wanted = plain(batch(seed=seed))
        found = last(batch(seed=seed).contiguous(memory_format=torch.channels_last))
        near = 1e-4 if precision == "fp32" else 0.3
        torch.testing.assert_close(found, wanted, rtol=0, atol=near)
    assert last.totals.updates == 3
