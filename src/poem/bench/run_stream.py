"""One adapter over one stream: the loop under `evaluate` and `measure`.

Images go to the adapter, labels go round it: the two meet again in an `Answered`, which metrics read.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from poem._util.caching import fingerprint
from poem.adapter import Adapter
from poem.engine.accounting import BatchRecord
from poem.streams.orders import Segment


@dataclass(frozen=True)
class Answered:
    """A batch that was answered, on the CPU."""

    logits: Tensor
    """(B, C)."""
    labels: Tensor
    """(B,)."""
    segment: Segment | None
    """Its stretch of the order, where the stream has one."""
    entry: BatchRecord | None
    """The adapter's own account; None for a batch that was missed."""


class Delay:
    """The online protocol: the stream does not wait, so a slow call costs the batches that arrive meanwhile.

    A call that takes as long as `ratio` plain forwards, on a stream `eta` times as fast as these, misses the next
    `ceil(eta * ratio) - 1` batches. They are answered without learning.

    Where the ratio is counted, it is what the network computed for the batch, an image that goes back as two that go
    forward, over the one plain forward of each image: samples that were computed and then not used cost time too.

    Paper: Alfarra et al., "Evaluation of Test-Time Adaptation Under Computational Time Constraints", ICML 2024.
    """

    def __init__(self, eta: float, ratio: float | str = "counted") -> None:
        if isinstance(ratio, str) and ratio not in ("counted", "measured"):
            raise ValueError(f"expected ratio 'counted', 'measured' or a number, got {ratio!r}")
        if not 0 <= eta < math.inf or (not isinstance(ratio, str) and not 0 <= ratio < math.inf):
            raise ValueError(f"expected eta >= 0 and a ratio >= 0, got {eta} and {ratio}")
        self.eta, self.ratio, self.left = eta, ratio, 0
        self.ratios: list[float] = []

    def restart(self) -> None:
        """A new domain begins: nothing is late yet."""
        self.left = 0

    def misses(self) -> bool:
        """Whether the batch that arrives now is missed."""
        late = self.left > 0
        self.left -= late
        return late

    def spend(self, ratio: float) -> None:
        """A call has taken as long as so many plain forwards."""
        self.ratios.append(ratio)
        self.left = max(0, math.ceil(self.eta * ratio) - 1)


class Run:
    """What one adapter does over one stream, what it needs for that, and how long it takes."""

    def __init__(
        self, adapter: Adapter, *, delay: Delay | None = None, before: Callable[[Tensor], None] | None = None
    ) -> None:
        self.adapter, self.delay, self._before = adapter, delay, before
        self.device = next(adapter.model.parameters()).device
        self.spent: Counter[str] = Counter()
        """The adapter's totals over all resets, once the stream has ended."""
        self.adapting = self.loading = 0.0
        """Seconds in the adapter, the device in step, and seconds until batches were there."""

    def over(self, pieces: Iterable[Any]) -> Iterator[Answered]:
        """Every batch of a stream, answered; resets are kept where the stream asks for them."""
        coming, shifts = iter(pieces), None
        while True:
            began = _now(self.device)
            piece = next(coming, None)
            if piece is None:
                break
            images, labels = _labelled(piece)
            if isinstance(images, Tensor):  # what is none is for the adapter to refuse
                labels, images = indices(labels, len(images)), images.to(self.device)
            self.loading += _now(self.device) - began
            segment: Segment | None = getattr(piece, "segment", None)
            if segment is not None and segment.reset:
                self._settle()
                self.adapter.reset()
            if self.delay is not None and segment is not None and (segment.reset or segment.shifts != shifts):
                self.delay.restart()
                shifts = segment.shifts
            missed = self.delay is not None and self.delay.misses()
            logits = self._missed(images) if missed else self._adapted(images)
            labels = _checked(labels, logits)
            yield Answered(logits.cpu(), labels, segment, None if missed else self.adapter.last)
        self._settle()

    def _adapted(self, images: Tensor) -> Tensor:
        if self._before is not None:
            self._before(images)
        began = _now(self.device)
        logits = self.adapter(images)
        seconds = _now(self.device) - began
        self.adapting += seconds
        if self.delay is not None:
            self.delay.spend(self._ratio(self.delay.ratio, images, seconds))
        return logits

    def _missed(self, images: Tensor) -> Tensor:
        """The answer of the network as it was last adapted; nothing is learnt."""
        began = _now(self.device)
        with self.adapter.frozen():
            logits = self.adapter(images)
        self.adapting += _now(self.device) - began
        return logits

    def _ratio(self, ratio: float | str, images: Tensor, seconds: float) -> float:
        """What the call cost in plain forwards: as stated, as counted in images computed, or by the clock."""
        if not isinstance(ratio, str):
            return ratio
        if ratio == "counted":
            last = self.adapter.last
            return (last.forwards_computed + 2 * last.backwards_computed) / len(images)
        began = _now(self.device)
        with self.adapter.frozen():
            self.adapter(images)
        return seconds / max(_now(self.device) - began, 1e-9)

    def _settle(self) -> None:
        """Adds the adapter's totals, which a reset would forget."""
        self.spent.update(asdict(self.adapter.totals))


class SameBatches:
    """Refuses a stream that gives one method other batches than it gave the first."""

    def __init__(self) -> None:
        self._first: tuple[str, list[str]] | None = None

    def over(self, name: str, pieces: Iterable[Any]) -> Iterator[Any]:
        """The same pieces, hashed as they come and compared with those of the first method."""
        seen: list[str] = []
        for piece in pieces:
            tensors = (
                [each for each in piece[:2] if isinstance(each, Tensor)] if isinstance(piece, tuple | list) else []
            )
            seen.append(fingerprint(*tensors))
            self._compare(name, seen[-1], len(seen))
            yield piece
        if self._first is None:
            self._first = name, seen
        elif 0 < len(seen) < len(self._first[1]):
            self._refuse(name, len(seen) + 1)

    def _compare(self, name: str, digest: str, count: int) -> None:
        if self._first is not None and self._first[1][count - 1 : count] != [digest]:
            self._refuse(name, count)

    def _refuse(self, name: str, batch: int) -> None:
        assert self._first is not None
        raise ValueError(
            f"expected the same batches for every method, got others for {name!r} than for {self._first[0]!r} from "
            f"batch {batch} on, so their rows could not be compared; make the loader with shuffle=False and without "
            "random transforms (for a mixed order: over Subset(data, torch.randperm(len(data)).tolist())), or pass "
            "list(loader)"
        )


def _labelled(piece: Any) -> tuple[Any, Any]:
    """Images and labels of a batch, or of a piece of a stream."""
    if isinstance(piece, tuple | list) and len(piece) >= 2:
        return piece[0], piece[1]
    raise TypeError(
        f"expected batches of (images, labels), got {type(piece).__name__}; without labels use adapter.stream"
    )


def indices(labels: Any, count: int) -> Tensor:
    """Labels of `count` images as class numbers (count,), or as they are where columns (count, C) await the logits.

    Taken are whole numbers of any type, in a tensor, an array or a list, of shape (count,) or (count, 1), and one-hot
    rows (count, C).
    """
    found = _tensor(labels)
    if found.dim() == 0 and count == 1:
        found = found.reshape(1)
    if found.dim() == 0 or len(found) != count:
        raise ValueError(f"expected one label for each of {count} images, got {found.numel()}")
    if found.numel() == count:
        found = found.reshape(count)
    if found.dim() > 2:
        shape = tuple(found.shape)
        raise ValueError(
            f"expected labels of shape ({count},), ({count}, 1) or one-hot ({count}, classes), got {shape}"
        )
    if found.dim() == 2:
        if not bool(((found == 0) | (found == 1)).all() and (found.sum(1) == 1).all()):
            raise ValueError(
                f"expected one class per image, as its number or as a one-hot row, got several or none in "
                f"{found.dtype} {tuple(found.shape)}; the likeliest is labels.argmax(1)"
            )
        return found
    if found.is_floating_point():
        strange = found[found != found.round()]
        if len(strange):
            raise ValueError(f"expected labels as whole numbers, got {float(strange[0]):g}")
    return found.long()


def _tensor(labels: Any) -> Tensor:
    """Labels as a tensor on the CPU, whatever held them."""
    if isinstance(labels, Tensor):
        return labels.detach().cpu()
    words = [each for each in labels if isinstance(each, str)] if isinstance(labels, list | tuple) else []
    if isinstance(labels, str) or words:
        shown = labels if isinstance(labels, str) else words[0]
        raise TypeError(
            f"expected labels as class numbers, got words such as {shown!r}; number them: "
            "torch.tensor([names.index(each) for each in labels])"
        )
    try:
        return torch.as_tensor(labels)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(labels).__name__
        raise TypeError(
            f"expected batches of (images, labels), got labels of {kind}; without labels use adapter.stream"
        ) from error


def _checked(labels: Tensor, logits: Tensor) -> Tensor:
    """Class numbers that the logits have."""
    if labels.dim() == 2:
        if labels.shape[1] != logits.shape[1]:
            columns = f"expected {logits.shape[1]} columns in one-hot labels, one per logit"
            raise ValueError(f"{columns}, got {labels.shape[1]}; see classes= for a mask")
        labels = labels.int().argmax(1)
    low, high = int(labels.min()), int(labels.max())
    if high >= logits.shape[1] or low < 0:
        raise ValueError(f"expected labels 0..{logits.shape[1] - 1}, got {low}..{high}; see classes= for a mask")
    return labels


def _now(device: torch.device) -> float:
    """A clock that waits for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
