"""Suggestions for a misspelt name: the names most like it, and the sentence that ends an error message."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable


def nearest_names(name: str, names: Iterable[str], *, most: int = 1, cutoff: float = 0.6) -> list[str]:
    """The names most like `name`, best first: at most `most`, each with a similarity of `cutoff` (0 to 1) or more."""
    return difflib.get_close_matches(name, list(names), n=most, cutoff=cutoff)


def nearest_hint(
    name: str,
    names: Iterable[str],
    *,
    most: int = 1,
    cutoff: float = 0.6,
    show: Callable[[str], str] = repr,
    otherwise: str | None = None,
) -> str:
    """Return "did you mean 'x'?" with the nearest names, as `show` writes them; where none is near, `otherwise`.

    By default `otherwise` lists all names: "known: a, b, c".
    """
    names = list(names)
    near = nearest_names(name, names, most=most, cutoff=cutoff)
    if near:
        return f"did you mean {' or '.join(map(show, near))}?"
    return f"known: {', '.join(names)}" if otherwise is None else otherwise
