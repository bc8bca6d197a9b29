"""Corrupt images: the 15 corruptions of ImageNet-C and its 4 extra ones, in torch, on any device.

`corrupt(images, "fog", 5)` returns a corrupted batch. The result for an image depends on the seed, the image's id, the
corruption, the severity and the size, not on the batch. Random numbers have the same bits on every device. So have the
results for uint8 images, except zoom_blur, whose sums a GPU may round otherwise: a level may then be off by one. Float
images may differ between devices by rounding.

Constants are those of the public generators of ImageNet-C (224 pixels), Tiny-ImageNet-C (64) and CIFAR-10-C (32); the
profile nearest in size is taken unless one is named, and `profile_of` says which.

Paper: Hendrycks, Dietterich, "Benchmarking Neural Network Robustness to Common Corruptions and Perturbations", ICLR
    2019; Michaelis et al., "Benchmarking Robustness in Object Detection: Autonomous Driving when Winter is Coming",
    2019 (motion blur without ImageMagick).
Reference code: hendrycks/robustness, bethgelab/imagecorruptions.
Differs: the random numbers; motion blur and snow smear as in imagecorruptions, on whole pixels, where the published
    ImageNet-C used ImageMagick; frost is drawn by code unless imagecorruptions is installed (`frost_source`); the edge
    distances of spatter are exact; spatter without a drop leaves the image as it is instead of dividing by zero; levels
    that float error would round one lower keep their value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from poem._util.integers import as_integer
from poem._util.nearest import nearest_hint
from poem.streams.corruptions.filters import floor_levels
from poem.streams.corruptions.frost import frost_source
from poem.streams.corruptions.levels import TABLE, Corruption
from poem.streams.corruptions.random_numbers import ImageRandom
from poem.streams.shift import CORRUPTIONS, EXTRA

__all__ = ["CORRUPTIONS", "EXTRA", "PROFILES", "check_arguments", "corrupt", "frost_source", "profile_of"]

PROFILES: dict[str, int] = {"imagenet": 224, "tiny-imagenet": 64, "cifar": 32}
"""Profiles and the image size, in pixels, that their constants were chosen for."""

_GPU_CHUNK = 1 << 25  # values per chunk on a GPU

Ids = Sequence[int | str] | Tensor | NDArray[np.int64]


def profile_of(size: int) -> str:
    """Return the profile whose image size is nearest to `size` pixels (the shorter side); of two, the larger."""
    return min(PROFILES, key=lambda name: (abs(PROFILES[name] - size), -PROFILES[name]))


def corrupt(
    images: Any, name: str, severity: int, *, seed: int = 0, ids: Ids | None = None, profile: str | None = None
) -> Any:
    """Return the images corrupted, in the form they came in.

    Takes tensors (N, C, H, W) of uint8, or of floats in [0, 1]; arrays (N, H, W, C) likewise; a PIL image or a list of
    them. C is 1 or 3. Levels of uint8 images are rounded down as in the generators; floats keep their fraction (shot
    noise, pixelate and JPEG round them to 8 bits first).

    `ids` identify the images (numbers or strings); by default an id is the position in the batch. Equal ids and seeds
    give equal random numbers, so a stream that is cut into batches passes its indices. `profile` is "imagenet",
    "tiny-imagenet" or "cifar", by default `profile_of` the shorter side.
    """
    severity, number = check_arguments(name, severity, profile), as_integer(seed)
    if number is None:
        raise ValueError(f"expected an integer seed, got {seed!r}")
    seed = number
    if isinstance(images, Tensor):
        return _corrupt_batch(images, name, severity, seed, ids, profile)
    if isinstance(images, np.ndarray):
        if images.ndim != 4:
            raise ValueError(
                f"expected an array (N, H, W, C), got shape {images.shape}; for one image pass image[None]"
            )
        tensor = torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2)
        return _corrupt_batch(tensor, name, severity, seed, ids, profile).permute(0, 2, 3, 1).contiguous().numpy()
    single = not isinstance(images, list | tuple)
    pictures = [images] if single else list(images)
    if not pictures or not all(hasattr(picture, "convert") and hasattr(picture, "mode") for picture in pictures):
        came = type(images).__name__ if single else f"a list of {sorted({type(one).__name__ for one in pictures})}"
        raise ValueError(
            f"expected a tensor (N, C, H, W), an array (N, H, W, C), a PIL image or a list of PIL images, got {came}; "
            "stack tensors with torch.stack"
        )
    names = _checked_ids(ids, len(pictures))
    out = [
        _corrupt_pil(picture, name, severity, seed, one, profile) for picture, one in zip(pictures, names, strict=True)
    ]
    return out[0] if single else out


def _corrupt_pil(picture: Any, name: str, severity: int, seed: int, one: int | str, profile: str | None) -> Any:
    """Corrupt one PIL image; mode L stays, everything else becomes RGB."""
    from PIL import Image

    pixels = np.array(picture if picture.mode == "L" else picture.convert("RGB"))
    array = pixels[None, ..., None] if picture.mode == "L" else pixels[None]
    out = corrupt(array, name, severity, seed=seed, ids=[one], profile=profile)[0]
    return Image.fromarray(out[..., 0] if picture.mode == "L" else out)


def _corrupt_batch(images: Tensor, name: str, severity: int, seed: int, ids: Ids | None, profile: str | None) -> Tensor:
    """Corrupt a tensor (N, C, H, W) in chunks of images."""
    if images.dim() != 4 or images.shape[1] not in (1, 3) or min(images.shape[-2:]) < 8:
        raise ValueError(
            f"expected images (N, C, H, W) with 1 or 3 channels and sides of 8 pixels or more, got shape "
            f"{tuple(images.shape)}; for one image pass image[None], for (N, H, W, C) pass images.permute(0, 3, 1, 2)"
        )
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise ValueError(f"expected uint8 images, or floats in [0, 1], got {images.dtype}; pass images.to(torch.uint8)")
    names = _checked_ids(ids, len(images))
    if images.is_floating_point() and len(images):
        low, high = images.amin().item(), images.amax().item()
        if not (low >= 0 and high <= 1):
            raise ValueError(
                f"expected float images in [0, 1], got {low:.3g} to {high:.3g}; corrupt before normalisation"
            )
    height, width = images.shape[-2:]
    entry = TABLE[name]
    level = entry.level(profile or profile_of(min(height, width)), severity)
    purpose = f"{seed}|{name}|{severity}|{height}x{width}"
    chunk = entry.chunk if images.device.type == "cpu" else _GPU_CHUNK
    size = max(1, chunk // max(images[:1].numel(), 1))
    out = torch.empty_like(images)
    with torch.no_grad():
        for start in range(0, len(images), size):
            rng = ImageRandom(names[start : start + size], purpose, images.device)
            done = _corrupt_chunk(images[start : start + size], entry, rng, level)
            if len(images) <= size:
                return done
            out[start : start + size] = done
    return out


def _corrupt_chunk(images: Tensor, entry: Corruption, rng: ImageRandom, level: tuple[Any, ...]) -> Tensor:
    """Corrupt one chunk; the result is uint8 for uint8 images, floats in [0, 1] for floats."""
    floats = images.is_floating_point()
    levels = images.to(torch.float32) * 255 if floats else images
    if entry.uint8:
        out = entry.apply(levels.round_().to(torch.uint8) if floats else levels, rng, *level)
    else:
        out = entry.apply(levels.to(torch.float32).contiguous(), rng, *level)
        out = out if floats else floor_levels(out).to(torch.uint8)
    return (out / 255).clamp_(0, 1).to(images.dtype) if floats else out


def check_arguments(name: str, severity: int, profile: str | None = None) -> int:
    """Raise if a name, severity or profile does not exist; return the severity as an int."""
    if name not in TABLE:
        names = f"the names are {', '.join(TABLE)}"
        hint = nearest_hint(str(name), TABLE, most=3, cutoff=0.5, show=str, otherwise=names)
        raise ValueError(f"expected the name of a corruption, got {name!r}; {hint}")
    number = as_integer(severity)
    if number not in (1, 2, 3, 4, 5):
        raise ValueError(f"expected severity 1, 2, 3, 4 or 5, got {severity!r}; for clean images do not call corrupt")
    if profile is not None and profile not in PROFILES:
        raise ValueError(
            f"expected profile {', '.join(PROFILES)} or None, got {profile!r}; None takes the nearest size"
        )
    return number


def _checked_ids(ids: Ids | None, count: int) -> list[int | str]:
    """Return one id per image, positions by default; raise if their number or type is wrong."""
    if ids is None:
        return list(range(count))
    given = ids.tolist() if isinstance(ids, Tensor | np.ndarray) else list(ids)
    names = [name for one in given if (name := one if isinstance(one, str) else as_integer(one)) is not None]
    if len(given) != count or len(names) != count:
        kinds = sorted({type(one).__name__ for one in given})
        raise ValueError(
            f"expected {count} ids, one int or str per image, got {len(given)} of {kinds}; "
            f"pass ids=range(start, start + {count})"
        )
    return names
