"""An exported network answers as the frozen adapter, and is a plain module."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compare import assert_same_answers
from learners import RICH, UNIT, batch, begun, learner, sharp
from nets import Wrapped
from torch import Tensor
from toys import images

import poem
from poem.parts import EntropyBelow, Source


def test_an_export_with_a_branch_copes_with_a_network_that_writes_into_its_input() -> None:
    class Writing(Wrapped):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.sub_(0.5).mul_(2.0))

    adapter = poem.adapt(Writing("bn"), "poem", **RICH)
    adapter(images(8, 0))
    given = images(8, 1)
    with adapter.frozen():
        torch.testing.assert_close(adapter.export()(given), adapter(images(8, 1)))
    assert_same_answers([given], [images(8, 1)])


@pytest.mark.parametrize("kind", ["bn", "gn", "ln"])
@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("tent", {}),
        ("tent", {"statistics": Source()}),
        ("tent-filtered", {"classes": [3, 1, 8], "threshold": 0.8, "mean": (0.1,) * 3, "std": (0.9,) * 3}),
        ("poem", {}),
        ("poem", {"alpha": 0.3, "classes": [3, 1, 8], "threshold": 0.8}),
        ("poem-official-v2", {"select": EntropyBelow(0.5)}),
        ("cotta", UNIT),
        ("roid", {**UNIT, "lr": 0.001}),
    ],
    ids=["tent", "source statistics", "mask", "poem", "poem mask", "official", "cotta", "roid"],
)
def test_an_export_answers_as_the_frozen_adapter(kind: str, method: str, changes: dict[str, Any]) -> None:
    adapter = learner(kind, method, **changes)
    for seed in (1, 2):
        adapter(batch(seed=seed))
    assert adapter.totals.updates > 0
    plain = adapter.export()
    with adapter.frozen(), torch.no_grad():
        torch.testing.assert_close(plain(batch(seed=3)), adapter(batch(seed=3)), atol=1e-4, rtol=1e-4)
        before = plain(batch(seed=3))
        adapter.reset()  # the export keeps what it was given
        assert torch.equal(plain(batch(seed=3)), before)
        assert not torch.allclose(adapter(batch(seed=3)), before, atol=1e-6)
    assert type(plain.heads[0]) is type(adapter.model)  # type: ignore[index]
    assert not plain.training


def test_what_depends_on_each_batch_is_not_exported() -> None:
    adapter = poem.adapt(sharp(), "memo", **UNIT)
    with pytest.raises(
        ValueError, match=r"Mixed\(.*depends on each batch and cannot be exported; use statistics=Source"
    ):
        adapter.export()


def test_an_export_goes_through_torch_export() -> None:
    adapter = begun("poem", "gn")
    plain = adapter.export()
    program = torch.export.export(plain, (batch(),)).module()
    torch.testing.assert_close(program(batch(seed=2)), plain(batch(seed=2)))
