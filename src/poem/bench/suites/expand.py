"""From the blocks of a suite file to cells: scale, suite, group, row and column over each other, then the flags.

Learning rates come last, once base, batch size and preset are settled: a chosen one, or the method's rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from poem import zoo
from poem._util.nearest import nearest_hint
from poem.bench.analysis.choose_lr import rate_of
from poem.bench.cell import Cell, laid, with_field
from poem.bench.suites import files
from poem.bench.suites.files import Block
from poem.recipes.methods import methods as method_names
from poem.recipes.methods import recipe as recipe_of
from poem.recipes.recipe import Rule
from poem.recipes.text import parse
from poem.streams.datasets import DATASETS
from poem.streams.shift import CORRUPTIONS, EXTRA

_HEADS = (
    "Gauss.", "Shot", "Impul.", "Defoc.", "Glass", "Motion", "Zoom", "Snow", "Frost", "Fog", "Brit.", "Contr.",
    "Elastic", "Pixel", "JPEG", "Speckle", "Gauss. blur", "Spatter", "Saturate",
)  # fmt: skip
LABELS: dict[str, str] = dict(zip((*CORRUPTIONS, *EXTRA), _HEADS, strict=True))
"""Corruptions as the paper's heads call them."""
APART = ("single", "label-shift", "one-by-one")
"""Scenarios that start afresh at every corruption, so that each may be a cell of its own."""
LIMITED = ("n", "source_images", "options")
"""Fields that a limit shortens."""
_recipe = cache(recipe_of)


class NothingLeftError(ValueError):
    """A suite has none of the methods or corruptions that were asked for; who loads many may pass it over."""


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


@dataclass(frozen=True)
class Asked:
    """What the caller sets."""

    limit: int | None = None
    methods: Sequence[str] | None = None
    seeds: Sequence[int] | None = None
    corruptions: Sequence[str] | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    chosen: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


class Layout:
    """Lays blocks over each other until they are cells."""

    def __init__(self, suite: Block, scale: str, asked: Asked) -> None:
        self.suite, self.scale, self.asked = suite, files.scales()[scale], asked
        self.seeds: list[int] = list(asked.seeds or suite.get("seeds") or self.scale["seeds"])
        self._check_corruptions(asked.corruptions or ())
        for pattern in asked.methods or ():
            if not any(fnmatchcase(each, pattern) for each in method_names()):
                raise ValueError(f"no method is like {pattern!r}; {nearest_hint(pattern, method_names())}")

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
        base = laid(self.suite["cell"], outer, row)
        if self.suite["columns"] == "corruptions":
            shifts = self._corruptions(base)
            columns: list[Block] = [{"label": LABELS.get(each, each), "corruptions": [each]} for each in shifts]
        else:
            columns = self.suite["columns"]
        for column in columns:
            block = laid(base, column)
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
        apart = self._settled(laid(self.scale["cell"], block)).get("scenario", "single") in APART
        for names in [[each] for each in shifts] if apart else [shifts] if shifts else []:
            for seed in self.seeds:
                yield self._cell({**block, "corruptions": names}, seed)

    def _cell(self, block: Block, seed: int) -> Cell:
        own = {name: block[name] for name in files.CELL if name in block}
        stated = self._settled(self._limited(laid(self.scale["cell"], own)))
        stated = laid({"changes": self._authors(stated)}, stated)
        stated["seed"], stated["version"] = seed, self.suite["version"]
        return _valid(self._rated(stated, block.get("factor")))

    def _settled(self, stated: Block) -> Block:
        """The fields with the flags over them, and names in place of roles."""
        for name, value in self.asked.changes.items():
            stated = _set(stated, name, value)
        base, data = stated.get("base", "bn"), stated.get("data", "main")
        return {**stated, "base": self.scale["bases"].get(base, base), "data": self.scale["data"].get(data, data)}

    def _authors(self, stated: Block) -> Block:
        """What a method's authors change for such a cell, where the scale says so."""
        found: Block = {}
        for each in self.scale.get("settings", ()):
            if self.scale["bases"][each["base"]] == stated["base"] and _scenario(stated) == each["scenario"]:
                found.update(each["changes"] if stated.get("method") in each["methods"] else {})
        return found

    def _rated(self, stated: Block, factor: Any) -> Block:
        """The fields with their learning rate: set by a flag, chosen before, as the file says, or the method's rule."""
        found = _recipe(stated.get("method", ""), stated.get("preset", "imagenet"))
        if not found.learns:
            return laid(stated, {"lr": None})
        if {"lr", "changes.lr"} & set(self.asked.changes):
            return stated
        if self._held_out(stated):
            chosen = rate_of(self.asked.chosen, stated["base"], stated["method"])
            stated = stated if chosen is None else laid(stated, {"lr": chosen})
        if factor is None:
            return stated
        rate: Any = stated.get("lr")
        if rate is None:
            rate = parse(str(stated.get("changes", {}).get("lr", repr(found.lr))))
        if isinstance(rate, Rule):
            rate = rate(family_of(stated["base"]), stated["batch_size"])
        return laid(stated, {"lr": float(f"{rate * float(factor):.6g}")})

    def _held_out(self, stated: Block) -> bool:
        """Whether the cell's stream is as those on which rates are chosen; a rate for 64 images says nothing of one."""
        return _scenario(stated) == "single" and stated["batch_size"] == self.scale["cell"]["batch_size"]

    def _limited(self, stated: Block) -> Block:
        limit = self.asked.limit
        if limit is None:
            return stated
        least = {"n": limit, "source_images": min(limit, stated.get("source_images", 2000))}
        length = stated.get("options", {}).get("length")
        return laid(stated, least, {} if length is None else {"options": {"length": min(limit, length)}})

    def _check_corruptions(self, given: Sequence[str]) -> None:
        for name in given:
            if name not in (*CORRUPTIONS, *EXTRA, "clean"):
                raise ValueError(f"unknown corruption {name!r}; {nearest_hint(str(name), (*CORRUPTIONS, *EXTRA))}")


def family_of(base: str) -> str:
    """Which of a rule's learning rates a base takes, without building it: scales name their transformers."""
    named = {scale["bases"][role] for scale in files.scales().values() for role in scale["transformers"]}
    return "transformer" if base in named or "vit" in zoo.base(base).arch else "convolutional"


def _scenario(stated: Block) -> str:
    return str(stated.get("scenario", "single"))


def _set(stated: Block, name: str, value: Any) -> Block:
    """The fields with one from the command line laid over them; what learns nothing keeps its recipe."""
    found = with_field(stated, name, value)
    recipes = name.partition(".")[0] in ("lr", "changes")
    return stated if recipes and not _recipe(stated.get("method", ""), "imagenet").learns else found


def _valid(stated: Block) -> Cell:
    """The cell, once every name in it is known; changes that change nothing are dropped, so that keys coincide."""
    for kind, value, known in (
        ("base", stated["base"], zoo.bases()),
        ("data set", stated["data"], list(DATASETS)),
        ("method", stated.get("method"), method_names()),
    ):
        if value not in known:
            raise ValueError(f"unknown {kind} {value!r}; {nearest_hint(str(value), known)}")
    if stated.get("changes"):
        changes = {name: str(value) for name, value in stated["changes"].items()}
        plain = _recipe(stated["method"], stated.get("preset", "imagenet"))
        same = plain.changed({name: parse(value) for name, value in changes.items()}) == plain
        stated = {**stated, "changes": {} if same else changes}
    cell = Cell.from_dict(stated)
    cell.order()
    return cell


def authors(scale: str, placed: Sequence[Placed]) -> Iterator[str]:
    """The notes of a scale's settings that some cell has."""
    for each in files.scales()[scale].get("settings", ()):
        base, changes = files.scales()[scale]["bases"][each["base"]], each["changes"].items()
        if any(
            (cell.base, cell.scenario) == (base, each["scenario"])
            and cell.method in each["methods"]
            and changes <= dict(cell.changes).items()
            for cell in (one.cell for one in placed)
        ):
            yield each["note"]


# What flags changed ---------------------------------------------------------------------------------------------------


def left_out(placed: Sequence[Placed], stated: Sequence[Placed]) -> Iterator[str]:
    """Rows, columns and corruptions that the suite states and that are not there."""
    for name in ("row", "column"):
        there = {getattr(each, name) for each in placed}
        yield from dict.fromkeys(getattr(each, name) for each in stated if getattr(each, name) not in there)
    there = {shift for each in placed for shift in each.cell.corruptions}
    missing = dict.fromkeys(shift for each in stated for shift in each.cell.corruptions if shift not in there)
    columns = {each.column for each in stated}
    yield from (shift for shift in missing if LABELS.get(shift, shift) not in columns)


def altered(placed: Sequence[Placed], stated: Sequence[Placed], asked: Asked) -> Iterator[str]:
    """How cells differ from those that the suite states, in words; seeds do not count."""
    places = {(each.group, each.row, each.column) for each in placed}
    if any((each.group, each.row, each.column) not in places and not _wanted(each, asked) for each in stated):
        yield f"methods {' '.join(asked.methods or ())}"
    shifts = {shift for each in placed for shift in each.cell.corruptions}
    if any(shift not in shifts for each in stated for shift in each.cell.corruptions if _wanted(each, asked)):
        yield f"corruptions {' '.join(asked.corruptions or ())}"
    found: dict[str, dict[str, None]] = {}
    own = {_spot(each): each.cell for each in reversed(stated)} | {_spot(each, True): each.cell for each in stated}
    for each in placed:
        cell = own.get(_spot(each, True)) or own[_spot(each)]
        for item in fields(Cell):
            if item.name not in ("corruptions", "seed") and getattr(cell, item.name) != getattr(each.cell, item.name):
                found.setdefault(item.name, {})[_words(item.name, getattr(each.cell, item.name))] = None
    if not any(name.startswith("changes.") for name in asked.changes):
        found.pop("changes", None)  # an author's setting, which another base or scenario does not have
    if asked.limit is not None and "n" in found and "n" not in asked.changes:
        yield f"limit {asked.limit}"
        own_words = {name.partition(".")[0] for name in asked.changes}
        found = {name: value for name, value in found.items() if name not in LIMITED or name in own_words}
    for name in (item.name for item in fields(Cell) if item.name in found):
        by_choice = name == "lr" and "lr" not in asked.changes and asked.chosen
        yield "chosen learning rates" if by_choice else f"{name} {' or '.join(found[name])}"


def _spot(placed: Placed, narrow: bool = False) -> tuple[Any, ...]:
    """Where a cell stands; narrowly, among those of one place."""
    return placed.group, placed.row, placed.column, placed.cell.corruptions if narrow else None


def _wanted(placed: Placed, asked: Asked) -> bool:
    method, patterns = placed.cell.method, asked.methods
    return patterns is None or method == "source" or any(fnmatchcase(method, each) for each in patterns)


def _words(name: str, value: Any) -> str:
    """A field's value; of pairs `name value`."""
    if isinstance(value, tuple):
        return ", ".join(" ".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in value) or "none"
    return str(value) if value is not None else {"n": "all", "lr": "the method's rule"}.get(name, "default")
