"""Alarms: their numbers, compared with the paper's, with MAPIE and by hand; how often they ring without a reason."""

from __future__ import annotations

import copy
import importlib.util
import math
import sys
from dataclasses import asdict
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest

from poem.guarded.alarms import Bet, Jumper, MeanBound, Ranks, ShiftAlarm, mixture_boundary

BENCHMARK = Path(__file__).resolve().parents[2] / "benchmarks" / "alarms.py"
P = st.floats(0, 1)
NUMBERS = st.lists(st.floats(0, 1) | st.just(math.nan) | st.just(math.inf), max_size=40)


def updated(gambler: Bet | Jumper, *p: float) -> float:
    """The wealth of a copy after more p-values."""
    gambler = copy.deepcopy(gambler)
    for each in p:
        gambler.update(each)
    return gambler.wealth


# Bet ------------------------------------------------------------------------------------------------------------------


def test_bet_has_the_bets_and_wealth_of_the_paper() -> None:
    gambler = Bet()
    bets, wealths = [], []
    for p in (0.9, 0.8, 0.7, 0.2, 0.95):
        bets.append(gambler.bet)
        gambler.update(p)
        wealths.append(gambler.wealth)
    assert bets == pytest.approx([0, 0, 0.072169, 0.111804, 0.064600], abs=1e-6)
    assert wealths == pytest.approx([1, 1, 1.014434, 0.980408, 1.008909], abs=1e-6)
    assert gambler.bet == pytest.approx(0.113503, abs=1e-6)


def test_bet_on_largest_p_values_reaches_20_at_the_22nd_and_its_bets_stop_near_1_8() -> None:
    gambler = Bet()
    wealths, bets = [], []
    for _ in range(3000):
        gambler.update(1.0)
        wealths.append(gambler.wealth)
        bets.append(abs(gambler.bet))
    assert next(place for place, wealth in enumerate(wealths, 1) if wealth >= 20) == 22
    assert wealths[21] == pytest.approx(22.5326, abs=1e-4)
    assert max(bets) == pytest.approx(1.801592, abs=1e-6)
    assert gambler.wealth == 1e200


@given(st.lists(P, max_size=60), P)
def test_no_wealth_is_negative_and_none_is_expected_to_grow(before: list[float], p: float) -> None:
    """The factor is linear in p, so over p and 1 - p it is 1 on average: the wealth is a martingale."""
    for gambler in (Bet(), Jumper(), Jumper(wealths=(0.1, 0.2, 0.3), reserve=0.4)):
        for each in before:
            gambler.update(each)
            assert gambler.wealth >= 0
        assert (updated(gambler, p) + updated(gambler, 1 - p)) / 2 == pytest.approx(gambler.wealth, rel=1e-9)


@given(st.lists(P, min_size=2, max_size=40), P, P)
def test_wealth_grows_with_p_where_the_bet_is_on_large_ones(before: list[float], one: float, other: float) -> None:
    gambler = Bet()
    for each in before:
        gambler.update(each)
    low, high = sorted([one, other])
    side = math.copysign(1, gambler.bet)
    assert side * (updated(gambler, high) - updated(gambler, low)) >= 0


@given(st.lists(P, max_size=20))
def test_p_values_that_are_not_finite_change_nothing(before: list[float]) -> None:
    for gambler in (Bet(), Jumper(), Jumper(wealths=(0.1, 0.2, 0.3), reserve=0.4)):
        for each in before:
            gambler.update(each)
        held = asdict(gambler)
        for strange in (math.nan, math.inf, -math.inf):
            gambler.update(strange)
        assert asdict(gambler) == held


# Jumper ---------------------------------------------------------------------------------------------------------------


def test_jumper_by_hand() -> None:
    gambler = Jumper(jump=0.3)
    gambler.update(1.0)
    assert gambler.wealths == pytest.approx((1 / 6, 1 / 3, 1 / 2))
    gambler.update(0.0)  # each keeps 0.7 of its wealth and gets 0.1 of all, which is 1
    assert gambler.wealths == pytest.approx(((0.7 / 6 + 0.1) * 1.5, 0.7 / 3 + 0.1, (0.35 + 0.1) * 0.5))


def test_jumper_equals_mapie() -> None:
    mapie = pytest.importorskip("mapie.exchangeability_testing")
    for jump in (0.01, 0.2):
        gambler, other = Jumper(jump=jump), mapie.OnlineMartingaleTest(jump_size=jump)
        for p in np.random.default_rng(0).beta(1.2, 1.0, 1000).tolist():
            gambler.update(p)
            assert gambler.wealth == pytest.approx(other.update_simple_jumper_martingale(p), rel=1e-9)
        assert gambler.wealth > 2  # the p-values are large rather often


def test_jumper_shares_its_reserve_out_slowly() -> None:
    gambler = Jumper(wealths=(0.0, 0.0, 0.0), reserve=1.0)
    for n in range(1, 200):
        gambler.update(0.5)  # on which nobody wins
        assert gambler.reserve == pytest.approx(1 / math.log2(n + 2))
        assert gambler.wealth == pytest.approx(1)


def test_a_reserve_is_what_counts_after_a_long_stream_without_shift() -> None:
    plain, kept = Jumper(), Jumper(wealths=(1 / 6, 1 / 6, 1 / 6), reserve=0.5)
    for p in np.random.default_rng(0).random(20_000).tolist():
        plain.update(p)
        kept.update(p)
    assert plain.wealth < 1e-20
    assert kept.wealth > 0.03
    assert updated(kept, *[0.9] * 60) > 100
    assert updated(plain, *[0.9] * 60) < 1e-10


# Ranks ----------------------------------------------------------------------------------------------------------------


def drawn(kind: str, count: int, seed: int) -> list[float]:
    rng = np.random.default_rng(seed)
    values = {"continuous": rng.gamma(1, 0.5, count), "three": rng.integers(0, 3, count), "same": np.zeros(count)}
    return [float(value) for value in values[kind]]


@pytest.mark.parametrize("kind", ["continuous", "three", "same"])
@pytest.mark.parametrize("limit", [100_000, 20])
def test_p_values_are_uniform_and_independent_while_nothing_shifts(kind: str, limit: int) -> None:
    ranks = Ranks(seed=3, limit=limit)
    p = np.array([ranks.p_value(value) for value in drawn(kind, 4000, seed=1)])
    assert kstest(p, "uniform").pvalue > 0.01
    for lag in (1, 2, 5):
        assert abs(np.corrcoef(p[:-lag], p[lag:])[0, 1]) < 3.3 / math.sqrt(len(p))
    assert len(ranks.values) == min(limit, 4000)
    assert list(ranks.values) == sorted(ranks.values)


def test_p_values_by_hand() -> None:
    ranks = Ranks(seed=0)
    ranks.add([3.0, 1.0, 2.0, 2.0])
    assert list(ranks.values) == [1, 2, 2, 3]
    for value, low, ties in ((0.5, 0, 0), (2.0, 1, 2), (9.0, 4, 0)):
        p = copy.deepcopy(ranks).p_value(value)
        assert low / 5 <= p < (low + ties + 1) / 5


def test_ties_are_broken_at_random_by_seed_and_place() -> None:
    def all_ties(seed: int) -> list[float]:
        ranks = Ranks(seed=seed)
        return [ranks.p_value(1.0) for _ in range(50)]

    assert all_ties(0) == all_ties(0)
    assert len(set(all_ties(0))) == 50
    assert len({all_ties(seed)[7] for seed in (-1, 0, 1, 2**63)}) == 4


@given(st.lists(st.floats(0, 5), max_size=30), st.floats(0, 5), st.floats(0, 5), st.integers(1, 40))
def test_p_values_grow_with_the_number(values: list[float], one: float, other: float, limit: int) -> None:
    ranks = Ranks(seed=1, limit=limit)
    ranks.add(values)
    low, high = sorted([one, other])
    assert 0 <= copy.deepcopy(ranks).p_value(low) <= copy.deepcopy(ranks).p_value(high) < 1


def test_numbers_that_are_not_finite_have_no_rank_and_leave_none() -> None:
    ranks, other = Ranks(seed=0), Ranks(seed=0)
    for each in (ranks, other):
        each.add([1.0, math.nan, math.inf, 2.0])
    assert list(ranks.values) == [1, 2]
    assert all(math.isnan(ranks.p_value(value)) for value in (math.nan, math.inf, -math.inf))
    assert ranks.p_value(1.5) == other.p_value(1.5)


def test_a_copy_of_ranks_goes_on_alone_and_as_the_first_would() -> None:
    ranks = Ranks(seed=5, limit=10)
    for value in drawn("three", 30, seed=0):
        ranks.p_value(value)
    other = copy.deepcopy(ranks)
    restored = Ranks(**asdict(ranks))
    expected = [ranks.p_value(value) for value in drawn("three", 30, seed=1)]
    for each in (other, restored):
        assert [each.p_value(value) for value in drawn("three", 30, seed=1)] == expected


# ShiftAlarm -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    if not BENCHMARK.is_file():
        pytest.skip("a copy without benchmarks")
    spec = importlib.util.spec_from_file_location("alarms_benchmark", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["alarms_benchmark"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("with_source", [False, True])
def test_without_shift_it_rings_on_a_share_alpha_of_streams_at_most(benchmark: ModuleType, with_source: bool) -> None:
    for kind in benchmark.KINDS:
        row = benchmark.without_shift(kind, streams=100, length=500, given=with_source)
        for alpha, share in row["alarmed"].items():
            level = float(alpha)
            assert share <= level + 3 * math.sqrt(level * (1 - level) / 100), (kind, alpha)


def test_it_rings_soon_after_a_shift(benchmark: ModuleType) -> None:
    small, large = (
        benchmark.with_shift("continuous", streams=20, given=True, shift=shift, at=300, after=300)
        for shift in (0.5, 2.0)
    )
    assert small["alarmed"]["0.01"] >= 0.9
    assert large["delay"]["0.01"] < small["delay"]["0.01"] < 100


def test_where_ranks_forget_it_rings_no_more_often() -> None:
    rang = 0
    for seed in range(60):
        alarm = ShiftAlarm(alpha=0.1, reference=16, seed=seed, ranks=Ranks(limit=16))
        alarm.update(drawn("continuous", 1000, seed=seed))
        rang += alarm.rang
    assert rang <= 6 + 3 * math.sqrt(60 * 0.09)


@settings(max_examples=30)
@given(NUMBERS, st.data())
def test_how_numbers_are_batched_does_not_matter(numbers: list[float], data: st.DataObject) -> None:
    whole, parts = (ShiftAlarm(alpha=0.5, reference=4, seed=2) for _ in range(2))
    bound, bound_parts = MeanBound(), MeanBound()
    rang = whole.update(numbers)
    bound.update([value for value in numbers if value != math.inf])
    cut = data.draw(st.integers(0, len(numbers)))
    first = parts.update(numbers[:cut])
    second = parts.update(numbers[cut:])
    for piece in (numbers[:cut], numbers[cut:]):
        bound_parts.update(piece)
    assert asdict(whole) == asdict(parts)
    assert asdict(bound) == asdict(bound_parts)
    assert rang == (first or second)
    assert not (first and second)


def test_it_stays_on_and_tells_of_it_once() -> None:
    alarm = ShiftAlarm(alpha=0.05)
    alarm.compare_with([0.1 * value for value in range(100)])
    told = [alarm.update([20.0 + value]) for value in range(60)]
    assert sum(told) == 1
    assert alarm.rang_at == told.index(True) + 1
    alarm.update(drawn("continuous", 100, seed=0))
    assert alarm.rang
    assert alarm.rang_at == told.index(True) + 1


def test_without_source_data_a_shift_from_the_start_is_invisible() -> None:
    shifted = [5 + value for value in drawn("continuous", 800, seed=0)]
    blind, seeing = ShiftAlarm(alpha=0.01), ShiftAlarm(alpha=0.01)
    seeing.compare_with(drawn("continuous", 256, seed=1))
    assert seeing.update(shifted)
    assert not blind.update(shifted)
    assert blind.bet.seen == 800 - 256


@pytest.mark.parametrize("alpha", [0, 1, -0.1, math.nan])
def test_levels_that_are_none_are_refused(alpha: float) -> None:
    with pytest.raises(ValueError, match="expected alpha, the rate of false alarms, between 0 and 1, got"):
        ShiftAlarm(alpha=alpha)
    with pytest.raises(ValueError, match="expected alpha, the rate of wrong bounds, between 0 and 1, got"):
        MeanBound(alpha=alpha)


# MeanBound ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.4])
@pytest.mark.parametrize("tuned_for", [1.0, 25.0])
def test_bounds_equal_mapie(alpha: float, tuned_for: float) -> None:
    """MAPIE halves alpha, and takes the running maximum unless it is told not to."""
    bounds = pytest.importorskip("mapie.exchangeability_testing.bounds")
    rng = np.random.default_rng(0)
    for values in (rng.random(40), rng.random(40) < 0.05, rng.beta(0.3, 0.1, 40), np.zeros(40)):
        lower, upper = (
            bounds.conjugate_mixture_empirical_bernstein_bound(
                values, v_opt=tuned_for, alpha=alpha, bound_side=side, running_intersection=False
            )
            for side in ("lower", "upper")
        )
        bound = MeanBound(alpha=alpha / 2, tuned_for=tuned_for)
        for place, value in enumerate(values):
            bound.update([float(value)])
            assert bound.lower == pytest.approx(lower[place], abs=1e-6)
            assert bound.upper == pytest.approx(upper[place], abs=1e-6)


def test_bounds_hold_at_all_times_for_means_that_move() -> None:
    rng = np.random.default_rng(0)
    means = np.linspace(0.9, 0.1, 200)
    wrong = 0
    for _ in range(100):
        bound, below = MeanBound(alpha=0.1, tuned_for=10.0), []
        for place in range(0, 200, 20):
            bound.update((rng.random(20) < means[place : place + 20]).astype(float).tolist())
            below.append(bound.lower <= means[: place + 20].mean())
        wrong += not all(below)
    assert wrong <= 10
    assert bound.lower > 0.3  # of a mean of 1/2: it says something


@settings(max_examples=50)
@given(st.floats(0, 1e4), st.floats(0.001, 0.9), st.floats(0.1, 1e3))
def test_the_boundary_grows_with_variation_and_confidence(variation: float, alpha: float, tuned_for: float) -> None:
    boundary = mixture_boundary(variation, alpha, tuned_for)
    assert 0 < boundary < math.inf
    assert mixture_boundary(variation + 1, alpha, tuned_for) >= boundary * (1 - 1e-9)
    assert boundary <= 10 * (math.log(1 / alpha) + 1) + 10 * math.sqrt(
        (variation + tuned_for) * (math.log(1 / alpha) + 1)
    )


def test_before_the_first_number_the_bound_says_nothing() -> None:
    bound = MeanBound()
    bound.update([math.nan])
    assert (bound.mean, bound.lower, bound.upper) == (0.5, 0, 1)


@given(NUMBERS)
def test_numbers_that_are_not_finite_do_not_enter_the_mean(numbers: list[float]) -> None:
    kept = [value for value in numbers if math.isfinite(value)]
    one, other = MeanBound(), MeanBound()
    one.update(numbers)
    other.update(kept)
    assert asdict(one) == asdict(other)
    assert one.count == len(kept)
    assert 0 <= one.lower <= one.mean + 1e-12
    assert one.mean - 1e-12 <= one.upper <= 1


def test_numbers_outside_the_range_are_refused_and_leave_no_trace() -> None:
    bound = MeanBound()
    for value in (1.2, -0.1):
        with pytest.raises(ValueError, match=r"expected numbers in \[0, 1\], for which the bound holds, got"):
            bound.update([0.5, value])
    assert bound == MeanBound()
    bound.update([1 + 1e-7, 1 + 1e-7, -1e-7])  # rounding
    assert (bound.total, bound.count) == (2, 3)
