"""Adapt a classifier in one line, print what happened, and give the model back.

Run it: python examples/01_adapt.py
"""

from __future__ import annotations

import torch
from torch import nn

import poem


def classifier() -> nn.Module:
    """Any module from images to logits will do; this one is small and untrained."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip


def main() -> None:
    """Three batches through POEM."""
    model = classifier()
    adapter = poem.adapt(model, "poem", threshold=0.99)  # an untrained model is uncertain: select nearly all samples
    for images in torch.rand(3, 32, 3, 32, 32):
        logits = adapter(images)  # predicts, and learns
        last = adapter.last
        print(f"predicted {tuple(logits.shape)}: {last.taught} used, {last.updates} updates, loss {last.loss:.3f}")
        print(f"    newly reliable: {int(last.newly_reliable.sum())}, forward images: {last.forwards}")

    print("may move:", ", ".join(adapter.adapted))
    with adapter.frozen():
        adapter(torch.rand(1, 3, 32, 32))  # predicts with what was learnt, learns nothing
    adapter.reset()  # bit for bit a fresh adapter
    assert adapter.unload() is model  # the very model that came in


if __name__ == "__main__":
    main()
