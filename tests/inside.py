"""The inside of an adapter, for facts that nothing public shows: which passes were saved, captured or cast.

Tests of behaviour do without this file. Names of the engine stand here once.
"""

from __future__ import annotations

from torch import Tensor

import poem
from poem.accelerate.branch_backward import BranchBackward
from poem.accelerate.weight_casts import WeightCasts
from poem.engine.network import Network


def network(adapter: poem.Adapter) -> Network:
    """The patched twin of the model."""
    return adapter._network


def importance(adapter: poem.Adapter) -> Tensor:
    """EATA's importance of each adapted number on source data."""
    return adapter._state.prepared["minimise.second.importance"]


def moving(adapter: poem.Adapter) -> dict[str, Tensor]:
    """The flat tensors that move now, by group."""
    return dict(adapter._state.moving)


def doubles(adapter: poem.Adapter) -> bool | None:
    """Whether both heads run as one doubled batch; None before that was checked."""
    return adapter._network.doubles


def set_doubles(adapter: poem.Adapter, value: bool | None) -> None:
    """As if the check of the doubled batch had ended so."""
    adapter._network.doubles = value


def fail_checks(adapter: poem.Adapter) -> None:
    """As if every check that is made on a batch had failed."""
    adapter._network.doubles = adapter._acceleration.independent = adapter._acceleration.branch_backward.right = False


def captured_sizes(adapter: poem.Adapter) -> list[int]:
    """The batch size of every captured loop, the one used last at the end."""
    return [key[0][0] for key in adapter._captures._loops]


def capture_key(adapter: poem.Adapter) -> object:
    """What a captured loop depends on in the model."""
    return adapter._network.model_key()


def branch_backward(adapter: poem.Adapter) -> BranchBackward:
    """The branch's backward pass through its half of the doubled batch."""
    return adapter._acceleration.branch_backward


def weight_casts(adapter: poem.Adapter) -> WeightCasts:
    """Frozen weights in bfloat16."""
    assert adapter._acceleration.weight_casts is not None
    return adapter._acceleration.weight_casts


def without_prefix_cache(adapter: poem.Adapter) -> poem.Adapter:
    """The adapter, whose every layer runs at every pass from now on."""
    adapter._acceleration.prefix_cache._modules = []
    return adapter


def cached_layers(adapter: poem.Adapter) -> set[str]:
    """Names of the layers whose outputs are cached."""
    cached = set(adapter._acceleration.prefix_cache._modules or [])
    return {name for name, module in adapter._network.twin.root.named_modules() if module in cached}
