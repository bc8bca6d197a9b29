"""Names of the domains, and the errors for a name or a severity that nobody knows."""

from __future__ import annotations

from dataclasses import dataclass

from poem._util.integers import as_integer
from poem._util.nearest import nearest_hint

CORRUPTIONS = (
    "gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "snow",
    "frost", "fog", "brightness", "contrast", "elastic_transform", "pixelate", "jpeg_compression",
)  # fmt: skip
"""The fifteen of ImageNet-C, in the order of every paper."""
EXTRA = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
"""Four more, held out: settings may be chosen on these."""
VERSIONS = {"frost": 2}
"""Version of each corruption whose images have changed; the others are at 1. It is part of the key of every cell that
has the corruption, so that results on the earlier images are not taken for results on these."""


@dataclass(frozen=True)
class Shift:
    """A domain: a corruption at a severity from 1 to 5, or the clean data (`Shift()`)."""

    corruption: str = "clean"
    severity: int = 0

    def __post_init__(self) -> None:
        known = (*CORRUPTIONS, *EXTRA, "clean")
        if self.corruption not in known:
            raise ValueError(f"unknown corruption {self.corruption!r}; {nearest_hint(str(self.corruption), known)}")
        severity = as_integer(self.severity)
        if severity is None or severity not in ((0,) if self.corruption == "clean" else (1, 2, 3, 4, 5)):
            wanted = "0 for clean data" if self.corruption == "clean" else "1 to 5"
            hint = "; pass an integer" if severity is None else ""
            raise ValueError(f"expected severity {wanted}, got {self.severity!r} for {self.corruption}{hint}")
        object.__setattr__(self, "severity", severity)

    def __str__(self) -> str:
        return self.corruption if self.severity == 0 else f"{self.corruption} {self.severity}"


CLEAN = Shift()
