"""Weather: snow, frost and fog."""

from __future__ import annotations

import torch
from torch import Tensor

from poem.streams.corruptions.filters import motion, zoom_into
from poem.streams.corruptions.frost import textures
from poem.streams.corruptions.random_numbers import Draws

_LUMA = (0.299, 0.587, 0.114)


def grey(images: Tensor) -> Tensor:
    """Return the luma (N, 1, H, W)."""
    if images.shape[1] == 1:
        return images
    red, green, blue = (images[:, at : at + 1] * part for at, part in enumerate(_LUMA))
    return red + green + blue


def snow(
    levels: Tensor,
    draws: Draws,
    mean: float,
    spread: float,
    zoom: float,
    least: float,
    radius: int,
    sigma: float,
    keep: float,
) -> Tensor:
    """Let it snow: flakes are the high values of zoomed noise, smeared downwards; the scene is whitened by 1 - keep."""
    height, width = levels.shape[-2:]
    flakes = zoom_into((draws.normal(height, width) * spread + mean)[:, None], zoom)
    flakes = torch.where(flakes < least, 0, flakes).clamp_(0, 1).mul_(255)
    flakes = motion(flakes, radius, sigma, draws.uniform() * 90 - 135).round_()[..., :height, :width]
    pale = torch.maximum(levels, grey(levels) * 1.5 + 127.5)
    return (keep * levels).add_(pale.mul_(1 - keep)).add_(flakes + flakes.flip(-2, -1))


def fog(levels: Tensor, draws: Draws, thickness: float, decay: float) -> Tensor:
    """Lay a plasma fractal over the image; the brightest value of the image stays the brightest."""
    height, width = levels.shape[-2:]
    cloud = _plasma(draws, 1 << (max(height, width) - 1).bit_length(), decay)[:, None, :height, :width]
    brightest = levels.amax((1, 2, 3), keepdim=True)
    return (levels + cloud * (255 * thickness)).mul_(brightest / (brightest + 255 * thickness))


def _plasma(draws: Draws, size: int, decay: float) -> Tensor:
    """Return heights (N, size, size) from 0 to 1 by the diamond-square algorithm on a torus."""
    chance = draws.uniform(size, size).mul_(2).sub_(1)
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


def frost(levels: Tensor, draws: Draws, keep: float, cover: float, scale: float) -> Tensor:
    """Put a crop of one of five frost textures, scaled by `scale`, on top."""
    height, width = levels.shape[-2:]
    layers = textures(scale, height, width)
    crops = []
    for which, down, right in draws.uniform(3).tolist():
        layer = layers[int(which * len(layers))]
        top, left = int(down * (layer.shape[-2] - height)), int(right * (layer.shape[-1] - width))
        crops.append(layer[:, top : top + height, left : left + width])
    ice = torch.stack(crops).to(levels.device, levels.dtype)
    return (keep * levels).add_((grey(ice) if levels.shape[1] == 1 else ice).mul_(cover))
