"""Commands that are given nonsense: one line that says what to type, no traceback, and nothing done before it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from stand_ins import cell, report

from poem import zoo
from poem.bench import measure, sweep
from poem.bench.store import Store
from poem.cli.main import main

RUN = ["run", "--base", "digits-bn", "--data", "digits-test", "--method", "source", "--n", "8"]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Two images in a folder."""
    folder = tmp_path / "photos" / "class"
    folder.mkdir(parents=True)
    for at in range(2):
        Image.new("RGB", (32, 32), (40 * at, 90, 20)).save(folder / f"{at}.png")
    return folder.parent


def refused(words: list[Any], capsys: pytest.CaptureFixture[str]) -> str:
    """What a command says that ends with exit code 2: one line, no traceback."""
    capsys.readouterr()
    try:
        code = main([str(word) for word in words])
    except SystemExit as ended:  # argparse says it after the usage
        code = int(str(ended.code))
    said = capsys.readouterr().err
    assert code == 2, said
    assert "Traceback" not in said
    last = said.strip().splitlines()[-1]
    assert last.startswith("poem "), said
    assert len(last) < 1000
    return last


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run", "--eta", "1"], "there is no option --eta; it is a field of the cell: --set eta=VALUE"),
        (["run", "--source-images", "5"], "--set source_images=VALUE"),
        (["run", "--corruptions", "fog"], "did you mean --corruption?"),
        (["run", "--batch_size", "8"], "did you mean --batch-size?"),
        (["bench", "table1", "--method", "tent"], "did you mean --methods?"),
        (["demo", "--eta", "1"], "there is no option --eta"),
    ],
    ids=lambda given: given[1] if isinstance(given, list) else "",
)
def test_an_unknown_option_is_told_what_the_command_takes(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(words, capsys)
    assert says in said
    assert ("--set" in said.splitlines()[-1]) == ("--set" in says)


def test_a_cell_file_that_is_not_there_is_told_what_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(["run", tmp_path / "cell.json"], capsys)
    assert "expected CELL.json, a file with a cell" in said
    assert "--set FIELD=VALUE" in said
    assert "guard=" not in said
    assert "poem.adapt(model, guard={...})" in refused(["run", "--guard", "budget=2"], capsys)


# Places for results -------------------------------------------------------------------------------------------------

OUTPUTS = {
    "predict": ["predict", "{photos}", "--model", "digits-bn", "-o", "{place}"],
    "run": [*RUN, "--out", "{place}"],
    "verify": ["verify", "digits-bn", "digits-test", "--json", "{place}"],
    "demo --json": ["demo", "--json", "{place}", "--out", "{free}"],
    "choose": ["choose", "{photos}", "-o", "{place}"],
}
FOLDERS = {
    "bench": ["bench", "demo", "--limit", "8", "--out", "{place}"],
    "reproduce": ["reproduce", "table1", "--limit", "8", "--out", "{place}"],
    "report": ["report", "{photos}", "--out", "{place}"],
    "demo": ["demo", "--out", "{place}"],
    "demo imagenet": ["demo", "imagenet", "--images", "{photos}", "--out", "{place}"],
    "train-source": ["train-source", "digits", "--out", "{place}"],
    "corrupt": ["corrupt", "{photos}", "{place}", "--corruptions", "fog", "--workers", "1"],
}


@pytest.fixture
def nothing_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever begins the work fails the test."""
    from poem import predict
    from poem.bench import store
    from poem.bench.analysis import choose_lr as choice
    from poem.report import demo
    from poem.streams.corruptions import corrupt_folder as _folder
    from poem.zoo import train, train_data
    from poem.zoo import verify as verifying

    def begun(*_: Any, **__: Any) -> None:
        pytest.fail("the work has begun")

    for module, name in (
        (zoo, "load"), (predict, "find_images"), (predict, "answers"), (measure, "measure"), (sweep, "sweep"),
        (verifying, "verify"), (train, "train"), (train_data, "digits"), (choice, "choose"), (_folder, "list_source"),
        (demo, "demo_rows"), (store.Store, "results"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, begun)


@pytest.mark.parametrize("name", [*OUTPUTS, *FOLDERS])
@pytest.mark.parametrize("kind", ["wrong kind", "below a file", "cannot be made"])
def test_a_place_for_results_is_tried_first(
    name: str, kind: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], nothing_done: None
) -> None:
    wanted = OUTPUTS.get(name) or FOLDERS[name]
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    place = {
        "wrong kind": tmp_path / ("folder" if name in OUTPUTS else "file"),
        "below a file": tmp_path / "file" / "results",
        "cannot be made": Path("/proc/poem/results"),
    }[kind]
    if kind == "cannot be made" and not os.path.isdir("/proc/self"):
        pytest.skip("needs a folder that nobody can write to")
    before = sorted(path for path in tmp_path.rglob("*"))
    said = refused([word.format(photos=photos, place=place, free=tmp_path / "free") for word in wanted], capsys)
    assert str(place) in said or str(place.parent) in said
    assert said.count("; ") >= 1, "it ends with what to do"
    assert sorted(path for path in tmp_path.rglob("*")) == before
    assert (tmp_path / "file").read_text() == "mine"


def test_an_image_is_not_overwritten_by_its_answers(
    photos: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zoo, "load", lambda *_: pytest.fail("a model was loaded"))
    out = photos / "class" / "0.png"
    before = out.read_bytes()
    assert "is one of the images" in refused(["predict", photos, "--model", "digits-bn", "-o", out], capsys)
    assert out.read_bytes() == before


# Values -------------------------------------------------------------------------------------------------------------

VERIFY = ["verify", "digits-bn", "digits-test", "--limit", "8"]
BENCH = ["bench", "demo", "--limit", "8", "--methods", "source", "--engine", "inline", "--out", "{out}"]
PREDICT = ["predict", "{photos}", "--model", "digits-bn", "-o", "{out}.csv"]
DEVICES = {
    "predict": PREDICT,
    "verify": VERIFY,
    "run": RUN,
    "bench": BENCH,
    "bench --dry-run": [*BENCH, "--dry-run"],
    "reproduce": ["reproduce", "table1", "--limit", "8", "--out", "{out}"],
    "train-source": ["train-source", "digits", "--out", "{out}"],
}


@pytest.mark.parametrize("command", DEVICES)
@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("banana", "expected a device such as cpu, cuda or cuda:1, got 'banana'"),
        ("", "expected a device such as cpu, cuda or cuda:1, got ''"),
        ("cuda", "expected a machine with CUDA for --device cuda; leave it out for the CPU"),
        ("cuda:7", "CUDA"),
        ("meta", "expected a device that can compute, got 'meta'"),
    ],
)
def test_a_device_is_known_before_anything_is_loaded(
    command: str, device: str, says: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    nothing_done: None,
) -> None:  # fmt: skip
    if torch.cuda.is_available() and device.startswith("cuda"):
        pytest.skip("this machine has one")
    words = [word.format(photos=photos, out=tmp_path / "out") for word in DEVICES[command]]
    assert says in refused([*words, "--device", device], capsys)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([*PREDICT, "--resize", "100000000"], "expected --resize from 1 to 8192, got 100000000"),
        ([*PREDICT, "--resize", "0"], "expected --resize from 1 to 8192, got 0"),
        ([*PREDICT, "--crop", "-3"], "expected --crop from 1 to 8192, got -3"),
        ([*PREDICT, "--crop", "9999999"], "expected --crop from 1 to 8192, got 9999999"),
        ([*PREDICT, "--batch-size", "0"], "expected --batch-size of at least 1, got 0"),
        ([*PREDICT, "--lr", "nan"], "expected --lr as a finite number of at least 0, got nan"),
        ([*PREDICT, "--lr=-1"], "expected --lr as a finite number of at least 0, got -1"),
        ([*PREDICT, "--mean", "nan,0,0"], "expected finite numbers"),
        ([*PREDICT, "--std", "inf"], "expected finite numbers"),
        ([*PREDICT, "--std", "0"], "expected a std above 0"),
        ([*VERIFY, "--batch-size", "0"], "expected --batch-size of at least 1, got 0"),
        ([*VERIFY, "--batch-size", "-1"], "expected --batch-size of at least 1, got -1"),
        ([*VERIFY, "--mean", "0", "--std=-1"], "expected a std above 0"),
        ([*RUN, "--seed", "99999999999999999999"], "expected --seed from"),
        ([*RUN, "--threads", "100000000"], "expected --threads from 1 to 1024, got 100000000"),
        ([*RUN, "--threads", "0"], "expected --threads from 1 to 1024, got 0"),
        ([*RUN, "--loaders=-1"], "expected --loaders from 0 to 1024, got -1"),
        ([*RUN, "--loaders", "100000000"], "expected --loaders from 0 to 1024, got 100000000"),
        ([*RUN, "--set", "threads=100000000"], "expected threads from 1 to 1024, got 100000000"),
        ([*RUN, "--set", "window=banana"], "expected window"),
        ([*RUN, "--set", "lr=[1, 2]"], "expected lr to be a finite number"),
        ([*RUN, "--set", f"changes.threshold={'[' * 1500}"], "nested too deeply"),
        ([*RUN, "--lr", "nan"], "expected --lr as a finite number of at least 0, got nan"),
        ([*RUN, "--weights", "/nowhere"], "expected --weights as a file or folder that is there, got '/nowhere'"),
        ([*BENCH, "--weights", "/nowhere"], "expected --weights as a file or folder that is there, got '/nowhere'"),
        ([*BENCH, "--workers", "0"], "expected --workers of at least 1, got 0"),
        ([*BENCH, "--workers", "100000000"], "expected --workers from 1 to 1024, got 100000000"),
        ([*BENCH, "--loaders", "100000000"], "expected --loaders from 0 to 1024, got 100000000"),
        ([*BENCH, "--retries=-1"], "expected --retries of at least 0, got -1"),
        ([*BENCH, "--limit", "0"], "expected limit >= 1, got 0"),
        ([*BENCH, "--seeds", "99999999999999999999"], "expected --seeds from"),
        ([*BENCH, "--gpus", "nan"], "expected --gpus as a finite number of at least 0, got nan"),
        (["train-source", "digits", "--out", "{out}", "--seed", "99999999999999999999"], "expected --seed from"),
        (["demo", "--out", "{out}", "--workers", "0"], "expected --workers from 1 to 1024, got 0"),
        (["demo", "--out", "{out}", "--batch-size", "0"], "expected --batch-size of at least 1, got 0"),
        (["demo", "imagenet", "--images", "{photos}", "--out", "{out}", "--batch-size=-2"], "expected --batch-size of"),
        (["predict", "", "--model", "digits-bn"], "expected a path, got ''"),
        ([*PREDICT, "-o", ""], "expected a path, got ''"),
        (["corrupt", "{photos}", ""], "expected a path, got ''"),
        (["report", ""], "expected a path, got ''"),
    ],
)  # fmt: skip
def test_values_that_make_no_sense_are_refused(
    words: list[str], says: str, photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], nothing_done: None
) -> None:
    assert says in refused([word.format(photos=photos, out=tmp_path / "out") for word in words], capsys)


# Files of settings --------------------------------------------------------------------------------------------------

CELL = {"base": "digits-bn", "data": "digits-test", "method": "source", "n": 8}
TEXTS: dict[str, bytes] = {
    "nothing": b"",
    "bytes": bytes(range(256)) * 4,
    "nested": b"[" * 5_000 + b"]" * 5_000,
    "NaN": b'{"base": NaN}',
    "too large a number": json.dumps({**CELL, "lr": 0}).replace('"lr": 0', '"lr": 1e999').encode(),
    "null": b"null",
    "a number": b"7",
    "a word": b'"words"',
    "wrong types": json.dumps({"base": 5, "data": [], "method": {}, "seed": "x", "corruptions": 7}).encode(),
    "a wrong seed": json.dumps({**CELL, "seed": "x"}).encode(),
    "wrong corruptions": json.dumps({**CELL, "corruptions": [[]]}).encode(),
    "many threads": json.dumps({**CELL, "threads": 10**8}).encode(),
    "a long seed": json.dumps({**CELL, "seed": 10**30}).encode(),
    "an odd scenario": json.dumps({**CELL, "scenario": [1]}).encode(),
}


@pytest.mark.parametrize("kind", [*TEXTS, "folder", "FIFO", "nowhere"])
def test_files_of_settings_are_not_trusted(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], nothing_done: None
) -> None:
    for ending in (".json", ".yaml"):
        path = tmp_path / f"given{ending}"
        if kind == "folder":
            path.mkdir()
        elif kind == "FIFO":
            os.mkfifo(path)
        elif kind != "nowhere":
            path.write_bytes(TEXTS[kind])
        out = tmp_path / "out"
        commands = [["bench", path, "--out", out]]
        if ending == ".json":
            commands += [["run", path, "--out", out]]
            if kind in TEXTS and TEXTS[kind][:1] == b"{":
                (tmp_path / "list.json").write_bytes(b"[" + TEXTS[kind] + b"]")
                commands += [["bench", tmp_path / "list.json", "--out", out]]
        else:
            commands += [["bench", "demo", "--chosen", path, "--out", out]]
        for words in commands:
            if words[0] == "run" and kind in ("nothing",):
                words = [*words, *RUN[1:]]
            said = refused(words, capsys)
            assert "RecursionError" not in said
            assert not out.exists()


def test_a_list_of_classes_is_read_like_any_other_file(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, data in {"bytes": bytes(range(256)), "none": b"\n\n", "twice": b"1\n1\n", "negative": b"-1\n"}.items():
        path = tmp_path / name
        path.write_bytes(data)
        refused([*[word.format(photos=photos, out=tmp_path / "out") for word in PREDICT], "--classes", path], capsys)


# Results ------------------------------------------------------------------------------------------------------------

SPOILT: dict[str, Any] = {
    "metrics []": {"metrics": []},
    "metrics of words": {"metrics": {"top1": "high"}},
    "metrics without top1": {"metrics": {}},
    "metrics of bools": {"metrics": {"top1": True}},
    "metrics of long numbers": {"metrics": {"top1": 10**400}},
    "metrics null": {"metrics": None},
    "domains of lists": {"domains": {"fog 5": [1, 2]}},
    "windows of words": {"windows": ["a"]},
    "windows a word": {"windows": "abc"},
    "groups of words": {"groups": {"low": {"n": "x"}}},
    "ledger a list": {"ledger": [1]},
    "notes of numbers": {"notes": [1]},
    "card a list": {"card": []},
    "card of lists of lists": {"card": {"data": [[1]]}},
    "card of mappings": {"card": {"data": {"a": 1}}},
    "base a word": {"base": "digits"},
    "host a list": {"host": []},
    "host of lists": {"host": {"device": []}},
    "timing of words": {"timing": {"adapt_s": "fast"}},
    "recipe of numbers": {"recipe": {"lr": 1}},
    "probes a list": {"probes": []},
    "cell a list": {"cell": []},
    "cell null": {"cell": None},
    "half a character": {"notes": ["\ud800"]},
    "schema a list": {"schema": []},
}


def spoil(path: Path, kind: str) -> None:
    """Put something else into a result."""
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, **SPOILT[kind]}))


@pytest.mark.parametrize("kind", [*SPOILT, "nested", "NaN", "bytes", "folder", "FIFO", "link in a circle"])
def test_a_result_that_is_none_is_left_out_by_name(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store, good, bad = Store(tmp_path / "a"), cell("source"), cell("tent")
    store.save(report(good, 40.0))
    path = store.save(report(bad, 50.0))
    if kind in SPOILT:
        spoil(path, kind)
    elif kind in TEXTS:
        path.write_bytes(TEXTS[kind])
    else:
        path.unlink()
        if kind == "folder":
            path.mkdir()
        elif kind == "FIFO":
            os.mkfifo(path)
        else:
            path.symlink_to(path)
    found = list(store.results())
    assert [each.cell for each in found] == [good]
    assert path.name in store.broken[path]
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    said = capsys.readouterr().out
    assert "1 cells in both: 1 identical" in said
    assert said.count(f"left out: {path}") >= 1
    assert store.finished(bad) is None


@pytest.mark.parametrize(
    "text",
    [
        "[" * 5_000, "{}", "7", "null", '[{"suite": 1, "scale": 2, "settings": 3}]', '[{"suite": []}]',
        '[{"suite": "demo", "scale": "tiny", "settings": {"limit": "x"}}]',
        '[{"suite": "demo", "scale": "tiny", "settings": {"colour": 1}}]',
    ],
)  # fmt: skip
def test_what_was_asked_for_is_not_trusted(text: str, tmp_path: Path) -> None:
    store = Store(tmp_path)
    (tmp_path / "asked.json").write_text(text)
    assert store.requests() == []
    assert "does not say what was asked for" in store.broken[tmp_path / "asked.json"]
    store.save_request(["demo"], "tiny", {})
    assert [each.suite for each in store.requests()] == ["demo"]


def test_an_unforeseen_error_is_one_line_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from poem.cli import show

    def broken(*_: Any) -> None:
        raise RuntimeError("shapes do not fit\nsecond line")

    monkeypatch.setattr(show, "run", broken)
    said = refused(["show", "tent"], capsys)
    assert said == "poem show: RuntimeError: shapes do not fit; poem -v show prints the traceback"
    with pytest.raises(RuntimeError):
        main(["-v", "show", "tent"])
    monkeypatch.setattr(show, "run", lambda *_: bytearray(1 << 62))
    assert "MemoryError" in refused(["show", "tent"], capsys)
