"""Adapters with visible updates on the toy nets, and the same update written out with torch's own autograd.

Where a calculation is done by hand it runs on the group-norm net, whose samples do not see each other, with autograd on
a copy of the net.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import Any

import torch
from nets import make_net
from torch import Generator, Tensor, nn
from toys import images

import poem
from poem.adapter import Adapter
from poem.parts import (
    Memory,
    Objective,
    Outputs,
    Select,
    Selected,
)

NETS = ("bn", "gn", "ln")
LR = {"bn": 0.05, "gn": 0.02, "ln": 0.002}
SHARPNESS = {"bn": 10.0, "gn": 6.0, "ln": 9.0}
E0 = 0.4 * math.log(10)


def net(kind: str = "gn") -> nn.Module:
    return make_net(kind, sharpness=SHARPNESS[kind]).double()


def stream(count: int = 36, size: int = 12) -> tuple[Tensor, ...]:
    return torch.split(images(count, seed=1).double(), size)


def adapted(kind: str, method: str | poem.Recipe, **changes: Any) -> Adapter:
    settings: dict[str, Any] = {"lr": LR[kind], "mean": (0, 0, 0), "std": (1, 1, 1), **changes}
    return poem.adapt(net(kind), method, guard=False, **settings)


def frozen(adapter: Adapter, batch: Tensor) -> Tensor:
    with adapter.frozen():
        return adapter(batch)


def tensors(adapter: Adapter) -> dict[str, Tensor]:
    found: dict[str, Tensor] = adapter.state_dict()["tensors"]
    return found


def memories(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """What parts remember, which a fresh adapter does not know before its first batch."""
    return {key: value for key, value in found.items() if key.startswith("memory/")}


def moved(adapter: Adapter) -> dict[str, Tensor]:
    """What may move, by name, with its present values."""
    return {k.removeprefix("moved/"): v for k, v in tensors(adapter).items() if k.startswith("moved/")}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert torch.equal(value, other[key]), key


def differs(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return any(not torch.equal(value, other[key]) for key, value in one.items())


def entropy(logits: Tensor) -> Tensor:
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1)


def with_batch_statistics(model: nn.Module) -> nn.Module:
    """A copy whose batch-norm layers have no running statistics and so use the batch's, in eval mode too."""
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.track_running_stats = False
            module.running_mean = module.running_var = None
    return model.eval()


class ByHand:
    """A copy of the net whose norm layers move by plain descent, as a straight-line program would."""

    def __init__(self, model: nn.Module, *, top: bool = True) -> None:
        self.model = copy.deepcopy(model).requires_grad_(False)
        norms = {
            name
            for name, m in self.model.named_modules()
            if isinstance(m, nn.GroupNorm | nn.LayerNorm | nn.BatchNorm2d)
        }
        self.named = {
            name: parameter.requires_grad_()
            for name, parameter in self.model.named_parameters()
            if name.rpartition(".")[0] in norms and (top or not name.startswith("layer4"))
        }

    def __call__(self, x: Tensor) -> Tensor:
        logits: Tensor = self.model(x)
        return logits

    def gradient(self, loss: Tensor) -> dict[str, Tensor]:
        return dict(zip(self.named, torch.autograd.grad(loss, list(self.named.values())), strict=True))

    def move(self, change: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, parameter in self.named.items():
                parameter.add_(change[name])

    def assert_equals(self, adapter: Adapter) -> None:
        found = {name: value for name, value in moved(adapter).items() if not name.startswith("branch.")}
        assert found.keys() == self.named.keys()
        for name, parameter in self.named.items():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-9, atol=1e-11)


def scaled(gradient: dict[str, Tensor], factor: float) -> dict[str, Tensor]:
    return {name: factor * value for name, value in gradient.items()}


@dataclass(frozen=True, repr=False)
class Bright(Select):
    """Selects images whose mean is above zero, so that a test decides; keeps every output it is shown."""

    seen: list[tuple[Outputs, Tensor]] = field(default_factory=list, compare=False)

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        mask = among & (outputs.batch.images.mean((1, 2, 3)) > 0)
        self.seen.append((outputs, among))
        return mask

    def __repr__(self) -> str:
        return "Bright()"


@dataclass(frozen=True, repr=False)
class Noting(Objective):
    """Entropy, and notes all that it is called with."""

    seen: list[Selected] = field(default_factory=list, compare=False)

    def __call__(self, selected: Selected) -> Tensor:
        self.seen.append(selected)
        return selected.mean(selected.outputs.entropy)

    def __repr__(self) -> str:
        return "Noting()"


def noisy(images: Tensor, rng: Generator) -> Tensor:
    return 0.5 * images + 0.5 * torch.rand(images.shape, generator=rng).to(images)


def eight_views(image: Tensor, rng: Generator) -> Tensor:
    return image * torch.linspace(0.3, 1, 8, dtype=image.dtype)[:, None, None, None]
