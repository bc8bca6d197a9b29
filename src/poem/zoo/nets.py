"""Small source networks for 32 x 32 images, one per kind of normalisation layer, trained by `poem train-source`.

They map normalised images (N, 3, 32, 32) to logits. `ResNet` keeps torchvision's names (`layer1` to `layer4`,
`fc`), `ViT` keeps timm's (`blocks`, `norm`, `head`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, scaled_dot_product_attention

from poem._util.files import write_atomic
from poem.zoo.weights import differing_keys, read_safetensors

Norm = Callable[[int], nn.Module]


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a skip connection; initialised to the skip connection alone."""

    def __init__(self, width_in: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width_in, width, 3, stride, 1, bias=False)
        self.norm1 = norm(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = norm(width)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or width_in != width:
            self.downsample = nn.Sequential(nn.Conv2d(width_in, width, 1, stride, bias=False), norm(width))

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, at a resolution lower by `stride`."""
        y = relu(self.norm1(self.conv1(x)))
        return relu(self.norm2(self.conv2(y)) + self.downsample(x))


class ResNet(nn.Module):
    """A residual network for small images: no pooling before the stages, four stages, a linear head.

    `groups=None` means batch normalisation, a number means group normalisation with so many groups.

    Paper: He et al., CVPR 2016 (the 18-layer layout with a 3x3 stem); Wu and He, ECCV 2018 (groups).
    """

    def __init__(
        self,
        *,
        classes: int = 10,
        widths: Sequence[int] = (48, 96, 192, 384),
        blocks: int = 2,
        groups: int | None = None,
        channels: int = 3,
        stem_stride: int = 1,
    ) -> None:
        super().__init__()

        def norm(width: int) -> nn.Module:
            return nn.BatchNorm2d(width) if groups is None else nn.GroupNorm(groups, width)

        def stage(width_in: int, width: int, stride: int) -> nn.Sequential:
            rest = [BasicBlock(width, width, 1, norm) for _ in range(blocks - 1)]
            return nn.Sequential(BasicBlock(width_in, width, stride, norm), *rest)

        self.conv1 = nn.Conv2d(channels, widths[0], 3, stem_stride, 1, bias=False)
        self.norm1 = norm(widths[0])
        self.layer1 = stage(widths[0], widths[0], 1)
        self.layer2 = stage(widths[0], widths[1], 2)
        self.layer3 = stage(widths[1], widths[2], 2)
        self.layer4 = stage(widths[2], widths[3], 2)
        self.fc = nn.Linear(widths[3], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if isinstance(module, BasicBlock):
                nn.init.zeros_(module.norm2.weight)  # type: ignore[arg-type]  # a norm layer's weight is a parameter

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (N, classes)."""
        x = relu(self.norm1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


class Stem(nn.Module):
    """Turns an image into tokens by 3x3 convolutions of stride 2; the pixels of neighbouring tokens overlap.

    Paper: Xiao et al., NeurIPS 2021 (early convolutions make small transformers easier to train).
    """

    def __init__(self, channels: int, width: int, patch: int) -> None:
        super().__init__()
        halvings = patch.bit_length() - 1
        if patch != 1 << halvings or halvings < 1:
            raise ValueError(f"expected a patch of 2, 4, 8 or 16 pixels, got {patch}")
        widths = [channels, *(width >> (halvings - 1 - step) for step in range(halvings))]
        self.convs = nn.ModuleList(nn.Conv2d(a, b, 3, 2, 1) for a, b in pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        """Tokens of shape (N, tokens, width)."""
        for index, conv in enumerate(self.convs):
            x = conv(x if index == 0 else gelu(x))
        return x.flatten(2).transpose(1, 2)


class TransformerBlock(nn.Module):
    """A pre-norm transformer block: attention, then two linear layers, each with a skip connection."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (N, tokens, width) of the same shape."""
        rows, tokens, width = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, tokens, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, tokens, width)
        x = x + self.proj(mixed)
        output: Tensor = x + self.fc2(gelu(self.fc1(self.norm2(x))))
        return output


class ViT(nn.Module):
    """A vision transformer for small images: equal blocks over tokens of `patch` pixels, and a class token.

    Paper: Dosovitskiy et al., ICLR 2021.
    Differs: tokens come from a small convolutional stem, which reaches a given accuracy in fewer epochs.
    """

    def __init__(
        self,
        *,
        classes: int = 10,
        width: int = 256,
        depth: int = 12,
        heads: int = 4,
        hidden: int = 512,
        patch: int = 4,
        size: int = 32,
        channels: int = 3,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"expected a width that {heads} heads share evenly, got {width}")
        self.stem = Stem(channels, width, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.empty(1, (size // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*[TransformerBlock(width, heads, hidden) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        nn.init.trunc_normal_(self.position, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=width**-0.5)
                nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, TransformerBlock):  # keeps the sum over all blocks as large as one block's output
                module.proj.weight.data.mul_((2 * depth) ** -0.5)
                module.fc2.weight.data.mul_((2 * depth) ** -0.5)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (N, classes)."""
        tokens = self.stem(x)
        tokens = torch.cat([self.token.expand(tokens.shape[0], -1, -1), tokens], dim=1) + self.position
        logits: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return logits


NETS: dict[str, Callable[[], nn.Module]] = {
    "digits-bn": lambda: ResNet(widths=(8, 16, 32, 64), blocks=1),
    "digits-gn": lambda: ResNet(widths=(8, 16, 32, 64), blocks=1, groups=4),
    "digits-ln": lambda: ViT(width=48, depth=8, heads=3, hidden=96, patch=8),
    "cifar10-bn": lambda: ResNet(widths=(20, 40, 72, 72)),
    "cifar10-gn": lambda: ResNet(widths=(20, 40, 72, 72), groups=4),
    "cifar10-vit": lambda: ViT(width=96, depth=5, heads=3, hidden=192),
    "cifar100-bn": lambda: ResNet(widths=(20, 40, 72, 72), classes=100),
    "cifar100-gn": lambda: ResNet(widths=(20, 40, 72, 72), classes=100, groups=4),
    "cifar100-vit": lambda: ViT(width=96, depth=5, heads=3, hidden=192, classes=100),
}
"""Constructors of our own networks by name; `poem.zoo.load` loads their weights."""


def build(name: str, *, seed: int = 0) -> nn.Module:
    """Build one of our own networks with weights drawn from `seed`; the caller's random state is restored."""
    if name not in NETS:
        raise ValueError(f"expected one of {', '.join(NETS)}, got {name!r}")
    with seeded(seed):
        return NETS[name]()


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator for a block, and restore its state at the end."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed every device
        yield


def save_net(net: nn.Module, path: Path, metadata: Mapping[str, str]) -> str:
    """Save weights as safetensors, atomically; returns the file's SHA-256.

    Matrices and kernels are stored in half precision, all else (norm layers, biases, statistics) as it is.
    """
    from safetensors.torch import save

    def stored(tensor: Tensor) -> Tensor:
        half = tensor.is_floating_point() and tensor.dim() > 1
        return tensor.detach().cpu().contiguous().to(torch.float16 if half else tensor.dtype)

    tensors = {key: stored(value) for key, value in net.state_dict().items()}
    for key, value in tensors.items():
        if not bool(value.isfinite().all()):
            raise ValueError(f"expected finite weights, got NaN or Inf in {key}; was the learning rate too high?")
    content = save(tensors, metadata=dict(metadata))
    write_atomic(path, content)
    return hashlib.sha256(content).hexdigest()


def load_net(net: nn.Module, path: Path) -> nn.Module:
    """Load weights that `save_net` saved into a network of the same name; any other key or shape is an error."""
    tensors, own = read_safetensors(path), net.state_dict()
    if wrong := differing_keys(own, tensors):
        raise ValueError(f"expected the weights of {type(net).__name__}, got {path}, which differs in {wrong[:3]}")
    net.load_state_dict({key: value.to(own[key].dtype) for key, value in tensors.items()})
    return net
