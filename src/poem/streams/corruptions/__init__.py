"""The 15 corruptions of ImageNet-C and its 4 extra ones, in torch, on any device."""

from __future__ import annotations

from poem.streams.corruptions.apply import (
    CORRUPTIONS,
    EXTRA,
    PROFILES,
    check_arguments,
    corrupt,
    frost_source,
    profile_of,
)

__all__ = ["CORRUPTIONS", "EXTRA", "PROFILES", "check_arguments", "corrupt", "frost_source", "profile_of"]
