"""What figures need beside accuracy: who is low in entropy, who becomes so, and what each would teach.

A probe takes in a `Sight` per batch and gives plain values for JSON: accuracies and confidences in percent, entropies
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
Truths = NDArray[np.bool_]
BINS = 20
"""Bins of entropy, of equal width from 0 to ln C."""


@dataclass(frozen=True)
class Sight:
    """What one batch showed, an array (B,) each; the pseudo-label is the answer at the first look."""

    first: Floats
    """Entropy in nats at the first look."""
    last: Floats
    """And at the last."""
    confidence: Floats
    """Largest probability at the first look."""
    right: Truths
    """Whether the pseudo-label is right."""
    answer: Truths
    """Whether the answer given is right."""
    low: Truths
    """Entropy below the threshold at the first look; nobody where there is no threshold."""
    newly: Truths
    """Potentially reliable: not low at the first look, selected at a later one."""

    @classmethod
    def of(cls, entry: BatchRecord, logits: Tensor, labels: Tensor, threshold: float | None) -> Sight | None:
        """From an adapter's account of a batch, its answers and the truth; None where it looked at no single image."""
        looks = entry.first_logits.cpu().double()
        if len(looks) != len(labels):
            return None
        confidence, pseudo = looks.softmax(1).amax(1), predicted(looks)
        first, last = (each.cpu().double().numpy() for each in entry.entropy)
        limit = -math.inf if threshold is None else threshold
        low, known = first < limit, np.isfinite(first) & (threshold is not None)
        newly = entry.newly_reliable.cpu().numpy() & known & ~low
        truth = labels.cpu()
        right, answer = (pseudo == truth).numpy(), (predicted(logits).cpu() == truth).numpy()
        return cls(first, last, confidence.nan_to_num(0.0).numpy(), right, answer, low, newly)


class Probe(Protocol):
    """Something that watches."""

    def update(self, sight: Sight) -> None:
        """Take in a batch."""
        ...

    def result(self) -> dict[str, Any]:
        """Plain values."""
        ...


class Groups:
    """Low-entropy, potentially reliable and other high-entropy samples: how many, how often right, how confident."""

    def __init__(self) -> None:
        self._sums = {name: np.zeros(4) for name in ("low", "newly", "high")}

    def update(self, sight: Sight) -> None:
        """Take in a batch."""
        for name, mask in (("low", sight.low), ("newly", sight.newly), ("high", ~sight.low & ~sight.newly)):
            values = (sight.right, sight.answer, sight.confidence)
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
    """Who was below the threshold at the first look, and who is at the last."""

    def __init__(self, threshold: float) -> None:
        self.threshold, self._counts = threshold, np.zeros((2, 2), np.int64)

    def update(self, sight: Sight) -> None:
        """Take in a batch."""
        high = (~(entropy < self.threshold) for entropy in (sight.first, sight.last))
        np.add.at(self._counts, tuple(each.astype(np.int64) for each in high), 1)

    def result(self) -> dict[str, float]:
        """Counts by (first, last)."""
        words = ("low", "high")
        named = {f"{a}_{b}": int(self._counts[i, j]) for i, a in enumerate(words) for j, b in enumerate(words)}
        return {"threshold": self.threshold, **named}


class EntropyBins:
    """Counts by entropy at the first look, in units of ln C."""

    def __init__(self, classes: int) -> None:
        self._top = math.log(max(classes, 2))
        names = ("n", "right", "confidence", "newly_n", "newly_right")
        self._sums = {name: np.zeros(BINS) for name in names}

    def update(self, sight: Sight) -> None:
        """Take in a batch."""
        place = binned(sight.first, self._top)
        weights = (np.ones(len(place)), sight.right, sight.confidence, sight.newly, sight.newly & sight.right)
        for sums, weight in zip(self._sums.values(), weights, strict=True):
            sums += np.bincount(place, weights=weight, minlength=BINS)

    def result(self) -> dict[str, list[float]]:
        """Edges, counts, and the sum of confidences per bin."""
        found: dict[str, list[float]] = {"edges": edges()}
        for name, sums in self._sums.items():
            found[name] = sums.tolist() if name == "confidence" else sums.astype(int).tolist()
        return found


class _Keeps:
    """Keeps a few arrays per batch, and puts them together at the end."""

    def __init__(self, *names: str) -> None:
        self._held: dict[str, list[NDArray[Any]]] = {name: [] for name in names}

    def keep(self, **arrays: NDArray[Any]) -> None:
        for name, array in arrays.items():
            self._held[name].append(array)

    def all(self, name: str, kind: type) -> NDArray[Any]:
        held = self._held[name]
        return np.concatenate(held) if held else np.zeros(0, kind)


class Range:
    """Potentially reliable samples beside everyone else of the same entropy.

    The range is the 5th to the 95th percentile of the entropy at the first look of the potentially reliable ones.
    """

    def __init__(self) -> None:
        self._kept = _Keeps("entropy", "right", "newly")

    def update(self, sight: Sight) -> None:
        """Take in a batch."""
        self._kept.keep(entropy=sight.first, right=sight.right, newly=sight.newly)

    def zone(self) -> tuple[float, float] | None:
        """The range in nats, or None where nobody was potentially reliable."""
        entropy, newly = self._kept.all("entropy", float), self._kept.all("newly", bool)
        if not newly.any():
            return None
        low, high = np.percentile(entropy[newly], (5, 95), method="inverted_cdf").tolist()
        return float(low), float(high)

    def result(self) -> dict[str, Any]:
        """`low` and `high`, and of each group within them: `n` and `accuracy`."""
        entropy, right, newly = (self._kept.all(name, bool) for name in ("entropy", "right", "newly"))
        zone = self.zone()
        if zone is None:
            return {name: {"n": 0} for name in ("newly", "all", "others")}
        inside = (entropy >= zone[0]) & (entropy <= zone[1])
        masks = {"newly": inside & newly, "all": inside, "others": inside & ~newly}
        return {"low": zone[0], "high": zone[1], **{name: _accuracy(right, mask) for name, mask in masks.items()}}


class Gradients:
    """How large a gradient each sample would give, by its entropy, and how good its pseudo-label is.

    Norms come from `Adapter.gradient_norms`, taken just before the batch. Four areas, as ranges of entropy at the first
    look:

    - `zone`: the 5th to the 95th percentile of the potentially reliable samples' entropies (the paper's green zone);
    - `area3`: below the zone: sure already, with little left to teach;
    - `area2`: above the zone, up to 0.8 ln C: labels begin to fail;
    - `area1`: above that: close to guessing.

    Without potentially reliable samples there are no areas.
    """

    DOUBTFUL = 0.8
    """Where area 1 begins, in units of ln C."""

    def __init__(self, classes: int) -> None:
        self._top = math.log(max(classes, 2))
        self._kept = _Keeps("entropy", "right", "norm")
        self._left_out = 0

    def update(self, sight: Sight, norms: Floats) -> None:
        """Take in a batch, with the norm of each sample; those that are not finite are counted apart."""
        sound = np.isfinite(norms)
        self._left_out += int((~sound).sum())
        self._kept.keep(entropy=sight.first[sound], right=sight.right[sound], norm=norms[sound])

    def result(self, zone: tuple[float, float] | None) -> dict[str, Any]:
        """By bin of entropy: `n`, `norm` (mean, `norm_p10`, `norm_p90`), `accuracy`; the areas; `nonfinite` if any."""
        entropy, right, norm = (self._kept.all(name, bool) for name in ("entropy", "right", "norm"))
        place = binned(entropy, self._top)
        masks = [place == at for at in range(BINS)]
        return {
            "edges": edges(),
            "n": [int(mask.sum()) for mask in masks],
            "norm": [float(norm[mask].mean()) if mask.any() else None for mask in masks],
            "norm_p10": [float(np.percentile(norm[mask], 10)) if mask.any() else None for mask in masks],
            "norm_p90": [float(np.percentile(norm[mask], 90)) if mask.any() else None for mask in masks],
            "accuracy": [100 * float(right[mask].mean()) if mask.any() else None for mask in masks],
            "areas": {} if zone is None else self._areas(zone, entropy, right, norm),
            **({"nonfinite": self._left_out} if self._left_out else {}),
        }

    def _areas(
        self, zone: tuple[float, float], entropy: NDArray[Any], right: Truths, norm: NDArray[Any]
    ) -> dict[str, dict[str, float]]:
        """Each area's range in nats, `n`, mean `norm` and `accuracy`."""
        doubtful = max(self.DOUBTFUL * self._top, zone[1])
        masks = {
            "area3": (entropy < zone[0], 0.0, zone[0]),
            "zone": ((entropy >= zone[0]) & (entropy <= zone[1]), *zone),
            "area2": ((entropy > zone[1]) & (entropy <= doubtful), zone[1], doubtful),
            "area1": (entropy > doubtful, doubtful, self._top),
        }
        return {
            name: {"low": low, "high": high, **_accuracy(right, mask), **_mean(norm, mask)}
            for name, (mask, low, high) in masks.items()
        }


class Probes:
    """Every probe that a run can feed, behind one `update`."""

    def __init__(self, margin: float | None, wanted: tuple[str, ...] = ()) -> None:
        for name in wanted:
            if name != "gradients":
                raise ValueError(f"unknown probe {name!r}; known: gradients")
        self._margin, self._wanted = margin, wanted
        self._groups, self._range = Groups(), Range()
        self._by_size: dict[str, Any] = {}  # what needs the number of classes, known with the first batch
        self._threshold: float | None = None

    def update(self, entry: BatchRecord, logits: Tensor, labels: Tensor, norms: Tensor | None = None) -> None:
        """Take in a batch: the adapter's account of it, its answers (B, C), the truth (B,), and gradient norms (B,)."""
        if not self._by_size:
            self._begin(logits.shape[1])
        sight = Sight.of(entry, logits, labels, self._threshold)
        if sight is None:
            return
        for probe in (self._groups, self._range, *self._by_size.values()):
            if not isinstance(probe, Gradients):
                probe.update(sight)
            elif norms is not None:
                probe.update(sight, norms.cpu().double().numpy())

    def groups(self) -> dict[str, dict[str, float]]:
        """For `Report.groups`; without a threshold there are no groups, and each is empty."""
        return self._groups.result() if self._margin is not None else Groups().result()

    def result(self) -> dict[str, Any]:
        """For `Report.probes`."""
        found: dict[str, Any] = {} if self._margin is None else {"range": self._range.result()}
        for name, probe in self._by_size.items():
            found[name] = probe.result(self._range.zone()) if isinstance(probe, Gradients) else probe.result()
        return found

    def _begin(self, classes: int) -> None:
        if self._margin is not None:
            self._threshold = self._margin * math.log(classes)
            self._by_size["transitions"] = Transitions(self._threshold)
        self._by_size["entropy_bins"] = EntropyBins(classes)
        if "gradients" in self._wanted:
            self._by_size["gradients"] = Gradients(classes)


def edges() -> list[float]:
    """The borders of the bins, in units of ln C."""
    return [at / BINS for at in range(BINS + 1)]


def binned(entropy: NDArray[Any], top: float) -> NDArray[np.int64]:
    """The bin of each entropy; what is not finite counts as the highest."""
    share = np.nan_to_num(entropy / top, nan=1.0, posinf=1.0)
    return np.clip((share * BINS).astype(np.int64), 0, BINS - 1)


def _accuracy(right: Truths, mask: Truths) -> dict[str, float]:
    n = int(mask.sum())
    return {"n": n, "accuracy": 100 * float(right[mask].mean())} if n else {"n": 0}


def _mean(norm: NDArray[Any], mask: Truths) -> dict[str, float]:
    return {"norm": float(norm[mask].mean())} if mask.any() else {}


def plain(values: Mapping[str, float]) -> dict[str, float]:
    """Without what is not a finite number."""
    return {name: value for name, value in values.items() if math.isfinite(value)}
