"""What the guard sees without labels: how steady and how balanced the source's and the adapted answers are."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from poem.parts.base import entropy
from poem.parts.runs import moved_runs, shared_runs, start_runs

HALVINGS, MANY = 20, 2**20
"""Of the interval in which a temperature is looked for; and numbers of which several multiples are not held at once."""
RUNS_OF = ("recent", "before", "near", "far")
OF_BOTH = ("classes", "steady", "lately", "lately_steady", "runs", *RUNS_OF)
LATELY = 128
"""Images over which the source's latest answers are averaged, to see it collapse soon after a shift."""
ONE_LATELY, FALL = 0.9, 0.2
"""A class's share of those from which on they are one answer; and the loss of balance that is a fall, as a share of the
most balance there is."""


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


def no_signals() -> Signals:
    """Before the source has answered any batch."""
    return Signals(*[0.0] * len(fields(Signals)))


def stopped_signals(drift: float) -> Signals:
    """Of a batch that the source alone was asked about, because the guard was stopped by hand."""
    return replace(
        no_signals(), source_steadiness=None, adapted_steadiness=None, source_balance=None, adapted_balance=None,
        runs=None, adapted_runs=None, evidence=None, drift=drift,
    )  # fmt: skip


class AverageNumbers(NamedTuple):
    """What a verdict is made of: the numbers of `Averages.numbers`, in its order."""

    source_steadiness: float
    adapted_steadiness: float
    source_balance: float
    adapted_balance: float
    runs: float
    adapted_runs: float
    shared_runs: float
    """The runs that both see."""
    most_answered: float
    """Share of the class that the source answers most."""
    images: float
    fell: float
    """1 where the source's answers were many and are one now, else 0."""
    gained_lately: float
    """How much more balanced the adapted answers to the last images are than the source's."""
    steady_lately: float
    """How steady the adapted answers to the last images are."""


@dataclass(frozen=True)
class Averages:
    """Running averages of both answers over the stream; replaced, never written into."""

    classes: Tensor  # (2, C) shares of the classes answered, by source and adapted
    steady: Tensor  # (2,) shares of images answered as their shifted copies, by source and adapted
    lately: Tensor  # (2, C) and (2,): both, over the last `LATELY` images
    lately_steady: Tensor
    fell: Tensor  # () 1 where the source's answers were many and are one now, else 0
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
        return cls(zeros, zeros[:, 0], zeros, zeros[:, 0], zeros[0, 0], zeros[0, 0], zeros[:, 0], **start)

    def moved(self, source: Tensor, adapted: Tensor, steady: Tensor | None, horizon: float) -> Averages:
        """With the log-probabilities (B, C) of one more batch in it; rows that are not finite are left out."""
        sound = (source.amax(1).isfinite() & adapted.amax(1).isfinite())[:, None]
        count = sound.sum()
        share = torch.maximum(count / (self.seen + count).clamp(min=1), (count / horizon).clamp(max=1))
        every = torch.arange(source.shape[1], device=source.device)
        answers = (torch.stack([source, adapted]).argmax(2)[:, :, None] == every) & sound  # (2, B, C)
        classes = answers.sum(1) / count.clamp(min=1)
        soon = torch.maximum(share, (count / LATELY).clamp(max=1))
        moved, moved_lately = self.steady, self.lately_steady
        if steady is not None:
            moved, moved_lately = moved + share * (steady - moved), moved_lately + soon * (steady - moved_lately)
        runs, held = moved_runs({name: getattr(self, name) for name in RUNS_OF}, answers.float(), self.seen)
        found = Averages(
            self.classes + share * (classes - self.classes), moved, self.lately + soon * (classes - self.lately),
            moved_lately, self.fell, self.seen + count, runs, **held,
        )  # fmt: skip
        return replace(found, fell=found._fallen())

    def _fallen(self) -> Tensor:
        """Whether the source's answers have become one: seen at once, and until they are several again.

        One that gave one answer from the first image on has not fallen; it may be right.
        """
        lost = self.balances[0] - self.lately_balances[0] > FALL * math.log(self.classes.shape[1])
        return ((self.lately[0].max() > ONE_LATELY) & ((self.fell > 0) | lost)).to(self.fell)

    def as_source(self) -> Averages:
        """With the source's answers in the place of the adapted ones, as at the start of a stream."""
        twice = {name: getattr(self, name)[:1].repeat(2, *[1] * (getattr(self, name).dim() - 1)) for name in OF_BOTH}
        return replace(self, **twice)

    def numbers(self) -> Tensor:
        """What a verdict is made of, as one tensor; `AverageNumbers` names each."""
        gained = self.lately_balances[1] - self.lately_balances[0]
        rest = [shared_runs(self.runs), self.classes[0].max(), self.seen, self.fell, gained, self.lately_steady[1]]
        return torch.cat([self.steady, self.balances, self.runs, torch.stack(rest)])

    @property
    def balances(self) -> Tensor:
        """(2,) entropy of the classes answered, by source and adapted, in nats."""
        return entropy(self.classes.clamp(min=1e-12).log())

    @property
    def lately_balances(self) -> Tensor:
        """(2,) the same of the last images."""
        return entropy(self.lately.clamp(min=1e-12).log())


def shifted(images: Tensor) -> Tensor:
    """Images moved by a sixteenth of their size, down and to the left; the border is repeated."""
    down, left = (max(1, side // 16) for side in images.shape[2:])
    wide = F.pad(images, (left, left, down, down), mode="replicate")
    return wide[:, :, : images.shape[2], 2 * left :].contiguous()


def as_sure_as(log_probs: Tensor, other: Tensor) -> Tensor:
    """Log-probabilities with the temperature at which their mean entropy is the other's, found by bisection.

    Two networks are averaged fairly only if neither is surer than the other by habit. On a GPU, where each operation is
    a launch, four halvings are made at a time.
    """
    halvings = 4 if log_probs.is_cuda and log_probs.numel() <= MANY else 1
    parts, target = 2**halvings, _mean_entropy(other)
    low, width = log_probs.new_full((), -3.0), 7.0  # of the logarithm of the factor
    inner = torch.arange(1, parts, device=log_probs.device) / parts
    for _ in range(HALVINGS // halvings):
        factors = (low + width * inner).exp()
        unsure = _mean_entropy((log_probs * factors[:, None, None]).log_softmax(2)) > target
        width /= parts
        low = low + width * unsure.sum()  # entropy falls as the factor grows
    return (log_probs * (low + width / 2).exp()).log_softmax(1)


def _mean_entropy(log_probs: Tensor) -> Tensor:
    """Over the rows (..., B, C) that are finite."""
    values = entropy(log_probs)
    sound = log_probs.amax(-1).isfinite()
    return torch.where(sound, values, 0).sum(-1) / sound.sum(-1).clamp(min=1)
