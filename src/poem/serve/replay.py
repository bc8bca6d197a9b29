"""A stream's answers computed again from its audit, request by request.

The audit says which requests made each micro-batch and which were answered by the source because of a deadline. With
the images of each request, which the service does not keep, every answer is computed again; hashes of images and
answers are compared with the recorded ones.

A batch that was computed together with those of other streams is computed again in the same row of as many, whose other
rows are blank: no row depends on what others hold, but the last bits depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from poem._util.state_file import load_state
from poem.adapter import Adapter
from poem.guarded.audit import read_audit, tensor_hash
from poem.guarded.guard import Guard
from poem.serve.learner import Learner, Served, answer_stacked
from poem.serve.stack import Stack


def replay_answers(
    audit: Path, served: Served, batch_size: int, images: Mapping[str, Tensor]
) -> dict[str, list[dict[str, Any]]]:
    """The answers of every request in an audit, by request id.

    Batches that were computed twice, because a kill had undone them, count as computed last.

    Args:
        audit: A stream's file; the state that it begins with lies beside it, where it is not a fresh one.
        served: The model of that service, and how it was adapted.
        batch_size: Of that service.
        images: The images of each request, by its id, as the service got them.

    Raises:
        ValueError: Images or answers are not the recorded ones, or some are missing.
    """
    _, lines = read_audit(audit)
    device = next(served.model.parameters()).device
    stack = Stack(_like(served, batch_size))
    learner, found = Learner(served, batch_size, stack=stack), dict[str, list[dict[str, Any]]]()
    start = audit.with_suffix(".safetensors")
    try:
        if start.exists():
            learner.load_state_dict(load_state(start))
        for line in _kept(lines):
            if line["kind"] == "event":
                learner.reset()
            elif line["kind"] == "late":
                batch = _images([line], images).to(device)
                answers, answer = learner.source(batch)
                _compare(line, batch, answer)
                found[line["request"]] = answers
            else:
                requests = line["requests"]
                batch = _images(requests, images).to(device)
                answers = learner.answer(batch) if "stacked" not in line else _stacked(stack, learner, batch, line)
                assert learner.last_hash is not None
                _compare(line, batch, learner.last_hash)
                for each in requests:
                    found[each["request"]], answers = answers[: each["count"]], answers[each["count"] :]
    finally:
        learner.close()
    return found


def _like(served: Served, batch_size: int) -> Adapter | Guard:
    """An adapter as the stream has one."""
    made = Learner(served, batch_size)
    made.close()
    return made.adapter


def _stacked(stack: Stack, learner: Learner, images: Tensor, line: dict[str, Any]) -> list[dict[str, Any]]:
    """A batch in its row of a stack whose other rows are blank."""
    streams, row = int(line["stacked"]["streams"]), int(line["stacked"]["row"])
    why = learner.why_not_stacked(images)
    if why:
        raise ValueError(f"batch {line['batch']}: expected streams that can be stacked, as they were, got: {why}")
    learners: list[Learner | None] = [None] * streams
    learners[row] = learner
    batches = [images if each is learner else torch.zeros_like(images) for each in learners]
    found = answer_stacked(stack, learners, batches)[row]
    if isinstance(found, Exception):
        raise found
    return found


def _kept(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Batches with their requests, late answers and resets, without the batches that were computed again later."""
    steps: list[dict[str, Any]] = []
    for line in lines:
        kind = line.get("kind")
        if kind in ("batch", "resumed") and _newest(steps) >= line["batch"]:
            last = max((at for at, each in enumerate(steps) if each["kind"] == "event"), default=-1)
            steps = [
                each for at, each in enumerate(steps)
                if at <= last or each["kind"] != "batch" or each["batch"] < line["batch"]
            ]  # fmt: skip
        if kind == "batch":
            steps.append(dict(line))
        elif kind == "requests":
            if not steps or steps[-1]["kind"] != "batch" or steps[-1]["batch"] != line["batch"]:
                raise ValueError(
                    f"expected the requests of a batch after it in the audit, got those of {line['batch']}"
                )
            steps[-1]["requests"] = line["requests"]
            if "stacked" in line:
                steps[-1]["stacked"] = line["stacked"]
        elif kind == "late" or is_reset(line):
            steps.append(line)
    return [each for each in steps if each["kind"] != "batch" or "requests" in each]


def is_reset(line: dict[str, Any]) -> bool:
    """Whether a line of an audit says that the stream was reset by a command."""
    return line.get("kind") == "event" and (line.get("event"), line.get("why")) == ("reset", "by hand")


def _newest(steps: list[dict[str, Any]]) -> int:
    """Number of the last batch since the last reset; -1 where there is none."""
    newest = next((each for each in reversed(steps) if each["kind"] in ("batch", "event")), None)
    return -1 if newest is None or newest["kind"] == "event" else int(newest["batch"])


def _images(requests: list[dict[str, Any]], images: Mapping[str, Tensor]) -> Tensor:
    """The images of some requests, as one batch."""
    missing = [each["request"] for each in requests if each["request"] not in images]
    if missing:
        raise ValueError(f"expected the images of every request, got none of {missing[0]}")
    return torch.cat([images[each["request"]] for each in requests])


def _compare(line: dict[str, Any], images: Tensor, answer: str) -> None:
    """Raise where a batch's images or answers are not the recorded ones."""
    for name, now in (("images", tensor_hash(images)), ("answer", answer)):
        if now != line[name]:
            raise ValueError(f"batch {line['batch']}: expected the {name} that were recorded, got others")
