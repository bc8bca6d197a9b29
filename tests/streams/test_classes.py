"""Which logits the classes of a data set are."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from trees import grow

from poem.streams.datasets import (
    class_indices,
    image_folder,
)
from poem.streams.datasets.classes import IMAGENET_A, IMAGENET_R, TINY_IMAGENET, imagenet_wnids


def test_class_indices_of_imagenet_a_r_and_tiny_imagenet() -> None:
    for indices in (IMAGENET_A, IMAGENET_R, TINY_IMAGENET):
        assert list(indices) == sorted(set(indices))
        assert len(indices) == 200
        assert 0 <= min(indices) <= max(indices) < 1000
    assert len(set(IMAGENET_A) & set(IMAGENET_R)) == 86


def test_class_indices_agree_with_timm() -> None:
    spec = importlib.util.find_spec("timm")  # found, not imported: that takes seconds
    if spec is None or spec.origin is None:
        pytest.skip("timm is not installed")
    folder = Path(spec.origin).parent / "data" / "_info"
    for name, ours in (("imagenet_a", IMAGENET_A), ("imagenet_r", IMAGENET_R)):
        path = folder / f"{name}_indices.txt"
        if not path.is_file():
            pytest.skip("this timm keeps its index lists elsewhere")
        assert [int(word) for word in path.read_text().split()] == list(ours)


def test_wnids_are_ranked_among_the_thousand() -> None:
    assert class_indices(["n01440764", "n01443537", "n15075141"]) == (0, 1, 999)
    assert class_indices([imagenet_wnids()[index] for index in IMAGENET_R]) == IMAGENET_R
    with pytest.raises(ValueError, match="got 1 others: n99999999; pass order="):
        class_indices(["n01440764", "n99999999"])


def test_the_thousand_wnids_are_those_of_timm() -> None:
    info = pytest.importorskip("timm.data.imagenet_info").ImageNetInfo("imagenet-1k")
    assert list(imagenet_wnids()) == list(info.label_names())


def test_other_names_come_from_a_list_a_mapping_or_a_file(tmp_path: Path) -> None:
    names = ["apple", "sea lion", "lime"]
    (tmp_path / "names.txt").write_text("apple\n\nsea lion\nlime\n")
    (tmp_path / "names.json").write_text('["apple", "sea lion", "lime"]')
    (tmp_path / "index.json").write_text('{"lime": 2, "sea lion": 1, "apple": 0}')
    (tmp_path / "synsets.txt").write_text("n01440764 tench, Tinca tinca\nn01443537 goldfish\n")
    mapping = {"apple": 0, "sea lion": 1, "lime": 2}
    files = [tmp_path / each for each in ("names.txt", "names.json", "index.json")]
    orders: list[Any] = [names, mapping, *files]
    for order in orders:
        assert class_indices(["lime", "sea lion"], order) == (2, 1)
    assert class_indices(["n01443537"], str(tmp_path / "synsets.txt")) == (1,)
    with pytest.raises(ValueError, match="expected names among the 3 given, got 1 others: lim; did you mean 'lime'"):
        class_indices(["lim"], names)
    with pytest.raises(ValueError, match="expected each class once, got 2 names for 1 logits"):
        class_indices(["a", "b"], {"a": 4, "b": 4})


def test_class_folders_are_in_the_order_of_their_logits(tmp_path: Path) -> None:
    wnids = [imagenet_wnids()[index] for index in (7, 2, 900)]
    data = image_folder(grow(tmp_path / "some", wnids))
    logits = torch.arange(1000.0)[None]
    cut = logits[:, list(class_indices(data.classes or ()))]
    assert [int(cut[0, label]) for label in data.labels] == [2, 7, 900], "folders come by name"
