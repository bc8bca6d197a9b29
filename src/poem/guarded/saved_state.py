"""A guard's part of a saved state: what it remembers as plain values and tensors, and back."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from typing import Any

import torch
from torch import Tensor

from poem.engine.state import Snapshot
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
    state: dict[str, Any], fresh: GuardState, now: Snapshot
) -> tuple[dict[str, Any], GuardState, Signals | None]:
    """What `joined` put together: the adapter's state, what the guard remembers, and its last signals.

    Args:
        state: As a file or another guard had it.
        fresh: What the guard that loads it remembers before the first batch.
        now: Of its adapter; gives the device, and what a snapshot need not hold.

    Raises:
        ValueError: A state without a guard's part, of another version of the format, or one that lacks something.
    """
    if not isinstance(state, dict) or not isinstance(state.get("guard"), dict):
        raise ValueError("expected the state of a guarded adapter, got one without a guard; load it unguarded")
    if not isinstance(state.get("tensors"), dict):
        raise ValueError("expected tensors by name in the state, got something else")
    own = {key: tensor for key, tensor in state["tensors"].items() if not key.startswith("guard/")}
    held = _from_plain(state["guard"], state["tensors"], fresh, now)
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


def _from_plain(plain: dict[str, Any], tensors: dict[str, Tensor], fresh: GuardState, now: Snapshot) -> GuardState:
    """The memory that `_to_plain` described."""
    if plain.get("schema") != GUARD_SCHEMA:
        came = f"number {plain['schema']!r}" if "schema" in plain else "none, as of an older version"
        raise ValueError(
            f"expected the guard's state in format number {GUARD_SCHEMA}, got {came}; begin the stream anew, or go on "
            "with the version that saved it"
        )
    device = now.values["source"]["theta"].device
    try:
        held = {name: plain[name] for name in PLAIN}
        shift = dict(plain["shift"])
        ranks = Ranks(**{**shift.pop("ranks"), "values": array("d", tensors["guard/ranks"].tolist())})
        jumper = Jumper(**{**shift["jumper"], "wealths": tuple(shift["jumper"]["wealths"])})
        alarm = ShiftAlarm(**{**shift, "bet": Bet(**shift["bet"]), "jumper": jumper, "ranks": ranks})
        averages = None
        if "guard/averages/seen" in tensors:
            averages = Averages(*(tensors[f"guard/averages/{item.name}"].to(device) for item in fields(Averages)))
        ring = tuple((batch, _snapshot(place, tensors, now, device)) for place, batch in enumerate(plain["ring"]))
        budget = None if plain["budget"] is None else AnswerBudget(**plain["budget"])
        worse = MeanBound(**plain["worse"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"expected the state of a guarded adapter, got one that lacks {error}") from error
    if held["verdict"] not in VERDICTS:
        raise ValueError(f"expected the verdict {', '.join(VERDICTS)} in the state, got {held['verdict']!r}")
    _check_ring(ring, now)
    if (budget and budget.share) != (fresh.budget and fresh.budget.share):
        raise ValueError(
            f"expected a state with the budget {fresh.budget and fresh.budget.share}, got one with "
            f"{budget and budget.share}; make the guard with budget={budget and budget.share}"
        )
    held |= {"gradients": tuple(held["gradients"]), "shift": alarm, "worse": worse, "averages": averages}
    return replace(fresh, **held, ring=ring, budget=budget)


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
