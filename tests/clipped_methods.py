"""Methods with clipped gradients, to be named as `clipped_methods:tent` where a method is taken by name."""

from __future__ import annotations

from dataclasses import replace

import poem
from poem.parts import Clipped


def _clipped(method: str) -> poem.Recipe:
    recipe = poem.recipe(method)
    return replace(recipe, step=Clipped(recipe.step))


def tent() -> poem.Recipe:
    """Tent, each sample's gradient clipped."""
    return _clipped("tent")


def eta_poem() -> poem.Recipe:
    """ETA with POEM's exploration and branch, each sample's gradient clipped."""
    return _clipped("eta+poem")
