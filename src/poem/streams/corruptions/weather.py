"""Weather: snow, frost and fog."""

from __future__ import annotations

import torch
from torch import Tensor

from poem.streams.corruptions.filters import luma, motion_filter, zoom_centre
from poem.streams.corruptions.frost import textures
from poem.streams.corruptions.random_numbers import ImageRandom


def snow(
    levels: Tensor,
    rng: ImageRandom,
    mean: float,
    spread: float,
    zoom: float,
    least: float,
    radius: int,
    sigma: float,
    keep: float,
) -> Tensor:
    """Add flakes, the high values of zoomed noise smeared downwards, and whiten the image by 1 - `keep`."""
    height, width = levels.shape[-2:]
    flakes = zoom_centre((rng.normal(height, width) * spread + mean)[:, None], zoom)
    flakes = torch.where(flakes < least, 0, flakes).clamp_(0, 1).mul_(255)
    flakes = motion_filter(flakes, radius, sigma, rng.uniform() * 90 - 135).round_()[..., :height, :width]
    pale = torch.maximum(levels, luma(levels) * 1.5 + 127.5)
    return (keep * levels).add_(pale.mul_(1 - keep)).add_(flakes + flakes.flip(-2, -1))


def fog(levels: Tensor, rng: ImageRandom, thickness: float, decay: float) -> Tensor:
    """Add a plasma fractal, and scale so that the brightest value of the image keeps its level."""
    height, width = levels.shape[-2:]
    cloud = _plasma(rng, 1 << (max(height, width) - 1).bit_length(), decay)[:, None, :height, :width]
    brightest = levels.amax((1, 2, 3), keepdim=True)
    return (levels + cloud * (255 * thickness)).mul_(brightest / (brightest + 255 * thickness))


def _plasma(rng: ImageRandom, size: int, decay: float) -> Tensor:
    """Return heights (N, size, size) from 0 to 1 by the diamond-square algorithm on a torus."""
    chance = rng.uniform(size, size).mul_(2).sub_(1)
    heights = torch.zeros_like(chance)
    step, wobble = size, 100.0
    while step >= 2:
        half, rough = step // 2, wobble * wobble
        corner = heights[:, ::step, ::step]
        square = corner + corner.roll(-1, 1)
        square = square + square.roll(-1, 2)
        centre = square.div_(4) + rough * chance[:, half::step, half::step]
        above = centre + centre.roll(1, 1) + corner + corner.roll(-1, 2)
        beside = centre + centre.roll(1, 2) + corner + corner.roll(-1, 1)
        heights[:, half::step, half::step] = centre
        heights[:, ::step, half::step] = above.div_(4) + rough * chance[:, ::step, half::step]
        heights[:, half::step, ::step] = beside.div_(4) + rough * chance[:, half::step, ::step]
        step, wobble = half, wobble / decay
    heights -= heights.amin((1, 2), keepdim=True)
    return heights.div_(heights.amax((1, 2), keepdim=True).clamp_min(1e-12))


def frost(levels: Tensor, rng: ImageRandom, keep: float, cover: float, scale: float) -> Tensor:
    """Add a random crop of one of five frost textures, resized by `scale`."""
    height, width = levels.shape[-2:]
    layers = textures(scale, height, width)
    crops = []
    for which, down, right in rng.uniform(3).tolist():
        layer = layers[int(which * len(layers))]
        top, left = int(down * (layer.shape[-2] - height)), int(right * (layer.shape[-1] - width))
        crops.append(layer[:, top : top + height, left : left + width])
    ice = torch.stack(crops).to(levels.device, levels.dtype)
    return (keep * levels).add_((luma(ice) if levels.shape[1] == 1 else ice).mul_(cover))
