"""Is there an adapt branch, and how are both heads combined?"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Annotated, Literal

import torch
from torch import Tensor

from poem.parts.base import Part
from poem.parts.fields import Count, Range
from poem.parts.objective import CrossEntropy, Objective


@dataclass(frozen=True, repr=False)
class AdaptBranch(Part):
    """A second deep part beside the frozen one. Only its norm layers are its own; the answer combines both heads.

    `depth` counts the stages (or blocks) it spans. `alpha` is the source's share of the answer. `combine` mixes
    probabilities as in the paper, or logits as in the published code.

    Paper: POEM, Eq. 5 and 6.
    Differs: the deep part is not copied; the features are doubled at the split and each norm layer after it treats the
    two halves with its own scale and shift.
    """

    depth: Count = 1
    alpha: Annotated[float, Range(at_least=0, at_most=1, hint="it is the source's share of the answer")] = 0.5
    combine: Literal["probabilities", "logits"] = "probabilities"
    teach: Objective = field(default_factory=CrossEntropy)

    def together(self, source: Tensor, branch: Tensor) -> Tensor:
        """Both heads as one answer (B, C): the log of the combined probability, or the mean logits."""
        if self.combine == "logits":
            return self.alpha * source + (1 - self.alpha) * branch
        if self.alpha in (0.0, 1.0):
            return (source if self.alpha else branch).log_softmax(1)
        mine = source.log_softmax(1) + math.log(self.alpha)
        return torch.logaddexp(mine, branch.log_softmax(1) + math.log(1 - self.alpha))
