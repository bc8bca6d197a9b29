"""`poem corrupt`: layout, resuming, broken images, full disks, and being killed."""

from __future__ import annotations

import argparse
import errno
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from poem.cli import corrupt as command
from poem.streams import CORRUPTIONS, corrupt

image = pytest.importorskip("PIL.Image")

RUN = (
    "import sys; from poem.cli import corrupt as c; import argparse; p = argparse.ArgumentParser(); c.add_options(p); "
)
RUN += "sys.exit(c.run(p.parse_args()))"


def tree(root: Path, count: int = 6, size: int = 32) -> Path:
    rng = np.random.default_rng(0)
    for at in range(count):
        path = root / f"class{at % 2}" / f"{at}.{'png' if at == 3 else 'JPEG'}"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.fromarray(rng.integers(0, 256, (size, size + at % 2, 3), dtype=np.uint8)).save(path)
    return root


def run(*words: Any) -> int:
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    return command.run(parser.parse_args([str(word) for word in words]))


def contents(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def files(root: Path) -> int:
    """Count images while others make and remove folders."""
    return sum(name.endswith(".JPEG") for _, _, names in os.walk(root) for name in names)


def test_layout_is_corruption_severity_class_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tree(tmp_path / "in"), tmp_path / "out"
    (source / "notes.txt").write_text("not an image")
    words = ("--corruptions", "contrast", "frost", "--severities", 5, 2, "--workers", 1)
    assert run(source, target, *words) == 0
    made = contents(target)
    assert "contrast/5/class0/0.JPEG" in made
    assert len(made) == 2 * 2 * 6 + 1  # and the record
    said = capsys.readouterr().out
    assert f"24 files written to {target}\n" in said
    assert "frost textures: " in said
    assert f"left alone: 1 file of {source}, no images in class folders: notes.txt\n" in said
    pixels = np.array(image.open(source / "class1/3.png"))
    expected = corrupt(pixels[None], "contrast", 2, ids=["class1/3.png"])[0]
    assert (np.array(image.open(target / "contrast/2/class1/3.png")) == expected).all()


def test_defaults_are_the_fifteen_at_severity_five(tmp_path: Path) -> None:
    source, target = tree(tmp_path / "in", count=1), tmp_path / "out"
    assert run(source, target, "--workers", 1) == 0
    assert sorted(path.name for path in target.iterdir() if path.is_dir()) == sorted(CORRUPTIONS)
    assert all((target / name / "5/class0/0.JPEG").is_file() for name in CORRUPTIONS)


def test_result_does_not_depend_on_workers_and_existing_files_stay(tmp_path: Path) -> None:
    source = tree(tmp_path / "in")
    words = ("--corruptions", "snow", "glass_blur", "jpeg_compression", "--seed", 3)
    assert run(source, tmp_path / "one", *words, "--workers", 1) == 0
    assert run(source, tmp_path / "two", *words, "--workers", 2) == 0
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    kept = tmp_path / "two/snow/5/class0/0.JPEG"
    kept.write_bytes(b"mine")
    lost = tmp_path / "two/snow/5/class0/2.JPEG"
    lost.unlink()
    (tmp_path / "two/snow/5/class0/4.JPEG").write_bytes(b"")
    assert run(source, tmp_path / "two", *words, "--workers", 1) == 0
    assert kept.read_bytes() == b"mine"
    kept.unlink()
    assert run(source, tmp_path / "two", *words, "--workers", 1) == 0
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_imagenet_size_is_224(tmp_path: Path) -> None:
    source, target = tree(tmp_path / "in", count=2, size=40), tmp_path / "out"
    assert run(source, target, "--corruptions", "fog", "--size", "imagenet", "--workers", 1) == 0
    assert image.open(target / "fog/5/class1/1.JPEG").size == (224, 224)


def test_broken_images_are_named_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tree(tmp_path / "in"), tmp_path / "out"
    whole = (source / "class0/0.JPEG").read_bytes()
    (source / "class0/0.JPEG").write_bytes(whole[: len(whole) // 2])
    (source / "class1/1.JPEG").write_bytes(b"no image at all")
    for workers in (1, 2):
        assert run(source, target, "--corruptions", "fog", "--workers", workers) == 1
        told = capsys.readouterr().err
        assert "2 images could not be read" in told
        assert "class0/0.JPEG" in told
        assert "class1/1.JPEG" in told
    assert len(contents(target)) == 4 + 1
    assert not (target / "fog/5/class0/0.JPEG").exists()
    for path in source.rglob("*.*"):
        path.write_bytes(b"no image at all")
    assert run(source, tmp_path / "none", "--corruptions", "fog", "--workers", 1) == 1
    assert f"0 files written to {tmp_path / 'none'}\n" in capsys.readouterr().out


def test_a_full_disk_leaves_no_temporary_file_and_the_run_can_resume(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tree(tmp_path / "in"), tmp_path / "out"
    plain, left = Path.replace, 4

    def move(self: Path, place: Path) -> Path:
        nonlocal left
        left -= 1
        if left < 0:
            self.write_bytes(self.read_bytes()[:10])
            raise OSError(errno.ENOSPC, "No space left on device", str(self))
        return plain(self, place)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", move)
        assert run(source, target, "--corruptions", "fog", "--workers", 1) == 1
    told = capsys.readouterr()
    assert "No space left on device" in told.err
    assert "type the same command again" in told.err
    assert "3 files written" in told.out
    assert len(contents(target)) == 3 + 1  # nothing half-written
    assert run(source, target, "--corruptions", "fog", "--workers", 1) == 0
    assert len(contents(target)) == 6 + 1


def test_the_summary_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = tree(tmp_path / "in"), tmp_path / "out"
    words = ("--corruptions", "contrast", "--workers", 1)
    assert run(source, target, *words) == 0
    assert f"\n6 files written to {target}\n" in capsys.readouterr().out
    assert run(source, target, *words) == 0
    assert "\nnothing to do: all 6 files were there\n" in capsys.readouterr().out
    (target / "contrast/5/class0/0.JPEG").unlink()
    assert run(source, target, *words) == 0
    assert f"\n1 file written to {target}, 5 were there already\n" in capsys.readouterr().out


def test_the_profile_is_printed_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One for the whole tree, the nearest to the usual size; a resumed run takes the folder's own."""
    source, target = tree(tmp_path / "in", count=5, size=66), tmp_path / "out"
    odd = source / "class0/0.JPEG"
    image.new("RGB", (300, 300)).save(odd)
    assert run(source, target, "--corruptions", "contrast", "--workers", 1) == 0
    assert "profile: tiny-imagenet (constants for 64 pixels)" in capsys.readouterr().out
    assert json.loads((target / "poem-corrupt.json").read_text())["profile"] == "tiny-imagenet"
    pixels = np.array(image.open(source / "class1/3.png"))
    expected = corrupt(pixels[None], "contrast", 5, ids=["class1/3.png"], profile="tiny-imagenet")[0]
    assert (np.array(image.open(target / "contrast/5/class1/3.png")) == expected).all()
    for path in source.rglob("*.JPEG"):
        image.new("RGB", (300, 300)).save(path)
    assert run(source, target, "--corruptions", "fog", "--workers", 1) == 0
    assert "profile: tiny-imagenet" in capsys.readouterr().out
    with pytest.raises(ValueError, match="profile 'tiny-imagenet', not 'cifar'"):
        run(source, target, "--corruptions", "fog", "--profile", "cifar")
    assert run(source, tmp_path / "large", "--corruptions", "fog", "--size", "imagenet", "--workers", 1) == 0
    assert "profile: imagenet (constants for 224 pixels)" in capsys.readouterr().out


def test_other_frost_textures_matter_only_where_there_is_frost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from poem.streams.corruptions import corrupt_folder as _folder

    source, target = tree(tmp_path / "in", count=2), tmp_path / "out"

    def made(name: str, textures: str) -> int:
        monkeypatch.setattr(_folder, "frost_source", lambda: textures)
        return run(source, target, "--corruptions", name, "--workers", 1)

    assert made("contrast", "one kind") == 0
    assert "frost" not in json.loads((target / "poem-corrupt.json").read_text())
    assert made("contrast", "another") == 0
    assert made("frost", "another") == 0
    assert json.loads((target / "poem-corrupt.json").read_text())["frost"] == "another"
    assert made("contrast", "one kind") == 0
    with pytest.raises(ValueError, match="frost 'another', not 'one kind'"):
        made("frost", "one kind")


def test_a_full_disk_at_the_first_file_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = tree(tmp_path / "in"), tmp_path / "out"

    def move(self: Path, place: Path) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device", str(self))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", move)
        assert run(source, target, "--corruptions", "fog", "--workers", 1) == 1
    told = capsys.readouterr()
    assert "No space left on device" in told.err
    assert "type the same command again to go on" in told.err
    assert f"0 files written to {target}, 6 still to make" in told.out
    assert contents(target) == {}
    assert run(source, target, "--corruptions", "fog", "--workers", 1) == 0
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(NotADirectoryError, match=r"expected a folder, or nothing yet, at .*file, got a file"):
        run(source, tmp_path / "file", "--corruptions", "fog", "--workers", 1)


def test_a_damaged_record_is_an_error_that_names_it(tmp_path: Path) -> None:
    source, target = tree(tmp_path / "in", count=2), tmp_path / "out"
    target.mkdir()
    for text in ("", "[]"):
        (target / "poem-corrupt.json").write_text(text)
        with pytest.raises(ValueError, match=r"expected the settings of poem corrupt in .*poem-corrupt.json, got"):
            run(source, target, "--corruptions", "fog")


@pytest.mark.skipif(sys.platform != "linux", reason="finds the worker in /proc")
def test_a_killed_worker_is_an_error_with_what_to_type(tmp_path: Path) -> None:
    source, target = tree(tmp_path / "in", count=60, size=64), tmp_path / "out"
    words = ["--corruptions", "snow", "zoom_blur", "--severities", "1", "5", "--workers", "2"]
    line = [sys.executable, "-c", RUN, str(source), str(target), *words]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and files(target) < 5:
        time.sleep(0.02)
    worker = next(
        int(path.name)
        for path in Path("/proc").glob("[0-9]*")
        if parent(path) == process.pid and b"spawn_main" in (path / "cmdline").read_bytes()
    )
    os.kill(worker, signal.SIGKILL)
    said, told = process.communicate(timeout=120)
    assert process.returncode == 1
    assert "a worker was killed" in told
    assert "type the same command again to go on, with fewer --workers than 2" in told
    assert "Traceback" not in told
    assert "still to make" in said
    assert not (target / ".poem-parts").exists()
    assert run(source, target, *words) == 0
    assert files(target) == 60 * 4 - 4  # one of the sixty is a .png


def parent(process: Path) -> int:
    """The parent of a process in /proc."""
    try:
        return int((process / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1


def test_ctrl_c_ends_with_a_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from poem.streams.corruptions import corrupt_folder as _folder

    source, target = tree(tmp_path / "in"), tmp_path / "out"
    plain = _folder.corrupt_image

    def work(job: Any, *rest: Any) -> Any:
        if job.name.endswith("4.JPEG"):
            raise KeyboardInterrupt
        return plain(job, *rest)

    monkeypatch.setattr(_folder, "corrupt_image", work)
    assert run(source, target, "--corruptions", "fog", "--workers", 1) == 130
    told = capsys.readouterr()
    assert "2 files written" in told.out
    assert "type the same command again" in told.err


def test_bad_use_is_refused_before_any_work(tmp_path: Path) -> None:
    source, target = tree(tmp_path / "in", count=2), tmp_path / "out"
    for words, told in (
        (("--severities", 6), "expected severity"),
        (("--corruptions", "fogg"), "did you mean fog"),
        (("--quality", 0), "expected --quality"),
        (("--workers", -1), "expected --workers"),
        (("--profile", "svhn"), "expected profile"),
    ):
        with pytest.raises(ValueError, match=told):
            run(source, target, *words)
    assert not target.exists()
    with pytest.raises(FileNotFoundError, match="expected a folder of class folders"):
        run(tmp_path / "nowhere", target)
    with pytest.raises(ValueError, match="put the images into one folder per class"):
        run(source / "class0", target)
    with pytest.raises(ValueError, match="expected DST outside SRC"):
        run(source, source / "out")
    assert run(source, target, "--corruptions", "fog", "--workers", 1) == 0
    with pytest.raises(ValueError, match="seed 0, not 1"):
        run(source, target, "--corruptions", "fog", "--seed", 1)


@pytest.mark.skipif(os.name != "posix", reason="needs kill -9")
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    source = tree(tmp_path / "in", count=40, size=64)
    words = ["--corruptions", "snow", "elastic_transform", "zoom_blur", "--severities", "1", "5"]
    assert run(source, tmp_path / "whole", *words, "--workers", 1) == 0
    target = tmp_path / "killed"
    chance = random.Random(0)
    line = [sys.executable, "-c", RUN, str(source), str(target), *words, "--workers", "2"]
    before = 0
    for _ in range(3):
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stop_at = before + chance.randint(5, 40)
        while process.poll() is None and files(target) < stop_at:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL) if process.poll() is None else None
        process.wait()
        before = files(target)
    assert 5 <= before < 40 * 6
    assert subprocess.run(line, capture_output=True, check=False).returncode == 0
    assert contents(target) == contents(tmp_path / "whole")
    assert not (target / ".poem-parts").exists()


def test_the_card_of_a_corrupted_folder_has_its_settings(tmp_path: Path) -> None:
    """Its provenance is the command's settings, not the official archive."""
    from poem.streams.datasets import imagenet_c

    cell = tmp_path / "fog" / "3" / "cat"
    cell.mkdir(parents=True)
    image.new("RGB", (8, 8)).save(cell / "one.png")
    (tmp_path / "poem-corrupt.json").write_text('{"seed": 7, "quality": 85, "profile": null, "frost": "generated"}')
    about = imagenet_c(tmp_path, "fog", 3, classes=1, per_class=None).describe()
    assert about["provenance"] == "made by poem corrupt: seed 7, quality 85, frost generated"
    assert about["subset"] == "all 1"
