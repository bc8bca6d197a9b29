"""Bases of other packages: a function that returns a network, alone or as a `Factory` with what a base must state.

With `mine = Factory(small, weights=FILE, crop=32)` in my_package/models.py, `--base my_package.models:mine` is a base,
and so is `--base my_package.models:small` if the function `small` loads its weights itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from torch import nn

from poem._util import outside
from poem.zoo import nets
from poem.zoo.catalog import NONE, Base, Triple


@dataclass(frozen=True)
class Factory:
    """A function that builds a network, with its weights and the preprocessing that they expect.

    Args:
        build: Called without arguments; returns the network. Layers that it does not load are drawn with seed 0, so
            that every process builds the same.
        weights: File of its state dict (.pth or .safetensors); None where `build` loads the weights itself.
        mean: Mean of red, green and blue that is subtracted from images in [0, 1].
        std: What they are divided by.
        crop: Side of the input in pixels; None for images as they are stored.
        resize: Short side before the crop; by default `crop`.
        interpolation: Of the resize.
        classes: Number of classes; by default that of the last linear layer.
        source: Data set with images of its training task, by name, for methods that measure something on them (EATA).
        notes: A line about it.
    """

    build: Callable[[], nn.Module]
    weights: str | os.PathLike[str] | None = None
    mean: Triple = NONE[0]
    std: Triple = NONE[1]
    crop: int | None = None
    resize: int | None = None
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    classes: int | None = None
    source: str = ""
    notes: str = ""

    def __post_init__(self) -> None:
        if not callable(self.build):
            raise TypeError(f"expected build as a function that returns a network, got {type(self.build).__name__}")
        for name in ("mean", "std"):
            values = getattr(self, name)
            if len(values) != 3:
                raise ValueError(f"expected {name} of red, green and blue, got {values!r}")
            object.__setattr__(self, name, tuple(map(float, values)))
        if min(self.std) <= 0:
            raise ValueError(f"expected a std above 0, got {min(self.std):g}; (1, 1, 1) is no normalisation")


def factory_of(name: str) -> Factory | Base:
    """The factory, or the base, behind an outside name; a plain function becomes a factory without settings.

    Raises:
        ValueError: The module or the name is not there.
        TypeError: The object is neither.
    """
    found = outside.load("base", name)
    if isinstance(found, Factory | Base):
        return found
    if isinstance(found, nn.Module) or not callable(found):
        kind = type(found).__name__
        raise TypeError(
            f"expected {name} to be a function that returns a torch.nn.Module, or a poem.zoo.Factory, got a {kind}; "
            "write a function that builds it"
        )
    return Factory(found)


@lru_cache(maxsize=64)
def outside_base(name: str) -> Base:
    """The base of an outside name. Its network is built once, to see that there is one and how many classes it has."""
    factory = factory_of(name)
    if isinstance(factory, Base):
        return replace(factory, name=name)
    model = build_outside(name)
    factory = _with_timm_settings(factory, getattr(model, "pretrained_cfg", None))
    crop = factory.crop or 0
    return Base(
        name=name, kind="outside", arch=outside.path_of("base", name), tag=outside.path_of("base", name),
        file="" if factory.weights is None else Path(factory.weights).name, mean=factory.mean, std=factory.std,
        resize=factory.resize or crop, crop=crop, interpolation=factory.interpolation,
        classes=factory.classes or _class_count(name, model), source=factory.source, notes=factory.notes,
    )  # fmt: skip


def build_outside(name: str, seed: int = 0) -> nn.Module:
    """Call the function behind an outside name; random weights are drawn from the seed.

    Raises:
        ValueError: The function raised.
        TypeError: It returned no network.
    """
    factory = factory_of(name)
    assert isinstance(factory, Factory)
    try:
        with nets.seeded(seed):
            model: Any = factory.build()
    except Exception as error:
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        raise ValueError(
            f"expected {name} to return a torch.nn.Module when it is called without arguments, got "
            f"{type(error).__name__}: {reason}"
        ) from error
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected {name} to return a torch.nn.Module, got {type(model).__name__}")
    return model


def own_weights(name: str) -> Path | None:
    """The weight file that a factory names, whether or not it exists; None where it names none."""
    factory = factory_of(name)
    if isinstance(factory, Base) or factory.weights is None:
        return None
    return Path(factory.weights).expanduser()


def _with_timm_settings(factory: Factory, config: Any) -> Factory:
    """A plain function's factory with the settings that timm has left on the network, where it has."""
    plain = Factory(factory.build)
    if not isinstance(config, dict) or factory != plain or "input_size" not in config:
        return factory
    crop, share = config["input_size"][-1], config.get("crop_pct") or 1.0
    return replace(
        factory, mean=tuple(config["mean"]), std=tuple(config["std"]), crop=crop, resize=int(crop / share),
        interpolation="bicubic" if config.get("interpolation") == "bicubic" else "bilinear",
    )  # fmt: skip


def _class_count(name: str, model: nn.Module) -> int:
    """Outputs of the last linear layer, two where it has one."""
    stated = getattr(model, "num_classes", None)
    linear = [module.out_features for module in model.modules() if isinstance(module, nn.Linear)]
    found = stated if isinstance(stated, int) and stated > 0 else linear[-1] if linear else None
    if found is None:
        raise ValueError(f"expected a last linear layer in {name}, found none; state poem.zoo.Factory(..., classes=N)")
    return 2 if found == 1 else found
