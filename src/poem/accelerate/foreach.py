"""Many tensors copied with a few launches."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def copy_each(to: Iterable[Tensor], source: Iterable[Tensor]) -> None:
    """Copy each tensor into the one at its place, of the same type and shape; all of one type at once."""
    kinds: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for mine, other in zip(to, source, strict=True):
        pair = kinds.setdefault(mine.dtype, ([], []))
        pair[0].append(mine)
        pair[1].append(other)
    for pair in kinds.values():
        torch._foreach_copy_(*pair, non_blocking=True)
