"""The paper's claims, one by one, on the study's networks: holds, does not hold, open, or not measured.

A claim compares rows; on a network it *holds* where the mean difference is more than two standard errors (three with
one seed) on the side that it states, *fails* where it is as far on the other, and is *open* between. Claims of equality
("suffices", "adds little") hold where the difference is as surely below half a point. A claim about every method, or
about the best, holds where all of them were measured and each holds, and fails where one does; those that were measured
cannot confirm it for the others. Costs have no standard error: they count where every stream agrees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from study import parts
from study.answers import APART, HOSTS, MAIN_NETS, NOT_MEASURED, Recorded, every_state, over, samples, with_ending
from study.evidence import Difference, Evidence, Floats, Pair, share_difference

CORRUPTED = tuple(stream for stream in parts.ALL if stream != "clean")
LITTLE = 0.5
"""Points that count as little."""
FAR, NEAR = 5.0, 10.0
"""Points that count as far above, and as close; those of `poem.bench.analysis`."""


@dataclass(frozen=True)
class Verdict:
    """What a network says to a claim."""

    state: str
    """`holds`, `fails`, `open` or empty, where cells are missing."""
    words: str = ""


MISSING = Verdict("")


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, and its check on a network."""

    where: str
    text: str
    check: Callable[[Evidence, str], Verdict]
    nets: tuple[str, ...] = MAIN_NETS


def above(found: Difference | None, margin: float = 0.0) -> Verdict:
    """Holds where a difference is surely above a margin; fails where it is surely below it."""
    if found is None:
        return MISSING
    lead = found.points - margin
    state = "open" if abs(lead) <= found.margin or lead == 0 else "holds" if lead > 0 else "fails"
    return Verdict(state, str(found))


def small(found: Difference | None, most: float = LITTLE) -> Verdict:
    """Holds where a difference is surely below some points; fails where it is surely above them."""
    if found is None:
        return MISSING
    if found.points + found.margin < most:
        return Verdict("holds", str(found))
    return Verdict("fails" if found.points - found.margin > most else "open", str(found))


def _lacking(wanted: Sequence[str], there: Sequence[str]) -> str:
    """The rows that were not measured, in words."""
    left = [name for name in wanted if name not in there]
    return f"; {NOT_MEASURED}: {', '.join(left)}" if left else ""


def _all_of(states: Sequence[str], wanted: int) -> str:
    """The state of a claim about all: fails where one does, holds where all were measured and hold, else open."""
    return "fails" if "fails" in states else "holds" if states.count("holds") == wanted else "open"


def _every(pairs: dict[str, Pair], streams: Sequence[str]) -> Callable[[Evidence, str], Verdict]:
    """Every first row above its second."""

    def check(evidence: Evidence, net: str) -> Verdict:
        found = over(evidence, net, pairs, streams)
        if found is None:
            return MISSING
        whole, each = found
        state = {"below": "fails", "above": "holds", "open": "open"}[every_state(pairs, each)]
        failing = [name for name, one in each.items() if one.state == "below"]
        words = f"{whole}" + (f"; below: {', '.join(failing)}" if failing else "")
        return Verdict(state, words + _lacking(list(pairs), list(each)))

    return check


def _best(rivals: Sequence[str], streams: Sequence[str], batch: int = 64) -> Callable[[Evidence, str], Verdict]:
    """POEM above each rival, on the samples that both have; told of the rival that is farthest ahead."""

    def check(evidence: Evidence, net: str) -> Verdict:
        found = {row: evidence.difference(net, [("poem", row)], streams, batch) for row in rivals}
        held = {row: one for row, one in found.items() if one is not None}
        if not held:
            return MISSING
        best = min(held, key=lambda row: held[row].points)
        state = _all_of([above(one).state for one in held.values()], len(rivals))
        return Verdict(state, f"{held[best]} to {best}{_lacking(rivals, list(held))}")

    return check


def _pair(pair: Pair, streams: Sequence[str], margin: float = 0.0) -> Callable[[Evidence, str], Verdict]:
    return lambda evidence, net: above(evidence.difference(net, [pair], streams), margin)


def _small(pairs: Sequence[Pair], streams: Sequence[str]) -> Callable[[Evidence, str], Verdict]:
    """None of the first rows is half a point above its second."""

    def check(evidence: Evidence, net: str) -> Verdict:
        found = {pair[0]: evidence.difference(net, [pair], streams) for pair in pairs}
        there = {name: each for name, each in found.items() if each is not None}
        if not there:
            return MISSING
        largest = max(there, key=lambda name: there[name].points)
        state = _all_of([small(each).state for each in there.values()], len(pairs))
        return Verdict(state, f"{there[largest]}{_lacking(list(found), list(there))}")

    return check


def _steadiest(evidence: Evidence, net: str) -> Verdict:
    """POEM's accuracy over thresholds 0.2, its own, 0.6 and 0.8 varies less than EATA's, SAR's and DeYO's."""
    names = {
        row: [row, *(f"{row}, threshold {value}" for value in (0.2, 0.6, 0.8))]
        for row in ("poem", "eata", "sar", "deyo")
    }
    every = [name for own in names.values() for name in own]
    if not all(evidence.has(net, name, parts.FOUR) for name in every):
        return MISSING
    seeds = evidence.common_seeds(net, every, parts.FOUR)
    accuracy = {name: evidence.accuracy(net, name, parts.FOUR, seeds=seeds) for name in every}
    means = {name: mean for name, mean in accuracy.items() if mean is not None}
    if len(means) < len(every):
        return MISSING
    ends = {row: (max(own, key=means.__getitem__), min(own, key=means.__getitem__)) for row, own in names.items()}
    leads = []
    for row in ("eata", "sar", "deyo"):  # the range of a rival minus that of POEM, as twice the mean of two pairs
        found = evidence.difference(net, [ends[row], ends["poem"][::-1]], parts.FOUR, seeds=seeds)
        if found is None:
            return MISSING
        leads.append(replace(found, points=2 * found.points, error=2 * found.error))
    ranges = ", ".join(f"{row} {means[high] - means[low]:.1f}" for row, (high, low) in ends.items())
    least = min(leads, key=lambda each: each.points)
    state = _all_of([above(each).state for each in leads], len(leads))
    return Verdict(state, f"range in points: {ranges}; the least of the others minus poem {least}")


def _more_hurts(evidence: Evidence, net: str) -> Verdict:
    """Five rounds are below two."""
    return above(evidence.difference(net, [("poem", "poem, rounds 5")], parts.FOUR))


def _half_best(evidence: Evidence, net: str) -> Verdict:
    """No other share of the source branch is above one half."""
    names = [f"poem, ratio {value}" for value in (0.0, 0.25, 0.75, 1.0)]
    found = {name: evidence.difference(net, [("poem", name)], parts.FOUR) for name in names}
    there = {name: each for name, each in found.items() if each is not None}
    if not there:
        return MISSING
    best = min(there, key=lambda name: there[name].points)
    state = _all_of([above(each).state for each in there.values()], len(names))
    words = f"{there[best]} to the best other, {best.removeprefix('poem, ')}"
    return Verdict(state, words + _lacking(names, list(there)))


def _cost(evidence: Evidence, net: str) -> Verdict:
    """POEM takes less than three times Tent's seconds, on every stream."""
    found = evidence.costs(net, "poem", "tent", parts.ALL)
    if not found:
        return MISSING
    state = "holds" if max(found) < 3 else "fails" if min(found) > 3 else "open"
    return Verdict(state, f"{np.median(found):.1f} times, {min(found):.1f} to {max(found):.1f} (the paper: 1.9)")


def _few(evidence: Evidence, net: str) -> Verdict:
    found = samples(evidence, net)
    if found is None:
        return MISSING
    words = f"{found.newly.n:,} of {found.newly.n + found.rest.n:,} that are not selected at first"
    return Verdict(above(found.few).state, words)


def _crossing(evidence: Evidence, net: str) -> Verdict:
    found = samples(evidence, net)
    if found is None or not found.down + found.up:
        return MISSING
    return Verdict(above(found.falling).state, f"{found.down:,} fall, {found.up:,} rise")


def _over_rest(evidence: Evidence, net: str) -> Verdict:
    found = samples(evidence, net)
    return MISSING if found is None else above(found.over_rest, FAR)


def _near_selected(evidence: Evidence, net: str) -> Verdict:
    found = samples(evidence, net)
    return MISSING if found is None else above(found.over_selected, -NEAR)


def _same_entropy(evidence: Evidence, net: str) -> Verdict:
    found = samples(evidence, net)
    return MISSING if found is None else above(found.same_entropy)


@dataclass(frozen=True)
class Zone:
    """Gradient norms and shares of right answers below, in and above the range of newly reliable samples."""

    norms: tuple[float, float, float]
    right: tuple[float, float, float]
    counts: tuple[int, int, int]
    norm_lead: Difference | None
    """Mean norm in the zone minus that below it, in hundredths; None where one of them has no sample."""
    lead: Difference | None
    """Share of right samples in the zone minus that above it."""


def zone(evidence: Evidence, net: str) -> Zone | None:
    """Over the four corruptions; the range is from the 5th to the 95th percentile of newly reliable samples."""
    held = Recorded(evidence, net, "poem, recorded with gradients")
    if not held.used:
        return None
    entropy, right, norms = held.entropies("entropy_first"), held.bits("before"), held.stack(lambda run: run.norms())
    newly = held.bits("newly") * (1 - held.bits("selected"))
    if not newly.any():
        return None
    low, high = np.percentile(entropy[newly > 0], [5, 95])
    masks = [each.astype(float) for each in (entropy < low, (entropy >= low) & (entropy <= high), entropy > high)]
    finite = np.isfinite(norms)
    norms = np.where(finite, norms, 0.0)

    def mean(values: Floats, mask: Floats) -> float:
        return float((values * mask).sum() / mask.sum()) if mask.any() else math.nan

    a, b, c = ((mean(norms, mask * finite), 100 * mean(right, mask), int(mask.sum())) for mask in masks)
    return Zone(
        (a[0], b[0], c[0]), (a[1], b[1], c[1]), (a[2], b[2], c[2]),
        share_difference(norms, masks[1] * finite, masks[0] * finite, seeds=held.seeds),
        share_difference(right, masks[1], masks[2], seeds=held.seeds),
    )  # fmt: skip


def _small_gradients(evidence: Evidence, net: str) -> Verdict:
    found = zone(evidence, net)
    if found is None or found.norm_lead is None:
        return MISSING
    error = found.norm_lead.error / 100
    words = f"mean norm {found.norms[0]:.3g} below, {found.norms[1]:.3g} in the zone (± {error:.2g})"
    return Verdict(above(found.norm_lead).state, words)


def _poor_labels(evidence: Evidence, net: str) -> Verdict:
    found = zone(evidence, net)
    if found is None or found.lead is None:
        return MISSING
    words = f"right {found.right[2]:.1f} % above, {found.right[1]:.1f} % in the zone ({found.lead})"
    return Verdict(above(found.lead).state, words)


_I = {host: (f"{host}+poem-i", host) for host in HOSTS}
_II = {host: (f"{host}+poem-ii", host) for host in HOSTS}
RIVALS = ("tent", "eata", "sar", "deyo", "roid")
CLAIMS = (
    Claim("Table 1", "POEM has the highest average over 15 corruptions", _best(RIVALS, CORRUPTED)),
    Claim("Table 1", "POEM is above the unadapted network", _pair(("poem", "source"), CORRUPTED)),
    Claim("Table 12", "POEM raises every method", _every({h: (f"{h}+poem", h) for h in HOSTS}, CORRUPTED)),
    Claim("Table 6", "Exploring beats as many plain updates",
          _every({h: (with_ending(h, "+poem-i"), f"{h}*") for h in ("tent-filtered", *HOSTS[1:])}, parts.FOUR), APART),
    Claim("Table 8", "POEM-I raises every method", _every(_I, parts.FOUR), APART),
    Claim("Table 8", "POEM-II raises every method", _every(_II, parts.FOUR), APART),
    Claim("Table 8", "POEM-II is never above POEM-I",
          _small([(f"{h}+poem-ii", f"{h}+poem-i") for h in HOSTS], parts.FOUR), APART),
    Claim("Table 10", "A branch of one stage is better than none",
          _pair(("poem", "poem, no branch"), parts.FOUR), APART),
    Claim("Table 10", "A deeper branch adds little",
          _small([("poem, depth 2", "poem"), ("poem, depth 3", "poem")], parts.FOUR), APART),
    Claim("Table 11", "Tent loses little when the shallow layers alone are moved",
          _small([("tent", "tent, shallow layers")], parts.FOUR), APART),
    Claim("text", "Cross-entropy is better than entropy for the branch",
          _pair(("poem", "poem, branch by entropy"), parts.FOUR), APART),
    Claim("Table 3", "POEM is the best under label shift", _best(("source", "tent", "deyo"), ("label_shift",))),
    Claim("Table 4", "POEM is the best on mixed shifts", _best(("source", "tent", "deyo"), ("mixed",))),
    Claim("Table 7", "POEM is the best on single images", _best(("source", "tent"), parts.FOUR, 1), APART),
    Claim("Table 9", "POEM is slower than Tent by less than three times", _cost),
    Claim("Figure 1a", "Most samples that cross the threshold fall below it", _crossing, APART),
    Claim("Figure 1b", "Potentially reliable samples are few", _few, APART),
    Claim("Figure 1b", "They are right far more often (5 points) than the rest", _over_rest, APART),
    Claim("Figure 1b", "They are right about as often (10 points) as those selected at first", _near_selected, APART),
    Claim("Figure 4", "At the same entropy they are right more often than the rest", _same_entropy, APART),
    Claim("Figure 3", "Below their range of entropy gradients are small", _small_gradients, APART),
    Claim("Figure 3", "Above it pseudo-labels are poor", _poor_labels, APART),
    Claim("Figure 5", "POEM varies least over thresholds", _steadiest, APART),
    Claim("Figure 6a", "One extra update suffices: a third adds little",
          _small([("poem, rounds 3", "poem")], parts.FOUR), APART),
    Claim("Figure 6a", "Two updates are better than one", _pair(("poem", "poem, rounds 1"), parts.FOUR), APART),
    Claim("Figure 6a", "More updates can hurt: five are below two", _more_hurts, APART),
    Claim("Figure 6b", "Equal shares of both branches answer best", _half_best, APART),
)  # fmt: skip
"""Tables 2 and 5 of the paper have no data here: CIFAR-100-C, ImageNet-A, -R and -Sketch."""


def verdicts(evidence: Evidence) -> list[tuple[Claim, dict[str, Verdict]]]:
    """Every claim with its verdict on each of its networks."""
    return [(claim, {net: claim.check(evidence, net) for net in claim.nets}) for claim in CLAIMS]
