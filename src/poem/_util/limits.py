"""Limits of what a command or a file may ask for; beyond them lies a slip of the finger that stops a machine."""

from __future__ import annotations

MANY = 1024
"""Processes or threads. OpenMP ends the process where it cannot start as many threads as it is told to."""
SEEDS = (-(2**63), 2**64 - 1)
"""Smallest and largest seed that `torch.Generator.manual_seed` takes."""
