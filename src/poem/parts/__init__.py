"""The words that recipes are made of, one file per question.

For example `Recipe(select=EntropyBelow(0.5) & PLPDAbove(0.1), weigh=ByEntropy(0.4))`.
"""

from poem.parts.augment import Augment, AugMix, Jitter
from poem.parts.base import Batch, Lesson, Look, Memory, Part
from poem.parts.branch import AdaptBranch
from poem.parts.exploration import Exploration, Explore, Once, Repeat
from poem.parts.objective import (
    Consistency,
    CrossEntropy,
    Entropy,
    FisherAnchor,
    FollowTeacher,
    MarginalEntropy,
    Objective,
    SoftLikelihoodRatio,
)
from poem.parts.parameters import Everything, NormAffine, Nothing, Parameters
from poem.parts.readout import Correction, Laplacian, Prior, Readout, Uncorrected
from poem.parts.recovery import (
    AverageWithSource,
    EachImage,
    EveryCalls,
    LossAverageBelow,
    Never,
    Recovery,
    StochasticRestore,
)
from poem.parts.selection import (
    ByDiversityAndCertainty,
    ByEntropy,
    ByPLPD,
    Diverse,
    EntropyBelow,
    Equal,
    Everyone,
    FirstRound,
    NotRedundant,
    Occlusion,
    Patches,
    Pixels,
    PLPDAbove,
    Select,
    Weigh,
)
from poem.parts.statistics import FromBatch, Mixed, RunningMean, Source, Statistics
from poem.parts.step import SAM, SGD, Adam, Step
from poem.parts.teacher import MeanTeacher

__all__ = [
    "SAM",
    "SGD",
    "Adam",
    "AdaptBranch",
    "AugMix",
    "Augment",
    "AverageWithSource",
    "Batch",
    "ByDiversityAndCertainty",
    "ByEntropy",
    "ByPLPD",
    "Consistency",
    "Correction",
    "CrossEntropy",
    "Diverse",
    "EachImage",
    "Entropy",
    "EntropyBelow",
    "Equal",
    "EveryCalls",
    "Everyone",
    "Everything",
    "Exploration",
    "Explore",
    "FirstRound",
    "FisherAnchor",
    "FollowTeacher",
    "FromBatch",
    "Jitter",
    "Laplacian",
    "Lesson",
    "Look",
    "LossAverageBelow",
    "MarginalEntropy",
    "MeanTeacher",
    "Memory",
    "Mixed",
    "Never",
    "NormAffine",
    "NotRedundant",
    "Nothing",
    "Objective",
    "Occlusion",
    "Once",
    "PLPDAbove",
    "Parameters",
    "Part",
    "Patches",
    "Pixels",
    "Prior",
    "Readout",
    "Recovery",
    "Repeat",
    "RunningMean",
    "Select",
    "SoftLikelihoodRatio",
    "Source",
    "Statistics",
    "Step",
    "StochasticRestore",
    "Uncorrected",
    "Weigh",
]
