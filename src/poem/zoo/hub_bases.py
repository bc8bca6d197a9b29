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
        ValueError: It has no such network or weights.
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
    config = timm.models.get_pretrained_cfg(rest)
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
    side = _side(steps.get("size")) or int(getattr(config, "image_size", 0) or 0)
    crop = (_side(steps.get("crop_size")) if steps.get("do_center_crop") else None) or side
    return Base(
        name=name, kind="transformers", arch=where, tag=where, file="", mean=_triple(steps.get("image_mean", NONE[0])),
        std=_triple(steps.get("image_std", NONE[1])), resize=side, crop=crop,
        interpolation="bicubic" if steps.get("resample") == 3 else "bilinear", classes=int(config.num_labels),
        notes="preprocessing as its image processor states it",
    )  # fmt: skip


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
    """The settings of an image processor; none, with a warning, where the model comes without one."""
    base = transformers.image_processing_utils.BaseImageProcessor
    try:
        found: dict[str, Any] = _fetch(name, lambda **local: base.get_image_processor_dict(where, **local)[0])
        return found
    except FileNotFoundError:
        log.warning("%s has no preprocessor_config.json: images are given from 0 to 1 as they are", name)
        return {}


def _folder_or_id(rest: str) -> str:
    folder = Path(rest).expanduser()
    return str(folder) if folder.is_dir() else rest


def _side(size: Any) -> int | None:
    """The side in pixels that a size of an image processor states."""
    if isinstance(size, dict):
        size = size.get("shortest_edge") or size.get("height")
    return None if size is None else int(size)


def _triple(values: Any) -> Triple:
    first, second, third = map(float, values if len(values) == 3 else list(values)[:1] * 3)
    return first, second, third


def _interpolation(name: str) -> Literal["bilinear", "bicubic"]:
    return "bicubic" if name == "bicubic" else "bilinear"
