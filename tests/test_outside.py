"""Methods, parts, bases and data sets of other packages: by path, by entry point, in this process and in others."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import packages
import pytest
import torch
from torch import Tensor

import poem
from poem import zoo
from poem._util import outside
from poem.bench.cell import Cell
from poem.bench.load_cell import Machine, load_model, weights_sha256
from poem.bench.measure import measure
from poem.bench.provenance import outside_versions
from poem.bench.requirements import check_requirements
from poem.bench.runners import Ray, Workers
from poem.bench.store import Store
from poem.bench.suites import load as load_suite
from poem.bench.sweep import sweep
from poem.cli.main import main
from poem.recipes.text import parse, read, written
from poem.streams.datasets import Stream, as_images, open_dataset
from poem.streams.orders import continual
from poem.zoo.predictions import Preprocessing

FIELDS: dict[str, Any] = {"corruptions": ("fog",), "batch_size": 8, "seed": 1}
CELL = Cell(base="tiny-net", data="few-digits", method="sure", **FIELDS)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder with the package, on the search path of this process."""
    folder = tmp_path_factory.mktemp("site")
    packages.install(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        yield folder
    for name in [each for each in sys.modules if each.split(".")[0] == "throwaway"]:
        del sys.modules[name]


pytestmark = pytest.mark.usefixtures("site")


# By name and by path --------------------------------------------------------------------------------------------------


def test_an_announced_name_and_its_path_are_the_same_method() -> None:
    assert poem.recipe("sure") == poem.recipe("throwaway:mine") == poem.recipe("sure-fixed")
    assert poem.recipe("sure", "cifar").lr == 0.02, "a function with a parameter preset is given it"
    assert poem.recipe("throwaway:fixed", "cifar").lr == 0.01, "a recipe is taken as it is"
    assert {"sure", "sure-fixed"} <= set(poem.methods())


def test_poem_is_added_to_a_method_of_another_package() -> None:
    host, added = poem.recipe("throwaway:mine"), poem.recipe("throwaway:mine+poem")
    assert added.select == host.select
    assert added.branch is not None
    assert poem.recipe("sure*").explore.updates == 2


def test_a_name_that_poem_has_stays_poem_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert poem.recipe("tent").select == poem.parts.Everyone()
    main(["list", "tent"])
    assert "another is throwaway:mine, from the package throwaway 1.2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "name", "path"),
    [
        ("methods", "sure", "throwaway:mine"),
        ("parts", "Surest", "throwaway:Surest"),
        ("bases", "tiny-net", "throwaway:base"),
        ("data", "few-digits", "throwaway:Digits"),
    ],
)
def test_poem_list_says_where_a_name_comes_from(
    kind: str, name: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["list", kind, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[name] == f"{path}, from the package throwaway 1.2"


def test_text_of_a_part_makes_it_again() -> None:
    recipe = poem.recipe("sure")
    assert written(recipe)["select"] == "throwaway:Surest(0.01)"
    assert read(written(recipe)) == recipe
    joined = parse("EntropyBelow(0.4) & throwaway:Surest(share=0.2)")
    assert repr(joined) == "EntropyBelow(0.4) & throwaway:Surest(0.2)"
    assert parse("Surest(0.2)") == parse("throwaway:Surest(0.2)") == joined.second
    assert parse("throwaway:HALF") == parse("throwaway:Surest") == parse("throwaway:Surest(0.5)")
    assert poem.recipe("tent").changed({"select": "throwaway:Surest(0.2)"}).select == joined.second


def test_words_in_quotes_are_no_paths() -> None:
    assert parse("'a:b'") == "a:b"


def test_text_of_somebody_else_imports_only_what_a_package_announces(tmp_path: Path) -> None:
    assert parse("throwaway:Surest(0.2)", trusted=False) == parse("Surest(0.2)")
    with pytest.raises(ValueError, match=r"'throwaway:HALF' would be imported"):
        parse("throwaway:HALF", trusted=False)
    Cell(base="digits-bn", data="digits-test", method="tent", changes={"select": "never_imported:Part(1)"})  # type: ignore[arg-type]


def test_adapt_takes_a_path_and_parts_as_text(site: Path) -> None:
    model, base = zoo.load("tiny-net")
    adapter = poem.adapt(model, "throwaway:mine", select="throwaway:Surest(0.02)", mean=base.mean, std=base.std)
    adapter(torch.rand(8, 3, 16, 16))
    assert adapter.totals.updates == 1
    assert adapter.recipe.select == parse("Surest(0.02)")


# Bases ----------------------------------------------------------------------------------------------------------------


def test_a_factory_states_weights_and_normalisation(site: Path) -> None:
    model, base = zoo.load("throwaway:base")
    held = torch.load(site / "throwaway" / "net.pth", weights_only=True)
    assert all(torch.equal(held[key], value) for key, value in model.state_dict().items())
    assert (base.kind, base.crop, base.classes, base.mean) == ("outside", 16, 10, (0.1,) * 3)
    assert not model.training


def test_a_plain_function_has_its_own_weights_which_are_in_the_key() -> None:
    base = zoo.base("throwaway:net")
    assert (base.crop, base.file, base.classes) == (0, "", 10)
    first, second = (zoo.load("throwaway:net")[0].state_dict() for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first), "drawn alike each time"
    cell = replace(CELL, base="throwaway:net")
    assert weights_sha256(cell, Machine()) == load_model(cell, Machine()).sha256
    assert weights_sha256(cell, Machine()) != weights_sha256(CELL, Machine())


def test_weights_of_a_plain_function_come_from_a_file(site: Path) -> None:
    file = str(site / "throwaway" / "net.pth")
    held = torch.load(file, weights_only=True)
    model, _ = zoo.load("throwaway:net", file)
    assert all(torch.equal(held[key], value) for key, value in model.state_dict().items())
    cell = replace(CELL, base="throwaway:net")
    assert load_model(cell, Machine(weights=file)).sha256 == zoo.sha256(Path(file))
    with pytest.raises(FileNotFoundError, match=r"expected a file with the weights of throwaway:net"):
        zoo.load("throwaway:net", str(site / "none.pth"))


def test_missing_weights_of_a_factory_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import throwaway  # type: ignore[import-not-found]

    monkeypatch.setattr(throwaway, "lost", zoo.Factory(throwaway.net, weights=tmp_path / "lost.pth"), raising=False)
    with pytest.raises(FileNotFoundError, match=r"no weights for throwaway:lost.*--weights FOLDER"):
        zoo.load("throwaway:lost")


def test_hub_ids_are_bases_with_their_library_s_preprocessing() -> None:
    pytest.importorskip("timm")
    pytest.importorskip("torchvision")
    base = zoo.base("timm:test_resnet")
    assert (base.arch, base.crop, base.mean, base.classes) == ("test_resnet.r160_in1k", 160, (0.5,) * 3, 1000)
    model, _ = zoo.load("timm:test_resnet", "random")
    assert model(torch.rand(1, 3, 160, 160)).shape == (1, 1000)
    base = zoo.base("torchvision:resnet18.IMAGENET1K_V1")
    assert (base.file, base.resize, base.crop) == ("resnet18-f37072fd.pth", 256, 224)
    for name, words in {
        "timm:test_resnett": r"timm has no weights 'test_resnett'; did you mean 'test_resnet",
        "timm:resnet50.nosuchtag": r"timm has no weights 'resnet50.nosuchtag'; ",
        "torchvision:resnet81": r"torchvision has no network 'resnet81'; did you mean 'resnet1?8",
        "torchvision:resnet18.V9": r"torchvision has no weights 'V9' of resnet18",
        "torchvision:fcn_resnet50": r"expected an image classifier of torchvision",
    }.items():
        with pytest.raises(ValueError, match=words):
            zoo.base(name)


def test_a_hub_id_without_its_library_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for library in ("timm", "torchvision", "transformers"):
        monkeypatch.setitem(sys.modules, library, None)
    zoo.hub_bases.hub_base.cache_clear()
    with pytest.raises(ImportError, match=r"pip install 'poem-tta\[bench\]'"):
        zoo.base("timm:resnet18")
    with pytest.raises(ImportError, match="pip install transformers"):
        zoo.base("hf:org/name")


def test_a_folder_of_hugging_face_is_a_base(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=16, patch_size=4,
        num_labels=10,
    )  # fmt: skip
    transformers.ViTForImageClassification(config).save_pretrained(tmp_path)
    steps = {"image_mean": [0.4] * 3, "image_std": [0.2] * 3, "size": {"height": 16, "width": 16}, "resample": 3}
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({**steps, "image_processor_type": "ViTImageProcessor"})
    )
    base = zoo.base(f"hf:{tmp_path}")
    assert (base.crop, base.mean, base.classes, base.interpolation) == (16, (0.4,) * 3, 10, "bicubic")
    result = measure(replace(CELL, base=f"hf:{tmp_path}"))
    assert result.ledger["images"] == 24
    assert result.weights_sha256 == weights_sha256(result.cell, Machine())
    with pytest.raises(FileNotFoundError, match="hf:FOLDER"):
        zoo.base(f"hf:{tmp_path / 'none'}")


def hugging_face(folder: Path, steps: dict[str, Any]) -> str:
    """The name of a tiny base with these settings of an image processor."""
    transformers = pytest.importorskip("transformers")
    transformers.ResNetConfig(num_labels=5).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(steps))
    return f"hf:{folder}"


VIT = {"image_processor_type": "ViTImageProcessor", "size": {"height": 24, "width": 24}}
CONVNEXT = {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 224}, "crop_pct": 0.875}


@pytest.mark.parametrize(
    ("steps", "sizes"),
    [
        ({**VIT, "image_mean": [0.4] * 3, "image_std": [0.2] * 3}, (24, 24, True)),
        ({**VIT, "do_normalize": False}, (24, 24, True)),
        ({**VIT, "do_normalize": False, "image_mean": None, "image_std": None}, (24, 24, True)),
        ({**VIT, "rescale_factor": 1 / 127.5}, (24, 24, True)),
        ({**VIT, "do_rescale": False, "image_mean": [120.0, 110, 100], "image_std": [60.0, 50, 40]}, (24, 24, True)),
        ({**VIT, "size": 24}, (24, 24, True)),
        (CONVNEXT, (256, 224, False)),
        ({**CONVNEXT, "size": {"shortest_edge": 384}}, (384, 384, True)),
        ({"image_processor_type": "EfficientNetImageProcessor", "size": VIT["size"]}, (24, 24, True)),
        ({"image_processor_type": "LevitImageProcessor"}, (256, 224, False)),
        ({"image_processor_type": "CLIPImageProcessor"}, (224, 224, False)),
    ],
)
def test_a_base_of_hugging_face_prepares_images_as_its_processor(
    tmp_path: Path, steps: dict[str, Any], sizes: tuple[int, int, bool]
) -> None:
    name = hugging_face(tmp_path, steps)
    base = zoo.base(name)
    assert (base.resize, base.crop, base.direct) == sizes
    import transformers

    slope = torch.linspace(0, 255, 600).expand(3, 500, 600).to(torch.uint8)
    processor: Any = transformers.AutoImageProcessor
    wanted = processor.from_pretrained(tmp_path)(slope, return_tensors="pt")["pixel_values"][0]
    steps_here = Preprocessing.of(base)
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (base.mean, base.std))
    got = (steps_here.resize_crop(slope).float() / 255 - mean) / std
    assert got.shape == wanted.shape
    assert float(((got - wanted) * std).abs().max()) < 3 / 255, "resizes of PIL and torchvision round otherwise"


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ({**VIT, "image_mean": None}, "expected image_mean of .*, which states do_normalize, got none; write three"),
        ({**VIT, "size": {"height": 24, "width": 32}}, "got size .*24.*32.* in its preprocessor_config.json; write a"),
        ({**VIT, "resample": 1}, r"got resample 1, neither bilinear \(2\) nor bicubic"),
        ({**VIT, "do_center_crop": True, "crop_size": 16}, "got size 24x24 with crop_size 16, a square and then a"),
        ({"image_processor_type": "MobileViTImageProcessor"}, "got do_flip_channel_order True"),
        ({"image_processor_type": "EfficientNetImageProcessor", "rescale_offset": True}, "got rescale_offset True"),
    ],
)
def test_what_a_base_cannot_do_as_a_processor_does_is_refused(
    tmp_path: Path, steps: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        zoo.base(hugging_face(tmp_path, steps))


# Data sets ------------------------------------------------------------------------------------------------------------


def test_a_torch_data_set_opens_by_name_with_options() -> None:
    data = open_dataset("few-digits", count=7)
    assert data.labels.tolist() == list(range(7))
    assert data[0].dtype == torch.uint8
    assert tuple(open_dataset("throwaway:few", mask=[3, 1])[0].shape) == (3, 16, 16)
    with pytest.raises(TypeError, match=r"few-digits: got an unexpected keyword argument 'cout'; it takes \(count=24"):
        open_dataset("few-digits", cout=7)
    with pytest.raises(TypeError, match="takes no options, got count; write a function"):
        open_dataset("throwaway:few", count=7)


def test_a_stream_takes_a_torch_data_set(site: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.rand(12, 3, 16, 16), torch.arange(12) % 10)
    batches = list(Stream(data=data, order=continual(["fog", "contrast"], severity=1, seed=0), batch_size=6))  # type: ignore[arg-type]
    assert [len(batch.labels) for batch in batches] == [6, 6, 6, 6]
    with pytest.raises(TypeError, match=r"expected a pair \(image, label\), got a tuple of 1; scoring needs a label"):
        Stream(data=torch.utils.data.TensorDataset(torch.rand(2, 3, 16, 16)), order=continual(["fog"]))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"expected int to be a data set of \(image, label\) pairs"):
        Stream(data=3, order=continual(["fog"]))  # type: ignore[arg-type]


def test_labels_are_taken_without_reading_images_but_the_first() -> None:
    class Kept(torch.utils.data.Dataset[Any]):
        targets = (3, 1, 2)
        classes = ("a", "b", "c", "d")
        reads = 0

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            Kept.reads += 1
            return torch.zeros(1, 8, 8), self.targets[index]

    data = as_images(Kept())
    assert (data.labels.tolist(), data.classes, Kept.reads) == ([3, 1, 2], ("a", "b", "c", "d"), 1)
    assert as_images(torch.utils.data.Subset(Kept(), [2, 0])).labels.tolist() == [2, 3]
    assert Kept.reads == 2
    assert tuple(data[0].shape) == (3, 8, 8)


def test_labels_that_are_no_whole_numbers_are_refused() -> None:
    pictures = torch.zeros(3, 3, 8, 8)
    for labels in (torch.tensor([0.0, 0.9, 1.0]), [0.0, 0.9, 1.0], [np.float32(0.9)] * 3):
        data: Any = list(zip(pictures, labels, strict=True))
        with pytest.raises(ValueError, match=r"expected labels of .* as whole numbers, got 0\.9; scoring needs"):
            as_images(data)
    with pytest.raises(ValueError, match=r"as whole numbers, got 0\.9"):
        as_images(torch.utils.data.TensorDataset(pictures, torch.tensor([0.0, 0.9, 1.0])))
    whole = torch.utils.data.TensorDataset(pictures, torch.tensor([0.0, 2.0, 1.0]))
    assert as_images(whole).labels.tolist() == [0, 2, 1]
    with pytest.raises(TypeError, match="as class numbers, got inf"):
        as_images(list(zip(pictures, [0.0, float("inf"), 1.0], strict=True)))


def test_an_attribute_with_other_labels_than_the_items_is_refused() -> None:
    class Shifted(torch.utils.data.Dataset[Any]):
        targets = (3, 1, 2)

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            return torch.rand(1, 8, 8), self.targets[index] - 1

    state = torch.get_rng_state()
    with pytest.raises(
        ValueError, match=r"expected data set\[0\] to have the label .* 3, got 2; let __getitem__ return"
    ):
        as_images(Shifted())
    assert torch.equal(torch.get_rng_state(), state), "no random number is taken from the user's generator"


# Cells, suites and other processes ------------------------------------------------------------------------------------


def test_a_result_states_recipe_weights_and_package() -> None:
    result = measure(CELL)
    assert result.ledger["updates"] == 3
    assert result.recipe["select"] == "throwaway:Surest(0.01)"
    assert result.weights_sha256 == weights_sha256(CELL, Machine())
    assert result.provenance["package throwaway"] == "1.2"
    assert replace(CELL, method="throwaway:mine").recipe() == CELL.recipe()
    assert replace(CELL, changes=(("select", "throwaway:Surest(0.2)"),)).key != CELL.key


def announce(folder: Path, package: str, points: dict[str, dict[str, str]]) -> None:
    """Write the metadata of an installed package that announces these names, and no code."""
    found = folder / f"{package}-3.4.dist-info"
    found.mkdir(parents=True)
    (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 3.4\n")
    (found / "top_level.txt").write_text(f"{package}\n")
    lines = [
        f"[{group}]\n" + "".join(f"{key} = {path}\n" for key, path in each.items()) for group, each in points.items()
    ]
    (found / "entry_points.txt").write_text("".join(lines))


def test_provenance_names_the_package_that_was_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {"poem.methods": {"tent": "hiding:tent"}, "poem.bases": {"digits-bn": "hiding:net"},
            "poem.datasets": {"digits-test": "hiding:data"}}  # fmt: skip
    announce(tmp_path, "hiding", ours)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = replace(CELL, method="tent", base="digits-bn", data="digits-test")
    with pytest.raises(ValueError, match="expected one method called 'tent'"):
        outside.path_of("method", "tent")
    assert outside_versions(own, own.recipe()) == {}, "names of poem keep their meaning"
    for name in ("throwaway:mine+poem", "sure+poem-ii", "sure*", "sure"):
        cell = replace(own, method=name)
        assert outside_versions(cell, poem.recipe("tent")) == {"package throwaway": "1.2"}, name
    for changed in (replace(own, base="tiny-net"), replace(own, data="few-digits")):
        assert outside_versions(changed, own.recipe()) == {"package throwaway": "1.2"}
    assert measure(own).provenance.keys() >= {"poem", "torch"}
    assert set(outside_versions(replace(own, base="timm:resnet18"), own.recipe())) <= {"package timm"}


CHANGING = """
name: changing
version: 1
title: Tent, ours, and Tent with a part of ours
columns: corruptions
corruptions: [fog]
cell: {data: digits-test, batch_size: 8, n: 16}
groups: [{label: Theirs, base: bn}]
rows:
  - {label: Tent, method: tent}
  - {label: Ours, method: "changing_code:mine"}
  - {label: Sure Tent, method: tent, changes: {select: "changing_code:Sure(0.3)"}}
"""


def test_results_of_code_that_has_changed_are_named_and_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, results = tmp_path / "changing_code.py", tmp_path / "results"
    module.write_text(packages.MODULE)
    (tmp_path / "changing.yaml").write_text(CHANGING)
    monkeypatch.syspath_prepend(tmp_path)
    words = ["bench", str(tmp_path / "changing.yaml"), "--engine", "inline", "--out", str(results)]
    assert main(words) == 0
    held = {result.cell.label: result.provenance.get("module changing_code") for result in Store(results).results()}
    assert len(held) == 3
    digests = {digest for label, digest in held.items() if "changing_code" in label}
    assert digests == {hashlib.sha256(packages.MODULE.encode()).hexdigest()[:16]}
    assert sum(digest is None for digest in held.values()) == 1, "plain Tent uses nothing of it"
    module.write_text(
        packages.MODULE.replace("outputs.probs.amax(1) > self.share", "outputs.probs.amax(1) < self.share")
    )
    capsys.readouterr()
    assert main([*words, "--dry-run"]) == 0
    assert "other code" not in capsys.readouterr().out, "this process runs the code that it imported"
    monkeypatch.delitem(sys.modules, "changing_code")
    assert main([*words, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "3 finished, 0 to run" in said
    now = hashlib.sha256(module.read_bytes()).hexdigest()[:8]
    assert (
        f"2 finished cells were measured with other code of the module changing_code (sha256 {digests.pop()[:8]} "
        in said
    )
    assert f"then, {now} now); --rerun changing_code measures what uses it again" in said
    assert main(words) == 0
    measured = capsys.readouterr()
    assert "0 cells measured" in measured.out
    assert "other code of the module changing_code" in measured.err
    again = [*words, "--rerun", "changing_code"]
    assert main([*again, "--dry-run"]) == 0
    assert "1 finished, 2 to run" in capsys.readouterr().out
    assert main([*words, "--rerun", "changing_code:mine"]) == 0, "one of the two"
    assert capsys.readouterr().out.startswith("1 cells measured")
    assert main(["report", str(results), "--format", "markdown"]) == 0
    page = (results / "report.md").read_text()
    assert "mixes 2 versions of the code of changing\\_code: sha256" in page
    assert "poem bench ... --rerun changing\\_code" in page
    capsys.readouterr()
    assert main(again) == 0
    measured = capsys.readouterr()
    assert measured.out.startswith("2 cells measured")
    assert "other code" not in measured.err
    assert len(list(results.rglob("*.json.old*"))) == 3, "what was measured before is kept"
    assert {result.provenance.get("module changing_code") for result in Store(results).results()} == {
        None, hashlib.sha256(module.read_bytes()).hexdigest()[:16],
    }  # fmt: skip
    assert main([*words, "--rerun", "changing_cod"]) == 2
    assert "is like 'changing_cod'; did you mean 'changing_code" in capsys.readouterr().err


def test_a_base_that_poem_has_is_listed_with_the_other_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    announce(tmp_path, "hiding", {"poem.bases": {"digits-bn": "hiding:net"}})
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["list", "bases", "digits-bn", "--json"]) == 0
    line = json.loads(capsys.readouterr().out)["digits-bn"]
    assert line.startswith("another is hiding:net, from the package hiding 3.4; digits-bn sha256:")
    assert main(["verify", "list"]) == 0
    said = capsys.readouterr().out
    own = said[said.index("\ndigits-bn ") : said.index("\ndigits-gn ")]
    assert "own         digits-bn sha256:" in own
    assert "another is hiding:net, from the package hiding 3.4" in own
    assert said.index("\ndigits-bn ") < said.index("\ntiny-net "), "names of other packages come last"


def test_a_changed_recipe_of_another_package_makes_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    import throwaway

    before = replace(CELL).key
    monkeypatch.setattr(throwaway, "fixed", replace(throwaway.fixed, lr=0.5))
    monkeypatch.setattr(throwaway, "mine", lambda: throwaway.fixed)
    assert replace(CELL).key != before


SUITE = """
name: mine
version: 1
title: Ours beside Tent
columns: corruptions
corruptions: [fog]
cell: {data: throwaway:few, batch_size: 6, n: 12}
groups: [{label: Ours, base: throwaway:base}]
rows:
  - {label: Source, method: source}
  - {label: Ours, method: throwaway:mine}
  - {label: Tent on sure samples, method: tent, changes: {select: "throwaway:Surest(0.02)"}}
"""


def test_a_suite_names_them_all(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(SUITE)
    suite = load_suite(tmp_path / "mine.yaml", seeds=[0, 1])
    assert {cell.base for cell in suite.cells} == {"throwaway:base"}
    outcome = sweep(suite.cells, Store(tmp_path / "results"))
    assert len(outcome.done) == 6
    assert len(sweep(suite.cells, Store(tmp_path / "results")).skipped) == 6, "the same weights and recipes"
    (tmp_path / "bad.yaml").write_text(SUITE.replace("throwaway:mine", "throwaway:mien"))
    with pytest.raises(ValueError, match=r"suite mine: expected a method at 'throwaway:mien'.*did you mean"):
        load_suite(tmp_path / "bad.yaml")


def test_worker_processes_find_them(tmp_path: Path) -> None:
    cells = [CELL, replace(CELL, base="throwaway:net", data="throwaway:few", method="throwaway:fixed+poem")]
    outcome = sweep(cells, Store(tmp_path), runner=Workers(count=2))
    assert len(outcome.done) == 2, Store(tmp_path).failures()
    here = {cell: measure(cell).identity() for cell in cells}
    assert all(Store(tmp_path).finished(cell).identity() == here[cell] for cell in cells)  # type: ignore[union-attr]


@pytest.mark.slow
def test_ray_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("RAY_worker_niceness", "0")
    outcome = sweep([CELL], Store(tmp_path), runner=Ray(cpus=1))
    assert len(outcome.done) == 1, Store(tmp_path).failures()
    assert Store(tmp_path).finished(CELL).identity() == measure(CELL).identity()  # type: ignore[union-attr]


def test_the_command_runs_what_pip_installed(tmp_path: Path) -> None:
    """A real package, installed by pip into a folder of its own, in a process that has never heard of it."""
    pytest.importorskip("setuptools")
    project = tmp_path / "project"
    (project / "piped").mkdir(parents=True)
    (project / "piped" / "__init__.py").write_text(packages.CODE)
    points = "\n".join(
        f'[project.entry-points."{group}"]\n'
        + "\n".join(f'{key} = "{each if ":" in each else f"piped:{each}"}"' for key, each in names.items())
        for group, names in packages.NAMES.items()
    )
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n'
        f'[project]\nname = "piped"\nversion = "2.0"\n{points}\n[tool.setuptools]\npackages = ["piped"]\n'
    )
    target = tmp_path / "target"
    flags = ["--no-deps", "--no-build-isolation", "--no-index", "-q", "--target", str(target)]
    pip = [sys.executable, "-m", "pip", "install", *flags, str(project)]
    made = subprocess.run(pip, capture_output=True, text=True, timeout=300, check=False)
    if made.returncode:
        pytest.skip(f"pip cannot build here: {made.stderr.strip().splitlines()[-1]}")
    folders = [str(target), str(Path(poem.__file__).parent.parent)]

    def command(*words: str) -> subprocess.CompletedProcess[str]:
        code = (
            f"import sys; sys.path[:0] = {folders!r}; from poem.cli.main import main; sys.exit(main({list(words)!r}))"
        )
        return subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path
        )

    assert "piped:mine, from the package piped 2.0" in command("list", "sure").stdout
    cell = ["--base", "piped:net", "--data", "few-digits", "--method", "sure", "--corruption", "fog"]
    done = command("run", *cell, "--batch-size", "8", "-o", "result.json")
    assert done.returncode == 0, done.stderr
    held = json.loads((tmp_path / "result.json").read_text())
    assert held["provenance"]["package piped"] == "2.0"
    assert held["ledger"]["updates"] == 3


# What is wrong is said before anything is run -------------------------------------------------------------------------

WRONG: dict[str, tuple[dict[str, str], str]] = {
    "an entry point without its module": (
        {"method": "gone"},
        "expected a method at 'nowhere:mine', which the package throwaway 1.2 announces as 'gone': there is no module "
        "'nowhere'; install its package",
    ),
    "no module": ({"base": "nowhere.models:net"}, "there is no module 'nowhere'; install its package, or start in"),
    "no attribute": ({"base": "throwaway:nett"}, "no 'nett'; did you mean throwaway:net"),
    "no network": ({"base": "no-net"}, "expected no-net to return a torch.nn.Module, got str"),
    "a factory that raises": ({"base": "throwaway:broken_net"}, "got RuntimeError: no such file: net.pth"),
    "no function": ({"base": "throwaway:poem"}, "expected throwaway:poem to be a function that returns"),
    "no recipe": ({"method": "throwaway:not_a_recipe"}, "expected throwaway:not_a_recipe to be a poem.Recipe"),
    "a part as a method": ({"method": "throwaway:Surest"}, "--method tent --set changes.select=throwaway:Surest"),
    "no labels": ({"data": "unlabelled"}, "scoring needs a label for every image: return (image, class number)"),
    "no data set": ({"data": "throwaway:not_a_recipe"}, "expected throwaway:not_a_recipe to be a data set of"),
}


@pytest.mark.parametrize("what", WRONG)
def test_bad_input_is_one_error_and_nothing_is_written(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, words = WRONG[what]
    fields = {"base": "tiny-net", "data": "few-digits", "method": "sure", **change}
    flags = [word for name, value in fields.items() for word in (f"--{name}", value)]
    assert main(["run", *flags, "--corruption", "fog", "-o", str(tmp_path / "result.json")]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert len([line for line in said.splitlines() if line.startswith("poem run:")]) == 1
    assert not list(tmp_path.iterdir())
    cells = tmp_path / "cells.json"
    cells.write_text(json.dumps([{**fields, "corruptions": ["fog"]}]))
    assert main(["bench", str(cells), "-o", str(tmp_path / "results")]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert "nothing was run" in said
    assert [path.name for path in tmp_path.iterdir()] == ["cells.json"]


def test_an_entry_point_that_fails_to_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    packages.install(tmp_path, "unlicensed", broken=True)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert main(["list", "parts", "Surest"]) == 1, "two packages announce it"
    with pytest.raises(ValueError, match=r"those of .* and .*; write .*:Surest or .*:Surest"):
        outside.load("part", "Surest")
    capsys.readouterr()
    assert main(["run", "--base", "unlicensed:net", "--data", "digits-test", "--method", "tent"]) == 2
    said = capsys.readouterr().err
    assert (
        "whose module fails to import: OSError: no licence; to see where, type: python -c 'import unlicensed'" in said
    )
    assert main(["show", "unlicensed:mine"]) == 2
    missing = check_requirements(
        [replace(CELL, method="unlicensed:mine", base="digits-bn", data="digits-test")], Machine()
    )
    assert "method unlicensed:mine (1 cell): expected a method at 'unlicensed:mine'" in str(missing)


def test_predict_takes_them_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image")
    (tmp_path / "photos").mkdir()
    for index in range(4):
        image.new("RGB", (20, 20), (60 * index, 90, 200)).save(tmp_path / "photos" / f"{index}.png")
    out = tmp_path / "answers.csv"
    words = ["predict", str(tmp_path / "photos"), "--model", "tiny-net", "--method", "throwaway:mine", "-o", str(out)]
    assert main(words) == 0
    assert "mean (0.1, 0.1, 0.1)" in capsys.readouterr().err
    assert len(out.read_text().splitlines()) == 5


def test_verify_takes_them_too(capsys: pytest.CaptureFixture[str]) -> None:
    main(["verify", "throwaway:base", "few-digits"])
    assert "source accuracy" in capsys.readouterr().out
    assert main(["verify", "list"]) == 0
    assert "throwaway:base, from the package throwaway 1.2" in capsys.readouterr().out
