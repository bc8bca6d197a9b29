"""Do we look again at the same batch, and pick anew?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from poem.parts.base import Part
from poem.parts.fields import Range

Updates = Annotated[int, Range(at_least=1, hint="use the method 'source' to learn nothing")]


@dataclass(frozen=True, repr=False)
class Exploration(Part):
    """At most `updates` updates per batch; with `reselect` the set is picked anew before each until it stands still."""

    updates: Updates = 1

    @property
    def reselect(self) -> bool:
        """Whether each look picks its own set."""
        return False


@dataclass(frozen=True, repr=False)
class Once(Exploration):
    """One update, as everyone did before."""

    updates: Annotated[int, Range(at_least=1, at_most=1, hint="Explore(2) and Repeat(2) make more updates")] = 1


@dataclass(frozen=True, repr=False)
class Repeat(Exploration):
    """The same samples again: the set of the first look teaches every update (the baselines marked * in the paper)."""

    updates: Updates = 2


@dataclass(frozen=True, repr=False)
class Explore(Exploration):
    """Looks again after each update and teaches those who are reliable now, until the set stands still.

    Paper: POEM, Eq. 2 and 4, Algorithm 1.
    Differs: the text says two iterations, the algorithm's `t <= N` allows three; two is the default here. Sets are
    compared, not their sizes; an empty set ends the batch.
    """

    updates: Updates = 2

    @property
    def reselect(self) -> bool:
        """Yes: that is the idea."""
        return True
