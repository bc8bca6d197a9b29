"""What a cell gave: frozen, documented, to JSON and back, written whole or not at all, with a checksum.

The checksum shows that a file was changed after it was measured. It is no signature: whoever changes a file on purpose
can compute a new one. Files of versions before it have none; they are read as before.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from poem._util.files import read_json, write_atomic
from poem._util.nearest import nearest_hint
from poem.bench.cell import Cell, key_of
from poem.bench.cell_files import is_number, read_cell
from poem.streams.shift import VERSIONS

__all__ = ["SCHEMA", "Report", "write_atomic"]

SCHEMA = 1
ADDED = ("nonfinite",)
"""Fields that came later within the schema: files from before lack them, and the default holds."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """One cell's result. Everything but `timing`, `host` and `provenance` depends on the cell alone."""

    cell: Cell
    recipe: dict[str, str]
    """Every field of the recipe as text, as `poem.recipes.text.read` takes it."""
    base: dict[str, Any]
    """Name, exact tag, sha256 of the weights (or "random"), normalisation."""
    card: dict[str, Any]
    """The protocol card of the stream."""
    nonfinite: int = 0
    """Answers that were NaN or infinite; they count as wrong. 0 in files from before it was counted."""
    metrics: dict[str, float]
    """Over the whole stream: top1 top5 ece aurc worst_window in percent, nll in nats, entropy_before, entropy_after.
    One that is not finite is left out, and a note names it."""
    domains: dict[str, dict[str, float]]
    """By shift ("fog 5"): n, top1, ece, nll."""
    windows: list[float]
    """Accuracy in percent of each window of `cell.window` images, in order of arrival."""
    groups: dict[str, dict[str, float]]
    """low, newly (potentially reliable), high (the other high-entropy ones): n, pseudo-label accuracy, confidence."""
    probes: dict[str, Any] = field(default_factory=dict)
    """What figures need: transitions, entropy_bins, gradients, online."""
    ledger: dict[str, int]
    """Counts in images, as METHODS of efficiency tables count them: the adapter's totals, and source_images."""
    notes: list[str] = field(default_factory=list)
    """What a reader should know, such as an adapter's fallback."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Package, torch and python versions, commit, dirty."""
    timing: dict[str, float] = field(default_factory=dict)
    """Seconds in the adapter (device in step) and in loading, images/s, peak memory in bytes: on a GPU above what the
    models themselves take, on a CPU of the whole process."""
    host: dict[str, Any] = field(default_factory=dict)
    """Device, processor, when."""
    schema: int = SCHEMA
    intact: bool | None = field(default=None, compare=False, repr=False)
    """Of a result that was read: whether the checksum in its file is right; None where there was none."""

    @property
    def key(self) -> str:
        """The key of the cell with the recipe that was run, which may have been another than the method's is now."""
        return key_of(self.cell, self.recipe)

    def identity(self) -> dict[str, Any]:
        """What must be equal wherever and however often the cell is run."""
        return {name: value for name, value in self.to_dict().items() if name not in ("timing", "host", "provenance")}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        found = {name: getattr(self, name) for name in _FIELDS if name != "cell"}
        return {"schema": self.schema, "key": self.key, "cell": self.cell.to_dict(), **found}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Report:
        """A report from `to_dict`'s values, with or without a checksum.

        Raises:
            ValueError: Another schema, a missing or an unknown field, or one that holds something else.
        """
        if values.get("schema") != SCHEMA:
            raise ValueError(f"expected a result of schema {SCHEMA}, got schema {str(values.get('schema'))[:40]!r}")
        for name in values:
            if name not in (*_FIELDS, "key", "checksum"):
                raise ValueError(f"a result has no field {name!r}; {nearest_hint(name, sorted(_FIELDS))}")
        missing = set(_FIELDS) - set(values) - set(ADDED)
        if missing:
            raise ValueError(f"a result lacks {', '.join(sorted(missing))}")
        for name, (right, words) in _SHAPES.items():
            if name in values and not right(values[name]):
                raise ValueError(f"expected {name} of a result as {words}, got {repr(values[name])[:80]}")
        stated = values.get("checksum")
        intact = None if stated is None else stated == checksum(values)
        plain = {name: values[name] for name in _FIELDS if name in values}
        report = cls(**{**plain, "cell": read_cell(values["cell"])}, intact=intact)
        if values.get("key", report.key) != report.key:
            key = str(values["key"])[:40]
            found = f"a result's key is {key}, its cell and recipe have {report.key}: the file was edited"
            changed = [name for name in report.cell.corruptions if name in VERSIONS]
            hint = f", or its images are of an earlier version of {changed[0]}; measure it again" if changed else ""
            raise ValueError(f"{found}{hint}")
        return report

    def save(self, path: Path) -> None:
        """Write it whole or not at all, with a checksum; one that was edited gets none."""
        values = self.to_dict()
        if self.intact is not False:
            values = {**values, "checksum": checksum(values)}
        write_atomic(path, json.dumps(values, indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read one; a half-written or foreign file is an error that names it."""
        try:
            values = read_json(path)
            if not isinstance(values, dict):
                raise ValueError(f"expected a JSON object, got {type(values).__name__}")
            return cls.from_dict(values)
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
            raise ValueError(f"{path} is not a result: {error}") from error


_FIELDS = tuple(item.name for item in fields(Report) if item.name != "intact")
"""What stands in a file, beside the key and the checksum."""


def checksum(values: Mapping[str, Any]) -> str:
    """The SHA-256 of a result's values as JSON, whatever their order and layout; a checksum among them is left out."""
    held = {name: value for name, value in values.items() if name != "checksum"}
    text = json.dumps(held, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _text(value: Any) -> bool:
    """Text that can be written: JSON may hold half of a character."""
    return isinstance(value, str) and not any("\ud800" <= each <= "\udfff" for each in value)


def _mapping(right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(_text(key) and right(each) for key, each in value.items())


def _list(right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(right, value))


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, bool) or _text(value) or is_number(value)


def _number(value: Any) -> bool:
    """A number, or null where there is nothing to measure."""
    return value is None or is_number(value)


def _measured(value: Any) -> bool:
    return _mapping(_number)(value) and is_number(value.get("top1"))


def _flat(value: Any) -> bool:
    return _plain(value) or _list(_plain)(value)


def _any(value: Any) -> bool:
    return _plain(value) or _list(_any)(value) or _mapping(_any)(value)


_SHAPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "recipe": (_mapping(_text), "names and texts"),
    "base": (_mapping(_plain), "names and values"),
    "card": (_mapping(_flat), "names and values or lists of values"),
    "metrics": (_measured, "names and numbers, top1 among them"),
    "domains": (_mapping(_mapping(_number)), "names and numbers by domain"),
    "windows": (_list(_number), "a list of numbers"),
    "groups": (_mapping(_mapping(_number)), "names and numbers by group"),
    "probes": (_mapping(_any), "names and values"),
    "ledger": (_mapping(_number), "names and numbers"),
    "nonfinite": (_number, "a number"),
    "notes": (_list(_text), "a list of texts"),
    "provenance": (_mapping(_plain), "names and values"),
    "timing": (_mapping(_number), "names and numbers"),
    "host": (_mapping(_plain), "names and values"),
}
"""What each field holds, as a check and in words."""
