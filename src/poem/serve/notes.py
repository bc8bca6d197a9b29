"""What `poem.adapt` logs of a method and a model: said once in a service, which calls it for every stream."""

from __future__ import annotations

import logging

NOTES = {
    "%s has no source_data for its Fisher anchor and runs as ETA":
        "%s has no source images for its Fisher anchor and runs as ETA; add --source-data FOLDER",
    "with %d classes %r selects almost no sample; try preset='cifar'":
        "with %d classes %r selects almost no sample; try --preset cifar",
}  # fmt: skip
"""Messages that name an argument of Python, each with one that names the option of `poem serve`."""


class NotesOnce(logging.Filter):
    """For the log `poem`: passes each of `NOTES` once, in the words of the command line, and everything else."""

    def __init__(self) -> None:
        super().__init__()
        self._said: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is logged; its message is replaced where it is one of `NOTES`."""
        words = NOTES.get(str(record.msg))
        if words is None:
            return True
        record.msg = words
        text = record.getMessage()
        new = text not in self._said
        self._said.add(text)
        return new
