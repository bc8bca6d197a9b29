"""Domain shifts: the names of the corruptions, and `Shift`, a corruption at a severity."""

from __future__ import annotations

from dataclasses import dataclass

from poem._util.integers import as_integer
from poem._util.nearest import nearest_hint

CORRUPTIONS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip
"""The fifteen corruptions of ImageNet-C, in the order of the papers."""
EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
"""The four extra corruptions, held out: settings may be chosen on these."""
VERSIONS = {"frost": 2}
"""Version of each corruption whose images have changed; the others are at 1. The key of every cell with the corruption
contains it, so that results on earlier images are not mixed with results on these."""


@dataclass(frozen=True)
class Shift:
    """A domain: a corruption at a severity from 1 to 5, or the clean data (`Shift()`)."""

    corruption: str = "clean"
    severity: int = 0

    def __post_init__(self) -> None:
        names = (*CORRUPTIONS, *EXTRA, "clean")
        if self.corruption not in names:
            raise ValueError(f"unknown corruption {self.corruption!r}; {nearest_hint(str(self.corruption), names)}")
        severity = as_integer(self.severity)
        if severity is None or severity not in ((0,) if self.corruption == "clean" else (1, 2, 3, 4, 5)):
            wanted = "0 for clean data" if self.corruption == "clean" else "1 to 5"
            hint = "; pass an integer" if severity is None else ""
            raise ValueError(f"expected severity {wanted}, got {self.severity!r} for {self.corruption}{hint}")
        object.__setattr__(self, "severity", severity)

    def __str__(self) -> str:
        return self.corruption if self.severity == 0 else f"{self.corruption} {self.severity}"


CLEAN = Shift()
