"""What adapts for one stream: a guarded adapter over the model that all streams share; answers as plain values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from poem.adapter import Adapter
from poem.api import adapt
from poem.engine.network import two_columns
from poem.guarded.audit import MACHINE, Audit, Event, tensor_hash
from poem.guarded.guard import Guard
from poem.parts.base import entropy
from poem.recipes.text import written
from poem.serve.stack import Stack
from poem.serve.stack_state import Member
from poem.streams.loading.prepare import Prepare


@dataclass(frozen=True, kw_only=True)
class Served:
    """The model of a service, and how each stream adapts it."""

    model: nn.Module
    method: str | None = None
    """None: `auto`. `source` adapts nothing, and is not guarded."""
    guard: Mapping[str, Any] | bool = True
    """Settings of each stream's guard; False: none."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of `poem.adapt`: mean, std, lr, preset."""
    prepare: Prepare = field(default_factory=Prepare)
    """How image files become the model's input."""
    names: Mapping[int, str] = field(default_factory=dict)
    """Names of the classes."""
    base: str = ""
    """What the model is called, for audits and the status."""

    @property
    def guarded(self) -> bool:
        """Whether each stream has a guard."""
        return self.guard is not False and self.method != "source"

    def facts(self, batch_size: int) -> dict[str, Any]:
        """What a state must be of to fit: weights, recipe, normalisation, settings."""
        learner = Learner(self, batch_size)
        try:
            return learner.facts()
        finally:
            learner.close()


class Learner:
    """One stream's adapter. Not thread-safe: the engine calls it from one thread.

    Args:
        served: The model and how it is adapted.
        batch_size: Images of a micro-batch, which the learning rate is for.
        stream: The stream's id, for log, events and audit.
        audit: A new file for the stream's audit; none for no audit.
        append: Go on with that file; `load_state_dict` next.
        on_event: Called with the guard's events.
        stack: Computes batches of several streams at once; none: this stream is computed alone.
    """

    def __init__(
        self,
        served: Served,
        batch_size: int,
        *,
        stream: str = "",
        audit: Path | None = None,
        append: bool = False,
        on_event: Callable[[Event], object] | None = None,
        stack: Stack | None = None,
    ) -> None:
        self._names, self.batches = served.names, 0
        self._last: Tensor | None = None
        self._alone = "source" if served.method == "source" else "adapted"
        guard: Any = False
        if served.guarded:
            own = dict(served.guard) if isinstance(served.guard, Mapping) else {}
            about = {"model": served.base, "stream": stream}
            guard = {**own, "name": stream, "audit": audit, "append": append, "about": about, "on_event": on_event}
        method: Any = served.method or "auto"
        self.adapter: Adapter | Guard = adapt(
            served.model, method, guard=guard, batch_size=batch_size, **served.settings
        )
        self._stack, self._member = stack, Member(self._plain)
        side = served.prepare.crop
        self._tried = False
        self._try_model((3, side, side) if side else None)

    @property
    def _plain(self) -> Adapter:
        """The adapter, without its guard."""
        return self.adapter if isinstance(self.adapter, Adapter) else self.adapter.adapter

    def _settle(self) -> None:
        """The adapter holds the state, also where a stack computed the last batches."""
        if self._stack is not None:
            self._stack.settle(self._member)

    def why_not_stacked(self, images: Tensor) -> str:
        """Why this batch is computed alone; "" where it can be stacked with those of other streams."""
        return "stacking is off" if self._stack is None else self._stack.why_not(self._member, images)

    def _try_model(self, shape: Sequence[int] | None) -> None:
        """Let the adapter find out what the model allows, on noise, so that it does not depend on the stream's images.

        Otherwise a stream that came back from disk with a single image would be computed otherwise, in the last bits,
        than one that stayed in memory: some ways to run the model are tried on several images alone. A model of no
        fixed size is tried when the first images come.
        """
        if shape is not None and not self._tried:
            self._tried = True
            device = next(self.adapter.model.parameters()).device
            noise = torch.rand(2, *shape, generator=torch.Generator().manual_seed(0))
            with self._plain.frozen():
                self._plain(noise.to(device))

    @property
    def guard(self) -> Guard | None:
        """The guard, where there is one."""
        return self.adapter if isinstance(self.adapter, Guard) else None

    def answer(self, images: Tensor) -> list[dict[str, Any]]:
        """Predict and learn: one answer per image.

        Raises:
            ValueError: Images that the model does not take; nothing has changed then.
        """
        self._settle()
        if images.dim() == 4 and images.isfinite().all():  # else the adapter refuses them
            self._try_model(images.shape[1:])
        logits = self.adapter(images)
        verdicts = self._answered(logits)
        self._plain.forget_batch()
        return described(logits, verdicts, self._names)

    def _answered(self, logits: Tensor) -> Sequence[str]:
        """One more batch was answered; says who answered each image."""
        self._last = logits
        self.batches += 1
        return [self._alone] * len(logits) if self.guard is None else self.guard.verdicts

    @property
    def last_hash(self) -> str | None:
        """Hash of the last answer as an audit has it; None before the first."""
        return None if self._last is None else tensor_hash(self._last)

    def source(self, images: Tensor) -> tuple[list[dict[str, Any]], str]:
        """The answers of the model as it came, and their hash; nothing is learnt or remembered."""
        logits = self.adapter.source(images)
        return described(logits, ["source"] * len(images), self._names), tensor_hash(logits)

    @property
    def audited(self) -> int | None:
        """Bytes of the audit, which ends with what was done last; None where lines are missing, or without one."""
        audit = None if self.guard is None else self.guard._told.audit
        return audit.size if isinstance(audit, Audit) else None

    def note(self, kind: str, **values: Any) -> None:
        """Write a line to the audit, where there is one."""
        if self.guard is not None:
            self.guard.note(kind, **values)

    def reset(self) -> None:
        """As a fresh one; the audit goes on."""
        self._settle()
        self.adapter.reset()
        self.batches, self._tried = 0, False

    def state_dict(self) -> dict[str, Any]:
        """The adapter's state, with the guard's."""
        self._settle()
        return self.adapter.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self._settle()
        self.adapter.load_state_dict(state)
        self.batches = self.guard.state.batches if self.guard is not None else int(state["calls"])

    def close(self) -> None:
        """Close the audit, and let go of the model."""
        self.adapter.unload()

    def facts(self) -> dict[str, Any]:
        """What a state must be of to fit."""
        if self.guard is not None:
            header = self.guard.header()
            return {name: value for name, value in header.items() if name not in ("run", "name", *MACHINE)}
        state = self.adapter.state_dict()
        named = {name: state[name] for name in ("source", "mean", "std", "mask", "prepared", "batch_size")}
        return {"method": self.adapter.name, "recipe": written(self.adapter.recipe), **named}

    def status(self) -> dict[str, Any]:
        """What is known of the stream after its last batch, as plain values."""
        adapter, guard = self.adapter, self.guard
        newly = self._member.newly_reliable
        if newly is None:
            found_newly = adapter.last.newly_reliable
            newly = float(found_newly.float().mean()) if len(found_newly) else 0.0
        found: dict[str, Any] = {
            "method": adapter.name, "guarded": guard is not None, "batches": self.batches, "lr": adapter.lr,
            "newly_reliable": newly,
        }  # fmt: skip
        if guard is None:
            return found
        state, signals = guard.state, guard.signals
        events = [{"batch": each.batch, "kind": each.kind, "why": each.why} for each in list(guard.events)[-20:]]
        return {
            **found, "verdict": state.verdict, "updates": state.updates, "rollbacks": state.rollbacks,
            "shift_alarm_after_images": state.shift.rang_at, "stopped": state.stopped,
            "signals": None if signals is None else signals.as_dict(), "events": events,
        }  # fmt: skip


def answer_stacked(
    stack: Stack, learners: Sequence[Learner | None], images: Sequence[Tensor]
) -> list[list[dict[str, Any]] | Exception]:
    """One batch of each of several streams, computed at once.

    Args:
        stack: That of all learners.
        learners: Each stream's; None for a row that is no stream's.
        images: (b, C, H, W) of each, of one shape.

    Returns:
        Each stream's answers, or what its own adapter would have raised; that of a None is an empty list. What is
        raised here was raised before any stream changed; an error after that is one of the streams' own, and `batches`
        says whether a stream has learnt.
    """
    members = [None if each is None else each._member for each in learners]
    found = stack.answer([None if each is None else each.adapter for each in learners], members, images)
    results: list[list[dict[str, Any]] | Exception] = [each.error or [] for each in found]
    verdicts: list[str] = []
    answered = []
    for at, (learner, each) in enumerate(zip(learners, found, strict=True)):
        if learner is None or each.logits is None:
            continue
        try:
            own = learner._answered(each.logits)
        except Exception as error:
            results[at] = error
            continue
        if each.error is None:
            verdicts += own
            answered.append((at, each.logits))
    if answered:
        names = next(each._names for each in learners if each is not None)
        try:
            rows = described(torch.cat([logits for _, logits in answered]), verdicts, names)
        except Exception as error:  # not raised: all of them have learnt, and the batch must not be taken again
            for at, _ in answered:
                results[at] = error
            return results
        for at, logits in answered:
            results[at], rows = rows[: len(logits)], rows[len(logits) :]
    return results


def described(logits: Tensor, verdicts: Sequence[str], names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Answers as plain values: label, name, probability, entropy in nats, and whose answer each is."""
    log_probs = two_columns(logits.detach().float()).log_softmax(1).cpu()
    tops = log_probs.exp().max(1)
    rows = zip(tops.indices.tolist(), tops.values.tolist(), entropy(log_probs).tolist(), verdicts, strict=True)
    return [
        {
            "label": label, "name": names.get(label, str(label)), "probability": chance, "entropy": unsure,
            "answered_by": verdict,
        }
        for label, chance, unsure, verdict in rows
    ]  # fmt: skip
