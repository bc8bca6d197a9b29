"""What the paper says of its tables and figures, as checks on our numbers: holds, does not hold, or cannot say.

    for claim, verdict in judged(suite, reports): print(claim.text, verdict.holds, verdict.words)

A check looks at means, the page's own; deviations stand beside them there. What is not there, or was left out by flags,
makes the answer None, never False.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from poem._util.nearest import nearest_hint
from poem.bench.analysis.aggregate import pooled
from poem.bench.analysis.evidence import TIE, Evidence, MissingError, Pair, Verdict, above, printed
from poem.bench.result import Report
from poem.bench.suites import Claim, Suite

__all__ = ["CHECKS", "Evidence", "Pair", "Verdict", "check", "judged"]

POEM, SOURCE = "POEM (Algorithm 1)", "No Adapt."
METHODS = ("Tent", "EATA", "SAR", "DeYO")
FAR = 5.0
"""Points that count as far above."""
NEAR = 10.0
"""Points within which two groups' pseudo-labels are comparable."""
Check = Callable[[Evidence], Verdict]


def judged(suite: Suite, reports: Iterable[Report]) -> list[tuple[Claim, Verdict]]:
    """Each claim of a suite, and what its check found; of a suite that flags changed nothing can be said."""
    if suite.left_out or suite.altered:
        words = f"left out by flags: {', '.join(suite.left_out)}" if suite.left_out else ""
        other = f"flags made it another suite: {', '.join(suite.altered)}"
        return [(claim, Verdict(None, words or other)) for claim in suite.claims]
    evidence = Evidence.of(suite, reports)
    return [(claim, check(claim.check, evidence)) for claim in suite.claims]


def check(name: str, evidence: Evidence) -> Verdict:
    """Run a check by name."""
    if name not in CHECKS:
        raise ValueError(f"unknown check {name!r}; {nearest_hint(name, CHECKS)}")
    try:
        return CHECKS[name](evidence)
    except MissingError as missing:
        return Verdict(None, f"not there: {missing}")


# POEM beside others ---------------------------------------------------------------------------------------------------


def _rivals(evidence: Evidence, group: str) -> list[str]:
    """Rows that POEM is compared with; other forms of POEM are not."""
    found = [row for row in evidence.rows(group) if "POEM" not in row]
    if not found:
        raise MissingError("rows beside POEM")
    return found


def poem_best(evidence: Evidence) -> Verdict:
    """In every block POEM's average is the highest, or as high as any."""
    pairs = []
    for group in evidence.groups:
        best = max(_rivals(evidence, group), key=lambda row: evidence.mean(group, row))
        pairs.append(evidence.pair(group, POEM, best))
    return above(pairs, -TIE)


def poem_best_everywhere(evidence: Evidence) -> Verdict:
    """In every block and column POEM is the highest, or as high as any."""
    pairs = []
    for group in evidence.groups:
        for column in evidence.columns:
            best = max(_rivals(evidence, group), key=lambda row: evidence.at(group, row, column))
            pairs.append(evidence.pair(group, POEM, best, column))
    return above(pairs, -TIE)


def poem_above_source(evidence: Evidence) -> Verdict:
    """POEM's average is above the unadapted network's in every block; in every column where there are no blocks."""
    if evidence.groups == [""]:
        return above(evidence.pair("", POEM, SOURCE, column) for column in evidence.columns)
    return above(evidence.pair(group, POEM, SOURCE) for group in evidence.groups)


def poem_above_base(evidence: Evidence) -> Verdict:
    """METHOD + POEM is above METHOD in every block and column."""
    return above(
        evidence.pair(group, f"{method} + POEM", method, column)
        for group in evidence.groups
        for method in METHODS
        for column in evidence.columns
    )


def exploring_beats_iterating(evidence: Evidence) -> Verdict:
    """METHOD + POEM-I is above METHOD*, on average."""
    return above(
        evidence.pair(group, f"{method} + POEM-I", f"{method}*") for group in evidence.groups for method in METHODS
    )


def parts_above_base(evidence: Evidence) -> Verdict:
    """POEM-I and POEM-II each raise every method on every network."""
    return above(
        _columns(evidence, net, f"{method} + {part}", method)
        for net in evidence.rows("")
        for method in METHODS
        for part in ("POEM-I", "POEM-II")
    )


def first_part_above_second(evidence: Evidence) -> Verdict:
    """POEM-I is not below POEM-II, for any method on any network."""
    pairs = (
        _columns(evidence, net, f"{method} + POEM-I", f"{method} + POEM-II")
        for net in evidence.rows("")
        for method in METHODS
    )
    return above(pairs, -TIE)


def _columns(evidence: Evidence, row: str, high: str, low: str) -> Pair:
    """Two columns of one row."""
    return Pair(row, (high, evidence.at("", row, high)), (low, evidence.at("", row, low)))


# Settings -------------------------------------------------------------------------------------------------------------


def branch_above_none(evidence: Evidence) -> Verdict:
    """The shallowest branch is above none, in every block."""
    return above(evidence.pair(group, _depths(evidence, group)[0], "Without branch") for group in evidence.groups)


def deeper_adds_little(evidence: Evidence) -> Verdict:
    """No deeper branch is as much as 0.3 points above the shallowest."""
    pairs = []
    for group in evidence.groups:
        first, *deeper = _depths(evidence, group)
        pairs += [evidence.pair(group, first, each) for each in deeper]
    return above(pairs, -0.3)


def _depths(evidence: Evidence, group: str) -> list[str]:
    found = [row for row in evidence.rows(group) if row.startswith(("Block ", "Layer "))]
    if len(found) < 2:
        raise MissingError("branches of several depths")
    return found


def shallow_suffices(evidence: Evidence) -> Verdict:
    """Tent on the shallow layers is not below Tent on all, in any block."""
    return above((evidence.pair(group, "Only shallow layers", "All layers") for group in evidence.groups), -TIE)


def cross_entropy_above_entropy(evidence: Evidence) -> Verdict:
    """The branch learns at least as well by cross-entropy."""
    return above((evidence.pair(group, "Cross-entropy", "Entropy") for group in evidence.groups), -TIE)


def poem_steadiest(evidence: Evidence) -> Verdict:
    """POEM's best and worst threshold are nearer to each other than any other curve's."""
    pairs = []
    for group in evidence.groups:
        spread = {}
        for row in [*_rivals(evidence, group), POEM]:
            values = [printed(evidence.at(group, row, column)) for column in evidence.columns]
            spread[row] = max(values) - min(values)
        pairs += [Pair("spread", (row, spread[row]), (POEM, spread[POEM])) for row in spread if row != POEM]
    return above(pairs)


def eata_falls(evidence: Evidence) -> Verdict:
    """EATA at thresholds above 0.8 is more than a point below its best up to there."""
    pairs = []
    for group in evidence.groups:
        values = {float(column): evidence.at(group, "EATA (both)", column) for column in evidence.columns}
        best = max((value for x, value in values.items() if x <= 0.8), default=0.0)
        pairs += [Pair("", ("best up to 0.8", best), (f"at {x:g}", value)) for x, value in values.items() if x > 0.8]
    return above(pairs, 1.0)


def one_extra_suffices(evidence: Evidence) -> Verdict:
    """Two updates are not below one, and a third changes no more than half a point."""
    group = _only(evidence)
    one, two, three = (printed(evidence.at(group, POEM, column)) for column in ("1", "2", "3"))
    words = f"accuracy {one:.1f}, {two:.1f}, {three:.1f} with 1, 2, 3 updates; {_times(evidence, group)}"
    return Verdict(two >= one and printed(abs(three - two)) <= 0.5, words)


def _only(evidence: Evidence) -> str:
    """The one block of a figure."""
    if len(evidence.groups) != 1:
        raise MissingError("one block")
    return evidence.groups[0]


def _times(evidence: Evidence, group: str) -> str:
    tent = _seconds(evidence.reports.get((group, "Tent", "1"), ()))
    poem = _seconds(evidence.reports.get((group, POEM, "2"), ()))
    return f"two updates take {poem / tent:.1f} times Tent's time" if tent and poem else "times not known"


def _seconds(reports: Sequence[Report]) -> float:
    """In the adapter, a run."""
    return statistics.fmean(report.timing.get("adapt_s", 0.0) for report in reports) if reports else 0.0


def more_can_hurt(evidence: Evidence) -> Verdict:
    """Some larger number of updates is below a smaller one."""
    values = [printed(evidence.at(_only(evidence), POEM, column)) for column in ("1", "2", "3", "4", "5")]
    falls = any(late < early for at, early in enumerate(values) for late in values[at + 1 :])
    return Verdict(falls, "accuracy " + ", ".join(f"{value:.1f}" for value in values) + " with 1 to 5 updates")


def alpha_half_best(evidence: Evidence) -> Verdict:
    """No share answers better than one half."""
    half = printed(evidence.at(_only(evidence), POEM, "0.5"))
    values = {column: printed(evidence.at(_only(evidence), POEM, column)) for column in evidence.columns}
    best = max(values, key=lambda column: (values[column], column == "0.5"))
    ties = [column for column in values if values[column] == half and column != "0.5"]
    also = f", as at {', '.join(ties)}" if ties else ""
    return Verdict(half >= values[best], f"{half:.1f} at 0.5{also}; the best is {values[best]:.1f} at {best}")


def poem_time_near_tent(evidence: Evidence) -> Verdict:
    """POEM takes less than three times Tent's time."""
    poem, tent = _seconds(evidence.of_row(POEM)), _seconds(evidence.of_row("Tent"))
    if not tent:
        raise MissingError("times")
    return Verdict(poem < 3 * tent, f"POEM {poem:.1f} s, Tent {tent:.1f} s: {poem / tent:.1f} times (the paper: 1.9)")


def memo_slowest(evidence: Evidence) -> Verdict:
    """MEMO takes more than ten times as long as any other."""
    seconds = {row: _seconds(evidence.of_row(row)) for row in evidence.rows("")}
    memo = seconds.pop("MEMO", 0.0)
    if not memo or not seconds:
        raise MissingError("times")
    runner_up = max(seconds, key=lambda row: seconds[row])
    words = f"MEMO {memo:.1f} s, then {runner_up} {seconds[runner_up]:.1f} s"
    return Verdict(memo > 10 * seconds[runner_up], words)


# Samples --------------------------------------------------------------------------------------------------------------


def mostly_high_to_low(evidence: Evidence) -> Verdict:
    """Of the samples that cross the threshold more come down than go up, however many updates there are."""
    counts = []
    for group in evidence.groups:
        for row in evidence.rows(group):
            found = [report.probes["transitions"] for report in evidence.of_row(row) if "transitions" in report.probes]
            if not found:
                raise MissingError("transitions")
            counts.append((row, sum(each["high_low"] for each in found), sum(each["low_high"] for each in found)))
    if not any(down + up for _, down, up in counts):
        raise MissingError("samples that cross the threshold")
    words = "; ".join(f"{row}: {down} come down, {up} go up" for row, down, up in counts)
    return Verdict(all(down > up for _, down, up in counts), words)


def _group(parts: Iterable[Mapping[str, Any]], name: str) -> dict[str, float]:
    """One group over several reports, as printed; a norm stays as it is."""
    found = pooled(part.get(name, {}) for part in parts)
    if not found["n"]:
        raise MissingError(f"samples in the group {name}")
    return {key: value if key in ("n", "norm") else printed(value) for key, value in found.items()}


def newly_few(evidence: Evidence) -> Verdict:
    """There are fewer potentially reliable samples than other high-entropy ones."""
    groups = [report.groups for report in evidence.all()]
    newly, high = _group(groups, "newly")["n"], _group(groups, "high")["n"]
    return Verdict(newly < high, f"{newly:.0f} potentially reliable, {high:.0f} other high-entropy samples")


def _beside(evidence: Evidence, other: str, key: str) -> tuple[float, float]:
    """A mean at the first look, of potentially reliable samples and of another group."""
    groups = [report.groups for report in evidence.all()]
    return _group(groups, "newly")[key], _group(groups, other)[key]


def newly_above_high(evidence: Evidence) -> Verdict:
    """Pseudo-labels at the first look: potentially reliable samples' are far better than other high-entropy ones'."""
    newly, high = _beside(evidence, "high", "accuracy")
    return Verdict(
        newly > high + FAR, f"right: {newly:.1f} % of potentially reliable, {high:.1f} % of other high-entropy"
    )


def newly_near_low(evidence: Evidence) -> Verdict:
    """Pseudo-labels at the first look: potentially reliable samples' are within ten points of low-entropy ones'."""
    newly, low = _beside(evidence, "low", "accuracy")
    return Verdict(newly > low - NEAR, f"right: {newly:.1f} % of potentially reliable, {low:.1f} % of low-entropy")


def newly_surer_than_high(evidence: Evidence) -> Verdict:
    """Confidence at the first look: potentially reliable samples' is above other high-entropy ones'."""
    newly, high = _beside(evidence, "high", "confidence")
    return Verdict(
        newly > high, f"confidence {newly:.1f} % of potentially reliable, {high:.1f} % of other high-entropy"
    )


def _in_range(evidence: Evidence, other: str, words: str) -> Verdict:
    ranges = [report.probes["range"] for report in evidence.all() if "range" in report.probes]
    newly, rest = _group(ranges, "newly"), _group(ranges, other)
    said = f"right: {newly['accuracy']:.1f} % of {newly['n']:.0f}, {words} {rest['accuracy']:.1f} % of {rest['n']:.0f}"
    return Verdict(newly["accuracy"] > rest["accuracy"], said)


def newly_above_range(evidence: Evidence) -> Verdict:
    """At equal entropy potentially reliable samples have better pseudo-labels than all."""
    return _in_range(evidence, "all", "all of the range")


def newly_above_others(evidence: Evidence) -> Verdict:
    """At equal entropy potentially reliable samples have better pseudo-labels than the rest."""
    return _in_range(evidence, "others", "the rest of the range")


def _areas(evidence: Evidence) -> list[dict[str, Any]]:
    found = [report.probes["gradients"] for report in evidence.all() if "gradients" in report.probes]
    held = [each["areas"] for each in found if each.get("areas")]
    if not held:
        raise MissingError("areas of gradients (nobody was potentially reliable)")
    return held


def lowest_entropy_small_gradients(evidence: Evidence) -> Verdict:
    """Below the zone of potentially reliable samples gradients are smaller than in it."""
    areas = _areas(evidence)
    zone, sure = _group(areas, "zone"), _group(areas, "area3")
    return Verdict(
        sure["norm"] < zone["norm"], f"mean norm {sure['norm']:.3g} below the zone, {zone['norm']:.3g} in it"
    )


def highest_entropy_poor_labels(evidence: Evidence) -> Verdict:
    """Above the zone of potentially reliable samples pseudo-labels are worse than in it."""
    areas = _areas(evidence)
    zone, above = _group(areas, "zone"), _higher(areas)
    words = f"right: {above['accuracy']:.1f} % above the zone, {zone['accuracy']:.1f} % in it"
    return Verdict(above["accuracy"] < zone["accuracy"], words)


def _higher(areas: list[dict[str, Any]]) -> dict[str, float]:
    """Areas 1 and 2 as one."""
    return _group([{"above": part[name]} for part in areas for name in ("area1", "area2") if name in part], "above")


def zone_normal_gradients(evidence: Evidence) -> Verdict:
    """In the zone of potentially reliable samples the mean norm is between half and twice that above it."""
    areas = _areas(evidence)
    zone, above = _group(areas, "zone")["norm"], _higher(areas)["norm"]
    return Verdict(0.5 * above <= zone <= 2 * above, f"mean norm {zone:.3g} in the zone, {above:.3g} above it")


CHECKS: dict[str, Check] = {
    function.__name__.replace("_", "-"): function
    for function in (
        poem_best, poem_best_everywhere, poem_above_source, poem_above_base, exploring_beats_iterating,
        parts_above_base, first_part_above_second, branch_above_none, deeper_adds_little, shallow_suffices,
        cross_entropy_above_entropy, poem_steadiest, eata_falls, one_extra_suffices, more_can_hurt, alpha_half_best,
        poem_time_near_tent, memo_slowest, mostly_high_to_low, newly_few, newly_above_high, newly_near_low,
        newly_surer_than_high,
        newly_above_range, newly_above_others, lowest_entropy_small_gradients, highest_entropy_poor_labels,
        zone_normal_gradients,
    )
}  # fmt: skip
"""Every check by the name that suites use."""
