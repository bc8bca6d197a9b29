"""README and docs agree with the code: blocks run, tables and numbers match, names exist, links have targets."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import io
import json
import math
import re
import runpy
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import toys
from anatomies import TABLE
from nets import make_net

import poem
from poem.bench.leaderboard_rows import read_results
from poem.bench.suites import load
from poem.cli.list import SUFFIX_LINES, names_of
from poem.cli.main import main
from poem.parts import SGD, Everything, NormAffine, Nothing
from poem.parts.objective import Total
from poem.parts.selection import Both
from poem.parts.weighting import Sum
from poem.recipes.methods import HOSTS, METHODS, SUFFIXES, describe
from poem.recipes.text import parse
from poem.report.demo import DemoRow, sentences
from poem.streams.shift import VERSIONS

ROOT = Path(__file__).parent.parent
DOCS = sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def nearly_same(printed: str, expected: str) -> bool:
    """Whether two outputs are equal, but for percentages of up to 2 points: another processor rounds otherwise."""
    pairs = zip(*(re.findall(r"\b(\d+)%", text) for text in (printed, expected)), strict=False)
    words = [re.sub(r"\b\d+%", "%", text) for text in (printed, expected)]
    return words[0] == words[1] and all(abs(int(one) - int(other)) <= 2 for one, other in pairs)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_blocks_of_a_page_run_one_after_the_other(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```(?:\n+```output\n(.*?)```)?", page.read_text(), flags=re.DOTALL)
    for block, expected in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(block, str(page), "exec", dont_inherit=True), names)
        same = not expected or nearly_same(printed.getvalue(), expected)
        assert same, f"{page.name} shows another output than its block prints: {printed.getvalue()}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_to_files_have_targets(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)", prose):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_examples_run(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(example), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.slow
def test_the_pages_build_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", str(ROOT / "docs")]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "index.html").is_file()


def test_the_notebook_runs_and_holds_no_output(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("MPLBACKEND", "agg")
    book = json.loads(_read("examples/tour.ipynb"))
    names: dict[str, Any] = {}
    for cell in book["cells"]:
        assert not cell.get("outputs"), "a notebook is committed without what it printed"
        if cell["cell_type"] == "code" and "install" not in cell["metadata"].get("tags", []):
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile("".join(cell["source"]), "tour.ipynb", "exec", dont_inherit=True), names)
    assert {"table", "plain"} <= set(names)


def test_the_notebook_s_first_cell_installs_from_the_address_that_the_readme_names() -> None:
    codes = [cell for cell in json.loads(_read("examples/tour.ipynb"))["cells"] if cell["cell_type"] == "code"]
    tagged = ["install" in cell["metadata"].get("tags", []) for cell in codes]
    assert tagged == [True] + [False] * (len(codes) - 1)
    addresses = set(re.findall(r"git\+(https://[\w./-]+)", _read("README.md")))
    (address,) = re.findall(r'%pip install .*"poem-tta\[demo\] @ git\+(https://[\w./-]+)"', "".join(codes[0]["source"]))
    assert addresses == {address}
    assert all("%pip" not in line and not line.startswith("!") for cell in codes[1:] for line in cell["source"])


def test_outputs_may_differ_in_the_last_percent_and_in_nothing_else() -> None:
    assert nearly_same("source 10%, auto 37%", "source 11%, auto 35%")
    assert not nearly_same("source 10%, auto 37%", "source 10%, auto 34%")
    assert not nearly_same("source 10%, auto 37%", "source 10%, tent 37%")
    assert not nearly_same("share 0.37", "share 0.38")


def first_screen() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_read("results/first_screen.json"))
    return found


def test_the_first_block_of_the_readme_prints_the_accuracies_of_the_picture() -> None:
    readme = _read("README.md")
    block, output = re.findall(r"```python\n(.*?)```\n+```output\n(.*?)```", readme, flags=re.DOTALL)[0]
    assert "adapter = poem.adapt(model, **settings)" in block, "no method is named"
    top1 = {(row["network"], row["method"]): row["accuracy"] for row in first_screen()["rows"]}
    for line in output.splitlines():
        name, _, shares = line.partition(": ")
        stated = [(method, int(share)) for method, share in re.findall(r"(\w+) (\d+)%", shares)]
        assert stated == [(method, round(top1[name, method])) for method in ("source", "tent", "auto")]
    assert len(output.splitlines()) == 2
    assert top1["digits-bn", "source"] < top1["digits-bn", "auto"] < top1["digits-bn", "tent"]
    assert top1["digits-gn", "tent"] < top1["digits-gn", "source"] < top1["digits-gn", "auto"]


def test_the_readme_opens_with_one_picture_and_one_command() -> None:
    readme = _read("README.md")
    opening = readme[: readme.index("```python")]
    assert opening.index("(docs/first_screen.png)") < opening.index("make demo")
    assert len(re.findall(r"!\[", opening)) == opening.count("```text") == 1
    assert (ROOT / "docs" / "first_screen.png").stat().st_size < 200_000
    words = re.search(r"!\[(.*?)\]\(docs/first_screen.png\)", readme)
    assert words is not None
    top1 = [round(row["accuracy"]) for row in first_screen()["rows"]]
    assert [int(number) for number in re.findall(r"(\d+) %", words[1])] == top1, "for readers who cannot see it"
    for each in first_screen()["examples"]:
        assert each["before"] != each["truth"] == each["after"]


def test_the_readme_says_what_the_guard_costs() -> None:
    seconds = {(row["network"], row["method"]): row["seconds"] for row in first_screen()["rows"]}
    ratio = {name: seconds[name, "auto"] / seconds[name, "tent"] for name in ("digits-bn", "digits-gn")}
    text = " ".join(_read("README.md").split())
    assert "between four and five times Tent's time on digits-bn and about three times on digits-gn" in text
    assert 4 <= ratio["digits-bn"] <= 5
    assert 2.5 <= ratio["digits-gn"] <= 3.5


def test_the_screenshot_of_the_demo_is_of_the_numbers_in_the_readme() -> None:
    from PIL import Image

    with Image.open(ROOT / "docs" / "demo.png") as picture:
        picture.load()
        held = picture.info["demo.json"]
    assert held == hashlib.sha256((ROOT / "results" / "demo.json").read_bytes()).hexdigest()


def test_the_readme_shows_the_demo_s_numbers() -> None:
    held = json.loads((ROOT / "results" / "demo.json").read_text())
    readme = _read("README.md")
    for row in held["rows"]:
        assert f"{row['accuracy']:.1f} ({row['gain']:+5.1f})" in readme, row


def test_the_readme_says_where_the_demo_loses() -> None:
    held = {(row["method"], row["network"]): row for row in json.loads(_read("results/demo.json"))["rows"]}
    names = [item.name for item in fields(DemoRow)]
    found = {at: DemoRow(**{name: row[name] for name in names}) for at, row in held.items()}
    readme = " ".join(_read("README.md").split())
    for sentence in sentences(load("demo"), found):
        assert sentence in readme


def test_the_suite_on_the_page_of_benchmarks_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    blocks = re.search(r"```yaml\n(name: mine\n.*?)```\n\n```console\n(.*?)```", _read("docs/benchmarks.md"), re.DOTALL)
    assert blocks is not None
    Path("mine.yaml").write_text(blocks[1])
    first, second = (line.removeprefix("$ poem ").split() for line in blocks[2].splitlines())
    assert main([*first, "--engine", "inline"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("; poem report mine makes a page of them")
    Path("mine.yaml").unlink()
    assert main(second) == 0
    page = Path("mine/report.md").read_text()
    assert "## Tent, and Tent on samples that are sure because of shape" in page
    rows = dict(re.findall(r"^\| (Tent|Tent by shape) \| \**([\d.]+)\** \| none", page, re.M))
    assert len(rows) == 2
    assert "select = EntropyBelow(0.4) &amp; PLPDAbove(0.1)" in page


def test_the_row_on_the_page_of_the_leaderboard_is_made_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The suite, the three commands, and the file in the repository that they made."""
    from poem.bench import provenance

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(provenance, "_commit", lambda: {"commit": "0" * 40, "dirty": False})
    page = _read("docs/leaderboard.md")
    blocks = re.search(r"```yaml\n(name: mine\n.*?)```\n\n```console\n(.*?)```", page, re.DOTALL)
    assert blocks is not None
    Path("mine.yaml").write_text(blocks[1])
    first, second, third = (line.removeprefix("$ poem ").split() for line in blocks[2].splitlines())
    assert main([*first, "--engine", "inline"]) == 0
    assert main(second) == 0
    assert main(third) == 0
    assert "18 cells, 3 rows in 1 blocks" in capsys.readouterr().out
    kept = {each.key: each for each in read_results(ROOT / "results" / "leaderboard" / "tent-by-shape.json")}
    again = {each.key: each for each in read_results(Path("tent-by-shape.json"))}
    assert set(kept) == set(again), "the file in the repository is of this suite"
    for key, result in again.items():
        n = result.card["total"]
        assert result.metrics["top1"] == pytest.approx(kept[key].metrics["top1"], abs=100 * 0.5 / n**0.5)


TABLED = re.findall(r"^\| `([\w-]+)` \|", (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8"), re.M)
"""Methods in the README's table; the others have their page alone."""
NETWORKS = ("batch norm", "group norm", "layer norm")
PLAIN_FIELDS = ("parameters", "statistics", "lr", "readout")
"""Fields of a recipe that the README's table describes in prose, or not at all."""


def method_rows() -> dict[str, tuple[str, str, str]]:
    """Paper, recipe and result of each method in the README's table."""
    table = _read("README.md").partition("| method | paper | recipe | BN/GN/ViT |\n")[2].partition("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table.splitlines()[1:]]
    return {name.strip("`"): (paper, recipe, result) for name, paper, recipe, result in rows}


def leaves(part: Any) -> set[Any]:
    """The parts that a part combines, where it is a sum or a chain."""
    if isinstance(part, Both | Sum | Total):
        return leaves(part.first) | leaves(part.second)
    return {part}


def choices(recipe: poem.Recipe) -> set[Any]:
    """The parts of a recipe that differ from Tent's, except for plain gradient descent."""
    plain = poem.Recipe()
    found = {plain.readout.correct, recipe.readout.correct} - {plain.readout.correct}
    for item in fields(recipe):
        value = getattr(recipe, item.name)
        if isinstance(value, poem.Recipe):  # for networks with batch norm
            found |= choices(value)
        elif item.name not in PLAIN_FIELDS and value is not None and type(value) is not SGD:
            found |= leaves(value) - leaves(getattr(plain, item.name))
    return found


def test_the_table_of_methods_has_methods_in_order() -> None:
    assert list(method_rows()) == [name for name in METHODS if name in method_rows()]
    assert set(method_rows()) <= set(poem.methods())


@pytest.mark.parametrize("name", TABLED)
def test_the_table_of_methods_has_the_parts_of_each_recipe(name: str) -> None:
    stated, recipe = method_rows()[name][1], poem.recipe(name)
    quoted = re.findall(r"`([^`]+)`", stated)
    named = {leaf for text in quoted if text not in METHODS for leaf in leaves(parse(text))}
    inherited = {leaf for text in quoted if text in METHODS for leaf in choices(poem.recipe(text))}
    assert named <= choices(recipe) | leaves(recipe.minimise), "every part in the table is in the recipe"
    assert choices(recipe) <= named | inherited, "every part of the recipe is in the table"
    adapted = "no updates" if isinstance(recipe.parameters, Nothing) else ""
    adapted = "all parameters" if isinstance(recipe.parameters, Everything) else adapted
    assert [each for each in ("no updates", "all parameters") if each in stated] == [adapted] * bool(adapted)
    top = recipe.parameters == NormAffine("excluded")
    assert ("without the top" in stated or "`poem`" in stated) == top


@pytest.mark.parametrize("name", TABLED)
def test_the_table_of_methods_names_the_paper(name: str) -> None:
    stated = describe(name).partition("Paper: ")[2].partition("Reference code:")[0]
    paper = method_rows()[name][0]
    assert (paper == "-") == stated.startswith("none")
    assert set(re.findall(r"\w+", paper)) <= set(re.findall(r"\w+", stated))


def test_the_table_of_methods_has_the_demo_s_results() -> None:
    held = json.loads((ROOT / "results" / "demo.json").read_text())
    mean = {(row["method"], row["network"]): row["accuracy"] for row in held["rows"]}
    label = {placed.cell.method: placed.row for placed in load("demo").placed}
    for name, (_, _, result) in method_rows().items():
        ran = name in label
        expected = "/".join(f"{mean[label[name], each]:.1f}" for each in NETWORKS) if ran else "-"
        assert result == expected, name


def test_the_readme_shows_the_trained_networks_accuracies() -> None:
    held = json.loads((ROOT / "results" / "sources" / "cifar10.json").read_text())
    for name, record in held.items():
        assert f"{record['accuracy']:.2f} %" in _read("README.md"), name


def test_the_page_of_streams_shows_how_near_drawn_frost_is_to_the_photographs() -> None:
    held = json.loads((ROOT / "results" / "streams" / "frost.json").read_text())
    page = _read("docs/streams.md").replace("\n", " ")
    assert held["textures"] == f"generated-{VERSIONS['frost']}"
    assert sorted(row["size"] for row in held["rows"]) == [32, 64, 224]
    assert max(abs(ratio - 1) for row in held["rows"] for ratio in row["change"]) <= 0.01
    assert "within 1 % of the photographs' at every severity" in page
    for kind, text in (("drawn", "gets {} and {} % of 500"), ("photographs", "with the photographs {} and {} %")):
        *first, last = held["accuracy"][kind]
        assert text.format(", ".join(map(str, first)), last) in page


def test_what_loading_costs() -> None:
    held = json.loads(_read("results/streams/loading_cost.json"))["ms_per_image"]
    page = _read("docs/speed.md").split("## From files to answers")[1]
    names = list(held)
    for row in (names[:8], names[8:]):
        assert f"| {' | '.join(f'{held[name]:.1f}' for name in row)} |" in page
    rows = json.loads(_read("results/speed/speed-resnet50-bn.json"))["rows"]
    (poem1,) = (row for row in rows if (row["method"], row["mode"], row["batch"]) == ("poem1", "bf16", 64))
    speed = round(poem1["images_per_s"], -2)
    processes = {name: math.ceil(speed * ms / 1000) for name, ms in held.items()}
    average = math.ceil(speed * sum(ms for name, ms in held.items() if name != "clean") / 15_000)
    said = (
        f"For {speed:,.0f} images per second, POEM with one update on ResNet-50 in the table above, these are "
        f"{processes['clean']} for clean images, {average} on average over the fifteen corruptions, "
        f"{processes['elastic_transform']} for elastic transform and {processes['glass_blur']} for glass blur"
    )
    assert said in " ".join(page.split())


def test_what_handing_over_a_batch_costs() -> None:
    """Both ways for each number of processes, as in the file."""
    page = _read("docs/speed.md").split("## From files to answers")[1]
    for row in json.loads(_read("results/streams/hand_over.json"))["rows"]:
        times = [f"{row[way]['taker_ms']:.1f}" for way in ("tensors", "slots")]
        gain = f"{row['slots_over_tensors']['images_per_s']:.1f}"
        assert f"| {row['images']}, {row['workers']} | {times[0]} | {times[1]} | {gain} |" in page
        assert [round(row[way]["bytes"] / 1e6, 1) for way in ("tensors", "slots")] == [38.5, 9.6]


def _speeds() -> ModuleType:
    """`benchmarks/speed_docs.py`, which is in no package."""
    spec = importlib.util.spec_from_file_location("speed_docs", ROOT / "benchmarks" / "speed_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_speeds_on_pages_are_of_the_code_as_it_is() -> None:
    speeds, places = _speeds(), 0
    today = speeds.tree_hash(ROOT)
    for path in speeds.pages(ROOT):
        text = path.read_text()
        places += len(speeds.PLACE.findall(text))
        assert text == speeds.filled(text, ROOT / "results" / "speed", today), (
            f"{path.name} quotes other speeds than those measured; type: python benchmarks/speed_docs.py"
        )
        outside = speeds.PLACE.sub("", text)
        assert not re.findall(r"\d[\d,.]* (?:/ \d[\d,.]* )?images/s|results/speed/h200", outside), path.name
    assert places >= 5


def test_stacked_speeds_are_of_the_service_as_it_is(tmp_path: Path) -> None:
    speeds, page = _speeds(), "<!-- speed:stacked.json stacked -->\n\n<!-- /speed -->"
    row = {"method": "tent", "stacked": 1234.0, "turns": 37.0, "one_stream": 2468.0, "ratio": 0.5, "difference": 1e-7}
    for served, quoted in ((speeds.tree_hash(names=speeds.STACKED), True), ("another", False)):
        content = {"tree": "a", "serve": served, "device": "GPU", "streams": 64, "rows": [row]}
        (tmp_path / "stacked.json").write_text(json.dumps(content))
        assert ("1234" in speeds.filled(page, tmp_path, "a")) == quoted


HOST = {"host": {"device": "A GPU", "torch": "2.9"}}
"""What a file of speeds was measured with."""


def test_a_file_of_another_tree_is_not_quoted(tmp_path: Path) -> None:
    speeds = _speeds()
    rows = [{
        "net": "n", "batch": 64, "method": "poem1", "mode": "bf16", "select": 100, "status": "ok", "median_ms": 1.0,
        "images_per_s": 4321.0, "ratio_to_source": None, "share_of_limit": 0.7, "peak_allocated_mib": 10,
    }]  # fmt: skip
    page = "before\n<!-- speed:some.json rows -->\n<!-- /speed -->\nafter\n"
    assert "Not measured yet" in speeds.filled(page, tmp_path, "today")
    (tmp_path / "some.json").write_text(json.dumps({"tree": "today", **HOST, "rows": rows}))
    fresh = speeds.filled(page, tmp_path, "today")
    assert "A GPU, torch 2.9:" in fresh
    assert "| n | 64 | poem1 | bf16 | 100 % | 4321 |" in fresh
    stale = speeds.filled(fresh, tmp_path, "tomorrow")
    assert "4321" not in stale
    assert "of an earlier version of the code and not quoted" in stale
    with pytest.raises(ValueError, match="expected speed:FILE with one of rows"):
        speeds.filled(page.replace("rows", "everything"), tmp_path, "today")


def test_rows_that_an_unfinished_run_left_out_are_named_beside_those_measured(tmp_path: Path) -> None:
    speeds = _speeds()
    row = {
        "status": "ok", "net": "n", "batch": 64, "method": "poem1", "mode": "bf16", "select": 100, "median_ms": 1.0,
        "images_per_s": 4321.0, "ratio_to_source": None, "share_of_limit": 0.7, "peak_allocated_mib": 10,
    }  # fmt: skip
    # The first one finished after all.
    skipped = ["n batch 64 poem1 bf16 100 %", "n batch 64 poem1 bf16 50 %", "n batch 1 auto bf16 100 %"]
    page = "<!-- speed:some.json rows -->\n<!-- /speed -->\n"
    run = {"tree": "today", **HOST, "seconds": 30.0, "settings": {"budget": 30.0}}
    (tmp_path / "some.json").write_text(json.dumps({**run, "rows": [row], "skipped": skipped}))
    said = speeds.filled(page, tmp_path, "today")
    assert "**Unfinished**: the run was cut off when its 30 s were over." in said
    assert "Not measured: n batch 64 poem1 bf16 50 %, n batch 1 auto bf16." in said, "no share is forced on auto"
    (tmp_path / "some.json").write_text(json.dumps({**run, "seconds": 7.0, "rows": [row], "skipped": skipped}))
    assert "the run was cut off after 7 s, of 30 that it might have taken." in speeds.filled(page, tmp_path, "today")
    (tmp_path / "some.json").write_text(json.dumps({**run, "rows": [row], "skipped": skipped[:1]}))
    assert "Not measured" not in speeds.filled(page, tmp_path, "today")
    other, rows = ["m batch 64 poem1 bf16 50 %"], [row, {**row, "net": "m", "curve": "m"}]
    (tmp_path / "some.json").write_text(json.dumps({**run, "rows": rows, "skipped": other}))
    assert "Not measured" not in speeds.filled(page, tmp_path, "today"), "it is in another table"
    (tmp_path / "some.json").write_text(json.dumps({**run, "rows": [row], "skipped": other}))
    assert "Not measured: m batch 64" in speeds.filled(page, tmp_path, "today")


def _measured_tree(root: Path) -> Path:
    """The source folder of a tree with a file for each of the names that a speed's hash is over."""
    source = root / "src" / "poem"
    for name in _speeds().MEASURED:
        file = source / (name if name.endswith(".py") else f"{name}/some.py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x = 0\n")
    return source


def test_the_hash_of_the_code_knows_code_from_words(tmp_path: Path) -> None:
    speeds, file, seen = _speeds(), _measured_tree(tmp_path) / "engine" / "one.py", []
    for text in (
        '"""Says."""\nx = 1\n', '"""Says more."""\n\nx = 1  # why\n', 'x = 1\n"""An attribute."""\n',
        "x = 2\n", "x = None\n",
    ):  # fmt: skip
        file.write_text(text)
        seen.append(speeds.tree_hash(tmp_path))
    assert seen[0] == seen[1] == seen[2]
    assert len(set(seen)) == 3


def test_the_hash_of_the_code_is_the_same_in_every_version_of_python(tmp_path: Path) -> None:
    # Python 3.12 gave functions and classes type_params, which 3.11 does not have.
    import ast

    plain = _speeds().plain_tree

    tree = ast.parse("def f(x: int) -> None:\n    return None\n\nclass C: pass\n")
    before = plain(tree)
    nodes: list[Any] = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    for node in nodes:
        node._fields = tuple(dict.fromkeys([*node._fields, "type_params"]))
        node.type_params = []
    assert plain(tree) == before
    assert "type_params" not in before


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("adapter.py", True), ("engine/loop.py", True), ("recipes/methods.py", True),
        ("accelerate/capture.py", True), ("guarded/actions.py", False),
    ],
)  # fmt: skip
def test_the_hash_of_the_code_is_over_all_that_is_measured(name: str, counts: bool, tmp_path: Path) -> None:
    speeds, file, seen = _speeds(), _measured_tree(tmp_path) / name, []
    file.parent.mkdir(exist_ok=True)
    for text in ("x = 1\n", "x = 2\n"):
        file.write_text(text)
        seen.append(speeds.tree_hash(tmp_path))
    assert (seen[0] != seen[1]) == counts


def test_rows_with_a_guard_are_quoted_only_while_its_code_is_the_same(tmp_path: Path) -> None:
    speeds = _speeds()
    row = {
        "net": "n", "batch": 64, "mode": "bf16", "status": "ok", "select": 100, "median_ms": 1.0,
        "images_per_s": 4321.0, "ratio_to_source": None, "share_of_limit": None, "peak_allocated_mib": 10,
    }  # fmt: skip
    rows = [{**row, "method": "tent"}, {**row, "method": "guarded-auto"}]
    page = "<!-- speed:some.json rows -->\n<!-- /speed -->\n"
    for guarded, quoted in ((speeds.tree_hash(names=speeds.GUARDED), True), ("another", False)):
        (tmp_path / "some.json").write_text(json.dumps({"tree": "today", **HOST, "guarded": guarded, "rows": rows}))
        found = speeds.filled(page, tmp_path, "today")
        assert "| tent |" in found
        assert ("| guarded-auto |" in found) == quoted
        assert ("Rows with a guard are of an earlier version" in found) != quoted


def test_a_name_without_files_has_no_hash(tmp_path: Path) -> None:
    _measured_tree(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"expected Python files at serve/stack\*\.py .* a hash of nothing never ages"
    ):
        _speeds().tree_hash(tmp_path, ("serve/stack*.py",))


def test_the_page_of_architectures_is_the_tested_table() -> None:
    rows = re.findall(
        r"^\| `(.+)` \| .* \| `(.+)` \| (.+) \| (.+) \| (.+) \| (.+) \|$", _read("docs/architectures.md"), re.M
    )
    found = [(name, split, *(int(n.replace(",", "")) for n in counts)) for name, split, *counts in rows]
    assert found == [(row.name, row.split, row.norms, row.top, row.numbers, row.total) for row in TABLE]


def test_the_readme_names_every_base_and_suffix() -> None:
    readme = _read("README.md")
    index = _read("docs/methods/index.md")
    for base in METHODS:
        assert f"`{base}`" in readme or f"]({base}.md)" in index, base
    for suffix in SUFFIXES:
        assert f"HOST{suffix}" in readme, suffix


def test_every_base_has_a_page_that_prints_its_recipe() -> None:
    index = _read("docs/methods/index.md")
    for base in METHODS:
        assert f'print(poem.recipe("{base}"))' in _read(f"docs/methods/{base}.md"), base
        assert f"]({base}.md)" in index, base
    for suffix in SUFFIXES:
        assert f"HOST{suffix}" in _read("docs/methods/grammar.md"), suffix


def test_the_reference_has_every_public_name() -> None:
    listed = set(re.findall(r"^\.\. (?:auto|py:)\w+:: (poem\.[\w.]+)$", _read("docs/api.md"), re.M))
    plain = {"__version__", "parts", "zoo"}  # a string and modules
    assert {f"poem.{name}" for name in poem.__all__ if name not in plain} <= listed
    assert {f"poem.parts.{name}" for name in poem.parts.__all__} <= listed
    assert plain <= set(re.findall(r"`poem\.(\w+)`", _read("docs/api.md")))


def test_every_method_says_its_paper_code_and_differences() -> None:
    for name in poem.methods():
        for word in ("Paper:", "Reference code:", "Differs:"):
            assert word in describe(name), (name, word)
    assert set(HOSTS) < set(METHODS)


def differs(name: str) -> str:
    """The section on differences of a base's description, in one line."""
    return " ".join(describe(name).partition("Differs:")[2].split())


# Bases by what their reference code does and ours does not.
TRAIN_MODE = (
    "tent", "eta", "eata", "sar", "deyo", "cotta", "rdumb", "rotta", "come", "poem", "poem-official",
    "poem-official-v2",
)  # fmt: skip
BATCH_NORM_ALONE = ("tent", "eta", "eata", "rdumb", "rpl")
ONE_RATE = ("eta", "eata", "rdumb")


@pytest.mark.parametrize("name", list(METHODS))
def test_a_description_says_if_the_reference_has_train_mode_batch_norm_only_or_one_rate(name: str) -> None:
    assert ("eval mode" in differs(name)) == (name in TRAIN_MODE)
    assert ("group and layer norms move too" in differs(name)) == (name in BATCH_NORM_ALONE)
    assert ("learning rate" in differs(name)) == (name in ONE_RATE)


@pytest.mark.parametrize("kind", ["bn", "gn", "ln"])
@pytest.mark.parametrize("name", TRAIN_MODE)
def test_dropout_is_off_during_updates(name: str, kind: str) -> None:
    settings: dict[str, Any] = {"mean": (0, 0, 0), "std": (1, 1, 1)}
    answers = []
    for rate in (0.0, 0.9):
        net = make_net(kind, sharpness=6.0)
        last = net.get_submodule("fc" if kind != "ln" else "head")
        last.register_forward_pre_hook(lambda module, args, rate=rate: torch.dropout(args[0], rate, module.training))
        adapter = poem.adapt(net.train(), name, lr=0.001, **settings)
        answers.append([adapter(batch) for batch in toys.images(12, seed=1).split(6)])
    assert all(torch.equal(one, other) for one, other in zip(*answers, strict=True))


@pytest.mark.parametrize("name", BATCH_NORM_ALONE)
@pytest.mark.parametrize("kind", ["gn", "ln"])
def test_group_and_layer_norms_are_adapted(name: str, kind: str) -> None:
    assert poem.adapt(make_net(kind), name).adapted


@pytest.mark.parametrize("name", ONE_RATE)
def test_the_rate_follows_the_family_and_the_batch(name: str) -> None:
    rates = [poem.adapt(make_net(kind), name, batch_size=size).lr for kind in ("gn", "ln") for size in (64, 8)]
    assert rates == [0.00025, 0.0000625, 0.001, 0.000125]


def test_every_public_name_resolves_and_is_described() -> None:
    for name in poem.__all__:
        value = getattr(poem, name)
        assert name == "__version__" or (value.__doc__ and value.__doc__.strip()), name
    for name in poem.parts.__all__:
        assert getattr(poem.parts, name).__doc__, name
    with pytest.raises(AttributeError, match="public names"):
        _ = poem.nonsense


def test_poem_list_has_every_method_and_the_parts_of_recipes() -> None:
    assert list(names_of("methods")) == poem.methods()
    assert set(SUFFIX_LINES) == set(SUFFIXES)
    parts = names_of("parts")
    assert set(parts) < set(poem.parts.__all__)
    for name in ("EntropyBelow", "SGD", "AugMix", "Jitter", "AdaptBranch", "Readout", "Uncorrected"):
        assert name in parts
    for name in ("Batch", "Look", "Lesson", "Memory", "Part", "Select", "Objective", "Recovery", "Augment"):
        assert name not in parts, f"{name} is an argument of parts, or a base class"
    used = {type(leaf).__name__ for name in poem.methods() for leaf in choices(poem.recipe(name))}
    assert used <= set(parts)
    for kind in ("methods", "parts", "corruptions", "bases", "data", "scenarios", "suites"):
        for name, line in names_of(kind).items():
            assert line, (kind, name)
            assert "\n" not in line


def _read(name: str) -> str:
    return (ROOT / name).read_text()


def test_the_page_on_speed_has_the_measured_cost_of_the_guard() -> None:
    held = json.loads(_read("results/auto/cost.json"))["networks"]
    page = _read("docs/speed.md")
    for net, rows in held.items():
        times = [rows[name]["times_source"] for name in ("tent", "guarded tent", "auto", "guarded auto")]
        values = [*times, times[-1] / times[0]]
        assert f"| `{net}` | " + " | ".join(f"{value:.1f}" for value in values) + " |" in page, net
        counts = [
            rows[name][kind]
            for name in ("tent", "poem", "auto", "guarded auto")
            for kind in ("forward_rows", "backward_rows")
        ]
        assert f"| `{net}` | " + " | ".join(f"{value:.2f}" for value in counts) + " |" in page, net
