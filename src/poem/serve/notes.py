"""Some messages of the package that name arguments of Python, in the words of a service.

A service calls `poem.adapt` for every stream, so a note on its method would be logged for each. Messages are known by
their text: one that is worded anew where it is logged must be changed here too, else it is logged as it is, each time.
"""

from __future__ import annotations

import logging

NOTES = {
    "%s has no source_data for its Fisher anchor and runs as ETA":
        "%s has no source images for its Fisher anchor and runs as ETA; add --source-data FOLDER",
    "with %d classes %r selects almost no sample; try preset='cifar'":
        "with %d classes %r selects almost no sample; try --preset cifar",
    "%s was measured to lose up to %d points on networks with %s norm, on streams %s (docs/when-not-to-adapt.md); "
    "poem.adapt(model) is auto, guarded; guard=True limits what %s loses":
        "%s was measured to lose up to %d points on networks with %s norm, on streams %s (docs/when-not-to-adapt.md); "
        "without METHOD it is auto; leave out --no-guard, and a guard limits what %s loses",
}  # fmt: skip
"""Messages that are logged once, each with one of the same arguments that names options of `poem serve`."""
PHRASES = {"Try a lower lr=, or adapter.reset()": "Try a lower --lr, or POST /v1/streams/ID/reset"}
"""Parts of texts that are arguments of a message, which is logged each time."""


class NotesOnce(logging.Filter):
    """For the log `poem`: passes each of `NOTES` once, and everything else; both in the words above."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged; its message is replaced where it is one of `NOTES`."""
        if isinstance(record.args, tuple):
            record.args = tuple(_reworded(each) for each in record.args)
        words = NOTES.get(str(record.msg))
        if words is None:
            return True
        record.msg = words
        text = record.getMessage()
        new = text not in self._said
        self._said.add(text)
        return new


def _reworded(value: object) -> object:
    """An argument of a message with `PHRASES` replaced, where it is text."""
    if isinstance(value, str):
        for phrase, words in PHRASES.items():
            value = value.replace(phrase, words)
    return value
