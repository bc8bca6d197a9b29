"""Pages: numbers as on paper, honest about what is missing, safe to open, and the same in Markdown and HTML."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from fixture_reports import cell, costs, curves, everything, probes, report, suite, table, wide

import poem
from poem.bench.analysis.aggregate import AVERAGE, Grid, metric, pooled
from poem.bench.result import CellResult
from poem.bench.store import Failure, Store
from poem.bench.suites import Claim, Placed, Suite
from poem.cli.main import main
from poem.recipes.text import written as written_recipe
from poem.report import build, compare
from poem.report.contents import about
from poem.report.costs import efficiency, ledger, other_computations, passes, side_by_side
from poem.report.figures import figures
from poem.report.html import html
from poem.report.markdown import escaped, markdown
from poem.report.plots import looks
from poem.report.protocol import cards
from poem.report.sections import Page, page
from poem.report.tables import comparable, numbers
from poem.report.words import NOTHING, TIMES, signed

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
TOP1 = metric("top1")


@pytest.fixture(scope="module")
def whole() -> Page:
    """One suite of every kind."""
    suites, reports = everything()
    return page(suites, reports, {})


@pytest.fixture(scope="module")
def written(whole: Page) -> str:
    """The same as HTML."""
    return html(whole)


def shown(made: Suite, reports: list[CellResult], failures: dict[str, Failure] | None = None) -> str:
    """A suite's Markdown."""
    return markdown(page([made], reports, failures or {}))


# --- numbers


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
    assert "±" not in shown(made, reports).split("## Contents")[1]


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


# --- tables


def bold(made: Suite, reports: list[CellResult], key: str = "top1") -> list[tuple[str, str]]:
    """Row and column of every bold number."""
    found = numbers(Grid(made, reports))
    return [
        (row.name, column)
        for block in found.blocks
        for row in block.rows
        for column, entry in zip(found.columns, row.entries[key], strict=True)
        if entry.best
    ]


def test_the_best_of_a_column_is_bold_and_ties_share_it() -> None:
    made, reports = table(
        {
            "Tent": {"Fog": [40.0], "Snow": [50.04], "Frost": [7.0]},
            "SAR": {"Fog": [41.0], "Snow": [49.96], "Frost": [7.0]},
            "EATA": {"Fog": [40.0], "Snow": [30.0], "Frost": [7.0]},
        },
        average=False,
    )
    assert "Frost" not in {column for _, column in bold(made, reports)}, "where all are equal none is the best"
    assert bold(made, reports) == [("Tent", "Snow"), ("SAR", "Fog"), ("SAR", "Snow")]
    assert "**41.0**" in shown(made, reports)
    words = "bold: the best of a block&#39;s column, where not all are equal"
    assert words in html(page([made], reports, {}))
    assert words.replace("&#39;", "'") in shown(made, reports)


def test_the_lowest_calibration_error_is_bold() -> None:
    made, reports = table({"Tent": {"Fog": [40.0]}, "SAR": {"Fog": [60.0]}}, average=False)
    reports = [replace(each, metrics={"top1": each.metrics["top1"], "ece": each.metrics["top1"]}) for each in reports]
    assert bold(made, reports, "ece") == [("Tent", "Fog")]
    assert [each.key for each in numbers(Grid(made, reports)).metrics] == ["top1", "ece"], "others have no number"


def test_a_block_says_which_network_it_is_of() -> None:
    made, reports = table({"Tent": {"Fog": [40.0]}}, group="ResNet-50-BN")
    text = shown(made, reports)
    assert "| digits-bn (in place of the paper's ResNet-50-BN) |" in text
    assert "Measured on digits-test with digits-bn, 500 images of each shift" in text
    head = "<span>digits-bn <small>in place of the paper&#39;s ResNet-50-BN</small></span>"
    assert head in html(page([made], reports, {}))
    assert {panel.title for figure in figures(Grid(*curves())) for panel in figure.panels} == {
        "digits-bn (for ResNet-50-BN)"
    }
    full, reports = table({"Tent": {"Fog": [40.0]}}, group="ResNet-50-BN", scale="full")
    assert "| digits-bn (the paper's ResNet-50-BN) |" in shown(full, reports)
    other, reports = table({"Tent": {"Fog": [40.0]}}, group="batch norm")
    assert "| digits-bn (batch norm) |" in shown(other, reports)


def test_columns_called_after_the_papers_networks_say_what_they_are_of() -> None:
    made, reports = table({"Tent": {"ResNet-50-BN": [40.0]}}, group="")
    assert "Measured on digits-test with digits-bn (for ResNet-50-BN), 500 images" in shown(made, reports)


def test_the_page_says_what_a_window_is_and_what_is_counted() -> None:
    made, reports = table({"Tent": {"Fog": [40.0]}, "SAR": {"Fog": [41.0]}})
    whole = page([made], reports, {})
    for text in (markdown(whole), html(whole)):
        assert "A window is 1,000 images that arrived one after the other." in text
        assert "asks for, as the paper counts; computed: what went through the network" in text


def test_a_shortened_suite_says_so() -> None:
    from poem.bench.suites import load

    made = load("table1", "tiny", limit=128, methods=["tent"])
    text = shown(made, [report(each) for each in made.cells])
    assert "Shortened by --limit 128: not comparable with runs of another length." in text
    assert "Changed by flags, methods tent: not comparable with the suite as its file states it." in text
    assert "source\\_images 128" not in text


def test_source_access_stands_beside_every_row() -> None:
    made, reports = table({"Tent": {"Fog": [40.0]}, "EATA": {"Fog": [41.0]}})
    card = {**reports[1].card, "source_access": "2000 clean images, to measure importance"}
    text = shown(made, [reports[0], replace(reports[1], card=card)])
    assert "| 40.0 | 40.0 | none |" in text
    assert "| **41.0** | **41.0** | 2000 clean images |" in text


def test_where_rows_are_networks_a_method_is_compared_with_its_own_variants() -> None:
    columns = {"Tent": "tent", "Tent + POEM-I": "tent+poem-i", "SAR": "sar", "SAR + POEM-I": "sar+poem-i"}
    placed, reports = [], []
    for row, tops in {"BN": (40, 42, 50, 49), "GN": (10, 12, 90, 91)}.items():
        for (column, method), top1 in zip(columns.items(), tops, strict=True):
            here = cell(method, row)
            placed.append(Placed(group="", row=row, column=column, cell=here))
            reports.append(report(here, float(top1)))
    made = suite(placed, list(columns), average=False)
    best = [("BN", "Tent + POEM-I"), ("BN", "SAR"), ("GN", "Tent + POEM-I"), ("GN", "SAR + POEM-I")]
    assert bold(made, reports) == best
    found = numbers(Grid(made, reports))
    assert found.families == (("Tent", 2), ("SAR", 2))
    assert found.heads == ("alone", "+ POEM-I", "alone", "+ POEM-I")


def test_fifteen_corruptions_stand_below_their_families() -> None:
    found = numbers(Grid(*wide(seeds=1)))
    assert found.families == (("Noise", 3), ("Blur", 4), ("Weather", 4), ("Digital", 4), ("", 1))
    assert found.columns[-1] == AVERAGE


PAPER = {"ResNet-50-BN": {"Tent": {"Fog": 41.5, AVERAGE: 41.5}}}


def test_at_full_scale_the_difference_to_the_paper_is_shown() -> None:
    made, reports = table({"Tent": {"Fog": [40.0]}, "SAR": {"Fog": [39.0]}}, scale="full", numbers=PAPER)
    text = shown(made, reports)
    assert "(41.5, \u22121.5)" in text
    assert "not comparable" not in text
    assert "| SAR | 39.0 |" in text, "the paper has no number for it"
    assert f"{NOTHING} (41.5) |" in shown(made, reports[1:]), "ours is not there, so there is no difference"


@pytest.mark.parametrize("limit", [None, 256])
def test_other_data_are_not_compared_with_the_paper(limit: int | None) -> None:
    made, reports = table({"Tent": {"Fog": [40.0]}}, scale="full" if limit else "tiny", numbers=PAPER)
    if limit:
        placed = tuple(replace(each, cell=replace(each.cell, n=limit)) for each in made.placed)
        made, reports = replace(made, placed=placed), [report(placed[0].cell, 40.0)]
    text = shown(made, reports)
    assert "(41.5†)" in text
    assert "\u22121.5" not in text
    assert "other data or settings: not comparable" in text


@pytest.mark.parametrize("what", ["altered", "partial", "weights"])
def test_other_settings_are_not_compared_with_the_paper(what: str) -> None:
    made, (one,) = table({"Tent": {"Fog": [40.0]}}, scale="full", numbers=PAPER)
    assert "(41.5, \u22121.5)" in shown(made, [one])
    if what == "altered":
        made = replace(made, altered=("severity 3",))
        said = "Changed by flags, severity 3: not comparable with the suite as its file states it."
        assert said in shown(made, [one])
    elif what == "partial":
        one = replace(one, card={**one.card, "n": one.card["n"] - 1})
    else:
        placed = tuple(replace(each, cell=replace(each.cell, weights="mine.pth")) for each in made.placed)
        made, one = replace(made, placed=placed), report(placed[0].cell, 40.0)
    text = shown(made, [one])
    assert "(41.5†)" in text
    assert "\u22121.5" not in text


def test_flags_that_change_cells_are_no_longer_compared() -> None:
    from poem.bench.suites import load

    plain = load("table1", "full", seeds=[5])
    assert comparable(Grid(plain, []))
    for name, value in (
        ("severity", 3),
        ("batch_size", 1),
        ("lr", 1.0),
        ("precision", "bf16"),
        ("dataset.partial", True),
    ):
        assert not comparable(Grid(load("table1", "full", changes={name: value}), [])), name


def test_a_difference_that_rounds_to_nothing_has_no_sign() -> None:
    assert (signed(0.04), signed(-0.04), signed(1.26), signed(-1.26)) == ("0.0", "0.0", "+1.3", "\u22121.3")


# --- what is not there


def test_missing_cells_are_dashes_and_counted() -> None:
    made, reports = table({"Tent": {"Fog": [40.0], "Snow": [50.0]}})
    text = shown(made, reports[:1])
    assert f"| Tent | 40.0 | {NOTHING} | {NOTHING} |" in text
    assert "1 of 2 cells are there" in text


def test_a_suite_without_a_cell_says_so() -> None:
    made, _ = table({"Tent": {"Fog": [40.0], "Snow": [50.0]}})
    whole = page([made], [], {})
    assert "No cell of this suite is there yet; it asks for 2." in markdown(whole)
    assert "No cell of this suite is there yet; it asks for 2." in html(whole)


@pytest.mark.parametrize("kind", ["lines", "bars", "efficiency", "transitions", "groups", "gradients", "range"])
def test_a_figure_without_results_says_so_and_draws_nothing(kind: str) -> None:
    made, _ = table({"Tent": {"1": [40.0]}}, kind=kind)
    whole = page([made], [], {})
    assert whole.sections[0].figures == ()
    assert "No cell of this suite is there yet" in html(whole)


def test_a_figure_whose_cells_met_nobody_says_so() -> None:
    made, (one,) = probes("range")
    nobody = replace(one, probes={"range": {"newly": {"n": 0}, "all": {"n": 0}, "others": {"n": 0}}})
    (section,) = page([made], [nobody], {}).sections
    assert section.figures == ()
    assert section.coverage.endswith("so there is nothing to draw.")


def test_failures_are_shown_with_their_last_line() -> None:
    made, reports = table({"Tent": {"Fog": [40.0]}, "SAR": {"Fog": [41.0]}})
    failed = Failure(cell=reports[1].cell, error="Traceback:\n  line 3\nRuntimeError: <no memory>\n")
    text = shown(made, reports[:1], {failed.cell.key: failed})
    assert "1 cell failed" in text
    assert "RuntimeError: &lt;no memory&gt;" in text
    assert "line 3" not in text
    assert "RuntimeError: &lt;no memory&gt;" in html(page([made], reports[:1], {failed.cell.key: failed}))


def test_claims_say_whether_they_hold() -> None:
    claims = (Claim("POEM has the highest average", "poem-best"),)
    made, reports = table({"Tent": {"Fog": [40.0]}, "POEM (Algorithm 1)": {"Fog": [45.0]}}, claims=claims)
    assert "POEM has the highest average: holds" in shown(made, reports)
    assert "POEM has the highest average: cannot say" in shown(made, reports[:1])
    lower = [report(each.cell, 100 - each.metrics["top1"]) for each in reports]
    assert "POEM has the highest average: **does not hold**" in shown(made, lower)


def test_what_cells_say_of_themselves_is_printed_once() -> None:
    made, reports = table({"Tent": {"Fog": [40.0, 41.0]}})
    text = shown(made, [replace(each, notes=["two passes were used"]) for each in reports])
    assert text.count("two passes were used (2 cells)") == 1


# --- the header


def test_the_header_is_honest() -> None:
    made, reports = table({"Tent": {"Fog": [40.0, 41.0]}})
    dirty = [replace(each, provenance={**each.provenance, "dirty": True}) for each in reports]
    text = shown(made, dirty)
    assert "Smoke, not evidence" in text
    assert "commit: 0123456789ab, with changes that are not committed" in text
    assert "seeds: 0, 1" in text
    assert "device: cpu" in text
    assert "images: 500 of each shift; 1,000 answered in all" in text
    other, reports = table({"Tent": {"Fog": [40.0]}}, scale="cifar10")
    assert "Smoke" not in shown(other, reports)


def test_images_of_missed_batches_were_answered_too() -> None:
    made, (one,) = table({"Tent": {"Fog": [40.0]}})
    assert "500 answered in all" in shown(made, [replace(one, ledger={**one.ledger, "images": 128})])


# --- settings and mixtures


def test_the_card_says_what_each_row_learns_with() -> None:
    rows: dict[str, tuple[str, dict[str, Any]]] = {
        "No Adapt.": ("source", {}), "Tent": ("tent", {}), "POEM (Algorithm 1)": ("poem", {"lr": 0.02}),
        "Fixed": ("poem", {"changes": {"threshold": "0.6"}}),
    }  # fmt: skip
    placed = [
        Placed(group="", row=row, column="Fog", cell=cell(method, preset="imagenet", **fields))
        for row, (method, fields) in rows.items()
    ]
    text = shown(suite(placed, ["Fog"]), [report(each.cell) for each in placed])
    assert f"| No Adapt. | {NOTHING} | {NOTHING} |" in text
    assert (
        "| Tent | its own: 0.00025 (convolutional) or 0.001 (transformer) at batch 64, less for smaller batches |"
        in text
    )
    assert f"| POEM (Algorithm 1) | 0.02 | {NOTHING} |" in text
    assert re.search(r"\| Fixed \| its own: .* \| threshold = 0.6 \|", text)
    assert "held-out" not in text


def test_rates_and_changes_are_read_back_from_the_recipe_that_ran(tmp_path: Path) -> None:
    """A page prints what was run, not what was asked for: files of before may hold two rates."""
    asked = cell("tent", lr=0.005, changes={"lr": 0.1, "select": "EntropyBelow(0.5)"})
    ran = {**written_recipe(poem.recipe("tent", "cifar")), "lr": "0.005", "select": "EntropyBelow(0.7)"}
    made = suite([Placed(group="G", row="Tent", column="Fog", cell=asked)], ["Fog"])
    kept = Store(tmp_path)
    kept.save(replace(report(cell("tent"), recipe=ran), cell=asked))
    (back,) = kept.results()
    (settings,) = [card for card in cards(Loose(made, [back])) if card.head[1] == "learning rate"]
    assert [row[1:] for row in settings.rows] == [("0.005", "select = EntropyBelow(0.7)")]


class Loose(Grid):
    """A grid that takes a report for its cell though the recipe has changed since."""

    def __init__(self, made: Suite, reports: list[CellResult]) -> None:
        super().__init__(made, [])
        self.results = {placed.cell.key: each for placed, each in zip(made.placed, reports, strict=True)}


def test_rates_from_the_held_out_corruptions_are_called_so() -> None:
    from poem.bench.suites import load

    made = load("table1", "cifar10", methods=["tent"], corruptions=["fog"], chosen={"cifar10-bn": {"tent": 0.02}})
    text = shown(made, [report(each) for each in made.cells])
    assert "Learning rates were chosen on the held-out corruptions" in text
    assert "; chosen on the held-out corruptions" in text.split("Protocol,")[2], "and above the rates themselves"
    assert "| Tent | 0.02 |" in text
    assert "held-out" not in shown(*table({"Tent": {"Fog": [40.0]}}))


def test_two_files_of_weights_in_one_block_are_told_loudly() -> None:
    made, reports = table({"Tent": {"Fog": [40.0, 41.0]}, "SAR": {"Fog": [39.0]}})
    assert page([made], reports, {}).sections[0].warnings == ()
    other = replace(reports[2], base={**reports[2].base, "sha256": "cd" * 32})
    whole = page([made], [*reports[:2], other], {})
    (warning,) = whole.sections[0].warnings
    assert "mixes 2 files of weights for digits-bn: sha256 abababababababab (2 cells), cdcdcdcdcdcdcdcd (1" in warning
    assert f"> **{escaped(warning)}**" in markdown(whole)
    assert f'<p class="warning">{warning}</p>' in html(whole)


def test_two_sources_of_frost_in_one_block_are_told_loudly() -> None:
    cells = [cell(method, "frost") for method in ("tent", "sar")]
    made = suite([Placed(group="", row=each.method, column="Frost", cell=each) for each in cells], ["Frost"])

    def frosted(*sources: str) -> list[CellResult]:
        pairs = [(report(each), source) for each, source in zip(cells, sources, strict=True)]
        return [replace(one, card={**one.card, "provenance": f"made: x; {source}"}) for one, source in pairs]

    same = frosted("frost textures: generated", "frost textures: generated")
    assert page([made], same, {}).sections[0].warnings == ()
    for first, second in (("generated", "imagecorruptions"), ("generated", "generated-2")):
        mixed = frosted(f"frost textures: {first}", f"frost {second}")
        (warning,) = page([made], mixed, {}).sections[0].warnings
        assert f"mixes 2 sources of frost on digits-test: {first} (1 cell), {second} (1 cell)" in warning


# --- efficiency


@pytest.mark.parametrize(
    ("needed", "text"),
    [
        (0, NOTHING),
        (500, "500"),
        (190, "190"),
        (686, "500 + 186"),
        (1000, f"500 {TIMES} 2"),
        (32500, f"500 {TIMES} 65"),
    ],
)
def test_passes_are_written_as_in_the_paper(needed: int, text: str) -> None:
    assert passes(needed, 500) == text


def test_the_efficiency_table_reads_the_ledger_and_the_recipe() -> None:
    rows = {row[0]: row[1:] for row in efficiency(Grid(*costs())).rows}
    no = times = TIMES
    assert rows["No Adapt."][:5] == (no, no, "500", NOTHING, "none")
    assert rows["MEMO"][:4] == (no, no, f"500 {times} 65", f"500 {times} 64"), (
        "it starts over at each image: not online"
    )
    assert rows["Tent"][:4] == (no, "✓", "500", "500")
    assert rows["EATA"][:5] == ("✓", "✓", "500", "190", "Fisher regulariser")
    assert rows["SAR"][2:4] == ("500 + 186", "311")
    assert rows["POEM (Algorithm 1)"][2:4] == (f"500 {times} 2", "416")
    assert rows["Tent"][5:] == ("0.17", "3,000")


def test_the_efficiency_table_is_of_one_run_however_many_seeds_there_are() -> None:
    made, reports = costs()
    seeds = [
        (replace(placed, cell=replace(placed.cell, seed=seed)), one)
        for placed, one in zip(made.placed, reports, strict=True)
        for seed in range(3)
    ]
    more = [report(placed.cell, ledger=one.ledger, timing=one.timing) for placed, one in seeds]
    thrice = replace(made, placed=tuple(placed for placed, _ in seeds))
    assert Grid(thrice, more).present == 3 * len(reports)
    assert efficiency(Grid(thrice, more)).rows == efficiency(Grid(made, reports)).rows


def test_memory_is_a_rows_own_only_on_a_gpu() -> None:
    made, reports = table({"Tent": {"Fog": [40.0]}, "SAR": {"Fog": [41.0]}})
    head = ledger(Grid(made, reports)).head
    assert not [name for name in head if "memory" in name], "a process's peak says nothing of one method"
    found = ledger(Grid(made, [reports[0], replace(reports[1], host={"device": "NVIDIA H200"})]))
    assert found.head[-1] == "peak memory of the GPU"
    assert [row[-1] for row in found.rows] == [NOTHING, "256 MiB"]


def test_sections_with_times_say_what_ran_beside_them() -> None:
    made, reports = costs()
    alone = [replace(each, host={**each.host, "processes": 1}) for each in reports]
    shared = [replace(each, host={**each.host, "processes": 2}) for each in reports]
    assert side_by_side(alone) == "Times are from cells run one after the other."
    assert "Times are from cells run side by side, here in up to 2 processes; run with --workers 1" in shown(
        made, shared
    )
    assert "Times are from cells run side by side; run with" in shown(made, reports), "nobody knows"
    assert "Times are from" in shown(*curves("fig6a", x="updates per batch, at most"))
    assert "Times are from" not in shown(*curves())


def test_other_computations_come_from_the_words_of_a_recipe() -> None:
    assert other_computations({"select": "Everyone()", "step": "SGD()"}) == "none"
    assert other_computations({"select": "EntropyBelow(0.5) & PLPDAbove(0.2)"}) == "PLPD pass"
    found = other_computations({"explore": "Explore(2)", "branch": "AdaptBranch()"})
    assert found == "selects again after an update, adapt branch"


# --- figures


def test_every_kind_has_its_figure(whole: Page) -> None:
    titles = {section.name: [figure.title for figure in section.figures] for section in whole.sections}
    assert titles["fig5"] == ["Accuracy"]
    assert titles["fig6a"] == ["Accuracy", "Time"]
    assert titles["fig1c"] == ["Accuracy"]
    assert titles["table1"] == ["Accuracy over the stream"]
    assert titles["table9"] == ["Speed against accuracy"]
    for name in ("transitions", "groups", "gradients", "range"):
        assert len(titles[name]) == 1, name


def test_a_curve_has_its_means_and_deviations() -> None:
    made, reports = curves()
    (figure,) = figures(Grid(made, reports))
    tent = next(each for each in figure.panels[0].series if each.name == "Tent")
    assert tent.x == (0.2, 0.4, 0.6, 0.8, 1.0)
    assert tent.spread == pytest.approx((1.0,) * 5)
    assert figure.legend == ("Tent", "EATA", "POEM (Algorithm 1)")


def test_groups_are_pooled_over_cells_by_their_size() -> None:
    made, (one,) = probes("groups")
    other = cell("poem", "snow")
    placed = (*made.placed, replace(made.placed[0], cell=other))
    share = {"low": {"n": 750, "accuracy": 75.0, "confidence": 80.0}, "newly": {"n": 0}, "high": {"n": 0}}
    (figure,) = figures(Grid(replace(made, placed=placed), [one, report(other, groups=share)]))
    assert figure.data[0].rows[0][2:5] == ("low entropy", "1,000", "80.0"), "(250 * 95 + 750 * 75) / 1000"
    assert figure.data[0].rows[1][2:5] == ("potentially reliable", "90", "80.0")


def test_areas_of_gradients_are_drawn_in_units_of_the_largest_entropy() -> None:
    made, (one,) = probes("gradients")
    ends = {"area3": (0.0, 0.8), "zone": (0.8, 1.2), "area2": (1.2, 1.6), "area1": (1.6, 2.0)}
    areas = {
        name: {"low": low, "high": high, "n": 5, "norm": 1.0, "accuracy": 50.0} for name, (low, high) in ends.items()
    }
    one.probes["gradients"]["areas"] = areas
    (figure,) = figures(Grid(made, [one]))
    low, high, name = figure.panels[0].marks[1]
    assert (low, high) == pytest.approx((0.4, 0.6))
    assert name == "zone"
    assert [row[2] for row in figure.data[0].rows] == ["area 3", "zone", "area 2", "area 1"]


def test_methods_keep_their_colour_and_variants_share_it() -> None:
    first, second = (
        looks(["Tent", "EATA", "POEM (Algorithm 1)"]),
        looks(["POEM (Algorithm 1)", "POEM (its code)", "Mine", "Tent"]),
    )
    assert first["Tent"].colour == second["Tent"].colour
    assert first["POEM (Algorithm 1)"] == second["POEM (Algorithm 1)"]
    assert second["POEM (its code)"].colour == second["POEM (Algorithm 1)"].colour
    assert second["POEM (its code)"].dash != second["POEM (Algorithm 1)"].dash
    assert len({look.colour for look in second.values()}) == 3


# --- HTML


class Reader(HTMLParser):
    """Keeps what a browser would stumble over."""

    VOID = ("meta", "link", "input", "br", "use", "path", "rect", "line")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.wanted: set[str] = set()
        self.fetched: list[str] = []
        self.heads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.ids += [values["id"]] if "id" in values else []
        self.wanted |= set(values.get("aria-labelledby", "").split())
        target = values.get("href", "")
        self.wanted |= {target[1:]} if target.startswith("#") else set()
        self.fetched += [value for name, value in values.items() if name in ("src", "href") and value[:1] not in "#"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag, f"</{tag}> closes another element"


def test_the_page_is_well_formed_and_fetches_nothing(written: str) -> None:
    reader = Reader()
    reader.feed(written)
    assert reader.open == []
    assert [name for name, times in Counter(reader.ids).items() if times > 1] == []
    assert reader.wanted - set(reader.ids) == set()
    assert reader.fetched == ["data:,"], "the empty icon"
    assert not re.search(r"https?://|@import|url\((?!#)", written)
    assert written.count("<script") == 2
    assert len(written) < 3_000_000


def test_drawings_take_the_colours_of_the_page_and_have_words(written: str) -> None:
    drawings = re.findall(r"<svg.*?</svg>", written, flags=re.DOTALL)
    assert len(drawings) >= 10
    for drawing in drawings:
        assert re.search(r"<title id=[^>]+>.*?</title><desc id=[^>]+>.+?</desc>", drawing, flags=re.DOTALL)
        assert not re.search(r"#[0-9a-f]{6}\b", drawing), "a colour of its own would not follow the theme"
        assert "var(--" in drawing


def test_numbers_of_every_metric_are_in_the_page(written: str) -> None:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', written, flags=re.DOTALL)
    assert found is not None
    data = json.loads(found[1])
    table1 = data["tables"]["table1"]
    assert list(table1) == ["top1", "top5", "ece", "nll", "aurc", "worst_window"]
    assert len(table1["top1"]) == 10, "two blocks of five rows"
    assert len(table1["top1"][0]) == 16
    text, deviation, best = table1["top1"][0][0]
    assert (text, deviation, best) == ("30.3", "0.3", 0)


def test_names_cannot_break_the_page() -> None:
    strange = "<script>alert(1)</script>|`*_"
    made, reports = table({strange: {"Fog": [40.0]}, "Tent": {"Fog": [1.0]}}, title=strange)
    whole = page([made], reports, {})
    assert "<script>alert" not in html(whole)
    assert html(page([replace(made, name="</script><b>")], reports, {})).count("</script>") == 2, "those of the page"
    text = markdown(whole)
    assert "<script>" not in text
    row = next(line for line in text.splitlines() if "40.0" in line)
    assert len(re.split(r"(?<!\\)\|", row)) - 2 == 4, "the pipe in the name opens no column"


# --- Markdown


def test_markdown_tables_parse(whole: Page) -> None:
    lines = markdown(whole).splitlines()
    tables = 0
    for at, line in enumerate(lines):
        if re.fullmatch(r"\|( -+:? \|)+", line):
            tables += 1
            widths = {len(re.split(r"(?<!\\)\|", lines[at - 1])), len(re.split(r"(?<!\\)\|", line))}
            for row in lines[at + 1 :]:
                if not row.startswith("|"):
                    break
                widths.add(len(re.split(r"(?<!\\)\|", row)))
            assert len(widths) == 1, lines[at - 1]
    assert tables > 20
    assert escaped("a|b*c") == "a\\|b\\*c"


def test_build_writes_both_pages(tmp_path: Path) -> None:
    made, reports = table({"Tent": {"Fog": [40.0]}})
    text, web = build([made], reports, tmp_path / "new")
    assert (text.name, web.name) == ("report.md", "report.html")
    assert "40.0" in text.read_text(encoding="utf-8")
    assert "40.0" in web.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="at least one suite"):
        build([], reports, tmp_path)


# --- two folders


def kept(folder: Path, *reports: CellResult) -> Path:
    """A folder with these results."""
    store = Store(folder)
    for each in reports:
        store.save(each)
    return folder


def test_the_same_results_are_equal_whenever_and_wherever_they_were_made(tmp_path: Path) -> None:
    one = report(cell())
    later = replace(one, timing={"adapt_s": 9.0}, provenance={**one.provenance, "torch": "3.0"})
    found = compare(kept(tmp_path / "a", one), kept(tmp_path / "b", later))
    assert found.equal
    assert found.identical == 1
    assert found.provenance == {"torch": (["2.9"], ["3.0"])}


def test_differences_are_sorted_by_size(tmp_path: Path) -> None:
    cells = [cell("tent", shift) for shift in ("fog", "snow", "frost")]
    a = kept(tmp_path / "a", *(report(each, 50.0) for each in cells))
    b = kept(tmp_path / "b", report(cells[0], 50.5), report(cells[1], 47.0), report(cell("sar")))
    found = compare(a, b)
    assert not found.equal
    assert [each.label for each in found.different] == [cells[1].label, cells[0].label]
    assert found.different[1].metrics["top1"] == (50.0, 50.5)
    assert "windows" in found.different[0].parts
    assert found.only_a == (cells[2].label,)
    assert found.only_b == (cell("sar").label,)
    assert "top1 50 -> 47" in str(found)


def test_cells_of_the_same_words_are_paired_and_what_sets_them_apart_is_said(tmp_path: Path) -> None:
    shifts = ("fog", "snow", "frost", "contrast", "rain")
    long, short = (
        [report(cell("tent", shift, n=n), top1) for shift in shifts] for n, top1 in ((500, 50.0), (64, 40.0))
    )
    fast, faster = report(cell("tent", "fog", n=64, lr=0.1), 30.0), report(cell("tent", "fog", n=500, lr=0.2), 20.0)
    mended = replace(report(cell("poem")), recipe={**report(cell("poem")).recipe, "readout": "Readout('first')"})
    a = kept(tmp_path / "a", *long, fast, report(cell("poem")))
    b = kept(tmp_path / "b", *short, faster, mended, report(cell("sar")))
    found = compare(a, b)
    assert not found.equal
    assert not found.only_a
    assert found.only_b == (cell("sar").label,)
    pairs = {(each.label, *each.fields): each for each in found.namesakes}
    assert len(found.namesakes) == 7
    assert pairs[cell("tent", "snow").label, "n"].fields == {"n": (500, 64)}
    assert pairs[cell("tent", "snow").label, "n"].metrics["top1"] == (50.0, 40.0)
    assert pairs[cell("tent").label, "n", "lr"].fields == {"n": (64, 500), "lr": (0.1, 0.2)}, "the nearest go together"
    assert pairs[cell("poem").label, "recipe.readout"].fields["recipe.readout"][1] == "Readout('first')"
    said = str(found)
    assert "0 cells in both: 0 identical, 0 different; 7 in both under the same words with other settings" in said
    assert "  other settings in 5 pairs: n 500 in A, 64 in B\n" in said
    assert f"    {cell('tent', 'fog').label}: top1 50 -> 40" in said
    assert "    2 more, of which --json has all" in said
    assert json.loads(json.dumps(found.to_dict()))["namesakes"][0]["fields"]


def test_results_of_other_weights_are_paired_and_older_files_are_the_same_cells(tmp_path: Path) -> None:
    one = report(cell())
    other = replace(one, base={**one.base, "sha256": "cd" * 32})
    (pair,) = compare(kept(tmp_path / "a", one), kept(tmp_path / "b", other)).namesakes
    assert pair.fields == {"weights_sha256": ("ab" * 32, "cd" * 32)}
    store = Store(tmp_path / "old")
    path = store.save(one)
    values = {**json.loads(path.read_text()), "key": one.cell_key}  # as before keys held the weights
    del values["checksum"]
    path.unlink()
    store.path(one.cell, one.cell_key).write_text(json.dumps(values))
    found = compare(store.folder, tmp_path / "a")
    assert (found.equal, found.identical) == (True, 1)


def test_compare_answers_with_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = kept(tmp_path / "a", report(cell(), 50.0))
    b = kept(tmp_path / "b", report(cell(), 51.0))
    assert main(["compare", str(a), str(a)]) == 0
    capsys.readouterr()
    assert main(["compare", str(a), str(b), "--json"]) == 1
    values = json.loads(capsys.readouterr().out)
    assert values["equal"] is False
    assert values["different"][0]["metrics"]["top1"] == [50.0, 51.0]
    (tmp_path / "empty" / "cells").mkdir(parents=True)
    for other in ("none", "empty"):
        assert main(["compare", str(a), str(tmp_path / other)]) == 2
        assert f"expected a folder of results, got {tmp_path / other}" in capsys.readouterr().err


# --- the command


def test_report_finds_the_suites_by_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from poem.bench.suites import load

    fig = load("fig6b", "tiny", limit=64)
    folder = kept(tmp_path, *(report(each, 60.0 + at / 10) for at, each in enumerate(fig.cells[:8])))
    (folder / "cells" / "stray.json").write_text("{", encoding="utf-8")
    assert [each.name for each in about(fig.cells[:1], names=["fig6b"])] == ["fig6b"]
    assert main(["report", str(folder), "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "report.html" in out
    assert "stray.json is not a result" in out
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "Figure 6b" in text
    assert "8 of 44 cells are there" in text
    assert "Figure 1a" not in text


def test_report_shows_whole_suites_and_not_parts_of_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from poem.bench.suites import load

    made = load("table11", "tiny", limit=128)
    folder = kept(tmp_path, *(report(each) for each in made.cells))
    assert len(about(made.cells[:1])) >= 1, "a part of one, where none is whole"
    assert main(["report", str(folder)]) == 0
    titles = re.findall(r"^## (.*)$", (folder / "report.md").read_text(encoding="utf-8"), re.M)
    assert titles == ["Contents", made.title]
    assert "left out" not in capsys.readouterr().out
    kept(folder, report(load("fig6b", "tiny", limit=128).cells[0]))
    assert main(["report", str(folder)]) == 0
    assert f"left out: 1 of {len(made.cells) + 1} cells, of other suites or settings" in capsys.readouterr().out
    assert main(["report", str(folder), "--limit", "64"]) == 2
    assert f"Images of each shift here: 128 ({len(made.cells) + 1} cells)" in capsys.readouterr().err


def test_report_shows_a_folder_as_it_was_asked_for(tmp_path: Path) -> None:
    from poem.bench.suites import load

    store = Store(tmp_path)

    def shown_suites() -> list[tuple[str, str, tuple[str, ...]]]:
        there = [each.cell for each in store.results()]
        return [(each.name, each.scale, each.altered) for each in about(there, requests=store.requests())]

    def measured(name: str, scale: str, **settings: Any) -> None:
        store.save_request([name], scale, {"seeds": None, "changes": {}, **settings})
        for each in load(name, scale, **settings).cells:
            store.save(report(each))

    measured("table3", "tiny", methods=["tent"], limit=64)
    assert shown_suites() == [("table3", "tiny", ("methods tent", "limit 64"))]
    measured("table1", "cifar10", methods=["tent"], corruptions=["fog"])
    assert [each[:2] for each in shown_suites()] == [("table1", "cifar10"), ("table3", "tiny")], "in order of print"
    measured("table3", "tiny", methods=["sar"], limit=64)
    assert shown_suites()[1][2] == ("methods sar", "limit 64"), "of two that are as full, the latest"
    measured("table3", "tiny")
    assert shown_suites()[1][2] == (), "most cells are of the suite as it is"
    store.save_request(["table2"], "tiny", {})
    assert len(shown_suites()) == 2, "nothing of it is there"
    there = [each.cell for each in store.results()]
    (cut,) = about(there, scale="tiny", asked={"limit": 64, "methods": ["sar"]}, requests=store.requests())
    assert cut.altered == ("methods sar", "limit 64"), "flags come first"


def test_report_passes_over_suites_that_flags_leave_nothing_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from poem.bench.suites import load

    fig = load("fig6b", "tiny", corruptions=["snow"])
    folder = kept(tmp_path, *(report(each) for each in fig.cells))
    assert main(["report", str(folder), "--corruptions", "snow", "--methods", "poem"]) == 0, "table 9 has no snow"
    assert "Figure 6b" in (folder / "report.md").read_text(encoding="utf-8")
    capsys.readouterr()
    assert main(["report", str(folder), "--corruptions", "snow", "--suites", "table9"]) == 2
    assert "suite table9: no cell is left" in capsys.readouterr().err


def test_report_reads_chosen_rates_as_poem_choose_writes_them(tmp_path: Path) -> None:
    from poem.bench.analysis.choose_lr import save
    from poem.bench.suites import load

    chosen = {"digits-bn": {"tent": 0.02}}
    save(chosen, tmp_path / "chosen.yaml")
    made = load("table1", "tiny", chosen=chosen)
    mine = [each for each in made.cells if each.lr == 0.02]
    assert mine
    folder = kept(tmp_path / "out", *(report(each) for each in mine))
    words = ["report", str(folder), "--suites", "table1", "--chosen", str(tmp_path / "chosen.yaml")]
    assert main(words) == 0
    assert f"{len(mine)} of" in (folder / "report.md").read_text(encoding="utf-8")


def test_report_of_something_else_says_what_to_type(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 2
    assert "poem reproduce table1" in capsys.readouterr().err
    kept(tmp_path, report(cell("tent", "fog", seed=77)))
    assert main(["report", str(tmp_path), "--suites", "table1"]) == 2
    assert "--seeds" in capsys.readouterr().err


def test_cells_that_one_folder_has_alone_are_named_up_to_ten(tmp_path: Path) -> None:
    cells = [cell("tent", "fog", seed) for seed in range(13)]
    a = kept(tmp_path / "a", *(report(each) for each in cells))
    b = kept(tmp_path / "b", report(cell("sar")))
    found = compare(a, b)
    said = str(found).splitlines()
    assert sum(line.startswith("  only in A: ") for line in said) == 11
    assert "  only in A: 3 more, of which --json has all" in said
    assert sum(line.startswith("  only in B: ") for line in said) == 1
    assert len(found.to_dict()["only_a"]) == 13


def test_only_pages_with_the_papers_numbers_have_a_box_for_them(written: str) -> None:
    assert 'id="paper"' in written
    made, reports = table({"Tent": {"Fog": [40.0]}})
    assert 'id="paper"' not in html(page([replace(made, numbers={})], reports, {}))
    assert 'class="said"' not in written, "the demo alone says what its numbers show"
