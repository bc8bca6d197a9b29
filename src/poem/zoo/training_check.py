"""Whether a network trained again is as accurate as its record says, up to the standard error of the test images."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ERRORS = 2.0
"""Standard errors by which a network may be below its record."""


def accuracy_error(accuracy: float, images: int) -> float:
    """Standard error in points of an accuracy in percent, of that many independent test images."""
    share = accuracy / 100
    return 100 * math.sqrt(share * (1 - share) / images)


@dataclass(frozen=True)
class RecordCheck:
    """A network's accuracy beside that of its record, in percent."""

    reached: float
    recorded: float
    error: float
    """Standard error of the difference, in points; the two are taken as independent."""
    unlike: str = ""
    """Why the two cannot be compared; empty where they can."""

    @property
    def passed(self) -> bool:
        """False where the network is below its record by more than `ERRORS` standard errors, and could be compared."""
        return bool(self.unlike) or self.reached >= self.recorded - ERRORS * self.error

    def __str__(self) -> str:
        verdict = (
            f"not judged: {self.unlike}" if self.unlike
            else "BELOW the record" if not self.passed
            else "above the record" if self.reached > self.recorded + ERRORS * self.error
            else "agrees with the record"
        )  # fmt: skip
        difference = f"{self.reached - self.recorded:+.2f} points to the record's {self.recorded:.2f} %"
        return f"{difference}, standard error {self.error:.2f}: {verdict}"


def check_record(record: Mapping[str, Any], before: Any) -> RecordCheck | None:
    """Compare a record of `poem.zoo.train.train` with an earlier one of the same network; None where that is no record.

    The two are judged where the test images are the same, pixel by pixel, and the later network was trained on as many
    images for at least as many epochs.
    """
    numbers = ("accuracy", "test_images", "epochs")
    if not isinstance(before, Mapping) or not all(isinstance(before.get(name), (int, float)) for name in numbers):
        return None
    if not 0 <= before["accuracy"] <= 100 or before["test_images"] < 1:
        return None
    unlike = [
        f"{name} {_stated(record, name)} instead of {_stated(before, name)}"
        for name in ("data", "train", "test", "pixels_sha256", "test_sha256")
        if _stated(record, name) != _stated(before, name)
    ]
    if record["epochs"] < before["epochs"]:
        unlike.append(f"{record['epochs']} epochs instead of {before['epochs']}")
    error = math.hypot(
        accuracy_error(record["accuracy"], record["test_images"]),
        accuracy_error(before["accuracy"], before["test_images"]),
    )
    return RecordCheck(record["accuracy"], before["accuracy"], error, "; ".join(unlike))


def _stated(record: Mapping[str, Any], name: str) -> str | None:
    """An entry of a record's description of its data, hashes shortened."""
    task = record.get("task")
    found = task.get(name) if isinstance(task, Mapping) else None
    return None if found is None else str(found)[:12] if name.endswith("sha256") else str(found)
