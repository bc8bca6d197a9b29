"""What `benchmarks/speed.py` measures: networks with random weights, and methods with a forced selection."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from poem.parts import Explore, NotRedundant, PLPDAbove, Repeat
from poem.parts.base import Memory, Outputs
from poem.parts.selection import Select

UNIT = ("roid", "rotta", "auto", "guarded-auto")  # methods that are given images in 0..1, and normalise
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
NETS = ("resnet50-bn", "vit-b16", "resnet50-gn", "effnet-lite0")
ALL_NETS = (*NETS, "resnet18-bn", "resnet18-gn", "resnet152-bn", "resnet152-gn", "tiny-bn")


class NotAvailableError(Exception):
    """This version, machine or network has no such thing."""


@dataclass(frozen=True, repr=False)
class Forced(Select):
    """Selects a share of the batch, whatever the network predicts; each round's block begins one place further on."""

    share: float = 1.0

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        """A block of `ceil(share * B)` samples."""
        rows = len(among)
        place = torch.arange(rows, device=among.device)
        return among & ((place - outputs.round) % rows < math.ceil(self.share * rows))


def with_forced_selection(method: str, share: float, batch: int) -> tuple[str, dict[str, Any]]:
    """The library's name of a method, and the changes that force its selection."""
    forced = Forced(share)
    again = Repeat(2) if math.ceil(share * batch) == batch else Explore(2)
    shape = forced & PLPDAbove(-2.0)
    changes: dict[str, dict[str, Any]] = {
        "source": {},
        "bn": {},
        "auto": IMAGENET,
        "guarded-auto": {"guard": True, **IMAGENET},
        "rotta": IMAGENET,
        "tent": {} if share == 1 else {"select": forced},
        "eata": {"select": forced & NotRedundant(2.0)},
        "sar": {"select": forced},
        "deyo": {"select": shape},
        "roid": {"select": forced, **IMAGENET},
        "poem1": {"select": forced, "rounds": 1},
        "poem2": {"select": forced, "explore": again},
        "deyo+poem": {"select": shape, "explore": again},
    }
    names = {"poem1": "poem", "poem2": "poem", "guarded-auto": "auto"}
    return names.get(method, method), changes[method]


@cache
def network(name: str) -> tuple[nn.Module, str]:
    """A network with random weights (seed 0) on the CPU, and who built it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return _built(name)


def _built(name: str) -> tuple[nn.Module, str]:
    try:
        import torchvision
        from torchvision.models import resnet
    except ImportError as error:
        raise NotAvailableError(f"{name} needs torchvision: {error}") from error
    by = f"torchvision {torchvision.__version__}"
    arch, _, norm = name.partition("-")
    if name == "tiny-bn":
        return resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=10).eval(), f"{by} ResNet(BasicBlock, 1 each)"
    if arch in ("resnet18", "resnet50", "resnet152") and norm in ("bn", "gn"):
        layer = {} if norm == "bn" else {"norm_layer": lambda width: nn.GroupNorm(32, width)}
        return getattr(resnet, arch)(weights=None, **layer).eval(), f"{by} {arch}"
    if name == "vit-b16":
        try:
            import timm
        except ImportError:
            model = torchvision.models.vit_b_16(weights=None)
            nn.init.normal_(model.heads.head.weight, std=0.02)  # zeros as it comes: nothing would flow back
            return model.eval(), f"{by} vit_b_16"
        return timm.create_model("vit_base_patch16_224").eval(), f"timm {timm.__version__} vit_base_patch16_224"
    if name == "effnet-lite0":
        try:
            from poem import zoo

            return zoo.load("effnet-lite0", "random")[0], "poem.zoo effnet-lite0"
        except ImportError as error:
            raise NotAvailableError(f"effnet-lite0 needs timm: {error}") from error
    raise NotAvailableError(f"expected a net out of {', '.join(ALL_NETS)}; got {name}")


def convolutional(name: str) -> bool:
    """Whether channels_last is the layout to take."""
    return not name.startswith("vit")
