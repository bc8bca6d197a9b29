"""Suite files: where they are, and reading them."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from poem._util.files import read_yaml
from poem._util.nearest import nearest_hint

PACKAGED = Path(__file__).resolve().parents[2] / "_suites"
CHECKOUT = Path(__file__).resolve().parents[4] / "benchmarks" / "suites"


def folder() -> Path:
    """The folder with the suites: `benchmarks/suites` in a checkout, `poem/_suites` in an installed wheel."""
    for path in (PACKAGED, CHECKOUT):
        if (path / "scales.yaml").is_file():
            return path
    raise FileNotFoundError(f"no suites in {PACKAGED} nor in {CHECKOUT}; install poem-tta anew")


def stems() -> list[str]:
    """Names of the suites in the folder."""
    return sorted((path.stem for path in folder().glob("*.yaml") if path.stem != "scales"), key=_natural_order)


def _natural_order(name: str) -> tuple[str, int, str]:
    """A sort key that puts table2 before table10."""
    word = name.rstrip("abcdefghijklmnopqrstuvwxyz") or name
    head = word.rstrip("0123456789")
    return head or name, int(word[len(head) :] or 0), name


def is_path(name: str) -> bool:
    """Whether a suite is named by a file of the user's own."""
    return name.endswith((".yaml", ".yml")) or os.sep in name


def path_of(name: str | os.PathLike[str]) -> Path:
    """The file of a suite, by its name or its own path."""
    text = os.fspath(name)
    if is_path(text):
        path = Path(text).expanduser()
        if not path.is_file():
            raise FileNotFoundError(f"no suite file {path}; name a YAML file, or one of: {', '.join(stems())}")
        return path
    if text not in stems():
        raise ValueError(f"unknown suite {text!r}; {nearest_hint(text, stems())}")
    return folder() / f"{text}.yaml"


def read(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file."""
    try:
        found = read_yaml(path)
    except ValueError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"expected fields in {path}, such as 'name: mine', got {type(found).__name__}")
    return found


@cache
def paper() -> dict[str, dict[str, dict[str, dict[str, float]]]]:
    """The paper's numbers by table, group, row and column."""
    found: dict[str, Any] = json.loads((folder() / "paper.json").read_text(encoding="utf-8"))
    return found
