"""Files that are not what they seem: links, FIFOs and devices, disguised images, archives that swell, edited results."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from poem._files import write_whole
from poem.store import Store

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs links, FIFOs and permissions")


def odd(kind: str, path: Path, victim: Path) -> Path:
    """Something at a path that is no regular file."""
    if kind == "link":
        path.symlink_to(victim)
    elif kind == "dangling link":
        path.symlink_to(victim.with_name("not there"))
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(path))
    elif kind == "folder":
        path.mkdir()
    return path


def files(folder: Path) -> list[str]:
    """Names of everything in a folder, hidden ones too."""
    return sorted(os.listdir(folder))


# Writing ------------------------------------------------------------------------------------------------------------


def test_the_temporary_file_cannot_be_foreseen(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "out" / "result.json"
    victim.write_text("mine")
    path.parent.mkdir()
    (path.parent / f".result.json.{os.getpid()}").symlink_to(victim)
    write_whole(path, "new")
    assert victim.read_text() == "mine"
    assert path.read_text() == "new"
    assert not path.is_symlink()


@pytest.mark.parametrize("kind", ["link", "dangling link", "FIFO", "socket", "folder"])
def test_nothing_but_a_regular_file_is_replaced(tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "out").mkdir()
    path = odd(kind, tmp_path / "out" / "result.json", victim)
    before = os.lstat(path)
    words = {"dangling link": "symbolic link", "link": "symbolic link"}.get(kind, kind)
    with pytest.raises(OSError, match=rf"expected a file, or nothing yet, at .*result.json, got a {words}.*; "):
        write_whole(path, "new")
    assert os.lstat(path).st_ino == before.st_ino
    assert victim.read_text() == "mine"
    assert files(tmp_path) == ["out", "victim"]
    assert files(path.parent) == ["result.json"]


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    """A device of our own: the real ones are not for tests to lose."""
    path = tmp_path / "null"
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except PermissionError:
        pytest.skip("only root makes devices")
    with pytest.raises(OSError, match="got a device"):
        write_whole(path, "new")
    assert stat.S_ISCHR(os.lstat(path).st_mode)


def test_permissions_are_the_umask_s_or_those_of_the_file_before(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    before = os.umask(0o027)
    try:
        write_whole(path, "first")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o600)
        write_whole(path, "second")
    finally:
        os.umask(before)
    assert path.read_text() == "second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    write_whole(path, "before")
    with pytest.raises(UnicodeEncodeError):
        write_whole(path, "\ud800")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write_whole(path, "never")
    assert files(tmp_path) == ["result.json"]
    assert path.read_text() == "before"


def test_a_name_as_long_as_a_file_system_takes_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 125 + ".json")
    write_whole(path, "whole")
    assert files(tmp_path) == [path.name]


def test_names_of_any_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff\xfe.jpg")
    write_whole(tmp_path / "names.csv", f"{name}\n")
    assert (tmp_path / "names.csv").read_bytes() == b"\xff\xfe.jpg\n"


def test_the_lock_of_a_store_is_not_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".lock").symlink_to(victim)
    with pytest.raises(OSError, match=r"\.lock"), Store(tmp_path / "out").lock():
        pass
    assert victim.read_text() == "mine"


def test_what_a_killed_writer_left_is_removed_under_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stand_ins import cell, report

    store = Store(tmp_path)
    with monkeypatch.context() as patch:  # as after kill -9: neither moved nor removed
        patch.setattr(Path, "replace", lambda *_: None)
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        store.save(report(cell()))
    folder = store.path(cell()).parent
    assert len(files(folder)) == 1
    with store.lock():
        assert files(folder) == []


def test_a_dangling_link_in_place_of_a_result_is_moved_aside(tmp_path: Path) -> None:
    from stand_ins import cell, report

    store = Store(tmp_path)
    path = store.path(cell())
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "gone")
    store.save(report(cell()))
    assert store.finished(cell()) == report(cell())
    assert not path.is_symlink()
    assert not (tmp_path / "gone").exists()


def test_a_tar_is_not_unpacked_through_a_link(tmp_path: Path) -> None:
    import tarfile

    from poem.streams._archives import plain_tar

    victim, packed = tmp_path / "victim", tmp_path / "set.tar.xz"
    victim.write_text("mine")
    with tarfile.open(packed, "w:xz") as tar:
        tar.add(victim, "class/0.png")
    place = plain_tar(packed, tmp_path / "first")
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / f".{place.name}.{os.getpid()}").symlink_to(victim)
    assert plain_tar(packed, tmp_path / "second").read_bytes() == place.read_bytes()
    assert victim.read_text() == "mine"
