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


def with_fields(values: Mapping[str, Any], changes: Mapping[str, str]) -> dict[str, Any]:
    """A cell's fields with changes on top; what may be changed is for `poem.bench.cell.with_field` to say."""
    from poem.bench.cell import with_field

    found = dict(values)
    for name, text in changes.items():
        try:
            found = with_field(found, name, text)
        except RecursionError as error:
            raise ValueError(f"--set {name}: a value that is nested too deeply") from error
    return found
