"""The backward pass over the selected rows alone: where samples do not depend on each other, and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import assert_same_answers
from nets import make_net
from test_contract import Case
from torch import Tensor, nn
from toys import stream

import poem
import poem.accelerate.capture
import poem.engine.loop
from poem.parts import FromBatch, Source


@pytest.mark.parametrize("method", ["poem", "deyo+poem", "eata", "tent-filtered*"])
@pytest.mark.parametrize("kind", ["gn", "ln"])
def test_few_selected_samples_go_backward_without_the_rest(
    method: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    """Takes the batch's mean away: samples depend on each other."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net("gn", sharpness=6.0)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.net(x - x.mean(0))
        return logits


def untracked() -> nn.Module:
    """Batch norm that never kept statistics, and so uses the batch's under every setting."""
    net = make_net("bn", sharpness=10.0)
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False
            module.running_mean = module.running_var = None
    return net


@pytest.mark.parametrize(("make", "statistics"), [(Centred, FromBatch()), (untracked, Source())])
def test_samples_that_depend_on_each_other_go_backward_together(
    make: Any, statistics: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
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
