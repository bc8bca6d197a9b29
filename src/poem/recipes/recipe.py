"""A method as a sentence: one choice per question, frozen, printable, comparable."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from poem._util.nearest import nearest_names
from poem.parts.augment import Augment
from poem.parts.base import Part
from poem.parts.branch import AdaptBranch
from poem.parts.exploration import Exploration, Explore, Once
from poem.parts.fields import Checked, NotNegative
from poem.parts.objective import Entropy, Objective
from poem.parts.parameters import NormAffine, Nothing, Parameters
from poem.parts.readout import Readout
from poem.parts.recovery import Never, Recovery
from poem.parts.selection import EntropyBelow, Equal, Everyone, Select, Weigh
from poem.parts.statistics import FromBatch, Statistics
from poem.parts.step import SGD, Step
from poem.parts.teacher import MeanTeacher


@dataclass(frozen=True)
class Rule(Checked):
    """The learning rate by network family and batch size, as the code of SAR, DeYO and POEM sets it for all methods.

    Convolutional: 0.00025 from 32 images on, below that 0.0005 / 64 per image. Transformer: 0.001 / 64 per image.
    `double_one` doubles it for streams of single images (SAR, DeYO, POEM and what is built on them).
    """

    double_one: bool = False
    convolutional: NotNegative = 0.00025
    transformer: NotNegative = 0.001

    def __str__(self) -> str:
        twice = "; twice that rule's for single images" if self.double_one else ""
        rates = f"{self.convolutional:g} (convolutional) or {self.transformer:g} (transformer) at batch 64"
        return f"{rates}, less for smaller batches{twice}"

    def __call__(self, family: str, batch_size: int) -> float:
        """The learning rate."""
        if family == "transformer":
            rate = self.transformer / 64 * batch_size
        else:
            rate = self.convolutional if batch_size >= 32 else self.convolutional / 64 * batch_size * 2
        return 2 * rate if self.double_one and batch_size == 1 else rate


@dataclass(frozen=True, kw_only=True)
class Recipe(Checked):
    """What a method decides. The defaults are Tent's."""

    parameters: Parameters = field(default_factory=NormAffine)
    statistics: Statistics = field(default_factory=FromBatch)
    views: Augment | None = None
    teacher: MeanTeacher | None = None
    select: Select = field(default_factory=Everyone)
    weigh: Weigh = field(default_factory=Equal)
    minimise: Objective = field(default_factory=Entropy)
    step: Step = field(default_factory=SGD)
    lr: NotNegative | Rule = field(default_factory=Rule)
    recover: Recovery = field(default_factory=Never)
    explore: Exploration = field(default_factory=Once)
    branch: AdaptBranch | None = None
    readout: Readout = field(default_factory=Readout)

    def __post_init__(self) -> None:
        """Refuses sentences that contradict themselves."""
        super().__post_init__()
        if self.readout.look == "teacher" and self.readout.correct.features:
            raise ValueError(f"{self.readout.correct!r} reads features, which a teacher's answer has not")
        if self.readout.look == "teacher" and self.teacher is None:
            raise ValueError("readout 'teacher' needs a teacher; add teacher=MeanTeacher() to the recipe")

    @property
    def learns(self) -> bool:
        """Whether any tensor may move."""
        return not isinstance(self.parameters, Nothing)

    @property
    def unit_range(self) -> bool:
        """Whether the method augments images and so needs them in [0, 1], with mean and std inside."""
        return self.views is not None or self.teacher is not None or self.minimise.augments

    @property
    def apart(self) -> bool:
        """Whether those who teach do so each for itself: nothing is shared between samples but the weights."""
        own = self.minimise.apart and (self.branch is None or self.branch.teach.apart)
        return own and self.views is None and self.teacher is None and not self.step.climbs

    @property
    def edits_images(self) -> object | None:
        """The first choice that works on images alone, if there is one."""
        if self.unit_range:
            return self.views or self.teacher or self.minimise
        parts = (getattr(self, item.name) for item in dataclasses.fields(self))
        inner = (part.edits_images for part in parts if isinstance(part, Part))
        return next((part for part in inner if part is not None), None)

    @property
    def on_host(self) -> Part | Augment | None:
        """The first choice that cannot be recorded as a CUDA graph, if there is one."""
        parts = [getattr(self, item.name) for item in dataclasses.fields(self)]
        return self.views or next((part for part in parts if isinstance(part, Part) and part.on_host), None)

    def changed(self, changes: Mapping[str, Any]) -> Recipe:
        """A copy with some fields replaced; `threshold rounds alpha depth readout` reach into their parts.

        Whole fields are replaced first, so that the order in which changes are given does not matter.

        A threshold is one fraction of ln C for every round. A selection whose first round has a fraction of its own is
        not guessed at: it is an error that says what to pass.
        """
        recipe = self
        for name, value in sorted(changes.items(), key=lambda change: change[0] in ALIASES or _look(*change)):
            if name == "threshold":
                if recipe.select.margin is None:
                    found = f"got {recipe.select!r}; see tent-filtered"
                    raise ValueError(f"threshold={value} needs an EntropyBelow in the selection, {found}")
                for each in _words(recipe.select):
                    if isinstance(each, EntropyBelow) and each.first is not None:
                        both = EntropyBelow(value, first=value)
                        raise ValueError(
                            f"threshold={value} is one fraction, and {each!r} has two; pass the whole selection, with "
                            f"both, as in select={both!r}"
                        )
                recipe = replace(recipe, select=recipe.select.with_margin(value))
            elif name == "rounds":
                recipe = replace(recipe, explore=_rounds(recipe.explore, value))
            elif name in ("alpha", "depth"):
                if recipe.branch is None:
                    raise ValueError(f"{name}={value} is a setting of the adapt branch, which this recipe has not")
                recipe = replace(recipe, branch=replace(recipe.branch, **{name: value}))
            elif _look(name, value):
                recipe = replace(recipe, readout=replace(recipe.readout, look=value))
            else:
                recipe = replace(recipe, **{field_name(name): value})
        return recipe

    def __str__(self) -> str:
        """The sentence: one line per question whose answer is not the plain one."""
        plain, lines = Recipe(), []
        always = ("parameters", "select", "lr") if self.learns else ("parameters",)
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if value is not None and (value != getattr(plain, item.name) or item.name in always):
                lines.append(f"{item.name:>10}  {value if isinstance(value, Rule) else repr(value)}")
        return "\n".join(lines)


FIELDS = tuple(item.name for item in dataclasses.fields(Recipe))
ALIASES = ("threshold", "rounds", "alpha", "depth")


def field_name(name: str) -> str:
    """The name itself if a recipe has such a field; otherwise an error with the nearest ones."""
    if name not in FIELDS:
        near = ["lr"] if name == "learning_rate" else nearest_names(name, FIELDS + ALIASES, most=3, cutoff=0.5)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise TypeError(
            f"a recipe has no field {name!r}.{hint} Fields: {' '.join(FIELDS)}; aliases: {' '.join(ALIASES)}"
        )
    return name


def _look(name: str, value: object) -> bool:
    """Whether a change is the look of the readout, a setting of that part, and not the part."""
    return name == "readout" and isinstance(value, str)


def _words(part: Select) -> Iterator[Select]:
    """A selection, and those that it is made of."""
    yield part
    for item in dataclasses.fields(part):
        inner = getattr(part, item.name)
        if isinstance(inner, Select):
            yield from _words(inner)


def _rounds(explore: Exploration, updates: int) -> Exploration:
    """The same way of looking again, with another number of updates; Once becomes Explore where more are asked for."""
    if isinstance(explore, Once) and updates != 1:
        return Explore(updates)
    return replace(explore, updates=updates)
