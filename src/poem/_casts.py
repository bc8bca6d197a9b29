"""Frozen weights in the precision and layout that the network computes in, copied once instead of in every pass.

Under autocast a convolution or a linear layer casts its weights each time it runs. The copies are what it would make,
bit for bit; images and convolutions keep channels last, which is how tensor cores read them.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

Swap = tuple[nn.Module, str, Tensor]
CAST = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, nn.MultiheadAttention)  # layers whose weights autocast casts


class Casts:
    """Copies of a model's frozen weights in half precision. They follow the originals if those are written into."""

    def __init__(self, modules: Iterable[nn.Module], moving: set[int], dtype: torch.dtype) -> None:
        places = [
            (module, key, parameter)
            for module in modules
            if isinstance(module, CAST)
            for key, parameter in module._parameters.items()
            if parameter is not None and parameter.dtype == torch.float32
        ]
        self._places = [place for place in places if id(place[2]) not in moving]
        self._dtype = dtype
        self._seen: list[tuple[int, int]] = []
        self.swaps: list[Swap] = []

    def refresh(self) -> None:
        """Copy what changed since last time, into the same memory where the model is where it was."""
        now = [(own.data_ptr(), own._version) for _, _, own in self._places]
        if now == self._seen:
            return
        with torch.no_grad():
            for index, (module, key, own) in enumerate(self._places):
                if index == len(self.swaps):
                    self.swaps.append((module, key, _packed(own.detach().to(self._dtype))))
                elif now[index][0] != self._seen[index][0]:
                    self.swaps[index] = (module, key, _packed(own.detach().to(self._dtype)))
                elif now[index] != self._seen[index]:
                    self.swaps[index][2].copy_(own)
        self._seen = now


def packed(images: Tensor) -> Tensor:
    """Channels last, where there are images."""
    return images.contiguous(memory_format=torch.channels_last) if images.dim() == 4 else images


def _packed(weight: Tensor) -> Tensor:
    return packed(weight) if weight.dim() == 4 else weight.contiguous()
