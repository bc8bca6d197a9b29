"""Frozen weights are cast to bfloat16 once, and follow the model's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from compare import assert_same_answers
from inside import network, weight_casts
from nets import make_net
from torch import Tensor, nn
from toys import stream

import poem
import poem.accelerate.capture
import poem.engine.loop


def test_half_precision_casts_frozen_weights_once_and_follows_them() -> None:
    net: Any = make_net("bn", sharpness=10.0)
    adapter = poem.adapt(net, "poem", lr=0.02, precision="bf16", fast=False)
    batches = stream("cpu", 2)
    adapter(batches[0])
    casts = weight_casts(adapter)
    copies = {id(swap[2]) for swap in casts.swaps}
    assert {name for _, name, _ in casts.swaps} == {"weight", "bias"}  # of the head; norm layers keep single precision
    assert all(swap[2].dtype == torch.bfloat16 for swap in casts.swaps)
    net.fc.weight.data.mul_(0.25)  # which leaves no trace in the tensor's version
    adapter.reset()
    fresh = poem.adapt(copy.deepcopy(net), "poem", lr=0.02, precision="bf16", fast=False)
    assert_same_answers([adapter(batch) for batch in batches], [fresh(batch) for batch in batches])
    assert {id(swap[2]) for swap in casts.swaps} == copies
    seen: list[torch.dtype] = []
    inner = net.conv1._conv_forward

    def watched(x: Tensor, weight: Tensor, bias: Any) -> Any:
        seen.append(weight.dtype)
        return inner(x, weight, bias)

    net.conv1._conv_forward = watched
    adapter(batches[0])
    assert set(seen) == {torch.bfloat16}


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: setattr(layer, "weight", nn.Parameter(torch.rand_like(layer.weight))),
        lambda layer: setattr(layer.weight, "data", layer.weight.data.t()),  # same place, same shape
    ],
    ids=["another weight", "another way to read it"],
)
def test_cast_weights_follow_the_layers_own(change: Any) -> None:
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                        nn.Linear(8, 8), nn.Linear(8, 5)).eval()  # fmt: skip
    adapter = poem.adapt(net, "bn", precision="bf16", fast=False)
    batch = stream("cpu", 1)[0]
    before = adapter(batch)
    change(net[4])
    fresh = poem.adapt(copy.deepcopy(net), "bn", precision="bf16", fast=False)
    assert torch.equal(adapter(batch), fresh(batch))
    assert not torch.equal(adapter(batch), before)


def test_unloading_releases_the_cast_weights() -> None:
    adapter = poem.adapt(make_net("bn"), "tent", precision="bf16")
    adapter(stream("cpu", 1)[0])
    casts = weight_casts(adapter)
    assert casts.swaps
    adapter.unload()
    assert not any((casts.swaps, casts._own, casts._copies))


def test_weights_that_move_are_not_cast() -> None:
    adapter = poem.adapt(make_net("ln"), "memo", precision="bf16", mean=(0, 0, 0), std=(1, 1, 1))
    network(adapter).autocast.note("cpu")
    assert weight_casts(adapter).swaps == []  # everything moves
