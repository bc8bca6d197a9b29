"""Two folders of results side by side: which cells agree, which do not and by how much."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from poem.bench.result import CellResult, latest

SHOWN, FEW = 10, 3
"""Cells that one folder has alone, and pairs with the same other settings, as text; JSON has them all."""


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
class Namesakes:
    """Two cells of the same words, base, method, shifts and seed, that are not the same cell."""

    label: str
    fields: dict[str, tuple[Any, Any]]
    """What of cell and recipe is not the same, in A and in B."""
    metrics: dict[str, tuple[float | None, float | None]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What two folders have in common. Prints as text; `equal` is the short answer."""

    identical: int
    different: tuple[Difference, ...]
    """Largest gap first."""
    namesakes: tuple[Namesakes, ...]
    """Of what is left, pairs of the same words: run with another limit, another rate, another recipe."""
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    provenance: dict[str, tuple[list[str], list[str]]]
    """Versions, commits and devices that are not the same in both; they do not count as a difference of results."""
    broken: tuple[str, ...]
    edited: tuple[str, ...] = ()
    """Results whose checksum is wrong, in words; they are compared all the same."""
    unchecked: int = 0
    """Results without a checksum, as of an older version."""

    @property
    def equal(self) -> bool:
        """Whether both hold the same cells with the same results."""
        return not (self.different or self.namesakes or self.only_a or self.only_b)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {"equal": self.equal, **asdict(self)}

    def __str__(self) -> str:
        lines = [
            f"{self.identical + len(self.different)} cells in both: {self.identical} identical, "
            f"{len(self.different)} different; {len(self.namesakes)} in both under the same words with other settings; "
            f"{len(self.only_a)} only in A, {len(self.only_b)} only in B"
        ]
        for each in self.different:
            gaps = sorted(each.metrics.items(), key=_gap, reverse=True)
            said = ", ".join(f"{name} {_text(a)} -> {_text(b)}" for name, (a, b) in gaps[:4])
            parts = f"also in {', '.join(each.parts)}" if said else f"only in {', '.join(each.parts)}"
            lines.append(f"  {each.label} [{each.key}]: {'; '.join(filter(None, (said, parts if each.parts else '')))}")
        lines += _by_fields(self.namesakes)
        lines += [*_alone("A", self.only_a), *_alone("B", self.only_b)]
        for name, (a, b) in self.provenance.items():
            lines.append(f"  {name}: {', '.join(a) or 'none'} in A, {', '.join(b) or 'none'} in B")
        lines += [f"  left out: {words}" for words in self.broken] + [f"  edited: {words}" for words in self.edited]
        if self.unchecked:
            have = "result has" if self.unchecked == 1 else "results have"
            lines.append(f"  {self.unchecked} {have} no checksum, as of an older version")
        return "\n".join(lines)


def _by_fields(pairs: Sequence[Namesakes]) -> list[str]:
    """Pairs under what sets them apart, the first few of each with their accuracies."""
    alike: dict[str, list[Namesakes]] = {}
    for each in pairs:
        apart = ", ".join(f"{name} {_text(a)} in A, {_text(b)} in B" for name, (a, b) in each.fields.items())
        alike.setdefault(apart, []).append(each)
    lines = []
    for apart, found in alike.items():
        lines.append(f"  other settings in {len(found)} {'pair' if len(found) == 1 else 'pairs'}: {apart}")
        for each in found[:FEW]:
            top1 = each.metrics.get("top1")
            same = "" if top1 is None else f": top1 {_text(top1[0])} -> {_text(top1[1])}"
            lines.append(f"    {each.label}{same}")
        lines += [f"    {len(found) - FEW} more, of which --json has all"] if len(found) > FEW else []
    return lines


def _alone(folder: str, labels: Sequence[str]) -> list[str]:
    """The first cells that one folder has alone, and how many more there are."""
    lines = [f"  only in {folder}: {label}" for label in labels[:SHOWN]]
    rest = len(labels) - SHOWN
    return lines + ([f"  only in {folder}: {rest} more, of which --json has all"] if rest > 0 else [])


def compare(a: Path, b: Path) -> Comparison:
    """Compare two folders that `poem bench` or `poem reproduce` wrote.

    Results are the same where they are equal bit for bit, time, host and provenance apart.
    """
    from poem.bench.store import Store

    stores = [Store(folder) for folder in (a, b)]
    for store in stores:
        if next(store.results(), None) is None and not store.failures():
            raise ValueError(f"expected a folder of results, got {store.folder}; poem reproduce table1 makes one")
    first, second = (latest(store.results(), lambda report: report.key) for store in stores)
    shared = [key for key in first if key in second]
    different = [_difference(first[key], second[key]) for key in shared if not _same(first[key], second[key])]
    both = set(shared)
    alone = [[report for key, report in found.items() if key not in both] for found in (first, second)]
    pairs = _namesakes(*alone)
    paired = {report.key for pair in pairs for report in pair}
    only_a, only_b = ([report.cell.label for report in reports if report.key not in paired] for reports in alone)
    return Comparison(
        identical=len(shared) - len(different),
        different=tuple(sorted(different, key=lambda each: (-each.largest, each.label))),
        namesakes=tuple(_apart(*pair) for pair in pairs),
        only_a=tuple(sorted(only_a)),
        only_b=tuple(sorted(only_b)),
        provenance=_provenance(first, second),
        broken=tuple(words for store in stores for words in store.broken.values()),
        edited=tuple(words for store in stores for words in store.edited.values()),
        unchecked=sum(len(store.unchecked) for store in stores),
    )


def _same(a: CellResult, b: CellResult) -> bool:
    return a.identity() == b.identity()


def _namesakes(first: Sequence[CellResult], second: Sequence[CellResult]) -> list[tuple[CellResult, CellResult]]:
    """Reports of the same words in pairs, each once; of several, those that have most in common."""
    by_label: dict[str, list[CellResult]] = {}
    for report in second:
        by_label.setdefault(report.cell.label, []).append(report)
    close = [(len(_fields(a, b)), at, a, b) for at, a in enumerate(first) for b in by_label.get(a.cell.label, [])]
    found: dict[str, tuple[int, CellResult, CellResult]] = {}
    taken: set[str] = set()
    for _, at, a, b in sorted(close, key=lambda each: each[:2]):
        if a.key not in found and b.key not in taken:
            found[a.key] = at, a, b
            taken.add(b.key)
    return [(a, b) for _, a, b in sorted(found.values(), key=lambda each: each[0])]


def _fields(a: CellResult, b: CellResult) -> dict[str, tuple[Any, Any]]:
    """Fields of two cells that differ; where none does, those of their recipes, then the hash of their weights."""

    def apart(left: Mapping[str, Any], right: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        pairs = {name: (left.get(name), right.get(name)) for name in dict.fromkeys([*left, *right])}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}

    recipes = ({f"recipe.{name}": text for name, text in each.recipe.items()} for each in (a, b))
    weights = ({"weights_sha256": each.weights_sha256} for each in (a, b))
    return apart(a.cell.to_dict(), b.cell.to_dict()) or apart(*recipes) or apart(*weights)


def _apart(a: CellResult, b: CellResult) -> Namesakes:
    return Namesakes(label=a.cell.label, fields=_fields(a, b), metrics=_metrics(a, b))


def _metrics(a: CellResult, b: CellResult) -> dict[str, tuple[float | None, float | None]]:
    """Metrics that differ."""
    pairs = {name: (a.metrics.get(name), b.metrics.get(name)) for name in dict.fromkeys([*a.metrics, *b.metrics])}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _difference(a: CellResult, b: CellResult) -> Difference:
    left, right = a.identity(), b.identity()
    return Difference(
        key=a.key,
        label=a.cell.label,
        metrics=_metrics(a, b),
        parts=tuple(name for name in left if name != "metrics" and left[name] != right[name]),
    )


def _provenance(
    first: Mapping[str, CellResult], second: Mapping[str, CellResult]
) -> dict[str, tuple[list[str], list[str]]]:
    a, b = _origins(first.values()), _origins(second.values())
    return {name: (a.get(name, []), b.get(name, [])) for name in sorted(a | b) if a.get(name) != b.get(name)}


def _origins(reports: Iterable[CellResult]) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {}
    for report in reports:
        for name, value in {**report.provenance, "device": report.host.get("device")}.items():
            found.setdefault(name, set()).add(str(value))
    return {name: sorted(values) for name, values in found.items()}


def _gap(item: tuple[str, tuple[float | None, float | None]]) -> float:
    a, b = item[1]
    return float("inf") if a is None or b is None else abs(a - b)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "none" if value is None else str(value)
