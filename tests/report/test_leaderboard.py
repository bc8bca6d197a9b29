"""The leaderboard: what is compared with what, paired errors by hand, and files that break the schema."""

from __future__ import annotations

import base64
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from poem.bench.sample_cells import SampleCell, bits_text, read_bits, read_sample_cell, read_suite
from poem.cli.main import main
from poem.report.leaderboard import Block, make_leaderboard, read_cells, scenario_of
from poem.report.leaderboard_page import render_leaderboard, times

AUTO = Path(__file__).resolve().parents[2] / "results" / "auto"
RUN = {"command": "python -m study.measure", "tree": "bcea7729b933", "torch": "2.11.0", "device": "NVIDIA H200"}


def values(row: str = "tent", stream: str = "fog-5", right: str = "1100", **other: Any) -> dict[str, Any]:
    """A cell as a suite's file holds it; `right` has a digit for each sample."""
    bits = np.array([each == "1" for each in right])
    found = {
        "net": "cifar10-bn", "row": row, "stream": stream, "seed": 0, "batch": 64, "n": len(bits), "hash": stream,
        "right": int(bits.sum()), "bits": bits_text(bits), "seconds": 2.0, "run": "a",
    }  # fmt: skip
    return {**found, **other}


def cell(*args: Any, **other: Any) -> SampleCell:
    facts = other.pop("facts", RUN)
    protocol = other.pop("protocol", "cifar10")
    return read_sample_cell(values(*args, **other), protocol, facts)


def suite_file(folder: Path, *cells: dict[str, Any], **other: Any) -> Path:
    path = folder / "cifar10.json"
    held = {"format": 1, "suite": "cifar10", "runs": {"a": RUN}, "cells": list(cells), **other}
    path.write_text(json.dumps(held), encoding="utf-8")
    return path


def names(block: Block) -> list[str]:
    return [row.name for row in block.rows]


def test_differences_are_paired_and_errors_are_those_of_the_formula() -> None:
    """Of eight samples, three are right in the row alone and one in source alone."""
    board = make_leaderboard([cell("source", right="00011110", seconds=1.0), cell("tent", right="11101110")])
    (block,) = board.blocks
    assert names(block) == ["tent", "source"]
    row = block.rows[0]
    assert row.accuracy == 75.0
    assert row.difference == 25.0
    assert row.error == pytest.approx(100 * math.sqrt((4 / 8 - (2 / 8) ** 2) / 8))
    assert row.accuracy_error == pytest.approx(100 * math.sqrt(0.75 * 0.25 / 8))
    assert (row.cost_source, row.cost_tent, row.n) == (2.0, 1.0, 8)
    assert block.rows[1].difference == block.rows[1].error == 0.0


def test_streams_count_alike_and_seeds_are_put_together() -> None:
    cells = [
        cell("source", "fog-5", "1100"), cell("source", "fog-5", "1000", seed=1, hash="f1"),
        cell("source", "clean", "1111"), cell("tent", "clean", "0111"),
        cell("tent", "fog-5", "1111"), cell("tent", "fog-5", "1000", seed=1, hash="f1"),
    ]  # fmt: skip
    (block,) = make_leaderboard(cells).blocks
    assert block.streams == ("clean", "fog-5")
    assert block.seeds == (0, 1)
    row = next(each for each in block.rows if each.name == "tent")
    assert {each.stream: each.accuracy for each in row.scores} == {"clean": 75.0, "fog-5": 62.5}
    assert row.accuracy == pytest.approx((75.0 + 62.5) / 2)
    assert (row.worst.stream, row.worst.difference) == ("clean", -25.0)
    means = (np.array([0, 1, 1, 1]) - np.array([1, 1, 1, 1]), np.array([0, 0, 1, 1, 0, 0, 0, 0]))
    influence = np.zeros(8)  # of an image: those of seed 0 come in both streams
    for values in means:
        influence[: len(values)] += (values - values.mean()) / len(values) / 2
    assert row.error == pytest.approx(100 * math.sqrt((influence**2).sum()))


def test_a_row_of_fewer_streams_makes_a_block_of_those_for_all() -> None:
    cells = [cell(row, stream) for row in ("source", "tent", "poem") for stream in ("clean", "fog-5", "snow-5")]
    board = make_leaderboard([*cells, cell("eata", "fog-5", "1111")])
    assert [(block.streams, len(block.rows), block.part) for block in board.blocks] == [
        (("clean", "fog-5", "snow-5"), 3, False), (("fog-5",), 4, True),
    ]  # fmt: skip
    assert names(board.blocks[1])[0] == "eata"
    assert "fewer streams or seeds" in board.blocks[1].title


@pytest.mark.parametrize(
    "change",
    [{"net": "cifar10-gn"}, {"hash": "other"}, {"protocol": "poem bench"}, {"seed": 3}, {"right": "11111111"}],
)
def test_other_networks_streams_seeds_and_protocols_are_not_compared(change: dict[str, Any]) -> None:
    board = make_leaderboard([cell("source"), cell("tent"), cell("poem", **change)])
    assert [names(block) for block in board.blocks] == [["source", "tent"]]
    assert len(board.without_source) == 1
    assert " poem (One shift at a time" in board.without_source[0]


def test_source_of_another_batch_size_serves_without_its_seconds() -> None:
    """Its answers are the same whatever the batch size; how long it takes is not."""
    board = make_leaderboard([cell("source"), cell("tent"), cell("tent", batch=16, right="1110")])
    assert [(block.batch, names(block)) for block in board.blocks] == [
        (64, ["source", "tent"]),
        (16, ["tent", "source"]),
    ]
    assert board.blocks[1].rows[0].difference == 25.0
    assert board.blocks[1].rows[0].cost_source is None
    assert board.blocks[1].scenario_title.endswith("batches of 16")


def test_costs_of_two_devices_are_not_compared() -> None:
    other = {**RUN, "device": "cpu"}
    (block,) = make_leaderboard([cell("source"), cell("tent", right="1110", facts=other)]).blocks
    assert block.rows[0].cost_source is None
    (block,) = make_leaderboard([cell("source", seconds=None), cell("tent")]).blocks
    assert block.rows[1].cost_source is None


@pytest.mark.parametrize(("name", "cost"), [("tent", 2.0), ("tent, lr 0.005", 2.0), ("tent-filtered", None)])
def test_costs_are_compared_with_the_plain_tent(name: str, cost: float | None) -> None:
    (block,) = make_leaderboard(
        [cell("source"), cell(name, seconds=1.5), cell("poem", right="1110", seconds=3.0)]
    ).blocks
    assert block.rows[0].cost_tent == cost


def test_the_same_images_in_two_streams_tell_no_more_than_in_one() -> None:
    """A row that does to every image the same in both: the error is that of one stream."""
    streams, right = ("fog-5", "snow-5"), {"source": "00011110", "tent": "11101110"}
    (block,) = make_leaderboard([cell(row, stream, bits) for row, bits in right.items() for stream in streams]).blocks
    row = block.rows[0]
    assert row.error == pytest.approx(row.scores[0].error)
    assert row.accuracy_error == pytest.approx(100 * math.sqrt(0.75 * 0.25 / 8))


def test_where_orders_are_not_known_streams_may_go_together() -> None:
    streams = ("sorted-clean", "sorted-fog-5")
    cells = [cell(row, stream, bits) for stream in streams for row, bits in (("source", "0001"), ("tent", "1110"))]
    (block,) = make_leaderboard(cells).blocks
    assert block.rows[0].error == pytest.approx(sum(each.error or 0 for each in block.rows[0].scores) / 2)


def test_with_three_seeds_the_error_is_at_least_that_over_seeds() -> None:
    """Each seed is certain of itself, and they contradict each other."""
    cells = [cell("source", right="0000", seed=seed, hash=str(seed)) for seed in range(3)]
    cells += [cell("tent", right=bits, seed=seed, hash=str(seed)) for seed, bits in enumerate(("1111", "0000", "0000"))]
    (block,) = make_leaderboard(cells).blocks
    assert block.rows[0].error == pytest.approx(np.std([100, 0, 0], ddof=1) / math.sqrt(3))
    assert not block.rows[0].sure


def test_images_that_come_again_have_an_error_over_seeds_or_none() -> None:
    right = {"source": "0000", "tent": "1110"}
    cells = [cell(row, "continual", bits) for row, bits in right.items()]
    (block,) = make_leaderboard(cells).blocks
    assert (block.rows[0].error, block.rows[0].scores[0].error, block.rows[0].sure) == (None, None, False)
    more = [cell(row, "continual", bits, seed=s, hash=f"{s}") for s in (1, 2) for row, bits in right.items()]
    more[-1] = cell("tent", "continual", "1100", seed=2, hash="2")
    (block,) = make_leaderboard([*cells, *more]).blocks
    independent = np.std([1, 1, 1, 0] * 2 + [1, 1, 0, 0]) / math.sqrt(12)
    assert block.rows[0].error == pytest.approx(100 * independent), "larger than that over seeds, 8.3"


def test_with_one_seed_three_errors_are_sure() -> None:
    """8 of 1,000 samples are 2.8 errors, 10 are 3.2."""
    zero = "0" * 1000
    for gained, sure in ((8, False), (10, True)):
        (block,) = make_leaderboard(
            [cell("source", right=zero), cell("tent", right="1" * gained + zero[gained:])]
        ).blocks
        assert block.rows[0].sure == sure


def test_a_cell_of_two_files_is_taken_once_and_must_be_the_same() -> None:
    twice = [cell(row, facts={"file": file}) for file in "xy" for row in ("source", "tent")]
    (block,) = make_leaderboard(twice).blocks
    assert (names(block), block.rows[0].n) == (["source", "tent"], 4)
    with pytest.raises(
        ValueError,
        match="expected the same samples right in cifar10-bn tent fog-5 seed 0 batch 64, got others in x and y",
    ):
        make_leaderboard([cell("tent", facts={"file": "x"}), cell("tent", right="0011", facts={"file": "y"})])


def test_two_streams_of_one_name_are_not_averaged() -> None:
    cells = [cell(row, hash=each, facts={"file": each}) for each in "ab" for row in ("source", "tent")]
    with pytest.raises(
        ValueError, match="expected one stream cifar10-bn fog-5 seed 0, got two of other samples in a and b"
    ):
        make_leaderboard(cells)


def test_no_cells_are_an_error() -> None:
    with pytest.raises(ValueError, match="expected cells, got none"):
        make_leaderboard([])


@pytest.mark.parametrize(
    ("stream", "scenario"),
    [
        ("clean", "single"), ("gaussian_noise-5", "single"), ("fog-3", "mild"), ("sorted-clean", "sorted"),
        ("sorted-contrast-5", "sorted"), ("label_shift", "label_shift"), ("label-shift of fog-5", "label_shift"),
        ("continual of 15 shifts-5", "continual"), ("recurring-short", "recurring"), ("noise", "noise"),
        ("something new", "something new"),
    ],
)  # fmt: skip
def test_the_scenario_of_a_stream(stream: str, scenario: str) -> None:
    assert scenario_of(stream) == scenario


@pytest.mark.parametrize("n", [1, 7, 8, 9, 1000])
def test_bits_round_trip(n: int) -> None:
    bits = np.random.default_rng(n).random(n) < 0.5
    assert (read_bits(bits_text(bits), n) == bits).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"net": None}, "expected net as a network's name, got 'None'"),
        ({"row": " "}, "expected row as a row's name"),
        ({"seed": -1}, "expected seed as an integer of at least 0, got '-1'"),
        ({"seed": True}, "expected seed as an integer"),
        ({"batch": 0}, "expected batch as an integer of at least 1"),
        ({"n": 4.0}, "expected n as an integer"),
        ({"right": 3}, "expected right as the number of bits that are set, 2, got 3"),
        ({"bits": "??"}, r"expected bits as base64, got '\?\?'"),
        ({"bits": base64.b64encode(b"ab").decode()}, "expected 1 bytes for 4 bits, got 2"),
        ({"bits": base64.b64encode(bytes([0b11000001])).decode()}, "expected 4 bits, got more"),
        ({"seconds": "2"}, "expected seconds as a number"),
        ({"seconds": -1}, "expected seconds as a number"),
        ({"run": "b"}, "expected run as one of a, or from and tree, got 'b'"),
    ],
)
def test_a_cell_that_breaks_the_schema_is_named(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = suite_file(tmp_path, values("source"), {**values(), **change})
    with pytest.raises(ValueError, match=rf"cifar10\.json, cell 2.*: {said}"):
        read_suite(path)


@pytest.mark.parametrize("name", ["net", "row", "stream", "seed", "batch", "n", "right", "bits", "hash"])
def test_a_missing_field_is_named(tmp_path: Path, name: str) -> None:
    held = {key: value for key, value in values().items() if key != name}
    held |= {"error": "raised"} if name == "bits" else {}
    with pytest.raises(ValueError, match=rf"cell 1.*: {name} is missing; expected"):
        read_suite(suite_file(tmp_path, held))


def test_provenance_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="its run 'a' does not state torch, device"):
        read_suite(suite_file(tmp_path, values(), runs={"a": {"command": "c", "tree": "t"}}))
    with pytest.raises(ValueError, match="expected runs by name, each with command, tree, torch, device, got 'None'"):
        read_suite(suite_file(tmp_path, values(), runs=None))
    taken = {name: value for name, value in values().items() if name != "run"}
    with pytest.raises(ValueError, match="expected run as one of none, or from and tree, got 'None'"):
        read_suite(suite_file(tmp_path, taken, runs={}))
    (found,) = read_suite(suite_file(tmp_path, {**taken, "from": "results/auto", "tree": "bcea"}, runs={}))
    assert dict(found.provenance) == {"file": "cifar10.json", "from": "results/auto", "tree": "bcea"}


def test_failed_cells_are_left_out_and_other_formats_refused(tmp_path: Path) -> None:
    path = suite_file(tmp_path, values(), {"net": "cifar10-bn", "row": "sar", "error": "CUDA out of memory"})
    assert [each.row for each in read_suite(path)] == ["tent"]
    with pytest.raises(ValueError, match=r"expected a suite of format 1 in .*, got format '2'"):
        read_suite(suite_file(tmp_path, values(), format=2))


def test_lines_are_read_as_suites_are(tmp_path: Path) -> None:
    lines = [values("source"), values("tent", right="1111")]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n", encoding="utf-8")
    (tmp_path / "summary.json").write_text("{}", encoding="utf-8")
    cells, other = read_cells([tmp_path])
    suite = read_suite(suite_file(tmp_path, *lines))
    assert [each.row for each in cells] == [each.row for each in suite]
    assert other == [], "a folder of lines is read for its lines"
    first, second = (make_leaderboard(each).blocks[0].rows for each in (cells, suite))
    assert [(row.name, row.difference, row.error) for row in first] == [(r.name, r.difference, r.error) for r in second]
    (tmp_path / "a.jsonl").write_text(json.dumps(lines[0]) + "\n{", encoding="utf-8")
    with pytest.raises(ValueError, match=r"expected a cell in line 2 of .*a\.jsonl"):
        read_cells([tmp_path])


def test_what_holds_no_cells_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jinja2")
    suite_file(tmp_path, values("source"), values())
    (tmp_path / "figures.json").write_text('{"a": 1}', encoding="utf-8")
    assert main(["report", "--leaderboard", str(tmp_path), "-o", str(tmp_path / "page.html")]) == 0
    out = capsys.readouterr().out
    assert "2 cells, 2 rows in 1 blocks" in out
    assert "figures.json holds no cells" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["{place}/nothing", "-o", "{place}/a.html"], "nothing, which does not exist"),
        (["{place}", "-o", "{place}/a.html"], "got a folder without any"),
        (["{place}", "-o", "{place}"], "expected -o as an .html file with --leaderboard"),
        (["{place}", "--collect", "x.json"], "expected --leaderboard or --collect, got both"),
    ],
)
def test_bad_input_says_what_to_type(
    tmp_path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", "--leaderboard", *(word.format(place=tmp_path) for word in words)]) == 2
    assert said in capsys.readouterr().err


def test_two_folders_are_for_the_leaderboard_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path), str(tmp_path)]) == 2
    assert "several are for --leaderboard" in capsys.readouterr().err


def test_the_page_holds_every_number_and_escapes_names() -> None:
    pytest.importorskip("jinja2")
    hostile = "<script>alert(1)</script>"
    board = make_leaderboard([cell("source"), cell(hostile, right="1111"), cell("tent", right="1000")])
    page = render_leaderboard(board)
    assert hostile not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "+50.00" in page
    assert "\u221225.00" in page
    for fact in RUN.values():
        assert fact in page
    assert "http" not in page.replace("http://www.w3.org", ""), "nothing is fetched"


@pytest.mark.parametrize(("value", "text"), [(None, "\u2013"), (2.25, "2.2"), (99.94, "99.9"), (123.4, "123")])
def test_costs_as_text(value: float | None, text: str) -> None:
    assert times(value) == text


def test_the_measured_cells_agree_with_their_summary() -> None:
    """Accuracies and paired differences of the repository's cells, from a formula of their own."""
    cells, _ = read_cells([AUTO / "cifar10-gn.jsonl"])
    board = make_leaderboard(cells)
    block = next(each for each in board.blocks if each.scenario == "single" and each.batch == 64)
    assert len(block.streams) == 16
    row = next(each for each in block.rows if each.name == "eata+poem")
    by_key = {(each.row, each.stream, each.seed): each for each in cells}
    differences, values = [], []
    for stream in block.streams:
        own, its = (
            np.concatenate([by_key[name, stream, seed].bits for seed in block.seeds])
            for name in ("eata+poem", "source")
        )
        paired = own.astype(float) - its.astype(float)
        differences.append(100 * paired.mean())
        values.append(paired)
    assert row.difference == pytest.approx(np.mean(differences))
    mean = np.mean(values, axis=0)  # of each image, whatever the corruption
    over = np.std([100 * each.mean() for each in np.split(mean, len(block.seeds))], ddof=1) / math.sqrt(3)
    assert row.error == pytest.approx(max(over, 100 * mean.std() / math.sqrt(len(mean))))
    assert row.worst.difference == pytest.approx(min(differences))
