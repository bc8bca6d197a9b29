"""Make docs/contact_sheet.png: one made-up picture under every corruption at every severity.

    python benchmarks/contact_sheet.py [docs/contact_sheet.png]

Needs Pillow. The picture is drawn here, so that no photograph is needed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from poem.streams import CORRUPTIONS, EXTRA, corrupt, frost_source

CELL, LEFT, TOP = 112, 118, 16


def picture(size: int = 224) -> NDArray[np.uint8]:
    """A house, a tree, a fence and the sun, uint8 (size, size, 3): flat areas, fine lines and texture."""
    y, x = np.mgrid[0:size, 0:size] / size

    def mix(red: object, green: object, blue: object) -> NDArray[np.float64]:
        return np.stack(np.broadcast_arrays(red, green, blue, x)[:3], -1).astype(np.float64)

    texture = 8 * np.sin(90 * x + 40 * y) * np.sin(70 * y - 30 * x)
    sky = mix(110 + 60 * y, 160 + 50 * y, 225 - 10 * y)
    grass = mix(70 + 60 * (y - 0.6) + texture, 125 + 40 * (y - 0.6) + texture, 50 + texture)
    hill = 0.62 + 0.06 * np.sin(7 * x + 1) + 0.02 * np.sin(31 * x)
    image = np.where((y > hill)[..., None], grass, sky)
    bricks = mix(178 + 10 * np.sin(120 * y), 84 + 8 * np.sin(120 * y), 66)
    leaves = mix(40 + 20 * np.sin(60 * x), 105 + 30 * np.sin(50 * y + 40 * x), 45)
    rim = 0.014 + 0.002 * np.sin(20 * np.arctan2(y - 0.44, x - 0.72))
    panes = [(abs(x - at) < 0.035) & (abs(y - 0.54) < 0.045) for at in (0.28, 0.44)]
    bars = [
        pane & ((abs(x - at) < 0.005) | (abs(y - 0.54) < 0.005)) for pane, at in zip(panes, (0.28, 0.44), strict=True)
    ]
    pickets = (y > 0.8) & (y < 0.9) & ((x * 30 % 1) < 0.35)
    for where, colour in (
        ((x - 0.78) ** 2 + (y - 0.2) ** 2 < 0.008, mix(255, 236, 150)),
        ((abs(x - 0.36) < 0.16) & (y > 0.42) & (y < 0.76), bricks),
        ((y > 0.24) & (y < 0.42) & (abs(x - 0.36) < (y - 0.24) * 1.15), mix(92, 52, 48)),
        (panes[0] | panes[1], mix(235, 240, 190)),
        (bars[0] | bars[1], mix(70, 50, 40)),
        ((abs(x - 0.36) < 0.03) & (y > 0.62) & (y < 0.76), mix(66, 44, 36)),
        ((abs(x - 0.72) < 0.018) & (y > 0.5) & (y < 0.74), mix(96, 66, 40)),
        ((x - 0.72) ** 2 + (y - 0.44) ** 2 / 1.3 < rim, leaves),
        (pickets | (abs(y - 0.83) < 0.008) | (abs(y - 0.87) < 0.008), mix(225, 215, 200)),
    ):
        image[where] = colour[where]
    return image.clip(0, 255).astype(np.uint8)


def main() -> None:
    """Draw the sheet and say which frost textures it shows."""
    out = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).resolve().parents[1] / "docs/contact_sheet.png")
    torch.set_num_threads(1)
    pixels, names = picture(), CORRUPTIONS + EXTRA
    sheet = Image.new("RGB", (LEFT + 6 * CELL, TOP + len(names) * CELL), "white")
    draw = ImageDraw.Draw(sheet)
    for severity in range(6):
        draw.text((LEFT + severity * CELL + 4, 3), f"severity {severity}" if severity else "clean", fill="black")
    for row, name in enumerate(names):
        draw.text((4, TOP + row * CELL + 50), name, fill="black")
        for severity in range(6):
            shown = corrupt(pixels[None], name, severity, ids=[row])[0] if severity else pixels
            small = Image.fromarray(shown).resize((CELL - 2, CELL - 2), Image.Resampling.LANCZOS)
            sheet.paste(small, (LEFT + severity * CELL, TOP + row * CELL))
    sheet.quantize(256, method=Image.Quantize.MEDIANCUT, dither=Image.Dither.NONE).save(out, optimize=True)
    print(f"{out}: {out.stat().st_size} bytes, frost textures: {frost_source()}")


if __name__ == "__main__":
    main()
