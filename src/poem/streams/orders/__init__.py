"""Orders: streams of indices, the same for every method, without pixels.

An order is two choices: which domains are visited when, and with which resets (`single`, `continual`, `gradual`, ...),
and how the images of one domain are arranged (`within=Shuffled()`, `Sorted()`, `Dirichlet(0.1)`, `LabelShift()`, ...).
Random numbers come from a generator keyed by (seed, scenario, corruption), never from the global ones.

    order = continual(seed=0)
    for segment in order.over(data.labels):
        if segment.reset: adapter.reset()
        for piece in segment.cut(64): ...   # piece.shift, piece.indices; the last one may be short
"""

from __future__ import annotations

from poem.streams.orders.scenarios import (
    SCENARIOS,
    Order,
    Segment,
    Visit,
    continual,
    correlated,
    forgetting,
    gradual,
    imbalanced,
    joined,
    mixed,
    one_by_one,
    recurring,
    scenario,
    single,
)  # fmt: skip
from poem.streams.orders.within_domain import (
    Dirichlet,
    InOrder,
    LabelShift,
    Shuffled,
    Sorted,
    Within,
    generator,
    label_shift,
)  # fmt: skip
from poem.streams.shift import CLEAN, CORRUPTIONS, EXTRA, Shift

__all__ = [
    "CLEAN", "CORRUPTIONS", "EXTRA", "SCENARIOS", "Dirichlet", "InOrder", "LabelShift", "Order", "Segment", "Shift",
    "Shuffled", "Sorted", "Visit", "Within", "continual", "correlated", "forgetting", "generator", "gradual",
    "imbalanced", "joined", "label_shift", "mixed", "one_by_one", "recurring", "scenario", "single",
]  # fmt: skip
