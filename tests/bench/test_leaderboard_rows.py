"""Rows for the leaderboard: measured, collected in one file, checked, shown; every file of the repository passes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fixture_reports import cell, kept, report

from poem.bench.leaderboard_rows import (
    check_rows,
    collect,
    read_results,
    read_rows,
    row_name,
    sample_cell,
    stream_name,
)
from poem.bench.measure import measure
from poem.bench.result import CellResult
from poem.bench.sample_cells import bits_text, read_bits
from poem.cli.main import main
from poem.report.leaderboard import make_leaderboard, read_cells
from poem.streams.corruptions import CORRUPTIONS

ROOT = Path(__file__).resolve().parents[2]
CONTRIBUTED = sorted((ROOT / "results" / "leaderboard").glob("*.json"))
STUDY = sorted((ROOT / "results" / "study").glob("*.json"))


def result(method: str = "tent", right: int = 250, **settings: Any) -> CellResult:
    """A result of 500 samples, the first of them right."""
    bits = np.arange(500) < right
    stated = {"samples": {"right": bits_text(bits), "labels": "ab" * 8}, **settings}
    return report(cell(method), 100 * right / 500, **stated)


@pytest.mark.parametrize("path", CONTRIBUTED, ids=lambda path: path.stem)
def test_every_contributed_file_is_a_row(path: Path) -> None:
    """Schema, checksums, provenance, weights, samples, and source beside every row."""
    board = make_leaderboard(read_rows(path))
    assert board.blocks
    assert not board.without_source
    assert all(each.intact for each in read_results(path)), "poem report FOLDER --collect FILE writes the checksums"


def second_file(folder: Path) -> Path:
    """A contributed file again, with its source and all, under another name."""
    path = folder / "other.json"
    path.write_text(CONTRIBUTED[0].read_text(encoding="utf-8"), encoding="utf-8")
    return path


def test_the_whole_folder_and_a_second_file_make_one_page(tmp_path: Path) -> None:
    """Every file brings its own source: the same cells in two files are no reason against a page."""
    cells, _ = read_cells([ROOT / "results" / "leaderboard"])
    more, _ = read_cells([second_file(tmp_path)])
    board, once = make_leaderboard([*cells, *more]), make_leaderboard(cells)
    assert not board.without_source
    assert [block.rows for block in board.blocks] == [block.rows for block in once.blocks]


@pytest.mark.parametrize("path", STUDY, ids=lambda path: path.stem)
def test_every_suite_of_the_study_can_be_shown(path: Path) -> None:
    cells, other = read_cells([path])
    assert not other
    if not cells:
        pytest.skip(f"{path.name} has no cells yet")
    assert make_leaderboard(cells).blocks


def test_there_is_an_example() -> None:
    assert CONTRIBUTED, "results/leaderboard holds the example of docs/leaderboard.md"


def test_a_measured_result_says_which_samples_were_right() -> None:
    """The same numbers as accuracy and windows, in order of arrival."""
    asked = replace(cell("tent"), n=96, batch_size=16, window=32)
    measured = measure(asked)
    right = read_bits(measured.samples["right"], 96)
    assert 100 * right.mean() == pytest.approx(measured.metrics["top1"])
    assert [100 * part.mean() for part in right.reshape(3, 32)] == pytest.approx(measured.windows)
    assert measure(replace(asked, method="source")).samples["labels"] == measured.samples["labels"]
    assert measure(replace(asked, seed=1)).samples["labels"] != measured.samples["labels"]


def test_a_result_without_samples_is_still_read(tmp_path: Path) -> None:
    """Files of earlier versions: read, shown, compared, and not taken as rows."""
    values = {name: value for name, value in result().to_dict().items() if name != "samples"}
    (tmp_path / "old.json").write_text(json.dumps(values), encoding="utf-8")
    old = CellResult.load(tmp_path / "old.json")
    assert old.samples == {}
    with pytest.raises(ValueError, match="it does not say which samples were right; measure it again"):
        check_rows([old])


def test_poem_compare_does_not_count_missing_samples_as_a_difference(tmp_path: Path) -> None:
    from poem.report import compare

    one, two = kept(tmp_path / "a", result()), kept(tmp_path / "b", replace(result(), samples={}))
    assert compare(one, two).identical == 1
    other = kept(tmp_path / "c", replace(result(), samples={"right": bits_text(np.arange(500) >= 250), "labels": "x"}))
    (difference,) = compare(one, other).different
    assert difference.parts == ("samples",)


def test_collected_results_are_rows_of_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jinja2")
    folder = kept(tmp_path / "mine", result("source", 200), result("tent", 260), result("poem", 150))
    file = tmp_path / "rows" / "mine.json"
    file.parent.mkdir()
    assert main(["report", str(folder), "--collect", str(file)]) == 0
    assert "mine.json: 3 results" in capsys.readouterr().out
    (block,) = make_leaderboard(read_rows(file)).blocks
    assert [(row.name, row.difference) for row in block.rows] == [("tent", 12.0), ("source", 0.0), ("poem", -10.0)]
    assert block.rows[0].error == pytest.approx(100 * np.sqrt((60 / 500 - (60 / 500) ** 2) / 500))
    assert main(["report", "--leaderboard", str(file.parent), "-o", str(tmp_path / "page.html")]) == 0
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "digits-bn: One shift at a time" in page
    assert "0123456789abcdef" in page, "the commit"
    assert "+12.00" in page


def test_one_result_of_poem_run_needs_source_beside_it(tmp_path: Path) -> None:
    result().save(tmp_path / "tent.json")
    with pytest.raises(ValueError, match=r"tent\.json: digits-bn tent .*expected source on the same stream beside it"):
        read_rows(tmp_path / "tent.json")


BASE = result("source")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"provenance": {**BASE.provenance, "dirty": True}}, "from a worktree with changes that are not committed"),
        ({"provenance": {"poem": "0.1"}}, "lacks the version of torch, python"),
        ({"base": {"name": "digits-bn", "sha256": "random"}}, "its weights are random or unknown"),
        ({"samples": {}}, "does not say which samples were right"),
        ({"samples": {"right": "AAAA", "labels": "ab"}}, "expected 63 bytes for 500 bits, got 3"),
        ({"metrics": {"top1": 99.0}}, r"250 of 500 samples are right, and top1 is 99\.00"),
        ({"card": {"total": None}}, "expected the number of images in its card"),
        ({"intact": False}, "its checksum does not fit"),
    ],
)
def test_what_no_leaderboard_takes_says_why(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"digits-bn tent single fog seed 0: .*{said}"):
        check_rows([BASE, replace(result(), **change)])


def test_source_alone_is_no_row() -> None:
    with pytest.raises(ValueError, match="expected a method beside source"):
        check_rows([BASE])
    check_rows([BASE, result()])


def test_an_edited_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    collect(kept(tmp_path / "mine", BASE, result("tent", 260)), file)
    held = json.loads(file.read_text())
    next(each for each in held["results"] if each["cell"]["method"] == "tent")["timing"]["adapt_s"] = 0.1
    file.write_text(json.dumps(held))
    with pytest.raises(ValueError, match="edited after it was measured"):
        read_rows(file)


def test_a_file_without_checksums_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    collect(kept(tmp_path / "mine", BASE, result("tent", 260)), file)
    held = json.loads(file.read_text())
    for each in held["results"]:
        del each["checksum"]
    file.write_text(json.dumps(held))
    with pytest.raises(ValueError, match=r"mine\.json: digits-bn .*expected a checksum .*--collect FILE"):
        read_rows(file)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "expected results of schema 1"),
        ('{"schema": 2, "results": []}', "expected results of schema 1"),
        ('{"schema": 1, "results": [3]}', "result 1: expected an object, got a int"),
        ('{"schema": 1, "results": [{"schema": 1}]}', "result 1: a result lacks"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        read_results(tmp_path / "x.json")


def test_a_folder_without_results_says_what_to_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path), "--collect", str(tmp_path / "x.json")]) == 2
    assert "poem bench makes one" in capsys.readouterr().err


def test_rows_are_named_by_method_changes_and_rate() -> None:
    asked = replace(cell("sar"), changes=(("threshold", "0.5"),), lr=0.01)
    assert row_name(report(asked)) == "sar, threshold 0.5, lr 0.01"


def test_the_name_of_a_stream_tells_shifts_options_and_images() -> None:
    named = {
        stream_name(replace(cell("tent"), **change))
        for change in (
            {}, {"corruptions": ("fog", "snow")}, {"scenario": "recurring", "corruptions": ("fog", "snow")},
            {"scenario": "recurring", "corruptions": ("fog", "frost")},
            {"scenario": "recurring", "corruptions": ("fog", "snow"), "options": {"cycles": 3}},
            {"scenario": "recurring", "corruptions": ("fog", "snow"), "n": 100}, {"severity": 3},
        )
    }  # fmt: skip
    assert len(named) == 7
    assert stream_name(replace(cell("tent"), scenario="mixed", corruptions=tuple(CORRUPTIONS), n=None)) == (
        "mixed of 15 shifts-5"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"eta": 1.0},
        {"eta": 1.0, "ratio": 2.0},
        {"precision": "bf16"},
        {"preset": "imagenet"},
        {"dataset": {"subset": 3}},
    ],
)
def test_another_protocol_is_another_block(change: dict[str, Any]) -> None:
    def both(**fields: Any) -> list[CellResult]:
        return [replace(each, cell=replace(each.cell, **fields)) for each in (BASE, result("tent", 260))]

    found = [sample_cell(each, "mine.json") for each in (*both(), *both(**change))]
    assert len({each.protocol for each in found}) == 2
    assert [len(block.rows) for block in make_leaderboard(found).blocks] == [2, 2]
    with pytest.raises(ValueError, match="expected source on the same stream beside it"):
        check_rows([*both()[:1], *both(**change)[1:]])


def test_other_weights_are_another_block_and_are_told() -> None:
    other = {"name": "digits-bn", "sha256": "cd" * 32}
    found = [sample_cell(each, "mine.json") for each in (BASE, result("tent", 260))]
    found += [sample_cell(replace(each, base=other), "mine.json") for each in (BASE, result("tent", 200))]
    assert [len(block.rows) for block in make_leaderboard(found).blocks] == [2, 2]
    assert [dict(each.provenance)["weights"] for each in found] == ["abababab"] * 2 + ["cdcdcdcd"] * 2


def test_a_row_tells_source_images_that_are_not_the_usual_number() -> None:
    asked, ledger = cell("eata"), {"source_images": 500}
    assert row_name(report(replace(asked, source_images=500), ledger=ledger)) == "eata, 500 source images"
    assert row_name(report(replace(asked, source_images=2000), ledger=ledger)) == "eata"
    assert row_name(report(replace(cell("tent"), source_images=500))) == "tent"
    none = report(replace(asked, source_images=0), notes=["eata without source images: no anchor, as ETA"])
    assert row_name(none) == "eata, 0 source images"


def test_source_with_a_stated_rate_is_still_the_row_to_compare_with(tmp_path: Path) -> None:
    base, other = (replace(each, cell=replace(each.cell, lr=0.01)) for each in (BASE, result("tent", 260)))
    file = tmp_path / "mine.json"
    collect(kept(tmp_path / "mine", base, other), file)
    board = make_leaderboard(read_rows(file))
    assert not board.without_source
    assert [row.name for row in board.blocks[0].rows] == ["tent, lr 0.01", "source"]
