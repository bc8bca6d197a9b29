"""The picture that a page begins with: clean and corrupted images, and what was answered before and after adapting.

Results hold no answers, so the stream is run again: only for networks of the package, and only where that takes seconds
and gives the accuracy that was measured.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from poem._util.log_level import errors_only
from poem.bench.cell import Cell
from poem.bench.load_cell import CellData, Machine, load_model
from poem.bench.measure import measure
from poem.bench.result import CellResult, latest
from poem.bench.run_stream import AnsweredBatch
from poem.streams.datasets import CIFAR10_CLASSES
from poem.streams.shift import CLEAN

NETWORKS = ("digits-", "cifar10-")
"""How the names of networks begin that come with the package."""
MAX_SECONDS = 15.0
"""The longest that a measured stream may have taken to be run again."""
SAME = 0.5
"""Percentage points that the repeated accuracy may differ: another processor rounds otherwise."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One image and its answers."""

    clean: str
    """A PNG as a data URL, as the other."""
    corrupted: str
    truth: str
    before: str
    after: str


@dataclass(frozen=True, kw_only=True)
class Picture:
    """Images of one stream with the answers of a model as it is and of a method, and both accuracies."""

    base: str
    shift: str
    """Such as `fog, severity 4`."""
    method: str
    images: int
    """How many images the stream has."""
    before: float
    """Accuracy of the model as it is, in percent, over all of them."""
    after: float
    examples: tuple[Example, ...]

    @property
    def caption(self) -> str:
        """What is seen, in two sentences."""
        return (
            f"{self.base} in {self.shift}: of {self.images:,} images the model as it is gets {self.before:.1f} % "
            f"right, with {self.method} {self.after:.1f} %. Shown are images that were wrong before and right after."
        )


@dataclass(frozen=True)
class Answers:
    """Labels and answers of a stream by the number of the image."""

    labels: dict[int, int]
    answers: dict[int, int]

    @property
    def accuracy(self) -> float:
        """Right answers in percent."""
        return 100 * sum(self.answers[at] == label for at, label in self.labels.items()) / max(1, len(self.labels))


def run_again(
    cell: Cell,
    machine: Machine = Machine(),  # noqa: B008 - frozen
) -> tuple[CellResult, Answers]:
    """Run a cell, and keep what it answered for each image beside the result.

    Args:
        cell: What to run; a stream of one shift, in which every image comes once.
        machine: Folders with data and weights, and the device.
    """
    labels: dict[int, int] = {}
    answers: dict[int, int] = {}

    def keep(batch: AnsweredBatch) -> None:
        if batch.segment is not None and len(batch.segment.indices) == len(batch.labels):
            indices = [int(at) for at in batch.segment.indices]
            labels.update(zip(indices, batch.labels.tolist(), strict=True))
            answers.update(zip(indices, batch.logits.argmax(1).tolist(), strict=True))

    with errors_only():  # what it warns of was said when it was measured
        result = measure(cell, machine, on_answers=keep)
    return result, Answers(labels, answers)


def best_pair(results: Iterable[CellResult]) -> tuple[CellResult, CellResult] | None:
    """The stream on which a method gained most, as the result without adapting and the method's; None without any.

    Only streams of a single shift and networks of the package count, and only those that were measured in seconds.
    """
    found = [each for each in latest(results, lambda result: result.cell_key).values() if _repeatable(each)]
    sources = {_stream(each.cell): each for each in found if each.cell.method == "source"}
    pairs = [(sources[_stream(each.cell)], each) for each in found if _stream(each.cell) in sources]
    gains = [(after.metrics["top1"] - before.metrics["top1"], at) for at, (before, after) in enumerate(pairs)]
    gain, at = max(gains, default=(0.0, 0))
    return pairs[at] if gain > 0 else None


def _repeatable(result: CellResult) -> bool:
    cell = result.cell
    return (
        cell.base.startswith(NETWORKS) and cell.weights is None and not _imports(cell)
        and cell.scenario == "single" and not cell.eta
        and cell.corruptions != ("clean",) and len(cell.corruptions) == 1 and "top1" in result.metrics
        and result.timing.get("adapt_s", MAX_SECONDS + 1) <= MAX_SECONDS and result.intact is not False
    )  # fmt: skip


def _imports(cell: Cell) -> bool:
    """Whether measuring the cell again would run code that only the result names."""
    texts = (cell.base, cell.data, cell.method, *(str(value) for _, value in cell.changes))
    return any(":" in text for text in texts)


def _stream(cell: Cell) -> Cell:
    """A cell of the same stream and network for every method."""
    return Cell(
        base=cell.base, data=cell.data, method="source", corruptions=cell.corruptions, severity=cell.severity,
        seed=cell.seed, batch_size=cell.batch_size, n=cell.n, options=cell.options, dataset=cell.dataset,
    )  # fmt: skip


def picture(
    results: Iterable[CellResult],
    *,
    count: int = 4,
    machine: Machine = Machine(),  # noqa: B008 - frozen
) -> Picture | None:
    """The picture of the stream on which a method gained most.

    Args:
        results: Results of any suites.
        count: How many images to show, each of another class.
        machine: Folders with data and weights, and the device.

    Returns:
        None where no stream can be run again here in seconds, where the accuracy is another one than was measured, or
        where no image was wrong before and right after.
    """
    pair = best_pair(results)
    if pair is None:
        return None
    before, after = pair
    try:
        first, second = (run_again(each.cell, machine)[1] for each in pair)
    except (FileNotFoundError, ImportError, ValueError):  # its data is not on this machine
        return None
    if any(abs(run.accuracy - each.metrics["top1"]) > SAME for run, each in zip((first, second), pair, strict=True)):
        return None
    shown = corrected(first, second, count)
    if not shown:
        return None
    cell = after.cell
    return Picture(
        base=cell.base,
        shift=f"{cell.corruptions[0].replace('_', ' ')}, severity {cell.severity}",
        method=cell.method_label,
        images=len(first.labels),
        before=before.metrics["top1"],
        after=after.metrics["top1"],
        examples=tuple(examples(cell, shown, first, second, machine)),
    )


def corrected(before: Answers, after: Answers, count: int) -> list[int]:
    """Numbers of the first images, each of another class, that were wrong before and right after."""
    found: dict[int, int] = {}
    for at, label in before.labels.items():
        if before.answers[at] != label == after.answers.get(at):
            found.setdefault(label, at)
    return list(found.values())[:count]


def examples(
    cell: Cell,
    indices: Sequence[int],
    before: Answers,
    after: Answers,
    machine: Machine = Machine(),  # noqa: B008 - frozen
) -> list[Example]:
    """The images with these numbers, clean and as the cell's stream has them, with their answers."""
    pixels = image_pairs(cell, indices, machine)
    names = CIFAR10_CLASSES if cell.base.startswith("cifar10-") else tuple(map(str, range(10)))
    return [
        Example(
            clean=png(clean), corrupted=png(corrupted), truth=names[before.labels[at]],
            before=names[before.answers[at]], after=names[after.answers[at]],
        )
        for at, (clean, corrupted) in zip(indices, pixels, strict=True)
    ]  # fmt: skip


def image_pairs(
    cell: Cell,
    indices: Sequence[int],
    machine: Machine = Machine(),  # noqa: B008 - frozen
) -> list[tuple[Tensor, Tensor]]:
    """Clean and corrupted images (3, H, W) in bytes of a cell's stream, by their numbers."""
    data = CellData(cell, load_model(replace(cell, method="source", guard=False), machine).base, machine)
    stream, _ = data.streams(cell.order())
    seen: dict[int, Tensor] = {}
    for images, _, segment in stream:
        for at, image in zip(np.asarray(segment.indices).tolist(), images, strict=False):
            if at in indices:
                seen[int(at)] = (image.clamp(0, 1) * 255).round().byte()
    return [(data.stored(CLEAN)[at], seen[at]) for at in indices]


def png(image: Tensor) -> str:
    """An image (3, H, W) in bytes as a PNG in a data URL."""
    from PIL import Image

    written = io.BytesIO()
    Image.fromarray(image.permute(1, 2, 0).cpu().numpy()).save(written, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(written.getvalue()).decode()
