"""What the guard sees: steadiness, balance, runs, and answers that are made equally sure."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from poem.guarded.signals import Averages, Signals, as_sure_as, shifted
from poem.parts.base import entropy

CPU = torch.device("cpu")


def log_probs(rows: int, seed: int, sharpness: float = 2.0) -> Tensor:
    """Log-probabilities over five classes."""
    rng = torch.Generator().manual_seed(seed)
    return (sharpness * torch.randn(rows, 5, generator=rng)).log_softmax(1)


def answered(classes: list[int]) -> Tensor:
    """Log-probabilities of a network that is sure."""
    return (20.0 * F.one_hot(torch.tensor(classes), 5).float()).log_softmax(1)


@pytest.mark.parametrize("sizes", [[8], [3, 5], [1, 1, 6]])
def test_up_to_the_horizon_averages_are_those_over_all_images(sizes: list[int]) -> None:
    source, adapted = log_probs(8, 0), log_probs(8, 1)
    averages = Averages.start(5, CPU)
    for one, two in zip(source.split(sizes), adapted.split(sizes), strict=True):
        averages = averages.moved(one, two, None, horizon=100)
    for index, each in enumerate((source, adapted)):
        shares = torch.bincount(each.argmax(1), minlength=5) / 8
        torch.testing.assert_close(averages.classes[index], shares)
        assert float(averages.balances[index]) == pytest.approx(-float(torch.xlogy(shares, shares).sum()), abs=1e-5)
    assert int(averages.seen) == 8


def test_past_the_horizon_old_images_are_forgotten() -> None:
    averages = Averages.start(5, CPU)
    for batch in (answered([0] * 16), answered([1] * 16), answered([1] * 16)):
        averages = averages.moved(batch, batch, None, horizon=16)
    torch.testing.assert_close(averages.classes[0], torch.tensor([0.0, 1.0, 0.0, 0.0, 0.0]))


def test_a_collapsed_network_has_no_balance() -> None:
    mixed, same = answered([0, 1, 2, 3, 4]), answered([2] * 5)
    balances = Averages.start(5, CPU).moved(mixed, same, None, 100).balances
    assert balances.tolist() == pytest.approx([math.log(5), 0], abs=1e-5)


def test_steadiness_is_averaged_where_it_was_looked_at() -> None:
    batch = log_probs(4, 0)
    first = Averages.start(5, CPU).moved(batch, batch, torch.tensor([1.0, 0.5]), 100)
    torch.testing.assert_close(first.steady, torch.tensor([1.0, 0.5]))
    torch.testing.assert_close(first.moved(batch, batch, None, 100).steady, first.steady)
    torch.testing.assert_close(
        first.moved(batch, batch, torch.tensor([0.0, 0.5]), 100).steady, torch.tensor([0.5, 0.5])
    )


def test_classes_that_come_in_runs_are_seen_and_one_class_all_along_is_none() -> None:
    rng = torch.Generator().manual_seed(0)
    mixed = torch.randint(5, (640,), generator=rng).tolist()
    streams = {"mixed": mixed, "runs": sorted(mixed), "one class": [3] * 640}
    found = {}
    for name, classes in streams.items():
        averages = Averages.start(5, CPU)
        for batch in answered(classes).split(64):
            averages = averages.moved(batch, batch, None, 1024)
        found[name] = float(averages.runs[0])
    assert found["mixed"] == pytest.approx(1, abs=0.15)
    assert found["one class"] == pytest.approx(1, abs=1e-4)
    assert found["runs"] > 2


def test_a_source_falls_where_many_answers_become_one_and_until_there_are_several_again() -> None:
    rng = torch.Generator().manual_seed(0)
    many, one = answered(torch.randint(5, (64,), generator=rng).tolist()), answered([3] * 64)
    frequent = answered([3] * 60 + [0, 1, 2, 4])

    def fell(*batches: Tensor) -> list[float]:
        averages, found = Averages.start(5, CPU), []
        for batch in batches:
            averages = averages.moved(batch, batch, None, 1024)
            found.append(float(averages.fell))
        return found

    assert fell(*[one] * 6) == [0] * 6
    assert fell(*[frequent] * 12) == [0] * 12
    assert fell(many, many, *[one] * 30)[8:] == [1] * 24, "also when the average has forgotten the others"
    assert fell(many, many, *[one] * 6, *[many] * 3)[-2:] == [0, 0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_rows_that_are_not_finite_are_left_out(bad: float) -> None:
    start = Averages.start(5, CPU).moved(log_probs(3, 7), log_probs(3, 8), None, 100)
    broken = torch.full((2, 5), bad)
    after = start.moved(log_probs(2, 1), broken, None, 100)
    torch.testing.assert_close(after.classes, start.classes)
    assert int(after.seen) == 3


def test_moving_writes_into_nothing() -> None:
    start, batch = Averages.start(5, CPU), log_probs(4, 0)
    before = {name: getattr(start, name).clone() for name in ("classes", "steady", "seen", "recent", "before")}
    start.moved(batch, batch, torch.ones(2), 100)
    for name, value in before.items():
        torch.testing.assert_close(getattr(start, name), value)


def test_shifted_images_have_the_pixels_of_the_image_a_sixteenth_further() -> None:
    images = torch.rand(2, 3, 32, 48)
    moved = shifted(images)
    assert moved.shape == images.shape
    torch.testing.assert_close(moved[:, :, 2:, :-3], images[:, :, :-2, 3:])
    torch.testing.assert_close(moved[:, :, 0], moved[:, :, 1])  # the border is repeated


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.floats(0.3, 5), st.floats(0.3, 5))  # within the factors that are tried
def test_made_as_sure_as_another_the_order_of_classes_stays(seed: int, one: float, two: float) -> None:
    mine, other = log_probs(16, seed, one), log_probs(16, seed + 1, two)
    matched = as_sure_as(mine, other)
    assert float(entropy(matched).mean()) == pytest.approx(float(entropy(other).mean()), abs=5e-3)
    assert bool((matched.argsort(1) == mine.argsort(1)).all())


def test_signals_are_plain_numbers() -> None:
    values = Signals(*(0.5 for _ in Signals.__dataclass_fields__)).as_dict()
    assert set(values) == set(Signals.__dataclass_fields__)
    assert all(value == 0.5 for value in values.values())
