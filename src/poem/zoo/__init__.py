"""Named bases: a network, its exact weights, its normalisation, and its published source accuracies.

    model, base = zoo.load("vit-b16-D")
    adapter = poem.adapt(model, "poem", mean=base.mean, std=base.std)

"ViT-B on ImageNet-C" is at least six different baselines; a name here stands for one of them. Weights are loaded from a
file you name, from $POEM_DATA, from the download caches of timm and torchvision, or are downloaded by these. A network
of your own is a base too: `package.module:function`, or a `Factory` with its weights and normalisation.
"""

from __future__ import annotations

from poem.zoo.catalog import HALF, IMAGENET, NONE, TRAINED, Base, KnownAccuracy, Triple, base, bases, normalisation
from poem.zoo.models import load, load_weights, require_builder
from poem.zoo.outside_bases import Factory
from poem.zoo.weights import find_weights, local_weight_paths, sha256, weights_file

__all__ = [
    "HALF", "IMAGENET", "NONE", "TRAINED", "Base", "Factory", "KnownAccuracy", "Triple", "base", "bases",
    "find_weights", "load", "load_weights", "local_weight_paths", "normalisation", "require_builder", "sha256",
    "weights_file",
]  # fmt: skip
