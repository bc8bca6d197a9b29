"""Suites and results made by hand, so that pages can be checked against numbers on paper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from poem.bench.cell import Cell
from poem.bench.estimate import domain_size
from poem.bench.result import CellResult
from poem.bench.store import Failure, Store
from poem.bench.suites import Claim, Placed, Suite
from poem.recipes.text import written
from poem.report.markdown import render_markdown
from poem.report.sections import build_page

FIFTEEN = ("Gauss.", "Shot", "Impul.", "Defoc.", "Glass", "Motion", "Zoom", "Snow", "Frost", "Fog", "Brit.", "Contr.",
           "Elastic", "Pixel", "JPEG")  # fmt: skip
METHODS = {"No Adapt.": "source", "Tent": "tent", "EATA": "eata", "SAR": "sar", "POEM (Algorithm 1)": "poem"}


def cell(method: str = "tent", corruption: str = "fog", seed: int = 0, **settings: Any) -> Cell:
    """A cell of digits."""
    stated: dict[str, Any] = {"base": "digits-bn", "data": "digits-test", "n": 500, "preset": "cifar", **settings}
    return Cell(method=method, corruptions=(corruption,), seed=seed, **stated)


def report(of: Cell, top1: float = 50.0, **settings: Any) -> CellResult:
    """A result with every part filled; what a test is about is passed in."""
    ledger = {"images": 500, "forwards": 500, "backwards": 0, "batches": 8, "source_images": 0, "selected": 300}
    n = domain_size(of.data) if of.n is None else 500
    stated: dict[str, Any] = {
        "recipe": written(of.recipe()),
        "base": {"name": of.base, "sha256": "ab" * 32},
        "card": {"data": of.data, "n": n, "total": n, "corruptions": list(of.corruptions), "seed": of.seed,
                 "source_access": "none", "provenance": "made on the fly"},
        "metrics": {"top1": top1, "top5": min(100.0, top1 + 30), "ece": 10.0 - top1 / 20, "nll": 2.0 - top1 / 100,
                    "aurc": 40 - top1 / 4, "worst_window": top1 - 8},
        "domains": {f"{of.corruptions[0]} 5": {"n": 500.0, "top1": top1}},
        "windows": [top1 - 4 + at for at in range(5)],
        "groups": {},
        "ledger": ledger,
        "provenance": {"poem": "0.1", "torch": "2.9", "python": "3.11", "commit": "0123456789abcdef", "dirty": False},
        "timing": {"adapt_s": 2.0, "data_s": 0.5, "total_s": 2.5, "images_per_s": 250.0, "peak_bytes": 2.0**28},
        "host": {"device": "cpu", "started": "2025-01-02T03:04:05"},
    }  # fmt: skip
    return CellResult(cell=of, **{**stated, **settings})


def suite(placed: Sequence[Placed], columns: Sequence[str], **settings: Any) -> Suite:
    """A suite of these cells."""
    stated: dict[str, Any] = {
        "name": "table1", "version": 1, "title": "Table 1: a table", "kind": "table", "scale": "tiny", "average": True,
        "readout": "A fresh adapter for every corruption.", "smoke": settings.get("scale", "tiny") == "tiny",
        "claims": (), "notes": ("A note on the protocol.",), "numbers": {},
    }  # fmt: skip
    return Suite(placed=tuple(placed), columns=tuple(columns), **{**stated, **settings})


def table(
    values: Mapping[str, Mapping[str, Sequence[float]]], *, group: str = "ResNet-50-BN", **settings: Any
) -> tuple[Suite, list[CellResult]]:
    """A table from numbers by row and column, one per seed; a row's name is that of `METHODS`, or a method's own."""
    placed, reports = [], []
    for row, by_column in values.items():
        for column, seeds in by_column.items():
            for seed, top1 in enumerate(seeds):
                full = {"n": None} if settings.get("scale") == "full" else {}
                here = cell(METHODS.get(row, "tent"), f"{column}-{row}-{group}", seed, **full)
                placed.append(Placed(group=group, row=row, column=column, cell=here))
                reports.append(report(here, top1))
    columns = list(dict.fromkeys(column for by_column in values.values() for column in by_column))
    return suite(placed, columns, **settings), reports


def wide(seeds: int = 3, **settings: Any) -> tuple[Suite, list[CellResult]]:
    """Fifteen corruptions, two blocks and five methods, with numbers that look like a table's."""
    placed: list[Placed] = []
    reports: list[CellResult] = []
    for block, group in enumerate(("ResNet-50-BN", "ViTbase-LN")):
        for at, row in enumerate(METHODS):
            values = {
                column: [30 + 4 * at + 10 * block + 7 * math.sin(place + at) + seed / 3 for seed in range(seeds)]
                for place, column in enumerate(FIFTEEN)
            }
            part, found = table({row: values}, group=group)
            placed += part.placed
            reports += found
    return suite(placed, FIFTEEN, **settings), reports


def probes(kind: str) -> tuple[Suite, list[CellResult]]:
    """A figure of a kind, with the probe that it reads."""
    bins = [round(at / 20, 2) for at in range(21)]
    found: dict[str, Any] = {
        "transitions": {"threshold": 0.92, "low_low": 240, "low_high": 10, "high_low": 90, "high_high": 160},
        "range": {"low": 0.9, "high": 1.6, "newly": {"n": 90, "accuracy": 80.0}, "all": {"n": 200, "accuracy": 62.0},
                  "others": {"n": 110, "accuracy": 47.3}},
        "gradients": {"edges": bins, "n": [25] * 20, "norm": [math.sin(3 * x) + 0.1 for x in bins[:-1]],
                      "norm_p10": [math.sin(3 * x) * 0.7 for x in bins[:-1]],
                      "norm_p90": [math.sin(3 * x) * 1.3 + 0.2 for x in bins[:-1]],
                      "accuracy": [98 - 70 * x for x in bins[:-1]], "areas": {}},
    }  # fmt: skip
    groups = {
        "low": {"n": 250, "accuracy": 95.0, "accuracy_last": 96.0, "confidence": 96.0},
        "newly": {"n": 90, "accuracy": 80.0, "accuracy_last": 84.0, "confidence": 71.0},
        "high": {"n": 160, "accuracy": 41.0, "accuracy_last": 43.0, "confidence": 44.0},
    }
    here = cell("poem")
    placed = [Placed(group="ResNet-50-BN", row="POEM (Algorithm 1)", column="all", cell=here)]
    return suite(placed, ["all"], name=kind, title=f"Figure: {kind}", kind=kind, average=False), [
        report(here, 60.0, probes=found, groups=groups)
    ]


def curves(
    name: str = "fig5", kind: str = "lines", x: str = "threshold (share of ln C)"
) -> tuple[Suite, list[CellResult]]:
    """Three curves over five x values."""
    xs = range(1, 6)
    values = {
        row: {str(at / 5): [40 + 5 * place + 6 * math.sin(at / (place + 1)) + seed for seed in range(3)] for at in xs}
        for place, row in enumerate(("Tent", "EATA", "POEM (Algorithm 1)"))
    }
    return table(values, name=name, title=f"Figure: {name}", kind=kind, average=False, x=x, y="accuracy (%)")


def costs() -> tuple[Suite, list[CellResult]]:
    """Table 9: counts as a ledger would hold them."""
    counts = {
        "No Adapt.": ("source", 500, 0, 0, 9000.0), "MEMO": ("memo", 500 * 65, 500 * 64, 0, 1.1),
        "Tent": ("tent", 500, 500, 0, 3000.0), "EATA": ("eata", 500, 190, 2000, 2500.0),
        "SAR": ("sar", 686, 311, 0, 1400.0), "POEM (Algorithm 1)": ("poem", 1000, 416, 0, 1000.0),
    }  # fmt: skip
    placed: list[Placed] = []
    reports: list[CellResult] = []
    for row, (method, forwards, backwards, source, fast) in counts.items():
        here = cell(method, "gaussian_noise")
        placed.append(Placed(group="ResNet-50-BN", row=row, column="Gauss.", cell=here))
        ledger = {"images": 500, "forwards": forwards, "backwards": backwards, "source_images": source}
        timing = {"adapt_s": 500 / fast, "images_per_s": fast}
        reports.append(report(here, 40 + len(reports), ledger=ledger, timing=timing))
    return suite(placed, ["Gauss."], name="table9", title="Table 9: cost", kind="efficiency", average=False), reports


def everything() -> tuple[list[Suite], list[CellResult]]:
    """One suite of every kind."""
    paper = {"ResNet-50-BN": {"Tent": {"Gauss.": 27.1, "Shot": 28.9}}}
    first, reports = wide(claims=(Claim("POEM has the highest average", "poem-best"),), numbers=paper)
    suites = [first]
    for made, found in (
        costs(), curves(), curves("fig6a", x="iterations"), curves("fig1c", kind="bars"),
        *(probes(kind) for kind in ("transitions", "groups", "gradients", "range")),
    ):  # fmt: skip
        suites.append(made)
        reports += found
    return suites, reports


def renamed(of: Suite, **settings: Any) -> Suite:
    """The same suite with other fields."""
    return replace(of, **settings)


def shown(made: Suite, reports: list[CellResult], failures: dict[str, Failure] | None = None) -> str:
    """A suite's Markdown."""
    return render_markdown(build_page([made], reports, failures or {}))


def kept(folder: Path, *reports: CellResult) -> Path:
    """A folder with these results."""
    store = Store(folder)
    for each in reports:
        store.save(each)
    return folder
