"""Suite files: where they lie, what may stand in them, and how their blocks are laid over each other."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from poem._util.files import read_yaml
from poem._util.nearest import nearest_hint
from poem.bench.cell import Cell, laid

PACKAGED = Path(__file__).resolve().parents[2] / "_suites"
CHECKOUT = Path(__file__).resolve().parents[4] / "benchmarks" / "suites"

KINDS = ("table", "lines", "bars", "efficiency", "transitions", "groups", "gradients", "range")
CELL = tuple(item.name for item in fields(Cell) if item.name not in ("seed", "version"))
BLOCK = (*CELL, "label", "factor", "at")
FIELDS: dict[str, tuple[str, ...]] = {
    "suite": (
        "name", "version", "title", "kind", "paper", "average", "readout", "x", "y", "claims", "notes", "cell",
        "corruptions", "seeds", "columns", "groups", "rows", "at",
    ),
    "cell": (*CELL, "at"),
    "group": (*BLOCK, "rows"),
    "row": (*BLOCK, "only"),
    "column": BLOCK,
    "claim": ("text", "check"),
    "scale": ("smoke", "bases", "data", "transformers", "corruptions", "seeds", "cell", "settings"),
    "setting": ("base", "scenario", "methods", "changes", "note"),
}  # fmt: skip
"""What may stand in each kind of block."""

Block = dict[str, Any]


def folder() -> Path:
    """The suites of this package: in a checkout `benchmarks/suites`, in an installed wheel a folder of its own."""
    for place in (PACKAGED, CHECKOUT):
        if (place / "scales.yaml").is_file():
            return place
    raise FileNotFoundError(f"no suites in {PACKAGED} nor in {CHECKOUT}; install poem-tta anew")


def stems() -> list[str]:
    """Names of the suites that are there."""
    return sorted((path.stem for path in folder().glob("*.yaml") if path.stem != "scales"), key=_natural)


def _natural(name: str) -> tuple[str, int, str]:
    """Sorts table2 before table10."""
    word = name.rstrip("abcdefghijklmnopqrstuvwxyz") or name
    head = word.rstrip("0123456789")
    return head or name, int(word[len(head) :] or 0), name


def is_path(name: str) -> bool:
    """Whether it names a file of the user's own, and no suite that comes along."""
    return name.endswith((".yaml", ".yml")) or os.sep in name


def path_of(name: str | os.PathLike[str]) -> Path:
    """The file of a suite by its name, or a file of the user's own."""
    text = os.fspath(name)
    if is_path(text):
        path = Path(text).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"no suite file {path}; name a YAML file, or one of: {', '.join(stems())}")
        return path
    if text not in stems():
        raise ValueError(f"unknown suite {text!r}; {nearest_hint(text, stems())}")
    return folder() / f"{text}.yaml"


def read(path: Path) -> Block:
    """The mapping that a YAML file holds."""
    try:
        found = read_yaml(path)
    except ValueError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"expected fields in {path}, such as 'name: mine', got {type(found).__name__}")
    return found


@cache
def scales() -> dict[str, Block]:
    """Every scale by name."""
    path = folder() / "scales.yaml"
    found = read(path)
    for name, block in found.items():
        known(block, "scale", f"{path}, {name}")
        known(block["cell"], "cell", f"{path}, {name}, cell")
        for setting in listed(block, "settings", f"{path}, {name}"):
            known(setting, "setting", f"{path}, {name}, settings")
    return found


@cache
def paper() -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """The paper's numbers by table, group, row and column."""
    found: dict[str, Any] = json.loads((folder() / "paper.json").read_text(encoding="utf-8"))
    return found


def known(block: Any, kind: str, where: str) -> None:
    """Refuses a block that is no mapping, and a field that its kind does not have."""
    if not isinstance(block, Mapping):
        raise ValueError(f"{where}: expected fields, got {block!r}")
    for name in block:
        if name not in FIELDS[kind]:
            raise ValueError(f"{where}: a {kind} has no field {name!r}; {nearest_hint(str(name), FIELDS[kind])}")


def listed(block: Mapping[str, Any], name: str, where: str) -> list[Any]:
    """A field that holds a list."""
    found = block.get(name, [])
    if not isinstance(found, list):
        raise ValueError(f"{where}: expected {name} to be a list, got {found!r}")
    return found


def at_scale(block: Block, scale: str, where: str) -> Block:
    """The block with what it says `at` this scale laid over it; its notes are added, not replaced."""
    over = block.get("at", {})
    for name in over:
        if name not in scales():
            raise ValueError(f"{where}: at names an unknown scale {name!r}; {nearest_hint(str(name), scales())}")
    plain = {name: value for name, value in block.items() if name != "at"}
    here = over.get(scale, {})
    merged = laid(plain, here)
    if "notes" in here:
        merged["notes"] = [*plain.get("notes", []), *here["notes"]]
    if "cell" in here:
        merged["cell"] = laid(plain.get("cell", {}), here["cell"])
    return merged


def filled(value: Any, x: Any) -> Any:
    """The value with a column's x in place of `{x}`."""
    if isinstance(value, Mapping):
        return {name: filled(each, x) for name, each in value.items()}
    return value.replace("{x}", str(x)) if isinstance(value, str) else value


def checked(block: Any, path: Path, scale: str) -> Block:
    """A suite as its file states it, for one scale: every field known, every block in place."""
    known(block, "suite", str(path))
    suite = at_scale(block, scale, str(path))
    known(suite, "suite", f"{path}, at {scale}")
    for name in ("name", "version", "title", "rows", "columns"):
        if name not in suite and not (name == "rows" and suite.get("groups")):
            raise ValueError(f"{path}: expected the field {name!r}, which is missing")
    if not isinstance(suite["version"], int) or suite["version"] < 1:
        raise ValueError(f"{path}: expected version 1, 2, ..., got {suite['version']!r}")
    kind = suite.setdefault("kind", "table")
    if kind not in KINDS:
        raise ValueError(f"{path}: unknown kind {kind!r}; {nearest_hint(str(kind), KINDS)}")
    suite["cell"] = suite.get("cell", {})
    known(suite["cell"], "cell", f"{path}, cell")
    for claim in listed(suite, "claims", str(path)):
        known(claim, "claim", f"{path}, claims")
    suite["rows"] = _blocks(listed(suite, "rows", str(path)), "row", path, scale)
    suite["groups"] = _blocks(suite.get("groups", [{"label": "", "base": "bn"}]), "group", path, scale)
    for group in suite["groups"]:
        group["rows"] = _blocks(group["rows"], "row", path, scale) if "rows" in group else suite["rows"]
    suite["columns"] = _columns(suite["columns"], path, scale)
    return suite


def _blocks(blocks: Iterable[Any], kind: str, path: Path, scale: str) -> list[Block]:
    found = []
    for at, block in enumerate(blocks):
        where = f"{path}, {kind} {at + 1}"
        known(block, kind, where)
        found.append(at_scale(block, scale, where))
        known(found[-1], kind, f"{where}, at {scale}")
        if "label" not in block:
            raise ValueError(f"{where}: expected a label")
    return found


def _columns(columns: Any, path: Path, scale: str) -> str | list[Block]:
    """`corruptions`, a list of blocks, or `{x: values}`, which gives a block for each value."""
    if columns == "corruptions":
        return "corruptions"
    if isinstance(columns, Mapping) and list(columns) == ["x"] and isinstance(columns["x"], Sequence):
        return [{"label": f"{x:g}" if isinstance(x, float) else str(x), "x": x} for x in columns["x"]]
    if isinstance(columns, list):
        return _blocks(columns, "column", path, scale)
    raise ValueError(
        f"{path}: expected columns to be 'corruptions', a list of blocks with labels, or {{x: [values]}}, "
        f"got {columns!r}"
    )
