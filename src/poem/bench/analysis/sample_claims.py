"""Checks of claims on samples: their entropy before and after the update, pseudo-labels, confidences and gradients.

"Potentially reliable" samples have a high entropy before the update and are selected after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from poem.bench.analysis.aggregate import pooled
from poem.bench.analysis.claims import Check, ClaimResult, Evidence, MissingError, printed

FAR = 5.0
"""Points that count as far above."""
NEAR = 10.0
"""Points within which two groups' pseudo-labels are comparable."""


def mostly_high_to_low(evidence: Evidence) -> ClaimResult:
    """Of the samples that cross the threshold more come down than go up, however many updates there are."""
    counts = []
    for group in evidence.groups:
        for row in evidence.rows(group):
            found = [result.probes["transitions"] for result in evidence.of_row(row) if "transitions" in result.probes]
            if not found:
                raise MissingError("transitions")
            counts.append((row, sum(each["high_low"] for each in found), sum(each["low_high"] for each in found)))
    if not any(down + up for _, down, up in counts):
        raise MissingError("samples that cross the threshold")
    words = "; ".join(f"{row}: {down} come down, {up} go up" for row, down, up in counts)
    return ClaimResult(all(down > up for _, down, up in counts), words)


def _group(shares: Iterable[Mapping[str, Any]], name: str) -> dict[str, float]:
    """One group of samples over several results, as printed; a norm is not rounded."""
    found = pooled(share.get(name, {}) for share in shares)
    if not found["n"]:
        raise MissingError(f"samples in the group {name}")
    return {key: value if key in ("n", "norm") else printed(value) for key, value in found.items()}


def newly_few(evidence: Evidence) -> ClaimResult:
    """There are fewer potentially reliable samples than other high-entropy ones."""
    groups = [result.groups for result in evidence.all()]
    newly, high = _group(groups, "newly")["n"], _group(groups, "high")["n"]
    return ClaimResult(newly < high, f"{newly:.0f} potentially reliable, {high:.0f} other high-entropy samples")


def _means(evidence: Evidence, other: str, key: str) -> tuple[float, float]:
    """A mean before the update, of potentially reliable samples and of another group."""
    groups = [result.groups for result in evidence.all()]
    return _group(groups, "newly")[key], _group(groups, other)[key]


def newly_above_high(evidence: Evidence) -> ClaimResult:
    """Pseudo-labels of potentially reliable samples are far better than those of other high-entropy ones."""
    newly, high = _means(evidence, "high", "accuracy")
    return ClaimResult(
        newly > high + FAR, f"right: {newly:.1f} % of potentially reliable, {high:.1f} % of other high-entropy"
    )


def newly_near_low(evidence: Evidence) -> ClaimResult:
    """Pseudo-labels of potentially reliable samples are within ten points of those of low-entropy ones."""
    newly, low = _means(evidence, "low", "accuracy")
    return ClaimResult(newly > low - NEAR, f"right: {newly:.1f} % of potentially reliable, {low:.1f} % of low-entropy")


def newly_surer_than_high(evidence: Evidence) -> ClaimResult:
    """Confidence of potentially reliable samples is above that of other high-entropy ones."""
    newly, high = _means(evidence, "high", "confidence")
    return ClaimResult(
        newly > high, f"confidence {newly:.1f} % of potentially reliable, {high:.1f} % of other high-entropy"
    )


def _in_range(evidence: Evidence, other: str, name: str) -> ClaimResult:
    ranges = [result.probes["range"] for result in evidence.all() if "range" in result.probes]
    newly, rest = _group(ranges, "newly"), _group(ranges, other)
    words = f"right: {newly['accuracy']:.1f} % of {newly['n']:.0f}, {name} {rest['accuracy']:.1f} % of {rest['n']:.0f}"
    return ClaimResult(newly["accuracy"] > rest["accuracy"], words)


def newly_above_range(evidence: Evidence) -> ClaimResult:
    """At equal entropy potentially reliable samples have better pseudo-labels than all."""
    return _in_range(evidence, "all", "all of the range")


def newly_above_others(evidence: Evidence) -> ClaimResult:
    """At equal entropy potentially reliable samples have better pseudo-labels than the rest."""
    return _in_range(evidence, "others", "the rest of the range")


def _areas(evidence: Evidence) -> list[dict[str, Any]]:
    found = [result.probes["gradients"] for result in evidence.all() if "gradients" in result.probes]
    held = [each["areas"] for each in found if each.get("areas")]
    if not held:
        raise MissingError("areas of gradients (no sample was potentially reliable)")
    return held


def lowest_entropy_small_gradients(evidence: Evidence) -> ClaimResult:
    """Below the zone of potentially reliable samples gradients are smaller than in it."""
    areas = _areas(evidence)
    zone, sure = _group(areas, "zone"), _group(areas, "area3")
    return ClaimResult(
        sure["norm"] < zone["norm"], f"mean norm {sure['norm']:.3g} below the zone, {zone['norm']:.3g} in it"
    )


def highest_entropy_poor_labels(evidence: Evidence) -> ClaimResult:
    """Above the zone of potentially reliable samples pseudo-labels are worse than in it."""
    areas = _areas(evidence)
    zone, above = _group(areas, "zone"), _above_zone(areas)
    words = f"right: {above['accuracy']:.1f} % above the zone, {zone['accuracy']:.1f} % in it"
    return ClaimResult(above["accuracy"] < zone["accuracy"], words)


def _above_zone(areas: list[dict[str, Any]]) -> dict[str, float]:
    """Areas 1 and 2 together."""
    return _group([{"above": part[name]} for part in areas for name in ("area1", "area2") if name in part], "above")


def zone_normal_gradients(evidence: Evidence) -> ClaimResult:
    """In the zone of potentially reliable samples the mean norm is between half and twice that above it."""
    areas = _areas(evidence)
    zone, above = _group(areas, "zone")["norm"], _above_zone(areas)["norm"]
    return ClaimResult(0.5 * above <= zone <= 2 * above, f"mean norm {zone:.3g} in the zone, {above:.3g} above it")


CHECKS: tuple[Check, ...] = (
    mostly_high_to_low, newly_few, newly_above_high, newly_near_low, newly_surer_than_high, newly_above_range,
    newly_above_others, lowest_entropy_small_gradients, highest_entropy_poor_labels, zone_normal_gradients,
)  # fmt: skip
