"""How small updates should be where few samples are selected: `least` of `auto` on ViT-Tiny far from its training data.

    PYTHONPATH=src:benchmarks python -m auto.far --data DATA

Held-out corruptions alone, one upon another, until the source is right on a few percent. Prints a line for each stream
and share; about three minutes a line on one core.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import poem
from auto import streams
from poem import zoo
from poem.bench.metrics import predicted
from poem.parts import AdaptBranch, CrossEntropy, Entropy, Once
from poem.streams import corrupt


def _branch(share: float) -> AdaptBranch:
    return AdaptBranch(teach=CrossEntropy(least=share))


NET, SEED, BATCH = "vit-tiny16", 0, 64
STREAMS = (
    (("speckle_noise", 5),),
    (("speckle_noise", 5), ("speckle_noise", 5)),
    (("speckle_noise", 5), ("spatter", 5)),
    (("spatter", 5), ("speckle_noise", 5), ("saturate", 4)),
)
NEAR = (
    (("gaussian_blur", 5),),
    (("gaussian_blur", 3),),
    (("speckle_noise", 5),),
    (("spatter", 5),),
    (("saturate", 5),),
)
"""The streams of `--near`."""
NEAR_SEED, NEAR_COUNT = 7, 512
SHARES = (0.0, 0.25, 0.35, 0.5, 1.0)
VARIANTS: dict[str, dict[str, Any]] = {
    **{f"least {each}": {"minimise": Entropy(least=each), "branch": _branch(each)} for each in SHARES},
    "least 0.0, one update": {"minimise": Entropy(), "branch": AdaptBranch(), "explore": Once()},
}
"""What is changed in `auto`."""
NEAR_VARIANTS = ("least 0.5", "least 0.0, one update")
"""What is compared there: `auto`, and the best far away."""


def corrupted(pixels: Tensor, ids: streams.Indices, corruptions: tuple[tuple[str, int], ...]) -> Tensor:
    """The images with one corruption upon another, each with noise of its own."""
    for seed, (name, severity) in enumerate(corruptions):
        parts = zip(
            pixels.split(streams.CHUNK), np.split(ids, range(streams.CHUNK, len(ids), streams.CHUNK)), strict=True
        )
        pixels = torch.cat([corrupt(part, name, severity, seed=seed, ids=own) for part, own in parts])
    return pixels


def accuracy(pixels: Tensor, labels: streams.Indices, name: str) -> float:
    """Percent of the images that a variant of `auto`, or `source`, gets right, answered in order."""
    base, (model, _) = zoo.base(NET), zoo.load(NET)
    method = "auto" if name in VARIANTS else name
    adapter = poem.adapt(
        model.to(pixels.device), method, mean=base.mean, std=base.std, guard=False, **VARIANTS.get(name, {})
    )
    answers = torch.cat([predicted(adapter(some.float() / 255).detach()) for some in pixels.split(BATCH)])
    return 100 * float((answers.cpu().numpy() == labels).mean())


def main() -> None:
    """Print the accuracy of every stream and variant."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the images and the weights")
    parser.add_argument("--n", type=int, default=1536, help="images of a stream, without --near")
    parser.add_argument("--near", action="store_true", help=f"single corruptions, {NEAR_COUNT} images of another order")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    os.environ["POEM_DATA"] = str(args.data)  # the zoo looks for weights there
    count, seed = (NEAR_COUNT, NEAR_SEED) if args.near else (args.n, SEED)
    images, labels = streams.read(streams.set_of(NET), args.data)
    rows = streams.order(streams.set_of(NET), labels, seed)[:count]
    fit = streams.Preprocessing.of(zoo.base(NET)).resize_crop
    clean = torch.stack([fit(images[int(row)]) for row in rows]).to(args.device)
    for corruptions in NEAR if args.near else STREAMS:
        pixels = corrupted(clean, rows, corruptions)
        name = " + ".join(f"{each} {severity}" for each, severity in corruptions)
        for variant in ("source", *(NEAR_VARIANTS if args.near else VARIANTS)):
            print(f"{name}, n = {len(rows)}: {variant} {accuracy(pixels, labels[rows], variant):.2f}", flush=True)


if __name__ == "__main__":
    main()
