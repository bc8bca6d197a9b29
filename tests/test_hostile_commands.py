"""Commands that are given nonsense: one line that says what to type, no traceback, and nothing done before it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from poem import benchmark, sweep, zoo
from poem.cli import main

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
    from poem import choice, demo, predict, store, train
    from poem import verify as verifying
    from poem.streams import _tree

    def begun(*_: Any, **__: Any) -> None:
        pytest.fail("the work has begun")

    for module, name in (
        (zoo, "load"), (predict, "photos"), (predict, "answers"), (benchmark, "measure"), (sweep, "sweep"),
        (verifying, "verify"), (train, "train"), (train, "digits"), (choice, "choose"), (_tree, "survey"),
        (demo, "table"), (store.Store, "reports"),
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
