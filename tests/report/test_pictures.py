"""The picture at the top of a page: real answers, of the stream where most was gained, or no picture at all."""

from __future__ import annotations

import base64
import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from poem.bench.cell import Cell
from poem.bench.measure import measure
from poem.bench.result import CellResult
from poem.report.pictures import MAX_SECONDS, best_pair, picture, run_again


def cell(method: str = "source", **settings: object) -> Cell:
    """128 digits in low contrast, on which batch norm gains much."""
    stated = {"base": "digits-bn", "data": "digits-test", "corruptions": ("contrast",), "severity": 4, "n": 128,
              "batch_size": 32, "preset": "cifar", **settings}  # fmt: skip
    return Cell(method=method, **stated)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def measured() -> list[CellResult]:
    """The model as it is and batch statistics, on one stream."""
    return [measure(cell()), measure(cell("bn"))]


def pixels(url: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))))


def test_a_picture_has_images_that_were_wrong_before_and_right_after(measured: list[CellResult]) -> None:
    found = picture(measured, count=3)
    assert found is not None
    before, after = (each.metrics["top1"] for each in measured)
    assert (found.before, found.after, found.images) == (before, after, 128)
    assert (found.base, found.method, found.shift) == ("digits-bn", "bn", "contrast, severity 4")
    assert len(found.examples) == 3
    for each in found.examples:
        assert each.before != each.truth == each.after
        clean, corrupted = pixels(each.clean), pixels(each.corrupted)
        assert clean.shape == corrupted.shape == (32, 32, 3)
        assert corrupted.std() < clean.std() / 2, "low contrast"
    assert len({each.truth for each in found.examples}) == 3, "each of another class"


def test_answers_are_those_that_were_measured(measured: list[CellResult]) -> None:
    result, answers = run_again(cell("bn"))
    assert len(answers.labels) == 128
    assert answers.accuracy == pytest.approx(measured[1].metrics["top1"])
    assert result.identity() == measured[1].identity(), "keeping answers changes nothing"


def test_a_result_that_another_version_measured_has_no_picture(measured: list[CellResult]) -> None:
    source, bn = measured
    other = replace(bn, metrics={**bn.metrics, "top1": bn.metrics["top1"] + 2.0})
    assert picture([source, other]) is None


def test_the_stream_with_the_largest_gain_is_chosen(measured: list[CellResult]) -> None:
    source, bn = measured
    foggy = [replace(each, cell=replace(each.cell, corruptions=("fog",))) for each in measured]
    foggy[1] = replace(foggy[1], metrics={**bn.metrics, "top1": 100.0})
    pair = best_pair([source, bn, *foggy])
    assert pair is not None
    assert [each.cell.corruptions for each in pair] == [("fog",), ("fog",)]
    assert [each.cell.method for each in pair] == ["source", "bn"]


@pytest.mark.parametrize("what", ["slow", "outside", "edited", "worse", "alone", "continual"])
def test_streams_that_cannot_be_run_again_in_seconds_have_no_picture(measured: list[CellResult], what: str) -> None:
    source, bn = measured
    other = {
        "slow": replace(bn, timing={**bn.timing, "adapt_s": MAX_SECONDS + 1}),
        "outside": replace(bn, cell=replace(bn.cell, base="resnet50")),
        "edited": replace(bn, intact=False),
        "worse": replace(bn, metrics={**bn.metrics, "top1": 1.0}),
        "alone": replace(bn, cell=replace(bn.cell, seed=1)),
        "continual": replace(bn, cell=replace(bn.cell, scenario="continual")),
    }[what]
    assert best_pair([source, bn]) is not None
    assert best_pair([source, other]) is None
    assert picture([]) is None


def test_data_that_is_not_here_gives_no_picture(
    measured: list[CellResult], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POEM_DATA", str(tmp_path))
    moved = [replace(each, cell=replace(each.cell, base="cifar10-bn", data="cifar10")) for each in measured]
    assert best_pair(moved) is not None
    assert picture(moved) is None
