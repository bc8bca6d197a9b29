"""Images whose shapes are destroyed, and what that costs the prediction (PLPD). Paper: DeYO (Lee et al., ICLR 2024)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from poem.parts.base import Need, Outputs, Part
from poem.parts.fields import Count


@dataclass(frozen=True, repr=False)
class Patches(Part):
    """Cuts each image into `grid` x `grid` tiles and shuffles them, each image in its own way."""

    grid: Count = 4

    @property
    def needs(self) -> frozenset[Need]:
        """Images with height and width."""
        return frozenset({Need.PICTURES})

    def __call__(self, outputs: Outputs) -> Tensor:
        """Shuffled images; the permutations are drawn once per batch."""
        images, grid = outputs.batch.images, self.grid
        count, _, high, wide = images.shape
        order = outputs.batch.once(self, lambda rng: torch.rand(count, grid * grid, generator=rng).argsort(dim=1))
        fitted = _resize(images, high // grid * grid, wide // grid * grid)
        tiles = F.unfold(fitted, (fitted.shape[2] // grid, fitted.shape[3] // grid), stride=_tile(fitted, grid))
        index = order[:, None, :].expand(-1, tiles.shape[1], -1)
        shuffled = F.fold(tiles.gather(2, index), fitted.shape[2:], _tile(fitted, grid), stride=_tile(fitted, grid))
        return _resize(shuffled, high, wide)


@dataclass(frozen=True, repr=False)
class Pixels(Part):
    """Shuffles all pixels, in one way for the whole batch."""

    @property
    def needs(self) -> frozenset[Need]:
        """Images with height and width."""
        return frozenset({Need.PICTURES})

    def __call__(self, outputs: Outputs) -> Tensor:
        """Shuffled images."""
        images = outputs.batch.images
        places = images.shape[2] * images.shape[3]
        order = outputs.batch.once(self, lambda rng: torch.rand(places, generator=rng).argsort())
        return images.flatten(2)[:, :, order].view_as(images)


@dataclass(frozen=True, repr=False)
class Occlusion(Part):
    """Covers the middle of each image (half its height and width) with the image's mean colour."""

    @property
    def needs(self) -> frozenset[Need]:
        """Images with height and width."""
        return frozenset({Need.PICTURES})

    def __call__(self, outputs: Outputs) -> Tensor:
        """Images with a covered middle."""
        images = outputs.batch.images.clone()
        high, wide = images.shape[2:]
        images[:, :, high // 4 : high // 4 + high // 2, wide // 4 : wide // 4 + wide // 2] = images.mean(
            (2, 3), keepdim=True
        )
        return images


Destroy = Patches | Pixels | Occlusion


def plpd(outputs: Outputs, among: Tensor, destroy: Destroy) -> Tensor:
    """Pseudo-label probability difference (B,), meaningful inside `among`; computed once per forward pass."""
    if destroy not in outputs.cache:
        label = outputs.probs.argmax(1, keepdim=True)
        destroyed = outputs.forward(destroy(outputs), among=among).softmax(1)
        outputs.cache[destroy] = (outputs.probs.gather(1, label) - destroyed.gather(1, label))[:, 0]
    return outputs.cache[destroy]


def _tile(images: Tensor, grid: int) -> tuple[int, int]:
    """Height and width of a tile."""
    return images.shape[2] // grid, images.shape[3] // grid


def _resize(images: Tensor, high: int, wide: int) -> Tensor:
    """Bilinear, or the very images where the size already fits."""
    if images.shape[2:] == (high, wide):
        return images
    return F.interpolate(images, (high, wide), mode="bilinear", align_corners=False)
