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
from fixture_reports import cell, curves, everything, probes, report, shown, suite, table, wide

import poem
from poem.bench.analysis.aggregate import AVERAGE, Grid, metric
from poem.bench.result import CellResult
from poem.bench.store import Failure, Store
from poem.bench.suites import Claim, Placed, Suite
from poem.recipes.text import written as written_recipe
from poem.report import build
from poem.report.figures import MIN_RANGE, figures
from poem.report.findings import BEST, LOSS, PLAIN, SOURCE
from poem.report.formatting import MISSING, signed
from poem.report.html import render_html
from poem.report.markdown import escape, render_markdown
from poem.report.pictures import Example, Picture
from poem.report.plots import series_styles, widened
from poem.report.protocol import cards
from poem.report.sections import Page, build_page
from poem.report.tables import comparable_with_paper, result_table

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")
TOP1 = metric("top1")


@pytest.fixture(scope="module")
def whole() -> Page:
    """One suite of every kind."""
    suites, reports = everything()
    return build_page(suites, reports, {})


@pytest.fixture(scope="module")
def written(whole: Page) -> str:
    """The same as HTML."""
    return render_html(whole)


# --- tables


def bold(made: Suite, reports: list[CellResult], key: str = "top1") -> list[tuple[str, str]]:
    """Row and column of every bold number."""
    found = result_table(Grid(made, reports))
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
    assert words in render_html(build_page([made], reports, {}))
    assert words.replace("&#39;", "'") in shown(made, reports)


def test_the_lowest_calibration_error_is_bold() -> None:
    made, reports = table({"Tent": {"Fog": [40.0]}, "SAR": {"Fog": [60.0]}}, average=False)
    reports = [replace(each, metrics={"top1": each.metrics["top1"], "ece": each.metrics["top1"]}) for each in reports]
    assert bold(made, reports, "ece") == [("Tent", "Fog")]
    assert [each.key for each in result_table(Grid(made, reports)).metrics] == ["top1", "ece"], "others have no number"


def test_a_block_says_which_network_it_is_of() -> None:
    made, reports = table({"Tent": {"Fog": [40.0]}}, group="ResNet-50-BN")
    text = shown(made, reports)
    assert "| digits-bn (in place of the paper's ResNet-50-BN) |" in text
    assert "Measured on digits-test with digits-bn, 500 images of each shift" in text
    head = "<span>digits-bn <small>in place of the paper&#39;s ResNet-50-BN</small></span>"
    assert head in render_html(build_page([made], reports, {}))
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
    whole = build_page([made], reports, {})
    for text in (render_markdown(whole), render_html(whole)):
        assert "A window is 1,000 consecutive images of the stream." in text
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
    found = result_table(Grid(made, reports))
    assert found.families == (("Tent", 2), ("SAR", 2))
    assert found.column_headers == ("alone", "+ POEM-I", "alone", "+ POEM-I")


def test_fifteen_corruptions_stand_below_their_families() -> None:
    found = result_table(Grid(*wide(seeds=1)))
    assert found.families == (("Noise", 3), ("Blur", 4), ("Weather", 4), ("Digital", 4), ("", 1))
    assert found.columns[-1] == AVERAGE


PAPER = {"ResNet-50-BN": {"Tent": {"Fog": 41.5, AVERAGE: 41.5}}}


def test_at_full_scale_the_difference_to_the_paper_is_shown() -> None:
    made, reports = table({"Tent": {"Fog": [40.0]}, "SAR": {"Fog": [39.0]}}, scale="full", numbers=PAPER)
    text = shown(made, reports)
    assert "(41.5, \u22121.5)" in text
    assert "not comparable" not in text
    assert "| SAR | 39.0 |" in text, "the paper has no number for it"
    assert f"{MISSING} (41.5) |" in shown(made, reports[1:]), "ours is not there, so there is no difference"


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
    assert comparable_with_paper(Grid(plain, []))
    for name, value in (
        ("severity", 3),
        ("batch_size", 1),
        ("lr", 1.0),
        ("precision", "bf16"),
        ("dataset.partial", True),
    ):
        assert not comparable_with_paper(Grid(load("table1", "full", changes={name: value}), [])), name


def test_a_difference_that_rounds_to_nothing_has_no_sign() -> None:
    assert (signed(0.04), signed(-0.04), signed(1.26), signed(-1.26)) == ("0.0", "0.0", "+1.3", "\u22121.3")


# --- what is not there


def test_missing_cells_are_dashes_and_counted() -> None:
    made, reports = table({"Tent": {"Fog": [40.0], "Snow": [50.0]}})
    text = shown(made, reports[:1])
    assert f"| Tent | 40.0 | {MISSING} | {MISSING} |" in text
    assert "1 of 2 cells are there" in text


def test_a_suite_without_a_cell_says_so() -> None:
    made, _ = table({"Tent": {"Fog": [40.0], "Snow": [50.0]}})
    whole = build_page([made], [], {})
    assert "No cell of this suite is there yet; it asks for 2." in render_markdown(whole)
    assert "No cell of this suite is there yet; it asks for 2." in render_html(whole)


@pytest.mark.parametrize("kind", ["lines", "bars", "efficiency", "transitions", "groups", "gradients", "range"])
def test_a_figure_without_results_says_so_and_draws_nothing(kind: str) -> None:
    made, _ = table({"Tent": {"1": [40.0]}}, kind=kind)
    whole = build_page([made], [], {})
    assert whole.sections[0].figures == ()
    assert "No cell of this suite is there yet" in render_html(whole)


def test_a_figure_whose_cells_met_nobody_says_so() -> None:
    made, (one,) = probes("range")
    nobody = replace(one, probes={"range": {"newly": {"n": 0}, "all": {"n": 0}, "others": {"n": 0}}})
    (section,) = build_page([made], [nobody], {}).sections
    assert section.figures == ()
    assert section.coverage.endswith("so there is nothing to draw.")


def test_failures_are_shown_with_their_last_line() -> None:
    made, reports = table({"Tent": {"Fog": [40.0]}, "SAR": {"Fog": [41.0]}})
    failed = Failure(cell=reports[1].cell, error="Traceback:\n  line 3\nRuntimeError: <no memory>\n")
    text = shown(made, reports[:1], {failed.cell.key: failed})
    assert "1 cell failed" in text
    assert "RuntimeError: &lt;no memory&gt;" in text
    assert "line 3" not in text
    assert "RuntimeError: &lt;no memory&gt;" in render_html(build_page([made], reports[:1], {failed.cell.key: failed}))


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
    assert f"| No Adapt. | {MISSING} | {MISSING} |" in text
    assert (
        "| Tent | its own: 0.00025 (convolutional) or 0.001 (transformer) at batch 64, less for smaller batches |"
        in text
    )
    assert f"| POEM (Algorithm 1) | 0.02 | {MISSING} |" in text
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
    (settings,) = [card for card in cards(Loose(made, [back])) if card.header[1] == "learning rate"]
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
    assert build_page([made], reports, {}).sections[0].warnings == ()
    other = replace(reports[2], base={**reports[2].base, "sha256": "cd" * 32})
    whole = build_page([made], [*reports[:2], other], {})
    (warning,) = whole.sections[0].warnings
    assert "mixes 2 files of weights for digits-bn: sha256 abababababababab (2 cells), cdcdcdcdcdcdcdcd (1" in warning
    assert f"> **{escape(warning)}**" in render_markdown(whole)
    assert f'<p class="warning">{warning}</p>' in render_html(whole)


def test_two_sources_of_frost_in_one_block_are_told_loudly() -> None:
    cells = [cell(method, "frost") for method in ("tent", "sar")]
    made = suite([Placed(group="", row=each.method, column="Frost", cell=each) for each in cells], ["Frost"])

    def frosted(*sources: str) -> list[CellResult]:
        pairs = [(report(each), source) for each, source in zip(cells, sources, strict=True)]
        return [replace(one, card={**one.card, "provenance": f"made: x; {source}"}) for one, source in pairs]

    same = frosted("frost textures: generated", "frost textures: generated")
    assert build_page([made], same, {}).sections[0].warnings == ()
    for first, second in (("generated", "imagecorruptions"), ("generated", "generated-2")):
        mixed = frosted(f"frost textures: {first}", f"frost {second}")
        (warning,) = build_page([made], mixed, {}).sections[0].warnings
        assert f"mixes 2 sources of frost on digits-test: {first} (1 cell), {second} (1 cell)" in warning


# --- the first screen


ROWS = {
    "No Adapt.": {"Fog": [50.0], "Snow": [60.0]},
    "Tent": {"Fog": [70.0], "Snow": [80.0]},
    "EATA": {"Fog": [69.5], "Snow": [80.0]},
    "SAR": {"Fog": [40.0], "Snow": [60.0]},
}


def test_a_table_says_who_won_who_is_as_good_and_who_loses() -> None:
    (section,) = build_page([table(ROWS, group="G")[0]], table(ROWS, group="G")[1], {}).sections
    (sentence,) = section.findings
    assert sentence == (
        "digits-bn (G): Tent is best, 75.0 %, +20.0 points over No Adapt.; EATA is within one standard error of it; "
        "SAR loses, \u22125.0."
    )
    assert section.bars is not None
    (panel,) = section.bars.panels
    assert (panel.level, [each.y[0] for each in panel.series]) == (55.0, [55.0, 75.0, 74.75, 50.0])
    colours = [section.bars.styles[each.name] for each in panel.series]
    assert colours == [SOURCE, BEST, BEST, LOSS]


def test_where_all_are_within_chance_no_bar_is_marked() -> None:
    made, reports = table({"No Adapt.": {"Fog": [50.0]}, "Tent": {"Fog": [50.6]}, "SAR": {"Fog": [49.8]}}, group="G")
    (section,) = build_page([made], reports, {}).sections
    assert section.findings == (
        "digits-bn (G): none stands out: Tent has most, 50.6 %, +0.6 points over No Adapt., and all others are within "
        "one standard error of it.",
    )
    assert section.bars is not None
    assert list(section.bars.styles.values()) == [SOURCE, PLAIN, PLAIN]
    assert section.bars.note == "Dashed: the model as it is."
    worse, reports = table({"No Adapt.": {"Fog": [50.0]}, "Tent": {"Fog": [20.0]}}, group="")
    (section,) = build_page([worse], reports, {}).sections
    assert section.findings == ("no method is above No Adapt., which has 50.0 %.",)


def test_the_page_begins_with_pictures_sentences_and_bars_and_ends_with_provenance() -> None:
    made, reports = table(ROWS, group="G")
    example = Example(clean="data:image/png;base64,AA", corrupted="data:image/png;base64,BB", truth="<4", before="8",
                      after="<4")  # fmt: skip
    shown = Picture(base="digits-bn", shift="fog, severity 4", method="tent", images=384, before=10.0, after=60.0,
                    examples=(example,))  # fmt: skip
    page = build_page([made], reports, {}, shown)
    text = render_html(page)
    order = ["<h1>", 'class="picture"', "before: 8 ✗", 'class="said"', "<svg", "<table", "Protocol card", "Provenance"]
    places = [text.index(words) for words in order]
    assert places == sorted(places)
    assert text.index("<dl ") > text.index("</main>")
    assert "of 384 images the model as it is gets 10.0 % right, with tent 60.0 %" in text
    assert "after: &lt;4 ✓" in text
    plain = render_markdown(page)
    assert (
        plain.index("Tent is best") < plain.index("| Tent |") < plain.index("## Provenance") < plain.index("- commit")
    )
    assert 'class="picture"' not in render_html(build_page([made], reports, {}))


def test_one_seed_is_called_so() -> None:
    assert "one seed, so no ±" in shown(*table({"Tent": {"Fog": [40.0]}}))
    assert "so no ±" not in shown(*table({"Tent": {"Fog": [40.0, 41.0]}}))


def test_an_axis_of_accuracy_is_never_narrower_than_twenty_points() -> None:
    made, reports = curves()
    panels = [panel for figure in figures(Grid(made, reports)) for panel in figure.panels]
    panels += [panel for figure in figures(Grid(*wide(seeds=1))) for panel in figure.panels]
    assert {panel.min_range for panel in panels} == {MIN_RANGE}
    assert widened(49.0, 51.0, 20.0) == (40.0, 60.0)
    assert widened(97.0, 99.0, 20.0) == (80.0, 100.0)
    assert widened(1.0, 3.0, 20.0) == (0.0, 20.0)


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
    low, high, name = figure.panels[0].spans[1]
    assert (low, high) == pytest.approx((0.4, 0.6))
    assert name == "zone"
    assert [row[2] for row in figure.data[0].rows] == ["area 3", "zone", "area 2", "area 1"]


def test_methods_keep_their_colour_and_variants_share_it() -> None:
    first, second = (
        series_styles(["Tent", "EATA", "POEM (Algorithm 1)"]),
        series_styles(["POEM (Algorithm 1)", "POEM (its code)", "Mine", "Tent"]),
    )
    assert first["Tent"].colour == second["Tent"].colour
    assert first["POEM (Algorithm 1)"] == second["POEM (Algorithm 1)"]
    assert second["POEM (its code)"].colour == second["POEM (Algorithm 1)"].colour
    assert second["POEM (its code)"].dash != second["POEM (Algorithm 1)"].dash
    assert len({style.colour for style in second.values()}) == 3


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
    whole = build_page([made], reports, {})
    assert "<script>alert" not in render_html(whole)
    assert render_html(build_page([replace(made, name="</script><b>")], reports, {})).count("</script>") == 2, (
        "those of the page"
    )
    text = render_markdown(whole)
    assert "<script>" not in text
    row = next(line for line in text.splitlines() if "40.0" in line)
    assert len(re.split(r"(?<!\\)\|", row)) - 2 == 4, "the pipe in the name opens no column"


# --- Markdown


def test_markdown_tables_parse(whole: Page) -> None:
    lines = render_markdown(whole).splitlines()
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
    assert escape("a|b*c") == "a\\|b\\*c"


def test_build_writes_both_pages(tmp_path: Path) -> None:
    made, reports = table({"Tent": {"Fog": [40.0]}})
    text, web = build([made], reports, tmp_path / "new")
    assert (text.name, web.name) == ("report.md", "report.html")
    assert "40.0" in text.read_text(encoding="utf-8")
    assert "40.0" in web.read_text(encoding="utf-8")
    with pytest.raises(ValueError, match="at least one suite"):
        build([], reports, tmp_path)


def test_only_pages_with_the_papers_numbers_have_a_box_for_them(written: str) -> None:
    assert 'id="paper"' in written
    made, reports = table({"Tent": {"Fog": [40.0]}})
    assert 'id="paper"' not in render_html(build_page([replace(made, numbers={})], reports, {}))
