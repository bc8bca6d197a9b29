"""Which forward pass is the answer, and which correction follows?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from poem.parts.base import Memory, Need, Outcome, Outputs, Part
from poem.parts.fields import Count, NotNegative, Share

LAST_IMAGES = 64
"""How many images are the last ones, where a batch holds fewer."""
Which = Literal["first", "before-last", "last", "teacher"]


@dataclass(frozen=True, repr=False)
class Correction(Part):
    """Turns the outputs of the answering pass into the answer; by default their logits.

    `memory` is that of before the batch; `remember` sees the same outputs as `outcome.answer` after it.
    """

    def __call__(self, outputs: Outputs, memory: Memory) -> Tensor:
        """The answer (B, C)."""
        return outputs.logits


@dataclass(frozen=True, repr=False)
class Uncorrected(Correction):
    """The logits as they are."""


@dataclass(frozen=True, repr=False)
class Prior(Correction):
    """Corrects by the batch's smoothed mean prediction: the logits times it, or with `"log"` plus its logarithm.

    A combined answer has no logits of its own; its log-probabilities are centred first, because a factor acts on the
    sign.

    Paper: ROID (Marsden et al., WACV 2024), prior correction.
    """

    by: Literal["factor", "log"] = "factor"

    def __call__(self, outputs: Outputs, memory: Memory) -> Tensor:
        """Logits that favour the classes frequent in the batch."""
        mean = outputs.probs.mean(0)
        smooth = max(1 / len(outputs.logits), 1 / outputs.classes) / mean.max()
        prior = (mean + smooth) / (1 + smooth * outputs.classes)
        logits = outputs.logits - outputs.logits.mean(1, keepdim=True) if outputs.combined else outputs.logits
        return logits * prior if self.by == "factor" else logits + prior.log()


@dataclass(frozen=True, repr=False)
class LocalPrior(Correction):
    """Adds what the last images say about which classes to expect, beyond their share in the stream.

    The prior is the smoothed mean prediction of the last 64 images or of the batch, the larger of the two, over that of
    the last `horizon`; `power` times its logarithm is added. Where classes come in runs it is far from 1, elsewhere
    near 1; a network that predicts few classes all along is not made to predict fewer.

    Paper: none; the smoothing is that of ROID's prior correction (Marsden et al., WACV 2024).
    """

    power: NotNegative = 2.0
    horizon: Count = 1024

    def start(self, outputs: Outputs) -> Memory:
        """No predictions seen."""
        zeros = outputs.probs.new_zeros(outputs.classes)
        return {"near": zeros, "far": zeros, "seen": zeros[0]}

    def __call__(self, outputs: Outputs, memory: Memory) -> Tensor:
        """Log-probabilities that favour the classes frequent now; as they are in the first batch."""
        near = self._moved(memory["near"], outputs, memory["seen"], LAST_IMAGES)
        count = max(len(outputs.logits), LAST_IMAGES)
        shift = _smoothed(near, count).log() - _smoothed(memory["far"], count).log()
        return outputs.log_probs + torch.where(memory["seen"] > 0, self.power * shift, 0.0)

    def remember(self, outcome: Outcome, memory: Memory) -> Memory:
        """The mean predictions, moved by the batch's."""
        outputs = outcome.answer or outcome.last
        near = self._moved(memory["near"], outputs, memory["seen"], LAST_IMAGES)
        far = self._moved(memory["far"], outputs, memory["seen"], self.horizon)
        return {"near": near, "far": far, "seen": memory["seen"] + len(outputs.logits)}

    def _moved(self, mean: Tensor, outputs: Outputs, seen: Tensor, horizon: int) -> Tensor:
        """A running mean over so many images, with the batch in it."""
        count = len(outputs.logits)
        share = (count / (seen + count)).clamp(min=min(1.0, count / horizon))
        return mean + share * (outputs.probs.mean(0) - mean)


def _smoothed(mean: Tensor, count: int) -> Tensor:
    """A mean prediction over so many images, mixed with the uniform one where no class stands out."""
    smooth = max(1 / count, 1 / len(mean)) / mean.max().clamp(min=1e-12)
    return (mean + smooth) / (1 + smooth * len(mean))


@dataclass(frozen=True, repr=False)
class Recentre(Correction):
    """Subtracts the stream's mean feature before the last linear layer; the batch in hand is part of the mean.

    The mean is over all images so far or, with `momentum`, a moving average that keeps that share at each batch and
    starts at zero.

    Paper: NEO (ICLR 2026).
    Reference code: awesomealex1/NEO (no licence).
    Differs: with an adapt branch it is an error, since two heads have two means; inside `adapter.frozen()` the batch is
    part of the mean too, which is then not kept.
    """

    momentum: Share | None = None

    @property
    def needs(self) -> frozenset[Need]:
        """Features to centre."""
        return frozenset({Need.FEATURES})

    def start(self, outputs: Outputs) -> Memory:
        """No mean yet."""
        if outputs.features is None:
            raise ValueError("Recentre() needs a model whose last layer is linear; none was found")
        mean = outputs.features.detach().new_zeros(outputs.features.shape[1], dtype=outputs.logits.dtype)
        return {"mean": mean, "count": mean.new_zeros(())}

    def __call__(self, outputs: Outputs, memory: Memory) -> Tensor:
        """The last layer's logits for centred features."""
        if outputs.combined:
            raise ValueError("Recentre() centres the features of one head; use it in a recipe without branch=")
        assert outputs.features is not None
        return outputs.classify(outputs.features - self._moved(outputs, memory)["mean"])

    def remember(self, outcome: Outcome, memory: Memory) -> Memory:
        """The mean with this batch."""
        return {} if outcome.answer is None else self._moved(outcome.answer, memory)

    def _moved(self, outputs: Outputs, memory: Memory) -> Memory:
        """The mean that this batch is part of."""
        assert outputs.features is not None
        features = outputs.features.detach().to(memory["mean"].dtype)
        count = memory["count"] + len(features)
        share = len(features) / count if self.momentum is None else 1 - self.momentum
        return {"mean": memory["mean"] + share * (features.mean(0) - memory["mean"]), "count": count}


@dataclass(frozen=True, repr=False)
class Laplacian(Correction):
    """Makes neighbours in feature space agree: the Laplacian-adjusted maximum-likelihood estimate. Answers log Y.

    `affinity` is `"rbf"` (bandwidth: mean distance to the `neighbours`-th nearest, self counted first, or to the
    farthest where there are fewer images), `"knn"` (self left out, symmetrised) or `"linear"`. One or two images have
    no neighbourhood and are answered as they are.

    Paper: LAME (Boudiaf et al., CVPR 2022).
    Reference code: the benchmark of Marsden et al. (MIT).
    Differs: answers log-probabilities, and never asks for more neighbours than there are.
    """

    neighbours: Count = 5
    affinity: Literal["rbf", "knn", "linear"] = "rbf"
    steps: Count = 100

    @property
    def needs(self) -> frozenset[Need]:
        """Features to find neighbours by, and the host, which stops when the energy is constant."""
        return frozenset({Need.FEATURES, Need.HOST})

    def __call__(self, outputs: Outputs, memory: Memory) -> Tensor:
        """A fixed point of `Y = softmax(log p + K Y)`, stopped when its energy is constant."""
        if outputs.features is None:
            raise ValueError("Laplacian() needs a model whose last layer is linear; none was found")
        if len(outputs.logits) <= 2:
            return outputs.log_probs
        unary = -(outputs.probs + 1e-10).log()
        kernel = self._kernel(torch.nn.functional.normalize(outputs.features.detach().to(unary.dtype), dim=1))
        answer, energy = (-unary).log_softmax(1), torch.inf
        for step in range(self.steps):
            pairwise = kernel @ answer.exp()
            answer = (pairwise - unary).log_softmax(1)
            y = answer.exp()
            before, energy = energy, float((unary * y - pairwise * y + y * y.clamp(min=1e-20).log()).sum())
            if step > 1 and abs(energy - before) <= 1e-8 * abs(before):
                break
        return answer

    def _kernel(self, features: Tensor) -> Tensor:
        """Affinities (B, B)."""
        if self.affinity == "linear":
            return features @ features.T
        distance = torch.cdist(features, features, compute_mode="donot_use_mm_for_euclid_dist")
        if self.affinity == "rbf":
            near = min(self.neighbours, len(features))  # the image itself is the first, at distance 0
            width = distance.topk(near, largest=False).values[:, -1].mean()
            return (-distance.square() / (2 * width.square()).clamp(min=1e-20)).exp()
        near = min(self.neighbours, len(features) - 1)
        nearest = distance.fill_diagonal_(torch.inf).topk(near, largest=False).indices
        graph = torch.zeros_like(distance).scatter_(1, nearest, 1.0)
        return 0.5 * (graph + graph.T)


@dataclass(frozen=True, repr=False)
class Readout(Part):
    """The answer is of pass `which` (before the first update, before the last, after the last, or the teacher's).

    `correct` then turns it into what the caller gets.
    """

    which: Which = "first"
    correct: Correction = Uncorrected()
