"""From the blocks of a suite file to cells: scale, suite, group, row and column are merged, then the flags.

Learning rates come last, when base, batch size and preset are known: a chosen one, or the method's rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from poem import zoo
from poem._util import outside
from poem._util.nearest import nearest_hint
from poem.bench.analysis.choose_lr import rate_of
from poem.bench.cell import Cell, merge_fields, read_cell, with_field
from poem.bench.suites.schema import CELL_FIELDS, ColumnBlock, Fields, GroupBlock, RowBlock, SuiteBlock, fill, scales
from poem.engine.anatomy import anatomy
from poem.recipes.learning_rate import Rule
from poem.recipes.methods import is_outside_method
from poem.recipes.methods import methods as method_names
from poem.recipes.methods import recipe as recipe_of
from poem.recipes.text import parse
from poem.streams.datasets import DATASETS
from poem.streams.shift import CORRUPTIONS, EXTRA

_HEADS = (
    "Gauss.", "Shot", "Impul.", "Defoc.", "Glass", "Motion", "Zoom", "Snow", "Frost", "Fog", "Brit.", "Contr.",
    "Elastic", "Pixel", "JPEG", "Speckle", "Gauss. blur", "Spatter", "Saturate",
)  # fmt: skip
LABELS: dict[str, str] = dict(zip((*CORRUPTIONS, *EXTRA), _HEADS, strict=True))
"""Corruptions as the heads of the paper's tables abbreviate them."""
RESET_PER_CORRUPTION = ("single", "label-shift", "one-by-one")
"""Scenarios with a fresh adapter for every corruption: each corruption is a cell of its own."""
LIMITED = ("n", "source_images", "options")
"""Fields that a limit shortens."""
_recipe = cache(recipe_of)


def _learns(stated: Fields) -> bool:
    """Whether the method of some fields makes updates; one that is not imported is taken to."""
    try:
        return _recipe(stated.get("method", ""), stated.get("preset", "imagenet")).learns
    except outside.ImportRefusedError:
        return True


class NothingLeftError(ValueError):
    """A suite has none of the methods or corruptions that the flags ask for."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A cell, and the group, row and column of its number."""

    group: str
    """A group of rows, as the paper names it: `ResNet-50-BN`."""
    row: str
    """A method, or a curve's name."""
    column: str
    """A corruption as the paper abbreviates it, or a figure's x as text."""
    cell: Cell


@dataclass(frozen=True)
class Overrides:
    """What flags change in a suite; the arguments of `poem.bench.suites.load`."""

    limit: int | None = None
    methods: list[str] | None = None
    seeds: list[int] | None = None
    corruptions: list[str] | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    chosen: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def include(self, method: Any, row: str) -> bool:
        """Whether a method, or the name of its row, matches one of the patterns; `source` always does."""
        if self.methods is None or method == "source":
            return True
        return any(fnmatchcase(name, pattern) for name in (str(method), row) for pattern in self.methods)


class Expansion:
    """Merges the blocks of a suite into cells."""

    def __init__(self, suite: SuiteBlock, scale: str, overrides: Overrides) -> None:
        self.suite, self.scale, self.overrides = suite, scales()[scale], overrides
        self.seeds: list[int] = list(overrides.seeds or suite.seeds or self.scale.seeds)
        self._known: dict[tuple[Any, ...], bool] = {}
        self.scales_own = False
        """Whether some cell placed so far has the scale's own networks on its own data, or does not state either."""
        self._check_corruptions(overrides.corruptions or ())
        for pattern in overrides.methods or ():
            known = [*method_names(), *self._row_names()]
            if ":" not in pattern and not any(fnmatchcase(each, pattern) for each in known):
                raise ValueError(f"no method and no row is like {pattern!r}; {nearest_hint(pattern, known)}")

    def placed(self) -> Iterator[Placed]:
        """Every cell, by group, row, column, corruption and seed."""
        found = False
        for group in self.suite.groups:
            for row in self.suite.rows if group.rows is None else group.rows:
                for column, merged in self._columns(group, row):
                    for cell in self._cells(merged):
                        found = True
                        yield Placed(group=group.label, row=row.label, column=column, cell=cell)
        if not found:
            raise NothingLeftError("no cell is left; ask for more methods or corruptions")

    def _row_names(self) -> Iterator[str]:
        """The name of each row, and the method that it states, such as one of the user's own."""
        for row in [*self.suite.rows, *(row for group in self.suite.groups for row in group.rows or ())]:
            yield row.label
            yield str(row.fields.get("method", row.label))

    def _columns(self, group: GroupBlock, row: RowBlock) -> Iterator[tuple[str, Fields]]:
        """The label of each column that a row fills, and the fields of its cells."""
        base = merge_fields(self.suite.cell.fields, group.fields, row.fields)
        columns = self.suite.columns
        if columns is None:
            shifts = self._corruptions(base)
            columns = [ColumnBlock(label=LABELS.get(each, each), fields={"corruptions": [each]}) for each in shifts]
        for column in columns:
            merged = merge_fields(base, column.fields)
            filled = row.only is None or column.label in map(str, row.only)
            if filled and self.overrides.include(merged.get("method"), row.label):
                yield column.label, merged if column.x is None else fill(merged, column.x)

    def _corruptions(self, stated: Fields) -> list[str]:
        """The corruptions of the fields, of the suite or of the scale, less those that the flags leave out."""
        own: list[str] = stated.get("corruptions") or self.suite.corruptions or self.scale.corruptions
        self._check_corruptions(own)
        return [each for each in own if self.overrides.corruptions is None or each in self.overrides.corruptions]

    def _cells(self, stated: Fields) -> Iterator[Cell]:
        """One cell per corruption and seed; in scenarios that go through all corruptions, one per seed."""
        shifts = self._corruptions(stated)
        scenario = _scenario(self._with_flags(merge_fields(self.scale.cell.fields, stated)))
        apart = scenario in RESET_PER_CORRUPTION
        for names in [[each] for each in shifts] if apart else [shifts] if shifts else []:
            for seed in self.seeds:
                yield self._cell({**stated, "corruptions": names}, seed)

    def _cell(self, stated: Fields, seed: int) -> Cell:
        own = {name: stated[name] for name in CELL_FIELDS if name in stated}
        merged = self._with_flags(self._limited(merge_fields(self.scale.cell.fields, own)))
        merged = merge_fields({"changes": self._authors_changes(merged)}, merged)
        merged["seed"], merged["version"] = seed, self.suite.version
        self.scales_own |= self._is_scales_own({**own, **self.overrides.changes})
        return _valid(self._with_learning_rate(merged, stated.get("factor")), self._known)

    def _with_flags(self, stated: Fields) -> Fields:
        """The fields with the flags merged over them, and names in place of roles."""
        for name, value in self.overrides.changes.items():
            stated = _set(stated, name, value)
        base, data = stated.get("base", "bn"), stated.get("data", "main")
        return {**stated, "base": self.scale.bases.get(base, base), "data": self.scale.data.get(data, data)}

    def _is_scales_own(self, stated: Fields) -> bool:
        """Whether the scale gives network or data, or what is stated are the scale's own of both."""
        roles = stated.get("base", "bn") in self.scale.bases, stated.get("data", "main") in self.scale.data
        names = stated.get("base") in self.scale.bases.values(), stated.get("data") in self.scale.data.values()
        return any(roles) or all(names)

    def _authors_changes(self, stated: Fields) -> Fields:
        """The changes of the scale's settings for such a cell."""
        found: Fields = {}
        for each in self.scale.settings:
            if self.scale.bases[each.base] == stated["base"] and _scenario(stated) == each.scenario:
                found.update(each.changes if stated.get("method") in each.methods else {})
        return found

    def _with_learning_rate(self, stated: Fields, factor: Any) -> Fields:
        """The fields with a learning rate: set by a flag, chosen, stated in the file, or the method's rule."""
        if not _learns(stated):
            return merge_fields(stated, {"lr": None})
        if {"lr", "changes.lr"} & set(self.overrides.changes):
            return stated
        if self._as_held_out(stated):
            chosen = rate_of(self.overrides.chosen, stated["base"], stated["method"])
            stated = stated if chosen is None else merge_fields(stated, {"lr": chosen})
        if factor is None:
            return stated
        rate: Any = stated.get("lr")
        if rate is None:
            try:
                own = _recipe(stated.get("method", ""), stated.get("preset", "imagenet")).lr
            except outside.ImportRefusedError:  # the rule to multiply is not known
                return stated
            rate = parse(str(stated.get("changes", {}).get("lr", repr(own))))
        if isinstance(rate, Rule):
            rate = rate(family_of(stated["base"]), stated["batch_size"])
        return merge_fields(stated, {"lr": float(f"{rate * float(factor):.6g}")})

    def _as_held_out(self, stated: Fields) -> bool:
        """Whether a cell has the scenario and batch size that learning rates were chosen with."""
        return _scenario(stated) == "single" and stated["batch_size"] == self.scale.cell.fields["batch_size"]

    def _limited(self, stated: Fields) -> Fields:
        limit = self.overrides.limit
        if limit is None:
            return stated
        least = {"n": limit, "source_images": min(limit, stated.get("source_images", 2000))}
        length = stated.get("options", {}).get("length")
        return merge_fields(stated, least, {} if length is None else {"options": {"length": min(limit, length)}})

    def _check_corruptions(self, given: Sequence[str]) -> None:
        for name in given:
            if name not in (*CORRUPTIONS, *EXTRA, "clean"):
                raise ValueError(f"unknown corruption {name!r}; {nearest_hint(str(name), (*CORRUPTIONS, *EXTRA))}")


def family_of(base: str) -> str:
    """The family whose learning rate a base takes; only networks of other packages are built to see it."""
    named = {scale.bases[role] for scale in scales().values() for role in scale.transformers}
    if zoo.base(base).kind in ("outside", "transformers"):
        return anatomy(zoo.load(base, "random")[0]).family
    return "transformer" if base in named or "vit" in zoo.base(base).arch else "convolutional"


def _scenario(stated: Fields) -> str:
    return str(stated.get("scenario", "single"))


def _set(stated: Fields, name: str, value: Any) -> Fields:
    """The fields with one from the command line merged over them; a method without updates keeps its recipe.

    The source, which cannot be guarded, stays beside guarded methods as it is.
    """
    found = with_field(stated, name, value)
    if name == "guard" and stated.get("method") == "source":
        return stated
    recipes = name.partition(".")[0] in ("lr", "changes")
    return stated if recipes and not _learns({**stated, "preset": "imagenet"}) else found


def _valid(stated: Fields, known: dict[tuple[Any, ...], bool]) -> Cell:
    """The cell, with every name checked; changes that change nothing are dropped, so that equal cells have one key.

    Whether changes change nothing is the same for all corruptions and seeds, and kept in `known`.
    """
    base, data, method = stated["base"], stated["data"], stated.get("method")
    with suppress(outside.ImportRefusedError):
        if ":" in str(base) or outside.is_outside("base", str(base)):
            zoo.base(base)
    with suppress(outside.ImportRefusedError):
        if data not in DATASETS and outside.is_outside("data set", str(data)):
            outside.load("data set", data)
    for kind, value, names, elsewhere in (
        ("base", base, zoo.bases(), ":" in str(base)),
        ("data set", data, list(DATASETS), outside.is_outside("data set", str(data))),
        ("method", method, method_names(), is_outside_method(str(method))),
    ):
        if value not in names and not elsewhere:
            raise ValueError(f"unknown {kind} {value!r}; {nearest_hint(str(value), names)}")
    if stated.get("changes"):
        changes = {name: str(value) for name, value in stated["changes"].items()}
        preset = stated.get("preset", "imagenet")
        asked = (method, preset, *changes.items())
        if asked not in known:
            known[asked] = False
            with suppress(outside.ImportRefusedError):
                plain = _recipe(stated["method"], preset)
                known[asked] = plain.changed({name: parse(value) for name, value in changes.items()}) == plain
        stated = {**stated, "changes": {} if known[asked] else changes}
    cell = read_cell(stated)
    cell.order()
    return cell


def setting_notes(scale: str, placed: Sequence[Placed]) -> Iterator[str]:
    """The notes of the scale's settings that some cell has."""
    for each in scales()[scale].settings:
        base, changes = scales()[scale].bases[each.base], each.changes.items()
        if any(
            (cell.base, cell.scenario) == (base, each.scenario)
            and cell.method in each.methods
            and changes <= dict(cell.changes).items()
            for cell in (one.cell for one in placed)
        ):
            yield each.note


# What flags changed ---------------------------------------------------------------------------------------------------


def left_out(placed: Sequence[Placed], stated: Sequence[Placed]) -> Iterator[str]:
    """Rows, columns and corruptions that the suite states and the flags left out."""
    for name in ("row", "column"):
        there = {getattr(each, name) for each in placed}
        yield from dict.fromkeys(getattr(each, name) for each in stated if getattr(each, name) not in there)
    there = {shift for each in placed for shift in each.cell.corruptions}
    missing = dict.fromkeys(shift for each in stated for shift in each.cell.corruptions if shift not in there)
    columns = {each.column for each in stated}
    yield from (shift for shift in missing if LABELS.get(shift, shift) not in columns)


def altered(placed: Sequence[Placed], stated: Sequence[Placed], overrides: Overrides) -> Iterator[str]:
    """How cells differ from those that the suite states, in words; seeds do not count."""
    positions = {_position(each) for each in placed}
    if any(_position(each) not in positions and not overrides.include(each.cell.method, each.row) for each in stated):
        yield f"methods {' '.join(overrides.methods or ())}"
    shifts = {shift for each in placed for shift in each.cell.corruptions}
    included = [each.cell for each in stated if overrides.include(each.cell.method, each.row)]
    if any(shift not in shifts for cell in included for shift in cell.corruptions):
        yield f"corruptions {' '.join(overrides.corruptions or ())}"
    found: dict[str, dict[str, None]] = {}
    own = {_position(each): each.cell for each in reversed(stated)}
    own |= {_position(each, True): each.cell for each in stated}
    for each in placed:
        cell = own.get(_position(each, True)) or own[_position(each)]
        for item in fields(Cell):
            if item.name not in ("corruptions", "seed") and getattr(cell, item.name) != getattr(each.cell, item.name):
                found.setdefault(item.name, {})[_words(item.name, getattr(each.cell, item.name))] = None
    if not any(name.startswith("changes.") for name in overrides.changes):
        found.pop("changes", None)  # of a setting that another base or scenario does not have
    if overrides.limit is not None and "n" in found and "n" not in overrides.changes:
        yield f"limit {overrides.limit}"
        own_words = {name.partition(".")[0] for name in overrides.changes}
        found = {name: value for name, value in found.items() if name not in LIMITED or name in own_words}
    for name in (item.name for item in fields(Cell) if item.name in found):
        by_choice = name == "lr" and "lr" not in overrides.changes and overrides.chosen
        yield "chosen learning rates" if by_choice else f"{name} {' or '.join(found[name])}"


def _position(placed: Placed, with_corruptions: bool = False) -> tuple[Any, ...]:
    """Group, row and column of a cell, with its corruptions if asked for."""
    return placed.group, placed.row, placed.column, placed.cell.corruptions if with_corruptions else None


def _words(name: str, value: Any) -> str:
    """A field's value as text; pairs as `name value`."""
    if isinstance(value, tuple):
        return ", ".join(" ".join(map(str, each)) if isinstance(each, tuple) else str(each) for each in value) or "none"
    return str(value) if value is not None else {"n": "all", "lr": "the method's rule"}.get(name, "default")
