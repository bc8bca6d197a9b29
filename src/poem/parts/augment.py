"""What else could this image have looked like? The augmentation chains of ROID, CoTTA and MEMO.

`Jitter` moves a whole batch with one draw of parameters (ROID; `Jitter.cotta()` for CoTTA); `AugMix` makes many views
of one image (MEMO). Both map [0, 1], before normalisation, to [0, 1], same dtype, same device. Every draw comes from
the CPU generator handed in, in the order the class states, so a seed means the same on every device, up to float error.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from poem.parts.fields import Checked, Count, NotNegative, Positive, Range, Share

__all__ = ["AugMix", "Augment", "Jitter"]

Hue = Annotated[float, Range(at_least=-1, at_most=1, hint="it is a part of the colour circle")]
Factors = tuple[NotNegative, NotNegative]
Scales = tuple[Positive, Positive]
_HAIR = 1e-3  # put on top before 8-bit levels are cut to integers, so that float error decides no tie


class Augment(Protocol):
    """Turns images (B, C, H, W) in [0, 1] into other images in [0, 1], by chance drawn from `rng` only."""

    def __call__(self, images: Tensor, rng: Generator, /) -> Tensor:
        """Return the augmented images; `rng` is a CPU generator."""
        ...


@dataclass(frozen=True, kw_only=True)
class Jitter(Checked):
    """Colour jitter, small rotation, shift and zoom, and a coin for a flip: one draw shared by the whole batch.

    Chain: clip to [0, 1]; brightness, contrast, saturation, hue, gamma in random order; pad by half the image; affine
    (bilinear, zeros beyond the padding); blur if set; crop back; flip; noise if set; clip. `hue` is a part of the
    colour circle, `translate` a part of the *padded* size (1/16 shifts by at most an eighth of the image), `blur` the
    range of the standard deviation in pixels of a 5 x 5 kernel, `noise` the standard deviation per pixel, `flip` a
    probability. Images without three channels skip saturation and hue.

    Draws: eleven uniforms (brightness, contrast, saturation, hue, gamma, angle, shift right, shift down, scale, blur,
    flip: always all of them), the order of the colour ops, then the noise, if set, pixel by pixel.

    Paper: Marsden, Döbler, Yang, "Universal Test-time Adaptation through Weight Ensembling, Diversity Weighting, and
        Prior Correction", WACV 2024; Wang, Fink, Van Gool, Dai, "Continual Test-Time Domain Adaptation", CVPR 2022.
    Reference code: mariodoebler/test-time-adaptation, qinenergy/cotta.
    Differs: the order of the draws; zeros beyond the padding, which the default ranges do not reach, start at the
        pixel's edge, without a blended seam.
    """

    brightness: Factors = (0.6, 1.4)
    contrast: Factors = (0.7, 1.3)
    saturation: Factors = (0.5, 1.5)
    hue: tuple[Hue, Hue] = (-0.06, 0.06)
    gamma: Scales = (0.7, 1.3)
    degrees: NotNegative = 15.0
    translate: Share = 1 / 16
    scale: Scales = (0.9, 1.1)
    padding: Literal["reflect", "edge"] = "reflect"
    blur: Scales | None = None
    noise: NotNegative = 0.0
    flip: Share = 0.5

    @classmethod
    def cotta(cls) -> Jitter:
        """CoTTA's chain: edge padding, a light blur, and noise."""
        return cls(padding="edge", blur=(0.001, 0.5), noise=0.005)

    def __call__(self, images: Tensor, rng: Generator) -> Tensor:
        """Return the batch (B, C, H, W) under one draw of the chain."""
        out = _computable(images).clamp(0, 1)
        chance: list[float] = torch.rand(11, generator=rng, dtype=torch.float64).tolist()
        for op in torch.randperm(5, generator=rng).tolist():
            name = list(_COLOUR)[op]
            out = _COLOUR[name](out, _between(getattr(self, name), chance[op]))

        turn, right, down = (2 * at - 1 for at in chance[5:8])
        high, wide = (self.translate * (size + size // 2 * 2) for size in images.shape[-2:])
        scale, margin = _between(self.scale, chance[8]), 0 if self.blur is None else 2
        out = _affine(out, turn * self.degrees, round(right * wide), round(down * high), scale, self.padding, margin)
        if self.blur is not None:
            out = _blur(out, _between(self.blur, chance[9]))
        if chance[10] < self.flip:
            out = out.flip(-1)
        if self.noise > 0:
            out = out + self.noise * torch.randn(out.shape, generator=rng).to(out)
        return out.clamp(0, 1).to(images.dtype)


@dataclass(frozen=True, kw_only=True)
class AugMix(Checked):
    """Turn one image (1, C, H, W) into `views` images (V, C, H, W): each a random mixture of lightly edited crops.

    Per view: crop (`pre`) and flip, then `width` chains of one to three ops on that crop, mixed with weights from
    Dirichlet(1, ..., 1), and the mixture blended with the crop itself, weight m ~ Beta(1, 1). Ops, on 8-bit levels:
    autocontrast and equalize (channels apart), rotate (up to 2 degrees), solarize, shear (up to 0.03), translate (up to
    a thirtieth of the size), posterize (4 bits); what they uncover is grey 128. `pre="resized-crop"` (ImageNet) takes 8
    to 100 % of the area and resizes it back, `pre="crop"` (CIFAR) pads 4 zeros and crops.

    The mixture is made in [0, 1] and normalised by the model afterwards: the weights sum to 1, so mixing is affine and
    commutes with normalisation; the reference normalises first and gets the same tensor.

    Draws: the crops (resized: ten tries of area and ratio per view; then the places), the flips, the Dirichlet weights,
    m, the number of ops per chain, the ops, their strengths, their signs.

    Paper: Zhang, Levine, Finn, "MEMO: Test Time Robustness via Adaptation and Augmentation", NeurIPS 2022; Hendrycks et
        al., "AugMix: A Simple Data Processing Method to Improve Robustness and Uncertainty", ICLR 2020.
    Reference code: zhangmarvin/memo.
    Differs: the order of the draws; the crop is cut from the image at hand, not from the larger original; an image so
        narrow that none of ten crops fits is used whole; the fill is grey in all channels (the reference passes the
        integer 128, which Pillow reads as dark red in RGB images).
    """

    views: Count = 64
    width: Count = 3
    pre: Literal["resized-crop", "crop"] = "resized-crop"

    def __call__(self, images: Tensor, rng: Generator) -> Tensor:
        """Return the views (V, C, H, W) of the one image in `images` (1, C, H, W)."""
        if images.shape[0] != 1:
            raise ValueError(f"expected one image (1, C, H, W), got {tuple(images.shape)}; call AugMix once per image")
        levels = (_computable(images).clamp(0, 1) * 255).round()
        crops = (_crops(levels, self.pre, self.views, rng) + 0.5 + _HAIR).floor()
        flips = torch.rand(self.views, generator=rng) < 0.5
        crops = torch.where(flips.to(crops.device)[:, None, None, None], crops.flip(-1), crops)

        weights = _mixing_weights(self.views, self.width, rng).to(crops)[..., None, None, None]
        links = (self.views, self.width, 3)
        depth = torch.randint(1, 4, links[:2], generator=rng)
        kind = torch.randint(len(_OPS), links, generator=rng)
        strength = 0.1 + 0.9 * torch.rand(links, generator=rng, dtype=torch.float64)
        strength = strength * (2 * torch.randint(2, links, generator=rng) - 1)
        mixed = weights[:, 0] * crops
        for chain in range(self.width):
            edited = crops.clone()
            for link in range(3):
                todo = torch.where(depth[:, chain] > link, kind[:, chain, link], -1)
                for index, op in enumerate(_OPS.values()):
                    rows = (todo == index).nonzero().flatten()
                    if len(rows):
                        edited[rows] = op(edited[rows], strength[rows, chain, link])
            mixed += weights[:, chain + 1] * edited
        return (mixed / 255).clamp(0, 1).to(images.dtype)


def _computable(images: Tensor) -> Tensor:
    """Return the images in a dtype fit for pixel coordinates (halves become float32); refuse what is no batch."""
    if images.dim() != 4 or not images.is_floating_point():
        came = f"{images.dtype} {tuple(images.shape)}"
        raise ValueError(f"expected float images (B, C, H, W) in [0, 1], got {came}; 8-bit: pass images.float() / 255")
    return images if images.dtype in (torch.float32, torch.float64) else images.float()


def _between(low_high: tuple[float, float], at: float) -> float:
    return low_high[0] + (low_high[1] - low_high[0]) * at


# Colour: images in [0, 1] and one factor -> images in [0, 1].
def _grey(images: Tensor) -> Tensor:
    """Return the ITU-R 601 luma (B, 1, H, W) of RGB images; the channel mean of others."""
    luma = images.new_tensor((0.2989, 0.587, 0.114))[:, None, None]
    return (images * luma).sum(1, keepdim=True) if images.shape[1] == 3 else images.mean(1, keepdim=True)


def _hue(images: Tensor, turn: float) -> Tensor:
    """Turn the hue of the HSV colour by a part of the circle; value and chroma stay."""
    red, green, blue = images.unbind(1)
    value = images.amax(1)
    chroma = value - images.amin(1)
    safe = torch.where(chroma == 0, 1, chroma)  # greys have no hue to turn
    sixth = torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe)
    sixth = torch.where(value == red, (green - blue) / safe, sixth) + 6 * turn
    # A channel is `value` less a trapezium of the hue of height `chroma`, at its own phase.
    phases = [(sixth + offset) % 6 for offset in (5, 3, 1)]
    return torch.stack([value - chroma * torch.minimum(k, 4 - k).clamp(0, 1) for k in phases], 1).clamp(0, 1)


_COLOUR: dict[str, Callable[[Tensor, float], Tensor]] = {
    "brightness": lambda x, factor: (factor * x).clamp(0, 1),
    "contrast": lambda x, factor: torch.lerp(_grey(x).mean((1, 2, 3), keepdim=True), x, factor).clamp(0, 1),
    "saturation": lambda x, factor: torch.lerp(_grey(x), x, factor).clamp(0, 1) if x.shape[1] == 3 else x,
    "hue": lambda x, turn: _hue(x, turn) if x.shape[1] == 3 else x,
    "gamma": lambda x, power: (x.clamp(1e-8, 1) ** power).clamp(0, 1),
}


# Geometry: places are x and y in pixels from the image's centre, a pixel sits at its middle, and a matrix (N, 2, 3)
# leads from a place in the output to the place in the input that is read there.
_PADDING = {"reflect": "reflection", "edge": "border"}


def _places(images: Tensor, matrix: Tensor, margin: int = 0) -> tuple[Tensor, Tensor]:
    """Return the x and the y (N, H, W) that each output pixel reads; the output has `margin` more on every side."""
    down, right = (torch.arange(-margin, size + margin).to(images) + 0.5 - size / 2 for size in images.shape[-2:])
    to_x, to_y = matrix.to(images).permute(1, 2, 0)[..., None, None]
    return to_x[0] * right + (to_x[1] * down[:, None] + to_x[2]), to_y[0] * right + (to_y[1] * down[:, None] + to_y[2])


def _read(images: Tensor, x: Tensor, y: Tensor, padding: str) -> Tensor:
    """Read bilinearly; beyond the image the border pixels go on ("border") or are the mirror ("reflection")."""
    height, width = (max(size - 1, 1) / 2 for size in images.shape[-2:])
    grid = torch.stack([x / width, y / height], -1).expand(len(images), -1, -1, -1)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode=padding, align_corners=True)


def _affine(images: Tensor, angle: float, right: int, down: int, scale: float, padding: str, margin: int) -> Tensor:
    """Turn clockwise by degrees, zoom, and shift right and down by pixels, images padded by half their size."""
    cos, sin = math.cos(math.radians(angle)) / scale, math.sin(math.radians(angle)) / scale
    matrix = [[cos, sin, -cos * right - sin * down], [-sin, cos, sin * right - cos * down]]
    x, y = _places(images, torch.tensor([matrix], dtype=torch.float64), margin)
    height, width = (size / 2 + size // 2 for size in images.shape[-2:])
    inside = (x.abs() <= width) & (y.abs() <= height)
    return _read(images, x, y, _PADDING[padding]) * inside[:, None]


def _blur(images: Tensor, sigma: float) -> Tensor:
    """Blur with a Gaussian; the output is two pixels smaller on every side."""
    line = torch.exp(-0.5 * (torch.arange(-2, 3).to(images) / sigma) ** 2)
    kernel = torch.outer(line, line) / line.sum() ** 2
    return F.conv2d(images, kernel.expand(images.shape[1], 1, 5, 5), groups=images.shape[1])


# AugMix: images are 8-bit levels 0..255 held as floats; a strength (N,) is 0.1 to 1 with a random sign.
def _crop_sizes(whole: Tensor, views: int, rng: Generator) -> Tensor:
    """Return sizes (V, 2) of 8 to 100 % of the whole's area and aspect 3/4 to 4/3: the first of ten tries that fits."""
    tries = torch.rand(views, 10, 2, generator=rng, dtype=torch.float64)
    area = (0.08 + 0.92 * tries[..., 0]) * whole.prod()
    ratio = torch.exp((2 * tries[..., 1] - 1) * math.log(4 / 3))
    sizes = torch.stack([(area / ratio).sqrt(), (area * ratio).sqrt()], -1).round()
    fits = ((sizes >= 1) & (sizes <= whole)).all(-1, keepdim=True)
    return torch.where(fits, sizes, whole)[torch.arange(views), fits.int().argmax(1).flatten()]


def _crops(levels: Tensor, pre: str, views: int, rng: Generator) -> Tensor:
    """Return crops (V, C, H, W) of the image: resized parts of it, or whole ones shifted over its zero border."""
    whole = torch.tensor(levels.shape[-2:], dtype=torch.float64)
    border, sizes = (0, _crop_sizes(whole, views, rng)) if pre == "resized-crop" else (4, whole.expand(views, 2))
    corners = ((whole + 2 * border - sizes + 1) * torch.rand(views, 2, generator=rng, dtype=torch.float64)).floor()
    source = F.pad(levels, (border,) * 4)
    crops = [source[..., y : y + h, x : x + w] for y, x, h, w in torch.cat([corners, sizes], 1).int().tolist()]
    return torch.cat([F.interpolate(crop, levels.shape[-2:], mode="bilinear", align_corners=False) for crop in crops])


def _mixing_weights(views: int, width: int, rng: Generator) -> Tensor:
    """Return (V, 1 + width) weights that sum to 1: the crop's own, then the chains'."""
    share = torch.empty(views, width, dtype=torch.float64).exponential_(generator=rng)  # over its sum: Dirichlet(1)
    own = torch.rand(views, 1, generator=rng, dtype=torch.float64)  # Beta(1, 1)
    return torch.cat([own, (1 - own) * share / share.sum(1, keepdim=True)], 1)


def _autocontrast(levels: Tensor, strength: Tensor) -> Tensor:
    low, high = levels.amin((2, 3), keepdim=True), levels.amax((2, 3), keepdim=True)
    return torch.where(high > low, ((levels - low) * 255 / (high - low).clamp_min(1)).floor(), levels)


def _equalize(levels: Tensor, strength: Tensor) -> Tensor:
    """Flatten each channel's histogram: a level becomes the number of darker pixels, in 255 steps."""
    flat = levels.flatten(0, 1).flatten(1).long()
    offsets = 256 * torch.arange(len(flat), device=flat.device)[:, None]
    counts = torch.bincount((flat + offsets).flatten(), minlength=256 * len(flat)).view(-1, 256)
    step = (flat.shape[1] - counts.gather(1, flat.amax(1, keepdim=True))) // 255  # the brightest level is left out
    table = ((step // 2 + counts.cumsum(1) - counts) // step.clamp_min(1)).clamp(max=255)
    return torch.where(step > 0, table.gather(1, flat), flat).view(levels.shape).to(levels)


def _move(levels: Tensor, strength: Tensor, *rows: tuple[Tensor | float, ...]) -> Tensor:
    """Read through a matrix of numbers and (N,) tensors; what lies outside is grey; levels are cut to integers."""
    matrix = torch.stack([torch.stack([0 * strength + entry for entry in row], -1) for row in rows], 1)
    x, y = _places(levels, matrix)
    inside = (x.abs() <= levels.shape[-1] / 2) & (y.abs() <= levels.shape[-2] / 2)
    return torch.where(inside[:, None], (_read(levels, x, y, "border") + _HAIR).floor(), 128.0)


def _rotate(levels: Tensor, strength: Tensor) -> Tensor:
    angle = torch.deg2rad((3 * strength).trunc())
    return _move(levels, strength, (angle.cos(), -angle.sin(), 0), (angle.sin(), angle.cos(), 0))


_OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "autocontrast": _autocontrast,
    "equalize": _equalize,
    "rotate": _rotate,
    "solarize": lambda x, s: torch.where(x < 256 - (25.6 * s.abs()).trunc().to(x)[:, None, None, None], x, 255 - x),
    "shear-x": lambda x, s: _move(x, s, (1, 0.03 * s, 0.03 * s * x.shape[-2] / 2), (0, 1, 0)),  # the top left stays
    "shear-y": lambda x, s: _move(x, s, (1, 0, 0), (0.03 * s, 1, 0.03 * s * x.shape[-1] / 2)),
    "translate-x": lambda x, s: _move(x, s, (1, 0, (s * x.shape[-1] / 30).trunc()), (0, 1, 0)),
    "translate-y": lambda x, s: _move(x, s, (1, 0, 0), (0, 1, (s * x.shape[-2] / 30).trunc())),
    "posterize": lambda x, _: (x / 16).floor() * 16,  # the upper 4 bits, whatever the strength
}
