"""`poem data get` against a local server: dropped connections, wrong checksums, no Range, no network."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import io
import json
import os
import shutil
import tarfile
import threading
import types
import zipfile
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from poem.cli import main as cli
from poem.streams.datasets import download, sources
from poem.streams.datasets.sources import SOURCES, Archive, archives
from poem.streams.shift import CORRUPTIONS, EXTRA

NOISE = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8).tobytes()


class Server(ThreadingHTTPServer):
    """Serves files from memory; `drops` connections break off halfway."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.drops = 0
        self.ranges = True
        self.status = 200
        self.asked: list[str | None] = []

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        held, wanted = self.server, self.headers.get("Range")
        held.asked.append(wanted)
        data = held.files.get(self.path.lstrip("/"))
        if data is None or held.status != 200:
            self.send_error(404 if data is None else held.status)
            return
        start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and held.ranges else 0
        if start >= len(data):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(data)}")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        rest = data[start:]
        if held.drops:
            held.drops -= 1
            self.wfile.write(rest[: len(rest) // 2])
            self.wfile.flush()
            self.connection.shutdown(2)
            return
        self.wfile.write(rest)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(download, "PAUSE", 0.0)
    found = Server()
    thread = threading.Thread(target=found.serve_forever, daemon=True)
    thread.start()
    yield found
    found.shutdown()
    found.server_close()
    thread.join()


def tar_of(files: dict[str, bytes], mode: Any = "w", *, edit: Callable[[tarfile.TarFile], None] | None = None) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=mode) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
        if edit is not None:
            edit(tar)
    return out.getvalue()


def zip_of(files: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as held:
        for name, data in files.items():
            held.writestr(name, data)
    return out.getvalue()


def serve(
    server: Server, monkeypatch: pytest.MonkeyPatch, name: str, data: bytes, at: int = 0, **changes: Any
) -> Archive:
    """Let the server have `data` as one archive of a data set, with its size and checksum."""
    found = list(SOURCES[name])
    known = found[at]
    checksum = f"md5:{hashlib.md5(data).hexdigest()}" if known.checksum else ""
    address = f"{server.address}/{known.file}"
    found[at] = dataclasses.replace(known, **{"address": address, "size": len(data), "checksum": checksum, **changes})
    monkeypatch.setitem(sources.SOURCES, name, tuple(found))
    server.files[known.file] = data
    return found[at]


CIFAR_C = {
    "CIFAR-10-C/labels.npy": b"labels", "CIFAR-10-C/fog.npy": NOISE, "CIFAR-10-C/README.txt": b"left out",
}  # fmt: skip


def below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_a_connection_that_drops_twice_is_taken_up_where_it_broke_off(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(server, monkeypatch, "cifar10-c", data := tar_of(CIFAR_C))
    server.drops = 2
    assert cli.main(["data", "get", "cifar10-c", "--root", str(tmp_path)]) == 0
    assert server.asked == [None, f"bytes={len(data) // 2}-", f"bytes={len(data) // 2 + (len(data) + 1) // 2 // 2}-"]
    assert below(tmp_path) == {"CIFAR-10-C/labels.npy", "CIFAR-10-C/fog.npy"}, "no archive, part or README stays"
    assert (tmp_path / "CIFAR-10-C" / "fog.npy").read_bytes() == NOISE
    assert f"next: poem data check cifar10-c --root {tmp_path}" in capsys.readouterr().out


def test_a_killed_download_is_resumed_by_the_next_command(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = serve(server, monkeypatch, "cifar10-c", data := tar_of(CIFAR_C))
    (tmp_path / f"{archive.file}.part").write_bytes(data[:1000])
    assert download.get_archive(archive, tmp_path) == [tmp_path / "CIFAR-10-C"]
    assert server.asked == ["bytes=1000-"]


def test_a_part_with_every_byte_is_not_downloaded_again(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = serve(server, monkeypatch, "cifar10-c", data := tar_of(CIFAR_C))
    (tmp_path / f"{archive.file}.part").write_bytes(data)
    assert download.get_archive(archive, tmp_path) == [tmp_path / "CIFAR-10-C"]
    assert server.asked == [f"bytes={len(data)}-"]


def test_a_server_without_range_sends_the_file_from_its_start(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = serve(server, monkeypatch, "cifar10-c", tar_of(CIFAR_C))
    server.ranges, server.drops = False, 2
    download.get_archive(archive, tmp_path)
    assert len(server.asked) == 3
    assert (tmp_path / "CIFAR-10-C" / "fog.npy").read_bytes() == NOISE


def test_a_server_that_always_drops_ends_in_an_error_and_the_part_stays(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = serve(server, monkeypatch, "cifar10-c", data := tar_of(CIFAR_C))
    server.ranges, server.drops = False, 100
    with pytest.raises(download.UnreachableError, match=r"tried 6 times without a new byte.*same command goes on"):
        download.get_archive(archive, tmp_path)
    assert below(tmp_path) == {"CIFAR-10-C.tar.part"}
    assert (tmp_path / "CIFAR-10-C.tar.part").stat().st_size == len(data) // 2


def test_another_checksum_unpacks_nothing_and_leaves_nothing(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(server, monkeypatch, "cifar10-c", tar_of(CIFAR_C), checksum=f"md5:{'0' * 32}")
    assert cli.main(["data", "get", "cifar10-c", "--root", str(tmp_path)]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert f"expected md5:{'0' * 32} (stated by Zenodo) of CIFAR-10-C.tar, got md5:" in error
    assert "it was removed: type the same command" in error
    assert not list(tmp_path.iterdir())


def test_another_size_than_the_published_one_is_not_downloaded(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = serve(server, monkeypatch, "cifar10-c", tar_of(CIFAR_C), size=7)
    with pytest.raises(ValueError, match=r"expected 7 bytes at .*the server offers \d+; it is another file"):
        download.get_archive(archive, tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_missing_file_on_the_server_is_one_error(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    serve(server, monkeypatch, "cifar10-c", tar_of(CIFAR_C))
    server.files.clear()
    assert cli.main(["data", "get", "cifar10-c", "--root", str(tmp_path)]) == 2
    assert "answered 404 Not Found; see whether the publisher has moved it" in capsys.readouterr().err
    assert len(server.asked) == 1
    assert not list(tmp_path.iterdir())


def test_a_busy_server_is_asked_again(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = serve(server, monkeypatch, "cifar10-c", tar_of(CIFAR_C))
    server.status = 503
    with pytest.raises(download.UnreachableError, match="503"):
        download.get_archive(archive, tmp_path)
    assert len(server.asked) == download.FIRST_ATTEMPTS


def test_imagenet_c_is_got_by_corruption(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"weather/{name}/5/n01440764/a.JPEG": name.encode() for name in ("snow", "frost", "fog", "brightness")}
    serve(server, monkeypatch, "imagenet-c", tar_of(files), at=2)
    words = ["data", "get", "imagenet-c", "--root", str(tmp_path), "--corruption"]
    assert cli.main([*words, "fog"]) == 0
    assert below(tmp_path) == {"ImageNet-C/fog/5/n01440764/a.JPEG"}
    kept = (tmp_path / "ImageNet-C/fog/5/n01440764/a.JPEG").stat().st_mtime_ns
    assert cli.main([*words, "snow", "fog"]) == 0
    assert below(tmp_path) == {f"ImageNet-C/{name}/5/n01440764/a.JPEG" for name in ("fog", "snow")}
    assert (tmp_path / "ImageNet-C/fog/5/n01440764/a.JPEG").stat().st_mtime_ns == kept, "what was there is left alone"
    asked = len(server.asked)
    assert cli.main([*words, "snow", "fog"]) == 0
    assert len(server.asked) == asked, "nothing is downloaded twice"


def test_zips_and_compressed_tars_are_unpacked_to_what_check_looks_for(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    sketch = serve(server, monkeypatch, "imagenet-sketch", zip_of({"sketch/n01440764/a.JPEG": b"a", "x.txt": b"b"}))
    assert not sketch.checksum, "its publisher states none"
    v2 = tar_of({"imagenetv2-matched-frequency-format-val/7/a.jpeg": b"a"}, "w:gz")
    serve(server, monkeypatch, "imagenet-v2", v2)
    clean = tar_of({"cifar-10-batches-bin/test_batch.bin": b"a", "cifar-10-batches-bin/readme.html": b"b"}, "w:gz")
    serve(server, monkeypatch, "cifar10", clean)
    for name in ("imagenet-sketch", "imagenet-v2", "cifar10"):
        assert cli.main(["data", "get", name, "--root", str(tmp_path)]) == 0
    assert below(tmp_path) == {
        "sketch/n01440764/a.JPEG",
        "imagenetv2-matched-frequency-format-val/7/a.jpeg",
        "cifar-10-batches-bin/test_batch.bin",
    }


def test_what_was_got_is_complete_for_check(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    image = io.BytesIO()
    pytest.importorskip("PIL.Image").new("RGB", (4, 4)).save(image, "JPEG")
    numbers = {f"v2/{label}/{at}.jpeg": image.getvalue() for label in range(1000) for at in range(10)}
    serve(server, monkeypatch, "imagenet-v2", tar_of(numbers, "w:gz"))
    assert cli.main(["data", "get", "imagenet-v2", "--root", str(tmp_path)]) == 0
    capsys.readouterr()
    assert cli.main(["data", "check", "imagenet-v2", "--root", str(tmp_path)]) == 0


@pytest.mark.parametrize("name", ["../n01440764/a.JPEG", "/n01440764/a.JPEG", "imagenet-a/../../n01440764/a.JPEG"])
def test_paths_outside_the_folder_are_refused(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    archive = serve(server, monkeypatch, "imagenet-a", tar_of({"imagenet-a/n01440764/b.JPEG": b"b", name: b"a"}))
    with pytest.raises(ValueError, match="a path outside its folder; nothing was unpacked"):
        download.get_archive(archive, tmp_path / "root")
    assert below(tmp_path) == {"root/imagenet-a.tar"}, "the verified archive stays, nothing else does"


def test_links_in_an_archive_are_left_out(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def link(tar: tarfile.TarFile) -> None:
        info = tarfile.TarInfo("imagenet-a/n01440764/link.JPEG")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(info)

    archive = serve(server, monkeypatch, "imagenet-a", tar_of({"imagenet-a/n01440764/b.JPEG": b"b"}, edit=link))
    download.get_archive(archive, tmp_path)
    assert below(tmp_path) == {"imagenet-a/n01440764/b.JPEG"}


def test_a_file_copied_by_hand_is_verified_and_unpacked_without_a_network(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = serve(server, monkeypatch, "cifar10-c", data := tar_of(CIFAR_C))
    (tmp_path / archive.file).write_bytes(data[:-1])
    with pytest.raises(download.ChecksumError, match=r"remove .*CIFAR-10-C\.tar, or replace it"):
        download.get_archive(archive, tmp_path)
    assert below(tmp_path) == {"CIFAR-10-C.tar"}, "a file of the user's is not removed"
    (tmp_path / archive.file).write_bytes(data)
    assert download.get_archive(archive, tmp_path, keep=True) == [tmp_path / "CIFAR-10-C"]
    assert (tmp_path / archive.file).is_file(), "--keep"
    assert not server.asked


def test_a_damaged_archive_without_a_checksum_leaves_no_data(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytearray(zip_of({"sketch/n01440764/a.JPEG": NOISE}))
    data[1000:1010] = bytes(10)
    archive = serve(server, monkeypatch, "imagenet-sketch", bytes(data))
    with pytest.raises(ValueError, match=r"ImageNet-Sketch\.zip is damaged .*remove it"):
        download.get_archive(archive, tmp_path)
    assert below(tmp_path) == {"ImageNet-Sketch.zip"}


def test_another_archive_of_that_name_is_told(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = serve(server, monkeypatch, "imagenet-a", tar_of({"other/file.txt": b"a"}))
    with pytest.raises(ValueError, match=r"expected files like .* found none; is it another file of that name"):
        download.get_archive(archive, tmp_path)


def test_a_half_unpacked_folder_is_begun_anew(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = serve(server, monkeypatch, "cifar10-c", tar_of(CIFAR_C))
    stale = tmp_path / ".CIFAR-10-C.tar.unpacking"
    stale.mkdir()
    (stale / "fog.npy").write_bytes(b"half")
    download.get_archive(archive, tmp_path)
    assert (tmp_path / "CIFAR-10-C" / "fog.npy").read_bytes() == NOISE
    assert not stale.exists()


def test_two_downloads_of_one_file_do_not_mix(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")
    archive = serve(server, monkeypatch, "cifar10-c", tar_of(CIFAR_C))
    with (tmp_path / f".{archive.file}.lock").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(OSError, match=r"another process downloads or unpacks .*CIFAR-10-C\.tar; wait for it"):
            download.get_archive(archive, tmp_path)
    assert not server.asked


@pytest.mark.parametrize("at", ["verify CIFAR-10-C.tar", "unpack CIFAR-10-C.tar"])
def test_a_second_run_while_the_first_verifies_or_unpacks_is_refused(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    pytest.importorskip("fcntl")
    archive = serve(server, monkeypatch, "cifar10-c", tar_of(CIFAR_C))
    refused: list[str] = []

    def second(what: str, done: int, total: int) -> None:
        if what == at and not refused:
            with pytest.raises(OSError, match="another process downloads or unpacks") as error:
                download.get_archive(archive, tmp_path)
            refused.append(str(error.value))

    assert download.get_archive(archive, tmp_path, on_progress=second) == [tmp_path / "CIFAR-10-C"]
    assert len(refused) == 1
    assert below(tmp_path) == {"CIFAR-10-C/labels.npy", "CIFAR-10-C/fog.npy"}


def test_without_locks_two_runs_unpack_apart_and_the_data_is_whole(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fcntl = pytest.importorskip("fcntl")

    def no_locks(*arguments: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    archive = serve(server, monkeypatch, "cifar10-c", tar_of(CIFAR_C))
    nested: list[Path] = []

    def second(what: str, done: int, total: int) -> None:
        if what.startswith("unpack") and not nested:
            nested.extend([tmp_path])
            nested.extend(download.get_archive(archive, tmp_path, keep=True))

    download.get_archive(archive, tmp_path, on_progress=second)
    assert nested[1:] == [tmp_path / "CIFAR-10-C"]
    assert below(tmp_path) == {"CIFAR-10-C/labels.npy", "CIFAR-10-C/fog.npy"}
    assert "cannot be locked ([Errno" in caplog.text


def test_a_folder_that_loses_a_file_while_it_is_unpacked_does_not_appear(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = serve(server, monkeypatch, "cifar10-c", tar_of(CIFAR_C))

    def lose(what: str, done: int, total: int) -> None:
        if what.startswith("unpack"):
            for file in tmp_path.glob(".*unpacking*/**/labels.npy"):
                file.unlink()

    with pytest.raises(OSError, match=r"expected 2 files of .*CIFAR-10-C.tar in .*found 1: another process changes"):
        download.get_archive(archive, tmp_path, on_progress=lose)
    assert not (tmp_path / "CIFAR-10-C").exists()


def test_a_full_disk_is_told_before_the_first_byte(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=5))
    with pytest.raises(OSError, match=r"expected about 45\.1 GB free in .*noise\.tar.*got 0\.0 MB; make room"):
        download.get_archive(archives("imagenet-c", ["shot_noise"])[0], tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_a_network_addresses_and_names_are_printed(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    archive = serve(server, monkeypatch, "cifar10-c", tar_of(CIFAR_C))
    monkeypatch.setitem(
        sources.SOURCES, "cifar10-c", (dataclasses.replace(archive, address="https://no.such.host.invalid/a.tar"),)
    )
    assert cli.main(["data", "get", "cifar10-c", "--root", str(tmp_path / "new")]) == 2
    said = capsys.readouterr()
    assert "no connection to" in said.err
    assert "Traceback" not in said.err
    assert "from      https://no.such.host.invalid/a.tar" in said.out
    assert f"becomes   {tmp_path / 'new' / 'CIFAR-10-C'}" in said.out
    assert "the same command then unpacks them" in said.out


def test_the_list_needs_no_network_and_names_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["data", "get", "--list"]) == 0
    text = capsys.readouterr().out
    for found in SOURCES.values():
        for archive in found:
            assert archive.address in text or archive.file == "extra.tar"
    assert "imagenet-c: 4 files, 50.2 GB" in text
    assert "no checksum is published" in text
    assert cli.main(["data", "get", "imagenet-c", "--list", "--json", "--corruption", "fog", "spatter"]) == 0
    listed = json.loads(capsys.readouterr().out)["imagenet-c"]
    assert [(each["file"], each["targets"]) for each in listed] == [
        ("weather.tar", [os.path.join("ROOT", "ImageNet-C", "fog")]),
        ("extra.tar", [os.path.join("ROOT", "ImageNet-C", "spatter")]),
    ]


def test_a_mirror_has_the_same_files_and_checksums(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tar_of(CIFAR_C)
    serve(server, monkeypatch, "cifar10-c", data, address="https://no.such.host.invalid/a.tar")
    assert cli.main(["data", "get", "cifar10-c", "--root", str(tmp_path), "--mirror", f"{server.address}/"]) == 0
    assert cli.main(["data", "get", "cifar100-c", "--root", str(tmp_path), "--mirror", "file:///tmp"]) == 2
    assert "expected a mirror as http://" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["get", "imagenet-val"], "needs a login"),
        (["get", "cifar10c"], "cifar10-c"),
        (["get"], "expected the name of a data set: cifar10-c"),
        (["get", "imagenet-c", "--corruption", "fogg"], "unknown corruption 'fogg'; did you mean 'fog'?"),
        (["get", "cifar10-c", "--corruption", "fog"], "is one archive"),
        (["get", "cifar10-c"], "no root given: pass --root DIR"),
        (["check"], "expected the name of a data set"),
        (["check", "cifar10-c", "--list"], "--list belongs to poem data get"),
    ],
)
def test_bad_input_is_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("POEM_DATA", raising=False)
    assert cli.main(["data", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.strip().splitlines()) == 1


def test_every_recorded_archive_is_well_formed() -> None:
    known = [archive for found in SOURCES.values() for archive in found]
    assert len({archive.file for archive in known}) == len(known)
    for archive in known:
        assert archive.address.startswith("https://")
        assert archive.file in archive.address
        assert bool(archive.checksum) == bool(archive.stated_by)
        kind, _, digest = archive.checksum.partition(":")
        assert len(digest) == {"": 0, "md5": 32, "sha256": 64}[kind]
    entries = [name for archive in SOURCES["imagenet-c"] for name in archive.entries]
    assert entries == [*CORRUPTIONS, *EXTRA]
