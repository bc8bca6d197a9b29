"""Alarms whose rate of false alarms is known: two betting martingales on ranks, and a confidence sequence.

A martingale is a wealth that starts at 1 and, while nothing has shifted, is not expected to grow. By Ville's
inequality it then ever reaches `1 / alpha` with probability `alpha` at most, however long the stream is.
"""

from __future__ import annotations

import bisect
import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

MOST_WEALTH = 1e200
WORD = 2**64 - 1
BET_RATE = 1 / (8 * math.sqrt(3))
LARGEST_BET = 1.8
ROUNDING = 1e-5
"""How far outside [0, 1] a number may be that was computed in single precision."""


@dataclass
class Bet:
    """A gambler who bets on p-values that are too large or too small, and learns the bet online.

    Paper: Bar et al., "Protected Test-Time Adaptation via Online Entropy Matching", NeurIPS 2024.
    Reference code: yarinbar/poem (no licence).
    Differs: a wealth that a bet would make negative is set to 0; a p-value that is not finite is left out.
    """

    bet: float = 0.0
    wealth: float = 1.0
    squares: float = 0.0  # of all gradients
    seen: int = 0

    def update(self, p: float) -> None:
        """The wealth after one more p-value, and the next bet."""
        if not math.isfinite(p):
            return
        excess = p - 0.5
        factor = max(0.0, 1 + self.bet * excess)
        if self.seen > 0:
            outward = abs(self.bet) > LARGEST_BET and excess * self.bet > 0
            gradient = 0.0 if outward or factor == 0.0 else excess / factor
            self.squares += gradient * gradient
            if gradient:
                self.bet += BET_RATE * gradient / math.sqrt(self.squares)
        self.seen += 1
        self.wealth = min(self.wealth * factor, MOST_WEALTH)


@dataclass
class Jumper:
    """Three gamblers, on large, on small and on no p-values, who now and then take over each other's wealth.

    Paper: Vovk et al., "Retrain or not retrain: conformal test martingales for change-point detection", COPA 2021.
    Reference code: scikit-learn-contrib/MAPIE (BSD-3).
    Differs: a p-value that is not finite is left out. A `reserve` is wealth that is not bet yet: after n p-values
    `1 / log2(n + 2)` of it is left, the rest was shared out. Without shift the gamblers lose a third of a percent a
    p-value, so that after a long while only what they got lately counts; the total is a martingale as before.
    """

    jump: float = 0.01
    wealths: tuple[float, float, float] = (1 / 3, 1 / 3, 1 / 3)
    reserve: float = 0.0
    seen: int = 0

    @property
    def wealth(self) -> float:
        """All three together, and the reserve."""
        return sum(self.wealths) + self.reserve

    def update(self, p: float) -> None:
        """The wealths after one more p-value."""
        if not math.isfinite(p):
            return
        left = self.reserve * math.log(self.seen + 2) / math.log(self.seen + 3)
        share = self.jump / 3 * sum(self.wealths) + (self.reserve - left) / 3
        self.reserve, self.seen = left, self.seen + 1
        shared = [(1 - self.jump) * wealth + share for wealth in self.wealths]
        low, none, high = (wealth * (1 + side * (p - 0.5)) for wealth, side in zip(shared, (-1, 0, 1), strict=True))
        self.wealths = (min(low, MOST_WEALTH), min(none, MOST_WEALTH), min(high, MOST_WEALTH))


@dataclass
class Ranks:
    """p-values of numbers by their rank among all earlier ones; ties are broken at random.

    While the numbers are exchangeable with the earlier ones, the p-values are independent and uniform. A number that is
    not finite has none. Past `limit` numbers each new one is compared with those that are kept, and then one of them
    all, the new one included, is forgotten at random: which one is kept tells nothing of the rank, so the p-values stay
    independent and uniform. All draws are functions of `seed` and `drawn`.
    """

    seed: int = 0
    limit: int = 100_000
    values: array[float] = field(default_factory=lambda: array("d"))
    drawn: int = 0

    def add(self, values: Iterable[float]) -> None:
        """Numbers to compare later ones with."""
        self.values = array("d", sorted([*self.values, *(value for value in values if math.isfinite(value))]))

    def p_value(self, value: float) -> float:
        """The rank of the next number as a p-value; large for a large number."""
        if not math.isfinite(value):
            return math.nan
        low, high = bisect.bisect_left(self.values, value), bisect.bisect_right(self.values, value)
        p = (low + _uniform(self.seed, 2 * self.drawn) * (high - low + 1)) / (len(self.values) + 1)
        self.values.insert(high, value)
        if len(self.values) > self.limit:
            del self.values[int(_uniform(self.seed, 2 * self.drawn + 1) * len(self.values))]
        self.drawn += 1
        return p

    def __deepcopy__(self, memo: dict[int, object]) -> Ranks:
        """A copy with an array of its own."""
        return replace(self, values=self.values[:])


@dataclass
class ShiftAlarm:
    """Has the stream shifted away from its reference? Half the wealth bets with `Bet`, half with `Jumper`.

    `reference` numbers are collected from the stream first where none were given; a shift that is there from the start
    is then invisible. The alarm rings where the mean wealth reaches `1 / alpha`, and stays on.
    """

    alpha: float = 0.01
    reference: int = 256
    seed: int = 0
    given: bool = False
    rang_at: int | None = None  # after how many numbers
    seen: int = 0
    bet: Bet = field(default_factory=Bet)
    jumper: Jumper = field(default_factory=lambda: Jumper(wealths=(1 / 6, 1 / 6, 1 / 6), reserve=0.5))
    ranks: Ranks = field(default_factory=Ranks)

    def __post_init__(self) -> None:
        """The ranks draw from this alarm's seed."""
        if not 0 < self.alpha < 1:
            raise ValueError(f"expected alpha, the rate of false alarms, between 0 and 1, got {self.alpha!r}")
        self.ranks.seed = self.seed

    @property
    def wealth(self) -> float:
        """The mean of both wealths."""
        return (self.bet.wealth + self.jumper.wealth) / 2

    @property
    def rang(self) -> bool:
        """Whether it has rung."""
        return self.rang_at is not None

    def copied(self) -> ShiftAlarm:
        """An alarm of its own with the same memory."""
        ranks = replace(self.ranks, values=self.ranks.values[:])
        return replace(self, bet=replace(self.bet), jumper=replace(self.jumper), ranks=ranks)

    def compare_with(self, values: Sequence[float]) -> None:
        """Use these numbers, from source data, as the reference."""
        self.ranks.add(values)
        self.given = True

    def update(self, values: Iterable[float]) -> bool:
        """Take in the numbers of a batch; returns whether the alarm rang in it for the first time."""
        before = self.rang
        for value in values:
            self.seen += 1
            if not self.given and len(self.ranks.values) < self.reference:
                self.ranks.add([value])
                continue
            p = self.ranks.p_value(value)
            self.bet.update(p)
            self.jumper.update(p)
            if self.rang_at is None and self.wealth >= 1 / self.alpha:
                self.rang_at = self.seen
        return self.rang and not before


@dataclass
class MeanBound:
    """A confidence sequence for the running mean of numbers in [0, 1]: valid at every time at once.

    `lower` is below the average of the numbers' conditional means at all times together, with probability
    `1 - alpha` at least, also where these means move, as for a model that is being adapted.

    Paper: Howard, Ramdas, McAuliffe, Sekhon, "Time-uniform, nonparametric, nonasymptotic confidence sequences", Annals
    of Statistics 2021: the conjugate-mixture empirical-Bernstein bound.
    Reference code: gostevehoward/confseq (MIT); MAPIE (BSD-3).
    Differs: no running maximum of the bound is taken, which would need a mean that does not move.
    """

    alpha: float = 0.05
    tuned_for: float = 25.0  # the sum of squared deviations at which the bound is narrowest
    count: int = 0
    total: float = 0.0
    variation: float = 0.0

    def __post_init__(self) -> None:
        """Refuses levels that are none."""
        if not 0 < self.alpha < 1:
            raise ValueError(f"expected alpha, the rate of wrong bounds, between 0 and 1, got {self.alpha!r}")
        if not 0 < self.tuned_for < math.inf:
            raise ValueError(f"expected tuned_for, a sum of squared deviations, above 0, got {self.tuned_for!r}")

    def update(self, values: Iterable[float]) -> None:
        """Take in more numbers; one that is not finite is left out, one outside [0, 1] is refused."""
        finite = [value for value in values if math.isfinite(value)]
        outside = [value for value in finite if not -ROUNDING <= value <= 1 + ROUNDING]
        if outside:
            raise ValueError(f"expected numbers in [0, 1], for which the bound holds, got {outside[0]!r}; rescale them")
        for value in finite:
            value = min(max(value, 0.0), 1.0)
            expected = self.total / self.count if self.count else 0.5
            self.variation += (value - expected) ** 2
            self.total += value
            self.count += 1

    @property
    def mean(self) -> float:
        """The running mean; 1/2 before the first number."""
        return self.total / self.count if self.count else 0.5

    @property
    def radius(self) -> float:
        """How far the bound lies from the mean."""
        if not self.count:
            return 1.0
        return mixture_boundary(self.variation, self.alpha, self.tuned_for) / self.count

    @property
    def lower(self) -> float:
        """The lower bound."""
        return max(0.0, self.mean - self.radius)

    @property
    def upper(self) -> float:
        """The upper bound, by the same argument for 1 - x; each of the two holds with `1 - alpha` alone."""
        return min(1.0, self.mean + self.radius)


def mixture_boundary(variation: float, alpha: float, tuned_for: float) -> float:
    """How large a sum of centred numbers may be whose squared deviations sum to `variation`, by bisection."""
    target = math.log(1 / alpha)
    level = 2 * math.log(1 / (2 * min(alpha, 0.45)))  # any rho is valid; the formula for the best one needs alpha < 1/2
    rho = tuned_for / (level + math.log(1 + level))
    low, high = 0.0, 1.0
    while _log_mixture(high, variation, rho) < target:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _log_mixture(middle, variation, rho) < target else (low, middle)
    return high


def _log_mixture(total: float, variation: float, rho: float) -> float:
    """The logarithm of the mixture martingale at a sum and a variation."""
    shape, place = variation + rho, total + variation + rho
    own, moving = (
        torch.special.gammainc(*torch.tensor([[rho, shape], [rho, place]], dtype=torch.float64)).log().tolist()
    )
    constant = rho * math.log(rho) - math.lgamma(rho) - own
    return float(constant + math.lgamma(shape) + moving - shape * math.log(place) + total + variation)


def _uniform(seed: int, place: int) -> float:
    """A number in [0, 1) for each seed and place: the splitmix64 generator, whose state is a function of both."""
    return (_mixed(_mixed(seed & WORD) + (place + 1) * 0x9E3779B97F4A7C15 & WORD) >> 11) * 2.0**-53


def _mixed(word: int) -> int:
    """The output function of splitmix64 (Steele, Lea, Flood, 2014): every bit depends on all."""
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & WORD
    word = (word ^ word >> 27) * 0x94D049BB133111EB & WORD
    return word ^ word >> 31
