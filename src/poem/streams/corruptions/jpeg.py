"""Baseline JPEG compression and decompression: Pillow where it is installed, else the same integers in torch.

The torch version follows libjpeg step by step (ITU-T T.81 with the usual tables scaled by quality, 4:2:0, the accurate
integer DCT, triangle upsampling) without the lossless entropy coding, so both give the same bytes; the tests
compare them. On CUDA the torch version runs.
"""

from __future__ import annotations

import io
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from poem.streams.corruptions.apply_pillow import apply_pillow

if TYPE_CHECKING:
    from PIL.Image import Image

_LUMINANCE = """16 11 10 16 24 40 51 61 12 12 14 19 26 58 60 55 14 13 16 24 40 57 69 56 14 17 22 29 51 87 80 62
18 22 37 56 68 109 103 77 24 35 55 64 81 104 113 92 49 64 78 87 103 121 120 101 72 92 95 98 112 100 103 99"""
_CHROMINANCE = "17 18 24 47 99 99 99 99 18 21 26 66 99 99 99 99 24 26 56 99 99 99 99 99 47 66" + " 99" * 38
_BITS, _PASS = 13, 2  # bits of the fixed-point constants; extra bits between the two passes


def jpeg(images: Tensor, quality: int) -> Tensor:
    """Return uint8 images (N, C, H, W) as they are after compression to JPEG at that quality."""
    if images.device.type != "cpu" or find_spec("PIL") is None:
        return jpeg_torch(images, quality)

    from PIL.Image import open as open_image

    def recompress(picture: Image) -> Image:
        file = io.BytesIO()
        picture.save(file, "JPEG", quality=quality)
        return open_image(file)

    return apply_pillow(images, recompress)


def jpeg_torch(images: Tensor, quality: int) -> Tensor:
    """Encode and decode in torch, on any device, to the same bytes as libjpeg."""
    height, width = images.shape[-2:]
    if images.shape[1] == 1:
        return _quantise_blocks(images[:, 0].int(), _table(_LUMINANCE, quality)).to(torch.uint8)[:, None]
    red, green, blue = images.int().unbind(1)
    half, centre = 1 << 15, 128 << 16
    luma = (19595 * red + 38470 * green + 7471 * blue + half) >> 16
    chroma = (
        (-11059 * red - 21709 * green + 32768 * blue + centre + half - 1) >> 16,
        (32768 * red - 27439 * green - 5329 * blue + centre + half - 1) >> 16,
    )
    luma = _quantise_blocks(luma, _table(_LUMINANCE, quality))
    table = _table(_CHROMINANCE, quality)
    halves = (_quantise_blocks(_downsample(plane), table)[..., : (width + 1) // 2] for plane in chroma)
    cb, cr = (_upsample(plane)[..., :height, :width] - 128 for plane in halves)
    rgb = (
        luma + ((91881 * cr + half) >> 16),
        luma + ((-22554 * cb - 46802 * cr + half) >> 16),
        luma + ((116130 * cb + half) >> 16),
    )
    return torch.stack(rgb, 1).clamp_(0, 255).to(torch.uint8)


@lru_cache(maxsize=64)
def _table(text: str, quality: int) -> Tensor:
    """Return the quantisation table (8, 8) of a quality from 1 to 100."""
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    base = np.array(text.split(), dtype=np.int32).reshape(8, 8)
    return torch.from_numpy(((base * scale + 50) // 100).clip(1, 255))


def _pad_to_multiple(planes: Tensor, multiple: int, axes: str) -> Tensor:
    """Repeat the last column ("x") or row ("y") up to a multiple of pixels."""
    down, right = (-size % multiple if axis in axes else 0 for axis, size in zip("yx", planes.shape[-2:], strict=True))
    return F.pad(planes[:, None].float(), (0, right, 0, down), mode="replicate")[:, 0].int() if down + right else planes


def _downsample(planes: Tensor) -> Tensor:
    """Average 2 x 2 pixels; halves are rounded down and up in turn along a row."""
    planes = _pad_to_multiple(_pad_to_multiple(planes, 16, "x"), 2, "y")
    total = planes[:, ::2, ::2] + planes[:, ::2, 1::2] + planes[:, 1::2, ::2] + planes[:, 1::2, 1::2]
    bias = 1 + torch.arange(total.shape[-1], device=planes.device, dtype=torch.int32) % 2
    return (total + bias) >> 2


def _upsample(planes: Tensor) -> Tensor:
    """Upsample by two: three parts the nearer pixel, one part the farther, down and then across."""
    down = torch.stack([planes * 3 + _neighbour(planes, -2, -1), planes * 3 + _neighbour(planes, -2, 1)], 2)
    down = down.flatten(1, 2)
    even = (down * 3 + _neighbour(down, -1, -1) + 8) >> 4
    odd = (down * 3 + _neighbour(down, -1, 1) + 7) >> 4
    return torch.stack([even, odd], 3).flatten(2)


def _neighbour(planes: Tensor, axis: int, step: int) -> Tensor:
    size = planes.shape[axis]
    index = (torch.arange(size, device=planes.device) + step).clamp(0, size - 1)
    return planes.index_select(axis, index)


def _quantise_blocks(planes: Tensor, table: Tensor) -> Tensor:
    """Return planes (N, H, W) after DCT, quantisation and inverse DCT of their 8 x 8 blocks."""
    height, width = planes.shape[-2:]
    padded = _pad_to_multiple(planes, 8, "xy")
    count, rows, columns = padded.shape
    # (8, 8, blocks): a line of a block is one slice, and every slice is contiguous.
    blocks = padded.view(count, rows // 8, 8, columns // 8, 8).permute(2, 4, 0, 1, 3).reshape(8, 8, -1) - 128
    steps = table.to(planes.device)[..., None] * 8
    waves = _dct(_dct(blocks.transpose(0, 1), first=True).transpose(0, 1), first=False)
    waves = torch.sign(waves) * torch.div(waves.abs() + steps // 2, steps, rounding_mode="floor") * (steps // 8)
    back = _inverse_dct(_inverse_dct(waves, first=True).transpose(0, 1), first=False).transpose(0, 1)
    back = (back + 128).clamp_(0, 255).view(8, 8, count, rows // 8, columns // 8)
    return back.permute(2, 3, 0, 4, 1).reshape(count, rows, columns)[:, :height, :width]


def _descale(value: Tensor, bits: int) -> Tensor:
    return (value + (1 << (bits - 1))) >> bits


def _rotate(low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """Return the even part's rotation by 3 pi / 8 in fixed point."""
    both = (low + high) * 4433
    return both + low * 6270, both - high * 15137


def _odd_part(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the odd part of the eight-point transform (Loeffler, Ligtenberg, Moschytz 1989) in fixed point."""
    all_ = (a + c + b + d) * 9633
    ad, bc = (a + d) * -7373, (b + c) * -20995
    ac, bd = (a + c) * -16069 + all_, (b + d) * -3196 + all_
    return a * 2446 + ad + ac, b * 16819 + bc + bd, c * 25172 + bc + ac, d * 12299 + ad + bd


def _dct(lines: Tensor, *, first: bool) -> Tensor:
    """DCT along axis 0; the first pass leaves two extra bits, the second removes them."""
    sums = [lines[at] + lines[7 - at] for at in range(4)]
    less = [lines[at] - lines[7 - at] for at in range(4)]
    outer, inner = sums[0] + sums[3], sums[1] + sums[2]
    bits = _BITS - _PASS if first else _BITS + _PASS
    two, six = _rotate(sums[0] - sums[3], sums[1] - sums[2])
    seven, five, three, one = (_descale(part, bits) for part in _odd_part(less[3], less[2], less[1], less[0]))
    even = (
        [(outer + inner) << _PASS, (outer - inner) << _PASS]
        if first
        else [_descale(outer + inner, _PASS), _descale(outer - inner, _PASS)]
    )
    return torch.stack([even[0], one, _descale(two, bits), three, even[1], five, _descale(six, bits), seven])


def _inverse_dct(lines: Tensor, *, first: bool) -> Tensor:
    """Inverse DCT along axis 0."""
    two, six = _rotate(lines[2], lines[6])
    up, down = (lines[0] + lines[4]) << _BITS, (lines[0] - lines[4]) << _BITS
    even = [up + two, down + six, down - six, up - two]
    odd = list(reversed(_odd_part(lines[7], lines[5], lines[3], lines[1])))
    bits = _BITS - _PASS if first else _BITS + _PASS + 3
    sums = [_descale(a + b, bits) for a, b in zip(even, odd, strict=True)]
    less = [_descale(a - b, bits) for a, b in zip(even, odd, strict=True)]
    return torch.stack(sums + less[::-1])
