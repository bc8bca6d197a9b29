"""What arrives at the adapter: corruptions, data sets and orders."""

from __future__ import annotations

from poem.streams.corruptions import CORRUPTIONS, EXTRA, PROFILES, corrupt, frost_source, profile_of

__all__ = ["CORRUPTIONS", "EXTRA", "PROFILES", "corrupt", "frost_source", "profile_of"]
