"""Learning rates chosen on the four held-out corruptions, and nowhere else.

save(choose(store.reports()), Path("chosen.yaml"))
suites.load("table1", "full", chosen=read(Path("chosen.yaml")))
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from poem._util.files import read_yaml
from poem.bench.result import Report, write_atomic
from poem.recipes.methods import SUFFIXES
from poem.streams.shift import EXTRA

RULE = (
    "For every base and method: the learning rate with the best mean top-1 accuracy over speckle_noise, gaussian_blur, "
    "spatter and saturate, over all seeds; ties go to the smaller rate. No other corruption is looked at. A rate holds "
    "for streams of one shift with the batches that it was chosen with, and for what is built on its method."
)
_FORMS = {"tent-filtered": "tent", "poem-official": "poem", "poem-official-v2": "poem"}
Chosen = dict[str, dict[str, float]]
"""Learning rates by base and method."""
_FREE = ("base", "method", "corruptions", "seed", "lr", "changes")
"""Fields of a cell in which results that choose may differ; changes may not differ within a base and method."""


def choose(reports: Iterable[Report]) -> Chosen:
    """The learning rate of each base and method, by `RULE`.

    Raises:
        ValueError: A report of another corruption, reports that differ in more than the rate, or a rate that lacks one
            of the four.
    """
    scores: dict[tuple[str, str], dict[float, dict[tuple[str, int], float]]] = {}
    alike = _Alike()
    for report in reports:
        cell = report.cell
        if len(cell.corruptions) != 1 or cell.corruptions[0] not in EXTRA or cell.scenario != "single":
            shown = f"{cell.scenario} {', '.join(cell.corruptions)}"
            raise ValueError(f"settings may be chosen on single {', '.join(EXTRA)} alone, got a result of {shown}")
        if cell.lr is not None:
            alike.check(report)
            cells = scores.setdefault((cell.base, cell.method), {}).setdefault(cell.lr, {})
            cells[cell.corruptions[0], cell.seed] = report.metrics["top1"]
    if not scores:
        raise ValueError("expected results of the suite holdout, got none with a learning rate of its own")
    chosen: Chosen = {}
    for (base, method), rates in sorted(scores.items()):
        chosen.setdefault(base, {})[method] = _best(rates, f"{base} {method}")
    return chosen


class _Alike:
    """Refuses results that cannot be compared with those before."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, ...], dict[str, Any]] = {}

    def check(self, report: Report) -> None:
        """One stream for all; one set of weights for a base; one recipe, but for its rate, for a method on it."""
        cell = report.cell
        stream = {name: value for name, value in cell.to_dict().items() if name not in _FREE}
        self._same((), stream, report)
        self._same((cell.base,), {"weights": report.base.get("sha256")}, report)
        self._same((cell.base, cell.method), {**report.recipe, "lr": None}, report)

    def _same(self, of: tuple[str, ...], fields: dict[str, Any], report: Report) -> None:
        before = self._seen.setdefault(of, fields)
        differ = [name for name in {**before, **fields} if before.get(name) != fields.get(name)]
        if differ:
            said = "; ".join(f"{name} {before.get(name)} and {fields.get(name)}" for name in differ)
            raise ValueError(
                f"expected results that differ in what is chosen alone, got {said} ({report.cell.label}); "
                "keep each `poem bench holdout` in a folder of its own"
            )


def rate_of(chosen: Mapping[str, Mapping[str, float]], base: str, method: str) -> float | None:
    """The chosen rate of a method on a base: its own, or that of the method that it is built on."""
    rates, name = chosen.get(base, {}), method
    while name not in rates and (below := parent(name)) is not None:
        name = below
    return rates.get(name)


def parent(method: str) -> str | None:
    """What a method is built on: `tent` of `tent+poem` and `tent*`, `poem` of its other forms; None of a base."""
    for suffix in SUFFIXES:
        if method.endswith(suffix):
            return method.removesuffix(suffix)
    return _FORMS.get(method)


def _best(rates: dict[float, dict[tuple[str, int], float]], label: str) -> float:
    """The rate with the best mean, once all have the same cells."""
    seeds = sorted({seed for cells in rates.values() for _, seed in cells})
    for rate, cells in sorted(rates.items()):
        missing = [f"{shift} seed {seed}" for shift in EXTRA for seed in seeds if (shift, seed) not in cells]
        if missing:
            raise ValueError(
                f"{label} at learning rate {rate:g} lacks {', '.join(missing)}; finish `poem bench holdout`"
            )
    means = {rate: statistics.fmean(cells.values()) for rate, cells in rates.items()}
    return min(means, key=lambda rate: (-means[rate], rate))


def save(chosen: Chosen, path: Path) -> None:
    """Write them as YAML, with the rule above."""
    import yaml

    rule = "".join(f"# {line}\n" for line in RULE.replace("; ", ";\n").replace(": ", ":\n", 1).splitlines())
    write_atomic(path, rule + yaml.safe_dump(chosen, sort_keys=True))


def read(path: Path) -> Chosen:
    """What `save` wrote."""
    try:
        found = read_yaml(path)
        chosen = {str(base): {str(name): float(rate) for name, rate in rates.items()} for base, rates in found.items()}
        if wrong := [rate for rates in chosen.values() for rate in rates.values() if not 0 <= rate < math.inf]:
            raise ValueError(f"a learning rate is a finite number of at least 0, got {wrong[0]:g}")
        return chosen
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"expected base: {{method: learning rate}} in {path}: {error}") from error
