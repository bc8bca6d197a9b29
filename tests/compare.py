"""What two runs gave, compared bit for bit, and all that a caller could see change in a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn


def differing(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> list[str]:
    """Names under which two sets of tensors are not bit for bit alike."""
    assert one.keys() == other.keys()
    return [name for name, tensor in one.items() if not torch.equal(tensor, other[name])]


def assert_same_state(one: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Two states are bit for bit the same: moving tensors, optimisers, memory, counts, random state."""
    assert differing(one["tensors"], other["tensors"]) == []
    assert torch.equal(one["rng"], other["rng"])
    plain = [{k: v for k, v in state.items() if k not in ("tensors", "rng")} for state in (one, other)]
    assert plain[0] == plain[1]


def assert_same_answers(some: list[Tensor], others: list[Tensor]) -> None:
    """Two runs answered bit for bit the same."""
    assert [torch.equal(a, b) for a, b in zip(some, others, strict=True)] == [True] * len(others)


def fingerprint(model: nn.Module) -> list[Any]:
    """All that a caller could see change: tensors, flags, hooks, forwards, attributes."""
    found: list[Any] = []
    for module in model.modules():
        found += [id(module), module.training, sorted(module.__dict__), len(module._forward_pre_hooks)]
        found += [len(module._forward_hooks), id(module.__dict__.get("forward"))]
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None:
                found += [id(tensor), tensor.data_ptr(), tensor.requires_grad, tensor.detach().cpu().numpy().tobytes()]
    return found


def assert_near(some: list[Tensor], others: list[Tensor], device: str) -> None:
    """To the bit on tapes, within rounding on a GPU."""
    for one, other in zip(some, others, strict=True):
        torch.testing.assert_close(one, other, atol=0 if device == "cpu" else 1e-5, rtol=0)
