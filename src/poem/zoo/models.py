"""From a base's name to its network with weights."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn

from poem.zoo import nets
from poem.zoo.catalog import Base, base
from poem.zoo.weights import check, find, read_tensors


def load(name: str, weights: str | os.PathLike[str] | None = None, *, seed: int = 0) -> tuple[nn.Module, Base]:
    """The model of a base, in eval mode on the CPU, and the base itself.

    Args:
        name: One of `bases()`.
        weights: A file, or a folder that holds the base's file; `"random"` for fresh weights, which predict nothing;
            None to look in $POEM_DATA, then in what was downloaded before, then to download.
        seed: Of fresh weights.

    Raises:
        FileNotFoundError: The weights are nowhere; the message says which file to put where.
    """
    chosen = base(name)
    path = None if weights == "random" else find(chosen, weights)
    if path is not None:
        check(chosen, path, stated=weights is not None)
    model = _build(chosen, seed)
    if path is not None:
        _fill(chosen, model, path)
    return model.eval(), chosen


def builder(chosen: Base) -> str:
    """The package that builds a base's network, once it is known to be there."""
    library = {"own": "poem", "torchvision": "torchvision", "yours": "torchvision"}.get(chosen.kind, "timm")
    if find_spec(library) is None:
        raise ImportError(f"{chosen.name} is built by {library}; pip install 'poem-tta[bench]'")
    return library


def _build(chosen: Base, seed: int = 0) -> nn.Module:
    """The network, with weights drawn from the seed."""
    library = builder(chosen)
    if library == "poem":
        return nets.build(chosen.arch, seed=seed)
    make: Callable[[], nn.Module]
    if library == "torchvision":
        from torchvision.models import get_model

        make = lambda: get_model(chosen.arch, weights=None, num_classes=chosen.classes)  # noqa: E731
    else:
        from timm import create_model

        make = lambda: create_model(chosen.arch, pretrained=False)  # noqa: E731
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # the CPU's alone: torch.manual_seed would reseed every device
        model = make()
        if chosen.kind == "yours":
            model.conv1, model.maxpool = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.Identity()
        return model


def _fill(chosen: Base, model: nn.Module, path: Path) -> None:
    """Load a file into the network, strictly: by position for the wheels, by name for all else."""
    if chosen.kind == "own":
        nets.read(model, path)
        return
    if path.suffix == ".npz":  # Google's own ViT files
        model.load_pretrained(str(path))  # type: ignore[operator]
        return
    tensors = read_tensors(path)
    own = model.state_dict()
    if chosen.kind == "wheel" and list(tensors) != list(own):
        tensors = by_position(tensors, own, path)
    wrong = sorted(set(own) ^ set(tensors)) or [key for key in own if own[key].shape != tensors[key].shape]
    if wrong:
        raise ValueError(
            f"expected the weights {chosen.tag} in {path}, which differs from {chosen.arch} in {wrong[:3]}"
        )
    model.load_state_dict(tensors)


def fill(model: nn.Module, weights: str | os.PathLike[str]) -> None:
    """Load a file of tensors into anybody's network, each by its name; the names may begin with DataParallel's.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: It holds something else, or other tensors than the network's.
    """
    path = Path(weights).expanduser()
    if not path.is_file():
        state = "which is a folder" if path.is_dir() else "which does not exist"
        raise FileNotFoundError(f"expected a file with the model's weights (.pth or .safetensors), got {path}, {state}")
    tensors, own = read_tensors(path), model.state_dict()
    if tensors and all(key.startswith("module.") for key in tensors) and not set(tensors) & set(own):
        tensors = {key.removeprefix("module."): value for key, value in tensors.items()}
    counted = "num_batches_tracked"  # older files have no such counts, and nothing depends on them
    wrong = {
        "lacks": [key for key in own if key not in tensors and not key.endswith(counted)],
        "has besides": [key for key in tensors if key not in own],
        "has in another shape": [key for key in own if key in tensors and own[key].shape != tensors[key].shape],
    }
    found = [f"{words} {', '.join(keys[:3])}{f' and {len(keys) - 3} more' if len(keys) > 3 else ''}"
             for words, keys in wrong.items() if keys]  # fmt: skip
    if found:
        raise ValueError(f"expected the weights of {type(model).__name__}, got {path}, which {'; '.join(found)}")
    model.load_state_dict(tensors, strict=False)


def by_position(tensors: dict[str, Tensor], own: dict[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Rename tensors to the network's own names, one after the other; kind and shape must agree for each."""
    if len(tensors) != len(own):
        raise ValueError(f"expected {len(own)} tensors in {path}, got {len(tensors)}")
    for (theirs, tensor), (ours, place) in zip(tensors.items(), own.items(), strict=True):
        if theirs.rpartition(".")[2] != ours.rpartition(".")[2] or tensor.shape != place.shape:
            raise ValueError(f"expected {ours} {tuple(place.shape)} in {path}, got {theirs} {tuple(tensor.shape)}")
    return dict(zip(own, tensors.values(), strict=True))
