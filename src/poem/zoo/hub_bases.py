"""Bases by hub id: `timm:NAME`, `torchvision:NAME.WEIGHTS`, `hf:ORG/NAME` or `hf:FOLDER`.

Normalisation, size and number of classes are those that the library states for the weights.
"""

from __future__ import annotations

import logging
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from torch import nn

from poem._util.nearest import nearest_hint
from poem.zoo import nets
from poem.zoo.catalog import NONE, Base, Triple

log = logging.getLogger("poem")

EXTRAS = {"timm": "pip install 'poem-tta[bench]'", "torchvision": "pip install 'poem-tta[bench]'",
          "transformers": "pip install transformers"}  # fmt: skip
"""What to type for a library that is not installed."""
HUBS = {"timm": "timm", "torchvision": "torchvision", "hf": "transformers"}
"""Library of each hub."""


def is_hub_id(name: str) -> bool:
    """Whether a name is written as a hub id."""
    hub, _, rest = name.partition(":")
    return hub in HUBS and bool(rest)


@lru_cache(maxsize=64)
def hub_base(name: str) -> Base:
    """The base of a hub id; no weights are downloaded, of `hf:` the configuration is.

    Raises:
        ImportError: The library is not installed.
        ValueError: It has no such network or weights, or, of `hf:`, preprocessing that a base does not have.
        FileNotFoundError: Of `hf:`, the configuration is neither on this machine nor can it be downloaded.
    """
    hub, _, rest = name.partition(":")
    return {"timm": _timm, "torchvision": _torchvision, "hf": _hugging_face}[hub](name, rest)


def _library(name: str, hub: str) -> Any:
    library = HUBS[hub]
    try:
        return import_module(library)
    except ImportError as error:
        raise ImportError(f"{name} is built by {library}, which cannot be imported; {EXTRAS[library]}") from error


def _timm(name: str, rest: str) -> Base:
    timm = _library(name, "timm")
    try:
        config = timm.models.get_pretrained_cfg(rest)
    except RuntimeError:  # a network that it has, with a tag that it has not
        config = None
    if config is None or not (config.hf_hub_id or config.url):
        known = timm.list_models(pretrained=True)
        hint = nearest_hint(rest, known, otherwise="timm.list_models(pretrained=True) has all")
        raise ValueError(f"timm has no weights {rest!r}; {hint}")
    full = f"{config.architecture}.{config.tag}" if config.tag else str(config.architecture)
    crop = int(config.input_size[-1])
    return Base(
        name=name, kind="timm", arch=full, tag=full, file=f"{full}.safetensors", mean=_triple(config.mean),
        std=_triple(config.std), resize=int(crop / (config.crop_pct or 1.0)), crop=crop,
        interpolation=_interpolation(config.interpolation), classes=int(config.num_classes),
        notes="preprocessing as timm states it",
    )  # fmt: skip


def _torchvision(name: str, rest: str) -> Base:
    models = _library(name, "torchvision").models
    arch, _, tag = rest.partition(".")
    if arch not in models.list_models():
        hint = nearest_hint(arch, models.list_models(), otherwise="torchvision.models.list_models() has all")
        raise ValueError(f"torchvision has no network {arch!r}; {hint}")
    weights = models.get_model_weights(arch)
    if tag and tag not in weights.__members__:
        hint = nearest_hint(tag, weights.__members__)
        raise ValueError(f"torchvision has no weights {tag!r} of {arch}; {hint}")
    chosen = weights[tag] if tag else weights.DEFAULT
    steps, classes = chosen.transforms(), chosen.meta.get("categories", ())
    if not hasattr(steps, "crop_size") or not classes or "Quantized" in type(chosen).__name__:
        raise ValueError(f"expected an image classifier of torchvision, got {name}")
    return Base(
        name=name, kind="torchvision", arch=arch, tag=str(chosen), file=chosen.url.rsplit("/", 1)[-1],
        mean=_triple(steps.mean), std=_triple(steps.std), resize=int(steps.resize_size[0]),
        crop=int(steps.crop_size[0]), interpolation=_interpolation(steps.interpolation.value), classes=len(classes),
        notes="preprocessing as torchvision states it",
    )  # fmt: skip


def _hugging_face(name: str, rest: str) -> Base:
    transformers = _library(name, "hf")
    where = _folder_or_id(rest)
    config = _fetch(name, lambda **local: transformers.AutoConfig.from_pretrained(where, **local))
    steps = _processor_settings(transformers, where, name)
    mean, std = _stated_normalisation(steps, name)
    resize, crop, direct = _stated_sizes(steps, name, int(getattr(config, "image_size", 0) or 0))
    return Base(
        name=name, kind="transformers", arch=where, tag=where, file="", mean=mean, std=std, resize=resize, crop=crop,
        interpolation=_stated_interpolation(steps, name), direct=direct, classes=int(config.num_labels),
        notes="preprocessing as its image processor states it",
    )  # fmt: skip


def _unable(name: str, what: str) -> ValueError:
    """The error for a step of an image processor that a base does not have."""
    return ValueError(
        f"expected a short side and a centre crop, or a square, then mean and std, of {name}, got {what} in its "
        "preprocessor_config.json; write a function that returns the network with that step inside, and name it as "
        "package.module:function"
    )


def _stated_normalisation(steps: dict[str, Any], name: str) -> tuple[Triple, Triple]:
    """Mean and std of images from 0 to 1 that give what an image processor gives.

    It multiplies pixels from 0 to 255 by its factor, then subtracts its mean and divides by its std: with a factor of
    k / 255, that is mean / k and std / k.
    """
    for word in ("do_flip_channel_order", "do_grayscale", "rescale_offset"):
        if steps.get(word):
            raise _unable(name, f"{word} {steps[word]}")
    scale = 1.0
    if not steps.get("do_rescale", True):
        scale = 255.0
    elif steps.get("rescale_factor") is not None:
        scale = float(steps["rescale_factor"]) * 255
    if not scale > 0:
        raise _unable(name, f"rescale_factor {steps['rescale_factor']}")
    mean, std = NONE
    if steps.get("do_normalize", "image_mean" in steps):
        for word in ("image_mean", "image_std"):
            if steps.get(word) is None:
                raise ValueError(
                    f"expected {word} of {name}, which states do_normalize, got none; write three numbers as {word} "
                    "into its preprocessor_config.json, or do_normalize: false"
                )
        mean, std = _triple(steps["image_mean"]), _triple(steps["image_std"])
        if steps.get("include_top"):  # EfficientNet's divides by its std twice
            std = _triple([each**2 for each in std])
    if abs(scale - 1) < 1e-5:
        return mean, std
    return _triple([each / scale for each in mean]), _triple([each / scale for each in std])


def _stated_sizes(steps: dict[str, Any], name: str, default: int) -> tuple[int, int, bool]:
    """Short side, crop, and whether images are resized straight to a square, as an image processor states them."""
    if steps.get("do_pad"):
        raise _unable(name, f"do_pad {steps['do_pad']}")
    size, crop = steps.get("size"), None
    if steps.get("do_center_crop"):
        crop = _square(steps.get("crop_size"), "crop_size", name) or default
    if not steps.get("do_resize", True):
        if crop:
            raise _unable(name, "do_center_crop without do_resize")
        return 0, 0, False
    short = size.get("shortest_edge") if isinstance(size, dict) else size if crop else None
    if short is None:
        side = _square(size, "size", name) or default
        if crop not in (None, side):
            raise _unable(name, f"size {side}x{side} with crop_size {crop}, a square and then a crop")
        return side, side, bool(side) and bool(steps)
    short = int(short)
    if isinstance(size, dict) and size.get("longest_edge"):
        raise _unable(name, f"size {size}")
    share = steps.get("crop_pct")
    if str(steps.get("image_processor_type", "")).startswith("Levit"):
        share = 224 / 256
    if crop is not None:
        return int(short / share) if share else short, crop, False
    if share is None:
        raise _unable(name, f"size {size} without do_center_crop, after which images differ in shape")
    return (int(short / share), short, False) if short < 384 else (short, short, True)  # as ConvNeXt's does


def _square(size: Any, word: str, name: str) -> int | None:
    """The side in pixels of a size that an image processor states; None where it states none."""
    if isinstance(size, dict):
        high, wide = size.get("height"), size.get("width")
        if high is None or high != wide:
            raise _unable(name, f"{word} {size}")
        size = high
    if isinstance(size, list | tuple):
        if len(set(size)) != 1:
            raise _unable(name, f"{word} {size}")
        size = size[0]
    return None if size is None else int(size)


def _stated_interpolation(steps: dict[str, Any], name: str) -> Literal["bilinear", "bicubic"]:
    number = steps.get("resample")
    if number not in (None, 2, 3) and steps.get("do_resize", True):
        raise _unable(name, f"resample {int(number)}, neither bilinear (2) nor bicubic (3)")
    return "bicubic" if number == 3 else "bilinear"


def build_hugging_face(chosen: Base, *, random: bool, seed: int = 0, local: bool = False) -> nn.Module:
    """Build the network of an `hf:` base with its weights, or with random ones drawn from the seed.

    Args:
        chosen: The base.
        random: Draw the weights instead of loading them.
        seed: Seed of random weights.
        local: Raise where they are not on this machine, instead of downloading them.
    """
    transformers = _library(chosen.name, "hf")
    make = transformers.AutoModelForImageClassification
    if random:
        config = _fetch(chosen.name, lambda **only: transformers.AutoConfig.from_pretrained(chosen.arch, **only))
        with nets.seeded(seed):
            model: nn.Module = make.from_config(config)
        return model
    model = _fetch(chosen.name, lambda **only: make.from_pretrained(chosen.arch, **only), local=local)
    return model


def _fetch(name: str, get: Any, *, local: bool = False) -> Any:
    """What a function of transformers gives from this machine, else from the hub, which must answer within seconds."""
    from poem.zoo.weights import check_connection

    try:
        return get(local_files_only=True)
    except (OSError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:160]
        folder = Path(name.partition(":")[2]).expanduser()
        if not local and not folder.is_dir():
            try:
                check_connection("huggingface.co")
                return get()
            except (OSError, ValueError) as second:
                reason = f"{type(second).__name__}: {second}".splitlines()[0][:160]
                error = second
        raise FileNotFoundError(
            f"expected an image classifier of transformers as {name}, which could not be loaded ({reason}); check the "
            "name, or name a folder that save_pretrained wrote: hf:FOLDER"
        ) from error


def _processor_settings(transformers: Any, where: str, name: str) -> dict[str, Any]:
    """The settings of an image processor with its defaults; none, with a warning, where the model comes without one."""
    base = transformers.image_processing_utils.BaseImageProcessor
    try:
        found: dict[str, Any] = _fetch(name, lambda **local: base.get_image_processor_dict(where, **local)[0])
    except FileNotFoundError:
        log.warning("%s has no preprocessor_config.json: images are given from 0 to 1 as they are", name)
        return {}
    make = transformers.AutoImageProcessor
    try:  # what the file leaves out has defaults, which differ from class to class
        whole: dict[str, Any] = make.from_pretrained(where, local_files_only=True, trust_remote_code=False).to_dict()
    except (ImportError, OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        log.warning("%s: its image processor cannot be built (%s); its file alone is read", name, error)
        return found
    return {**found, **whole}


def _folder_or_id(rest: str) -> str:
    folder = Path(rest).expanduser()
    return str(folder) if folder.is_dir() else rest


def _triple(values: Any) -> Triple:
    first, second, third = map(float, values if len(values) == 3 else list(values)[:1] * 3)
    return first, second, third


def _interpolation(name: str) -> Literal["bilinear", "bicubic"]:
    return "bicubic" if name == "bicubic" else "bilinear"
