"""Comparison of two folders of results: which cells agree, which differ and by how much."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from poem.bench.result import CellResult, latest

MAX_LABELS, MAX_PAIRS = 10, 3
"""Cells of one folder only, and pairs with the same changed settings, that the text lists; JSON has them all."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One cell whose results differ."""

    key: str
    label: str
    metrics: dict[str, tuple[float | None, float | None]]
    """Metrics that differ, in A and in B."""
    parts: tuple[str, ...]
    """Other parts of the result that differ: domains, windows, ledger, ..."""

    @property
    def largest(self) -> float:
        """The largest difference of a metric; infinite where one folder lacks the metric."""
        return max((_gap(a, b) for a, b in self.metrics.values()), default=0.0)


@dataclass(frozen=True, kw_only=True)
class Namesakes:
    """Two cells with the same label (base, method, shifts and seed) and different settings."""

    label: str
    fields: dict[str, tuple[Any, Any]]
    """Fields of cell and recipe that differ, or the hash of the weights, in A and in B."""
    metrics: dict[str, tuple[float | None, float | None]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Result of `compare`; prints as text."""

    identical: int
    different: tuple[Difference, ...]
    """Largest difference first."""
    namesakes: tuple[Namesakes, ...]
    """Pairs of other cells with the same label: run with another limit, another rate, another recipe."""
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    provenance: dict[str, tuple[list[str], list[str]]]
    """Versions, commits and devices that differ; they do not count as a difference of results."""
    broken: tuple[str, ...]
    edited: tuple[str, ...] = ()
    """Messages about results whose checksum is wrong; they are compared all the same."""
    unchecked: int = 0
    """Results without a checksum, as of an older version."""

    @property
    def equal(self) -> bool:
        """Whether both folders hold the same cells with the same results."""
        return not (self.different or self.namesakes or self.only_a or self.only_b)

    def to_dict(self) -> dict[str, Any]:
        """All fields and `equal` as plain values, for JSON."""
        return {"equal": self.equal, **asdict(self)}

    def __str__(self) -> str:
        lines = [
            f"{self.identical + len(self.different)} cells in both: {self.identical} identical, "
            f"{len(self.different)} different; {len(self.namesakes)} in both under the same label with other settings; "
            f"{len(self.only_a)} only in A, {len(self.only_b)} only in B"
        ]
        for each in self.different:
            metrics = sorted(each.metrics.items(), key=lambda item: _gap(*item[1]), reverse=True)
            shown = ", ".join(f"{name} {_text(a)} -> {_text(b)}" for name, (a, b) in metrics[:4])
            parts = f"also in {', '.join(each.parts)}" if shown else f"only in {', '.join(each.parts)}"
            lines.append(
                f"  {each.label} [{each.key}]: {'; '.join(filter(None, (shown, parts if each.parts else '')))}"
            )
        lines += _namesake_lines(self.namesakes)
        lines += [*_only_in("A", self.only_a), *_only_in("B", self.only_b)]
        for name, (a, b) in self.provenance.items():
            lines.append(f"  {name}: {', '.join(a) or 'none'} in A, {', '.join(b) or 'none'} in B")
        lines += [f"  left out: {reason}" for reason in self.broken] + [f"  edited: {reason}" for reason in self.edited]
        if self.unchecked:
            have = "result has" if self.unchecked == 1 else "results have"
            lines.append(f"  {self.unchecked} {have} no checksum, as of an older version")
        return "\n".join(lines)


def _namesake_lines(pairs: Sequence[Namesakes]) -> list[str]:
    """Pairs grouped by the settings that differ, the first few of each group with their accuracies."""
    by_settings: dict[str, list[Namesakes]] = {}
    for each in pairs:
        settings = ", ".join(f"{name} {_text(a)} in A, {_text(b)} in B" for name, (a, b) in each.fields.items())
        by_settings.setdefault(settings, []).append(each)
    lines = []
    for settings, found in by_settings.items():
        lines.append(f"  other settings in {len(found)} {'pair' if len(found) == 1 else 'pairs'}: {settings}")
        for each in found[:MAX_PAIRS]:
            top1 = each.metrics.get("top1")
            change = "" if top1 is None else f": top1 {_text(top1[0])} -> {_text(top1[1])}"
            lines.append(f"    {each.label}{change}")
        lines += [f"    {len(found) - MAX_PAIRS} more, of which --json has all"] if len(found) > MAX_PAIRS else []
    return lines


def _only_in(folder: str, labels: Sequence[str]) -> list[str]:
    """The first cells that only one folder has, and how many more there are."""
    lines = [f"  only in {folder}: {label}" for label in labels[:MAX_LABELS]]
    rest = len(labels) - MAX_LABELS
    return lines + ([f"  only in {folder}: {rest} more, of which --json has all"] if rest > 0 else [])


def compare(a: Path, b: Path) -> Comparison:
    """Compare two folders that `poem bench` or `poem reproduce` wrote.

    Results are the same where they are equal bit for bit, except for time, host and provenance.
    """
    from poem.bench.store import Store

    stores = [Store(folder) for folder in (a, b)]
    for store in stores:
        if next(store.results(), None) is None and not store.failures():
            raise ValueError(f"expected a folder of results, got {store.folder}; poem reproduce table1 makes one")
    first, second = (latest(store.results(), lambda result: result.key) for store in stores)
    shared = [key for key in first if key in second]
    different = [_difference(first[key], second[key]) for key in shared if not _same(first[key], second[key])]
    both = set(shared)
    unshared = [[result for key, result in found.items() if key not in both] for found in (first, second)]
    pairs = _pair_by_label(*unshared)
    paired = {result.key for pair in pairs for result in pair}
    only_a, only_b = ([result.cell.label for result in results if result.key not in paired] for results in unshared)
    return Comparison(
        identical=len(shared) - len(different),
        different=tuple(sorted(different, key=lambda each: (-each.largest, each.label))),
        namesakes=tuple(_namesakes(*pair) for pair in pairs),
        only_a=tuple(sorted(only_a)),
        only_b=tuple(sorted(only_b)),
        provenance=_provenance(first, second),
        broken=tuple(reason for store in stores for reason in store.broken.values()),
        edited=tuple(reason for store in stores for reason in store.edited.values()),
        unchecked=sum(len(store.unchecked) for store in stores),
    )


def _same(a: CellResult, b: CellResult) -> bool:
    return not _unequal_fields(a, b)


def _unequal_fields(a: CellResult, b: CellResult) -> list[str]:
    """Fields of the identity that differ; `samples`, which earlier versions did not write, where both have it."""
    first, second = a.identity(), b.identity()
    left_out = () if a.samples and b.samples else ("samples",)
    return [name for name in first if name not in left_out and first[name] != second[name]]


def _pair_by_label(first: Sequence[CellResult], second: Sequence[CellResult]) -> list[tuple[CellResult, CellResult]]:
    """Pair results with the same label, each once; of several, those with the fewest different fields."""
    by_label: dict[str, list[CellResult]] = {}
    for result in second:
        by_label.setdefault(result.cell.label, []).append(result)
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
    recipes = ({f"recipe.{name}": text for name, text in each.recipe.items()} for each in (a, b))
    weights = ({"weights_sha256": each.weights_sha256} for each in (a, b))
    return _differing(a.cell.to_dict(), b.cell.to_dict()) or _differing(*recipes) or _differing(*weights)


def _differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Keys whose values are not the same in both mappings, with both values; a missing one is None."""
    pairs = {name: (a.get(name), b.get(name)) for name in dict.fromkeys([*a, *b])}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _namesakes(a: CellResult, b: CellResult) -> Namesakes:
    return Namesakes(label=a.cell.label, fields=_fields(a, b), metrics=_differing(a.metrics, b.metrics))


def _difference(a: CellResult, b: CellResult) -> Difference:
    return Difference(
        key=a.key,
        label=a.cell.label,
        metrics=_differing(a.metrics, b.metrics),
        parts=tuple(name for name in _unequal_fields(a, b) if name != "metrics"),
    )


def _provenance(
    first: Mapping[str, CellResult], second: Mapping[str, CellResult]
) -> dict[str, tuple[list[str], list[str]]]:
    a, b = _provenance_values(first.values()), _provenance_values(second.values())
    return {name: (a.get(name, []), b.get(name, [])) for name in sorted(a | b) if a.get(name) != b.get(name)}


def _provenance_values(results: Iterable[CellResult]) -> dict[str, list[str]]:
    found: dict[str, set[str]] = {}
    for result in results:
        for name, value in {**result.provenance, "device": result.host.get("device")}.items():
            found.setdefault(name, set()).add(str(value))
    return {name: sorted(values) for name, values in found.items()}


def _gap(a: float | None, b: float | None) -> float:
    return float("inf") if a is None or b is None else abs(a - b)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return "none" if value is None else str(value)
