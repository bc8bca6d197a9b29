"""Compare our drawn frost textures with the generators' photographs, on real images: strength, spectrum, accuracy.

    pip install imagecorruptions    # in an environment of its own: only its folder of photographs is used
    python benchmarks/frost.py .../imagecorruptions/frost --out results/streams/frost.json \
        --images 224=imagenet-val 64=tiny-imagenet-val 32=cifar10/test --weights vit_tiny.safetensors

For each size, 49 crops of each texture, the same of both kinds, on 49 images from each folder (any depth, taken at
equal distances from the sorted list). `change` is the mean square change of the levels, drawn over photographs, at
severities 1 to 5: of all textures, and of each. `spectrum` is the power of the crops' luma in six rings of frequency,
drawn over photographs. Crops lie on a grid, so that the numbers do not depend on random draws.

`--weights` are those of timm's vit_tiny_patch16_224.augreg_in21k_ft_in1k; then `accuracy` is that network's, unadapted,
in percent, on 500 images of the folder of 224 pixels (a folder per class, all 1000) at severities 1 to 5, with the same
draws for both kinds of texture.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from poem.streams import corrupt, frost_source, profile_of
from poem.streams.corruptions import frost as _frost
from poem.streams.corruptions.levels import TABLE

GRID, RINGS = 7, 6
ENDINGS = (".jpg", ".jpeg", ".png")


def images(folder: Path, size: int) -> NDArray[np.float64]:
    """Images (49, size, size, 3) from a folder."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS)
    if len(files) < GRID**2:
        raise ValueError(f"expected {GRID**2} images or more in {folder}, found {len(files)}")
    chosen = [files[at * len(files) // GRID**2] for at in range(GRID**2)]
    found = np.stack([np.array(Image.open(path).convert("RGB")) for path in chosen]).astype(np.float64)
    if found.shape[1:3] != (size, size):
        raise ValueError(f"expected images of {size} pixels in {folder}, got {found.shape[1:3]}")
    return found


def measured(texture: Tensor, size: int, pictures: NDArray[np.float64]) -> tuple[list[float], NDArray[np.float64]]:
    """The mean square change at each severity, and the power of luma in rings of frequency."""
    levels = [TABLE["frost"].level(profile_of(size), severity) for severity in range(1, 6)]
    layer = _frost._enlarge_to_cover(texture, levels[0][2], size, size).permute(1, 2, 0).numpy()
    tops, lefts = (((np.arange(GRID) + 0.5) * (side - size) / GRID).astype(int) for side in layer.shape[:2])
    crops = np.stack([layer[top : top + size, left : left + size] for top in tops for left in lefts]).astype(float)
    changed = [np.floor((keep * pictures + cover * crops).clip(0, 255)) for keep, cover, _ in levels]
    power = np.abs(np.fft.fft2(crops @ np.array([0.299, 0.587, 0.114]))) ** 2
    ring = (np.hypot(*np.meshgrid(*[np.fft.fftfreq(size)] * 2)) * 2 * RINGS).astype(int)
    ring[0, 0] = RINGS
    rings = np.array([power[:, ring == at].mean() for at in range(RINGS)])
    return [float(((out - pictures) ** 2).mean()) for out in changed], rings


def accuracy(weights: Path, folder: Path, textures: Path) -> dict[str, list[float]]:
    """Accuracy in percent at each severity, with the photographs and with our own textures."""
    import timm
    from safetensors.torch import load_file

    net = timm.create_model("vit_tiny_patch16_224.augreg_in21k_ft_in1k")
    net.load_state_dict({name: value.float() for name, value in load_file(weights).items()})
    net.eval()
    names = sorted(path.name for path in folder.iterdir() if path.is_dir())
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in ENDINGS)
    files = [files[at * len(files) // 500] for at in range(500)]
    labels = torch.tensor([names.index(path.parent.name) for path in files])
    pixels = np.stack([np.array(Image.open(path).convert("RGB")) for path in files])
    clean = torch.from_numpy(pixels).permute(0, 3, 1, 2).contiguous()
    found: dict[str, list[float]] = {}
    for kind, source in (("photographs", textures), ("drawn", None)):
        _use(source)
        for severity in range(1, 6):
            frosted = corrupt(clean, "frost", severity).float() / 127.5 - 1
            with torch.inference_mode():
                right = torch.cat([net(batch).argmax(1) for batch in frosted.split(50)]) == labels
            found.setdefault(kind, []).append(round(100 * right.double().mean().item(), 1))
    return found


def _use(folder: Path | None) -> None:
    """Make `corrupt` use the photographs in a folder, or our own textures."""
    _frost._photograph_folder = lambda: folder  # type: ignore[assignment]
    _frost.textures.cache_clear()


def main() -> None:
    """Print the ratios, and write them to --out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photographs", type=Path)
    parser.add_argument("--images", nargs="+", required=True, metavar="SIZE=FOLDER")
    parser.add_argument("--weights", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    kinds = _frost._photographs(args.photographs), _frost._drawn_textures()
    rows: list[dict[str, Any]] = []
    for size, folder in (
        (int(size), Path(folder)) for size, _, folder in (each.partition("=") for each in args.images)
    ):
        pictures = images(folder, size)
        theirs, ours = ([measured(layer, size, pictures) for layer in kind] for kind in kinds)
        change, power = ([np.array([row[at] for row in mine]) for mine in (theirs, ours)] for at in (0, 1))
        rows.append(
            {
                "size": size,
                "images": folder.name,
                "change": (change[1].mean(0) / change[0].mean(0)).round(3).tolist(),
                "change_by_texture": (change[1] / change[0]).round(3).tolist(),
                "spectrum": (power[1].mean(0) / power[0].mean(0)).round(2).tolist(),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    found: dict[str, Any] = {"command": "python benchmarks/frost.py", "crops": GRID**2, "rows": rows}
    if args.weights:
        (folder,) = (Path(each.partition("=")[2]) for each in args.images if each.startswith("224="))
        found["accuracy"] = accuracy(args.weights, folder, args.photographs)
        print(json.dumps(found["accuracy"]))
    _use(None)
    if args.out:
        args.out.write_text(json.dumps({"textures": frost_source(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
