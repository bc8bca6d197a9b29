"""Metrics over logits and labels, with `update`, `result` and `reset`: the only code that reads labels.

An answer that is not finite (NaN, infinity, or minus infinity for every class) is wrong. What is made of probabilities
(ECE, NLL, AURC) is NaN over a stream that has such an answer, and `NonFinite` counts them.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Metric(Protocol):
    """A number over a stream, updated batch by batch."""

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: logits (B, C), labels (B,)."""
        ...

    def result(self) -> float:
        """The value over all batches since the last reset."""
        ...

    def reset(self) -> None:
        """Drop all batches."""
        ...


def finite(logits: Tensor) -> Tensor:
    """(B,) whether each row of logits (B, C) has a finite maximum, so that its probabilities exist."""
    return logits.amax(1).isfinite()  # NaN and infinity are the largest of their row; minus infinity is if alone


def predicted(logits: Tensor) -> Tensor:
    """(B,) the likeliest class of each row, or -1 where the answer is not finite."""
    return torch.where(finite(logits), logits.argmax(1), -1)


class NonFinite:
    """The number of answers that are not finite."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Drop all batches."""
        self._count = 0

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Count the answers of a batch that are not finite."""
        self._count += int((~finite(logits)).sum())

    def result(self) -> float:
        """The number of such answers."""
        return float(self._count)


class Accuracy:
    """Share of samples whose label is among the `top` likeliest, each sample counted once."""

    def __init__(self, top: int = 1) -> None:
        self.top = top
        self.reset()

    def reset(self) -> None:
        """Drop all batches."""
        self._right, self._seen = 0, 0

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Count the samples of a batch, logits (B, C), and those whose label is among the `top` likeliest."""
        best = logits.topk(min(self.top, logits.shape[1]), dim=1).indices
        self._right += int(((best == labels[:, None]).any(1) & finite(logits)).sum())
        self._seen += len(labels)

    def result(self) -> float:
        """A share between 0 and 1."""
        return self._right / max(self._seen, 1)


class NLL:
    """Mean negative log-likelihood of the label, in nats."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Drop all batches."""
        self._sum, self._seen = 0.0, 0

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Sum the cross-entropy of a batch: logits (B, C), labels (B,)."""
        self._sum += float(torch.nn.functional.cross_entropy(logits.double(), labels, reduction="sum"))
        self._seen += len(labels)

    def result(self) -> float:
        """Nats; 0 where every label has probability 1."""
        return self._sum / max(self._seen, 1)


class ECE:
    """Expected calibration error: the gap between confidence and accuracy, over `bins` of equal width."""

    def __init__(self, bins: int = 15) -> None:
        self.bins = bins
        self.reset()

    def reset(self) -> None:
        """Drop all batches."""
        self._count = torch.zeros(self.bins, dtype=torch.float64)
        self._confidence, self._right = self._count.clone(), self._count.clone()

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Put each sample of a batch, logits (B, C), into the bin of its largest probability."""
        confidence = logits.double().softmax(1).amax(1)
        right = (predicted(logits) == labels).double().cpu()
        bins = (confidence.cpu().nan_to_num(0.0) * self.bins).ceil().long().sub(1).clamp(0, self.bins - 1)
        self._count += torch.bincount(bins, minlength=self.bins)
        self._confidence.index_add_(0, bins, confidence.cpu())
        self._right.index_add_(0, bins, right)

    def result(self) -> float:
        """Between 0 and 1; 0 is calibrated. NaN where a confidence is NaN."""
        return float((self._confidence - self._right).abs().sum() / self._count.sum().clamp(min=1))


class AURC:
    """Area under the risk-coverage curve: the mean, over every coverage, of the error among the most confident.

    Confidence is the largest probability. Samples of equal confidence enter with the mean error of all of them, so the
    result does not depend on the order of arrival.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Drop all batches."""
        self._confidence: list[NDArray[np.float64]] = []
        self._wrong: list[NDArray[np.bool_]] = []

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Keep the largest probability of each sample of a batch, logits (B, C), and whether its answer is wrong."""
        self._confidence.append(logits.double().softmax(1).amax(1).cpu().numpy())
        self._wrong.append((predicted(logits) != labels).cpu().numpy())

    def result(self) -> float:
        """Between 0 and 1; lower is better, and errors of low confidence cost less. NaN where a confidence is NaN."""
        if not self._confidence:
            return 0.0
        confidence, wrong = np.concatenate(self._confidence), np.concatenate(self._wrong)
        if np.isnan(confidence).any():
            return float("nan")
        _, level, count = np.unique(-confidence, return_inverse=True, return_counts=True)
        share = np.bincount(level, weights=wrong) / count  # of errors among samples of equal confidence
        errors = np.repeat(share, count).cumsum()
        return float((errors / np.arange(1, len(errors) + 1)).mean())


class Windows:
    """Accuracy in windows of `size` images, in order of arrival; the result is the worst one.

    A last, shorter window counts if it is the only one, or at least half as long as the others.
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ValueError(f"expected windows of at least 1 image, got {size}")
        self.size = size
        self.reset()

    def reset(self) -> None:
        """Drop all batches."""
        self._right: list[NDArray[np.bool_]] = []

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Keep for each sample of a batch, logits (B, C), whether its answer is right."""
        self._right.append((predicted(logits) == labels).cpu().numpy())

    def accuracies(self) -> list[float]:
        """The accuracy of each window, between 0 and 1."""
        if not self._right:
            return []
        right = np.concatenate(self._right)
        windows = [right[at : at + self.size] for at in range(0, len(right), self.size)]
        if len(windows) > 1 and 2 * len(windows[-1]) < self.size:
            windows.pop()
        return [float(window.mean()) for window in windows]

    def result(self) -> float:
        """The accuracy of the worst window."""
        return min(self.accuracies(), default=0.0)
