"""Metrics against numbers worked out by hand, and against torchmetrics where it is installed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from poem.bench.metrics import AURC, ECE, NLL, Accuracy, Metric, Windows


def batch(confidences: list[float], right: list[bool]) -> tuple[Tensor, Tensor]:
    """Two classes; class 0 is always the answer, with the given probability."""
    sure = torch.tensor(confidences, dtype=torch.float64)
    return torch.stack([sure.log(), (1 - sure).log()], 1), torch.tensor([0 if each else 1 for each in right])


def fed(metric: Metric, logits: Tensor, labels: Tensor, size: int) -> float:
    for part in zip(logits.split(size), labels.split(size), strict=True):
        metric.update(*part)
    return metric.result()


def test_aurc_by_hand() -> None:
    """Risks 0, 0, 1/3, 1/4 at coverages of one to four samples."""
    logits, labels = batch([0.9, 0.6, 0.8, 0.7], [True, True, True, False])
    assert fed(AURC(), logits, labels, 3) == pytest.approx((0 + 0 + 1 / 3 + 1 / 4) / 4)


def test_an_error_costs_most_where_it_is_most_confident() -> None:
    worst = fed(AURC(), *batch([0.9, 0.8, 0.7], [False, True, True]), 3)
    best = fed(AURC(), *batch([0.9, 0.8, 0.7], [True, True, False]), 3)
    assert worst == pytest.approx((1 + 1 / 2 + 1 / 3) / 3)
    assert best == pytest.approx(1 / 9)


def test_equally_confident_samples_have_no_order() -> None:
    """Their errors arrive evenly: of three with one error, a third at each step."""
    results = {
        fed(AURC(), *batch([0.9, 0.8, 0.8, 0.8], [True, *right]), 2)
        for right in ([False, True, True], [True, False, True], [True, True, False])
    }
    assert len(results) == 1
    assert results.pop() == pytest.approx((0 + (1 / 3) / 2 + (2 / 3) / 3 + 1 / 4) / 4)


def test_aurc_forgets() -> None:
    metric = AURC()
    assert metric.result() == 0.0
    assert fed(metric, *batch([0.9], [False]), 1) == 1.0
    metric.reset()
    assert metric.result() == 0.0


@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [
        (3, 10, [2 / 3]),  # the only window counts, however short
        (10, 4, [3 / 4, 3 / 4, 1 / 2]),  # two of four: half a window counts
        (9, 4, [3 / 4, 3 / 4]),  # one of four does not
        (8, 4, [3 / 4, 3 / 4]),
        (2, 1, [1.0, 0.0]),
    ],
)
def test_windows_by_hand(count: int, size: int, expected: list[float]) -> None:
    right = [True, False, True, True, True, False, True, True, True, False][:count]
    metric = Windows(size)
    fed(metric, *batch([0.9] * count, right), 3)
    assert metric.accuracies() == pytest.approx(expected)
    assert metric.result() == pytest.approx(min(expected))


def test_windows_need_an_image() -> None:
    assert Windows(5).result() == 0.0
    with pytest.raises(ValueError, match="at least 1 image, got 0"):
        Windows(0)


def test_nothing_depends_on_how_the_stream_is_cut() -> None:
    rng = torch.Generator().manual_seed(0)
    logits, labels = 3 * torch.randn(200, 7, generator=rng), torch.randint(7, (200,), generator=rng)
    for make in (Accuracy, lambda: Accuracy(5), NLL, ECE, AURC, lambda: Windows(30)):
        whole, cut = fed(make(), logits, labels, 200), fed(make(), logits, labels, 13)
        assert whole == pytest.approx(cut, abs=1e-12)


def test_torchmetrics_agrees() -> None:
    theirs = pytest.importorskip("torchmetrics.functional.classification")
    rng = torch.Generator().manual_seed(1)
    logits, labels = 3 * torch.randn(500, 10, generator=rng), torch.randint(10, (500,), generator=rng)
    for top in (1, 5):
        expected = theirs.multiclass_accuracy(logits, labels, num_classes=10, top_k=top, average="micro")
        assert fed(Accuracy(top), logits, labels, 64) == pytest.approx(float(expected), abs=1e-6)
    error = theirs.multiclass_calibration_error(logits.double().softmax(1), labels, num_classes=10, n_bins=15)
    assert fed(ECE(), logits, labels, 64) == pytest.approx(float(error), abs=1e-6)
    expected = torch.nn.functional.cross_entropy(logits, labels)
    assert fed(NLL(), logits, labels, 64) == pytest.approx(float(expected), abs=1e-6)
    perplexity = pytest.importorskip("torchmetrics.functional.text").perplexity
    assert math.log(float(perplexity(logits[None], labels[None]))) == pytest.approx(float(expected), abs=1e-5)


def test_accuracy_counts_samples_and_not_batches() -> None:
    metric = Accuracy()
    metric.update(torch.eye(4), torch.arange(4))
    metric.update(torch.eye(4)[:1], torch.tensor([3]))
    assert metric.result() == pytest.approx(4 / 5)
