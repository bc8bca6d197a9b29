"""`measure` turns a cell into a report: the same one wherever and whenever, from images the adapter saw and labels it
did not.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oracles
import pytest
import torch
from nets import make_net
from small_cells import FOG, NOISE, add_base, cell
from torch import Tensor

import poem
from poem import zoo
from poem.adapter import Adapter
from poem.bench import load_cell
from poem.bench import provenance as origins
from poem.bench.cell import Cell
from poem.bench.load_cell import Machine
from poem.bench.measure import measure
from poem.bench.result import CellResult
from poem.bench.run_stream import Delay, StreamRun
from poem.parts import EntropyBelow
from poem.recipes import methods as method
from poem.recipes.text import PART_VERSIONS, written
from poem.streams import datasets
from poem.streams.datasets import Tensors
from poem.streams.orders import single
from poem.streams.shift import VERSIONS


@pytest.fixture
def fresh() -> Iterator[None]:
    """Nothing kept from other tests, nothing left for them."""
    load_cell.clear_caches()
    yield
    load_cell.clear_caches()


# Identity -------------------------------------------------------------------------------------------------------------


def test_a_cell_gives_the_same_result_whatever_ran_before(fresh: None) -> None:
    asked = cell(probes=("gradients",), n=32, batch_size=16)
    first = measure(asked)
    measure(cell("eata", corruptions=(FOG,), source_images=100))
    measure(cell("sar", base="digits-gn", scenario="mixed", corruptions=(NOISE, FOG)))
    again = measure(asked)
    load_cell.clear_caches()
    anew = measure(asked)
    assert first.identity() == again.identity() == anew.identity()
    assert {"timing", "host", "provenance"}.isdisjoint(first.identity())


def test_importance_measured_through_another_mask_is_not_reused(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """EATA's anchor depends on which classes there are: masked after unmasked equals masked alone."""
    add_base(monkeypatch, "digits-twelve", classes=12)
    asked = cell(
        "eata", base="digits-twelve", weights="random", preset="imagenet", source_images=64,
        changes={"select": "EntropyBelow(1.0)"},
    )  # fmt: skip
    monkeypatch.setattr(load_cell.CellData, "mask", lambda self: None)
    unmasked = measure(asked)
    monkeypatch.setattr(load_cell.CellData, "mask", lambda self: list(range(10)))
    after = measure(asked)
    load_cell.clear_caches()
    alone = measure(asked)
    assert alone.ledger["updates"] > 0
    assert after.identity() == alone.identity()
    assert unmasked.metrics != alone.metrics


def test_a_result_has_the_key_of_its_cell_until_the_recipe_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another default is another cell: the old result stays sound, and is not taken for the new."""
    report = measure(cell("tent", n=32))
    assert report.cell_key == cell("tent", n=32).key
    assert report.key == f"{report.cell_key}-{report.base['sha256'][:8]}"
    monkeypatch.setitem(method.METHODS, "tent", lambda: poem.Recipe(select=EntropyBelow(0.3)))
    assert report.cell_key != cell("tent", n=32).key
    assert CellResult.from_dict(json.loads(json.dumps(report.to_dict()))) == report
    with pytest.raises(ValueError, match="the file was edited"):
        CellResult.from_dict({**report.to_dict(), "recipe": {**report.recipe, "lr": "0.1"}})


@pytest.mark.parametrize("base", ["digits-bn", "digits-gn"])
def test_a_method_with_a_recipe_for_batch_norm_has_its_cells_key_on_every_network(base: str) -> None:
    """`auto` runs another recipe on batch norm; a store that looked for the cell would not find its result."""
    wanted = cell("auto", base=base, n=32)
    assert measure(wanted).key.startswith(wanted.key)


def test_a_corruption_whose_images_changed_makes_other_keys_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """A result on the images of an earlier version is not found for the cell, and is refused by its own file."""
    kinds = {name: cell("tent", corruptions=[name], n=32) for name in ("frost", "fog")}
    now = {name: replace(each).key for name, each in kinds.items()}
    report = measure(kinds["frost"])
    assert report.cell_key == now["frost"]
    saved = json.loads(json.dumps(report.to_dict()))
    monkeypatch.setitem(VERSIONS, "frost", VERSIONS["frost"] + 1)
    later = {name: replace(each).key for name, each in kinds.items()}
    assert later["frost"] != now["frost"]
    assert later["fog"] == now["fog"]
    with pytest.raises(ValueError, match=r"edited, or its images are of an earlier version of frost; measure it again"):
        CellResult.from_dict(saved)


def test_a_result_with_earlier_defaults_of_a_part_is_refused_by_its_own_file(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = json.loads(json.dumps(measure(cell("tent", n=32)).to_dict()))
    monkeypatch.setitem(PART_VERSIONS, "Entropy", 2)
    with pytest.raises(ValueError, match=r"edited, or its method had an earlier version of Entropy; measure it again"):
        CellResult.from_dict(saved)


def test_the_keys_of_cells_without_frost_are_those_of_before() -> None:
    plain = Cell(base="digits-bn", data="digits-test", method="tent", corruptions=("fog",))
    text = json.dumps({**plain.to_dict(), "recipe": written(plain.recipe())}, sort_keys=True, separators=(",", ":"))
    assert plain.key == hashlib.sha256(text.encode()).hexdigest()[:16]


def test_a_result_round_trips_through_its_file(tmp_path: Path) -> None:
    report = measure(cell(probes=("gradients",), eta=1.0, n=32, batch_size=16))
    report.save(tmp_path / "cell.json")
    back = CellResult.load(tmp_path / "cell.json")
    written = json.loads((tmp_path / "cell.json").read_text())
    assert written.pop("checksum")
    assert back.intact
    assert back.to_dict() == written == report.to_dict()
    assert {"transitions", "entropy_bins", "range", "gradients", "online"} == set(report.probes)
    assert set(report.metrics) == {
        "top1", "top5", "ece", "aurc", "worst_window", "nll", "entropy_before", "entropy_after",
    }  # fmt: skip


def test_images_made_once_are_the_images_made_on_the_fly(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = cell("tent", scenario="mixed", corruptions=(NOISE, "glass_blur", "clean"), n=40)
    kept = measure(asked)
    assert len(load_cell._CORRUPTED) == 3
    load_cell.clear_caches()
    monkeypatch.setattr(load_cell, "CACHE_BYTES", 0)
    assert measure(asked).identity() == kept.identity()
    assert len(load_cell._CORRUPTED) == 0


def test_threads_are_the_cells_and_are_restored() -> None:
    before, seen = torch.get_num_threads(), []
    measure(cell("source", threads=2, n=32), on_progress=lambda done, total: seen.append(torch.get_num_threads()))
    assert seen == [2]
    assert torch.get_num_threads() == before


def test_the_global_generator_is_not_advanced() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    measure(cell("deyo", n=32))
    assert torch.equal(torch.rand(1), expected)


# What is measured -----------------------------------------------------------------------------------------------------


def test_metrics_are_those_of_evaluate() -> None:
    """The same images and labels through the public function, by hand."""
    asked = cell("tent", corruptions=(NOISE,))
    loaded = load_cell.load_model(asked, Machine())
    stream, _ = load_cell.CellData(asked, loaded.base, Machine()).streams(asked.order())
    row = poem.evaluate(
        loaded.model, stream, {"tent": asked.recipe()}, batch_size=32, mean=loaded.base.mean, std=loaded.base.std
    )["tent"]
    report = measure(asked)
    assert report.metrics["top1"] == row.accuracy
    assert report.metrics["ece"] == pytest.approx(row.ece, abs=1e-9)
    assert report.metrics["nll"] == pytest.approx(row.nll, abs=1e-12)
    assert (report.ledger["forwards"], report.ledger["backwards"]) == (row.forwards, row.backwards)


def test_progress_counts_images() -> None:
    seen: list[tuple[int, int]] = []
    report = measure(cell("source", n=70, corruptions=(NOISE, FOG)), on_progress=lambda *now: seen.append(now))
    assert seen == [(32, 140), (64, 140), (70, 140), (102, 140), (134, 140), (140, 140)]
    assert report.card["total"] == 140
    assert report.ledger["images"] == 140
    assert report.ledger["batches"] == 6


@pytest.mark.parametrize("scenario", ["single", "continual", "mixed", "recurring"])
def test_domains_make_up_the_stream(scenario: str) -> None:
    options = {"cycles": 2} if scenario == "recurring" else {}
    report = measure(cell("tent", scenario=scenario, corruptions=(NOISE, FOG), n=50, options=options))
    counts = {name: domain["n"] for name, domain in report.domains.items()}
    assert counts == dict.fromkeys((f"{NOISE} 5", f"{FOG} 5"), 100 if options else 50)
    for name in ("top1", "nll"):
        whole = sum(domain["n"] * domain[name] for domain in report.domains.values()) / sum(counts.values())
        assert whole == pytest.approx(report.metrics[name])


def test_a_mixed_batch_is_scored_by_each_images_own_shift() -> None:
    """With a network that learns nothing, a pooled stream gives every domain what it has alone."""
    pooled = measure(cell("source", scenario="mixed", corruptions=(NOISE, FOG)))
    for name in (NOISE, FOG):
        alone = measure(cell("source", corruptions=(name,)))
        assert pooled.domains[f"{name} 5"]["top1"] == pytest.approx(alone.metrics["top1"])
        assert pooled.domains[f"{name} 5"]["nll"] == pytest.approx(alone.metrics["nll"], abs=1e-4)


def test_resets_are_kept() -> None:
    apart = measure(cell("tent", scenario="single", corruptions=(NOISE, FOG), lr=0.05))
    alone = measure(cell("tent", corruptions=(FOG,), lr=0.05))
    assert apart.domains[f"{FOG} 5"]["nll"] == alone.domains[f"{FOG} 5"]["nll"]
    through = measure(cell("tent", scenario="continual", corruptions=(NOISE, FOG), lr=0.05))
    assert through.domains[f"{FOG} 5"]["nll"] != alone.domains[f"{FOG} 5"]["nll"]


def test_windows_are_in_order_of_arrival() -> None:
    report = measure(cell("source", window=40, n=96))
    assert len(report.windows) == 2, "the last 16 of 40 are too few"
    assert report.metrics["worst_window"] == min(report.windows)
    assert measure(cell("source", window=1000)).windows == [pytest.approx(measure(cell("source")).metrics["top1"])]


def test_groups_by_a_plain_loop() -> None:
    """POEM's groups counted batch by batch, from the adapter's masks and the labels."""
    asked = cell("poem", corruptions=("contrast",), lr=0.02)
    loaded = load_cell.load_model(asked, Machine())
    _, stream = load_cell.CellData(asked, loaded.base, Machine()).streams(asked.order())
    adapter = poem.adapt(loaded.model, asked.recipe(), batch_size=32, mean=loaded.base.mean, std=loaded.base.std)
    newly, low, right = 0, 0, 0
    for images, labels, _ in stream:
        adapter(images)
        low += int((adapter.last.first_entropy < 0.4 * np.log(10)).sum())
        mask = adapter.last.newly_reliable
        newly += int(mask.sum())
        right += int((adapter.last.first_logits.argmax(1) == labels)[mask].sum())
    groups = measure(asked).groups
    assert groups["low"]["n"] == low
    assert groups["newly"]["n"] == newly > 0
    assert groups["newly"]["accuracy"] == pytest.approx(100 * right / newly)
    assert groups["high"]["n"] == 96 - low - newly
    moves = measure(asked).probes["transitions"]
    assert moves["low_low"] + moves["low_high"] == low
    assert sum(value for name, value in moves.items() if name != "threshold") == 96


def test_small_batches_are_counted_like_large_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches wait for each other before they are counted: across domains, missed ones, and with gradient norms."""
    settings: dict[str, Any] = {"scenario": "continual", "corruptions": (NOISE, FOG), "n": 40, "batch_size": 8}
    asked = cell("poem", eta=0.5, probes=("gradients",), **settings)
    together = measure(asked)
    monkeypatch.setattr("poem.bench.collect.Collector.QUEUED_IMAGES", 1)
    alone = measure(asked)
    assert together.probes["online"] == alone.probes["online"]
    assert together.groups == alone.groups
    assert together.probes["gradients"]["n"] == alone.probes["gradients"]["n"]
    for name, value in alone.metrics.items():
        assert together.metrics[name] == pytest.approx(value, abs=1e-9)


def test_entropy_before_and_after() -> None:
    report = measure(cell("poem"))
    assert 0 < report.metrics["entropy_after"] < report.metrics["entropy_before"] < np.log(10)


# Data -----------------------------------------------------------------------------------------------------------------


def test_the_images_of_a_limit_are_the_same_for_every_seed_and_domain() -> None:
    parts = []
    for seed in (0, 1):
        asked = cell("source", seed=seed, n=50)
        data = load_cell.CellData(asked, zoo.base("digits-bn"), Machine())
        part = data.stored(single((FOG,)).visits[0].shifts[0])
        assert len(part) == 50
        parts.append(torch.stack([part[i] for i in range(50)]))
        assert np.array_equal(data.corrupted(single((NOISE,)).visits[0].shifts[0]).labels, part.labels)
    assert torch.equal(*parts)
    first, second = (measure(cell("source", seed=seed, n=50, corruptions=("clean",))) for seed in (0, 1))
    assert first.metrics["nll"] == pytest.approx(second.metrics["nll"], abs=1e-6)
    assert first.card["subset"].startswith("50 of 1500")
    assert measure(cell("source", n=5000, corruptions=("clean",), batch_size=500)).card["n"] == 1500


def test_label_shift_works_on_a_subset() -> None:
    report = measure(cell("lame", scenario="label-shift", n=60, options={"length": 80}))
    assert report.ledger["images"] == report.card["total"] == 80


def folder(root: Path, *, broken: bool = False) -> Path:
    """Three classes with the names of ImageNet's, four images each of 40 x 50."""
    image = pytest.importorskip("PIL.Image")
    rng = np.random.RandomState(0)
    for name in ("n01440764", "n02123045", "n03417042"):
        (root / name).mkdir(parents=True)
        for at in range(4):
            path = root / name / f"{at}.png"
            image.fromarray(rng.randint(256, size=(40, 50, 3)).astype(np.uint8)).save(path)
    if broken:
        (root / "n02123045" / "1.png").write_bytes(b"no image")
    return root


@pytest.mark.parametrize("broken", [False, True])
def test_folders_named_by_wnid_are_masked_and_brought_to_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None, broken: bool
) -> None:
    pytest.importorskip("timm")
    add_base(monkeypatch, "thousand", classes=1000, side=16, kind="gn")
    asked = Cell(base="thousand", data="folder", method="tent", weights="random", batch_size=4)
    report = measure(asked, Machine(root=str(folder(tmp_path, broken=broken))))
    assert report.metrics["entropy_before"] <= np.log(3)
    assert "top5" not in report.metrics
    assert report.base["sha256"] == "random"
    assert "centre 16" in report.card["preparation"]
    assert report.ledger["images"] == 12 - broken
    assert report.notes == (["1 images could not be read and were left out"] if broken else [])
    assert str(tmp_path) not in json.dumps(report.to_dict())


def test_stored_corruptions_are_read_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    pytest.importorskip("timm")
    add_base(monkeypatch, "thousand", classes=1000, side=16, kind="gn")
    for name in (NOISE, FOG):
        folder(tmp_path / "ImageNet-C" / name / "5")
    asked = Cell(
        base="thousand", data="imagenet-c", method="source", weights="random", batch_size=4, scenario="continual",
        corruptions=(NOISE, FOG), dataset=(("classes", 3), ("per_class", None)), n=8,
    )  # fmt: skip
    report = measure(asked, Machine(root=str(tmp_path)))
    assert report.domains[f"{NOISE} 5"] == pytest.approx(report.domains[f"{FOG} 5"]), "both hold the same files"
    assert report.domains[f"{NOISE} 5"]["n"] == 8
    assert "poem.corrupt" not in report.card["provenance"]
    assert "short side to 16, centre 16" in report.card["preparation"]


# Labels ---------------------------------------------------------------------------------------------------------------


def test_labels_reach_metrics_only(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    """Wrong labels change what is scored, and nothing that the adapter is given, does or answers."""
    asked = cell("poem", n=None, batch_size=50)
    handed: list[list[Tensor]] = []
    call = Adapter.__call__

    def listen(self: Adapter, *given: Any, **named: Any) -> Tensor:
        assert len(given) == 1
        assert not named
        handed[-1].append(given[0])
        answer = call(self, *given)
        handed[-1].append(answer)
        return answer

    monkeypatch.setattr(Adapter, "__call__", listen)
    images = datasets.mnist_digits(split="test").images[:150]
    reports = []
    for labels in (torch.arange(150) % 10, torch.arange(150) // 15):
        load_cell.clear_caches()
        handed.append([])
        data = Tensors(images, labels, name="digits-test")
        monkeypatch.setitem(datasets.DATASETS, "digits-test", lambda root=None, data=data: data)
        reports.append(measure(asked))
    assert len(handed[0]) == 6
    assert all(torch.equal(one, other) for one, other in zip(*handed, strict=True))
    assert reports[0].ledger == reports[1].ledger
    assert reports[0].metrics["nll"] != reports[1].metrics["nll"]


# Costs ----------------------------------------------------------------------------------------------------------------


def by_reference(method: str, asked: Cell) -> tuple[int, int]:
    """Forwards and backwards of a method, counted by the rules of the efficiency table from a reference's own sets."""
    base = zoo.base(asked.base)
    net = make_net("bn", sharpness=10.0)
    _, stream = load_cell.CellData(asked, base, Machine()).streams(asked.order())
    batches = [images for images, _, _ in stream]
    n, lr = sum(map(len, batches)), asked.lr or 0.0
    if method == "source":
        return n, 0
    if method == "memo":
        return n * (64 + 1), n * 64
    source = [images for images, _ in load_cell.source_images(asked, base, Machine())] if method == "eata" else None
    outcomes = oracles.outcomes(method, net, batches, lr=lr, source=source)
    taught = sum(int(mask.sum()) for outcome in outcomes for mask in outcome.updates)
    chosen = sum(int(outcome.selected.sum()) for outcome in outcomes)
    if method == "sar":  # a second pass and a second loss for those of the first
        return n + chosen, chosen + taught
    if method == "deyo":  # one more pass for the sure ones, with their patches shuffled
        sure = [oracles.entropy(outcome.answer) < 0.5 * np.log(10) for outcome in outcomes]
        return n + sum(int(mask.sum()) for mask in sure), taught
    if method == "poem":  # every update is followed by another forward pass
        return sum(len(x) * (1 + len(outcome.updates)) for x, outcome in zip(batches, outcomes, strict=True)), taught
    return n, taught


@pytest.mark.parametrize("method", ["source", "memo", "tent", "eata", "sar", "deyo", "poem"])
def test_counts_of_the_efficiency_table(method: str, monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    add_base(monkeypatch, "digits-toy")
    few = method == "memo"
    asked = Cell(
        base="digits-toy", data="digits-test", method=method, corruptions=(NOISE,), n=4 if few else 120,
        batch_size=2 if few else 24, lr=0.02, weights="random", source_images=60,
    )  # fmt: skip
    ledger = measure(asked).ledger
    assert (ledger["forwards"], ledger["backwards"]) == by_reference(method, asked)
    assert ledger["source_images"] == (60 if method == "eata" else 0)
    if method in ("eata", "sar", "deyo", "poem"):
        assert 0 < ledger["taught"] < ledger["rounds"] * 24, "neither nobody nor everybody teaches"


def test_eata_without_source_images_says_so() -> None:
    report = measure(cell("eata", source_images=0))
    assert report.ledger["source_images"] == 0
    assert report.notes == ["eata without source images: no anchor, as ETA"]
    assert report.card["source_access"] == "none"
    assert report.metrics == measure(cell("eta")).metrics


def test_timing_is_apart() -> None:
    timing = measure(cell("source")).timing
    assert 0 < timing["adapt_s"] + timing["data_s"] < timing["total_s"]
    assert timing["images_per_s"] == pytest.approx(96 / timing["adapt_s"])
    assert timing["peak_bytes"] > 1e7


# The stream that does not wait ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("eta", "ratio", "pattern"),
    [
        (1, 2.6, "AmmAmmAmmAmm"),
        (0.5, 2.6, "AmAmAmAmAmAm"),
        (0, 2.6, "AAAAAAAAAAAA"),
        (1, 1.0, "AAAAAAAAAAAA"),
        (1, 1.0001, "AmAmAmAmAmAm"),
        (1, 8.2, "AmmmmmmmmAmm"),
    ],
)
def test_which_batches_are_missed(eta: float, ratio: float, pattern: str) -> None:
    delay, seen = Delay(eta, ratio), ""
    for _ in pattern:
        if delay.misses():
            seen += "m"
        else:
            seen += "A"
            delay.spend(ratio)
    assert seen == pattern


def test_missed_batches_are_answered_as_last_adapted() -> None:
    asked = cell("tent", n=96, batch_size=16, lr=0.05, eta=1.0, ratio=100.0)
    report = measure(asked)
    assert report.probes["online"]["adapted"] == 1
    assert report.probes["online"]["missed"] == 5
    assert report.ledger["backwards"] == 16
    loaded = load_cell.load_model(asked, Machine())
    stream, _ = load_cell.CellData(asked, loaded.base, Machine()).streams(asked.order())
    adapter = poem.adapt(loaded.model, asked.recipe(), mean=loaded.base.mean, std=loaded.base.std)
    right = 0
    for at, (images, labels, _) in enumerate(stream):
        if at == 0:
            adapter(images)
            continue
        with adapter.frozen():
            right += int((adapter(images).argmax(1) == labels).sum())
    assert report.probes["online"]["top1_missed"] == pytest.approx(100 * right / 80)


def test_entropies_are_means_over_the_batches_that_were_adapted_to() -> None:
    """Missed batches have an answer and no first look."""
    settings: dict[str, Any] = {"n": 96, "batch_size": 16, "lr": 0.0}
    missed = measure(cell("tent", eta=1.0, ratio=100.0, **settings))
    asked = cell("tent", **settings)
    loaded = load_cell.load_model(asked, Machine())
    stream, _ = load_cell.CellData(asked, loaded.base, Machine()).streams(asked.order())
    adapter = poem.adapt(loaded.model, asked.recipe(), mean=loaded.base.mean, std=loaded.base.std)
    adapter(next(iter(stream)).images)
    assert missed.metrics["entropy_before"] == pytest.approx(float(adapter.last.first_entropy.mean()), abs=1e-6)


def test_what_an_adapter_notes_is_in_the_result() -> None:
    report = measure(cell("tent", batch_size=1, n=2))
    assert [note for note in report.notes if "one image at a time through batch norm" in note]


def test_cost_counted_in_forwards() -> None:
    """A backward is worth two forwards: Tent takes three in all, the source model one."""
    tent = measure(cell("tent", n=96, batch_size=16, eta=1.0)).probes["online"]
    assert (tent["ratio"], tent["adapted"], tent["missed"]) == (3.0, 2, 4)
    source = measure(cell("source", n=96, batch_size=16, eta=1.0)).probes["online"]
    assert (source["ratio"], source["adapted"], source["missed"]) == (1.0, 6, 0)
    assert "top1_missed" not in source


def test_what_is_computed_and_not_used_costs_time_too() -> None:
    """DeYO needs the gradients of those that it selects; the whole batch goes through the network and back."""
    report = measure(cell("deyo", n=96, batch_size=16, eta=1e-9))
    ledger, online = report.ledger, report.probes["online"]
    assert (ledger["forwards_computed"], ledger["backwards_computed"]) > (ledger["forwards"], ledger["backwards"])
    counted = (ledger["forwards_computed"] + 2 * ledger["backwards_computed"]) / ledger["images"]
    assert online["ratio"] == pytest.approx(counted)


def test_every_domain_begins_on_time() -> None:
    report = measure(cell("tent", scenario="continual", corruptions=(NOISE, FOG), n=32, batch_size=16, eta=9.0))
    assert report.probes["online"]["adapted"] == 2, "the first batch of each"


def test_cost_by_the_clock() -> None:
    report = measure(cell("poem", n=96, batch_size=16, eta=1.0, ratio="measured"))
    online = report.probes["online"]
    assert online["adapted"] + online["missed"] == 6
    assert online["ratio"] > 1
    assert "depends on the clock" in report.notes[0]


def test_a_run_learns_nothing_from_the_clock() -> None:
    """The plain forward that is timed beside a call leaves the adapter as it was."""
    batches = [(torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(i)), torch.zeros(4).long())
               for i in range(3)]  # fmt: skip
    answers = []
    for delay in (None, Delay(0.0, "measured")):
        run = StreamRun(poem.adapt(make_net("bn", sharpness=6.0), "deyo+poem", lr=0.05), delay=delay)
        answers.append([each.logits for each in run.answers(batches)])
    assert all(torch.equal(one, other) for one, other in zip(*answers, strict=True))


# What cannot be measured ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"base": "digits-bm"}, "did you mean 'digits-bn'"),
        ({"data": "digit-test"}, "did you mean 'digits-test'"),
        ({"probes": ("gradient",)}, "unknown probe 'gradient'"),
        ({"ratio": "guessed", "eta": 1.0}, "expected ratio 'counted', 'measured' or a number"),
        ({"precision": "fp8"}, "expected precision fp32, tf32 or bf16"),
        ({"scenario": "one-by-one"}, "one-by-one prescribes batch size 1, got 32"),
        ({"data": "cifar100", "base": "digits-bn"}, "POEM_DATA|expected at most"),
    ],
)
def test_errors_say_what_to_type(changed: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POEM_DATA", raising=False)
    with pytest.raises(ValueError, match=words):
        measure(replace(cell("tent"), **changed))


def test_source_images_that_are_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh: None) -> None:
    pytest.importorskip("timm")
    add_base(monkeypatch, "thousand", classes=1000, side=16, kind="gn")
    folder(tmp_path / "ImageNet-C" / FOG / "5")
    asked = Cell(
        base="thousand", data="imagenet-c", method="eata", weights="random", batch_size=4, corruptions=(FOG,),
        dataset=(("classes", 3), ("per_class", None)),
    )  # fmt: skip
    with pytest.raises(FileNotFoundError, match="--set source_images=0"):
        measure(asked, Machine(root=str(tmp_path)))


def test_source_images_of_an_imagenet_base(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fresh: None) -> None:
    pytest.importorskip("timm")
    add_base(monkeypatch, "thousand", classes=1000, side=16, kind="gn")
    folder(tmp_path / "imagenet-val")
    folder(tmp_path / "ImageNet-C" / FOG / "5")
    asked = Cell(
        base="thousand", data="imagenet-c", method="eata", weights="random", batch_size=4, corruptions=(FOG,),
        dataset=(("classes", 3), ("per_class", None)), source_images=10,
    )  # fmt: skip
    report = measure(asked, Machine(root=str(tmp_path)))
    assert report.ledger["source_images"] == 10
    assert report.card["source_access"] == "10 clean images, to measure importance"


def test_fresh_weights_follow_the_seed(fresh: None) -> None:
    prints = [measure(cell("source", weights="random", seed=seed)).metrics["nll"] for seed in (0, 1, 0)]
    assert prints[0] == prints[2] != prints[1]


def test_a_folder_of_weights_need_not_hold_what_the_package_carries(tmp_path: Path) -> None:
    there = measure(cell("source"), Machine(weights=str(tmp_path)))
    assert there.identity() == measure(cell("source")).identity()
    with pytest.raises(FileNotFoundError, match=r"expected vit_tiny_patch16_224\..*safetensors in"):
        measure(cell("source", base="vit-tiny16"), Machine(weights=str(tmp_path)))


def test_a_failure_gives_the_model_back() -> None:
    asked = cell("tent")

    def stop(done: int, total: int) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        measure(asked, on_progress=stop)
    from poem.engine.model_lock import model_lock

    assert model_lock(load_cell.load_model(asked, Machine()).model).adapters == 0


def test_provenance_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(origins, "_git", lambda *words: None)
    origins._commit.cache_clear()
    found = origins.provenance()
    origins._commit.cache_clear()
    assert (found["commit"], found["dirty"]) == (None, None)
    assert found["torch"] == torch.__version__
