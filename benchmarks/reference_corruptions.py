"""Make tests/data/corruptions.json: the output of the public generators, for our tests to compare with.

Run in a throw-away environment, never in the project's own (the package does not import on current libraries and is
patched here at run time, see `import_imagecorruptions`):

    python -m venv /tmp/refenv
    /tmp/refenv/bin/pip install imagecorruptions scikit-image scipy opencv-python-headless numpy pillow
    /tmp/refenv/bin/python benchmarks/reference_corruptions.py tests/data/corruptions.json

At 224 pixels the numbers come from the package `imagecorruptions` itself. At 32 pixels they come from the same
functions with their constants replaced by those of make_cifar_c.py (hendrycks/robustness), since that file's functions
do not differ otherwise. Elastic transform, which the package defines otherwise, is written out below
after make_imagenet_c.py and make_cifar_c.py; frost at 32 pixels is fed textures shrunk to a fifth, as there.

Deterministic corruptions are kept as the exact levels on a lattice of pixels; random ones as mean, standard deviation
and power spectrum (mean log10 power of the change of luma in rings of frequency), each with its spread over the draws.

The section "frost" holds statistics of the five frost photographs, which may not be shipped: those that our textures
are drawn from ("looks", the numbers of poem/streams/corruptions/frost.py) and those of crops at 224, 64 and 32 pixels
("crops"). To make this section alone again, leaving the others as they are:

    /tmp/refenv/bin/python benchmarks/reference_corruptions.py tests/data/corruptions.json frost
"""

from __future__ import annotations

import ast
import base64
import importlib.util
import inspect
import json
import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

STEP = {224: 15, 32: 5}
DRAWS = {224: 6, 32: 24}
RINGS = 6
CERTAIN = [
    "defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression", "saturate", "gaussian_blur",
]  # fmt: skip
CHANCE = [
    "gaussian_noise", "shot_noise", "impulse_noise", "speckle_noise", "glass_blur", "motion_blur", "snow", "frost",
    "fog", "elastic_transform", "spatter",
]  # fmt: skip
CIFAR: dict[str, str] = {
    "gaussian_noise": "[0.04, 0.06, 0.08, 0.09, 0.10]",
    "shot_noise": "[500, 250, 100, 75, 50]",
    "impulse_noise": "[0.01, 0.02, 0.03, 0.05, 0.07]",
    "speckle_noise": "[0.06, 0.1, 0.12, 0.16, 0.2]",
    "gaussian_blur": "[0.4, 0.6, 0.7, 0.8, 1]",
    "glass_blur": "[(0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)]",
    "defocus_blur": "[(0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)]",
    "motion_blur": "[(6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)]",
    "zoom_blur": "[np.arange(1, 1 + 0.01 * n, 0.01) for n in (6, 11, 16, 21, 26)]",
    "fog": "[(0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)]",
    "frost": "[(1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)]",
    "snow": "[(0.1, 0.2, 1, 0.6, 8, 3, 0.95), (0.1, 0.2, 1, 0.5, 10, 4, 0.9), (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9), "
    "(0.25, 0.3, 2.25, 0.6, 12, 6, 0.85), (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8)]",
    "spatter": "[(0.62, 0.1, 0.7, 0.7, 0.5, 0), (0.65, 0.1, 0.8, 0.7, 0.5, 0), (0.65, 0.3, 1, 0.69, 0.5, 0), "
    "(0.65, 0.1, 0.7, 0.69, 0.6, 1), (0.65, 0.1, 0.5, 0.68, 0.6, 1)]",
    "contrast": "[0.75, 0.5, 0.4, 0.3, 0.15]",
    "brightness": "[0.05, 0.1, 0.15, 0.2, 0.3]",
    "saturate": "[(0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)]",
    "jpeg_compression": "[80, 65, 58, 50, 40]",
    "pixelate": "[0.95, 0.9, 0.85, 0.75, 0.65]",
}
ELASTIC = {
    224: [(2, 0.7, 0.1), (2, 0.08, 0.2), (0.05, 0.01, 0.02), (0.07, 0.01, 0.02), (0.12, 0.01, 0.02)],
    32: [(0, 0, 0.08), (0.05, 0.2, 0.07), (0.08, 0.06, 0.06), (0.1, 0.04, 0.05), (0.1, 0.03, 0.03)],
}
FROST = {
    224: (1.0, [(1, 0.4), (0.8, 0.6), (0.7, 0.7), (0.65, 0.7), (0.6, 0.75)]),
    64: (0.3, [(1, 0.3), (0.9, 0.4), (0.8, 0.45), (0.75, 0.5), (0.7, 0.55)]),
    32: (0.2, [(1, 0.2), (1, 0.3), (0.9, 0.4), (0.85, 0.4), (0.75, 0.45)]),
}  # size: scale of the textures, then the weights of image and texture at each severity
PHOTOGRAPHS = ("frost1.png", "frost2.png", "frost3.png", "frost4.jpg", "frost5.jpg")  # a sixth is never drawn
SHARES = (0.001, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999)
BANDS, SEEN, GRID = 15, 192, 7
LUMA = np.array([0.299, 0.587, 0.114])


def scene(size: int, index: int) -> np.ndarray:
    """Return a made-up uint8 image (size, size, 3): waves, a chirp, a dark box, a bright disk, a little grain."""
    y, x = np.mgrid[0:size, 0:size] / size
    planes = []
    for channel in range(3):
        waves = np.sin(2 * np.pi * ((index + 1) * x + (channel + 1) * y + 0.1 * index))
        chirp = np.sin(40 * x * y * (index + 1) + channel)
        grain = np.sin(12.9898 * size * x + 78.233 * size * y + 37 * index + channel) * 43758.5453
        plane = 118 + 70 * waves + 28 * chirp + 16 * (grain - np.floor(grain) - 0.5)
        plane = np.where((abs(x - 0.3) < 0.12) & (abs(y - 0.6) < 0.2), 25 + 15 * channel, plane)
        planes.append(np.where((x - 0.7) ** 2 + (y - 0.35) ** 2 < 0.03, 235 - 30 * index + 8 * channel, plane))
    return np.stack(planes, -1).round().clip(0, 255).astype(np.uint8)


def import_imagecorruptions() -> types.ModuleType:
    """Import imagecorruptions on current libraries, with stand-ins for the functions that these have removed."""
    import scipy.ndimage
    import skimage.filters

    np.float_ = np.float64  # type: ignore[attr-defined]
    spec = importlib.util.find_spec("imagecorruptions")
    if spec is None or spec.origin is None:
        raise ImportError("imagecorruptions is not installed; see the head of this file")
    home = os.path.dirname(spec.origin)
    resources = types.ModuleType("pkg_resources")
    resources.resource_filename = lambda _, path: os.path.join(home, path)  # type: ignore[attr-defined]
    interpolation = types.ModuleType("scipy.ndimage.interpolation")
    interpolation.map_coordinates = scipy.ndimage.map_coordinates  # type: ignore[attr-defined]
    sys.modules["pkg_resources"], sys.modules["scipy.ndimage.interpolation"] = resources, interpolation
    plain = skimage.filters.gaussian

    def gaussian(image: Any, *args: Any, multichannel: bool = False, **options: Any) -> Any:
        return plain(image, *args, **({"channel_axis": -1} if multichannel else {}), **options)

    skimage.filters.gaussian = gaussian
    return importlib.import_module("imagecorruptions.corruptions")


def with_constants(package: types.ModuleType, name: str, constants: str) -> Callable[..., Any]:
    """Return the package's function with the list it assigns to `c` replaced."""

    class Swap(ast.NodeTransformer):
        def visit_Assign(self, node: ast.Assign) -> ast.Assign:
            target = node.targets[0]
            if isinstance(target, ast.Name) and target.id == "c":
                node.value = ast.parse(f"({constants})[severity - 1]", mode="eval").body
            return node

    tree = ast.fix_missing_locations(Swap().visit(ast.parse(inspect.getsource(getattr(package, name)))))
    space = dict(vars(package))
    exec(compile(tree, name, "exec"), space)
    return space[name]  # type: ignore[no-any-return]


def elastic(picture: Any, severity: int) -> np.ndarray:
    """Warp by a random affine map, then by smoothed noise (after the two generators; theirs is the order of draws)."""
    import cv2
    from scipy.ndimage import gaussian_filter, map_coordinates

    image = np.asarray(picture, np.float32)
    size = image.shape[0]
    alpha, sigma, shake = (part * (244 if size == 224 else size) for part in ELASTIC[size][severity - 1])
    half, third = size // 2, size // 3
    corners = half + third * np.array([[1, 1], [1, -1], [-1, -1]], np.float32)
    moved = (corners + np.random.uniform(-shake, shake, (3, 2))).astype(np.float32)
    affine = cv2.getAffineTransform(corners, moved)
    image = cv2.warpAffine(image, affine, (size, size), borderMode=cv2.BORDER_REFLECT_101)
    right, down = (
        alpha * gaussian_filter(np.random.uniform(-1, 1, (size, size)), sigma, mode="reflect", truncate=3) for _ in "xy"
    )
    y, x = np.mgrid[0:size, 0:size]
    planes = [map_coordinates(image[..., c], [y + down, x + right], order=1, mode="reflect") for c in range(3)]
    return np.stack(planes, -1).clip(0, 255)


def function(package: types.ModuleType, name: str, size: int) -> Callable[[np.ndarray, int], np.ndarray]:
    """Return uint8 image, severity -> uint8 image."""
    import cv2
    from PIL import Image

    if name == "elastic_transform":
        made: Callable[..., Any] = elastic
    elif size == 32:
        made = with_constants(package, name, CIFAR[name])
    else:
        made = getattr(package, name)
    if name == "frost" and size == 32:
        full = cv2.imread

        def frost(picture: Any, severity: int) -> Any:
            cv2.imread = lambda path: cv2.resize(full(path), (0, 0), fx=0.2, fy=0.2)
            try:
                return with_constants(package, "frost", CIFAR["frost"])(picture, severity)
            finally:
                cv2.imread = full

        made = frost
    return lambda image, severity: np.uint8(np.array(made(Image.fromarray(image), severity)))


def spectrum(change: np.ndarray) -> np.ndarray:
    """Return the mean log10 power of the change of luma in rings of frequency, the constant left out."""
    luma = change @ LUMA
    power = np.abs(np.fft.fft2(luma)) ** 2 / luma.size
    frequency = np.hypot(*np.meshgrid(*[np.fft.fftfreq(luma.shape[0])] * 2))
    ring = np.minimum((frequency * 2 * RINGS).astype(int), RINGS)
    ring[0, 0] = -1
    return np.array([np.log10(power[ring == at].mean() + 1e-3) for at in range(RINGS)])


def texture_statistics(photograph: np.ndarray) -> dict[str, Any]:
    """Return the statistics that a frost texture is drawn from; pixels are weighted by the crops that contain them.

    `levels`: red, green and blue at SHARES of the pixels. `power`: log10 of the mean power of luma in half octaves of
    frequency, the first at 1/256 cycles per pixel and below. `colours`: correlations red-green, red-blue, green-blue.
    """
    ends = [np.minimum(np.arange(side) + 1, side - np.arange(side)) for side in photograph.shape[:2]]
    down, right = (np.minimum(end, min(SEEN, len(end) - SEEN + 1)) for end in ends)
    weight = np.outer(down, right) / (down.sum() * right.sum())
    planes = photograph.reshape(-1, 3).T.astype(float)
    levels = []
    for plane in planes:
        order = plane.argsort()
        levels.append(np.interp(SHARES, weight.ravel()[order].cumsum(), plane[order]).round().astype(int).tolist())
    luma = photograph @ LUMA
    power = np.abs(np.fft.rfft2((luma - (luma * weight).sum()) * np.sqrt(weight))) ** 2
    frequency = np.hypot(np.fft.fftfreq(len(luma))[:, None], np.fft.rfftfreq(luma.shape[1]))
    band = (2 * np.log2(256 * np.maximum(frequency, 1 / 256))).round().clip(0, BANDS - 1).astype(int)
    means = np.bincount(band.ravel(), power.ravel(), BANDS) / np.bincount(band.ravel(), minlength=BANDS)
    together = np.cov(planes, aweights=weight.ravel())
    spread = np.sqrt(np.diag(together))
    pairs = (together / np.outer(spread, spread))[[0, 0, 1], [1, 2, 2]]
    return {
        "size": list(luma.shape), "levels": levels, "power": np.log10(means).round(2).tolist(),
        "colours": np.round(pairs, 3).tolist(),
    }  # fmt: skip


def crops(photograph: np.ndarray, size: int) -> dict[str, Any]:
    """Return statistics of GRID x GRID crops, and the mean square change they make to the scenes at each severity.

    `mean` of luma, `within` crops its deviation, `between` crops that of their means; `levels` of luma at SHARES;
    `spectrum` of the crops; `change` of severities 1 to 5.
    """
    import cv2

    scale, weights = FROST[size]
    texture = photograph if scale == 1 else cv2.resize(photograph, (0, 0), fx=scale, fy=scale)
    tops, lefts = (((np.arange(GRID) + 0.5) * (side - size) / GRID).astype(int) for side in texture.shape[:2])
    cut = np.stack([texture[top : top + size, left : left + size] for top in tops for left in lefts]).astype(float)
    luma = cut @ LUMA
    images = np.stack([scene(size, at % 4) for at in range(len(cut))]).astype(float)
    change = [(np.floor((keep * images + cover * cut).clip(0, 255)) - images) for keep, cover in weights]
    return {
        "mean": round(luma.mean(), 2), "within": round(luma.var((1, 2)).mean() ** 0.5, 2),
        "between": round(luma.mean((1, 2)).std(), 2), "levels": np.quantile(luma, SHARES).round(1).tolist(),
        "spectrum": np.log10(np.mean([10 ** spectrum(one) for one in cut], 0)).round(3).tolist(),
        "change": [round((each**2).mean(), 1) for each in change],
    }  # fmt: skip


def frost(package: types.ModuleType) -> dict[str, Any]:
    """Return the section "frost"."""
    from PIL import Image

    folder = Path(str(package.__file__)).parent / "frost"
    photographs = [np.array(Image.open(folder / name).convert("RGB")) for name in PHOTOGRAPHS]
    return {
        "shares": SHARES,
        "looks": [texture_statistics(photograph) for photograph in photographs],
        "crops": {str(size): [crops(photograph, size) for photograph in photographs] for size in FROST},
    }


def main() -> None:
    """Write the file named on the command line, or one section of it."""
    package = import_imagecorruptions()
    if sys.argv[2:] == ["frost"]:
        path = Path(sys.argv[1])
        path.write_text(json.dumps({**json.loads(path.read_text()), "frost": frost(package)}, indent=0) + "\n")
        return
    made: dict[str, Any] = {"step": STEP, "certain": {}, "chance": {}, "frost": frost(package)}
    for size in (224, 32):
        scenes = [scene(size, index) for index in range(4)]
        lattice = slice(STEP[size] // 2, None, STEP[size])
        for name in CERTAIN:
            apply = function(package, name, size)
            for severity in range(1, 6):
                points = np.stack([apply(image, severity)[lattice, lattice] for image in scenes])
                made["certain"][f"{name}/{size}/{severity}"] = base64.b64encode(points.tobytes()).decode()
        for name in CHANCE:
            apply = function(package, name, size)
            for severity in (1, 3, 5):
                np.random.seed(severity)
                rows = []
                for image in scenes * (1 if name == "glass_blur" and size == 224 else DRAWS[size]):
                    out = apply(image, severity).astype(float)
                    rows.append([out.mean(), out.std(), *spectrum(out - image)])
                table = np.array(rows)
                made["chance"][f"{name}/{size}/{severity}"] = {
                    "mean": np.round(table.mean(0), 3).tolist(),
                    "error": np.round(table.std(0) / len(table) ** 0.5, 3).tolist(),
                }
            print(name, size, flush=True)
    Path(sys.argv[1]).write_text(json.dumps(made, indent=0) + "\n")


if __name__ == "__main__":
    main()
