"""Decode image files to 8-bit RGB; all image files are opened here.

Formats: those of `FORMATS_READ`, known by content. Pillow reads more, and one of them, PostScript, starts another
program.

Pixels:
- 8 bits, RGB or grey: as Pillow's `convert("RGB")` has them; palettes, 1 bit, CMYK and YCbCr too, without colour
  profiles.
- transparency (RGBA, LA, a transparent palette entry or colour): composited over white; opaque images as they are.
- 16 bits: scaled to 8 (65535 is white; 4095 in a TIFF of 12 bits).
- floating point: 0 to 1 is scaled to 8 bits; other ranges, NaN and infinity are refused.
- 32-bit integers: refused, since no format states the value of white.
- an EXIF orientation is applied: the image is upright, as a viewer shows it.
- of several frames the first is read.
"""

from __future__ import annotations

import os
from io import BytesIO
from typing import Any

import numpy as np

from poem._util.files import printable
from poem.streams.images import Unreadable

FORMATS_READ = ("JPEG", "PNG", "BMP", "WEBP", "PPM", "TIFF", "GIF")
"""Formats that are opened, by Pillow's names."""
_ORIENTATION, _BITS, _PHOTOMETRIC = 0x0112, 258, 262
_EXIF_TRANSPOSE = {
    2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_270", 7: "TRANSVERSE",
    8: "ROTATE_90",
}  # fmt: skip
"""Pillow's transpose operation that undoes each EXIF orientation."""


def pillow() -> Any:
    """Import PIL's Image module; the environment variable POEM_MAX_PIXELS sets its limit of pixels."""
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("reading image files needs Pillow: pip install 'poem-tta[bench]'") from error
    if limit := os.environ.get("POEM_MAX_PIXELS"):
        if not limit.isdecimal() or int(limit) < 1:
            raise ValueError(f"expected POEM_MAX_PIXELS as a number of pixels, such as 400000000, got {limit!r}")
        Image.MAX_IMAGE_PIXELS = int(limit)
    return Image


def decode(data: bytes, where: str) -> Any:
    """Decode an image file to a PIL image of mode RGB; one that cannot be read is an `Unreadable` that names it."""
    image_module, file, name = pillow(), BytesIO(data), printable(where)
    try:
        with _open(file, name) as opened:
            opened.load()
            operation = _exif_operation(opened)
            picture = _to_rgb(opened, name)
    except Unreadable:
        raise
    except Exception as error:  # Pillow's plugins raise anything for a broken file
        last = printable(where.replace("\\", "/").rsplit("/", 1)[-1])
        reason = str(error).replace(repr(file), last) or type(error).__name__
        if isinstance(error, image_module.UnidentifiedImageError):
            reason += f": none of the formats that are read, {', '.join(FORMATS_READ)}"
        raise Unreadable(f"{name}: {len(data)} bytes that are no whole image ({reason})") from error
    return picture if operation is None else picture.transpose(getattr(image_module.Transpose, operation))


def image_size(data: bytes, where: str) -> tuple[int, int]:
    """Width and height as stored, from an image file's header alone."""
    with _open(BytesIO(data), printable(where)) as opened:
        found: tuple[int, int] = opened.size
    return found


def check_pixels(wide: int, high: int, name: str, becomes: str = "") -> None:
    """Raise if an image has more pixels than Pillow's limit: it might fill the memory."""
    most = pillow().MAX_IMAGE_PIXELS
    if most is not None and wide * high > most:
        raise Unreadable(
            f"{name}: {becomes}{wide}x{high}, more than {most} pixels; if you trust the file, set POEM_MAX_PIXELS to "
            f"{wide * high}"
        )


def _open(file: BytesIO, name: str) -> Any:
    """Open an image and check its format and size; its pixels are not decoded yet."""
    image_module = pillow()
    try:
        opened = image_module.open(file, formats=FORMATS_READ)
    except (image_module.DecompressionBombError, image_module.DecompressionBombWarning) as error:
        raise Unreadable(
            f"{name}: more than {image_module.MAX_IMAGE_PIXELS} pixels ({error}); if you trust the file, set "
            "POEM_MAX_PIXELS to more than it has"
        ) from error
    check_pixels(opened.width, opened.height, name)
    return opened


def _exif_operation(opened: Any) -> str | None:
    """The transpose operation that undoes the EXIF orientation, or None; Pillow applies that of TIFFs itself."""
    try:
        return _EXIF_TRANSPOSE.get(opened.getexif().get(_ORIENTATION))
    except Exception:  # damaged EXIF; the pixels are complete
        return None


def _to_rgb(opened: Any, name: str) -> Any:
    """Convert a loaded image of any mode to 8-bit RGB."""
    if opened.mode == "F" or opened.mode.startswith("I"):
        return pillow().fromarray(_to_eight_bits(opened, name)).convert("RGB")
    if opened.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in opened.info:
        rgba = opened.convert("RGBA")
        if rgba.getextrema()[3][0] < 255:
            white = pillow().new("RGBA", rgba.size, (255, 255, 255, 255))
            return pillow().alpha_composite(white, rgba).convert("RGB")
    return opened.convert("RGB")


def _to_eight_bits(opened: Any, name: str) -> Any:
    """Scale grey values of more than 8 bits so that white is 255."""
    tags = getattr(opened, "tag_v2", {})
    values = np.asarray(opened)
    if opened.mode == "F":
        if not np.isfinite(values).all():
            raise Unreadable(f"{name}: floating-point pixels that are NaN or infinite; save it with 8 or 16 bits")
        low, high = float(values.min()) + 0.0, float(values.max()) + 0.0  # no -0 in the message
        if low < 0 or high > 1:
            raise Unreadable(
                f"{name}: floating-point pixels from {low:g} to {high:g}, expected 0 to 1; scale them, or save it with "
                "8 or 16 bits"
            )
        white = 1.0
    elif opened.mode == "I" and opened.format == "TIFF":
        raise Unreadable(f"{name}: pixels of 32-bit integers, without a value for white; save it with 8 or 16 bits")
    else:  # Pillow puts PGM of more than 8 bits, scaled to 16, and in some versions 16-bit PNG, into mode I
        bits = tags.get(_BITS, 16)
        white = 4095.0 if (bits[0] if isinstance(bits, tuple) else bits) == 12 else 65535.0
    scaled = values.astype(np.float64) * (255 / white)
    grey = np.rint(scaled).clip(0, 255).astype(np.uint8)
    return 255 - grey if tags.get(_PHOTOMETRIC) == 0 else grey  # white is zero: Pillow inverts 8 bits alone
