"""The paper's claims, checked on numbers made up to hold or not; and learning rates chosen on held-out data."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from poem.bench import suites
from poem.bench.analysis import accuracy_claims, claims
from poem.bench.analysis import choose_lr as choice
from poem.bench.analysis.aggregate import Grid, metric
from poem.bench.analysis.claims import Evidence, Pair, check
from poem.bench.cell import Cell
from poem.bench.result import CellResult
from poem.recipes.methods import methods
from poem.recipes.text import written
from poem.streams.shift import EXTRA


def report(cell: Cell, top1: float = 50.0, **fields: Any) -> CellResult:
    """What a cell might have given."""
    given: dict[str, Any] = {
        "recipe": written(cell.recipe()), "base": {}, "card": {}, "domains": {}, "windows": [], "groups": {},
        "ledger": {}, **fields,
    }  # fmt: skip
    return CellResult(cell=cell, metrics={"top1": top1}, **given)


CELL = Cell(base="digits-bn", data="digits-test", method="poem")


def seen(table: dict[tuple[str, str], float], group: str = "", **fields: Any) -> Evidence:
    """Evidence with these accuracies by row and column."""
    numbers = {(group, *place): value for place, value in table.items()}
    return Evidence(numbers, {place: [report(CELL, value, **fields)] for place, value in numbers.items()})


def row(**values: float) -> dict[tuple[str, str], float]:
    """One column."""
    return {(name, "Accuracy"): value for name, value in values.items()}


def test_a_number_is_a_mean_over_cells_then_over_seeds() -> None:
    suite = suites.load("branch-loss", seeds=[0, 1])
    rows = {placed.cell.key: placed.row for placed in suite.placed}
    reports = [report(cell, 60.0 + cell.seed if rows[cell.key] == "Entropy" else 70.0) for cell in suite.cells]
    evidence = Evidence.of(suite, reports)
    assert evidence.at("", "Entropy", "Accuracy") == 60.5
    assert evidence.at("", "Cross-entropy", "Accuracy") == 70.0
    ((claim, verdict),) = claims.check_claims(suite, reports)
    assert claim.check == "cross-entropy-above-entropy"
    assert verdict.holds
    assert verdict.words == "Cross-entropy 70.0, Entropy 60.5"


def test_a_claim_is_undecided_while_a_planned_seed_is_missing() -> None:
    suite = suites.load("branch-loss", seeds=[0, 1])
    rows = {placed.cell.key: placed.row for placed in suite.placed}
    reports = [report(cell, 60.0 if rows[cell.key] == "Entropy" else 70.0) for cell in suite.cells]
    ((_, whole),) = claims.check_claims(suite, reports)
    assert whole.holds
    ((_, partial),) = claims.check_claims(suite, [each for each in reports if each.cell != suite.cells[1]])
    assert (partial.holds, partial.words) == (None, "not there: Cross-entropy Accuracy")
    assert (whole.state, partial.state) == ("holds", "cannot say")


def test_a_claim_is_checked_on_the_numbers_of_the_page() -> None:
    """Averages of rows too: by seed the mean over columns, then over seeds."""
    suite = suites.load("table1", seeds=[0, 1, 2])
    reports = [report(cell, 10 + len(cell.label) ** 1.7 % 60 + cell.seed / 3) for cell in suite.cells]
    evidence, grid = Evidence.of(suite, reports), Grid(suite, reports)
    for placed in suite.placed:
        shown = grid.value(placed.group, placed.row, placed.column, metric("top1"))
        assert shown is not None
        assert evidence.at(placed.group, placed.row, placed.column) == shown.mean
        average = grid.average(placed.group, placed.row, metric("top1"))
        assert average is not None
        assert evidence.mean(placed.group, placed.row) == average.mean
    assert evidence.columns == grid.columns


@pytest.mark.parametrize(
    ("name", "cut", "words"),
    [
        ("table1", {"methods": ["poem"]}, "left out by flags: BN statistics, Tent"),
        ("table1", {"corruptions": ["snow"]}, "left out by flags: Gauss., Defoc., Contr."),
        ("fig1c", {"corruptions": ["snow"]}, "left out by flags: gaussian_noise, defocus_blur, contrast"),
        ("table8", {"methods": ["tent*"]}, "left out by flags: EATA, EATA + POEM-I"),
    ],
)
def test_no_claim_holds_on_what_flags_left(name: str, cut: dict[str, list[str]], words: str) -> None:
    suite = suites.load(name, **cut)  # type: ignore[arg-type]
    reports = [report(cell, 70.0 if cell.method == "poem" else 40.0) for cell in suite.cells]
    for _, verdict in claims.check_claims(suite, reports):
        assert verdict.holds is None
        assert verdict.words.startswith(words)


def test_seeds_leave_claims_to_their_checks_and_other_settings_do_not() -> None:
    for flags in ({"seeds": [5]}, {"methods": ["*"]}):
        suite = suites.load("branch-loss", **flags)
        assert [verdict.holds for _, verdict in claims.check_claims(suite, map(report, suite.cells))] == [True]
    suite = suites.load("branch-loss", changes={"severity": 3})
    ((_, verdict),) = claims.check_claims(suite, map(report, suite.cells))
    assert verdict.holds is None
    assert "severity 3" in verdict.words


@pytest.mark.parametrize("name", suites.all_names())
def test_claims_on_missing_results_are_undecided(name: str) -> None:
    suite = suites.load(name)
    first = report(suite.cells[0])
    assert {verdict.holds for _, verdict in claims.check_claims(suite, [first])} == {None}


@pytest.mark.parametrize("name", claims.checks())
def test_every_check_is_undecided_without_numbers(name: str) -> None:
    verdict = check(name, Evidence({}, {}))
    assert verdict.holds is None
    assert verdict.words


def test_an_unknown_check_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean 'poem-best'"):
        check("poem-bst", Evidence({}, {}))


def verdict(name: str, table: dict[tuple[str, str], float], group: str = "", **fields: Any) -> bool | None:
    return check(name, seen(table, group, **fields)).holds


def test_poem_is_best_only_above_all_rivals() -> None:
    above = row(Tent=50, **{"POEM (Algorithm 1)": 51.0, "POEM (its code)": 60.0})
    assert verdict("poem-best", above), "its own other form is no rival"
    assert not verdict("poem-best", {**above, ("DeYO", "Accuracy"): 52.0})
    assert verdict("poem-best-everywhere", above)
    assert verdict("poem-best", row(Tent=51.04, **{"POEM (Algorithm 1)": 51.0})), "equal as printed"
    assert verdict("poem-above-source", row(**{"No Adapt.": 9.0, "POEM (Algorithm 1)": 10.0}))
    assert not verdict("poem-above-source", row(**{"No Adapt.": 10.0, "POEM (Algorithm 1)": 10.0}))


def test_poem_raises_every_method_or_the_claim_fails() -> None:
    table = {(name, "BN"): 50.0 for name in accuracy_claims.METHODS} | {
        (f"{name} + POEM", "BN"): 51.0 for name in accuracy_claims.METHODS
    }
    assert verdict("poem-above-base", table)
    assert not verdict("poem-above-base", {**table, ("SAR + POEM", "BN"): 50.0})
    iterated = {(f"{name}*", "BN"): 50.0 for name in accuracy_claims.METHODS}
    explored = {(f"{name} + POEM-I", "BN"): 50.2 for name in accuracy_claims.METHODS}
    assert verdict("exploring-beats-iterating", iterated | explored)
    assert not verdict("exploring-beats-iterating", iterated | {**explored, ("Tent + POEM-I", "BN"): 49.0})


def test_parts_are_compared_by_column() -> None:
    table = {
        ("BN", f"{name}{part}"): value
        for name in accuracy_claims.METHODS
        for part, value in (("", 50.0), (" + POEM-I", 52.0), (" + POEM-II", 51.0))
    }
    assert verdict("parts-above-base", table)
    assert verdict("first-part-above-second", table)
    assert not verdict("first-part-above-second", {**table, ("BN", "SAR + POEM-II"): 53.0})
    assert not verdict("parts-above-base", {**table, ("BN", "SAR + POEM-II"): 49.0})


def test_leads_are_what_the_printed_numbers_say() -> None:
    """70.6 - 70.3 is 0.29999999999999716 to a machine."""
    assert Pair("", ("a", 70.6), ("b", 70.3)).lead == 0.3
    assert not verdict("deeper-adds-little", row(**{"Layer 4": 70.3, "Layer 3+4": 70.6})), "0.3 is as much as 0.3"
    assert verdict("deeper-adds-little", row(**{"Layer 4": 70.3, "Layer 3+4": 70.5}))
    shares = {("POEM (Algorithm 1)", "0.5"): 41.04, ("POEM (Algorithm 1)", "1"): 40.96}
    assert verdict("alpha-half-best", {**shares, ("POEM (Algorithm 1)", "0"): 41.0499}), "41.0 and 41.0 on the page"


def test_branches_and_layers() -> None:
    table = row(**{"Without branch": 50.0, "Layer 4": 52.0, "Layer 3+4": 52.1})
    assert verdict("branch-above-none", table)
    assert verdict("deeper-adds-little", table)
    assert not verdict("deeper-adds-little", table | row(**{"Layer 3+4": 53.0}))
    assert not verdict("branch-above-none", table | row(**{"Without branch": 52.5}))
    assert verdict("shallow-suffices", row(**{"Only shallow layers": 31.4, "All layers": 31.0}))
    assert not verdict("shallow-suffices", row(**{"Only shallow layers": 30.4, "All layers": 31.0}))


def test_thresholds() -> None:
    curves = {("POEM (Algorithm 1)", x): 60.0 for x in ("0.4", "0.9")} | {
        ("EATA (both)", "0.4"): 58.0,
        ("EATA (both)", "0.9"): 50.0,
    }
    assert verdict("poem-steadiest", curves)
    assert verdict("eata-falls", curves)
    assert not verdict("eata-falls", {**curves, ("EATA (both)", "0.9"): 57.5})
    assert not verdict("poem-steadiest", {**curves, ("POEM (Algorithm 1)", "0.9"): 45.0})


@pytest.mark.parametrize(
    ("values", "suffices", "hurts"),
    [
        ((40, 42, 42.2, 42.1, 41.5), True, True),
        ((42, 41, 41, 41, 41), False, True),
        ((40, 41, 42, 42, 42), False, False),
    ],
)
def test_updates(values: tuple[float, ...], suffices: bool, hurts: bool) -> None:
    table = {("POEM (Algorithm 1)", str(at + 1)): value for at, value in enumerate(values)} | {("Tent", "1"): 39.0}
    found = check("one-extra-suffices", seen(table, timing={"adapt_s": 2.0}))
    assert found.holds is suffices
    assert "two updates take 1.0 times Tent's time" in found.words
    assert verdict("more-can-hurt", table) is hurts


def test_shares() -> None:
    assert verdict(
        "alpha-half-best",
        {("POEM (Algorithm 1)", "0"): 40.0, ("POEM (Algorithm 1)", "0.5"): 41.0, ("POEM (Algorithm 1)", "1"): 40.5},
    )
    assert not verdict("alpha-half-best", {("POEM (Algorithm 1)", "0.5"): 41.0, ("POEM (Algorithm 1)", "1"): 41.5})


def test_times() -> None:
    def timed(**seconds: float) -> Evidence:
        places = {("", name.replace("_", " "), "Gauss."): value for name, value in seconds.items()}
        places = {(g, {"POEM": "POEM (Algorithm 1)"}.get(r, r), c): value for (g, r, c), value in places.items()}
        return Evidence(
            dict.fromkeys(places, 50.0),
            {place: [report(CELL, timing={"adapt_s": value})] for place, value in places.items()},
        )

    assert check("poem-time-near-tent", timed(POEM=2.0, Tent=1.0)).holds
    assert not check("poem-time-near-tent", timed(POEM=4.0, Tent=1.0)).holds
    assert check("memo-slowest", timed(MEMO=100.0, Tent=1.0)).holds
    assert not check("memo-slowest", timed(MEMO=5.0, Tent=1.0)).holds


def test_samples_that_cross_the_threshold() -> None:
    def moved(down: int, up: int) -> bool | None:
        probe = {"transitions": {"threshold": 1.0, "low_low": 5, "low_high": up, "high_low": down, "high_high": 5}}
        return verdict("mostly-high-to-low", {("2 updates", "all"): 50.0}, probes=probe)

    assert moved(9, 2)
    assert not moved(2, 9)
    assert moved(0, 0) is None, "nobody crossed"


def test_groups_of_samples() -> None:
    def grouped(name: str, newly: float, high: float, low: float, n: int = 5, sure: float = 60.0) -> bool | None:
        """Answers after the last look say the opposite, so that a check of these would be seen."""
        groups = {
            "low": {"n": 50, "accuracy": low, "accuracy_last": 100 - low, "confidence": 90.0},
            "newly": {"n": n, "accuracy": newly, "accuracy_last": 100 - newly, "confidence": sure} if n else {"n": 0},
            "high": {"n": 20, "accuracy": high, "accuracy_last": 100 - high, "confidence": 40.0},
        }
        return verdict(name, {("POEM (Algorithm 1)", "all"): 50.0}, groups=groups)

    assert grouped("newly-few", 80, 40, 90)
    assert not grouped("newly-few", 80, 40, 90, n=30)
    assert grouped("newly-few", 80, 40, 90, n=0) is None
    assert grouped("newly-above-high", 80, 40, 90)
    assert not grouped("newly-above-high", 42, 40, 90)
    assert grouped("newly-near-low", 85, 40, 90)
    assert not grouped("newly-near-low", 70, 40, 90)
    assert grouped("newly-near-low", 40, 40, 10), "better is near enough"
    assert grouped("newly-surer-than-high", 80, 40, 90)
    assert not grouped("newly-surer-than-high", 80, 40, 90, sure=30.0)


def test_one_range_of_entropy() -> None:
    found = {"low": 1.0, "high": 2.0, "newly": {"n": 4, "accuracy": 75.0}, "all": {"n": 20, "accuracy": 50.0}}
    probes = {"range": {**found, "others": {"n": 16, "accuracy": 43.75}}}
    assert verdict("newly-above-range", {("POEM (Algorithm 1)", "all"): 50.0}, probes=probes)
    probes["range"]["others"] = {"n": 16, "accuracy": 80.0}
    assert not verdict("newly-above-others", {("POEM (Algorithm 1)", "all"): 50.0}, probes=probes)


def test_gradients_by_area() -> None:
    def areas(sure: float, zone: float, above: float, label: float = 80.0) -> list[bool | None]:
        found = {
            "area3": {"n": 50, "norm": sure, "accuracy": 95.0},
            "zone": {"n": 10, "norm": zone, "accuracy": label},
            "area2": {"n": 10, "norm": above, "accuracy": 40.0},
            "area1": {"n": 0},
        }
        names = ("lowest-entropy-small-gradients", "highest-entropy-poor-labels", "zone-normal-gradients")
        return [
            verdict(name, {("POEM (Algorithm 1)", "all"): 1.0}, probes={"gradients": {"areas": found}})
            for name in names
        ]

    assert areas(0.5, 2.0, 2.5) == [True, True, True]
    assert areas(3.0, 2.0, 9.0, label=30.0) == [False, False, False]


# Learning rates -------------------------------------------------------------------------------------------------------


def held_out(**scores: float) -> list[CellResult]:
    """Reports of the hold-out suite; a score by learning rate and corruption, such as `spatter_3`."""
    found = []
    for placed in suites.load("holdout", methods=["tent"]).placed:
        (shift,) = placed.cell.corruptions
        found.append(report(placed.cell, scores.get(f"{shift}_{placed.column}".replace(".", "_"), 50.0)))
    return found


def test_the_best_mean_over_the_four_is_chosen() -> None:
    chosen = choice.choose(held_out(spatter_3=60.0, saturate_10=55.0))
    assert chosen == {base: {"tent": 0.015} for base in ("digits-bn", "digits-gn", "digits-ln")}


@pytest.mark.parametrize("arrival", [1, -1, 3])
@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ({}, 0.0005),
        ({"spatter_3": 60.0, "saturate_10": 60.0}, 0.015),
        ({"spatter_0_3": 60.0, "saturate_3": 30.0, "speckle_noise_10": 60.0}, 0.0015),
        ({f"{shift}_{rate}": 50 + (at if rate == 1 else 5 - at) / 10 for at, shift in enumerate(EXTRA, 1)
          for rate in (1, 10)}, 0.005),
    ],
)  # fmt: skip
def test_ties_go_to_the_smaller_rate_in_whatever_order_results_come(
    scores: dict[str, float], expected: float, arrival: int
) -> None:
    """Files come in the order of their names, which says nothing of rates; equal means of other sums are equal."""
    found = held_out(**scores)
    mixed = [each for start in range(abs(arrival)) for each in found[start :: abs(arrival)]][
        :: 1 if arrival > 0 else -1
    ]
    assert len(mixed) == len(found)
    assert {base: rates["tent"] for base, rates in choice.choose(mixed).items()} == dict.fromkeys(
        ("digits-bn", "digits-gn", "digits-ln"), expected
    )


def test_nothing_else_may_choose() -> None:
    shown = report(suites.load("table1", methods=["tent"]).placed[-1].cell)
    with pytest.raises(ValueError, match="chosen on single speckle_noise, gaussian_blur, spatter, saturate alone"):
        choice.choose([*held_out(), shown])


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"n": 99}, "n 500 and 99"), ({"batch_size": 1}, "batch_size 64 and 1"), ({"threads": 4}, "threads 1 and 4"),
        ({"preset": "cifar100"}, "preset cifar and cifar100"), ({"version": 2}, "version 1 and 2"),
        ({"changes": {"select": "EntropyBelow(0.3)"}}, r"select Everyone\(\) and EntropyBelow\(0.3\)"),
    ],
)  # fmt: skip
def test_results_that_differ_elsewhere_do_not_choose(changed: dict[str, Any], words: str) -> None:
    *most, last = held_out()
    assert choice.choose([*most, last])
    with pytest.raises(ValueError, match=words):
        choice.choose([*most, report(replace(last.cell, **changed))])
    with pytest.raises(ValueError, match="weights None and ab"):
        choice.choose([*most, replace(last, base={"sha256": "ab"})])


def test_what_is_built_on_a_method_takes_its_rate() -> None:
    chosen = {"digits-bn": {"tent": 0.1, "poem": 0.2, "sar": 0.3, "sar+poem": 0.4}}
    found = {name: choice.rate_of(chosen, "digits-bn", name) for name in methods()}
    assert {name for name in found if found[name] == 0.1} == set(methods("tent*"))
    assert {name for name in found if found[name] == 0.2} == {"poem", "poem-official", "poem-official-v2"}
    assert {name for name in found if found[name] == 0.3} == {"sar", "sar*", "sar+poem-i", "sar+poem-ii"}
    assert {name for name in found if found[name] == 0.4} == {"sar+poem"}, "its own comes first"
    assert choice.rate_of(chosen, "digits-gn", "tent") is None


def test_an_unfinished_grid_is_refused() -> None:
    with pytest.raises(ValueError, match=r"digits-bn tent at learning rate 0\.0005 lacks speckle_noise seed 0"):
        choice.choose(held_out()[1:])
    with pytest.raises(ValueError, match="expected results of the suite holdout"):
        choice.choose([])


def test_choices_are_kept_with_their_rule(tmp_path: Path) -> None:
    path = tmp_path / "chosen.yaml"
    chosen = choice.choose(held_out(spatter_3=60.0))
    choice.save(chosen, path)
    assert path.read_text().startswith("# For every base and method")
    assert choice.read(path) == chosen
    cells = suites.load("table1", chosen=choice.read(path)).cells
    assert {cell.lr for cell in cells if cell.method == "tent"} == {0.015}
    path.write_text("- nothing")
    with pytest.raises(ValueError, match="expected base"):
        choice.read(path)
