"""Models of Hugging Face's transformers, tiny and untrained: batches of a processor, keywords, `.logits`."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from learners import snapshot
from torch import Tensor, nn

import poem

transformers = pytest.importorskip("transformers")
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2}
LOOSE: dict[str, Any] = {"lr": 0.05}


def vit() -> nn.Module:
    config = transformers.ViTConfig(**SMALL, image_size=32, patch_size=8, num_labels=5)
    return seeded(transformers.ViTForImageClassification, config)


def resnet() -> nn.Module:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16, 32], depths=[1, 1, 1], layer_type="basic", num_labels=5
    )
    return seeded(transformers.ResNetForImageClassification, config)


def seeded(kind: Any, config: Any) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = kind(config).eval()
    return model


def images(seed: int, count: int = 12) -> Tensor:
    return torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("make", [vit, resnet])
@pytest.mark.parametrize("method", ["tent", "eata", "sar", "poem", "auto", "deyo", "cotta"])
def test_a_processors_batch_keywords_and_a_tensor_are_one_and_the_same(make: Any, method: str) -> None:
    settings: dict[str, Any] = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "threshold": 0.999, **LOOSE}
    if method in ("tent", "auto", "cotta"):
        del settings["threshold"]
    adapters = [poem.adapt(make(), method, **settings) for _ in range(4)]
    for seed in (1, 2):
        x = images(seed)
        batch = transformers.BatchFeature({"pixel_values": x, "labels": torch.zeros(12, dtype=torch.long)})
        more = {"interpolate_pos_encoding": True} if make is vit else {"output_hidden_states": True}
        answers = [
            adapters[0](x), adapters[1](pixel_values=x), adapters[2](batch), adapters[3](pixel_values=x, **more),
        ]  # fmt: skip
        assert all(torch.equal(answers[0], each) for each in answers[1:3])
        torch.testing.assert_close(answers[3], answers[0])
    assert answers[0].shape == (12, 5)
    if method in ("tent", "cotta", "poem"):
        assert adapters[0].totals.updates > 0


@pytest.mark.parametrize("make", [vit, resnet])
def test_the_source_is_the_model_and_a_guard_takes_the_same_batch(make: Any) -> None:
    model = make()
    guard = poem.adapt(model, "tent", guard=True, **LOOSE)
    batch = transformers.BatchFeature({"pixel_values": images(1)})
    guard(batch)
    with torch.no_grad():
        torch.testing.assert_close(guard.source(**batch), model(**batch).logits)
    assert guard.signals is not None
    assert guard.signals.source_steadiness


@pytest.mark.parametrize("make", [vit, resnet])
def test_an_export_loads_into_the_class_it_came_from(make: Any) -> None:
    adapter = poem.adapt(make(), "tent", **LOOSE)
    for seed in (1, 2):
        adapter(pixel_values=images(seed))
    plain, mine = adapter.export(statistics="frozen"), make()
    assert set(plain.state_dict()) == set(mine.state_dict())
    mine.load_state_dict(plain.state_dict())
    with torch.no_grad(), adapter.frozen():
        torch.testing.assert_close(mine(images(2)).logits, adapter(images(2)), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(plain(pixel_values=images(2)), plain(images(2)))


def test_embedded_tokens_adapt_a_text_classifier() -> None:
    config = transformers.BertConfig(vocab_size=50, num_labels=4, **SMALL)
    model: Any = seeded(transformers.BertForSequenceClassification, config)
    ids, mask = torch.randint(50, (6, 9), generator=torch.Generator().manual_seed(1)), torch.ones(6, 9).long()
    mask[2, 5:] = 0
    adapter = poem.adapt(model, "tent", **LOOSE)
    before = snapshot(adapter)
    with pytest.raises(TypeError, match=r"got input_ids of torch.int64.*embed them first"):
        adapter(input_ids=ids, attention_mask=mask)
    assert snapshot(adapter) == before
    answer = adapter(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask)
    torch.testing.assert_close(answer, model(input_ids=ids, attention_mask=mask).logits)
    assert adapter.totals.updates == 1
    floating = poem.adapt(model, "tent", **LOOSE)
    floating(inputs_embeds=model.get_input_embeddings()(ids), attention_mask=mask.float())
    assert floating.adapted == adapter.adapted


def test_waveforms_and_spectrograms_adapt_audio_classifiers() -> None:
    config = transformers.Wav2Vec2Config(
        **SMALL, conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 8), num_feat_extract_layers=2, num_labels=4,
        num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2, classifier_proj_size=16,
    )  # fmt: skip
    waves = seeded(transformers.Wav2Vec2ForSequenceClassification, config)
    config = transformers.ASTConfig(**SMALL, max_length=64, num_mel_bins=32, num_labels=4)
    spectra = seeded(transformers.ASTForAudioClassification, config)
    for model, shape in ((waves, (1000,)), (spectra, (64, 32))):
        adapter = poem.adapt(model, "tent", **LOOSE)
        for _ in range(2):
            assert adapter(input_values=torch.randn(4, *shape)).shape == (4, 4)
        assert adapter.totals.updates == 2


def example() -> Any:
    """The example's module."""
    path = Path(__file__).parent.parent / "examples" / "05_clip.py"
    spec = importlib.util.spec_from_file_location("clip_example", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["clip_example"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("method", ["tent", "poem"])
def test_clip_is_refused_with_its_wrapper_and_the_wrapper_adapts(method: str) -> None:
    torch.manual_seed(0)
    wrapped = example().hugging_face(5)
    vision = {**SMALL, "image_size": 32, "patch_size": 8}
    clip = transformers.CLIPModel(transformers.CLIPConfig(text_config=SMALL, vision_config=vision))
    with pytest.raises(TypeError, match=r"got CLIPModel, which compares images with texts; wrap its image tower"):
        poem.adapt(clip, "tent")
    loose: dict[str, Any] = {"threshold": 0.999} if method == "poem" else {}
    adapter = poem.adapt(wrapped, method, **loose)
    texts = wrapped.texts.clone()
    for seed in (1, 2):
        assert adapter(pixel_values=images(seed)).shape == (12, 5)
    assert adapter.totals.updates > 0
    assert torch.equal(wrapped.texts, texts)
    assert all("images." in name for name in adapter.adapted)


def test_the_wrapper_is_clips_own_similarity() -> None:
    torch.manual_seed(0)
    module = example()
    words = {**SMALL, "vocab_size": 99, "max_position_embeddings": 16, "bos_token_id": 97, "eos_token_id": 98}
    vision = {**SMALL, "image_size": 32, "patch_size": 8}
    clip = transformers.CLIPModel(
        transformers.CLIPConfig(text_config=words, vision_config=vision, projection_dim=16)
    ).eval()
    ids = torch.cat([torch.randint(2, 97, (5, 5)), torch.full((5, 1), 98)], dim=1)
    with torch.no_grad():
        texts = clip.text_projection(clip.text_model(input_ids=ids).pooler_output)
        wrapped = module.ZeroShot(module.HuggingFaceTower(clip), texts, clip.logit_scale)
        wanted = clip(input_ids=ids, pixel_values=images(1)).logits_per_image
        torch.testing.assert_close(wrapped(images(1)), wanted, atol=1e-4, rtol=1e-4)
