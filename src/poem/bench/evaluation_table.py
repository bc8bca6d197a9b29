"""The table of `poem.evaluate`: rows of methods over seeds and by shift, paired differences, several formats."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

By = Literal["shift"]
_LATEX = {"\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{",
          "}": r"\}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Row:
    """Accuracy, calibration and cost of one method on one stream; with several seeds, means over them."""

    method: str
    accuracy: float  # percent
    ece: float  # percent
    nll: float  # nats
    n: int  # images of one seed
    forwards: int  # in images, as the method's arithmetic needs them; of one seed
    backwards: int
    source_images: int  # spent on source data before the stream
    seconds: float  # in the adapter, loading apart; of one seed
    nonfinite: int = 0  # answers of all seeds that were NaN or infinite; they count as wrong
    accuracies: tuple[float, ...] = ()
    """Accuracy with each seed, in percent."""
    shifts: Mapping[str, tuple[float, ...]] = field(default_factory=dict, hash=False)
    """Accuracy by shift with each seed that has it, in percent; empty for a loader whose batches state no shift."""
    correct: tuple[NDArray[np.bool_], ...] = field(default=(), repr=False, compare=False)
    """Whether each answer was right, in order of arrival, with each seed."""

    @property
    def deviation(self) -> float | None:
        """Sample standard deviation of the accuracy over seeds, in points; None with one seed."""
        return deviation(self.accuracies)

    def by_shift(self) -> dict[str, tuple[float, float | None]]:
        """Mean accuracy by shift, and its deviation over seeds or None."""
        return {name: (statistics.fmean(values), deviation(values)) for name, values in self.shifts.items()}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Accuracy of a method minus that of another, on the same images in the same order."""

    method: str
    reference: str
    points: float
    """Mean difference, in percentage points."""
    deviation: float | None
    """Sample standard deviation of the difference over seeds, in points; None with one seed."""
    error: float
    """Standard error of the mean difference over images, in points. Only images that one of the two answers right and
    the other wrong count; the images of a stream that is adapted to are not independent, so it is a lower bound."""
    seeds: int = 1
    """How many seeds the mean is over."""

    def __str__(self) -> str:
        return f"{self.method} {self.points:+.2f} points against {self.reference}" + _deviation_words(self)


def _deviation_words(difference: Difference) -> str:
    """Both errors, and what each counts: seeds draw other orders, images alone know of one."""
    seeds = f"deviation {difference.deviation:.2f} over {difference.seeds} seeds; " if difference.seeds > 1 else ""
    alone = f"standard error {difference.error:.2f} over images alone, which ignores that order and seeds matter"
    return f" ({seeds}{alone})"


@dataclass(frozen=True)
class Table:
    """Rows that print as an aligned table."""

    rows: tuple[Row, ...]
    seeds: tuple[int, ...] = ()
    """Empty where none were asked for."""
    by: By | None = None
    """With "shift", columns are the accuracies by shift."""

    def __iter__(self) -> Iterator[Row]:
        """Iterate over the rows."""
        return iter(self.rows)

    def __getitem__(self, method: str) -> Row:
        """The row of a method."""
        for row in self.rows:
            if row.method == method:
                return row
        raise KeyError(f"no row {method!r}; rows: {', '.join(row.method for row in self.rows)}")

    def __str__(self) -> str:
        lines = self._lines()
        wide = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join([line[0].ljust(wide[0]), *(cell.rjust(w) for cell, w in zip(line[1:], wide[1:], strict=True))])
            for line in lines
        )

    def differences(self, reference: str | None = None) -> tuple[Difference, ...]:
        """Paired differences of every other row to one row, by default the first.

        Raises:
            KeyError: No row has the name of the reference.
            ValueError: The rows hold no answers, because they were made by hand.
        """
        one = self.rows[0] if reference is None else self[reference]
        return tuple(paired_difference(row, one) for row in self.rows if row is not one)

    def markdown(self) -> str:
        """The table in Markdown, for a page or an issue."""
        head, *rows = (f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in self._lines())
        return "\n".join([head, f"|---|{'---:|' * (len(self._lines()[0]) - 1)}", *rows])

    def latex(self) -> str:
        r"""The table in LaTeX, for a document with `\usepackage{booktabs}`; the highest accuracies are bold."""
        head, *rows = self._lines()
        best = self._best(len(head))
        body = [
            [
                rf"\textbf{{{_escaped(cell)}}}" if at in best and line in best[at] else _escaped(cell)
                for at, cell in enumerate(row)
            ]
            for line, row in enumerate(rows)
        ]
        lines = [" & ".join(cells) + r" \\" for cells in [list(map(_escaped, head)), *body]]
        columns = "l" + "r" * (len(head) - 1)
        inner = [r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"]
        return "\n".join([rf"\begin{{tabular}}{{{columns}}}", *inner, r"\end{tabular}"])

    def csv(self) -> str:
        """The numbers as CSV in full precision: a line for each method, with `by="shift"` for each method and shift."""
        records = self.records()
        text = io.StringIO()
        writer = csv.DictWriter(text, list(records[0]) if records else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(records)
        return text.getvalue()

    def frame(self) -> Any:
        """The numbers as a pandas DataFrame, with the columns of `csv`.

        Raises:
            ImportError: pandas is not installed.
        """
        try:
            pandas = import_module("pandas")
        except ImportError as error:
            raise ImportError("a frame needs pandas; type: pip install pandas") from error
        return pandas.DataFrame(self.records())

    def records(self) -> list[dict[str, Any]]:
        """What `csv` and `frame` hold, a mapping for each line; None where there is no number."""
        if self.by == "shift":
            return [
                {
                    "method": row.method,
                    "shift": name,
                    "accuracy": mean,
                    "accuracy_std": std,
                    "seeds": len(row.accuracies),
                }
                for row in self.rows
                for name, (mean, std) in row.by_shift().items()
            ]
        found = []
        for row in self.rows:
            against = None if row is self.rows[0] or not row.correct else paired_difference(row, self.rows[0])
            found.append({
                "method": row.method, "accuracy": row.accuracy, "accuracy_std": row.deviation, "ece": row.ece,
                "nll": row.nll, "n": row.n, "seeds": max(1, len(row.accuracies)), "forwards": row.forwards,
                "backwards": row.backwards, "source_images": row.source_images, "seconds": row.seconds,
                "nonfinite": row.nonfinite, "difference": None if against is None else against.points,
                "difference_std": None if against is None else against.deviation,
                "difference_error": None if against is None else against.error,
            })  # fmt: skip
        return found

    def _lines(self) -> list[tuple[str, ...]]:
        """The head and every row, as texts."""
        if self.by == "shift":
            names = list(self.rows[0].shifts)
            head = ("method", *names, "mean")
            return [head, *((row.method, *_shift_texts(row, names)) for row in self.rows)]
        head = ("method", "accuracy %", "ECE %", "NLL", "n", "forwards", "backwards", "images/s")
        lines = [head, *map(_texts, self.rows)]
        if len(self.seeds) > 1:
            first = f"against {self.rows[0].method}"
            added = (first, *(self._difference_text(row) for row in self.rows))
            lines = [(*line[:2], word, *line[2:]) for line, word in zip(lines, added, strict=True)]
        if not any(row.nonfinite for row in self.rows):
            return lines
        more = ("not finite", *(f"{row.nonfinite}" for row in self.rows))
        return [(*line, word) for line, word in zip(lines, more, strict=True)]

    def _difference_text(self, row: Row) -> str:
        if row is self.rows[0]:
            return ""
        found = paired_difference(row, self.rows[0])
        return _with_deviation(found.points, found.deviation, sign="+")

    def _best(self, columns: int) -> dict[int, set[int]]:
        """Rows with the highest number, by column of accuracies."""
        if self.by == "shift":
            values = [[mean for mean, _ in row.by_shift().values()] + [row.accuracy] for row in self.rows]
            grid = {at + 1: [round(each[at], 1) for each in values] for at in range(columns - 1)}
        else:
            grid = {1: [round(row.accuracy, 1) for row in self.rows]}
        return {at: {line for line, each in enumerate(held) if each == max(held)} for at, held in grid.items()}


def paired_difference(row: Row, reference: Row) -> Difference:
    """The difference between two rows of one table.

    Raises:
        ValueError: The rows hold no answers, or answers to different numbers of images.
    """
    sizes = [[len(each) for each in one.correct] for one in (row, reference)]
    if not row.correct or sizes[0] != sizes[1]:
        raise ValueError("expected two rows of one poem.evaluate, got rows without answers to the same images")
    apart = [
        100 * (ours.astype(np.float64) - theirs) for ours, theirs in zip(row.correct, reference.correct, strict=True)
    ]
    every = np.concatenate(apart)
    points = [float(each.mean()) for each in apart]
    return Difference(
        method=row.method, reference=reference.method, points=statistics.fmean(points), deviation=deviation(points),
        error=float(every.std() / math.sqrt(len(every))), seeds=len(points),
    )  # fmt: skip


def deviation(values: Sequence[float]) -> float | None:
    """Sample standard deviation; None of fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


def _texts(row: Row) -> tuple[str, ...]:
    shares = _with_deviation(row.accuracy, row.deviation), f"{row.ece:.1f}", f"{row.nll:.2f}"
    return (
        row.method, *shares, f"{row.n}", f"{row.forwards}", f"{row.backwards}",
        f"{row.n / max(row.seconds, 1e-9):.0f}",
    )  # fmt: skip


def _shift_texts(row: Row, names: Sequence[str]) -> list[str]:
    found = row.by_shift()
    return [*(_with_deviation(*found[name]) for name in names), _with_deviation(row.accuracy, row.deviation)]


def _with_deviation(mean: float, std: float | None, sign: str = "") -> str:
    return f"{mean:{sign}.1f}" + ("" if std is None else f" ± {std:.1f}")


def _escaped(text: str) -> str:
    return "".join(_LATEX.get(each, each) for each in text)
