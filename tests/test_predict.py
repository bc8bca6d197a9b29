"""Answers for a folder without labels: a row per file, broken ones too; and the command line around it."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import poem
from poem import zoo
from poem.cli.main import main
from poem.predict import Answer, answers, class_count, find_images, import_model, summary
from poem.streams.loading.prepare import Prepare
from poem.zoo.train_data import digits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve digits as files in two folders, a hidden one, a text file and a broken image."""
    top = tmp_path_factory.mktemp("photos")
    (top / "b").mkdir()
    for at, image in enumerate(digits().test.images[:12]):
        where = top / ("b" if at % 2 else ".") / f"{at:02d}.png"
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(where)
    (top / ".hidden.png").write_bytes(b"")
    (top / "notes.txt").write_text("not an image")
    (top / "99.jpg").write_bytes(b"\xff\xd8 half")
    return top


def test_photos_are_found_at_any_depth_in_order_of_name(folder: Path) -> None:
    names = [str(path.relative_to(folder)) for path in find_images(folder)]
    assert names == sorted(names)
    assert len(names) == 13
    assert "99.jpg" in names


def test_a_folder_without_images_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no images under"):
        find_images(tmp_path)
    with pytest.raises(FileNotFoundError, match="not one"):
        find_images(tmp_path / "nowhere")


def test_answers_are_the_adapter_s_and_the_model_comes_back(folder: Path) -> None:
    model, base = zoo.load("digits-bn")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = [
        each
        for batch in answers(
            model,
            find_images(folder),
            "tent",
            folder=folder,
            prepare=Prepare(),
            batch_size=5,
            mean=base.mean,
            std=base.std,
        )
        for each in batch
    ]
    assert [each.file for each in found] == sorted(each.file for each in found)
    assert sum(bool(each.error) for each in found) == 1
    adapter = poem.adapt(model, "tent", mean=base.mean, std=base.std, batch_size=5)
    files = find_images(folder)
    expected: dict[str, int] = {}
    for start in range(0, len(files), 5):
        good = [path for path in files[start : start + 5] if path.name != "99.jpg"]
        pixels = torch.stack([torch.from_numpy(np.array(Image.open(path))) for path in good]).permute(0, 3, 1, 2)
        for path, label in zip(good, adapter(pixels.float() / 255).argmax(1).tolist(), strict=True):
            expected[str(path.relative_to(folder))] = label
    assert {each.file: each.label for each in found if not each.error} == expected
    assert all(each.taught for each in found if not each.error), "tent selects every sample"
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_a_corruption_is_put_on_every_image_by_its_place_in_the_order(folder: Path) -> None:
    model, base = zoo.load("digits-bn")
    files = [path for path in find_images(folder) if path.name != "99.jpg"]
    settings: dict[str, Any] = {
        "folder": folder,
        "prepare": Prepare(),
        "batch_size": 5,
        "mean": base.mean,
        "std": base.std,
    }
    found = [each for batch in answers(model, files, "source", corruption=("snow", 5), **settings) for each in batch]
    pixels = torch.stack([torch.from_numpy(np.array(Image.open(path))) for path in files]).permute(0, 3, 1, 2)
    spoilt = poem.corrupt(pixels, "snow", 5, ids=list(range(len(files)))).float() / 255
    with torch.no_grad():
        mean, std = (torch.tensor(each).view(1, 3, 1, 1) for each in (base.mean, base.std))
        sure = model((spoilt - mean) / std).softmax(1).max(1).values
    assert [each.confidence for each in found] == pytest.approx(sure.tolist(), abs=1e-5)


def test_the_command_writes_one_row_per_file(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "answers.csv"
    code = main(["predict", str(folder), "--model", "digits-gn", "--preset", "cifar", "-o", str(out)])
    assert code == 1, "one file could not be read"
    rows = list(csv.DictReader(out.open()))
    assert len(rows) == 13
    assert [row["file"] for row in rows if row["error"]] == ["99.jpg"]
    assert all(0 <= float(row["confidence"]) <= 1 for row in rows if not row["error"])
    assert "12 images answered, 1 unreadable" in capsys.readouterr().out


def test_answers_as_json_lines(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(
        ["predict", str(folder), "--model", "digits-gn", "--method", "source", "-o", str(tmp_path / "a.csv"), "--json"]
    )
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(lines) == 13
    assert all(line["label"] == line["source_label"] for line in lines), "source is what source says"


def test_bare_list_ends_with_the_other_kinds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    found = capsys.readouterr()
    (line,) = found.err.splitlines()
    assert line.endswith("poem list KIND, for other kinds: parts corruptions bases data scenarios suites")
    assert all(main(["list", kind]) == 0 for kind in line.partition("kinds: ")[2].split())
    assert "KIND" not in found.out, "piped output has names alone"
    capsys.readouterr()
    main(["list", "tent*"])
    main(["list", "--json"])
    assert capsys.readouterr().err == ""


def test_a_summary_says_when_adapting_made_answers_less_certain() -> None:
    row = {"label": 1, "source_label": 1, "confidence": 0.5, "newly_reliable": False, "first_entropy": 2.0}
    sure = Answer(file="a", entropy=0.2, source_entropy=0.1, **row)  # type: ignore[arg-type]
    lost = Answer(file="a", entropy=2.0, source_entropy=0.1, **row)  # type: ignore[arg-type]
    assert "less certain" not in summary([sure])
    assert "less certain" in summary([lost])


def test_a_model_by_its_function() -> None:
    with pytest.raises(
        ValueError, match=r"expected a base at 'torch:nothing_there', where there is no 'nothing_there'"
    ):
        import_model("torch:nothing_there")
    with pytest.raises(TypeError, match="Module"):
        import_model("torch:get_num_threads")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["lst"], "did you mean poem list?"),
        (["predict", "nowhere"], "not one"),
        (["list", "nothing-like-it"], "none of the methods"),
        (["list", "base"], "did you mean poem list bases?"),
        (["list", "tant"], "did you mean tent"),
        (["list", "bases", "vit-b16-G"], "did you mean vit-b16-"),
        (["show", "poem", "--preset", "cifr"], "got 'cifr'; did you mean 'cifar'?"),
        (["demo", "--corruption", "fog"], "type: poem demo imagenet --corruption fog"),
        (["demo", "--model", "resnet50-bn"], "type: poem demo imagenet --model resnet50-bn"),
        (["demo", "--method", "tent"], "type: poem demo imagenet --method tent"),
        (["demo", "--count", "0"], "expected --count of at least 1, got 0"),
        (["demo", "imagenet", "--images", ".", "--json", "a.json"], "type: poem predict --json"),
        (["show", "digits-bn"], "'digits-bn' is a base network, not a method; see `poem list bases`"),
        (["show", "EntropyBelow"], "'EntropyBelow' is a part, not a method; see `poem list parts`"),
        (["show", "digits-test"], "'digits-test' is a data set, not a method; see `poem list data`"),
        (["show", "fog"], "'fog' is a corruption, not a method; see `poem list corruptions`"),
        (["show", "tnet"], "Methods: auto source bn tent"),
    ],
)
def test_mistakes_end_with_what_to_type(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) in (1, 2)
    found = capsys.readouterr()
    assert says in found.out + found.err


def test_an_unknown_option_is_the_command_s_own_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--sevrity", "3"])
    assert "did you mean --severity?" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["methods", "parts", "corruptions", "bases", "data", "scenarios", "suites"])
def test_everything_that_has_a_name_can_be_listed(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", kind, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)


def test_the_8x8_digits_are_told_from_the_bases_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "data", "digits*"]) == 0
    first, second, third = capsys.readouterr().out.splitlines()
    assert "8x8, not the digits bases' own set (digits-test)" in first
    assert "8x8" not in second + third
    assert third.startswith("digits-train")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_methods_and_options(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert all(word in script for word in ("predict", "deyo+poem", "--severity" if shell != "fish" else "-l severity"))
    assert "vit-b16-D" in script


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes_commands_options_names_and_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", "bash"]) == 0
    (tmp_path / "poem.bash").write_text(capsys.readouterr().out)
    expected = {
        "pre": "predict",
        "demo im": "imagenet",
        "demo --severity 5": "5",
        "predict --meth": "--method",
        "predict photos --method deyo+poem-": "deyo+poem-i deyo+poem-ii",
        "show eata --preset cifar": "cifar cifar10 cifar100",
        "run --base digits-b": "digits-bn",
        "reproduce table12 fig6": "fig6a fig6b",
        "bench table1 --scale t": "tiny",
        "list corr": "corruptions",
        "report poem.b": "poem.bash",
    }
    calls = "".join(
        f'COMP_WORDS=(poem {line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _shtab_poem; echo "${{COMPREPLY[*]}}"\n'
        for line in expected
    )
    code = f"source poem.bash\n{calls}"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60, cwd=tmp_path, check=True)
    assert dict(zip(expected, done.stdout.splitlines(), strict=True)) == expected


def test_completion_without_shtab_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert "type: pip install 'poem-tta[completion]'" in capsys.readouterr().err


@pytest.fixture(scope="module")
def wnids(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four images in two folders named by wnid."""
    top = tmp_path_factory.mktemp("wnids")
    for at, image in enumerate(digits().test.images[:4]):
        where = top / ("n01440764" if at % 2 else "n01443537") / f"{at}.png"
        where.parent.mkdir(exist_ok=True)
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(where)
    return top


def thousand() -> torch.nn.Module:
    """A network with ImageNet's logits, of which class 5 is always the highest, then class 1."""
    head = torch.nn.Linear(3, 1000)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()
        head.bias[5], head.bias[1] = 2.0, 1.0
    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), head)


def predicted(wnids: Path, out: Path, *words: str) -> list[str]:
    model = ["--model", "test_predict:thousand", "--method", "source", "-o", str(out)]
    assert main(["predict", str(wnids), *model, *words]) == 0
    return [row["name"] for row in csv.DictReader(out.open())]


def test_wnid_folders_are_noticed_and_can_be_the_classes(
    wnids: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "answers.csv"
    assert set(predicted(wnids, out)) == {"5"}, "a class that cannot come"
    assert "2 folders named by wnid" in (said := capsys.readouterr().err)
    assert "--classes folders" in said
    assert set(predicted(wnids, out, "--classes", "folders")) == {"1"}
    assert "named by wnid" not in capsys.readouterr().err
    (tmp_path / "indices.txt").write_text("0\n7\n1\n")
    assert set(predicted(wnids, out, "--classes", str(tmp_path / "indices.txt"))) == {"1"}
    (tmp_path / "wnids.txt").write_text("n01440764\nn01443537 goldfish\n")
    assert set(predicted(wnids, out, "--classes", str(tmp_path / "wnids.txt"))) == {"1"}


def test_folders_of_another_name_are_no_classes(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(folder), "--model", "digits-gn", "--classes", "folders"]) == 2
    assert "needs every image in a folder named by wnid" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["bench", "table1", "--engine", "wrkers"], "there is no choice 'wrkers'; did you mean 'workers'?"),
        (["demo", "imagnet"], "there is no choice 'imagnet'; did you mean 'imagenet'?"),
        (["demo", "--severity", "9"], "there is no choice '9'; one of: 1, 2, 3, 4, 5"),
        (["completion", "bsh"], "did you mean 'bash'"),
        (["train-source", "digts"], "did you mean 'digits'?"),
    ],
)
def test_a_choice_that_is_none_names_the_nearest(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("words", [["predict", "{}"], ["demo", "imagenet", "--images", "{}"]])
@pytest.mark.parametrize(("flags", "says"), [(["--method", "pom"], "Did you mean poem")])
def test_a_method_is_known_before_a_model_is_loaded(
    words: list[str], flags: list[str], says: str, folder: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(zoo, "load", lambda *_: pytest.fail("a model was loaded"))
    assert main([word.format(folder) for word in words] + flags) == 2
    assert says in capsys.readouterr().err


def test_a_line_of_a_list_fits_the_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert main(["list", "parts"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 70
    assert sum(line.endswith(" ...") for line in lines) > 5


# Models of one's own ------------------------------------------------------------------------------------------------


def own() -> torch.nn.Module:
    """A network with ten logits and a bias that says which weights it has."""
    return torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 10))


def weights_for(label: int, path: Path) -> Path:
    """A file with which `own` always answers this class."""
    torch.save({"2.weight": torch.zeros(10, 3), "2.bias": 5 * torch.eye(10)[label]}, path)
    return path


def by_own(folder: Path, out: Path, *words: str) -> int:
    return main(["predict", str(folder), "--model", "test_predict:own", "--method", "source", "-o", str(out), *words])


def test_weights_are_loaded_into_a_model_of_one_s_own(
    wnids: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a.csv"
    for label in (3, 8):
        assert by_own(wnids, out, "--weights", str(weights_for(label, tmp_path / "w.pth"))) == 0
        assert {row["label"] for row in csv.DictReader(out.open())} == {str(label)}
    assert "random" not in capsys.readouterr().err
    assert by_own(wnids, out) == 0
    assert "no --weights: test_predict:own has to load its own; if it does not, the model is random" in (
        capsys.readouterr().err
    )


def test_weights_that_are_not_there_or_not_the_model_s_end_in_an_error(
    wnids: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert by_own(wnids, tmp_path / "a.csv", "--weights", str(tmp_path / "none.pth")) == 2
    assert "none.pth, which does not exist" in capsys.readouterr().err
    torch.save({"fc.weight": torch.zeros(1)}, tmp_path / "other.pth")
    assert by_own(wnids, tmp_path / "a.csv", "--weights", str(tmp_path / "other.pth")) == 2
    assert "lacks 2.weight, 2.bias; has besides fc.weight" in capsys.readouterr().err
    assert not (tmp_path / "a.csv").exists()


def test_what_is_assumed_about_normalisation_is_printed(
    wnids: Path, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "a.csv")
    by_own(wnids, Path(out))
    assert "no --mean and --std: the model is given images from 0 to 1 as they are" in capsys.readouterr().err
    by_own(wnids, Path(out), "--mean", "0.5", "--std", "0.5")
    assert "no --mean" not in capsys.readouterr().err
    words = ["predict", str(folder), "--model", "digits-gn", "--method", "source", "-o", out]
    main(words)
    assert "replaces" not in capsys.readouterr().err
    main([*words, "--mean", "0.3"])
    said = capsys.readouterr().err
    assert "--mean replaces digits-gn's own mean (0.1" in said
    assert "--std replaces" not in said


def test_a_network_of_torchvision_is_found_by_its_bare_name(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(folder), "--model", "resnet18"]) == 2
    said = capsys.readouterr().err
    assert "unknown base 'resnet18'; did you mean 'resnet50-" in said
    assert "--model torchvision.models:resnet18 --weights FILE" in said
    assert main(["predict", str(folder), "--model", "digits-b"]) == 2
    assert "torchvision" not in capsys.readouterr().err


def test_a_misspelt_function_or_module_is_answered_with_what_there_is() -> None:
    with pytest.raises(
        ValueError,
        match=r"'torchvision.models:resnet81', where there is no 'resnet81'; did you mean torchvision.models:resnet18",
    ):
        import_model("torchvision.models:resnet81")
    with pytest.raises(ValueError, match=r"there is no module 'torchvision.modls'"):
        import_model("torchvision.modls:resnet18")
    with pytest.raises(ValueError, match=r"such as torchvision.models:resnet18, got 'torchvision.models:'"):
        import_model("torchvision.models:")


def test_a_misspelt_folders_is_no_missing_file(
    wnids: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert by_own(wnids, tmp_path / "a.csv", "--classes", "folder") == 2
    assert "which is no file; did you mean 'folders'?" in capsys.readouterr().err
    assert by_own(wnids, tmp_path / "a.csv", "--classes", "list.txt") == 2
    assert "has a wnid or an index per line" in capsys.readouterr().err


def test_nothing_is_printed_of_classes_that_the_model_has_not(
    wnids: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (class_count(own()), class_count(thousand()), class_count(torch.nn.ReLU())) == (10, 1000, None)
    by_own(wnids, tmp_path / "a.csv")
    assert "--classes folders" not in capsys.readouterr().err
    assert main(["predict", str(wnids), "--model", "test_predict:nothing"]) == 2
    assert "1000 classes" not in capsys.readouterr().err, "there is no model to speak of"
    (tmp_path / "c.txt").write_text("3\n10\n")
    assert by_own(wnids, tmp_path / "a.csv", "--classes", str(tmp_path / "c.txt")) == 2
    assert "expected classes below 10, as test_predict:own has, got class 10" in capsys.readouterr().err


def test_a_row_names_the_answer_in_the_model_s_own_numbering_too(wnids: Path, tmp_path: Path) -> None:
    out = tmp_path / "a.csv"
    predicted(wnids, out)
    row = next(csv.DictReader(out.open()))
    assert (row["label"], row["class_index"], row["wnid"], row["source_name"]) == ("5", "5", "", "5")
    (tmp_path / "few.txt").write_text("7\n1\n")
    predicted(wnids, out, "--classes", str(tmp_path / "few.txt"))
    row = next(csv.DictReader(out.open()))
    assert (row["label"], row["name"], row["class_index"], row["wnid"]) == ("1", "1", "1", "")
    (tmp_path / "few.txt").write_text("n01443537\nn01440764\n")  # the model's 1 and 0
    predicted(wnids, out, "--classes", str(tmp_path / "few.txt"))
    row = next(csv.DictReader(out.open()))
    assert (row["label"], row["name"], row["class_index"], row["wnid"]) == ("0", "1", "1", "n01443537")
    assert (row["source_label"], row["source_name"]) == ("0", "1")


def test_every_column_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["predict", "--help"])
    said = capsys.readouterr().out.partition("with these columns:")[2]
    page = (Path(__file__).parents[1] / "docs/command-line.md").read_text(encoding="utf-8")
    for column in Answer.__dataclass_fields__:
        assert column in said
        assert f"`{column}`" in page


# Doubt --------------------------------------------------------------------------------------------------------------


def rows(agree: int, count: int) -> list[Answer]:
    found = {"label": 1, "confidence": 0.5, "newly_reliable": False, "first_entropy": 1.0, "entropy": 1.0}
    return [
        Answer(file=str(at), source_label=1 if at < agree else 2, source_entropy=1.0, **found)  # type: ignore[arg-type]
        for at in range(count)
    ]


def test_answers_that_are_mostly_not_the_model_s_own_begin_with_a_doubt() -> None:
    first = summary(rows(9, 20)).splitlines()[0]
    assert first.startswith("Only 9 of 20 answers are the model's own")
    assert all(words in first for words in ("--method source", "--classes folders", "--batch-size"))
    for agree, count in ((10, 20), (20, 20), (0, 19)):
        assert summary(rows(agree, count)).startswith(f"{count} images answered")
    assert "answers are the model's own" not in summary(rows(9, 20), labelled=True), "labels tell what is right"


# One measurement ----------------------------------------------------------------------------------------------------


def test_a_run_says_how_many_images_and_which_digits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["run", "--base", "digits-bn", "--method", "source", "--n", "16", "--data"]
    assert main([*words, "digits", "--preset", "cifar10", "--out", str(tmp_path / "a.json")]) == 0
    found = capsys.readouterr()
    assert "n                       16 images" in found.out
    assert "digits are another set, 8x8" in found.err
    assert "--data digits-test" in found.err
    assert "--method source" not in found.out
    assert json.loads((tmp_path / "a.json").read_text())["cell"]["preset"] == "cifar", "one cell, one key"
    assert main([*words, "digits-test", "--method", "bn"]) == 0
    found = capsys.readouterr()
    assert "another set" not in found.err
    assert "the same with --method source measures the model unadapted" in found.out


# Stopping and going on ----------------------------------------------------------------------------------------------

STREAM = ("--model", "digits-bn", "--method", "tent", "--lr", "0.05", "--preset", "cifar", "--batch-size", "3")


class Stop:
    """Does something before a certain batch is read, and counts the batches."""

    def __init__(self, patch: pytest.MonkeyPatch, before: int = 10**9, do: Callable[[], None] | None = None) -> None:
        import poem.predict

        plain, self.batches = poem.predict._read_batch, 0

        def read(*args: Any) -> Any:
            self.batches += 1
            if self.batches == before:
                assert do is not None
                do()
            return plain(*args)

        patch.setattr(poem.predict, "_read_batch", read)


def interrupt() -> None:
    raise KeyboardInterrupt


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def whole(folder: Path, tmp_path: Path) -> bytes:
    """What a run writes that is not interrupted."""
    out = tmp_path / "whole.csv"
    assert main(["predict", str(folder), *STREAM, "-o", str(out)]) == 1
    assert sorted(os.listdir(tmp_path)) == ["whole.csv"]
    return out.read_bytes()


@pytest.mark.parametrize(("stop", "code"), [(interrupt, 130), (terminate, 143)])
def test_a_stopped_run_keeps_its_answers_and_goes_on(
    folder: Path, tmp_path: Path, whole: bytes, stop: Callable[[], None], code: int,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    out, handler = tmp_path / "a.csv", signal.getsignal(signal.SIGTERM)
    words = ["predict", str(folder), *STREAM, "-o", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        Stop(patch, 4, stop)  # the first state is written, the next two wait for their time
        assert main(words) == code
    assert signal.getsignal(signal.SIGTERM) is handler
    said = capsys.readouterr().err
    assert "stopped after 9 of 13 images" in said
    assert "the same command goes on" in said
    assert not out.exists(), "whole or not at all"
    kept = (tmp_path / "a.partial.csv").read_bytes()
    rows = list(csv.DictReader((tmp_path / "a.partial.csv").open()))
    assert len(rows) == 9
    with pytest.MonkeyPatch.context() as patch:
        going_on = Stop(patch)
        assert main(words) == 1, "one file could not be read"
        assert going_on.batches == 2, "the first three of five batches are not read again"
    assert "resuming after 9 of 13 images" in capsys.readouterr().err
    assert out.read_bytes() == whole
    assert kept.splitlines()[0] == whole.splitlines()[0]
    assert sorted(os.listdir(tmp_path)) == ["a.csv", "whole.csv"]


def test_answers_after_going_on_depend_on_the_saved_state(folder: Path, tmp_path: Path, whole: bytes) -> None:
    """The test above would not notice a lost state if no update were made."""
    from poem.predict import answers

    model, base = zoo.load("digits-bn")
    late = find_images(folder)[6:]
    settings: dict[str, Any] = {"mean": base.mean, "std": base.std, "lr": 0.05, "preset": "cifar"}
    fresh = next(iter(answers(model, late, "tent", folder=folder, prepare=Prepare(), batch_size=3, **settings)))
    rows = {row["file"]: row for row in csv.DictReader(whole.decode().splitlines())}
    assert any(abs(float(rows[each.file]["entropy"]) - (each.entropy or 0)) > 1e-3 for each in fresh if not each.error)


def test_a_run_killed_at_any_moment_goes_on(folder: Path, tmp_path: Path, whole: bytes) -> None:
    """As a crash leaves it: rows that no state belongs to, the last of them half."""
    out = tmp_path / "a.csv"
    words = ["predict", str(folder), *STREAM, "-o", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        Stop(patch, 4, interrupt)
        patch.setattr("poem.cli._checkpoint.EVERY", 3600.0)  # the state of the first batch is the last one written
        patch.setattr("poem.cli._checkpoint.FileCheckpoint.__exit__", lambda *_: None)
        assert main(words) == 130
    with (tmp_path / "a.partial.csv").open("ab") as file:
        file.write(b'"half a ro')
    with pytest.MonkeyPatch.context() as patch:
        going_on = Stop(patch)
        assert main(words) == 1
        assert going_on.batches == 4
    assert out.read_bytes() == whole


@pytest.mark.skipif(os.name != "posix", reason="needs kill -9")
def test_a_process_that_is_killed_goes_on(folder: Path, tmp_path: Path, whole: bytes) -> None:
    out, partial = tmp_path / "a.csv", tmp_path / "a.partial.csv"
    words = ["predict", str(folder), *STREAM, "-o", str(out)]
    slow = """import time, poem.predict as predict
read, waits = predict._read_batch, iter([0, 0])
predict._read_batch = lambda *words: (time.sleep(next(waits, 60)), read(*words))[1]"""  # the third waits for the end
    line = f"import torch; torch.set_num_threads(1)\n{slow}\nfrom poem.cli.main import main; main({words!r})"
    process = subprocess.Popen([sys.executable, "-c", line], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None and not (partial.exists() and partial.read_bytes().count(b"\n") > 6):
            time.sleep(0.02)
        assert process.poll() is None, "it should not have ended by itself"
    finally:
        process.kill()
        process.wait()
    assert not out.exists()
    assert main(words) == 1
    assert out.read_bytes() == whole
    assert sorted(os.listdir(tmp_path)) == ["a.csv", "whole.csv"]


@pytest.fixture
def stopped(folder: Path, tmp_path: Path) -> Path:
    """The place of a result whose run was stopped after two batches."""
    out = tmp_path / "a.csv"
    with pytest.MonkeyPatch.context() as patch:
        Stop(patch, 3, interrupt)
        assert main(["predict", str(folder), *STREAM, "-o", str(out)]) == 130
    return out


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (["--method", "source"], "method 'tent', now 'source'"),
        (["--batch-size", "4"], "batch_size 3, now 4"),
        (["--lr", "0.01"], "lr 0.05, now 0.01"),
        (["--shuffle", "0"], "images"),
        (["--resize", "40"], "prepare"),
    ],
)
def test_other_settings_do_not_go_on(
    folder: Path, stopped: Path, change: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    before = stopped.with_name("a.partial.csv").read_bytes()
    assert main(["predict", str(folder), *STREAM, "-o", str(stopped), *change]) == 2
    said = capsys.readouterr().err
    assert "was begun with" in said
    assert says in said
    assert "--restart" in said
    assert stopped.with_name("a.partial.csv").read_bytes() == before
    assert main(["predict", str(folder), *STREAM, "-o", str(stopped), *change, "--restart"]) == 1
    assert len(list(csv.DictReader(stopped.open()))) == 13
    assert os.listdir(stopped.parent) == ["a.csv"]


@pytest.mark.parametrize("words", [["predict", "{}", *STREAM, "-o"], ["demo", "imagenet", "--images", "{}", "--out"]])
def test_a_file_that_predict_did_not_write_is_not_replaced(
    folder: Path, tmp_path: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "predictions.csv"
    out.write_text("file,label\na.png,3\n")
    place = tmp_path if words[0] == "demo" else out
    assert main([*(word.format(folder) for word in words), str(place)]) == 2
    said = capsys.readouterr().err
    assert f"expected predictions of an earlier run, or nothing yet, at {out}, got another file" in said
    assert "give another place" in said
    assert out.read_text() == "file,label\na.png,3\n"
    assert os.listdir(tmp_path) == ["predictions.csv"]


@pytest.mark.parametrize(
    "there", ["", "file,label,name,first_entropy,source_label,source_entropy,error\na.png,3\n", None]
)
def test_predictions_of_an_earlier_run_and_an_empty_file_are_replaced(
    folder: Path, tmp_path: Path, whole: bytes, there: str | None
) -> None:
    out = tmp_path / "a.csv"
    if there is None:
        out.write_bytes(whole)
    else:
        out.write_text(there)
    assert main(["predict", str(folder), *STREAM, "-o", str(out)]) == 1, "one file could not be read"
    assert out.read_bytes() == whole


def test_a_file_of_somebody_else_is_not_taken_for_a_stopped_run(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.partial.csv").write_text("precious\n")
    assert main(["predict", str(folder), *STREAM, "-o", str(tmp_path / "a.csv")]) == 2
    assert "not written by poem predict" in capsys.readouterr().err
    assert (tmp_path / "a.partial.csv").read_text() == "precious\n"


def test_files_with_other_endings_are_counted(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "moving.gif").write_bytes(b"GIF89a")
    with caplog.at_level("WARNING", logger="poem"):
        find_images(folder)
    assert "left alone: their endings are none of" in caplog.text


def test_other_images_do_not_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    top, out = tmp_path / "in", tmp_path / "a.csv"
    top.mkdir()
    for at in range(8):
        Image.new("RGB", (32, 32), (9 * at, 90, 200)).save(top / f"{at}.png")
    words = ["predict", str(top), *STREAM, "-o", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        Stop(patch, 3, interrupt)
        assert main(words) == 130
    os.utime(top / "0.png", (1, 1))
    assert main(words) == 2
    assert "the images, or their order, are not those" in capsys.readouterr().err


@pytest.mark.parametrize("harm", ["rows edited", "rows cut", "state spoilt", "state gone", "state is another's"])
def test_a_record_that_cannot_be_trusted_is_refused(
    folder: Path, stopped: Path, harm: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, state = stopped.with_name("a.partial.csv"), stopped.with_name("a.partial.csv.state")
    if harm == "rows edited":
        rows.write_bytes(rows.read_bytes().replace(b"png", b"jpg", 1))
    elif harm == "rows cut":
        rows.write_bytes(rows.read_bytes()[:-20])
    elif harm == "state spoilt":
        state.write_bytes(state.read_bytes()[:-20])
    elif harm == "state is another's":
        model, _ = zoo.load("digits-bn")
        poem.adapt(model, "tent").save(state)
    else:
        state.unlink()
    words = ["predict", str(folder), *STREAM, "-o", str(stopped)]
    capsys.readouterr()
    if harm == "state gone":
        assert main(words) == 1, "there is nothing to go on from"
    else:
        assert main(words) == 2
        assert "--restart" in capsys.readouterr().err
        assert main([*words, "--restart"]) == 1
    assert len(list(csv.DictReader(stopped.open()))) == 13


def test_two_runs_do_not_write_one_result(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fcntl")
    words = ["predict", str(folder), *STREAM, "-o", str(tmp_path / "a.csv")]
    codes = []
    with pytest.MonkeyPatch.context() as patch:
        Stop(patch, 3, lambda: codes.append(main(words)))
        assert main(words) == 1
    assert codes == [2]
    assert "another process writes" in capsys.readouterr().err
    assert len(list(csv.DictReader((tmp_path / "a.csv").open()))) == 13


def test_a_link_in_place_of_the_record_is_not_written_through(folder: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "a.partial.csv").symlink_to(victim)
    assert main(["predict", str(folder), *STREAM, "-o", str(tmp_path / "a.csv")]) == 2
    assert victim.read_text() == "mine"


ODD_NAMES = [
    b"a,b.png", b'quo"ted".png', b"new\nline.png", b"car\rriage.png", b"-dash.png", b"--method.png", b"=1+1.png",
    b"sp ace .png", "\u00e9\u2603.png".encode(), b"not utf-8 \xff\xfe.png", b"\x1b[31mred.png", b"tab\t'.png",
    b"x" * 251 + b".png", b"%s{}.png", b"$(touch x).png",
]  # fmt: skip


@pytest.mark.skipif(sys.platform != "linux", reason="other systems take fewer names")
def test_any_file_name_survives(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    top, out = tmp_path / "-photos", tmp_path / "out" / "a.csv"
    top.mkdir()
    data = io.BytesIO()
    Image.new("RGB", (32, 32), (90, 10, 30)).save(data, "PNG")
    for name in ODD_NAMES:
        (top / os.fsdecode(name)).write_bytes(data.getvalue())
    (top / os.fsdecode(b"broken\n\xff.png")).write_bytes(b"")
    words = ["predict", f"{tmp_path}/-photos", *STREAM, "-o", str(out)]
    with pytest.MonkeyPatch.context() as patch:
        Stop(patch, 4, interrupt)
        assert main(words) == 130
    assert main(words) == 1
    with out.open(encoding="utf-8", errors="surrogateescape", newline="") as file:
        rows = list(csv.DictReader(file))
    assert sorted(os.fsencode(row["file"]) for row in rows) == sorted([*ODD_NAMES, b"broken\n\xff.png"])
    (lost,) = [row for row in rows if row["error"]]
    assert "\n" not in lost["error"]
    said = capsys.readouterr().out
    assert r"unreadable: broken\n\udcff.png: 0 bytes" in said
    assert main([*words, "--json"]) == 1
    found = [json.loads(line)["file"] for line in capsys.readouterr().out.splitlines()]
    assert sorted(map(os.fsencode, found)) == sorted([*ODD_NAMES, b"broken\n\xff.png"])


def test_a_terminal_of_another_encoding_is_no_reason_to_fail() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    code = "import sys; from poem.cli.main import main; import poem.cli.list as l; "
    code += "l.names_of = lambda kind: {'n\\u00e9\\udcff': 'x'}; sys.exit(main(['list', 'methods']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"n\\xe9\\udcff")
