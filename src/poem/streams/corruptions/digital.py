"""Light and digital processing: brightness, contrast, saturate, elastic transform, pixelate and JPEG."""

from __future__ import annotations

from importlib.util import find_spec

import numpy as np
import torch
from torch import Tensor

from poem.streams.corruptions.apply_pillow import apply_pillow
from poem.streams.corruptions.filters import gaussian, sample_bilinear
from poem.streams.corruptions.jpeg import jpeg
from poem.streams.corruptions.random_numbers import ImageRandom


def brightness(levels: Tensor, rng: ImageRandom, more: float) -> Tensor:
    """Raise the value of HSV; hue and saturation stay, so a colour is scaled, and black turns grey."""
    value = levels.amax(1, keepdim=True)
    raised = (value + 255 * more).clamp_(max=255)
    return torch.where(value > 0, levels * (raised / value.clamp_min(1e-6)), raised)


def contrast(levels: Tensor, rng: ImageRandom, keep: float) -> Tensor:
    """Scale the difference of every value to its channel's mean by `keep`."""
    means = levels.mean((2, 3), keepdim=True, dtype=torch.float64).float()
    return (levels - means).mul_(keep).add_(means)


def saturate(levels: Tensor, rng: ImageRandom, factor: float, more: float) -> Tensor:
    """Scale and raise the saturation of HSV; greys, whose hue is red by convention, turn red where it is raised."""
    if levels.shape[1] == 1:
        return levels
    value = levels.amax(1, keepdim=True)
    chroma = value - levels.amin(1, keepdim=True)
    before = chroma / value.clamp_min(1e-6)
    after = (before * factor).add_(more).clamp_(0, 1)
    coloured = value - (value - levels) * (after / before.clamp_min(1e-6))
    pale = value * (1 - after)
    return torch.where(chroma > 0, coloured, torch.cat([value, pale, pale], 1))


def pixelate(images: Tensor, rng: ImageRandom, share: float) -> Tensor:
    """Shrink each side to a share of itself by averaging, and enlarge again with square pixels."""
    height, width = images.shape[-2:]
    few_rows, few_columns = (max(int(size * share), 1) for size in (height, width))
    if images.device.type == "cpu" and find_spec("PIL") is not None:
        from PIL.Image import Resampling

        small, large = (few_columns, few_rows), (width, height)
        return apply_pillow(images, lambda one: one.resize(small, Resampling.BOX).resize(large, Resampling.NEAREST))
    return pixelate_torch(images, few_rows, few_columns)


def pixelate_torch(images: Tensor, few_rows: int, few_columns: int) -> Tensor:
    """Pixelate in torch, to the same bytes as Pillow: each pixel belongs to one run, levels are rounded twice."""
    small = _shrink(_shrink(images.float(), -1, few_columns), -2, few_rows)
    rows, columns = (  # a running sum, as in Pillow: its float error decides ties
        torch.from_numpy(np.cumsum([few / size * 0.5] + [few / size] * (size - 1)).astype(np.int64)).to(images.device)
        for size, few in zip(images.shape[-2:], (few_rows, few_columns), strict=True)
    )
    return small.index_select(-1, columns).index_select(-2, rows).to(torch.uint8)


def _shrink(levels: Tensor, axis: int, target: int) -> Tensor:
    """Average runs of pixels along an axis, rounded to integer levels."""
    size = levels.shape[axis]
    scale = size / target
    centre = (np.arange(target) + 0.5) * scale
    first = (centre - scale / 2 + 0.5).astype(np.int64).clip(0, size)
    last = (centre + scale / 2 + 0.5).astype(np.int64).clip(0, size)
    # A pixel whose middle lies on a border belongs to the run on its left.
    first += (first - centre + 0.5) / scale <= -0.5
    last -= (last - 1 - centre + 0.5) / scale > 0.5
    start, length = (torch.from_numpy(run).to(levels.device) for run in (first, last - first))
    total = levels.index_select(axis, start)
    shape = (-1, 1) if axis == -2 else (-1,)
    for step in range(1, int(length.max())):
        more = levels.index_select(axis, (start + step).clamp_(max=size - 1))
        total += more.mul_((length > step).to(levels.dtype).view(shape))
    return total.div_(length.to(levels.dtype).view(shape)).add_(0.5).floor_()


def jpeg_compression(images: Tensor, rng: ImageRandom, quality: int) -> Tensor:
    """Encode as JPEG at `quality` and decode."""
    return jpeg(images, quality)


def elastic_transform(levels: Tensor, rng: ImageRandom, alpha: float, sigma: float, shake: float) -> Tensor:
    """Move three corners of a square by up to `shake` pixels each way, then every pixel by smoothed noise.

    The noise is uniform in [-1, 1], blurred with `sigma` pixels (edges "reflect") and multiplied by `alpha` pixels.
    """
    count, _, height, width = levels.shape
    middle = torch.tensor([width // 2, height // 2], dtype=torch.float64)
    side = min(height, width) // 3
    square = middle + side * torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    moved = square + (rng.uniform(3, 2).cpu().double() * 2 - 1) * shake
    # The affine map that takes the moved corners back: (x, y, 1) of the output to (x, y) of the input.
    back = torch.linalg.solve(torch.cat([moved, torch.ones(count, 3, 1, dtype=torch.float64)], 2), square)
    back = back.to(levels.device)[..., None, None]
    y = torch.arange(height, dtype=torch.float64, device=levels.device)[:, None]
    x = torch.arange(width, dtype=torch.float64, device=levels.device)
    to_x, to_y = (back[:, 0, at] * x + back[:, 1, at] * y + back[:, 2, at] for at in (0, 1))
    turned = sample_bilinear(levels.double(), to_x, to_y, "mirror")
    if alpha == 0:
        return turned.float()
    noise = rng.uniform(2, height, width).mul_(2).sub_(1)
    shift = gaussian(noise, sigma, truncate=3.0, edge="reflect").double() * alpha
    return sample_bilinear(turned, x + shift[:, 0], y + shift[:, 1], "reflect").float()
