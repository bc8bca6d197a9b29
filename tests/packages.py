"""A throw-away package with methods, parts, bases and data sets, written to a folder as pip would install it."""

from __future__ import annotations

from pathlib import Path

CODE = '''
"""Everything that a package of a user may bring."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import poem
from poem.parts import Outputs, Select
from poem.zoo import Factory


@dataclass(frozen=True, repr=False)
class Surest(Select):
    """Selects the samples whose largest probability is above a share."""

    share: float = 0.5

    def __call__(self, outputs: Outputs, among: Tensor, memory: dict) -> Tensor:
        return among & (outputs.probs.amax(1) > self.share)


HALF = Surest(0.5)
fixed = replace(poem.recipe("tent"), select=Surest(0.01), lr=0.01)


def mine(preset="imagenet"):
    """Tent on sure samples."""
    return replace(fixed, lr=0.02 if preset == "cifar" else 0.01)


def not_a_recipe():
    return 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU())
        self.head = nn.Linear(16, 10)

    def forward(self, x):
        return self.head(self.body(self.stem(x)).mean((2, 3)))


def net():
    return Net()


def no_net():
    return "a network"


def broken_net():
    raise RuntimeError("no such file: net.pth")


base = Factory(net, weights=Path(__file__).parent / "net.pth", mean=(0.1,) * 3, std=(0.3,) * 3, crop=16, classes=10)


class Digits(Dataset):
    """Pictures of a torch data set: floats from 0 to 1 and class numbers."""

    def __init__(self, count=24, size=16):
        pictures = torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(0))
        self.pictures, self.count = pictures, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return self.pictures[index], index % 10


class Unlabelled(Digits):
    def __getitem__(self, index):
        return self.pictures[index]


few = Digits(12)
'''
MODULE = """
from dataclasses import dataclass, replace
from pathlib import Path

import poem
from poem import zoo
from poem.parts import Select

Path(__file__).with_suffix(".imported").touch()


@dataclass(frozen=True, repr=False)
class Sure(Select):
    share: float = 0.5

    def __call__(self, outputs, among, memory):
        return among & (outputs.probs.amax(1) > self.share)


def mine(preset="imagenet"):
    return replace(poem.recipe("tent"), select=Sure(0.2))


def net():
    return zoo.load("digits-bn")[0]
"""
"""A module of a user that nobody announces; it leaves a file beside it when it is imported."""
NAMES = {
    "poem.methods": {"sure": "mine", "sure-fixed": "fixed", "gone": "nowhere:mine", "tent": "mine"},
    "poem.parts": {"Surest": "Surest"},
    "poem.bases": {"tiny-net": "base", "no-net": "no_net"},
    "poem.datasets": {"few-digits": "Digits", "unlabelled": "Unlabelled"},
}
"""Entry points by group; a target without a colon is a name of the package's own module."""


def install(folder: Path, name: str = "throwaway", *, broken: bool = False) -> str:
    """Write the package, its weights and its metadata into a folder; returns the name of its module."""
    import torch

    from poem.zoo import nets

    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text("raise OSError('no licence')\n" if broken else CODE)
    found = folder / f"{name}-1.2.dist-info"
    found.mkdir()
    (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (found / "top_level.txt").write_text(f"{name}\n")
    (found / "INSTALLER").write_text("pip\n")
    lines = [f"{name}/__init__.py,,\n", f"{name}-1.2.dist-info/METADATA,,\n", f"{name}-1.2.dist-info/RECORD,,\n"]
    (found / "RECORD").write_text("".join(lines))
    words = []
    for group, points in NAMES.items():
        words.append(f"[{group}]")
        words += [f"{key} = {target if ':' in target else f'{name}:{target}'}" for key, target in points.items()]
    (found / "entry_points.txt").write_text("\n".join(words) + "\n")
    if not broken:
        with nets.seeded(3):
            net = torch.nn.Module()
            net.stem = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 2, 1), torch.nn.BatchNorm2d(8), torch.nn.ReLU())
            net.body = torch.nn.Sequential(torch.nn.Conv2d(8, 16, 3, 2, 1), torch.nn.BatchNorm2d(16), torch.nn.ReLU())
            net.head = torch.nn.Linear(16, 10)
        torch.save(net.state_dict(), folder / name / "net.pth")
    return name
