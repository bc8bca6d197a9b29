"""Text leaves settings at their default out, so that a changed default needs another version of its part."""

from __future__ import annotations

from dataclasses import MISSING, Field, fields, is_dataclass
from typing import Any

import pytest

from poem.bench.cell import Cell, key_of
from poem.parts.base import Part
from poem.recipes import text

COTTA = (
    "Jitter(brightness=(0.6, 1.4), contrast=(0.7, 1.3), saturation=(0.5, 1.5), hue=(-0.06, 0.06), gamma=(0.7, 1.3), "
    "degrees=15.0, translate=0.0625, scale=(0.9, 1.1), padding='edge', blur=(0.001, 0.5), noise=0.005, flip=0.5)"
)
COPIES = "rates=(1.0, 1.0, 1.0, 1.0, 0.05), doubts=(0.0, 0.0, 0.0, 0.0, 3.0)"
DEFAULTS: dict[str, tuple[str, ...]] = {
    "Adam": ("eps=1e-08",),
    "AdaptBranch": ("alpha=0.5, combine='probabilities', teach=CrossEntropy(labels='combined', least=0.0)",),
    "Blended": (
        f"{COPIES}, trust=2.3, caution=5.0, horizon=256, source_images=256",
        f"{COPIES}, trust=10.0, bonus=1.0, caution=5.0, horizon=256, source_images=512",
        f"{COPIES}, trust=10.0, bonus=1.0, caution=5.0, horizon=256, source_images=512",  # another rule for runs
    ),
    "ByDiversityAndCertainty": ("temperature=0.3333333333333333",),
    "ByEntropy": ("score=SoftmaxEntropy(), most=None",),
    "Clipped": ("limit=None, rate=0.1",),
    "Components": ("temperature=0.07, momentum=0.1",),
    "CrossEntropy": ("least=0.0",),
    "Entropy": ("least=0.0",),
    "EntropyBelow": ("first=None, score=SoftmaxEntropy()",),
    "Laplacian": ("affinity='rbf', steps=100",),
    "LocalPrior": ("horizon=1024",),
    "LossAverageBelow": ("momentum=0.9, of='last'",),
    "LowFrequencies": ("transformer=0.2, square=0.2",),
    "MatchEntropy": ("widest=1.8, score=SoftmaxEntropy()",),
    "MeanTeacher": (f"copies=32, unsure=0.1, augment={COTTA}",),
    "MemoryBank": (f"every=64, timeliness=1.0, certainty=1.0, augment={COTTA}, by_age=True",),
    "MomentumFilter": ("keep_hidden=0.99, noise=0.005, least=0.89",),
    "NotRedundant": ("momentum=0.9",),
    "PLPDAbove": ("destroy=Patches(grid=4)",),
    "PatchNoise": ("convolutional=0.1, transformer=0.4, clip=1.0",),
    "RankedEntropy": ("levels=3, ranking=1.0, margin=0.0",),
    "Readout": ("correct=Uncorrected()",),
    "RegionConfidence": ("score=RegionalEntropy(region=1.2, tilt=0.0005)",),
    "RegionalEntropy": ("tilt=0.0005",),
    "SAM": ("base=SGD(momentum=0.9, nesterov=False), momentum_coast=False",),
    "SGD": ("nesterov=False",),
    "SelfBootstrap": (
        "transformer=5.0, frequencies=LowFrequencies(convolutional=0.1, transformer=0.2, square=0.2), "
        "noise=PatchNoise(patch=16, convolutional=0.1, transformer=0.4, clip=1.0)",
    ),
    "SiameseEntropy": ("convolutional=10.0, transformer=1.0",),
    "SoftLikelihoodRatio": ("eps=1e-05",),
    "WaryTeacher": ("rate=0.05",),
}
"""Defaults that text leaves out, of each version of every part that has some."""


def default_of(item: Field[Any]) -> Any:
    return item.default_factory() if item.default_factory is not MISSING else item.default


def in_full(value: Any) -> str:
    """A value with every setting of it and of what is inside it, also those at their default."""
    if not is_dataclass(value):
        return repr(value)
    inside = (f"{item.name}={in_full(getattr(value, item.name))}" for item in fields(value))
    return f"{type(value).__name__}({', '.join(inside)})"


def left_out(part: type[Part]) -> str:
    """Defaults that a part's text leaves out: all but the first setting's, unless that one is given by name alone."""
    found = {item.name: default_of(item) for index, item in enumerate(fields(part)) if index or item.kw_only}
    return ", ".join(f"{name}={in_full(value)}" for name, value in found.items() if value is not MISSING)


def test_a_part_with_other_defaults_has_another_version() -> None:
    parts = {name: part for name, part in text.PARTS.items() if part.__repr__ is Part.__repr__}
    now = {name: words for name, part in sorted(parts.items()) if (words := left_out(part))}
    assert now == {name: versions[-1] for name, versions in DEFAULTS.items()}, (
        "defaults changed that text leaves out: raise the part's number in poem.recipes.text.PART_VERSIONS and add the "
        "new defaults to DEFAULTS; a new setting whose default changes no answer goes into the last entry instead"
    )
    changed = {name: len(versions) for name, versions in DEFAULTS.items() if len(versions) > 1}
    assert changed == text.PART_VERSIONS


def test_auto_with_the_new_defaults_of_blended_has_another_key() -> None:
    cell = Cell(base="digits-bn", data="digits-test", method="auto")
    assert cell.key != "ef04828280c76a5d", "its key with trust=2.3"
    assert cell.key == key_of(cell, text.written(cell.recipe()))


def test_only_recipes_with_the_part_get_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def keys() -> dict[str, str]:
        return {name: Cell(base="digits-bn", data="digits-test", method=name).key for name in ("auto", "eta", "tent")}

    before = keys()
    monkeypatch.setitem(text.PART_VERSIONS, "NotRedundant", 2)
    assert {name for name, key in keys().items() if key != before[name]} == {"auto", "eta"}


def test_versions_are_read_from_text_and_only_of_parts_of_this_package() -> None:
    assert text.part_versions({"statistics": "Blended((0.0, 1.0))", "lr": "0.1"}) == {"Blended": 3}
    assert text.part_versions({"on_batch_norm": "Recipe(statistics=Blended((0.0, 1.0)))"}) == {"Blended": 3}
    for other in ("mine:Blended(0.5)", "mine.Blended(0.5)", "NotBlended(0.5)", "'Blended'", "FromBatch()"):
        assert text.part_versions({"statistics": other}) == {}, other
