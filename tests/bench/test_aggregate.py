"""Means over seeds, deviations, pooled shares: each number of a table worked out by hand."""

from __future__ import annotations

import re

import pytest
from fixture_reports import cell, report, shown, suite, table

from poem.bench.analysis.aggregate import AVERAGE, Grid, metric, pooled
from poem.bench.suites import Placed

TOP1 = metric("top1")


def test_a_number_is_the_mean_over_seeds_with_their_deviation() -> None:
    made, reports = table({"Tent": {"Fog": [40.0, 42.0, 47.0]}})
    value = Grid(made, reports).value("ResNet-50-BN", "Tent", "Fog", TOP1)
    assert value is not None
    assert value.mean == pytest.approx(43.0)
    assert value.deviation == pytest.approx(((9 + 1 + 16) / 2) ** 0.5)
    assert value.seeds == {0: 40.0, 1: 42.0, 2: 47.0}
    assert "43.0 ± 3.6" in shown(made, reports)


def test_one_seed_has_no_deviation() -> None:
    made, reports = table({"Tent": {"Fog": [40.0]}})
    value = Grid(made, reports).value("ResNet-50-BN", "Tent", "Fog", TOP1)
    assert value is not None
    assert value.deviation is None
    text = shown(made, reports).split("## Contents")[1]
    assert "one seed, so no ±" in text
    assert not re.search(r"\d ±", text)


def test_cells_that_share_a_place_are_averaged_by_seed_first() -> None:
    placed, reports = [], []
    for seed, tops in enumerate(([10.0, 30.0], [50.0, 60.0])):
        for shift, top1 in zip(("fog", "snow"), tops, strict=True):
            here = cell("tent", shift, seed)
            placed.append(Placed(group="", row="Tent", column="all", cell=here))
            reports.append(report(here, top1))
    value = Grid(suite(placed, ["all"], average=False), reports).value("", "Tent", "all", TOP1)
    assert value is not None
    assert value.seeds == {0: 20.0, 1: 55.0}
    lacking = Grid(suite(placed, ["all"], average=False), reports[1:]).value("", "Tent", "all", TOP1)
    assert lacking is not None
    assert lacking.seeds == {1: 55.0}, "a seed that lacks a cell does not count"


def test_the_average_takes_the_seeds_that_have_every_column() -> None:
    made, reports = table({"Tent": {"Fog": [40.0, 50.0], "Snow": [60.0, 80.0]}})
    grid = Grid(made, reports)
    value = grid.number("ResNet-50-BN", "Tent", AVERAGE, TOP1)
    assert value is not None
    assert value.seeds == {0: 50.0, 1: 65.0}
    short = Grid(made, [each for each in reports if each.metrics["top1"] != 80.0])
    value = short.average("ResNet-50-BN", "Tent", TOP1)
    assert value is not None
    assert value.seeds == {0: 50.0}
    only_fog = [each for each in reports if each.cell.corruptions[0].startswith("Fog")]
    assert Grid(made, only_fog).average("ResNet-50-BN", "Tent", TOP1) is None


def test_a_cell_in_two_places_counts_once() -> None:
    here = cell()
    placed = [Placed(group="", row=row, column="Fog", cell=here) for row in ("a", "b")]
    grid = Grid(suite(placed, ["Fog"]), [report(here)])
    assert (grid.present, grid.planned) == (1, 1)
    columns = [Placed(group="", row="a", column=column, cell=here) for column in ("Fog", "Snow")]
    assert len(Grid(suite(columns, ["Fog", "Snow"]), [report(here)]).at("", "a")) == 1


def test_a_share_that_a_group_lacks_is_not_zero() -> None:
    found = pooled([{"n": 2, "accuracy": 60.0}, {"n": 6}, {"n": 0}, {"n": 2, "accuracy": 90.0, "confidence": 50.0}])
    assert found == {"n": 10.0, "accuracy": 75.0, "confidence": 50.0}
