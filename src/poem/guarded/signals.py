"""What the guard sees without labels: how steady and how balanced the source's and the adapted answers are."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from poem.parts.base import entropy
from poem.parts.runs import moved_runs, start_runs

RUNS_OF = ("recent", "before", "near", "far")
OF_BOTH = ("classes", "steady", "runs", *RUNS_OF)


@dataclass(frozen=True)
class Signals:
    """What was seen at one batch, as plain numbers; averages are over the last `horizon` images or so.

    While the guard is stopped by hand the source alone is asked, and what compares it with anything is None.
    """

    source_steadiness: float | None
    """Share of images that the source answers as it answers them shifted by a few pixels."""
    adapted_steadiness: float | None
    """The same of the adapted answers; it falls where the statistics are wrong."""
    source_balance: float | None
    """Entropy of the classes that the source answers, in nats."""
    adapted_balance: float | None
    """The same of the adapted answers; it falls where a network collapses to few classes."""
    runs: float | None
    """How much likelier neighbours in the stream get the same answer from the source than images further apart."""
    adapted_runs: float | None
    """The same of the adapted answers; below the source's where a network answers the same whatever comes."""
    evidence: float | None
    """For the adapted answers where positive, for the source's where negative; what the verdict is made of."""
    disagreement: float
    """Share of answers that differ from the source's, in this batch; NaN where the source did not answer it."""
    selected: float
    """Share of the batch that was selected."""
    gradient: float
    """Norm of the last update's gradient; 0 where there was none."""
    drift: float
    """Distance of the adapted tensors from the source's, relative to the source's norm."""

    def as_dict(self) -> dict[str, float | None]:
        """For an event or a file."""
        return asdict(self)


@dataclass(frozen=True)
class Averages:
    """Running averages of both answers over the stream; replaced, never written into."""

    classes: Tensor  # (2, C) shares of the classes answered, by source and adapted
    steady: Tensor  # (2,) shares of images answered as their shifted copies, by source and adapted
    seen: Tensor  # () images
    runs: Tensor  # (2,) of classes, in the answers of source and adapted
    recent: Tensor  # (2, C) and what they are made of
    before: Tensor  # (2, C)
    near: Tensor  # (2,)
    far: Tensor  # (2,)

    @classmethod
    def start(cls, classes: int, device: torch.device) -> Averages:
        """Before the first batch."""
        zeros = torch.zeros(2, classes, device=device)
        start = {name: torch.stack([value, value]) for name, value in start_runs(zeros).items()}
        return cls(zeros, zeros[:, 0], zeros[0, 0], zeros[:, 0], **start)

    def moved(self, source: Tensor, adapted: Tensor, steady: Tensor | None, horizon: float) -> Averages:
        """With the log-probabilities (B, C) of one more batch in it; rows that are not finite are left out."""
        sound = (source.amax(1).isfinite() & adapted.amax(1).isfinite())[:, None]
        count = sound.sum()
        share = torch.maximum(count / (self.seen + count).clamp(min=1), (count / horizon).clamp(max=1))
        both = [F.one_hot(each.argmax(1), each.shape[1]) * sound for each in (source, adapted)]
        classes = torch.stack([each.sum(0) for each in both]) / count.clamp(min=1)
        moved = self.steady if steady is None else self.steady + share * (steady - self.steady)
        each = [
            moved_runs({name: getattr(self, name)[place] for name in RUNS_OF}, answers.float(), self.seen)
            for place, answers in enumerate(both)
        ]
        runs = torch.stack([now for now, _ in each])
        held = {name: torch.stack([new[name] for _, new in each]) for name in RUNS_OF}
        return Averages(self.classes + share * (classes - self.classes), moved, self.seen + count, runs, **held)

    def as_source(self) -> Averages:
        """With the source's answers in the place of the adapted ones, as at the start of a stream."""
        twice = {name: getattr(self, name)[:1].repeat(2, *[1] * (getattr(self, name).dim() - 1)) for name in OF_BOTH}
        return replace(self, **twice)

    @property
    def balances(self) -> Tensor:
        """(2,) entropy of the classes answered, by source and adapted, in nats."""
        return entropy(self.classes.clamp(min=1e-12).log())


def shifted(images: Tensor) -> Tensor:
    """Images moved by a sixteenth of their size, down and to the left; the border is repeated."""
    down, left = (max(1, side // 16) for side in images.shape[2:])
    wide = F.pad(images, (left, left, down, down), mode="replicate")
    return wide[:, :, : images.shape[2], 2 * left :].contiguous()


def as_sure_as(log_probs: Tensor, other: Tensor) -> Tensor:
    """Log-probabilities with the temperature at which their mean entropy is the other's, found by bisection.

    Two networks are averaged fairly only if neither is surer than the other by habit.
    """
    target = _mean_entropy(other)
    low, high = log_probs.new_tensor(-3.0), log_probs.new_tensor(4.0)  # of the logarithm of the factor
    for _ in range(20):
        middle = (low + high) / 2
        unsure = _mean_entropy((log_probs * middle.exp()).log_softmax(1)) > target
        low, high = torch.where(unsure, middle, low), torch.where(unsure, high, middle)
    return (log_probs * ((low + high) / 2).exp()).log_softmax(1)


def _mean_entropy(log_probs: Tensor) -> Tensor:
    """Over the rows that are finite."""
    values = entropy(log_probs)
    sound = log_probs.amax(1).isfinite()
    return torch.where(sound, values, 0).sum() / sound.sum().clamp(min=1)
