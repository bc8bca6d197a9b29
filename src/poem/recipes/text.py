"""Recipes as text and back: what suites, reports and the command line are written in.

`parse("EntropyBelow(0.5) & PLPDAbove(0.2)")` gives the parts. Only the parts of `poem.parts`, plain values, `&`, `+`
and `/` are understood: text is read, never executed. Parts of other packages are written as `package.module:Name(0.5)`,
or by the name that a package announces in the group `poem.parts`; their module is imported.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import operator
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from poem import parts
from poem._util import outside
from poem._util.nearest import nearest_hint
from poem.parts.base import Part
from poem.parts.fields import Checked
from poem.recipes.learning_rate import FamilyRate, Rule
from poem.recipes.recipe import FIELDS, Recipe, field_name

_EXPORTED = {name: getattr(parts, name) for name in parts.__all__} | {
    "Rule": Rule, "FamilyRate": FamilyRate, "Recipe": Recipe
}  # fmt: skip
PARTS: dict[str, Any] = {
    name: part
    for name, part in _EXPORTED.items()
    if isinstance(part, type) and issubclass(part, Checked) and not inspect.isabstract(part)
}
PART_VERSIONS = {"Blended": 3}
"""Version of each part whose defaults have changed; the others are at 1. Text leaves settings at their default out, so
the key of every cell with the part contains its version: results with the earlier defaults are not taken for new."""
_OPERATORS: dict[type[ast.operator], Any] = {
    ast.BitAnd: operator.and_,
    ast.Add: operator.add,
    ast.Div: operator.truediv,
}
_PATH_OR_WORDS = re.compile(r"""('[^']*'|"[^"]*")|([^\W\d][\w.]*):(?=[^\W\d])""")
"""Text in quotes, or what stands before the colon of `package.module:Name`."""
_OWN_PART = re.compile(r"(?<![\w.:])([^\W\d]\w*)\(")
"""The name of a part of this package: none with a module before it."""
Trust = bool | Collection[str]
"""Whether modules that a text names may be imported: all of them, none, or those of parts at some paths."""
LENGTH, DEPTH = 10_000, 64  # of a text in characters and in levels; far more than any recipe has


class UnannouncedPartError(ValueError):
    """Text that is not trusted names a part whose module nobody allowed to import."""


def parse(text: str, *, trusted: Trust = True) -> Any:
    """The part, or the plain value, that a text stands for.

    Args:
        text: Such as `EntropyBelow(0.5)` or `my_package.parts:Mine(0.5)`.
        trusted: Whether the module of any `package.module:Name` may be imported. False for text that may come from
            somebody else: then only parts that an installed package announces are. Or the paths of further parts that
            are trusted, such as those of `part_paths`.

    Raises:
        ValueError: Text that is none, a part that is not there, or settings that it does not take.
    """
    if not isinstance(text, str):
        raise TypeError(f"expected text, got {text!r}")
    text = text.strip()
    try:
        # "a.b:C(1)" is parsed as "a.b.C(1)", whose last dot is the colon; positions stay as they are.
        plain = _PATH_OR_WORDS.sub(lambda found: found[1] or f"{found[2]}.", text)
        tree = ast.parse(plain, mode="eval") if len(text) <= LENGTH else None
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        tree = None
    if tree is None or any(level > DEPTH for level in _levels(tree.body)):
        raise ValueError(f"expected parts such as 'EntropyBelow(0.4) & PLPDAbove(0.2)', got {_cut(text)!r}")
    return _read(tree.body, text, trusted)


def written(recipe: Recipe) -> dict[str, str]:
    """Every field of a recipe as text; that for batch norm only where there is one."""
    fields = [name for name in FIELDS if name != "on_batch_norm" or recipe.on_batch_norm is not None]
    return {name: repr(getattr(recipe, name)) for name in fields}


def part_versions(fields: Mapping[str, str]) -> dict[str, int]:
    """Version of each part in a recipe as `written` has it; those at 1 are left out."""
    names = {name for text in fields.values() for name in _OWN_PART.findall(text)}
    return {name: PART_VERSIONS[name] for name in sorted(names) if name in PART_VERSIONS}


def part_paths(recipe: Recipe) -> frozenset[str]:
    """`package.module:Name` of every part of a recipe, and of its recipe for batch norm."""
    recipes = [each for each in (recipe, recipe.on_batch_norm) if each is not None]
    kinds = {type(part) for each in recipes for _, part in each.places}
    return frozenset(f"{kind.__module__}:{kind.__name__}" for kind in kinds)


def read(fields: dict[str, str], *, trusted: Trust = True) -> Recipe:
    """The recipe that `written` wrote; missing fields take their defaults. `trusted` is as in `parse`."""
    return Recipe(**{field_name(name): parse(text, trusted=trusted) for name, text in fields.items()})


def _levels(body: ast.expr) -> Iterator[int]:
    """How deep each expression of a text lies, found without recursion."""
    left: list[tuple[ast.AST, int]] = [(body, 1)]
    while left:
        node, level = left.pop()
        yield level
        left += [(child, level + 1) for child in ast.iter_child_nodes(node)]


def _read(node: ast.expr, text: str, trusted: Trust) -> Any:
    if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return _computed(node, text, trusted, operator.neg, node.operand)
    if isinstance(node, ast.Tuple):
        return tuple(_read(each, text, trusted) for each in node.elts)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _computed(node, text, trusted, _OPERATORS[type(node.op)], node.left, node.right)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return _made(node, _part(node.func.id, text, trusted), node.func.id, text, trusted)
    if isinstance(node, ast.Call) and (path := _path(node.func)) is not None:
        return _made(node, _outside_part(path, text, trusted), path, text, trusted)
    if (path := _path(node)) is not None:
        found = _outside_part(path, text, trusted, instance=True)
        return _checked_call(found) if isinstance(found, type) else found
    raise ValueError(f"expected parts, numbers and words in quotes, got {_source(node, text)} in {_cut(text)!r}")


def _computed(node: ast.expr, text: str, trusted: Trust, operate: Any, *operands: ast.expr) -> Any:
    """Parts joined, numbers divided or negated."""
    values = [_read(each, text, trusted) for each in operands]
    try:
        return operate(*values)
    except (TypeError, ArithmeticError) as error:
        if isinstance(values[0], Checked) and len(values) == 2:  # the part says what it cannot be joined with
            raise ValueError(str(error)) from error
        remedy = "& and + join parts, / divides numbers"
        raise ValueError(f"cannot compute {_source(node, text)} ({error}); {remedy}") from error


def _made(node: ast.Call, part: Any, name: str, text: str, trusted: Trust) -> Any:
    """A part with its settings; what it refuses in Python it refuses here, in the same words."""
    takes = f"{name} takes ({', '.join(item.name for item in dataclasses.fields(part))})"
    names = [each.arg for each in node.keywords]
    if None in names or len(set(names)) < len(names) or any(isinstance(each, ast.Starred) for each in node.args):
        raise ValueError(f"{takes}, each once and by its name, got {_source(node, text)}")
    values = [_read(each, text, trusted) for each in node.args]
    named = {str(each.arg): _read(each.value, text, trusted) for each in node.keywords}
    try:
        inspect.signature(part).bind(*values, **named)
    except TypeError as error:
        raise ValueError(f"{takes}, got {_source(node, text)}") from error
    return _checked_call(part, *values, **named)


def _checked_call(part: Any, *values: Any, **named: Any) -> Any:
    try:
        return part(*values, **named)
    except TypeError as error:
        raise ValueError(str(error)) from error


def _path(node: ast.expr) -> str | None:
    """`a.b:C` of a node that reads a.b.C, or None for any other node."""
    words: list[str] = []
    while isinstance(node, ast.Attribute):
        words, node = [node.attr, *words], node.value
    if not words or not isinstance(node, ast.Name):
        return None
    return f"{'.'.join([node.id, *words[:-1]])}:{words[-1]}"


def _outside_part(path: str, text: str, trusted: Trust, *, instance: bool = False) -> Any:
    """The class of a part at `package.module:Name`, or, where that is allowed, a part that the module has made."""
    known = {each.path for each in outside.announced("part").values()}
    if trusted is not True and path not in known | set(trusted or ()):
        raise UnannouncedPartError(
            f"expected parts of poem, or of a package that announces them, in {_cut(text)!r}, which may come from "
            f"somebody else: {path!r} would be imported"
        )
    found = outside.load("part", path)
    if isinstance(found, type) and issubclass(found, Checked) and not inspect.isabstract(found):
        return found
    if instance and isinstance(found, Part):
        return found
    kind = found.__name__ if isinstance(found, type) else type(found).__name__
    hint = "write it without ()" if isinstance(found, Part) else "docs/writing-a-part.md shows how to make one"
    raise ValueError(f"expected {path} to be a class derived from one of poem.parts, got {kind}; {hint}")


def _part(name: str, text: str, trusted: Trust) -> Any:
    if name not in PARTS and outside.is_outside("part", name):
        return _outside_part(outside.path_of("part", name), text, trusted)
    if name not in PARTS:
        known = [*PARTS, *outside.announced("part")]
        hint = nearest_hint(name, known, most=3, cutoff=0.5, show=str, otherwise="see poem.parts")
        raise ValueError(f"no part is called {name!r} in {_cut(text)!r}; {hint}")
    return PARTS[name]


def _source(node: ast.expr, text: str) -> str:
    """The piece of text that a node was read from."""
    return _cut(ast.get_source_segment(text, node) or text)


def _cut(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:197]}..."
