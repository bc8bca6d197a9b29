"""A method is complete: recipe, reference, page and changelog. The failure lists what is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from oracles import METHODS as REFERENCES

from poem.recipes.methods import HOSTS, METHODS, SUFFIXES

ROOT = Path(__file__).parents[2]


def missing(name: str, references: tuple[str, ...] = REFERENCES) -> list[str]:
    """What a method lacks, as the file to write."""
    lacks = []
    doc = METHODS[name].__doc__ or "" if name in METHODS else ""
    for field in ("Paper:", "Reference code:", "Differs:"):
        if field not in doc:
            lacks.append(f"{field} in the docstring of src/poem/recipes/methods.py: {name}")
    wanted = [name, *(f"{name}{suffix}" for suffix in SUFFIXES)] if name in HOSTS else [name]
    lacks += [f"a reference of {each} in tests/oracles/" for each in wanted if each not in references]
    page = ROOT / "docs" / "methods" / f"{name}.md"
    if not page.is_file():
        lacks.append(f"docs/methods/{name}.md")
    index = (ROOT / "docs" / "methods" / "index.md").read_text(encoding="utf-8")
    if f"]({name}.md)" not in index or not re.search(rf"^{re.escape(name)}$", index, re.M):
        lacks.append(f"a row and an entry of {name} in docs/methods/index.md")
    if f"`{name}`" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        lacks.append(f"`{name}` in CHANGELOG.md")
    return lacks


@pytest.mark.parametrize("name", list(METHODS))
def test_a_method_has_a_recipe_a_reference_a_page_and_a_line_in_the_changelog(name: str) -> None:
    lacks = missing(name)
    assert not lacks, "missing: " + "; ".join(lacks)


def test_what_a_method_lacks_is_listed() -> None:
    lacks = missing("tent", references=())
    assert lacks[0] == "a reference of tent in tests/oracles/"
    assert len(missing("no-such-method")) == 7
