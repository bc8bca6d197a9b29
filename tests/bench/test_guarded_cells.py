"""Guarded cells: keys of other cells stay, rows are measured with a guard around the method, and say so."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from stand_ins import cell, report

import poem
from poem import zoo
from poem.bench import suites
from poem.bench.analysis.choose_lr import choose
from poem.bench.cell import Cell, read_cell, with_field
from poem.bench.estimate import Rates, assumed_seconds
from poem.bench.load_cell import CellData, Machine
from poem.bench.measure import measure
from poem.bench.result import CellResult
from poem.cli.main import main

pytest.importorskip("mlxtend")


@pytest.mark.parametrize(
    ("method", "fields", "key"),
    [
        ("source", {}, "9fc5e1eaef8b9652"),
        ("tent", {}, "888e95743fb36c7e"),
        ("deyo+poem", {"seed": 2}, "5d274cfd3ac35f37"),
        ("sar", {"corruptions": ["frost"]}, "be84a3dc2017dc8e"),
        (
            "eata",
            {
                "changes": {"threshold": "0.5"}, "lr": 0.01, "scenario": "continual",
                "corruptions": ["fog", "snow"],
            },
            "74676f41022bdef8",
        ),
    ],
)  # fmt: skip
def test_cells_without_a_guard_have_the_keys_of_before(method: str, fields: dict[str, Any], key: str) -> None:
    plain = cell(method, **fields)
    assert plain.key == cell(method, guard=False, **fields).key == key
    assert "guard" not in plain.to_dict(), "files of such cells have the fields of before"
    if method != "source":
        assert cell(method, guard=True, **fields).key != key


@pytest.mark.parametrize(
    ("name", "scale", "digest"),
    [("table1", "tiny", "a76e06662cf5479e"), ("table5", "full", "edf327966d83b86f")],
)
def test_suites_have_the_keys_of_before(name: str, scale: str, digest: str) -> None:
    keys = "".join(placed.cell.key for placed in suites.load(name, scale=scale).placed)
    assert hashlib.sha256(keys.encode()).hexdigest()[:16] == digest


def test_a_guarded_cell_is_read_back_and_says_so() -> None:
    guarded = cell("tent", guard=True)
    assert read_cell(json.loads(json.dumps(guarded.to_dict()))) == guarded
    assert guarded.method_label == "tent, guarded"
    assert "digits-ln tent, guarded single fog" in guarded.label
    assert cell("tent").method_label == "tent"
    assert with_field({}, "guard", "true") == {"guard": True}


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"method": "source", "guard": True}, "there is nothing to guard"),
        ({"method": "tent", "guard": 1}, "expected guard true or false, got 1"),
        ({"method": "tent", "guard": True, "eta": 1.0}, "expected ratio as a number or 'measured' with guard"),
    ],
)
def test_what_cannot_be_guarded_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        cell(**fields)


def test_a_guarded_cell_is_measured_with_a_guard() -> None:
    asked = Cell(base="digits-bn", data="digits-test", method="tent", corruptions=("clean",), n=64, batch_size=4,
                 preset="cifar", lr=0.3)  # fmt: skip
    guarded = Cell(**{**asked.__dict__, "guard": True})
    found, plain = measure(guarded), measure(asked)
    model, base = zoo.load("digits-bn")
    guard = poem.adapt(model, "tent", preset="cifar", lr=0.3, batch_size=4, mean=base.mean, std=base.std, guard=True)
    stream, _ = CellData(guarded, base, Machine()).streams(guarded.order())
    right = [guard(images).argmax(1) == labels for images, labels, *_ in stream]
    assert guard.state.rollbacks > 0
    assert found.metrics["top1"] == pytest.approx(100 * float(torch.cat(right).float().mean()))
    assert found.metrics["top1"] > plain.metrics["top1"], "such a rate does harm, and the guard undoes it"
    assert any("guarded" in note for note in found.notes)
    assert not any("guarded" in note for note in plain.notes)
    assert found.key != plain.key
    assert CellResult.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_the_online_protocol_may_be_guarded() -> None:
    fields: dict[str, Any] = {"base": "digits-bn", "batch_size": 8, "lr": 0.01, "guard": True, "eta": 1.0, "ratio": 2.0}
    found = measure(cell("tent", **fields))
    assert found.probes["online"]


def test_the_command_measures_a_guarded_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.json"
    words = ["run", "--base", "digits-bn", "--data", "digits-test", "--n", "32", "--preset", "cifar"]
    assert main([*words, "--method", "tent", "--guard", "-o", str(out)]) == 0
    assert "digits-bn tent, guarded single clean seed 0" in capsys.readouterr().out
    assert json.loads(out.read_text())["cell"]["guard"] is True
    assert main(["run", str(out)]) == 0
    assert "tent, guarded" in capsys.readouterr().out
    assert main([*words, "--method", "source", "--guard"]) == 2
    assert "nothing to guard" in capsys.readouterr().err


def test_a_suite_may_have_guarded_rows(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: mine\nversion: 1\ntitle: Guarded\ncell: {data: digits-test, corruptions: [fog], preset: cifar}\n"
        "groups: [{label: BN, base: bn}]\ncolumns: corruptions\n"
        "rows:\n- {label: Tent, method: tent}\n- {label: 'Tent, guarded', method: tent, guard: true}\n"
    )
    placed = suites.load(path, scale="tiny").placed
    assert {each.row: each.cell.guard for each in placed} == {"Tent": False, "Tent, guarded": True}
    assert len({each.cell.key for each in placed}) == len(placed)


def test_a_whole_suite_is_guarded_but_for_the_source() -> None:
    plain = suites.load("table1", scale="tiny").placed
    guarded = suites.load("table1", scale="tiny", changes={"guard": "true"}).placed
    assert any(each.cell.method == "source" for each in plain)
    assert all(each.cell.guard == (each.cell.method != "source") for each in guarded)
    assert [each.row for each in guarded] == [each.row for each in plain]


def test_guarded_cells_take_longer_and_are_not_mixed_with_others() -> None:
    plain, guarded = cell("tent"), cell("tent", guard=True)
    assert assumed_seconds(guarded) > assumed_seconds(plain)
    rates = Rates.of([report(plain), report(guarded)])
    assert {("digits-ln", "tent"), ("digits-ln", "tent, guarded")} <= set(rates.factors)
    held_out = [cell("tent", corruptions=["spatter"], lr=0.1, guard=guard) for guard in (False, True)]
    with pytest.raises(ValueError, match="guard None and True"):
        choose(map(report, held_out))
