"""Learning rates chosen on the four held-out corruptions, and nowhere else.

save(choose(store.results()), Path("chosen.yaml"))
suites.load("table1", "full", chosen=read(Path("chosen.yaml")))
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from poem._util.files import read_yaml, write_atomic
from poem.bench.result import CellResult
from poem.recipes.methods import SUFFIXES
from poem.streams.shift import EXTRA

RULE = (
    "For every base and method: the learning rate with the best mean top-1 accuracy over speckle_noise, gaussian_blur, "
    "spatter and saturate, over all seeds; ties go to the smaller rate. No other corruption is looked at. A rate holds "
    "for streams of one shift with the batches that it was chosen with, and for what is built on its method."
)
_HOSTS = {"tent-filtered": "tent", "poem-official": "poem", "poem-official-v2": "poem"}
Chosen = dict[str, dict[str, float]]
"""Learning rates by base and method."""
_MAY_DIFFER = ("base", "method", "corruptions", "seed", "lr", "changes")
"""Fields of a cell in which the results may differ; changes may not differ within a base and method."""


def choose(results: Iterable[CellResult]) -> Chosen:
    """The learning rate of each base and method, by `RULE`.

    Raises:
        ValueError: A result of another corruption, results that differ in more than the rate, or a rate that lacks one
            of the four.
    """
    scores: dict[tuple[str, str], dict[float, dict[tuple[str, int], float]]] = {}
    settings = _SameSettings()
    for result in results:
        cell = result.cell
        if len(cell.corruptions) != 1 or cell.corruptions[0] not in EXTRA or cell.scenario != "single":
            shown = f"{cell.scenario} {', '.join(cell.corruptions)}"
            raise ValueError(f"settings may be chosen on single {', '.join(EXTRA)} alone, got a result of {shown}")
        if cell.lr is not None:
            settings.check(result)
            cells = scores.setdefault((cell.base, cell.method), {}).setdefault(cell.lr, {})
            cells[cell.corruptions[0], cell.seed] = result.metrics["top1"]
    if not scores:
        raise ValueError("expected results of the suite holdout, got none with a learning rate of its own")
    chosen: Chosen = {}
    for (base, method), rates in sorted(scores.items()):
        chosen.setdefault(base, {})[method] = _best(rates, f"{base} {method}")
    return chosen


class _SameSettings:
    """Raises ValueError for a result that cannot be compared with those before it."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, ...], dict[str, Any]] = {}

    def check(self, result: CellResult) -> None:
        """One stream for all; one set of weights for a base; one recipe, but for its rate, for a method on it."""
        cell = result.cell
        stream = {name: value for name, value in cell.to_dict().items() if name not in _MAY_DIFFER}
        self._same((), stream, result)
        self._same((cell.base,), {"weights": result.base.get("sha256")}, result)
        self._same((cell.base, cell.method), {**result.recipe, "lr": None}, result)

    def _same(self, of: tuple[str, ...], fields: dict[str, Any], result: CellResult) -> None:
        before = self._seen.setdefault(of, fields)
        differ = [name for name in {**before, **fields} if before.get(name) != fields.get(name)]
        if differ:
            words = "; ".join(f"{name} {before.get(name)} and {fields.get(name)}" for name in differ)
            raise ValueError(
                f"expected results that differ in what is chosen alone, got {words} ({result.cell.label}); "
                "keep each `poem bench holdout` in a folder of its own"
            )


def rate_of(chosen: Mapping[str, Mapping[str, float]], base: str, method: str) -> float | None:
    """The chosen rate of a method on a base: its own, or that of its host method."""
    rates, name = chosen.get(base, {}), method
    while name not in rates and (host := host_of(name)) is not None:
        name = host
    return rates.get(name)


def host_of(method: str) -> str | None:
    """The host method: `tent` of `tent+poem` and `tent*`, `poem` of `poem-official`; None where there is none."""
    for suffix in SUFFIXES:
        if method.endswith(suffix):
            return method.removesuffix(suffix)
    return _HOSTS.get(method)


def _best(rates: dict[float, dict[tuple[str, int], float]], label: str) -> float:
    """The rate with the best mean; raises ValueError where one lacks a corruption or a seed of the others."""
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
    """Write the rates as YAML, under the rule."""
    import yaml

    rule = "".join(f"# {line}\n" for line in RULE.replace("; ", ";\n").replace(": ", ":\n", 1).splitlines())
    write_atomic(path, rule + yaml.safe_dump(chosen, sort_keys=True))


def read(path: Path) -> Chosen:
    """Rates from a file that `save` wrote."""
    try:
        found = read_yaml(path)
        chosen = {str(base): {str(name): float(rate) for name, rate in rates.items()} for base, rates in found.items()}
        if wrong := [rate for rates in chosen.values() for rate in rates.values() if not 0 <= rate < math.inf]:
            raise ValueError(f"a learning rate is a finite number of at least 0, got {wrong[0]:g}")
        return chosen
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"expected base: {{method: learning rate}} in {path}: {error}") from error
