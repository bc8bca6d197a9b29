"""Do classes come in runs? Seen in predictions: do neighbours in the stream agree more than samples further apart?

A stream sorted by class, or one that stays with a few classes for a while, gives a number well above 1; a stream in
mixed order gives 1, whatever the network predicts: one that always answers the same class agrees with itself near and
far alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from poem.parts.base import Memory

NEAR, FAR, SMOOTH = 64, 512, 256
"""Images that are a sample's neighbours, that are further apart, and over which their agreement is averaged."""
RUNS, UNKNOWN_RUNS = 1.3, 1.5
"""From here on classes are taken to come in runs; and what is assumed before there is anything to compare with."""
SECOND = 4.0
"""How many times the excess over 1 that a second network finds counts, in `shared_runs`."""
HELD_RUNS = ("recent", "before", "near", "far")
"""What `moved_runs` holds: mean predictions of the last images and of more, and how far each agrees with the batch."""


def shared_runs(runs: Tensor) -> Tensor:
    """How far classes come in runs by two networks (2,): what the first finds, as far as the second finds some of it.

    A shift that makes the first answer one class from now on looks to it like a run of that class, until its answers
    are as far apart as `FAR`. A second network, that copes with the shift, sees the order as mixed as it was.
    """
    return torch.minimum(runs[0], 1 + SECOND * (runs[1] - 1))


def start_runs(probs: Tensor) -> Memory:
    """Before the first batch of predictions (..., B, C): none before it, no agreement."""
    zeros = torch.zeros_like(probs[..., 0, :])
    return dict(zip(HELD_RUNS, (zeros, zeros, zeros[..., 0], zeros[..., 0]), strict=True))


def moved_runs(held: Memory, probs: Tensor, seen: Tensor) -> tuple[Tensor, Memory]:
    """How much likelier neighbours agree than samples apart, with the batch (B, C) in it; and what to hold now.

    `seen` images came before. A short batch borrows the last images as neighbours. Predictions of several networks
    (N, B, C) are held side by side: the answer is then (N,).
    """
    count, recent, before = probs.shape[-2], held["recent"], held["before"]
    borrowed = max(0, NEAR - count) * (seen > 0)
    neighbours = probs.sum(-2, keepdim=True) - probs + borrowed * recent[..., None, :]
    others = neighbours / (count - 1 + borrowed).clamp(min=1)
    near, far = (probs * others).sum(-1).mean(-1), (probs * before[..., None, :]).sum(-1).mean(-1)
    step = torch.where(held["far"] > 0, min(1.0, count / SMOOTH), 1.0) * (seen > 0)
    new = {name: held[name] + step * (now - held[name]) for name, now in (("near", near), ("far", far))}
    runs = torch.where(new["far"] > 0, new["near"] / new["far"].clamp(min=1e-9), UNKNOWN_RUNS)
    for name, old, horizon in (("recent", recent, NEAR), ("before", before, FAR)):
        share = (count / (seen + count)).clamp(min=min(1.0, count / horizon))
        new[name] = old + share * (probs.mean(-2) - old)
    return runs, new
