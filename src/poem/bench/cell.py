"""One measurement as a value: which model, data, order, method and seed. Frozen, JSON, with a key of its own.

A cell holds everything that its result depends on, but for the weights, and nothing else: no folder, no device, no
commit. Its key is a hash of its fields and of its method's whole recipe, so a method whose defaults change makes other
cells. A result's key adds the hash of the weights that it was measured with (`result_key`).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, get_args, get_origin

from poem._util.integers import as_integer
from poem._util.limits import MAX_PROCESSES, SEED_RANGE
from poem._util.nearest import nearest_hint
from poem._util.outside import ImportRefusedError, announced_only
from poem.bench.blocks import refused
from poem.engine.source_data import SAMPLES
from poem.parts.fields import field_annotations
from poem.recipes.methods import recipe
from poem.recipes.recipe import Recipe
from poem.recipes.text import parse, part_versions, written
from poem.streams.orders import Order, scenario
from poem.streams.shift import VERSIONS

Pairs = tuple[tuple[str, Any], ...]
NESTED = ("changes", "options", "dataset")
"""Fields that are mappings in files, and pairs in a `Cell`."""
UNSTATED = {"guard": False}
"""Later fields, which cells without them do not state: earlier results keep their keys."""
NOT_SETTABLE = ("method", "corruptions", "seed", "version")
"""Fields that `--set` refuses: a suite, or a flag of its own, states them."""
WEIGHTS_DIGITS = 8
"""Digits of the weights' SHA-256 in the key of a result."""


@dataclass(frozen=True, kw_only=True)
class Cell:
    """What is measured. Pairs are written as mappings in files and sorted by name here."""

    base: str
    """A name of `poem.zoo`, a hub id or `package.module:name`."""
    data: str
    """A name of `poem.streams.datasets`, or `package.module:name`; clean data is corrupted on the fly."""
    method: str
    """A name of `poem.methods()`, or `package.module:name`."""
    scenario: str = "single"
    corruptions: tuple[str, ...] = ("clean",)
    severity: int = 5
    seed: int = 0
    batch_size: int = 64
    n: int | None = None
    """Images of each domain; None for all."""
    preset: str = "imagenet"
    lr: float | None = None
    """Learning rate; None for the method's own rule. Files may write it as `changes: {lr: ...}`; `merge_fields` makes
    one field of both."""
    changes: Pairs = ()
    """Fields of the recipe, and its aliases, as text: `("select", "EntropyBelow(0.5)")`, `("threshold", "0.6")`."""
    options: Pairs = ()
    """Arguments of the scenario beside these: cycles, imbalance, length, delta."""
    dataset: Pairs = ()
    """Arguments of the data set beside these: subset, classes, per_class, partial."""
    weights: str | None = None
    """None for the base's own; "random" for weights drawn from the seed."""
    source_images: int = 2000
    """Clean images for methods with an anchor, 2000 at most; 0 for none, so that EATA runs as ETA."""
    window: int = 1000
    """Images in a window of accuracy."""
    probes: tuple[str, ...] = ()
    """Measurements that cost extra: "gradients"."""
    eta: float = 0.0
    """Speed of the stream relative to a plain forward; 0 waits for the method (the usual, offline protocol)."""
    ratio: float | str = "counted"
    """A call's cost in plain forwards, where eta is not 0: a number, "counted" from the ledger (what was computed), or
    "measured"."""
    guard: bool = False
    """Whether a guard with its own defaults is around the adapter (`poem.guard`)."""
    precision: str = "fp32"
    threads: int = 1
    """CPU threads; sums depend on their number in the last bits."""
    version: int = 1
    """Version of the suite that asks for the cell."""

    def __post_init__(self) -> None:
        """Turns lists and mappings into tuples, and checks ranges."""
        for name in NESTED:
            object.__setattr__(self, name, _pairs(getattr(self, name)))
        for name in ("corruptions", "probes"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "changes", tuple((key, _canonical(key, str(value))) for key, value in self.changes))
        for name in ("lr", "eta", "ratio"):  # 1 and 1.0 are one cell
            if isinstance(getattr(self, name), int):
                object.__setattr__(self, name, float(getattr(self, name)))
        for name in ("batch_size", "threads", "window"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise ValueError(f"expected {name} >= 1, got {getattr(self, name)!r}")
        if self.n is not None and self.n < 1:
            raise ValueError(f"expected n >= 1, or None for all images, got {self.n}")
        if not 0 <= self.source_images <= SAMPLES:
            raise ValueError(
                f"expected source_images from 0 to {SAMPLES}, as many as importance is measured on, "
                f"got {self.source_images}"
            )
        if not isinstance(self.guard, bool):
            raise ValueError(f"expected guard true or false, got {self.guard!r}")
        if self.guard and self.method == "source":
            raise ValueError("expected a method that adapts with guard, got source: there is nothing to guard")
        if self.guard and self.eta and self.ratio == "counted":
            raise ValueError(
                "expected ratio as a number or 'measured' with guard and eta, got 'counted': the guard's own passes "
                "are not counted"
            )

    @cached_property
    def key(self) -> str:
        """Sixteen hexadecimal digits: a hash of the fields and of the method's recipe as it is now.

        Inside `recorded_keys`, a cell whose modules are not imported has the key that it was measured with.
        """
        try:
            text = written(self.recipe())
        except ImportRefusedError:
            return _RECORDED.get().get(self) or key_of(self, {})
        except (ValueError, TypeError):  # no such recipe: the cell will fail, and its failure needs a key too
            text = {}
        return key_of(self, text)

    @property
    def label(self) -> str:
        """Base, method, changes, scenario, shift and seed in one line, for a progress bar or an error."""
        shifts = self.corruptions[0] if len(self.corruptions) == 1 else f"{len(self.corruptions)} shifts"
        changed = "".join(f" {key}={value}" for key, value in self.changes)
        return f"{self.base} {self.method_label}{changed} {self.scenario} {shifts} seed {self.seed}"

    @property
    def method_label(self) -> str:
        """The method's name, with `guarded` where a guard is around it."""
        return f"{self.method}, guarded" if self.guard else self.method

    def recipe(self) -> Recipe:
        """The method's recipe with the cell's changes."""
        chosen = recipe(self.method, self.preset)  # type: ignore[arg-type]
        changes = {key: parse(value) for key, value in self.changes}
        if self.lr is not None:
            _refuse_two_rates(self.lr, changes.get("lr", self.lr))
            changes["lr"] = self.lr
        return chosen.changed(changes)

    def order(self) -> Order:
        """The order of the stream, from the scenario, corruptions, severity, seed and options."""
        settings: dict[str, Any] = {"seed": self.seed, "severity": self.severity, **dict(self.options)}
        if self.scenario == "gradual":
            del settings["severity"]
        return scenario(self.scenario, corruptions=self.corruptions, **settings)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; every field, so that a new default makes other keys, but for later ones not set."""
        found: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name in UNSTATED and value == UNSTATED[item.name]:
                continue
            if item.name in NESTED:
                value = dict(value)
            found[item.name] = list(value) if isinstance(value, tuple) else value
        return found

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Cell:
        """A cell from `to_dict`'s values."""
        names = [item.name for item in fields(cls)]
        for key in values:
            if key not in names:
                raise ValueError(f"a cell has no field {key!r}; {nearest_hint(key, names)}")
        for key in ("base", "data", "method"):
            if key not in values:
                raise ValueError(f"expected a cell with base, data and method; {key} is missing")
        return cls(**values)


_RECORDED: ContextVar[Mapping[Cell, str]] = ContextVar("recorded", default={})  # noqa: B039 - never written into


@contextmanager
def recorded_keys(keys: Mapping[Cell, str]) -> Iterator[set[str]]:
    """Inside, no module that only cells or suites name is imported, and their cells have these keys.

    Yields the names that were not imported.
    """
    token = _RECORDED.set(keys)
    try:
        with announced_only() as refused:
            yield refused
    finally:
        _RECORDED.reset(token)


# Keys -----------------------------------------------------------------------------------------------------------------


def key_of(cell: Cell, recipe: Mapping[str, str]) -> str:
    """The key of a cell that is run with a recipe as `poem.recipes.text.written` has it.

    Corruptions whose images have changed and parts whose defaults have changed enter with their version, so that
    results of before are not taken for those of today; all other keys stay.
    """
    stated = {**cell.to_dict(), "recipe": dict(recipe)}
    if changed := {name: VERSIONS[name] for name in cell.corruptions if name in VERSIONS}:
        stated["corruption_versions"] = changed
    if versions := part_versions(recipe):
        stated["part_versions"] = versions
    text = json.dumps(stated, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def result_key(cell_key: str, weights: str | None) -> str:
    """The key of a result: that of its cell, then the first digits of the weights' SHA-256 where it is known."""
    return cell_key if weights is None else f"{cell_key}-{weights[:WEIGHTS_DIGITS]}"


# Fields from files and flags ------------------------------------------------------------------------------------------


def _in_files(name: str, hint: Any) -> Any:
    """The annotation of a field as YAML and JSON hold it: lists for tuples, mappings for pairs."""
    if name in NESTED:
        return Mapping[str, Any]
    return list[get_args(hint)[0]] if get_origin(hint) is tuple else hint  # type: ignore[misc]


FILE_FIELDS: dict[str, Any] = {name: _in_files(name, hint) for name, hint in field_annotations(Cell).items()}
"""Name and annotation of every field of a cell, as files hold them."""


def read_cell(values: Any) -> Cell:
    """A cell from the values of `Cell.to_dict`, as JSON has them.

    Raises:
        ValueError: A field of another type, or a number that no machine or generator takes.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"expected a cell with base, data and method, got a {type(values).__name__}")
    for name, hint in FILE_FIELDS.items():
        if name not in values or (name in NESTED and _are_pairs(values[name])):
            continue
        fits = name == "seed" and as_integer(values[name]) is not None  # a seed may be larger than other integers
        if not fits and (words := refused(name, hint, values[name])):
            raise ValueError(words)
    threads, seed = values.get("threads", 1), values.get("seed", 0)
    if not 1 <= threads <= MAX_PROCESSES:
        raise ValueError(f"expected threads from 1 to {MAX_PROCESSES}, got {threads}")
    if not SEED_RANGE[0] <= seed <= SEED_RANGE[1]:
        raise ValueError(f"expected seed from {SEED_RANGE[0]} to {SEED_RANGE[1]}, got {seed}")
    return Cell.from_dict(values)


def merge_fields(*blocks: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a cell from several blocks: the later block wins; mappings, such as `changes`, are joined.

    `lr` and `changes: {lr: ...}` are one field, so a later one in either spelling replaces an earlier one in the other.
    A number is kept as `lr`, a `Rule` as a change.
    """
    found: dict[str, Any] = {}
    for block in blocks:
        stated = _with_one_rate(block)
        for name, value in stated.items():
            joined = name in NESTED and isinstance(value, Mapping)
            found[name] = {**found.get(name, {}), **value} if joined else value
        if "lr" in stated and "lr" not in stated.get("changes", {}) and "lr" in found.get("changes", {}):
            found["changes"] = {name: value for name, value in found["changes"].items() if name != "lr"}
    return found


def _with_one_rate(block: Mapping[str, Any]) -> Mapping[str, Any]:
    """The block with its learning rate in one field."""
    changes = block.get("changes")
    if not isinstance(changes, Mapping) or "lr" not in changes:
        return block
    rate = changes["lr"]
    with suppress(ValueError):  # `{x}`, which its column has not filled yet
        rate = parse(rate) if isinstance(rate, str) else rate
    if block.get("lr") is not None:
        _refuse_two_rates(block["lr"], rate)
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, int | float)):
        return {**block, "lr": None}
    return {**block, "lr": rate, "changes": {name: value for name, value in changes.items() if name != "lr"}}


def _refuse_two_rates(stated: Any, changed: Any) -> None:
    """Raise ValueError where one block states two learning rates."""
    if stated != changed:
        raise ValueError(f"expected one learning rate, got lr {stated} and changes lr {changed}; state lr alone")


def settable_fields() -> list[str]:
    """Fields of a cell that `--set` takes by their name alone; the three mappings take a key after a dot."""
    return [item.name for item in fields(Cell) if item.name not in (*NOT_SETTABLE, *NESTED)]


def with_field(values: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    """A cell's fields with one more merged over them, as `--set` names it; a dot reaches into the three mappings.

    This alone decides what may be set. Text is read as a suite file would be.
    """
    plain = settable_fields()
    head, _, rest = name.partition(".")
    if name not in plain and not (rest and head in NESTED):
        names = [*plain, *(f"{each}.NAME" for each in NESTED)]
        flag = {"corruptions": "corruption"}.get(name, name)
        hint = (
            f"it has a flag of its own, --{flag} or --{flag}s"
            if name in NOT_SETTABLE[:3]
            else nearest_hint(name, names)
        )
        raise ValueError(f"no field {name!r} can be set; {hint}")
    read = parse_value(value) if isinstance(value, str) else value
    return merge_fields(values, {head: {rest: read} if rest else read})


def parse_value(text: str) -> Any:
    """A value as YAML has it, and 1e-3, which YAML reads as text."""
    import yaml

    try:
        return float(text) if not text.lstrip("+-").isdigit() else int(text)
    except ValueError:
        try:
            return yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ValueError(f"expected a value as a YAML file has it, got {text!r}") from error


def _canonical(name: str, text: str) -> str:
    """A change as it prints, so that spaces and `1` for `1.0` make no other cell; what cannot be parsed stays.

    Files of results are read here too, so that no module is imported that only their text names.
    """
    try:
        value = parse(text, trusted=False)
    except ValueError:
        return text
    return repr(float(value) if name in ("threshold", "alpha", "lr") and isinstance(value, int) else value)


def _are_pairs(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, list | tuple) and len(each) == 2 for each in value)


def _pairs(given: Pairs | Mapping[str, Any]) -> Pairs:
    items = given.items() if isinstance(given, Mapping) else given
    return tuple(sorted((str(key), _frozen(value)) for key, value in items))


def _frozen(value: Any) -> Any:
    return tuple(_frozen(each) for each in value) if isinstance(value, list | tuple) else value
