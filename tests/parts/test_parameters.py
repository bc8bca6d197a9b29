"""Which parameters a recipe moves: found by what layers are, not by their names."""

from __future__ import annotations

import pytest
import torch
from nets import make_net
from torch import nn

import poem
from poem.engine.anatomy import anatomy
from poem.parts import (
    Everything,
    NormAffine,
    Readout,
)


def numbers(model: nn.Module, layers: tuple[str, ...]) -> tuple[int, int]:
    return len(layers), sum(p.numel() for layer in layers for p in model.get_submodule(layer).parameters())


@pytest.mark.parametrize(
    ("library", "name", "every", "shallow", "branch"),
    [
        ("torchvision", "resnet50", (53, 53_120), (43, 30_592), (10, 22_528)),
        ("timm", "vit_base_patch16_224", (25, 38_400), (18, 27_648), (3, 4_608)),
    ],
)
def test_layers_are_found_by_what_they_are(
    library: str, name: str, every: tuple[int, int], shallow: tuple[int, int], branch: tuple[int, int]
) -> None:
    models = pytest.importorskip(f"{library}.models")
    with torch.device("meta"):
        inner = getattr(models, name)()
    for model in (inner, nn.Sequential(nn.Identity(), inner)):  # another name in front changes nothing
        facts = anatomy(model)
        assert numbers(model, facts.norms) == every
        for parameters, count in ((NormAffine(), every), (NormAffine("excluded"), shallow)):
            names = parameters(model, facts)
            layers = tuple(dict.fromkeys(n.rpartition(".")[0] for n in names))
            assert len(names) == 2 * len(layers)
            assert numbers(model, layers) == count
        assert numbers(model, facts.beyond(facts.split())) == branch


def test_everything_means_every_parameter_and_cotta_leaves_out_tokens() -> None:
    model = make_net("ln")
    facts, names = anatomy(model), [name for name, _ in model.named_parameters()]
    assert Everything()(model, facts) == names
    left = set(names) - set(Everything("weight-and-bias")(model, facts))
    assert left == {"token", "position"}
    assert poem.recipe("cotta").parameters == Everything("weight-and-bias")
    assert poem.recipe("cotta").readout == Readout("teacher")
