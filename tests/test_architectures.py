"""Real networks with random weights: `tent+poem` at 224 pixels, the doubled branch proven on each, and its fallback."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import pytest
import timm
import torch
import torchvision
from nets import ConvNet, make_net
from torch import Tensor, nn

import poem

TIMM = [
    *("resnet50", "resnet50_gn", "resnetv2_50d_gn", "convnext_tiny", "tf_efficientnet_lite0"),
    *("vit_base_patch16_224", "deit_tiny_patch16_224", "swin_tiny_patch4_window7_224"),
]
TORCHVISION = ["resnet18", "vit_b_16", "mobilenet_v3_small", "densenet121"]
BUILD: dict[str, Callable[[], nn.Module]] = {
    **{name: partial(timm.create_model, name, pretrained=False) for name in TIMM},
    **{f"tv:{name}": partial(torchvision.models.get_model, name, weights=None) for name in TORCHVISION},
}


@pytest.mark.parametrize("name", BUILD)
def test_tent_with_poem_runs_at_224_on_the_doubled_branch(name: str) -> None:
    torch.manual_seed(0)
    model = BUILD[name]()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    training = [module.training for module in model.modules()]
    adapter = poem.adapt(model, "tent+poem", threshold=2.0)  # random weights are unsure: this selects every sample
    with torch.no_grad():
        answers = adapter(torch.rand(2, 3, 224, 224))
    assert answers.shape == (2, 1000)
    assert torch.allclose(answers.exp().sum(1), torch.ones(2), atol=1e-4)
    assert adapter.last.taught >= 2
    zeros = adapter.last.first_logits.std(1).max() < 1e-6  # torchvision starts a ViT's head with zeros: no gradient
    notes = [note for note in adapter.last.notes if not (zeros and "changed nothing" in note)]
    assert notes == [], "the doubled pass equals two plain passes on this network"
    moved = {name.removeprefix("branch.") for name in adapter.adapted}
    assert adapter.unload() is model
    assert [module.training for module in model.modules()] == training
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert moved


class KeepsBatchSize(ConvNet):
    """Remembers the batch size from before the split, so that a doubled batch breaks its last view."""

    def forward(self, x: Tensor) -> Tensor:
        count = x.size(0)
        x = torch.relu(self.norm1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean((2, 3)).view(count, -1))
        return logits


class MixesSamples(ConvNet):
    """Its deep part subtracts the batch's mean: equal halves would not show it."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv1(x)))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x)))).mean((2, 3))
        logits: Tensor = self.fc(x - x.mean(0, keepdim=True))
        return logits


@pytest.mark.parametrize("kind", [KeepsBatchSize, MixesSamples])
def test_a_network_that_cannot_be_doubled_runs_the_branch_as_a_second_pass(
    kind: type[ConvNet], caplog: pytest.LogCaptureFixture
) -> None:
    """The fallback says so, and computes what the doubled pass computes where both are possible."""
    plain, odd = make_net("gn", sharpness=6.0), kind(groups=4).eval()
    odd.load_state_dict(plain.state_dict())
    images = torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    adapter = poem.adapt(odd, "poem", threshold=0.95, lr=0.01)
    with caplog.at_level(logging.WARNING, logger="poem"):
        answers = adapter(images)
    assert adapter.last.taught > 0
    assert "second pass" in adapter.last.notes[0]
    assert "second pass" in caplog.text
    assert adapter.last.forwards_computed == 2 * adapter.last.forwards
    if kind is KeepsBatchSize:
        other = poem.adapt(plain, "poem", threshold=0.95, lr=0.01)
        assert torch.allclose(other(images), answers, atol=1e-5)
        assert other.last.notes == []


def test_the_branch_of_a_resnet50_costs_its_norm_parameters_only() -> None:
    """22,528 numbers move in the branch; with momentum and snapshot it stays under a megabyte."""
    model = timm.create_model("resnet50", pretrained=False)
    adapter = poem.adapt(model, "poem", threshold=2.0, lr=0.01)
    source = {key: value.clone() for key, value in model.get_submodule("layer4").state_dict().items()}
    rng = torch.Generator().manual_seed(0)
    for _ in range(100):
        adapter(torch.rand(2, 3, 32, 32, generator=rng))
    state = adapter.state_dict()["tensors"]
    moving = {key: value for key, value in state.items() if "branch" in key}
    numbers = sum(value.numel() for key, value in moving.items() if key.startswith("moved/"))
    assert numbers == 22_528
    assert sum(value.numel() * value.element_size() for value in moving.values()) + 4 * numbers < 1_000_000
    assert adapter.totals.updates >= 100
    original = dict(model.named_parameters())
    changed = [
        k
        for k in moving
        if k.startswith("moved/") and not torch.equal(moving[k], original[k.removeprefix("moved/branch.")])
    ]
    assert len(changed) == 20, "all scales and shifts of the ten layers moved"
    for key, value in model.get_submodule("layer4").state_dict().items():
        assert torch.equal(value, source[key]), f"the source branch moved: {key}"


def test_reference_counts_of_what_may_move() -> None:
    """ResNet-50: 53 norm layers, 43 without the top. ViT-B/16: 25 and 18, and POEM's branch has 3."""
    for name, everything, shallow, branch in (("resnet50", 106, 86, 20), ("vit_base_patch16_224", 50, 36, 6)):
        with torch.device("meta"):
            model = timm.create_model(name, pretrained=False)
        model = model.to_empty(device="cpu")
        assert len(poem.adapt(model, "tent").adapted) == everything
        assert len(poem.adapt(model, "sar").adapted) == shallow
        names = poem.adapt(model, "poem").adapted
        assert len([n for n in names if not n.startswith("branch.")]) == shallow
        assert len([n for n in names if n.startswith("branch.")]) == branch
