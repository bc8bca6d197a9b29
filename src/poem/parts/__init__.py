"""The parts that recipes are made of, one file per question.

For example `Recipe(select=EntropyBelow(0.5) & PLPDAbove(0.1), weigh=ByEntropy(0.4))`.
"""

from __future__ import annotations

from typing import Any

from poem.parts.augment import Augment, AugMix, Jitter
from poem.parts.bank import MemoryBank
from poem.parts.base import Batch, Forward, Memory, Need, Outcome, Outputs, Part, Selected, Update, inside
from poem.parts.bootstrap import LowFrequencies, PatchNoise, SelfBootstrap
from poem.parts.branch import AdaptBranch
from poem.parts.destruction import Occlusion, Patches, Pixels
from poem.parts.exploration import Exploration, Explore, Once, Repeat
from poem.parts.matching import MatchEntropy
from poem.parts.objective import (
    ConservativeEntropy,
    Consistency,
    CrossEntropy,
    Entropy,
    FisherAnchor,
    FollowSource,
    FollowTeacher,
    MarginalEntropy,
    NearSource,
    Objective,
    RobustCrossEntropy,
    SiameseEntropy,
    SoftLikelihoodRatio,
)
from poem.parts.parameters import Everything, NormAffine, Nothing, Parameters
from poem.parts.ranking import RankedEntropy
from poem.parts.readout import Correction, Laplacian, LocalPrior, Prior, Readout, Recentre, Uncorrected
from poem.parts.recovery import (
    AverageWithSource,
    EachImage,
    EveryCalls,
    LossAverageBelow,
    MomentumFilter,
    Never,
    Recovery,
    StochasticRestore,
)
from poem.parts.region import RegionalEntropy, RegionConfidence
from poem.parts.score import OpinionEntropy, Score, SoftmaxEntropy, TemperedEntropy
from poem.parts.selection import AfterImages, Diverse, EntropyBelow, Everyone, NotRedundant, PLPDAbove, Select
from poem.parts.statistics import FromBatch, Mixed, Robust, RunningMean, Source, Statistics
from poem.parts.step import SAM, SGD, Adam, Clipped, Step
from poem.parts.stream_statistics import Blended, Components, Significant
from poem.parts.teacher import MeanTeacher, SlowTeacher, Teacher, WaryTeacher
from poem.parts.views import View, Views
from poem.parts.weighting import ByDiversityAndCertainty, ByEntropy, ByPLPD, Equal, FirstRound, Weigh

__all__ = [
    "SAM",
    "SGD",
    "Adam",
    "AdaptBranch",
    "AfterImages",
    "AugMix",
    "Augment",
    "AverageWithSource",
    "Batch",
    "Blended",
    "ByDiversityAndCertainty",
    "ByEntropy",
    "ByPLPD",
    "Clipped",
    "Components",
    "ConservativeEntropy",
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
    "FollowSource",
    "FollowTeacher",
    "Forward",
    "FromBatch",
    "Jitter",
    "Laplacian",
    "LocalPrior",
    "LossAverageBelow",
    "LowFrequencies",
    "MarginalEntropy",
    "MatchEntropy",
    "MeanTeacher",
    "Memory",
    "MemoryBank",
    "Mixed",
    "MomentumFilter",
    "NearSource",
    "Need",
    "Never",
    "NormAffine",
    "NotRedundant",
    "Nothing",
    "Objective",
    "Occlusion",
    "Once",
    "OpinionEntropy",
    "Outcome",
    "Outputs",
    "PLPDAbove",
    "Parameters",
    "Part",
    "PatchNoise",
    "Patches",
    "Pixels",
    "Prior",
    "RankedEntropy",
    "Readout",
    "Recentre",
    "Recovery",
    "RegionConfidence",
    "RegionalEntropy",
    "Repeat",
    "Robust",
    "RobustCrossEntropy",
    "RunningMean",
    "Score",
    "Select",
    "Selected",
    "SelfBootstrap",
    "SiameseEntropy",
    "Significant",
    "SlowTeacher",
    "SoftLikelihoodRatio",
    "SoftmaxEntropy",
    "Source",
    "Statistics",
    "Step",
    "StochasticRestore",
    "Teacher",
    "TemperedEntropy",
    "Uncorrected",
    "Update",
    "View",
    "Views",
    "WaryTeacher",
    "Weigh",
    "inside",
]
_FORMER = {"Look": "Outputs", "Lesson": "Selected"}
"""Former names, which still work."""


def __getattr__(name: str) -> Any:
    """The part behind a former name."""
    if name in _FORMER:
        return globals()[_FORMER[name]]
    raise AttributeError(f"module 'poem.parts' has no attribute {name!r}")
