"""A guard's part of a saved state: what it remembers as plain values and tensors, and back."""

from __future__ import annotations

import copy
import math
from array import array
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from poem.engine.state import Snapshot
from poem.guarded.actions import LAST_GRADIENTS
from poem.guarded.alarms import Bet, Jumper, MeanBound, Ranks, ShiftAlarm
from poem.guarded.budget import AnswerBudget
from poem.guarded.guard_state import GuardState
from poem.guarded.judgement import VERDICTS
from poem.guarded.signals import Averages, Signals

GUARD_SCHEMA = 2
"""Version of the guard's part of a saved state; it is stored in every one."""
GROUPS = ("moving", "teacher", "memory")
PLAIN = (
    "batches", "verdict", "gradients", "updates", "rollbacks", "wait", "trial", "stopped", "skipped", "learn_ms",
    "plain_ms",
)  # fmt: skip


def joined(state: dict[str, Any], held: GuardState, signals: Signals | None) -> dict[str, Any]:
    """An adapter's state with the guard's part: plain values under `guard`, tensors among the adapter's."""
    plain, tensors = _to_plain(held)
    plain["signals"] = None if signals is None else signals.as_dict()
    return {**state, "guard": plain, "tensors": {**state["tensors"], **tensors}}


def parted(
    state: dict[str, Any], fresh: GuardState, now: Snapshot, ring: int
) -> tuple[dict[str, Any], GuardState, Signals | None]:
    """What `joined` put together: the adapter's state, what the guard remembers, and its last signals.

    Args:
        state: As a file or another guard had it.
        fresh: What the guard that loads it remembers before the first batch; its limits are kept, whatever the state
            has.
        now: Of its adapter; gives the device, and what a snapshot need not hold.
        ring: Snapshots that this guard keeps, at most.

    Raises:
        ValueError: A state without a guard's part, of another version of the format, one that lacks something, or one
            with counts that no guard can have.
    """
    if not isinstance(state, dict) or not isinstance(state.get("guard"), dict):
        raise ValueError("expected the state of a guarded adapter, got one without a guard; load it unguarded")
    if not isinstance(state.get("tensors"), dict):
        raise ValueError("expected tensors by name in the state, got something else")
    own = {key: tensor for key, tensor in state["tensors"].items() if not key.startswith("guard/")}
    held = _from_plain(state["guard"], state["tensors"], fresh, now, ring)
    rest = {key: value for key, value in state.items() if key not in ("guard", "tensors")}
    return {**rest, "tensors": own}, held, _signals(state["guard"].get("signals"))


def _to_plain(held: GuardState) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Plain values for JSON, and tensors whose names begin with `guard/`."""
    tensors: dict[str, Tensor] = {}
    if held.averages is not None:
        for item in fields(Averages):
            tensors[f"guard/averages/{item.name}"] = getattr(held.averages, item.name).clone()
    tensors["guard/ranks"] = torch.tensor(held.shift.ranks.values, dtype=torch.float64)
    for place, (_, snapshot) in enumerate(held.ring):
        for name, tensor in _tensors(snapshot).items():
            tensors[f"guard/ring/{place}/{name}"] = tensor.clone()
        tensors[f"guard/ring/{place}/rng"] = snapshot.rng.clone()
    shift = {**asdict(held.shift), "ranks": {**asdict(held.shift.ranks), "values": []}}
    plain = {"schema": GUARD_SCHEMA, **{name: getattr(held, name) for name in PLAIN}}
    plain |= {
        "shift": shift, "worse": asdict(held.worse), "ring": [batch for batch, _ in held.ring],
        "budget": None if held.budget is None else asdict(held.budget),
    }  # fmt: skip
    return plain, tensors


def _from_plain(
    plain: dict[str, Any], tensors: dict[str, Tensor], fresh: GuardState, now: Snapshot, most: int
) -> GuardState:
    """The memory that `_to_plain` described, with at most so many snapshots."""
    if plain.get("schema") != GUARD_SCHEMA:
        came = f"number {plain['schema']!r}" if "schema" in plain else "none, as of an older version"
        raise ValueError(
            f"expected the guard's state in format number {GUARD_SCHEMA}, got {came}; begin the stream anew, or go on "
            "with the version that saved it"
        )
    device = now.values["source"]["theta"].device
    try:
        held = {name: plain[name] for name in PLAIN}
        alarm = _alarm(plain["shift"], tensors["guard/ranks"], fresh.shift)
        _check_length("snapshots", plain["ring"], most)
        _check_length("gradients", held["gradients"], LAST_GRADIENTS)
        averages = None
        if "guard/averages/seen" in tensors:
            averages = Averages(*(tensors[f"guard/averages/{item.name}"].to(device) for item in fields(Averages)))
        ring = tuple((batch, _snapshot(place, tensors, now, device)) for place, batch in enumerate(plain["ring"]))
        budget = None if plain["budget"] is None else AnswerBudget(**plain["budget"])
        worse = MeanBound(**{**plain["worse"], "alpha": fresh.worse.alpha, "tuned_for": fresh.worse.tuned_for})
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected the state of a guarded adapter, got one that lacks {error}") from error
    if held["verdict"] not in VERDICTS:
        raise ValueError(f"expected the verdict {', '.join(VERDICTS)} in the state, got {held['verdict']!r}")
    _check_ring(ring, now)
    _check_numbers(held, alarm, worse)
    if (budget and budget.share) != (fresh.budget and fresh.budget.share):
        raise ValueError(
            f"expected a state with the budget {fresh.budget and fresh.budget.share}, got one with "
            f"{budget and budget.share}; make the guard with budget={budget and budget.share}"
        )
    _check_budget(budget, alarm)
    held |= {"gradients": tuple(held["gradients"]), "shift": alarm, "worse": worse, "averages": averages}
    return replace(fresh, **held, ring=ring, budget=budget)


def _alarm(shift: dict[str, Any], values: Tensor, fresh: ShiftAlarm) -> ShiftAlarm:
    """The shift alarm of a state, with the limits of the guard's own."""
    most = max(fresh.ranks.limit, fresh.reference, len(fresh.ranks.values))
    if values.dim() != 1 or len(values) > most:
        raise ValueError(f"expected at most {most} numbers in the state's shift alarm, got {tuple(values.shape)}")
    if not bool(values.isfinite().all()) or bool((values[1:] < values[:-1]).any()):
        raise ValueError("expected finite numbers in ascending order in the state's shift alarm, got others")
    limits = {"seed": fresh.ranks.seed, "limit": fresh.ranks.limit}
    ranks = Ranks(**{**shift["ranks"], **limits, "values": array("d", values.tolist())})
    jumper = Jumper(**{**shift["jumper"], "wealths": tuple(shift["jumper"]["wealths"]), "jump": fresh.jumper.jump})
    own = {"alpha": fresh.alpha, "reference": fresh.reference, "seed": fresh.seed}
    return ShiftAlarm(**{**shift, **own, "bet": Bet(**shift["bet"]), "jumper": jumper, "ranks": ranks})


def _check_length(name: str, values: Any, most: int) -> None:
    """Refuse a list that is longer than a guard's own."""
    if not isinstance(values, list | tuple) or len(values) > most:
        came = len(values) if isinstance(values, list | tuple) else repr(values)[:80]
        raise ValueError(f"expected at most {most} {name} in the state, as this guard keeps, got {came}")


def _check_numbers(held: dict[str, Any], alarm: ShiftAlarm, worse: MeanBound) -> None:
    """Refuse what counts nothing, or is no number."""
    bet, jumper = alarm.bet, alarm.jumper
    counts = {name: held[name] for name in ("batches", "updates", "rollbacks", "wait", "trial")} | {
        "shift.seen": alarm.seen, "shift.ranks.drawn": alarm.ranks.drawn, "shift.bet.seen": bet.seen,
        "shift.jumper.seen": jumper.seen, "shift.rang_at": alarm.rang_at or 0, "worse.count": worse.count,
    }  # fmt: skip
    for name, value in counts.items():
        if type(value) is not int or value < 0:
            raise ValueError(f"expected {name} to be a count in the state, got {repr(value)[:80]}")
    numbers = {
        "shift.bet.bet": bet.bet, "shift.bet.wealth": bet.wealth, "shift.bet.squares": bet.squares,
        "shift.jumper.reserve": jumper.reserve, "worse.total": worse.total, "worse.variation": worse.variation,
        "learn_ms": held["learn_ms"], "plain_ms": held["plain_ms"],
    }  # fmt: skip
    numbers |= {f"shift.jumper.wealths {at}": each for at, each in enumerate(jumper.wealths)}
    for name, value in numbers.items():
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ValueError(f"expected {name} to be a finite number in the state, got {repr(value)[:80]}")
    if len(jumper.wealths) != 3 or any(type(each) not in (int, float) for each in held["gradients"]):
        raise ValueError("expected three wealths and numbers as gradients in the state, got something else")
    if type(alarm.given) is not bool or not all(isinstance(held[name], str) for name in ("stopped", "skipped")):
        raise ValueError("expected shift.given to be true or false and reasons in words in the state, got others")


def _check_budget(budget: AnswerBudget | None, alarm: ShiftAlarm) -> None:
    """Refuse a budget that has spent more than it may, or has seen images that the alarm has not: it sees each."""
    if budget is None:
        return
    counts = (budget.seen, budget.spent)
    if any(type(each) is not int or each < 0 for each in counts) or budget.seen > alarm.seen:
        raise ValueError(
            f"expected a budget in the state of at most {alarm.seen} images, which its alarm has seen, got {counts}"
        )
    if budget.spent > Fraction(str(float(budget.share))) * budget.seen:
        raise ValueError(
            f"expected a budget in the state that has spent at most {budget.share} of {budget.seen} answers, got "
            f"{budget.spent}"
        )


def _signals(values: Any) -> Signals | None:
    """The signals of a saved state; None where it has none."""
    try:
        return None if values is None else Signals(**values)
    except TypeError as error:
        raise ValueError(f"expected the state of a guarded adapter, got one with other signals: {error}") from error


def _check_ring(ring: Iterable[tuple[int, Snapshot]], now: Snapshot) -> None:
    """Refuse snapshots that the adapter, whose state is `now`, could not go back to."""
    for batch, snapshot in ring:
        own = _tensors(snapshot)
        for name, tensor in _tensors(now).items():
            other = own.get(name)
            if other is None or (other.shape, other.dtype) != (tensor.shape, tensor.dtype):
                came = "none" if other is None else f"{tuple(other.shape)} of {other.dtype}"
                raise ValueError(
                    f"expected {name} as {tuple(tensor.shape)} of {tensor.dtype} in the snapshot of batch {batch}, "
                    f"got {came}"
                )
            if name.startswith("moving/") and not bool(other.isfinite().all()):
                raise ValueError(f"expected {name} to be finite in the snapshot of batch {batch}")


def _tensors(snapshot: Snapshot) -> dict[str, Tensor]:
    """What a snapshot must hold to go back to it."""
    values = snapshot.values
    found = {f"{group}/{name}": tensor for group in GROUPS for name, tensor in values[group].items()}
    return found | {f"steps/{key}/{name}": each for key, step in values["steps"].items() for name, each in step.items()}


def _snapshot(place: int, tensors: dict[str, Tensor], now: Snapshot, device: torch.device) -> Snapshot:
    """A snapshot of the ring, from its tensors."""
    prefix = f"guard/ring/{place}/"
    own = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
    rng = own.pop("rng")
    values = copy.copy(now.values)
    values.update({group: {} for group in GROUPS}, steps={})
    for key, tensor in own.items():
        group, _, name = key.partition("/")
        if group == "steps":
            step, _, name = name.rpartition("/")
            values["steps"].setdefault(step, {})[name] = tensor.to(device)
        else:
            values[group][name] = tensor.to(device)
    return Snapshot(values, rng)
