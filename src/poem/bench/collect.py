"""All that is counted over one run of a cell: metrics over the stream, by domain and by window, probes, notes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from poem.bench.cell import Cell
from poem.bench.metrics import AURC, ECE, NLL, Accuracy, Metric, NonFinite, Windows
from poem.bench.probes import Probes, plain
from poem.bench.run_stream import Answered, Delay
from poem.engine.accounting import BatchRecord
from poem.recipes.recipe import Recipe


class Domain:
    """One shift's share of a stream."""

    def __init__(self) -> None:
        self.n = 0
        self._accuracy, self._ece, self._nll = Accuracy(), ECE(), NLL()

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Take in some rows of a batch."""
        self.n += len(labels)
        for metric in (self._accuracy, self._ece, self._nll):
            metric.update(logits, labels)

    def result(self) -> dict[str, float]:
        """`n`, `top1` and `ece` in percent, `nll` in nats; some may not be finite."""
        found = {"top1": 100 * self._accuracy.result(), "ece": 100 * self._ece.result(), "nll": self._nll.result()}
        return {"n": self.n, **found}


class Tally:
    """Fed with every batch that was answered; small batches wait for each other, so that counting them costs little.

    Results are there after `close`.
    """

    TOGETHER = 256
    """Images that are counted in one go."""

    def __init__(self, cell: Cell, recipe: Recipe) -> None:
        self.n = self.classes = 0
        self.domains: dict[str, Domain] = {}
        self.windows = Windows(cell.window)
        self.probes = Probes(recipe.select.margin, cell.probes)
        self.notes: dict[str, None] = {}
        self.norms: Tensor | None = None
        """Gradient norms of the batch that comes next, where they were asked for."""
        self._metrics: dict[str, Metric] = {"top1": Accuracy(), "top5": Accuracy(5), "ece": ECE(), "aurc": AURC()}
        self._nll, self._nonfinite = NLL(), NonFinite()
        self._entropy = torch.zeros(2, dtype=torch.float64)
        self._online = {True: Accuracy(), False: Accuracy()}  # by whether the batch was adapted to
        self._adapted = self._batches = self._learnt = 0
        self._waiting: list[Answered] = []
        self._norms: list[Tensor] = []  # of those that wait

    def update(self, answered: Answered) -> None:
        """Take in a batch."""
        if self._waiting and not _alike(self._waiting[0], answered):
            self.close()
        self._waiting.append(answered)
        if self.norms is not None:
            self._norms.append(self.norms)
            self.norms = None
        self.n, self.classes = self.n + len(answered.labels), answered.logits.shape[1]
        self._batches += 1
        if answered.entry is not None:
            self._learnt += 1
            self.notes.update(dict.fromkeys(answered.entry.notes))
        if sum(len(each.labels) for each in self._waiting) >= self.TOGETHER:
            self.close()

    def close(self) -> None:
        """Count those that wait."""
        if not self._waiting:
            return
        logits = torch.cat([each.logits for each in self._waiting])
        labels = torch.cat([each.labels for each in self._waiting])
        entries = [each.entry for each in self._waiting if each.entry is not None]
        metrics: list[Metric] = [*self._metrics.values(), self._nll, self._nonfinite, self.windows]
        metrics.append(self._online[bool(entries)])
        for metric in metrics:
            metric.update(logits, labels)
        self._by_domain(logits, labels)
        if entries:
            entry = BatchRecord()
            entry.merge(entries)
            self._adapted += len(labels)
            self._entropy += torch.stack([each.cpu().double().sum() for each in entry.entropy])
            self.probes.update(entry, logits, labels, torch.cat(self._norms) if self._norms else None)
        self._waiting, self._norms = [], []

    def found(self, delay: Delay | None = None) -> dict[str, Any]:
        """The fields of a report that are counted here."""
        online = {} if delay is None else {"online": self._online_probe(delay)}
        return {
            "nonfinite": self.nonfinite,
            "metrics": plain(self._overall()),
            "domains": {name: plain(domain.result()) for name, domain in self.domains.items()},
            "windows": [100 * each for each in self.windows.accuracies()],
            "groups": self.probes.groups(),
            "probes": {**self.probes.result(), **online},
        }

    @property
    def nonfinite(self) -> int:
        """Answers that were NaN or infinite."""
        return int(self._nonfinite.result())

    @property
    def left_out(self) -> list[str]:
        """Metrics that are not finite, over the stream or in one of its domains, which JSON cannot hold."""
        every = [self._overall(), *(domain.result() for domain in self.domains.values())]
        return list(dict.fromkeys(name for values in every for name in values if name not in plain(values)))

    def _overall(self) -> dict[str, float]:
        found = {name: 100 * metric.result() for name, metric in self._metrics.items()}
        if self.classes <= 5:
            del found["top5"]
        before, after = (self._entropy / max(self._adapted, 1)).tolist()
        found.update(worst_window=100 * self.windows.result(), nll=self._nll.result())
        return {**found, "entropy_before": before, "entropy_after": after}

    def _online_probe(self, delay: Delay) -> dict[str, Any]:
        missed = self._batches - self._learnt
        found: dict[str, Any] = {"ratio": sum(delay.ratios) / max(len(delay.ratios), 1)}
        found.update(adapted=self._learnt, missed=missed, top1_adapted=100 * self._online[True].result())
        return {**found, "top1_missed": 100 * self._online[False].result()} if missed else found

    def _by_domain(self, logits: Tensor, labels: Tensor) -> None:
        """Each row to its own shift; a batch of a mixed stream holds several."""
        segments = [each.segment for each in self._waiting if each.segment is not None]
        if not segments:
            return
        which = torch.cat([torch.from_numpy(segment.which) for segment in segments])
        for at, shift in enumerate(segments[0].shifts):
            rows = slice(None) if len(segments[0].shifts) == 1 else which == at
            if len(labels[rows]):
                self.domains.setdefault(str(shift), Domain()).update(logits[rows], labels[rows])


def _alike(one: Answered, other: Answered) -> bool:
    """Whether two batches can be counted together: of the same domains, and both adapted to or both missed."""
    shifts = [None if each.segment is None else each.segment.shifts for each in (one, other)]
    return shifts[0] == shifts[1] and (one.entry is None) == (other.entry is None)
