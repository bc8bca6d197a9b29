"""The study's questions, and the sentence that the cells give to each, network by network.

A network whose cells are missing is "not measured". Differences are of rows on the same samples (see `evidence.py`);
"above" and "below" are more than two standard errors from 0, without a correction for their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from auto.paired import LEVEL, holm
from auto.rows import has_batch_norm

from study import parts, rows
from study.evidence import Difference, Evidence, Floats, Group, Pair, group_of, over_seeds, share_difference
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

    @property
    def state(self) -> str:
        """As `Difference.state`; empty where nothing was measured."""
        return "" if self.main is None else self.main.state


@dataclass(frozen=True)
class Answer:
    """A question with a line for every network."""

    name: str
    question: str
    compared: str
    """Which rows on which streams."""
    lines: tuple[Line, ...]
    failing: bool = False
    """Whether the lines are about the worst that was found."""

    @property
    def head(self) -> str:
        """How many networks say what."""
        measured = [line for line in self.lines if line.state]
        if not measured:
            return "Not measured."
        if self.failing:
            below = sum(line.state == "below" for line in measured)
            return f"Some stream is below source on {below} of {len(measured)} networks."
        counts = {state: sum(line.state == state for line in measured) for state in ("above", "below", "open")}
        words = {"above": "yes on {}", "below": "no, the opposite, on {}", "open": "no difference seen on {}"}
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


def _with(host: str, ending: str) -> str:
    """A host with an ending; Tent with exploration or a branch has the filter of `tent-filtered`."""
    return f"tent{ending}" if host == "tent-filtered" and ending.startswith("+") else f"{host}{ending}"


def _over(
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
    found = _over(evidence, net, pairs, streams)
    if found is None:
        return Line(net)
    whole, each = found
    alone = ", ".join(f"{name} {one}" for name, one in each.items())
    words = f"{whole} points" + (f" ({alone})" if len(each) > 1 else f" ({next(iter(each))})")
    lacking = [name for name in pairs if name not in each]
    if lacking:
        words += f"; {NOT_MEASURED}: {', '.join(lacking)}"
    return Line(net, words + more, whole, each)


# The questions --------------------------------------------------------------------------------------------------------


def exploration(evidence: Evidence) -> Answer:
    """Exploration against the same number of plain updates."""
    hosts = ("tent-filtered", *HOSTS[1:])
    pairs = {host: (_with(host, "+poem-i"), f"{host}*") for host in hosts}
    pairs["poem"] = ("poem", "poem, first selection twice")
    return Answer(
        "exploration", "Does exploration (POEM-I) beat the same number of plain updates?",
        "`HOST+poem-i` minus `HOST*`, which makes as many updates on its first selection, and `poem` minus `poem` that "
        "updates twice on its first selection; the four corruptions of the paper's ablations.",
        tuple(_line(evidence, net, pairs, parts.FOUR) for net in APART),
    )  # fmt: skip


def branch(evidence: Evidence) -> Answer:
    """The branch against none, both answered after the update."""
    hosts = ("tent-filtered", *HOSTS[1:])
    pairs = {host: (_with(host, "+poem-ii"), f"{host}, read last") for host in hosts}
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
        tuple(_line(evidence, net, pairs, parts.ALL) for net in MAIN_NETS),
    )  # fmt: skip


def lift_right_statistics(evidence: Evidence) -> Answer:
    """`+poem` on each base, with the statistics of `auto`."""
    pairs = {host: (f"{host}+poem{AUTO_STATISTICS}", f"{host}{AUTO_STATISTICS}") for host in HOSTS}
    return Answer(
        "lift-statistics", "Does `+poem` lift each base, with the statistics that `auto` takes?",
        "the same with `[auto statistics]` in both rows; the four corruptions, networks with batch norm.",
        tuple(_line(evidence, net, pairs, parts.FOUR) for net in BATCH_NORM),
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
        whole = _over(evidence, net, {host: (f"{host}+poem", host) for host in line.others}, parts.FOUR)
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
    down: int
    """Samples whose entropy falls below 0.4 ln C."""
    up: int


def samples(evidence: Evidence, net: str, row: str = "poem, recorded") -> Samples | None:
    """The groups of a recorded row: selected before any update, newly reliable after one, and the rest."""
    if not evidence.has(net, row, parts.FOUR):
        return None
    seeds = sorted(set.intersection(*(set(evidence.run(net, row, stream)) for stream in parts.FOUR)))
    if not seeds:
        return None

    def stack(name: str) -> Floats:
        columns = [
            np.concatenate([
                run.entropies(name) if name.startswith("entropy") else run.bools(name).astype(float)
                for run in (evidence.run(net, row, stream)[seed] for seed in seeds)
            ])
            for stream in parts.FOUR
        ]  # fmt: skip
        return np.stack(columns, axis=1)

    right, selected, newly = stack("before"), stack("selected"), stack("newly")
    newly = newly * (1 - selected)
    rest = (1 - selected) * (1 - newly)
    first, last = stack("entropy_first"), stack("entropy_last")
    return Samples(
        group_of(right, selected), group_of(right, newly), group_of(right, rest),
        share_difference(right, newly, rest), share_difference(right, newly, selected),
        _same_entropy(right, newly, rest, first),
        int(((first >= 0.4) & (last < 0.4)).sum()), int(((first < 0.4) & (last >= 0.4)).sum()),
    )  # fmt: skip


def _same_entropy(right: Floats, newly: Floats, rest: Floats, entropy: Floats) -> Difference | None:
    """Newly reliable samples against the rest in ranges of entropy that have both, weighted by the former's number."""
    at = (entropy * 255 // BIN).astype(int)
    points, variance, total = 0.0, 0.0, 0
    for number in np.unique(at):
        here = (at == number).astype(float)
        found = share_difference(right, newly * here, rest * here)
        count = int((newly * here).sum())
        if found is None:
            continue
        points, variance, total = points + count * found.points, variance + (count * found.error) ** 2, total + count
    if not total:
        return None
    return Difference(points / total, math.sqrt(variance) / total, total, right.shape[1])


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
    points: float
    error: float


def failures(evidence: Evidence, chosen: Sequence[str]) -> list[Failure]:
    """Of each row and network: how many streams are below source, and the worst."""
    found = []
    for net in NETS:
        for row in chosen:
            pairs = {stream: evidence.paired(net, (row, "source"), stream) for stream in evidence.streams(net, row)}
            held = {stream: paired for stream, paired in pairs.items() if paired is not None}
            if not held:
                continue
            adjusted = holm([paired.p_below(0.0) for paired in held.values()])
            worst = min(held, key=lambda stream: held[stream].difference)
            error = held[worst].error
            one = evidence.difference(net, [(row, "source")], [worst])
            error = max(error, one.error) if one is not None else error
            below = sum(p < LEVEL for p in adjusted)
            found.append(Failure(net, row, len(held), below, worst, held[worst].difference, error))
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
        worst = min(own, key=lambda each: each.points)
        words = "; ".join(
            f"{each.row} is below source on {each.below} of {each.cells} streams, "
            f"most on {each.worst} ({each.points:+.1f} ± {each.error:.1f})"
            for each in own
        )
        main = Difference(worst.points, worst.error, 0, sum(each.cells for each in own))
        found.append(Line(net, words, main))
    return Answer(
        "failing", "Where does any of it fail?",
        "every stream at batch 64, scenarios among them, against source: one-sided at 5 %, adjusted by Holm over the "
        "streams of a row and network.",
        tuple(found), failing=True,
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
        found: dict[str, Any] = {"points": round(each.points, 3), "error": round(each.error, 3), "n": each.n}
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
                    ratios.append(over_seeds(found.seeds) / found.paired)
    return (float(np.median(ratios)), max(ratios), len(ratios)) if ratios else None
