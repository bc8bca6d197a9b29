"""Backward passes over less: over the selected samples alone, and over the branch's half of a doubled batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import assert_same_answers
from nets import Tokens, make_net
from test_contract import Case
from torch import Tensor, nn
from toys import stream

import poem
import poem.accelerate.capture
import poem.engine.loop
from poem.parts import Everyone, FromBatch, Source


@pytest.mark.parametrize("method", ["poem", "deyo+poem", "eata", "tent-filtered*"])
@pytest.mark.parametrize("kind", ["gn", "ln"])
def test_a_few_who_teach_go_back_alone(method: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case, adapters = Case(method, kind), []
    for few in (torch.inf, 1.0):  # never, always
        monkeypatch.setattr(poem.accelerate.selected_rows, "BACKWARD_RATIO", few)
        adapters.append(case.adapter(fast=False))
        for batch in stream("cpu", 4):
            answer = adapters[-1](batch)
    whole, apart = (adapter.totals for adapter in adapters)
    torch.testing.assert_close(adapters[0](batch), answer := adapters[1](batch), atol=1e-4, rtol=1e-4)
    assert answer.isfinite().all()
    assert whole.backwards_computed == 8 * whole.rounds >= apart.backwards_computed == apart.backwards > 0
    assert (whole.taught, whole.forwards, whole.updates) == (apart.taught, apart.forwards, apart.updates)


class Centred(nn.Module):
    """Takes the batch's mean away: samples meet."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net("gn", sharpness=6.0)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x - x.mean(0))
        return logits


def untracked() -> nn.Module:
    """Batch norm that never kept statistics, and so takes the batch's whatever it is told."""
    net = make_net("bn", sharpness=10.0)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False
            module.running_mean = module.running_var = None
    return net


@pytest.mark.parametrize(("make", "statistics"), [(Centred, FromBatch()), (untracked, Source())])
def test_where_samples_meet_nobody_goes_back_alone(make: Any, statistics: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    for few in (torch.inf, 1.0):
        monkeypatch.setattr(poem.accelerate.selected_rows, "BACKWARD_RATIO", few)
        adapter = poem.adapt(make(), "poem", lr=0.02, threshold=0.6, fast=False, statistics=statistics)
        answers.append([adapter(batch) for batch in stream("cpu", 3)])
        assert adapter.totals.updates > 0
    assert_same_answers(*answers)


def test_batch_norm_keeps_its_batch_whole() -> None:
    adapter = Case("poem", "bn").adapter(fast=False, threshold=0.2)
    for batch in stream("cpu", 4):
        adapter(batch)
    assert 0 < adapter.totals.taught < 0.4 * adapter.totals.backwards_computed
    assert adapter.totals.backwards_computed == 8 * adapter.totals.rounds


def test_the_branchs_own_lesson_goes_back_as_far_as_the_split() -> None:
    net: Any = make_net("bn", sharpness=10.0)
    passed: list[str] = []

    def watch(name: str) -> Any:
        def hook(_: nn.Module, __: Any, out: Tensor) -> None:
            if out.requires_grad:
                out.register_hook(lambda _: passed.append(name))

        return hook

    net.layer3.register_forward_hook(watch("shallow"))
    net.layer4.register_forward_hook(watch("deep"))
    adapter = poem.adapt(net, "poem", lr=0.02, rounds=1, fast=False, select=Everyone())
    first, second = stream("cpu", 2)
    adapter(first)
    passed.clear()  # the first time the branch's lesson is tried both ways
    adapter(second)
    assert adapter.last.updates == 1
    assert sorted(passed) == ["deep", "deep", "shallow"]  # two lessons, of which one goes all the way


@pytest.mark.parametrize(
    ("make", "right"), [(Tokens, False), (lambda: Tokens(1), False), (lambda: make_net("ln", sharpness=9.0), True)]
)
def test_half_a_way_back_is_tried_before_it_is_trusted(make: Any, right: bool) -> None:
    half, whole = (
        poem.adapt(make(), "poem", fast=False, lr=0.02, select=Everyone(), split="blocks.3") for _ in range(2)
    )
    whole._acceleration.branch_backward.right = False
    assert half._acceleration.branch_backward.layers
    batches = stream("cpu", 4)
    for batch in batches:
        torch.testing.assert_close(half(batch), whole(batch), atol=1e-4, rtol=0)
    assert half._network.doubles
    assert half._acceleration.branch_backward.right is right
    assert half.totals.updates > 0


def test_a_gradient_of_nothing_proves_nothing() -> None:
    halves = poem.adapt(make_net("bn"), "poem")._acceleration.branch_backward
    halves.gradient(lambda: torch.zeros(3), 1e-3)
    assert halves.untried
    halves.gradient(lambda: torch.ones(3), 1e-3)
    assert halves.right
