"""Predictions as CSV: the text of `predictions.csv`, its reader, and the check that a file is one."""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from poem._util.files import write_atomic
from poem.predict import Answer

GUARDED_COLUMNS = tuple(item.name for item in dataclasses.fields(Answer))
"""The columns of a guarded run."""
COLUMNS = tuple(name for name in GUARDED_COLUMNS if name != "verdict")
_PARSERS: dict[str, Any] = {
    **dict.fromkeys(("label", "class_index", "source_label"), int),
    **dict.fromkeys(("confidence", "entropy", "first_entropy", "source_entropy"), float),
    **dict.fromkeys(("taught", "newly_reliable"), lambda text: text == "True"),
}
"""Parsers of the columns that are not text; an empty field is None."""


def to_csv(answers: Iterable[Answer], *, header: bool = True, columns: Sequence[str] = COLUMNS) -> str:
    """Answers as CSV text, with a line of column names unless `header` is false."""
    rows = [columns] if header else []
    return "".join(map(_line, [*rows, *([getattr(each, name) for name in columns] for each in answers)]))


def _line(values: Sequence[Any]) -> str:
    """One row, ended by a line feed; with CRLF as terminator, the writer quotes fields that hold either character."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(values)
    return text.getvalue()[:-2] + "\n"


def from_csv(text: str) -> list[Answer]:
    """Parse the answers from the text that `to_csv` made."""
    return [_parse(row) for row in csv.DictReader(io.StringIO(text, newline=""))]


def _parse(row: Mapping[str, str]) -> Answer:
    values: dict[str, Any] = dict(row)
    for name, parse in _PARSERS.items():
        values[name] = parse(row[name]) if row[name] else None
    return Answer(**values)


def is_predictions(start: bytes) -> bool:
    """Whether a file that starts with these bytes is empty, or has a header of `to_csv` of this or an older version."""
    names = start.decode("utf-8", "replace").partition("\n")[0].split(",")
    return not start or (names[0] == "file" and {"first_entropy", "source_entropy"} <= {*names} <= {*GUARDED_COLUMNS})


def check_own_file(path: Path) -> None:
    """Raise if predictions would replace a file that `poem predict` did not write."""
    if path.is_file():
        with path.open("rb") as file:
            ours = is_predictions(file.read(4096))
        if not ours:
            raise FileExistsError(
                f"expected predictions of an earlier run, or nothing yet, at {path}, got another file; give another "
                "place with -o"
            )


def write_csv(answers: Iterable[Answer], path: Path, *, columns: Sequence[str] = COLUMNS) -> None:
    """Write a CSV file so that it appears with all of its rows or not at all."""
    write_atomic(path, to_csv(answers, columns=columns))
