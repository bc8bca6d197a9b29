"""The branch's backward pass runs through its half of a doubled batch alone, where a check found that right."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from inside import branch_backward, set_doubles
from nets import Tokens, make_net
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
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


class RowsOfConvolutions(TorchDispatchMode):
    """How many rows each convolution has, forward and backward, by the shape of its weights."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: dict[tuple[int, ...], set[int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        places = {"convolution": (0, 1), "conv2d": (0, 1), "convolution_backward": (0, 2)}
        if func.overloadpacket.__name__ in places:
            first, weight = places[func.overloadpacket.__name__]
            self.seen.setdefault(tuple(args[weight].shape), set()).add(len(args[first]))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("norm", ["bn", "gn"])
def test_a_convolution_of_the_doubled_tensor_itself_runs_once(norm: str) -> None:
    once, twice = (
        poem.adapt(make_net(norm, sharpness=10.0), "poem", lr=0.02, rounds=1, fast=False, select=Everyone())
        for _ in range(2)
    )
    branch_backward(twice).undoubled = lambda x: None
    first, *others = stream("cpu", 4)
    once(first), twice(first)  # the first batch has passes of its own, which try things out
    for batch in others:
        with RowsOfConvolutions() as rows:
            answer = once(batch)
        assert rows.seen[20, 16, 3, 3] == rows.seen[20, 16, 1, 1] == {len(batch)}, "those that begin the stage"
        assert max(rows.seen[20, 20, 3, 3]) == 2 * len(batch), "what follows a norm layer runs for both heads"
        torch.testing.assert_close(answer, twice(batch), atol=1e-5, rtol=0)
    assert once.totals.updates == 4


class WritesInPlace(nn.Module):
    """A stage that changes its input before the first convolution."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(torch.linspace(0.5, 1.5, len(x)).view(-1, 1, 1, 1))  # another factor for each row: halves differ now
        answer: Tensor = self.stage(x)
        return answer


def test_halves_that_were_written_to_are_both_computed() -> None:
    def adapter() -> poem.Adapter:
        net: Any = make_net("gn", sharpness=10.0)
        net.layer4 = WritesInPlace(net.layer4)
        return poem.adapt(net, "poem", lr=0.02, rounds=1, fast=False, select=Everyone(), split="layer4")

    here, there = adapter(), adapter()
    branch_backward(there).undoubled = lambda x: None
    for adapted in (here, there):
        set_doubles(adapted, True)  # the check would find that such a model needs two passes
    for batch in stream("cpu", 3):
        assert torch.equal(here(batch), there(batch))
