"""The leaderboard: rows by network and scenario, each compared with the source sample by sample.

A block holds what can be compared: one network, one scenario, one batch size, one protocol, and the same streams with
the same seeds for every row. A row that was measured on fewer streams than others makes a block of its own, where the
others are shown on those streams too. A row without `source` on its streams is left out, and counted.

Accuracies are means over streams, the samples of a stream's seeds put together. The standard error of a difference is
paired: only samples that one row gets right and the other wrong tell the two apart. The unit is the image, whatever the
number of streams that it comes in, and with three seeds the error is at least that over seeds (`bench.paired_errors`).
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median

import numpy as np
from numpy.typing import NDArray

from poem._util.files import read_json
from poem.bench.leaderboard_rows import read_rows
from poem.bench.paired_errors import SEEDS, errors_needed, image_error, seed_error
from poem.bench.sample_cells import SampleCell, read_lines, read_suite
from poem.streams.corruptions import CORRUPTIONS

SOURCE = "source"
TENT = re.compile(r"tent(, lr [^,]+)?")
"""Names of the plain Tent, which costs are compared with; `poem bench` names its rate where a suite states one."""
SCENARIOS = {
    "single": "One shift at a time, clean and severity 5", "mild": "One shift at a time, milder",
    "continual": "Continual: shift after shift", "recurring": "Recurring shifts", "mixed": "Mixed shifts",
    "label_shift": "Label shift: classes in runs", "sorted": "Sorted by class", "noise": "Noise between the images",
}  # fmt: skip
"""Scenarios in their order on the page, and what each is called there."""

Group = tuple[str, str, int, str, int]
"""Network, scenario, batch size, protocol, and the number of samples where streams of several numbers could meet."""
Sample = tuple[str, int, str]
"""A stream with its seed and its hash."""
Rows = dict[str, dict[Sample, SampleCell]]
"""Cells of a group by row."""
Runs = dict[str, tuple[tuple[tuple[str, str], ...], ...]]
"""Provenance by id: the facts of each run that a row's cells are of."""
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class StreamScore:
    """A row on one stream, its seeds put together; percent and points."""

    stream: str
    n: int
    accuracy: float
    difference: float
    """To source."""
    error: float | None
    """Standard error of the difference, paired; None where it cannot be known."""


@dataclass(frozen=True)
class LeaderboardRow:
    """A row of a block."""

    name: str
    scores: tuple[StreamScore, ...]
    accuracy_error: float | None
    """Standard error of the mean accuracy; None where it cannot be known."""
    error: float | None
    """Standard error of the mean difference, paired; alike."""
    seeds: int
    """Seeds that were measured on every stream."""
    cost_source: float | None
    """Seconds of the row by seconds of source, the median over streams and seeds; None where there are none."""
    cost_tent: float | None
    run: str
    """Id of the run, or runs, that the row was measured in."""

    @property
    def accuracy(self) -> float:
        """Mean over streams."""
        return fmean(each.accuracy for each in self.scores)

    @property
    def difference(self) -> float:
        """Mean difference to source."""
        return fmean(each.difference for each in self.scores)

    @property
    def worst(self) -> StreamScore:
        """The stream with the lowest difference to source."""
        return min(self.scores, key=lambda each: each.difference)

    @property
    def n(self) -> int:
        """Samples of all streams and seeds."""
        return sum(each.n for each in self.scores)

    @property
    def sure(self) -> bool:
        """Whether the difference is more than two standard errors from 0; three with fewer than three seeds."""
        return self.error is not None and abs(self.difference) > errors_needed(self.seeds) * self.error


@dataclass(frozen=True)
class Block:
    """Rows that can be compared, best first."""

    net: str
    scenario: str
    """A key of `SCENARIOS`, or a stream's own name."""
    batch: int
    protocol: str
    streams: tuple[str, ...]
    seeds: tuple[int, ...]
    each: tuple[int, ...]
    """Samples of a stream with one seed: the numbers that occur."""
    rows: tuple[LeaderboardRow, ...]
    part: bool = False
    """Whether other blocks of the same network and scenario have more streams or seeds."""

    @property
    def title(self) -> str:
        """Network and scenario."""
        return f"{self.net}: {self.scenario_title}{', fewer streams or seeds' if self.part else ''}"

    @property
    def scenario_title(self) -> str:
        """The scenario in words, with the batch size where it is not 64."""
        words = SCENARIOS.get(self.scenario, self.scenario)
        size = {64: "", 1: ", single images"}.get(self.batch, f", batches of {self.batch}")
        return f"{words}{size}"

    @property
    def about(self) -> str:
        """Streams, images, seeds, batch size and protocol."""
        one = len(self.streams) == 1
        names = ", ".join(self.streams) if len(self.streams) <= 5 else f"{len(self.streams)} streams"
        images = " or ".join(f"{each:,}" for each in self.each)
        seeds = f"{len(self.seeds)} seeds" if len(self.seeds) > 1 else f"seed {self.seeds[0]}"
        return f"{names}; {images} images{'' if one else ' each'}, {seeds}; batch {self.batch}; {self.protocol}"


@dataclass(frozen=True)
class Leaderboard:
    """Everything that the page shows."""

    blocks: tuple[Block, ...]
    runs: Runs
    without_source: tuple[str, ...]
    """Rows that are left out because source was not measured on their streams."""


def read_cells(paths: Sequence[Path]) -> tuple[list[SampleCell], list[Path]]:
    """Cells of files and folders, and the JSON files in folders that hold none.

    A folder's lines of cells (*.jsonl) are read, or else its *.json files: suites, and results of `poem bench`.

    Raises:
        FileNotFoundError: A path does not exist.
        ValueError: A file holds something else, or a cell breaks the schema; the message names file and cell.
    """
    cells: list[SampleCell] = []
    other: list[Path] = []
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"expected cells in {path}, which does not exist")
        files = [path] if path.is_file() else sorted(path.glob("*.jsonl")) or sorted(path.glob("*.json"))
        if not files:
            raise ValueError(f"expected *.json or *.jsonl with cells in {path}, got a folder without any")
        for file in files:
            found = _read_file(file)
            if found is None and path.is_file():
                raise ValueError(
                    f"expected cells (a suite) or results (poem report FOLDER --collect FILE) in {file}, got others"
                )
            cells += found or []
            other += [] if found is not None else [file]
    return cells, other


def _read_file(path: Path) -> list[SampleCell] | None:
    """The cells of a file; None where it is JSON of another kind."""
    if path.suffix == ".jsonl":
        return read_lines(path)
    try:
        held = read_json(path)
    except ValueError as error:
        raise ValueError(f"expected JSON in {path}, got another file ({error})") from error
    if isinstance(held, dict) and "cells" in held:
        return read_suite(path)
    if isinstance(held, dict) and ("results" in held or "cell" in held):
        return read_rows(path)
    return None


def scenario_of(stream: str) -> str:
    """The scenario that a stream belongs to, a key of `SCENARIOS`; a stream of another kind is its own."""
    name, _, severity = stream.rpartition("-")
    if stream == "clean" or (name in CORRUPTIONS and severity == "5"):
        return "single"
    if name in CORRUPTIONS and severity.isdigit():
        return "mild"
    word = re.split(r"[-_ ]", stream.replace("label-shift", "label_shift"), maxsplit=1)[0]
    word = "label_shift" if stream.startswith(("label_shift", "label-shift")) else word
    return word if word in SCENARIOS else stream


def make_leaderboard(cells: Iterable[SampleCell]) -> Leaderboard:
    """Put cells into blocks. A cell that several files hold, with the same samples right, is taken once.

    Raises:
        ValueError: No cells; two of the same row, stream, seed and protocol with other samples right; or two streams of
            one name and seed in a block.
    """
    groups = _grouped(cells)
    own_sources = {key: dict(rows.get(SOURCE, {})) for key, rows in groups.items()}
    runs: Runs = {}
    blocks: list[Block] = []
    alone: list[str] = []
    for key in sorted(groups, key=_place):
        (net, scenario, batch, protocol, _), rows = key, groups[key]
        base = rows[SOURCE] = {**_other_batches(own_sources, key), **rows.get(SOURCE, {})}
        sets: dict[frozenset[Sample], None] = {}
        for name, held in sorted(rows.items(), key=lambda item: -len(item[1])):
            shared = frozenset(held) & frozenset(base)
            if name == SOURCE:
                continue
            if shared:
                sets.setdefault(shared)
            else:
                alone.append(f"{net} {name} ({SCENARIOS.get(scenario, scenario)}, batch {batch})")
        for at, samples in enumerate(sets):
            shown = {name: held for name, held in rows.items() if samples <= frozenset(held)}
            block = _block(net, scenario, batch, protocol, sorted(samples), shown, runs)
            blocks.append(replace(block, part=at > 0))
    return Leaderboard(tuple(blocks), runs, tuple(alone))


def _grouped(cells: Iterable[SampleCell]) -> dict[Group, Rows]:
    """Cells by group and row, each once."""
    groups: dict[Group, Rows] = defaultdict(dict)
    for cell in cells:
        scenario = scenario_of(cell.stream)
        each = cell.n if scenario in ("single", "mild", "sorted") else 0
        rows = groups[cell.net, scenario, cell.batch, cell.protocol, each]
        held = rows.setdefault(cell.row, {}).setdefault((cell.stream, cell.seed, cell.hash), cell)
        if held is not cell and not (held.n == cell.n and np.array_equal(_bits(held), _bits(cell))):
            named = f"{cell.net} {cell.row} {cell.stream} seed {cell.seed} batch {cell.batch}"
            raise ValueError(f"expected the same samples right in {named}, got others in {_files(held, cell)}")
    if not groups:
        raise ValueError("expected cells, got none")
    return groups


def _files(*cells: SampleCell) -> str:
    """The files of cells, in words."""
    return " and ".join(dict.fromkeys(dict(cell.provenance).get("file", "?") for cell in cells))


def _bits(cell: SampleCell) -> NDArray[np.bool_]:
    """Which answers were right.

    Raises:
        ValueError: The cell does not say.
    """
    if cell.bits is None:
        raise ValueError(f"expected {cell.net} {cell.row} {cell.stream} to say which samples were right")
    return cell.bits


def _place(key: Group) -> tuple[int, str, str, int, str, int]:
    """Where a group's blocks come on the page."""
    net, scenario, batch, protocol, each = key
    order = list(SCENARIOS)
    at = order.index(scenario) if scenario in order else len(order)
    return at, scenario, net, -batch, protocol, -each


def _other_batches(sources: Mapping[Group, Mapping[Sample, SampleCell]], key: Group) -> dict[Sample, SampleCell]:
    """Source's cells of other batch sizes, without their seconds: its answers do not depend on the batch size."""
    return {
        sample: replace(cell, seconds=None)
        for other, held in sources.items()
        if (other[0], other[1], *other[3:]) == (key[0], key[1], *key[3:]) and other[2] != key[2]
        for sample, cell in held.items()
    }


def _block(net: str, scenario: str, batch: int, protocol: str, samples: list[Sample], rows: Rows, runs: Runs) -> Block:
    own = [rows[SOURCE][sample] for sample in samples]
    for one, other in pairwise(own):  # sorted: streams of one name and seed are neighbours
        if (one.stream, one.seed) == (other.stream, other.seed):
            raise ValueError(
                f"expected one stream {net} {one.stream} seed {one.seed}, got two of other samples in "
                f"{_files(*(held[each] for held in rows.values() for each in samples if each[0] == one.stream))}"
            )
    tent = next((held for name, held in sorted(rows.items()) if TENT.fullmatch(name)), None)
    made = []
    for name, held in rows.items():
        facts = tuple(sorted({held[sample].provenance for sample in samples}))
        run = hashlib.sha256(repr(facts).encode()).hexdigest()[:7]
        runs[run] = facts
        made.append(_row(name, held, rows[SOURCE], tent, samples, run))
    return Block(
        net, scenario, batch, protocol,
        streams=tuple(sorted({cell.stream for cell in own}, key=lambda stream: (stream != "clean", stream))),
        seeds=tuple(sorted({cell.seed for cell in own})),
        each=tuple(sorted({cell.n for cell in own})),
        rows=tuple(sorted(made, key=lambda row: (-row.accuracy, row.name))),
    )  # fmt: skip


def _row(
    name: str,
    held: dict[Sample, SampleCell],
    base: dict[Sample, SampleCell],
    tent: dict[Sample, SampleCell] | None,
    samples: list[Sample],
    run: str,
) -> LeaderboardRow:
    """A row of a block, compared with source."""
    right, differences = {}, {}
    for sample in samples:
        mine, its = held[sample], base[sample]
        if mine.n != its.n:
            raise ValueError(f"expected the same samples of {mine.net} {mine.stream} for {mine.row} and source")
        right[sample] = _bits(mine).astype(float)
        differences[sample] = right[sample] - _bits(its)
    images = {held[sample].images for sample in samples}
    scores = []
    for stream in dict.fromkeys(stream for stream, _, _ in samples):
        some = [sample for sample in samples if sample[0] == stream]
        accuracy, difference = (np.concatenate([all_of[each] for each in some]) for all_of in (right, differences))
        error = _error({each: differences[each] for each in some}, images)
        scores.append(StreamScore(stream, len(accuracy), 100 * accuracy.mean(), 100 * difference.mean(), error))
    return LeaderboardRow(
        name, tuple(scores), _error(right, images), _error(differences, images), len(_common_seeds(samples)),
        _cost(held, base, samples), None if tent is None else _cost(held, tent, samples), run,
    )  # fmt: skip


def _common_seeds(samples: Iterable[Sample]) -> list[int]:
    """Seeds that every stream has."""
    seeds: dict[str, set[int]] = defaultdict(set)
    for stream, seed, _ in samples:
        seeds[stream].add(seed)
    return sorted(set.intersection(*seeds.values()))


def _error(values: Mapping[Sample, Floats], images: set[str]) -> float | None:
    """Standard error of the mean over streams: over images or over seeds, the larger; None where it cannot be known.

    Args:
        values: Of every sample, by stream and seed.
        images: What is known of the images behind the samples: `SampleCell.images` of all of them.
    """
    of_stream: dict[str, dict[int, Floats]] = defaultdict(dict)
    for (stream, seed, _), each in values.items():
        of_stream[stream][seed] = each
    seeds = _common_seeds(values)
    over = seed_error([100 * fmean(float(held[seed].mean()) for held in of_stream.values()) for seed in seeds])
    if "repeated" in images and len(seeds) < SEEDS:
        return None
    longest = max(map(len, values.values()))
    number = {seed: at * longest for at, seed in enumerate(sorted({seed for _, seed, _ in values}))}
    columns = [
        (np.concatenate(list(held.values())),
         np.concatenate([number[seed] + np.arange(len(each)) for seed, each in held.items()]))
        for held in of_stream.values()
    ]  # fmt: skip
    if images == {"in order"}:
        return max(over, image_error(columns)[0])
    return max(over, fmean(image_error([column])[0] for column in columns))  # the most: streams that go together


def _cost(held: dict[Sample, SampleCell], base: dict[Sample, SampleCell], samples: list[Sample]) -> float | None:
    """Seconds by the other row's, on the same device as far as that is known; None where some are not known."""
    ratios = []
    for sample in samples:
        own, other = held[sample], base.get(sample)
        if other is None or not own.seconds or not other.seconds:
            return None
        devices = {dict(cell.provenance).get("device") for cell in (own, other)} - {None}
        if len(devices) > 1:
            return None
        ratios.append(own.seconds / other.seconds)
    return median(ratios)
