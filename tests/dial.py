"""A net of two numbers, and images made for it: small enough to count by hand.

The net answers `a + shift` for the first of two classes and 0 for the second, where `a` is what an image shows in its
middle. Entropy is below 0.4 ln 2 where the logit is beyond 2.46 on either side, below 0.5 ln 2 beyond 2.10.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Shift(nn.Module):
    """Adds its one number to the first class. Built like a norm layer, so that it may move."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.eps = 0.0

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight * x.new_tensor([1.0, 0.0])


class Dial(nn.Module):
    """Reads the middle of each image; the split lies between its two shifts."""

    def __init__(self) -> None:
        super().__init__()
        self.shallow = Shift()
        self.deep = Shift()

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.deep(self.shallow(x[:, :, 1, 1]))
        return logits


class Stubborn(Dial):
    """Insists on as many rows at the end as came in."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).view(len(x), 2)


def spots(*values: float) -> Tensor:
    """Images dark but for a middle of this value: covering the middle costs them most of their confidence."""
    x = torch.zeros(len(values), 2, 4, 4)
    x[:, 0, 1:3, 1:3] = torch.tensor(values)[:, None, None]
    return x


def plains(*values: float) -> Tensor:
    """Images of this one value all over: covering the middle changes nothing."""
    x = torch.zeros(len(values), 2, 4, 4)
    x[:, 0] = torch.tensor(values)[:, None, None]
    return x
