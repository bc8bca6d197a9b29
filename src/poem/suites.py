"""Suites as data: which cells make a table or a figure, and where each number stands.

    suite = load("table1", "tiny")
    for placed in suite.placed: print(placed.group, placed.row, placed.column, placed.cell.label)

A suite file states differences only. A cell is laid from the scale, the suite's `cell`, the group, the row and the
column, in this order; then come a chosen learning rate, limits, and what the caller sets: flags > file > defaults.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from poem import _suite_files as files
from poem import zoo
from poem._suite_files import Block
from poem.cells import Cell
from poem.method import methods as method_names
from poem.method import recipe as recipe_of
from poem.recipes import Rule
from poem.sentences import parse
from poem.streams._shift import CORRUPTIONS, EXTRA, nearest
from poem.streams.datasets import DATASETS

_HEADS = (
    "Gauss.", "Shot", "Impul.", "Defoc.", "Glass", "Motion", "Zoom", "Snow", "Frost", "Fog", "Brit.", "Contr.",
    "Elastic", "Pixel", "JPEG", "Speckle", "Gauss. blur", "Spatter", "Saturate",
)  # fmt: skip
LABELS: dict[str, str] = dict(zip((*CORRUPTIONS, *EXTRA), _HEADS, strict=True))
"""Corruptions as the paper's heads call them."""
APART = ("single", "label-shift", "one-by-one")
"""Scenarios that start afresh at every corruption, so that each may be a cell of its own."""
TABLES = tuple(f"table{number}" for number in range(1, 13))
FIGURES = ("fig1a", "fig1b", "fig1c", "fig3", "fig4", "fig5", "fig6a", "fig6b", "branch-loss")
AVERAGE = "Avg."


class NothingLeftError(ValueError):
    """A suite has none of the methods or corruptions that were asked for; who loads many may pass it over."""


@dataclass(frozen=True)
class Claim:
    """What the paper says of a table or figure, in our words, and the name of its check in `poem.claims`."""

    text: str
    check: str


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A cell and where its number stands."""

    group: str
    """Block of rows, in the paper's words: `ResNet-50-BN`."""
    row: str
    """A method, or a curve's name."""
    column: str
    """A corruption as the paper abbreviates it, or a figure's x as text."""
    cell: Cell


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
        chosen: Learning rates by base and method, as `poem.choice.choose` finds them.

    Raises:
        ValueError: Something in the file or in the arguments is not known; the message names file, field and remedy.
        NothingLeftError: The suite has none of the methods or corruptions that were asked for.
    """
    if scale not in files.scales():
        raise ValueError(f"unknown scale {scale!r}; {nearest(scale, files.scales())}")
    if limit is not None and limit < 1:
        raise ValueError(f"expected limit >= 1, got {limit}")
    path = files.path_of(name)
    suite = files.checked(files.read(path), path, scale)
    asked = _Asked(limit, methods, seeds, corruptions, changes or {}, chosen or {})
    try:
        placed = tuple(_Layout(suite, scale, asked).placed())
    except (ValueError, TypeError) as error:
        kind = NothingLeftError if isinstance(error, NothingLeftError) else ValueError
        raise kind(f"suite {suite['name']}: {error}") from error
    return Suite(
        name=suite["name"], version=suite["version"], title=suite["title"], kind=suite["kind"], scale=scale,
        placed=placed, columns=tuple(_in_order(suite, placed)), average=bool(suite.get("average", False)),
        readout=suite.get("readout", ""), smoke=bool(files.scales()[scale]["smoke"]),
        claims=tuple(Claim(**claim) for claim in suite.get("claims", [])), notes=tuple(suite.get("notes", [])),
        x=suite.get("x", ""), y=suite.get("y", ""), numbers=_numbers(suite),
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
        raise ValueError(f"suite {suite['name']}: the paper has no table {key!r}; {nearest(key, files.paper())}")
    return files.paper()[key]


@dataclass(frozen=True)
class _Asked:
    """What the caller sets."""

    limit: int | None
    methods: Sequence[str] | None
    seeds: Sequence[int] | None
    corruptions: Sequence[str] | None
    changes: Mapping[str, Any]
    chosen: Mapping[str, Mapping[str, float]]


class _Layout:
    """Lays blocks over each other until they are cells."""

    def __init__(self, suite: Block, scale: str, asked: _Asked) -> None:
        self.suite, self.scale, self.asked = suite, files.scales()[scale], asked
        self.seeds: list[int] = list(asked.seeds or suite.get("seeds") or self.scale["seeds"])
        self._check_corruptions(asked.corruptions or ())
        for pattern in asked.methods or ():
            if not any(fnmatchcase(each, pattern) for each in method_names()):
                raise ValueError(f"no method is like {pattern!r}; {nearest(pattern, method_names())}")

    def placed(self) -> Iterator[Placed]:
        """Every cell in its place: by group, row, column, corruption and seed."""
        found = False
        for group in self.suite["groups"]:
            for row in group["rows"]:
                for column, block in self._columns(group, row):
                    for cell in self._cells(block):
                        found = True
                        yield Placed(group=group["label"], row=row["label"], column=column, cell=cell)
        if not found:
            raise NothingLeftError("no cell is left; ask for more methods or corruptions")

    def _columns(self, group: Block, row: Block) -> Iterator[tuple[str, Block]]:
        """The columns that a row fills, each with the block of its cells."""
        outer = {name: value for name, value in group.items() if name != "rows"}
        base = files.laid(self.suite["cell"], outer, row)
        if self.suite["columns"] == "corruptions":
            shifts = self._corruptions(base)
            columns: list[Block] = [{"label": LABELS.get(each, each), "corruptions": [each]} for each in shifts]
        else:
            columns = self.suite["columns"]
        for column in columns:
            block = files.laid(base, column)
            if self._wanted(block) and ("only" not in row or column["label"] in map(str, row["only"])):
                yield column["label"], files.filled(block, column["x"]) if "x" in column else block

    def _wanted(self, block: Block) -> bool:
        patterns, method = self.asked.methods, block.get("method")
        return patterns is None or method == "source" or any(fnmatchcase(str(method), each) for each in patterns)

    def _corruptions(self, block: Block) -> list[str]:
        """The suite's corruptions, or the block's own, less those that nobody asked for."""
        own: list[str] = block.get("corruptions") or self.suite.get("corruptions") or self.scale["corruptions"]
        self._check_corruptions(own)
        return [each for each in own if self.asked.corruptions is None or each in self.asked.corruptions]

    def _cells(self, block: Block) -> Iterator[Cell]:
        """One cell per corruption and seed; of scenarios that run on through all, one per seed."""
        shifts = self._corruptions(block)
        apart = block.get("scenario", self.scale["cell"].get("scenario", "single")) in APART
        for names in [[each] for each in shifts] if apart else [shifts] if shifts else []:
            for seed in self.seeds:
                yield self._cell({**block, "corruptions": names}, seed)

    def _cell(self, block: Block, seed: int) -> Cell:
        stated = files.laid(self.scale["cell"], {name: block[name] for name in files.CELL if name in block})
        role = stated.get("base", "bn")
        stated["base"] = self.scale["bases"].get(role, role)
        stated["data"] = self.scale["data"].get(stated.get("data", "main"), stated.get("data"))
        stated["seed"], stated["version"] = seed, self.suite["version"]
        stated["lr"] = self._rate(stated, block.get("factor"), role)
        stated = self._limited(stated)
        for name, value in self.asked.changes.items():
            _set(stated, name, value)
        stated["base"] = self.scale["bases"].get(stated["base"], stated["base"])
        return _valid(stated)

    def _rate(self, stated: Block, factor: Any, role: str) -> float | None:
        """The learning rate: chosen before, as the file says, or None for the method's rule; times the factor."""
        method = stated.get("method", "")
        found = _recipe(method, stated.get("preset", "imagenet"))
        if not found.learns:
            return None
        rate = self.asked.chosen.get(stated["base"], {}).get(method, stated.get("lr"))
        if factor is None:
            return rate
        if rate is None:
            family = "transformer" if role in self.scale["transformers"] else "convolutional"
            rate = found.lr(family, stated["batch_size"]) if isinstance(found.lr, Rule) else found.lr
        return float(f"{rate * float(factor):.6g}")

    def _limited(self, stated: Block) -> Block:
        limit = self.asked.limit
        if limit is None:
            return stated
        least = {"n": limit, "source_images": min(limit, stated.get("source_images", 2000))}
        length = stated.get("options", {}).get("length")
        return files.laid(stated, least, {} if length is None else {"options": {"length": min(limit, length)}})

    def _check_corruptions(self, given: Sequence[str]) -> None:
        for name in given:
            if name not in (*CORRUPTIONS, *EXTRA, "clean"):
                raise ValueError(f"unknown corruption {name!r}; {nearest(str(name), (*CORRUPTIONS, *EXTRA))}")


SETTABLE = tuple(name for name in files.CELL if name not in ("method", "corruptions", *files.NESTED))


def _set(stated: Block, name: str, value: Any) -> None:
    """One field from the command line; text is read as a suite file would be. What learns nothing keeps its recipe."""
    head, _, rest = name.partition(".")
    if name not in SETTABLE and not (rest and head in files.NESTED):
        known = [*SETTABLE, *(f"{each}.NAME" for each in files.NESTED)]
        raise ValueError(f"no field {name!r} can be set; {nearest(name, known)}")
    if head in ("lr", "changes") and not _recipe(stated["method"], "imagenet").learns:
        return
    if isinstance(value, str):
        value = _read(value)
    stated[head] = {**stated.get(head, {}), rest: value} if rest else value


def _read(text: str) -> Any:
    """A value as YAML has it, and 1e-3, which YAML takes for a word."""
    import yaml

    try:
        return float(text) if not text.lstrip("+-").isdigit() else int(text)
    except ValueError:
        return yaml.safe_load(text)


def _valid(stated: Block) -> Cell:
    """The cell, once every name in it is known; changes that change nothing are dropped, so that keys coincide."""
    for kind, value, known in (
        ("base", stated["base"], zoo.bases()),
        ("data set", stated["data"], list(DATASETS)),
        ("method", stated.get("method"), method_names()),
    ):
        if value not in known:
            raise ValueError(f"unknown {kind} {value!r}; {nearest(str(value), known)}")
    if stated.get("changes"):
        changes = {name: str(value) for name, value in stated["changes"].items()}
        plain = _recipe(stated["method"], stated.get("preset", "imagenet"))
        same = plain.changed({name: parse(value) for name, value in changes.items()}) == plain
        stated = {**stated, "changes": {} if same else changes}
    cell = Cell.from_dict(stated)
    cell.order()
    return cell


_recipe = cache(recipe_of)
