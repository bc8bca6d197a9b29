"""Recipes survive being written down, and text is read but never executed."""

from __future__ import annotations

import re

import pytest

import poem
from poem.parts import EntropyBelow, NotRedundant, PLPDAbove
from poem.recipes.text import parse, read, written


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
        ("SGD(**{'momentum': 0.5})", "SGD takes (momentum, nesterov), each once and by its name, got"),
        ("SGD(momentum=0.1, momentum=0.5)", "SGD takes (momentum, nesterov), each once and by its name, got"),
        ("Explore(*(2,))", "Explore takes (updates), each once and by its name, got Explore(*(2,))"),
        ("SGD(0.1, momentum=0.2)", "SGD takes (momentum, nesterov), got SGD(0.1, momentum=0.2)"),
        ("(*(1, 2),)", "expected parts"),
        ("1/0", "cannot compute 1/0 (division by zero)"),
        ("NotRedundant(1/0)", "cannot compute 1/0 (division by zero)"),
        ("-'x'", "cannot compute -'x'"),
        ("-Everyone()", "cannot compute -Everyone()"),
        ("'a'/2", "cannot compute 'a'/2"),
        ("3 & Everyone()", "cannot compute 3 & Everyone()"),
        ("nan", "expected parts, numbers and words in quotes, got nan"),
        ("SGD(inf)", "expected parts, numbers and words in quotes, got inf"),
        ("NormAffine(excluded)", "expected parts, numbers and words in quotes, got excluded"),
        ("1j", "expected parts, numbers and words in quotes, got 1j"),
        ("b'x'", "expected parts, numbers and words in quotes, got b'x'"),
        ("...", "expected parts, numbers and words in quotes, got ..."),
        ("Select()", "no part is called 'Select'"),
        ("Outputs(1, 2)", "no part is called 'Outputs'"),
        ("Look(1, 2)", "no part is called 'Look'"),
        ("Memory()", "no part is called 'Memory'"),
        ("\x00", "expected parts such as"),
        ("", "expected parts such as"),
    ],
)
def test_other_text_is_refused_with_a_remedy(text: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        parse(text)


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="no field 'selct'"):
        read({"selct": "Everyone()"})


HUGE = "0x" + "f" * 5000


@pytest.mark.parametrize(
    "text",
    [
        "(" * 3000 + "1" + ")" * 3000,
        "(1," * 90 + ")" * 90,
        "-" * 9000 + "1",
        "-" * 100_000 + "1",
        "Everyone()" + " & Everyone()" * 600,
        "Everyone()" + " & Everyone()" * 3000,
        "1+" * 5000 + "1",
        "9" * 9000,
        "9" * 100_000,
        f"{HUGE}/1",
        f"1.5 + {HUGE}",
        f"EveryCalls({HUGE})",
        f"SGD({HUGE})",
        f"SGD(1, {HUGE}, 3)",
    ],
    ids=["brackets", "tuples", "signs", "more signs", "chain", "longer chain", "sum", "digits", "more digits",
         "division", "addition", "count", "number", "arguments"],
)  # fmt: skip
def test_deep_and_huge_text_is_refused_in_a_few_words(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected|takes|cannot compute") as error:
        parse(text)
    assert len(str(error.value)) < 1000


def test_deep_text_of_a_usual_kind_is_read() -> None:
    chain = " & ".join(["EntropyBelow(0.4)"] * 40)
    assert repr(parse(chain)) == chain


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(TypeError, match="expected text, got 3"):
        parse(3)  # type: ignore[arg-type]
