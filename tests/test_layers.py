"""The package's shape: imports point one way, labels stop at the stream, and parts keep nothing."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path

import pytest
import torch
from nets import make_net
from toys import images

import poem
import poem.parts
from poem.parts import Batch, Outcome, Outputs, Part, Selected, Update, bank

ROOT = Path(poem.__file__).parent
FILES = {
    ".".join(("poem", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}
PARTS = sorted(name for name in FILES if name.startswith("poem.parts"))


def imported(name: str) -> set[str]:
    """Modules of the package that a module imports, at the top or inside a function."""
    found = set()
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {module if module in FILES else str(node.module) for module in inner}
    return {module for module in found if module.split(".")[0] == "poem"}


def package_of(name: str) -> str:
    """The package or root module of `poem` that a module belongs to."""
    return name.removeprefix("poem.").split(".")[0]


def packages(name: str) -> set[str]:
    """The packages and root modules, beside its own, that a module imports from."""
    return {package_of(module) for module in imported(name)} - {"poem", package_of(name)}


def beneath(name: str) -> set[str]:
    """Every module that a module imports, directly or through others."""
    found: set[str] = set()
    left = [name]
    while left:
        for module in imported(left.pop()) - found - {"poem"}:
            found.add(module)
            left.append(module)
    return found


def inside(package: str) -> list[str]:
    """The modules of a package."""
    found = [name for name in FILES if package_of(name) == package]
    assert found, package
    return found


PACKAGES = {package_of(name) for name in FILES} - {"poem"}  # the names of `poem` itself resolve on first use


def documented() -> dict[str, list[str]]:
    """The table in docs/architecture.md: each package or root module, and what it may import."""
    text = (Path(__file__).parents[1] / "docs" / "architecture.md").read_text(encoding="utf-8")
    table = text.partition("| package | what it holds | may import |\n|---|---|---|\n")[2].partition("\n\n")[0]
    rows = [line.strip("|").split("|") for line in table.splitlines()]
    found = [(re.findall(r"`([^`]+)`", first), re.findall(r"`([^`]+)`", last)) for first, _, last in rows]
    names = [(name.removesuffix(".py").removesuffix("/"), below) for (name,), below in found]
    assert len(dict(names)) == len(names), "a row twice"
    return dict(names)


ALLOWED = documented()


def test_the_imports_of_the_package_were_found() -> None:
    assert "poem.parts.base" in imported("poem.parts.selection")
    assert "poem.engine.anatomy" in imported("poem.parts.parameters")
    assert "poem.engine.input_checks" in imported("poem.adapter"), "from poem.engine import input_checks is a module"
    assert {"poem.adapter", "poem.recipes.methods"} <= imported("poem.api")


def test_every_package_and_root_module_is_documented_once() -> None:
    assert set(ALLOWED) == PACKAGES


@pytest.mark.parametrize("package", sorted(ALLOWED))
def test_a_package_may_import_only_rows_above_it(package: str) -> None:
    above = list(ALLOWED)[: list(ALLOWED).index(package)]
    assert set(ALLOWED[package]) <= {*above, "engine.anatomy"}, "so that no package imports itself through others"


@pytest.mark.parametrize("name", sorted(set(FILES) - {"poem"}))
def test_a_module_imports_what_its_package_may(name: str) -> None:
    own, allowed = package_of(name), set(ALLOWED[package_of(name)])
    others = {module for module in imported(name) if package_of(module) not in ("poem", own)}
    strange = {module for module in others if not {package_of(module), module.removeprefix("poem.")} & allowed}
    assert not strange


def test_the_rules_of_the_table() -> None:
    """The table is free to say less, not to say something else."""
    assert ALLOWED["_util"] == ALLOWED["_version"] == []
    assert set(ALLOWED["streams"]) == {"_util"}
    assert set(ALLOWED["zoo"]) == {"_util", "streams"}
    assert set(ALLOWED["parts"]) == {"_util", "engine.anatomy"}
    assert set(ALLOWED["recipes"]) == {"parts", "_util"}
    assert set(ALLOWED["engine"]) == {"parts", "recipes", "_util"}
    assert set(ALLOWED["accelerate"]) == {"engine", "parts", "recipes", "_util"}
    assert not {"bench", "report", "cli"} & {*ALLOWED["adapter"], *ALLOWED["api"], *ALLOWED["predict"]}
    assert not {"report", "cli"} & set(ALLOWED["bench"])
    assert "cli" not in ALLOWED["report"]
    assert ALLOWED["__main__"] == ["cli"]
    assert [package for package, below in ALLOWED.items() if "cli" in below] == ["__main__"]


def test_the_anatomy_of_a_model_imports_helpers_alone() -> None:
    assert {package_of(module) for module in beneath("poem.engine.anatomy")} <= {"_util"}, "since parts import it"


def test_the_engine_runs_without_acceleration() -> None:
    for name in inside("engine"):
        assert "accelerate" not in {package_of(module) for module in beneath(name)}, name


def test_the_engine_knows_no_method_by_name() -> None:
    assert {"poem.recipes.recipe", "poem.engine.network", "poem.parts.base"} <= beneath("poem.adapter")
    for name in ("poem.adapter", *inside("engine"), *inside("accelerate")):
        assert "poem.recipes.methods" not in beneath(name), name
        assert not {package_of(module) for module in beneath(name)} & {"api", "bench", "report", "cli"}, name


def test_adapting_imports_no_stream_and_no_benchmark() -> None:
    below = {package_of(module) for module in beneath("poem.api")}
    assert {"adapter", "accelerate", "engine"} <= below
    assert not below & {"streams", "zoo", "predict", "bench", "report", "cli"}


def test_streams_and_networks_know_no_method() -> None:
    for name in (*inside("streams"), *inside("zoo")):
        assert not {package_of(module) for module in beneath(name)} & {"adapter", "api", "engine", "parts", "recipes"}


def test_the_command_line_is_imported_by_main_alone() -> None:
    users = {name for name in FILES if "cli" in packages(name)}
    assert users == {"poem.__main__"}


def test_methods_are_named_nowhere_below_them() -> None:
    """No `if method == "sar"` in the engine: a string that equals a method's name does not occur there."""
    names = set(poem.methods())
    for module in sorted({*PARTS, *beneath("poem.adapter"), "poem.adapter"}):
        compared = [
            value.value
            for node in ast.walk(TREES[module])
            if isinstance(node, ast.Compare)
            for value in (node.left, *node.comparators)
            if isinstance(value, ast.Constant)
        ]
        assert not names & {value for value in compared if isinstance(value, str)} - {"source", "auto"}, (
            module
        )  # `fast="auto"` too


# What an import costs -------------------------------------------------------------------------------------------------


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_poem_needs_no_torch() -> None:
    code = """
import sys
before = set(sys.modules)
import poem, poem.cli, poem.cli
poem.__version__, dir(poem)
print(*sorted({name.split(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names)))
"""
    assert python(code).split() == ["poem"]


def test_the_engine_needs_torch_and_numpy_alone() -> None:
    code = """
import sys
import numpy, torch
before = {name.split(".")[0] for name in sys.modules}
import poem.api, poem.parts
from poem import Adapter, Recipe, adapt, methods, recipe
assert "torch" in before and "poem.adapter" in sys.modules
print(*sorted({name.split(".")[0] for name in sys.modules} - before - set(sys.stdlib_module_names)))
"""
    assert python(code).split() == ["poem"]


def test_adapting_needs_torch_and_numpy_alone() -> None:
    code = """
import sys
import torch, poem
net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.GroupNorm(2, 4), torch.nn.Conv2d(4, 4, 3),
                          torch.nn.GroupNorm(2, 4), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(),
                          torch.nn.Linear(4, 5))
for method in ("poem", "eata", "deyo+poem"):
    poem.adapt(net, method)(torch.rand(4, 3, 8, 8))
heavy = ("rich", "jsonargparse", "timm", "torchvision", "sklearn", "safetensors", "ray", "fastapi", "matplotlib", "PIL")
print(*[name for name in heavy if name in sys.modules])
"""
    assert python(code).split() == []


# Labels ---------------------------------------------------------------------------------------------------------------

TRUTH = {"label", "labels", "targets", "y", "ys", "y_true", "truth", "ground_truth", "gt", "classes_true"}
ENGINE = sorted(
    {*PARTS, "poem.adapter", "poem.engine.network", "poem.recipes.recipe", "poem.api", *beneath("poem.adapter")}
)


def signatures(name: str) -> Iterator[tuple[str, set[str]]]:
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            a = node.args
            given = [*a.posonlyargs, *a.args, *a.kwonlyargs, *(rest for rest in (a.vararg, a.kwarg) if rest)]
            yield getattr(node, "name", "lambda"), {arg.arg for arg in given}


@pytest.mark.parametrize("name", ENGINE)
def test_no_signature_of_the_engine_has_room_for_a_label(name: str) -> None:
    for function, arguments in signatures(name):
        coordinates = {"y"} if "x" in arguments else set()
        assert not arguments & TRUTH - coordinates, function


def test_what_parts_are_handed_has_no_room_for_a_label() -> None:
    for kind in (Batch, Outputs, Selected, Update, Outcome):
        assert not {item.name for item in fields(kind)} & TRUTH


class Secret:
    """A label that nobody may touch."""

    def __getattribute__(self, name: str) -> object:
        raise AssertionError(f"somebody read {name} of a label")


@pytest.mark.parametrize("method", ["source", "tent", "deyo+poem"])
def test_a_stream_drops_labels_unseen(method: str) -> None:
    adapter = poem.adapt(make_net("gn", sharpness=6.0), method)
    loader = [(batch, Secret()) for batch in torch.split(images(8, seed=0), 4)]
    answers = torch.cat(list(adapter.stream(loader)))
    alone = poem.adapt(make_net("gn", sharpness=6.0), method)
    assert torch.equal(answers, torch.cat([alone(batch) for batch, _ in loader]))


# Parts keep nothing ---------------------------------------------------------------------------------------------------


MADE_ANEW = (Batch, Outputs, Selected, Update, Outcome, bank._Item)
"""Values that live as long as a batch."""


def part_classes() -> list[type]:
    """Every class of `poem.parts` but protocols, and what is made anew for every batch."""
    names = [info.name for info in pkgutil.iter_modules(poem.parts.__path__)]
    modules = [importlib.import_module(f"poem.parts.{name}") for name in names]
    found = {
        value
        for module in modules
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
        if value not in MADE_ANEW and not issubclass(value, Enum | tuple)  # which cannot be written to either
        if not getattr(value, "_is_protocol", False)
    }
    return sorted(found, key=lambda kind: kind.__qualname__)


@pytest.mark.parametrize("kind", part_classes(), ids=lambda kind: kind.__name__)
def test_a_part_is_frozen(kind: type) -> None:
    assert is_dataclass(kind)
    assert kind.__dataclass_params__.frozen  # type: ignore[attr-defined]


def test_parts_were_found() -> None:
    assert len([kind for kind in part_classes() if issubclass(kind, Part)]) > 40


MUTATING = {"append", "extend", "insert", "add", "update", "setdefault", "pop", "popitem", "clear", "remove", "discard"}


@pytest.mark.parametrize("name", PARTS)
def test_no_module_of_parts_keeps_state(name: str) -> None:
    """Tables at the top of a module are read, never written; nothing is cached between calls."""
    tree = TREES[name]
    top: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = {target.id for target in targets if isinstance(target, ast.Name)}
            if names == {"__all__"}:
                continue
            top |= names
            value = node.value
            kinds = ("list", "set", "defaultdict", "WeakKeyDictionary", "count", "Generator", "local")
            if isinstance(value, ast.Call):
                function = value.func
                called = function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")
                assert called not in kinds, f"{called}() at the top of {name}"
            assert not isinstance(value, ast.List | ast.Set | ast.ListComp | ast.SetComp), f"{names} of {name}"
    for inner in ast.walk(tree):
        assert not isinstance(inner, ast.Global), f"global in {name}, line {inner.lineno}"
        if isinstance(inner, ast.Subscript) and isinstance(inner.ctx, ast.Store | ast.Del):
            assert not (isinstance(inner.value, ast.Name) and inner.value.id in top), f"{name}, line {inner.lineno}"
        if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) and inner.func.attr in MUTATING:
            owner = inner.func.value
            assert not (isinstance(owner, ast.Name) and owner.id in top), f"{name}, line {inner.lineno}"
        if isinstance(inner, ast.FunctionDef):
            decorators = {ast.unparse(d).split("(")[0].split(".")[-1] for d in inner.decorator_list}
            assert not decorators & {"cache", "lru_cache"}, f"{inner.name} of {name} remembers its answers"
            defaults = [*inner.args.defaults, *inner.args.kw_defaults]
            assert not any(isinstance(d, ast.List | ast.Dict | ast.Set) for d in defaults), f"{inner.name} of {name}"
