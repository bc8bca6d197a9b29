"""Checks of claims on accuracies and times; `claims.py` runs them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from poem.bench.analysis.claims import Check, ClaimResult, Evidence, MissingError, Pair, above, printed
from poem.bench.result import CellResult

POEM, SOURCE = "POEM (Algorithm 1)", "No Adapt."
METHODS = ("Tent", "EATA", "SAR", "DeYO")
TIE = 0.05
"""Points that the paper's one decimal cannot tell apart."""


# POEM beside others ---------------------------------------------------------------------------------------------------


def _rivals(evidence: Evidence, group: str) -> list[str]:
    """Rows that POEM is compared with; other forms of POEM are not."""
    found = [row for row in evidence.rows(group) if "POEM" not in row]
    if not found:
        raise MissingError("rows beside POEM")
    return found


def poem_best(evidence: Evidence) -> ClaimResult:
    """In every group POEM's average is the highest, or as high as any."""
    pairs = []
    for group in evidence.groups:
        best = max(_rivals(evidence, group), key=lambda row: evidence.mean(group, row))
        pairs.append(evidence.pair(group, POEM, best))
    return above(pairs, -TIE)


def poem_best_everywhere(evidence: Evidence) -> ClaimResult:
    """In every group and column POEM is the highest, or as high as any."""
    pairs = []
    for group in evidence.groups:
        for column in evidence.columns:
            best = max(_rivals(evidence, group), key=lambda row: evidence.at(group, row, column))
            pairs.append(evidence.pair(group, POEM, best, column))
    return above(pairs, -TIE)


def poem_above_source(evidence: Evidence) -> ClaimResult:
    """POEM's average is above the unadapted network's in every group; in every column where there are no groups."""
    if evidence.groups == [""]:
        return above(evidence.pair("", POEM, SOURCE, column) for column in evidence.columns)
    return above(evidence.pair(group, POEM, SOURCE) for group in evidence.groups)


def poem_above_base(evidence: Evidence) -> ClaimResult:
    """METHOD + POEM is above METHOD in every group and column."""
    return above(
        evidence.pair(group, f"{method} + POEM", method, column)
        for group in evidence.groups
        for method in METHODS
        for column in evidence.columns
    )


def exploring_beats_iterating(evidence: Evidence) -> ClaimResult:
    """METHOD + POEM-I is above METHOD*, on average."""
    return above(
        evidence.pair(group, f"{method} + POEM-I", f"{method}*") for group in evidence.groups for method in METHODS
    )


def parts_above_base(evidence: Evidence) -> ClaimResult:
    """POEM-I and POEM-II each raise every method on every network."""
    return above(
        _column_pair(evidence, net, f"{method} + {part}", method)
        for net in evidence.rows("")
        for method in METHODS
        for part in ("POEM-I", "POEM-II")
    )


def first_part_above_second(evidence: Evidence) -> ClaimResult:
    """POEM-I is not below POEM-II, for any method on any network."""
    pairs = (
        _column_pair(evidence, net, f"{method} + POEM-I", f"{method} + POEM-II")
        for net in evidence.rows("")
        for method in METHODS
    )
    return above(pairs, -TIE)


def _column_pair(evidence: Evidence, row: str, high: str, low: str) -> Pair:
    """Two columns of one row, of which the first should be above the second."""
    return Pair(row, (high, evidence.at("", row, high)), (low, evidence.at("", row, low)))


# Settings -------------------------------------------------------------------------------------------------------------


def branch_above_none(evidence: Evidence) -> ClaimResult:
    """The shallowest branch is above none, in every group."""
    return above(evidence.pair(group, _branch_rows(evidence, group)[0], "Without branch") for group in evidence.groups)


def deeper_adds_little(evidence: Evidence) -> ClaimResult:
    """No deeper branch is as much as 0.3 points above the shallowest."""
    pairs = []
    for group in evidence.groups:
        first, *deeper = _branch_rows(evidence, group)
        pairs += [evidence.pair(group, first, each) for each in deeper]
    return above(pairs, -0.3)


def _branch_rows(evidence: Evidence, group: str) -> list[str]:
    found = [row for row in evidence.rows(group) if row.startswith(("Block ", "Layer "))]
    if len(found) < 2:
        raise MissingError("branches of several depths")
    return found


def shallow_suffices(evidence: Evidence) -> ClaimResult:
    """Tent on the shallow layers is not below Tent on all, in any group."""
    return above((evidence.pair(group, "Only shallow layers", "All layers") for group in evidence.groups), -TIE)


def cross_entropy_above_entropy(evidence: Evidence) -> ClaimResult:
    """The branch is at least as good with cross-entropy as with entropy."""
    return above((evidence.pair(group, "Cross-entropy", "Entropy") for group in evidence.groups), -TIE)


def poem_steadiest(evidence: Evidence) -> ClaimResult:
    """POEM's accuracy varies less over the thresholds than any other curve's."""
    pairs = []
    for group in evidence.groups:
        spread = {}
        for row in [*_rivals(evidence, group), POEM]:
            values = [printed(evidence.at(group, row, column)) for column in evidence.columns]
            spread[row] = max(values) - min(values)
        pairs += [Pair("spread", (row, spread[row]), (POEM, spread[POEM])) for row in spread if row != POEM]
    return above(pairs)


def eata_falls(evidence: Evidence) -> ClaimResult:
    """EATA at thresholds above 0.8 is more than a point below its best up to there."""
    pairs = []
    for group in evidence.groups:
        values = {float(column): evidence.at(group, "EATA (both)", column) for column in evidence.columns}
        best = max((value for x, value in values.items() if x <= 0.8), default=0.0)
        pairs += [Pair("", ("best up to 0.8", best), (f"at {x:g}", value)) for x, value in values.items() if x > 0.8]
    return above(pairs, 1.0)


def one_extra_suffices(evidence: Evidence) -> ClaimResult:
    """Two updates are not below one, and a third changes no more than half a point."""
    group = _only_group(evidence)
    one, two, three = (printed(evidence.at(group, POEM, column)) for column in ("1", "2", "3"))
    words = f"accuracy {one:.1f}, {two:.1f}, {three:.1f} with 1, 2, 3 updates; {_times_in_words(evidence, group)}"
    return ClaimResult(two >= one and printed(abs(three - two)) <= 0.5, words)


def _only_group(evidence: Evidence) -> str:
    """The only group of a figure."""
    if len(evidence.groups) != 1:
        raise MissingError("one group")
    return evidence.groups[0]


def _times_in_words(evidence: Evidence, group: str) -> str:
    tent = _seconds(evidence.results.get((group, "Tent", "1"), ()))
    poem = _seconds(evidence.results.get((group, POEM, "2"), ()))
    return f"two updates take {poem / tent:.1f} times Tent's time" if tent and poem else "times not known"


def _seconds(results: Sequence[CellResult]) -> float:
    """Mean seconds in the adapter."""
    return statistics.fmean(result.timing.get("adapt_s", 0.0) for result in results) if results else 0.0


def more_can_hurt(evidence: Evidence) -> ClaimResult:
    """Some larger number of updates is below a smaller one."""
    values = [printed(evidence.at(_only_group(evidence), POEM, column)) for column in ("1", "2", "3", "4", "5")]
    falls = any(late < early for at, early in enumerate(values) for late in values[at + 1 :])
    return ClaimResult(falls, "accuracy " + ", ".join(f"{value:.1f}" for value in values) + " with 1 to 5 updates")


def alpha_half_best(evidence: Evidence) -> ClaimResult:
    """No alpha gives a better accuracy than one half."""
    half = printed(evidence.at(_only_group(evidence), POEM, "0.5"))
    values = {column: printed(evidence.at(_only_group(evidence), POEM, column)) for column in evidence.columns}
    best = max(values, key=lambda column: (values[column], column == "0.5"))
    ties = [column for column in values if values[column] == half and column != "0.5"]
    also = f", as at {', '.join(ties)}" if ties else ""
    return ClaimResult(half >= values[best], f"{half:.1f} at 0.5{also}; the best is {values[best]:.1f} at {best}")


def poem_time_near_tent(evidence: Evidence) -> ClaimResult:
    """POEM takes less than three times Tent's time."""
    poem, tent = _seconds(evidence.of_row(POEM)), _seconds(evidence.of_row("Tent"))
    if not tent:
        raise MissingError("times")
    words = f"POEM {poem:.1f} s, Tent {tent:.1f} s: {poem / tent:.1f} times (the paper: 1.9)"
    return ClaimResult(poem < 3 * tent, words)


def memo_slowest(evidence: Evidence) -> ClaimResult:
    """MEMO takes more than ten times as long as any other."""
    seconds = {row: _seconds(evidence.of_row(row)) for row in evidence.rows("")}
    memo = seconds.pop("MEMO", 0.0)
    if not memo or not seconds:
        raise MissingError("times")
    runner_up = max(seconds, key=lambda row: seconds[row])
    words = f"MEMO {memo:.1f} s, then {runner_up} {seconds[runner_up]:.1f} s"
    return ClaimResult(memo > 10 * seconds[runner_up], words)


CHECKS: tuple[Check, ...] = (
    poem_best, poem_best_everywhere, poem_above_source, poem_above_base, exploring_beats_iterating, parts_above_base,
    first_part_above_second, branch_above_none, deeper_adds_little, shallow_suffices, cross_entropy_above_entropy,
    poem_steadiest, eata_falls, one_extra_suffices, more_can_hurt, alpha_half_best, poem_time_near_tent, memo_slowest,
)  # fmt: skip
