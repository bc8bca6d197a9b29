"""Test-time adaptation of image classifiers: `poem.adapt(model)` updates a model while it predicts.

Names resolve on first use, so that importing the package, and `poem --help`, need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from poem._version import __version__

_HOMES = {
    "adapt": "poem.api",
    "Adapter": "poem.adapter",
    "guard": "poem.guarded.guard:guard_adapter",
    "Guard": "poem.guarded.guard",
    "Recipe": "poem.recipes.recipe",
    "methods": "poem.recipes.methods",
    "recipe": "poem.recipes.methods",
    "evaluate": "poem.bench.evaluate",
    "check": "poem.paired_check",
    "Client": "poem.serve.client",
    "corrupt": "poem.streams.corruptions",
    "parts": "poem.parts",
    "zoo": "poem.zoo",
}
__all__ = [
    "Adapter",
    "Client",
    "Guard",
    "Recipe",
    "__version__",
    "adapt",
    "check",
    "corrupt",
    "evaluate",
    "guard",
    "methods",
    "parts",
    "recipe",
    "zoo",
]

if TYPE_CHECKING:
    from poem import parts, zoo
    from poem.adapter import Adapter
    from poem.api import adapt
    from poem.bench.evaluate import evaluate
    from poem.guarded.guard import Guard
    from poem.guarded.guard import guard_adapter as guard
    from poem.paired_check import check
    from poem.recipes.methods import methods, recipe
    from poem.recipes.recipe import Recipe
    from poem.serve.client import Client
    from poem.streams.corruptions import corrupt


def __getattr__(name: str) -> Any:
    """Import the module behind a public name when it is first asked for."""
    if name not in _HOMES:
        raise AttributeError(f"module 'poem' has no attribute {name!r}; public names: {', '.join(__all__)}")
    home, _, other = _HOMES[name].partition(":")
    module = import_module(home)
    value = module if name in ("parts", "zoo") else getattr(module, other or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names without importing any of them."""
    return sorted(__all__)
