"""How long a cell takes, from the seconds of the cells that were measured before.

Those were measured by processes that shared one H200: 15 of them, 4 with large networks. What a row that is not among
them costs is guessed from its number of passes through the network.
"""

from __future__ import annotations

import math
from collections import defaultdict
from pathlib import Path
from statistics import median

from auto import rows as measured_rows
from auto.cells import read_cells
from auto.rows import SMALL

from study.rows import AUTO_STATISTICS

PASSES: dict[str, float] = {
    **measured_rows.PASSES, "tent-filtered": 3, "eata": 4, "rotta": 9, "spa": 8, "cmf": 8, "rem": 14, "rpl": 3,
    "petta": 14, "protected": 4, "recap": 6, "poem-official": 12,
}  # fmt: skip
"""About how many forward passes a batch costs; a pass with its gradient counts as three."""
ENDINGS = {"+poem-ii": (1, 2), "+poem-i": (2, 0), "+poem": (2, 1), "*": (2, 0)}
"""A host's passes times the first, and the second more."""
START = 1.0
"""Seconds that loading a stream's images and making an adapter take."""
STATISTICS_TIMES = 10.0
"""What rows with the statistics of `auto` cost of the published, where neither `auto` nor `bn` was measured."""
GIGABYTES = {"resnet50-keras": 10.0, "vit-tiny16": 5.0, "effnet-lite0": 9.0, "effnet-lite1": 11.0, "effnet-lite2": 14.0}
"""Memory of a GPU that a process needs with a gradient through a batch of 64."""


def passes(row: str) -> float:
    """About how many forward passes a batch of a row costs, with the published statistics."""
    method, *changes = row.removesuffix(AUTO_STATISTICS).split(", ")
    found = PASSES.get(method)
    if found is None:
        ending = next(each for each in ENDINGS if method.endswith(each))
        times, more = ENDINGS[ending]
        found = PASSES[method.removesuffix(ending)] * times + more
    for change in changes:
        if change.startswith("rounds "):
            found *= (1 + int(change.split()[1])) / 3
        if change.endswith("gradients"):
            found += 64 * 2
    return found


def gigabytes(net: str, row: str, batch: int) -> float:
    """Memory that a row needs while it runs."""
    each = GIGABYTES.get(net, 1.5) * max(batch, 16) / 64
    method = row.removesuffix(AUTO_STATISTICS)
    if method in ("source", "bn", "auto"):
        return max(1.0, each / 2)
    twice = method.startswith(("roid", "cmf", "spa", "rem", "petta", "rotta"))
    return each * (1.7 if twice else 1.0) * (5.0 if row.endswith(AUTO_STATISTICS) else 1.0)


class Estimate:
    """Seconds of cells, from earlier ones."""

    def __init__(self, paths: list[Path]) -> None:
        times: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
        for cell in read_cells(paths):
            if cell["batch"] == 64 and "seconds" in cell:
                times[cell["net"], cell["row"]].append((math.ceil(cell["n"] / 64), cell["seconds"]))
        self.lines = {key: _line(found) for key, found in times.items()}

    def seconds(self, net: str, row: str, batch: int, images: int) -> float:
        """About how many seconds of one process a cell takes."""
        fixed, each = self._row(net, row)
        large = 1.0 if net in SMALL or batch <= 16 else batch / 64
        return START + fixed + math.ceil(images / batch) * each * (0.8 * large if batch < 64 else max(1.0, large))

    def _row(self, net: str, row: str) -> tuple[float, float]:
        """Seconds before the first batch, and of each batch."""
        if (net, row) in self.lines:
            return self.lines[net, row]
        known = {own: line for (other, own), line in self.lines.items() if other == net and own in PASSES}
        own = row.removesuffix(AUTO_STATISTICS)
        if (net, own) in self.lines:
            fixed, each = self.lines[net, own]
        else:
            fixed = median([line[0] for line in known.values()] or [1.0])
            each = passes(row) * median([line[1] / PASSES[name] for name, line in known.items()] or [0.01])
        if own == row:
            return fixed, each
        if "auto" in known and "bn" in known:
            return fixed, each * known["auto"][1] / known["bn"][1]
        return fixed, each * STATISTICS_TIMES


def _line(found: list[tuple[int, float]]) -> tuple[float, float]:
    """Fixed seconds and seconds of a batch through the short cells' median and the longest cells'."""
    most, least = max(batches for batches, _ in found), min(batches for batches, _ in found)
    high = median(seconds for batches, seconds in found if batches == most)
    low = median(seconds for batches, seconds in found if batches == least)
    each = (high - low) / (most - least) if most > least else high / most
    each = each if each > 0 else high / most
    return max(0.0, low - each * least), each
