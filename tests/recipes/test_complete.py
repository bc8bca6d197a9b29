"""A method is complete: recipe, reference, page and changelog. The failure lists what is missing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from oracles import METHODS as REFERENCES

from poem import parts
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
    for each in wanted:
        if each not in references:
            lacks.append(f"a reference of {each} in tests/oracles/, of a host by a class (see its __init__.py)")
    page = ROOT / "docs" / "methods" / f"{name}.md"
    if not page.is_file():
        lacks.append(f"docs/methods/{name}.md")
    index = (ROOT / "docs" / "methods" / "index.md").read_text(encoding="utf-8")
    if f"]({name}.md)" not in index or not re.search(rf"^{re.escape(name)}$", index, re.M):
        lacks.append(f"a row and an entry of {name} in docs/methods/index.md")
    if f"`{name}`" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        lacks.append(f"`{name}` in CHANGELOG.md")
    if name in HOSTS and f"`{name}`" not in (ROOT / "docs" / "methods" / "grammar.md").read_text(encoding="utf-8"):
        lacks.append(f"`{name}` among the hosts of docs/methods/grammar.md")
    if not re.search(rf"^\| `{re.escape(name)}` \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.M):
        lacks.append(f"a row of `{name}` in README.md's table of methods")
    return lacks


@pytest.mark.parametrize("name", list(METHODS))
def test_a_method_has_a_recipe_a_reference_a_page_and_a_line_in_the_changelog(name: str) -> None:
    lacks = missing(name)
    assert not lacks, "missing: " + "; ".join(lacks)


def test_the_page_on_parts_names_every_answer_to_a_recipe_s_questions() -> None:
    page = (ROOT / "docs" / "parts.md").read_text(encoding="utf-8")
    questions = (
        parts.Parameters, parts.Statistics, parts.Select, parts.Weigh, parts.Objective, parts.Step, parts.Recovery,
        parts.Exploration, parts.Correction, parts.Teacher,
    )  # fmt: skip
    found = {name: getattr(parts, name) for name in parts.__all__}
    answers = [name for name, part in found.items() if isinstance(part, type) and issubclass(part, questions)]
    assert [name for name in answers if f"`{name}" not in page and found[name] not in questions] == []


def test_what_a_method_lacks_is_listed() -> None:
    lacks = missing("tent", references=())
    assert lacks[0].startswith("a reference of tent in tests/oracles/")
    assert len(missing("no-such-method")) == 8
