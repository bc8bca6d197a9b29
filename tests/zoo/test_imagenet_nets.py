"""Networks that the library builds itself for 224 x 224 images: equal to timm's, and to Keras' layout."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from poem import zoo
from poem.engine.anatomy import anatomy
from poem.zoo.imagenet_nets import ImageNetViT
from poem.zoo.models import require_builder


def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Every tensor random, norm layers and biases too, so that none can be missed in a comparison."""
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                scale = 0.3 if tensor.dim() < 2 else tensor[0].numel() ** -0.5
                values = torch.randn(tensor.shape, generator=rng) * scale
                tensor.copy_(values.abs() + 0.5 if name.endswith(("running_var", "norm.weight")) else values)
    return model.eval()


def images(count: int = 2, size: int = 224) -> Tensor:
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(1)) * 2 - 1


def test_the_vit_has_timms_tensors_and_logits() -> None:
    timm = pytest.importorskip("timm")
    theirs = randomised(timm.create_model("vit_tiny_patch16_224", pretrained=False))
    ours = ImageNetViT().eval()
    assert {key: value.shape for key, value in ours.state_dict().items()} == {
        key: value.shape for key, value in theirs.state_dict().items()
    }
    ours.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        expected, found = theirs(images()), ours(images())
    assert expected.std() > 0.1, "random weights answer differently for every class"
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_the_vit_has_the_anatomy_of_timms() -> None:
    timm = pytest.importorskip("timm")
    theirs, ours = anatomy(timm.create_model("vit_tiny_patch16_224", pretrained=False)), anatomy(ImageNetViT())
    assert (ours.kind, ours.stages, ours.norms, ours.top, ours.head) == (
        theirs.kind, theirs.stages, theirs.norms, theirs.top, theirs.head,
    )  # fmt: skip


@pytest.mark.parametrize("settings", [{"width": 50, "heads": 4}, {"size": 30, "patch": 16}])
def test_a_vit_that_cannot_be_built_says_why(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected"):
        ImageNetViT(**settings)


def test_vit_tiny16_needs_no_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)
    assert require_builder(zoo.base("vit-tiny16")) == "poem"
    model, base = zoo.load("vit-tiny16", "random")
    assert isinstance(model, ImageNetViT)
    assert (base.mean, base.std, base.resize, base.crop) == ((0.5,) * 3, (0.5,) * 3, 256, 224)
    assert sum(p.numel() for p in model.parameters()) == 5_717_416


def test_half_precision_weights_are_loaded_as_float32(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    stored = {key: value.half() for key, value in randomised(ImageNetViT()).state_dict().items()}
    base = zoo.base("vit-tiny16")
    save_file(stored, tmp_path / base.file)
    model, _ = zoo.load("vit-tiny16", tmp_path)
    assert {value.dtype for value in model.state_dict().values()} == {torch.float32}
    assert all(torch.equal(value, stored[key].float()) for key, value in model.state_dict().items())


def test_googles_npz_is_refused_where_timm_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "vit.npz").write_bytes(b"PK")
    with pytest.raises(ValueError, match="expected a file of tensors alone"):
        zoo.load("vit-tiny16", tmp_path / "vit.npz")


def test_keras_resnet_has_strides_and_eps_of_keras() -> None:
    pytest.importorskip("torchvision")
    model, base = zoo.load("resnet50-keras", "random")
    for layer in (1, 2, 3, 4):
        convs = [model.get_submodule(f"layer{layer}.0.conv{number}") for number in (1, 2, 3)]
        strides = [conv.stride for conv in convs if isinstance(conv, nn.Conv2d)]
        assert strides == [(1, 1) if layer == 1 else (2, 2), (1, 1), (1, 1)]
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == 53
    assert {norm.eps for norm in norms} == {1e-3}
    pixels = torch.tensor([123.68, 116.779, 103.939]) + torch.tensor([0.0, 1.0, -2.0])
    normalised = (pixels / 255 - torch.tensor(base.mean)) / torch.tensor(base.std)
    torch.testing.assert_close(normalised, torch.tensor([0.0, 1.0, -2.0]), rtol=0, atol=1e-4)


def test_keras_resnet_computes_what_torchvisions_does_but_for_strides_and_eps() -> None:
    models = pytest.importorskip("torchvision.models")
    ours, _ = zoo.load("resnet50-keras", "random")
    theirs = models.resnet50(weights=None)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(randomised(ours).state_dict())
    theirs.eval()
    for name in ("layer2", "layer3", "layer4"):
        block = theirs.get_submodule(f"{name}.0")
        block.conv1.stride, block.conv2.stride = (2, 2), (1, 1)
    x = images(1, 64)
    with torch.no_grad():
        assert not torch.allclose(ours(x), theirs(x)), "the eps differs"
        for module in theirs.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eps = 1e-3
        torch.testing.assert_close(ours(x), theirs(x))


def test_a_file_without_counters_of_batches_is_loaded_and_one_without_a_kernel_is_not(tmp_path: Path) -> None:
    pytest.importorskip("torchvision")
    from safetensors.torch import save_file

    base = zoo.base("resnet50-keras")
    state = randomised(zoo.load("resnet50-keras", "random")[0]).state_dict()
    tensors = {
        key: value.half() if value.dim() > 1 else value
        for key, value in state.items()
        if not key.endswith("num_batches_tracked")
    }
    save_file(tensors, tmp_path / base.file)
    model, _ = zoo.load("resnet50-keras", tmp_path)
    assert torch.equal(model.state_dict()["layer3.0.conv2.weight"], tensors["layer3.0.conv2.weight"].float())
    assert torch.equal(model.state_dict()["bn1.running_var"], tensors["bn1.running_var"])
    del tensors["layer3.0.conv2.weight"]
    save_file(tensors, tmp_path / base.file)
    with pytest.raises(ValueError, match=r"expected the weights resnet50_v1_keras .*layer3\.0\.conv2\.weight"):
        zoo.load("resnet50-keras", tmp_path)


def test_missing_keras_weights_are_described(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"it is Keras' ImageNet weights.*put resnet50_v1_keras\.safetensors"):
        zoo.load("resnet50-keras", tmp_path)
