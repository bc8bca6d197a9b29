"""Networks for 224 x 224 images that a base builds otherwise than torchvision or timm: a ViT, and Keras' ResNet-50."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

LAYER_NORM_EPS = 1e-6
"""As in timm's vision transformers; torch's default is 1e-5."""
KERAS_BATCH_NORM_EPS = 1e-3
"""As in Keras; torch's default is 1e-5."""


class PatchEmbed(nn.Module):
    """Turns an image into tokens: one linear map of each square of `patch` pixels."""

    def __init__(self, channels: int, width: int, patch: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, patch)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens of shape (N, tokens, width)."""
        tokens: Tensor = self.proj(x).flatten(2).transpose(1, 2)
        return tokens


class Attention(nn.Module):
    """Self-attention over tokens."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (N, tokens, width) of the same shape."""
        rows, tokens, width = x.shape
        q, k, v = self.qkv(x).view(rows, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed: Tensor = self.proj(scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, tokens, width))
        return mixed


class Mlp(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (N, tokens, width) of the same shape."""
        output: Tensor = self.fc2(gelu(self.fc1(x)))
        return output


class Block(nn.Module):
    """A pre-norm transformer block: attention, then two linear layers, each with a skip connection."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.mlp = Mlp(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (N, tokens, width) of the same shape."""
        x = x + self.attn(self.norm1(x))
        output: Tensor = x + self.mlp(self.norm2(x))
        return output


class ImageNetViT(nn.Module):
    """A vision transformer with timm's parameter names and logits, built without timm; by default ViT-Tiny/16.

    Paper: Dosovitskiy et al., ICLR 2021.
    Differs: dropout and stochastic depth, which do nothing in eval mode, are left out.

    Args:
        classes: Number of logits.
        width: Width of a token.
        depth: Number of blocks.
        heads: Attention heads; they share the width evenly.
        patch: Side of a token's square, in pixels.
        size: Side of the image, in pixels; a multiple of `patch`.
        channels: Channels of the image.

    Raises:
        ValueError: The heads do not divide the width, or the patch does not divide the image.
    """

    def __init__(
        self,
        *,
        classes: int = 1000,
        width: int = 192,
        depth: int = 12,
        heads: int = 3,
        patch: int = 16,
        size: int = 224,
        channels: int = 3,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ValueError(f"expected a width that {heads} heads share evenly, got {width}")
        if size % patch:
            raise ValueError(f"expected images of a multiple of {patch} pixels, got {size}")
        self.patch_embed = PatchEmbed(channels, width, patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.empty(1, (size // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*[Block(width, heads, 4 * width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.head = nn.Linear(width, classes)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (N, classes)."""
        tokens = self.patch_embed(x)
        tokens = torch.cat([self.cls_token.expand(tokens.shape[0], -1, -1), tokens], dim=1) + self.pos_embed
        logits: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return logits


def keras_resnet50() -> nn.Module:
    """ResNet-50 as Keras builds it, with torchvision's names.

    Differs from torchvision's: batch norm adds 1e-3 to the variance instead of 1e-5, and the first block of layers 2 to
    4 has its stride of 2 in the first 1x1 convolution (as He et al., CVPR 2016) instead of the 3x3 one.
    """
    from torchvision.models import resnet50

    net: nn.Module = resnet50(weights=None, norm_layer=partial(nn.BatchNorm2d, eps=KERAS_BATCH_NORM_EPS))
    for name in ("layer2", "layer3", "layer4"):
        block = net.get_submodule(f"{name}.0")
        first, second = block.get_submodule("conv1"), block.get_submodule("conv2")
        assert isinstance(first, nn.Conv2d)
        assert isinstance(second, nn.Conv2d)
        first.stride, second.stride = (2, 2), (1, 1)
    return net


IMAGENET_NETS: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "vit_tiny_patch16_224": ("poem", ImageNetViT),
    "resnet50_keras": ("torchvision", keras_resnet50),
}
"""By the `arch` of a base: the package that must be installed, and the constructor with random weights."""
