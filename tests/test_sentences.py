"""Recipes survive being written down, and text is read but never executed."""

from __future__ import annotations

import re

import pytest

import poem
from poem.parts import EntropyBelow, NotRedundant, PLPDAbove
from poem.sentences import parse, read, written


@pytest.mark.parametrize("preset", ["imagenet", "cifar", "cifar100"])
@pytest.mark.parametrize("name", poem.methods())
def test_every_recipe_survives_being_written_down(name: str, preset: str) -> None:
    recipe = poem.recipe(name, preset)  # type: ignore[arg-type]
    assert read(written(recipe)) == recipe


def test_parts_compose_in_text_as_in_code() -> None:
    text = "EntropyBelow(0.5) & PLPDAbove(0.2) & NotRedundant(cosine=1/20)"
    assert parse(text) == EntropyBelow(0.5) & PLPDAbove(0.2) & NotRedundant(0.05)
    assert parse("-0.5") == -0.5
    assert parse("None") is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("EntropyBelo(0.4)", "did you mean EntropyBelow"),
        ("EntropyBelow(fractoin=0.4)", "takes"),
        ("EntropyBelow(0.4", "expected parts such as"),
        ("__import__('os').getcwd()", "expected parts"),
        ("open('x')", "no part is called 'open'"),
        ("[1 for x in (1,)]", "expected parts"),
    ],
)
def test_other_text_is_refused_with_a_remedy(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        parse(text)


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="no field 'selct'"):
        read({"selct": "Everyone()"})
