"""What a cell gave: frozen, documented, to JSON and back, written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from poem._files import write_whole
from poem.cells import Cell, key_of
from poem.streams._shift import nearest

__all__ = ["SCHEMA", "Report", "write_whole"]

SCHEMA = 1
ADDED = ("nonfinite",)
"""Fields that came later within the schema: files from before lack them, and the default holds."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """One cell's result. Everything but `timing`, `host` and `provenance` depends on the cell alone."""

    cell: Cell
    recipe: dict[str, str]
    """Every field of the recipe as text, as `poem.sentences.read` takes it."""
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

    @property
    def key(self) -> str:
        """The key of the cell with the recipe that was run, which may have been another than the method's is now."""
        return key_of(self.cell, self.recipe)

    def identity(self) -> dict[str, Any]:
        """What must be equal wherever and however often the cell is run."""
        return {name: value for name, value in self.to_dict().items() if name not in ("timing", "host", "provenance")}

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        found = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "cell"}
        return {"schema": self.schema, "key": self.key, "cell": self.cell.to_dict(), **found}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Report:
        """A report from `to_dict`'s values; another schema, a missing or an unknown field is an error."""
        if values.get("schema") != SCHEMA:
            raise ValueError(f"expected a result of schema {SCHEMA}, got schema {values.get('schema')!r}")
        known = {item.name for item in fields(cls)}
        for name in values:
            if name not in known | {"key"}:
                raise ValueError(f"a result has no field {name!r}; {nearest(name, sorted(known))}")
        missing = known - set(values) - set(ADDED)
        if missing:
            raise ValueError(f"a result lacks {', '.join(sorted(missing))}")
        plain = {name: value for name, value in values.items() if name != "key"}
        report = cls(**{**plain, "cell": Cell.from_dict(values["cell"])})
        if values.get("key", report.key) != report.key:
            found = f"a result's key is {values['key']}, its cell and recipe have {report.key}"
            raise ValueError(f"{found}: the file was edited")
        return report

    def save(self, path: Path) -> None:
        """Write it beside its place, then move it there."""
        write_whole(path, json.dumps(self.to_dict(), indent=1, allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> Report:
        """Read one; a half-written or foreign file is an error that names it."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(values, dict):
                raise ValueError(f"expected a JSON object, got {type(values).__name__}")
            return cls.from_dict(values)
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path} is not a result: {error}") from error
