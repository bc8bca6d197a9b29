"""Answers that are NaN or infinite count as wrong, and are reported in results, tables, pages and commands."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fixture_reports import report as made_report
from fixture_reports import table
from nets import make_net
from torch import Tensor, nn

import poem
from poem import zoo
from poem.bench import load_cell
from poem.bench.cell import Cell
from poem.bench.measure import measure
from poem.bench.metrics import AURC, ECE, NLL, Accuracy, NonFinite, Windows, predicted
from poem.bench.probes import Probes
from poem.bench.result import CellResult
from poem.bench.store import Store
from poem.bench.sweep import sweep
from poem.cli.main import main
from poem.engine.accounting import BatchRecord, FirstLast
from poem.report.sections import build_page
from poem.streams import datasets
from poem.streams.datasets import Tensors
from poem.zoo import nets
from poem.zoo import predictions as _measure

METHODS = ("source", "lame", "tent", "poem", "roid")
BAD = (2, 5, 6)
"""Places of the bright images, which the network cannot answer."""


class Sick(nn.Module):
    """A network whose answer to a bright image is not finite."""

    def __init__(self, value: float = math.nan) -> None:
        super().__init__()
        self.inner, self.value = make_net("gn", sharpness=8.0), value

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(x)
        bright = x.flatten(1).mean(1) > 0.9
        return torch.where(bright[:, None], torch.full_like(logits, self.value), logits)


def pixels(count: int = 8) -> Tensor:
    found = torch.rand(count, 3, 32, 32, generator=torch.Generator().manual_seed(0)) * 0.8
    found[[at for at in BAD if at < count]] = 0.99
    return found


@pytest.fixture
def sick(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cell]:
    """A cell of eight images, three of which the network cannot answer."""
    monkeypatch.setitem(nets.NETS, "digits-sick", Sick)
    base = zoo.Base(name="digits-sick", kind="own", arch="digits-sick", tag="sick", file="sick.safetensors",
                    mean=(0.0,) * 3, std=(1.0,) * 3, resize=32, crop=32, classes=10)  # fmt: skip
    monkeypatch.setitem(zoo.catalog._BASES, "digits-sick", base)
    data = Tensors(pixels(), [0] * 8, name="digits-test")
    monkeypatch.setitem(datasets.DATASETS, "digits-test", lambda root=None: data)
    load_cell.clear_caches()
    yield Cell(base="digits-sick", data="digits-test", method="tent", weights="random", batch_size=4, lr=0.001)
    load_cell.clear_caches()


# Metrics --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_answer_that_is_not_finite_is_wrong_and_leaves_confidence_undefined(value: float) -> None:
    logits = torch.tensor([[0.0, 4.0], [value, 0.0], [value, value], [4.0, 0.0]])
    labels = torch.tensor([1, 0, 0, 0])
    assert predicted(logits).tolist() == [1, -1, -1, 0]
    for metric, expected in ((Accuracy(), 0.5), (Accuracy(5), 0.5), (NonFinite(), 2.0), (Windows(2), 0.5)):
        metric.update(logits[:2], labels[:2])
        metric.update(logits[2:], labels[2:])
        assert metric.result() == expected
        metric.reset()
        metric.update(logits[:1], labels[:1])
        assert metric.result() == (0.0 if isinstance(metric, NonFinite) else 1.0)
    for each in (ECE(), NLL(), AURC()):
        each.update(logits, labels)
        assert math.isnan(each.result())
        each.reset()
        each.update(logits[:1], labels[:1])
        assert math.isfinite(each.result())


def test_classes_without_any_probability_are_an_answer() -> None:
    """Log-probabilities may be minus infinity; a row of nothing else is none."""
    logits = torch.tensor([[0.0, -math.inf], [-math.inf, -math.inf]])
    assert predicted(logits).tolist() == [0, -1]


def test_probes_do_not_take_nothing_for_right() -> None:
    entry = BatchRecord()
    entry.first_logits = torch.tensor([[math.nan] * 10, [0.0] * 9 + [5.0]])
    entry.entropy = FirstLast(torch.tensor([math.nan, 0.1]), torch.tensor([math.nan, 0.1]))
    entry.newly_reliable = torch.tensor([False, False])
    probes = Probes(0.4, ("gradients",))
    probes.update(entry, entry.first_logits, torch.tensor([0, 9]), torch.tensor([math.nan, 1.0]))
    assert probes.groups()["high"] == {"n": 1, "accuracy": 0.0, "accuracy_last": 0.0, "confidence": 0.0}
    assert probes.result()["gradients"]["nonfinite"] == 1


def test_verify_does_not_take_nothing_for_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    setting = _measure.Preprocessing(_measure.ResizeCrop(32, 32), (0.0,) * 3, (1.0,) * 3)
    found = _measure.predict_classes(Sick(), Tensors(pixels(), [0] * 8), range(8), setting, None, 4)
    assert np.flatnonzero(found == -1).tolist() == list(BAD)
    assert "3 answers were not finite" in caplog.text


# Reports --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_report_counts_what_was_not_finite_and_names_what_it_leaves_out(method: str, sick: Cell) -> None:
    report = measure(replace(sick, method=method))
    assert 3 <= report.nonfinite <= 8, "a correction by the batch may spread it"
    if method in ("source", "tent"):
        assert report.nonfinite == 3
    assert report.metrics["top1"] <= 100 * (8 - report.nonfinite) / 8
    assert f"{report.nonfinite} of 8 answers were not finite (NaN or Inf); they count as wrong" in report.notes
    (left_out,) = [note for note in report.notes if note.startswith("left out, for they are not finite:")]
    for name in ("ece", "nll", "aurc"):
        assert name not in report.metrics
        assert name in left_out
    assert CellResult.from_dict(json.loads(json.dumps(report.to_dict(), allow_nan=False))) == report


def test_a_finite_report_says_nothing_of_it(sick: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(nets.NETS, "digits-sick", lambda: Sick(value=0.0))
    load_cell.clear_caches()
    report = measure(sick)
    assert report.nonfinite == 0
    assert report.notes == []
    assert {"ece", "nll", "aurc"} <= set(report.metrics)


def test_a_label_without_any_probability_is_reported_too(sick: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    class Certain(Sick):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full((len(x), 10), -math.inf, device=x.device).index_fill(1, torch.tensor([1]), 0.0)

    monkeypatch.setitem(nets.NETS, "digits-sick", Certain)
    load_cell.clear_caches()
    report = measure(replace(sick, method="source"))
    assert report.nonfinite == 0, "these are answers"
    assert "nll" not in report.metrics
    assert any("nll" in note and note.startswith("left out") for note in report.notes)


def test_results_of_before_are_read(tmp_path: Path) -> None:
    report = made_report(Cell(base="digits-bn", data="digits-test", method="tent"))
    values = report.to_dict()
    assert values.pop("nonfinite") == 0
    (tmp_path / "old.json").write_text(json.dumps(values))
    assert CellResult.load(tmp_path / "old.json") == report
    values.pop("ledger")
    with pytest.raises(ValueError, match="a result lacks ledger"):
        CellResult.from_dict(values)


# Tables and pages -----------------------------------------------------------------------------------------------------


def test_a_table_has_a_column_for_it_where_there_are_any(caplog: pytest.LogCaptureFixture) -> None:
    loader = [(pixels(), torch.zeros(8, dtype=torch.long))]
    table = poem.evaluate(Sick(), loader, ["source", "tent"])
    assert [row.nonfinite for row in table] == [3, 3]
    assert str(table).splitlines()[0].split()[-2:] == ["not", "finite"]
    assert table.markdown().splitlines()[0].endswith("| not finite |")
    assert "nan" in str(table)
    assert caplog.text.count("3 of 8 answers of source were not finite") == 1
    sound = poem.evaluate(Sick(), [(pixels(2), torch.zeros(2, dtype=torch.long))], "source")
    assert "not finite" not in str(sound)


def test_a_page_warns_of_rows_with_such_answers() -> None:
    suite, reports = table({"Tent": {"Fog": [40.0, 41.0]}, "SAR": {"Fog": [39.0]}})
    assert build_page([suite], reports, {}).sections[0].warnings == ()
    reports[1] = replace(reports[1], nonfinite=7)
    (warning,) = build_page([suite], reports, {}).sections[0].warnings
    assert "Tent" in warning
    assert "7 of 500 answers were not finite" in warning
    assert "count as wrong" in warning


# Commands -------------------------------------------------------------------------------------------------------------


def words(cell: Cell, *more: str) -> list[str]:
    return ["run", "--base", cell.base, "--data", cell.data, "--set", "weights=random", "--batch-size", "4", *more]


@pytest.mark.parametrize("method", ["source", "lame", "poem"])
def test_poem_run_fails_and_says_so(
    method: str, sick: Cell, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words(sick, "--method", method), "--out", str(tmp_path / "result.json")]) == 1
    said = capsys.readouterr()
    report = CellResult.load(tmp_path / "result.json")
    assert f"{report.nonfinite} of 8 answers were not finite (NaN or Inf) and count as wrong" in said.err
    assert f"not finite{report.nonfinite:16d} answers" in said.out


def test_a_sweep_fails_and_says_so_each_time(sick: Cell, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed, out = tmp_path / "cells.json", tmp_path / "results"
    sound = replace(sick, base="digits-gn", weights=None)
    listed.write_text(json.dumps([sick.to_dict(), sound.to_dict()]))
    for _ in range(2):
        assert main(["bench", str(listed), "--out", str(out), "--engine", "inline", "--keep-going"]) == 1
        said = capsys.readouterr()
        assert "1 with answers that are not finite" in said.out
        assert "digits-sick tent single clean seed 0: 3 of 8 answers were not finite" in said.err
    assert len(list(Store(out).results())) == 2, "both are results"
    outcome = sweep([sound], Store(out))
    assert (outcome.code, outcome.nonfinite) == (0, ())


def test_predict_fails_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    picture = pytest.importorskip("PIL.Image")
    for at, image in enumerate((pixels() * 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()):
        picture.fromarray(image).save(tmp_path / f"{at}.png")
    monkeypatch.setitem(sys.modules, "sick_model", type(sys)("sick_model"))
    sys.modules["sick_model"].make = Sick  # type: ignore[attr-defined]
    out = tmp_path / "predictions.csv"
    assert main(["predict", str(tmp_path), "--model", "sick_model:make", "--method", "tent", "--out", str(out)]) == 1
    assert "3 answers were not finite (NaN or Inf)" in capsys.readouterr().err
