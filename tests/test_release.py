"""What a release consists of: archives that install and run by themselves, and files that agree with one another."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import poem

ROOT = Path(__file__).resolve().parents[1]
DATA_SETS = ("npy", "npz", "tar", "gz", "zip", "jpg", "jpeg", "JPEG", "bin", "pt", "pth", "parquet", "pickle", "pkl")


def _build(source: Path, target: str, into: Path) -> Path:
    """One archive, made by the builder itself: without pip, isolation or a network."""
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(into)]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (made,) = into.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ROOT / "pyproject.toml").is_file():
        pytest.skip("no checkout")
    return _build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the unpacked source archive, as an installer would: what that lacks, the wheel lacks."""
    at = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        if hasattr(tarfile, "data_filter"):
            archive.extractall(at, filter="data")
        else:
            archive.extractall(at)
    (unpacked,) = at.iterdir()
    return _build(unpacked, "wheel", tmp_path_factory.mktemp("wheel"))


def _contents(sdist: Path) -> dict[str, int]:
    """Size of every file of a source archive, by its path in the repository."""
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2]: member.size for member in archive if member.isfile()}


def test_the_source_archive_holds_the_repository_and_no_data_set(sdist: Path) -> None:
    held = _contents(sdist)
    # One file per suite holds every sample of the study, a bit each; nothing else may be as large.
    large = [name for name, size in held.items() if size > 1_000_000 and not name.startswith("results/study/")]
    assert not large
    assert all(size < 5_000_000 for size in held.values())
    assert [name for name in held if name.rpartition(".")[2] in DATA_SETS] == []
    assert sdist.stat().st_size < 10_000_000
    for name in ("README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "Makefile", "tests/test_release.py"):
        assert name in held
    top = {name.partition("/")[0] for name in held} - {"PKG-INFO", ".gitignore"}
    assert top <= {path.name for path in ROOT.iterdir()}, "nothing is made for the archive alone"


def test_what_lies_beside_the_repository_stays_out_of_the_source_archive(sdist: Path) -> None:
    """The archive is made from a list of names, so that a folder with images in the checkout is not published."""
    named = re.search(
        r"\[tool\.hatch\.build\.targets\.sdist\].*?include = \[(.*?)\]", _read("pyproject.toml"), re.DOTALL
    )
    assert named is not None
    allowed = {name.lstrip("/") for name in re.findall(r'"([^"]+)"', named[1])}
    for name in allowed:
        assert (ROOT / name).exists(), f"pyproject.toml names {name}, which is not there"
    always = {"PKG-INFO", ".gitignore", "pyproject.toml", "README.md", "LICENSE"}
    assert {name.partition("/")[0] for name in _contents(sdist)} <= allowed | always


def test_the_wheel_holds_weights_suites_templates_and_the_mark_of_types(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    package = ROOT / "src" / "poem"
    files = {path.relative_to(package) for path in package.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    for path in files:
        assert f"poem/{path.as_posix()}" in held
    kinds = {path.suffix for path in files}
    assert {".safetensors", ".html", ".css", ".js", ".json", ".txt", ".typed"} <= kinds
    suites = {path.name for path in (ROOT / "benchmarks" / "suites").iterdir()}
    assert {"scales.yaml", "table1.yaml", "demo.yaml"} <= suites
    for name in suites:
        assert f"poem/_suites/{name}" in held
    outside = {name.partition("/")[0] for name in held} - {"poem"}
    assert outside == {f"poem_tta-{poem.__version__}.dist-info"}, "one package, and nothing of tests or docs"


def _needed(names: list[str], seen: dict[str, Distribution]) -> dict[str, Distribution]:
    """Installed packages that the requirements name, and what those need, without extras."""
    for text in names:
        wanted = Requirement(text)
        if wanted.marker is not None and not wanted.marker.evaluate({"extra": ""}):
            continue
        name = canonicalize_name(wanted.name)
        if name not in seen:
            try:
                seen[name] = distribution(name)
            except PackageNotFoundError:  # such as a GPU's libraries, beside a build of torch for CPUs
                continue
            _needed(list(seen[name].requires or []), seen)
    return seen


def _link(found: Distribution, into: Path) -> None:
    """Make an installed package importable from another environment, without a copy."""
    tops = {file.parts[0] for file in found.files or [] if file.parts[0] not in ("..", "__pycache__")}
    for top in tops:
        origin, target = Path(str(found.locate_file(top))), into / top
        if origin.exists() and not target.exists():
            target.symlink_to(origin, target_is_directory=origin.is_dir())


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the programs of an environment with the wheel and what it requires, and nothing else."""
    if os.name == "nt":
        pytest.skip("links to packages need rights there")
    at = tmp_path_factory.mktemp("environment")
    venv.create(at, with_pip=False, symlinks=True)
    (site,) = at.glob("lib/python*/site-packages")
    python = at / "bin" / "python"
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    done = subprocess.run([*command, str(wheel)], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (metadata,) = site.glob("poem_tta-*.dist-info")
    for found in _needed(list(Distribution.at(metadata).requires or []), {}).values():
        _link(found, site)
    return at / "bin"


def _run(command: list[str], at: Path, *, code: int = 0) -> str:
    """What a program prints, run outside the checkout with an environment that names no folder of it."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "POEM"))}
    done = subprocess.run(command, cwd=at, env=plain, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


PROGRAM = """
import json
from importlib import metadata, util
import torch, poem
from poem import zoo

model, base = zoo.load("cifar10-bn")
adapter = poem.adapt(model, "deyo+poem", mean=base.mean, std=base.std, preset="cifar")
logits = adapter(torch.rand(8, 3, 32, 32))
optional = ["timm", "torchvision", "matplotlib", "mlxtend", "sklearn", "ray", "transformers", "onnx", "pytest"]
found = [name for name in optional if util.find_spec(name)]
print(json.dumps([poem.__file__, poem.__version__, metadata.version("poem-tta"), list(logits.shape), found]))
"""


@pytest.mark.slow
def test_the_wheel_runs_in_an_environment_with_its_requirements_alone(environment: Path, tmp_path: Path) -> None:
    python, command = str(environment / "python"), str(environment / "poem")
    lines = _run([python, "-c", PROGRAM], tmp_path).splitlines()  # warnings of the method are among them
    told: list[Any] = json.loads(next(line for line in lines if line.startswith("[")))
    assert Path(told[0]).is_relative_to(environment.parent), "not the checkout"
    assert told[1:] == [poem.__version__, poem.__version__, [8, 10], []]
    assert f"poem-tta {poem.__version__}" in _run([command, "--version"], tmp_path)
    helped = _run([command, "--help"], tmp_path)
    assert "reproduce" in helped
    assert helped == _run([python, "-m", "poem", "--help"], tmp_path)
    assert "deyo+poem" in _run([command, "show", "deyo+poem"], tmp_path)
    listed = _run([command, "list"], tmp_path)
    assert {"tent", "poem", "auto"} <= set(listed.split())
    assert "ImageNet-C" in _run([command, "show", "table1"], tmp_path), "the paper's tables come with the wheel"
    for word in ("demo", "completion"):
        told_off = _run([command, word, *(["bash"] if word == "completion" else [])], tmp_path, code=2)
        assert f"pip install 'poem-tta[{word}]'" in told_off, "what an extra brings is named, not traced back"


# Files that agree with one another ------------------------------------------------------------------------------------


def _read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_version_is_the_changelog_s_newest_and_the_citation_s() -> None:
    version = Version(poem.__version__)
    assert str(version) == poem.__version__, "written as an index would write it"
    heading = re.search(r"^## (\S+)", _read("CHANGELOG.md"), re.M)
    assert heading is not None
    assert heading[1] == poem.__version__
    assert yaml.safe_load(_read("CITATION.cff"))["version"] == poem.__version__


def test_the_citation_follows_its_schema() -> None:
    """The parts of version 1.2.0 of the schema that the file uses; `cffconvert --validate` checks all of it."""
    held: dict[str, Any] = yaml.safe_load(_read("CITATION.cff"))
    assert held["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= set(held), "the fields that the schema requires"
    texts = {"cff-version", "message", "title", "abstract", "license", "version", "type", "date-released", "doi", "url"}
    assert set(held) <= texts | {"authors", "keywords", "references", "repository-code"}
    assert all(isinstance(held[name], str) and held[name] for name in texts & set(held))
    assert held["type"] == "software"
    assert held["license"] == "MIT"
    assert len(set(held["keywords"])) == len(held["keywords"])
    person, group = {"family-names", "given-names", "orcid"}, {"name", "website"}
    for each in (held, *held["references"]):
        assert {"title", "authors", "type"} <= set(each)
        for author in each["authors"]:
            assert author
            assert set(author) <= person or set(author) <= group
    assert "POEM" in held["references"][0]["title"]


WORKFLOW: dict[str, Any] = yaml.safe_load(_read(".github/workflows/test.yml"))


def test_the_workflow_runs_make_test_on_every_version_of_python_that_the_package_names() -> None:
    named = re.findall(r"Programming Language :: Python :: (3\.\d+)", _read("pyproject.toml"))
    assert named[0] == "3.10"
    assert 'requires-python = ">=3.10"' in _read("pyproject.toml")
    whole, core = WORKFLOW["jobs"]["make-test"], WORKFLOW["jobs"]["core-windows"]
    for job in (whole, core):
        assert job["strategy"]["matrix"]["python"] == named
    assert whole["strategy"]["matrix"]["os"] == ["ubuntu-latest", "macos-latest"]
    assert whole["steps"][-1]["run"].startswith("make test ")
    assert re.search(r"^test:", _read("Makefile"), re.M)


def test_what_the_workflow_names_exists() -> None:
    lines = [step["run"] for job in WORKFLOW["jobs"].values() for step in job["steps"] if "run" in step]
    tests = {word for line in lines for word in line.split() if word.startswith("tests/")}
    assert {"tests/engine", "tests/parts", "tests/recipes", "tests/test_contract.py", "tests/test_release.py"} <= tests
    assert [name for name in tests if not (ROOT / name).exists()] == []
    extras = {word for line in lines for found in re.findall(r'"\.\[([\w,]+)\]"', line) for word in found.split(",")}
    declared = re.findall(r"^(\w+) = \[", _read("pyproject.toml").partition("[project.optional-dependencies]")[2], re.M)
    assert extras
    assert extras <= set(declared)


def test_the_dockerfile_copies_what_the_wheel_is_made_of_and_runs_the_demo() -> None:
    written = _read("Dockerfile")
    copied = [line.split()[1:-1] for line in written.splitlines() if line.startswith("COPY ")]
    sources = {name for names in copied for name in names}
    assert sources == {"pyproject.toml", "README.md", "LICENSE", "src", "benchmarks/suites"}
    let_in = {line[1:] for line in _read(".dockerignore").splitlines() if line.startswith("!")}
    assert let_in == sources
    assert all((ROOT / name).exists() for name in sources)
    assert re.findall(r"^CMD (.*)$", written, re.M) == ['["poem", "demo"]']


def test_what_runs_before_a_commit_is_what_make_check_runs() -> None:
    hooks = {
        hook["id"]: hook for repo in yaml.safe_load(_read(".pre-commit-config.yaml"))["repos"] for hook in repo["hooks"]
    }
    assert {"ruff-check", "ruff-format", "mypy", "trailing-whitespace", "check-yaml", "check-added-large-files"} <= set(
        hooks
    )
    recipe = re.findall(r"^\t\$\(BIN\)/(.*)$", _read("Makefile").partition("\ncheck:")[2].partition("\n\n")[0], re.M)
    programs = {" ".join(line.split()[: 2 if line.startswith("ruff") else 1]) for line in recipe}
    entries = {hook["entry"].removesuffix(" --force-exclude") for hook in hooks.values() if "entry" in hook}
    assert entries == programs == {"ruff check", "ruff format", "mypy"}


def test_the_page_of_releases_says_what_nobody_has_run() -> None:
    page = _read("docs/releasing.md")
    untested = page.partition("## What is not tested")[2].partition("\n## ")[0]
    for word in ("Dockerfile", ".github/workflows/test.yml", "MPS", "macOS", "Windows", "Colab"):
        assert word in untested
    assert "on no registry yet" in " ".join(_read("README.md").split())
