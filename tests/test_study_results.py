"""The study's evidence: statistics by hand, answers on made-up cells; pages, figures and board equal to the cells."""

from __future__ import annotations

import base64
import json
import math
import re
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from poem.bench.sample_cells import bits_text

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
pytestmark = pytest.mark.skipif(not (BENCHMARKS / "study").is_dir(), reason="a copy without benchmarks")


def _module(name: str, package: str = "study") -> Any:
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return import_module(f"{package}.{name}")


def _text(bits: Any) -> str:
    return bits_text(np.array(bits, bool))


def _cell(row: str, bits: Any, stream: str = "fog-5", net: str = "cifar10-bn", **changes: Any) -> dict[str, Any]:
    bits = np.array(bits, bool)
    cell = {"net": net, "stream": stream, "seed": 0, "batch": 64, "row": row, "n": len(bits), "hash": "a"}
    return {**cell, "tree": "t", "right": int(bits.sum()), "bits": _text(bits), "seconds": 1.0, **changes}


def _evidence(*cells: dict[str, Any]) -> Any:
    return _module("evidence").Evidence(cells)


# The pages ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def everything() -> tuple[Any, dict[str, Any], Any]:
    found: tuple[Any, dict[str, Any], Any] = _module("evidence").load_all()
    if not len(found[0]):
        pytest.skip("no cells in results/study")
    return found


def test_pages_hold_what_the_cells_say(everything: tuple[Any, dict[str, Any], Any]) -> None:
    analyse = _module("analyse")
    texts = analyse.texts(*everything)
    for name in analyse.PAGES:
        page = (ROOT / name).read_text()
        assert analyse.PLACE.search(page), f"{name} has no place: <!-- study:NAME -->"
        assert page == analyse.filled(page, texts), f"{name} is out of date: run python -m study.analyse"


def test_every_answer_and_every_suite_has_a_place(everything: tuple[Any, dict[str, Any], Any]) -> None:
    texts = _module("analyse").texts(*everything)
    results, study = ((ROOT / "docs" / f"{name}.md").read_text() for name in ("results", "study"))
    there = set(re.findall(r"<!-- study:([\w.-]+) -->", results + study))
    shown = {name for name in texts if not name.startswith("answer-")} - {"variants-tiny-imagenet"}
    assert shown <= there
    for answer in _module("answers").answers(everything[0]):
        assert answer.question in results


def test_the_answers_file_is_that_of_the_cells(everything: tuple[Any, dict[str, Any], Any]) -> None:
    analyse = _module("analyse")
    held = json.loads((ROOT / analyse.ANSWERS).read_text())
    assert held == json.loads(json.dumps(analyse.summary(everything[0])))


def test_figures_have_the_numbers_of_the_cells_and_are_small(everything: tuple[Any, dict[str, Any], Any]) -> None:
    analyse, figures = _module("analyse"), _module("figures")
    for name, drawing in figures.drawings(everything[0]).items():
        path = ROOT / analyse.FIGURES / f"{name}.svg"
        assert path.is_file() == (drawing is not None), f"run python -m study.analyse for {name}"
        if drawing is not None:
            text = path.read_text()
            assert len(text) <= figures.MOST_BYTES
            (told,) = re.findall(r"<desc>(.*?)</desc>", text)
            assert json.loads(told) == json.loads(json.dumps(figures.numbers(drawing)))


def test_the_text_s_sentences_are_true_of_the_cells(everything: tuple[Any, dict[str, Any], Any]) -> None:
    """What docs/study.md says in words of its own."""
    study, _, earlier = everything
    parts, answers = _module("parts"), _module("answers")
    for line in answers.learning(study).lines:
        assert line.main is None or abs(line.main.points) < 1, "learning is hardly told apart from the statistics"
    for net in ("resnet50-keras", "cifar10-bn", "effnet-lite0"):
        cost = earlier.difference(net, [("bn", "source")], ["clean"])
        assert cost.state == "below", "on clean images the batch's statistics cost"
    gain = {net: earlier.difference(net, [("mean6", "bn")], parts.ALL) for net in ("resnet50-keras", "effnet-lite0")}
    assert all(each.state == "above" for each in gain.values()), "some of both is better on large networks"
    assert earlier.difference("cifar10-bn", [("mean6", "bn")], parts.ALL).state == "below", "and not on the small one"
    for net in ("effnet-lite0", "effnet-lite1", "effnet-lite2"):
        assert earlier.difference(net, [("tent", "source")], ["jpeg_compression-5"]).points < -10
    for row in ("tent", "poem"):
        assert study.difference("cifar10-gn", [(row, "source")], ["continual"]).points < -30, "entropy alone collapses"
    assert study.difference("cifar10-gn", [("eata+poem", "source")], parts.ALL).state == "above"


def test_joined_files_are_those_of_the_earlier_cells_and_the_raw_ones() -> None:
    join = _module("join")
    raw = sorted((ROOT / "results" / "study" / "raw").glob("*.jsonl"))
    for name, suite in join.joined(raw).items():
        held = json.loads((ROOT / "results" / "study" / f"{name}.json").read_text())
        assert held == json.loads(join.text(suite)), f"{name}.json is out of date: run python -m study.join"


@pytest.mark.skipif(find_spec("poem.report.leaderboard") is None, reason="a version without a leaderboard")
def test_the_leaderboard_shows_the_accuracies_of_the_cells(everything: tuple[Any, dict[str, Any], Any]) -> None:
    leaderboard, evidence = import_module("poem.report.leaderboard"), _module("evidence")
    study, _ = evidence.load()
    cells, _ = leaderboard.read_cells([ROOT / "results" / "study"])
    assert len(cells) == len(study)
    compared = 0
    for block in leaderboard.make_leaderboard(cells).blocks:
        for row in block.rows:
            for score in row.scores:
                runs = study.run(block.net, row.name, score.stream, block.batch)
                own = [run.bits for seed, run in runs.items() if seed in block.seeds]
                if own and sum(map(len, own)) == score.n:
                    assert score.accuracy == pytest.approx(100 * np.concatenate(own).mean())
                    compared += 1
    assert compared > 500


# Differences ----------------------------------------------------------------------------------------------------------


def test_a_difference_over_streams_has_one_value_for_an_image() -> None:
    """An image that differs in both streams counts once: the error is that of images, not of samples."""
    one, zero = [1, 1, 0, 0, 0, 0, 0, 0], [0] * 8
    cells = [_cell(row, bits, stream) for stream in ("fog-5", "snow-5") for row, bits in (("tent", one), ("bn", zero))]
    found = _evidence(*cells).difference("cifar10-bn", [("tent", "bn")], ["fog-5", "snow-5"])
    assert found.points == 25.0
    assert found.error == pytest.approx(100 * np.std(one) / math.sqrt(8))
    other = _evidence(*cells[:2], _cell("tent", [0, 0, 1, 1, 0, 0, 0, 0], "snow-5"), cells[3])
    values = np.array([1, 1, 1, 1, 0, 0, 0, 0]) / 2
    found = other.difference("cifar10-bn", [("tent", "bn")], ["fog-5", "snow-5"])
    assert (found.points, found.error) == pytest.approx((25.0, 100 * values.std() / math.sqrt(8)))
    assert found.n == 8


def test_streams_of_other_orders_count_as_independent() -> None:
    cells = [_cell("tent", [1, 0], "mixed"), _cell("bn", [0, 0], "mixed"), _cell("tent", [1, 0, 0, 0], "continual")]
    found = _evidence(*cells, _cell("bn", [0] * 4, "continual")).difference(
        "cifar10-bn", [("tent", "bn")], ["mixed", "continual"]
    )
    assert found.points == pytest.approx(37.5)
    assert found.error == pytest.approx(50 * math.hypot(0.5 / math.sqrt(2), math.sqrt(3) / 4 / 2))


def test_with_three_seeds_the_error_is_at_least_that_over_seeds() -> None:
    """Every seed is certain of itself, and they contradict each other."""
    cells = []
    for seed, bit in enumerate((1, 0, 0)):
        cells += [_cell("tent", [bit] * 10, seed=seed), _cell("bn", [0] * 10, seed=seed)]
    found = _evidence(*cells).difference("cifar10-bn", [("tent", "bn")], ["fog-5"])
    assert found.seeds == pytest.approx((100, 0, 0))
    assert found.error == pytest.approx(np.std([100, 0, 0], ddof=1) / math.sqrt(3))
    assert found.error > found.paired
    assert found.state == "open"


def test_rows_of_other_samples_are_not_compared() -> None:
    cells = [_cell("tent", [1, 1]), _cell("bn", [0, 0], hash="b"), _cell("poem", [1, 0], seed=1)]
    evidence = _evidence(*cells)
    assert evidence.difference("cifar10-bn", [("tent", "bn")], ["fog-5"]) is None
    assert evidence.difference("cifar10-bn", [("tent", "poem")], ["fog-5"]) is None
    assert evidence.difference("cifar10-bn", [("tent", "eata")], ["fog-5"]) is None
    with pytest.raises(ValueError, match="expected 2 bits set"):
        _evidence(_cell("tent", [1, 0], right=2))


def test_shares_are_compared_image_by_image() -> None:
    """With one stream it is the difference of two independent proportions."""
    share_difference = _module("evidence").share_difference
    rng = np.random.RandomState(0)
    right, one = rng.rand(400, 1) < 0.6, rng.rand(400, 1) < 0.3
    found = share_difference(right.astype(float), one.astype(float), (~one).astype(float))
    p, q = right[one].mean(), right[~one].mean()
    assert found.points == pytest.approx(100 * (p - q))
    expected = 100 * math.sqrt(p * (1 - p) / one.sum() + q * (1 - q) / (~one).sum())
    assert found.error == pytest.approx(expected)
    twice = share_difference(*(np.repeat(each.astype(float), 2, axis=1) for each in (right, one, ~one)))
    assert twice.error == pytest.approx(expected), "the same images again tell nothing new"
    assert share_difference(right.astype(float), one * 0.0, (~one).astype(float)) is None


# Answers --------------------------------------------------------------------------------------------------------------


def _on_four(row: str, bits: Any, **changes: Any) -> list[dict[str, Any]]:
    return [_cell(row, bits, stream, **changes) for stream in _module("parts").FOUR]


def test_every_answer_without_cells_is_not_measured() -> None:
    for answer in _module("answers").answers(_evidence()):
        assert answer.head == "Not measured."
        assert "Not measured: `resnet50-keras`" in answer.text
    for claim, found in _module("claims").verdicts(_evidence()):
        assert {verdict.state for verdict in found.values()} == {""}, claim.text


def test_with_every_cell_of_the_plan_everything_is_answered_and_drawn() -> None:
    """Random cells: whatever they say, no place of a page is left without numbers."""
    answers, claims, figures = _module("answers"), _module("claims"), _module("figures")
    analyse, join, n, rng = _module("analyse"), _module("join"), 64, np.random.RandomState(0)
    cells = []
    for net, row, stream, seed, batch in {key for key, _ in join.cells_of_study()}:
        record = {}
        if "recorded" in row:
            group = rng.randint(0, 3, n)
            record = {"before": _text(rng.rand(n) < 0.5), "selected": _text(group == 0), "newly": _text(group == 1)}
            steps = (group * 60 + rng.randint(0, 90, n)).astype(np.uint8)
            record |= {name: base64.b64encode(steps.tobytes()).decode() for name in ("entropy_first", "entropy_last")}
            steps = np.where(group == 2, steps // 2, steps)
            record["entropy_last"] = base64.b64encode(steps.astype(np.uint8).tobytes()).decode()
        if row.endswith("gradients"):
            record["gradients"] = base64.b64encode(rng.rand(n).astype("<f2").tobytes()).decode()
        cells.append(_cell(row, rng.rand(n) < 0.5, stream, net, seed=seed, batch=batch, **record))
    evidence = _evidence(*cells)
    for answer in answers.answers(evidence):
        assert all(line.state for line in answer.lines), answer.text
        assert "not measured" not in answer.text.lower() or "statistics" in answer.name, answer.text
    planned = {"resnet50-keras", "cifar10-bn", "cifar10-gn", "cifar10-vit"}
    for claim, found in claims.verdicts(evidence):
        missing = {net for net, verdict in found.items() if not verdict.state}
        assert missing <= ({"vit-tiny16"} if claim.where == "Figure 3" else set()), (claim.text, missing)
        assert planned <= set(found)
    facts = {"cells": len(cells), "left_out": {}, "runs": {"r": {"tree": "t", "torch": "2"}}}
    suites = dict.fromkeys(_module("parts").SUITES, facts)
    texts = analyse.texts(evidence, suites, evidence)
    empty = {name for name, text in texts.items() if text == _module("tables").NONE}
    assert empty == {"variants-tiny-imagenet", "in-order"}
    for drawing in figures.drawings(evidence).values():
        text = figures.draw(drawing)
        assert text.count("<desc>") == 1
        assert len(text) <= figures.MOST_BYTES


def test_exploration_is_compared_with_as_many_updates() -> None:
    better = [1] * 60 + [0] * 40
    cells = [*_on_four("deyo+poem-i", better), *_on_four("deyo*", [1] * 50 + [0] * 50)]
    cells += [*_on_four("tent+poem-i", [0] * 100), *_on_four("tent-filtered*", [0] * 100)]
    answer = _module("answers").exploration(_evidence(*cells))
    line = next(line for line in answer.lines if line.net == "cifar10-bn")
    assert line.main.points == 5.0
    assert {name: each.points for name, each in line.others.items()} == {"tent-filtered": 0.0, "deyo": 10.0}
    assert line.words.endswith("not measured: eata, sar, roid, poem")
    assert answer.head == "Yes on 1 of 1 networks; 4 not measured."


def test_newly_reliable_samples_are_told_from_the_rest_and_from_the_first() -> None:
    """40 selected (all right), 20 newly (half right), 40 never (a quarter right)."""
    right = np.array([1] * 40 + [1, 0] * 10 + [1, 0, 0, 0] * 10, bool)
    selected, newly = np.arange(100) < 40, (np.arange(100) >= 40) & (np.arange(100) < 60)
    first = np.where(selected, 50, 150).astype(np.uint8)
    last = np.where(selected | newly, 50, 150).astype(np.uint8)
    record = {"before": _text(right), "selected": _text(selected), "newly": _text(newly)}
    record |= {
        name: base64.b64encode(values.tobytes()).decode()
        for name, values in {"entropy_first": first, "entropy_last": last}.items()
    }
    answers = _module("answers")
    found = answers.samples(_evidence(*_on_four("poem, recorded", right, **record)), "cifar10-bn")
    assert (found.selected.share, found.newly.share, found.rest.share) == (100.0, 50.0, 25.0)
    assert found.newly.n == 80, "of four streams"
    assert found.over_rest.points == 25.0
    assert found.over_selected.points == -50.0
    assert found.same_entropy.points == 25.0, "all unselected samples have one entropy"
    assert (found.down, found.up) == (80, 0)
    verdicts = {
        claim.text: each["cifar10-bn"].state
        for claim, each in _module("claims").verdicts(_evidence(*_on_four("poem, recorded", right, **record)))
        if "cifar10-bn" in each
    }
    assert verdicts["They are right about as often (10 points) as those selected at first"] == "fails"
    assert verdicts["Potentially reliable samples are few"] == "holds"


def test_a_loss_to_source_is_found_with_its_stream() -> None:
    source, bad = [1] * 500 + [0] * 500, [1] * 300 + [0] * 700
    cells = [
        _cell("source", source),
        _cell("poem", bad),
        _cell("source", source, "clean"),
        _cell("poem", source, "clean"),
    ]
    (found,) = _module("answers").failures(_evidence(*cells), ["poem"])
    assert (found.below, found.cells, found.worst, found.points) == (1, 2, "fog-5", -20.0)
    answer = _module("answers").failing(_evidence(*cells))
    assert answer.head == "Some stream is below source on 1 of 1 networks."


def test_a_claim_of_every_method_fails_where_one_does() -> None:
    claims = _module("claims")
    claim = next(each for each in claims.CLAIMS if each.text == "POEM raises every method")
    half, more, less = [1] * 500 + [0] * 500, [1] * 700 + [0] * 300, [1] * 400 + [0] * 600
    rows = {"tent": half, "tent+poem": more, "sar": half, "sar+poem": less}
    cells = [_cell(row, bits, stream) for row, bits in rows.items() for stream in claims.CORRUPTED]
    verdict = claim.check(_evidence(*cells), "cifar10-bn")
    assert verdict.state == "fails"
    assert "tent, sar alone" in verdict.words
    assert verdict.words.endswith("below: sar")
    assert claim.check(_evidence(*cells[: 2 * len(claims.CORRUPTED)]), "cifar10-bn").state == "holds"


def test_a_difference_in_gradients_or_labels_within_its_error_is_open() -> None:
    """Newly reliable samples at an entropy of 150 steps; below them gradients of half the size, above as many right."""
    claims, n, rng = _module("claims"), 90, np.random.RandomState(0)
    group = np.arange(n) % 3
    steps, norms = np.array([50, 150, 250], np.uint8)[group], np.array([1.0, 2.0, 2.0])[group] + 0.1 * rng.rand(n)
    texts = {name: base64.b64encode(steps.tobytes()).decode() for name in ("entropy_first", "entropy_last")}
    texts |= {"before": _text(np.arange(n) // 3 % 2), "selected": _text(group == 0), "newly": _text(group == 1)}
    texts["gradients"] = base64.b64encode(norms.astype("<f2").tobytes()).decode()
    evidence = _evidence(*_on_four("poem, recorded with gradients", group == 0, **texts))
    states = {
        claim.text: claim.check(evidence, "cifar10-bn").state for claim in claims.CLAIMS if claim.where == "Figure 3"
    }
    assert states == {
        "Below their range of entropy gradients are small": "holds",
        "Above it pseudo-labels are poor": "open",
    }


def test_little_is_below_half_a_point_by_two_errors() -> None:
    claims, difference = _module("claims"), _module("evidence").Difference
    assert claims.small(difference(0.1, 0.1, 100, 1)).state == "holds"
    assert claims.small(difference(0.4, 0.1, 100, 1)).state == "open"
    assert claims.small(difference(0.9, 0.1, 100, 1)).state == "fails"
    assert claims.small(None).state == ""


def test_cells_of_a_network_are_borrowed_only_where_the_study_has_none() -> None:
    study = _evidence(_cell("source", [1, 0]))
    other = _evidence(
        _cell("tent", [1, 0]), _cell("tent", [1, 0], net="vit-tiny16"), _cell("mean6", [1], net="vit-tiny16")
    )
    for net in ("cifar10-bn", "vit-tiny16"):
        study.borrow(other, net, "2 images")
    assert study.borrowed == {"vit-tiny16": "2 images"}
    assert study.rows("cifar10-bn") == ["source"]
    assert study.rows("vit-tiny16") == ["tent"]


# The plan and the check -----------------------------------------------------------------------------------------------


def test_the_plan_fits_an_hour_and_a_quarter_of_ten_processes() -> None:
    measure = _module("measure")
    last = measure.listing(measure.parse(["--processes", "10"])).splitlines()[-1]
    assert last.startswith("all")
    assert float(last.split()[-1]) <= 4500


def test_a_cell_agrees_within_a_standard_error_and_a_prefix_is_compared_with_its_prefix() -> None:
    check = _module("check")
    chosen = check.Chosen("cifar10", "cifar10-bn", "fog-5", "tent")
    bits = np.arange(1000) % 2 == 0
    evidence = _evidence(_cell("tent", bits))
    assert check.compare(_cell("tent", bits), evidence, chosen).agrees
    worse = bits & (np.arange(1000) >= 40)
    result = check.compare(_cell("tent", worse), evidence, chosen)
    assert (result.other, result.agrees) == (20, False), "2 points, and the error is 1.6"
    part = check.compare(_cell("tent", bits[:128], hash="b"), evidence, chosen)
    assert (part.n, part.of, part.other, part.agrees) == (128, 1000, 0, True)
    with pytest.raises(ValueError, match="other images, or another copy"):
        check.compare(_cell("tent", bits, hash="b"), evidence, chosen)
    with pytest.raises(ValueError, match="no cell"):
        check.compare(_cell("tent", bits), _evidence(), chosen)


def test_the_checked_cells_are_in_the_plan() -> None:
    check, join = _module("check"), _module("join")
    keys = {key for key, _ in join.cells_of_study()}
    assert set(check.CELLS) == set(_module("parts").SUITES)
    for chosen in (each for own in check.CELLS.values() for each in own):
        assert (chosen.net, chosen.row, chosen.stream, 0, 64) in keys
    with pytest.raises(SystemExit):
        check.main(["--n", "100"])
