"""What every part sees: a batch, the outputs of a forward pass over it, the selected samples.

A part answers one question and keeps nothing. What it must know at the next batch lives in a `Memory` that is handed
in: `start` makes it, `remember` returns its new values once, when the batch is over, and calling the part never writes
there.
"""

from __future__ import annotations

import dataclasses
from abc import ABC
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from types import FunctionType
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from poem.parts.fields import Checked, own_fields

Memory: TypeAlias = dict[str, Tensor]
"""Named tensors that a part finds again at the next batch. Reset, save and load treat them all alike."""


class Need(Enum):
    """What a part needs beyond logits; `Part.needs` says which, and one walk over the recipe collects them."""

    FEATURES = "the input of the last linear layer"
    SOURCE_DATA = "source images, on which `prepare` is called before the stream"
    UNIT_RANGE = "images in [0, 1], with mean and std inside"
    PICTURES = "images of shape (batch, channels, height, width)"
    HOST = "decisions or random draws on the host, which a CUDA graph cannot repeat"
    TOKENS = "a vision transformer with a class token: its attention to patches, and passes with fewer of them"
    SEVERAL_LOGITS = "a model with more than one logit per image"


@dataclass(frozen=True)
class Part(Checked, ABC):
    """A frozen choice of a recipe, whose `repr` is the text that makes it again and whose fields are checked.

    Any part may keep memory (`start`, `remember`), say what it needs (`needs`), prepare itself on source data
    (`prepare`) and bring tensors that are trained beside the network's own (`trainable`, `lr_factor`).
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Refuse a field that would hide a method or a property of the classes it derives from.

        Raises:
            TypeError: There is one, such as a selection's own `margin`.
        """
        super().__init_subclass__(**kwargs)
        for name in own_fields(cls):
            for base in cls.__mro__[1:]:
                if isinstance(base.__dict__.get(name), FunctionType | property):
                    raise TypeError(
                        f"expected a field of {cls.__name__} under a name of its own, got {name!r}, which hides "
                        f"{base.__name__}.{name}; call it otherwise, as in own_{name}"
                    )

    @property
    def needs(self) -> frozenset[Need]:
        """What the part itself needs; parts inside it say so for themselves."""
        return frozenset()

    @property
    def further_passes(self) -> Mapping[object, tuple[int, int]]:
        """Forward and backward passes over the batch that a call takes, by the key they are cached under."""
        return {}

    def start(self, outputs: Outputs) -> Memory:
        """The memory before the first batch, whose outputs tell the number of classes."""
        return {}

    def remember(self, outcome: Outcome, memory: Memory) -> Memory:
        """New values of the memory when a batch is over; what is left out stays."""
        return {}

    def prepare(self, batches: Iterable[Outputs]) -> Memory:
        """Memory measured on source images before the stream, each batch with a gradient; no reset forgets it."""
        return {}

    def trainable(self, outputs: Outputs) -> Memory:
        """An objective's own tensors, which the step trains with the recipe's loss, as before the first batch."""
        return {}

    def lr_factor(self, family: str) -> float:
        """The learning rate of `trainable` as a multiple of the recipe's, for a network of this family."""
        return 1.0

    def constrain(self, name: str, tensor: Tensor, family: str) -> Tensor:
        """A tensor of `trainable` after a step, moved to where it may be; by default as it is."""
        return tensor

    @property
    def places(self) -> Iterator[tuple[str, Part]]:
        """The part and all parts inside it, each with its place: the names of the fields that lead to it."""
        yield "", self
        for name, value in vars(self).items():
            if isinstance(value, Part):
                for place, part in value.places:
                    yield f"{name}.{place}".rstrip("."), part

    def __repr__(self) -> str:
        """The class name, with the first setting by position and others only where they differ from the default.

        A first setting that can only be given by name is one of the others.

        A part of another package has its module before the name, `package.module:Mine(0.5)`, so that the text makes it
        again elsewhere and equal names of two packages do not look equal.
        """
        words = []
        for index, item in enumerate(dataclasses.fields(self)):
            value = getattr(self, item.name)
            default = item.default_factory() if callable(item.default_factory) else item.default
            if index == 0 and not item.kw_only:
                words.append(f"{value!r}")
            elif value != default:
                words.append(f"{item.name}={value!r}")
        return f"{_written_name(type(self))}({', '.join(words)})"


def _written_name(kind: type) -> str:
    """The name of a part's class in text, with its module where that is another package's and can be imported."""
    importable = kind.__qualname__ == kind.__name__ and kind.__module__ not in ("__main__", "builtins")
    own = kind.__module__.partition(".")[0] == __name__.partition(".")[0]
    return kind.__name__ if own or not importable else f"{kind.__module__}:{kind.__name__}"


def unprepared(part: Part) -> ValueError:
    """The error of a part that was not prepared on source images."""
    name = type(part).__name__
    return ValueError(f"{name}() needs source images; pass source_data=, or in a cell source_images= above 0")


def inside(memory: Mapping[str, Tensor], name: str) -> Memory:
    """The memory of the part in field `name`, for a part that calls it."""
    prefix = f"{name}."
    return {key.removeprefix(prefix): tensor for key, tensor in memory.items() if key.startswith(prefix)}


@dataclass
class Batch:
    """The images in hand, and the random draws made for them.

    A draw is made once per batch and reused by every forward pass, so that between two passes only the weights differ.
    """

    images: Tensor
    rng: torch.Generator
    size: int  # the configured batch size, which a short last batch does not change
    _drawn: dict[object, Tensor] = field(default_factory=dict, repr=False)

    def once(self, key: object, draw: Callable[[torch.Generator], Tensor]) -> Tensor:
        """The draw named `key`: made at the first call, the same for the rest of the batch, on the images' device."""
        if key not in self._drawn:
            self._drawn[key] = draw(self.rng).to(self.images.device)
        return self._drawn[key]


class Forward(Protocol):
    """Runs the network on other images with the weights of some outputs."""

    def __call__(
        self,
        images: Tensor,
        *,
        among: Tensor | None = None,
        grad: bool = False,
        features: bool = False,
        keep: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, C). Rows outside `among` do not count, and stay out of the batch statistics too.

        With `features` the input (B, D) of the last linear layer instead, of the network's own head, for a part that
        needs features. `keep` (B, K) are the patches that a vision transformer is shown, for a part that needs tokens.
        """
        ...


def _no_batch() -> Batch:
    """The batch of outputs that were made by hand."""
    return Batch(torch.empty(0), torch.Generator(), 0)


def _no_network(
    images: Tensor,
    *,
    among: Tensor | None = None,
    grad: bool = False,
    features: bool = False,
    keep: Tensor | None = None,
) -> Tensor:
    """The network of outputs that were made by hand."""
    raise RuntimeError("these outputs have no network for a further forward pass")


def _no_head(features: Tensor) -> Tensor:
    """The last linear layer of outputs without features."""
    raise RuntimeError("these outputs have no last linear layer; does the part say that it needs features?")


@dataclass
class Outputs:
    """What one forward pass over a batch gave for every sample, with its graph."""

    logits: Tensor  # (B, C), what would be answered; with a branch, both heads combined (see `combined`)
    heads: tuple[Tensor, ...]  # (B, C) raw logits each: the network's own, then the adapt branch's
    batch: Batch = field(default_factory=_no_batch, repr=False)
    forward: Forward = field(default=_no_network, repr=False)
    round: int = 0  # how many updates this batch has already had
    images: Tensor | None = None  # what the network saw: the batch's images, or views of them
    features: Tensor | None = None  # (B, D), input of the last linear layer, where a part needs it
    theta: Tensor | None = None  # the adapted tensors of this pass, flat
    branch: Tensor | None = None  # and the branch's
    sample_rows: Memory = field(default_factory=dict, repr=False)  # both (B, P), a row per sample, if the step asks
    record: Memory = field(default_factory=dict, repr=False)  # statistics to remember if this pass is the last
    classify: Callable[[Tensor], Tensor] = field(default=_no_head, repr=False)  # logits of other features (B, D)
    source: Tensor | None = None  # (B, C) logits of the copy with the source's statistics, where there is one
    scale: tuple[Tensor, Tensor] | None = None  # mean and std (1, C, 1, 1) by which the network normalises images
    attention: Tensor | None = None  # (B, T) of the class token to each patch, where a part needs tokens
    family: str = "convolutional"  # or "transformer", for constants that differ
    cache: dict[object, Tensor] = field(default_factory=dict, repr=False)

    @property
    def combined(self) -> bool:
        """Whether `logits` combine two heads; with `AdaptBranch()` they are then log-probabilities."""
        return len(self.heads) > 1

    @cached_property
    def log_probs(self) -> Tensor:
        """Log-probabilities (B, C)."""
        return self.logits.log_softmax(dim=1)

    @cached_property
    def probs(self) -> Tensor:
        """Probabilities (B, C), without a gradient: for selecting, weighting and remembering."""
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
class Selected:
    """Outputs, which samples are selected, and how much each counts: all that an objective may use."""

    outputs: Outputs
    mask: Tensor  # (B,) bool
    weights: Tensor  # (B,), no gradient
    theta: Tensor  # every adapted number, flat
    source: Tensor  # where theta started
    target: Tensor | None = None  # (B, C), the teacher's logits, where there is one
    memory: Memory = field(default_factory=dict)  # the objective's own
    trained: Memory = field(default_factory=dict)  # the objective's own trainable tensors
    told: Memory = field(default_factory=dict)  # what a teacher tells beside its target
    sizes: tuple[int, ...] = ()  # how many numbers of theta are of each adapted tensor

    def mean(self, losses: Tensor, over: Literal["selected", "batch"] = "selected", *, least: float = 0.0) -> Tensor:
        """Weighted losses of the selected samples, summed and divided by their number or the configured batch size.

        An objective that passes `over="batch"` or `least` must return `"batch"` from `divisor`; `Clipped` then
        refuses it.

        Args:
            losses: One for each sample (B,).
            over: What the sum is divided by.
            least: Their number counts as at least this share of the configured batch size. With `over="batch"` it has
                no effect.
        """
        total, size = torch.where(self.mask, self.weights * losses, 0).sum(), self.outputs.batch.size
        return total / (size if over == "batch" else self.mask.sum().clamp(min=max(1, least * size)))

    def inside(self, name: str) -> Selected:
        """The same for the objective in field `name`, with that one's memory and tensors."""
        return dataclasses.replace(self, memory=inside(self.memory, name), trained=inside(self.trained, name))


@dataclass
class Update:
    """One update: the outputs and the selected samples it was made of, its loss, and whether it was applied."""

    outputs: Outputs
    mask: Tensor  # (B,) bool
    loss: Tensor
    gradients: dict[str, Tensor]
    applied: Tensor  # () bool: some sample was selected and every number is finite
    step_memory: dict[str, Memory] = field(default_factory=dict)  # what `Step.join` remembers, by group


@dataclass
class Outcome:
    """What a batch did, when it is over."""

    first: Outputs
    last: Outputs
    updates: list[Update]
    selections: list[Tensor]  # (B,) bool, one for each time samples were selected
    target: Tensor | None = None  # the teacher's logits, where there is one
    answer: Outputs | None = None  # the pass that is answered with

    def after_updates(self, change: Callable[[Outputs, Tensor], Memory], memory: Memory) -> Memory:
        """What `change` makes of the last update that was applied, or of the first outputs where none was tried.

        Decided on the device: `change` is called for each update and the results are selected by `applied`.
        """
        tried = [(each.outputs, each.mask, each.applied) for each in self.updates]
        finite = self.last.logits.isfinite().all()
        result: Memory = {}
        for outputs, mask, applied in tried or [(self.first, mask, finite) for mask in self.selections]:
            new = change(outputs, mask)
            held = {**memory, **result}
            result |= {key: torch.where(applied, value.detach(), held[key]) for key, value in new.items()}
        return result


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
