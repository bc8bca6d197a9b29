"""Filters and samplers that the corruptions share: float32 grey levels (N, C, H, W), each image on its own.

Sums are taken tap by tap in a fixed order, each product and sum rounded separately, so that an image's bits do not
depend on the batch; where a library chooses the order (matrix products) they are taken in float64. Edges are named as
in scipy: "nearest" a|abc|c, "reflect" cba|abc|cba, "mirror" cb|abc|ba.
"""

from __future__ import annotations

import math
import warnings
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[np.float64]
_PADDING = {"nearest": "replicate", "mirror": "reflect"}
LUMA = (0.299, 0.587, 0.114)  # weights of red, green and blue
FLOOR_EPSILON = 1e-3  # of a grey level, added before the floor so that float error cannot lower an integer


def floor_levels(levels: Tensor) -> Tensor:
    """Return levels rounded down to integers from 0 to 255, as the generators do; still floats."""
    return levels.add(FLOOR_EPSILON).clamp_(0, 255).floor_()


def luma(images: Tensor) -> Tensor:
    """Return the luma (N, 1, H, W) of colour images; grey ones as they are."""
    if images.shape[1] == 1:
        return images
    red, green, blue = (images[:, at : at + 1] * weight for at, weight in enumerate(LUMA))
    return red + green + blue


def edge_index(index: NDArray[np.int64], size: int, edge: str) -> NDArray[np.int64]:
    """Return the pixel that an index outside the image reads."""
    if edge == "nearest" or size == 1:
        return index.clip(0, size - 1)
    period = 2 * size if edge == "reflect" else 2 * size - 2
    index = index % period
    return np.where(index < size, index, (period - 1 if edge == "reflect" else period) - index)


def gaussian_taps(sigma: float, truncate: float) -> Array:
    """Return the normalised Gaussian taps that scipy cuts off at `truncate` standard deviations."""
    radius = int(truncate * sigma + 0.5)
    taps = np.exp(-0.5 * (np.arange(-radius, radius + 1) / max(sigma, 1e-12)) ** 2)
    return np.asarray(taps / taps.sum())


@lru_cache(maxsize=64)
def _gauss_matrix(size: int, sigma: float, truncate: float, edge: str) -> Tensor:
    """Return the Gaussian filter of a line of pixels as a matrix, edges included."""
    taps = gaussian_taps(sigma, truncate)
    matrix = np.zeros((size, size))
    at = np.arange(size)
    for offset, weight in zip(range(-(len(taps) // 2), len(taps) // 2 + 1), taps, strict=True):
        np.add.at(matrix, (at, edge_index(at + offset, size, edge)), weight)
    return torch.from_numpy(matrix)


def gaussian(levels: Tensor, sigma: float, *, truncate: float = 4.0, edge: str = "nearest") -> Tensor:
    """Blur with a Gaussian of `sigma` pixels: tap by tap, or as a matrix product where the kernel is long."""
    if sigma <= 1e-15:
        return levels
    if edge == "nearest" and min(levels.shape[-2:]) > 32:
        taps = gaussian_taps(sigma, truncate).tolist()
        return _filter_axis(_filter_axis(levels, taps, -2), taps, -1)
    rows, columns = (_gauss_matrix(size, sigma, truncate, edge).to(levels.device) for size in levels.shape[-2:])
    return (rows @ levels.double() @ columns.T).float()


def _filter_axis(levels: Tensor, taps: list[float], axis: int) -> Tensor:
    """Filter along an axis with an odd, symmetric kernel, edges "nearest"."""
    radius, size = len(taps) // 2, levels.shape[axis]
    if radius == 0:
        return levels
    padded = F.pad(levels, (0, 0, radius, radius) if axis == -2 else (radius, radius, 0, 0), mode="replicate")
    out = levels * taps[radius]
    for offset in range(1, radius + 1):
        pair = padded.narrow(axis, radius - offset, size) + padded.narrow(axis, radius + offset, size)
        out += pair.mul_(taps[radius + offset])
    return out


def correlate(levels: Tensor, kernel: Array, edge: str) -> Tensor:
    """Correlate every channel with a kernel of a few taps."""
    high, wide = (size // 2 for size in kernel.shape)
    padded = F.pad(levels, (wide, wide, high, high), mode=_PADDING[edge])
    out = torch.zeros_like(levels)
    for (y, x), weight in np.ndenumerate(kernel):
        if weight:
            out += padded[..., y : y + levels.shape[-2], x : x + levels.shape[-1]] * float(weight)
    return out


def disk_sum(levels: Tensor, radius: float, margin: int) -> Tensor:
    """Add up the levels within `radius` pixels, edges "mirror", for the image and `margin` pixels around it.

    The cumulative sum along a row is exact for integer levels; a row of the disk is a difference of two sums.
    """
    reach = int(radius)
    around = reach + margin
    rows, columns = (
        torch.from_numpy(edge_index(np.arange(-around, size + around), size, "mirror")).to(levels.device)
        for size in levels.shape[-2:]
    )
    padded = levels.index_select(-2, rows).index_select(-1, columns)
    running = F.pad(padded, (1, 0)).cumsum(-1)
    height, width = (size + 2 * margin for size in levels.shape[-2:])
    out = levels.new_zeros(*levels.shape[:2], height, width)
    for half in range(reach + 1):  # rows of the disk of one length go together
        rows_of = [y for y in range(-reach, reach + 1) if math.isqrt(int(radius**2 - y * y)) == half]
        if rows_of:
            strip = running.narrow(-2, reach + rows_of[0], height)
            strip = strip.clone() if len(rows_of) > 1 else strip
            for y in rows_of[1:]:
                strip += running.narrow(-2, reach + y, height)
            out += strip.narrow(-1, reach + half + 1, width)
            out -= strip.narrow(-1, reach - half, width)
    return out


def zoom_weights(size: int, zoom: float) -> tuple[NDArray[np.int64], Array]:
    """Return the bilinear weights of a line that is cropped about its middle and zoomed to `size` pixels or a few more.

    For each pixel: the first of the two source pixels, and the weight of the second. End points map to end points.
    """
    crop = math.ceil(size / zoom)
    out = max(round(crop * zoom), size)
    place = np.arange(out) * ((crop - 1) / max(out - 1, 1))
    first = np.floor(place).astype(np.int64).clip(0, max(crop - 2, 0))
    return first + (size - crop) // 2, place - first


def zoom_centre(levels: Tensor, zoom: float) -> Tensor:
    """Zoom into the middle, bilinear; the result may be a pixel larger than the images."""
    if zoom == 1:
        return levels
    for axis, size in ((-2, levels.shape[-2]), (-1, levels.shape[-1])):
        first, share = (torch.from_numpy(part).to(levels.device) for part in zoom_weights(size, zoom))
        near, far = levels.index_select(axis, first), levels.index_select(axis, (first + 1).clamp_(max=size - 1))
        levels = near + (far - near) * share.float().view((-1, 1) if axis == -2 else (-1,))
    return levels


@lru_cache(maxsize=16)
def zoom_matrix(height: int, width: int, zooms: tuple[float, ...]) -> Tensor:
    """Return the sum of all zooms as one sparse matrix over the flattened pixels."""
    keys, weights = [], []
    for zoom in zooms:
        (y, down), (x, right) = (
            (at[:size], by[:size]) for size in (height, width) for at, by in [zoom_weights(size, zoom)]
        )
        for rows, by_row in ((y, 1 - down), (np.minimum(y + 1, height - 1), down)):
            for columns, by_column in ((x, 1 - right), (np.minimum(x + 1, width - 1), right)):
                target = np.arange(height * width).reshape(height, width) * (height * width)
                keys.append((target + rows[:, None] * width + columns).ravel())
                weights.append((by_row[:, None] * by_column).ravel())
    unique, inverse = np.unique(np.concatenate(keys), return_inverse=True)
    values = np.bincount(inverse, np.concatenate(weights))
    kept = values > 0
    unique, values = unique[kept], values[kept]
    counts = np.bincount(unique // (height * width), minlength=height * width)
    starts = np.concatenate([[0], counts.cumsum()])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls its sparse matrices a beta
        return torch.sparse_csr_tensor(
            torch.from_numpy(starts),
            torch.from_numpy(unique % (height * width)),
            torch.from_numpy(values),
            (height * width, height * width),
            check_invariants=False,
        )


def motion_filter(levels: Tensor, radius: int, sigma: float, angle: Tensor) -> Tensor:
    """Smear each image along its own angle (N,) in degrees: half a Gaussian on integer pixel steps, edges "nearest".

    As imagecorruptions defines it, in place of ImageMagick's motion blur.
    """
    height, width = levels.shape[-2:]
    length = 2 * radius + 1
    weights = torch.exp(-(torch.arange(length, dtype=torch.float64) ** 2) / (2 * sigma**2))[:, None]
    steps = torch.arange(length, dtype=torch.float64)[:, None]
    turn = torch.deg2rad(angle.cpu().double())
    down, right = (-(steps * part - 0.5).ceil().long() for part in (turn.sin(), turn.cos()))
    inside = ((down.abs() < height) & (right.abs() < width)).long().cumprod(0)
    share = (weights / weights.sum() * inside).float()
    padded = F.pad(levels, (length,) * 4, mode="replicate")
    if levels.device.type == "cpu" and height * width > 128 * 128:
        out = torch.zeros_like(levels)
        for at in range(len(levels)):
            for y, x, part in zip(down[:, at].tolist(), right[:, at].tolist(), share[:, at].tolist(), strict=True):
                out[at] += padded[at, :, length - y : length - y + height, length - x : length - x + width] * part
        return out
    # The same sums for all images at once, each reading at its own offset.
    stride = width + 2 * length
    places = torch.arange(length, length + height)[:, None] * stride + torch.arange(length, length + width)
    places = places.flatten().to(levels.device)
    offsets, share = ((down * stride + right).to(levels.device), share.to(levels.device))
    flat, out = padded.flatten(-2), torch.zeros_like(levels).flatten(-2)
    for step in range(length):
        index = (places - offsets[step, :, None])[:, None].expand(-1, levels.shape[1], -1)
        out += flat.gather(-1, index).mul_(share[step, :, None, None])
    return out.view_as(levels)


def sample_bilinear(images: Tensor, x: Tensor, y: Tensor, edge: str) -> Tensor:
    """Read bilinearly at pixel coordinates (N, H, W); edges "mirror" or "reflect"."""
    height, width = images.shape[-2:]
    if edge == "mirror":
        grid = torch.stack([2 * x / max(width - 1, 1) - 1, 2 * y / max(height - 1, 1) - 1], -1)
    else:
        grid = torch.stack([(2 * x + 1) / width - 1, (2 * y + 1) / height - 1], -1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=edge == "mirror")
