"""A method as a recipe: one part per question, frozen, printable, comparable."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from poem._util.nearest import nearest_names
from poem._util.outside import is_path
from poem.parts.augment import Augment
from poem.parts.base import Need, Part
from poem.parts.branch import AdaptBranch
from poem.parts.exploration import Exploration, Explore, Once
from poem.parts.fields import Checked, NotNegative
from poem.parts.objective import Entropy, Objective
from poem.parts.parameters import NormAffine, Nothing, Parameters
from poem.parts.readout import Readout
from poem.parts.recovery import Never, Recovery
from poem.parts.selection import EntropyBelow, Everyone, Select
from poem.parts.statistics import FromBatch, Statistics
from poem.parts.step import SGD, Step
from poem.parts.teacher import Teacher
from poem.parts.views import Views
from poem.parts.weighting import Equal, Weigh
from poem.recipes.learning_rate import Rule

AUGMENTING = {Need.UNIT_RANGE, Need.PICTURES, Need.HOST}
"""What an augmentation needs."""


@dataclass(frozen=True, kw_only=True)
class Recipe(Checked):
    """What a method decides. The defaults are Tent's."""

    parameters: Parameters = field(default_factory=NormAffine)
    statistics: Statistics = field(default_factory=FromBatch)
    views: Augment | Views | None = None
    teacher: Teacher | None = None
    select: Select = field(default_factory=Everyone)
    weigh: Weigh = field(default_factory=Equal)
    minimise: Objective = field(default_factory=Entropy)
    step: Step = field(default_factory=SGD)
    lr: NotNegative | Rule = field(default_factory=Rule)
    recover: Recovery = field(default_factory=Never)
    explore: Exploration = field(default_factory=Once)
    branch: AdaptBranch | None = None
    readout: Readout = field(default_factory=Readout)
    on_batch_norm: Recipe | None = None  # the recipe of networks with batch norm, where it is another

    def __post_init__(self) -> None:
        """Refuses recipes that contradict themselves."""
        super().__post_init__()
        if self.readout.which == "teacher" and Need.FEATURES in self.readout.correct.needs:
            raise ValueError(f"{self.readout.correct!r} reads features, which a teacher's answer has not")
        if self.readout.which == "teacher" and self.teacher is None:
            raise ValueError("readout 'teacher' needs a teacher; add teacher=MeanTeacher() to the recipe")
        if self.teacher is not None and self.teacher.asks_source and not isinstance(self.views, Views):
            raise ValueError(f"{self.teacher!r} watches what a bank holds; add views=MemoryBank() to the recipe")
        objectives = [self.minimise, *([] if self.branch is None else [self.branch.teach])]
        coupled = [each for each in objectives if not each.per_sample]
        if self.step.per_sample and coupled:
            raise ValueError(
                f"{self.step!r} needs an objective that is a sum over samples, such as Entropy(), got {coupled[0]!r}; "
                f"leave the clipping out: step={self.step.optimiser!r}; or, where it is such a sum, let its per_sample "
                "be True"
            )
        shared = [each for each in objectives if each.divisor != "selected"]
        if self.step.per_sample and shared:
            raise ValueError(
                f"{self.step!r} needs an objective that is a mean over the selected samples, such as Entropy(), got "
                f"{shared[0]!r}, which divides by the batch size; leave the clipping out: step={self.step.optimiser!r}"
            )
        if self.on_batch_norm is not None and self.on_batch_norm.on_batch_norm is not None:
            raise ValueError("expected on_batch_norm without a recipe for batch norm of its own, got one that has it")

    def fitted(self, *, batch_norm: bool) -> Recipe:
        """The recipe for a network with batch norm, or without."""
        return self.on_batch_norm if batch_norm and self.on_batch_norm is not None else self

    @cached_property
    def places(self) -> tuple[tuple[str, Part], ...]:
        """Every part of the recipe, parts inside parts too, with the names of the fields that lead to it."""
        fields = ((item.name, getattr(self, item.name)) for item in dataclasses.fields(self))
        own = [(name, part) for name, part in fields if isinstance(part, Part)]
        return tuple((f"{name}.{place}".rstrip("."), inner) for name, part in own for place, inner in part.places)

    def first_with(self, *needs: Need) -> Part | Augment | None:
        """The first choice that has one of these needs, or None; augmentations have the needs of images in [0, 1]."""
        if self.views is not None and not isinstance(self.views, Part) and set(needs) & AUGMENTING:
            return self.views
        return next((part for _, part in self.places if part.needs & set(needs)), None)

    @cached_property
    def learns(self) -> bool:
        """Whether any tensor is adapted."""
        return not isinstance(self.parameters, Nothing)

    @cached_property
    def unit_range(self) -> bool:
        """Whether the method augments images and so needs them in [0, 1], with mean and std inside."""
        return self.first_with(Need.UNIT_RANGE) is not None

    @cached_property
    def uses_source_data(self) -> bool:
        """Whether a part prepares itself on source images."""
        return self.first_with(Need.SOURCE_DATA) is not None

    @cached_property
    def select_runs_network(self) -> bool:
        """Whether selecting takes forward passes of its own."""
        return any(part.further_passes for _, part in self.select.places)

    @cached_property
    def per_sample(self) -> bool:
        """Whether a selected sample's gradient depends on no other sample, so that others may be left out."""
        own = self.minimise.per_sample and (self.branch is None or self.branch.teach.per_sample)
        return own and self.views is None and self.teacher is None and not self.step.perturbs

    def changed(self, changes: Mapping[str, Any]) -> Recipe:
        """A copy with some fields replaced; `threshold rounds alpha depth readout` reach into their parts.

        Whole fields are replaced first, wherever they are among the changes. Each is replaced in turn and has to fit
        what is there by then: a `step` that clips comes after a `minimise` that it can clip. A recipe for batch norm is
        changed alike, but for settings of the branch and the number of updates.

        A part may be given as text, as suites write it: `select="EntropyBelow(0.4) & my_package.parts:Mine(0.5)"`.

        A threshold is one fraction of ln C for every round. A selection whose first round has a fraction of its own is
        not guessed at: it is an error that says what to pass.
        """
        changes = {name: _from_text(value) for name, value in changes.items()}
        recipe = self
        if self.on_batch_norm is not None and "on_batch_norm" not in changes:
            own = {name: value for name, value in changes.items() if name not in ("alpha", "depth", "rounds")}
            recipe = replace(self, on_batch_norm=self.on_batch_norm.changed(own))
        for name, value in sorted(changes.items(), key=lambda change: change[0] in ALIASES or _is_which(*change)):
            if name == "threshold":
                if recipe.select.margin is None:
                    found = f"got {recipe.select!r}; see tent-filtered"
                    raise ValueError(f"threshold={value} needs an EntropyBelow in the selection, {found}")
                for _, each in recipe.select.places:
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
            elif _is_which(name, value):
                recipe = replace(recipe, readout=replace(recipe.readout, which=value))
            else:
                recipe = replace(recipe, **{field_name(name): value})
        return recipe

    def __str__(self) -> str:
        """One line per part that is not the default."""
        plain, lines = Recipe(), []
        always = ("parameters", "select", "lr") if self.learns else ("parameters",)
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            if item.name == "on_batch_norm":
                continue
            if value is not None and (value != getattr(plain, item.name) or item.name in always):
                lines.append(f"{item.name:>10}  {value if isinstance(value, Rule) else repr(value)}")
        if self.on_batch_norm is not None:
            lines += ["on batch norm:", str(self.on_batch_norm)]
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


def _is_which(name: str, value: object) -> bool:
    """Whether a change is the readout's `which`, a setting of that part, and not the part."""
    return name == "readout" and isinstance(value, str)


def _from_text(value: Any) -> Any:
    """The part that a text with a call or with `package.module:name` stands for; any other value as it is."""
    if isinstance(value, str) and (value.rstrip().endswith(")") or is_path(value)):
        from poem.recipes.text import parse  # which needs this module

        return parse(value)
    return value


def _rounds(explore: Exploration, updates: int) -> Exploration:
    """The same exploration with another number of updates; Once becomes Explore where more are asked for."""
    if isinstance(explore, Once) and updates != 1:
        return Explore(updates)
    return replace(explore, updates=updates)
