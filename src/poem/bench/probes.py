"""Numbers for figures beside accuracy: entropy before and after the updates of a batch, and gradient norms.

A probe is updated with a `ProbeBatch` and gives plain values for JSON: accuracies and confidences in percent, entropies
in nats, shares of ln C where it says so. A value that does not exist is left out, or None inside a list.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from poem.bench.metrics import predicted
from poem.engine.accounting import BatchRecord

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
BINS = 20
"""Bins of entropy, of equal width from 0 to ln C."""


@dataclass(frozen=True)
class ProbeBatch:
    """Entropies, confidences and correctness of one batch, an array (B,) each.

    "Before" is the first forward pass, "after" the last one; the pseudo-label is the answer before.
    """

    entropy_before: Floats
    """Of the predictions before, in nats."""
    entropy_after: Floats
    """Of the predictions after, in nats."""
    confidence: Floats
    """Largest probability before."""
    pseudo_label_right: Bools
    answer_right: Bools
    """Whether the answer that the adapter returned is right."""
    low: Bools
    """Entropy below the threshold before; all False without a threshold."""
    newly: Bools
    """Potentially reliable: entropy not below the threshold before, selected in a later forward pass."""

    @classmethod
    def of(cls, entry: BatchRecord, logits: Tensor, labels: Tensor, threshold: float | None) -> ProbeBatch | None:
        """From an adapter's `last`, its answers and the labels; None where the first pass was over augmented views."""
        first_logits = entry.first_logits.cpu().double()
        if len(first_logits) != len(labels):
            return None
        confidence, pseudo = first_logits.softmax(1).amax(1), predicted(first_logits)
        before, after = (each.cpu().double().numpy() for each in entry.entropy)
        limit = -math.inf if threshold is None else threshold
        low, finite = before < limit, np.isfinite(before) & (threshold is not None)
        newly = entry.newly_reliable.cpu().numpy() & finite & ~low
        truth = labels.cpu()
        right, answer = (pseudo == truth).numpy(), (predicted(logits).cpu() == truth).numpy()
        return cls(before, after, confidence.nan_to_num(0.0).numpy(), right, answer, low, newly)


class Probe(Protocol):
    """Numbers over a stream, updated batch by batch."""

    def update(self, batch: ProbeBatch) -> None:
        """Take a batch's samples into the numbers."""
        ...

    def result(self) -> dict[str, Any]:
        """Plain values for JSON."""
        ...


class Groups:
    """Number, accuracy and confidence of low-entropy, potentially reliable and other high-entropy samples."""

    def __init__(self) -> None:
        self._sums = {name: np.zeros(4) for name in ("low", "newly", "high")}

    def update(self, batch: ProbeBatch) -> None:
        """Count the batch's samples in each group, and sum what is averaged over them."""
        for name, mask in (("low", batch.low), ("newly", batch.newly), ("high", ~batch.low & ~batch.newly)):
            values = (batch.pseudo_label_right, batch.answer_right, batch.confidence)
            self._sums[name] += [mask.sum(), *(value[mask].sum() for value in values)]

    def result(self) -> dict[str, dict[str, float]]:
        """`n`, `accuracy` of pseudo-labels, `accuracy_last` of the answers, `confidence`."""
        return {name: self._group(*sums.tolist()) for name, sums in self._sums.items()}

    @staticmethod
    def _group(n: float, right: float, answer: float, confidence: float) -> dict[str, float]:
        if not n:
            return {"n": 0}
        shares = {"accuracy": right, "accuracy_last": answer, "confidence": confidence}
        return {"n": int(n), **{name: 100 * value / n for name, value in shares.items()}}


class Transitions:
    """Counts of samples by whether their entropy is below the threshold before and after."""

    def __init__(self, threshold: float) -> None:
        self.threshold, self._counts = threshold, np.zeros((2, 2), np.int64)

    def update(self, batch: ProbeBatch) -> None:
        """Count the batch's samples by both."""
        high = (~(entropy < self.threshold) for entropy in (batch.entropy_before, batch.entropy_after))
        np.add.at(self._counts, tuple(each.astype(np.int64) for each in high), 1)

    def result(self) -> dict[str, float]:
        """Counts by (before, after), such as `high_low`."""
        words = ("low", "high")
        named = {f"{a}_{b}": int(self._counts[i, j]) for i, a in enumerate(words) for j, b in enumerate(words)}
        return {"threshold": self.threshold, **named}


class EntropyBins:
    """Counts by entropy before, in units of ln C."""

    def __init__(self, classes: int) -> None:
        self._top = math.log(max(classes, 2))
        names = ("n", "right", "confidence", "newly_n", "newly_right")
        self._sums = {name: np.zeros(BINS) for name in names}

    def update(self, batch: ProbeBatch) -> None:
        """Sum counts and confidences of the batch's samples in their bins."""
        bins, right = binned(batch.entropy_before, self._top), batch.pseudo_label_right
        weights = (np.ones(len(bins)), right, batch.confidence, batch.newly, batch.newly & right)
        for sums, weight in zip(self._sums.values(), weights, strict=True):
            sums += np.bincount(bins, weights=weight, minlength=BINS)

    def result(self) -> dict[str, list[float]]:
        """Edges, counts, and the sum of confidences per bin."""
        found: dict[str, list[float]] = {"edges": edges()}
        for name, sums in self._sums.items():
            found[name] = sums.tolist() if name == "confidence" else sums.astype(int).tolist()
        return found


class _Arrays:
    """Named lists of arrays, one array per batch, concatenated when they are read."""

    def __init__(self, *names: str) -> None:
        self._held: dict[str, list[NDArray[Any]]] = {name: [] for name in names}

    def append(self, **arrays: NDArray[Any]) -> None:
        for name, array in arrays.items():
            self._held[name].append(array)

    def all(self, name: str, kind: type) -> NDArray[Any]:
        held = self._held[name]
        return np.concatenate(held) if held else np.zeros(0, kind)


class EntropyRange:
    """Accuracy of potentially reliable samples and of the other samples in the same range of entropy.

    The range is the 5th to the 95th percentile of the potentially reliable samples' entropy before.
    """

    def __init__(self) -> None:
        self._arrays = _Arrays("entropy", "right", "newly")

    def update(self, batch: ProbeBatch) -> None:
        """Keep the batch's entropies and whether its samples were right and newly reliable."""
        self._arrays.append(entropy=batch.entropy_before, right=batch.pseudo_label_right, newly=batch.newly)

    def bounds(self) -> tuple[float, float] | None:
        """The range in nats, or None where no sample was potentially reliable."""
        entropy, newly = self._arrays.all("entropy", float), self._arrays.all("newly", bool)
        if not newly.any():
            return None
        low, high = np.percentile(entropy[newly], (5, 95), method="inverted_cdf").tolist()
        return float(low), float(high)

    def result(self) -> dict[str, Any]:
        """`low` and `high`, and of each group within them: `n` and `accuracy`."""
        entropy, right, newly = (self._arrays.all(name, bool) for name in ("entropy", "right", "newly"))
        bounds = self.bounds()
        if bounds is None:
            return {name: {"n": 0} for name in ("newly", "all", "others")}
        inside = (entropy >= bounds[0]) & (entropy <= bounds[1])
        masks = {"newly": inside & newly, "all": inside, "others": inside & ~newly}
        return {"low": bounds[0], "high": bounds[1], **{name: _accuracy(right, mask) for name, mask in masks.items()}}


class Gradients:
    """Gradient norm and pseudo-label accuracy of each sample, by its entropy before.

    Norms come from `Adapter.gradient_norms`, called just before the batch is adapted to. Four areas of entropy:

    - `zone`: the range of `EntropyRange` (the paper's green zone);
    - `area3`: below the zone: confident already, with small gradients;
    - `area2`: above the zone, up to 0.8 ln C: pseudo-labels begin to fail;
    - `area1`: above that: close to guessing.

    Without potentially reliable samples there are no areas.
    """

    AREA1 = 0.8
    """Lower bound of area 1, in units of ln C."""

    def __init__(self, classes: int) -> None:
        self._top = math.log(max(classes, 2))
        self._arrays = _Arrays("entropy", "right", "norm")
        self._nonfinite = 0

    def update(self, batch: ProbeBatch, norms: Floats) -> None:
        """Add a batch with the gradient norm of each sample; norms that are not finite are only counted."""
        finite = np.isfinite(norms)
        self._nonfinite += int((~finite).sum())
        entropy, right = batch.entropy_before[finite], batch.pseudo_label_right[finite]
        self._arrays.append(entropy=entropy, right=right, norm=norms[finite])

    def result(self, zone: tuple[float, float] | None) -> dict[str, Any]:
        """By bin of entropy: `n`, `norm` (mean, `norm_p10`, `norm_p90`), `accuracy`; the areas; `nonfinite` if any."""
        entropy, right, norm = (self._arrays.all(name, bool) for name in ("entropy", "right", "norm"))
        bins = binned(entropy, self._top)
        masks = [bins == at for at in range(BINS)]
        return {
            "edges": edges(),
            "n": [int(mask.sum()) for mask in masks],
            "norm": [float(norm[mask].mean()) if mask.any() else None for mask in masks],
            "norm_p10": [float(np.percentile(norm[mask], 10)) if mask.any() else None for mask in masks],
            "norm_p90": [float(np.percentile(norm[mask], 90)) if mask.any() else None for mask in masks],
            "accuracy": [100 * float(right[mask].mean()) if mask.any() else None for mask in masks],
            "areas": {} if zone is None else self._areas(zone, entropy, right, norm),
            **({"nonfinite": self._nonfinite} if self._nonfinite else {}),
        }

    def _areas(
        self, zone: tuple[float, float], entropy: NDArray[Any], right: Bools, norm: NDArray[Any]
    ) -> dict[str, dict[str, float]]:
        """Each area's range in nats, `n`, mean `norm` and `accuracy`."""
        border = max(self.AREA1 * self._top, zone[1])
        masks = {
            "area3": (entropy < zone[0], 0.0, zone[0]),
            "zone": ((entropy >= zone[0]) & (entropy <= zone[1]), *zone),
            "area2": ((entropy > zone[1]) & (entropy <= border), zone[1], border),
            "area1": (entropy > border, border, self._top),
        }
        return {
            name: {"low": low, "high": high, **_accuracy(right, mask), **_mean(norm, mask)}
            for name, (mask, low, high) in masks.items()
        }


class Probes:
    """Every probe of a stream, behind one `update`."""

    def __init__(self, margin: float | None, wanted: tuple[str, ...] = ()) -> None:
        for name in wanted:
            if name != "gradients":
                raise ValueError(f"unknown probe {name!r}; known: gradients")
        self._margin, self._wanted = margin, wanted
        self._groups, self._range = Groups(), EntropyRange()
        self._by_classes: dict[str, Any] = {}  # probes that need the number of classes, made with the first batch
        self._threshold: float | None = None

    def update(self, entry: BatchRecord, logits: Tensor, labels: Tensor, norms: Tensor | None = None) -> None:
        """Add a batch: the adapter's `last`, its answers (B, C), the labels (B,), and gradient norms (B,)."""
        if not self._by_classes:
            self._begin(logits.shape[1])
        batch = ProbeBatch.of(entry, logits, labels, self._threshold)
        if batch is None:
            return
        for probe in (self._groups, self._range, *self._by_classes.values()):
            if not isinstance(probe, Gradients):
                probe.update(batch)
            elif norms is not None:
                probe.update(batch, norms.cpu().double().numpy())

    def groups(self) -> dict[str, dict[str, float]]:
        """The field `groups` of a result; every group is empty where the method has no threshold."""
        return self._groups.result() if self._margin is not None else Groups().result()

    def result(self) -> dict[str, Any]:
        """The field `probes` of a result."""
        found: dict[str, Any] = {} if self._margin is None else {"range": self._range.result()}
        for name, probe in self._by_classes.items():
            found[name] = probe.result(self._range.bounds()) if isinstance(probe, Gradients) else probe.result()
        return found

    def _begin(self, classes: int) -> None:
        if self._margin is not None:
            self._threshold = self._margin * math.log(classes)
            self._by_classes["transitions"] = Transitions(self._threshold)
        self._by_classes["entropy_bins"] = EntropyBins(classes)
        if "gradients" in self._wanted:
            self._by_classes["gradients"] = Gradients(classes)


def edges() -> list[float]:
    """Edges of the bins of entropy, in units of ln C."""
    return [at / BINS for at in range(BINS + 1)]


def binned(entropy: NDArray[Any], top: float) -> NDArray[np.int64]:
    """The bin of each entropy; one that is not finite is in the last bin."""
    share = np.nan_to_num(entropy / top, nan=1.0, posinf=1.0)
    return np.clip((share * BINS).astype(np.int64), 0, BINS - 1)


def _accuracy(right: Bools, mask: Bools) -> dict[str, float]:
    n = int(mask.sum())
    return {"n": n, "accuracy": 100 * float(right[mask].mean())} if n else {"n": 0}


def _mean(norm: NDArray[Any], mask: Bools) -> dict[str, float]:
    return {"norm": float(norm[mask].mean())} if mask.any() else {}


def finite_values(values: Mapping[str, float]) -> dict[str, float]:
    """The entries whose value is finite."""
    return {name: value for name, value in values.items() if math.isfinite(value)}
