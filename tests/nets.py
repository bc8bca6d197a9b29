"""Three tiny classifiers, one per kind of normalisation: 3 x 16 x 16 images to 10 logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """Two 3x3 convolutions around a skip connection."""

    def __init__(self, wide_in: int, wide_out: int, stride: int, groups: int | None) -> None:
        super().__init__()

        def norm(width: int) -> nn.Module:
            return nn.BatchNorm2d(width) if groups is None else nn.GroupNorm(groups, width)

        self.conv1 = nn.Conv2d(wide_in, wide_out, 3, stride, 1, bias=False)
        self.norm1 = norm(wide_out)
        self.conv2 = nn.Conv2d(wide_out, wide_out, 3, 1, 1, bias=False)
        self.norm2 = norm(wide_out)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or wide_in != wide_out:
            self.skip = nn.Sequential(nn.Conv2d(wide_in, wide_out, 1, stride, bias=False), norm(wide_out))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.skip(x))


class ConvNet(nn.Module):
    """Four stages in the manner of a ResNet; ``groups=None`` means batch normalisation."""

    def __init__(self, classes: int = 10, groups: int | None = None) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3, 1, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(8) if groups is None else nn.GroupNorm(groups, 8)
        self.layer1 = nn.Sequential(Residual(8, 8, 1, groups))
        self.layer2 = nn.Sequential(Residual(8, 12, 2, groups))
        self.layer3 = nn.Sequential(Residual(12, 16, 2, groups))
        self.layer4 = nn.Sequential(Residual(16, 20, 2, groups))
        self.fc = nn.Linear(20, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


class Block(nn.Module):
    """A pre-norm transformer block with one attention head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        attention = (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1)
        x = x + self.proj(attention @ v)
        y: Tensor = x + self.down(torch.relu(self.up(self.norm2(x))))
        return y


class Transformer(nn.Module):
    """Eight equal blocks over 16 patches of 4 x 4 pixels and a class token."""

    def __init__(self, classes: int = 10, width: int = 16) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn(1, 17, width) * 0.2)
        self.blocks = nn.Sequential(*[Block(width) for _ in range(8)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.token.expand(len(x), -1, -1), tokens], dim=1) + self.position
        logits: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return logits


def make_net(kind: str, *, classes: int = 10, seed: int = 0, sharpness: float = 1.0) -> nn.Module:
    """A net of kind ``bn``, ``gn`` or ``ln`` with seeded weights, in eval mode.

    ``sharpness`` multiplies the head, so that the entropies of random images straddle the thresholds.
    Running statistics and affine parameters are drawn away from 0 and 1: a mistake in either shows.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net: nn.Module
        if kind == "bn":
            net = ConvNet(classes)
        elif kind == "gn":
            net = ConvNet(classes, groups=4)
        elif kind == "ln":
            net = Transformer(classes)
        else:
            raise ValueError(f"expected bn, gn or ln, got {kind!r}")
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d | nn.GroupNorm | nn.LayerNorm):
                nn.init.uniform_(module.weight, 0.7, 1.3)
                nn.init.uniform_(module.bias, -0.2, 0.2)
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                nn.init.uniform_(module.running_mean, -0.2, 0.2)
                nn.init.uniform_(module.running_var, 0.6, 1.4)
        head = net.fc if isinstance(net, ConvNet) else net.head
        assert isinstance(head, nn.Linear)
        with torch.no_grad():
            head.weight.mul_(sharpness)
    return net.eval()


class Wrapped(nn.Module):
    """A net whose pieces a test calls in its own way."""

    def __init__(self, kind: str = "gn") -> None:
        super().__init__()
        self.net: Any = make_net(kind, sharpness=6.0)

    def stem(self, x: Tensor) -> Tensor:
        out: Tensor = self.net.conv1(x)
        return out

    def forward(self, x: Tensor) -> Tensor:
        net = self.net
        x = torch.relu(net.norm1(self.stem(x)))
        logits: Tensor = net.fc(net.layer4(net.layer3(net.layer2(net.layer1(x)))).mean((2, 3)))
        return logits


class TokensFirst(nn.Module):
    """A block whose norm layer sees (batch, tokens, width) and whose linear layer (tokens, batch, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + torch.tanh(self.mix(self.norm(tokens).transpose(0, 1)).transpose(0, 1))


class Tokens(nn.Module):
    """Four such blocks: no half of a linear layer's rows is a head's; with a class token there are no halves."""

    def __init__(self, more: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.more = more
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.blocks = nn.Sequential(*[TokensFirst() for _ in range(4)])
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        tokens = self.blocks(torch.cat([tokens[:, : self.more], tokens], dim=1))
        logits: Tensor = 20 * self.head(self.norm(tokens).mean(1))
        return logits
