"""`poem.check`: did adapting help? A few labelled images, answered by the adapted model and by the model as it came.

Both answer the same images, so only those that one of the two gets right, and the other wrong, tell them apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from poem.adapter import Adapter
from poem.bench.metrics import predicted
from poem.bench.run_stream import class_numbers, label_indices
from poem.engine.input_checks import finite
from poem.engine.model_input import ModelInput, read_input
from poem.engine.network import two_columns
from poem.parts.parameters import Nothing
from poem.parts.readout import Uncorrected
from poem.parts.statistics import FromBatch, Source
from poem.recipes.recipe import Recipe

Verdict = Literal["helped", "hurt", "cannot tell"]
DEFAULT_BATCH = 64  # images in a batch, where the adapter has not seen one yet
LEVEL = 0.05
Z_LEVEL, Z_POWER = 1.959963984540054, 0.8416212335729143  # normal quantiles: two-sided 5 %, power 80 %
SMALLEST_DIFFERENCE = 0.02  # the difference to plan for where none was seen


class Checkable(Protocol):
    """What `check` asks of an adapter, or of an object around one."""

    def __call__(self, images: Tensor | Mapping[str, Any]) -> Tensor:
        """Answers for a batch."""
        ...

    def source(self, images: Tensor | Mapping[str, Any]) -> Tensor:
        """Answers of the model as it came, without a trace."""
        ...

    def frozen(self) -> AbstractContextManager[Any]:
        """A block in which calls learn nothing."""
        ...


@dataclass(frozen=True, kw_only=True)
class Check:
    """The adapted model against the model as it came, on the same labelled images; `str` says it in sentences.

    The interval is Tango's score interval for a difference of paired proportions (Statistics in Medicine 17, 1998),
    widened to 0 where the exact sign test does not reject at 5 %: it excludes 0 only where the test agrees. It takes
    the images as drawn independently of each other; frames of one video are worth fewer.
    """

    n: int
    """Labelled images."""
    source_accuracy: float
    """Of the model as it came, in percent."""
    adapted_accuracy: float
    """Of the adapted model, in percent."""
    difference: float
    """Adapted minus source, in points."""
    low: float
    """Lower end of the 95 % interval of the difference, in points."""
    high: float
    """Upper end of the 95 % interval of the difference, in points."""
    b: int
    """Images that only the adapted model gets right."""
    c: int
    """Images that only the model as it came gets right."""
    p_value: float
    """Of the exact two-sided sign test on these `b + c` images (McNemar's exact test)."""
    verdict: Verdict
    """`"helped"` or `"hurt"` where the interval excludes 0, else `"cannot tell"`."""
    needed: int | None = None
    """About how many labelled images would tell, with a chance of 80 %; None where these do.

    For the difference that was seen, or for 2 points where none was.
    """
    notes: tuple[str, ...] = ()
    """What the numbers do not show, such as an adapter that has not learnt yet."""

    def __str__(self) -> str:
        images = "image" if self.n == 1 else "images"
        size = f"{abs(self.difference):.1f} points {'more' if self.difference > 0 else 'less'}"
        first = (
            f"On {self.n} labelled {images} the adapted model is right on {self.adapted_accuracy:.1f} %, the model as "
            f"it came on {self.source_accuracy:.1f} %: {size if self.b != self.c else 'no difference'} "
            f"(95 % interval of adapted minus source: {self.low:+.1f} to {self.high:+.1f})."
        )
        if self.needed is None:
            return " ".join([first, f"Adapting {self.verdict}.", *self.notes])
        seen = f"{abs(self.difference):.1f}" if self.b != self.c else f"{100 * SMALLEST_DIFFERENCE:.0f}"
        true = f"If the true difference is {seen} points"
        more = f"{true}, about {self.needed} labelled images are needed to tell."
        return " ".join([first, "These images cannot tell whether adapting helped.", more, *self.notes])


def check(
    adapter: Checkable, images: Tensor | Mapping[str, Any], labels: Any, *, batch_size: int | None = None
) -> Check:
    """Compare the adapted model, as it is now, with the model as it came, on a few labelled images.

    Nothing is learnt: the adapter answers inside `frozen()`, and its state, `last` and `totals` stay as they were. The
    images should be like those of the stream, in mixed order, and not the ones that settings were chosen on.

    Args:
        adapter: From `poem.adapt`, or any object with its `frozen()` and `source(images)`.
        images: (N, ...), as the adapter takes them, on any device; any number. Or a mapping of the model's arguments,
            as `adapter(mapping)` takes it: tensors of N rows are cut into batches, all else goes to every batch, and
            `labels` or `label` among them are left out. Images are answered in batches: with batch statistics an
            answer depends on the batch it is in, so a last batch that would be short is filled up with the images
            before it.
        labels: N class numbers of any type, or one-hot rows (N, C); with `classes=`, positions in that list.
        batch_size: Images in a batch; by default the adapter's, or 64 where it has not seen a batch.

    Returns:
        Accuracies, their difference with a paired 95 % interval, and a verdict; `print` it.

    Raises:
        TypeError: No adapter, images that are no tensor and no mapping with a tensor of floating point, or no labels.
        ValueError: No image, images with NaN or Inf, another number of labels than of images, labels that are no class
            of the model, or a method whose frozen answers are never adapted (`source`, `memo`).

    Example::

        found = poem.check(adapter, images, labels)
        print(found)  # On 200 labelled images the adapted model is right on 81.5 %, ...
        if found.verdict == "hurt":
            adapter.reset()
    """
    if not (callable(adapter) and callable(getattr(adapter, "source", None)) and hasattr(adapter, "frozen")):
        kind = type(adapter).__name__
        raise TypeError(f"expected an adapter, as poem.adapt(model, ...) makes it, got {kind}; pass the adapter")
    if labels is None:
        raise TypeError(
            "expected labels, one class number per image, got None; which answers are right only labels tell: label a "
            "few images"
        )
    model = getattr(adapter, "model", None)
    given = read_input(model, images, {}) if isinstance(images, Mapping) and isinstance(model, nn.Module) else images
    if isinstance(given, ModelInput):
        given = given.noted(set(getattr(getattr(adapter, "adapter", adapter), "shared_arguments", ())))
    whole = given.images if isinstance(given, ModelInput) else given
    if not isinstance(whole, Tensor):
        kind = type(images).__name__
        raise TypeError(
            f"expected images as one tensor (N, ...), or a mapping of the model's arguments, got {kind}; join batches "
            "by torch.cat(list)"
        )
    if whole.dim() < 2 or len(whole) == 0:
        raise ValueError(f"expected at least one labelled image, got shape {tuple(whole.shape)}; label a few images")
    _refuse_unadapted(adapter)
    classes = label_indices(labels, len(whole))
    finite(whole)
    size = batch_size or getattr(adapter, "batch_size", None) or DEFAULT_BATCH
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    adapted: list[Tensor] = []
    source: list[Tensor] = []
    with adapter.frozen():
        for rows, new in _batches(len(whole), size):
            batch: Any = given.cut(rows) if isinstance(given, ModelInput) else whole[rows]
            batch = batch if first is None else batch.to(first.device)
            answers = [two_columns(ask(batch)).cpu() for ask in (adapter, adapter.source)]
            truth = class_numbers(classes[rows], answers[0])
            for right, logits in zip((adapted, source), answers, strict=True):
                right.append((predicted(logits) == truth)[-new:])
    return paired(torch.cat(adapted), torch.cat(source), notes=_notes(adapter, len(whole), size))


def paired(adapted_right: Tensor, source_right: Tensor, *, notes: tuple[str, ...] = ()) -> Check:
    """The check from what each model got right on the same images: (N,) bool, adapted and source."""
    if adapted_right.shape != source_right.shape or adapted_right.dim() != 1 or not len(adapted_right):
        came = f"{tuple(adapted_right.shape)} and {tuple(source_right.shape)}"
        raise ValueError(f"expected two masks of one shape (N,), N at least 1, got {came}")
    n, adapted, source = len(adapted_right), adapted_right.bool(), source_right.bool()
    b, c = int((adapted & ~source).sum()), int((source & ~adapted).sum())
    p_value, (low, high) = sign_test(b, c), interval(b, c, n)
    verdict: Verdict = "helped" if low > 0 else "hurt" if high < 0 else "cannot tell"
    return Check(
        n=n, source_accuracy=100 * float(source.double().mean()), adapted_accuracy=100 * float(adapted.double().mean()),
        difference=100 * (b - c) / n, low=100 * low, high=100 * high, b=b, c=c, p_value=p_value, verdict=verdict,
        needed=_needed(b, c, n) if verdict == "cannot tell" else None, notes=notes,
    )  # fmt: skip


def sign_test(b: int, c: int) -> float:
    """Two-sided exact p-value that `b` of `b + c` fair coins are as far from half as this, or farther."""
    m = b + c
    logs = (math.lgamma(m + 1) - math.lgamma(k + 1) - math.lgamma(m - k + 1) for k in range(min(b, c) + 1))
    return min(1.0, 2 * math.fsum(math.exp(each - m * math.log(2)) for each in logs))


def interval(b: int, c: int, n: int) -> tuple[float, float]:
    """95 % interval of the difference (as a share) where `b` of `n` pairs speak for it and `c` against it.

    Tango's score interval: all differences that the score test does not reject. Where the exact sign test does not
    reject a difference of 0, the interval is widened to contain it.
    """
    seen = (b - c) / n

    def end(side: int) -> float:
        inside, outside = seen, float(side)
        for _ in range(60):
            middle = (inside + outside) / 2
            rejected = abs(_score(b, c, n, middle)) > Z_LEVEL
            inside, outside = (inside, middle) if rejected else (middle, outside)
        return inside

    low, high = end(-1), end(1)
    return (min(low, 0.0), max(high, 0.0)) if sign_test(b, c) >= LEVEL else (low, high)


def _score(b: int, c: int, n: int, difference: float) -> float:
    """Tango's score statistic for a difference of paired proportions."""
    linear = (2 * n - b + c) * difference - b - c
    root = math.sqrt(max(0.0, linear * linear + 8 * n * c * difference * (1 - difference)))
    against = (root - linear) / (4 * n)  # the likeliest share of `c`, given the difference
    variance = n * (2 * against + difference * (1 - difference))
    return (b - c - n * difference) / math.sqrt(max(variance, 1e-300))


def _needed(b: int, c: int, n: int) -> int:
    """About how many pairs tell a difference of the size that was seen, in two digits.

    Paper: Connor, Biometrics 43 (1987), power 80 % at 5 %.
    """
    size = abs(b - c) / n or SMALLEST_DIFFERENCE
    apart = max((b + c) / n, (b + c + 1) / (n + 2) if b == c else 0.0, size)
    exact = ((Z_LEVEL * math.sqrt(apart) + Z_POWER * math.sqrt(max(apart - size * size, 0.0))) / size) ** 2
    unit = int(10 ** max(0, math.floor(math.log10(exact)) - 1))
    return max(n + 1, math.ceil(exact / unit) * unit)


def _batches(count: int, size: int) -> Iterator[tuple[slice, int]]:
    """Rows of each batch, and how many at its end are new: a short last batch takes images of the one before it."""
    for start in range(0, count, size):
        end = min(start + size, count)
        yield slice(max(0, end - size), end), end - start


def _refuse_unadapted(adapter: Any) -> None:
    """Refuse a method whose frozen answers never show what was learnt."""
    recipe, name = getattr(adapter, "recipe", None), getattr(adapter, "name", "this method")
    if not isinstance(recipe, Recipe):
        return
    still = isinstance(recipe.parameters, Nothing) and isinstance(recipe.statistics, Source)
    if still and isinstance(recipe.readout.correct, Uncorrected):
        raise ValueError(
            f"expected an adapter that learns, got {name!r}, whose answers are the model's own; adapt with another "
            "method, such as poem.adapt(model, 'poem')"
        )
    if recipe.recover.each_image:
        raise ValueError(
            f"expected an adapter that keeps what it learns, got {name!r}, which returns to the source after every "
            f"image; compare by poem.evaluate(model, loader, ['source', {name!r}])"
        )


def _notes(adapter: Any, count: int, size: int) -> tuple[str, ...]:
    """What a reader should know beside the numbers."""
    notes = []
    if isinstance(adapter, Adapter):
        if adapter.recipe.learns and adapter.state_dict()["calls"] == 0:
            notes.append("The adapter has not learnt from any batch yet.")
        batch_norm = any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in adapter.model.modules())
        if count < size and batch_norm and isinstance(adapter.recipe.statistics, FromBatch):
            notes.append(f"Batch statistics were those of {count} images, not of {size} as in the stream.")
    return tuple(notes)
