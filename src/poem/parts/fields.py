"""Settings checked when an object is made, from the annotations of its fields.

`Checked` is the base of every part, of the augmentations, of `Rule` and of `Recipe`. A field is checked against what
its annotation says: choices (`Literal`), numbers (finite; an integer is no bool), ranges
(`Annotated[float, Range(above=0)]`), parts, callables, tuples, and unions of these. Any other annotation, and one that
cannot be resolved, is not checked; a field's own default is always allowed.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from poem._util.nearest import nearest_names

LARGEST = 2**63 - 1  # what torch takes as an integer


@dataclass(frozen=True)
class Range:
    """Bounds of a number, for `Annotated[float, Range(...)]`; `hint` is added to the error."""

    at_least: float = -math.inf
    at_most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    hint: str = ""

    def holds(self, number: Any) -> bool:
        """Whether the number lies inside; NaN never does."""
        return bool(self.at_least <= number <= self.at_most and self.above < number < self.below)

    def __str__(self) -> str:
        if self.at_least == self.at_most:
            return f"equal to {self.at_least:g}"
        if math.isfinite(self.at_least) and math.isfinite(self.at_most):
            return f"from {self.at_least:g} to {self.at_most:g}"
        bounds = {"of at least": self.at_least, "above": self.above, "at most": self.at_most, "below": self.below}
        return " and ".join(f"{word} {bound:g}" for word, bound in bounds.items() if math.isfinite(bound))


Share = Annotated[float, Range(at_least=0, at_most=1)]
"""A number from 0 to 1: a share, a probability, the momentum of an average."""
NotNegative = Annotated[float, Range(at_least=0)]
"""A number that is at least 0."""
Positive = Annotated[float, Range(above=0)]
"""More than 0."""
Count = Annotated[int, Range(at_least=1)]
"""An integer, 1 or more."""
_OF_LN_C = "it is a fraction of ln C, the largest entropy that C classes can have: 40 % of it is EntropyBelow(0.4)"
Fraction = Annotated[float, Range(at_least=0, at_most=10, hint=_OF_LN_C)]
"""An entropy as a fraction of ln C."""


@dataclass(frozen=True)
class Checked:
    """A dataclass whose fields are checked when it is made, after its own `__post_init__`."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Wraps a `__post_init__` that may not call this class's own, so that the check runs for every subclass."""
        super().__init_subclass__(**kwargs)
        own = cls.__post_init__
        if own is Checked.__post_init__ or hasattr(own, "checks_fields"):
            return

        @functools.wraps(own)
        def checked(self: Checked, *args: Any, **kwargs: Any) -> None:
            own(self, *args, **kwargs)
            check(self)

        checked.checks_fields = True  # type: ignore[attr-defined]
        cls.__post_init__ = checked  # type: ignore[method-assign]

    def __post_init__(self) -> None:
        """Checks all fields."""
        check(self)


def check(made: Any) -> None:
    """Refuse the first field whose value its annotation does not allow; keep NumPy's numbers as Python's."""
    for name, hint, default in _annotated(type(made)):
        value = getattr(made, name, default)
        if value is default:
            continue
        refused = refusal(name, hint, value)
        if refused is not None:
            raise type(refused)(f"{type(made).__name__}: {refused}")
        plain = _plain(value)
        if plain is not value and any(each is int or each is float for each in _leaves(hint)):
            object.__setattr__(made, name, plain)


def refusal(name: str, hint: Any, value: Any) -> TypeError | ValueError | None:
    """The error for a value that an annotation does not allow: what was expected, what came, what to type; or None."""
    fault = _fault(hint, value)
    if fault is None:
        return None
    return fault("; ".join([f"expected {name} to be {_said(hint)}, got {_shown(value)}", *_remedies(hint, value)]))


def field_annotations(kind: type) -> dict[str, Any]:
    """The resolved annotation of each field of a dataclass; Any where it cannot be resolved."""
    hints = {name: hint for owner in reversed(kind.__mro__) for name, hint in _resolved(owner)}
    return {item.name: hints.get(item.name, Any) for item in fields(kind)}


def own_fields(kind: type) -> list[str]:
    """Names of the fields that a class itself states, before it is a dataclass; class variables are none."""
    try:
        stated = inspect.get_annotations(kind)
    except Exception:  # annotations may be any code
        return []
    return [name for name, hint in stated.items() if "ClassVar" not in str(hint)]


def _annotated(kind: type) -> tuple[tuple[str, Any, Any], ...]:
    """Name, resolved annotation and default of each field that has a meaning to us; found once per class."""
    known: tuple[tuple[str, Any, Any], ...] | None = kind.__dict__.get("_annotated_fields")
    if known is None:
        hints = field_annotations(kind)
        known = tuple((item.name, hints[item.name], item.default) for item in fields(kind))
        known = tuple(each for each in known if each[1] is not Any)
        kind._annotated_fields = known  # type: ignore[attr-defined]
    return known


def _resolved(owner: type) -> Iterator[tuple[str, Any]]:
    """The class's own annotations, text evaluated with its module's names; what cannot be resolved is Any."""
    module = getattr(sys.modules.get(owner.__module__), "__dict__", {})
    try:
        given = inspect.get_annotations(owner)
    except Exception:  # annotations may be any code
        given = {}
    for name, hint in given.items():
        alone = types.SimpleNamespace(__annotations__={name: hint})
        try:
            yield name, get_type_hints(alone, dict(vars(owner)), module, include_extras=True)[name]
        except Exception:
            yield name, Any


def _fault(hint: Any, value: Any) -> type[TypeError] | type[ValueError] | None:
    """None where the value is allowed; otherwise whether its kind is wrong, or only its value."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Annotated:
        ranges = [each for each in inside[1:] if isinstance(each, Range)] if isinstance(value, Real) else []
        fault = _fault(inside[0], value)
        return fault or (None if all(each.holds(value) for each in ranges) else ValueError)
    if origin in (Union, types.UnionType):
        faults = [_fault(each, value) for each in inside]
        return None if None in faults else ValueError if ValueError in faults else TypeError
    if origin is Literal:
        return None if any(type(value) is type(each) and value == each for each in inside) else ValueError
    if origin is tuple:
        return _tuple_fault(inside, value)
    if hint is int or hint is float:
        return _number_fault(hint, value)
    if hint is bool or hint is str or hint is type(None):
        return None if isinstance(value, hint) else TypeError
    if _is_called(hint):
        return None if callable(value) and not isinstance(value, type) else TypeError
    if isinstance(hint, type) and issubclass(hint, Checked):
        return None if isinstance(value, hint) else TypeError
    return None


def _number_fault(hint: Any, value: Any) -> type[TypeError] | type[ValueError] | None:
    """Integers are whole and fit into 64 bits, other numbers are finite; a bool is neither."""
    kind: Any = Integral if hint is int else Real
    if isinstance(value, bool) or not isinstance(value, kind):
        return TypeError
    try:
        fits = -LARGEST <= value <= LARGEST if hint is int else math.isfinite(value)
    except OverflowError:
        fits = False
    return None if fits else ValueError


def _tuple_fault(inside: tuple[Any, ...], value: Any) -> type[TypeError] | type[ValueError] | None:
    """Of `tuple[X, ...]` and `tuple[X, Y]`: the first fault of an element."""
    if not isinstance(value, tuple):
        return TypeError
    hints = inside[:1] * len(value) if inside[1:] == (...,) else inside
    if len(hints) != len(value):
        return ValueError
    return next((fault for hint, each in zip(hints, value, strict=True) if (fault := _fault(hint, each))), None)


def _is_called(hint: Any) -> bool:
    """Whether the annotation is a protocol with `__call__` alone, such as `Augment`."""
    return bool(getattr(hint, "_is_protocol", False)) and "__call__" in vars(hint)


def _said(hint: Any) -> str:
    """What an annotation allows, in words."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return " ".join([_said(inside[0]).replace("a finite number", "a number"), *map(str, _ranges(inside[1:]))])
    if origin in (Union, types.UnionType):
        return _listed([_said(each) for each in inside])
    if origin is Literal:
        return _listed([repr(each) for each in inside])
    if origin is tuple and inside[1:] == (...,):
        return f"a tuple of values, each {_said(inside[0])}"
    if origin is tuple:
        return f"a tuple ({', '.join(map(_said, inside))})"
    name = getattr(hint, "__name__", str(hint))
    plain = {
        "int": "an integer",
        "float": "a finite number",
        "bool": "True or False",
        "str": "text",
        "NoneType": "None",
    }
    other = f"a function like {name}" if _is_called(hint) else f"a{'n' * (name[0] in 'AEIO')} {name}"
    return plain.get(name, other)


def _remedies(hint: Any, value: Any) -> Iterator[str]:
    """What to type instead: the nearest choice, the nearest part, an instance of the class; then a range's hint."""
    inside = list(_leaves(hint))
    if isinstance(value, str):
        choices = {str(each): repr(each) for leaf in inside if get_origin(leaf) is Literal for each in get_args(leaf)}
        kinds = [leaf for leaf in inside if isinstance(leaf, type) and issubclass(leaf, Checked)]
        choices |= {part.__name__.lower(): f"{part.__name__}()" for kind in kinds for part in _below(kind)}
        near = nearest_names(value.lower(), choices, cutoff=0.5)
        yield from (f"did you mean {choices[each]}?" for each in near)
    elif isinstance(value, type):
        yield f"write {value.__name__}() for an object of the class"
    yield from (each.hint for each in _ranges(inside) if each.hint)


def _leaves(hint: Any) -> Iterator[Any]:
    """An annotation taken apart: members of unions and tuples, what is annotated, and its marks."""
    if get_origin(hint) in (Annotated, Union, types.UnionType, tuple):
        for each in get_args(hint):
            yield from _leaves(each)
    else:
        yield hint


def _ranges(marks: Any) -> list[Range]:
    return [each for each in marks if isinstance(each, Range)]


def _below(kind: type) -> list[type]:
    """The class and its subclasses, those that can be made."""
    children: list[type] = kind.__subclasses__()
    found = [kind, *(each for child in children for each in _below(child))]
    return [each for each in found if not inspect.isabstract(each)]


def _listed(words: list[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if words[1:] else words)


def _plain(value: Any) -> Any:
    """A number of another kind as Python's own, in tuples too; all else as it is."""
    if type(value) is tuple and any(_plain(each) is not each for each in value):
        return tuple(map(_plain, value))
    kind: type = type(value)
    if kind in (bool, int, float) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def _shown(value: Any) -> str:
    """The value as it prints, cut where it is long; Python does not print a number with thousands of digits."""
    try:
        text = repr(value)
    except Exception:
        text = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else f"a {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:197]}..."
