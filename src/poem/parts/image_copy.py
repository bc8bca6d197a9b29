"""A copy of the images, mirrored, moved or smoothed, that a network answers for as well."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from torch import Tensor

from poem.parts.base import Part
from poem.parts.fields import NotNegative, Range

MoveShare = Annotated[float, Range(at_least=-0.5, at_most=0.5, hint="a share of the image's width and height")]


@dataclass(frozen=True, repr=False)
class ImageCopy(Part):
    """Each image mirrored, then moved down to the right, then smoothed; by default as it is.

    `smooth` is the width of a Gaussian filter in pixels for images of 32 pixels; for a shorter side `s` it is
    `smooth * (s / 32) ** 0.4`. `move` is a share of each side, one pixel at least; the edge is repeated. What is no
    batch of images stays as it is.

    Paper: none.
    """

    smooth: NotNegative = 0.0
    move: MoveShare = 0.0
    mirrored: bool = False

    def __call__(self, images: Tensor) -> Tensor:
        """The copy of images (B, C, H, W)."""
        if images.dim() != 4 or min(images.shape[2:]) < 2:
            return images
        if self.mirrored:
            images = images.flip(-1)
        if self.move:
            images = moved(images, self.move)
        return smoothed(images, self.smooth * (min(images.shape[2:]) / 32) ** 0.4) if self.smooth else images


def moved(images: Tensor, share: float) -> Tensor:
    """Images moved down to the right by a share of their height and width, up to the left where it is negative."""
    down, right = (int(math.copysign(max(1, round(abs(share) * side)), share)) for side in images.shape[2:])
    edges = (max(right, 0), max(-right, 0), max(down, 0), max(-down, 0))
    height, width = images.shape[2:]
    framed = F.pad(images, edges, mode="replicate")
    return framed[..., max(-down, 0) : max(-down, 0) + height, max(-right, 0) : max(-right, 0) + width]


def smoothed(images: Tensor, sigma: float) -> Tensor:
    """Images after a Gaussian filter of so many pixels, mirrored at the edges, cut off at three sigma."""
    radius = min(max(1, math.ceil(3 * sigma)), min(images.shape[-2:]) - 1)
    at = torch.arange(-radius, radius + 1, device=images.device, dtype=images.dtype)
    kernel = (-0.5 * (at / sigma).square()).exp()
    kernel, channels = kernel / kernel.sum(), images.shape[1]
    filtered = F.pad(images, (radius, radius, radius, radius), mode="reflect")
    for shape in ((1, 1, 1, -1), (1, 1, -1, 1)):
        filtered = F.conv2d(filtered, kernel.view(shape).expand(channels, *[-1] * 3), groups=channels)
    return filtered
