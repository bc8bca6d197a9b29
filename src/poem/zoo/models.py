"""Build a base's network and load its weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from torch import Tensor, nn

from poem.zoo import nets
from poem.zoo.catalog import Base, base
from poem.zoo.hub_bases import EXTRAS, build_hugging_face
from poem.zoo.imagenet_nets import IMAGENET_NETS
from poem.zoo.outside_bases import build_outside
from poem.zoo.weights import check_sha256, differing_keys, read_tensors, weights_file

COUNTER = "num_batches_tracked"
"""Last part of the name of batch norm's counters of training batches; some files lack them, and no logit needs them."""


def load(name: str, weights: str | os.PathLike[str] | None = None, *, seed: int = 0) -> tuple[nn.Module, Base]:
    """Load the network of a base, in eval mode on the CPU; returns it with the base.

    Args:
        name: As in `base`: one of `bases()`, `package.module:name`, or a hub id.
        weights: A file, or a folder that holds the base's file; `"random"` for untrained weights; None to look in
            $POEM_DATA, then in the download caches, then to download.
        seed: Seed of untrained weights.

    Raises:
        FileNotFoundError: The weights were not found; the message says which file to put where.
    """
    chosen = base(name)
    random = weights == "random"
    path = None if random else weights_file(chosen, weights)
    if path is not None:
        check_sha256(chosen, path, named_by_user=weights is not None)
    if chosen.kind == "transformers":
        model = build_hugging_face(chosen, random=random or path is not None, seed=seed)
    else:
        model = _build(chosen, seed if random else 0)
    if path is not None:
        _load_base_weights(chosen, model, path)
    return model.eval(), chosen


def require_builder(chosen: Base) -> str:
    """Name of the package that builds a base's network; raises ImportError if it is not installed."""
    if chosen.kind == "outside":
        return chosen.arch.partition(":")[0].partition(".")[0]
    own = {"own": "poem", "torchvision": "torchvision", "yours": "torchvision", "transformers": "transformers"}
    library = own.get(chosen.kind, "timm")
    library = IMAGENET_NETS[chosen.arch][0] if chosen.arch in IMAGENET_NETS else library
    if find_spec(library) is None:
        raise ImportError(f"{chosen.name} is built by {library}; {EXTRAS[library]}")
    return library


def _build(chosen: Base, seed: int = 0) -> nn.Module:
    """Build the network with random weights drawn from the seed."""
    library = require_builder(chosen)
    if chosen.kind == "outside":
        return build_outside(chosen.name, seed)
    if chosen.kind == "own":
        return nets.build(chosen.arch, seed=seed)
    make: Callable[[], nn.Module]
    if chosen.arch in IMAGENET_NETS:
        make = IMAGENET_NETS[chosen.arch][1]
    elif library == "torchvision":
        from torchvision.models import get_model

        make = lambda: get_model(chosen.arch, weights=None, num_classes=chosen.classes)  # noqa: E731
    else:
        from timm import create_model

        make = lambda: create_model(chosen.arch, pretrained=False)  # noqa: E731
    with nets.seeded(seed):
        model = make()
        if chosen.kind == "yours":
            model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
        return model


def _load_base_weights(chosen: Base, model: nn.Module, path: Path) -> None:
    """Load a weight file into the base's network, strictly: by position for wheels, else by name.

    Tensors are cast to the network's type, so weights stored in half precision are loaded as float32.
    """
    if chosen.kind == "own":
        nets.load_net(model, path)
        return
    if chosen.kind in ("outside", "transformers"):
        load_weights(model, path)
        return
    if path.suffix == ".npz" and hasattr(model, "load_pretrained"):  # Google's own ViT files, in timm's network
        model.load_pretrained(str(path))  # type: ignore[operator]
        return
    tensors = read_tensors(path)
    own = model.state_dict()
    if chosen.kind == "wheel" and list(tensors) != list(own):
        tensors = rename_by_position(tensors, own, path)
    tensors = {**{key: own[key] for key in own if key.endswith(COUNTER) and key not in tensors}, **tensors}
    if wrong := differing_keys(own, tensors):
        raise ValueError(
            f"expected the weights {chosen.tag} in {path}, which differs from {chosen.arch} in {wrong[:3]}"
        )
    model.load_state_dict(tensors)


def load_weights(model: nn.Module, weights: str | os.PathLike[str]) -> None:
    """Load a file of tensors into any network, by name; the prefix `module.` of DataParallel is removed.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It holds other data, or other tensors than the network's.
    """
    path = Path(weights).expanduser()
    if not path.is_file():
        state = "which is a folder" if path.is_dir() else "which does not exist"
        raise FileNotFoundError(f"expected a file with the model's weights (.pth or .safetensors), got {path}, {state}")
    tensors, own = read_tensors(path), model.state_dict()
    if tensors and all(key.startswith("module.") for key in tensors) and not set(tensors) & set(own):
        tensors = {key.removeprefix("module."): value for key, value in tensors.items()}
    wrong = {
        "lacks": [key for key in own if key not in tensors and not key.endswith(COUNTER)],
        "has besides": [key for key in tensors if key not in own],
        "has in another shape": [key for key in own if key in tensors and own[key].shape != tensors[key].shape],
    }
    found = [f"{words} {', '.join(keys[:3])}{f' and {len(keys) - 3} more' if len(keys) > 3 else ''}"
             for words, keys in wrong.items() if keys]  # fmt: skip
    if found:
        raise ValueError(f"expected the weights of {type(model).__name__}, got {path}, which {'; '.join(found)}")
    model.load_state_dict(tensors, strict=False)


def rename_by_position(tensors: dict[str, Tensor], own: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Rename tensors to the network's own names, in order; the last part of each name, and the shape, must agree."""
    if len(tensors) != len(own):
        raise ValueError(f"expected {len(own)} tensors in {path}, got {len(tensors)}")
    for (theirs, tensor), (ours, mine) in zip(tensors.items(), own.items(), strict=True):
        if theirs.rpartition(".")[2] != ours.rpartition(".")[2] or tensor.shape != mine.shape:
            raise ValueError(f"expected {ours} {tuple(mine.shape)} in {path}, got {theirs} {tuple(tensor.shape)}")
    return dict(zip(own, tensors.values(), strict=True))
