"""Suites as data: every one loads at every scale, names what exists, and finds the paper's numbers."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

import poem
from poem import zoo
from poem.bench import suites
from poem.bench.analysis import claims
from poem.bench.cell import Cell
from poem.bench.suites import expand, files, schema
from poem.engine.anatomy import anatomy
from poem.parts import AdaptBranch
from poem.streams.shift import CORRUPTIONS, EXTRA

SCALES = suites.scales()
EVERY = [(name, scale) for name in suites.names() for scale in SCALES]


def mine(folder: Path, **changed: object) -> Path:
    """A small suite of one's own."""
    fields = {
        "name": "mine",
        "version": 1,
        "title": "Mine",
        "columns": "corruptions",
        "groups": [{"label": "BN", "base": "bn"}],
        "rows": [{"label": "Tent", "method": "tent"}],
        **changed,
    }
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({name: value for name, value in fields.items() if value is not None}))
    return path


def test_all_means_twelve_tables_and_nine_figures() -> None:
    assert len(suites.all_names()) == 21
    assert set(suites.all_names()) <= set(suites.names())
    assert {"online", "long", "holdout", "demo"} == set(suites.names()) - set(suites.all_names())


@pytest.mark.parametrize(
    ("base", "data", "smoke"),
    [
        ("bn", None, True),
        ("digits-bn", "digits-test", True),
        ("cifar10-bn", None, True),
        ("bn", "cifar10", True),
        ("cifar10-bn", "cifar10", False),
        ("cifar10-bn", "digits-test", False),
    ],
)
def test_a_suite_with_its_own_network_and_data_is_no_smoke_test(
    tmp_path: Path, base: str, data: str | None, smoke: bool
) -> None:
    groups = [{"label": "BN", "base": base}]
    stated = {} if data is None else {"data": data}
    assert suites.load(mine(tmp_path, groups=groups, cell=stated), "tiny").smoke is smoke
    flags = {"base": base, **stated}
    assert suites.load(mine(tmp_path), "tiny", changes=flags).smoke is smoke, "stated by --set"
    both = [*groups, {"label": "digits", "base": "bn"}]
    assert suites.load(mine(tmp_path, groups=both), "tiny").smoke, "another group has the scale's"


@pytest.mark.parametrize(("name", "scale"), EVERY)
def test_every_suite_is_whole_at_every_scale(name: str, scale: str) -> None:
    suite = suites.load(name, scale)
    assert (suite.name, suite.scale, suite.smoke) == (name, scale, scale == "tiny")
    assert suite.title
    assert suite.readout
    assert suite.kind in get_args(schema.Kind)
    assert suite.placed
    seeds = {placed.cell.seed for placed in suite.placed}
    assert len(seeds) == (1 if scale == "tiny" else 3)
    for placed in suite.placed:
        assert placed.column in suite.columns
        assert placed.cell.base in zoo.bases()
        assert placed.cell.version == suite.version == 1
        assert set(placed.cell.corruptions) <= {*CORRUPTIONS, *EXTRA, "clean"}
    for cell in suite.cells:
        cell.recipe()
        cell.order()
    again = Counter((each.group, each.row, each.column, each.cell.key) for each in suite.placed)
    assert max(again.values()) == 1, "a cell stands twice in one place"


@pytest.mark.parametrize(("name", "scale"), EVERY)
def test_every_claim_has_a_check(name: str, scale: str) -> None:
    suite = suites.load(name, scale)
    assert {claim.check for claim in suite.claims} <= set(claims.checks())
    assert suite.claims or name not in suites.all_names()


def test_every_check_is_used() -> None:
    used = {claim.check for name in suites.names() for claim in suites.load(name).claims}
    assert used == set(claims.checks())


# The paper's numbers --------------------------------------------------------------------------------------------------

NUMBERS = {
    "table1": 20 * 16, "table2": 7 * 16, "table3": 12 * 16, "table4": 10, "table5": 20, "table6": 40, "table7": 12 * 16,
    "table8": 36, "table9": 28, "table10": 40, "table11": 20, "table12": 32,
}  # fmt: skip
"""How many numbers each table of the paper prints, averages too."""


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_of_a_table_is_found_by_group_row_and_column(name: str) -> None:
    suite = suites.load(name, "full")
    rows = dict.fromkeys((placed.group, placed.row) for placed in suite.placed)
    columns = [*suite.columns, "Avg.", "#Forward", "#Backward", "GPU Time (s)", "FPS"]
    found = [suite.paper(*row, column) for row in rows for column in columns]
    assert sum(value is not None for value in found) == NUMBERS[name]
    assert sum(len(row) for group in suite.numbers.values() for row in group.values()) == NUMBERS[name]


@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("table1", ("ResNet-50-BN", "No Adapt.", "Gauss."), 2.9),
        ("table1", ("ViTbase-LN", "POEM (Algorithm 1)", "Avg."), 66.2),
        ("table2", ("ResNet-50-BN", "POEM (Algorithm 1)", "JPEG"), 58.4),
        ("table3", ("ResNet-50-GN", "DeYO", "Zoom"), 3.6),
        ("table4", ("", "POEM (Algorithm 1)", "ViTbase-LN"), 58.3),
        ("table5", ("", "EATA", "ImageNet-sketch"), 35.1),
        ("table6", ("", "SAR + POEM-I", "Snow"), 49.8),
        ("table7", ("ViTbase-LN", "No Adapt.", "Impul."), 8.2),
        ("table8", ("", "ViTbase-LN", "SAR + POEM-II"), 55.2),
        ("table9", ("", "SAR", "#Forward"), 68_608.0),
        ("table9", ("", "MEMO", "#Backward"), 3_200_000.0),
        ("table10", ("ResNet-50", "Layer 3+4", "Contr."), 34.4),
        ("table10", ("ViTbase-LN", "Without branch", "Snow"), 61.8),
        ("table11", ("ViTbase-LN", "All layers", "Snow"), 10.7),
        ("table12", ("", "DeYO + POEM", "ViTbase-LN"), 65.5),
        ("branch-loss", ("", "Entropy", "Accuracy"), 36.3),
    ],
)
def test_the_paper_says(name: str, place: tuple[str, str, str], value: float) -> None:
    assert suites.load(name, "full").paper(*place) == value


def test_an_average_is_the_papers_only_over_the_same_columns() -> None:
    assert suites.load("table1", "full").paper("ResNet-50-BN", "Tent", "Avg.") == 41.0
    assert suites.load("table1", "tiny").paper("ResNet-50-BN", "Tent", "Avg.") is None
    assert suites.load("table6", "tiny").paper("", "Tent*", "Avg.") == 33.3


# Protocol -------------------------------------------------------------------------------------------------------------


def bases(name: str) -> dict[str, str]:
    return {placed.group: placed.cell.base for placed in suites.load(name, "full").placed}


def test_each_table_uses_its_own_base() -> None:
    assert bases("table1") == {
        "ResNet-50-BN": "resnet50-bn",
        "ResNet-50-GN": "resnetv2-50d-gn",
        "ViTbase-LN": "vit-b16-B",
    }
    assert bases("table7") == {"ResNet-50-GN": "resnet50-gn", "ViTbase-LN": "vit-b16-A"}


@pytest.mark.parametrize("scale", SCALES)
def test_label_shift_is_never_shown_without_roid_and_lame(scale: str) -> None:
    for name in suites.names():
        suite = suites.load(name, scale)
        if any(cell.scenario == "label-shift" for cell in suite.cells):
            for group in {placed.group for placed in suite.placed}:
                there = {placed.cell.method for placed in suite.placed if placed.group == group}
                assert {"source", "roid", "lame", "poem"} <= there
                assert name == "table3"


def test_label_shift_follows_the_published_streams() -> None:
    cells = suites.load("table3", "full").cells
    assert {cell.seed for cell in cells} == {2022, 2023, 2024}
    assert {dict(cell.options)["length"] for cell in cells} == {100_000}
    assert {cell.n for cell in cells} == {None}


def test_settings_are_chosen_on_held_out_corruptions_alone() -> None:
    for scale in SCALES:
        held = {shift for cell in suites.load("holdout", scale).cells for shift in cell.corruptions}
        assert held == set(EXTRA)
        shown = {
            shift
            for name in suites.names()
            if name != "holdout"
            for cell in suites.load(name, scale).cells
            for shift in cell.corruptions
        }
        assert not shown & held, "a table shows what settings were chosen on"


def test_the_grid_of_learning_rates_is_the_same_for_every_method() -> None:
    suite = suites.load("holdout", "full")
    rates: dict[tuple[str, str], set[float | None]] = {}
    for placed in suite.placed:
        rates.setdefault((placed.group, placed.row), set()).add(placed.cell.lr)
    own = {"ResNet-50-BN": 0.00025, "ResNet-50-GN": 0.00025, "ViTbase-LN": 0.001}
    for (group, row), found in rates.items():
        middle = 0.00025 if row == "ROID" else own[group]
        assert sorted(rate or 0 for rate in found) == pytest.approx([middle * f for f in (0.1, 0.3, 1.0, 3.0, 10.0)]), (
            row
        )


def test_long_holds_rdumb_and_twenty_cycles() -> None:
    for scale in SCALES:
        cells = suites.load("long", scale).cells
        assert "rdumb" in {cell.method for cell in cells}
        assert {dict(cell.options)["cycles"] for cell in cells} == {20}


def test_thresholds_move_together_and_apart() -> None:
    suite = suites.load("fig5")
    recipes = {placed.row: placed.cell.recipe() for placed in suite.placed if placed.column == "0.7"}
    assert "EntropyBelow(0.7)" in repr(recipes["EATA (both)"].select)
    assert "0.7" in repr(recipes["EATA (both)"].weigh)
    assert "EntropyBelow(0.7)" in repr(recipes["EATA (selection only)"].select)
    assert "0.4" in repr(recipes["EATA (selection only)"].weigh)
    assert "EntropyBelow(0.4)" in repr(recipes["EATA (weights only)"].select)
    assert "0.7" in repr(recipes["DeYO (weights only)"].weigh)


def test_shared_cells_are_one() -> None:
    """What several suites ask for has one key, so that it is run once."""
    for scale in SCALES:
        first = {cell.key for cell in suites.load("table1", scale).cells}
        plain = {"tent", "eata", "sar", "deyo"}
        for name in ("table8", "table12", "fig1c"):
            cells = [cell for cell in suites.load(name, scale).cells if cell.method in plain]
            assert cells
            assert {cell.key for cell in cells} <= first
        for name in ("fig1b", "fig4"):
            assert {cell.key for cell in suites.load(name, scale).cells} <= first
    usual = {placed.column for placed in suites.load("fig6b").placed if not placed.cell.changes}
    assert usual == {"0.5"}


def test_tiny_stays_small() -> None:
    cells = {cell for name in suites.all_names() for cell in suites.load(name).cells}
    assert len(cells) < 750
    assert all(cell.n is not None and cell.n >= 500 and cell.threads == 1 for cell in cells)
    assert sum(cell.method == "memo" for cell in cells) == 1


# What the caller sets -------------------------------------------------------------------------------------------------


def test_limits_reach_images_length_and_source() -> None:
    cells = suites.load("table3", "full", limit=256).cells
    assert {cell.n for cell in cells} == {256}
    assert {dict(cell.options)["length"] for cell in cells} == {256}
    assert {cell.source_images for cell in cells} == {256}
    with pytest.raises(ValueError, match="limit >= 1"):
        suites.load("table3", limit=0)
    wide = suites.load("table3", limit=1000).cells
    assert {cell.source_images for cell in wide} == {500}, "a limit makes nothing longer"
    assert {dict(cell.options)["length"] for cell in wide} == {dict(suites.load("table3").cells[0].options)["length"]}


def test_methods_are_patterns_and_source_stays() -> None:
    found = {cell.method for cell in suites.load("table1", methods=["*poem*", "tent"]).cells}
    assert found == {"source", "tent", "poem", "poem-official"}
    columns = suites.load("table8", methods=["sar*"]).columns
    assert columns == ("SAR", "SAR + POEM-I", "SAR + POEM-II")


def test_methods_are_patterns_for_the_names_of_rows_too(tmp_path: Path) -> None:
    rows = [{"label": "No Adapt.", "method": "source"}, {"label": "ours, strict", "method": "tent-filtered"},
            {"label": "ours, loose", "method": "tent"}, {"label": "Tent", "method": "tent"}]  # fmt: skip
    path = mine(tmp_path, rows=rows)
    kept = suites.load(path, methods=["ours*"])
    assert list(dict.fromkeys(each.row for each in kept.placed)) == ["No Adapt.", "ours, strict", "ours, loose"]
    assert kept.left_out == ("Tent",)
    assert kept.altered == ("methods ours*",)
    assert {each.row for each in suites.load("table10", methods=["Layer 4"]).placed} == {"No Adapt.", "Layer 4"}
    with pytest.raises(ValueError, match="no method and no row is like 'oursss'"):
        suites.load(path, methods=["oursss"])


def test_a_suite_without_cells_raises_an_error_of_its_own() -> None:
    with pytest.raises(suites.NothingLeftError, match="suite table11: no cell is left"):
        suites.load("table11", methods=["poem"])
    with pytest.raises(suites.NothingLeftError, match="suite table6"):
        suites.load("table6", corruptions=["fog"])


def test_seeds_and_corruptions_narrow() -> None:
    suite = suites.load("table1", "full", seeds=[7], corruptions=["fog", "snow"])
    assert {cell.seed for cell in suite.cells} == {7}
    assert suite.columns == ("Snow", "Fog")
    (mixed,) = {cell.corruptions for cell in suites.load("table4", "full", corruptions=["fog", "snow"]).cells}
    assert mixed == ("snow", "fog")


def test_fields_are_set_in_every_cell() -> None:
    changes = {"batch_size": "16", "lr": "1e-4", "changes.threshold": 0.6, "weights": "random"}
    cells = {cell.method: cell for cell in suites.load("table1", methods=["poem"], changes=changes).cells}
    assert (cells["poem"].batch_size, cells["poem"].lr, cells["poem"].weights) == (16, 0.0001, "random")
    assert dict(cells["poem"].changes) == {"threshold": "0.6"}
    assert (cells["source"].lr, cells["source"].changes) == (None, ()), "what learns nothing keeps its recipe"


def test_a_base_can_be_set_by_role_or_name() -> None:
    assert {cell.base for cell in suites.load("table6", changes={"base": "gn"}).cells} == {"digits-gn"}
    assert {cell.base for cell in suites.load("table6", "full", changes={"base": "effnet-lite0"}).cells} == {
        "effnet-lite0"
    }


def test_chosen_rates_override_the_file_and_flags_override_them() -> None:
    chosen = {"digits-bn": {"tent": 0.02}}
    rates = {(cell.base, cell.method): cell.lr for cell in suites.load("table1", chosen=chosen).cells}
    assert rates["digits-bn", "tent"] == 0.02
    assert rates["digits-gn", "tent"] == rates["digits-bn", "sar"] == 0.005
    cells = suites.load("table1", chosen=chosen, changes={"lr": 0.1}).cells
    assert {cell.lr for cell in cells if cell.method == "tent"} == {0.1}


def test_a_chosen_rate_stays_with_the_streams_it_was_chosen_on() -> None:
    """One shift, in batches as the hold-out's: a rate for 64 images says nothing of single ones."""
    chosen = {base: {"tent": 0.02} for base in ("digits-bn", "digits-gn", "digits-ln")}

    def rates(name: str, method: str = "tent", **flags: Any) -> set[float | None]:
        return {cell.lr for cell in suites.load(name, chosen=chosen, **flags).cells if cell.method == method}

    assert rates("table1") == rates("fig1c") == {0.02}
    assert rates("table6", "tent*") == rates("table8", "tent+poem-i") == rates("fig1c", "tent+poem") == {0.02}
    assert rates("table7") == {0.0005}, "the suite's own"
    assert rates("table3") == rates("table4") == rates("table1", changes={"batch_size": 16}) == {0.005}


RATES: list[dict[str, Any]] = [
    {"cell": {"changes": {"lr": 0.1}}},
    {"groups": [{"label": "BN", "base": "bn", "changes": {"lr": 0.1}}]},
    {"rows": [{"label": "Tent", "method": "tent", "changes": {"lr": 0.1}}]},
    {"columns": [{"label": "Fog", "corruptions": ["fog"], "changes": {"lr": 0.1}}]},
    {"columns": {"x": [0.1]}, "rows": [{"label": "Tent", "method": "tent", "changes": {"lr": "{x}"}}]},
    {"cell": {"changes": {"lr": 0.7}}, "rows": [{"label": "Tent", "method": "tent", "lr": 0.1}]},
    {"cell": {"lr": 0.7}, "rows": [{"label": "Tent", "method": "tent", "changes": {"lr": 0.1}}]},
    {"groups": [{"label": "BN", "base": "bn", "changes": {"lr": 0.7}}],
     "rows": [{"label": "Tent", "method": "tent", "lr": 0.1}]},
    {"cell": {"changes": {"lr": 0.01}}, "rows": [{"label": "Tent", "method": "tent", "factor": 10}]},
    {"cell": {"changes": {"lr": "Rule(convolutional=0.01)"}}, "rows": [{"label": "T", "method": "tent", "factor": 10}]},
]  # fmt: skip
"""Suites that all ask for the rate 0.1, in two spellings and at every level."""


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("stated", RATES)
def test_the_later_learning_rate_wins_however_it_is_spelled(stated: dict[str, Any], scale: str, tmp_path: Path) -> None:
    """`lr: 0.1` and `changes: {lr: 0.1}` are one field: scale, suite, group, row, column, in this order."""
    suite = suites.load(mine(tmp_path, **stated), scale)
    assert {cell.recipe().lr for cell in suite.cells} == {0.1}
    assert {(cell.lr, cell.changes) for cell in suite.cells} == {(0.1, ())}, "one spelling, so that keys coincide"
    flagged = suites.load(mine(tmp_path, **stated), scale, changes={"changes.lr": "0.3"})
    assert {cell.recipe().lr for cell in flagged.cells} == {0.3}
    assert not any(word.startswith("changes") for word in flagged.altered)


def test_a_rule_in_a_row_overrides_the_scales_number(tmp_path: Path) -> None:
    row = {"label": "Tent", "method": "tent", "changes": {"lr": "Rule(convolutional=0.01)"}}
    (cell,) = suites.load(mine(tmp_path, rows=[row]), corruptions=["snow"]).cells
    assert cell.lr is None
    assert repr(cell.recipe().lr) == "Rule(double_one=False, convolutional=0.01, transformer=0.001)"
    plain = suites.load(mine(tmp_path, rows=[{**row, "changes": {}, "lr": None}]), corruptions=["snow"]).cells[0]
    assert plain.recipe().lr == poem.recipe("tent", "cifar").lr, "null is the method's own"
    chosen = {"digits-bn": {"tent": 0.02}}
    (chosen_cell,) = suites.load(mine(tmp_path, rows=[row]), corruptions=["snow"], chosen=chosen).cells
    assert chosen_cell.recipe().lr == 0.02
    source = {"label": "No Adapt.", "method": "source", "changes": {"lr": "Rule()"}}
    assert suites.load(mine(tmp_path, rows=[source])).cells[0].changes == (), "what learns nothing keeps its recipe"


def test_two_rates_in_one_place_are_refused(tmp_path: Path) -> None:
    row = {"label": "Tent", "method": "tent", "lr": 0.2, "changes": {"lr": 0.1}}
    with pytest.raises(
        ValueError, match=r"expected one learning rate, got lr 0\.2 and changes lr 0\.1; state lr alone"
    ):
        suites.load(mine(tmp_path, rows=[row]))
    both = Cell(base="digits-bn", data="digits-test", method="tent", lr=0.2, changes={"lr": 0.1})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected one learning rate"):
        both.recipe()
    assert Cell.from_dict(both.to_dict()) == both, "files of before stay readable"


def test_whole_parts_are_changed_before_what_reaches_into_them() -> None:
    """`alpha` is a setting of the branch: a new branch in the same changes does not undo it."""
    changes = {"alpha": 0.25, "branch": "AdaptBranch()"}
    cell = Cell(base="digits-bn", data="digits-test", method="poem", changes=changes)  # type: ignore[arg-type]
    found = cell.recipe().branch
    assert found is not None
    assert found.alpha == 0.25
    given = {"alpha": 0.25, "branch": AdaptBranch()}
    assert poem.recipe("poem").changed(given) == poem.recipe("poem").changed(dict(reversed(given.items())))


def test_flags_come_before_the_rate() -> None:
    def rates(**flags: Any) -> set[float | None]:
        return {cell.lr for cell in suites.load("holdout", "full", methods=["tent"], changes=flags).cells} - {None}

    factors = (0.1, 0.3, 1.0, 3.0, 10.0)
    cases: list[tuple[dict[str, Any], float]] = [
        ({"base": "vit"}, 0.001), ({"base": "vit-b16-D"}, 0.001), ({"base": "gn"}, 0.00025),
        ({"base": "bn", "batch_size": 16}, 0.000125), ({"base": "bn", "preset": "cifar"}, 0.001),
    ]  # fmt: skip
    for flags, own in cases:
        assert rates(**flags) == {float(f"{own * factor:.6g}") for factor in factors}, flags
    assert rates(lr=0.5) == {0.5}


def test_the_family_of_a_base_is_its_models() -> None:
    ours = [name for name in zoo.bases() if zoo.base(name).kind == "own"]
    assert len(ours) >= 6
    for name in ours:
        model, _ = zoo.load(name, "random")
        assert expand.family_of(name) == anatomy(model).family, name


def test_a_scenario_set_by_a_flag_decides_which_corruptions_share_a_cell() -> None:
    (shifts,) = {cell.corruptions for cell in suites.load("fig1c", changes={"scenario": "mixed"}).cells}
    assert len(shifts) == 4


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"seeds": [7]}, ()),
        ({"methods": ["*"], "corruptions": list(CORRUPTIONS), "changes": {"severity": 5}}, ()),
        ({"methods": ["tent", "sar"]}, ("methods tent sar",)),
        ({"corruptions": ["fog"]}, ("corruptions fog",)),
        ({"limit": 256}, ("limit 256",)),
        ({"limit": 256, "changes": {"source_images": 99}}, ("limit 256", "source_images 99")),
        ({"changes": {"n": 256}}, ("n 256",)),
        ({"changes": {"severity": 3, "weights": "random"}}, ("severity 3", "weights random")),
        ({"changes": {"dataset.partial": True}}, ("dataset partial True",)),
        ({"changes": {"precision": "bf16", "lr": 1.0}}, ("lr 1.0", "precision bf16")),
        ({"chosen": {"resnet50-bn": {"tent": 0.1}}}, ("chosen learning rates",)),
    ],
)
def test_a_suite_knows_how_flags_altered_it(flags: dict[str, Any], words: tuple[str, ...]) -> None:
    suite = suites.load("table1", "full", **flags)
    assert suite.altered == words
    assert bool(suite.left_out) == bool({"methods", "corruptions"} & set(flags) and words)


def test_deyo_takes_its_authors_threshold_on_batch_norm() -> None:
    """And nowhere else: not at other scales, on other bases, in other scenarios."""
    for name in suites.names():
        for scale in SCALES:
            suite = suites.load(name, scale)
            found = [cell for cell in suite.cells if cell.method.startswith("deyo")]
            mild = [cell for cell in found if (cell.base, cell.scenario) == ("resnet50-bn", "single")]
            assert {"PLPDAbove(0.3" in repr(cell.recipe().select) for cell in mild} <= {True}
            assert not [cell for cell in found if cell not in mild and "0.3)" in dict(cell.changes).get("select", "")]
            assert any("PLPD above 0.3" in note for note in suite.notes) == bool(mild)
    tables = [suites.load(name, "full") for name in ("table1", "table6", "table8", "table12")]
    shown = {cell.method for suite in tables for cell in suite.cells}
    assert {"deyo", "deyo*", "deyo+poem", "deyo+poem-i", "deyo+poem-ii"} <= shown
    curve = {each.column: each.cell for each in suites.load("fig5", "full").placed if "DeYO (s" in each.row}
    assert repr(curve["0.7"].recipe().select).startswith("EntropyBelow(0.7) & PLPDAbove(0.3")


# Cells ----------------------------------------------------------------------------------------------------------------


def test_words_and_numbers_that_mean_the_same_make_one_cell() -> None:
    def key(**fields: Any) -> str:
        return Cell(**{"base": "digits-bn", "data": "digits-test", "method": "poem", **fields}).key

    assert key(lr=1) == key(lr=1.0)
    assert key(eta=1) == key(eta=1.0)
    assert key(changes={"select": "EntropyBelow( 0.50 )"}) == key(changes={"select": "EntropyBelow(0.5)"})
    assert key(changes={"alpha": 1}) == key(changes={"alpha": "1.0"})
    assert key(changes={"alpha": 1}) != key(changes={"alpha": "0.9"})
    assert key(changes={"select": "Entropy("}) != key(), "what cannot be read fails when it is run, not here"


def test_more_source_images_than_are_used_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expected source_images from 0 to 2000.*got 5000"):
        suites.load("table1", changes={"source_images": 5000})


# Files of one's own, and mistakes -------------------------------------------------------------------------------------


def test_a_file_of_ones_own_is_a_suite(tmp_path: Path) -> None:
    suite = suites.load(mine(tmp_path))
    first = suite.placed[0]
    assert (first.group, first.row, first.column) == ("BN", "Tent", "Gauss.")
    assert suite.paper("BN", "Tent", "Gauss.") is None


def test_a_version_makes_other_cells(tmp_path: Path) -> None:
    before = suites.load(mine(tmp_path)).placed[0].cell
    after = suites.load(mine(tmp_path, version=2)).placed[0].cell
    assert before.key != after.key
    assert before.key == suites.load(mine(tmp_path, title="Other words")).placed[0].cell.key


def test_fields_at_a_scale_override_the_rest(tmp_path: Path) -> None:
    path = mine(tmp_path, cell={"options": {"length": 9}, "scenario": "label-shift"}, notes=["one"],
                at={"cifar10": {"seeds": [5], "cell": {"n": 30}, "notes": ["two"]}})  # fmt: skip
    suite = suites.load(path, "cifar10")
    cell = suite.placed[0].cell
    assert (cell.seed, cell.n, dict(cell.options), suite.notes) == (5, 30, {"length": 9}, ("one", "two"))
    assert suites.load(path).placed[0].cell.n == 500


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"titel": "x"}, "a suite has no field 'titel'; did you mean 'title'"),
        ({"title": None}, "expected the field 'title'"),
        ({"version": "two"}, "expected version to be an integer of at least 1, got 'two'; write 1"),
        ({"kind": "tabel"}, "unknown kind 'tabel'; did you mean 'table'"),
        ({"rows": [{"label": "T", "metod": "tent"}]}, "row 1: a row has no field 'metod'; did you mean 'method'"),
        ({"rows": [{"method": "tent"}]}, "row 1: expected the field 'label', which is missing"),
        ({"rows": [{"label": "T", "method": "tentt"}]}, "suite mine: unknown method 'tentt'. Did you mean tent"),
        ({"rows": [{"label": "T", "method": "tent", "changes": {"alpha": 1}}]}, "suite mine: alpha=1"),
        ({"rows": [{"label": "T", "method": "tent", "changes": {"select": "EntropyBelo(1)"}}]}, "did you mean"),
        ({"groups": [{"label": "", "base": "digits-bm"}]}, "unknown base 'digits-bm'; did you mean 'digits-bn'"),
        ({"cell": {"data": "digits-tset"}}, "unknown data set 'digits-tset'; did you mean 'digits-test'"),
        ({"cell": {"scenario": "mixd"}}, "unknown scenario 'mixd'; did you mean 'mixed'"),
        ({"corruptions": ["fogg"]}, "unknown corruption 'fogg'; did you mean 'fog'"),
        ({"columns": 3}, "expected columns to be"),
        ({"columns": [{"label": "Fog", "corruption": ["fog"]}]}, "column 1: a column has no field 'corruption'"),
        ({"rows": "tent"}, "expected rows to be a list, got 'tent'"),
        ({"rows": ["tent"]}, "row 1: expected fields, got 'tent'"),
        ({"rows": None}, "expected the field 'rows'"),
        ({"rows": [{"label": 3, "method": "tent"}]}, "row 1: expected label to be text, got 3"),
        (
            {"rows": [{"label": "T", "method": "tent", "lr": "1e-3"}]},
            "got '1e-3'; write 0.001: YAML reads 1e-3 as text",
        ),
        ({"groups": [{"label": "", "rows": [{"label": "T", "metod": "tent"}]}]}, "group 1, row 1: a row has no field"),
        ({"cell": {"n": "many"}}, "cell: expected n to be an integer or None, got 'many'"),
        ({"cell": {"corruptions": "fog"}}, "cell: expected corruptions to be a list, got 'fog'"),
        ({"cell": {"changes": "lr"}}, "cell: expected changes to be names and values, got 'lr'"),
        ({"cell": {"seed": 1}}, "cell: a cell has no field 'seed'"),
        ({"seeds": ["one"]}, "expected each of seeds to be an integer, got 'one'"),
        ({"average": "yes"}, "expected average to be True or False, got 'yes'"),
        ({"at": ["tiny"]}, "expected at to be a mapping from scales to fields, got ['tiny']"),
        ({"at": {"tiny": {"rows": 3}}}, "expected rows to be a list, got 3"),
        ({"paper": "ICmian"}, "the paper has no table 'ICmian'; did you mean 'ICmain'"),
        ({"at": {"tinny": {}}}, "unknown scale 'tinny'; did you mean 'tiny'"),
        ({"at": {"tiny": {"titel": "x"}}}, "a suite has no field 'titel'"),
        ({"claims": [{"txt": "x"}]}, "a claim has no field 'txt'; did you mean 'text'"),
    ],
)
def test_a_mistake_in_a_file_is_named(tmp_path: Path, changed: dict[str, object], words: str) -> None:
    path = mine(tmp_path, **changed)
    with pytest.raises(ValueError, match="mine") as caught:
        suites.load(path)
    assert words in str(caught.value)


def test_a_mistake_in_a_call_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown suite 'tabel1'; did you mean 'table1'"):
        suites.load("tabel1")
    with pytest.raises(ValueError, match="unknown scale 'tinny'; did you mean 'tiny'"):
        suites.load("table1", "tinny")
    with pytest.raises(ValueError, match="suite table1: no method and no row is like 'poen'; did you mean 'poem'"):
        suites.load("table1", methods=["poen"])
    with pytest.raises(ValueError, match="suite table1: unknown corruption 'fogg'; did you mean 'fog'"):
        suites.load("table1", corruptions=["fogg"])
    with pytest.raises(ValueError, match="suite table1: no field 'batchsize' can be set; did you mean 'batch_size'"):
        suites.load("table1", changes={"batchsize": 3})
    with pytest.raises(FileNotFoundError, match="no suite file"):
        suites.load(tmp_path / "none.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_text("name: [")
    with pytest.raises(ValueError, match=r"broken\.yaml is not YAML"):
        suites.load(broken)
    broken.write_text("- a list")
    with pytest.raises(ValueError, match=r"expected fields in .*broken\.yaml"):
        suites.load(broken)


def test_an_installed_package_finds_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside = tmp_path / "poem" / "_suites"
    shutil.copytree(files.CHECKOUT, inside)
    (inside / "table12.yaml").unlink()
    monkeypatch.setattr(files, "PACKAGED", inside)
    monkeypatch.setattr(files, "CHECKOUT", tmp_path / "nowhere")
    assert files.folder() == inside
    assert "table12" not in suites.names()
    assert suites.load("table11").placed
    monkeypatch.setattr(files, "PACKAGED", tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no suites in"):
        suites.names()
