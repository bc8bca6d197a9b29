"""A method of your own: other parts in the recipe, and one new part.

Run it: python examples/02_compose_your_own.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

import poem
from poem.parts import AdaptBranch, ByEntropy, EntropyBelow, Explore, Memory, Outputs, PLPDAbove, Readout, Select


@dataclass(frozen=True, repr=False)
class MarginAbove(Select):
    """Samples whose best class leads the second by more than `lead` in probability: a part is this small."""

    lead: float = 0.2

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        """A mask (B,), never True outside `among`."""
        best, second = outputs.probs.topk(2, dim=1).values.unbind(1)
        return among & (best - second > self.lead)


def main() -> None:
    """Compose, print, adapt."""
    mine = poem.Recipe(
        select=EntropyBelow(0.8) & MarginAbove(0.1) & PLPDAbove(-1.0),
        weigh=ByEntropy(0.4),
        lr=0.001,
    )
    with_poem = replace(mine, explore=Explore(2), branch=AdaptBranch(), readout=Readout("last"))
    print(with_poem)

    torch.manual_seed(0)
    head = nn.Linear(32, 10)
    with torch.no_grad():
        head.weight.mul_(8)  # sharper predictions, so that some samples are certain
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1), nn.GroupNorm(4, 32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), head,
    )  # fmt: skip
    adapter = poem.adapt(model, with_poem)
    for images in torch.rand(3, 32, 3, 1, 1) + 0.5 * torch.rand(3, 32, 3, 32, 32):
        adapter(images)
        last = adapter.last
        print(f"selected {int(last.selected.sum())} of 32, used {last.taught}, {last.updates} updates")
    print(adapter.totals)


if __name__ == "__main__":
    main()
