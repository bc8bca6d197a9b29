"""A guarded run repeated from its audit: the same images must give the same signals, verdicts, events and answers.

Decisions to learn from a batch or to skip it, and `stop`, `resume` and `reset` by hand, are taken from the audit: they
came from a clock or from a user. Everything else is computed again and compared, bit for bit.

Bits are the same on the same torch, device and kind of machine. On a CPU the number of threads must be the same
(`torch.set_num_threads`), because sums depend on it in the last bits. On CUDA both runs need
`torch.use_deterministic_algorithms(True)`. The header of an audit holds all of these but the machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from poem.guarded.audit import MACHINE, json_values, read_audit, tensor_hash
from poem.guarded.guard import Guard

COMPARED = ("verdict", "events", "signals", "answer")
"""What is compared of each batch, after the hash of its images."""
STACKED = (
    "the service computed some batches together with those of other streams, which changes their last bits: "
    "poem.serve.replay.replay_answers repeats them so"
)
"""What to say where a service's audit is repeated as one stream alone."""
HEADER = {
    "weights": "these are not the weights of that run",
    "recipe": "this is not the recipe of that run",
    "guard": "these are not the guard's settings of that run",
    "reference": "the shift alarm is not given the source_data of that run",
    "prepared": "the method was not prepared on the source_data of that run",
}
"""Words for some fields of the header; all fields but those of the machine must be the same."""


@dataclass(frozen=True)
class Replay:
    """What a repeated run showed; `str()` says it in words."""

    batches: int
    """Batches repeated that were identical."""
    differing: int | None = None
    """Which batch of the run differs first, from 0; None where all are identical, or where none was repeated."""
    what: str = ""
    """In what it differs; "" where all are identical."""
    hints: tuple[str, ...] = ()
    """What is different about the machine: a cause of differences, none by itself."""
    left: bool = False
    """Whether there are images that the audit has no line of, as after a run that was stopped."""

    @property
    def identical(self) -> bool:
        """Whether everything that was recorded came out the same."""
        return not self.what

    def __str__(self) -> str:
        if self.identical:
            rest = "; the audit ends before the images do" if self.left else ""
            return f"{_count(self.batches)} repeated, all identical{rest}"
        if self.differing is None:
            return f"nothing repeated: {self.what}"
        hints = "".join(f"\n{hint}" for hint in self.hints)
        before = f"{_count(self.batches)} before it identical"
        return f"batch {self.differing} differs: {self.what} ({before}){hints}"


def replay(audit: str | Path, guard: Guard, batches: Iterable[Tensor]) -> Replay:
    """Repeat the run that an audit records, batch by batch, until one differs.

    An audit that ends early, because its run was killed, is repeated as far as it goes. Of a run that was stopped and
    resumed, batches that were computed twice count once, as resumed.

    Args:
        audit: The file that a guard wrote.
        guard: A fresh guard of the same model, recipe and settings, without an audit of its own.
        batches: The images of that run in its order, on the model's device.

    Returns:
        How many batches were identical, and the first that was not.

    Raises:
        ValueError: The file is no audit, records no batch, lacks the beginning of its run, or is of a run with
            `compile=True`; or the guard is not fresh.
    """
    if guard.state.batches:
        raise ValueError(f"expected a fresh guard, got one that has seen {guard.state.batches} batches; make a new one")
    header, lines = read_audit(Path(audit))
    refuse_compiled(audit, header, lines)
    steps, mine = recorded_steps(lines), json_values(guard.header())
    if not any(step["kind"] == "batch" for step in steps):
        raise ValueError(f"expected an audit with at least one batch, got {audit}, which has none")
    if differences := _header_differences(header, mine):
        return Replay(0, what="; ".join(differences))
    machines = [header, *(line for line in lines if line.get("kind") == "resumed")]
    stream = iter(batches)
    done = _repeat(guard, steps, stream)
    if done.identical:
        return replace(done, left=next(stream, None) is not None)
    hints = _machine_hints(machines, mine)
    if any("stacked" in line for line in lines):
        hints = (*hints, STACKED)
    return replace(done, hints=hints)


def refuse_compiled(audit: str | Path, header: dict[str, Any], lines: Iterable[dict[str, Any]]) -> None:
    """An error where a run was made, or went on, with `compile=True`: its last bits were those of compiled passes."""
    if any(line.get("compile", False) is not False for line in (header, *lines)):
        raise ValueError(
            f"expected an audit of a run without compile=True, which adapt no longer has, got {audit}; repeat it with "
            "the version of poem that wrote it"
        )


def recorded_steps(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of batches, and of what was done by hand, in the order in which they count.

    A batch that is recorded again, after a stop, takes the place of its first line and of all that follow it.

    Raises:
        ValueError: Lines are missing, or are none of a guard's.
    """
    steps: list[dict[str, Any]] = []
    start = 0  # of the batches since the last reset by hand, which counts from 0 again
    for line in lines:
        kind = line.get("kind")
        if kind in ("batch", "resumed"):
            number = line.get("batch")
            if not isinstance(number, int) or (kind == "batch" and not isinstance(line.get("learn"), bool)):
                raise ValueError(f"expected a line with the number of a batch, got {_cut(line)}")
            _drop_from(steps, start, number)
            seen = _seen(steps, start)
            if number != seen:
                raise ValueError(
                    f"expected the whole run in the audit, got batch {number} after {seen}: a run is repeated from its "
                    "beginning"
                )
        if kind == "batch":
            steps.append(line)
        elif kind == "event" and _by_hand(line):
            steps.append(line)
            start = len(steps) if line["event"] == "reset" else start
    return steps


def _seen(steps: list[dict[str, Any]], start: int) -> int:
    """Batches since the last reset by hand."""
    places = range(len(steps) - 1, start - 1, -1)
    return next((int(steps[place]["batch"]) + 1 for place in places if steps[place]["kind"] == "batch"), 0)


def _drop_from(steps: list[dict[str, Any]], start: int, number: int) -> None:
    """Remove a batch, and all after it, that is about to be recorded again."""
    first = len(steps)
    for place in range(len(steps) - 1, start - 1, -1):
        if steps[place]["kind"] == "batch":
            if steps[place]["batch"] < number:
                break
            first = place
    del steps[first:]


def _by_hand(line: dict[str, Any]) -> bool:
    """Whether an event is what a user did: the guard resets too, for reasons of its own."""
    return line.get("event") in ("stop", "resume") or (line.get("event"), line.get("why")) == ("reset", "by hand")


def _repeat(guard: Guard, steps: list[dict[str, Any]], stream: Iterator[Tensor]) -> Replay:
    """Take the steps until a batch differs."""
    done, total = 0, sum(step["kind"] == "batch" for step in steps)
    for step in steps:
        if step["kind"] == "event":
            {"stop": guard.stop, "resume": guard.resume, "reset": guard.reset}[step["event"]]()
            continue
        images = next(stream, None)
        if images is None:
            return Replay(done, done, f"the images end here, and the audit has {_count(total - done)} more")
        if tensor_hash(images) != step.get("images"):
            return Replay(done, done, "these are not the images of that run")
        found, then = (_compared(each) for each in (guard.repeat(images, learn=step["learn"]), step))
        differ = [name for name in COMPARED if _text(found.get(name)) != _text(then.get(name))]
        if differ:
            return Replay(done, done, "; ".join(_words(name, found.get(name), then.get(name)) for name in differ))
        done += 1
    return Replay(done)


def _compared(line: dict[str, Any]) -> dict[str, Any]:
    """The line without events that say nothing of their own.

    That a batch is skipped belongs to the decision that the audit gives; a change of the verdict, which older audits
    lack, is seen in the verdict itself.
    """
    events = line.get("events")
    if not isinstance(events, list):
        return line
    return {**line, "events": [kind for kind in events if kind not in ("skip", "verdict")]}


def _words(name: str, now: Any, then: Any) -> str:
    """A difference in words."""
    if name == "answer":
        return "other answers"
    if name == "signals" and isinstance(now, dict) and isinstance(then, dict):
        apart = [key for key in {**now, **then} if _text(now.get(key)) != _text(then.get(key))]
        return ", ".join(f"{key} {now.get(key)}, recorded {then.get(key)}" for key in apart)
    if name == "events":
        now, then = (", ".join(map(str, each)) or "none" if isinstance(each, list) else each for each in (now, then))
    return f"{name} {now}, recorded {then}"


def _header_differences(then: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """In what the guard is not that of the header; what is about the images and the machine is left out."""
    found = []
    for name in [name for name in {**now, **then} if name not in ("kind", "schema", "method", "name", "run", *MACHINE)]:
        one, two = now.get(name), then.get(name)
        if _text(one) == _text(two):
            continue
        if isinstance(one, dict) and isinstance(two, dict) and name in ("guard", "recipe"):
            apart = [key for key in {**one, **two} if _text(one.get(key)) != _text(two.get(key))]
            detail = ", ".join(f"{key} {one.get(key)}, recorded {two.get(key)}" for key in apart)
            found.append(f"{HEADER[name]}: {detail}")
        else:
            found.append(HEADER.get(name) or f"{name} {one}, recorded {two}")
    return found


def _machine_hints(then: list[dict[str, Any]], now: dict[str, Any]) -> tuple[str, ...]:
    """What may be the cause where bits differ: other versions, devices or numbers of threads."""
    names = dict.fromkeys(name for each in then for name in each if name in MACHINE and name in now)
    apart = [
        f"{name} {now[name]}, recorded {each[name]}"
        for name in names
        for each in then
        if name in each and _text(each[name]) != _text(now[name])
    ]
    hints = [f"the machine is another: {'; '.join(dict.fromkeys(apart))}"] if apart else []
    if "cuda" in (now.get("device"), then[0].get("device")) and not now.get("deterministic"):
        hints.append("on CUDA both runs need torch.use_deterministic_algorithms(True)")
    return tuple(hints)


def _text(value: Any) -> str:
    """A value as JSON has it: floats to the last bit."""
    return json.dumps(value, sort_keys=True)


def _count(batches: int) -> str:
    return f"{batches} batch{'' if batches == 1 else 'es'}"


def _cut(line: dict[str, Any]) -> str:
    text = _text(line)
    return text if len(text) <= 80 else f"{text[:80]}..."
