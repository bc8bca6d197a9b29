"""The efficiency table: passes as the paper writes them, memory and times."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fixture_reports import costs, curves, report, shown, table

from poem.bench.analysis.aggregate import Grid
from poem.report.costs import efficiency, ledger, other_computations, passes, timing_note
from poem.report.formatting import MISSING, TIMES

pytest.importorskip("matplotlib")
pytest.importorskip("jinja2")


@pytest.mark.parametrize(
    ("needed", "text"),
    [
        (0, MISSING),
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
    assert rows["No Adapt."][:5] == (no, no, "500", MISSING, "none")
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
    head = ledger(Grid(made, reports)).header
    assert not [name for name in head if "memory" in name], "a process's peak says nothing of one method"
    found = ledger(Grid(made, [reports[0], replace(reports[1], host={"device": "NVIDIA H200"})]))
    assert found.header[-1] == "peak memory of the GPU"
    assert [row[-1] for row in found.rows] == [MISSING, "256 MiB"]


def test_sections_with_times_say_what_ran_beside_them() -> None:
    made, reports = costs()
    alone = [replace(each, host={**each.host, "processes": 1}) for each in reports]
    shared = [replace(each, host={**each.host, "processes": 2}) for each in reports]
    assert timing_note(alone) == "Times are from cells run one after the other."
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
