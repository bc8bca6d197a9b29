"""The study's runner: names of rows, the order of work, and that joined files pair what was measured on one stream."""

from __future__ import annotations

import json
import multiprocessing
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import poem
from poem.bench.sample_cells import bits_text

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
pytestmark = pytest.mark.skipif(not (BENCHMARKS / "study").is_dir(), reason="a copy without benchmarks")


def _module(name: str, package: str = "study") -> Any:
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return import_module(f"{package}.{name}")


def _cell(row: str, bits: list[int], **changes: Any) -> dict[str, Any]:
    text = bits_text(np.array(bits, bool))
    cell = {"net": "cifar10-bn", "stream": "fog-5", "seed": 0, "batch": 64, "row": row, "n": len(bits), "hash": "a"}
    return {**cell, "tree": "t", "right": sum(bits), "bits": text, **changes}


# Rows -----------------------------------------------------------------------------------------------------------------


def test_every_row_of_every_part_has_a_recipe() -> None:
    rows, parts = _module("rows"), _module("parts")
    made = 0
    for blocks in parts.PARTS.values():
        for block in blocks:
            for net in block.nets:
                made += sum(rows.recipe_of(row, net) is not None for row in block.rows if rows.fits(row, net))
    assert made > 500


def test_a_row_without_changes_is_the_method() -> None:
    rows = _module("rows")
    assert rows.recipe_of("deyo+poem", "resnet50-keras") == poem.recipe("deyo+poem")
    assert rows.recipe_of("tent", "cifar10-gn") == poem.recipe("tent", "cifar")


def test_changes_are_those_of_the_name() -> None:
    recipe_of = _module("rows").recipe_of
    assert recipe_of("poem, threshold 0.2", "resnet50-keras") == poem.recipe("poem").changed({"threshold": 0.2})
    assert recipe_of("poem, rate x4", "cifar10-bn").lr == pytest.approx(0.004)
    assert recipe_of("tent, rate x4", "vit-tiny16").lr("transformer", 64) == pytest.approx(0.004)
    assert recipe_of("tent, read last", "vit-tiny16").readout.which == "last"
    assert recipe_of("poem, no branch", "vit-tiny16").branch is None
    with pytest.raises(ValueError, match="expected changes out of"):
        recipe_of("poem, treshold 0.2", "vit-tiny16")


def test_auto_statistics_are_those_of_auto_and_nothing_else_changes() -> None:
    recipe_of = _module("rows").recipe_of
    plain, found = recipe_of("sar", "resnet50-keras"), recipe_of("sar [auto statistics]", "resnet50-keras")
    taken = poem.recipe("auto").on_batch_norm
    assert taken is not None
    assert found.statistics == taken.statistics != plain.statistics
    assert found.changed({"statistics": plain.statistics}) == plain
    with pytest.raises(ValueError, match="no batch norm"):
        recipe_of("sar [auto statistics]", "vit-tiny16")


# Work -----------------------------------------------------------------------------------------------------------------


def _entries(*arguments: str) -> list[Any]:
    measure = _module("measure")
    return list(measure.wanted(measure.parse(["--again", *arguments])))


def test_no_cell_is_asked_for_twice_and_the_first_part_comes_first() -> None:
    entries = _entries()
    keys = [(entry.key(row), entry.images) for entry in entries for row in entry.names]
    assert len(keys) == len(set(keys))
    order = list(_module("parts").PARTS)
    places = [order.index(entry.part) for entry in entries]
    assert places == sorted(places)
    assert entries[0].part == "imagenet"


def test_splitting_keeps_every_row_once() -> None:
    measure, costs = _module("measure"), _module("costs")
    entry = _entries("--parts", "imagenet", "--nets", "resnet50-keras")[0]
    groups = list(measure.split(entry, costs.Estimate([])))
    assert sorted(row for group in groups for row in group.names) == sorted(entry.names)
    assert all(group.seconds > 0 and group.gigabytes > 0 for group in groups)


def test_rows_wait_for_their_images_and_for_room() -> None:
    measure = _module("measure")
    clean = _module("streams", "auto").CLEAN
    prepare = measure.Entry("p", "cifar10-bn", 0, clean, gigabytes=1.0)
    large = measure.Entry("p", "cifar10-bn", 0, stream="fog-5", names=("tent",), after=(0,), gigabytes=8.0)
    small = measure.Entry("p", "cifar10-bn", 0, stream="clean", names=("tent",), gigabytes=1.0)
    entries = [prepare, large, small]
    board = measure.Board(multiprocessing.get_context("spawn"), 3, 8.5)
    assert board.take(entries) == (0, True)
    assert board.take(entries) == (2, True)  # the second entry's images are not there
    assert board.take(entries) == (None, True)
    board.give_back(0, prepare, ready=True)
    assert board.take(entries) == (None, True)  # 1 of 8.5 GB is in use, it needs 8
    board.give_back(2, small, ready=True)
    assert board.take(entries) == (1, True)
    assert board.take(entries) == (None, False)


def test_cells_of_another_stream_are_run_again() -> None:
    measure = _module("measure")
    entry = measure.Entry("p", "cifar10-bn", 0, stream="fog-5", images=4, names=("tent", "poem"))
    done = {(entry.key("tent"), 4, "a"), (entry.key("poem"), 4, "b")}
    left = list(measure.without(iter([entry]), done, lambda _: "a"))
    assert [each.names for each in left] == [("poem",)]


# Joined files ---------------------------------------------------------------------------------------------------------


def test_a_cell_is_paired_with_source_on_the_same_stream_alone() -> None:
    join = _module("join")
    cells = [
        _cell("source", [1, 1, 0, 0]), _cell("tent", [1, 0, 1, 1]), _cell("poem", [1, 1, 1, 1], hash="b"),
        _cell("tent", [0, 0, 0, 1], batch=16),
    ]  # fmt: skip
    found = {(cell["row"], cell["batch"]): cell for cell in join.paired(cells)}
    assert (found["tent", 64]["better"], found["tent", 64]["worse"]) == (2, 1)
    assert (found["tent", 16]["better"], found["tent", 16]["worse"]) == (1, 2)
    assert "better" not in found["poem", 64]


def test_bits_that_do_not_fit_their_count_are_refused() -> None:
    with pytest.raises(ValueError, match="expected 3 bits set"):
        _module("join").paired([_cell("tent", [1, 0, 1, 0], right=3)])


def test_a_joined_file_is_json_with_a_cell_a_line() -> None:
    join = _module("join")
    suite = {"format": 1, "suite": "cifar10", "runs": {}, "left_out": {}, "cells": join.paired([_cell("tent", [1, 0])])}
    text = join.text(suite)
    assert json.loads(text)["cells"][0]["row"] == "tent"
    assert sum('"row"' in line for line in text.splitlines()) == 1


def test_a_stream_in_another_order_is_told_from_the_one_that_was_measured() -> None:
    measure = _module("measure")
    entry = measure.Entry("p", "cifar10-bn", 0, stream="fog-5", images=4, names=("tent", "poem"))
    key = ("cifar10-bn", "source", "fog-5", 0, 64)
    assert measure.other_order([entry], {(key, 4, "mine")}, lambda entry: "mine") is None
    assert measure.other_order([entry], {(key, 8, "other")}, lambda entry: "mine") is None, "as many images alone"
    assert measure.other_order([entry], set(), lambda entry: "mine") is None
    found = measure.other_order([entry], {(key, 4, "other")}, lambda entry: "mine")
    assert found == "cifar10-bn, fog-5, seed 0: other, got mine"


def test_cells_of_a_suite_are_finished(tmp_path: Path) -> None:
    measure = _module("measure")
    cell = _cell("tent", [1, 0])
    (tmp_path / "cifar10.json").write_text(json.dumps({"cells": [cell]}))
    (tmp_path / "new.jsonl").write_text(json.dumps({**cell, "row": "poem"}) + "\n")
    found = measure.finished([tmp_path / "cifar10.json", tmp_path / "new.jsonl"])
    assert {key[1] for key, _, _ in found} == {"tent", "poem"}


def test_the_hash_of_a_set_is_of_its_pixels_in_any_order() -> None:
    streams, images = _module("streams", "auto"), torch.arange(48, dtype=torch.uint8).reshape(4, 3, 2, 2)
    assert streams.pixel_hash(images) == streams.pixel_hash(images.flip(0)) == streams.pixel_hash(list(images))
    changed = images.clone()
    changed[2, 0, 0, 0] += 1
    assert streams.pixel_hash(changed) != streams.pixel_hash(images)


def test_a_process_measures_the_rows_of_an_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure, streams = _module("measure"), _module("streams", "auto")
    rng = np.random.RandomState(0)
    images, labels = rng.randint(0, 256, (40, 3, 32, 32)).astype(np.uint8), np.arange(40) % 10
    np.savez(tmp_path / "cifar10.npz", images=images, labels=labels.astype(np.int16))
    counts = {"cifar10": 32}
    held = measure.Images(tmp_path / "store", counts)
    held.store("cifar10-gn").prepare("cifar10-gn", 0, 32, tmp_path, (), torch.device("cpu"))
    entry = measure.Entry(
        "cifar10", "cifar10-gn", 0, stream="fog-5", batch=16, images=32, names=("source", "poem, recorded")
    )
    args = measure.parse(["--precision", "tf32", "--data", str(tmp_path)])
    assert args.other_precision == {"precision": "tf32"}
    assert measure.parse(["--data", str(tmp_path)]).other_precision == {}
    asked, own = [], poem.adapt

    def adapt(*given: Any, **settings: Any) -> Any:
        asked.append((settings["fast"], settings["precision"]))
        return own(*given, **{**settings, "precision": "fp32"})

    monkeypatch.setattr(poem, "adapt", adapt)
    bench = measure.Bench(held, torch.device("cpu"), how=args.how, weights="random", about={"tree": "none"})
    found: list[dict[str, Any]] = []
    bench.run(entry, float("inf"), found.append)
    assert [cell["row"] for cell in found] == ["source", "poem, recorded"]
    assert not any("error" in cell for cell in found), found
    assert {cell["n"] for cell in found} == {streams.scored_count("fog-5", 32)}
    assert "selected" in found[1]
    assert asked == [(False, "tf32")] * 2
