"""Recipes as text and back: what suites, reports and the command line are written in.

`parse("EntropyBelow(0.5) & PLPDAbove(0.2)")` gives the parts. Only the words of `poem.parts`, plain values, `&`, `+`
and `/` are understood: text is read, never executed.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import operator
from typing import Any

from poem import parts
from poem.recipes import FIELDS, Recipe, Rule, field_name

WORDS: dict[str, Any] = {name: getattr(parts, name) for name in parts.__all__} | {"Rule": Rule}
_JOINTS: dict[type[ast.operator], Any] = {
    ast.BitAnd: operator.and_,
    ast.Add: operator.add,
    ast.Div: operator.truediv,
}


def parse(text: str) -> Any:
    """The part, or the plain value, that a text stands for."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError as error:
        raise ValueError(f"expected parts such as 'EntropyBelow(0.4) & PLPDAbove(0.2)', got {text!r}") from error
    return _read(tree.body, text)


def written(recipe: Recipe) -> dict[str, str]:
    """Every field of a recipe as text."""
    return {name: repr(getattr(recipe, name)) for name in FIELDS}


def read(fields: dict[str, str]) -> Recipe:
    """The recipe that `written` wrote; missing fields take their defaults."""
    return Recipe(**{field_name(name): parse(text) for name, text in fields.items()})


def _read(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_read(node.operand, text)
    if isinstance(node, ast.Tuple):
        return tuple(_read(each, text) for each in node.elts)
    if isinstance(node, ast.BinOp) and type(node.op) in _JOINTS:
        return _JOINTS[type(node.op)](_read(node.left, text), _read(node.right, text))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        word = _word(node.func.id, text)
        values = [_read(each, text) for each in node.args]
        named = {each.arg: _read(each.value, text) for each in node.keywords if each.arg}
        try:
            return word(*values, **named)
        except TypeError as error:
            takes = ", ".join(item.name for item in dataclasses.fields(word))
            raise ValueError(f"{node.func.id} takes ({takes}), got {ast.unparse(node)}") from error
    raise ValueError(f"expected parts, numbers and words, got {ast.unparse(node)!r} in {text!r}")


def _word(name: str, text: str) -> Any:
    word = WORDS.get(name)
    if not dataclasses.is_dataclass(word):
        near = difflib.get_close_matches(name, WORDS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(near)}?" if near else "see poem.parts"
        raise ValueError(f"no part is called {name!r} in {text!r}; {hint}")
    return word
