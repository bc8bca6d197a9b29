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
    for name, texts in analyse.pages().items():
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
        each = [] if line.main is None else [line.main, *line.others.values()]
        assert all(abs(one.points) < 1 for one in each), "within a point of the statistics alone"
        assert line.net == "cifar10-bn" or all(one.state == "open" for one in each)
    cost = {net: earlier.difference(net, [("bn", "source")], ["clean"]) for net in answers.BATCH_NORM}
    assert {net: each.state for net, each in cost.items()} == {
        "resnet50-keras": "open", "cifar10-bn": "below", "effnet-lite0": "below",
    }, "on clean images the batch's statistics can cost"  # fmt: skip
    large = cost["resnet50-keras"]
    assert round(large.points / large.error, 1) == -2.5
    for other in ("bn", "source"):
        assert earlier.difference("effnet-lite0", [("mean6", other)], parts.ALL).state == "above", "better than either"
    large = earlier.difference("resnet50-keras", [("mean6", "bn")], parts.ALL)
    assert (large.state, round(large.points / large.error, 1)) == ("open", 2.3)
    assert earlier.difference("cifar10-bn", [("mean6", "bn")], parts.ALL).state == "below", "and not on the small one"
    for net in ("effnet-lite0", "effnet-lite1", "effnet-lite2"):
        assert earlier.difference(net, [("tent", "source")], ["jpeg_compression-5"]).points < -10
    losses = {
        "vit-tiny16": {"deyo": 19.0, "deyo+poem": 18.7, "poem": 15.5, "tent": 9.6},
        "cifar10-gn": {"poem": 44.0, "tent": 37.3, "deyo+poem": 16.8, "deyo": 8.8},
    }
    for net, told in losses.items():
        found = {row: earlier.difference(net, [(row, "source")], ["continual"]) for row in told}
        assert {row: round(-each.points, 1) for row, each in found.items()} == pytest.approx(told, abs=0.051)
        assert all(each.state == "below" for each in found.values())
    for row, kept in {"eata+poem": ("+1.4 ± 0.5", "+1.9 ± 0.3"), "roid": ("+2.5 ± 0.4", "+0.9 ± 0.2")}.items():
        nets = ("vit-tiny16", "cifar10-gn")
        assert tuple(earlier.difference(net, [(row, "source")], ["continual"]).rounded(1) for net in nets) == kept


THREE = ("cifar10-bn", "cifar10-gn", "cifar10-vit")
WITHOUT = THREE[1:]
VIT = "vit-tiny16"
TWICE = ("*", "+poem-i")
"""Endings of hosts with two updates, plain and explored."""
FAR = ("gaussian_noise-5", "impulse_noise-5", "contrast-5")
"""Streams of which ViT-Tiny gets 4 to 6 % right."""
BY_HAND: tuple[tuple[Any, ...], ...] = (
    (1, "is {} and {} points below the unadapted network with group norm and with layer norm on CIFAR-10 (n = 6,000),"
        " and {} above it on ViT-Tiny, where `eata` gains {}",
     *(("ALL", net, "source", "poem") for net in WITHOUT), *(("ALL", VIT, row, "source") for row in ("poem", "eata"))),
    (2, "There it raises `poem` by {} points and lowers `eata` by {} on average of four streams",
     ("FOUR", VIT, "poem", "poem, no branch"), ("FOUR", VIT, "eata, read last", "eata+poem-ii")),
    (1, "on `cifar10-gn`, which is chance, and `source` 62.9 (-{}); on `cifar10-vit` it gets 39.3 and `source` 57.8"
        " (-{})",
     *(("recurring", net, "source", "poem") for net in WITHOUT)),
    (2, "On `cifar10-bn` it lowers `tent` and raises `roid`, by {} and {} points",
     ("ALL", "cifar10-bn", "tent", "tent+poem"), ("ALL", "cifar10-bn", "roid+poem", "roid")),
    (1, "loses on 3 to 5, most with `eata` in impulse noise (-{})", ("impulse_noise-5", VIT, "eata", "eata+poem")),
    (2, "On `cifar10-gn` `eata*` is {} points above `eata`, and `eata+poem-i` {}; `roid*` is {} above `roid`, and"
        " `roid+poem-i` {}. On `cifar10-vit` the same pairs gain {} and {}, {} and {}.",
     *(("FOUR", net, f"{host}{twice}", host) for net in WITHOUT for host in ("eata", "roid") for twice in TWICE)),
    (2, "on `cifar10-gn` `sar*` is {} points below `sar`, and `sar+poem-i` {}; on `cifar10-vit` {} and {}.",
     *(("FOUR", net, "sar", f"sar{twice}") for net in WITHOUT for twice in TWICE)),
    (2, "better without exploration, by {} points on `cifar10-gn` and {} on `cifar10-vit`",
     *(("FOUR", net, "poem, no exploration", "poem") for net in WITHOUT)),
    (2, "on `cifar10-bn` no difference is seen ({})", ("FOUR", "cifar10-bn", "poem, no exploration", "poem")),
    (2, "On ViT-Tiny (n = 3,000, one seed) `poem` is better without exploration as well, by {} points",
     ("FOUR", VIT, "poem, no exploration", "poem")),
    (1, "it loses {} by it in snow and {} in gaussian noise, and gains {} in contrast and {} in defocus blur",
     *((stream, VIT, "poem, no exploration", "poem") for stream in ("snow-5", "gaussian_noise-5")),
     *((stream, VIT, "poem", "poem, no exploration") for stream in ("contrast-5", "defocus_blur-5"))),
    (2, "On average `eata*` loses {} points and `eata+poem-i` {}",
     *(("FOUR", VIT, "eata", f"eata{twice}") for twice in TWICE)),
    (1, "`poem` without its branch is {} points lower there, and `eata+poem-ii` {} below `eata` answered after its",
     ("contrast-5", VIT, "poem", "poem, no branch"), ("contrast-5", VIT, "eata, read last", "eata+poem-ii")),
    (1, "in snow `poem` is {} better without it", ("snow-5", VIT, "poem, no branch", "poem")),
    (2, "For `roid` on `cifar10-gn` that alone is worth {} points, where `roid+poem` gains {}",
     *(("FOUR", "cifar10-gn", row, "roid") for row in ("roid, read last", "roid+poem"))),
    (2, "by {} points to `roid` on `cifar10-bn`, and to `eata` by {} on `cifar10-gn`, {} on `cifar10-vit` (n = 6,000)"
        " and {} on ViT-Tiny",
     ("CORRUPTED", "cifar10-bn", "roid", "poem"), *(("CORRUPTED", net, "eata", "poem") for net in (*WITHOUT, VIT))),
    (2, "is {} points above `poem` on `cifar10-gn`, {} on `cifar10-vit`",
     *(("FOUR", net, "poem-official", "poem") for net in WITHOUT)),
    (2, "no different on `cifar10-bn` ({})", ("FOUR", "cifar10-bn", "poem-official", "poem")),
    (2, "It is above source on the first two, by {} and {}, and below `eata` by {} and {}.",
     *(("FOUR", net, "poem-official", "source") for net in WITHOUT),
     *(("FOUR", net, "eata", "poem-official") for net in WITHOUT)),
    (1, "of ViT-Tiny: {} points above source in defocus blur, {} below it in gaussian noise",
     ("defocus_blur-5", VIT, "poem-official", "source"), ("gaussian_noise-5", VIT, "source", "poem-official")),
    (2, "`tent` loses {} points by it", ("FOUR", "cifar10-bn", "tent", "tent [auto statistics]")),
    (1, "It gains {} points on `cifar10-gn`, {} on `cifar10-vit` (n = 6,000) and {} on ViT-Tiny",
     *(("ALL", net, "eata", "source") for net in (*WITHOUT, VIT))),
    (2, "{}, {} and {} points above `eata`", *(("ALL", net, "auto", "eata") for net in (*WITHOUT, VIT))),
    (1, "on ViT-Tiny that is mostly contrast (+{})", ("contrast-5", VIT, "auto", "eata")),
    (2, "`eata+poem` is {} and {} points above `eata` on the first two",
     *(("ALL", net, "eata+poem", "eata") for net in WITHOUT)),
    (2, "no different on the third ({})", ("ALL", VIT, "eata+poem", "eata")),
    (2, "At a quarter of the preset's rate `poem` is {} points better on `cifar10-gn` and {} on `cifar10-vit`",
     *(("FOUR", net, "poem, rate x0.25", "poem") for net in WITHOUT)),
    (2, "even so not above source (-{}, -{})", *(("FOUR", net, "source", "poem, rate x0.25") for net in WITHOUT)),
    (1, "; now +{}), impulse noise (", ("gaussian_noise-5", VIT, "auto", "source")),
    (1, "; +{}) and contrast (", ("impulse_noise-5", VIT, "auto", "source")),
    (1, "; +{}). `eata`, which", ("contrast-5", VIT, "auto", "source")),
    (1, "gains {}, {} and {} there", *((each, VIT, "eata", "source") for each in FAR)),
    (1, "In gaussian noise `eata+poem-i` is {} points below `eata`, `eata*` {} and `eata+poem-ii` not (+{})",
     *(("gaussian_noise-5", VIT, "eata", row) for row in ("eata+poem-i", "eata*")),
     ("gaussian_noise-5", VIT, "eata+poem-ii", "eata")),
)  # fmt: skip
"""Digits, words of docs/study.md around differences that are written by hand, and these differences in their order.

Each is of some streams, on a network, of the row that by these words is the better one, and the other row.
"""


def test_the_differences_in_the_text_are_those_of_the_cells(everything: tuple[Any, dict[str, Any], Any]) -> None:
    study, parts, claims, answers = everything[0], _module("parts"), _module("claims"), _module("answers")
    named = {"ALL": parts.ALL, "FOUR": parts.FOUR, "CORRUPTED": claims.CORRUPTED}
    text = " ".join(_module("analyse").PLACE.sub("", (ROOT / "docs" / "study.md").read_text()).split())
    told = [
        (digits, words, [study.difference(net, [(better, worse)], named.get(streams, (streams,)))
                         for streams, net, better, worse in each])
        for digits, words, *each in BY_HAND
    ]  # fmt: skip
    words = "`poem` is below the unadapted network on all three CIFAR-10 networks, by {}, {} and {} points"
    told.append((1, words, [study.difference(net, [("source", "poem")], parts.FOUR, 1) for net in THREE]))
    lifted = [line.main for line in answers.lift(study).lines if line.net == VIT]
    told.append((2, "On ViT-Tiny it raises the mean of five methods by {} points", lifted))
    learnt = {line.net: line.main for line in answers.learning(study).lines}
    words = "Learning adds +{} and +{} points to it within 8 batches (n = 500 images), and +{} within 32"
    told.append((2, words, [learnt[net] for net in ("resnet50-keras", "effnet-lite0", "cifar10-bn")]))
    for digits, words, found in told:
        assert all(each.points >= 0 for each in found), f"the other way round: {words}"
        assert "no differen" not in words or all(each.state == "open" for each in found), words
        sentence = words.format(*(each.rounded(digits).lstrip("+") for each in found))
        assert text.count(sentence) == 1, f"not in docs/study.md, once: {sentence}"


def test_eata_alone_of_the_published_methods_is_below_source_nowhere_without_batch_norm(
    everything: tuple[Any, dict[str, Any], Any],
) -> None:
    study, answers = everything[0], _module("answers")
    hosts = ("tent", "eata", "sar", "deyo", "roid")
    rows = [*hosts, "rotta", "poem", "auto", *(f"{host}+poem" for host in hosts)]
    found = [each for each in answers.failures(study, rows) if each.net in (*WITHOUT, "vit-tiny16")]
    assert all(sum(each.row == row for each in found) == 3 for row in rows)
    assert {each.row for each in found} - {each.row for each in found if each.below} == {"eata", "auto"}


def test_what_the_text_counts_is_in_the_cells(everything: tuple[Any, dict[str, Any], Any]) -> None:
    """Streams that `+poem` gains and loses on ViT-Tiny, streams below source, batches with newly reliable samples."""
    study, parts, answers = everything[0], _module("parts"), _module("answers")
    for host, counts in {"tent": (10, 3), "eata": (10, 3), "sar": (7, 5), "deyo": (7, 5), "roid": (11, 3)}.items():
        found = [study.difference("vit-tiny16", [(f"{host}+poem", host)], [each]).state for each in parts.ALL]
        assert (found.count("above"), found.count("below")) == counts, host
    told = {"eata": (0, 2), "roid": (1, 3), "sar": (3, 5), "tent": (4, 5), "deyo": (4, 5)}
    rows = [f"{host}{ending}" for host in told for ending in ("", "+poem")]
    below = {each.row: each.below for each in answers.failures(study, rows) if each.net == "vit-tiny16"}
    assert {host: (below[host], below[f"{host}+poem"]) for host in told} == told
    shares = {}
    for net in ("cifar10-bn", "cifar10-gn", "cifar10-vit", "vit-tiny16"):
        runs = [run for stream in parts.FOUR for run in study.run(net, "poem, recorded", stream).values()]
        newly = [run.bools("newly") & ~run.bools("selected") for run in runs]
        batches = [each[start : start + 64].any() for each in newly for start in range(0, len(each), 64)]
        shares[net] = (round(100 * np.mean(batches)), len(batches))
    assert shares == {
        "cifar10-bn": (22, 384),
        "cifar10-gn": (31, 384),
        "cifar10-vit": (22, 384),
        "vit-tiny16": (46, 188),
    }
    noise, contrast = (
        {
            row: f"{100 * study.run('vit-tiny16', row, stream)[0].bits.mean():.1f}"
            for row in ("eata", "eata*", "eata+poem-i")
        }
        for stream in ("gaussian_noise-5", "contrast-5")
    )
    text = " ".join((ROOT / "docs" / "study.md").read_text().split())
    assert f"({contrast['eata*']} and {contrast['eata+poem-i']} % right)" in text
    assert f"`eata+poem-i` does ({noise['eata+poem-i']} %)" in text
    assert f"`eata*` does not ({noise['eata*']} %, `eata` {noise['eata']})" in text
    states = [one.state for line in answers.branch(study).lines for one in line.others.values()]
    assert (len(states), states.count("above"), states.count("below")) == (21, 4, 3)


def test_what_another_machine_makes_of_contrast_is_told(everything: tuple[Any, dict[str, Any], Any]) -> None:
    """Cells of ViT-Tiny measured again on a CPU, and the differences with them in the place of the study's."""
    evidence, parts = _module("evidence"), _module("parts")
    net, stream, folder = "vit-tiny16", "contrast-5", ROOT / "results" / "study" / "again"
    again = [json.loads(line) for line in (folder / "vit-tiny16-contrast.jsonl").read_text().splitlines()]
    text = " ".join((ROOT / "docs" / "study.md").read_text().split())
    here = {row: everything[0].run(net, row, stream)[0] for row in ("tent", "eata", "poem")}
    assert {cell["row"] for cell in again} == set(here)
    assert all(cell["hash"] == here[cell["row"]].stream for cell in again)
    there = {cell["row"]: 100 * cell["right"] / cell["n"] for cell in again}
    shares = {row: (f"{there[row]:.1f}", f"{100 * here[row].bits.mean():.1f}") for row in here}
    assert "`tent` has {} % (H200: {})".format(*shares["tent"]) in text
    assert "`eata` {} ({}) and `poem` {} ({})".format(*shares["eata"], *shares["poem"]) in text
    held = json.loads((ROOT / "results" / "study" / "imagenet-3k.json").read_text())
    keys = {(cell["row"], cell["stream"]) for cell in again}
    kept = [cell for cell in held["cells"] if cell["net"] == net and (cell["row"], cell["stream"]) not in keys]
    study = evidence.Evidence([*kept, *again])
    for row, other in (("poem, no exploration", "poem"), ("poem", "poem, no branch"), ("eata, read last", "eata")):
        assert study.difference(net, [(row, other)], parts.FOUR).rounded(2).lstrip("+") in text, row
    cpu = {name for name, run in held["runs"].items() if run["device"] == "CPU"}
    told = [cell["stream"] for cell in held["cells"] if cell.get("run") in cpu]
    assert (len(told), set(told)) == (20, {"contrast-5", "snow-5"})


def test_joined_files_are_those_of_the_earlier_cells_and_the_measured_ones() -> None:
    join = _module("join")
    there = sorted((ROOT / "results" / "study").glob("*.json"))
    assert there
    made = join.joined([], join.EARLIER, there)
    for path in there:
        held = json.loads(path.read_text())
        assert held == json.loads(join.text(made[path.stem])), f"{path.name} is out of date: run python -m study.join"


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


def _visits(n: int, rng: np.random.RandomState) -> tuple[list[dict[str, Any]], Any, Any]:
    """Cells on `continual` over n images, where an image is right or wrong whatever the shift; values and images."""
    streams = _module("streams", "auto")
    images = streams.plan("continual", np.zeros(n, np.int64), 0).image
    right = (rng.rand(n) < 0.5)[images]
    cells = [_cell("bn", np.zeros(n), "clean"), _cell("tent", right, "continual")]
    return [*cells, _cell("bn", np.zeros(len(right)), "continual")], right.astype(float), images


def test_an_image_that_comes_in_many_corruptions_counts_once() -> None:
    """40 images in 15 corruptions are 600 samples, and tell as much as 40."""
    cells, right, images = _visits(40, np.random.RandomState(0))
    found = _evidence(*cells).difference("cifar10-bn", [("tent", "bn")], ["continual"])
    assert found.points == pytest.approx(100 * right.mean())
    assert (len(right), found.n) == (600, 40)
    each = right[:40][np.argsort(images[:40])]
    assert found.error == pytest.approx(100 * each.std() / math.sqrt(40))
    labels = np.arange(40) % 7
    assert (_module("streams", "auto").plan("continual", labels, 0).image == images).all(), "labels change nothing"


def test_an_error_is_not_told_where_it_cannot_be_known() -> None:
    """Label shift draws images again; nobody knows which without labels, or without the number of images."""
    cells = [_cell(row, bits, "label_shift") for row, bits in (("tent", [1] * 9), ("bn", [0] * 9))]
    found = _evidence(*cells).difference("cifar10-bn", [("tent", "bn")], ["label_shift"])
    assert (str(found), found.state, found.p_below) == ("+100.00", "open", 0.5)
    cells, *_ = _visits(40, np.random.RandomState(0))
    found = _evidence(*cells[1:]).difference("cifar10-bn", [("tent", "bn")], ["continual"])
    assert math.isinf(found.error)
    more = [
        _cell(row, [bit] * 9, "label_shift", seed=s) for s in range(3) for row, bit in (("tent", s == 0), ("bn", 0))
    ]
    found = _evidence(*more).difference("cifar10-bn", [("tent", "bn")], ["label_shift"])
    assert found.error == pytest.approx(np.std([100, 0, 0], ddof=1) / math.sqrt(3))


def test_one_seed_needs_three_errors() -> None:
    def state(gained: int, seeds: int) -> str:
        bits = np.arange(1000) < gained
        cells = [_cell(row, bits & (row == "tent"), seed=seed) for seed in range(seeds) for row in ("tent", "bn")]
        found: str = _evidence(*cells).difference("cifar10-bn", [("tent", "bn")], ["fog-5"]).state
        return found

    assert (state(8, 1), state(8, 3), state(10, 1)) == ("open", "above", "above"), "8 of 1,000 are 2.8 errors"
    tables = _module("tables")
    cells = [_cell("tent", np.arange(1000) < 8), _cell("source", np.zeros(1000))]
    assert tables._versus(_evidence(*cells), "cifar10-bn", "tent", ["fog-5"], 64) == "0.8 (+0.8 ± 0.3)"


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
    seeds = np.repeat([0, 1, 2], [100, 100, 200])
    right = right & (seeds[:, None] != 0) | one & (seeds[:, None] == 1)
    found = share_difference(right.astype(float), one.astype(float), (~one).astype(float), seeds=seeds)
    assert found.error == pytest.approx(np.std(found.seeds, ddof=1) / math.sqrt(3)), "seeds that contradict each other"
    assert found.error > found.paired


def test_ranges_of_entropy_have_the_same_images() -> None:
    """Two ranges with the same images in them: what they tell is told once."""
    share_difference = _module("evidence").share_difference
    rng = np.random.RandomState(0)
    right, one = (np.repeat(rng.rand(200, 1) < share, 2, axis=1).astype(float) for share in (0.6, 0.4))
    strata = np.tile([0, 1], (200, 1))
    alone = share_difference(right[:, :1], one[:, :1], 1 - one[:, :1])
    assert share_difference(right, one, 1 - one, strata=strata).error == pytest.approx(alone.error)


def test_the_same_images_in_two_streams_tell_nothing_new() -> None:
    share_difference = _module("evidence").share_difference
    rng = np.random.RandomState(0)
    right, one = rng.rand(400, 1) < 0.6, rng.rand(400, 1) < 0.3
    expected = share_difference(*(each.astype(float) for each in (right, one, ~one))).error
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
    assert verdicts["Potentially reliable samples are few"] == "open", "20 of 100 images against 40: 2.7 errors"
    assert verdicts["Most samples that cross the threshold fall below it"] == "holds"


def test_a_loss_to_source_is_found_with_its_stream() -> None:
    source, bad = [1] * 500 + [0] * 500, [1] * 300 + [0] * 700
    cells = [
        _cell("source", source),
        _cell("poem", bad),
        _cell("source", source, "clean"),
        _cell("poem", source, "clean"),
    ]
    (found,) = _module("answers").failures(_evidence(*cells), ["poem"])
    assert (found.below, found.cells, found.worst, found.difference.points) == (1, 2, "fog-5", -20.0)
    answer = _module("answers").failing(_evidence(*cells))
    assert answer.head == "Some stream is below source on 1 of 1 networks."


def test_a_network_without_a_loss_beyond_doubt_is_not_counted() -> None:
    """9 of 1,000 lost are three errors, and among 19 streams not enough."""
    streams = [each for each in _module("parts").ALL if each != "clean"]
    cells = [_cell(row, np.ones(1000), stream) for row in ("source", "poem") for stream in streams]
    cells += [_cell("source", np.arange(1000) < 500, "clean"), _cell("poem", np.arange(1000) < 493, "clean")]
    answer = _module("answers").failing(_evidence(*cells))
    assert answer.lines[2].main.points == pytest.approx(-0.7)
    assert "poem is below source on 0 of 16 streams, lowest on clean (-0.7 ± 0.3)" in answer.text
    assert answer.head == "Some stream is below source on 0 of 1 networks."


def test_seeds_that_contradict_each_other_are_no_loss() -> None:
    """Two seeds lose nothing and one loses all: McNemar over pooled samples would be certain."""
    cells = [_cell("source", np.ones(200), seed=seed) for seed in range(3)]
    cells += [_cell("poem", np.full(200, seed > 0), seed=seed) for seed in range(3)]
    (found,) = _module("answers").failures(_evidence(*cells), ["poem"])
    assert (found.below, found.cells) == (0, 1)
    assert found.difference.points == pytest.approx(-100 / 3)


def test_one_base_cannot_confirm_what_is_asked_of_each() -> None:
    answers, parts = _module("answers"), _module("parts")
    half, more, less = [1] * 500 + [0] * 500, [1] * 700 + [0] * 300, [1] * 400 + [0] * 600

    def head(**rows: Any) -> str:
        cells = [_cell(row, bits, stream) for row, bits in rows.items() for stream in parts.ALL]
        found: str = answers.lift(_evidence(*cells)).head
        return found

    lifted = {f"{host}{end}": bits for host in answers.HOSTS for end, bits in (("", half), ("+poem", more))}
    assert head(**{"deyo": half, "deyo+poem": more}) == "Open on 1 of 1 networks; 5 not measured."
    assert head(**{"deyo": half, "deyo+poem": less}) == "Not each one on 1 of 1 networks; 5 not measured."
    assert head(**lifted) == "Each one on 1 of 1 networks; 5 not measured."
    assert head(**{**lifted, "sar+poem": half}) == "Open on 1 of 1 networks; 5 not measured."


def test_a_claim_of_every_method_fails_where_one_does() -> None:
    claims = _module("claims")
    claim = next(each for each in claims.CLAIMS if each.text == "POEM raises every method")
    half, more, less = [1] * 500 + [0] * 500, [1] * 700 + [0] * 300, [1] * 400 + [0] * 600
    rows = {"tent": half, "tent+poem": more, "sar": half, "sar+poem": less}
    cells = [_cell(row, bits, stream) for row, bits in rows.items() for stream in claims.CORRUPTED]
    verdict = claim.check(_evidence(*cells), "cifar10-bn")
    assert verdict.state == "fails"
    assert verdict.words.endswith("below: sar; not measured: eata, deyo, roid")
    assert claim.check(_evidence(*cells[: 2 * len(claims.CORRUPTED)]), "cifar10-bn").state == "open", "tent alone"
    hosts = _module("answers").HOSTS
    every = {f"{host}{end}": bits for host in hosts for end, bits in (("", half), ("+poem", more))}
    cells = [_cell(row, bits, stream) for row, bits in every.items() for stream in claims.CORRUPTED]
    assert claim.check(_evidence(*cells), "cifar10-bn").state == "holds"


def test_the_best_is_told_on_common_seeds_and_not_without_every_rival() -> None:
    """Seed 1 is easy, and ROID was measured on it alone beside seed 0."""
    claims = _module("claims")
    claim = next(each for each in claims.CLAIMS if each.text.startswith("POEM has the highest average"))
    bits = {"poem": 700, "tent": 500, "eata": 500, "sar": 500, "deyo": 500, "roid": 600}

    def check(rows: dict[str, int]) -> Any:
        cells = [
            _cell(row, np.arange(1000) < right, stream) for row, right in rows.items() for stream in claims.CORRUPTED
        ]
        easy = [_cell("roid", np.ones(1000), stream, seed=1) for stream in claims.CORRUPTED]
        return claim.check(_evidence(*cells, *easy), "cifar10-bn")

    found = check(bits)
    assert (found.state, found.words) == ("holds", "+10.00 ± 0.95 to roid")
    assert check({row: right for row, right in bits.items() if row != "eata"}).state == "open"
    assert check({"poem": 400, "tent": 500}).state == "fails"


def test_a_range_over_thresholds_has_an_error() -> None:
    claims = _module("claims")
    claim = next(each for each in claims.CLAIMS if each.where == "Figure 5")

    def check(poem: int, rival: int) -> str:
        cells = []
        for row, spread in (("poem", poem), ("eata", rival), ("sar", rival), ("deyo", rival)):
            for name, lost in ((row, 0), *((f"{row}, threshold {value}", spread) for value in (0.2, 0.6, 0.8))):
                cells += _on_four(name, np.arange(1000) < 500 - lost)
        found: str = claim.check(_evidence(*cells), "cifar10-bn").state
        return found

    assert (check(10, 100), check(100, 10), check(10, 12)) == ("holds", "fails", "open")


def test_figure_3_counts_an_image_of_four_streams_once() -> None:
    """Four streams with the same answers have the error of one."""
    claims, n, rng = _module("claims"), 90, np.random.RandomState(0)
    group = np.arange(n) % 3
    steps, norms = np.array([50, 150, 250], np.uint8)[group], rng.rand(n)
    texts = {name: base64.b64encode(steps.tobytes()).decode() for name in ("entropy_first", "entropy_last")}
    right = rng.rand(n) < 0.5
    texts |= {"before": _text(right), "selected": _text(group == 0), "newly": _text(group == 1)}
    texts["gradients"] = base64.b64encode(norms.astype("<f2").tobytes()).decode()
    found = claims.zone(_evidence(*_on_four("poem, recorded with gradients", right, **texts)), "cifar10-bn")
    shares = [right[group == each].mean() for each in (1, 2)]
    assert found.lead.error == pytest.approx(100 * math.sqrt(sum(p * (1 - p) / 30 for p in shares)))
    inside, below = (norms.astype("<f2").astype(float)[group == each] for each in (1, 0))
    assert found.norm_lead.error / 100 == pytest.approx(math.sqrt((inside.var() + below.var()) / 30))


def test_the_variants_table_has_the_seeds_of_each_row() -> None:
    cells = [cell for seed in range(3) for cell in _on_four("poem", np.ones(8), seed=seed)]
    cells += [cell for seed in range(3) for cell in _on_four("poem, no branch", np.ones(8), seed=seed)]
    cells += _on_four("poem, rounds 3", np.ones(8))
    text = _module("tables").variants(_evidence(*cells), "cifar10-bn")
    assert "| `poem, no branch` | 100.0 | `poem` | +0.0 ± 0.0 | 3 |" in text
    assert "| `poem, rounds 3` | 100.0 | `poem` | +0.0 ± 0.0 | 1 |" in text


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
    swapped = bits.copy()
    swapped[:12] = ~swapped[:12]
    result = check.compare(_cell("tent", swapped), evidence, chosen)
    assert (result.now, result.other, result.agrees) == (result.then, 12, False), "as accurate, and not the same run"
    swapped[4:12] = bits[4:12]
    assert check.compare(_cell("tent", swapped), evidence, chosen).agrees, "four answers that rounding may turn"
    part = check.compare(_cell("tent", bits[:128], hash="b"), evidence, chosen)
    assert (part.n, part.of, part.other, part.agrees) == (128, 1000, 0, True)
    with pytest.raises(ValueError, match="other images, or another copy"):
        check.compare(_cell("tent", bits, hash="b"), evidence, chosen)
    with pytest.raises(ValueError, match="no cell"):
        check.compare(_cell("tent", bits), _evidence(), chosen)


def test_a_prefix_of_other_images_is_refused_before_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    check = _module("check")
    chosen, labels = check.Chosen("cifar10", "cifar10-bn", "fog-5", "tent"), np.arange(3000) % 10
    own = labels[check.streams.order("cifar10", labels, check.SEED)][:1000]
    plan = check.streams.plan("fog-5", own, check.SEED)
    evidence = _evidence(_cell("tent", np.arange(1000) % 2 == 0, hash=plan.hashed(own[plan.image])))
    monkeypatch.setattr(check.streams, "read", lambda data, root: (None, labels))
    assert check.other_stream(chosen, evidence, None) is None
    monkeypatch.setattr(check.streams, "read", lambda data, root: (None, labels[:2000]))
    assert "has 2,000 images of cifar10, other ones or in another number" in check.other_stream(chosen, evidence, None)
    assert "no cell" in check.other_stream(chosen, _evidence(), None)


def test_the_check_tells_tent_from_the_batch_s_statistics(everything: tuple[Any, dict[str, Any], Any]) -> None:
    check = _module("check")
    chosen = next(each for each in check.CELLS["cifar10"] if each.row == "tent")
    own, other = (everything[0].run(chosen.net, row, chosen.stream)[0] for row in ("tent", "bn"))
    cell = _cell("tent", other.bits, chosen.stream, chosen.net, hash=own.stream)
    result = check.compare(cell, everything[0], chosen)
    assert abs(result.now - result.then) <= result.error
    assert not result.agrees


def test_the_checked_cells_are_in_the_plan() -> None:
    check, join = _module("check"), _module("join")
    keys = {key for key, _ in join.cells_of_study()}
    assert set(check.CELLS) == set(_module("parts").SUITES)
    for chosen in (each for own in check.CELLS.values() for each in own):
        assert (chosen.net, chosen.row, chosen.stream, 0, 64) in keys
    with pytest.raises(SystemExit):
        check.main(["--n", "100"])
