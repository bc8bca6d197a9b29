"""Cells that are measured in a second, and bases of the tests' own networks."""

from __future__ import annotations

from typing import Any

import pytest
from nets import make_net

from poem import zoo
from poem.bench.cell import Cell
from poem.zoo import nets

NOISE, FOG = "gaussian_noise", "fog"


def cell(method: str = "poem", **settings: Any) -> Cell:
    given = {"corruptions": (NOISE,), "n": 96, "batch_size": 32, "preset": "cifar", "lr": 0.005, **settings}
    return Cell(**{"base": "digits-bn", "data": "digits-test", "method": method, **given})


def add_base(patch: pytest.MonkeyPatch, name: str, *, classes: int = 10, side: int = 32, kind: str = "bn") -> None:
    """A base of the tests' own networks, sharp enough that entropies lie on both sides of the thresholds."""
    patch.setitem(nets.NETS, name, lambda: make_net(kind, classes=classes, sharpness=10.0))
    new = zoo.Base(
        name=name, kind="own", arch=name, tag=name, file=f"{name}.safetensors", mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0), resize=side, crop=side, classes=classes,
    )  # fmt: skip
    patch.setitem(zoo.catalog._BASES, name, new)
