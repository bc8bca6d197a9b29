"""Signals: running averages of both answers equal those over all images seen, or over the last ones."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from poem.guarded.signals import Averages, Signals

CPU = torch.device("cpu")


def log_probs(count: int, seed: int, sharpness: float = 2.0, classes: int = 5) -> Tensor:
    logits = torch.randn(count, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (sharpness * logits).log_softmax(1)


def entropy(probs: Tensor) -> Tensor:
    return -(probs * probs.log()).sum(-1)


@pytest.mark.parametrize("sizes", [[30], [7, 1, 12, 10], [1] * 30])
def test_up_to_the_horizon_averages_are_those_over_all_images(sizes: list[int]) -> None:
    source, adapted = log_probs(30, 0), log_probs(30, 1, 4.0)
    averages = Averages.start(5, CPU)
    for one, other in zip(source.split(sizes), adapted.split(sizes), strict=True):
        averages = averages.moved(one, other, None, horizon=1000)
    for index, each in enumerate((source.exp(), adapted.exp())):
        balance, mean = entropy(each.mean(0)), entropy(each).mean()
        assert float(averages.balances[index]) == pytest.approx(float(balance), abs=1e-6)
        assert float(averages.information[index]) == pytest.approx(float(balance - mean), abs=1e-6)
    assert float(averages.seen) == 30


def test_past_the_horizon_old_images_are_forgotten() -> None:
    averages = Averages.start(5, CPU)
    for seed in range(40):
        averages = averages.moved(log_probs(10, seed), log_probs(10, seed), None, horizon=20)
    one_class = torch.full((10, 5), -50.0, dtype=torch.float64)
    one_class[:, 2] = 0
    for _ in range(20):  # each batch is half of the horizon
        averages = averages.moved(one_class, log_probs(10, 3), None, horizon=20)
    assert float(averages.information[0]) == pytest.approx(0, abs=1e-4)
    assert float(averages.information[1]) > 0.1
    averages = averages.moved(log_probs(64, 5), log_probs(64, 6), None, horizon=20)  # longer than the horizon
    torch.testing.assert_close(averages.source_mean, log_probs(64, 5).exp().mean(0))


@settings(max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 40), st.floats(0.1, 20))
def test_information_lies_between_none_and_all(sizes: list[int], horizon: int, sharpness: float) -> None:
    averages = Averages.start(5, CPU)
    for seed, size in enumerate(sizes):
        batch = log_probs(size, seed, sharpness)
        averages = averages.moved(batch, batch, None, horizon)
    low, high = -1e-5, math.log(5) + 1e-5
    assert all(low <= value <= high for value in [*averages.information.tolist(), *averages.balances.tolist()])


def test_neither_a_collapsed_nor_an_unsure_network_has_information() -> None:
    sure = torch.full((5, 5), -40.0).fill_diagonal_(0).log_softmax(1)
    same, unsure = sure[:1].expand(5, 5), torch.zeros(5, 5).log_softmax(1)
    start = Averages.start(5, CPU)
    assert start.moved(sure, same, None, 100).information.tolist() == pytest.approx([math.log(5), 0], abs=1e-5)
    assert start.moved(sure, unsure, None, 100).information.tolist() == pytest.approx([math.log(5), 0], abs=1e-5)


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_are_left_out_of_both(strange: float) -> None:
    source, adapted = log_probs(6, 0), log_probs(6, 1)
    broken = adapted.clone()
    broken[2], broken[4] = strange, strange
    kept = [0, 1, 3, 5]
    start = Averages.start(5, CPU).moved(log_probs(3, 7), log_probs(3, 8), None, 100)
    found, expected = start.moved(source, broken, None, 100), start.moved(source[kept], adapted[kept], None, 100)
    for name in ("source_mean", "adapted_mean", "entropies", "seen"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name))
    nothing = start.moved(source, torch.full_like(adapted, strange), None, 100)
    torch.testing.assert_close(nothing.information, start.information)
    assert float(nothing.seen) == 3


def test_steadiness_is_averaged_where_it_is_looked_at() -> None:
    start, batch = Averages.start(5, CPU), log_probs(4, 0)
    once = start.moved(batch, batch, torch.tensor([1.0, 0.5]), 100)
    assert once.steady.tolist() == [1.0, 0.5]
    assert once.moved(batch, batch, torch.tensor([0.0, 0.5]), 100).steady.tolist() == [0.5, 0.5]
    assert once.moved(batch, batch, None, 100).steady.tolist() == [1.0, 0.5]


def test_moving_writes_into_nothing() -> None:
    start, batch = Averages.start(5, CPU), log_probs(4, 0)
    start.moved(batch, batch, torch.ones(2), 100)
    assert float(start.seen) == 0
    assert not start.source_mean.any()


def test_signals_are_plain_numbers() -> None:
    signals = Signals(1.0, 0.5, 2.0, 1.5, 0.1, 0.3, 4.0, 0.01)
    assert signals.as_dict()["disagreement"] == 0.1
    assert signals.as_dict()["source_steadiness"] is None
    assert len(signals.as_dict()) == 10
