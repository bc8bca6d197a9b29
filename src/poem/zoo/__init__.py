"""Named bases: a model, its exact weights, its normalisation and what it is known to score.

    model, base = zoo.load("vit-b16-D")
    adapter = poem.adapt(model, "poem", mean=base.mean, std=base.std)

"ViT-B on ImageNet-C" is at least six different baselines; a name here stands for one of them. Weights come from a file
of yours, from $POEM_DATA, from what timm or torchvision downloaded before, or through them from the net.
"""

from __future__ import annotations

from poem.zoo.catalog import HALF, IMAGENET, NONE, Base, Known, Triple, base, bases, normalisation
from poem.zoo.models import builder, by_position, fill, load
from poem.zoo.records import TRAINED
from poem.zoo.weights import find, nearby, sha256

__all__ = [
    "HALF", "IMAGENET", "NONE", "TRAINED", "Base", "Known", "Triple", "base", "bases", "builder", "by_position", "fill",
    "find", "load", "nearby", "normalisation", "sha256",
]  # fmt: skip
