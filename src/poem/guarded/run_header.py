"""The first line of an audit: what a replay must find the same, and where the run is made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from poem.adapter import Adapter
from poem.guarded.alarms import ShiftAlarm
from poem.guarded.audit import tensor_hash
from poem.guarded.settings import GuardSettings, stated
from poem.recipes.text import written


def run_header(
    adapter: Adapter, settings: GuardSettings, shift: ShiftAlarm, about: Mapping[str, Any]
) -> dict[str, Any]:
    """The header of a run; `shift` is the alarm before the first batch, `about` what the user adds."""
    state, given = adapter.state_dict(), adapter.settings
    reference = tensor_hash(torch.tensor(shift.ranks.values)) if shift.given else None
    return {
        "method": adapter.name, **({"name": settings.name} if settings.name else {}),
        "recipe": written(adapter.recipe), "weights": state["source"],
        "mean": state["mean"], "std": state["std"], "mask": state["mask"], "prepared": state["prepared"],
        "reference": reference, **{name: given[name] for name in ("batch_size", "seed", "precision", "split")},
        "guard": stated(settings), "torch": torch.__version__,
        "device": next(adapter.model.parameters()).device.type, "threads": torch.get_num_threads(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        **({"run": dict(about)} if about else {}),
    }  # fmt: skip
