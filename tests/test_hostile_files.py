"""Files that are not what they seem: links, FIFOs, devices, disguised images, archives that swell, edited results."""

from __future__ import annotations

import inspect
import io
import json
import os
import socket
import stat
import struct
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from stand_ins import cell, report

from poem import predict
from poem._util.files import read_json, write_atomic
from poem.bench.result import CellResult
from poem.bench.store import Store
from poem.cli.main import main
from poem.streams.corruptions import corrupt_folder as _folder
from poem.streams.datasets import Prepare, Unreadable, cifar, image_folder
from poem.streams.datasets.archives import plain_tar, unpacked_limit
from poem.streams.datasets.folders import walk

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
    write_atomic(path, "new")
    assert victim.read_text() == "mine"
    assert path.read_text() == "new"
    assert not path.is_symlink()
    names, move = [], Path.replace

    def noted(self: Path, place: Path) -> Path:
        names.append(self.name)
        return move(self, place)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "replace", noted)
        for _ in range(2):
            write_atomic(path, "new")
    assert len(set(names)) == 2
    with pytest.MonkeyPatch.context() as patch:  # though somebody had guessed it
        patch.setattr("poem._util.files.secrets.token_hex", lambda _: "0" * 16)
        (path.parent / f".result.json.{os.getpid()}-{'0' * 16}.part").symlink_to(victim)
        with pytest.raises(FileExistsError):
            write_atomic(path, "newer")
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("kind", ["link", "dangling link", "FIFO", "socket", "folder"])
def test_nothing_but_a_regular_file_is_replaced(tmp_path: Path, kind: str) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "out").mkdir()
    path = odd(kind, tmp_path / "out" / "result.json", victim)
    before = os.lstat(path)
    words = {"dangling link": "symbolic link", "link": "symbolic link"}.get(kind, kind)
    with pytest.raises(OSError, match=rf"expected a file, or nothing yet, at .*result.json, got a {words}.*; "):
        write_atomic(path, "new")
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
        write_atomic(path, "new")
    assert stat.S_ISCHR(os.lstat(path).st_mode)


def test_permissions_are_the_umask_s_or_those_of_the_file_before(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    before = os.umask(0o027)
    try:
        write_atomic(path, "first")
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
        path.chmod(0o600)
        write_atomic(path, "second")
    finally:
        os.umask(before)
    assert path.read_text() == "second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_failure_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    write_atomic(path, "before")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "\ud800")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write_atomic(path, "never")
    assert files(tmp_path) == ["result.json"]
    assert path.read_text() == "before"


def test_a_name_as_long_as_a_file_system_takes_can_be_written(tmp_path: Path) -> None:
    path = tmp_path / ("é" * 125 + ".json")
    write_atomic(path, "whole")
    assert files(tmp_path) == [path.name]


def test_names_of_any_bytes_are_written_as_they_are(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff\xfe.jpg")
    write_atomic(tmp_path / "names.csv", f"{name}\n")
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
    store = Store(tmp_path)
    with monkeypatch.context() as patch:  # as after kill -9: neither moved nor removed
        patch.setattr(Path, "replace", lambda *_: None)
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        store.save(report(cell()))
    folder = store.path(cell(), cell().key).parent
    assert len(files(folder)) == 1
    with store.lock():
        assert files(folder) == []


def test_a_dangling_link_in_place_of_a_result_is_moved_aside(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.path(cell(), report(cell()).key)
    path.parent.mkdir(parents=True)
    path.symlink_to(tmp_path / "gone")
    store.save(report(cell()))
    assert store.finished(cell()) == report(cell())
    assert not path.is_symlink()
    assert not (tmp_path / "gone").exists()


def test_a_tar_is_not_unpacked_through_a_link(tmp_path: Path) -> None:
    victim, packed = tmp_path / "victim", tmp_path / "set.tar.xz"
    victim.write_text("mine")
    with tarfile.open(packed, "w:xz") as tar:
        tar.add(victim, "class/0.png")
    place = plain_tar(packed, tmp_path / "first")
    (tmp_path / "second").mkdir()
    (tmp_path / "second" / f".{place.name}.{os.getpid()}").symlink_to(victim)
    assert plain_tar(packed, tmp_path / "second").read_bytes() == place.read_bytes()
    assert victim.read_text() == "mine"


# Images -------------------------------------------------------------------------------------------------------------

GREY = np.arange(0, 256, dtype=np.uint8).reshape(16, 16)
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 32\n%%EndComments\nshowpage\n%%EOF\n"


def encoded(picture: Any, kind: str, **options: Any) -> bytes:
    """A picture as a file of a kind."""
    held = io.BytesIO()
    picture.save(held, kind, **options)
    return held.getvalue()


def read(data: bytes) -> Any:
    """The pixels (H, W, 3) that everybody gets."""
    return Prepare()(data, "image").permute(1, 2, 0).numpy()


def by_data_set(path: Path) -> Any:
    return image_folder(path.parents[1])[0].permute(1, 2, 0).numpy()


def by_predict(path: Path) -> Any:
    pixels, _, bad = predict._read_batch([path], Prepare(), path.parent)
    if pixels is None:
        raise Unreadable(bad[0].error)
    return pixels[0].permute(1, 2, 0).numpy()


def by_corrupt(path: Path) -> Any:
    """What `poem corrupt` reads, as handed to the corruption."""
    seen: list[Any] = []

    def kept(pixels: Any, *_: Any, **__: Any) -> Any:
        seen.append(pixels[0].permute(1, 2, 0).numpy())
        return pixels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_folder, "corrupt", kept)
        job = _folder.Job(path, path.name, (("fog", 5),), 0)
        outcome = _folder.corrupt_image(job, path.parents[1] / "out", _folder.Settings())
    if not seen:
        raise Unreadable(f"{outcome.name}: {outcome.unreadable}")
    return seen[0]


WAYS = {"data set": by_data_set, "predict": by_predict, "corrupt": by_corrupt}


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[bytes, str], Any]:
    """Reads bytes as the file of a class folder, by each of the commands' own ways."""

    def reads(data: bytes, name: str = "0.png") -> Any:
        path = tmp_path / "in" / "class" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return WAYS[request.param](path)

    return reads


def test_postscript_under_an_image_s_name_starts_no_program(
    way: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import EpsImagePlugin

    started: list[bool] = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *_, **__: started.append(True))
    with pytest.raises(Unreadable, match=r"0\.jpg: .*JPEG, PNG, BMP, WEBP, PPM, TIFF, GIF"):
        way(POSTSCRIPT, "0.jpg")
    assert not started


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "BMP", "WEBP", "PPM", "TIFF", "GIF"])
def test_formats_are_known_by_content_not_by_name(kind: str) -> None:
    picture = Image.fromarray(GREY)
    options = {"lossless": True} if kind == "WEBP" else {"quality": 100} if kind == "JPEG" else {}
    assert abs(read(encoded(picture, kind, **options)).astype(int) - GREY[..., None]).max() <= 2


@pytest.mark.parametrize("kind", ["ICO", "PCX", "TGA", "SGI", "IM", "JPEG2000", "DDS"])
def test_other_formats_are_refused(kind: str) -> None:
    picture = Image.fromarray(np.stack([GREY] * 3, 2))
    try:
        data = encoded(picture, kind)
    except (OSError, KeyError):
        pytest.skip("Pillow was built without it")
    with pytest.raises(Unreadable, match="none of the formats"):
        read(data)


SIXTEEN = {
    "PNG": lambda: encoded(Image.fromarray(GREY.astype(np.uint16) * 257), "PNG"),
    "TIFF": lambda: encoded(Image.fromarray(GREY.astype(np.uint16) * 257), "TIFF"),
    "TIFF, high byte first": lambda: tiff(GREY.astype(">u2") * 257, order=">"),
    "TIFF, white is zero": lambda: tiff(65535 - GREY.astype("<u2") * 257, photometric=0),
    "TIFF of 12 bits": lambda: tiff(GREY.astype("<u2"), bits=12),
    "PGM": lambda: encoded(Image.fromarray(GREY.astype(np.uint16) * 257), "PPM"),
    "PGM of 10 bits": lambda: b"P5 16 16 1023\n" + np.rint(GREY / 255 * 1023).astype(">u2").tobytes(),
}


def tiff(values: Any, *, order: str = "<", photometric: int = 1, bits: int = 16) -> bytes:
    """A grey TIFF of one strip; values of 12 bits are packed two to three bytes, scaled from 8."""
    if bits == 12:
        wide = np.rint(values.astype(float) / 255 * 4095).astype(int).reshape(-1, 2)
        packed = np.stack([wide[:, 0] >> 4, (wide[:, 0] & 15) << 4 | wide[:, 1] >> 8, wide[:, 1] & 255], 1)
        strip = packed.astype(np.uint8).tobytes()
    else:
        strip = values.tobytes()
    tags = {256: 16, 257: 16, 258: bits, 259: 1, 262: photometric, 273: 8, 277: 1, 278: 16, 279: len(strip)}
    head = (b"II" if order == "<" else b"MM") + struct.pack(f"{order}HI", 42, 8 + len(strip))
    entries = b"".join(struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in tags.items())
    return head + strip + struct.pack(f"{order}H", len(tags)) + entries + struct.pack(f"{order}I", 0)


@pytest.mark.parametrize("kind", SIXTEEN)
def test_sixteen_bits_are_scaled_not_clipped(kind: str) -> None:
    pixels = read(SIXTEEN[kind]())
    assert abs(pixels.astype(int) - GREY[..., None]).max() <= (0 if "10" not in kind and "12" not in kind else 1)


def test_data_sets_predict_and_corrupt_read_sixteen_bits_alike(way: Callable[..., Any]) -> None:
    assert (way(SIXTEEN["PNG"]()) == GREY[..., None]).all()


def test_floats_from_0_to_1_are_scaled() -> None:
    for kind in ("TIFF", "PPM"):
        assert (read(encoded(Image.fromarray((GREY / 255).astype(np.float32)), kind)) == GREY[..., None]).all()


@pytest.mark.parametrize(
    ("values", "says"),
    [
        (GREY.astype(np.float32), r"floating-point pixels from 0 to 255, expected 0 to 1"),
        (np.where(GREY == 7, np.nan, 0.5).astype(np.float32), r"floating-point pixels that are NaN or infinite"),
        (-GREY.astype(np.float32) / 255, r"floating-point pixels from -1 to 0"),
        (GREY.astype(np.int32) * 1000, r"32-bit integers.*; save it with 8 or 16 bits"),
    ],
)
def test_pixels_without_a_value_for_white_are_refused(way: Callable[..., Any], values: Any, says: str) -> None:
    with pytest.raises(Unreadable, match=rf"0\.tif: .*{says}"):
        way(encoded(Image.fromarray(values), "TIFF"), "0.tif")


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_is_applied_by_data_sets_predict_and_corrupt(way: Callable[..., Any], orientation: int) -> None:
    picture, exif = Image.fromarray(np.stack([GREY[:6]] * 3, 2)), Image.Exif()
    exif[0x0112] = orientation
    data = encoded(picture, "PNG", exif=exif)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
    assert (way(data) == expected).all()
    if orientation == 1:
        assert (way(data) == np.asarray(picture)).all()


def test_the_orientation_of_a_tiff_is_applied_once() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = Image.fromarray(np.stack([GREY[:6]] * 3, 2))
    assert (
        read(encoded(picture, "TIFF", exif=exif)) == np.asarray(picture.transpose(Image.Transpose.ROTATE_270))
    ).all()


def test_an_image_with_damaged_exif_is_read() -> None:
    picture = Image.fromarray(np.stack([GREY] * 3, 2))
    assert (read(encoded(picture, "PNG", exif=b"Exif\x00\x00MM\x00*\xff\xff\xff\xff")) == np.asarray(picture)).all()


def test_transparent_pixels_are_white() -> None:
    colours = np.stack([GREY, GREY[::-1], np.zeros_like(GREY), np.where(GREY < 128, 0, 255).astype(np.uint8)], 2)
    hidden = colours[..., 3] == 0
    for kind in ("PNG", "WEBP", "TIFF"):
        options = {"lossless": True, "exact": True} if kind == "WEBP" else {}
        pixels = read(encoded(Image.fromarray(colours), kind, **options))
        assert (pixels[hidden] == 255).all(), kind
        assert (pixels[~hidden] == colours[~hidden][:, :3]).all(), kind
    pixels = read(encoded(Image.fromarray(colours[..., [0, 3]]), "PNG"))
    assert (pixels[hidden] == 255).all()
    assert (pixels[~hidden] == colours[~hidden][:, :1]).all()
    palette = Image.fromarray(GREY // 64, "P")
    palette.putpalette([0, 0, 0, 200, 0, 0, 0, 200, 0, 0, 0, 200])
    pixels = read(encoded(palette, "PNG", transparency=0))
    assert (pixels[GREY < 64] == 255).all()
    assert (pixels[GREY // 64 == 1] == (200, 0, 0)).all()


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "CMYK", "RGBA", "LA", "YCbCr"])
def test_ordinary_images_have_the_pixels_that_pillow_s_rgb_has(mode: str) -> None:
    rng = np.random.default_rng(0)
    picture = Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)).convert(mode)
    for kind in {"RGB": ("JPEG", "PNG", "BMP"), "L": ("JPEG", "PNG"), "CMYK": ("JPEG", "TIFF"), "YCbCr": ("JPEG",)}.get(
        mode, ("PNG",)
    ):
        data = encoded(picture, kind)
        assert (read(data) == np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))).all(), kind


def test_too_many_pixels_are_refused_by_name(way: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.new("RGB", (40, 30)), "PNG")
    for limit in (1199, 100):  # Pillow itself warns above the limit, and raises above twice the limit
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
        with pytest.raises(Unreadable, match=rf"0\.png: .*more than {limit} pixels.*POEM_MAX_PIXELS"):
            way(data)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1200)
    assert way(data).shape == (30, 40, 3)


def test_the_limit_of_pixels_can_be_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encoded(Image.new("RGB", (40, 30)), "PNG")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    monkeypatch.setenv("POEM_MAX_PIXELS", "5000")
    assert read(data).shape == (30, 40, 3)
    monkeypatch.setenv("POEM_MAX_PIXELS", "many")
    with pytest.raises(ValueError, match="expected POEM_MAX_PIXELS as a number"):
        read(data)


def test_a_strip_of_an_image_is_not_blown_up() -> None:
    data = encoded(Image.new("L", (60_000, 2)), "PNG")
    with pytest.raises(Unreadable, match=r"strip: 60000x2 pixels would become 7680000x256, more than"):
        Prepare(resize=256, crop=224)(data, "strip")


@pytest.mark.parametrize("sizes", [{"resize": 100_000_000}, {"crop": 10_000}, {"resize": 0}, {"crop": -3}])
def test_sizes_that_no_model_has_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"expected sizes from 1 to 8192"):
        Prepare(**sizes)  # type: ignore[arg-type]


def test_names_of_any_bytes_are_shown_on_one_line() -> None:
    with pytest.raises(Unreadable) as told:
        Prepare()(b"", os.fsdecode(b"a\nb\x1b[31m\xff.jpg"))
    assert str(told.value).startswith(r"a\nb\x1b[31m\udcff.jpg: ")


# Folders ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def strange(tmp_path: Path) -> Path:
    """A class folder with one image, one link to it, and everything else that a folder may hold."""
    folder = tmp_path / "set" / "class"
    (folder / "deeper").mkdir(parents=True)
    Image.fromarray(GREY).save(folder / "0.png")
    (folder / "deeper" / "1.png").symlink_to(folder / "0.png")
    odd("FIFO", folder / "2.png", folder)
    odd("socket", folder / "3.png", folder)
    (folder / "4.png").symlink_to(folder / "4.png")
    (folder / "5.png").symlink_to(folder / "nowhere")
    (folder / "6.png").symlink_to(folder / "2.png")
    (folder / "deeper" / "up").symlink_to(folder)
    (folder / "deeper" / "top").symlink_to(tmp_path / "set")
    (folder.parent / "loop").symlink_to(folder.parent / "loop")
    (folder.parent / "again").symlink_to(folder.parent)
    (folder.parent / ".hidden").mkdir()
    os.mkfifo(folder.parent / ".hidden" / "7.png")
    return folder.parent


def test_entries_that_are_no_files_are_skipped_with_a_warning(strange: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = image_folder(strange)
    assert [Path(data.where(at)).name for at in range(len(data))] == ["0.png", "1.png"]
    assert data.classes == ("class",)
    assert all((data[at].numpy() == GREY).all() for at in range(2))
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"{strange}: 9 entries skipped" in said
    for words in ("2 FIFOs", "1 socket", "3 links that lead nowhere", "3 folders visited before"):
        assert words in said, said
    caplog.clear()
    assert [path.name for path in predict.find_images(strange)] == ["0.png", "1.png"]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "2 FIFOs" in said
    assert "3 linked folders" in said
    assert _folder.list_source(strange).images == ("class/0.png", "class/deeper/1.png")


def test_links_between_folders_are_followed_once(tmp_path: Path) -> None:
    inner = tmp_path / "set" / "class" / "deeper" / "inner"
    inner.mkdir(parents=True)
    (inner / "0.png").touch()
    (inner / "up").symlink_to(inner.parent)
    (inner.parent / "again").symlink_to(inner)
    assert len(list(walk(tmp_path / "set"))) == 1


def test_folders_of_any_depth_are_walked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    depth, limit = 300, sys.getrecursionlimit()  # made and removed step by step, as rmtree could not
    monkeypatch.chdir(tmp_path)
    for _ in range(depth):
        os.mkdir("d")
        os.chdir("d")
    Path("0.png").touch()
    try:
        sys.setrecursionlimit(len(inspect.stack()) + 100)  # less than the folders are deep
        found = list(walk(tmp_path))
    finally:
        sys.setrecursionlimit(limit)
        Path("0.png").unlink()
        for _ in range(depth):
            os.chdir("..")
            os.rmdir("d")
    assert [name.count("/") for name in found] == [depth]


def test_a_file_replaced_by_a_fifo_does_not_block(tmp_path: Path) -> None:
    path = tmp_path / "set" / "class" / "0.png"
    path.parent.mkdir(parents=True)
    Image.fromarray(GREY).save(path)
    data = image_folder(tmp_path / "set")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(Unreadable, match="expected a regular file, got a FIFO"):
        data[0]
    with pytest.raises(Unreadable, match="expected a regular file, got a FIFO"):
        by_predict(path)
    with pytest.raises(Unreadable, match="expected a regular file, got a FIFO"):
        by_corrupt(path)


def test_a_file_larger_than_any_image_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "set" / "class" / "0.png"
    path.parent.mkdir(parents=True)
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a hole: it takes no room
    with pytest.raises(Unreadable, match="expected at most"):
        by_data_set(path)


# Archives -----------------------------------------------------------------------------------------------------------


def swollen(path: Path, size: int = 3 << 20) -> Path:
    """A compressed tar whose one file is all zeros."""
    with tarfile.open(path, f"w:{path.suffix[1:]}") as tar:  # type: ignore[call-overload]
        member = tarfile.TarInfo("class/0.png")
        member.size = size
        tar.addfile(member, io.BytesIO(bytes(size)))
    return path


@pytest.mark.parametrize("kind", ["xz", "gz", "bz2"])
def test_an_archive_that_unpacks_to_too_many_bytes_is_refused(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = swollen(tmp_path / f"set.tar.{kind}")
    monkeypatch.setenv("POEM_MAX_UNPACKED", "1M")
    with pytest.raises(ValueError, match=rf"set\.tar\.{kind} unpacks to more than 1\.0 MB.*POEM_MAX_UNPACKED"):
        image_folder(packed, cache=tmp_path / "cache")
    assert files(tmp_path / "cache") == []
    monkeypatch.setenv("POEM_MAX_UNPACKED", "1G")
    assert len(image_folder(packed, cache=tmp_path / "cache")) == 1
    monkeypatch.setenv("POEM_MAX_UNPACKED", "much")
    with pytest.raises(ValueError, match="expected POEM_MAX_UNPACKED as a number of bytes, such as 200G, got 'much'"):
        image_folder(packed, cache=tmp_path / "other")


def test_the_limit_of_an_archive_grows_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POEM_MAX_UNPACKED", raising=False)
    assert unpacked_limit(1000) == 1 << 30
    assert unpacked_limit(10**9) == 20 * 10**9


def test_a_packed_file_that_unpacks_to_too_many_bytes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cifar10.npz"
    np.savez_compressed(path, blobs=np.zeros(3 << 20, np.uint8), lengths=[1], splits=[1], names=[b"a"], labels=[0])
    monkeypatch.setenv("POEM_MAX_UNPACKED", "1M")
    with pytest.raises(ValueError, match=r"cifar10\.npz unpacks to 3\.\d MB, more than 1\.0 MB.*POEM_MAX_UNPACKED"):
        cifar(path, partial=True)


@pytest.mark.parametrize(
    "arrays",
    [
        {"lengths": [1], "splits": [1, 1, 1], "names": [b"a"], "labels": [0], "blobs": np.zeros(1, np.uint8)},
        {"lengths": ["x"], "splits": [1], "names": [b"a"], "labels": [0], "blobs": np.zeros(1, np.uint8)},
        {"lengths": [1], "splits": [1], "names": [7], "labels": [0], "blobs": np.zeros(1, np.uint8)},
        {"splits": [1]},
    ],
)
def test_a_packed_file_of_other_arrays_is_refused(tmp_path: Path, arrays: dict[str, Any]) -> None:
    np.savez(tmp_path / "cifar10.npz", **arrays)
    with pytest.raises(ValueError, match="expected packed images of CIFAR-10"):
        cifar(tmp_path / "cifar10.npz", partial=True)


@pytest.mark.parametrize("text", ["[NaN]", "[Infinity]", "[-Infinity]", "[1e999]", "[" * 100_000, "[1", "\x00"])
def test_json_with_nan_infinity_or_endless_nesting_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match=r"finite|deeply|Expecting"):
        read_json(tmp_path / "a.json")


# Results ------------------------------------------------------------------------------------------------------------


def edit(path: Path, change: Callable[[dict[str, Any]], Any], **layout: Any) -> None:
    """Change a result as somebody with an editor would."""
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values, **layout))


def better(values: dict[str, Any]) -> None:
    values["metrics"]["top1"] = 99.0


def test_an_edited_result_is_noticed(tmp_path: Path) -> None:
    store, mine = Store(tmp_path), cell()
    path = store.save(report(mine))
    assert len(json.loads(path.read_text())["checksum"]) == 64
    assert CellResult.load(path).intact is True
    assert CellResult.load(path) == report(mine), "equality is of results"
    edit(path, lambda values: None, sort_keys=True)
    assert CellResult.load(path).intact is True, "another layout is no edit"
    edit(path, better)
    (found,) = store.results()
    assert found.intact is False
    assert found.metrics["top1"] == 99.0
    assert "was edited after it was measured" in store.edited[path]
    assert path.name in store.edited[path]
    assert store.broken == {}
    assert found.cell_key == mine.key
    for change in (
        lambda values: values["timing"].update(total_s=0.1),
        lambda values: values["notes"].append("all is well"),
        lambda values: values.update(checksum="0" * 64),
        lambda values: values.update(checksum=7),
    ):
        report(mine).save(path)
        edit(path, change)
        assert CellResult.load(path).intact is False


def test_a_result_without_a_checksum_is_of_an_older_version(tmp_path: Path) -> None:
    store = Store(tmp_path)
    path = store.save(report(cell()))
    edit(path, lambda values: values.pop("checksum"))
    (found,) = store.results()
    assert found.intact is None
    assert found == report(cell())
    assert store.unchecked == {path}
    assert store.edited == {}
    assert store.finished(cell()) is not None, "it counts"


def test_an_edited_result_gets_no_new_checksum(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    report(cell()).save(path)
    edit(path, better)
    CellResult.load(path).save(tmp_path / "b.json")
    assert CellResult.load(tmp_path / "b.json").intact is None


def test_pages_and_comparisons_mark_edited_results(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from poem.bench.suites import load

    suite = load("demo", "tiny", limit=8)
    stores = Store(tmp_path / "a"), Store(tmp_path / "b")
    for store in stores:
        paths = [store.save(report(each)) for each in suite.cells]
    edit(paths[0], better)
    edit(paths[1], lambda values: values.pop("checksum"))
    words = ["report", str(tmp_path / "b"), "--suites", "demo", "--limit", "8"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert f"{paths[0]} was edited after it was measured" in said
    assert "1 result has no checksum, as of an older version" in said
    label = suite.cells[0].label
    for page in ("report.md", "report.html"):
        text = (tmp_path / "b" / page).read_text().replace("\\", "")
        assert f"1 result was edited after it was measured: {label}" in text
        assert f"{len(paths) - 2} match, 1 does not, 1 has none" in text
    assert main(["report", str(tmp_path / "a"), "--suites", "demo", "--limit", "8"]) == 0
    assert "edited" not in capsys.readouterr().out
    assert "edited" not in (tmp_path / "a" / "report.md").read_text()
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    said = capsys.readouterr().out
    assert f"edited: {paths[0]} was edited" in said
    assert "1 result has no checksum" in said
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert len(found["edited"]) == 1
    assert found["unchecked"] == 1
