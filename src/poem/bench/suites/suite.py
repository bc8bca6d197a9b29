"""Suites: the cells of a table or a figure, and the group, row and column of each number.

    suite = load("table1", "tiny")
    for placed in suite.placed: print(placed.group, placed.row, placed.column, placed.cell.label)

A suite file states differences only. A cell's fields are merged from the scale, the suite's `cell`, the group, the row
and the column, in this order; then come a chosen learning rate, limits, and flags: flags > file > defaults.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from poem._util.nearest import nearest_hint
from poem.bench.cell import Cell
from poem.bench.suites import files
from poem.bench.suites.expand import Expansion, NothingLeftError, Overrides, Placed, altered, left_out, setting_notes
from poem.bench.suites.schema import Claim, SuiteBlock, read_suite
from poem.bench.suites.schema import scales as _scales

TABLES = tuple(f"table{number}" for number in range(1, 13))
FIGURES = ("fig1a", "fig1b", "fig1c", "fig3", "fig4", "fig5", "fig6a", "fig6b", "branch-loss")
AVERAGE = "Avg."
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A table or figure at one scale.

    The number at a group, row and column is, for each seed, the mean over the cells placed there with that seed; then
    come mean and deviation over the seeds.
    """

    name: str
    version: int
    title: str
    kind: str
    scale: str
    placed: tuple[Placed, ...]
    columns: tuple[str, ...]
    """In the order of the page, which adds the average where `average` is True."""
    average: bool
    readout: str
    """A sentence on which answers, before or after the update, are measured."""
    smoke: bool
    """Whether the scale is too small to be evidence, and gives some cell its network or data."""
    claims: tuple[Claim, ...]
    notes: tuple[str, ...]
    x: str = ""
    y: str = ""
    altered: tuple[str, ...] = ()
    """What flags changed, in words: `methods tent`, `limit 256`; seeds do not count."""
    left_out: tuple[str, ...] = ()
    """Rows, columns and corruptions that its file states and flags left out."""
    numbers: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict, repr=False, hash=False)
    """The paper's numbers, by group, row and column."""

    def paper(self, group: str, row: str, column: str) -> float | None:
        """The paper's number at a group, row and column; its average only where all of its columns are shown."""
        there = self.numbers.get(group, {}).get(row, {})
        if column == AVERAGE and not set(there) - {AVERAGE} <= set(self.columns):
            return None
        return there.get(column)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The cells of the suite, each once."""
        return tuple(dict.fromkeys(placed.cell for placed in self.placed))


def names() -> list[str]:
    """Names of the suites in the package: the paper's, then others."""
    there = files.stems()
    return [name for name in all_names() if name in there] + [name for name in there if name not in all_names()]


def scales() -> list[str]:
    """Every scale, small to large."""
    return list(_scales())


def all_names() -> list[str]:
    """Names of the suites of `poem reproduce all`: the paper's twelve tables and nine figures."""
    return [*TABLES, *FIGURES]


def load(
    name: str | os.PathLike[str],
    scale: str = "tiny",
    *,
    limit: int | None = None,
    methods: Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    corruptions: Sequence[str] | None = None,
    changes: Mapping[str, Any] | None = None,
    chosen: Mapping[str, Mapping[str, float]] | None = None,
) -> Suite:
    """A suite by name, or from a YAML file of your own, at a scale.

    Args:
        name: One of `names()`, or a path that ends in .yaml.
        scale: One of `scales()`.
        limit: Images of each domain; at most as many in a label-shifted stream and of source data.
        methods: Patterns such as `"*poem*"` for methods or names of rows; other rows are left out, but for `source`.
        seeds: Instead of the suite's own.
        corruptions: Those of the suite's corruptions to keep.
        changes: Fields of every cell: `{"batch_size": 16}`; reach into mappings with a dot: `{"changes.alpha": 0.3}`.
        chosen: Learning rates by base and method, as `poem.bench.analysis.choose_lr.choose` finds them.

    Raises:
        ValueError: An unknown name or a wrong type in the file or the arguments; the message names file, field and
            remedy.
        NothingLeftError: The suite has none of the methods or corruptions in the arguments.
    """
    if scale not in _scales():
        raise ValueError(f"unknown scale {scale!r}; {nearest_hint(scale, _scales())}")
    if limit is not None and limit < 1:
        raise ValueError(f"expected limit >= 1, got {limit}")
    path = files.path_of(name)
    suite = read_suite(path, scale)
    lists = _list(methods), _list(seeds), _list(corruptions)
    overrides = Overrides(limit, *lists, changes or {}, chosen or {})
    plain = Overrides(seeds=overrides.seeds)
    try:
        expansion = Expansion(suite, scale, overrides)
        placed = tuple(expansion.placed())
        stated = placed if overrides == plain else tuple(Expansion(suite, scale, plain).placed())
    except (ValueError, TypeError) as error:
        kind = NothingLeftError if isinstance(error, NothingLeftError) else ValueError
        raise kind(f"suite {suite.name}: {error}") from error
    return Suite(
        name=suite.name, version=suite.version, title=suite.title, kind=suite.kind, scale=scale, placed=placed,
        columns=tuple(_column_labels(suite, placed)), average=suite.average, readout=suite.readout,
        smoke=_scales()[scale].smoke and expansion.scales_own, claims=tuple(suite.claims),
        notes=(*suite.notes, *setting_notes(scale, placed)), x=suite.x, y=suite.y, numbers=_paper_numbers(suite),
        altered=tuple(altered(placed, stated, overrides)), left_out=tuple(left_out(placed, stated)),
    )  # fmt: skip


def _list(values: Sequence[T] | None) -> list[T] | None:
    return None if values is None else list(values)


def _column_labels(suite: SuiteBlock, placed: Sequence[Placed]) -> list[str]:
    """The labels of the columns that have cells, in the suite's order."""
    there = dict.fromkeys(each.column for each in placed)
    return [column.label for column in suite.columns or () if column.label in there] or list(there)


def _paper_numbers(suite: SuiteBlock) -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    key = suite.paper
    if key is None:
        return {}
    if key not in files.paper():
        raise ValueError(f"suite {suite.name}: the paper has no table {key!r}; {nearest_hint(key, files.paper())}")
    return files.paper()[key]
