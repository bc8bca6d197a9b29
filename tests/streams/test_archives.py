"""Tar archives: read in place, unpacked once, refused when they are not whole."""

from __future__ import annotations

import tarfile
from io import BytesIO
from pathlib import Path

import pytest
import torch
from trees import grow, level, pack

from poem.streams.datasets import (
    archive,
    image_folder,
)
from poem.streams.datasets.archives import tar_index


def test_a_tar_is_read_in_place(tmp_path: Path) -> None:
    root = grow(tmp_path / "tree", ["b", "a", "c"], per_class=2)
    path = pack(tmp_path / "set.tar", root, "top/set")
    data, plain = archive(path), image_folder(root)
    assert data.classes == plain.classes == ("a", "b", "c")
    assert data.labels.tolist() == plain.labels.tolist()
    for index in range(6):
        assert torch.equal(data[index], plain[index])
    assert data.where(0).startswith("set.tar:top/set/a/")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["set.tar", "tree"]


def test_a_compressed_tar_is_unpacked_once_and_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pack(tmp_path / "set.tar.xz", grow(tmp_path / "tree", ["a", "b"]), ".")
    monkeypatch.setenv("POEM_CACHE", str(tmp_path / "cache"))
    assert [level(archive(path), index) for index in (0, 1)] == [0, 1]
    (copy,) = (tmp_path / "cache").iterdir()
    stamp = copy.stat().st_mtime_ns
    assert len(archive(path)) == 2
    assert copy.stat().st_mtime_ns == stamp
    assert len(archive(path, cache=tmp_path / "other")) == 2
    monkeypatch.delenv("POEM_CACHE")
    assert len(archive(path)) == 2
    assert len(list(tmp_path.glob("set-*.tar"))) == 1

    cut = tmp_path / "cut.tar.xz"
    cut.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match=r"cut.tar.xz is cut short or damaged"):
        archive(cut, cache=tmp_path / "third")
    assert list((tmp_path / "third").iterdir()) == []


def test_nothing_is_unpacked_into_a_folder_marked_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POEM_CACHE", raising=False)
    folder = tmp_path / "shared"
    folder.mkdir()
    path = pack(folder / "set.tar.gz", grow(tmp_path / "tree", ["a", "b"]), ".")
    folder.chmod(0o555)
    try:
        with pytest.raises(ValueError, match="cannot be written; set POEM_CACHE to a folder with room"):
            archive(path)  # root, too, keeps its hands off
        assert [each.name for each in folder.iterdir()] == ["set.tar.gz"]
        assert len(archive(path, cache=tmp_path / "cache")) == 2
    finally:
        folder.chmod(0o755)


def test_an_archive_with_splits_is_an_error_that_asks_for_under(tmp_path: Path) -> None:
    grow(tmp_path / "tree" / "train", ["a", "b"], per_class=2)
    grow(tmp_path / "tree" / "test", ["a", "b"])
    path = pack(tmp_path / "set.tar", tmp_path / "tree", ".")
    with pytest.raises(ValueError, match=r"pass under= one of: test, train"):
        archive(path)
    assert len(archive(path, under="test")) == 2
    with pytest.raises(ValueError, match="no images under 'val'"):
        archive(path, under="val")
    broken = tmp_path / "broken.tar"
    broken.write_bytes(path.read_bytes()[:700])
    with pytest.raises(ValueError, match=r"broken.tar"):
        archive(broken)


def test_a_tar_truncated_between_two_files_is_an_error(tmp_path: Path) -> None:
    """A cut at a member's border, or a damaged header, would otherwise read as a smaller archive."""
    path = tmp_path / "images.tar"
    with tarfile.open(path, "w") as tar:
        for number in range(6):
            name, blob = f"tree/{'ab'[number % 2]}/{number}.bin", bytes(700)
            info = tarfile.TarInfo(name)
            info.size = len(blob)
            tar.addfile(info, BytesIO(blob))
    whole = path.read_bytes()
    for spoilt in (whole[: 4 * 1536], whole[: 4 * 1536 + 100], whole[: 3 * 1536 + 20] + b"x" + whole[3 * 1536 + 21 :]):
        path.write_bytes(spoilt)
        with pytest.raises(ValueError, match="is no whole tar archive"):
            tar_index(path)
    path.write_bytes(whole)
    assert len(tar_index(path)[0]) == 6
