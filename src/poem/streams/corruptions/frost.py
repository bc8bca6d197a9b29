"""Frost textures: the generators' photographs where the package `imagecorruptions` is installed, else drawn by code.

The photographs may not be redistributed; statistics of them are part of the package (`STATISTICS`). A drawn texture
consists of needle-shaped crystals and has a photograph's quantiles in each channel and its power spectrum.
`frost_source` says which of the two is in use. Results differ between the two.
"""

from __future__ import annotations

import math
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from poem.streams.corruptions.filters import LUMA
from poem.streams.corruptions.random_numbers import ImageRandom
from poem.streams.shift import VERSIONS

Field = NDArray[np.float64]

QUANTILES = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
"""Shares of the pixels at which `TextureStatistics.levels` gives the level."""
_CROP = 192  # pixels of a full-size texture that a crop shows: 224 at scale 1, 213 at 0.3, 160 at 0.2
_ROUNDS = 2  # spectrum and quantiles are matched in turn; a third round changes nothing that tests could see


class TextureStatistics(NamedTuple):
    """Statistics of a photograph; a pixel is weighted by the number of crops that contain it (see `_crop_weights`)."""

    size: tuple[int, int]
    tint: tuple[float, float, float]
    """Share of a second, smooth field in red, green and blue, for a photograph whose channels are less correlated."""
    levels: tuple[tuple[int, ...], ...]
    """Quantiles of red, green and blue at `QUANTILES`."""
    power: tuple[float, ...]
    """log10 of the mean power of luma in half octaves of frequency, the first up to 1/256 cycles per pixel."""


_WHITE = TextureStatistics(
    (315, 560),
    (0.0, 0.0, 0.0),
    (
        (107, 138, 160, 171, 187, 201, 212, 220, 225, 232, 239),
        (108, 140, 163, 175, 191, 206, 217, 225, 230, 237, 244),
        (113, 146, 171, 182, 200, 215, 227, 235, 239, 246, 250),
    ),
    (6.41, 5.37, 4.68, 4.54, 4.34, 4.12, 3.83, 3.76, 3.56, 3.23, 2.9, 2.67, 2.39, 2.01, 1.33),
)
STATISTICS = (
    TextureStatistics(
        (600, 900),
        (0.46, -0.1, -0.46),
        (
            (23, 30, 38, 44, 56, 72, 94, 116, 130, 154, 172),
            (111, 117, 123, 128, 136, 147, 159, 170, 177, 189, 204),
            (129, 135, 141, 145, 153, 164, 175, 184, 189, 200, 214),
        ),
        (6.45, 5.46, 5.01, 4.6, 4.23, 3.83, 3.41, 3.02, 2.76, 2.6, 2.47, 2.38, 2.24, 1.93, 1.35),
    ),
    _WHITE,
    _WHITE,  # the third photograph is the second, stored again
    TextureStatistics(
        (350, 527),
        (0.0, 0.0, 0.0),
        (
            (44, 71, 98, 110, 128, 145, 160, 175, 186, 214, 242),
            (58, 85, 112, 125, 143, 160, 175, 190, 201, 229, 255),
            (65, 95, 123, 136, 155, 173, 189, 205, 217, 246, 255),
        ),
        (6.47, 5.07, 4.52, 4.29, 4.38, 4.14, 3.94, 3.9, 3.63, 3.47, 3.29, 3.1, 2.86, 2.52, 1.89),
    ),
    TextureStatistics(
        (495, 660),
        (0.0, 0.0, 0.0),
        (
            (24, 34, 46, 55, 73, 97, 126, 153, 172, 208, 242),
            (35, 45, 57, 67, 85, 109, 137, 164, 182, 216, 247),
            (46, 57, 69, 79, 98, 121, 148, 175, 192, 223, 251),
        ),
        (6.8, 5.75, 5.37, 5.14, 5.15, 4.9, 4.65, 4.3, 4.02, 3.75, 3.46, 3.15, 2.87, 2.58, 2.34),
    ),
)
"""Statistics of the five photographs, as benchmarks/reference_corruptions.py measures them."""
_FILES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")  # a sixth is never drawn


def frost_source() -> str:
    """Return the source of the frost textures: "imagecorruptions" (photographs) or "generated-2" (drawn by code).

    The number is the version of the drawing; another version gives other images.
    """
    return f"generated-{VERSIONS['frost']}" if _photograph_folder() is None else "imagecorruptions"


@lru_cache(maxsize=1)
def _photograph_folder() -> Path | None:
    spec = find_spec("imagecorruptions")  # located, not imported: the package does not import any more
    if spec is None or spec.origin is None or find_spec("PIL") is None:
        return None
    folder = Path(spec.origin).parent / "frost"
    return folder if all((folder / name).is_file() for name in _FILES) else None


@lru_cache(maxsize=4)
def textures(scale: float, height: int, width: int) -> list[Tensor]:
    """Return five textures uint8 (3, h, w), scaled, and enlarged further where they would not cover the image."""
    folder = _photograph_folder()
    return [
        _enlarge_to_cover(layer, scale, height, width)
        for layer in (_drawn_textures() if folder is None else _photographs(folder))
    ]


def _enlarge_to_cover(layer: Tensor, scale: float, height: int, width: int) -> Tensor:
    factor = max(scale, (height + 1) / layer.shape[1], (width + 1) / layer.shape[2])
    if factor == 1:
        return layer
    size = [math.ceil(factor * side - 1e-9) for side in layer.shape[1:]]
    return F.interpolate(layer[None].double(), size=size, mode="bilinear", align_corners=False)[0].round().byte()


@lru_cache(maxsize=1)
def _photographs(folder: Path) -> list[Tensor]:
    import numpy as np
    from PIL import Image

    return [
        torch.from_numpy(np.array(Image.open(folder / name).convert("RGB"))).permute(2, 0, 1).contiguous()
        for name in _FILES
    ]


@lru_cache(maxsize=1)
def _drawn_textures() -> list[Tensor]:
    return [_draw_texture(index, statistics) for index, statistics in enumerate(STATISTICS)]


def _draw_texture(index: int, statistics: TextureStatistics) -> Tensor:
    """Draw a texture uint8 (3, H, W): crystals over a cloud, filtered to the power spectrum, mapped to the quantiles.

    Each of the two steps disturbs what the other has set, so they alternate, the quantiles last.
    """
    rng = ImageRandom([index], "frost texture", torch.device("cpu"))
    field = _crystals(rng, statistics.size) + 0.5 * _smooth_noise(rng, statistics.size)
    smooth = _smooth_noise(rng, statistics.size)
    weights, bands = _crop_weights(statistics.size), _bands(statistics.size, len(statistics.power))
    levels = np.array(statistics.levels, dtype=np.float64)
    for _ in range(_ROUNDS):
        gain = (np.array(statistics.power) - np.log10(_power(field, weights, bands))) / 2
        filtered = np.fft.rfft2(field) * 10 ** np.interp(bands, np.arange(len(gain)), gain)
        rank = _ranks(np.fft.irfft2(filtered, s=statistics.size), weights)
        field = np.interp(rank, QUANTILES, np.array(LUMA) @ levels)
    field = (field - field.mean()) / field.std()
    planes = [
        np.interp(_ranks(math.sqrt(1 - tint**2) * field + tint * smooth, weights) if tint else rank, QUANTILES, each)
        for tint, each in zip(statistics.tint, levels, strict=True)
    ]
    return torch.from_numpy(np.stack(planes).round().astype(np.uint8))


def _crystals(rng: ImageRandom, size: tuple[int, int]) -> Field:
    """Return overlapping crystals (H, W): long, narrow rhombs, each with a tone that slopes across it."""
    height, width = size
    ice = np.zeros(size)
    y, x = np.arange(height)[:, None], np.arange(width)
    for row in rng.uniform(6, height * width // 60)[0].double().T.tolist():
        down, right, turn, tone = row[0] * height, row[1] * width, row[2] * math.pi, 2 * row[3] - 1
        long, wide = (half * (0.3 + 1.4 * share**2) for half, share in ((26, row[4]), (4, row[5])))
        cos, sin = math.cos(turn), math.sin(turn)
        reach_y, reach_x = abs(sin) * long + abs(cos) * wide, abs(cos) * long + abs(sin) * wide
        rows = slice(max(int(down - reach_y), 0), int(down + reach_y) + 2)
        columns = slice(max(int(right - reach_x), 0), int(right + reach_x) + 2)
        dy, dx = y[rows] - down, x[columns] - right
        across = (cos * dy - sin * dx) / wide
        inside = np.abs(cos * dx + sin * dy) / long + np.abs(across) < 1
        np.copyto(ice[rows, columns], tone + math.copysign(0.6, tone) * across, where=inside)
    return ice


def _smooth_noise(rng: ImageRandom, size: tuple[int, int]) -> Field:
    """Return noise (H, W) of mean 0 and standard deviation 1 whose amplitude falls with frequency squared."""
    height, width = size
    noise = np.fft.rfft2(rng.normal(height, width)[0].double().numpy())
    square = (np.fft.fftfreq(height)[:, None] * height) ** 2 + (np.fft.rfftfreq(width) * width) ** 2
    plain = np.fft.irfft2(noise / (1 + square), s=size)
    cloud: Field = (plain - plain.mean()) / plain.std()
    return cloud


def _crop_weights(size: tuple[int, int]) -> Field:
    """Return the share (H, W) of each pixel in all crops of `_CROP` pixels; pixels at the edge are in few of them."""
    ends = [np.minimum(np.arange(side) + 1, side - np.arange(side)) for side in size]
    down, right = (np.minimum(end, min(_CROP, len(end) - _CROP + 1)) for end in ends)
    weights: Field = np.outer(down, right) / (down.sum() * right.sum())
    return weights


def _bands(size: tuple[int, int], count: int) -> Field:
    """Return the band of each frequency of `rfft2`, in half octaves above 1/256 cycles per pixel, not rounded."""
    frequency = np.hypot(np.fft.fftfreq(size[0])[:, None], np.fft.rfftfreq(size[1]))
    bands: Field = (2 * np.log2(256 * frequency.clip(1 / 256))).clip(0, count - 1)
    return bands


def _power(field: Field, weights: Field, bands: Field) -> Field:
    """Return the mean power in each band, windowed by the square root of the weights."""
    power = np.abs(np.fft.rfft2((field - (field * weights).sum()) * np.sqrt(weights))) ** 2
    band = bands.round().astype(np.int64).ravel()
    mean: Field = np.bincount(band, power.ravel()) / np.bincount(band)
    return mean


def _ranks(field: Field, weights: Field) -> Field:
    """Return for each pixel the weight of all darker pixels: 0 to 1."""
    order = field.argsort(axis=None)
    rank, sorted_weights = np.empty(field.size), weights.ravel()[order]
    rank[order] = sorted_weights.cumsum() - sorted_weights / 2
    return rank.reshape(field.shape)
