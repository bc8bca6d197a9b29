"""The study's questions, and the sentence that the cells give to each, network by network.

A network whose cells are missing is "not measured". Differences are of rows on the same samples (see `evidence.py`);
"above" and "below" are more than two standard errors from 0, or three with one seed, not corrected for their number.
A question about each base is answered by all of them: one that is lowered is enough for a no, one that is lifted says
nothing of the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from auto.paired import LEVEL, holm
from auto.rows import has_batch_norm

from poem.bench.paired_errors import image_error, seed_error
from study import parts, rows
from study.evidence import Difference, Evidence, Floats, Group, Indices, Pair, Run, group_of, share_difference
from study.rows import AUTO_STATISTICS

NETS = tuple(net for nets in parts.SUITES.values() for net in nets)
HOSTS = ("tent", "eata", "sar", "deyo", "roid")
NOT_MEASURED = "not measured"
APART = (*parts.SUITES["imagenet-3k"], *parts.SUITES["cifar10"])
"""Networks on which the methods' parts are told apart."""
MAIN_NETS = (*APART, "effnet-lite0")
"""Networks that have every main row."""
BATCH_NORM = tuple(net for net in MAIN_NETS if has_batch_norm(net))
SCENARIO_STREAMS = (*parts.SCENARIOS, "recurring", "recurring-short")
BIN = 16
"""Entropy is compared in ranges of this many of its 256 steps."""


@dataclass(frozen=True)
class Line:
    """What one network says to a question."""

    net: str
    words: str = NOT_MEASURED
    main: Difference | None = None
    """The difference that decides; None where it was not measured."""
    others: dict[str, Difference] = field(default_factory=dict)
    verdict: str = ""
    """The state where it is not that of `main`."""

    @property
    def state(self) -> str:
        """As `Difference.state`; empty where nothing was measured."""
        return self.verdict or ("" if self.main is None else self.main.state)


@dataclass(frozen=True)
class Answer:
    """A question with a line for every network."""

    name: str
    question: str
    compared: str
    """Which rows on which streams."""
    lines: tuple[Line, ...]
    kind: str = "mean"
    """`mean`: about the mean over what was measured; `each`: about every base; `failing`: about losses to source."""

    @property
    def head(self) -> str:
        """How many networks say what."""
        measured = [line for line in self.lines if line.state]
        if not measured:
            return "Not measured."
        counts = {state: sum(line.state == state for line in measured) for state in ("above", "below", "open")}
        if self.kind == "failing":
            return f"Some stream is below source on {counts['below']} of {len(measured)} networks."
        words = {"above": "yes on {}", "below": "no, the opposite, on {}", "open": "no difference seen on {}"}
        if self.kind == "each":
            words = {"above": "each one on {}", "below": "not each one on {}", "open": "open on {}"}
        text = ", ".join(words[state].format(count) for state, count in counts.items() if count)
        left = len(self.lines) - len(measured)
        text = f"{text} of {len(measured)} networks" + (f"; {left} not measured" if left else "")
        return text[0].upper() + text[1:] + "."

    @property
    def text(self) -> str:
        """As Markdown: the head, then a sentence for each network that was measured."""
        found = [f"- `{line.net}`: {line.words}.\n" for line in self.lines if line.state]
        missing = [f"`{line.net}`" for line in self.lines if not line.state]
        if missing:
            found.append(f"- Not measured: {', '.join(missing)}.\n")
        return f"**{self.question}** {self.head}\n\nCompared: {self.compared}\n\n{''.join(found)}"


def with_ending(host: str, ending: str) -> str:
    """A host with an ending; Tent with exploration or a branch has the filter of `tent-filtered`."""
    return f"tent{ending}" if host == "tent-filtered" and ending.startswith("+") else f"{host}{ending}"


def over(
    evidence: Evidence, net: str, pairs: dict[str, Pair], streams: Sequence[str], batch: int = 64
) -> tuple[Difference, dict[str, Difference]] | None:
    """The mean over those pairs that were measured on all streams, and each alone; None where none was."""
    found = {name: evidence.difference(net, [pair], streams, batch) for name, pair in pairs.items()}
    each = {name: one for name, one in found.items() if one is not None}
    if not each:
        return None
    whole = evidence.difference(net, [pairs[name] for name in each], streams, batch)
    return (whole, each) if whole is not None else None


def _line(evidence: Evidence, net: str, pairs: dict[str, Pair], streams: Sequence[str], more: str = "") -> Line:
    found = over(evidence, net, pairs, streams)
    if found is None:
        return Line(net)
    whole, each = found
    alone = ", ".join(f"{name} {one}" for name, one in each.items())
    words = f"{whole} points" + (f" ({alone})" if len(each) > 1 else f" ({next(iter(each))})")
    lacking = [name for name in pairs if name not in each]
    if lacking:
        words += f"; {NOT_MEASURED}: {', '.join(lacking)}"
    return Line(net, words + more, whole, each)


def every_state(pairs: Mapping[str, Pair], each: Mapping[str, Difference]) -> str:
    """`below` where one pair is, `above` where all are, else `open`: those measured cannot speak for the others."""
    states = [each[name].state if name in each else "open" for name in pairs]
    return "below" if "below" in states else "above" if set(states) == {"above"} else "open"


def _each_line(evidence: Evidence, net: str, pairs: dict[str, Pair], streams: Sequence[str]) -> Line:
    """A line whose state is that of every pair, not of their mean."""
    line = _line(evidence, net, pairs, streams)
    return line if line.main is None else replace(line, verdict=every_state(pairs, line.others))


# The questions --------------------------------------------------------------------------------------------------------


def exploration(evidence: Evidence) -> Answer:
    """Exploration against the same number of plain updates."""
    hosts = ("tent-filtered", *HOSTS[1:])
    pairs = {host: (with_ending(host, "+poem-i"), f"{host}*") for host in hosts}
    pairs["poem"] = ("poem", "poem, first selection twice")
    return Answer(
        "exploration", "Does exploration (POEM-I) beat the same number of plain updates?",
        "`HOST+poem-i`, which updates at most twice and stops where its selection stands still, minus `HOST*`, which "
        "updates twice on its first selection, and `poem` minus `poem` that updates twice on its first selection; the "
        "four corruptions of the paper's ablations.",
        tuple(_line(evidence, net, pairs, parts.FOUR) for net in APART),
    )  # fmt: skip


def branch(evidence: Evidence) -> Answer:
    """The branch against none, both answered after the update."""
    hosts = ("tent-filtered", *HOSTS[1:])
    pairs = {host: (with_ending(host, "+poem-ii"), f"{host}, read last") for host in hosts}
    pairs["poem"] = ("poem", "poem, no branch")
    return Answer(
        "branch", "Does the branch (POEM-II) help?",
        "`HOST+poem-ii` minus the host answered after its update, and `poem` minus `poem` without a branch; the four "
        "corruptions.",
        tuple(_line(evidence, net, pairs, parts.FOUR) for net in APART),
    )  # fmt: skip


def lift(evidence: Evidence) -> Answer:
    """`+poem` on each base, with the published statistics."""
    pairs = {host: (f"{host}+poem", host) for host in HOSTS}
    return Answer(
        "lift", "Does `+poem` lift each base, with the batch's statistics?",
        "`HOST+poem` minus `HOST`, as published; clean and 15 corruptions.",
        tuple(_each_line(evidence, net, pairs, parts.ALL) for net in MAIN_NETS), kind="each",
    )  # fmt: skip


def lift_right_statistics(evidence: Evidence) -> Answer:
    """`+poem` on each base, with the statistics of `auto`."""
    pairs = {host: (f"{host}+poem{AUTO_STATISTICS}", f"{host}{AUTO_STATISTICS}") for host in HOSTS}
    return Answer(
        "lift-statistics", "Does `+poem` lift each base, with the statistics that `auto` takes?",
        "the same with `[auto statistics]` in both rows; the four corruptions, networks with batch norm.",
        tuple(_each_line(evidence, net, pairs, parts.FOUR) for net in BATCH_NORM), kind="each",
    )  # fmt: skip


def statistics(evidence: Evidence) -> Answer:
    """The statistics of `auto` against the published ones."""
    chosen = ("bn", "tent", "poem", "tent+poem", "eata", "eata+poem", "deyo", "deyo+poem")
    pairs = {row: (f"{row}{AUTO_STATISTICS}", row) for row in chosen}
    return Answer(
        "statistics", "Are the statistics that `auto` takes better than the batch's?",
        "each row with `[auto statistics]` minus the row as published; the four corruptions, networks with batch norm.",
        tuple(_line(evidence, net, pairs, parts.FOUR) for net in BATCH_NORM),
    )  # fmt: skip


def learning(evidence: Evidence) -> Answer:
    """What is learnt, on top of the statistics alone."""
    pairs = {row: (row, "bn") for row in ("tent", "eata", "sar", "deyo", "roid", "poem", "deyo+poem")}
    return Answer(
        "learning", "Does learning add to the batch's statistics?",
        "each method minus `bn`, which takes the batch's statistics and learns nothing; clean and 15 corruptions, "
        "networks with batch norm.",
        tuple(_line(evidence, net, pairs, parts.ALL) for net in BATCH_NORM),
    )  # fmt: skip


def answered_after(evidence: Evidence) -> Answer:
    """The answer after the update alone, beside what `+poem` gives."""
    found = []
    for net in APART:
        read = {host: (f"{host}, read last", host) for host in HOSTS}
        line = _line(evidence, net, read, parts.FOUR)
        whole = over(evidence, net, {host: (f"{host}+poem", host) for host in line.others}, parts.FOUR)
        if line.main is not None and whole is not None:
            line = Line(net, f"{line.words}; `+poem` on the same hosts {whole[0]}", line.main, line.others)
        found.append(line)
    return Answer(
        "answered-after", "How much does the answer after the update give, alone?",
        "each host answered after its update minus the host as published, which answers before; the four corruptions.",
        tuple(found),
    )  # fmt: skip


@dataclass(frozen=True)
class Samples:
    """What became of the samples of a recorded row, over the four corruptions."""

    selected: Group
    newly: Group
    rest: Group
    over_rest: Difference | None
    over_selected: Difference | None
    same_entropy: Difference | None
    """Newly reliable samples against the rest of the same range of entropy."""
    few: Difference
    """Samples that are never selected minus newly reliable ones, in points of all samples."""
    down: int
    """Samples whose entropy falls below 0.4 ln C."""
    up: int
    falling: Difference
    """`down` minus `up`, in points of all samples."""


class Recorded:
    """A recorded row on the four corruptions, as values of (images, streams); images of one seed after another."""

    def __init__(self, evidence: Evidence, net: str, row: str) -> None:
        self.runs = [evidence.run(net, row, stream) for stream in parts.FOUR]
        self.used = sorted(set.intersection(*map(set, self.runs)))
        """Seeds that all four have."""

    @property
    def seeds(self) -> Indices:
        """(images,) the seed of each image."""
        return np.concatenate([np.full(len(self.runs[0][seed].bits), seed) for seed in self.used])

    def stack(self, values: Callable[[Run], Floats]) -> Floats:
        """(images, streams) of a field."""
        return np.stack([np.concatenate([values(runs[seed]) for seed in self.used]) for runs in self.runs], axis=1)

    def bits(self, name: str) -> Floats:
        """(images, streams) of a field of bits, 0 and 1."""
        return self.stack(lambda run: run.bools(name).astype(float))

    def entropies(self, name: str) -> Floats:
        """(images, streams) of a field of entropies, as shares of ln C."""
        return self.stack(lambda run: run.entropies(name))


def _balance(values: Floats, seeds: Indices) -> Difference:
    """The mean of values (images, streams) in points, with its error over images and seeds."""
    images = np.arange(len(values), dtype=np.int64)
    error, size = image_error([(column, images) for column in values.T])
    alone = tuple(100 * float(values[seeds == seed].mean()) for seed in np.unique(seeds))
    return Difference(100 * float(values.mean()), max(error, seed_error(alone)), size, values.shape[1], alone, error)


def samples(evidence: Evidence, net: str, row: str = "poem, recorded") -> Samples | None:
    """The groups of a recorded row: selected before any update, newly reliable after one, and the rest."""
    held = Recorded(evidence, net, row)
    if not held.used:
        return None
    seeds, right, selected = held.seeds, held.bits("before"), held.bits("selected")
    newly = held.bits("newly") * (1 - selected)
    rest = (1 - selected) * (1 - newly)
    first, last = held.entropies("entropy_first"), held.entropies("entropy_last")
    down, up = (first >= 0.4) & (last < 0.4), (first < 0.4) & (last >= 0.4)
    strata = (first * 255 // BIN).astype(np.int64)
    return Samples(
        group_of(right, selected), group_of(right, newly), group_of(right, rest),
        share_difference(right, newly, rest, seeds=seeds), share_difference(right, newly, selected, seeds=seeds),
        share_difference(right, newly, rest, strata=strata, seeds=seeds), _balance(rest - newly, seeds),
        int(down.sum()), int(up.sum()), _balance(down.astype(float) - up, seeds),
    )  # fmt: skip


def newly_reliable(evidence: Evidence) -> Answer:
    """Whether newly reliable samples are right more often than those that were not selected."""
    found = []
    for net in APART:
        each = samples(evidence, net)
        if each is None or each.over_rest is None or each.over_selected is None:
            found.append(Line(net, f"{NOT_MEASURED}" if each is None else "no sample became reliable"))
            continue
        words = (
            f"right before any update: {each.newly.share:.1f} % of {each.newly.n:,} newly reliable samples, "
            f"{each.rest.share:.1f} % of {each.rest.n:,} never selected ({each.over_rest} points), "
            f"{each.selected.share:.1f} % of {each.selected.n:,} selected at first ({each.over_selected})"
        )
        if each.same_entropy is not None:
            words += f"; at the same entropy {each.same_entropy}"
        others = {"selected at first": each.over_selected}
        others |= {} if each.same_entropy is None else {"same entropy": each.same_entropy}
        found.append(Line(net, words, each.over_rest, others))
    return Answer(
        "newly-reliable", "Are potentially reliable samples right more often than the others?",
        "`poem` on the four corruptions: samples that are selected after an update and were not before it, against "
        "those that never are.",
        tuple(found),
    )  # fmt: skip


@dataclass(frozen=True)
class Failure:
    """A row's cells on a network that are below source."""

    net: str
    row: str
    cells: int
    below: int
    """Significantly, adjusted by Holm over the cells of the row and network."""
    worst: str
    """The stream with the lowest difference."""
    difference: Difference


def failures(evidence: Evidence, chosen: Sequence[str]) -> list[Failure]:
    """Of each row and network: how many streams are below source, and the worst."""
    found = []
    for net in NETS:
        for row in chosen:
            all_of = {s: evidence.difference(net, [(row, "source")], [s]) for s in evidence.streams(net, row)}
            held = {stream: found for stream, found in all_of.items() if found is not None}
            if not held:
                continue
            adjusted = holm([found.p_below for found in held.values()])
            worst = min(held, key=lambda stream: held[stream].points)
            found_below = sum(p < LEVEL for p in adjusted)
            found.append(Failure(net, row, len(held), found_below, worst, held[worst]))
    return found


def failing(evidence: Evidence) -> Answer:
    """Where POEM and `+poem` are below source."""
    chosen = ("poem", *(f"{host}+poem" for host in HOSTS))
    found = []
    for net in NETS:
        own = [each for each in failures(evidence, chosen) if each.net == net]
        if not own:
            found.append(Line(net))
            continue
        worst = min(own, key=lambda each: each.difference.points)
        words = "; ".join(
            f"{each.row} is below source on {each.below} of {each.cells} streams, "
            f"lowest on {each.worst} ({each.difference.rounded(1)})"
            for each in own
        )
        found.append(Line(net, words, worst.difference, verdict="below" if any(each.below for each in own) else "open"))
    return Answer(
        "failing", "Where does any of it fail?",
        "every stream of the study at batch 64, scenarios among them (not those sorted by class, nor those with images "
        "of noise), against source: one-sided at 5 %, by the larger of the paired "
        "error and that over seeds, adjusted by Holm over the streams of a row and network. A difference without ± has "
        "no error that is known, and is not counted.",
        tuple(found), kind="failing",
    )  # fmt: skip


QUESTIONS: tuple[Callable[[Evidence], Answer], ...] = (
    exploration, branch, lift, lift_right_statistics, newly_reliable, answered_after, statistics, learning, failing,
)  # fmt: skip


def answers(evidence: Evidence) -> list[Answer]:
    """All of them, in order; a network with borrowed cells says so."""
    found = []
    for question in QUESTIONS:
        answer = question(evidence)
        lines = tuple(
            replace(line, words=f"({evidence.borrowed[line.net]}) {line.words}")
            if line.state and line.net in evidence.borrowed else line
            for line in answer.lines
        )  # fmt: skip
        found.append(replace(answer, lines=lines))
    return found


def as_values(answer: Answer) -> dict[str, Any]:
    """An answer as plain values."""

    def values(each: Difference) -> dict[str, Any]:
        found: dict[str, Any] = {
            "points": round(each.points, 3),
            "error": round(each.error, 3) if math.isfinite(each.error) else None,
            "n": each.n,
        }
        if len(each.seeds) > 1:
            found["seeds"] = [round(value, 3) for value in each.seeds]
        return found

    lines = {}
    for line in answer.lines:
        if line.main is not None:
            lines[line.net] = {**values(line.main), "state": line.state}
            lines[line.net] |= {"each": {name: values(each) for name, each in line.others.items()}}
    missing = [line.net for line in answer.lines if line.main is None]
    return {"question": answer.question, "head": answer.head, "networks": lines, "not_measured": missing}


def spread(evidence: Evidence) -> tuple[float, float, int] | None:
    """How far seeds differ: median of the error over seeds by the paired one, the largest, and of how many cells.

    Cells are main rows against source on one stream; None where none has three seeds.
    """
    ratios = []
    for net in NETS:
        for row in rows.MAIN:
            for stream in parts.ALL:
                found = evidence.difference(net, [(row, "source")], [stream])
                if found is not None and len(found.seeds) >= 3 and found.paired > 0:
                    ratios.append(seed_error(found.seeds) / found.paired)
    return (float(np.median(ratios)), max(ratios), len(ratios)) if ratios else None
