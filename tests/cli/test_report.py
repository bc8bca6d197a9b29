"""`poem report`: which suites it finds in a folder, and what it shows of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fixture_reports import cell, kept, report
from packages import MODULE

from poem.bench.store import Store
from poem.cli.main import main
from poem.report.select_suites import select_suites

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")


def test_report_finds_the_suites_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from poem.bench.suites import load

    fig = load("fig6b", "tiny", limit=64)
    folder = kept(tmp_path, *(report(each, 60.0 + at / 10) for at, each in enumerate(fig.cells[:8])))
    (folder / "cells" / "stray.json").write_text("{", encoding="utf-8")
    assert [each.name for each in select_suites(fig.cells[:1], names=["fig6b"])] == ["fig6b"]
    assert main(["report", str(folder), "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "report.html" in out
    assert "stray.json is not a result" in out
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "Figure 6b" in text
    assert "8 of 44 cells are there" in text
    assert "Figure 1a" not in text


def test_report_shows_whole_suites_and_not_parts_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from poem.bench.suites import load

    made = load("table11", "tiny", limit=128)
    folder = kept(tmp_path, *(report(each) for each in made.cells))
    assert len(select_suites(made.cells[:1])) >= 1, "a part of one, where none is whole"
    assert main(["report", str(folder)]) == 0
    titles = re.findall(r"^## (.*)$", (folder / "report.md").read_text(encoding="utf-8"), re.M)
    assert titles == ["Contents", made.title, "Provenance"]
    assert "left out" not in capsys.readouterr().out
    kept(folder, report(load("fig6b", "tiny", limit=128).cells[0]))
    assert main(["report", str(folder)]) == 0
    assert f"left out: 1 of {len(made.cells) + 1} cells, of other suites or settings" in capsys.readouterr().out
    assert main(["report", str(folder), "--limit", "64"]) == 2
    assert f"Images of each shift here: 128 ({len(made.cells) + 1} cells)" in capsys.readouterr().err


def test_report_shows_a_folder_as_it_was_asked_for(tmp_path: Path) -> None:
    from poem.bench.suites import load

    store = Store(tmp_path)

    def shown_suites() -> list[tuple[str, str, tuple[str, ...]]]:
        there = [each.cell for each in store.results()]
        return [(each.name, each.scale, each.altered) for each in select_suites(there, requests=store.requests())]

    def measured(name: str, scale: str, **settings: Any) -> None:
        store.save_request([name], scale, {"seeds": None, "changes": {}, **settings})
        for each in load(name, scale, **settings).cells:
            store.save(report(each))

    measured("table3", "tiny", methods=["tent"], limit=64)
    assert shown_suites() == [("table3", "tiny", ("methods tent", "limit 64"))]
    measured("table1", "cifar10", methods=["tent"], corruptions=["fog"])
    assert [each[:2] for each in shown_suites()] == [("table1", "cifar10"), ("table3", "tiny")], "in order of print"
    measured("table3", "tiny", methods=["sar"], limit=64)
    assert shown_suites()[1][2] == ("methods sar", "limit 64"), "of two that are as full, the latest"
    measured("table3", "tiny")
    assert shown_suites()[1][2] == (), "most cells are of the suite as it is"
    store.save_request(["table2"], "tiny", {})
    assert len(shown_suites()) == 2, "nothing of it is there"
    there = [each.cell for each in store.results()]
    (cut,) = select_suites(there, scale="tiny", settings={"limit": 64, "methods": ["sar"]}, requests=store.requests())
    assert cut.altered == ("methods sar", "limit 64"), "flags come first"


def test_report_passes_over_suites_that_flags_leave_nothing_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from poem.bench.suites import load

    fig = load("fig6b", "tiny", corruptions=["snow"])
    folder = kept(tmp_path, *(report(each) for each in fig.cells))
    assert main(["report", str(folder), "--corruptions", "snow", "--methods", "poem"]) == 0, "table 9 has no snow"
    assert "Figure 6b" in (folder / "report.md").read_text(encoding="utf-8")
    capsys.readouterr()
    assert main(["report", str(folder), "--corruptions", "snow", "--suites", "table9"]) == 2
    assert "suite table9: no cell is left" in capsys.readouterr().err


def test_report_reads_chosen_rates_as_poem_choose_writes_them(tmp_path: Path) -> None:
    from poem.bench.analysis.choose_lr import save
    from poem.bench.suites import load

    chosen = {"digits-bn": {"tent": 0.02}}
    save(chosen, tmp_path / "chosen.yaml")
    made = load("table1", "tiny", chosen=chosen)
    mine = [each for each in made.cells if each.lr == 0.02]
    assert mine
    folder = kept(tmp_path / "out", *(report(each) for each in mine))
    words = ["report", str(folder), "--suites", "table1", "--chosen", str(tmp_path / "chosen.yaml")]
    assert main(words) == 0
    assert f"{len(mine)} of" in (folder / "report.md").read_text(encoding="utf-8")


def test_report_of_something_else_says_what_to_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "poem reproduce table1" in capsys.readouterr().err
    kept(tmp_path, report(cell("tent", "fog", seed=77)))
    assert main(["report", str(tmp_path), "--suites", "table1"]) == 2
    assert "--seeds" in capsys.readouterr().err


OWN_SUITE = """
name: mine
version: 1
title: Ours beside Tent
columns: corruptions
corruptions: [fog]
cell: {data: digits-test, batch_size: 8, n: 16}
groups: [{label: Theirs, base: bn}, {label: Own net, base: "%s:net"}]
rows:
  - {label: Source, method: source}
  - {label: Ours, method: "%s:mine"}
  - {label: Sure Tent, method: tent, changes: {select: "%s:Sure(0.3)"}}
"""


def test_modules_that_only_the_folder_names_are_not_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "module_of_a_folder"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / "mine.yaml").write_text(OWN_SUITE.replace("%s", name))
    monkeypatch.syspath_prepend(tmp_path)
    results, suite, seeds = tmp_path / "results", str(tmp_path / "mine.yaml"), ["--seeds", "0", "1"]
    assert main(["bench", suite, *seeds, "--engine", "inline", "--out", str(results)]) == 0, capsys.readouterr().err
    tables = results / "tables"
    assert main(["report", str(results), "--suites", suite, *seeds, "--format", "csv"]) == 0
    expected = {each.name: each.read_text() for each in tables.glob("*.csv")}
    assert {"Source", "Ours", "Sure Tent"} <= {line.split(",")[1] for line in expected["mine-top1.csv"].splitlines()}
    shutil.rmtree(tables)
    imported = tmp_path / f"{name}.imported"
    imported.unlink()
    line = [sys.executable, "-m", "poem", "report", str(results), "--format", "csv", "html", "markdown"]
    shown = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = subprocess.run(line, cwd=tmp_path, env=shown, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stderr
    assert not imported.exists(), "it was imported"
    assert {each.name: each.read_text() for each in tables.glob("*.csv")} == expected
    page = (results / "report.md").read_text(encoding="utf-8").replace("\\_", "_")
    assert f"| Ours | 0.005 | {name}:mine: tent with select = {name}:Sure(0.2) |" in page, (
        "what a method of one's own is"
    )
    assert f"| Sure Tent | 0.005 | select = {name}:Sure(0.3) |" in page
    named = f"not imported, since only this folder names them: {name}:Sure, {name}:mine, {name}:net; tables show"
    assert named in found.stdout
    assert "left out" not in found.stdout
    found = subprocess.run(
        [*line, "--suites", suite, *seeds], cwd=tmp_path, env=shown, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert imported.exists(), "a suite that the user names is trusted"
    assert "not imported" not in found.stdout


def test_failures_of_methods_that_only_the_folder_names_are_shown_as_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from poem.bench.suites import load

    name = "module_of_failures"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / "mine.yaml").write_text(OWN_SUITE.replace("%s", name))
    monkeypatch.syspath_prepend(tmp_path)
    suite, results = str(tmp_path / "mine.yaml"), tmp_path / "results"
    store = Store(results)
    failed = [each for each in load(suite, "tiny").cells if each.method == f"{name}:mine"]
    for each in failed:
        store.save_failure(each, "Traceback ...\nValueError: too odd")
    store.save_request([suite], "tiny", {})
    imported = tmp_path / f"{name}.imported"
    imported.unlink()
    sys.modules.pop(name)
    assert main(["report", str(results)]) == 0, capsys.readouterr().err
    out = capsys.readouterr().out
    assert not imported.exists(), "it was imported"
    assert f"{name}:mine" in out.partition("not imported")[2]
    assert "left out" not in out
    page = (results / "report.md").read_text(encoding="utf-8")
    assert page.count("ValueError: too odd") == len(failed) == 2


def test_names_that_only_failures_have_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No suite that is shown has them: they are known from the folder alone."""
    from poem.bench.suites import load

    fig = load("fig6b", "tiny", limit=64)
    folder = kept(tmp_path, *(report(each) for each in fig.cells[:8]))
    store = Store(folder)
    store.save_request(["fig6b"], "tiny", {"limit": 64})
    store.save_failure(cell("module_that_is_nowhere:mine", "fog"), "ValueError: too odd")
    assert main(["report", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "not imported, since only this folder names them: module_that_is_nowhere:mine; tables show" in out
    assert "left out: 1 of 9 cells" in out
