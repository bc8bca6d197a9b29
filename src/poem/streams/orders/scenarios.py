"""The scenarios of the papers, each as an `Order`: which domains are visited when, and when the adapter is reset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from poem._util.integers import as_integer
from poem._util.nearest import nearest_hint
from poem.streams.orders.within_domain import (
    SHUFFLED,
    Dirichlet,
    Indices,
    LabelShift,
    Sorted,
    Within,
    generator,
)
from poem.streams.shift import CLEAN, CORRUPTIONS, Shift


@dataclass(frozen=True)
class Visit:
    """One step of an order: its domains (several are pooled), and whether the adapter is reset before it."""

    shifts: tuple[Shift, ...]
    reset: bool = False


@dataclass(frozen=True, eq=False)
class Segment:
    """A stretch of an order: indices in order of arrival, and the shift of each."""

    shifts: tuple[Shift, ...]
    indices: Indices
    reset: bool
    which: Indices
    """(T,) position in `shifts` of every index; zeros if there is one shift."""

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def shift(self) -> Shift:
        """The domain of this segment; raises if there are several."""
        if len(self.shifts) != 1:
            raise ValueError(f"expected one domain, got {len(self.shifts)} in this segment; see .shifts and .which")
        return self.shifts[0]

    def cut(self, size: int) -> Iterator[Segment]:
        """Cut the segment into batches of `size`; the last may be shorter. Only the first can ask for a reset."""
        if size < 1:
            raise ValueError(f"expected a batch size >= 1, got {size}")
        for at in range(0, len(self), size):
            here = slice(at, at + size)
            yield Segment(self.shifts, self.indices[here], self.reset and at == 0, self.which[here])


@dataclass(frozen=True, kw_only=True)
class Order:
    """Visits and an arrangement, independent of the data: printable, comparable, part of every protocol card."""

    name: str
    visits: tuple[Visit, ...]
    within: Within = SHUFFLED
    seed: int = 0
    batch_size: int | None = None
    """Batch size that the scenario prescribes, or None."""

    def __post_init__(self) -> None:
        if not self.visits or not all(visit.shifts for visit in self.visits):
            raise ValueError(f"expected at least one domain to visit, got none for {self.name}; name corruptions")
        seed = as_integer(self.seed)
        if seed is None:
            raise TypeError(f"expected an integer seed, got {self.seed!r}")
        object.__setattr__(self, "seed", seed)

    def over(self, labels: int | Sequence[int] | Indices) -> Iterator[Segment]:
        """Yield the segments, given the labels of one domain (or its number of images, if `within` needs no labels)."""
        if isinstance(labels, int | np.integer):
            if self.within.needs_labels:
                raise TypeError(f"expected labels, got the number {labels}; {self.within} arranges by class")
            labels = np.zeros(int(labels), np.int64)
        labels = np.asarray(labels)
        if labels.ndim != 1 or len(labels) == 0:
            raise ValueError(f"expected labels of shape (n,), n >= 1, got {labels.shape}")
        visited: Counter[str] = Counter()
        for visit in self.visits:
            key = "+".join(shift.corruption for shift in visit.shifts)
            rng = generator(self.seed, self.name, key, visited[key])
            visited[key] += 1
            pooled = self.within(np.tile(labels, len(visit.shifts)), rng, self.seed)
            which, indices = np.divmod(pooled, len(labels))
            yield Segment(visit.shifts, indices, visit.reset, which)

    def count(self, images: int, classes: int = 1) -> int:
        """Number of samples in the whole stream, for domains of that many images and classes."""
        return sum(self.within.count(images * len(visit.shifts), classes) for visit in self.visits)

    def describe(self) -> dict[str, Any]:
        """The order's fields of a protocol card."""
        shifts = list(dict.fromkeys(shift for visit in self.visits for shift in visit.shifts))
        resets = sum(visit.reset for visit in self.visits)
        arranged = "" if self.within == SHUFFLED else f", {self.within}"
        every = "at each domain" if resets == len(self.visits) > 1 else "at the start"
        return {
            "order": f"{self.name}{arranged}; {len(self.visits)} segments, reset {every}",
            "seed": self.seed,
            "corruptions": tuple(dict.fromkeys(shift.corruption for shift in shifts)),
            "severity": tuple(sorted({shift.severity for shift in shifts})),
        }


def _shifts(corruptions: Iterable[str | Shift], severity: int) -> tuple[Shift, ...]:
    """Names as shifts of one severity; shifts stay, "clean" has none."""
    if isinstance(corruptions, str | Shift):
        corruptions = (corruptions,)
    return tuple(
        name if isinstance(name, Shift) else CLEAN if name == "clean" else Shift(name, severity) for name in corruptions
    )


def _visits(shifts: Iterable[Shift], *, reset_each: bool = False) -> tuple[Visit, ...]:
    """One visit per shift, with a reset before the first, or before each."""
    return tuple(Visit((shift,), reset=reset_each or at == 0) for at, shift in enumerate(shifts))


Names = Iterable[str | Shift]


def single(corruptions: Names = CORRUPTIONS, *, severity: int = 5, seed: int = 0, within: Within = SHUFFLED) -> Order:
    """One shift at a time, with a reset before each (the papers' "normal" or "mild" setting)."""
    visits = _visits(_shifts(corruptions, severity), reset_each=True)
    return Order(name="single", visits=visits, within=within, seed=seed)


def continual(
    corruptions: Names = CORRUPTIONS, *, severity: int = 5, seed: int = 0, within: Within = SHUFFLED
) -> Order:
    """One shift after another, reset before the first only."""
    return Order(name="continual", visits=_visits(_shifts(corruptions, severity)), within=within, seed=seed)


def gradual(
    corruptions: Names = CORRUPTIONS, *, first_descends: bool = False, seed: int = 0, within: Within = SHUFFLED
) -> Order:
    """Each corruption rises and falls in severity, 1 2 3 4 5 4 3 2 1; no reset after the start.

    With `first_descends` the first corruption starts at its peak, 5 4 3 2 1 (CoTTA's variant).
    """
    names = [shift.corruption for shift in _shifts(corruptions, 5)]
    if "clean" in names:
        raise ValueError("expected corruptions, got clean data, which has no severities to walk through")
    shifts = [
        Shift(name, severity)
        for at, name in enumerate(names)
        for severity in ((5, 4, 3, 2, 1) if first_descends and at == 0 else (1, 2, 3, 4, 5, 4, 3, 2, 1))
    ]
    name = "gradual-cotta" if first_descends else "gradual"
    return Order(name=name, visits=_visits(shifts), within=within, seed=seed)


def mixed(corruptions: Names = CORRUPTIONS, *, severity: int = 5, seed: int = 0, within: Within = SHUFFLED) -> Order:
    """All shifts pooled into one stream, arranged as a whole."""
    visits = (Visit(_shifts(corruptions, severity), reset=True),)
    return Order(name="mixed", visits=visits, within=within, seed=seed)


def recurring(
    corruptions: Names = CORRUPTIONS,
    *,
    cycles: int = 20,
    severity: int = 5,
    seed: int = 0,
    within: Within = SHUFFLED,
) -> Order:
    """The same shifts, in the same order, `cycles` times; each visit is arranged anew, without a reset (PeTTA)."""
    if cycles < 1:
        raise ValueError(f"expected cycles >= 1, got {cycles}")
    shifts = _shifts(corruptions, severity) * cycles
    return Order(name="recurring", visits=_visits(shifts), within=within, seed=seed)


def correlated(
    corruptions: Names = CORRUPTIONS,
    *,
    delta: float | None = None,
    minimum: int = 10,
    severity: int = 5,
    seed: int = 0,
) -> Order:
    """Continual, with labels correlated in time: sorted by class, or Dirichlet with concentration `delta`.

    For other mixtures pass the arrangement yourself: `mixed(within=Dirichlet(0.01))`.
    """
    within: Within = Sorted() if delta is None else Dirichlet(delta, minimum)
    visits = _visits(_shifts(corruptions, severity))
    return Order(name="correlated", visits=visits, within=within, seed=seed)


def imbalanced(
    corruptions: Names = CORRUPTIONS,
    *,
    imbalance: float = 500_000,
    length: int | None = None,
    severity: int = 5,
    seed: int = 2022,
) -> Order:
    """SAR's online label shift at every corruption, with a reset before each; see `label_shift`."""
    visits = _visits(_shifts(corruptions, severity), reset_each=True)
    return Order(name="label-shift", visits=visits, within=LabelShift(imbalance, length), seed=seed)


def one_by_one(
    corruptions: Names = CORRUPTIONS, *, severity: int = 5, seed: int = 0, within: Within = SHUFFLED
) -> Order:
    """One shift at a time, with a reset before each, in batches of one image."""
    visits = _visits(_shifts(corruptions, severity), reset_each=True)
    return Order(name="one-by-one", visits=visits, within=within, seed=seed, batch_size=1)


def forgetting(
    corruptions: Names = CORRUPTIONS, *, severity: int = 5, seed: int = 0, within: Within = SHUFFLED
) -> Order:
    """Continual, with the clean data as a domain after every shift, to measure forgetting (EATA)."""
    shifts = [each for shift in _shifts(corruptions, severity) for each in (shift, CLEAN)]
    return Order(name="forgetting", visits=_visits(shifts), within=within, seed=seed)


SCENARIOS: dict[str, Callable[..., Order]] = {
    "single": single,
    "continual": continual,
    "gradual": gradual,
    "mixed": mixed,
    "recurring": recurring,
    "correlated": correlated,
    "label-shift": imbalanced,
    "one-by-one": one_by_one,
    "forgetting": forgetting,
}


def scenario(name: str, **settings: Any) -> Order:
    """Make an order by its scenario's name, such as `scenario("gradual", seed=1)`."""
    if name not in SCENARIOS:
        raise ValueError(f"unknown scenario {name!r}; {nearest_hint(name, SCENARIOS)}")
    return SCENARIOS[name](**settings)


def joined(segments: Iterable[Segment]) -> Iterator[Segment]:
    """Concatenate segments up to the next reset, so that a batch may hold images of two domains."""
    group: list[Segment] = []
    for segment in segments:
        if segment.reset and group:
            yield _concatenate(group)
            group = []
        group.append(segment)
    if group:
        yield _concatenate(group)


def _concatenate(group: list[Segment]) -> Segment:
    shifts = tuple(dict.fromkeys(shift for segment in group for shift in segment.shifts))
    which = [np.array([shifts.index(shift) for shift in segment.shifts], np.int64)[segment.which] for segment in group]
    return Segment(shifts, np.concatenate([each.indices for each in group]), group[0].reset, np.concatenate(which))
