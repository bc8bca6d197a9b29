"""What the service answers, as /openapi.json describes it: JSON schemas, with which tests compare real answers."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]


def _field(kind: str | list[str], description: str, **rest: Any) -> Schema:
    return {"type": kind, "description": description, **rest}


def _count(description: str) -> Schema:
    return _field("integer", description, minimum=0)


def _object(description: str, properties: dict[str, Schema], optional: tuple[str, ...] = ()) -> Schema:
    """An object that has these properties, of which some may be missing; a later version may add others."""
    return {
        "type": "object", "description": description, "properties": properties,
        "required": [name for name in properties if name not in optional],
    }  # fmt: skip


ANSWERED_BY = ["source", "mean", "adapted"]
ANSWER = _object("The answer for one image.", {
    "label": _count("Index of the class."),
    "name": _field("string", "Name of the class; its index where no names are known."),
    "probability": _field(["number", "null"], "Of that class; null where the network has diverged."),
    "entropy": _field(["number", "null"], "Of the probabilities of all classes, in nats; null likewise."),
    "answered_by": _field(
        "string", "Whose answer it is: the model's as it came (`source`), the `adapted` one's, or the `mean` of both.",
        enum=ANSWERED_BY,
    ),
})  # fmt: skip
PREDICTION = _object("The answers to one request.", {
    "stream": _field("string", "Id of the stream."),
    "request": _field("string", "The service's name for the request, by which the stream's audit knows it."),
    "batch": _count("Number of the stream's micro-batch that the request was in, from 0."),
    "late": _field("boolean", "Whether the source answered because of the deadline; nothing was learnt then."),
    "answers": _field("array", "One for each image, in their order.", minItems=1,
                      items={"$ref": "#/components/schemas/Answer"}),
    "ms": _field("number", "Milliseconds from the request's beginning to its answer."),
})  # fmt: skip
EVENT = _object("Something that a stream's guard has seen or decided.", {
    "batch": _count("At which batch."),
    "kind": _field("string", "Such as alarm, verdict, roll back, reset."),
    "why": _field("string", "In words."),
})  # fmt: skip
_ANSWERED = {
    "method": _field("string", "The method that adapts."),
    "guarded": _field("boolean", "Whether it has a guard."),
    "batches": _count("Micro-batches computed since it was made or reset; an imported state brings its own count. Late "
                      "requests are in none."),
    "lr": _field(["number", "null"], "Learning rate; null where not known."),
    "newly_reliable": _field(
        ["number", "null"], "Share of its last batch that was selected only after an update; null where not known."
    ),
}  # fmt: skip
_GUARDED = {
    "verdict": _field(
        "string", "Who answers: the model as it came (`source`), the `adapted` model, or the `mean` of both.",
        enum=ANSWERED_BY,
    ),
    "updates": _count("Updates of the adapted tensors."),
    "rollbacks": _count("Times that the guard went back to an earlier state, or reset to the source's."),
    "shift_alarm_after_images": _field(
        ["integer", "null"], "Images after which the shift alarm rang; null where it has not."
    ),
    "stopped": _field("string", "Why nothing is learnt any more; empty while it is."),
    "signals": _field(
        ["object", "null"], "What the guard saw at the last batch: numbers by name, null where not known.",
        additionalProperties={"type": ["number", "null"]},
    ),
    "events": _field("array", "The guard's last events, 20 at most, since the stream last came into memory.",
                     maxItems=20, items={"$ref": "#/components/schemas/GuardEvent"}),
}  # fmt: skip
_MEASURED = {
    "latency_ms": _field("number", "Milliseconds to the answer: a running mean of about 20 requests since the start."),
    "answer_entropy": _field("number", "Entropy of the answers in nats: a running mean of about 20 requests since the "
                                       "start, without those whose answers are not finite."),
}  # fmt: skip
STATUS = _object("What is known of a stream, as it is between two batches.", {
    "stream": _field("string", "Its id."),
    "folder": _field("string", "Its folder with snapshot and audits, in that of `--state`."),
    "how": _field("string", "How its last batch was computed: `stacked` with those of other streams, or alone, in "
                            "`turns`; before its first batch since the start, `turns`.", enum=["stacked", "turns"]),
    "why_alone": _field("string", "Why alone; empty where it was not, and before its first batch since the start."),
    "live": _field("boolean", "Whether it is in memory; else it is on disk until its next request."),
    "waiting": _count("Requests in its queue."),
    **_ANSWERED, **_GUARDED,
    "requests": _count("Requests answered, late ones too."),
    "images": _count("Images of these."),
    "late": _count("Requests that the source answered because of a deadline."),
    "rejected": _count("Requests refused because the queue was full. After a restart or a move, also after a clean "
                       "stop, it is as of the last snapshot."),
    "replayed": _count("Requests answered as before, because of their key. After a restart or a move as `rejected`."),
    "snapshots": _count("Snapshots written."),
    "snapshot_failures": _count("Snapshots that could not be written; the log says why."),
    **_MEASURED,
    "unsaved_batches": _count("Batches since the last snapshot, which a kill would lose."),
    "audit": _count("Number of its last audit, as 1 of `0001.jsonl`; 0 before the first."),
    "idle_s": _field("number", "Seconds since its last request, or since the start."),
}, optional=(*_ANSWERED, *_GUARDED, *_MEASURED))  # fmt: skip
SCHEMAS = {"Answer": ANSWER, "Prediction": PREDICTION, "GuardEvent": EVENT, "StreamStatus": STATUS}
"""Components of the schema, by name."""


def json_response(schema: Schema, description: str = "Successful Response") -> dict[int | str, dict[str, Any]]:
    """The entry of a route's `responses` for an answer of this schema."""
    return {200: {"description": description, "content": {"application/json": {"schema": schema}}}}


PREDICTION_RESPONSE = json_response({"$ref": "#/components/schemas/Prediction"}, "The answers, one for each image.")
STATUS_RESPONSE = json_response({"$ref": "#/components/schemas/StreamStatus"}, "The stream's status.")
STATUSES_RESPONSE = json_response(
    {"type": "array", "items": {"$ref": "#/components/schemas/StreamStatus"}}, "The status of every stream."
)
