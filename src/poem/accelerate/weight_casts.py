"""Frozen weights in the precision and layout that the network computes in, copied once per call instead of per pass.

Under autocast a convolution or a linear layer casts its weights each time it runs. The copies are what it would make,
bit for bit; images and convolutions keep channels last, which is how tensor cores read them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from poem.engine.parameter_groups import Swap, memory_places

CAST = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.MultiheadAttention)  # layers whose weights autocast casts


class WeightCasts:
    """Copies of a model's frozen weights in half precision, at addresses that stay for as long as we do."""

    def __init__(self, modules: Iterable[nn.Module], moving: set[int], dtype: torch.dtype) -> None:
        places = [
            (module, key)
            for module in modules
            if isinstance(module, CAST)
            for key, parameter in module._parameters.items()
            if parameter is not None and parameter.dtype == torch.float32 and id(parameter) not in moving
        ]
        self._places, self._dtype = places, dtype
        self._copies: dict[tuple[int, torch.device, torch.Size], Tensor] = {}
        self._own: list[Tensor] = []
        self._where: list[Any] = []
        self.swaps: list[Swap] = []

    def refresh(self) -> None:
        """Copy the weights as they are now. Nothing less will do: who writes through `.data` leaves no trace."""
        weights = [module._parameters.get(key) for module, key in self._places]
        where = memory_places(weights)
        if where != self._where:
            self._find(weights)
            self._where = where
        self.copy()

    def copy(self) -> None:
        """Copy the weights that were there when `refresh` was called last; a CUDA graph can hold it."""
        if self._own:
            with torch.no_grad():
                torch._foreach_copy_([copy for _, _, copy in self.swaps], self._own)

    def forget(self) -> None:
        """Let go of weights and copies."""
        self.swaps, self._own, self._where = [], [], []
        self._copies.clear()

    def _find(self, weights: list[nn.Parameter | None]) -> None:
        """The weights to copy, and where to; what is held here keeps its address from being used again."""
        self.swaps, self._own = [], []
        for index, ((module, key), weight) in enumerate(zip(self._places, weights, strict=True)):
            if weight is None or weight.dtype != torch.float32 or weight.layout != torch.strided:
                continue
            place = index, weight.device, weight.shape
            if place not in self._copies:
                self._copies[place] = channels_last(torch.empty_like(weight, dtype=self._dtype, requires_grad=False))
            self.swaps.append((module, key, self._copies[place]))
            self._own.append(weight.detach())


def channels_last(images: Tensor) -> Tensor:
    """Channels last, where there are images."""
    return images.contiguous(memory_format=torch.channels_last) if images.dim() == 4 else images
