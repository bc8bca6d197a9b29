"""How a page writes its numbers, and what its metrics are called."""

from __future__ import annotations

from dataclasses import dataclass

NOTHING, TIMES = "\u2013", "\u00d7"
"""A dash where a number is not there, and the sign of multiplication."""


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One key of `CellResult.metrics`, as a reader meets it."""

    key: str
    label: str
    unit: str
    digits: int = 1
    higher: bool = True
    """Whether more is better."""

    def text(self, value: float | None) -> str:
        """A number as printed."""
        return NOTHING if value is None else f"{value:.{self.digits}f}"

    @property
    def title(self) -> str:
        """Label, unit and direction."""
        return f"{self.label}, {self.unit}, {'higher' if self.higher else 'lower'} is better"


METRICS: dict[str, Metric] = {
    each.key: each
    for each in (
        Metric(key="top1", label="Top-1 accuracy", unit="%"),
        Metric(key="top5", label="Top-5 accuracy", unit="%"),
        Metric(key="ece", label="Calibration error (ECE)", unit="%", higher=False),
        Metric(key="nll", label="Negative log-likelihood", unit="nats", digits=2, higher=False),
        Metric(key="aurc", label="Risk over coverage (AURC)", unit="%", higher=False),
        Metric(key="worst_window", label="Worst window", unit="% right in the worst stretch of the stream"),
    )
}
"""What the page's switch offers, in order; the paper prints the first alone."""


def count(number: float) -> str:
    """A whole number with its thousands apart."""
    return f"{number:,.0f}"


def signed(value: float, digits: int = 1) -> str:
    """A difference with its sign; what rounds to nothing has none."""
    text = f"{value:+.{digits}f}"
    return text[1:] if float(text) == 0 else text.replace("-", "\u2212")


def seconds(value: float) -> str:
    """A duration, as coarse as it is long."""
    if value >= 100:
        return count(value)
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def speed(value: float) -> str:
    """Images per second."""
    return count(value) if value >= 10 else f"{value:.1f}"


def size(value: float) -> str:
    """Bytes, in MiB."""
    return f"{value / 2**20:,.0f} MiB"


def listed(values: list[str], most: int = 6) -> str:
    """Words between commas; long lists lose their middle."""
    if len(values) <= most:
        return ", ".join(values)
    return f"{', '.join(values[:3])}, … {values[-1]} ({len(values)})"


def plural(number: int, word: str) -> str:
    """`1 cell`, `2 cells`."""
    return f"{count(number)} {word}{'' if number == 1 else 's'}"
