"""Two folders of results side by side: which cells agree, which do not and by how much."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from poem.report import Report

SHOWN = 10
"""Cells that one folder has alone, as text; JSON has them all."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One cell that gave two results."""

    key: str
    label: str
    metrics: dict[str, tuple[float | None, float | None]]
    """Metrics that differ, in A and in B."""
    parts: tuple[str, ...]
    """Other parts of the result that differ: domains, windows, ledger, ..."""

    @property
    def largest(self) -> float:
        """The largest gap between two metrics; endless where one of them is missing."""
        gaps = [float("inf") if a is None or b is None else abs(a - b) for a, b in self.metrics.values()]
        return max(gaps, default=0.0)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What two folders have in common. Prints as text; `equal` is the short answer."""

    identical: int
    different: tuple[Difference, ...]
    """Largest gap first."""
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    provenance: dict[str, tuple[list[str], list[str]]]
    """Versions, commits and devices that are not the same in both; they do not count as a difference of results."""
    broken: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether both hold the same cells with the same results."""
        return not (self.different or self.only_a or self.only_b)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"equal": self.equal, **asdict(self)}

    def __str__(self) -> str:
        lines = [
            f"{self.identical + len(self.different)} cells in both: {self.identical} identical, "
            f"{len(self.different)} different; {len(self.only_a)} only in A, {len(self.only_b)} only in B"
        ]
        for each in self.different:
            gaps = sorted(each.metrics.items(), key=_gap, reverse=True)
            said = ", ".join(f"{name} {_text(a)} -> {_text(b)}" for name, (a, b) in gaps[:4])
            parts = f"also in {', '.join(each.parts)}" if said else f"only in {', '.join(each.parts)}"
            lines.append(f"  {each.label} [{each.key}]: {'; '.join(filter(None, (said, parts if each.parts else '')))}")
        lines += [*_alone("A", self.only_a), *_alone("B", self.only_b)]
        for name, (a, b) in self.provenance.items():
            lines.append(f"  {name}: {', '.join(a) or 'none'} in A, {', '.join(b) or 'none'} in B")
        return "\n".join(lines + [f"  left out: {words}" for words in self.broken])


def _alone(folder: str, labels: Sequence[str]) -> list[str]:
    """The first cells that one folder has alone, and how many more there are."""
    lines = [f"  only in {folder}: {label}" for label in labels[:SHOWN]]
    rest = len(labels) - SHOWN
    return lines + ([f"  only in {folder}: {rest} more, of which --json has all"] if rest > 0 else [])


def compare(a: Path, b: Path) -> Comparison:
    """Compare two folders that `poem bench` or `poem reproduce` wrote.

    Results are the same where they are equal bit for bit, time, host and provenance apart.
    """
    from poem.store import Store

    stores = [Store(folder) for folder in (a, b)]
    for store in stores:
        if not store.folder.is_dir():
            raise ValueError(f"expected a folder of results, got {store.folder}; poem reproduce table1 makes one")
    first, second = ({report.key: report for report in store.reports()} for store in stores)
    shared = [key for key in first if key in second]
    different = [_difference(first[key], second[key]) for key in shared if not _same(first[key], second[key])]
    return Comparison(
        identical=len(shared) - len(different),
        different=tuple(sorted(different, key=lambda each: (-each.largest, each.label))),
        only_a=tuple(sorted(report.cell.label for key, report in first.items() if key not in second)),
        only_b=tuple(sorted(report.cell.label for key, report in second.items() if key not in first)),
        provenance=_provenance(first, second),
        broken=tuple(words for store in stores for words in store.broken.values()),
    )


def _same(a: Report, b: Report) -> bool:
    return a.identity() == b.identity()


def _difference(a: Report, b: Report) -> Difference:
    names = dict.fromkeys([*a.metrics, *b.metrics])
    pairs = {name: (a.metrics.get(name), b.metrics.get(name)) for name in names}
    left, right = a.identity(), b.identity()
    return Difference(
        key=a.key,
        label=a.cell.label,
        metrics={name: pair for name, pair in pairs.items() if pair[0] != pair[1]},
        parts=tuple(name for name in left if name != "metrics" and left[name] != right[name]),
    )


def _provenance(first: Mapping[str, Report], second: Mapping[str, Report]) -> dict[str, tuple[list[str], list[str]]]:
    a, b = _origins(first.values()), _origins(second.values())
    return {name: (a.get(name, []), b.get(name, [])) for name in sorted(a | b) if a.get(name) != b.get(name)}


def _origins(reports: Iterable[Report]) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {}
    for report in reports:
        for name, value in {**report.provenance, "device": report.host.get("device")}.items():
            found.setdefault(name, set()).add(str(value))
    return {name: sorted(values) for name, values in found.items()}


def _gap(item: tuple[str, tuple[float | None, float | None]]) -> float:
    a, b = item[1]
    return float("inf") if a is None or b is None else abs(a - b)


def _text(value: float | None) -> str:
    return "none" if value is None else f"{value:.6g}"
