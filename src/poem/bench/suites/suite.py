"""Suites as data: which cells make a table or a figure, and where each number stands.

    suite = load("table1", "tiny")
    for placed in suite.placed: print(placed.group, placed.row, placed.column, placed.cell.label)

A suite file states differences only. A cell is laid from the scale, the suite's `cell`, the group, the row and the
column, in this order; then come a chosen learning rate, limits, and what the caller sets: flags > file > defaults.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from poem._util.nearest import nearest_hint
from poem.bench.cell import Cell
from poem.bench.suites import files
from poem.bench.suites.expand import Asked, Layout, NothingLeftError, Placed, altered, authors, left_out
from poem.bench.suites.files import Block

TABLES = tuple(f"table{number}" for number in range(1, 13))
FIGURES = ("fig1a", "fig1b", "fig1c", "fig3", "fig4", "fig5", "fig6a", "fig6b", "branch-loss")
AVERAGE = "Avg."


@dataclass(frozen=True)
class Claim:
    """What the paper says of a table or figure, in our words, and its check in `bench/analysis/claims.py`."""

    text: str
    check: str


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A table or figure at one scale.

    The number at a place is, for each seed, the mean over the cells placed there with that seed; then come mean and
    deviation over the seeds.
    """

    name: str
    version: int
    title: str
    kind: str
    scale: str
    placed: tuple[Placed, ...]
    columns: tuple[str, ...]
    """In order of print; a page adds the average where `average` says so."""
    average: bool
    readout: str
    """What is read out when."""
    smoke: bool
    """Too small to be evidence."""
    claims: tuple[Claim, ...]
    notes: tuple[str, ...]
    x: str = ""
    y: str = ""
    altered: tuple[str, ...] = ()
    """How flags made it another suite than its file states: `methods tent`, `limit 256`; seeds do not count."""
    left_out: tuple[str, ...] = ()
    """Rows, columns and corruptions that its file states and flags left out."""
    numbers: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict, repr=False, hash=False)
    """The paper's, by group, row and column."""

    def paper(self, group: str, row: str, column: str) -> float | None:
        """The paper's number at a place; its average only where all of its columns are shown."""
        there = self.numbers.get(group, {}).get(row, {})
        if column == AVERAGE and not set(there) - {AVERAGE} <= set(self.columns):
            return None
        return there.get(column)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """Every cell once."""
        return tuple(dict.fromkeys(placed.cell for placed in self.placed))


def names() -> list[str]:
    """Every suite that comes with the package: the paper's, then protocols beyond it."""
    there = files.stems()
    return [name for name in all_names() if name in there] + [name for name in there if name not in all_names()]


def scales() -> list[str]:
    """Every scale, small to large."""
    return list(files.scales())


def all_names() -> list[str]:
    """What `reproduce all` means: the paper's twelve tables and nine figures."""
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
        limit: So many images of each domain; at most so many in a label-shifted stream and of source data.
        methods: Patterns such as `"*poem*"`; rows of other methods are left out, `source` never is.
        seeds: Instead of the suite's own.
        corruptions: Of the suite's corruptions these alone.
        changes: Fields of every cell: `{"batch_size": 16}`; reach into mappings with a dot: `{"changes.alpha": 0.3}`.
        chosen: Learning rates by base and method, as `poem.bench.analysis.choose_lr.choose` finds them.

    Raises:
        ValueError: Something in the file or in the arguments is not known; the message names file, field and remedy.
        NothingLeftError: The suite has none of the methods or corruptions that were asked for.
    """
    if scale not in files.scales():
        raise ValueError(f"unknown scale {scale!r}; {nearest_hint(scale, files.scales())}")
    if limit is not None and limit < 1:
        raise ValueError(f"expected limit >= 1, got {limit}")
    path = files.path_of(name)
    suite = files.checked(files.read(path), path, scale)
    asked = Asked(limit, methods, seeds, corruptions, changes or {}, chosen or {})
    plain = Asked(seeds=seeds)
    try:
        placed = tuple(Layout(suite, scale, asked).placed())
        stated = placed if asked == plain else tuple(Layout(suite, scale, plain).placed())
    except (ValueError, TypeError) as error:
        kind = NothingLeftError if isinstance(error, NothingLeftError) else ValueError
        raise kind(f"suite {suite['name']}: {error}") from error
    return Suite(
        name=suite["name"], version=suite["version"], title=suite["title"], kind=suite["kind"], scale=scale,
        placed=placed, columns=tuple(_in_order(suite, placed)), average=bool(suite.get("average", False)),
        readout=suite.get("readout", ""), smoke=bool(files.scales()[scale]["smoke"]),
        claims=tuple(Claim(**claim) for claim in suite.get("claims", [])),
        notes=(*suite.get("notes", []), *authors(scale, placed)),
        x=suite.get("x", ""), y=suite.get("y", ""), numbers=_numbers(suite),
        altered=tuple(altered(placed, stated, asked)), left_out=tuple(left_out(placed, stated)),
    )  # fmt: skip


def _in_order(suite: Block, placed: Sequence[Placed]) -> list[str]:
    there = dict.fromkeys(each.column for each in placed)
    stated = [] if suite["columns"] == "corruptions" else [column["label"] for column in suite["columns"]]
    return [label for label in stated if label in there] or list(there)


def _numbers(suite: Block) -> Mapping[str, Mapping[str, Mapping[str, float]]]:
    key = suite.get("paper")
    if key is None:
        return {}
    if key not in files.paper():
        raise ValueError(f"suite {suite['name']}: the paper has no table {key!r}; {nearest_hint(key, files.paper())}")
    return files.paper()[key]
