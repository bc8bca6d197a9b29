"""What a guard asks for, answered by its own adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from poem.adapter import Adapter
from poem.engine.accounting import BatchRecord
from poem.engine.model_input import ModelInput, moved_input
from poem.guarded.asked import AskAdapted, AskCheckpoint, AskDrift, Asked, AskJudgement, AskSource, Steps, log_probs_of
from poem.guarded.judgement import entropies, judgement
from poem.guarded.settings import GuardSettings
from poem.guarded.signals import shifted
from poem.guarded.source_images import SourceImages
from poem.recipes.recipe import Recipe


class Replies:
    """A guard's own adapter answers what the guard asks for, for one batch.

    Args:
        adapter: The guard's.
        judged: `judged_tensors`, as it is or captured.
        images: The batch.
        rows_alone: Whether no image's answer by the source depends on others.
    """

    def __init__(
        self,
        adapter: Adapter,
        judged: Callable[..., Sequence[Tensor]],
        images: Tensor | ModelInput,
        *,
        rows_alone: bool,
    ) -> None:
        self._adapter, self._judged, self._images, self._rows_alone = adapter, judged, images, rows_alone
        self._moved: Tensor | ModelInput | None = None

    def __call__(self, asked: Asked) -> Any:
        """What the adapter, the source or the judgement answers to one request."""
        if isinstance(asked, AskSource):
            return self._source(asked)
        if isinstance(asked, AskAdapted):
            images = self._shifted() if asked.shifted else self._images
            with ExitStack() as block:
                if not asked.learning:
                    block.enter_context(self._adapter.frozen())
                return _Adapted(self._adapter, *self._adapter.answer_with_record(images))
        if isinstance(asked, AskJudgement):
            seen = judgement(self._judged, asked.averages, *asked.log_probs)
            return seen, seen.read()
        if isinstance(asked, AskDrift):
            return self._adapter.drift
        if isinstance(asked, AskCheckpoint):
            return self._adapter.checkpoint().state
        return self._adapter.rollback(asked.to)

    def _shifted(self) -> Tensor | ModelInput:
        """The images moved, once."""
        self._moved = shifted_input(self._images) if self._moved is None else self._moved
        return self._moved

    def _source(self, asked: AskSource) -> tuple[Tensor | None, Tensor | None, list[float]]:
        """The source's log-probabilities; in one pass where rows are alone."""
        images, source = self._images, self._adapter.source
        moved = None if asked.of == "images" else self._shifted()
        if asked.of == "shifted":
            return None, log_probs_of(source(moved)), []
        if self._rows_alone and isinstance(images, Tensor) and isinstance(moved, Tensor):
            both = log_probs_of(source(torch.cat([images, moved])))
            own = both[: len(images)]
            return own, both[len(images) :], entropies(own).tolist()
        own = log_probs_of(source(images))
        return own, None if moved is None else log_probs_of(source(moved)), entropies(own).tolist()


class _Adapted:
    """An adapter's answer with its record."""

    def __init__(self, adapter: Adapter, raw: Tensor, record: BatchRecord) -> None:
        self.raw, self.log_probs, self._record, self._adapter = raw, log_probs_of(raw), record, adapter

    @property
    def source(self) -> Tensor | None:
        """Of the pass, where it had a copy of the source."""
        found = self._record.source_logits
        return None if found is None else log_probs_of(found)

    @property
    def selected(self) -> float:
        """Share of the batch."""
        found = self._record.selected
        return float(found.float().mean()) if len(found) else 0.0

    @property
    def gradient(self) -> float:
        """Of the last update."""
        return self._record.gradient

    @property
    def updates(self) -> int:
        """That were applied."""
        return self._record.updates

    @property
    def drift(self) -> float:
        """Of the adapter now."""
        return self._adapter.drift


def replied(steps: Steps, reply: Callable[[Asked], Any]) -> Any:
    """Answer what is asked until the batch is over; its value."""
    given = None
    while True:
        try:
            asked = steps.send(given)
        except StopIteration as over:
            return over.value
        given = reply(asked)


def rows_alone(model: nn.Module) -> bool:
    """Whether no image's answer by the model as it came depends on others of its batch."""
    norms = [each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm)]
    return all(norm.running_mean is not None for norm in norms)


def pass_has_source(recipe: Recipe, settings: GuardSettings) -> bool:
    """Whether the source's answers are taken from the adapter's own pass, which has a copy with its statistics.

    A budget's proof is about the model itself, and where learning waits for the shift alarm the source answers first.
    """
    own_copy = not recipe.learns and recipe.statistics.source_copy is not None
    return own_copy and settings.budget is None and settings.adapt == "always"


def shifted_input(given: Tensor | ModelInput) -> Tensor | ModelInput:
    """Images moved by a few pixels; what goes along stays."""
    return replace(given, images=shifted(given.images)) if isinstance(given, ModelInput) else shifted(given)


def source_entropies(adapter: Adapter, source_data: Iterable[Any] | Tensor) -> list[float]:
    """Entropies of the source's predictions on source images: a tensor, or batches that may come with labels.

    Raises:
        ValueError: There is no batch.
    """
    if isinstance(source_data, SourceImages):
        if source_data.entropies is None:
            source_data.entropies = source_entropies(adapter, iter(source_data))
        return source_data.entropies
    batches = source_data.split(64) if isinstance(source_data, Tensor) else source_data
    batches = [batches] if isinstance(batches, Mapping) else batches
    found: list[float] = []
    for item in batches:
        images = item[0] if isinstance(item, tuple | list) else item
        images = moved_input(images, next(adapter.model.parameters()).device)
        found += entropies(log_probs_of(adapter.source(images))).tolist()
    if not found:
        raise ValueError("expected source_data with at least one batch of images, got none")
    return found
