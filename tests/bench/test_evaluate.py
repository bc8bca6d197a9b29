"""`poem.evaluate` over data sets, seeds and shifts, and the formats of its table."""

from __future__ import annotations

import csv
import io
import logging
import re
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from nets import make_net
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

import poem
from poem.bench.evaluate import Row, Table
from poem.streams.datasets import Stream, Tensors
from poem.streams.orders import continual


def pictures(count: int = 32) -> TensorDataset:
    drawn = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.rand(count, 3, 16, 16, generator=drawn), torch.randint(10, (count,), generator=drawn)
    )  # fmt: skip


def shifted(seed: int = 0) -> Stream:
    data = Tensors(*pictures().tensors)
    return Stream(data=data, order=continual(["fog", "contrast"], severity=3, seed=seed), batch_size=8)


def test_a_data_set_is_taken_in_one_random_order() -> None:
    net, data = make_net("bn"), pictures()
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0)).tolist()
    table = poem.evaluate(net, data, ["source", "tent"], batch_size=8, lr=0.1)
    by_hand = poem.evaluate(net, DataLoader(Subset(data, order), 8), ["source", "tent"], batch_size=8, lr=0.1)
    assert [(row.accuracy, row.nll) for row in table] == [(row.accuracy, row.nll) for row in by_hand]
    assert table["tent"].n == 32
    own = poem.evaluate(net, Tensors(*data.tensors), "source", batch_size=8)["source"]
    assert own.accuracy == table["source"].accuracy


def test_other_kinds_of_data_sets() -> None:
    class Coming(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(pictures())

    class Plain:
        def __len__(self) -> int:
            return 6

        def __getitem__(self, index: int) -> tuple[np.ndarray[Any, Any], int]:
            return np.zeros((3, 16, 16), np.float32), index

    net = make_net("gn")
    assert poem.evaluate(net, Coming(), "source")["source"].n == 32
    assert poem.evaluate(net, Plain(), "source")["source"].n == 6
    assert poem.evaluate(net, lambda seed: DataLoader(pictures(), 8), "source")["source"].n == 32


class ByName(nn.Module):
    """A network that is called with `pixel_values`, and a scale beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = make_net("bn")

    def forward(self, pixel_values: Tensor, scale: Tensor) -> Tensor:
        logits: Tensor = self.net(pixel_values) * scale
        return logits


def test_mappings_with_labels_of_any_kind_are_scored() -> None:
    images, labels = pictures().tensors
    kinds: list[Any] = [list, Tensor.numpy, Tensor.tolist, lambda each: each]
    found = [
        [
            ({"pixel_values": images[at], "scale": torch.ones(8, 1)}, kind(labels[at]))
            for at in torch.arange(32).split(8)
        ]
        for kind in kinds
    ]
    rows = [poem.evaluate(ByName(), loader, ["source", "tent"])["tent"] for loader in found]
    assert {row.n for row in rows} == {32}
    assert len({row.nll for row in rows}) == 1
    with pytest.raises(ValueError, match="expected one label for each of 8 images, got 7"):
        poem.evaluate(ByName(), [(found[0][0][0], labels[:7])], "source")


@pytest.mark.parametrize("which", ["pixel_values", "scale", "labels"])
def test_mappings_that_differ_between_methods_are_refused(which: str) -> None:
    class Drawn:
        def __iter__(self) -> Iterator[Any]:
            batch = {"pixel_values": torch.zeros(8, 3, 16, 16), "scale": torch.ones(8, 1)}
            labels = [0] * 7 + [next(numbers) if which == "labels" else 0]
            yield {name: torch.rand_like(each) if name == which else each for name, each in batch.items()}, labels

    numbers = iter(range(10))
    with pytest.raises(ValueError, match="expected the same batches for every method"):
        poem.evaluate(ByName(), Drawn(), ["source", "tent"])


def test_shifts_that_some_seeds_lack_are_means_over_the_others() -> None:
    data, drawn = Tensors(*pictures().tensors), [["fog", "contrast"], ["contrast", "gaussian_noise"]]
    table = poem.evaluate(
        make_net("bn"), lambda seed: Stream(data=data, order=continual(drawn[seed], severity=3), batch_size=8),
        ["source", "bn"], seeds=2, by="shift",
    )  # fmt: skip
    assert sorted(len(values) for values in table["bn"].shifts.values()) == [1, 1, 2]
    assert all(word in str(table) for word in ("fog", "contrast", "gaussian_noise"))


def test_none_is_auto_with_a_guard() -> None:
    table = poem.evaluate(make_net("bn"), DataLoader(pictures(), 8), ["source", None])
    assert [row.method for row in table] == ["source", "auto, guarded"]
    assert poem.evaluate(make_net("bn"), DataLoader(pictures(), 8), None)["auto, guarded"].n == 32


def test_a_data_set_without_labels_is_told_so() -> None:
    class Unlabelled(Dataset[Tensor]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> Tensor:
            return torch.rand(3, 16, 16)

    net = make_net("bn")
    with pytest.raises(
        TypeError, match=r"expected items \(image, label\) of the data set, got a Tensor: scoring needs"
    ):
        poem.evaluate(net, Unlabelled(), "tent")
    with pytest.raises(TypeError, match=r"got a tuple of 1: scoring needs labels"):
        poem.evaluate(net, TensorDataset(torch.rand(4, 3, 16, 16)), "tent")
    with pytest.raises(TypeError, match=r"expected batches of \(images, labels\), got tuple of 1"):
        poem.evaluate(net, [(torch.rand(4, 3, 16, 16),)], "tent")
    with pytest.raises(TypeError, match=r"expected a loader of .*, a stream or a data set, got int"):
        poem.evaluate(net, 3, "tent")


def test_seeds_give_mean_deviation_and_paired_differences() -> None:
    net, data = make_net("bn", sharpness=8.0), pictures(128)
    table = poem.evaluate(net, data, ["source", "tent"], seeds=3, batch_size=8, lr=0.5)
    assert table.seeds == (0, 1, 2)
    alone = [poem.evaluate(net, data, "tent", seeds=[seed], batch_size=8, lr=0.5)["tent"] for seed in range(3)]
    row = table["tent"]
    assert row.accuracies == tuple(each.accuracy for each in alone)
    assert row.accuracy == pytest.approx(np.mean(row.accuracies))
    assert row.deviation == pytest.approx(np.std(row.accuracies, ddof=1))
    assert table["source"].deviation == 0, "another order of the same images"
    assert alone[0].deviation is None
    (difference,) = table.differences()
    apart = np.subtract(row.accuracies, table["source"].accuracies)
    assert difference.points == pytest.approx(apart.mean())
    assert difference.deviation == pytest.approx(apart.std(ddof=1))
    assert difference.error > 0
    assert f"(deviation {difference.deviation:.2f} over 3 seeds; " in str(difference)
    said = f"standard error {difference.error:.2f} over images alone, which ignores that order and seeds matter)"
    assert str(difference).endswith(said)
    assert table.differences("tent")[0].points == pytest.approx(-difference.points)
    assert f"{row.accuracy:.1f} ± {row.deviation:.1f}" in str(table)
    assert "against source" in str(table)


def test_one_seed_has_no_deviation() -> None:
    table = poem.evaluate(make_net("bn"), pictures(), ["source", "tent"], batch_size=8)
    assert "±" not in str(table)
    assert table.differences()[0].deviation is None
    assert "deviation" not in str(table.differences()[0])


def test_a_stream_is_drawn_anew_for_every_seed() -> None:
    net = make_net("bn")
    table = poem.evaluate(net, shifted(), ["source", "tent"], seeds=[4, 7], by="shift", lr=0.1)
    for at, seed in enumerate((4, 7)):
        alone = poem.evaluate(net, shifted(seed), "tent", seed=seed, lr=0.1)["tent"]
        assert table["tent"].accuracies[at] == alone.accuracy
        assert {name: values[at] for name, values in table["tent"].shifts.items()} == {
            name: values[0] for name, values in alone.shifts.items()
        }
    assert list(table["tent"].shifts) == ["fog 3", "contrast 3"]
    assert str(table).splitlines()[0].split() == ["method", "fog", "3", "contrast", "3", "mean"]
    means = [mean for mean, _ in table["tent"].by_shift().values()]
    assert table["tent"].accuracy == pytest.approx(np.mean(means)), "both shifts have all images"


def test_a_loader_with_one_order_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    net = make_net("bn")
    with caplog.at_level(logging.WARNING, "poem"):
        poem.evaluate(net, list(DataLoader(pictures(), 8)), "tent", seeds=2)
    assert "every seed has seen the same images in the same order" in caplog.text
    caplog.clear()
    poem.evaluate(net, pictures(), "tent", seeds=2)
    assert not caplog.text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"seeds": 0}, "expected seeds as a list of integers, or their number, got 0"),
        ({"seeds": [1, 1]}, "expected seeds as different integers"),
        ({"seeds": []}, "expected seeds as different integers"),
        ({"by": "class"}, "expected by 'shift' or None, got 'class'"),
        ({"by": "shift"}, "expected a stream whose batches state their shift"),
    ],
)
def test_what_cannot_be_asked_for_is_said(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        poem.evaluate(make_net("bn"), pictures(), "source", **settings)
    with pytest.raises(TypeError, match="got both"):
        poem.evaluate(make_net("bn"), pictures(), "source", seeds=2, seed=1)


def test_the_table_in_every_format() -> None:
    table = poem.evaluate(make_net("bn"), pictures(), {"source_a & b": "source", "tent": "tent"}, seeds=2, lr=0.5)
    lines = table.latex().splitlines()
    assert lines[0] == r"\begin{tabular}{lrrrrrrrr}"
    assert lines[1:5:2] == [r"\toprule", r"\midrule"]
    assert lines[4].startswith(r"source\_a \& b & ")
    assert r"$\pm$" in lines[4]
    assert lines[-2:] == [r"\bottomrule", r"\end{tabular}"]
    assert sum(r"\textbf{" in line for line in lines) >= 1
    held = list(csv.DictReader(io.StringIO(table.csv())))
    assert [row["method"] for row in held] == ["source_a & b", "tent"]
    assert float(held[1]["accuracy"]) == table["tent"].accuracy
    assert float(held[1]["difference"]) == table.differences()[0].points
    assert held[0]["difference"] == ""
    assert table.markdown().count("\n") == 3


def test_the_table_as_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    table = poem.evaluate(make_net("bn"), shifted(), ["source", "tent"], by="shift")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pandas", None)
        with pytest.raises(ImportError, match="pip install pandas"):
            table.frame()
    pytest.importorskip("pandas")
    frame = table.frame()
    assert list(frame["shift"]) == ["fog 3", "contrast 3"] * 2
    assert frame["accuracy"].tolist() == [mean for row in table for mean, _ in row.by_shift().values()]


def test_rows_made_by_hand_have_no_difference() -> None:
    row = Row(
        method="a", accuracy=50.0, ece=1.0, nll=1.0, n=2, forwards=2, backwards=0, source_images=0, seconds=1.0
    )  # fmt: skip
    with pytest.raises(ValueError, match="rows without answers"):
        Table((row, row.__class__(**{**vars(row), "method": "b"}))).differences()


def test_progress_is_shown_on_a_terminal_or_where_it_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    net = make_net("bn")

    def shown(loader: Any, **settings: Any) -> list[str]:
        poem.evaluate(net, loader, ["source", "tent"], batch_size=8, **settings)
        return capsys.readouterr().err.splitlines()

    monkeypatch.setattr("poem._util.progress.EVERY", 0.0)
    quiet = poem.evaluate(net, pictures(), ["source", "tent"], batch_size=8, lr=0.1)
    assert capsys.readouterr().err == "", "standard error is no terminal here"
    lines = [re.sub(", about .* left", "", each) for each in shown(pictures(), seeds=2, lr=0.1, progress=True)]
    assert lines == [f"{each}: {at + 1}/16 batches" for at, each in enumerate(
        ["source, seed 0"] * 4 + ["tent, seed 0"] * 4 + ["source, seed 1"] * 4 + ["tent, seed 1"] * 3
    )]  # fmt: skip
    lines = [re.sub(", about .* left", "", each) for each in shown(shifted(), progress=True)]
    assert lines[:2] == ["source: 1 batches", "source: 2 batches"], "a stream does not say how many it has"
    assert lines[8] == "tent: 9/16 batches", "and the first method has counted them"
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert shown(pictures())
    assert shown(pictures(), progress=False) == []
    again = poem.evaluate(net, pictures(), ["source", "tent"], batch_size=8, lr=0.1)
    assert [row.accuracies for row in again] == [row.accuracies for row in quiet]
    with pytest.raises(TypeError, match="expected progress=True, False or None, got 'yes'"):
        poem.evaluate(net, pictures(), progress="yes")  # type: ignore[arg-type]
