"""Arrangements of the images within one domain: shuffled, sorted, correlated, imbalanced.

Each is called with the labels, the generator of this visit, and the run's seed, and returns indices.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]

PUBLISHED_IMBALANCES = (1, 1000, 2000, 3000, 4000, 5000, 500_000)
"""The ratios of SAR's published index files, in the order in which their generator shuffled the classes."""
DRAW_SEED = 2022
"""Seed of the label and image draws of `label_shift`, whatever the run's seed is."""


def generator(seed: int, scenario: str, corruption: str, visit: int = 0) -> np.random.RandomState:
    """Make the generator of one visit, seeded by a hash of its name, so that no other random numbers influence it.

    `visit` counts earlier visits to the same corruption. NumPy guarantees that the numbers of `RandomState` never
    change.
    """
    name = json.dumps(["poem order", int(seed), scenario, corruption, int(visit)])
    return np.random.RandomState(np.frombuffer(hashlib.sha256(name.encode()).digest(), dtype="<u4"))


class Within(Protocol):
    """Interface of an arrangement of one domain."""

    needs_labels: ClassVar[bool]

    def __call__(self, labels: Indices, rng: np.random.RandomState, seed: int) -> Indices:
        """Return indices into `labels`, in order of arrival."""
        ...

    def count(self, images: int, classes: int) -> int:
        """Number of indices for a domain of this size."""
        ...


@dataclass(frozen=True)
class _Permutation:
    """An arrangement in which every image comes once."""

    needs_labels: ClassVar[bool] = False

    def count(self, images: int, classes: int) -> int:
        """The number of images: every one comes once."""
        return images


@dataclass(frozen=True)
class InOrder(_Permutation):
    """In the order of the files (Tent and CoTTA on CIFAR-C)."""

    def __call__(self, labels: Indices, rng: np.random.RandomState, seed: int) -> Indices:
        """Return 0, 1, 2, ..."""
        return np.arange(len(labels), dtype=np.int64)


@dataclass(frozen=True)
class Shuffled(_Permutation):
    """Every image once, in random order."""

    def __call__(self, labels: Indices, rng: np.random.RandomState, seed: int) -> Indices:
        """Return a random permutation."""
        return rng.permutation(len(labels)).astype(np.int64)


SHUFFLED = Shuffled()


@dataclass(frozen=True)
class Sorted(_Permutation):
    """Class after class, ascending; shuffled inside a class."""

    needs_labels: ClassVar[bool] = True

    def __call__(self, labels: Indices, rng: np.random.RandomState, seed: int) -> Indices:
        """Return a shuffle, then stably sorted by label."""
        shuffled = rng.permutation(len(labels)).astype(np.int64)
        return shuffled[np.argsort(labels[shuffled], kind="stable")]


@dataclass(frozen=True)
class Dirichlet(_Permutation):
    """Labels correlated in time: each class spreads over `chunks` by Dirichlet(`delta`), and chunk follows chunk.

    Chunks that already hold their share (images / chunks) get nothing more of later classes. Inside a chunk the
    classes come in random order. The whole draw is repeated until every chunk has `minimum` images, at most `tries`
    times. `chunks=None`: as many as there are classes. A small `delta` means strong correlation.

    Paper: Gong et al., "NOTE: Robust Continual Test-time Adaptation Against Temporal Correlation", NeurIPS 2022.
    Reference code: mariodoebler/test-time-adaptation (MIT).
    Differs: a bound on tries instead of 120 seconds; a class whose chunks are all full goes to one chunk with room,
        where the reference divides by zero.
    """

    needs_labels: ClassVar[bool] = True
    delta: float = 0.1
    minimum: int = 10
    chunks: int | None = None
    tries: int = 100

    def __post_init__(self) -> None:
        if not self.delta > 0 or self.minimum < 0 or self.tries < 1 or (self.chunks is not None and self.chunks < 1):
            raise ValueError(f"expected delta > 0, minimum >= 0, tries >= 1 and chunks None or >= 1, got {self}")

    def __call__(self, labels: Indices, rng: np.random.RandomState, seed: int) -> Indices:
        """Return the chunks one after another."""
        members = indices_by_class(labels)
        chunks = self.chunks or len(members)
        if chunks * self.minimum > len(labels):
            raise ValueError(
                f"expected {chunks} chunks of at least {self.minimum} images, got {len(labels)} images in all; "
                f"pass minimum={len(labels) // chunks} or fewer chunks="
            )
        taken = self._counts([len(each) for each in members], chunks, rng)
        members = [rng.permutation(each) for each in members]
        ends = taken.cumsum(1)
        pieces = [
            members[k][ends[k, chunk] - taken[k, chunk] : ends[k, chunk]]
            for chunk in range(chunks)
            for k in rng.permutation(np.flatnonzero(taken[:, chunk]))
        ]
        return np.concatenate(pieces)

    def _counts(self, sizes: list[int], chunks: int, rng: np.random.RandomState) -> Indices:
        """How many images of each class (row) go to each chunk (column)."""
        share, best = sum(sizes) / chunks, 0
        for _ in range(self.tries):
            counts, held = np.zeros((len(sizes), chunks), np.int64), np.zeros(chunks, np.int64)
            for k, size in enumerate(sizes):
                parts = rng.dirichlet(np.full(chunks, self.delta)) * (held < share)
                total = parts.sum()
                if not total > 0:  # also if every draw underflowed
                    parts, total = np.zeros(chunks), 1.0
                    parts[rng.choice(np.flatnonzero(held < share))] = 1.0
                cuts = (np.cumsum(parts / total) * size).astype(np.int64)
                cuts[-1] = size
                counts[k] = np.diff(cuts, prepend=0)
                held += counts[k]
            best = max(best, int(held.min()))
            if held.min() >= self.minimum:
                return counts
        raise ValueError(
            f"expected {chunks} chunks of at least {self.minimum} images; the best of {self.tries} draws with delta "
            f"{self.delta} left a chunk with {best}; raise delta, lower minimum=, or take fewer chunks="
        )


@dataclass(frozen=True)
class LabelShift:
    """SAR's online imbalanced label shift: `label_shift` with the run's seed, the same indices at every corruption."""

    needs_labels: ClassVar[bool] = True
    imbalance: float = 500_000
    length: int | None = None

    def __call__(self, labels: Indices, rng: np.random.RandomState, seed: int) -> Indices:
        """Return indices drawn with replacement."""
        return label_shift(labels, imbalance=self.imbalance, length=self.length, seed=seed)

    def count(self, images: int, classes: int) -> int:
        """`length`, or 100 per class."""
        return 100 * classes if self.length is None else self.length


def label_shift(
    labels: Sequence[int] | Indices, *, imbalance: float = 500_000, length: int | None = None, seed: int = 2022
) -> Indices:
    """Indices of a stream in which one class after another dominates (Niu et al., SAR, ICLR 2023).

    At each time one class is `imbalance` times as likely as any other; the dominant class changes every
    `length / classes` samples. Images are drawn with replacement, so some repeat and some never come. With 1000 classes
    of 50 images, length 100,000 and seeds 2022, 2023 (SAR) or 2024, 2025 (DeYO) the published files come out bit for
    bit: a published imbalance uses the shuffle at its position in their generator, any other uses the first.

    Args:
        labels: Class of every image; classes rank by value, images of a class by position.
        imbalance: Ratio of the dominant class's probability to another's; 1 is uniform, 500,000 the papers' infinity.
        length: Number of samples in the stream; by default 100 per class.
        seed: Seed of the class order. Labels and images are always drawn with seed 2022.
    """
    members = indices_by_class(np.asarray(labels))
    classes = len(members)
    length = 100 * classes if length is None else length
    if not imbalance >= 1 or not np.isfinite(imbalance) or length < 1:
        raise ValueError(f"expected a finite imbalance >= 1 and a length >= 1, got {imbalance} and {length}")
    shuffler, order = random.Random(seed), list(range(classes))
    position = PUBLISHED_IMBALANCES.index(int(imbalance)) if imbalance in PUBLISHED_IMBALANCES else 0
    for _ in range(position + 1):
        order = list(range(classes))
        shuffler.shuffle(order)

    minor = 1.0 / (imbalance + classes - 1)
    rng = np.random.RandomState(DRAW_SEED)
    chance = rng.random_sample(length)
    drawn = np.empty(length, np.int64)
    borders = [length * k // classes for k in range(classes + 1)]
    for k, dominant in enumerate(order):
        odds = np.full(classes, minor)
        odds[dominant] = imbalance * minor
        edges = odds.cumsum()
        edges /= edges[-1]
        block = slice(borders[k], borders[k + 1])
        drawn[block] = edges.searchsorted(chance[block], side="right")

    indices = np.empty(length, np.int64)
    for k, images in enumerate(members):
        times = np.flatnonzero(drawn == k)
        if len(times):
            indices[times] = images[rng.randint(0, len(images), len(times), dtype=np.int64)]
    return indices


def indices_by_class(labels: Indices) -> list[Indices]:
    """Positions of each class's images, classes ascending."""
    labels = np.asarray(labels)
    if labels.ndim != 1 or len(labels) == 0 or not np.issubdtype(labels.dtype, np.integer):
        raise ValueError(f"expected labels: integers of shape (n,), n >= 1, got {labels.dtype} {labels.shape}")
    order = np.argsort(labels, kind="stable").astype(np.int64)
    _, starts = np.unique(labels[order], return_index=True)
    return np.split(order, starts[1:])
