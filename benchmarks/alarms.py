"""How often does the shift alarm ring where nothing has shifted, and how soon where something has?

    python benchmarks/alarms.py --json results/auto/alarms.json

First 1,000 streams of 5,000 numbers for each kind of entropies, without a shift: the share of streams on which the
alarm ever rang, for several alpha; it must not exceed alpha by more than chance. Then streams that shift by so many
standard deviations: the share on which it rang after the shift, and the median of how many numbers that took. `given`
is whether 1,000 numbers like those before the shift were given as source data; without, the stream's first 256 are the
reference. p-values are those of `Ranks`; the bets are made for all streams at once, and the first streams are compared
with `ShiftAlarm` itself.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import numpy as np
from numpy.typing import NDArray

from poem.guarded.alarms import BET_RATE, LARGEST_BET, MOST_WEALTH, Jumper, Ranks, ShiftAlarm

Numbers = NDArray[np.float64]
ALPHAS = (0.01, 0.05, 0.1)
SOURCE, CHECKED = 1000, 2
KINDS: dict[str, Callable[[np.random.Generator, int], Numbers]] = {
    "continuous": lambda rng, count: rng.gamma(1.0, 0.5, count),
    "mostly zero": lambda rng, count: np.where(rng.random(count) < 0.7, 0.0, rng.random(count)),
    "three values": lambda rng, count: rng.integers(0, 3, count).astype(float),
}


def p_values(stream: Numbers, source: Numbers | None, seed: int) -> Numbers:
    """p-values of one stream; 1/2, with which no wealth changes hands, for numbers that are the reference."""
    ranks, start = Ranks(seed=seed), 0 if source is not None else ShiftAlarm().reference
    ranks.add(stream[:start].tolist() if source is None else source.tolist())
    return np.array([0.5] * start + [ranks.p_value(value) for value in stream[start:].tolist()])


def wealths(p: Numbers, start: int) -> Numbers:
    """What `ShiftAlarm.wealth` is after each p-value of several streams (streams, length), from place `start` on."""
    streams, length = p.shape
    fresh: Jumper = ShiftAlarm().jumper
    bet, squares, wealth = (np.full(streams, value) for value in (0.0, 0.0, 1.0))
    three, reserve = np.repeat(np.array(fresh.wealths)[:, None], streams, axis=1), fresh.reserve
    sides, total = np.array([-1.0, 0.0, 1.0])[:, None], np.ones((streams, length))
    for place in range(start, length):
        excess, seen = p[:, place] - 0.5, place - start
        factor = 1 + bet * excess
        wealth = np.minimum(wealth * factor, MOST_WEALTH)
        if seen:
            gradient = np.where((np.abs(bet) > LARGEST_BET) & (excess * bet > 0), 0.0, excess / factor)
            squares += gradient * gradient
            bet = bet + BET_RATE * gradient / np.sqrt(np.maximum(squares, 1e-300))
        left = reserve * np.log(seen + 2) / np.log(seen + 3)
        share = fresh.jump / 3 * three.sum(0) + (reserve - left) / 3
        three, reserve = np.minimum(((1 - fresh.jump) * three + share) * (1 + sides * excess), MOST_WEALTH), left
        total[:, place] = (wealth + three.sum(0) + reserve) / 2
    return total


def simulated(
    kind: str, *, streams: int, length: int, given: bool, shift: float = 0.0, at: int = 0, seed: int = 0
) -> Numbers:
    """The wealth along streams (streams, length) that shift by `shift` standard deviations at a place."""
    rng, draw = np.random.default_rng(seed), KINDS[kind]
    numbers = np.stack([draw(rng, length) for _ in range(streams)])
    numbers[:, at:] += shift * numbers.std()
    sources = [draw(rng, SOURCE) if given else None for _ in range(streams)]
    p = np.stack([p_values(each, sources[index], index) for index, each in enumerate(numbers)])
    found = wealths(p, 0 if given else ShiftAlarm().reference)
    for index in range(min(CHECKED, streams)):
        alarm, source = ShiftAlarm(alpha=ALPHAS[0], seed=index), sources[index]
        if source is not None:
            alarm.compare_with(source.tolist())
        alarm.update(numbers[index].tolist())
        np.testing.assert_allclose(found[index, -1], alarm.wealth, rtol=1e-6)
        assert alarm.rang_at == _first(found[index], ALPHAS[0]), "expected the alarm's own answer"
    return found


def _first(wealth: Numbers, alpha: float) -> int | None:
    """After how many numbers the alarm rings."""
    rings = np.flatnonzero(wealth >= 1 / alpha)
    return int(rings[0]) + 1 if len(rings) else None


def without_shift(kind: str, streams: int, length: int, given: bool, seed: int = 0) -> dict[str, Any]:
    """The share of streams that alarmed, by alpha."""
    largest = simulated(kind, streams=streams, length=length, given=given, seed=seed).max(1)
    shares = {str(alpha): float((largest >= 1 / alpha).mean()) for alpha in ALPHAS}
    return {"entropies": kind, "given": given, "streams": streams, "length": length, "alarmed": shares}


def with_shift(
    kind: str, streams: int, given: bool, shift: float, at: int, after: int, seed: int = 0
) -> dict[str, Any]:
    """The share of streams that alarmed after the shift, by alpha, and the median of how many numbers it took."""
    found = simulated(kind, streams=streams, length=at + after, given=given, shift=shift, at=at, seed=seed)
    row: dict[str, Any] = {"entropies": kind, "given": given, "shift": shift, "at": at, "streams": streams}
    row |= {"after": after, "alarmed": {}, "delay": {}}
    for alpha in ALPHAS:
        rang = [_first(each, alpha) for each in found]
        late = [place - at if place is not None else np.inf for place in rang if place is None or place > at]
        row["alarmed"][str(alpha)] = float(np.isfinite(late).mean())
        middle = float(np.median(late))
        row["delay"][str(alpha)] = middle if np.isfinite(middle) else None
    return row


def main() -> None:
    """Print both tables; write them where `--json` says."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--streams", type=int, default=1000, help="without a shift; a fifth of it with one")
    parser.add_argument("--length", type=int, default=5000)
    parser.add_argument("--json", type=Path, help="a file for the numbers")
    args = parser.parse_args()
    began = time.perf_counter()
    print(f"{'entropies':14}{'given':7}" + "".join(f"alpha {alpha:<6g}" for alpha in ALPHAS) + "(share that alarmed)")
    clean = []
    for kind in KINDS:
        for given in (False, True):
            row = without_shift(kind, args.streams, args.length, given)
            clean.append(row)
            shares = "".join(f"{share:<12.3f}" for share in row["alarmed"].values())
            print(f"{kind:14}{given!s:7}{shares}", flush=True)
    print(
        f"{'entropies':14}{'given':7}{'shift':7}{'at':7}" + "".join(f"alpha {a:<6g}" for a in ALPHAS) + "(median delay)"
    )
    cases = [("continuous", given, shift, 1000) for given in (False, True) for shift in (0.1, 0.25, 0.5, 1.0, 2.0)]
    cases += [("three values", True, 0.5, 1000), ("continuous", True, 0.25, 20_000), ("continuous", True, 1.0, 20_000)]
    shifted = []
    for kind, given, shift, at in cases:
        row = with_shift(kind, max(args.streams // (5 if at < 5000 else 20), 1), given, shift, at, after=3000)
        shifted.append(row)
        delays = "".join(f"{'-' if d is None else f'{d:.0f}':12}" for d in row["delay"].values())
        print(f"{kind:14}{given!s:7}{shift:<7g}{at:<7}{delays}", flush=True)
    seconds = round(time.perf_counter() - began, 1)
    print(f"{seconds} s")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        command = " ".join(["python", "benchmarks/alarms.py", *sys.argv[1:]])
        figures = {"command": command, "seconds": seconds, "without_shift": clean, "with_shift": shifted}
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
