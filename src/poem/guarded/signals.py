"""What the guard sees without labels: how informative the source's and the adapted answers are, and how they differ."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from poem.parts.base import entropy


@dataclass(frozen=True)
class Signals:
    """What was seen at one batch, as plain numbers; averages are over the last `horizon` images or so."""

    source_information: float
    """Entropy of the source's mean prediction less the mean entropy of its predictions, in nats."""
    adapted_information: float
    """The same of the adapted answers; it falls where a network collapses to few classes or is sure of nothing."""
    source_balance: float
    """Entropy of the source's mean prediction alone, in nats."""
    adapted_balance: float
    disagreement: float
    """Share of answers that differ from the source's, in this batch."""
    selected: float
    """Share of the batch that was selected."""
    gradient: float
    """Norm of the last update's gradient; 0 where there was none."""
    drift: float
    """Distance of the adapted tensors from the source's, relative to the source's norm."""
    source_steadiness: float | None = None
    """Share of images that get the same answer as their mirror image, where that is looked at."""
    adapted_steadiness: float | None = None

    def as_dict(self) -> dict[str, float | None]:
        """For an event or a file."""
        return asdict(self)


@dataclass(frozen=True)
class Averages:
    """Running averages of both answers over the stream; replaced, never written into."""

    source_mean: Tensor  # (C,)
    adapted_mean: Tensor  # (C,)
    entropies: Tensor  # (2,) source, adapted
    steady: Tensor  # (2,) shares, source, adapted
    seen: Tensor  # () images

    @classmethod
    def start(cls, classes: int, device: torch.device) -> Averages:
        """Before the first batch."""
        zeros = torch.zeros(classes, device=device)
        return cls(zeros, zeros, torch.zeros(2, device=device), torch.zeros(2, device=device), zeros[0])

    def moved(self, source: Tensor, adapted: Tensor, steady: Tensor | None, horizon: float) -> Averages:
        """With the log-probabilities (B, C) of one more batch in it; rows that are not finite are left out."""
        sound = source.amax(1).isfinite() & adapted.amax(1).isfinite()
        count = sound.sum()
        share = torch.maximum(count / (self.seen + count).clamp(min=1), (count / horizon).clamp(max=1))

        def mean(rows: Tensor) -> Tensor:
            kept = sound.view(-1, *[1] * (rows.dim() - 1))
            return torch.where(kept, rows, 0).sum(0) / count.clamp(min=1)

        now = torch.stack([mean(entropy(source)), mean(entropy(adapted))])
        return Averages(
            self.source_mean + share * (mean(source.exp()) - self.source_mean),
            self.adapted_mean + share * (mean(adapted.exp()) - self.adapted_mean),
            self.entropies + share * (now - self.entropies),
            self.steady if steady is None else self.steady + share * (steady - self.steady),
            self.seen + count,
        )

    @property
    def balances(self) -> Tensor:
        """(2,) entropy of the mean prediction, source and adapted."""
        both = torch.stack([self.source_mean, self.adapted_mean])
        return entropy(both.clamp(min=1e-12).log())

    @property
    def information(self) -> Tensor:
        """(2,) how well the predictions tell the images apart, source and adapted, in nats."""
        return self.balances - self.entropies
