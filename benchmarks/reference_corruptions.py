"""Make tests/data/corruptions.json: what the public generators give, for our tests to compare with.

Run in a throw-away environment, never in the project's own (the package is broken on current libraries and is repaired
here at run time, see `repaired`):

    python -m venv /tmp/refenv
    /tmp/refenv/bin/pip install imagecorruptions scikit-image scipy opencv-python-headless numpy pillow
    /tmp/refenv/bin/python benchmarks/reference_corruptions.py tests/data/corruptions.json

At 224 pixels the numbers come from the package `imagecorruptions` itself. At 32 pixels they come from the same
functions with their constants replaced by those of make_cifar_c.py (hendrycks/robustness), since that file's functions
differ in nothing else that matters here. Elastic transform, which the package defines otherwise, is written out below
after make_imagenet_c.py and make_cifar_c.py; frost at 32 pixels is fed textures shrunk to a fifth, as there.

Deterministic corruptions are kept as the exact levels on a lattice of pixels; random ones as mean, standard deviation
and power spectrum (mean log10 power of the change of luma in rings of frequency), each with its spread over the draws.
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


def repaired() -> types.ModuleType:
    """Import imagecorruptions on current libraries, by giving back what they have dropped."""
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
    luma = change @ np.array([0.299, 0.587, 0.114])
    power = np.abs(np.fft.fft2(luma)) ** 2 / luma.size
    frequency = np.hypot(*np.meshgrid(*[np.fft.fftfreq(luma.shape[0])] * 2))
    ring = np.minimum((frequency * 2 * RINGS).astype(int), RINGS)
    ring[0, 0] = -1
    return np.array([np.log10(power[ring == at].mean() + 1e-3) for at in range(RINGS)])


def main() -> None:
    """Write the file named on the command line."""
    package = repaired()
    made: dict[str, Any] = {"step": STEP, "certain": {}, "chance": {}}
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
