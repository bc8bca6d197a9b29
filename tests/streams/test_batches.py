"""Batches of any data set: order, workers, corruption on the fly, images that cannot be read, memory."""

from __future__ import annotations

import gc
import os
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trees import Image, grow, pack, picture, toy

from poem.streams.corruptions import corrupt
from poem.streams.datasets import (
    Unreadable,
    archive,
    batches,
    cifar_c,
    image_folder,
)
from poem.streams.orders import single


def test_batches_follow_the_order_and_keep_the_last() -> None:
    data, order = toy(), [3, 1, 4, 1, 5]
    found = batches(data, order, 2)
    assert len(found) == 3
    parts = list(found)
    assert [len(labels) for _, labels in parts] == [2, 2, 1]
    images = torch.cat([each for each, _ in parts])
    assert images.dtype == torch.float32
    assert torch.equal(images, data.images[order].float() / 255)
    assert torch.cat([labels for _, labels in parts]).tolist() == data.labels[order].tolist()
    assert list(batches(data, [], 4)) == []
    (segment,) = single(["fog"]).over(10)
    assert (
        torch.cat([labels for _, labels in batches(data, segment, 4)]).tolist() == data.labels[segment.indices].tolist()
    )


def test_workers_give_the_same_batches_and_do_not_touch_the_global_generator() -> None:
    data = toy()
    alone = [images for images, _ in batches(data, range(10), 4, corruption=("gaussian_noise", 3))]
    torch.manual_seed(3)
    before = torch.get_rng_state()
    shared = [images for images, _ in batches(data, range(10), 4, corruption=("gaussian_noise", 3), workers=1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert len(alone) == len(shared) == 3
    assert all(torch.equal(a, b) for a, b in zip(alone, shared, strict=True))


def test_corruption_on_the_fly_depends_on_the_image_not_on_the_batch() -> None:
    data = toy()
    whole = corrupt(data.images, "gaussian_noise", 5, seed=2, ids=list(range(10)))
    order = [7, 0, 3]
    for size in (1, 2, 3):
        made = torch.cat([images for images, _ in batches(data, order, size, corruption=("gaussian_noise", 5), seed=2)])
        assert torch.equal(made, whole[order].float() / 255)


def test_corrupted_data_is_not_corrupted_again(cifar_c_root: Path) -> None:
    data = cifar_c(cifar_c_root, "fog", 5)
    ((images, _),) = batches(data, [0], corruption=("fog", 5))
    assert torch.equal(images, torch.full((1, 3, 32, 32), 5.0) / 255)
    with pytest.raises(ValueError, match="cifar10-c here is fog 5 already"):
        batches(data, [0], corruption=("snow", 5))


@pytest.mark.parametrize("workers", [0, 1])
def test_broken_images_are_named_and_counted(tmp_path: Path, workers: int, caplog: pytest.LogCaptureFixture) -> None:
    root = grow(tmp_path, ["a", "b", "c"], per_class=3, size=(32, 32))
    noise = Image.fromarray(np.random.RandomState(0).randint(0, 256, (32, 32, 3), dtype=np.uint8))
    noise.save(root / "b" / "cut.jpg", quality=95)
    (root / "b" / "cut.jpg").write_bytes((root / "b" / "cut.jpg").read_bytes()[:700])
    (root / "c" / "empty.png").write_bytes(b"")
    data = image_folder(root)
    assert len(data) == 11
    with pytest.raises(Unreadable, match=r"cut.jpg: 700 bytes that are no whole image.*on_error='report'"):
        list(batches(data, range(11), 4, workers=workers))
    found = batches(data, range(11), 4, on_error="report", workers=workers)
    labels = torch.cat([each for _, each in found])
    assert labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert len(found.failures) == 2
    assert "cut.jpg" in found.failures[0]
    assert "empty.png" in found.failures[1]
    assert "2 of 11 images could not be read" in caplog.text
    alone = batches(data, [6, 10], 1, on_error="report", workers=workers)
    assert list(alone) == []
    assert len(alone.failures) == 2


def test_a_file_removed_after_listing_is_named(tmp_path: Path) -> None:
    data = image_folder(grow(tmp_path, ["a", "b"]))
    next((tmp_path / "b").iterdir()).unlink()
    with pytest.raises(Unreadable, match=r"ILSVRC2012_val_00000001.JPEG: No such file"):
        data[1]


def test_bad_arguments_of_batches_are_errors(tmp_path: Path) -> None:
    data = toy()
    for order in ([10], [-1]):
        with pytest.raises(IndexError, match="expected indices from 0 to 9"):
            batches(data, order)
    with pytest.raises(ValueError, match="expected a list of indices"):
        batches(data, [0.5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="batch_size >= 1"):
        batches(data, [0], 0)
    with pytest.raises(ValueError, match="on_error 'raise' or 'report'"):
        batches(data, [0], on_error="ignore")  # type: ignore[arg-type]
    for severity in (0, 6):
        with pytest.raises(ValueError, match="expected severity 1 to 5"):
            batches(data, [0], corruption=("fog", severity))
    grow(tmp_path, ["a"], size=(8, 8))
    (tmp_path / "a" / "big.jpg").write_bytes(picture(1, (9, 8)))
    with pytest.raises(ValueError, match=r"one size in a batch, got 8x8, 9x8; pass prepare="):
        list(batches(image_folder(tmp_path), [0, 1]))


def test_every_data_set_can_be_pickled_for_a_worker(tmp_path: Path, cifar_c_root: Path) -> None:
    root = grow(tmp_path / "tree", ["a", "b"])
    kinds: list[Any] = [
        toy(), image_folder(root), archive(pack(tmp_path / "x.tar", root, ".")), cifar_c(cifar_c_root, "fog", 1),
    ]  # fmt: skip
    for data in kinds:
        packed = pickle.dumps(data)
        assert len(packed) < 300_000
        assert torch.equal(pickle.loads(packed)[1], data[1])


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def peak_over(data: Any, indices: Any) -> int:
    """Python's peak over one pass, in bytes, after a short warm-up."""
    for _ in batches(data, indices[:512], 256):
        pass
    gc.collect()
    tracemalloc.start()
    for _ in batches(data, indices, 256):
        pass
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_stays_flat_over_fifty_thousand_rows(cifar_c_root: Path) -> None:
    if not Path("/proc/self/status").exists():
        pytest.skip("reads /proc")
    whole = 50_000 * 3072
    parts = [cifar_c(cifar_c_root, "fog", severity) for severity in range(1, 6)]
    before, seen = anonymous(), 0
    for data in parts:
        for images, _ in batches(data, np.arange(len(data)), 256):
            seen += len(images)
    assert seen == 50_000
    assert anonymous() - before < whole / 5
    assert peak_over(parts[0], np.arange(2_000)) < 10_000_000


def test_memory_stays_flat_over_fifty_thousand_files(tmp_path: Path) -> None:
    source = tmp_path / "one.png"
    source.write_bytes(picture(7, (32, 32), "PNG"))
    for name in ("a", "b"):
        (tmp_path / "tree" / name).mkdir(parents=True)
        for at in range(25_000):
            os.link(source, tmp_path / "tree" / name / f"{at:05d}.png")
    gc.collect()
    tracemalloc.start()
    data = image_folder(tmp_path / "tree")
    gc.collect()
    kept = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(data) == 50_000
    assert kept < 60 * 50_000  # names, places and labels; pixels would be 3072 bytes each
    # Paths intern their names, and once in a while Python's table of these grows by megabytes: the lower of two passes.
    passes = [np.arange(0, 50_000, 50_000 // count) for count in (500, 2_500)]
    short, long = (min(peak_over(data, each) for _ in range(2)) for each in passes)
    assert long < short + 1_000_000
