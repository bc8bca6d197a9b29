"""How certain is a prediction around its feature? ReCAP's bounds over a Gaussian region, second-hand.

Neither the paper's text nor its code could be read: the formulas are those that a later paper restates.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from poem.parts.base import Memory, Need, Outputs, Selected, inside, unprepared
from poem.parts.fields import NotNegative
from poem.parts.objective import Objective
from poem.parts.score import Score

LARGEST = 80.0
"""Of the exponents in `M`: single precision overflows at 88."""


@dataclass(frozen=True, repr=False)
class RegionalEntropy(Score):
    """An entropy over a region of features: the prediction's, plus how far the region may change it.

    The region of a sample is Gaussian around its feature, with variances `A = region * diag(v)`, `v` those of source
    features. With rows `w_k` of the last layer, `M_kj = exp((w_k - w_j)' A (w_k - w_j) / 2)`, `nu_k = sum_j p_j M_kj`
    and `q = softmax(logits + d)` it is `sum_k q_k (ln nu_k - ln p_k)`. `d_k` is `tilt * |w_k|^2`, or with None what
    the region itself gives, `w_k' A w_k / 2`.

    Paper: ReCAP (ICML 2025, arXiv 2505.20704), as a later paper restates it; `region` and `tilt` are not established.
    Differs: exponents of `M` are at most 80, where single precision would overflow.
    """

    region: NotNegative = 1.2
    tilt: NotNegative | None = 5e-4

    @property
    def needs(self) -> frozenset[Need]:
        """Source features, and the last layer that reads them."""
        return frozenset({Need.SOURCE_DATA, Need.FEATURES})

    def prepare(self, batches: Iterable[Outputs]) -> Memory:
        """`M` (C, C) and `d` (C,), from the variances of source features and the last layer."""
        seen = []
        for outputs in batches:
            if outputs.features is None:
                raise ValueError("RegionalEntropy() needs a model whose last layer is linear; none was found")
            seen.append(outputs.features.detach().double())
        if not seen:
            return {}
        wide = self.region * torch.cat(seen).var(0, correction=0)
        eye = torch.eye(len(wide), dtype=torch.float64, device=wide.device)
        with torch.no_grad():  # the last layer's weight (C, D), cut to the classes
            weight = (outputs.classify(eye) - outputs.classify(torch.zeros_like(eye[:1]))).T.double()
        scaled = weight * wide.sqrt()
        apart = torch.cdist(scaled, scaled, compute_mode="donot_use_mm_for_euclid_dist").square() / 2
        tilt = scaled.square().sum(1) / 2 if self.tilt is None else self.tilt * weight.square().sum(1)
        kind = outputs.logits.dtype
        return {"moments": apart.clamp(max=LARGEST).exp().to(kind), "tilt": tilt.to(kind)}

    def __call__(self, outputs: Outputs, memory: Memory) -> Tensor:
        """Regional entropy in nats; the plain entropy where the region is a point."""
        return self.both(outputs, memory)[0]

    def both(self, outputs: Outputs, memory: Memory) -> tuple[Tensor, Tensor]:
        """Regional entropy and regional instability `sum_k p_k ln nu_k`, (B,) each."""
        if "moments" not in memory:
            raise unprepared(self)
        log_probs = outputs.log_probs.clamp(min=torch.finfo(outputs.log_probs.dtype).min)
        spread = (log_probs.exp() @ memory["moments"]).log()  # ln nu; M is symmetric
        tilted = (outputs.log_probs + memory["tilt"]).softmax(1)
        return (tilted * (spread - log_probs)).sum(1), (log_probs.exp() * spread).sum(1)


@dataclass(frozen=True, repr=False)
class RegionConfidence(Objective):
    """Mean regional entropy plus `instability` times the regional instability over the selected samples.

    The instability bounds the divergence of predictions in the region from the sample's own.

    Paper: ReCAP (ICML 2025, arXiv 2505.20704), second-hand; see `RegionalEntropy`.
    """

    instability: NotNegative = 0.5
    score: RegionalEntropy = field(default_factory=RegionalEntropy)

    @property
    def per_sample(self) -> bool:
        """A mean over samples."""
        return True

    def __call__(self, selected: Selected) -> Tensor:
        """Weighted mean over the selection."""
        entropy, instability = self.score.both(selected.outputs, inside(selected.memory, "score"))
        return selected.mean(entropy + self.instability * instability)
