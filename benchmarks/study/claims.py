"""The paper's claims, one by one, on the study's networks: holds, does not hold, open, or not measured.

A claim compares rows; on a network it *holds* where the mean difference is more than two standard errors on the side
that it states, *fails* where it is as far on the other, and is *open* between. Claims of equality ("suffices", "adds
little") hold where the difference is below half a point by two standard errors. A claim about every method holds on a
network where none of them fails and their mean holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from study import parts
from study.answers import APART, HOSTS, MAIN_NETS, _over, _with, samples
from study.evidence import SURE, Bools, Difference, Evidence, Floats, Pair, share_difference

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
    """Holds where a difference is above a margin by two standard errors."""
    if found is None:
        return MISSING
    lead = found.points - margin
    state = "open" if abs(lead) <= SURE * found.error or lead == 0 else "holds" if lead > 0 else "fails"
    return Verdict(state, str(found))


def small(found: Difference | None, most: float = LITTLE) -> Verdict:
    """Holds where a difference is surely below some points; fails where it is surely above them."""
    if found is None:
        return MISSING
    if found.points + SURE * found.error < most:
        return Verdict("holds", str(found))
    return Verdict("fails" if found.points - SURE * found.error > most else "open", str(found))


def _every(pairs: dict[str, Pair], streams: Sequence[str]) -> Callable[[Evidence, str], Verdict]:
    """Every first row above its second; those that were measured are named where not all were."""

    def check(evidence: Evidence, net: str) -> Verdict:
        found = _over(evidence, net, pairs, streams)
        if found is None:
            return MISSING
        whole, each = found
        states = {name: above(one).state for name, one in each.items()}
        failing = [name for name, state in states.items() if state == "fails"]
        state = "fails" if failing else above(whole).state
        some = "" if len(each) == len(pairs) else f", {', '.join(each)} alone"
        words = f"{whole}{some}" + (f"; below: {', '.join(failing)}" if failing else "")
        return Verdict(state, words)

    return check


def _best(
    rivals: Sequence[str], streams: Sequence[str], batch: int = 64, least: int = 2
) -> Callable[[Evidence, str], Verdict]:
    """POEM above the best of its rivals, which is the best on the same samples."""

    def check(evidence: Evidence, net: str) -> Verdict:
        means = {row: evidence.accuracy(net, row, streams, batch) for row in rivals}
        there = {row: mean for row, mean in means.items() if mean is not None}
        if len(there) < least:
            return MISSING
        best = max(there, key=lambda row: there[row])
        found = above(evidence.difference(net, [("poem", best)], streams, batch))
        return Verdict(found.state, f"{found.words} to {best}") if found.state else MISSING

    return check


def _pair(pair: Pair, streams: Sequence[str], margin: float = 0.0) -> Callable[[Evidence, str], Verdict]:
    return lambda evidence, net: above(evidence.difference(net, [pair], streams), margin)


def _small(pairs: Sequence[Pair], streams: Sequence[str]) -> Callable[[Evidence, str], Verdict]:
    """None of the first rows is half a point above its second."""

    def check(evidence: Evidence, net: str) -> Verdict:
        found = [evidence.difference(net, [pair], streams) for pair in pairs]
        there = [each for each in found if each is not None]
        if len(there) < len(pairs):
            return MISSING
        return small(max(there, key=lambda each: each.points))

    return check


def _steadiest(evidence: Evidence, net: str) -> Verdict:
    """POEM's accuracy over thresholds 0.2, its own, 0.6 and 0.8 varies less than EATA's, SAR's and DeYO's."""
    spreads = {}
    for row in ("poem", "eata", "sar", "deyo"):
        names = [row, *(f"{row}, threshold {value}" for value in (0.2, 0.6, 0.8))]
        values = [evidence.accuracy(net, name, parts.FOUR) for name in names]
        there = [value for value in values if value is not None]
        if len(there) < len(values):
            return MISSING
        spreads[row] = max(there) - min(there)
    words = ", ".join(f"{row} {value:.1f}" for row, value in spreads.items())
    least = min(spreads, key=lambda row: spreads[row])
    return Verdict("holds" if least == "poem" else "fails", f"range in points: {words}")


def _more_hurts(evidence: Evidence, net: str) -> Verdict:
    """Five rounds are below two."""
    return above(evidence.difference(net, [("poem", "poem, rounds 5")], parts.FOUR))


def _half_best(evidence: Evidence, net: str) -> Verdict:
    """No other share of the source branch is above one half."""
    names = [f"poem, ratio {value}" for value in (0.0, 0.25, 0.75, 1.0)]
    found = {name: evidence.difference(net, [(name, "poem")], parts.FOUR) for name in names}
    there = {name: each for name, each in found.items() if each is not None}
    if len(there) < len(names):
        return MISSING
    best = max(there, key=lambda name: there[name].points)
    state = {"above": "fails", "below": "holds", "open": "open"}[there[best].state]
    return Verdict(state, f"the best other, {best.removeprefix('poem, ')}: {there[best]}")


def _cost(evidence: Evidence, net: str) -> Verdict:
    """POEM takes less than three times Tent's seconds."""
    found = evidence.cost(net, "poem", "tent", parts.ALL)
    if found is None:
        return MISSING
    return Verdict("holds" if found < 3 else "fails", f"{found:.1f} times (the paper: 1.9)")


def _few(evidence: Evidence, net: str) -> Verdict:
    found = samples(evidence, net)
    if found is None:
        return MISSING
    state = "holds" if found.newly.n < found.rest.n else "fails"
    return Verdict(state, f"{found.newly.n:,} of {found.newly.n + found.rest.n:,} that are not selected at first")


def _crossing(evidence: Evidence, net: str) -> Verdict:
    found = samples(evidence, net)
    if found is None or not found.down + found.up:
        return MISSING
    return Verdict("holds" if found.down > found.up else "fails", f"{found.down:,} fall, {found.up:,} rise")


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
    norm_lead: float
    """Mean norm in the zone minus that below it."""
    norm_error: float
    lead: Difference | None
    """Share of right samples in the zone minus that above it."""


def zone(evidence: Evidence, net: str) -> Zone | None:
    """Over the four corruptions; the range is from the 5th to the 95th percentile of newly reliable samples."""
    row = "poem, recorded with gradients"
    if not evidence.has(net, row, parts.FOUR):
        return None
    runs = [run for stream in parts.FOUR for run in evidence.run(net, row, stream).values()]
    entropy = np.concatenate([run.entropies("entropy_first") for run in runs])
    newly = np.concatenate([run.bools("newly") & ~run.bools("selected") for run in runs])
    right = np.concatenate([run.bools("before") for run in runs])
    norms = np.concatenate([run.norms() for run in runs])
    if not newly.any():
        return None
    low, high = np.percentile(entropy[newly], [5, 95])
    masks = (entropy < low, (entropy >= low) & (entropy <= high), entropy > high)
    finite = np.isfinite(norms)

    def mean(values: Floats, mask: Bools) -> float:
        return float(values[mask].mean()) if mask.any() else math.nan

    a, b, c = ((mean(norms, mask & finite), 100 * mean(right.astype(float), mask), int(mask.sum())) for mask in masks)
    below, inside = (norms[mask & finite] for mask in masks[:2])
    error = math.sqrt(sum(each.var() / max(1, len(each)) for each in (below, inside) if len(each)))
    lead = share_difference(*(each.astype(float)[:, None] for each in (right, masks[1], masks[2])))
    return Zone((a[0], b[0], c[0]), (a[1], b[1], c[1]), (a[2], b[2], c[2]), b[0] - a[0], error, lead)


def _small_gradients(evidence: Evidence, net: str) -> Verdict:
    found = zone(evidence, net)
    if found is None or math.isnan(found.norms[0]):
        return MISSING
    words = f"mean norm {found.norms[0]:.3g} below, {found.norms[1]:.3g} in the zone (± {found.norm_error:.2g})"
    if abs(found.norm_lead) <= SURE * found.norm_error:
        return Verdict("open", words)
    return Verdict("holds" if found.norm_lead > 0 else "fails", words)


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
          _every({h: (_with(h, "+poem-i"), f"{h}*") for h in ("tent-filtered", *HOSTS[1:])}, parts.FOUR), APART),
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
