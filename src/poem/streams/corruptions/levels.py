"""Every corruption with its five levels for each profile: the constants of the public generators.

The numbers are those of make_imagenet_c.py, make_tinyimagenet_c.py and make_cifar_c.py in hendrycks/robustness; what
each one means is said where the corruption is defined. Lengths are pixels, whatever the size of the image.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from poem.streams.corruptions import blur as _blur
from poem.streams.corruptions import digital as _digital
from poem.streams.corruptions import noise as _noise
from poem.streams.corruptions import spatter as _spatter
from poem.streams.corruptions import weather as _weather

Level = float | tuple[float, ...]


@dataclass(frozen=True)
class Corruption:
    """A function of grey levels (N, C, H, W), of an `ImageRandom` and of a setting; and its five settings per profile.

    Levels are float32 from 0 to 255, or uint8 where `uint8` is set. On a CPU the function gets `chunk` values at a
    time: as many as fit a cache, more where a call has a fixed cost.
    """

    apply: Callable[..., Tensor]
    imagenet: tuple[Level, ...]
    tiny: tuple[Level, ...]
    cifar: tuple[Level, ...]
    uint8: bool = False
    chunk: int = 1 << 18

    def level(self, profile: str, severity: int) -> tuple[Any, ...]:
        """Return the numbers that `apply` takes after the levels and the random numbers."""
        levels = {"imagenet": self.imagenet, "tiny-imagenet": self.tiny, "cifar": self.cifar}[profile]
        level = levels[severity - 1]
        return level if isinstance(level, tuple) else (level,)


_FINE = ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01))


def _sized(size: int, *rows: tuple[float, ...]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(size * share for share in row) for row in rows)


TABLE: dict[str, Corruption] = {
    "gaussian_noise": Corruption(
        _noise.gaussian_noise,
        (0.08, 0.12, 0.18, 0.26, 0.38),
        (0.04, 0.08, 0.12, 0.15, 0.18),
        (0.04, 0.06, 0.08, 0.09, 0.10),
    ),
    "shot_noise": Corruption(_noise.shot_noise, (60, 25, 12, 5, 3), (250, 100, 50, 30, 15), (500, 250, 100, 75, 50)),
    "impulse_noise": Corruption(
        _noise.impulse_noise,
        (0.03, 0.06, 0.09, 0.17, 0.27),
        (0.01, 0.02, 0.05, 0.08, 0.14),
        (0.01, 0.02, 0.03, 0.05, 0.07),
    ),
    "defocus_blur": Corruption(
        _blur.defocus_blur,
        ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
        ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)),
        ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    ),
    "glass_blur": Corruption(
        _blur.glass_blur,
        ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
        ((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2)),
        ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    ),
    "motion_blur": Corruption(
        _blur.motion_blur,
        ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
        ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
        ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    ),
    "zoom_blur": Corruption(
        _blur.zoom_blur,
        ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
        _FINE,
        _FINE,
        chunk=1 << 20,
    ),
    "snow": Corruption(
        _weather.snow,
        (
            (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
            (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
            (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
            (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
            (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
        ),
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.8),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.8),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.7),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.65),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
        ),
        (
            (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
            (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
            (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
            (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
            (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
        ),
        chunk=1 << 20,
    ),
    "frost": Corruption(  # the last number scales the texture
        _weather.frost,
        ((1, 0.4, 1), (0.8, 0.6, 1), (0.7, 0.7, 1), (0.65, 0.7, 1), (0.6, 0.75, 1)),
        ((1, 0.3, 0.3), (0.9, 0.4, 0.3), (0.8, 0.45, 0.3), (0.75, 0.5, 0.3), (0.7, 0.55, 0.3)),
        ((1, 0.2, 0.2), (1, 0.3, 0.2), (0.9, 0.4, 0.2), (0.85, 0.4, 0.2), (0.75, 0.45, 0.2)),
    ),
    "fog": Corruption(
        _weather.fog,
        ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
        ((0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75)),
        ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
        chunk=1 << 20,
    ),
    "brightness": Corruption(
        _digital.brightness, (0.1, 0.2, 0.3, 0.4, 0.5), (0.1, 0.2, 0.3, 0.4, 0.5), (0.05, 0.1, 0.15, 0.2, 0.3)
    ),
    "contrast": Corruption(
        _digital.contrast, (0.4, 0.3, 0.2, 0.1, 0.05), (0.4, 0.3, 0.2, 0.1, 0.05), (0.75, 0.5, 0.4, 0.3, 0.15)
    ),
    "elastic_transform": Corruption(
        _digital.elastic_transform,
        _sized(244, (2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02)),
        _sized(64, (0, 0, 0.08), (0.05, 0.3, 0.06), (0.1, 0.08, 0.06), (0.1, 0.03, 0.03), (0.16, 0.03, 0.02)),
        _sized(32, (0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)),
    ),
    "pixelate": Corruption(
        _digital.pixelate,
        (0.6, 0.5, 0.4, 0.3, 0.25),
        (0.9, 0.8, 0.7, 0.6, 0.5),
        (0.95, 0.9, 0.85, 0.75, 0.65),
        True,
        1 << 22,
    ),
    "jpeg_compression": Corruption(
        _digital.jpeg_compression, (25, 18, 15, 10, 7), (65, 58, 50, 40, 25), (80, 65, 58, 50, 40), True, 1 << 22
    ),
    "speckle_noise": Corruption(
        _noise.speckle_noise,
        (0.15, 0.2, 0.35, 0.45, 0.6),
        (0.15, 0.2, 0.25, 0.3, 0.35),
        (0.06, 0.1, 0.12, 0.16, 0.2),
    ),
    "gaussian_blur": Corruption(
        _blur.gaussian_blur, (1, 2, 3, 4, 6), (0.5, 0.75, 1, 1.25, 1.5), (0.4, 0.6, 0.7, 0.8, 1)
    ),
    "spatter": Corruption(
        _spatter.spatter,
        (
            (0.65, 0.3, 4, 0.69, 0.6, 0),
            (0.65, 0.3, 3, 0.68, 0.6, 0),
            (0.65, 0.3, 2, 0.68, 0.5, 0),
            (0.65, 0.3, 1, 0.65, 1.5, 1),
            (0.67, 0.4, 1, 0.65, 1.5, 1),
        ),
        (
            (0.62, 0.1, 0.7, 0.7, 0.6, 0),
            (0.65, 0.1, 0.8, 0.7, 0.6, 0),
            (0.65, 0.3, 1, 0.69, 0.6, 0),
            (0.65, 0.1, 0.7, 0.68, 0.6, 1),
            (0.65, 0.1, 0.5, 0.67, 0.6, 1),
        ),
        (
            (0.62, 0.1, 0.7, 0.7, 0.5, 0),
            (0.65, 0.1, 0.8, 0.7, 0.5, 0),
            (0.65, 0.3, 1, 0.69, 0.5, 0),
            (0.65, 0.1, 0.7, 0.69, 0.6, 1),
            (0.65, 0.1, 0.5, 0.68, 0.6, 1),
        ),
        chunk=1 << 20,
    ),
    "saturate": Corruption(
        _digital.saturate,
        ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),
        ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (30, 0.2)),
        ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
    ),
}
