"""Spatter: water drops with a bright rim, or mud.

Water follows the generators' chain of OpenCV steps (Canny edges, distance to them, histogram equalisation, emboss), in
torch; the distance is the exact one, where OpenCV's five-by-five mask is up to two percent off.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from poem.streams.corruptions.filters import FLOOR_EPSILON, correlate, gaussian, luma
from poem.streams.corruptions.random_numbers import ImageRandom

_WATER = (175.0, 238.0, 238.0)
_MUD = (63.0, 42.0, 20.0)
_BOX = np.full((3, 3), 1 / 9)
_EMBOSS = np.array([[-2.0, -1, 0], [-1, 1, 1], [0, 1, 2]])
_MAX_DISTANCE = 20  # pixels


def spatter(
    levels: Tensor, rng: ImageRandom, mean: float, spread: float, sigma: float, least: float, last: float, mud: int
) -> Tensor:
    """Add drops of water (`last` is their strength) or of mud (`last` is the blur of their rim)."""
    height, width = levels.shape[-2:]
    liquid = gaussian((rng.normal(height, width) * spread + mean)[:, None], sigma)
    if mud:
        cover = gaussian((liquid > least).to(levels.dtype), last)
        cover = torch.where(cover < 0.8, 0, cover)
        return levels * (1 - cover) + cover * _colour(levels, _MUD)
    drops = torch.where(liquid < least, 0, liquid * 255).clamp_(0, 255).floor_()
    relief = _relief(drops) * drops
    # An image without a drop stays as it is; the generators divide by zero there.
    relief = relief / relief.amax((1, 2, 3), keepdim=True).clamp_min(1e-12)
    return levels + relief.mul_(last) * _colour(levels, _WATER)


def _colour(levels: Tensor, rgb: tuple[float, float, float]) -> Tensor:
    colour = levels.new_tensor(rgb)[None, :, None, None]
    return luma(colour) if levels.shape[1] == 1 else colour


def _relief(drops: Tensor) -> Tensor:
    """Return the bright rims of drops: the embossed, equalised distance to their edges, in levels 0..255."""
    far = correlate(_distance(_edges(drops)), _BOX, "mirror").add_(FLOOR_EPSILON).floor_()
    embossed = correlate(_equalised(far), _EMBOSS, "mirror").clamp_(0, 255)
    return correlate(embossed, _BOX, "mirror").round_()


def _edges(levels: Tensor, low: int = 50, high: int = 150) -> Tensor:
    """Return Canny's edges as booleans: thin ridges of the gradient, strong or joined to a strong one."""
    kernel = np.array([[-1.0, 0, 1], [-2, 0, 2], [-1, 0, 1]])
    right, down = correlate(levels, kernel, "nearest"), correlate(levels, kernel.T, "nearest")
    steep = right.abs() + down.abs()
    around = F.pad(steep, (1, 1, 1, 1))

    def at(y: int, x: int) -> Tensor:
        return around[..., 1 + y : 1 + y + levels.shape[-2], 1 + x : 1 + x + levels.shape[-1]]

    flat = down.abs() * 32768 < right.abs() * 13573  # below 22.5 degrees
    tall = down.abs() * 32768 > right.abs() * (13573 + 65536)  # above 67.5
    slash = (right < 0) != (down < 0)
    ridge = torch.where(
        flat,
        (steep > at(0, -1)) & (steep >= at(0, 1)),
        torch.where(
            tall,
            (steep > at(-1, 0)) & (steep >= at(1, 0)),
            torch.where(
                slash,
                (steep > at(-1, 1)) & (steep > at(1, -1)),
                (steep > at(-1, -1)) & (steep > at(1, 1)),
            ),
        ),
    )
    weak = ridge & (steep > low)
    strong = weak & (steep > high)
    while True:
        grown = _dilate(_dilate(strong, -1), -2) & weak
        if bool((grown == strong).all()):
            return strong
        strong = grown


def _dilate(mask: Tensor, axis: int) -> Tensor:
    """Return the mask dilated by one pixel along an axis."""
    size = mask.shape[axis]
    out = mask.clone()
    out.narrow(axis, 1, size - 1).logical_or_(mask.narrow(axis, 0, size - 1))
    out.narrow(axis, 0, size - 1).logical_or_(mask.narrow(axis, 1, size - 1))
    return out


def _distance(edges: Tensor) -> Tensor:
    """Return the Euclidean distance to the nearest edge, at most 20 pixels."""
    height, width = edges.shape[-2:]
    line = torch.arange(height, device=edges.device, dtype=torch.float32)[:, None]
    above = torch.where(edges, line, -1e3).cummax(-2).values
    below = -torch.where(edges, line, 1e4).flip(-2).neg().cummax(-2).values.flip(-2)
    straight = torch.minimum(line - above, below - line).clamp_(max=_MAX_DISTANCE).square_()
    padded = F.pad(straight, (_MAX_DISTANCE, _MAX_DISTANCE), value=float(_MAX_DISTANCE**2))
    best = straight.clone()
    for step in range(1, _MAX_DISTANCE):
        sides = torch.minimum(
            padded[..., _MAX_DISTANCE - step :][..., :width], padded[..., _MAX_DISTANCE + step :][..., :width]
        )
        torch.minimum(best, sides.add_(step * step), out=best)
    return best.clamp_(max=_MAX_DISTANCE**2).sqrt_()


def _equalised(levels: Tensor) -> Tensor:
    """Equalise the histogram of integer levels: the darkest becomes 0, the rest their rank in 255 steps."""
    flat = levels.flatten(1).long()
    offsets = 256 * torch.arange(len(flat), device=flat.device)[:, None]
    counts = torch.bincount((flat + offsets).flatten(), minlength=256 * len(flat)).view(-1, 256)
    darkest = counts.gather(1, flat.amin(1, keepdim=True))
    rest = flat.shape[1] - darkest
    table = ((counts.cumsum(1) - darkest).double() * 255 / rest.clamp_min(1)).round_().clamp_(0, 255)
    return torch.where(rest > 0, table.gather(1, flat), flat.to(table)).view(levels.shape).to(levels)
