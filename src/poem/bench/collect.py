"""Collects what a result holds of one cell's stream: metrics overall, by domain and by window, probes and notes."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch import Tensor

from poem.bench.cell import Cell
from poem.bench.metrics import AURC, ECE, NLL, Accuracy, Metric, NonFinite, Windows, predicted
from poem.bench.probes import Probes, finite_values
from poem.bench.run_stream import AnsweredBatch, Delay
from poem.bench.sample_cells import HASH_DIGITS, bits_text
from poem.engine.accounting import BatchRecord
from poem.recipes.recipe import Recipe


class DomainMetrics:
    """Accuracy, ECE and NLL over the samples of one shift."""

    def __init__(self) -> None:
        self.n = 0
        self._accuracy, self._ece, self._nll = Accuracy(), ECE(), NLL()

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add the rows of a batch that are of this shift."""
        self.n += len(labels)
        for metric in (self._accuracy, self._ece, self._nll):
            metric.update(logits, labels)

    def result(self) -> dict[str, float]:
        """`n`, `top1` and `ece` in percent, `nll` in nats; some may not be finite."""
        found = {"top1": 100 * self._accuracy.result(), "ece": 100 * self._ece.result(), "nll": self._nll.result()}
        return {"n": self.n, **found}


class Collector:
    """Collects metrics, probes and notes from every answered batch; `flush` before reading the results.

    Small batches are queued and counted together, which costs less than counting each.
    """

    QUEUED_IMAGES = 256
    """Images in the queue from which on they are counted."""

    def __init__(self, cell: Cell, recipe: Recipe) -> None:
        self.n = self.classes = 0
        self.domains: dict[str, DomainMetrics] = {}
        self.windows = Windows(cell.window)
        self.probes = Probes(recipe.select.margin, cell.probes)
        self.notes: dict[str, None] = {}
        self.norms: Tensor | None = None
        """Gradient norms of the batch that comes next, for the probe "gradients"."""
        self._metrics: dict[str, Metric] = {"top1": Accuracy(), "top5": Accuracy(5), "ece": ECE(), "aurc": AURC()}
        self._nll, self._nonfinite = NLL(), NonFinite()
        self._entropy = torch.zeros(2, dtype=torch.float64)
        self._online = {True: Accuracy(), False: Accuracy()}  # by whether the batch was adapted to
        self._batches = self._adapted_batches = self._adapted_images = 0
        self._right: list[Tensor] = []
        self._labels = hashlib.sha256()
        self._queue: list[AnsweredBatch] = []
        self._queued_norms: list[Tensor] = []

    def update(self, answered: AnsweredBatch) -> None:
        """Queue an answered batch; batches of one kind are scored together."""
        if self._queue and not _can_be_joined(self._queue[0], answered):
            self.flush()
        self._queue.append(answered)
        if self.norms is not None:
            self._queued_norms.append(self.norms)
            self.norms = None
        self.n, self.classes = self.n + len(answered.labels), answered.logits.shape[1]
        self._batches += 1
        if answered.entry is not None:
            self._adapted_batches += 1
            self.notes.update(dict.fromkeys(answered.entry.notes))
        if sum(len(each.labels) for each in self._queue) >= self.QUEUED_IMAGES:
            self.flush()

    def flush(self) -> None:
        """Count the queued batches."""
        if not self._queue:
            return
        logits = torch.cat([each.logits for each in self._queue])
        labels = torch.cat([each.labels for each in self._queue])
        entries = [each.entry for each in self._queue if each.entry is not None]
        metrics: list[Metric] = [*self._metrics.values(), self._nll, self._nonfinite, self.windows]
        metrics.append(self._online[bool(entries)])
        for metric in metrics:
            metric.update(logits, labels)
        self._update_domains(logits, labels)
        self._right.append(predicted(logits).cpu() == labels.cpu())
        self._labels.update(labels.cpu().numpy().astype("<i8").tobytes())
        if entries:
            entry = BatchRecord()
            entry.merge(entries)
            self._adapted_images += len(labels)
            self._entropy += torch.stack([each.cpu().double().sum() for each in entry.entropy])
            self.probes.update(entry, logits, labels, torch.cat(self._queued_norms) if self._queued_norms else None)
        self._queue, self._queued_norms = [], []

    def result_fields(self, delay: Delay | None = None) -> dict[str, Any]:
        """The fields of a `CellResult` that are collected here."""
        online = {} if delay is None else {"online": self._online_probe(delay)}
        return {
            "nonfinite": self.nonfinite,
            "metrics": finite_values(self._overall()),
            "domains": {name: finite_values(domain.result()) for name, domain in self.domains.items()},
            "windows": [100 * each for each in self.windows.accuracies()],
            "groups": self.probes.groups(),
            "probes": {**self.probes.result(), **online},
            "samples": self._samples(),
        }

    def _samples(self) -> dict[str, str]:
        right = torch.cat(self._right).numpy() if self._right else np.zeros(0, bool)
        return {"right": bits_text(right), "labels": self._labels.hexdigest()[:HASH_DIGITS]}

    @property
    def nonfinite(self) -> int:
        """The number of answers that were NaN or infinite."""
        return int(self._nonfinite.result())

    @property
    def nonfinite_metrics(self) -> list[str]:
        """Names of metrics that are not finite, overall or in a domain; JSON cannot hold them."""
        every = [self._overall(), *(domain.result() for domain in self.domains.values())]
        return list(dict.fromkeys(name for values in every for name in values if name not in finite_values(values)))

    def _overall(self) -> dict[str, float]:
        found = {name: 100 * metric.result() for name, metric in self._metrics.items()}
        if self.classes <= 5:
            del found["top5"]
        before, after = (self._entropy / max(self._adapted_images, 1)).tolist()
        found.update(worst_window=100 * self.windows.result(), nll=self._nll.result())
        return {**found, "entropy_before": before, "entropy_after": after}

    def _online_probe(self, delay: Delay) -> dict[str, Any]:
        missed = self._batches - self._adapted_batches
        found: dict[str, Any] = {"ratio": sum(delay.ratios) / max(len(delay.ratios), 1)}
        found.update(adapted=self._adapted_batches, missed=missed, top1_adapted=100 * self._online[True].result())
        return {**found, "top1_missed": 100 * self._online[False].result()} if missed else found

    def _update_domains(self, logits: Tensor, labels: Tensor) -> None:
        """Count each row for its own shift; a batch of a mixed stream has several."""
        segments = [each.segment for each in self._queue if each.segment is not None]
        if not segments:
            return
        which = torch.cat([torch.from_numpy(segment.which) for segment in segments])
        for at, shift in enumerate(segments[0].shifts):
            rows = slice(None) if len(segments[0].shifts) == 1 else which == at
            if len(labels[rows]):
                self.domains.setdefault(str(shift), DomainMetrics()).update(logits[rows], labels[rows])


def _can_be_joined(one: AnsweredBatch, other: AnsweredBatch) -> bool:
    """Whether two batches can be counted together: of the same shifts, and both adapted to or both missed."""
    shifts = [None if each.segment is None else each.segment.shifts for each in (one, other)]
    return shifts[0] == shifts[1] and (one.entry is None) == (other.entry is None)
