"""Make the tables of the comparison from its result files.

    PYTHONPATH=src:benchmarks python -m auto.analyse

Reads results/auto/*.jsonl; prints all tables as Markdown, writes them to results/auto/tables.md, the figures to
results/auto/summary.json, and the tables that a page of the docs has a place for, `<!-- auto:NAME -->` ...
`<!-- /auto -->`, into that page. A page without any such place gets them at its end. A cell is a network, a row, a
stream and a batch size; its samples are those of all its seeds.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from auto import rows as methods
from auto import streams
from auto.cells import read_cells
from auto.paired import LEVEL, Paired, gain_kept, holm
from poem.bench.sample_cells import read_bits

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results" / "auto"
NEARLY_ALL = 0.85
"""Share of a network's streams that a row needs to be compared in the means; those are over the streams in common."""
LONG = "long"
"""Folder in there of cells with more images than those of the same network beside it."""
MARGIN = -0.5
"""Points below source that count as a loss."""
KEPT, NOT_BELOW, NINE_GAIN = 0.9, 0.9, 14.0
PAGES = {
    "docs/methods/auto.md": ("criteria", "coverage", "means", "best", "losses", "short", "accuracy-*"),
    "docs/guard.md": ("guard", "guard-losses", "guard-kept"),
    "README.md": ("readme",),
}
"""Tables of each page."""
PLACE = re.compile(r"<!-- auto:([\w.*-]+) -->\n(.*?)<!-- /auto -->", re.DOTALL)
LITE = ("clean", *streams.WORST, "sorted-clean", "sorted-contrast-5", "continual")

Place = tuple[str, str, int]
"""Network, stream, batch size."""


@dataclass(frozen=True)
class Run:
    """One row on one stream and seed: what it got right."""

    bits: NDArray[np.bool_]
    stream: str
    """Hash of the rows of the stream and their labels; only equal ones are paired."""


class Results:
    """The cells of result files; of two with the same key the later one counts."""

    def __init__(self, cells: Iterable[dict[str, Any]]) -> None:
        self.runs: dict[tuple[Place, str], dict[int, Run]] = {}
        self.trees: dict[str, int] = {}
        for cell in cells:
            place = cell["net"], cell["stream"], cell["batch"]
            run = Run(read_bits(cell["bits"], cell["n"]), cell["hash"])
            if int(run.bits.sum()) != cell["right"]:
                raise ValueError(f"expected {cell['right']} bits set in {place}, {cell['row']}, got {run.bits.sum()}")
            self.runs.setdefault((place, cell["row"]), {})[cell["seed"]] = run
            self.trees[cell["tree"]] = self.trees.get(cell["tree"], 0) + 1

    def places(self, row: str, *, main: bool = False) -> list[Place]:
        """Where a row was measured, in the order of networks and streams; `main`: batch 64, without `recurring`."""
        found = [place for place, own in self.runs if own == row]
        if main:
            found = [place for place in found if place[2] == 64 and place[1] != "recurring"]
        order = [stream for net in methods.NETS for stream in streams.names(net)]
        return sorted(found, key=lambda place: (methods.NETS.index(place[0]), -place[2], order.index(place[1])))

    @property
    def nets(self) -> list[str]:
        """The networks that were measured."""
        there = {place[0] for place, _ in self.runs}
        return [net for net in methods.NETS if net in there]

    def rows(self, net: str) -> list[str]:
        """The rows of a network at batch 64."""
        there = {row for (own, _, batch), row in self.runs if own == net and batch == 64}
        return [row for row in methods.ROWS if row in there]

    def accuracy(self, place: Place, row: str) -> float | None:
        """In percent, over all seeds; None where it was not measured."""
        runs = self.runs.get((place, row))
        return None if not runs else 100 * float(np.concatenate([run.bits for run in runs.values()]).mean())

    def paired(self, place: Place, row: str, other: str = "source", *, beside: str | None = None) -> Paired | None:
        """A row against another on the seeds that both have, and `beside` has; None where there is none."""
        own, theirs = self.runs.get((place, row), {}), self.runs.get((place, other), {})
        if beside is not None:
            own = {seed: run for seed, run in own.items() if seed in self.runs.get((place, beside), {})}
        found = [
            Paired.of(own[seed].bits, theirs[seed].bits)
            for seed in sorted(own)
            if seed in theirs and own[seed].stream == theirs[seed].stream
        ]
        return _total(found)

    def against_best(self, place: Place, row: str = "auto") -> tuple[Paired, list[str]] | None:
        """A row against the best single method, which is chosen on other samples than it is compared on.

        With several seeds it is chosen on the next one, and compared on this one; with one seed it is chosen on every
        second sample and compared on the others, both ways round. Comparisons are added up. Methods that were measured
        on some seeds of the row alone come in by a second comparison, on the seeds that all have; of the two the one
        counts that speaks more clearly against the row. None where Tent was not measured on every seed.
        """
        own = self.runs.get((place, row), {})
        rivals = {name: self.runs.get((place, name), {}) for name in methods.SINGLE}
        rivals = {name: runs for name, runs in rivals.items() if own.keys() & runs.keys()}
        if not own or not own.keys() <= rivals.get("tent", {}).keys():
            return None
        every = {name: runs for name, runs in rivals.items() if own.keys() <= runs.keys()}
        found = [_against(own, every, sorted(own))]
        common = own.keys() & set.intersection(*(set(runs) for runs in rivals.values()))
        if len(every) < len(rivals) and common:
            found.append(_against(own, rivals, sorted(common)))
        return min(found, key=lambda each: each[0].p_below(0.0))


def _against(
    own: Mapping[int, Run], rivals: Mapping[str, Mapping[int, Run]], seeds: Sequence[int]
) -> tuple[Paired, list[str]]:
    """A row's runs against the best of its rivals on these seeds, and which that was each time."""
    chosen, found = [], []
    for at, seed in enumerate(seeds):
        for part in range(1 if len(seeds) > 1 else 2):
            choose_on = slice(None) if len(seeds) > 1 else slice(part, None, 2)
            compare_on = slice(None) if len(seeds) > 1 else slice(1 - part, None, 2)
            other = seeds[(at + 1) % len(seeds)]
            name = max(rivals, key=lambda each: rivals[each][other].bits[choose_on].mean())
            chosen.append(name)
            found.append(Paired.of(own[seed].bits[compare_on], rivals[name][seed].bits[compare_on]))
    total = _total(found)
    assert total is not None
    return total, chosen


def _total(found: Sequence[Paired]) -> Paired | None:
    total = None
    for each in found:
        total = each if total is None else total + each
    return total


# Figures --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Loss:
    """A cell against source."""

    place: Place
    row: str
    paired: Paired
    adjusted: float
    """P-value against a difference of -0.5 or more, adjusted by Holm over the row's cells."""


def losses(results: Results, row: str) -> list[Loss]:
    """Every cell of a row against source, with the p-value that it lies below the margin."""
    found = [(place, results.paired(place, row)) for place in results.places(row)]
    pairs = [(place, paired) for place, paired in found if paired is not None]
    adjusted = holm([paired.p_below(MARGIN) for _, paired in pairs])
    return [Loss(place, row, paired, p) for (place, paired), p in zip(pairs, adjusted, strict=True)]


def common_places(results: Results, net: str) -> list[Place]:
    """The network's main streams on which every row was measured that has `NEARLY_ALL` of them."""
    return _common(results, net, results.rows(net))


def _common(results: Results, net: str, rows: Sequence[str]) -> list[Place]:
    """The same for some of the rows."""
    places = [place for place in results.places("source", main=True) if place[0] == net]
    there = {row: [place for place in places if results.accuracy(place, row) is not None] for row in rows}
    wanted = [found for found in there.values() if len(found) >= NEARLY_ALL * len(places)]
    return [place for place in places if all(place in found for found in wanted)]


def means(results: Results, net: str) -> dict[str, float]:
    """Mean accuracy of each row over `common_places`; rows that miss one of them are left out."""
    return _means_over(results, common_places(results, net), results.rows(net))


def _means_over(results: Results, places: Sequence[Place], rows: Sequence[str]) -> dict[str, float]:
    """Mean accuracy of those of the rows that have all these places."""
    found = {}
    for row in rows:
        each = [results.accuracy(place, row) for place in places]
        if each and None not in each:
            found[row] = fmean(value for value in each if value is not None)
    return found


def rank(found: dict[str, float], row: str = "auto") -> int | None:
    """Place of a row among the rows without a guard, 1 for the best; None where it has no mean."""
    if row not in found:
        return None
    return 1 + sum(value > found[row] for name, value in found.items() if not name.startswith("guarded "))


def mean_difference(results: Results | None, net: str, chosen: Sequence[str], other: str) -> dict[str, Any] | None:
    """`auto` minus another row, the mean over streams that both have; None where there is none."""
    if results is None:
        return None
    found = {stream: results.paired((net, stream, 64), "auto", other) for stream in chosen}
    there = {stream: paired.difference for stream, paired in found.items() if paired is not None}
    if not there:
        return None
    return {"points": round(fmean(there.values()), 2), "streams": len(there), "of": len(chosen)}


def guard_figures(results: Results, method: str) -> dict[str, Any]:
    """How a guard around a method does: losses against source, and what is kept of the method's gains."""
    row = f"guarded {method}"
    found, kept = losses(results, row), {}
    for loss in found:
        guarded = results.paired(loss.place, row, beside=method)
        unguarded = results.paired(loss.place, method, beside=row)
        share = None if guarded is None or unguarded is None else gain_kept(guarded, unguarded)
        if share is not None and guarded is not None and unguarded is not None:
            kept[loss.place] = (share, guarded.difference, unguarded.difference)
    gained = sum(each[2] for each in kept.values())
    return {
        "cells": len(found),
        "significant": sum(loss.adjusted < LEVEL for loss in found),
        "below": sum(loss.paired.difference < MARGIN for loss in found),
        "worst": min((loss.paired.difference for loss in found), default=None),
        "unguarded_worst": min(
            (paired.difference for loss in found if (paired := results.paired(loss.place, method)) is not None),
            default=None,
        ),
        "gains": len(kept),
        "kept": sum(each[1] for each in kept.values()) / gained if kept else None,
        "kept_median": median(each[0] for each in kept.values()) if kept else None,
        "kept_enough": sum(each[0] >= KEPT for each in kept.values()),
        "short": {place: each for place, each in kept.items() if each[0] < KEPT},
    }


def best_figures(results: Results) -> dict[Place, tuple[Paired, list[str]]]:
    """`auto` against the best single method, on every main stream of networks with all rows."""
    whole = [net for net in methods.NETS if methods.names(net) != methods.FIVE]
    found = {
        place: results.against_best(place) for place in results.places("auto", main=True) if place[0] in whole
    }  # fmt: skip
    return {place: figure for place, figure in found.items() if figure is not None}


def summary(results: Results, long: Results | None = None) -> dict[str, Any]:
    """All figures, as plain values."""
    own, best = losses(results, "auto"), best_figures(results)
    not_below = [paired.p_below(0.0) >= LEVEL for paired, _ in best.values()]
    cells = []
    for place, row in sorted(results.runs, key=lambda each: (each[0], each[1])):
        paired, accuracy = results.paired(place, row), results.accuracy(place, row)
        assert accuracy is not None
        runs = results.runs[place, row]
        cell = {"net": place[0], "stream": place[1], "batch": place[2], "row": row, "seeds": sorted(runs)}
        cell |= {"n": sum(len(run.bits) for run in runs.values()), "accuracy": round(accuracy, 3)}
        if paired is not None and row != "source":
            cell |= {"difference": round(paired.difference, 3), "error": round(paired.error, 3)}
            cell |= {"upper": round(paired.upper, 3)}
        cells.append(cell)
    guards = {}
    for method in methods.GUARDED:
        if results.places(f"guarded {method}"):
            figures = guard_figures(results, method)
            figures["short"] = [
                {"net": net, "stream": stream, "batch": batch, "kept": round(each[0], 3)}
                for (net, stream, batch), each in figures["short"].items()
            ]
            guards[method] = {
                key: round(value, 4) if isinstance(value, float) else value for key, value in figures.items()
            }
    return {
        "margin": MARGIN,
        "trees": dict(sorted(results.trees.items())),
        "auto": {
            "cells": len(own),
            "significant": [_place_text(loss.place) for loss in own if loss.adjusted < LEVEL],
            "below": [_place_text(loss.place) for loss in own if loss.paired.difference < MARGIN],
            "best_streams": len(not_below),
            "best_not_below": sum(not_below),
            "rank": {net: rank(means(results, net)) for net in results.nets},
            "nine": mean_difference(results, "resnet50-keras", streams.NINE, "source"),
            "lite0_over_mean6": mean_difference(results, "effnet-lite0", LITE, "mean6"),
            "lite0_over_mean6_long": mean_difference(long, "effnet-lite0", LITE, "mean6"),
        },
        "means": {net: {row: round(value, 3) for row, value in means(results, net).items()} for net in results.nets},
        "guard": guards,
        "cells": cells,
    }


# Tables ---------------------------------------------------------------------------------------------------------------


def tables(results: Results, long: Results | None = None) -> dict[str, str]:
    """Every table by its name, as Markdown that ends with a line's end; `long` has longer streams of large networks."""
    found = {
        "criteria": _criteria(results, long),
        "coverage": _coverage(results),
        "means": _means(results),
        "best": _best(results),
        "losses": _losses(results, ["auto"]),
        "short": _short(results),
        "guard": _guard(results),
        "guard-losses": _losses(results, [f"guarded {method}" for method in methods.GUARDED]),
        "guard-kept": _kept(results),
        "readme": _readme(results),
    }
    for net in results.nets:
        free = [row for row in results.rows(net) if not row.startswith("guarded ")]
        guarded = ["source", *(row for row in results.rows(net) if row.startswith("guarded "))]
        found[f"accuracy-{net}"] = _streams(results, net, free, against_source=False)
        found[f"difference-{net}"] = _streams(results, net, free, against_source=True)
        found[f"guarded-{net}"] = _streams(results, net, guarded, against_source=False)
        found[f"guarded-difference-{net}"] = _streams(results, net, guarded, against_source=True)
    return found


def _criteria(results: Results, long: Results | None) -> str:
    own, best = losses(results, "auto"), best_figures(results)
    significant = sum(loss.adjusted < LEVEL for loss in own)
    below = sum(loss.paired.difference < MARGIN for loss in own)
    lines = []
    if own:
        found = f"{significant} of {len(own)} cells; {below} point estimates below"
        lines.append(
            ("`auto` more than 0.5 points below source: no cell (one-sided 95 %, Holm)", found, not significant)
        )
    if best:
        count = sum(paired.p_below(0.0) >= LEVEL for paired, _ in best.values())
        words = "not significantly below the best single method: 90 % of streams"
        lines.append((words, f"{100 * count / len(best):.0f} % of {len(best)}", count / len(best) >= NOT_BELOW))
    compared = [net for net in results.nets if methods.names(net) != methods.FIVE]
    ranks = {net: place for net in compared if (place := rank(means(results, net))) is not None}
    if ranks:
        first = sum(place == 1 for place in ranks.values())
        rest = ", ".join(f"{net}: place {place}" for net, place in ranks.items() if place > 1)
        found = f"{first} of {len(ranks)}" + (f" ({rest})" if rest else "")
        lines.append(("best on average: each network", found, first == len(ranks)))
    for words, figure, least in (
        (
            "ResNet-50, nine streams: 14 points over source",
            mean_difference(results, "resnet50-keras", streams.NINE, "source"),
            NINE_GAIN,
        ),
        (
            "Lite0, 2,000 images: at least the mean over six weights",
            mean_difference(long, "effnet-lite0", LITE, "mean6"),
            0.0,
        ),
        (
            "Lite0, 500 images: at least the mean over six weights",
            mean_difference(results, "effnet-lite0", LITE, "mean6"),
            0.0,
        ),
    ):
        if figure is not None:
            found = f"{figure['points']:+.1f} ({figure['streams']} of {figure['of']} streams)"
            lines.append((words, found, figure["points"] >= least))
    default = guard_figures(results, "auto")
    if default["cells"]:
        found = f"{default['significant']} of {default['cells']} cells; {default['below']} point estimates below"
        lines.append(
            (
                "guarded `auto`, the default, more than 0.5 points below source: no cell",
                found,
                not default["significant"],
            )
        )
    guards = [guard_figures(results, method) for method in methods.GUARDED if method != "auto"]
    guards = [each for each in guards if each["cells"]]
    if guards:
        count, cells = sum(each["significant"] for each in guards), sum(each["cells"] for each in guards)
        words = "guarded methods more than 0.5 points below source: no cell (Holm over each method's)"
        lines.append((words, f"{count} of {cells} cells", not count))
        enough, gains = sum(each["kept_enough"] for each in guards), sum(each["gains"] for each in guards)
        if gains:
            words = "guarded methods keep 90 % of a gain of 1 point or more: each cell"
            lines.append((words, f"{enough} of {gains} cells", enough == gains))
    return _table(["criterion", "measured", "met"], [[*line[:2], "yes" if line[2] else "**no**"] for line in lines])


def planned(net: str) -> dict[tuple[str, int, str], int]:
    """The cells of a network in the whole comparison: stream, batch size and row, and the number of seeds."""
    return {
        (stream, batch, row): len(methods.seeds(net))
        for batch in (64, 8, 1)
        for stream in streams.names(net, batch)
        for row in methods.names(net, stream, batch)
    }


def _coverage(results: Results) -> str:
    lines = []
    for net in methods.NETS:
        wanted = planned(net)
        seen = {
            (stream, batch, row): len(results.runs.get(((net, stream, batch), row), {}))
            for stream, batch, row in wanted
        }
        absent = [row for row in methods.ROWS if any(each[2] == row and seen[each] < wanted[each] for each in wanted)]
        done = sum(min(seen[each], wanted[each]) for each in wanted)
        lines.append([net, f"{done} of {sum(wanted.values())}", ", ".join(absent) or "-"])
    return _table(["network", "cells measured", "rows with cells left out"], lines)


def _means(results: Results) -> str:
    found = {net: means(results, net) for net in results.nets}
    there = [row for row in methods.ROWS if any(row in each for each in found.values())]
    lines = []
    for row in there:
        best = {net: max((each[name] for name in each if not name.startswith("guarded ")), default=0.0)
                for net, each in found.items()}  # fmt: skip
        values = [_number(each.get(row), bold=each.get(row) == best[net]) for net, each in found.items()]
        lines.append([row, *values])
    lines.append(["streams", *(str(len(common_places(results, net))) for net in found)])
    return _table(["mean over streams", *found], lines)


README_NETS = {
    "cifar10-bn": "small ResNet, batch norm; CIFAR-10",
    "cifar10-gn": "small ResNet, group norm; CIFAR-10",
    "cifar10-vit": "small ViT; CIFAR-10",
    "resnet50-keras": "ResNet-50, batch norm; ImageNet",
    "vit-tiny16": "ViT-Tiny; ImageNet",
}


def _readme(results: Results) -> str:
    chosen, lines = ("tent", "poem", "guarded auto"), []
    for net, words in README_NETS.items():
        shown = ("source", *chosen)
        own = _means_over(results, _common(results, net, shown), shown)
        if not all(row in own for row in shown):
            continue
        best = max(own[row] for row in ("source", *chosen))
        worst = [
            min(paired.difference for place in results.places(row, main=True)
                if place[0] == net and (paired := results.paired(place, row)) is not None)
            for row in chosen
        ]  # fmt: skip
        means_of = [_number(own[row], bold=own[row] == best) for row in ("source", *chosen)]
        lines.append([words, *means_of, ", ".join(f"{value + 0.0:+.1f}" for value in worst)])
    head = [
        "network, images",
        "source",
        "Tent",
        "POEM",
        "auto, guarded",
        "worst stream of the last three against source",
    ]
    return _table(head, lines)


def _best(results: Results) -> str:
    figures, lines = best_figures(results), []
    for net in results.nets:
        own = {place: figure for place, figure in figures.items() if place[0] == net}
        if not own:
            continue
        below = {place: figure for place, figure in own.items() if figure[0].p_below(0.0) < LEVEL}
        words = "; ".join(
            f"{_stream_text(place)} {paired.difference:+.1f} ({', '.join(dict.fromkeys(chosen))})"
            for place, (paired, chosen) in below.items()
        )
        share = f"{100 * (1 - len(below) / len(own)):.0f} % of {len(own)}"
        lines.append([net, share, f"{fmean(paired.difference for paired, _ in own.values()):+.1f}", words or "-"])
    return _table(["network", "not significantly below", "mean difference", "significantly below on"], lines)


def _losses(results: Results, rows: Sequence[str]) -> str:
    lines = []
    for row in rows:
        for loss in losses(results, row):
            if loss.paired.difference < MARGIN:
                found = loss.paired
                lines.append([
                    loss.place[0], row, _stream_text(loss.place), f"{found.difference:+.2f} ± {found.error:.2f}",
                    f"{found.upper:+.2f}", f"{loss.adjusted:.2g}", "**yes**" if loss.adjusted < LEVEL else "no",
                ])  # fmt: skip
    if not lines:
        return "No point estimate lies below -0.5 points.\n"
    head = ["network", "row", "stream", "minus source", "95 % upper bound", "p (Holm)", "significantly below -0.5"]
    return _table(head, lines)


def _short(results: Results) -> str:
    lines = []
    for net in results.nets:
        for batch, chosen in ((8, None), (1, None), (64, "recurring")):
            places = [place for place in results.places("source") if place[0] == net and place[2] == batch
                      and (chosen is None or place[1] == chosen)]  # fmt: skip
            if places:
                values = []
                for row in methods.SHORT:
                    each = [value for place in places if (value := results.accuracy(place, row)) is not None]
                    values.append(_number(fmean(each) if len(each) == len(places) else None))
                lines.append([net, f"batch {batch}" if chosen is None else chosen, *values])
    return _table(["network", "streams", *methods.SHORT], lines)


def _guard(results: Results) -> str:
    lines = []
    for method in methods.GUARDED:
        each = guard_figures(results, method)
        if each["cells"]:
            lines.append([
                method, str(each["cells"]), _number(each["unguarded_worst"], sign=True),
                _number(each["worst"], sign=True), str(each["below"]), str(each["significant"]),
                _percent(each["kept"]), _percent(each["kept_median"]), f"{each['kept_enough']} of {each['gains']}",
            ])  # fmt: skip
    head = ["guarded", "cells", "worst without the guard", "worst with it", "below -0.5", "significantly",
            "gain kept", "median", "90 % kept"]  # fmt: skip
    return _table(head, lines)


def _kept(results: Results) -> str:
    lines = []
    for method in methods.GUARDED:
        for place, (share, own, free) in guard_figures(results, method)["short"].items():
            lines.append([place[0], method, _stream_text(place), f"{free:+.1f}", f"{own:+.1f}", _percent(share)])
    if not lines:
        return "Every guarded method keeps 90 % of every gain of 1 point or more.\n"
    return _table(["network", "method", "stream", "gain without the guard", "with it", "kept"], lines)


def _streams(results: Results, net: str, rows: Sequence[str], *, against_source: bool) -> str:
    lines = []
    for place in results.places("source"):
        if place[0] != net or place[2] != 64:
            continue
        values = []
        for row in rows:
            paired = results.paired(place, row)
            if against_source and row != "source":
                values.append("" if paired is None else f"{paired.difference:+.1f} ± {paired.error:.1f}")
            else:
                values.append(_number(results.accuracy(place, row)))
        lines.append([place[1], *values])
    return _table([net, *rows], lines)


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    if not lines:
        return "Not measured yet.\n"
    rule = ["---", *["---:" if len(head) > 4 else "---"] * (len(head) - 1)]
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, rule, *lines))


def _number(value: float | None, *, sign: bool = False, bold: bool = False) -> str:
    text = "" if value is None else f"{value:+.1f}" if sign else f"{value:.1f}"
    return f"**{text}**" if bold and text else text


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def _stream_text(place: Place) -> str:
    return place[1] if place[2] == 64 else f"{place[1]}, batch {place[2]}"


def _place_text(place: Place) -> str:
    return f"{place[0]}: {_stream_text(place)}"


# Pages ----------------------------------------------------------------------------------------------------------------


def filled(page: str, found: dict[str, str], own: Sequence[str]) -> str:
    """A page with its tables in their places; without any place, the page's own tables are added at its end.

    A place `accuracy-*` holds all tables of that kind, one after another.

    Raises:
        ValueError: A place names no table.
    """
    if not PLACE.search(page):
        page = page.rstrip("\n") + "\n" + "".join(f"\n<!-- auto:{name} -->\n<!-- /auto -->\n" for name in own)

    def place(match: re.Match[str]) -> str:
        name = match[1]
        texts = [found[name]] if name in found else []
        if name.endswith("*"):
            texts = [text for each, text in found.items() if each.startswith(name[:-1])] or ["Not measured yet.\n"]
        elif not texts and re.match(r"(accuracy|difference|guarded|guarded-difference)-", name):
            texts = ["Not measured yet.\n"]
        if not texts:
            raise ValueError(f"expected auto:NAME out of {', '.join(found)}; got auto:{name}")
        return f"<!-- auto:{name} -->\n\n" + "\n".join(texts) + "\n<!-- /auto -->"

    return PLACE.sub(place, page)


def _by_cell(found: dict[str, Any]) -> str:
    """As JSON with a line for each cell, which is a quarter of the size that indents make."""
    cells = ",\n".join(json.dumps(cell) for cell in found["cells"])
    rest = json.dumps({name: value for name, value in found.items() if name != "cells"}, indent=1)
    return f'{rest[:-2]},\n "cells": [\n{cells}\n]\n}}\n'


def load(folder: Path = RESULTS) -> Results | None:
    """The results of a folder; None where it has no file."""
    paths = sorted(folder.glob("*.jsonl"))
    return Results(read_cells(paths)) if paths else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Print and write everything; returns 1 where there are no results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the result files")
    parser.add_argument("--root", type=Path, default=ROOT, help="the repository, whose docs get the tables")
    parser.add_argument("--no-docs", action="store_true", help="leave the docs alone")
    args = parser.parse_args(arguments)
    results = load(args.results)
    if results is None:
        print(f"expected result files in {args.results}; measure first: python -m auto.measure", file=sys.stderr)
        return 1
    long = load(args.results / LONG)
    found = tables(results, long)
    text = "\n".join(f"## {name}\n\n{table}" for name, table in found.items())
    print(text)
    (args.results / "tables.md").write_text(text)
    (args.results / "summary.json").write_text(_by_cell(summary(results, long)))
    for name, own in PAGES.items():
        path = args.root / name
        if path.is_file() and not args.no_docs:
            path.write_text(filled(path.read_text(), found, own))
    return 0


if __name__ == "__main__":
    sys.exit(main())
