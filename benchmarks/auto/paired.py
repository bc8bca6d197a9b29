"""Paired comparisons of two rows on the same samples.

Only samples that one row gets right and the other wrong tell them apart. The one-sided test that a difference lies
below a margin is Tango's score test for paired proportions (Statistics in Medicine 17, 1998); at a margin of 0 it is
McNemar's. The 95 % upper bound is the largest difference that the test at 5 % does not reject.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from poem.bench.paired_errors import paired_error

LEVEL = 0.05
Z = 1.6448536269514722
"""The normal quantile of a one-sided test at 5 %."""


@dataclass(frozen=True)
class Paired:
    """A row against another on the same samples; numbers of points are percent."""

    better: int
    """Samples that only this row gets right."""
    worse: int
    """Samples that only the other row gets right."""
    n: int

    @staticmethod
    def of(own: NDArray[np.bool_], other: NDArray[np.bool_]) -> Paired:
        """From the correctness of every sample.

        Raises:
            ValueError: The two have not the same number of samples, or none.
        """
        if own.shape != other.shape or not len(own):
            raise ValueError(f"expected the same samples twice, got {own.shape} and {other.shape}")
        return Paired(int((own & ~other).sum()), int((other & ~own).sum()), len(own))

    def __add__(self, other: Paired) -> Paired:
        return Paired(self.better + other.better, self.worse + other.worse, self.n + other.n)

    @property
    def difference(self) -> float:
        """In points."""
        return 100 * (self.better - self.worse) / self.n

    @property
    def error(self) -> float:
        """Standard error of the difference, in points."""
        return paired_error(self.better, self.worse, self.n)

    def p_below(self, points: float) -> float:
        """One-sided p-value against "the true difference is `points` or more"."""
        return 0.5 * math.erfc(-self._score(points / 100) / math.sqrt(2))

    @property
    def upper(self) -> float:
        """One-sided 95 % upper bound of the difference, in points."""
        inside, outside = self.difference / 100, 1.0
        for _ in range(50):
            middle = (inside + outside) / 2
            inside, outside = (inside, middle) if self._score(middle) < -Z else (middle, outside)
        return 100 * inside

    def _score(self, difference: float) -> float:
        """Tango's statistic: standard normal where the true difference (a share) is this one."""
        b, c, n = self.better, self.worse, self.n
        linear = (2 * n - b + c) * difference - b - c
        root = math.sqrt(max(0.0, linear * linear + 8 * n * c * difference * (1 - difference)))
        against = (root - linear) / (4 * n)
        variance = n * (2 * against + difference * (1 - difference))
        distance = b - c - n * difference
        if distance == 0:
            return 0.0
        return distance / math.sqrt(variance) if variance > 1e-12 else math.copysign(math.inf, distance)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted by Holm: those below a level are rejected while the chance of any false one stays below it."""
    order = sorted(range(len(p_values)), key=lambda at: p_values[at])
    adjusted, largest = [1.0] * len(p_values), 0.0
    for rank, at in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[at]))
        adjusted[at] = largest
    return adjusted


def gain_kept(guarded: Paired, unguarded: Paired, least: float = 1.0) -> float | None:
    """The share of a gain over source that is left under the guard; None where the gain is below `least` points."""
    if unguarded.difference < least:
        return None
    return guarded.difference / unguarded.difference
