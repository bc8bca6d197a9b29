"""Recipes as text and back: what suites, reports and the command line are written in.

`parse("EntropyBelow(0.5) & PLPDAbove(0.2)")` gives the parts. Only the parts of `poem.parts`, plain values, `&`, `+`
and `/` are understood: text is read, never executed.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import operator
from collections.abc import Iterator
from typing import Any

from poem import parts
from poem._util.nearest import nearest_hint
from poem.parts.fields import Checked
from poem.recipes.learning_rate import Rule
from poem.recipes.recipe import FIELDS, Recipe, field_name

_EXPORTED = {name: getattr(parts, name) for name in parts.__all__} | {"Rule": Rule, "Recipe": Recipe}
PARTS: dict[str, Any] = {
    name: part
    for name, part in _EXPORTED.items()
    if isinstance(part, type) and issubclass(part, Checked) and not inspect.isabstract(part)
}
_OPERATORS: dict[type[ast.operator], Any] = {
    ast.BitAnd: operator.and_,
    ast.Add: operator.add,
    ast.Div: operator.truediv,
}
LENGTH, DEPTH = 10_000, 64  # of a text in characters and in levels; far more than any recipe has


def parse(text: str) -> Any:
    """The part, or the plain value, that a text stands for."""
    if not isinstance(text, str):
        raise TypeError(f"expected text, got {text!r}")
    text = text.strip()
    try:
        tree = ast.parse(text, mode="eval") if len(text) <= LENGTH else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if tree is None or any(level > DEPTH for level in _levels(tree.body)):
        raise ValueError(f"expected parts such as 'EntropyBelow(0.4) & PLPDAbove(0.2)', got {_cut(text)!r}")
    return _read(tree.body, text)


def written(recipe: Recipe) -> dict[str, str]:
    """Every field of a recipe as text; that for batch norm only where there is one."""
    fields = [name for name in FIELDS if name != "on_batch_norm" or recipe.on_batch_norm is not None]
    return {name: repr(getattr(recipe, name)) for name in fields}


def read(fields: dict[str, str]) -> Recipe:
    """The recipe that `written` wrote; missing fields take their defaults."""
    return Recipe(**{field_name(name): parse(text) for name, text in fields.items()})


def _levels(body: ast.expr) -> Iterator[int]:
    """How deep each expression of a text lies, found without recursion."""
    left: list[tuple[ast.AST, int]] = [(body, 1)]
    while left:
        node, level = left.pop()
        yield level
        left += [(child, level + 1) for child in ast.iter_child_nodes(node)]


def _read(node: ast.expr, text: str) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _computed(node, text, operator.neg, node.operand)
    if isinstance(node, ast.Tuple):
        return tuple(_read(each, text) for each in node.elts)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _computed(node, text, _OPERATORS[type(node.op)], node.left, node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _made(node, node.func.id, text)
    raise ValueError(f"expected parts, numbers and words in quotes, got {_source(node, text)} in {_cut(text)!r}")


def _computed(node: ast.expr, text: str, operate: Any, *operands: ast.expr) -> Any:
    """Parts joined, numbers divided or negated."""
    values = [_read(each, text) for each in operands]
    try:
        return operate(*values)
    except (TypeError, ArithmeticError) as error:
        if isinstance(values[0], Checked) and len(values) == 2:  # the part says what it cannot be joined with
            raise ValueError(str(error)) from error
        remedy = "& and + join parts, / divides numbers"
        raise ValueError(f"cannot compute {_source(node, text)} ({error}); {remedy}") from error


def _made(node: ast.Call, name: str, text: str) -> Any:
    """A part with its settings; what it refuses in Python it refuses here, in the same words."""
    part = _part(name, text)
    takes = f"{name} takes ({', '.join(item.name for item in dataclasses.fields(part))})"
    names = [each.arg for each in node.keywords]
    if None in names or len(set(names)) < len(names) or any(isinstance(each, ast.Starred) for each in node.args):
        raise ValueError(f"{takes}, each once and by its name, got {_source(node, text)}")
    values = [_read(each, text) for each in node.args]
    named = {str(each.arg): _read(each.value, text) for each in node.keywords}
    try:
        inspect.signature(part).bind(*values, **named)
    except TypeError as error:
        raise ValueError(f"{takes}, got {_source(node, text)}") from error
    try:
        return part(*values, **named)
    except TypeError as error:
        raise ValueError(str(error)) from error


def _part(name: str, text: str) -> Any:
    if name not in PARTS:
        hint = nearest_hint(name, PARTS, most=3, cutoff=0.5, show=str, otherwise="see poem.parts")
        raise ValueError(f"no part is called {name!r} in {_cut(text)!r}; {hint}")
    return PARTS[name]


def _source(node: ast.expr, text: str) -> str:
    """The piece of text that a node was read from."""
    return _cut(ast.get_source_segment(text, node) or text)


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:197]}..."
