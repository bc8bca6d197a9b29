"""The branch's backward pass runs through its half of a doubled batch alone, where a check found that right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inside import branch_backward
from nets import Tokens, make_net
from torch import Tensor, nn
from toys import stream

import poem
import poem.accelerate.capture
import poem.engine.loop
from poem.parts import Everyone


def test_backward_of_the_branchs_loss_stops_at_the_split() -> None:
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
    passed.clear()  # at the first update the branch's gradient is computed both ways
    adapter(second)
    assert adapter.last.updates == 1
    assert sorted(passed) == ["deep", "deep", "shallow"]  # two losses, of which one reaches the shallow layers


@pytest.mark.parametrize(
    ("make", "right"), [(Tokens, False), (lambda: Tokens(1), False), (lambda: make_net("ln", sharpness=9.0), True)]
)
def test_the_half_batch_backward_is_checked_before_it_is_used(make: Any, right: bool) -> None:
    half, whole = (
        poem.adapt(make(), "poem", fast=False, lr=0.02, select=Everyone(), split="blocks.3") for _ in range(2)
    )
    branch_backward(whole).right = False
    assert branch_backward(half).layers
    batches = stream("cpu", 4)
    for batch in batches:
        torch.testing.assert_close(half(batch), whole(batch), atol=1e-4, rtol=0)
    assert half.last.notes == [], "one pass serves both heads"
    assert branch_backward(half).right is right
    assert half.totals.updates > 0


def test_a_gradient_of_zero_does_not_decide_the_check() -> None:
    halves = branch_backward(poem.adapt(make_net("bn"), "poem"))
    halves.gradient(lambda: torch.zeros(3), 1e-3)
    assert halves.untried
    halves.gradient(lambda: torch.ones(3), 1e-3)
    assert halves.right
