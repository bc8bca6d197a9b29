"""HOST+poem, HOST+poem-i, HOST+poem-ii and HOST*: a host with POEM's re-selection, with its branch, or repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from oracles.common import Outcome
from oracles.host import Forward, Host

Explore = Callable[[Host, Tensor, Forward, Tensor], tuple[list[Tensor], Forward]]
"""From the first forward pass and its selection to the updates made and the forward pass after the last one."""


def reselect(host: Host, x: Tensor, now: Forward, chosen: Tensor) -> tuple[list[Tensor], Forward]:
    """Select, update, run again; a second update if the set has changed and is not empty (+poem, +poem-i)."""
    updates: list[Tensor] = []
    for _ in range(2):
        if not chosen.any():
            break
        learnt = host.learn(now, chosen)
        if not learnt.any():
            break
        updates.append(learnt)
        now, previous = host.forward(x), chosen
        chosen = host.select(now)
        if torch.equal(chosen, previous):
            break
    return updates, now


def once(host: Host, x: Tensor, now: Forward, chosen: Tensor) -> tuple[list[Tensor], Forward]:
    """One update (+poem-ii)."""
    if not chosen.any():
        return [], now
    learnt = host.learn(now, chosen)
    return ([learnt], host.forward(x)) if learnt.any() else ([], now)


def repeat(host: Host, x: Tensor, now: Forward, chosen: Tensor) -> tuple[list[Tensor], Forward]:
    """Two updates on the set of the first forward pass (*)."""
    updates: list[Tensor] = []
    for _ in range(2):
        if not chosen.any():
            break
        learnt = host.learn(now, chosen)
        if not learnt.any():
            break
        updates.append(learnt)
        now = host.forward(x)
    return updates, now


def run(host: Host, explore: Explore, batches: list[Tensor]) -> Iterator[Outcome]:
    """Every batch is answered after its last update."""
    for x in batches:
        host.was_reset = False
        host.begin(x)
        now = host.forward(x)
        chosen = host.select(now)
        updates, now = explore(host, x, now, chosen)
        answer = host.answer(now).detach()
        host.end()
        yield Outcome(answer, chosen, updates, host.was_reset)
