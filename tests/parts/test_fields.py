"""Every part checks its settings when it is made, from the annotations of its fields; so do the parts of users."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import math
import pkgutil
import re
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, get_type_hints

import numpy as np
import pytest
import torch
from torch import Tensor

import poem
import poem.parts
from poem.parts import (
    SAM,
    SGD,
    Adam,
    AdaptBranch,
    AugMix,
    AverageWithSource,
    EntropyBelow,
    EveryCalls,
    Everyone,
    Explore,
    Jitter,
    MeanTeacher,
    Memory,
    NormAffine,
    Objective,
    Once,
    Outputs,
    Part,
    Select,
    fields,
)
from poem.parts.fields import Checked, Range
from poem.parts.objective import Total
from poem.parts.selection import Both
from poem.parts.weighting import Sum
from poem.recipes.learning_rate import Rule
from poem.recipes.recipe import Recipe
from poem.recipes.text import parse, read, written

if TYPE_CHECKING:
    from nowhere import Something  # type: ignore[import-not-found]

# What text can say, the field that is wrong, and what the error says of it. Python says the same.
WRONG = [
    ("NormAffine('exclude')", "top", "'included' or 'excluded', got 'exclude'; did you mean 'excluded'?"),
    ("NormAffine(True)", "top", "'included' or 'excluded', got True"),
    ("Everything('none')", "only", "'all' or 'weight-and-bias', got 'none'"),
    ("Everything('weights-and-bias')", "only", "did you mean 'weight-and-bias'?"),
    ("AdaptBranch(combine='both')", "combine", "'probabilities' or 'logits', got 'both'"),
    ("AdaptBranch(combine='logit')", "combine", "did you mean 'logits'?"),
    ("AdaptBranch(0)", "depth", "an integer of at least 1, got 0"),
    ("AdaptBranch(1.0)", "depth", "an integer of at least 1, got 1.0"),
    ("AdaptBranch(alpha=1.5)", "alpha", "a number from 0 to 1, got 1.5; it is the source's share of the answer"),
    ("AdaptBranch(teach=Everyone())", "teach", "an Objective, got Everyone()"),
    ("AdaptBranch(teach='entropy')", "teach", "did you mean Entropy()?"),
    ("Prior('x')", "by", "'factor' or 'log', got 'x'"),
    ("Laplacian(affinity='foo')", "affinity", "'rbf', 'knn' or 'linear', got 'foo'"),
    ("Laplacian(0)", "neighbours", "an integer of at least 1, got 0"),
    ("Laplacian(steps=2.5)", "steps", "an integer of at least 1, got 2.5"),
    ("Readout('middle')", "which", "'first', 'before-last', 'last' or 'teacher', got 'middle'"),
    ("Readout('frist')", "which", "did you mean 'first'?"),
    ("Readout('last', 'prior')", "correct", "a Correction, got 'prior'; did you mean Prior()?"),
    ("LossAverageBelow(of='middle')", "of", "'first' or 'last', got 'middle'"),
    ("LossAverageBelow('0.2')", "limit", "a finite number, got '0.2'"),
    ("LossAverageBelow(momentum=9)", "momentum", "a number from 0 to 1, got 9"),
    ("CrossEntropy('mine')", "labels", "'combined' or 'own', got 'mine'"),
    ("FollowTeacher(1)", "symmetric", "True or False, got 1"),
    ("FisherAnchor(-1.0)", "weight", "a number of at least 0, got -1.0"),
    ("SoftLikelihoodRatio(1.5)", "clip", "a number above 0 and at most 1, got 1.5"),
    ("SoftLikelihoodRatio(eps=0)", "eps", "a number above 0, got 0"),
    ("Consistency(0.5)", "augment", "a function like Augment, got 0.5"),
    ("SGD(1e999)", "momentum", "a number from 0 to 1, got inf"),
    ("SGD(-0.1)", "momentum", "a number from 0 to 1, got -0.1"),
    ("SGD(True)", "momentum", "a number from 0 to 1, got True"),
    ("SGD(nesterov='no')", "nesterov", "True or False, got 'no'"),
    ("Adam(0.9)", "betas", "a tuple (a number of at least 0 and below 1, "),
    ("Adam((0.9, 1.0))", "betas", "got (0.9, 1.0)"),
    ("Adam((0.9, 0.99, 0.999))", "betas", "got (0.9, 0.99, 0.999)"),
    ("Adam(eps=-1e-8)", "eps", "a number of at least 0, got -1e-08"),
    ("SAM(-0.05)", "radius", "a number of at least 0, got -0.05"),
    ("SAM(base='adam')", "base", "a Step, got 'adam'; did you mean Adam()?"),
    ("SAM(base=Entropy())", "base", "a Step, got Entropy()"),
    ("SAM(base=None)", "base", "a Step, got None"),
    ("MeanTeacher(1e999)", "momentum", "a number from 0 to 1, got inf"),
    ("MeanTeacher(copies=0)", "copies", "an integer of at least 1, got 0"),
    ("MeanTeacher(unsure=72)", "unsure", "a number from 0 to 2, got 72"),
    ("MeanTeacher(augment='jitter')", "augment", "a function like Augment, got 'jitter'"),
    ("EveryCalls(0)", "calls", "an integer of at least 1, got 0"),
    ("EveryCalls(1e3)", "calls", "an integer of at least 1, got 1000.0"),
    ("AverageWithSource(99)", "keep", "a number from 0 to 1, got 99"),
    ("MomentumFilter(99)", "keep", "a number from 0 to 1, got 99"),
    ("MomentumFilter(noise=-1)", "noise", "a number of at least 0, got -1"),
    ("RobustCrossEntropy(0)", "power", "a number above 0 and at most 1, got 0"),
    ("RegionalEntropy(-1)", "region", "a number of at least 0, got -1"),
    ("RegionConfidence(score=SoftmaxEntropy())", "score", "a RegionalEntropy, got SoftmaxEntropy()"),
    ("ByEntropy(most=0)", "most", "a number above 0 or None, got 0"),
    ("AfterImages(0)", "images", "an integer of at least 1, got 0"),
    ("MatchEntropy(0)", "rate", "a number above 0, got 0"),
    ("TemperedEntropy(0)", "temperature", "a number above 0, got 0"),
    ("LowFrequencies(2)", "convolutional", "a number from 0 to 1, got 2"),
    ("PatchNoise(0)", "patch", "an integer of at least 1, got 0"),
    ("SelfBootstrap(noise=Patches())", "noise", "a PatchNoise, got Patches(4)"),
    ("RankedEntropy(1.0)", "step", "a number above 0 and below 1, got 1.0"),
    ("RankedEntropy(levels=1)", "levels", "an integer of at least 2, got 1"),
    ("WaryTeacher(rate=2)", "rate", "a number from 0 to 1, got 2"),
    ("NearSource(-1)", "weight", "a number of at least 0, got -1"),
    ("FollowSource(-1)", "weight", "a number of at least 0, got -1"),
    ("StochasticRestore(1.1)", "chance", "a number from 0 to 1, got 1.1"),
    ("EntropyBelow(40)", "fraction", "a number from 0 to 10, got 40; it is a fraction of ln C"),
    ("EntropyBelow('0.4')", "fraction", "a number from 0 to 10, got '0.4'"),
    ("EntropyBelow(None)", "fraction", "a number from 0 to 10, got None"),
    ("EntropyBelow(0.4, first=-1)", "first", "a number from 0 to 10 or None, got -1"),
    ("ByEntropy(40)", "fraction", "a number from 0 to 10, got 40"),
    ("NotRedundant(5)", "cosine", "a number from 0 to 2, got 5; a cosine is at most 1, and 2 keeps everyone"),
    ("NotRedundant(momentum=-0.9)", "momentum", "a number from 0 to 1, got -0.9"),
    ("PLPDAbove(20)", "drop", "a number from -2 to 2, got 20"),
    ("PLPDAbove(0.2, 'pixels')", "destroy", "did you mean Pixels()?"),
    ("PLPDAbove(0.2, Entropy())", "destroy", "a Patches, a Pixels or an Occlusion, got Entropy()"),
    ("ByPLPD(4)", "destroy", "a Patches, a Pixels or an Occlusion, got 4"),
    ("Patches(0)", "grid", "an integer of at least 1, got 0"),
    ("Diverse(2)", "momentum", "a number from 0 to 1, got 2"),
    ("ByDiversityAndCertainty(temperature=0)", "temperature", "a number above 0, got 0"),
    ("FirstRound(Everyone())", "weigh", "a Weigh, got Everyone()"),
    ("Mixed(17)", "alpha", "a number from 0 to 1, got 17"),
    ("RunningMean(-0.1)", "alpha", "a number from 0 to 1, got -0.1"),
    ("Robust(2)", "alpha", "a number from 0 to 1, got 2"),
    ("SlowTeacher(9)", "momentum", "a number from 0 to 1, got 9"),
    ("MemoryBank(0)", "capacity", "an integer of at least 1, got 0"),
    ("MemoryBank(every=0.5)", "every", "an integer of at least 1, got 0.5"),
    ("MemoryBank(timeliness=-1)", "timeliness", "a number of at least 0, got -1"),
    ("SiameseEntropy(-1)", "divergence", "a number of at least 0, got -1"),
    ("SiameseEntropy(transformer='1')", "transformer", "a number of at least 0, got '1'"),
    ("Recentre(2)", "momentum", "a number from 0 to 1 or None, got 2"),
    ("EntropyBelow(0.4, score='opinion')", "score", "a Score, got 'opinion'; did you mean OpinionEntropy()?"),
    ("Explore(0)", "updates", "an integer of at least 1, got 0; use the method 'source' to learn nothing"),
    ("Repeat(2.5)", "updates", "an integer of at least 1, got 2.5"),
    ("Once(2)", "updates", "an integer equal to 1, got 2; Explore(2) and Repeat(2) make more updates"),
    ("Jitter(padding='mirror')", "padding", "'reflect' or 'edge', got 'mirror'"),
    ("Jitter(flip=50)", "flip", "a number from 0 to 1, got 50"),
    ("Jitter(blur=0.5)", "blur", "a tuple (a number above 0, a number above 0) or None, got 0.5"),
    ("Jitter(blur=(0.0, 0.5))", "blur", "a tuple (a number above 0, a number above 0) or None, got (0.0, 0.5)"),
    ("Jitter(scale=(0.0, 1.0))", "scale", "a tuple (a number above 0, a number above 0), got (0.0, 1.0)"),
    (
        "Jitter(brightness=(-1, 1))",
        "brightness",
        "a tuple (a number of at least 0, a number of ",
    ),
    ("Jitter(noise=-0.1)", "noise", "a number of at least 0, got -0.1"),
    ("AugMix(views=0)", "views", "an integer of at least 1, got 0"),
    ("AugMix(width=1.5)", "width", "an integer of at least 1, got 1.5"),
    ("AugMix(pre='crops')", "pre", "'resized-crop' or 'crop', got 'crops'; did you mean 'crop'?"),
    ("Rule('yes')", "double_one", "True or False, got 'yes'"),
    ("Rule(transformer=-0.001)", "transformer", "a number of at least 0, got -0.001"),
    ("Rule(convolutional=1e999)", "convolutional", "a number of at least 0, got inf"),
]
JOINED = [
    ("Everyone() & 3", "Both: expected second to be a Select, got 3"),
    ("Everyone() & Entropy()", "Both: expected second to be a Select, got Entropy()"),
    ("Entropy() + Equal()", "Total: expected second to be an Objective, got Equal()"),
    ("Equal() + Entropy()", "Sum: expected second to be a Weigh, got Entropy()"),
]
NAMES = {name: getattr(poem.parts, name) for name in poem.parts.__all__} | {"Rule": Rule}


def refused(text: str) -> str:
    """What the error says, in Python and in text alike."""
    with pytest.raises((TypeError, ValueError)) as python:
        eval(text, dict(NAMES))
    with pytest.raises(ValueError, match=re.escape(str(python.value))) as written_down:
        parse(text)
    assert str(python.value) == str(written_down.value)
    return str(python.value)


@pytest.mark.parametrize(("text", "name", "words"), WRONG, ids=[text for text, _, _ in WRONG])
def test_a_setting_that_means_nothing_is_refused_in_python_and_in_text(text: str, name: str, words: str) -> None:
    found = refused(text)
    assert found.startswith(f"{text.partition('(')[0]}: expected {name} to be ")
    assert words in found


@pytest.mark.parametrize(("text", "words"), JOINED, ids=[text for text, _ in JOINED])
def test_only_parts_of_one_question_are_joined(text: str, words: str) -> None:
    assert refused(text) == words


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, np.float32("nan"), 10**400], ids=repr)
@pytest.mark.parametrize(
    "make", [SGD, MeanTeacher, AverageWithSource, poem.parts.LossAverageBelow, poem.parts.FisherAnchor]
)
def test_numbers_are_finite(make: Callable[[Any], Any], number: Any) -> None:
    with pytest.raises(ValueError, match=r"expected .* to be a"):
        make(number)


@pytest.mark.parametrize("number", [torch.tensor(0.9), "0.9", None, [0.9], 1j], ids=repr)
def test_a_number_is_a_number(number: Any) -> None:
    with pytest.raises(TypeError, match="SGD: expected momentum to be a number from 0 to 1"):
        SGD(number)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"select": EntropyBelow}, r"got <class 'poem.parts.selection.EntropyBelow'>; write EntropyBelow\(\)"),
        ({"views": AugMix}, r"expected views to be a function like Augment, a Views or None, got .*write AugMix\(\)"),
        ({"step": "sgd"}, r"Recipe: expected step to be a Step, got 'sgd'; did you mean SGD\(\)\?"),
        ({"lr": True}, "Recipe: expected lr to be a number of at least 0 or a Rule, got True"),
        ({"lr": "0.1"}, "Recipe: expected lr to be a number of at least 0 or a Rule, got '0.1'"),
        ({"lr": torch.tensor(0.1)}, "Recipe: expected lr to be a number of at least 0 or a Rule, got tensor"),
        ({"readout": 3}, "Recipe: expected readout to be a Readout, got 3"),
        ({"teacher": Explore()}, r"Recipe: expected teacher to be a Teacher or None, got Explore\(2\)"),
    ],
    ids=["class", "views", "step", "lr", "text", "tensor", "readout", "teacher"],
)  # fmt: skip
def test_a_recipe_checks_the_kind_of_each_answer(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=words):
        Recipe(**changes)


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1.0])
def test_a_learning_rate_is_finite_and_not_negative(rate: float) -> None:
    with pytest.raises(ValueError, match="Recipe: expected lr to be a number of at least 0 or a Rule, got"):
        Recipe(lr=rate)


def test_a_learning_rate_of_zero_is_one() -> None:
    assert Recipe(lr=0).lr == 0
    assert Recipe(lr=0.0).lr == 0.0


# Every part of the library --------------------------------------------------------------------------------------------


def checked_classes() -> list[type]:
    """Every class of the library whose fields are checked, and that can be made."""
    modules = [importlib.import_module(f"poem.parts.{info.name}") for info in pkgutil.iter_modules(poem.parts.__path__)]
    values = [value for module in modules for value in vars(module).values()]
    found = {value for value in (*values, Rule, Recipe) if isinstance(value, type) and issubclass(value, Checked)}
    return sorted((kind for kind in found if not inspect.isabstract(kind)), key=lambda kind: kind.__name__)


WHOLE = {
    Both: lambda: Both(Everyone(), Everyone()),
    Sum: lambda: Sum(poem.parts.Equal(), poem.parts.Equal()),
    Total: lambda: Total(poem.parts.Entropy(), poem.parts.Entropy()),
}


@pytest.mark.parametrize("kind", checked_classes(), ids=lambda kind: kind.__name__)
def test_no_field_of_the_library_takes_just_anything(kind: Any) -> None:
    whole = WHOLE.get(kind, kind)()
    for item in dataclasses.fields(kind):
        with pytest.raises((TypeError, ValueError), match=rf"{kind.__name__}: expected {item.name} to be "):
            dataclasses.replace(whole, **{item.name: object()})


def test_the_classes_of_the_library_were_found() -> None:
    names = {kind.__name__ for kind in checked_classes()}
    assert len(names) > 40
    assert {"SGD", "Jitter", "AugMix", "Rule", "Recipe", "AdaptBranch", "MeanTeacher", "Both"} <= names


# Parts of users -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class Mine(Select):
    """A part as users write them."""

    mode: Literal["soft", "hard"] = "soft"
    power: Annotated[float, Range(above=0, hint="2 is a good start")] = 1.0
    inner: Select | None = None

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        return among


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mode": "sotf"}, "Mine: expected mode to be 'soft' or 'hard', got 'sotf'; did you mean 'soft'?"),
        ({"power": 0}, "Mine: expected power to be a number above 0, got 0; 2 is a good start"),
        ({"inner": "mine"}, "Mine: expected inner to be a Select or None, got 'mine'; did you mean Mine()?"),
    ],
)
def test_a_part_of_a_user_is_checked_too(changes: dict[str, Any], words: str) -> None:
    assert Mine(inner=Mine("hard", 2)).inner == Mine("hard", 2.0)
    with pytest.raises((TypeError, ValueError), match=re.escape(words)):
        Mine(**changes)


@dataclass(frozen=True, repr=False)
class Unusual(Select):
    """Annotations that say nothing to us, or cannot be resolved."""

    hidden: Something = 1
    missing: Nowhere[int] = 2  # type: ignore[name-defined]  # noqa: F821
    words: list[str] = field(default_factory=lambda: ["a"])
    table: dict[str, int] | None = None
    function: Callable[[int], int] = abs
    anything: Any = object
    shape: torch.Size = (1, 2)  # type: ignore[assignment]
    lazy: float = None  # type: ignore[assignment]
    text: "float" = 0.1  # noqa: UP037

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        return among


def test_annotations_that_say_nothing_are_not_checked() -> None:
    odd: Any = Unusual
    assert odd().lazy is None, "a default is the author's own choice"
    made = odd(hidden="x", missing=[], words=3, table=4, function=5, anything=6, shape=7)
    assert made.words == 3
    strange: Any = dataclasses.make_dataclass("Strange", [("odd", 3, "x")], bases=(Everyone,), frozen=True)
    assert strange(odd=None).odd is None
    assert odd(lazy=0.5).lazy == 0.5
    with pytest.raises(TypeError, match="Unusual: expected lazy to be a finite number, got 'x'"):
        odd(lazy="x")
    with pytest.raises(TypeError, match="Unusual: expected text to be a finite number, got 'x'"):
        odd(text="x")


def test_a_part_made_inside_a_function_is_checked() -> None:
    @dataclass(frozen=True, repr=False)
    class Local(Mine):
        count: int = 1

    assert Local(count=2).count == 2
    with pytest.raises(TypeError, match=r"Local: expected count to be an integer, got 2\.5"):
        Local(count=2.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Local: expected power to be a number above 0, got -1"):
        Local(power=-1)


@dataclass(frozen=True, repr=False)
class Converting(Select):
    """Turns what comes into what it wants, and does not call the base class."""

    sizes: tuple[int, ...] = (1,)
    scale: float = 1.0
    twice: InitVar[float] = 2.0

    def __post_init__(self, twice: float) -> None:
        object.__setattr__(self, "sizes", tuple(self.sizes))
        object.__setattr__(self, "scale", float(self.scale) * twice)

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor:
        return among


def test_a_part_that_converts_is_checked_afterwards() -> None:
    made = Converting([1, 2], "3", 4.0)  # type: ignore[arg-type]
    assert (made.sizes, made.scale) == ((1, 2), 12.0)
    with pytest.raises(TypeError, match="Converting: expected sizes to be a tuple of values, each an integer, got "):
        Converting([1, 2.5])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Converting: expected scale to be a finite number, got nan"):
        Converting(scale=math.nan)


class Announces:
    """A mixin that knows nothing of parts."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "announced", True)


class Named(Protocol):
    """A protocol that a part may name as a base."""

    def __call__(self, outputs: Outputs, among: Tensor, memory: Memory) -> Tensor: ...


def test_mixins_and_protocols_do_not_hide_the_check() -> None:
    @dataclass(frozen=True, repr=False)
    class Mixed(Announces, Mine):
        """With a `__post_init__` from elsewhere."""

    @dataclass(frozen=True, repr=False)
    class Explicit(Mine, Named):
        """Names a protocol among its bases."""

    assert Mixed().announced  # type: ignore[attr-defined]
    for kind in (Mixed, Explicit):
        with pytest.raises(ValueError, match=f"{kind.__name__}: expected power to be a number above 0"):
            kind(power=-1)


def test_a_subclass_without_a_decorator_is_checked() -> None:
    class Plain(EntropyBelow):
        """Adds no field."""

    assert Plain(0.5).fraction == 0.5
    with pytest.raises(ValueError, match="Plain: expected fraction"):
        Plain(50)


def test_annotations_are_resolved_once_per_class(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True, repr=False)
    class Fresh(Mine):
        count: int = 1

    calls: list[Any] = []

    def counted(*args: Any, **kwargs: Any) -> dict[str, Any]:
        calls.append(args)
        return get_type_hints(*args, **kwargs)

    monkeypatch.setattr(fields, "get_type_hints", counted)
    Fresh(count=2)
    first = len(calls)
    assert first > 0
    Fresh(count=3)
    assert len(calls) == first


# Numbers of NumPy -----------------------------------------------------------------------------------------------------


def test_numbers_of_numpy_are_kept_as_python_s() -> None:
    adam = Adam((np.float64(0.9), np.float32(0.5)), eps=np.float64(1e-8))
    assert adam == Adam((0.9, 0.5))
    assert repr(adam) == "Adam((0.9, 0.5))"
    assert repr(EntropyBelow(np.float64(0.4))) == "EntropyBelow(0.4)"
    assert repr(EveryCalls(np.int64(5))) == "EveryCalls(5)"
    assert type(Explore(np.int32(3)).updates) is int
    recipe = poem.recipe("sar").changed({"threshold": np.float64(0.5), "lr": np.float32(0.25)})
    assert read(written(recipe)) == recipe
    assert repr(FRACTION) == "EntropyBelow(0.5)"


FRACTION = EntropyBelow(np.float64(0.5))


def test_rounds_say_what_they_take() -> None:
    for rounds in ("2", 2.5, None):
        with pytest.raises(TypeError, match="Explore: expected updates to be an integer of at least 1"):
            poem.recipe("tent").changed({"rounds": rounds})
    assert poem.recipe("tent").changed({"rounds": 1}).explore == Once()
    assert poem.recipe("tent").changed({"rounds": 2}).explore == Explore(2)


def test_what_is_allowed_stays_allowed() -> None:
    assert SAM(0, Adam()).base == Adam()
    assert Jitter.cotta().blur == (0.001, 0.5)
    assert AdaptBranch(alpha=1).alpha == 1
    assert NormAffine("included") == NormAffine()
    assert issubclass(Objective, Part)
    assert issubclass(Part, Checked)


def test_filters_joined_by_and_are_an_error() -> None:
    with pytest.raises(TypeError, match="join filters with &"):
        poem.parts.EntropyBelow(0.4) and poem.parts.PLPDAbove(0.2)
    with pytest.raises(TypeError, match=r"join weights with \+"):
        poem.parts.ByEntropy(0.4) or poem.parts.ByPLPD()


def test_former_names_of_what_parts_see_still_work() -> None:
    assert poem.parts.Look is Outputs
    assert poem.parts.Lesson is poem.parts.Selected
    with pytest.raises(AttributeError, match=r"'poem.parts' has no attribute 'Glance'"):
        _ = poem.parts.Glance


@pytest.mark.parametrize("name", ["margin", "needs", "places", "with_margin"])
def test_a_field_that_hides_what_its_base_has_is_refused_where_the_class_is_written(name: str) -> None:
    owner = "Select" if "margin" in name else "Part"
    words = f"got '{name}', which hides {owner}.{name}; call it otherwise, as in own_{name}"
    with pytest.raises(TypeError, match=f"a field of Mine under a name of its own, {words}"):
        type("Mine", (Select,), {"__annotations__": {name: "float"}, name: 0.5})
    with pytest.raises(TypeError, match=re.escape(words)):
        type("Mine", (Everyone,), {"__annotations__": {name: float}})


def test_a_class_variable_and_a_field_of_the_base_may_be_stated_again() -> None:
    @dataclass(frozen=True, repr=False)
    class Half(EntropyBelow):
        needs: ClassVar[frozenset[Any]] = frozenset()
        fraction: float = 0.5

        @property
        def margin(self) -> float | None:
            """Half of it."""
            return self.fraction / 2

    assert (Half().fraction, Half().margin) == (0.5, 0.25)
