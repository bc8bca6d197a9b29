"""What a method is estimated to cost is what the adapter counts, on a batch where every update is made."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from learners import sharp
from torch import Tensor
from toys import calibrated, images

import poem
from poem.bench import estimate
from poem.bench.cell import Cell
from poem.bench.estimate import ASSUMED, assumed_seconds, data_sizes, forward_passes, image_count, rows
from poem.cli.main import main
from poem.parts import (
    AdaptBranch,
    AugMix,
    Consistency,
    EntropyBelow,
    Everyone,
    Explore,
    MeanTeacher,
    Memory,
    MemoryBank,
    Need,
    NotRedundant,
    Outputs,
    PLPDAbove,
    Readout,
    Select,
)
from poem.parts.selection import Both
from poem.recipes.recipe import Recipe

SIZE = 8


@dataclass(frozen=True, repr=False)
class AllButOne(Select):
    """Leaves out another sample in every round, so that no round finds the set of the one before."""

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        return among & (torch.arange(len(among)) != outputs.round)


def opened(select: Select) -> Select:
    """The same filters, which keep every sample: those that run the network still do."""
    if isinstance(select, Both):
        return opened(select.first) & opened(select.second)
    if isinstance(select, EntropyBelow):
        return replace(select, fraction=10, first=None)
    if isinstance(select, NotRedundant):
        return NotRedundant(2.0)
    return PLPDAbove(-2.0, select.destroy) if isinstance(select, PLPDAbove) else Everyone()


def complete(recipe: Recipe) -> Recipe:
    """The recipe with settings under which every update is made on a batch of `SIZE`; few views and copies."""
    recipe = replace(recipe, select=opened(recipe.select) & AllButOne(), lr=1e-4)
    if isinstance(recipe.teacher, MeanTeacher):
        recipe = replace(recipe, teacher=replace(recipe.teacher, copies=3))
    if isinstance(recipe.views, AugMix):
        recipe = replace(recipe, views=AugMix(views=4, width=1, pre="crop"))
    if isinstance(recipe.views, MemoryBank):  # large enough for all images of a batch to be of one class
        recipe = replace(recipe, views=MemoryBank(10 * SIZE, every=SIZE))
    return recipe


def assert_costs(recipe: Recipe, kind: str) -> None:
    """The adapter's counts for one batch are the estimate's."""
    inside: dict[str, Any] = {"mean": (0.0,) * 3, "std": (1.0,) * 3} if recipe.unit_range else {}
    if recipe.uses_source_data:
        inside["source_data"] = [images(SIZE, seed=2)]
    fitted, net = recipe.fitted(batch_norm=kind == "bn"), sharp(kind)
    adapter = poem.adapt(calibrated(net) if fitted.statistics.copies > 1 else net, recipe, **inside)
    adapter(images(SIZE, seed=1))
    batches = SIZE if recipe.recover.each_image else 1
    assert adapter.last.updates == (fitted.explore.updates * batches if fitted.learns else 0), "an update is missing"
    expected = rows(recipe, batch_norm=kind == "bn")
    assert (adapter.last.forwards_computed, adapter.last.backwards_computed) == (
        SIZE * expected.forward, SIZE * expected.backward,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["bn", "gn", "ln"])
@pytest.mark.parametrize("method", poem.methods())
def test_every_method_costs_what_is_estimated(method: str, kind: str) -> None:
    if poem.recipe(method).first_with(Need.TOKENS) is not None and kind != "ln":
        pytest.skip("takes vision transformers alone")
    assert_costs(complete(poem.recipe(method)), kind)


@pytest.mark.parametrize("which", ["first", "before-last", "last"])
@pytest.mark.parametrize("method", ["sar+poem", "deyo*", "memo+poem", "roid+poem"])
def test_every_pass_that_can_answer_is_counted(method: str, which: Any) -> None:
    recipe = complete(poem.recipe(method))
    assert_costs(replace(recipe, readout=replace(recipe.readout, which=which)), "gn")


@pytest.mark.parametrize("unsure", [0.0, 2.0])
@pytest.mark.parametrize("method", ["cotta", "cotta+poem"])
def test_the_teachers_copies_are_counted_where_the_source_is_unsure(method: str, unsure: float) -> None:
    teacher = MeanTeacher(copies=3, unsure=unsure)
    recipe = replace(complete(poem.recipe(method)), teacher=teacher)
    assert_costs(recipe, "gn")
    assert teacher.passes == (4 if unsure else 2)


@pytest.mark.parametrize("which", ["first", "last"])
def test_a_bank_without_a_teacher_is_told_of_a_pass_of_its_own(which: Any) -> None:
    recipe = replace(poem.recipe("tent"), views=MemoryBank(10 * SIZE, every=SIZE), readout=Readout(which))
    assert_costs(replace(recipe, lr=1e-4), "gn")


def test_passes_of_the_branchs_objective_are_counted() -> None:
    recipe = complete(poem.recipe("sar+poem"))
    assert_costs(replace(recipe, branch=AdaptBranch(teach=Consistency())), "gn")


@pytest.mark.parametrize("updates", [1, 2, 4])
def test_every_further_update_is_counted(updates: int) -> None:
    assert_costs(replace(complete(poem.recipe("poem-official")), explore=Explore(updates)), "gn")


@pytest.mark.parametrize("method", ["source", "tent", "poem"])
def test_single_images_are_estimated_to_cost_more_than_those_of_a_batch(method: str) -> None:
    cell = Cell(base="digits-gn", data="digits-test", method=method, n=500)
    alone = assumed_seconds(replace(cell, batch_size=1))
    assert 2 < alone / assumed_seconds(cell) < 10
    assert assumed_seconds(replace(cell, scenario="one-by-one")) == alone, "the order has batches of one of its own"
    large = replace(cell, base="resnet50-bn")
    assert assumed_seconds(replace(large, batch_size=1)) < 1.2 * assumed_seconds(large), "its passes are long anyway"


def test_views_of_an_image_share_a_pass_and_memo_takes_each_image_alone() -> None:
    cell = Cell(base="digits-gn", data="digits-test", method="memo", n=10)
    assert assumed_seconds(replace(cell, batch_size=1)) == assumed_seconds(cell)
    assert forward_passes(poem.recipe("memo")) > 100
    assert forward_passes(poem.recipe("memo"), views=False) < 10


def test_data_is_named_in_bytes_as_published() -> None:
    fog = Cell(base="vit-b16-B", data="imagenet-c", method="tent", corruptions=("fog",))
    noise = replace(fog, corruptions=("shot_noise", "gaussian_noise"))
    assert data_sizes([fog, replace(fog, seed=1)]) == {"imagenet-c": 12_797_438_995}
    assert data_sizes([fog, noise]) == {"imagenet-c": 12_797_438_995 + 22_565_673_785}
    clean = replace(fog, base="cifar10-bn", data="CIFAR-10-C", corruptions=("clean",))
    assert data_sizes([clean]) == {"cifar10": 170_052_171}
    assert data_sizes([replace(fog, data="digits-test"), replace(fog, data="folder")]) == {}


OWN = """
import torch
from torch import nn
from torch.utils.data import TensorDataset


def net():
    layers = nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)
    return nn.Sequential(*layers)


def odd():
    return nn.Sequential(nn.Linear(7, 10))


def pictures(count=20):
    return TensorDataset(torch.zeros(count, 3, 24, 24), torch.arange(count) % 10)
"""


def test_a_network_of_ones_own_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "estimated_net.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    cell = Cell(base="estimated_net:net", data="digits-test", method="source", n=1000)
    assert assumed_seconds(cell) < 1000 / ASSUMED["ImageNet"][0] / 10, "a small network on images of 32x32"
    estimate._timed.cache_clear()
    monkeypatch.setattr(estimate, "_fastest", lambda model, images: 0.001 + 0.002 * len(model(images)))
    seconds = 1000 * 0.002 + 0.001 * 1000 / 64
    assert assumed_seconds(cell) == pytest.approx(seconds)
    assert assumed_seconds(cell, "cuda") < seconds / 10, "as much faster as others of its size"
    other = replace(cell, base="estimated_net:odd")
    assert assumed_seconds(other) == pytest.approx(1000 / ASSUMED["CIFAR"][0], rel=0.1), "one that raises is as small"
    words = ["--set", "base=estimated_net:net", "--set", "data=digits-test", "--out", str(tmp_path / "out")]
    assert main(["bench", "table1", "--methods", "tent", "--dry-run", *words]) == 0
    assert "\ntimed here: estimated_net:net 500 images/s\n" in capsys.readouterr().out
    estimate._timed.cache_clear()


def test_images_of_ones_own_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "estimated_data.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    cell = Cell(base="digits-bn", data="estimated_data:pictures", method="source")
    assert image_count(cell) == 20
    assert image_count(replace(cell, dataset={"count": 30})) == 30  # type: ignore[arg-type]
    assert image_count(replace(cell, n=8)) == 8
    assert image_count(replace(cell, data="estimated_data:gone")) == 10_000, "not known"
