"""Two folders of results compared cell by cell."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from fixture_reports import cell, kept, report

from poem.bench.store import Store
from poem.cli.main import main
from poem.report import compare


def test_the_same_results_are_equal_whenever_and_wherever_they_were_made(tmp_path: Path) -> None:
    one = report(cell())
    later = replace(one, timing={"adapt_s": 9.0}, provenance={**one.provenance, "torch": "3.0"})
    found = compare(kept(tmp_path / "a", one), kept(tmp_path / "b", later))
    assert found.equal
    assert found.identical == 1
    assert found.provenance == {"torch": (["2.9"], ["3.0"])}


def test_differences_are_sorted_by_size(tmp_path: Path) -> None:
    cells = [cell("tent", shift) for shift in ("fog", "snow", "frost")]
    a = kept(tmp_path / "a", *(report(each, 50.0) for each in cells))
    b = kept(tmp_path / "b", report(cells[0], 50.5), report(cells[1], 47.0), report(cell("sar")))
    found = compare(a, b)
    assert not found.equal
    assert [each.label for each in found.different] == [cells[1].label, cells[0].label]
    assert found.different[1].metrics["top1"] == (50.0, 50.5)
    assert "windows" in found.different[0].parts
    assert found.only_a == (cells[2].label,)
    assert found.only_b == (cell("sar").label,)
    assert "top1 50 -> 47" in str(found)


def test_cells_of_the_same_words_are_paired_and_what_sets_them_apart_is_said(tmp_path: Path) -> None:
    shifts = ("fog", "snow", "frost", "contrast", "rain")
    long, short = (
        [report(cell("tent", shift, n=n), top1) for shift in shifts] for n, top1 in ((500, 50.0), (64, 40.0))
    )
    fast, faster = report(cell("tent", "fog", n=64, lr=0.1), 30.0), report(cell("tent", "fog", n=500, lr=0.2), 20.0)
    mended = replace(report(cell("poem")), recipe={**report(cell("poem")).recipe, "readout": "Readout('first')"})
    a = kept(tmp_path / "a", *long, fast, report(cell("poem")))
    b = kept(tmp_path / "b", *short, faster, mended, report(cell("sar")))
    found = compare(a, b)
    assert not found.equal
    assert not found.only_a
    assert found.only_b == (cell("sar").label,)
    pairs = {(each.label, *each.fields): each for each in found.namesakes}
    assert len(found.namesakes) == 7
    assert pairs[cell("tent", "snow").label, "n"].fields == {"n": (500, 64)}
    assert pairs[cell("tent", "snow").label, "n"].metrics["top1"] == (50.0, 40.0)
    assert pairs[cell("tent").label, "n", "lr"].fields == {"n": (64, 500), "lr": (0.1, 0.2)}, "the nearest go together"
    assert pairs[cell("poem").label, "recipe.readout"].fields["recipe.readout"][1] == "Readout('first')"
    said = str(found)
    assert "0 cells in both: 0 identical, 0 different; 7 in both under the same label with other settings" in said
    assert "  other settings in 5 pairs: n 500 in A, 64 in B\n" in said
    assert f"    {cell('tent', 'fog').label}: top1 50 -> 40" in said
    assert "    2 more, of which --json has all" in said
    assert json.loads(json.dumps(found.to_dict()))["namesakes"][0]["fields"]


def test_results_of_other_weights_are_paired_and_older_files_are_the_same_cells(tmp_path: Path) -> None:
    one = report(cell())
    other = replace(one, base={**one.base, "sha256": "cd" * 32})
    (pair,) = compare(kept(tmp_path / "a", one), kept(tmp_path / "b", other)).namesakes
    assert pair.fields == {"weights_sha256": ("ab" * 32, "cd" * 32)}
    store = Store(tmp_path / "old")
    path = store.save(one)
    values = {**json.loads(path.read_text()), "key": one.cell_key}  # as before keys held the weights
    del values["checksum"]
    path.unlink()
    store.path(one.cell, one.cell_key).write_text(json.dumps(values))
    found = compare(store.folder, tmp_path / "a")
    assert (found.equal, found.identical) == (True, 1)


def test_compare_answers_with_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = kept(tmp_path / "a", report(cell(), 50.0))
    b = kept(tmp_path / "b", report(cell(), 51.0))
    assert main(["compare", str(a), str(a)]) == 0
    capsys.readouterr()
    assert main(["compare", str(a), str(b), "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    assert values["equal"] is False
    assert values["different"][0]["metrics"]["top1"] == [50.0, 51.0]
    (tmp_path / "empty" / "cells").mkdir(parents=True)
    for other in ("none", "empty"):
        assert main(["compare", str(a), str(tmp_path / other)]) == 2
        assert f"expected a folder of results, got {tmp_path / other}" in capsys.readouterr().err


def test_cells_that_one_folder_has_alone_are_named_up_to_ten(tmp_path: Path) -> None:
    cells = [cell("tent", "fog", seed) for seed in range(13)]
    a = kept(tmp_path / "a", *(report(each) for each in cells))
    b = kept(tmp_path / "b", report(cell("sar")))
    found = compare(a, b)
    said = str(found).splitlines()
    assert sum(line.startswith("  only in A: ") for line in said) == 11
    assert "  only in A: 3 more, of which --json has all" in said
    assert sum(line.startswith("  only in B: ") for line in said) == 1
    assert len(found.to_dict()["only_a"]) == 13
