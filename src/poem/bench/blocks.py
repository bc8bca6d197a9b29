"""Blocks of YAML and JSON files, parsed into the dataclasses that declare their fields.

`parse_block(RowBlock, {"label": "Tent", "metod": "tent"}, "mine.yaml, row 1")` raises
`ValueError: mine.yaml, row 1: a row has no field 'metod'; did you mean 'method'?`
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from poem._util.nearest import nearest_hint
from poem.parts.fields import field_annotations, refusal

T = TypeVar("T")
Prepare = Callable[[Any, type, str], Any]
"""Called with a block, its dataclass and where it stands; returns the block to parse."""
OTHERS = "others"
"""Key in the metadata of a dataclass field. Its value maps names to annotations: the field collects what stands under
these names beside the declared ones, in the same block."""


def parse_block(kind: type[T], block: Any, where: str, prepare: Prepare | None = None) -> T:
    """An object of a dataclass from a block of a file; fields that are dataclasses, or lists of them, are parsed too.

    Text with `{x}`, which the column of a suite fills in later, is not checked.

    Raises:
        ValueError: The block is no mapping, lacks a field without a default, has a field that the class does not
            declare, or one of another type. The message begins with `where`.
    """
    if prepare is not None:
        block = prepare(block, kind, where)
    check_names(block, kind, where)
    own, values = field_annotations(kind), {}
    for item in fields(kind):  # type: ignore[arg-type]
        if OTHERS in item.metadata:
            hints = item.metadata[OTHERS]
            there = {name: block[name] for name in hints if name in block}
            values[item.name] = {name: _parsed(name, hints[name], each, where, prepare) for name, each in there.items()}
        elif item.name in block:
            values[item.name] = _parsed(item.name, own[item.name], block[item.name], where, prepare)
        elif item.default is MISSING and item.default_factory is MISSING:
            raise ValueError(f"{where}: expected the field {item.name!r}, which is missing")
    return kind(**values)


def check_names(block: Any, kind: type, where: str) -> None:
    """Raise ValueError for a block that is no mapping, and for a field that the dataclass does not declare."""
    if not isinstance(block, Mapping):
        raise ValueError(f"{where}: expected fields, got {_shown(block)}")
    others = [name for item in fields(kind) for name in item.metadata.get(OTHERS, ())]
    names = [*(item.name for item in fields(kind) if OTHERS not in item.metadata), *others]
    for name in block:
        if name not in names:
            raise ValueError(f"{where}: a {_word(kind)} has no field {name!r}; {nearest_hint(str(name), names)}")


def refused(name: str, hint: Any, value: Any) -> str | None:
    """Why a value does not fit its annotation, with what to type; None where it fits."""
    members = [each for each in _members(hint) if each is not type(None)]
    if value is None and type(None) in _members(hint):
        return None
    only, inside = members[0], get_args(members[0])
    if get_origin(only) is list:
        if not isinstance(value, list | tuple):
            return f"expected {name} to be a list, got {_shown(value)}"
        return _first(refused(f"each of {name}", inside[0], each) for each in value)
    if get_origin(only) is Mapping:
        if not isinstance(value, Mapping):
            return f"expected {name} to be names and values, got {_shown(value)}"
        return _first(refused(f"each of {name}", inside[1], each) for each in value.values())
    if get_origin(only) is Literal and isinstance(value, str) and value not in inside:
        return f"unknown {name} {value!r}; {nearest_hint(value, inside)}"
    error = refusal(name, hint, value)
    return None if error is None else f"{error}{_as_number(value) if float in members else ''}"


def _parsed(name: str, hint: Any, value: Any, where: str, prepare: Prepare | None) -> Any:
    """The value of a field: checked, and parsed where the annotation is a dataclass or a list of one."""
    if is_dataclass(hint) and isinstance(hint, type):
        return parse_block(hint, value, f"{where}, {name}", prepare)
    lists = [each for each in _members(hint) if get_origin(each) is list and is_dataclass(get_args(each)[0])]
    if lists and isinstance(value, list):
        inner = get_args(lists[0])[0]
        return [parse_block(inner, each, f"{where}, {_word(inner)} {at + 1}", prepare) for at, each in enumerate(value)]
    unfilled = isinstance(value, str) and "{x}" in value
    if not unfilled and (words := refused(name, hint, value)):
        raise ValueError(f"{where}: {words}")
    return value


def _word(kind: type) -> str:
    """What errors call a block: "row" for RowBlock."""
    return kind.__name__.removesuffix("Block").lower()


def _as_number(value: Any) -> str:
    """What to type for a number that YAML reads as text, such as 1e-3."""
    try:
        return f"; write {float(value)!r}: YAML reads {value} as text" if isinstance(value, str) else ""
    except ValueError:
        return ""


def _members(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _first(found: Iterable[str | None]) -> str | None:
    return next((words for words in found if words), None)


def _shown(value: Any) -> str:
    return repr(value)[:80]
