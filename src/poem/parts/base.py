"""What every part sees: a batch, a look at it, a lesson drawn from it.

A part answers one question and keeps nothing. What it must remember between batches lives in a `Memory` that is
handed in; asking never writes there, and `remember` returns the new values once, when the batch is over.
"""

from __future__ import annotations

import dataclasses
from abc import ABC
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol

import torch
from torch import Tensor

from poem.parts.fields import Checked

Memory = dict[str, Tensor]
"""Named tensors that a part finds again at the next batch. Reset, save and load treat them all alike."""


@dataclass(frozen=True)
class Part(Checked, ABC):
    """A frozen choice whose `repr` reads like the word in the sentence, and whose fields are checked."""

    @property
    def on_host(self) -> bool:
        """Whether it, or a part inside, decides or draws on the host, so that it cannot be recorded as a CUDA graph."""
        return any(value.on_host for value in vars(self).values() if isinstance(value, Part))

    @property
    def edits_images(self) -> Part | None:
        """It, or a part inside, if it works on images (batch, channels, height, width) alone."""
        inner = (value.edits_images for value in vars(self).values() if isinstance(value, Part))
        return next((part for part in inner if part is not None), None)

    def __repr__(self) -> str:
        """The class name, with the first setting by position and others only where they differ from the default."""
        words = []
        for index, item in enumerate(dataclasses.fields(self)):
            value = getattr(self, item.name)
            default = item.default_factory() if callable(item.default_factory) else item.default
            if index == 0:
                words.append(f"{value!r}")
            elif value != default:
                words.append(f"{item.name}={value!r}")
        return f"{type(self).__name__}({', '.join(words)})"


@dataclass
class Batch:
    """The images in hand, and the draws made for them.

    Chance is drawn once per batch and reused by every look, so that looking again changes the weights alone.
    """

    images: Tensor
    rng: torch.Generator
    size: int  # the configured batch size, which a short last batch does not change
    _drawn: dict[object, Tensor] = field(default_factory=dict, repr=False)

    def once(self, key: object, draw: Callable[[torch.Generator], Tensor]) -> Tensor:
        """The draw named `key`: made on first asking, then the same for the rest of the batch, where the images are."""
        if key not in self._drawn:
            self._drawn[key] = draw(self.rng).to(self.images.device)
        return self._drawn[key]


class Ask(Protocol):
    """Runs the network on other images with the weights of this look."""

    def __call__(self, images: Tensor, *, among: Tensor | None = None, grad: bool = False) -> Tensor:
        """Logits (B, C). Rows outside `among` do not count: they stay out of the batch statistics too."""
        ...


def _nothing() -> Batch:
    """The batch of a look that nobody will ask again."""
    return Batch(torch.empty(0), torch.Generator(), 0)


def _nobody(images: Tensor, *, among: Tensor | None = None, grad: bool = False) -> Tensor:
    """The network of a look that stands alone."""
    raise RuntimeError("this look has no network to ask")


@dataclass
class Look:
    """One pass over a batch: what the network says of every sample, with the graph that says why."""

    logits: Tensor  # (B, C), what would be answered; with a branch, both heads combined
    heads: tuple[Tensor, ...]  # (B, C) each: the network's own, then the adapt branch's
    batch: Batch = field(default_factory=_nothing, repr=False)
    ask: Ask = field(default=_nobody, repr=False)
    round: int = 0  # how many updates this batch has already had
    shown: Tensor | None = None  # the images that were looked at: the batch's own, or views of them
    features: Tensor | None = None  # (B, D), input of the last linear layer, where a correction wants it
    theta: Tensor | None = None  # the weights this look was taken with
    zeta: Tensor | None = None  # and the branch's
    record: Memory = field(default_factory=dict, repr=False)  # statistics to remember if this look is the last
    cache: dict[object, Tensor] = field(default_factory=dict, repr=False)

    @cached_property
    def log_probs(self) -> Tensor:
        """Log-probabilities (B, C)."""
        return self.logits.log_softmax(dim=1)

    @cached_property
    def probs(self) -> Tensor:
        """Probabilities (B, C), without a gradient: for choosing, weighing and remembering."""
        return self.log_probs.detach().exp()

    @cached_property
    def entropy(self) -> Tensor:
        """Entropy in nats (B,), with its gradient."""
        return entropy(self.log_probs)

    @property
    def classes(self) -> int:
        """How many classes the logits have, after any mask."""
        return self.logits.shape[1]


@dataclass
class Lesson:
    """A look, who teaches, and how much each counts: all that an objective may use."""

    look: Look
    mask: Tensor  # (B,) bool
    weights: Tensor  # (B,), no gradient
    theta: Tensor  # every moving number, flat
    source: Tensor  # where theta started
    fisher: Tensor | None = None  # importance of each number, where source data was given
    target: Tensor | None = None  # (B, C), the teacher's logits, where there is one

    def mean(self, losses: Tensor, over: Literal["selected", "batch"] = "selected") -> Tensor:
        """Weighted losses of those who teach, summed and divided by their number, or by the configured batch size."""
        total = torch.where(self.mask, self.weights * losses, 0).sum()
        return total / (self.look.batch.size if over == "batch" else self.mask.sum().clamp(min=1))


def entropy(log_probs: Tensor) -> Tensor:
    """Shannon entropy in nats along the last dimension; a probability of exactly zero adds nothing."""
    finite = log_probs.clamp(min=torch.finfo(log_probs.dtype).min)
    return -(log_probs.exp() * finite).sum(-1)


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the rows that `mask` keeps; zeros if it keeps none."""
    rows = mask.view(-1, *[1] * (values.dim() - 1))
    return torch.where(rows, values, 0).sum(0) / mask.sum().clamp(min=1)


def min_max(values: Tensor) -> Tensor:
    """Values moved to [0, 1] over the batch; all 1 where they do not differ (a batch of one, identical samples)."""
    low, high = values.min(), values.max()
    flat = high - low < 1e-12
    return torch.where(flat, 1.0, (values - low) / torch.where(flat, 1.0, high - low))
