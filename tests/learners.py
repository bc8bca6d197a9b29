"""Adapters on sharp nets whose updates show, and their state as plain numbers to compare."""

from __future__ import annotations

from typing import Any

import toys
from nets import make_net
from torch import Tensor, nn

import poem
from poem.parts import EntropyBelow, NotRedundant

UNIT: dict[str, Any] = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
SHARPNESS = {"bn": 10.0, "gn": 6.0, "ln": 9.0}
LR = {"bn": 0.05, "gn": 0.02, "ln": 0.002}
LOOSE: dict[str, Any] = {"select": EntropyBelow(0.4) & NotRedundant(0.999)}
RICH: dict[str, Any] = {"lr": 0.02, "threshold": 0.6}
"""Settings under which filtered methods select and move on every toy net."""


def sharp(kind: str = "bn") -> nn.Module:
    """A random net that is sure of some images and unsure of others."""
    return make_net(kind, sharpness=SHARPNESS[kind])


def learner(kind: str = "bn", method: str = "tent", net: nn.Module | None = None, **changes: Any) -> poem.Adapter:
    """An adapter whose updates show."""
    return poem.adapt(sharp(kind) if net is None else net, method, guard=False, **{"lr": LR[kind], **changes})


def batch(count: int = 8, seed: int = 1) -> Tensor:
    return toys.images(count, seed=seed)


def snapshot(adapter: poem.Adapter) -> tuple[Any, ...]:
    """State and counts, to compare bit for bit."""
    state = adapter.state_dict()
    tensors = {name: tensor.tolist() for name, tensor in state.pop("tensors").items()}
    return {**state, "rng": state["rng"].tolist()}, tensors, adapter.totals


def begun(method: str = "eta", kind: str = "bn", **changes: Any) -> poem.Adapter:
    """An adapter after an update."""
    adapter = learner(kind, method, **(changes or (LOOSE if method == "eta" else {})))
    adapter(batch())
    assert adapter.totals.taught > 0
    return adapter
