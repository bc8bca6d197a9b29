"""Cells as evidence: accuracies, and differences of rows that are paired over samples.

The unit is the image (`poem.bench.paired_errors`): its samples in one stream or in several, and in several pairs of
rows, count together. In a stream of one shift sample i is image i; in `continual` and `recurring` the stream's plan
tells which image comes when. `label_shift` draws images with replacement by their labels, which cells do not have: with
fewer than three seeds its error is not known, and with three its samples count as independent in the paired one.

Samples of one run are not independent either: every answer depends on the updates before it, and a run that goes wrong
is wrong on all that follows. Where there are three seeds, the error is therefore the larger of the paired one and that
over seeds. One seed cannot tell, and its differences count from three errors on instead of two.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from auto import streams as orders
from auto.cells import read_cells
from numpy.typing import NDArray

from poem.bench.paired_errors import SEEDS, Column, errors_needed, image_error, seed_error
from poem.bench.sample_cells import read_bits
from study import parts, rows

ROOT = Path(__file__).resolve().parents[2]
STUDY, AUTO = ROOT / "results" / "study", ROOT / "results" / "auto"

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Indices = NDArray[np.int64]
Pair = tuple[str, str]
"""Two rows; the difference is the first minus the second."""
BETWEEN = 10**9
"""Between the numbers of two seeds' images, which are other ones."""


@dataclass(frozen=True)
class Run:
    """One row on one stream with one seed."""

    bits: Bools
    stream: str
    """Hash of the stream; only equal ones are paired."""
    seconds: float | None
    record: Mapping[str, str]
    """What a recorded row has beside the bits, as text."""

    def bools(self, name: str) -> Bools:
        """A recorded field of bits."""
        return read_bits(self.record[name], len(self.bits))

    def entropies(self, name: str) -> Floats:
        """A recorded field of entropies, as shares of ln C."""
        return np.frombuffer(base64.b64decode(self.record[name]), np.uint8).astype(np.float64) / 255

    def norms(self) -> Floats:
        """The recorded norms of each sample's gradient."""
        return np.frombuffer(base64.b64decode(self.record["gradients"]), "<f2").astype(np.float64)


@dataclass(frozen=True)
class Difference:
    """A mean difference, in points."""

    points: float
    error: float
    """Standard error: paired over images or over seeds, the larger; infinite where it is not known."""
    n: int
    """Images that tell the two apart or not; each counts once, in however many streams it comes."""
    streams: int
    seeds: tuple[float, ...] = ()
    """The difference of each seed alone."""
    paired: float = 0.0
    """The paired standard error."""

    @property
    def margin(self) -> float:
        """Points from which on a difference counts: two standard errors, three where no error over seeds is known."""
        return errors_needed(len(self.seeds)) * self.error

    @property
    def state(self) -> str:
        """`above`, `below` or `open`: farther from 0 than `margin`, or not."""
        if abs(self.points) <= self.margin or self.points == 0:
            return "open"
        return "above" if self.points > 0 else "below"

    @property
    def p_below(self) -> float:
        """One-sided p-value against "the true difference is 0 or more", by the normal distribution."""
        if not self.error:
            return 0.0 if self.points < 0 else 1.0
        return 0.5 * math.erfc(-self.points / self.error / math.sqrt(2))

    def rounded(self, digits: int) -> str:
        """Points and error; points alone where the error is not known."""
        points = f"{self.points + 0.0:+.{digits}f}"
        return points if math.isinf(self.error) else f"{points} ± {self.error:.{digits}f}"

    def __str__(self) -> str:
        return self.rounded(2)


class Evidence:
    """Cells by network, row, stream and batch size."""

    def __init__(self, cells: Iterable[Mapping[str, Any]]) -> None:
        self.runs: dict[tuple[str, str, str, int], dict[int, Run]] = {}
        fields = ("before", "selected", "newly", "entropy_first", "entropy_last", "gradients")
        for cell in cells:
            bits = read_bits(cell["bits"], cell["n"])
            if int(bits.sum()) != cell["right"]:
                raise ValueError(f"expected {cell['right']} bits set in {cell['net']} {cell['row']}, got {bits.sum()}")
            record = {name: cell[name] for name in fields if name in cell}
            key = cell["net"], cell["row"], cell["stream"], cell["batch"]
            self.runs.setdefault(key, {})[cell["seed"]] = Run(bits, cell["hash"], cell.get("seconds"), record)

        self.borrowed: dict[str, str] = {}
        """Networks whose cells come from elsewhere, and from where in words."""

    def borrow(self, other: Evidence, net: str, words: str) -> None:
        """Take another's cells of a network that this one has none of; rows and streams of the study alone."""
        if any(own == net for own, *_ in self.runs):
            return
        known = {*rows.MAIN, *rows.STATISTICS}
        streams = {*parts.ALL, *parts.SCENARIOS}
        found = {key: runs for key, runs in other.runs.items() if key[0] == net and key[1] in known}
        found = {key: runs for key, runs in found.items() if key[2] in streams and key[3] == 64}
        self.runs |= found
        if found:
            self.borrowed[net] = words

    def __len__(self) -> int:
        return sum(map(len, self.runs.values()))

    def run(self, net: str, row: str, stream: str, batch: int = 64) -> dict[int, Run]:
        """A row's runs by seed; empty where it was not measured."""
        return self.runs.get((net, row, stream, batch), {})

    def has(self, net: str, row: str, streams: Iterable[str], batch: int = 64) -> bool:
        """Whether a row was measured on all these streams."""
        return all(self.run(net, row, stream, batch) for stream in streams)

    def rows(self, net: str, batch: int = 64) -> list[str]:
        """The rows of a network, in the order of their first cells."""
        return list(dict.fromkeys(row for own, row, _, size in self.runs if own == net and size == batch))

    def streams(self, net: str, row: str, batch: int = 64) -> list[str]:
        """The streams that a row was measured on."""
        return [stream for own, name, stream, size in self.runs if (own, name, size) == (net, row, batch)]

    def count(self, net: str, row: str, stream: str, batch: int = 64) -> int:
        """Samples of a row on a stream, of all seeds."""
        return sum(len(run.bits) for run in self.run(net, row, stream, batch).values())

    def accuracy(
        self, net: str, row: str, streams: Sequence[str], batch: int = 64, seeds: Collection[int] | None = None
    ) -> float | None:
        """Mean over streams in percent, seeds (all, or these) put together; None where a stream has none of them."""
        means = []
        for stream in streams:
            runs = self.run(net, row, stream, batch)
            bits = [run.bits for seed, run in runs.items() if seeds is None or seed in seeds]
            if not bits:
                return None
            means.append(100 * float(np.concatenate(bits).mean()))
        return fmean(means) if means else None

    def common_seeds(self, net: str, rows: Iterable[str], streams: Sequence[str], batch: int = 64) -> set[int]:
        """Seeds that all these rows have on all these streams, with the same samples."""
        held = [[self.run(net, row, stream, batch) for row in rows] for stream in streams]
        every = set.intersection(*(set(runs) for own in held for runs in own))
        return {seed for seed in every if all(len({runs[seed].stream for runs in own}) == 1 for own in held)}

    def images(self, net: str, stream: str, seed: int, n: int) -> Indices | None:
        """The image behind each of a stream's n samples; None where images come again and it is not known which."""
        if stream == "label_shift":
            return None
        every = np.arange(n, dtype=np.int64)
        if stream not in orders.VISITS:
            return -1 - every if stream.startswith("sorted-") else every  # sorted: each once, in an order of its own
        clean = (runs for (own, _, name, size), runs in self.runs.items() if (own, name, size) == (net, "clean", 64))
        count = next((len(runs[seed].bits) for runs in clean if seed in runs), 0)
        if not count or orders.scored_count(stream, count) != n:
            return None
        return orders.plan(stream, np.zeros(count, np.int64), seed).image

    def _seeds(self, net: str, pair: Pair, stream: str, batch: int) -> dict[int, tuple[Run, Run]]:
        """Runs of both rows on the same samples, by seed; source serves at any batch size."""
        own, other = (self.run(net, row, stream, batch) for row in pair)
        if pair[1] == "source" and not other:
            other = self.run(net, "source", stream)
        same = {seed for seed in own if seed in other and own[seed].stream == other[seed].stream}
        return {seed: (own[seed], other[seed]) for seed in sorted(same)}

    def difference(
        self, net: str, pairs: Sequence[Pair], streams: Sequence[str], batch: int = 64,
        seeds: Collection[int] | None = None,
    ) -> Difference | None:  # fmt: skip
        """The mean difference over pairs and streams, on the seeds that have all of them; None where none has.

        Args:
            net: The network.
            pairs: Rows that are compared, first minus second.
            streams: Each counts the same.
            batch: Batch size.
            seeds: Only these; None for all.
        """
        held = {(pair, stream): self._seeds(net, pair, stream, batch) for pair in pairs for stream in streams}
        if not held:
            return None
        common = sorted(set.intersection(*(set(each) for each in held.values())))
        common = [seed for seed in common if seeds is None or seed in seeds]
        if not common:
            return None
        columns: list[Column] = []
        known = True
        for (_, stream), runs in held.items():
            values = [runs[seed][0].bits.astype(float) - runs[seed][1].bits for seed in common]
            images = [self.images(net, stream, seed, len(own)) for seed, own in zip(common, values, strict=True)]
            known = known and all(each is not None for each in images)
            numbers = [
                at * BETWEEN + (np.arange(len(own)) if each is None else each)
                for at, (own, each) in enumerate(zip(values, images, strict=True))
            ]
            columns.append((np.concatenate(values), np.concatenate(numbers)))
        alone = tuple(
            100 * fmean(float((runs[seed][0].bits.astype(float) - runs[seed][1].bits).mean()) for runs in held.values())
            for seed in common
        )
        points = 100 * fmean(float(values.mean()) for values, _ in columns)
        error, size = image_error(columns)
        if not known and len(alone) < SEEDS:
            error = math.inf
        return Difference(points, max(error, seed_error(alone)), size, len(streams), alone, error)

    def costs(self, net: str, row: str, other: str, streams: Sequence[str]) -> list[float]:
        """Seconds of a row by those of another: of each stream the median over seeds."""
        found = []
        for stream in streams:
            runs = self._seeds(net, (row, other), stream, 64).values()
            if ratios := [one.seconds / two.seconds for one, two in runs if one.seconds and two.seconds]:
                found.append(float(np.median(ratios)))
        return found


# Shares of samples ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Samples of a kind: how many there are, and how many of them are right."""

    n: int
    share: float
    """Right, in percent."""
    error: float
    """Standard error of the share over images, in points."""


def share_difference(
    right: Floats, one: Floats, other: Floats, *, strata: Indices | None = None, seeds: Indices | None = None
) -> Difference | None:
    """The share of right samples in one group minus that in another, in points; None where a group is empty.

    Args:
        right: (images, streams), 1 where right.
        one: The same shape, 1 where a sample belongs to the first group.
        other: Alike for the second.
        strata: The same shape: samples of equal number are compared with each other alone, and the differences
            weighted by the first group's number of samples. None for a single stratum.
        seeds: (images,) the seed of each image; None for one seed.

    Each image is one observation, however many streams and strata it comes in: the error is that of a difference of
    ratios of sums over images. With three seeds it is at least that over seeds.
    """
    strata = np.zeros(right.shape, np.int64) if strata is None else strata
    found = _shares(right, one, other, strata)
    if found is None:
        return None
    points, influence, size = found
    alone = []
    for seed in () if seeds is None else np.unique(seeds):
        at = seeds == seed
        own = _shares(right[at], one[at], other[at], strata[at])
        alone += [] if own is None else [100 * own[0]]
    error = 100 * math.sqrt(float((influence**2).sum()))
    return Difference(100 * points, max(error, seed_error(alone)), size, right.shape[1], tuple(alone), error)


def _shares(right: Floats, one: Floats, other: Floats, strata: Indices) -> tuple[float, Floats, int] | None:
    """The difference of shares, what each image adds to it, and the number of samples."""
    numbers = [each for each in np.unique(strata) if one[strata == each].any() and other[strata == each].any()]
    total = sum(one[strata == each].sum() for each in numbers)
    influence, points, size = np.zeros(len(right)), 0.0, 0
    for number in numbers:
        weight = one[strata == number].sum() / total
        for sign, group in ((weight, one), (-weight, other)):
            member = group * (strata == number)
            share = float((right * member).sum() / member.sum())
            points += sign * share
            influence += sign * ((right - share) * member).sum(axis=1) / member.sum()
            size += int(member.sum())
    return (points, influence, size) if numbers else None


def group_of(right: Floats, member: Floats) -> Group:
    """A group's size and its share of right samples."""
    total = int(member.sum())
    if not total:
        return Group(0, math.nan, math.nan)
    share = float((right * member).sum() / total)
    influence = ((right - share) * member).sum(axis=1) / total
    return Group(total, 100 * share, 100 * math.sqrt(float((influence**2).sum())))


# Files ----------------------------------------------------------------------------------------------------------------


def load(folder: Path = STUDY) -> tuple[Evidence, dict[str, dict[str, Any]]]:
    """The cells of the suites' files, and each suite's own facts: `runs` and `left_out`."""
    cells: list[Mapping[str, Any]] = []
    about = {}
    for suite in parts.SUITES:
        path = folder / f"{suite}.json"
        if path.is_file():
            held = json.loads(path.read_text())
            cells += held["cells"]
            about[suite] = {name: value for name, value in held.items() if name != "cells"}
            about[suite]["cells"] = len(held["cells"])
    return Evidence(cells), about


def load_earlier(folder: Path = AUTO) -> Evidence:
    """The cells of the comparison behind `auto`, which has fewer images of large networks."""
    return Evidence(read_cells(sorted(folder.glob("*.jsonl"))))


def load_all() -> tuple[Evidence, dict[str, dict[str, Any]], Evidence]:
    """The study's cells, each suite's facts, and the earlier cells; networks that the study lacks are borrowed."""
    (study, about), earlier = load(), load_earlier()
    for net in (net for nets in parts.SUITES.values() for net in nets):
        study.borrow(earlier, net, "500 images")
    return study, about, earlier
