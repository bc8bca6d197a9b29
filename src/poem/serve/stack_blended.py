"""`Blended` for a layer of many streams at once: the same arithmetic, with the streams as one more axis.

Mapping the part over streams (`torch.func.vmap`) gives the same and costs several times as much on the host, which at
some fifty layers is more than the network itself takes on a GPU. Tests compare it with the part of a stream alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from poem.parts.base import Memory
from poem.parts.stream_statistics import FORGET, LARGEST_JUMP, Blended, mixture


def blended_moments(
    part: Blended, x: Tensor, streams: int, own: tuple[Tensor, Tensor], memory: Memory, key: str
) -> tuple[Tensor, Tensor, Memory]:
    """Mean and variance (N, copies, C) of each stream's copies, and the new memory.

    Args:
        part: The statistics.
        x: (copies * b * N, C, ...), copies first, then the images of each stream in turn.
        streams: N.
        own: The source's mean and variance (C,).
        memory: The layer's, N in front.
        key: Under which it lies there.
    """
    held = {name.rpartition(".")[2]: value for name, value in memory.items()}
    images = held["images"].view(-1, 1, 1)
    mean, var, mean_error, var_error = _described(x.detach(), part.copies, streams)
    count = x.shape[0] // (part.copies * streams)
    several = images.new_full((), count)
    rate = part._rate(held["rates"], several, images)
    new = dict(zip(("mean", "var"), mixture(held["mean"], held["var"], mean, var, rate), strict=True))
    new["share"] = (1 - rate).square() * held["share"] + rate.square()
    first = images == 0
    for name, now, error in (("mean", mean, mean_error), ("var", var, var_error)):
        between = torch.where(first, error, held[f"{name}_moves"])
        floor = between if count == 1 else torch.maximum(between, error)
        jump = (now - held[f"last_{name}"]).square() / 2
        known = between + FORGET * (torch.minimum(jump, LARGEST_JUMP * floor) - between)
        between = torch.where(first, between, torch.where(floor > 0, known, jump))
        new |= {f"last_{name}": now, f"{name}_moves": between if count == 1 else torch.maximum(between, error)}
    new["images"] = held["images"] + count
    weight = held["weights"]
    if count < 2:
        weight = torch.where(first & (held["doubts"] > 0), 0, weight)
    named = {f"{key}.{name}": value for name, value in new.items()}
    chosen = part._mixtures(own, named | {f"{key}.doubts": held["doubts"]}, weight, key)
    return *chosen, named


def _described(x: Tensor, copies: int, streams: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean and variance (N, copies, C) of each stream's copies, and the squared standard error of each.

    One image has no spread: its errors are 0.
    """
    values = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    apart = values.unflatten(0, (copies, -1, streams))
    flat = apart.flatten(4) if x.dim() > 2 else apart[..., None]
    means = flat.mean(4)  # (copies, b, N, C), of each image
    squares = torch.linalg.vector_norm(flat, dim=4).square() / flat.shape[4]
    mean = means.mean(1, keepdim=True)
    spreads = (squares - 2 * mean * means + mean.square()).clamp(min=0)  # about the batch's mean
    var = spreads.mean(1, keepdim=True)
    if means.shape[1] == 1:
        none = mean.new_zeros(())
        return _front(mean), _front(var), none, none
    below = means.shape[1] - 1
    mean_error = (means - mean).square().mean(1, keepdim=True) / below
    return _front(mean), _front(var), _front(mean_error), _front((spreads - var).square().mean(1, keepdim=True) / below)


def _front(each: Tensor) -> Tensor:
    """(N, copies, C) of (copies, 1, N, C)."""
    return each[:, 0].transpose(0, 1)
