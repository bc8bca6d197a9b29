"""Which recipes can be stacked: those whose parts are known to compute the same when they are mapped over streams."""

from __future__ import annotations

from poem.parts.base import Part
from poem.parts.branch import AdaptBranch
from poem.parts.destruction import Occlusion, Patches
from poem.parts.exploration import Explore, Once, Repeat
from poem.parts.objective import ConservativeEntropy, CrossEntropy, Entropy, FisherAnchor, RobustCrossEntropy, Total
from poem.parts.parameters import NormAffine, Nothing
from poem.parts.readout import LocalPrior, Prior, Readout, Uncorrected
from poem.parts.recovery import AverageWithSource, EveryCalls, LossAverageBelow, Never
from poem.parts.score import OpinionEntropy, SoftmaxEntropy, TemperedEntropy
from poem.parts.selection import AfterImages, Both, EntropyBelow, Everyone, NotRedundant, PLPDAbove
from poem.parts.statistics import FromBatch, Mixed, RunningMean, Source
from poem.parts.step import SAM, SGD, Adam
from poem.parts.stream_statistics import Blended
from poem.parts.weighting import ByEntropy, ByPLPD, Equal, FirstRound, Sum
from poem.recipes.recipe import Recipe

STACKED: tuple[type[Part], ...] = (
    NormAffine, Nothing, Source, FromBatch, Mixed, RunningMean, Blended, Everyone, AfterImages, EntropyBelow,
    NotRedundant, PLPDAbove, Both, Patches, Occlusion, SoftmaxEntropy, TemperedEntropy, OpinionEntropy, Equal,
    ByEntropy, ByPLPD, FirstRound, Sum, Entropy, ConservativeEntropy, RobustCrossEntropy, CrossEntropy, FisherAnchor,
    Total, SGD, Adam, SAM, Never, LossAverageBelow, AverageWithSource, EveryCalls, Once, Repeat, Explore, AdaptBranch,
    Readout, Uncorrected, LocalPrior, Prior,
)  # fmt: skip
"""Parts, by their very class: what a subclass does is its own."""


def recipe_why_not(recipe: Recipe) -> str:
    """Why streams with this recipe take turns; "" where they can be stacked."""
    if recipe.teacher is not None:
        return f"{type(recipe.teacher).__name__} keeps a network of its own for each stream"
    if recipe.views is not None:
        return f"{type(recipe.views).__name__} makes other images of each stream's batch"
    for _, part in recipe.places:
        if type(part) not in STACKED:
            return f"{type(part).__name__} is computed for one stream at a time"
    if isinstance(recipe.step, SAM) and recipe.step.steps_when_empty:
        return "momentum_coast steps where nothing is selected"
    if len({part for _, part in recipe.places if isinstance(part, Patches | Occlusion)}) > 1:
        return "images are destroyed in several ways"
    return ""
