"""`poem report --against`: paired differences of every row to one row, each worked out by hand."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path

import pytest
from fixture_reports import cell, kept, report, suite

from poem.bench.analysis.aggregate import Grid, Value, metric
from poem.bench.result import CellResult
from poem.bench.suites import Placed, Suite, load
from poem.cli.main import main
from poem.report import build, report_tables

NUMBERS = {
    "Source": {"fog": [40.0, 50.0, 60.0], "snow": [20.0, 21.0, 22.0]},
    "Tent": {"fog": [45.0, 55.0, 65.0], "snow": [30.0, 30.0, 30.0]},
    "Ours": {"fog": [46.0, 57.0, 68.0], "snow": [30.0, 31.0, 32.0]},
}
METHODS = {"Source": "source", "Tent": "tent", "Ours": "sar"}


def made(**settings: object) -> tuple[Suite, list[CellResult]]:
    """Three rows on the same streams, three seeds."""
    placed, reports = [], []
    for row, by_column in NUMBERS.items():
        for column, seeds in by_column.items():
            for seed, top1 in enumerate(seeds):
                here = cell(METHODS[row], column, seed)
                placed.append(Placed(group="Own net", row=row, column=column, cell=here))
                reports.append(report(here, top1))
    return suite(placed, ["fog", "snow"], **settings), reports


def test_a_difference_is_the_mean_over_seeds_with_deviation_and_interval() -> None:
    found = report_tables(*made_list(), against="tent")["table1-differences"]
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(found.csv()))}
    assert list(rows) == ["Source", "Ours"], "the row itself is left out"
    assert float(rows["Ours"]["fog"]) == 2.0, "1, 2 and 3"
    assert float(rows["Ours"]["fog ±"]) == 1.0
    assert float(rows["Source"]["fog"]) == -5.0
    assert float(rows["Source"]["fog ±"]) == 0.0, "paired: the seeds differ by ten points, their differences do not"
    assert float(rows["Ours"]["Avg."]) == 1.5, "0.5, 1.5 and 2.5"
    half = 4.303 / 3**0.5
    assert float(rows["Ours"]["95 % from"]) == pytest.approx(1.5 - half)
    assert float(rows["Ours"]["95 % to"]) == pytest.approx(1.5 + half)
    assert rows["Ours"]["seeds"] == "3"
    assert "less that of Tent, in percentage points" in found.caption
    assert r"Ours & +2.0 $\pm$ 1.0 & +1.0 $\pm$ 1.0 & +1.5 $\pm$ 1.0 & $-$1.0 & +4.0 & 3 \\" in found.latex()


def test_seeds_without_a_partner_do_not_count() -> None:
    planned, reports = made()
    there = [each for each in reports if (each.cell.method, each.cell.seed) != ("tent", 1)]
    grid = Grid(planned, there)
    place = ("Ours", "fog"), ("Tent", "fog")
    value = grid.difference("Own net", [place], metric("top1"))
    assert value is not None
    assert value.seeds == {0: 1.0, 2: 3.0}
    fewer = tuple(
        replace(each, cell=replace(each.cell, n=100)) if each.row == "Tent" else each for each in planned.placed
    )
    short = [replace(each, cell=replace(each.cell, n=100)) if each.cell.method == "tent" else each for each in reports]
    assert Grid(replace(planned, placed=fewer), short).difference("Own net", [place], metric("top1")) is None, (
        "other images are another stream"
    )


def test_an_interval_is_student_s() -> None:
    assert Value(mean=1.0, deviation=None, seeds={0: 1.0}).interval is None
    for count, quantile in ((2, 12.706), (5, 2.776), (41, 2.021), (121, 1.980)):
        found = Value(mean=0.0, deviation=count**0.5, seeds=dict.fromkeys(range(count), 0.0)).interval
        assert found == pytest.approx((-quantile, quantile), abs=0.002)


@pytest.mark.parametrize("name", ["Tent", "tent", "TENT"])
def test_a_row_is_named_by_its_label_or_its_method(name: str) -> None:
    assert "less that of Tent" in report_tables(*made_list(), against=name)["table1-differences"].caption


def test_a_wrong_name_says_which_there_are() -> None:
    with pytest.raises(ValueError, match=r"no row and no method is 'tnt'; did you mean 'tent'"):
        report_tables(*made_list(), against="tnt")
    planned, reports = made()
    twice = tuple(
        replace(each, row="Same" if each.row == "Tent" else each.row,
                cell=cell("source" if each.row == "Source" else "tent", each.column, each.cell.seed))
        for each in planned.placed
    )  # fmt: skip
    with pytest.raises(ValueError, match="several rows are 'tent': Same, Ours; name one of them"):
        report_tables([replace(planned, placed=twice)], reports, against="tent")


def made_list() -> tuple[list[Suite], list[CellResult]]:
    """`made`, as `build` takes it."""
    planned, reports = made()
    return [planned], reports


def test_where_columns_are_methods_they_are_compared() -> None:
    placed, reports = [], []
    for row, base in (("A", "digits-bn"), ("B", "digits-gn")):
        for at, method in enumerate(("tent", "sar")):
            here = cell(method, "fog", base=base)
            placed.append(Placed(group="", row=row, column=method, cell=here))
            reports.append(report(here, 50.0 + at + 2 * at * (row == "B")))
    found = report_tables([suite(placed, ["tent", "sar"], average=False)], reports, against="tent")
    text = found["table1-differences"].csv().splitlines()
    assert text[1:] == ['"A, sar",1.0,,,1', '"B, sar",3.0,,,1'], "one seed has no interval"


def test_the_page_and_every_format_hold_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("jinja2")
    planned = load("table11", "tiny", limit=128)
    folder = kept(tmp_path, *(report(each, 50.0 + each.seed) for each in planned.cells))
    formats = ["--format", "markdown", "html", "latex", "csv", "json"]
    assert main(["report", str(folder), "--against", "all layers", *formats]) == 0
    written = {path.name for path in (folder / "tables").iterdir()}
    assert {f"table11-differences.{ending}" for ending in ("tex", "csv", "json")} <= written
    for name in ("report.md", "report.html"):
        page = (folder / name).read_text(encoding="utf-8")
        assert "in percentage points" in page
        assert "Student" in page
    capsys.readouterr()
    assert main(["report", str(folder), "--against", "al layers"]) == 2
    assert "no row and no method is 'al layers'" in capsys.readouterr().err
    build([planned], [], tmp_path / "plain", formats=["csv"])
    assert not list((tmp_path / "plain").glob("**/*-differences.csv"))
