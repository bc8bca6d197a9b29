"""`poem.evaluate`: several methods over one labelled stream, as a table."""

from __future__ import annotations

import dataclasses
import logging
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, Subset

from poem._util.progress import Progress
from poem.api import adapt
from poem.bench.collect import DomainMetrics
from poem.bench.device_batches import depth_for
from poem.bench.evaluation_table import By, Difference, Row, Table
from poem.bench.metrics import ECE, NLL, Accuracy, NonFinite
from poem.bench.run_stream import SameBatches, StreamRun
from poem.recipes.known_losses import comparing
from poem.recipes.recipe import Recipe
from poem.streams.datasets.classes import imagenet_wnids, is_wnid
from poem.streams.datasets.own_sets import dataset_order, is_dataset, is_images
from poem.streams.loading.batches import Batches, batches
from poem.streams.orders import Segment
from poem.streams.stream import Stream

log = logging.getLogger("poem")

__all__ = ["Difference", "Row", "Table", "evaluate"]

BATCH = 64
"""Images per batch where a data set is given and no `batch_size`."""
GUARDED = "auto, guarded"
"""The row of `poem.adapt(model)`, without a method."""


def evaluate(
    model: nn.Module,
    loader: Any,
    methods: str | Recipe | Sequence[str | Recipe | None] | Mapping[str, str | Recipe | None] | None = (
        "source",
        "tent",
        "poem",
    ),
    *,
    seeds: int | Sequence[int] | None = None,
    by: By | None = None,
    progress: bool | None = None,
    **settings: Any,
) -> Table:
    """Run several methods over the same labelled stream, each from a fresh adapter: accuracy, calibration, cost.

    Args:
        model: The classifier; it comes out as it went in.
        loader: Labelled images, as one of these:
            an iterable of batches (images, labels), such as a `DataLoader` or a list. It is iterated once per method
            and seed and must give each method the same batches, or a ValueError is raised, as with `shuffle=True`;
            a `poem.streams` stream, at whose resets the adapter is reset;
            a `torch.utils.data.Dataset` of (image, label) pairs, or a data set of `poem.streams`, which is taken in one
            random order for all methods, in batches of `batch_size` (64);
            a function from a seed to one of these. Labels are class numbers (N,) or (N, 1) of any type, or one-hot rows
            (N, C).
        methods: Names from `poem.methods()`, `package.module:name`, recipes of your own, or a mapping from a row's name
            to any of these. None is what `poem.adapt(model)` makes, `auto` with a guard; its row is "auto, guarded".
        seeds: Seeds to repeat everything with, or their number. A seed draws the order of a data set, the order and the
            corruptions of a stream, and the adapter's random numbers. Rows are then means, with a deviation.
        by: `"shift"` for a table of the accuracies by shift, which a stream states.
        progress: Whether to show on standard error how far it is; by default where that is a terminal.
        settings: Passed on to `poem.adapt` for every method; a setting for one method belongs in a recipe.

    Returns:
        The table: `print` it, or take `.markdown()`, `.latex()`, `.csv()`, `.frame()`, `.differences()`.

    Raises:
        TypeError: The batches or items hold no labels.
        ValueError: Methods would see different batches, or `by="shift"` with a loader that states no shifts.
    """
    if methods is None or isinstance(methods, str | Recipe):
        methods = [methods]
    if not isinstance(methods, Mapping):
        methods = {_method_name(each, at): each for at, each in enumerate(methods)}
    if by is not None and by not in get_args(By):
        raise ValueError(f"expected by 'shift' or None, got {by!r}")
    asked = _seeds(seeds, settings)
    runs: dict[str, list[_Run]] = {name: [] for name in methods}
    shown = Progress("evaluate", unit="batches") if _show(progress) else None
    with shown or nullcontext():
        for seed in asked or (None,):
            batched = _batched(loader, seed, settings)
            own = settings if seed is None else {**settings, "seed": seed}
            same = SameBatches()
            for name, method in methods.items():
                stream = batched if len(methods) == 1 else same.checked(name, batched)
                if shown is not None:
                    done = sum(map(len, runs.values()))
                    shown.total = _total(shown, batched, done, len(methods) * max(len(asked), 1))
                    shown.title = name if len(asked) < 2 else f"{name}, seed {seed}"
                advance = None if shown is None else shown.advance
                run = _run(name, model, stream, method, own, source=batched, advance=advance)
                if not any(runs.values()) and settings.get("classes") is None:
                    warn_of_fewer_classes(_with_classes(loader, batched), run.highest, run.logits, run.n)
                if by == "shift" and not run.shifts:
                    raise ValueError(
                        "expected a stream whose batches state their shift with by='shift', got a plain loader; pass "
                        "poem.streams.datasets.Stream(data=..., order=...), or evaluate each shift by itself"
                    )
                runs[name].append(run)
    if len(asked) > 1:
        _warn_of_one_order(runs)
    return Table(tuple(_row(name, found) for name, found in runs.items()), asked, by)


def _show(progress: bool | None) -> bool:
    """Whether progress is shown: as asked for, or where standard error is a terminal."""
    if progress is not None and not isinstance(progress, bool):
        raise TypeError(f"expected progress=True, False or None, got {progress!r}")
    return progress if progress is not None else sys.stderr is not None and sys.stderr.isatty()


def _total(shown: Progress, batched: Any, done: int, runs: int) -> int | None:
    """The number of batches of all runs, of which `done` are over: as they state it, else as in the runs before."""
    try:
        each = len(batched)
    except TypeError:  # a stream, or a loader that does not know
        each = shown.done // max(done, 1)
    return runs * each or None


def _method_name(method: str | Recipe | None, at: int) -> str:
    """The row's name of a method that came without one."""
    return GUARDED if method is None else method if isinstance(method, str) else f"recipe {at + 1}"


def _seeds(seeds: int | Sequence[int] | None, settings: Mapping[str, Any]) -> tuple[int, ...]:
    if seeds is None:
        return ()
    if "seed" in settings:
        raise TypeError("expected seed= or seeds=, got both")
    if isinstance(seeds, bool) or (isinstance(seeds, int) and seeds < 1):
        raise ValueError(f"expected seeds as a list of integers, or their number, got {seeds!r}")
    found = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    if not found or len(set(found)) < len(found) or any(isinstance(each, bool) or int(each) != each for each in found):
        raise ValueError(f"expected seeds as different integers, such as [0, 1, 2], got {seeds!r}")
    return found


def _batched(loader: Any, seed: int | None, settings: Mapping[str, Any]) -> Iterable[Any]:
    """What is given as an iterable of batches, in the order that the seed draws."""
    if isinstance(loader, Stream):
        if seed is None:
            return loader
        return dataclasses.replace(loader, order=dataclasses.replace(loader.order, seed=seed))
    if isinstance(loader, DataLoader | Batches):
        return loader
    size = settings.get("batch_size") or BATCH
    if is_images(loader):
        return batches(loader, dataset_order(len(loader), seed or 0), size)
    if isinstance(loader, IterableDataset):
        return DataLoader(loader, size)
    if is_dataset(loader) and not _gives_batches(loader):
        return DataLoader(Subset(loader, dataset_order(len(loader), seed or 0)), size, collate_fn=_collated)
    if callable(loader) and not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        return _batched(loader(seed or 0), seed, settings)
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise TypeError(
            f"expected a loader of (images, labels), a stream or a data set, got {type(loader).__name__}; see "
            "docs/your-data.md"
        )
    found: Iterable[Any] = loader
    return found


def _gives_batches(data: Any) -> bool:
    """Whether the items of something that can be indexed are batches of images rather than single ones."""
    if isinstance(data, torch.utils.data.Dataset) or len(data) == 0:
        return False
    item = data[0]
    image = item[0] if isinstance(item, tuple | list) and len(item) else item
    return isinstance(image, Tensor) and image.dim() >= 4


def _collated(items: list[Any]) -> Any:
    """A batch of the items of a data set; images of PIL are an error that says what to do."""
    first = items[0]
    if not isinstance(first, tuple | list) or len(first) < 2:
        kind = f"{type(first).__name__} of {len(first)}" if isinstance(first, tuple | list) else type(first).__name__
        raise TypeError(
            f"expected items (image, label) of the data set, got a {kind}: scoring needs labels; without them use "
            "adapter.stream"
        )
    if not isinstance(first[0], Tensor | np.ndarray):
        raise TypeError(
            f"expected images as tensors in the data set, got {type(first[0]).__name__}; give it a transform, such as "
            "torchvision's ToTensor(), or wrap it: poem.streams.datasets.as_images(data)"
        )
    return torch.utils.data.default_collate([tuple(each[:2]) for each in items])


def _with_classes(loader: Any, batched: Any) -> Any:
    """The object to look for class names in: what was given, or its batches where that is a function."""
    return batched if callable(loader) and not hasattr(loader, "__iter__") else loader


@dataclass
class _Run:
    """One method with one seed."""

    accuracy: float
    ece: float
    nll: float
    n: int
    forwards: int
    backwards: int
    source_images: int
    seconds: float
    nonfinite: int
    highest: int
    """The highest label."""
    logits: int
    """The number of logits."""
    correct: np.ndarray[Any, np.dtype[np.bool_]]
    labels: bytes
    """The labels in order of arrival, to see whether two seeds gave the same order."""
    shifts: dict[str, float] = field(default_factory=dict)


def _row(name: str, runs: Sequence[_Run]) -> Row:
    """The row of a method from its runs, one per seed."""

    def mean(get: Callable[[_Run], float]) -> float:
        return statistics.fmean(map(get, runs))

    shifts = dict.fromkeys(shift for run in runs for shift in run.shifts)  # seeds may draw different ones
    return Row(
        method=name, accuracy=mean(lambda run: run.accuracy), ece=mean(lambda run: run.ece),
        nll=mean(lambda run: run.nll), n=round(mean(lambda run: run.n)), forwards=round(mean(lambda run: run.forwards)),
        backwards=round(mean(lambda run: run.backwards)), source_images=runs[0].source_images,
        seconds=mean(lambda run: run.seconds), nonfinite=sum(run.nonfinite for run in runs),
        accuracies=tuple(run.accuracy for run in runs), correct=tuple(run.correct for run in runs),
        shifts={shift: tuple(run.shifts[shift] for run in runs if shift in run.shifts) for shift in shifts},
    )  # fmt: skip


def _warn_of_one_order(runs: Mapping[str, Sequence[_Run]]) -> None:
    """Warn where every seed has given the same labels in the same order."""
    if all(len({run.labels for run in found}) == 1 for found in runs.values()):
        log.warning(
            "every seed has seen the same images in the same order, so the deviation is of the methods' own random "
            "numbers alone; pass the data set itself, a stream, or a function from seed to loader"
        )


def warn_of_fewer_classes(loader: Any, highest: int, logits: int, seen: int) -> None:
    """Warn where data has fewer classes than there are logits and no `classes=` says which of them they are.

    The number of classes is that of the class names, of the loader or of the data set under it. Without names it is
    the highest label's, once there are as many images as logits.
    """
    data: Any = loader
    for _ in range(4):  # a loader over a subset of a data set, or a stream over one
        if _class_names(data):
            break
        data = getattr(data, "dataset", getattr(data, "data", None))
    names = _class_names(data)
    count = len(names) or (highest + 1 if seen >= logits and highest < logits // 2 else logits)
    if not highest < count < logits:  # labels above it are numbered as the logits are
        return
    mask = getattr(data, "mask", None)
    how = "classes=[...] with the index of each class among the logits"
    if mask is not None:
        how = "classes=data.mask"
    elif logits == len(imagenet_wnids()) and names and all(map(is_wnid, names)):
        how = "classes=poem.streams.datasets.class_indices(data.classes)"
    log.warning(
        "the data has %d classes and the model %d logits: answers may fall on classes that never come, and labels be "
        "numbered otherwise; pass %s", count, logits, how,
    )  # fmt: skip


def _class_names(data: Any) -> Sequence[str]:
    """The names of a data set's classes; empty where it has none."""
    names = getattr(data, "classes", None)
    return names if isinstance(names, list | tuple) and all(isinstance(name, str) for name in names) else ()


def _run(
    name: str,
    model: nn.Module,
    loader: Iterable[Any],
    method: str | Recipe | None,
    settings: dict[str, Any],
    *,
    source: Iterable[Any],
    advance: Callable[[], None] | None,
) -> _Run:
    """One method over the batches of `loader`, which come from `source`; `advance` is called after each."""
    with comparing():
        run = StreamRun(adapt(model, method, **settings))
    run.prefetch = depth_for(source, run.device)  # of the loader itself, where its batches are compared on the way
    accuracy, ece, nll, nonfinite = Accuracy(), ECE(), NLL(), NonFinite()
    domains: dict[str, DomainMetrics] = {}
    seen, highest, logits = 0, 0, 0
    correct: list[Tensor] = []
    labels: list[Tensor] = []
    try:
        for answered in run.answers(loader):
            seen, logits = seen + len(answered.labels), answered.logits.shape[1]
            highest = max(highest, int(answered.labels.max()))
            for metric in (accuracy, ece, nll, nonfinite):
                metric.update(answered.logits, answered.labels)
            finite = answered.logits.isfinite().all(1)
            correct.append((answered.logits.argmax(1) == answered.labels) & finite)
            labels.append(answered.labels)
            for shift, rows in _by_shift(answered.segment):
                domains.setdefault(shift, DomainMetrics()).update(answered.logits[rows], answered.labels[rows])
            if advance is not None:
                advance()
    finally:
        run.adapter.unload()
    if seen == 0:
        raise ValueError("expected a loader that can be iterated once per method, got one that was empty or used up")
    if lost := int(nonfinite.result()):
        log.warning("%d of %d answers of %s were not finite (NaN or Inf); they count as wrong", lost, seen, name)
    return _Run(
        accuracy=100 * accuracy.result(), ece=100 * ece.result(), nll=nll.result(), n=seen,
        forwards=run.totals["forwards"], backwards=run.totals["backwards"],
        source_images=run.adapter.preparation["forwards"], seconds=run.adapt_seconds, nonfinite=lost, highest=highest,
        logits=logits, correct=torch.cat(correct).numpy(), labels=torch.cat(labels).numpy().tobytes(),
        shifts={shift: domain.result()["top1"] for shift, domain in domains.items()},
    )  # fmt: skip


def _by_shift(segment: Segment | None) -> Iterator[tuple[str, Tensor]]:
    """Names of the shifts of a batch, each with a mask of its rows."""
    if segment is None:
        return
    which = torch.from_numpy(segment.which)
    for at, shift in enumerate(segment.shifts):
        rows = which == at
        if bool(rows.any()):
            yield str(shift), rows
