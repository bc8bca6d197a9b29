"""Cells as evidence: accuracies, and differences of rows that are paired over samples.

In a stream of one shift sample i is image i, so that the mean over several streams, or over several pairs of rows, has
a value for every image. Its standard error is that of those values over images: what an image does in one corruption
tells something of what it does in the next, and an error that took them as independent would be too small. Streams of
other orders count as independent of each other.

Samples of one run are not independent either: every answer depends on the updates before it, and a run that goes wrong
is wrong on all that follows. Where there are three seeds, the error is therefore the larger of the paired one and the
standard deviation of the seeds' differences by the root of their number. One seed cannot tell.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import numpy as np
from auto.cells import read_cells
from auto.paired import Paired
from numpy.typing import NDArray

from poem.bench.sample_cells import read_bits
from study import parts, rows

ROOT = Path(__file__).resolve().parents[2]
STUDY, AUTO = ROOT / "results" / "study", ROOT / "results" / "auto"
SURE = 2.0
"""Standard errors from 0 that count as a difference."""

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Pair = tuple[str, str]
"""Two rows; the difference is the first minus the second."""


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
    """Standard error: paired over samples or over seeds, the larger."""
    n: int
    """Images that tell the two apart or not; each counts once, in however many streams it comes."""
    streams: int
    seeds: tuple[float, ...] = ()
    """The difference of each seed alone."""
    paired: float = 0.0
    """The paired standard error."""

    @property
    def state(self) -> str:
        """`above`, `below` or `open`: more than two standard errors from 0, or not."""
        if abs(self.points) <= SURE * self.error or self.points == 0:
            return "open"
        return "above" if self.points > 0 else "below"

    def __str__(self) -> str:
        return f"{self.points + 0.0:+.2f} ± {self.error:.2f}"


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

    def accuracy(self, net: str, row: str, streams: Sequence[str], batch: int = 64) -> float | None:
        """Mean over streams in percent, seeds put together; None where one is missing."""
        if not streams or not self.has(net, row, streams, batch):
            return None
        return fmean(
            100 * float(np.concatenate([run.bits for run in self.run(net, row, stream, batch).values()]).mean())
            for stream in streams
        )

    def paired(self, net: str, pair: Pair, stream: str, batch: int = 64) -> Paired | None:
        """Two rows on one stream, over the seeds that both have."""
        total: Paired | None = None
        for one, other in self._seeds(net, pair, stream, batch).values():
            found = Paired.of(one.bits, other.bits)
            total = found if total is None else total + found
        return total

    def _seeds(self, net: str, pair: Pair, stream: str, batch: int) -> dict[int, tuple[Run, Run]]:
        """Runs of both rows on the same samples, by seed; source serves at any batch size."""
        own, other = (self.run(net, row, stream, batch) for row in pair)
        if pair[1] == "source" and not other:
            other = self.run(net, "source", stream)
        same = {seed for seed in own if seed in other and own[seed].stream == other[seed].stream}
        return {seed: (own[seed], other[seed]) for seed in sorted(same)}

    def difference(self, net: str, pairs: Sequence[Pair], streams: Sequence[str], batch: int = 64) -> Difference | None:
        """The mean difference over pairs and streams, on the seeds that have all of them; None where none has.

        Args:
            net: The network.
            pairs: Rows that are compared, first minus second.
            streams: Each counts the same.
            batch: Batch size.
        """
        held = {(pair, stream): self._seeds(net, pair, stream, batch) for pair in pairs for stream in streams}
        if not held:
            return None
        common = set.intersection(*(set(each) for each in held.values()))
        if not common:
            return None
        lines: dict[str, list[Floats]] = {}
        for stream in streams:
            kind = "one shift" if stream in parts.ALL else stream
            for pair in pairs:
                found = [held[pair, stream][seed] for seed in sorted(common)]
                values = np.concatenate([one.bits.astype(float) - other.bits for one, other in found])
                lines.setdefault(kind, []).append(values)
        points = fmean(float(values.mean()) for each in lines.values() for values in each)
        variance, size = 0.0, 0
        for each in lines.values():
            mean = np.mean(each, axis=0)  # of each image
            share = len(each) / (len(pairs) * len(streams))
            variance += share**2 * float(mean.var()) / len(mean)
            size += len(mean)
        alone = tuple(
            100 * fmean(
                float((one.bits.astype(float) - other.bits).mean())
                for each in held.values()
                for one, other in [each[seed]]
            )
            for seed in sorted(common)
        )  # fmt: skip
        error = 100 * math.sqrt(variance)
        return Difference(100 * points, max(error, over_seeds(alone)), size, len(streams), alone, error)

    def cost(self, net: str, row: str, other: str, streams: Sequence[str]) -> float | None:
        """Seconds of a row by those of another, the median over streams and seeds; None where there are none."""
        ratios = [
            one.seconds / two.seconds
            for stream in streams
            for one, two in self._seeds(net, (row, other), stream, 64).values()
            if one.seconds and two.seconds
        ]
        return median(ratios) if ratios else None


def over_seeds(values: Sequence[float]) -> float:
    """The standard error of the mean of seeds; 0 for fewer than three, which tell too little."""
    return stdev(values) / math.sqrt(len(values)) if len(values) >= 3 else 0.0


# Shares of samples ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """Samples of a kind: how many there are, and how many of them are right."""

    n: int
    share: float
    """Right, in percent."""


def share_difference(right: Floats, one: Floats, other: Floats) -> Difference | None:
    """The share of right samples in one group minus that in another, in points; None where a group is empty.

    Args:
        right: (images, streams), 1 where right.
        one: The same shape, 1 where a sample belongs to the first group.
        other: Alike for the second.

    Each image is one observation, however many streams it comes in: the error is that of a difference of two ratios of
    sums over images.
    """
    influence, points = np.zeros(len(right)), 0.0
    for sign, member in ((1.0, one), (-1.0, other)):
        total = member.sum()
        if not total:
            return None
        share = float((right * member).sum() / total)
        points += sign * share
        influence += sign * ((right - share) * member).sum(axis=1) / total
    size = int(one.sum() + other.sum())
    error = 100 * math.sqrt(float((influence**2).sum()))
    return Difference(100 * points, error, size, right.shape[1], paired=error)


def group_of(right: Floats, member: Floats) -> Group:
    """A group's size and its share of right samples."""
    total = int(member.sum())
    return Group(total, 100 * float((right * member).sum() / total) if total else math.nan)


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
