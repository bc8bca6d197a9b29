"""What may stand in a suite file and in `scales.yaml`, declared as dataclasses that their blocks are parsed into.

Rows, columns and groups hold fields of a cell beside their own. Every block of a suite may hold `at: {SCALE: fields}`,
which is merged over the block at that scale before it is parsed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from poem._util.nearest import nearest_hint
from poem.bench.blocks import OTHERS, check_names, parse_block
from poem.bench.cell import FILE_FIELDS, merge_fields
from poem.bench.suites import files
from poem.parts.fields import Range

Fields = dict[str, Any]
"""Fields of a cell, as one block states them or several merged."""
Kind = Literal["table", "lines", "bars", "efficiency", "transitions", "groups", "gradients", "range"]
CELL_FIELDS = {name: hint for name, hint in FILE_FIELDS.items() if name not in ("seed", "version")}
"""Fields of a cell that a block may state: all but the seed and the version, which are the suite's."""


@dataclass(frozen=True, kw_only=True)
class CellBlock:
    """Fields of every cell of a suite or a scale."""

    fields: Fields = field(default_factory=dict, metadata={OTHERS: CELL_FIELDS})


@dataclass(frozen=True, kw_only=True)
class LabelledBlock:
    """A label, and fields of the cells under it; `factor` multiplies the learning rate."""

    label: str
    fields: Fields = field(default_factory=dict, metadata={OTHERS: CELL_FIELDS | {"factor": float | None}})


@dataclass(frozen=True, kw_only=True)
class ColumnBlock(LabelledBlock):
    """A column; `columns: {x: [values]}` makes one for each value."""

    x: Any = None
    """Put in place of `{x}` in the fields of rows and groups."""


@dataclass(frozen=True, kw_only=True)
class RowBlock(LabelledBlock):
    """A row, such as that of one method."""

    only: list[str | float] | None = None
    """Labels of the columns that the row fills; None for all."""


@dataclass(frozen=True, kw_only=True)
class GroupBlock(LabelledBlock):
    """A group of rows, such as those of one network."""

    rows: list[RowBlock] | None = None
    """None for the suite's."""


@dataclass(frozen=True)
class Claim:
    """What the paper says of a table or figure, in our words, and its check in `bench/analysis/claims.py`."""

    text: str
    check: str


@dataclass(frozen=True, kw_only=True)
class SuiteBlock:
    """A suite file at one scale."""

    name: str
    version: Annotated[int, Range(at_least=1, hint="write 1, and the next number once the same words mean other cells")]
    title: str
    kind: Kind = "table"
    paper: str | None = None
    """A table of `paper.json`."""
    average: bool = False
    readout: str = ""
    x: str = ""
    y: str = ""
    claims: list[Claim] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    cell: CellBlock = field(default_factory=CellBlock)
    corruptions: list[str] | None = None
    """None for the scale's."""
    seeds: list[int] | None = None
    """None for the scale's."""
    columns: list[ColumnBlock] | None
    """None for a column per corruption, which files write as `columns: corruptions`."""
    groups: list[GroupBlock] = field(default_factory=lambda: [GroupBlock(label="", fields={"base": "bn"})])
    rows: list[RowBlock] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class SettingBlock:
    """What a method's authors change on one base in one scenario; a suite that shows it prints the note."""

    base: str
    scenario: str
    methods: list[str]
    changes: Mapping[str, Any]
    note: str


@dataclass(frozen=True, kw_only=True)
class ScaleBlock:
    """A scale of `scales.yaml`, which explains the fields."""

    smoke: bool
    bases: Mapping[str, str]
    data: Mapping[str, str]
    transformers: list[str]
    corruptions: list[str]
    seeds: list[int]
    cell: CellBlock
    settings: list[SettingBlock] = field(default_factory=list)


@cache
def scales() -> dict[str, ScaleBlock]:
    """Every scale by name, small to large."""
    path = files.folder() / "scales.yaml"
    return {name: parse_block(ScaleBlock, block, f"{path}, {name}") for name, block in files.read(path).items()}


def read_suite(path: Path, scale: str) -> SuiteBlock:
    """A suite file, parsed for one scale.

    Raises:
        ValueError: Something in it is not declared here; the message names the file, the block and the field.
    """

    def prepare(block: Any, kind: type, where: str) -> Any:
        found = _at_scale(block, kind, scale, where)
        if kind is SuiteBlock and "columns" in found:
            return {**found, "columns": _columns(found["columns"], where)}
        return found

    suite = parse_block(SuiteBlock, files.read(path), str(path), prepare)
    if not suite.rows and any(group.rows is None for group in suite.groups):
        raise ValueError(f"{path}: expected the field 'rows', which is missing")
    return suite


def _at_scale(block: Any, kind: type, scale: str, where: str) -> Any:
    """The block with what it states `at` this scale merged over it; notes are added to its own."""
    if not isinstance(block, Mapping) or "at" not in block:
        return block
    plain, over = {name: value for name, value in block.items() if name != "at"}, block["at"]
    if not isinstance(over, Mapping):
        raise ValueError(f"{where}: expected at to be a mapping from scales to fields, got {over!r}")
    for name in over:
        if name not in scales():
            raise ValueError(f"{where}: at names an unknown scale {name!r}; {nearest_hint(str(name), scales())}")
    here = over.get(scale, {})
    check_names(here, kind, f"{where}, at {scale}")
    merged = merge_fields(plain, here)
    if "notes" in here:
        merged["notes"] = [*plain.get("notes", []), *here["notes"]]
    if "cell" in here:
        merged["cell"] = merge_fields(plain.get("cell", {}), here["cell"])
    return merged


def _columns(columns: Any, where: str) -> list[Any] | None:
    """The blocks of columns: None for `corruptions`, a list as it is, a block for each value of `{x: values}`."""
    if columns == "corruptions":
        return None
    if isinstance(columns, Mapping) and list(columns) == ["x"] and isinstance(columns["x"], list):
        return [{"label": f"{x:g}" if isinstance(x, float) else str(x), "x": x} for x in columns["x"]]
    if isinstance(columns, list):
        return columns
    raise ValueError(
        f"{where}: expected columns to be 'corruptions', a list of blocks with labels, or {{x: [values]}}, "
        f"got {columns!r}"
    )


def fill(value: Any, x: Any) -> Any:
    """The value with a column's x in place of `{x}`, in mappings too."""
    if isinstance(value, Mapping):
        return {name: fill(each, x) for name, each in value.items()}
    return value.replace("{x}", str(x)) if isinstance(value, str) else value
