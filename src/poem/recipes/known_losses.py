"""Where a published method was measured to lose: what `poem.adapt` says, once, when it is asked for by name.

The numbers are those of `results/auto/`: the largest loss to the model unadapted among the streams of all networks with
that kind of norm layer, at batches of 64, where it is over 5 points.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import nn

log = logging.getLogger("poem")

SORTED, LONG, NOISE, BLUR = "sorted by class", "of many shifts in a row", "of noisy images", "of blurred images"
FOG, AGAIN = "in fog", "of shifts that come again"
LOSSES: dict[str, dict[str, tuple[int, str]]] = {
    "bn": {"batch": (65, SORTED)},
    "tent": {"batch": (65, SORTED), "group": (51, AGAIN), "layer": (12, AGAIN)},
    "poem": {"batch": (65, SORTED), "group": (53, AGAIN), "layer": (18, AGAIN)},
    "sar": {"batch": (65, SORTED), "group": (8, "whose classes come in runs")},
    "deyo": {"batch": (65, SORTED), "group": (13, NOISE), "layer": (19, LONG)},
    "eata+poem": {"batch": (65, SORTED)},
    "deyo+poem": {"batch": (65, SORTED), "group": (22, BLUR), "layer": (19, LONG)},
    "roid": {"batch": (64, SORTED), "group": (6, FOG), "layer": (6, BLUR)},
}
"""Method, kind of norm layer: the largest loss in points, and on which stream."""
KINDS: tuple[tuple[str, type[nn.Module]], ...] = (
    ("batch", nn.modules.batchnorm._BatchNorm), ("group", nn.GroupNorm), ("layer", nn.LayerNorm),
)  # fmt: skip

_told: set[tuple[str, str]] = set()
_silent: ContextVar[bool] = ContextVar("silent", default=False)


def kind_of(model: nn.Module) -> str:
    """`batch`, `group` or `layer`, by the first of them that the network has; empty where it has none."""
    return next((name for name, kind in KINDS if any(isinstance(each, kind) for each in model.modules())), "")


def warn_of_loss(method: str, model: nn.Module) -> None:
    """Say once in a process what a method lost on networks with such norm layers; nothing where it lost little."""
    kind = kind_of(model)
    if _silent.get() or kind not in LOSSES.get(method, {}) or (method, kind) in _told:
        return
    _told.add((method, kind))
    points, where = LOSSES[method][kind]
    log.warning(
        "%s was measured to lose up to %d points on networks with %s norm, on streams %s (docs/when-not-to-adapt.md); "
        "poem.adapt(model) is auto, guarded; guard=True limits what %s loses", method, points, kind, where, method
    )  # fmt: skip


@contextmanager
def comparing() -> Iterator[None]:
    """No such warnings inside: who compares methods is about to see it."""
    token = _silent.set(True)
    try:
        yield
    finally:
        _silent.reset(token)
