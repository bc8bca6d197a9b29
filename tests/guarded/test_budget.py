"""The budget of answers: a bound that holds on every prefix of the stream, spent on the largest gains."""

from __future__ import annotations

import itertools
import math
from dataclasses import asdict
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from poem.guarded.budget import AnswerBudget

GAIN = st.floats(-1, 1) | st.just(math.nan) | st.sampled_from([0.0, 0.5])
BATCH = st.lists(st.tuples(st.booleans(), GAIN), max_size=12)
SHARE = st.floats(0, 1, exclude_min=True) | st.sampled_from([0.005, 0.1, 0.3, 1 / 3, 0.3333333333, 0.7, 1.0])


def granted(budget: AnswerBudget, batch: list[tuple[bool, float]]) -> tuple[list[bool], AnswerBudget]:
    """Which samples of a batch of (differs, gain) keep their answer, and the budget after it."""
    differs = torch.tensor([each[0] for each in batch], dtype=torch.bool)
    kept, after = budget.grant(differs, torch.tensor([each[1] for each in batch], dtype=torch.float64))
    assert (kept.dtype, kept.shape) == (torch.bool, differs.shape)
    return kept.tolist(), after


@given(SHARE, st.lists(BATCH, max_size=12))
def test_every_prefix_keeps_to_the_share(share: float, batches: list[list[tuple[bool, float]]]) -> None:
    budget, overrides = AnswerBudget(share), list[bool]()
    for batch in batches:
        kept, budget = granted(budget, batch)
        assert all(differs for keep, (differs, _) in zip(kept, batch, strict=True) if keep)
        overrides += kept
    for n in range(1, len(overrides) + 1):
        assert sum(overrides[:n]) <= Fraction(str(share)) * n
    assert asdict(budget) == {"share": share, "seen": len(overrides), "spent": sum(overrides)}


@given(SHARE, st.integers(0, 20), st.lists(st.tuples(st.booleans(), st.floats(0, 1)), max_size=7))
def test_the_largest_gains_win(share: float, seen: int, batch: list[tuple[bool, float]]) -> None:
    """No other choice that keeps to the share on every prefix has a larger sum of gains, nor more answers."""
    kept, _ = granted(AnswerBudget(share, seen=seen), batch)
    gains = [gain for _, gain in batch]
    found = sum(gain for gain, keep in zip(gains, kept, strict=True) if keep)
    for choice in itertools.product([False, True], repeat=len(batch)):
        allowed = all(differs or not chosen for chosen, (differs, _) in zip(choice, batch, strict=True))
        fits = all(sum(choice[: n + 1]) <= Fraction(str(share)) * (seen + n + 1) for n in range(len(batch)))
        if allowed and fits:
            assert sum(gain for gain, chosen in zip(gains, choice, strict=True) if chosen) <= found + 1e-9
            assert sum(choice) <= sum(kept)


def test_by_hand() -> None:
    """Of the first four one may differ, of the first eight two, so the third of the three gains here is refused."""
    gains = [0.1, 0.3, 0.2, 0.9, 0.4, 0.1, 0.2, 0.8]
    kept, budget = granted(AnswerBudget(0.25), [(True, gain) for gain in gains])
    assert [place for place, keep in enumerate(kept) if keep] == [3, 7]
    kept, budget = granted(budget, [(True, 0.9)])
    assert kept == [False]
    assert (budget.seen, budget.spent) == (9, 2)


def test_what_was_not_spent_may_be_spent_later() -> None:
    _, budget = granted(AnswerBudget(0.1), [(False, 0.0)] * 30)
    kept, budget = granted(budget, [(True, 0.5)] * 5)
    assert kept == [True, True, True, False, False]
    assert budget.spent == 3


@pytest.mark.parametrize(("left", "expected"), [(1, [2]), (2, [2, 3]), (3, [1, 2, 3]), (4, [0, 1, 2, 3])])
def test_equal_gains_are_granted_in_order_and_nan_last(left: int, expected: list[int]) -> None:
    batch = [(True, math.nan), (True, -0.5), (True, 0.2), (True, 0.2)]
    kept, _ = granted(AnswerBudget(0.01, seen=100 * left), batch)
    assert [place for place, keep in enumerate(kept) if keep] == expected


@given(BATCH)
def test_a_budget_of_1_grants_all(batch: list[tuple[bool, float]]) -> None:
    kept, budget = granted(AnswerBudget(1), batch)
    assert kept == [differs for differs, _ in batch]
    assert budget.spent == sum(kept)


@pytest.mark.parametrize(("share", "n"), [(0.1, 30), (0.7, 10), (0.29, 100), (0.07, 100), (0.005, 200)])
def test_a_share_is_the_number_as_it_is_written(share: float, n: int) -> None:
    """As a float, 0.7 is a little below and 0.1 a little above."""
    kept, _ = granted(AnswerBudget(share), [(False, 0.0)] * (n - 1) + [(True, 1.0)])
    assert kept[-1]
    _, budget = granted(AnswerBudget(share), [(True, 1.0)] * n)
    assert budget.spent == round(share * n)


def test_no_rounding_adds_to_a_share() -> None:
    kept, _ = granted(AnswerBudget(0.3333333333), [(False, 0.0), (False, 0.0), (True, 1.0)])
    assert not any(kept)


def test_asking_leaves_the_budget_as_it_was() -> None:
    budget = AnswerBudget(0.5)
    granted(budget, [(True, 1.0)] * 4)
    assert budget == AnswerBudget(0.5)
    kept, after = granted(budget, [])
    assert (kept, after) == ([], budget)


@pytest.mark.parametrize(
    ("share", "kind"),
    [
        (0, ValueError), (0.0, ValueError), (-0.1, ValueError), (1.001, ValueError), (5, ValueError),
        (math.nan, ValueError), (math.inf, ValueError), (True, TypeError), ("0.1", TypeError), (None, TypeError),
    ],
)  # fmt: skip
def test_what_is_no_share_is_refused(share: Any, kind: type[Exception]) -> None:
    with pytest.raises(
        kind, match=r"expected a budget above 0 and at most 1, .*, got .*; for none use .* leave budget="
    ):
        AnswerBudget(share)
