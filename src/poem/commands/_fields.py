"""Settings of a cell from the command line: `--set batch_size=16`, `--set changes.threshold=0.6`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def pairs(words: Iterable[str]) -> dict[str, str]:
    """FIELD=VALUE words as a mapping."""
    found = {}
    for word in words:
        name, sign, value = word.partition("=")
        if not sign or not name:
            raise ValueError(f"expected --set FIELD=VALUE, as in --set batch_size=16, got {word!r}")
        found[name] = value
    return found


def laid(values: Mapping[str, Any], changes: Mapping[str, str]) -> dict[str, Any]:
    """A cell's fields with changes on top; a dot reaches into the three that are mappings."""
    from dataclasses import fields

    from poem._laying import value_of
    from poem.cells import NESTED, Cell
    from poem.streams._shift import nearest

    plain = [item.name for item in fields(Cell) if item.name not in NESTED]
    found = dict(values)
    for name, text in changes.items():
        head, _, rest = name.partition(".")
        if head in NESTED and rest:
            found[head] = {**found.get(head, {}), rest: text if head == "changes" else value_of(text)}
        elif name in plain:
            found[name] = value_of(text)
        else:
            known = [*plain, *(f"{each}.NAME" for each in NESTED)]
            raise ValueError(f"a cell has no field {name!r} to set; {nearest(name, known)}")
    return found
