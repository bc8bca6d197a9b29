"""`poem run`, `poem bench`, `poem reproduce` as a user types them."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import toys
from nets import make_net
from stand_ins import cell, report

from poem import adapt, methods, zoo
from poem import recipe as recipe_of
from poem._util.progress import duration
from poem.bench.analysis.choose_lr import read
from poem.bench.cell import Cell, with_field
from poem.bench.estimate import Rates, forward_passes, image_count
from poem.bench.result import CellResult
from poem.bench.runners import CellEnded, CellProgress, CellStarted, Inline, Workers
from poem.bench.store import Store
from poem.bench.sweep import CannotWriteError, SweepPlanned
from poem.cli import _sweep
from poem.cli._sweep_progress import SweepProgress
from poem.cli.main import main
from poem.parts import AfterImages, EntropyBelow, MemoryBank, Need
from poem.recipes.text import written
from poem.streams import EXTRA

CELL = ("--base", "digits-ln", "--data", "digits-test", "--preset", "cifar", "--n", "64", "--lr", "0.005")
SMALL = ("--methods", "tent", "--corruptions", "contrast", "--limit", "64")


def poem(*words: object) -> int:
    return main([str(word) for word in words])


def test_run_prints_card_and_metrics_and_writes_the_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "result.json"
    flags = ("--method", "tent", "--corruption", "contrast", "--set", "window=32")
    assert poem("run", *CELL, *flags, "--out", out) == 0
    said = capsys.readouterr().out
    report = CellResult.load(out)
    assert f"top1{report.metrics['top1']:22.3f} %" in said
    assert "corruptions    contrast" in said
    assert len(report.windows) == 2
    assert report.cell.lr == 0.005
    again = tmp_path / "again.json"
    assert poem("run", out, "--seed", 1, "--out", again) == 0, "a result can be run again, with flags on top"
    assert CellResult.load(again).cell.to_dict() == {**report.cell.to_dict(), "seed": 1}


@pytest.mark.parametrize(
    ("stated", "flags", "expected"),
    [
        ({"changes": {"lr": 0.1}}, (), 0.1),
        ({"changes": {"lr": 0.1}}, ("--lr", "0.3"), 0.3),
        ({"lr": 0.1}, ("--set", "changes.lr=0.3"), 0.3),
        ({"lr": 0.1}, ("--lr", "0.2", "--set", "changes.lr=0.3"), 0.3),
    ],
)
def test_flags_lie_over_a_rate_in_either_spelling(
    stated: dict[str, Any], flags: tuple[str, ...], expected: float, tmp_path: Path
) -> None:
    file, out = tmp_path / "cell.json", tmp_path / "result.json"
    file.write_text(json.dumps({**cell("tent", n=16).to_dict(), "lr": None, **stated}))
    assert poem("run", file, *flags, "--out", out) == 0
    result = CellResult.load(out)
    assert (result.recipe["lr"], result.cell.lr, result.cell.changes) == (str(expected), expected, ())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--base", "digits-ln"), "expected --data --method, or a file with a cell, as in poem run --base"),
        ((*CELL, "--method", "tant"), "unknown method 'tant'. Did you mean tent"),
        ((*CELL, "--method", "tent", "--corruption", "fogg"), "unknown corruption 'fogg'; did you mean 'fog'?"),
        ((*CELL, "--method", "tent", "--set", "windw=3"), "no field 'windw' can be set; did you mean 'window'?"),
        ((*CELL, "--method", "tent", "--set", "window"), "expected --set FIELD=VALUE"),
        (
            (*CELL, "--method", "tent", "--set", "seed=1"),
            "no field 'seed' can be set; it has a flag of its own, --seed",
        ),
        ((*CELL, "--method", "tent", "--set", "window=[1"), "expected a value as a YAML file has it, got '[1'"),
        ((*CELL, "--method", "tent", "--base", "digits-bb"), "unknown base 'digits-bb'; did you mean 'digits-bn'?"),
        (("nowhere.json",), "expected CELL.json, a file with a cell, got nowhere.json, which is not there"),
    ],
)
def test_run_says_what_to_type(words: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert poem("run", *words) == 2
    said = capsys.readouterr().err
    assert expected in said
    assert said.count("\n") == 1


def test_bench_runs_a_suite_and_does_not_run_it_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("bench", "table1", *SMALL, "--out", tmp_path, "--engine", "inline")
    assert poem(*words, "--dry-run") == 0
    said = capsys.readouterr().out
    assert "ResNet-50-GN (digits-gn): 2 rows x 1 columns, 1 seed: 2 cells" in said
    assert "0 finished, 6 to run, 384 images" in said
    assert "about 0 s with 1 process, 75 % of it tent, assuming 3000 (digits), 100 (CIFAR), 5 (ImageNet)" in said
    assert said.endswith("weights and data: all found\n")
    assert not list(tmp_path.iterdir()), "a dry run touches nothing"
    assert poem(*words) == 0
    said = capsys.readouterr().out
    assert said.startswith("6 cells measured in ")
    assert f"poem report {tmp_path}" in said
    reports = list(Store(tmp_path).results())
    assert len(reports) == 6
    assert {report.cell.n for report in reports} == {64}
    assert poem(*words) == 0
    assert capsys.readouterr().out.startswith("0 cells measured in 0.0 s, 6 finished before")
    assert poem(*words, "--dry-run") == 0
    assert "6 finished, 0 to run, 0 images\nabout 0 s with 1 process, from 6 finished cells" in capsys.readouterr().out


def test_a_json_list_of_cells_is_run_like_a_suite_without_yaml(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert poem("bench", "table1", *SMALL, "--json") == 0
    text = capsys.readouterr().out
    cells = [Cell.from_dict(each) for each in json.loads(text)]
    assert len(cells) == 6
    monkeypatch.setitem(sys.modules, "yaml", None)
    path = tmp_path / "cells.json"
    broken = {**cells[0].to_dict(), "data": "digits-tast"}
    path.write_text(json.dumps([*json.loads(text), broken]))
    words = ("bench", path, "--methods", "source", "--out", tmp_path / "out", "--engine", "inline")
    assert poem(*words) == 2
    said = capsys.readouterr()
    assert "unknown data set 'digits-tast'; did you mean 'digits-test'?" in said.err
    assert "nothing was run" in said.err
    assert not said.out
    assert poem(*words, "--keep-going") == 1, "a cell failed"
    said = capsys.readouterr()
    assert said.out.startswith("3 cells measured")
    assert "1 failed" in said.out
    assert "unknown data set 'digits-tast'; did you mean 'digits-test'?" in said.err
    assert poem("bench", path, "--methods", "nobody", "--out", tmp_path / "out") == 2
    assert "no cell of" in capsys.readouterr().err
    for flags in (("--scale", "tiny"), ("--chosen", str(path))):
        assert poem("bench", path, *flags) == 2
        assert f"{flags[0]} shapes suites, and {path} holds cells" in capsys.readouterr().err
    path.write_text("{}")
    assert poem("bench", path) == 2
    assert "expected a JSON list of cells" in capsys.readouterr().err


def test_a_limit_on_a_list_of_cells_is_the_limit_of_a_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cells.json"
    for suite in ("table2", "table1"):
        assert poem("bench", suite, "--limit", 32, "--json") == 0
        limited = json.loads(capsys.readouterr().out)
        assert poem("bench", suite, "--json") == 0
        path.write_text(capsys.readouterr().out)
        assert json.loads(path.read_text()) != limited
        assert poem("bench", path, "--limit", 32, "--json") == 0
        assert json.loads(capsys.readouterr().out) == limited
    path.write_text(json.dumps([cell(scenario="label-shift", options={"length": 70, "imbalance": 5}).to_dict()]))
    assert poem("bench", path, "--limit", 32, "--json") == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["options"] == {"imbalance": 5, "length": 32}
    assert found["source_images"] == 32


def test_values_are_set_alike_in_suites_and_in_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--set", "lr=1e-3", "--set", "window=10", "--set", "precision=bf16", "--set", "weights=null")
    path = tmp_path / "cells.json"
    assert poem("bench", "table1", *SMALL, "--json") == 0
    path.write_text(capsys.readouterr().out)
    found = []
    for what in (("table1", *SMALL), (path, "--methods", "tent")):
        assert poem("bench", *what, *words, "--json") == 0
        cells = [each for each in json.loads(capsys.readouterr().out) if each["method"] == "tent"]
        found.append([(each["lr"], each["window"], each["precision"], each["weights"]) for each in cells])
    assert found[0] == found[1] == [(0.001, 10, "bf16", None)] * 3


def test_a_gpu_is_worked_on_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = {
        "engine": None,
        "workers": None,
        "root": None,
        "weights": None,
        "loaders": 0,
        "address": None,
        "retries": 2,
    }
    monkeypatch.setattr(_sweep, "_devices", list)
    made = _sweep.make_runner(argparse.Namespace(device=["cuda:0"], **flags), [cell(), cell("tent")])
    assert isinstance(made, Workers)
    assert (made.count, made.devices) == (1, ("cuda:0",))
    assert isinstance(_sweep.make_runner(argparse.Namespace(device=["cpu"], **flags), [cell()]), Inline)


@pytest.mark.parametrize("error", [CannotWriteError("no room"), ChildProcessError("workers do not start")])
@pytest.mark.parametrize("command", ["bench", "reproduce"])
def test_a_sweep_that_breaks_off_has_an_exit_code_of_its_own(
    command: str,
    error: OSError,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*cells: object, **settings: object) -> None:
        raise error

    monkeypatch.setattr("poem.bench.sweep.sweep", broken)
    assert poem(command, "table1", *SMALL, "--out", tmp_path) == 3
    assert f"poem {command}: {error}" in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("words", [["list", "parts"], ["list", "methods"], ["--help"], ["show", "nobody"]])
def test_a_reader_that_goes_away_is_no_error(words: list[str]) -> None:
    code = "import sys; from poem.cli.main import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()  # before a word is said
    said = process.stderr.read()
    process.stderr.close()
    expected = 2 if words[-1] == "nobody" else 141
    assert process.wait() == expected, said
    assert bool(said) == (expected == 2), said


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("tabel1",), "unknown suite 'tabel1'; did you mean 'table1'?"),
        (("table1", "--scale", "tny"), "unknown scale 'tny'; did you mean 'tiny'?"),
        (("table1", "--methods", "tant"), "did you mean 'tent'?"),
        (("table1", "--corruptions", "fogg"), "unknown corruption 'fogg'; did you mean 'fog'?"),
        (("table1", "--set", "bach_size=3"), "did you mean 'batch_size'?"),
        (("table1", "--workers", "0"), "expected --workers of at least 1, got 0"),
        (("table1", "--address", "auto"), "add --engine ray"),
        (("table1", "--device", "cuda"), "expected a machine with CUDA"),
    ],
)
def test_bench_says_what_to_type(
    words: tuple[str, ...], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    if "cuda" in words and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    assert poem("bench", *words, "--out", tmp_path) == 2
    assert expected in capsys.readouterr().err


def test_reproduce_measures_and_makes_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("reproduce", "table11", "fig4", "--limit", 64, "--corruptions", "contrast", "--out", tmp_path)
    assert poem(*words, "--engine", "inline") == 0
    said = capsys.readouterr().out
    assert f"page: {tmp_path / 'report.html'}" in said
    assert (tmp_path / "report.md").is_file()
    assert "Table 11" in (tmp_path / "report.md").read_text(encoding="utf-8")
    asked = {each.suite: each.settings for each in Store(tmp_path).requests()}
    assert asked == {name: {"limit": 64, "corruptions": ["contrast"]} for name in ("table11", "fig4")}
    (tmp_path / "report.md").unlink()
    assert poem("report", tmp_path) == 0, "the flags of the run are known"
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    titles = re.findall("^## (Contents|Table 11|Figure 4|Provenance)", text, re.M)
    assert len(titles) == text.count("\n## ")
    assert titles == ["Contents", "Table 11", "Figure 4", "Provenance"]


def test_all_is_the_paper(capsys: pytest.CaptureFixture[str]) -> None:
    assert poem("reproduce", "all", "--dry-run", "--scale", "tiny") == 0
    said = capsys.readouterr().out
    assert sum(line.startswith("table") for line in said.splitlines()) == 12
    assert sum(line.startswith(("fig", "branch-loss")) for line in said.splitlines()) == 9
    assert "results in poem-results" in said


def test_progress_of_a_sweep_counts_cells_images_and_failures() -> None:
    progress, first, second = SweepProgress(), cell(), cell("tent")
    progress(SweepPlanned((first, second), ()))
    progress(CellStarted(first))
    progress(CellProgress(first, 32, 64))
    assert str(progress).startswith("0/2 cells, 32/128 images, ")
    assert " left: digits-ln source" in str(progress)
    progress(CellEnded(first, None, "it raised"))
    progress(CellStarted(second))
    assert str(progress).startswith("1/2 cells, 64/128 images, ")
    assert ", 1 failed: digits-ln tent" in str(progress)


def test_work_is_estimated_from_the_order_and_from_cells_alike() -> None:
    three = cell(scenario="continual", corruptions=["fog", "snow", "frost"])
    assert image_count(three) == 3 * 64
    assert image_count(cell(n=None)) == 1500
    assert image_count(cell(n=9999)) == 1500, "no more than there are"
    assert image_count(cell(scenario="label-shift", options={"length": 70})) == 70
    rates = Rates.of([report(cell())])  # 64 images in half a second
    assert rates.seconds([cell(), cell("tent")]) == pytest.approx(2.0), "of the same base; Tent goes back too"
    other = rates.seconds([cell(base="cifar10-bn", data="cifar10")])
    assert other == pytest.approx(0.5 * 3000 / 100, rel=0.05), "of another base, as much slower as is assumed"
    assert Rates.of([]).seconds([cell()]) == pytest.approx(64 / 3000 + 0.0008), "and one pass"
    assert [duration(seconds) for seconds in (5, 600, 9000, 999_999)] == ["5 s", "10 min", "2.5 h", "12 days"]


@pytest.mark.parametrize("method", methods())
def test_the_passes_of_a_method_are_those_that_the_ledger_counts(method: str) -> None:
    recipe = recipe_of(method)
    inside: dict[str, Any] = {"mean": (0.0,) * 3, "std": (1.0,) * 3} if recipe.unit_range else {}
    if recipe.uses_source_data:
        inside["source_data"] = [toys.images(8, seed=2)]
    if isinstance(recipe.views, MemoryBank):  # which waits for more images than come here
        inside["views"] = MemoryBank(8, every=8)
    if any(isinstance(part, AfterImages) for _, part in recipe.select.places):
        inside["select"] = EntropyBelow(0.4)
    kind = "gn" if recipe.first_with(Need.TOKENS) is None else "ln"
    adapter = adapt(make_net(kind, sharpness=6.0 if kind == "gn" else 9.0), method, **inside)
    for seed in (0, 1):
        adapter(toys.images(8, seed=seed).clamp(0, 1))
    spent = adapter.totals
    counted = (spent.forwards_computed + 2 * spent.backwards_computed) / 16
    stated = forward_passes(replace(recipe, on_batch_norm=None))  # the net has group norm
    assert counted <= stated, "an upper bound"
    assert counted >= stated / 4, "and not far above: batches that teach nobody, or look once, cost less"
    if method in ("source", "tent", "sar", "memo", "tent*"):
        assert counted == stated


def test_memo_is_named_where_most_of_the_time_goes_to_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    alone = Rates.of([])
    assert alone.seconds([cell("memo", preset="imagenet")]) == pytest.approx(193 * alone.seconds([cell()]), rel=0.05)
    assert alone.slowest([cell("memo"), cell("tent"), cell()]) == "96 % of it memo"
    assert alone.slowest([cell("memo")]) == "", "there is nothing to tell apart"
    assert alone.slowest([cell("tent"), cell("eata"), cell("sar", seed=1), cell("deyo")]) == ""
    assert poem("bench", "table9", "--dry-run", "--out", tmp_path) == 0
    assert " % of it memo, assuming" in capsys.readouterr().out


def test_the_time_left_is_by_work_and_unsaid_at_first() -> None:
    cheap, dear = cell(), cell("memo")
    progress = SweepProgress()
    progress(SweepPlanned((cheap, dear), ()))
    progress(CellStarted(cheap))
    progress(CellProgress(cheap, 32, 64))
    assert " left" not in str(progress), "half of the cheap cell is next to nothing"
    progress(CellEnded(cheap, report(cheap), ""))
    progress(CellProgress(dear, 32, 64))
    progress.began -= 50
    left = re.search(r"about (\d+) s left", str(progress))
    assert left is not None
    assert 47 <= int(left[1]) <= 51, "half of the work is done, though three images of four have passed"


# What is missing ------------------------------------------------------------------------------------------------------


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with an empty folder for data, and no network."""
    monkeypatch.setattr(zoo, "local_weight_paths", lambda base: [])
    monkeypatch.setattr(zoo.weights, "check_connection", lambda host: (_ for _ in ()).throw(OSError("no network")))
    monkeypatch.delenv("POEM_DATA", raising=False)
    (tmp_path / "data").mkdir()
    return tmp_path / "data"


@pytest.mark.parametrize("command", ["bench", "reproduce"])
def test_a_sweep_lists_all_that_is_missing_and_runs_nothing(
    command: str, bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("timm")
    words = (
        command,
        "table1",
        "--scale",
        "full",
        "--limit",
        8,
        "--seeds",
        0,
        "--root",
        bare,
        "--out",
        tmp_path / "out",
    )
    assert poem(*words) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"poem {command}: 5 things are missing:\n  weights of resnet50-bn (")
    for name in ("resnetv2-50d-gn", "vit-b16-B"):
        assert said.err.count(f"weights of {name} (") == 1
    assert said.err.count("data set imagenet-c (375 cells): no gaussian_noise/5 in") == 1
    assert "(and 14 more like it)" in said.err
    assert "put resnet50-0676ba61.pth into a folder and name it with --weights FOLDER" in said.err
    assert "source images for eata (45 cells)" in said.err
    assert "--set source_images=0" in said.err
    assert "nothing was run; --keep-going" in said.err
    assert not (tmp_path / "out").exists()
    assert not said.out
    assert poem(*words, "--dry-run") == 2, "as the run"
    said = capsys.readouterr()
    assert "2 things are missing; a run downloads the weights of resnet50-bn, resnetv2-50d-gn, vit-b16-B:" in said.out


def test_what_is_there_is_not_missing(bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (bare / "imagenet-c" / "fog" / "5" / "n01440764").mkdir(parents=True)
    weights = tmp_path / "weights"
    weights.mkdir()
    for name in ("resnet50-bn", "resnetv2-50d-gn", "vit-b16-B"):
        (weights / zoo.base(name).file).touch()
    words = ("bench", "table1", "--scale", "full", "--limit", 8, "--root", bare, "--weights", weights, "--dry-run")
    assert poem(*words, "--corruptions", "fog", "--methods", "tent") == 0
    assert capsys.readouterr().out.endswith("weights and data: all found\n")
    assert poem(*words, "--corruptions", "fog", "snow", "--methods", "tent", "--keep-going") == 1, "some would fail"
    assert "1 thing is missing:\n  data set imagenet-c (" in (said := capsys.readouterr().out)
    assert "no snow/5 in" in said
    assert "no fog/5 in" not in said
    assert poem(*words, "--engine", "ray", "--address", "auto") == 0
    assert "not checked, each node of a cluster has its own" in capsys.readouterr().out


def test_finished_cells_need_nothing(bare: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, one = Store(tmp_path / "out"), cell(base="resnet50-bn", data="imagenet-c")
    store.save(report(one))
    (tmp_path / "cells.json").write_text(json.dumps([one.to_dict()]))
    assert poem("bench", tmp_path / "cells.json", "--root", bare, "--out", store.folder, "--engine", "inline") == 0
    assert "0 cells measured" in capsys.readouterr().out


def test_suites_lists_and_runs_may_set_the_same_fields(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, one = tmp_path / "cells.json", tmp_path / "cell.json"
    path.write_text(json.dumps([cell("tent").to_dict()]))
    one.write_text(json.dumps(cell("tent").to_dict()))
    for name in ("method", "corruptions", "seed", "version", "nothing", "changes", "dataset."):
        found = []
        for words in (("bench", "table1"), ("bench", path), ("run", one)):
            assert poem(*words, "--set", f"{name}=1") == 2
            found.append(capsys.readouterr().err.partition("no field ")[2])
        assert found[0], name
        assert found[0] == found[1] == found[2]
    for name in ("base=digits-gn", "window=32", "changes.threshold=0.5", "dataset.partial=true", "options.length=3"):
        field, _, value = name.partition("=")
        head = field.partition(".")[0]
        laid = with_field({}, field, value)
        assert list(laid) == [head]


def test_chosen_rates_come_from_the_held_out_corruptions_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(tmp_path / "results")
    for rate, top1 in ((0.01, 60.0), (0.1, 50.0)):
        for shift in (*EXTRA, "fog"):
            cell = Cell(base="digits-bn", data="digits-test", method="tent", corruptions=(shift,), lr=rate)
            found = 99.0 if shift == "fog" and rate == 0.1 else top1  # fog would choose the other rate
            store.save(
                CellResult(
                    cell=cell, recipe=written(cell.recipe()), base={"sha256": "x"}, card={}, metrics={"top1": found},
                    domains={}, windows=[], groups={}, ledger={},
                )
            )  # fmt: skip
    out = tmp_path / "chosen.yaml"
    assert main(["choose", str(store.folder), "-o", str(out)]) == 0
    assert read(out) == {"digits-bn": {"tent": 0.01}}
    assert "from 8 results" in capsys.readouterr().out
    assert main(["choose", str(tmp_path / "nowhere")]) == 2
    assert "poem bench holdout" in capsys.readouterr().err
