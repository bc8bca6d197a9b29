"""Labels cannot reach an adapter: with other labels every method is given and answers the same, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from nets import make_net
from torch import Tensor
from toys import images

import poem
from poem.adapter import Adapter
from poem.bench import load_cell
from poem.bench.cell import Cell
from poem.bench.measure import measure
from poem.bench.result import CellResult
from poem.cli.main import main
from poem.engine.accounting import BatchRecord
from poem.parts import Need
from poem.predict import answers
from poem.streams import datasets
from poem.streams.datasets import Stream, Tensors
from poem.streams.loading.prepare import Prepare
from poem.streams.orders import SCENARIOS, scenario

NORMAL: dict[str, Any] = {"mean": (0.5,) * 3, "std": (0.25,) * 3}
CORRUPTIONS = ("contrast", "fog")
FRESH = 12


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Everything that adapters are given and answer, in order; they are given images alone."""
    seen: list[Tensor] = []
    call = Adapter.answer_with_record

    def listen(self: Adapter, *given: Any, **named: Any) -> tuple[Tensor, BatchRecord]:
        assert len(given) == 1
        assert not named
        answer, record = call(self, *given)
        seen.extend((given[0].clone(), answer.clone()))
        return answer, record

    monkeypatch.setattr(Adapter, "answer_with_record", listen)
    return seen


def taken(handed: list[Tensor]) -> list[Tensor]:
    """What came since the last time."""
    found = list(handed)
    handed.clear()
    return found


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    assert first
    return len(first) == len(second) and all(map(torch.equal, first, second))


@pytest.mark.parametrize("method", poem.methods())
def test_no_method_sees_a_label_in_evaluate(method: str, handed: list[Tensor]) -> None:
    size = 1 if "memo" in method else 8
    batches = images(2 * size, seed=0).split(size)
    labels = [torch.arange(at, at + size) % 10 for at in (0, 3)]
    net = make_net("ln" if poem.recipe(method).first_with(Need.TOKENS) is not None else "bn", sharpness=8.0)
    further: dict[str, Any] = {"source_data": [images(8, seed=2)]} if poem.recipe(method).uses_source_data else {}
    rows = []
    for change in (0, 7):
        given = [(batch, (label + change) % 10) for batch, label in zip(batches, labels, strict=True)]
        rows.append(poem.evaluate(net, given, method, lr=0.01, **NORMAL, **further)[method])
        if change == 0:
            first = taken(handed)
    assert same(first, taken(handed))
    assert (rows[0].forwards, rows[0].backwards) == (rows[1].forwards, rows[1].backwards)
    assert rows[0].nll != rows[1].nll, "the labels did change"


def test_labels_of_another_kind_change_nothing_either(handed: list[Tensor]) -> None:
    batch, label = images(8, seed=0), torch.arange(8)
    first: list[Tensor] = []
    for form in (label, label.flip(0), torch.nn.functional.one_hot(label, 10), label.float()[:, None]):
        poem.evaluate(make_net("bn", sharpness=8.0), [(batch, form)] * 2, "poem", lr=0.01)
        found = taken(handed)
        assert same(first or found, found)
        first = found


class Relabelled:
    """A stream whose labels are other ones, once its order is fixed."""

    def __init__(self, stream: Stream) -> None:
        self.stream, self.failures = stream, stream.failures

    def __iter__(self) -> Iterator[Any]:
        for piece in self.stream:
            yield piece._replace(labels=(piece.labels + 7) % 10)


def asked(name: str, method: str) -> Cell:
    options = {"recurring": {"cycles": 2}, "label-shift": {"length": 20}}.get(name, {})
    shifts, size = CORRUPTIONS[: 1 if name == "gradual" else 2], 1 if name == "one-by-one" else 8
    return Cell(
        base="digits-bn", data="digits-test", method=method, scenario=name, corruptions=shifts, batch_size=size, n=10,
        preset="cifar", lr=0.01, options=tuple(options.items()), source_images=16,
    )  # fmt: skip


def digits(labels: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve digits with these labels, in the place of all."""
    data = Tensors(datasets.mnist_digits(split="test").images[:FRESH], labels, name="digits-test")
    monkeypatch.setitem(datasets.DATASETS, "digits-test", lambda root=None: data)
    load_cell.clear_caches()


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing kept from other tests, nothing left for them."""
    load_cell.clear_caches()
    yield
    load_cell.clear_caches()


@pytest.mark.parametrize("method", ["poem", "lame"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_no_scenario_shows_a_label_to_a_cell(
    name: str, method: str, handed: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orders that arrange by class may use labels to arrange; after that no label may matter."""
    cell, labels = asked(name, method), torch.arange(FRESH) % 10
    digits(labels, monkeypatch)
    reports = [measure(cell)]
    first = taken(handed)
    needs = scenario(name, corruptions=CORRUPTIONS).within.needs_labels
    if not needs:
        digits(((labels + 7) % 10).flip(0), monkeypatch)
        reports.append(measure(cell))
        assert same(first, taken(handed))
        digits(labels, monkeypatch)
    streams = load_cell.CellData.streams
    monkeypatch.setattr(
        load_cell.CellData, "streams", lambda self, order: (Relabelled((both := streams(self, order))[0]), both[1])
    )
    reports.append(measure(cell))
    assert same(first, taken(handed))
    for report in reports[1:]:
        assert (report.ledger, report.notes, report.card) == (reports[0].ledger, reports[0].notes, reports[0].card)
        assert report.metrics["nll"] != reports[0].metrics["nll"], "the labels did change"


def test_orders_that_arrange_by_class_are_known() -> None:
    """So that the test above cannot pass by calling all of them such."""
    needs = {name for name in SCENARIOS if scenario(name, corruptions=CORRUPTIONS).within.needs_labels}
    assert needs == {"correlated", "label-shift"}


def test_poem_run_shows_no_label(
    handed: list[Tensor], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["run", "--base", "digits-bn", "--data", "digits-test", "--method", "deyo+poem", "--corruption", "fog",
             "--preset", "cifar", "--lr", "0.01", "--batch-size", "6", "--out", f"{tmp_path}/result.json"]  # fmt: skip
    metrics, found = [], []
    for labels in (torch.arange(FRESH) % 10, (torch.arange(FRESH) + 7) % 10):
        digits(labels, monkeypatch)
        assert main(words) == 0
        found.append(taken(handed))
        metrics.append(CellResult.load(tmp_path / "result.json").metrics)
    assert same(*found)
    assert metrics[0]["nll"] != metrics[1]["nll"]
    for name in ("entropy_before", "entropy_after"):
        assert metrics[0][name] == metrics[1][name]


def test_predict_answers_alike_whatever_folder_an_image_is_in(tmp_path: Path, handed: list[Tensor]) -> None:
    """Folders may be classes: the same images in the same order, with the border between two folders elsewhere."""
    picture = pytest.importorskip("PIL.Image")
    pixels = (images(8, seed=0) * 255).to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    found = []
    for border in (2, 5):
        top = tmp_path / str(border)
        files = [top / ("n01440764" if at < border else "n02123045") / f"{at}.png" for at in range(8)]
        for path, each in zip(files, pixels, strict=True):
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.fromarray(each).save(path)
        net = make_net("bn", sharpness=8.0)
        made = answers(net, files, "poem", prepare=Prepare(), folder=top, batch_size=4, lr=0.01)
        found.append([each for batch in made for each in batch])
        if border == 2:
            first = taken(handed)
    assert same(first, taken(handed))
    one, other = ([(each.label, each.confidence, each.entropy, each.taught) for each in rows] for rows in found)
    assert one == other
