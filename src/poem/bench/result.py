"""The result of a cell: frozen, to JSON and back, written whole or not at all, with a checksum.

The checksum shows that a file was changed after it was measured. It is no signature: whoever changes a file on purpose
can compute a new one. Files of versions before it have none; they are read as before.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from poem._util.files import read_json, write_atomic
from poem._util.nearest import nearest_hint
from poem.bench.cell import Cell, key_of, read_cell, result_key
from poem.recipes.text import part_versions
from poem.streams.shift import VERSIONS

__all__ = ["SCHEMA", "CellResult", "latest"]

SCHEMA = 1
ADDED = ("nonfinite", "samples")
"""Fields that came later within the schema: older files lack them and get the default."""


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """What was measured for one cell. `timing`, `host` and `provenance` apart, it depends on cell and weights alone."""

    cell: Cell
    recipe: dict[str, str]
    """Every field of the recipe as text, as `poem.recipes.text.read` takes it."""
    base: dict[str, Any]
    """Name, exact tag, normalisation, sha256 of the file with the weights (or "random", and then `tensors_sha256`)."""
    card: dict[str, Any]
    """The protocol card of the stream."""
    nonfinite: int = 0
    """Answers that were NaN or infinite; they count as wrong. 0 in files that do not have it."""
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
    samples: dict[str, str] = field(default_factory=dict)
    """`right`: one bit an answer, in order of arrival, as `poem.bench.sample_cells.bits_text` writes them, so that two
    methods can be compared sample by sample; `labels`: digits of the SHA-256 of the labels, which say that two streams
    are the same. Empty in files that do not have it."""
    ledger: dict[str, int]
    """The adapter's totals, counted in images as efficiency tables do, and source_images."""
    notes: list[str] = field(default_factory=list)
    """Warnings and fallbacks of the adapter and the stream, in sentences."""
    provenance: dict[str, Any] = field(default_factory=dict)
    """Versions of poem, torch, numpy and Python, commit, dirty; of other packages `package NAME`, the version, and
    `module NAME`, digits of the SHA-256 of the module's file."""
    timing: dict[str, float] = field(default_factory=dict)
    """Seconds in the adapter (device synchronised) and in loading, images/s, peak memory in bytes: on a GPU above what
    the models themselves take, on a CPU of the whole process."""
    host: dict[str, Any] = field(default_factory=dict)
    """Device, processor, when."""
    schema: int = SCHEMA
    intact: bool | None = field(default=None, compare=False, repr=False)
    """Whether the checksum in the file that the result was read from is right; None where there was none."""

    @property
    def cell_key(self) -> str:
        """The key of the cell with the recipe that was run, which may differ from the method's recipe of today."""
        return key_of(self.cell, self.recipe)

    @property
    def weights_sha256(self) -> str | None:
        """SHA-256 of the weights: of their file, or of the tensors of random ones; None where older files lack it."""
        found = self.base.get("tensors_sha256", self.base.get("sha256"))
        return None if found in (None, "random") else str(found)

    @property
    def key(self) -> str:
        """The cell's key and the first digits of the weights' SHA-256."""
        return result_key(self.cell_key, self.weights_sha256)

    def identity(self) -> dict[str, Any]:
        """Every field but timing, host and provenance: equal wherever and however often the cell is run on a CPU."""
        return {name: value for name, value in self.to_dict().items() if name not in ("timing", "host", "provenance")}

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        found = {name: getattr(self, name) for name in _FIELDS if name != "cell"}
        return {"schema": self.schema, "key": self.key, "cell": self.cell.to_dict(), **found}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> CellResult:
        """A result from `to_dict`'s values, with or without a checksum; older files state the cell's key as their own.

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
        result = cls(**{**plain, "cell": read_cell(values["cell"])}, intact=intact)
        if values.get("key", result.key) not in (result.key, result.cell_key):
            key = str(values["key"])[:40]
            found = f"a result's key is {key}, its cell, recipe and weights have {result.key}: the file was edited"
            changed = [f"its images are of an earlier version of {name}"
                       for name in result.cell.corruptions if name in VERSIONS][:1]  # fmt: skip
            changed += [f"its method had an earlier version of {name}" for name in part_versions(result.recipe)]
            raise ValueError(", or ".join([found, *changed]) + ("; measure it again" if changed else ""))
        return result

    def save(self, path: Path) -> None:
        """Write the result whole or not at all, with a checksum; an edited one is written without."""
        values = self.to_dict()
        if self.intact is not False:
            values = {**values, "checksum": checksum(values)}
        write_atomic(path, json.dumps(values, indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> CellResult:
        """Read a result; a half-written or foreign file raises a ValueError that names it."""
        try:
            values = read_json(path)
            if not isinstance(values, dict):
                raise ValueError(f"expected a JSON object, got {type(values).__name__}")
            return cls.from_dict(values)
        except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
            raise ValueError(f"{path} is not a result: {error}") from error


K = TypeVar("K")
_FIELDS = tuple(item.name for item in fields(CellResult) if item.name != "intact")
"""Fields of a file, beside the key and the checksum."""


def latest(results: Iterable[CellResult], key: Callable[[CellResult], K]) -> dict[K, CellResult]:
    """Results by a key; of several with the same key, the one that was measured last."""
    found: dict[K, CellResult] = {}
    for result in results:
        name = key(result)
        before = found.setdefault(name, result)
        if str(result.host.get("started", "")) > str(before.host.get("started", "")):
            found[name] = result
    return found


def checksum(values: Mapping[str, Any]) -> str:
    """SHA-256 of a result's values as JSON, whatever their order and layout; a checksum among them is left out."""
    held = {name: value for name, value in values.items() if name != "checksum"}
    text = json.dumps(held, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def is_number(value: Any) -> bool:
    """Whether a value is a finite number that a float can hold."""
    if isinstance(value, int) and not isinstance(value, bool):
        return abs(value) < 2**1000
    return isinstance(value, float) and math.isfinite(value)


def _text(value: Any) -> bool:
    """Whether a value is text that can be encoded: JSON may hold half of a surrogate pair."""
    return isinstance(value, str) and not any("\ud800" <= each <= "\udfff" for each in value)


def _mapping(right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(_text(key) and right(each) for key, each in value.items())


def _list(right: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(map(right, value))


def _plain(value: Any) -> bool:
    return value is None or isinstance(value, bool) or _text(value) or is_number(value)


def _number(value: Any) -> bool:
    """Whether a value is a number, or null where nothing was measured."""
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
    "samples": (_mapping(_text), "names and texts"),
    "notes": (_list(_text), "a list of texts"),
    "provenance": (_mapping(_plain), "names and values"),
    "timing": (_mapping(_number), "names and numbers"),
    "host": (_mapping(_plain), "names and values"),
}
"""Check of each field, and the same in words for an error."""
