"""A batch that breaks under way: a loss that is not finite moves nothing, and says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from learners import LOOSE, UNIT, batch, learner, sharp, snapshot

from poem.parts import RunningMean


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
    ],
    ids=["tent", "tent*", "cotta", "eta", "sar", "poem", "roid"],
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
