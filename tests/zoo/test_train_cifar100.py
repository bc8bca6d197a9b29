"""CIFAR-100's source networks: file formats that give the same data, training, and records that are compared."""

from __future__ import annotations

import argparse
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from poem import zoo
from poem.cli import train_source
from poem.cli.main import main
from poem.streams.datasets import open_dataset
from poem.zoo.train_data import cifar100
from poem.zoo.training_check import RecordCheck, accuracy_error, check_record

TRAIN, TEST = 200, 100


def small_set(split: str) -> tuple[Any, Any]:
    """Pixels (rows, 3072), the red plane first, and fine labels: every class as often as any other."""
    rows = {"train": TRAIN, "test": TEST}[split]
    rng = np.random.default_rng(rows)
    labels = np.arange(rows) % 100
    return rng.integers(0, 256, (rows, 3072)).astype(np.uint8), labels


def binary(root: Path) -> Path:
    """The binary version: a coarse label, a fine label, then the pixels, row after row."""
    folder = root / "cifar-100-binary"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        pixels, labels = small_set(split)
        heads = np.stack([labels // 5, labels], 1).astype(np.uint8)
        (folder / f"{split}.bin").write_bytes(np.concatenate([heads, pixels], 1).tobytes())
    return root


def python(root: Path) -> Path:
    """The python version, as torchvision downloads it."""
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        pixels, labels = small_set(split)
        held = {b"data": pixels, b"fine_labels": labels.tolist(), b"coarse_labels": (labels // 5).tolist()}
        (folder / split).write_bytes(pickle.dumps(held, protocol=2))
    return root


def folders(root: Path) -> Path:
    """Class folders of PNGs, which lose nothing."""
    image = pytest.importorskip("PIL.Image")
    for split in ("train", "test"):
        pixels, labels = small_set(split)
        for row, label in enumerate(labels.tolist()):
            folder = root / "cifar100" / split / f"class{label:02d}"
            folder.mkdir(parents=True, exist_ok=True)
            image.fromarray(pixels[row].reshape(3, 32, 32).transpose(1, 2, 0)).save(folder / f"{row:03d}.png")
    return root


@pytest.mark.parametrize(("make", "said"), [(binary, "binary"), (python, "python"), (folders, "JPEG")])
def test_every_format_gives_the_same_images(tmp_path: Path, make: Any, said: str) -> None:
    task = cifar100(make(tmp_path), partial=True)
    for split, part in (("train", task.train), ("test", task.test)):
        pixels, labels = small_set(split)
        order = np.argsort(labels, kind="stable") if make is folders else np.arange(len(labels))
        assert part.labels.tolist() == labels[order].tolist()
        assert torch.equal(part.images, torch.from_numpy(pixels[order].reshape(-1, 3, 32, 32)))
    assert task.about["data"] == f"CIFAR-100 ({said})"
    assert task.mean == pytest.approx((0.5071, 0.4865, 0.4409))


@pytest.mark.parametrize("make", [binary, python])
def test_a_small_copy_is_refused_unless_it_is_asked_for(tmp_path: Path, make: Any) -> None:
    root = make(tmp_path)
    with pytest.raises(ValueError, match=r"expected 10000 (rows|images)"):
        open_dataset("cifar100", root)
    data = open_dataset("cifar100", root, partial=True)
    assert len(data) == TEST
    assert data.describe()["subset"] == f"{TEST} of 10000 (test)"


def test_a_binary_file_that_is_cut_inside_a_row_is_refused(tmp_path: Path) -> None:
    file = binary(tmp_path) / "cifar-100-binary" / "test.bin"
    file.write_bytes(file.read_bytes()[:-5])
    with pytest.raises(ValueError, match=rf"expected {TEST - 1} rows of 3074 bytes"):
        open_dataset("cifar100", tmp_path, partial=True)
    file.write_bytes(b"")
    with pytest.raises(ValueError, match=r"expected 1 rows of 3074 bytes .*got 0 bytes"):
        open_dataset("cifar100", tmp_path, partial=True)


def test_an_empty_python_batch_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    (folder / "test").write_bytes(pickle.dumps({b"data": np.zeros((0, 3072), np.uint8), b"fine_labels": []}))
    with pytest.raises(ValueError, match="expected some images of 3072 bytes"):
        open_dataset("cifar100", tmp_path, partial=True)


def test_the_command_trains_and_the_network_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Train, load, measure on CIFAR-100 with EATA's source images; a second training is compared with the first."""
    root, out = binary(tmp_path / "data"), tmp_path / "weights"
    words = ["train-source", "cifar100", "--root", str(root), "--nets", "cifar100-bn", "--epochs", "1", "--partial"]
    words += ["--device", "cpu", "--out", str(out)]
    assert main(words) == 0
    assert "no record of cifar100-bn to compare with" in capsys.readouterr().out
    record = json.loads((out / "cifar100.json").read_text())["cifar100-bn"]
    assert record["bytes"] < 1_000_000
    assert record["standard_error"] == pytest.approx(accuracy_error(record["accuracy"], TEST), abs=0.005)
    model, base = zoo.load("cifar100-bn", weights=out)
    assert base.classes == 100
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 100)
    assert main(words) == 0
    assert "+0.00 points to the record's" in (said := capsys.readouterr().out)
    assert "agrees with the record" in said
    (out / "cifar100.json").write_text(json.dumps({"cifar100-bn": {**record, "accuracy": 90.0}}))
    assert main(words) == 1
    assert "BELOW the record" in capsys.readouterr().out
    run = ["run", "--base", "cifar100-bn", "--data", "cifar100", "--method", "eata", "--corruption", "fog", "--preset"]
    run += ["cifar100", "--root", str(root), "--weights", str(out), "--set", "dataset.partial=true"]
    assert main([*run, "--set", "source_images=50", "--n", "64"]) == 0


def test_without_weights_the_error_says_how_to_train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("POEM_DATA", raising=False)
    with pytest.raises(
        FileNotFoundError, match="poem train-source cifar100 --nets cifar100-gn --root ROOT --out FOLDER"
    ):
        zoo.load("cifar100-gn")


def made(**values: Any) -> dict[str, Any]:
    task = {"data": "CIFAR-10 (binary)", "train": 50_000, "test": 10_000, "pixels_sha256": "ab" * 32}
    return {"accuracy": 93.0, "test_images": 10_000, "epochs": 100, "task": task, **values}


@pytest.mark.parametrize(
    ("reached", "passed", "said"),
    [
        (92.9, True, "agrees"), (92.3, True, "agrees"), (92.2, False, "BELOW"), (50.0, False, "BELOW"),
        (93.9, True, "above"), (93.0, True, "+0.00 points"),
    ],
)  # fmt: skip
def test_a_record_allows_two_standard_errors_of_the_difference(reached: float, passed: bool, said: str) -> None:
    """Two accuracies near 93 % of 10,000 images: 0.26 each, 0.36 for their difference."""
    found = check_record(made(accuracy=reached), made())
    assert isinstance(found, RecordCheck)
    assert found.passed is passed
    assert said in str(found)
    if reached > 92:
        assert found.error == pytest.approx(0.36, abs=0.02)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"epochs": 3}, "3 epochs instead of 100"),
        ({"task": {**made()["task"], "pixels_sha256": "cd" * 32}}, "pixels_sha256 cdcdcdcdcdcd instead of abab"),
        ({"task": {**made()["task"], "train": 5}}, "train 5 instead of 50000"),
    ],
)
def test_other_data_or_fewer_epochs_are_shown_and_not_judged(values: dict[str, Any], said: str) -> None:
    found = check_record(made(accuracy=10.0, **values), made())
    assert found is not None
    assert found.passed
    assert "not judged" in str(found)
    assert said in str(found)


@pytest.mark.parametrize("before", [None, [], {}, {"accuracy": "high"}, made(test_images=0), made(accuracy=400)])
def test_what_is_no_record_is_not_compared(before: Any) -> None:
    assert check_record(made(), before) is None


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cifar100"], "no root given: .*holds CIFAR-100"),
        (["cifar10", "--nets", "cifar100-bn"], "expected --nets among cifar10-bn, cifar10-gn, cifar10-vit, got"),
        (["digits", "--seconds", "0"], "expected --seconds above 0"),
        (["digits", "--seconds", "inf"], "expected --seconds as a finite number"),
    ],
)
def test_bad_input_says_what_to_type(words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POEM_DATA", raising=False)
    parser = argparse.ArgumentParser()
    train_source.add_options(parser)
    with pytest.raises(ValueError, match=said):
        train_source.run(parser.parse_args(words))


def test_the_package_states_accuracy_size_and_floor() -> None:
    """The table in the zoo's page, from the records in the repository."""
    root = Path(__file__).resolve().parents[2]
    records = json.loads((root / "results/sources/cifar10.json").read_text())
    page = (root / "docs/zoo.md").read_text()
    for name, record in records.items():
        error = accuracy_error(record["accuracy"], record["test_images"])
        floor = f"{record['floor']:.0f} %" + ("" if record["floor_reached"] else ", not reached")
        assert (
            f"| `{name}` | {record['accuracy']:.2f} ± {error:.2f} % | {record['parameters'] / 1e6:.2f} million | "
            f"{record['bytes'] / 1e6:.2f} MB | {record['epochs']} | {floor} |"
        ) in page
        assert record["bytes"] < 1_000_000
        assert zoo.catalog.training_records("cifar10.json")[name]["sha256"] == record["sha256"]
