"""Frost on the window: the generators' photographs where the package `imagecorruptions` is installed, else drawn ice.

The drawn textures have the mean and the spread of the photographs, colour by colour, and ice ferns of our own making;
`frost_source` says which of the two is in use. Results differ between the two.
"""

from __future__ import annotations

import math
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from poem.streams._draws import Draws

# Of five photographs: height and width, then mean and standard deviation of red, green and blue.
_LOOKS = (
    ((600, 900), (77.7, 149.1, 165.7), (26.9, 16.5, 15.3)),
    ((315, 560), (200.8, 205.4, 214.5), (21.4, 22.1, 22.6)),
    ((315, 560), (200.8, 205.4, 214.5), (21.4, 22.1, 22.6)),
    ((350, 527), (137.6, 152.8, 165.2), (28.5, 28.5, 29.9)),
    ((495, 660), (112.4, 123.4, 134.8), (44.4, 43.3, 41.7)),
)
_FILES = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")  # a sixth is never drawn


def frost_source() -> str:
    """Say where the frost textures come from: "imagecorruptions" (photographs) or "generated" (drawn by us)."""
    return "generated" if _folder() is None else "imagecorruptions"


@lru_cache(maxsize=1)
def _folder() -> Path | None:
    spec = find_spec("imagecorruptions")  # located, not imported: the package does not import any more
    if spec is None or spec.origin is None or find_spec("PIL") is None:
        return None
    folder = Path(spec.origin).parent / "frost"
    return folder if all((folder / name).is_file() for name in _FILES) else None


@lru_cache(maxsize=4)
def textures(scale: float, height: int, width: int) -> list[Tensor]:
    """Return five textures uint8 (3, h, w), scaled, and enlarged further where they would not cover the image."""
    folder = _folder()
    whole = _drawn() if folder is None else _photographs(folder)
    scaled = []
    for layer in whole:
        factor = max(scale, (height + 1) / layer.shape[1], (width + 1) / layer.shape[2])
        if factor != 1:
            size = [math.ceil(factor * side - 1e-9) for side in layer.shape[1:]]
            layer = F.interpolate(layer[None].double(), size=size, mode="bilinear", align_corners=False)[0]
            layer = layer.round().to(torch.uint8)
        scaled.append(layer)
    return scaled


@lru_cache(maxsize=1)
def _photographs(folder: Path) -> list[Tensor]:
    import numpy as np
    from PIL import Image

    return [
        torch.from_numpy(np.array(Image.open(folder / name).convert("RGB"))).permute(2, 0, 1).contiguous()
        for name in _FILES
    ]


@lru_cache(maxsize=1)
def _drawn() -> list[Tensor]:
    return [_ice(index, *look) for index, look in enumerate(_LOOKS)]


def _ice(index: int, size: tuple[int, int], mean: tuple[float, ...], spread: tuple[float, ...]) -> Tensor:
    """Draw ice ferns: ribs that leave a stem at an angle, in patches of one direction each, over a cloudy ground."""
    height, width = size
    draws = Draws([index], "frost texture", torch.device("cpu"))
    cloud, bend_x, bend_y, grain = (_cloud(draws, size, slope) for slope in (1.6, 2.0, 2.0, 0.9))
    y = torch.arange(height, dtype=torch.float64)[:, None] + 14 * bend_y
    x = torch.arange(width, dtype=torch.float64) + 14 * bend_x
    seeds = draws.uniform(3, max(height * width // 9000, 8))[0].double()
    distance, patch = torch.full(size, torch.inf, dtype=torch.float64), torch.zeros(size, dtype=torch.int64)
    for at, (down, right, _) in enumerate(seeds.T.tolist()):  # one by one: all at once would take a gigabyte
        reach = (y - down * height) ** 2 + (x - right * width) ** 2
        patch[reach < distance] = at
        distance = torch.minimum(distance, reach)
    turn = seeds[2][patch] * 2 * math.pi
    dy, dx = y - seeds[0][patch] * height, x - seeds[1][patch] * width
    along, across = turn.cos() * dx + turn.sin() * dy, turn.cos() * dy - turn.sin() * dx
    ribs = torch.sin((along + across.abs()) * 0.55 + 2 * grain).abs() ** 0.5
    stem = torch.exp(-across.abs() / 3)
    ice = 0.8 * cloud + 0.45 * grain + 0.7 * ribs + 0.6 * stem - 0.25 * distance.sqrt() / 60
    ice = (ice - ice.mean()) / ice.std()
    levels = torch.stack([ice * by + at for at, by in zip(mean, spread, strict=True)])
    return levels.round().clamp(0, 255).to(torch.uint8)


def _cloud(draws: Draws, size: tuple[int, int], slope: float) -> Tensor:
    """Return noise (H, W) of mean 0 and spread 1 whose amplitude falls with frequency to the power of `slope`."""
    height, width = size
    noise = torch.fft.rfft2(draws.normal(height, width)[0])
    down = torch.fft.fftfreq(height, dtype=torch.float64)[:, None] * height
    right = torch.fft.rfftfreq(width, dtype=torch.float64) * width
    cloud: Tensor = torch.fft.irfft2(noise / (1 + down**2 + right**2) ** (slope / 2), s=size)
    spread: Tensor = (cloud - cloud.mean()) / cloud.std()
    return spread
