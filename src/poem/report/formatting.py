"""Formats of numbers on a page, and the labels of its metrics."""

from __future__ import annotations

from dataclasses import dataclass

MISSING, TIMES = "\u2013", "\u00d7"
"""The dash for a missing number, and the multiplication sign."""


@dataclass(frozen=True, kw_only=True)
class MetricLabel:
    """Label, unit and digits of one key of `CellResult.metrics`."""

    key: str
    label: str
    unit: str
    digits: int = 1
    higher: bool = True
    """Whether more is better."""

    def format(self, value: float | None) -> str:
        """A value with the metric's digits, or a dash."""
        return MISSING if value is None else f"{value:.{self.digits}f}"

    @property
    def title(self) -> str:
        """Label, unit and direction."""
        return f"{self.label}, {self.unit}, {'higher' if self.higher else 'lower'} is better"


METRICS: dict[str, MetricLabel] = {
    each.key: each
    for each in (
        MetricLabel(key="top1", label="Top-1 accuracy", unit="%"),
        MetricLabel(key="top5", label="Top-5 accuracy", unit="%"),
        MetricLabel(key="ece", label="Calibration error (ECE)", unit="%", higher=False),
        MetricLabel(key="nll", label="Negative log-likelihood", unit="nats", digits=2, higher=False),
        MetricLabel(key="aurc", label="Risk over coverage (AURC)", unit="%", higher=False),
        MetricLabel(key="worst_window", label="Worst window", unit="% right in the worst window of the stream"),
    )
}
"""The metrics that a page can show, in the order of its switch; the paper prints the first alone."""


def count(number: float) -> str:
    """A whole number with commas between thousands."""
    return f"{number:,.0f}"


def signed(value: float, digits: int = 1) -> str:
    """A difference with its sign, or without one where it rounds to zero."""
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "\u2212")


def seconds(value: float) -> str:
    """A duration with fewer digits the longer it is."""
    if value >= 100:
        return count(value)
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def speed(value: float) -> str:
    """Images per second."""
    return count(value) if value >= 10 else f"{value:.1f}"


def mebibytes(value: float) -> str:
    """Bytes as MiB."""
    return f"{value / 2**20:,.0f} MiB"


def comma_list(values: list[str], most: int = 6) -> str:
    """Values between commas; of more than `most`, the first three, the last and the count."""
    if len(values) <= most:
        return ", ".join(values)
    return f"{', '.join(values[:3])}, … {values[-1]} ({len(values)})"


def plural(number: int, word: str) -> str:
    """`1 cell`, `2 cells`."""
    return f"{count(number)} {word}{'' if number == 1 else 's'}"
