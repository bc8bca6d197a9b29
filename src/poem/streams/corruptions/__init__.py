"""What corruptions do to images: the 15 of ImageNet-C and its 4 extra ones, in torch, on any device."""

from __future__ import annotations

from poem.streams.corruptions.apply import CORRUPTIONS, EXTRA, PROFILES, check, corrupt, frost_source, profile_of

__all__ = ["CORRUPTIONS", "EXTRA", "PROFILES", "check", "corrupt", "frost_source", "profile_of"]
