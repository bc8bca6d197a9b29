"""CLIP as a zero-shot classifier that learns while it predicts: a wrapper of a few lines around its image tower.

A model such as CLIP compares images with texts. With the texts' features as the last layer its image tower is a
classifier like any other, and every method adapts it. Run it: python examples/05_clip.py
It builds an untrained CLIP of Hugging Face's transformers where that is installed, else a stand-in; with trained
weights the lines are the same.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import poem


class ZeroShot(nn.Module):
    """Images to logits over texts; `tower` gives an image's features (batch, D), `texts` (classes, D) the texts'."""

    def __init__(self, tower: nn.Module, texts: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.images = tower
        self.register_buffer("texts", F.normalize(texts.detach(), dim=-1))
        self.register_buffer("scale", scale.detach())

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Cosine of image and text, times CLIP's own temperature."""
        scale: Any = self.scale
        texts: Any = self.texts
        logits: Tensor = scale.exp() * F.normalize(self.images(pixel_values), dim=-1) @ texts.T
        return logits


class HuggingFaceTower(nn.Module):
    """The image tower of a `transformers.CLIPModel`. Of open_clip and OpenAI's CLIP it is `clip.visual` as it is."""

    def __init__(self, clip: Any) -> None:
        super().__init__()
        self.vision, self.projection = clip.vision_model, clip.visual_projection

    def forward(self, pixel_values: Tensor) -> Tensor:
        """An image's features."""
        features: Tensor = self.projection(self.vision(pixel_values=pixel_values).pooler_output)
        return features


def hugging_face(classes: int) -> ZeroShot:
    """An untrained CLIP; yours: CLIPModel.from_pretrained(...), and ids from its tokenizer."""
    from transformers import CLIPConfig, CLIPModel

    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
    words = {**small, "vocab_size": 99, "max_position_embeddings": 16, "bos_token_id": 97, "eos_token_id": 98}
    config = CLIPConfig(
        text_config=words, vision_config={**small, "image_size": 32, "patch_size": 8}, projection_dim=16
    )
    clip: Any = CLIPModel(config)
    clip.eval()
    ids = torch.cat([torch.randint(2, 97, (classes, 5)), torch.full((classes, 1), 98)], dim=1)
    with torch.no_grad():
        found = clip.text_model(input_ids=ids).pooler_output
        return ZeroShot(HuggingFaceTower(clip), clip.text_projection(found), clip.logit_scale)


def stand_in(classes: int) -> ZeroShot:
    """Two towers of nothing in particular."""
    images = nn.Sequential(
        nn.Conv2d(3, 16, 4, 4), nn.GroupNorm(2, 16), nn.ReLU(), nn.Conv2d(16, 32, 2, 2), nn.GroupNorm(2, 32), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 16),
    )  # fmt: skip
    texts = nn.EmbeddingBag(99, 16)
    return ZeroShot(images, texts(torch.randint(99, (classes, 5))), torch.tensor(2.66))


def main() -> None:
    """Three batches, by the method's own name."""
    torch.manual_seed(0)
    model = (hugging_face if importlib.util.find_spec("transformers") else stand_in)(5)
    adapter = poem.adapt(model, "poem", threshold=0.999)  # an untrained model is uncertain: select nearly all samples
    for images in torch.rand(3, 16, 3, 32, 32):
        answer = adapter(pixel_values=images)  # or adapter(images), or a processor's batch
        print(f"{tuple(answer.shape)}: {adapter.last.taught} used, {adapter.last.updates} updates")
    print(len(adapter.adapted), "tensors of the image tower may move; the texts' features stay")


if __name__ == "__main__":
    main()
