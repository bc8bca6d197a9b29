"""One adapter over one stream: the loop under `evaluate` and `measure`.

Only images reach the adapter. Its answers and the labels are paired in an `AnsweredBatch`, which metrics read.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poem._util.caching import fingerprint
from poem.adapter import Adapter
from poem.bench.device_batches import DeviceBatches, as_pixels, depth_for
from poem.engine.accounting import BatchRecord
from poem.engine.network import two_columns
from poem.guarded.guard import Guard
from poem.streams.orders import Segment


@dataclass(frozen=True)
class AnsweredBatch:
    """Logits and labels of one batch, on the CPU."""

    logits: Tensor
    """(B, C); of a model with one logit (B, 2), for class 0 and class 1."""
    labels: Tensor
    """(B,), the true class of each."""
    segment: Segment | None
    """The segment of the order that the batch is from; None for a plain loader."""
    entry: BatchRecord | None
    """The adapter's `last` for the batch; None for a batch that was missed."""


class Delay:
    """The online protocol: the stream does not wait, so a slow call costs the batches that arrive meanwhile.

    A call that takes as long as `ratio` plain forwards, on a stream `eta` times as fast as these, misses the next
    `ceil(eta * ratio) - 1` batches. They are answered without an update.

    A counted ratio is what the network computed for the batch, a backward as two forwards, over one plain forward of
    each image: samples that were computed and then not used cost time too.

    Paper: Alfarra et al., "Evaluation of Test-Time Adaptation Under Computational Time Constraints", ICML 2024.
    """

    def __init__(self, eta: float, ratio: float | str = "counted") -> None:
        if isinstance(ratio, str) and ratio not in ("counted", "measured"):
            raise ValueError(f"expected ratio 'counted', 'measured' or a number, got {ratio!r}")
        if not 0 <= eta < math.inf or (not isinstance(ratio, str) and not 0 <= ratio < math.inf):
            raise ValueError(f"expected eta >= 0 and a ratio >= 0, got {eta} and {ratio}")
        self.eta, self.ratio, self.to_miss = eta, ratio, 0
        self.ratios: list[float] = []

    def restart(self) -> None:
        """Miss no further batches; called where a new domain begins."""
        self.to_miss = 0

    def misses(self) -> bool:
        """Whether the batch that arrives now is missed."""
        late = self.to_miss > 0
        self.to_miss -= late
        return late

    def spend(self, ratio: float) -> None:
        """Record a call that took as long as `ratio` plain forwards."""
        self.ratios.append(ratio)
        self.to_miss = max(0, math.ceil(self.eta * ratio) - 1)


class StreamRun:
    """Runs an adapter over a stream; counts its totals over all resets, and the seconds in the adapter and in loading.

    Args:
        adapter: An adapter, guarded or not. It is not unloaded at the end.
        delay: The online protocol, or None to wait for the adapter.
        before: Called with the images of each batch before the adapter is.
        prefetch: Batches that a thread loads while the adapter works on others. Answers do not depend on it. By
            default two for a GPU where the stream allows it (`depth_for`), none on a CPU, and none where a delay is
            measured by the clock, which would measure the loading too.
    """

    def __init__(
        self,
        adapter: Adapter | Guard,
        *,
        delay: Delay | None = None,
        before: Callable[[Tensor], None] | None = None,
        prefetch: int | None = None,
    ) -> None:
        self.adapter, self.delay, self._before = adapter, delay, before
        self.prefetch = prefetch
        self.device = next(adapter.model.parameters()).device
        self._by_clock = delay is not None and delay.ratio == "measured"
        self.totals: Counter[str] = Counter()
        """The adapter's totals over all resets, once the stream has ended."""
        self.adapt_seconds = self.load_seconds = 0.0
        """Seconds in the adapter, until its answers are on the CPU, and seconds of waiting for batches."""

    def answers(self, stream: Iterable[Any]) -> Iterator[AnsweredBatch]:
        """Answer every batch of a stream, and reset the adapter where the stream's segments say so."""
        coming, shifts = DeviceBatches(stream, self.device, self._depth(stream)), None
        try:
            while True:
                began = self._time()
                batch = next(coming, None)
                if batch is None:
                    break
                images, labels, segment = batch
                if isinstance(images, Tensor | Mapping):  # the adapter refuses anything else
                    labels = label_indices(labels, _count(images, labels))
                self.load_seconds += self._time() - began
                if segment is not None and segment.reset:
                    self._add_totals()
                    self.adapter.reset()
                if self.delay is not None and segment is not None and (segment.reset or segment.shifts != shifts):
                    self.delay.restart()
                    shifts = segment.shifts
                missed = self.delay is not None and self.delay.misses()
                logits = self._missed(images) if missed else self._adapted(images)
                labels = class_numbers(labels, logits)
                del batch, images  # one batch less in memory while the next one is loaded
                yield AnsweredBatch(logits, labels, segment, None if missed else self.adapter.last)
        finally:
            coming.close()
        self._add_totals()

    def _depth(self, stream: Iterable[Any]) -> int:
        """How many batches to load ahead."""
        if self.prefetch is not None:
            return self.prefetch
        return 0 if self._by_clock else depth_for(stream, self.device)

    def _adapted(self, images: Tensor) -> Tensor:
        """The answer (B, C) on the CPU, with an update."""
        if self._before is not None:
            self._before(images)
            _synchronise(self.device)
        began = self._time()
        answer = self.adapter(images)
        spent = self._time() - began  # by the clock: without what follows
        logits = two_columns(answer).cpu()  # waits for the device
        self.adapt_seconds += spent if self._by_clock else self._time() - began
        if self.delay is not None:
            self.delay.spend(self._ratio(self.delay.ratio, images, len(logits), spent))
        return logits

    def _missed(self, images: Tensor) -> Tensor:
        """The answer (B, C) on the CPU of the network as it was last adapted, without an update."""
        began = self._time()
        with self.adapter.frozen():
            logits = two_columns(self.adapter(images)).cpu()
        self.adapt_seconds += self._time() - began
        return logits

    def _ratio(self, ratio: float | str, images: Tensor, count: int, seconds: float) -> float:
        """The call's cost in plain forwards: as stated, as counted in images computed, or as measured in seconds."""
        if not isinstance(ratio, str):
            return ratio
        if ratio == "counted":
            last = self.adapter.last
            return (last.forwards_computed + 2 * last.backwards_computed) / count
        began = self._time()
        with self.adapter.frozen():
            self.adapter(images)
        return seconds / max(self._time() - began, 1e-9)

    def _time(self) -> float:
        """Seconds on a clock; where a delay is measured by it, once the device has finished its work."""
        if self._by_clock:
            _synchronise(self.device)
        return time.perf_counter()

    def _add_totals(self) -> None:
        """Add the adapter's totals, which a reset clears."""
        self.totals.update(asdict(self.adapter.totals))


class SameBatches:
    """Raises ValueError where a stream gives one method other batches than it gave the first."""

    def __init__(self) -> None:
        self._first: tuple[str, list[str]] | None = None

    def checked(self, name: str, stream: Iterable[Any]) -> Iterator[Any]:
        """The batches of the stream, hashed as they come and compared with those of the first method."""
        seen: list[str] = []
        for batch in as_pixels(stream):
            seen.append(fingerprint(*_tensors(batch[:2] if isinstance(batch, tuple | list) else ())))
            self._compare(name, seen[-1], len(seen))
            yield batch
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


def _tensors(batch: Any) -> list[Tensor]:
    """Every tensor among the images and the labels: of mappings by name, of lists in their order; numbers too."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        return [each for name in sorted(batch, key=str) for each in _tensors(batch[name])]
    if isinstance(batch, tuple | list):
        if batch and all(isinstance(each, int | float) for each in batch):  # labels as a list
            return [torch.as_tensor(batch)]
        return [each for value in batch for each in _tensors(value)]
    return [torch.as_tensor(batch)] if isinstance(batch, np.ndarray) and batch.dtype.kind in "biuf" else []


def _count(images: Tensor | Mapping[str, Any], labels: Any) -> int:
    """The number of samples: of a tensor its length, of a mapping the longest first axis that the labels have too."""
    if isinstance(images, Tensor):
        return len(images)
    lengths = [len(each) for each in images.values() if isinstance(each, Tensor) and each.dim() > 0]
    found = len(labels) if hasattr(labels, "__len__") and getattr(labels, "ndim", 1) > 0 else 1
    return found if found in lengths or not lengths else max(lengths)


def label_indices(labels: Any, count: int) -> Tensor:
    """Labels of `count` images as class numbers (count,); one-hot rows (count, C) stay until the logits are there.

    Accepts whole numbers of any type, in a tensor, an array or a list, of shape (count,) or (count, 1), and one-hot
    rows (count, C).
    """
    found = _label_tensor(labels)
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


def _label_tensor(labels: Any) -> Tensor:
    """Labels of any type as a tensor on the CPU."""
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


def class_numbers(labels: Tensor, logits: Tensor) -> Tensor:
    """Labels as class numbers (B,), each of which must be one of the logits'."""
    if labels.dim() == 2:
        if labels.shape[1] != logits.shape[1]:
            columns = f"expected {logits.shape[1]} columns in one-hot labels, one per logit"
            raise ValueError(f"{columns}, got {labels.shape[1]}; see classes= for a mask")
        labels = labels.int().argmax(1)
    low, high = int(labels.min()), int(labels.max())
    if high >= logits.shape[1] or low < 0:
        raise ValueError(f"expected labels 0..{logits.shape[1] - 1}, got {low}..{high}; see classes= for a mask")
    return labels


def _synchronise(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
