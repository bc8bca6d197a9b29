"""How many updates does a batch get, and are samples selected again before each?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from poem.parts.base import Part
from poem.parts.fields import Range

Updates = Annotated[int, Range(at_least=1, hint="use the method 'source' to learn nothing")]


@dataclass(frozen=True, repr=False)
class Exploration(Part):
    """At most `updates` updates per batch; with `reselect`, samples are selected anew for each until none changes."""

    updates: Updates = 1

    @property
    def reselect(self) -> bool:
        """Whether samples are selected again after each update."""
        return False


@dataclass(frozen=True, repr=False)
class Once(Exploration):
    """One update per batch."""

    updates: Annotated[int, Range(at_least=1, at_most=1, hint="Explore(2) and Repeat(2) make more updates")] = 1


@dataclass(frozen=True, repr=False)
class Repeat(Exploration):
    """Every update is made of the samples selected first (the baselines marked * in the paper)."""

    updates: Updates = 2


@dataclass(frozen=True, repr=False)
class Explore(Exploration):
    """Selects again after each update, and updates on the samples that are reliable now, until the set is the same.

    Paper: POEM, Eq. 2 and 4, Algorithm 1.
    Differs: the text says two iterations, the algorithm's `t <= N` allows three; two is the default here. Sets are
    compared, not their sizes; an empty set ends the batch.
    """

    updates: Updates = 2

    @property
    def reselect(self) -> bool:
        """Samples are selected again: POEM's first idea."""
        return True
