"""What a round of many streams computes: tensors with the streams in front, N of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from poem.engine.state import MANY, SMALL
from poem.parts.base import Memory


@dataclass
class Arrays:
    """What adapting changes, of N streams: every tensor has N in front."""

    moving: Memory
    steps: dict[str, Memory]
    memory: Memory


@dataclass
class Pass:
    """What one pass gave for every stream, with its graph."""

    logits: Tensor  # (N, b, C)
    heads: tuple[Tensor, ...]
    theta: Tensor  # (N, P), and the branch's: leaves of the graph
    branch: Tensor | None
    round: int
    record: Memory
    source: Tensor | None = None
    cache: dict[object, Tensor] = field(default_factory=dict)  # (N, b) each

    def plain(self) -> Pass:
        """Without the graph."""
        heads = tuple(each.detach() for each in self.heads)
        return Pass(self.logits.detach(), heads, self.theta, self.branch, self.round, self.record, self.source)


@dataclass
class Made:
    """One update of every stream that had one."""

    outputs: Pass
    mask: Tensor  # (N, b)
    loss: Tensor  # (N,)
    gradients: Memory
    applied: Tensor  # (N,) bool


@dataclass
class Round:
    """What a batch gave and left behind."""

    answer: Tensor  # (N, b, C)
    arrays: Arrays
    first: Pass
    selected: Tensor  # (N, b) bool: before any update
    newly_reliable: Tensor
    no_longer_reliable: Tensor
    entropy: tuple[Tensor, Tensor]  # (N, b) in the first pass and in the last
    loss: Tensor  # (N,) of the last update; NaN where there was none
    gradient: Tensor  # (N,)
    counts: dict[str, Tensor]  # (N,) each
    updates: list[Made]
    tried: list[Tensor]  # (N,) bool: whether a stream had this update


def chosen_rows(chosen: Tensor, new: Memory, old: Memory) -> Memory:
    """New tensors where a stream is chosen, else the old ones; many small ones are joined and chosen at once."""
    found: Memory = {}
    kinds: dict[torch.dtype, list[str]] = {}
    for key, value in new.items():
        if value.shape == old[key].shape and value.dtype == old[key].dtype and value.numel() <= len(chosen) * SMALL:
            kinds.setdefault(value.dtype, []).append(key)
    for keys in kinds.values():
        if len(keys) >= MANY:
            fresh, held = (torch.cat([_wide(each[key]) for key in keys], 1) for each in (new, old))
            joined = torch.where(chosen[:, None], fresh, held)
            pieces = joined.split([old[key][0].numel() for key in keys], 1)
            found |= {key: piece.view(old[key].shape) for key, piece in zip(keys, pieces, strict=True)}
    for key, value in new.items():
        if key not in found:
            rows = chosen.view(-1, *[1] * (old[key].dim() - 1))
            found[key] = torch.where(rows, value.detach(), old[key])
    return found


def _wide(tensor: Tensor) -> Tensor:
    """(N, all numbers of a stream)."""
    return tensor.detach().flatten(1) if tensor.dim() > 1 else tensor.detach()[:, None]
